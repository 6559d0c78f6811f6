"""t1, t2 and t3 on the emulator, and what the assembler makes of them. Needs no GPU."""

from __future__ import annotations

import re
from itertools import product

import lesson_problems
import numpy as np
import pytest
from lesson_problems import A_ALIGNED, B_ALIGNED, C_IS_FLOAT32, GEOMETRY, TYPES, Problem, bound, reference, run

from numba_gemm.compile.assembler import assemble, find_tool
from numba_gemm.compile.resources import read_resources
from numba_gemm.compile.sass import disassemble
from numba_gemm.emulator.hazards import SharedMemoryRace, UnwaitedAsyncCopy
from numba_gemm.emulator.machine import Machine
from numba_gemm.emulator.tensorcore import mma
from numba_gemm.errors import NumbaGemmError
from numba_gemm.tensorcore.source import load_ptx, specialise

KERNELS = tuple(GEOMETRY)
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_120")

TINY = [(1, 1, 1), (1, 8, 8), (2, 3, 1), (3, 2, 5), (1, 1, 70), (5, 9, 16), (8, 8, 8), (16, 16, 16), (17, 15, 33)]
TILES = [(128, 128, 32), (128, 128, 64), (127, 129, 31), (129, 127, 33), (256, 128, 96), (128, 136, 40), (136, 120, 24)]
ODD = [(131, 137, 67), (1, 139, 41), (139, 1, 41), (37, 41, 1), (1, 264, 72), (264, 1, 72), (200, 8, 104)]
SHAPES = TINY + TILES + ODD


def check(kernel, problem, arch="sm_90", flags=None):
    """Run it and hold it against the reference: equal for exact inputs, else within the bound."""
    matrices = problem.make()
    want = reference(problem, matrices)
    limit = bound(problem, matrices, arch)
    report = run(kernel, problem, matrices, arch=arch, flags=flags)
    got = matrices[2].astype(np.float64)
    error = np.abs(got - want)
    if problem.inputs == "random":
        assert (error <= limit).all(), f"{(~(error <= limit)).sum()} elements, worst {np.nanmax(error / limit)} bounds"
    else:
        np.testing.assert_array_equal(got, want.astype(TYPES[problem.output]).astype(np.float64))
    return matrices, report


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_whole_numbers_are_exact_at_every_shape(kernel, shape):
    check(kernel, Problem(*shape, inputs="integer"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 9, 16), (128, 128, 64), (131, 137, 67), (136, 120, 40)], ids=str)
def test_random_inputs_are_within_the_bound(kernel, dtype, shape):
    for output, arch in product((dtype, "float32"), ("sm_80", "sm_90")):
        check(kernel, Problem(*shape, dtype=dtype, output=output), arch)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(33, 47, 61), (144, 152, 72), (130, 129, 35)], ids=str)
