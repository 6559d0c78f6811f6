"""Launches that overlap: who may, what the driver is told, what the kernels do about it. Needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm import emulate, emulator, execute
from numba_gemm.compile import compile_kernel, kernel_ptx
from numba_gemm.compile.assembler import assemble
from numba_gemm.compile.sass import disassemble
from numba_gemm.device import launch as launching
from numba_gemm.device.module import Function
from numba_gemm.emulator import Machine
from numba_gemm.emulator.hazards import UnwaitedDependency
from numba_gemm.errors import CompileError
from numba_gemm.fp32 import repack, split_k_sum, v8_pipelined
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses, first_alone
from numba_gemm.tensorcore import splitk_reduce
from numba_gemm.tensorcore.w_specs import W1, W2
from numba_gemm.validate import check, reference

HOPPER, AMPERE = (9, 0), (8, 0)
BF16 = np.dtype(ml_dtypes.bfloat16)
WAIT, LAUNCH = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


def plan(m, n, k, dtype="bfloat16", spec=None, **more):
    spec = spec or (v8_pipelined.SPEC if dtype == "float32" else W2)
    problem = Problem.packed(m, n, k, dtype=dtype, **more)
    return first_alone(spec.plan(problem, spec.select(problem, 132, HOPPER)).launches)


def names(launches):
    return [(one.spec.name, one.overlaps) for one in launches]


# --- who overlaps whom


def test_all_but_the_first_launch_of_a_product_overlap():
    assert names(plan(1000, 1001, 1001)) == [("repack_pair", False), ("w2", True)]
    assert names(plan(1024, 1024, 1001)) == [("repack", False), ("w2", True)]
    assert names(plan(128, 128, 65536)) == [("w2", False), ("splitk_reduce", True)]
    assert names(plan(129, 129, 65535)) == [("repack_pair", False), ("w2", True), ("splitk_reduce", True)]
    assert names(plan(256, 512, 32768, "float32"))[-1] == ("split_k_sum", True)
    assert names(plan(8191, 8193, 8195, "float32"))[:2] == [("repack_pair", False), ("v8", False)]
    assert ("gemv", False) in names(plan(8191, 8193, 8195, "float32"))[2:], "gemv, behind it, doesn't wait"
    assert names(plan(4095, 4097, 4099))[:2] == [("repack_pair", False), ("w2", False)]
    assert names(plan(1000, 1001, 1001, spec=W1)) == [("repack_pair", False), ("w1", False)], "w1 doesn't wait"


def test_the_reduction_waits_only_where_it_is_launched_so():
    (_, reduction) = plan(128, 128, 65536)
    assert WAIT in kernel_ptx(reduction.spec, reduction.config, HOPPER)
    for config in splitk_reduce.SPEC.configs:
        assert "griddepcontrol" not in kernel_ptx(splitk_reduce.SPEC, config, AMPERE)


# --- what the driver is told


@pytest.fixture
def told(monkeypatch):
    """Attributes of the launches, as the driver would read them."""
    seen = []

    def call(config, handle, kernel_params, extra):
        address = ctypes.c_uint64.from_address(config + 40).value
        count = ctypes.c_uint32.from_address(config + 48).value
        seen.append(ctypes.string_at(address, 72 * count) if count else address or b"")
        return 0

    monkeypatch.setattr(launching, "_launch_function", lambda: call)
    monkeypatch.setattr(launching, "first_parameter", lambda function: 0)
    return seen


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_that_overlaps_carries_one_attribute(told, overlaps):
    """CUlaunchAttribute in cuda.h: an enum of four bytes, four of padding, a union of 64; its number there is 6."""
    function = Function(handle=9, name="kernel", registers=1, local_bytes=0, static_shared_bytes=0)
    given = function, (3, 1, 1), (256, 1, 1)
    parameters = launching.struct.Struct("<3Q")
    launching.launch(*given, parameters, (1, 2, 3), stream=5, overlaps=overlaps)
    launching.prepare_packed_launch(*given, 40, overlaps=overlaps)(bytes(40), 5)
    launching.prepare_launch(*given, bytes(32))(1, 2, 3, 5)  # of products of one launch, which overlap nothing
    attribute = b"\6\0\0\0" + bytes(4) + b"\1\0\0\0" + bytes(60)
    assert told == [attribute if overlaps else b""] * 2 + [b""]


@pytest.mark.parametrize(("arch", "overlap"), [(HOPPER, True), ((8, 9), False), ((12, 0), True)], ids=str)
def test_only_gpus_that_can_are_told_to(monkeypatch, arch, overlap):
    launched = []
    monkeypatch.setattr(execute, "compile_kernel", lambda spec, config, arch: spec.name)
    monkeypatch.setattr(execute, "load", lambda compiled, context, dynamic_shared_bytes: compiled)
    monkeypatch.setattr(execute, "memory_pool", lambda context: None)
    monkeypatch.setattr(
        execute, "launch", lambda function, *given, overlaps, **more: launched.append((function, overlaps))
    )
    context = SimpleNamespace(device=SimpleNamespace(compute_capability=arch, sm_count=132))
    problem = Problem.packed(256, 512, 32768)
    spec = v8_pipelined.SPEC
    one = execute.prepare_form(problem, spec, spec.select(problem, 132, HOPPER), context)
    one.launch(1 << 20, 2 << 20, 3 << 20, 0, workspace=4 << 20)
    assert launched == [("v8", False), ("split_k_sum", overlap)]


def test_where_numba_cannot_compile_two_copies_their_twins_are_two_launches(monkeypatch):
    def compiled(spec, config, arch):
        if spec.name.startswith("repack") and spec.source == "numba":
            raise CompileError("no NVVM")
        return spec.name

    twins = {spec.name: spec for spec in (execute.REPACK[2],)}
    monkeypatch.setattr(execute, "compile_kernel", compiled)
    monkeypatch.setattr(execute, "load", lambda compiled, context, dynamic_shared_bytes: compiled)
    monkeypatch.setattr(execute, "memory_pool", lambda context: None)
    monkeypatch.setattr(execute, "_twin", lambda spec, context, error: twins["repack-nvcc"])
    monkeypatch.setattr(execute, "prepare_packed_launch", lambda *given, **more: None)
    context = SimpleNamespace(device=SimpleNamespace(compute_capability=HOPPER, sm_count=132))
    problem = Problem.packed(1000, 1001, 1003, dtype="bfloat16")
    config = W2.select(problem, 132, HOPPER)
    one = execute.prepare_form(problem, W2, config, context)
    assert [(step.function, step.overlaps) for step in one.steps] == [
        ("repack-nvcc", False), ("repack-nvcc", False), ("w2", True),
    ]  # fmt: skip
    assert (one.main, one.function) == (2, "w2")
    at = Addresses(1 << 30, 2 << 30, 3 << 30, 4 << 30)
    (pair, _) = W2.plan(problem, config).launches
    values = pair.values(at)
    assert [step.launch.values(at) for step in one.steps[:2]] == [values[:10], values[10:20]]
    for step in one.steps[:2]:
        rows, columns = step.launch.values(at)[2:4]
        assert step.launch.grid == (-(-rows // 32) * -(-columns // 128), 1, 1)
        assert dict(step.launch.config) == dict(repack.form(2))


# --- what the kernels do about it


#: Global memory, read or written, also by the copy engine.
ACCESSES_IN_SASS = {"LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG", "UTMALDG", "UTMASTG", "UBLKCP"}


def kernels():
    v8, sums = v8_pipelined.SPEC, split_k_sum.SPEC
    launches = [one for shape in ((1000, 1001, 1001), (128, 128, 65536)) for one in plan(*shape)]
    launched = {one.spec.name: (one.spec, one.config) for one in launches if one.overlaps}
    copies = [(spec, config) for spec in repack.SPECS.values() for config in spec.configs]
    pairs = [(spec, config) for spec in repack.PAIRS.values() for config in spec.configs]
    return [*launched.values(), *copies, *pairs, *((v8, config) for config in v8.configs[:3]), (sums, sums.configs[0])]


@pytest.mark.parametrize(("spec", "config"), kernels(), ids=lambda x: getattr(x, "abi", ""))
def test_every_kernel_waits_before_it_touches_memory(spec, config):
    compiled = compile_kernel(spec, config, HOPPER)
    lines = [line.split("//")[0].strip() for line in compiled.ptx.splitlines()]
    assert lines.count(WAIT) == lines.count(LAUNCH) == 1
    assert lines.index(LAUNCH) > lines.index(WAIT)
    before = lines[: lines.index(WAIT)]
    assert not [line for line in before if ".global" in line and "cvta" not in line]


@pytest.mark.parametrize(("spec", "config"), kernels(), ids=lambda x: getattr(x, "abi", ""))
def test_the_assembler_moves_no_access_to_before_the_wait(spec, config):
    """It might, with loads by the read-only path: they promise that nobody writes."""
    opcodes = [one.opcode.split(".")[0] for one in disassemble(compile_kernel(spec, config, HOPPER).cubin).instructions]
    assert opcodes.count("ACQBULK") == opcodes.count("PREEXIT") == 1
    accesses = [index for index, opcode in enumerate(opcodes) if opcode in ACCESSES_IN_SASS]
    assert accesses
    assert opcodes.index("ACQBULK") < min(accesses)


@pytest.mark.parametrize("spec", [repack.SPECS[2], repack.PAIRS[4], split_k_sum.SPEC, v8_pipelined.SPEC], ids=str)
def test_before_sm_90_numba_kernels_have_no_such_instruction(spec):
    assert "griddepcontrol" not in compile_kernel(spec, spec.configs[0], AMPERE).ptx


def test_the_reduction_assembles_with_and_without():
    for dependent, arch in ((False, "sm_80"), (True, "sm_90"), (False, "sm_90")):
        assert assemble(splitk_reduce.render("bf16", 8, dependent=dependent), arch)[0]
    with pytest.raises(CompileError):
        assemble(splitk_reduce.render("bf16", 8, dependent=True), "sm_80")


# --- on the emulator

PTX = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 where)
{{
    .reg .b64 %at;
    .reg .b32 %x;
    .reg .pred %first;
    mov.u32 %x, %tid.x;
    setp.eq.u32 %first, %x, 0;
    ld.param.u64 %at, [where];
    cvta.to.global.u64 %at, %at;
    {before}
    bar.sync 0;
    {after}
    ret;
}}
"""
ACCESSES = [
    "st.global.u32 [%at], %x;",
    "ld.global.u32 %x, [%at];",
    "atom.global.add.u32 %x, [%at], 1;",
    "ld.u32 %x, [%at];",
]


