"""What the assembler makes of v8's forms: no spills anywhere, and a main loop that is nearly all FMAs. Needs no GPU."""

from __future__ import annotations

import itertools

import pytest

from numba_gemm.compile import compile_kernel
from numba_gemm.compile.assembler import find_tool
from numba_gemm.compile.sass import disassemble
from numba_gemm.fp32 import split_k_sum
from numba_gemm.fp32.v8_choose import SHAPES, UNBOUND_BELOW, parameters_for
from numba_gemm.fp32.v8_parameters import V8Parameters
from numba_gemm.fp32.v8_pipelined import SPEC
from numba_gemm.problem import Problem

ARCHS = [(8, 0), (9, 0), (12, 0)]
PROBLEMS = {
    "aligned": Problem.packed(128, 128, 128),
    "odd": Problem.packed(127, 127, 127),
    "columns": Problem(128, 128, 128, lda=128, ldb=128, ldc=128, a_layout="column", b_layout="column"),
}


def label(shape):
    return "{block_m}x{block_n}-{thread_m}x{thread_n}".format(**shape.parameters)


def resources(config, arch, spec=SPEC):
    return compile_kernel(spec, config, arch).resources


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=() if arch == (9, 0) else pytest.mark.slow) for arch in ARCHS],
    ids=lambda arch: f"sm_{arch[0]}{arch[1]}",
)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_no_form_spills(shape, problem, arch):
    p = parameters_for(shape, PROBLEMS[problem])
    assert p is not None
    found = resources(p.config, arch)
    assert not found.uses_local_memory
    # What the model takes for granted, whether the assembler is asked for it or not.
    resident = shape.parameters["blocks_per_sm"] if arch < UNBOUND_BELOW else p.blocks_per_sm
    assert found.registers * p.threads * resident <= 65536


@pytest.mark.parametrize("config", split_k_sum.SPEC.configs, ids=["few-parts", "many-parts"])
def test_the_sum_of_parts_does_not_spill(config):
    assert not resources(config, (9, 0), split_k_sum.SPEC).uses_local_memory


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("shape", "share"), [(SHAPES[0], 0.92), (SHAPES[1], 0.88)], ids=["16x8", "8x8"])
def test_the_main_loop_is_nearly_all_fmas(shape, share):
    p = parameters_for(shape, PROBLEMS["aligned"], copied="a")
    loop = disassemble(compile_kernel(SPEC, p.config, (9, 0)).cubin).main_loop_mix()
    assert loop["FFMA"] == p.thread_m * p.thread_n * p.block_k
    assert loop["LDS.128"] == (p.thread_m + p.thread_n) // 4 * p.block_k
    assert loop["BAR"] == 1
    assert loop["FFMA"] / sum(loop.values()) > share


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="needs nvdisasm")
def test_fmas_rarely_wait_for_a_bank_of_the_register_file():
    """An FMA whose three registers, none of them in the operand cache, lie in one bank takes two cycles."""
    p = parameters_for(SHAPES[0], PROBLEMS["aligned"])
    report = disassemble(compile_kernel(SPEC, p.config, (9, 0)).cubin)
    reads = [0, 0, 0, 0]
    cached: dict[int, str] = {}
    one_bank = 0
    for instruction in report.main_loop:
        if not instruction.opcode.startswith("FFMA"):
            continue
        sources = [operand.strip() for operand in instruction.operands.split(",")][1:4]
        names = [source.removesuffix(".reuse") for source in sources]
        fresh = {name for slot, name in enumerate(names) if cached.get(slot) != name}
        cached = {slot: names[slot] for slot, source in enumerate(sources) if source.endswith(".reuse")}
        reads[len(fresh)] += 1
        one_bank += len(fresh) == 3 and len({int(name[1:]) % 2 for name in fresh}) == 1
    assert sum(reads) == p.thread_m * p.thread_n * p.block_k
    assert one_bank < 0.01 * sum(reads)
    assert reads[3] < 0.2 * sum(reads)


def test_copies_tile_the_stage_exactly():
    """Each element of a stage is copied by one thread, to a place of its own."""
    for shape, problem in itertools.product(SHAPES, PROBLEMS.values()):
        p = parameters_for(shape, problem)
        for copies in (p.a_copies, p.b_copies):
            along_e = copies.mode == "direct"
            seen = set()
            for thread in range(p.threads):
                e, k = copies.place_of_thread(thread)
                for i, j, w in itertools.product(range(copies.steps_e), range(copies.steps_k), range(copies.width)):
                    at = (e + i * copies.e_step + (w if along_e else 0), k + j * copies.k_step + (0 if along_e else w))
                    seen.add(at)
            assert seen == set(itertools.product(range(copies.extent), range(p.block_k)))


def test_outputs_of_threads_tile_the_warp_exactly():
    for shape in SHAPES:
        p = V8Parameters(**shape.parameters, a_width=1)
        rows = {r + 4 * lane for r in p.rows_of_thread for lane in range(p.lanes_m)}
        columns = {c + 4 * lane for c in p.columns_of_thread for lane in range(p.lanes_n)}
        assert rows == set(range(p.warp_m))
        assert columns == set(range(p.warp_n))