def test_one_hot_rows_pick_rows(kernel, shape):
    check(kernel, Problem(*shape, inputs="onehot"))
    check(kernel, Problem(*shape, dtype="bfloat16", output="bfloat16", inputs="onehot", layout="sliced"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["padded", "odd", "sliced"])
@pytest.mark.parametrize("shape", [(40, 48, 32), (129, 135, 37), (144, 136, 56)], ids=str)
def test_every_leading_dimension_and_alignment(kernel, layout, shape):
    for output in ("float16", "float32"):
        check(kernel, Problem(*shape, output=output, inputs="integer", layout=layout))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("output", ["input", "float32"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (-0.5, 2.0), (1.3, -0.7), (0.0, 0.5), (2.5, 0.0)])
def test_alpha_and_beta(kernel, dtype, output, alpha, beta):
    output = dtype if output == "input" else output
    check(kernel, Problem(37, 43, 50, dtype=dtype, output=output, alpha=alpha, beta=beta))
    check(kernel, Problem(136, 131, 24, dtype=dtype, output=output, alpha=alpha, beta=beta, layout="odd"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("aligned", [0, A_ALIGNED, B_ALIGNED, A_ALIGNED | B_ALIGNED])
def test_each_operand_chooses_its_copies_alone(kernel, aligned):
    """The element copies are right for aligned operands too, and give the same bits."""
    problem = Problem(136, 144, 88)
    (_, _, c), _ = check(kernel, problem, flags=C_IS_FLOAT32 | aligned)
    (_, _, usual), _ = check(kernel, problem)
    np.testing.assert_array_equal(c.view(np.uint32), usual.view(np.uint32))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["packed", "sliced"])
def test_a_row_or_column_of_nans_stays_there(kernel, layout):
    """A row of A reaches its own row of C only, a column of B its own column, at the edge of the matrix too."""
    problem = Problem(135, 136, 40, inputs="integer", layout=layout)
    a, b, c = problem.make()
    clean = reference(problem, (a, b, c))
    a[134] = np.nan
    b[:, 135] = np.inf
    run(kernel, problem, (a, b, c))
    assert np.isnan(c[134]).all()
    assert not np.isfinite(c[:, 135]).any()
    np.testing.assert_array_equal(c[:134, :135], clean[:134, :135])


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_lies_beside_the_matrices_is_neither_read_into_the_result_nor_written(kernel):
    """The base arrays hold NaN round the views: in A and B they would show in C, round C they must stay."""
    problem = Problem(21, 19, 23, inputs="integer", layout="sliced")
    a, b, c = problem.make()
    around = c.base
    kept = around.copy()
    run(kernel, problem, (a, b, c))
    np.testing.assert_array_equal(c, reference(problem, (a, b, c)))
    kept[1:22, 1:20] = c
    np.testing.assert_array_equal(around, kept)


@pytest.mark.parametrize("kernel", KERNELS)
def test_overflow_of_the_output_is_infinity(kernel):
    problem = Problem(16, 16, 16, output="float16", inputs="integer")
    a, b, c = problem.make()
    a[...], b[...] = 200, 200
    b[:, 1] = -200
    run(kernel, problem, (a, b, c))
    assert (c[:, 0] == np.inf).all()
    assert (c[:, 1] == -np.inf).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_three_kernels_add_in_the_same_order(kernel, arch):
    """One MMA after the other along k, from zero: so t1, t2 and t3 give the same bits, those of the chain itself."""
    problem = Problem(48, 40, 72)
    (a, b, c), _ = check(kernel, problem, arch)
    chain = np.zeros((48, 40), np.uint32)
    for k in range(0, 72, 16):
        part = np.zeros((48, 16), np.uint16), np.zeros((16, 40), np.uint16)
        part[0][:, : 72 - k] = a.view(np.uint16)[:, k : k + 16]
        part[1][: 72 - k] = b.view(np.uint16)[k : k + 16]
        chain = mma(*part, chain, a_type="f16", b_type="f16", acc_type="f32", d_type="f32", arch=arch)
    np.testing.assert_array_equal(c.view(np.uint32), chain)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("flags", [0, A_ALIGNED | B_ALIGNED])
@pytest.mark.parametrize("pitch", [3 * 2**31, -3 * 2**31])
def test_rows_gigabytes_apart_are_addressed_in_64_bits(kernel, flags, pitch):
    """Leading dimensions past 2**31 elements, and negative ones: only the rows themselves exist on the emulator."""
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (9, 40)).astype(np.float16)
    b = rng.integers(-4, 5, (40, 16)).astype(np.float16)
    machine = Machine("sm_90")

    def place(rows, start, matrix):
        first = start << 40
        for i in range(rows):
            address = machine.alloc(matrix.shape[1] * 2, at=first + 2 * pitch * i)
            machine.write(address, matrix[i])
        return np.uint64(first)

    empty = np.zeros((9, 16), np.float16)
    addresses = [place(9, 2, a), place(40, 4, b), place(9, 6, empty)]
    sizes = [np.uint32(9), np.uint32(16), np.uint32(40)]
    scales = [np.float32(1), np.float32(0)]
    params = [*addresses, *sizes, *[np.int64(pitch)] * 3, *scales, np.uint32(flags)]
    machine.launch(load_ptx(kernel), 1, GEOMETRY[kernel][1], params)
    rows = [machine.read(int(addresses[2]) + 2 * pitch * i, np.float16, 16) for i in range(9)]
    np.testing.assert_array_equal(np.stack(rows), a @ b)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["packed", "sliced"])
def test_no_bank_conflicts(kernel, layout):
    problem = Problem(256, 128, 96, output="float16", layout=layout)
    counters = run(kernel, problem, problem.make()).counters
    assert counters.shared_load_conflicts == 0
    assert counters.shared_store_conflicts == 0