def run(before, after, overlaps=True):
    machine = Machine("sm_90")
    at = machine.alloc(256, initialised=True)
    machine.launch(PTX.format(before=before, after=after), 3, 64, [np.uint64(at)], overlaps=overlaps)


@pytest.mark.parametrize("access", ACCESSES)
def test_memory_is_not_touched_before_the_wait(access):
    run(WAIT, access)
    run(f"@%first {WAIT}", access)  # one thread's wait, and a barrier
    run(LAUNCH, access, overlaps=False)
    with pytest.raises(
        UnwaitedDependency, match=r"before griddepcontrol\.wait.*by block \(0, 0, 0\), thread \(0, 0, 0\)"
    ):
        run(access, WAIT)
    with pytest.raises(UnwaitedDependency):
        run(LAUNCH, access)


def test_a_block_that_ends_without_the_wait_would_break_the_chain():
    run("", "", overlaps=False)
    with pytest.raises(UnwaitedDependency, match=r"ends without griddepcontrol\.wait"):
        run(LAUNCH, "")


def test_bulk_copies_wait_too(monkeypatch):
    strip(monkeypatch, "w2")
    with pytest.raises(UnwaitedDependency, match="bulk copy"):
        product(61, 67, 129, "w2")


def strip(monkeypatch, *kernels):
    """Take the wait out of kernels."""
    whole = emulate._ptx
    monkeypatch.setattr(
        emulate,
        "_ptx",
        lambda spec, config, arch: (
            whole(spec, config, arch).replace(WAIT, "") if spec.name in kernels else whole(spec, config, arch)
        ),
    )