@pytest.mark.parametrize("kernel", ["t2", "t3"])
def test_every_barrier_and_wait_closes_a_hazard(kernel, monkeypatch):
    """Without any one of them the emulator reports a race, or a read of data that is still on its way."""
    whole = load_ptx(kernel).splitlines()
    needed = [i for i, line in enumerate(whole) if re.match(r"\s+(bar\.|cp\.async\.wait)", line)]
    assert len(needed) == {"t2": 4, "t3": 5}[kernel]
    for i in needed:
        text = "\n".join([*whole[:i], "// gone", *whole[i + 1 :]])
        monkeypatch.setattr(lesson_problems, "load_ptx", lambda name, text=text: text)
        problem = Problem(128, 128, 96)
        with pytest.raises((SharedMemoryRace, UnwaitedAsyncCopy)):
            run(kernel, problem, problem.make())


def test_the_counts_that_the_headers_state():
    """Loads, MMAs and barriers a tile, from runs of 2 and of 3 tiles along k."""
    steps = {"t1": 16, "t2": 32, "t3": 32}
    want = {
        "t1": {"mma_instructions": 2, "global_load_requests": 12, "barriers": 0, "async_copies": 0},
        "t2": {"mma_instructions": 256, "global_load_requests": 32, "barriers": 16, "async_copies": 0},
        "t3": {"mma_instructions": 256, "async_copies": 32, "barriers": 16},
    }
    for kernel, step in steps.items():
        tile, _ = GEOMETRY[kernel]
        counts = []
        for tiles in (2, 3):
            problem = Problem(tile, tile, tiles * step)
            counts.append(run(kernel, problem, problem.make()).counters.as_dict())
        for name, value in want[kernel].items():
            assert counts[1][name] - counts[0][name] == value, (kernel, name)


# --- what the assembler makes of them


@pytest.fixture(scope="module")
def assembled():
    """(kernel, dtype, arch) to (resources, machine code), each assembled once."""
    found = {}

    def get(kernel, dtype, arch):
        key = kernel, dtype, arch
        if key not in found:
            cubin, log, _ = assemble(specialise(load_ptx(kernel), dtype), arch)
            number = int(arch.removeprefix("sm_"))
            found[key] = read_resources(log, cubin, kernel, divmod(number, 10)), cubin
        return found[key]

    return get


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills(assembled, kernel, dtype, arch):
    resources, _ = assembled(kernel, dtype, arch)
    assert not resources.uses_local_memory
    # two blocks of 256 threads an SM, or 32 blocks of one warp
    assert resources.registers <= {"t1": 64, "t2": 128, "t3": 128}[kernel]
    assert resources.shared_bytes == {"t1": 0, "t2": 20480, "t3": 37888}[kernel]


@pytest.mark.skipif(not (find_tool("nvdisasm") or find_tool("cuobjdump")), reason="no disassembler is installed")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_machine_code(assembled, kernel, arch):
    _, cubin = assembled(kernel, "float16", arch)
    mix = disassemble(cubin).main_loop_mix()
    assert mix["HMMA.16816"] == {"t1": 2, "t2": 32, "t3": 32}[kernel]
    assert mix["LDSM"] == {"t1": 0, "t2": 12, "t3": 12}[kernel]
    assert mix["LDGSTS"] == {"t1": 0, "t2": 0, "t3": 4}[kernel]
    assert mix["LDG.128"] == mix["STS.128"] == {"t1": 0, "t2": 4, "t3": 0}[kernel]
    assert mix["BAR"] == {"t1": 0, "t2": 2, "t3": 2}[kernel]


# --- the texts


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_file_itself_is_the_fp16_form(kernel):
    text = load_ptx(kernel)
    assert specialise(text, "float16") == text
    other = specialise(text, "bfloat16")
    code = [line for line in other.splitlines() if not line.startswith("//")]
    assert not any(re.match(r"[^/]*\.f16\b", line) for line in code)
    assert len(other.splitlines()) == len(text.splitlines())


def test_specialise_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="float32"):
        specialise("ret;", "float32")
    with pytest.raises(ValueError, match="line 2 is of FP16"):
        specialise("// fine: add.f16\n    add.f16 %x, %y, %z;", "bfloat16")


def test_a_kernel_that_is_not_there():
    with pytest.raises(NumbaGemmError, match=r"t99\.ptx is in neither"):
        load_ptx("t99")