def product(m, n, k, kernel):
    dtype = np.dtype(np.float32) if kernel == "v8" else BF16
    rng = np.random.default_rng([m, n, k])
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    c = ng.matmul(a, b, kernel=kernel, device="emulator")
    tensor_core = None if kernel == "v8" else HOPPER
    verdict = check(c, reference(a, b, None, c_dtype=dtype.name, tensor_core=tensor_core))
    assert verdict, verdict.message


@pytest.mark.parametrize(("shape", "kernel"), [
    ((61, 67, 129), "w2"), ((1, 1, 1), "w2"), ((65, 33, 2049), "w2"), ((64, 64, 8192), "w2"),
    ((67, 61, 35), "v8"), ((33, 35, 1201), "v8"),
])  # fmt: skip
def test_products_of_several_launches(shape, kernel):
    product(*shape, kernel)


@pytest.mark.parametrize(("shape", "kernel", "stripped"), [
    ((64, 64, 8192), "w2", "splitk_reduce"), ((65, 33, 2049), "w2", "splitk_reduce"), ((65, 33, 2049), "w2", "w2"),
    ((33, 35, 1201), "v8", "split_k_sum"),
])  # fmt: skip
def test_a_kernel_that_doesnt_wait_is_caught(monkeypatch, shape, kernel, stripped):
    strip(monkeypatch, stripped)
    with pytest.raises(UnwaitedDependency):
        product(*shape, kernel)


def test_the_first_launch_has_nothing_to_wait_for(monkeypatch):
    strip(monkeypatch, "repack", "repack_pair")
    product(61, 67, 129, "w2")


def test_hazards_are_public():
    assert emulator.UnwaitedDependency is UnwaitedDependency
    assert replace(plan(128, 128, 65536)[1], overlaps=False).overlaps is False
