"""The kernels in CUDA C++: what nvcc and NVRTC make of them, on the emulator and in machine code. Needs no GPU."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import fp32_inputs
import ml_dtypes
import numpy as np
import pytest

from numba_gemm import emulator, fallback
from numba_gemm.cases import Case
from numba_gemm.catalog import LADDER
from numba_gemm.compile import cuda_source
from numba_gemm.compile.assembler import assemble, find_tool
from numba_gemm.compile.cuda_source import COMPILERS, CUDA_FOLDER, CompilerMissingError, cuda_to_ptx, supported_archs
from numba_gemm.compile.resources import read_resources
from numba_gemm.compile.sass import disassemble
from numba_gemm.emulator.hazards import SharedMemoryRace
from numba_gemm.emulator.tensorcore import rule
from numba_gemm.errors import CompileError, KernelConstraintError
from numba_gemm.fallback import FALLBACKS, REPACK, fallback_for
from numba_gemm.fp32.repack import copies
from numba_gemm.problem import Problem
from numba_gemm.tensorcore.bound import tensorcore_bound
from numba_gemm.validate import check, reference

ARCHS = ((7, 5), (8, 0), (9, 0), (12, 0))
FP32 = tuple(name for name in FALLBACKS if name.startswith("v"))
WMMA = tuple(name for name in FALLBACKS if name.startswith("t"))
FORMS = [(name, config) for name, spec in FALLBACKS.items() for config in spec.configs]
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def form_id(value):
    return value if isinstance(value, str) else "-".join(str(v) for _, v in value)


def some_slow(forms):
    """Forms as parameters; every second one that has a column-major factor is slow, as nvcc and Numba take seconds."""
    for index, (name, config) in enumerate(forms):
        slow = index % 2 and "column" in dict(config).values()
        marks = pytest.mark.slow if slow else ()
        yield pytest.param(name, config, marks=marks, id=f"{name}-{form_id(config)}")


@pytest.fixture(scope="session")
def ptx():
    """(spec, config, arch, compiler) → PTX, each compiled once; skips where the compiler isn't installed."""
    known = {}

    def get(spec, config, arch, compiler):
        key = spec.name, config, arch, compiler
        if key not in known:
            try:
                COMPILERS[compiler].version()
            except CompilerMissingError as missing:
                pytest.skip(f"{compiler} is not installed: {missing}")
            source = spec.build(**dict(config))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NUMBA_GEMM_CUDA_COMPILER", compiler)
                known[key] = cuda_to_ptx(source.path, arch, defines=dict(source.defines), name=spec.entry(config))
        return known[key]

    return get


@pytest.fixture(scope="session")
def cubin(ptx):
    """(name, config, arch) → PTX, resources and machine code, by one compiler or the other: NVRTC is quicker."""
    known = {}

    def compiler_for(arch):
        other = "nvrtc" if arch in ((8, 0), (12, 0)) else "nvcc"
        try:
            COMPILERS[other].version()
        except CompilerMissingError:
            return cuda_source._find_compiler()
        return other

    def get(name, config, arch):
        if (name, config, arch) not in known:
            spec = FALLBACKS[name]
            text = ptx(spec, config, arch, compiler_for(arch))
            code, log, _ = assemble(text, f"sm_{arch[0]}{arch[1]}")
            known[name, config, arch] = text, read_resources(log, code, spec.entry(config), arch), code
        return known[name, config, arch]

    return get


# --- launches on the emulator


def offset(matrix):
    """Where the emulator puts a matrix, modulo 16 bytes: a view keeps its place in its base array."""
    base = matrix.base
    return 0 if base is None else (matrix.ctypes.data - base.ctypes.data) % 16


def problem_of(a, b, c, alpha, beta):
    columns = [x.strides[1] != x.itemsize for x in (a, b, c)]
    pitches = (x.strides[int(column)] // x.itemsize for x, column in zip((a, b, c), columns, strict=True))
    offsets = (offset(x) for x in (a, b, c))
    a_layout, b_layout, _ = ("column" if column else "row" for column in columns)
    return Problem(
        *a.shape[:1], b.shape[1], a.shape[1], a.dtype.name, *pitches, *offsets, alpha, beta, c_dtype=c.dtype.name,
        a_layout=a_layout, b_layout=b_layout,
    )  # fmt: skip


def run(text, spec, problem, a, b, c, arch="sm_90"):
    """Launch on the emulator, which changes C in place."""
    words = [x.view(np.uint16) if x.itemsize == 2 else x for x in (a, b, c)]
    sizes = [np.uint32(x) for x in (problem.m, problem.n, problem.k)]
    pitches = [np.int64(x) for x in (problem.lda, problem.ldb, problem.ldc)]
    args = [*words, *sizes, *pitches, np.float32(problem.alpha), np.float32(problem.beta)]
    if spec.abi == "gemm_16":
        args.append(np.uint32(problem.flags))
    if spec.batched:
        args += [np.int64(0)] * 3
    return emulator.launch(text, spec.grid(problem.m, problem.n), spec.threads, args, arch=arch)


def fp32_cases(spec, compiler):
    block_m, block_n, step = spec.block_tile
    tile = max(block_m, block_n)
    if compiler == "nvrtc":  # fewer, for its code is nearly nvcc's
        yield Case(2, 3, 2 * step + 1)
        yield Case(36, tile + 4, 20, alpha=1.5, beta=-1.0)
        yield Case(21, 28, 12, layout="sliced", inputs="onehot_a")
        return
    yield Case(1, 1, 1)
    yield Case(2, 3, 2 * step + 1)
    yield Case(4, 8, 4, inputs="integer")
    yield Case(tile + 3, 37, step + 3, alpha=-0.5, beta=2.0)
    yield Case(36, tile + 4, 20, inputs="onehot_b")
    yield Case(40, 44, 24, alpha=1.5, beta=-1.0)
    yield Case(21, 28, 12, layout="sliced", alpha=1.5, beta=-1.0)
    yield Case(21, 27, 12, layout="padded", inputs="onehot_a")
    yield Case(5, 6, 7, alpha=0.0, beta=0.5)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", FP32)
def test_fp32_twins_are_right_at_every_shape(ptx, name, compiler):
    spec = FALLBACKS[name]
    used = set()
    for case in fp32_cases(spec, compiler):
        a, b, c = case.make()
        problem = problem_of(a, b, c, case.alpha, case.beta)
        expected = reference(a, b, c, alpha=case.alpha, beta=case.beta)
        config = next(config for config in spec.configs if spec.unmet(problem, config) is None)
        used.add(config)
        if case.beta == 0:
            c[...] = np.nan
        run(ptx(spec, config, (9, 0), compiler), spec, problem, a, b, c)
        verdict = check(c, expected, exact=case.exact)
        assert verdict, f"{case}: {verdict.message}"
    assert used == {config for config in spec.configs if "column" not in dict(config).values()}


@pytest.mark.parametrize(("name", "config"), list(some_slow([form for form in FORMS if form[0] in FP32])))
def test_fp32_twins_give_the_bits_of_the_numba_kernels(ptx, name, config):
    """Odd and aligned shapes; normal, subnormal, infinite and NaN values; alpha and beta."""
    pytest.importorskip("numba.cuda")
    from numba_gemm.compile import compile_kernel

    spec, numba = FALLBACKS[name], LADDER[name.removesuffix("-nvcc")]
    compilers = {"nvcc" if find_tool("nvcc") else "nvrtc"}
    texts = [ptx(spec, config, (9, 0), compiler) for compiler in compilers]
    original = compile_kernel(numba, config, (9, 0)).ptx
    ran = False
    for case in (
        Case(68, 72, 36, inputs="special", alpha=0.625, beta=2.5),
        Case(36, 132, 12, inputs="wide", alpha=3.0, beta=0.1),
        Case(36, 40, 20, inputs="subnormal"),
        Case(35, 39, 21, inputs="random", alpha=-1.5, beta=0.375),
    ):
        a, b, c = fp32_inputs.draw(case)
        if "a_layout" in dict(config):
            a = np.asfortranarray(a)
        if "b_layout" in dict(config):
            b = np.asfortranarray(b)
        problem = problem_of(a, b, c, case.alpha, case.beta)
        if spec.unmet(problem, config):
            continue
        ran = True
        want = c.copy()
        run(original, numba, problem, a, b, want)
        for text in texts:
            got = c.copy()
            run(text, spec, problem, a, b, got)
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), str(case))
    assert ran


def lay_out(values, dtype, layout):
    rows, columns = values.shape
    if layout == "sliced":
        view = np.full((rows + 2, columns + 5), np.nan, dtype)[1 : rows + 1, 1 : columns + 1]
    else:
        view = np.full((rows, columns + {"packed": 0, "padded": 8, "odd": 3}[layout]), np.nan, dtype)[:, :columns]
    view[...] = values.astype(dtype)
    return view


WMMA_CASES = [
    # m, n, k, type of C (empty: that of A and B), layout, alpha, beta, whole numbers
    (1, 1, 1, "", "packed", 1.0, 0.0, True),
    (3, 2, 5, "float32", "packed", 1.0, 0.0, True),
    (16, 16, 16, "float32", "packed", 1.0, 0.0, False),
    (40, 48, 72, "", "packed", -0.5, 2.0, False),
    (33, 47, 61, "float32", "sliced", 1.3, -0.7, False),
    (136, 24, 40, "float32", "padded", 1.0, 0.0, True),
    (24, 136, 35, "", "odd", 1.0, 1.0, True),
    (129, 13, 37, "float32", "packed", 2.5, 0.0, False),
    (17, 19, 23, "float32", "sliced", 0.0, 0.5, True),
]


@pytest.mark.parametrize(
    ("dtype", "arch", "compiler"),
    [
        ("float16", (7, 5), "nvcc"),
        ("float16", (7, 5), "nvrtc"),
        ("float16", (9, 0), "nvcc"),
        ("bfloat16", (9, 0), "nvrtc"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WMMA)
def test_wmma_kernels_are_right_at_every_shape(ptx, name, dtype, arch, compiler):
    spec = FALLBACKS[name]
    text = ptx(spec, (("dtype", dtype),), arch, compiler)
    sm = f"sm_{arch[0]}{arch[1]}"
    how = rule({"float16": "f16", "bfloat16": "bf16"}[dtype], "f32", 16, sm)
    fewer = (dtype, compiler) == ("float16", "nvrtc")  # its code is nearly nvcc's
    for m, n, k, c_type, layout, alpha, beta, exact in WMMA_CASES[3:6] if fewer else WMMA_CASES:
        output = c_type or dtype
        rng = np.random.default_rng([m, n, k])
        shapes = (m, k), (k, n), (m, n)
        values = [rng.integers(-4, 5, s).astype(float) if exact else rng.standard_normal(s) for s in shapes]
        types = (dtype, dtype, output)
        a, b, c = (lay_out(x, TYPES[t], layout) for x, t in zip(values, types, strict=True))
        problem = problem_of(a, b, c, alpha, beta)
        wide = [x.astype(np.float64) for x in (a, b, c)]
        want = np.float64(np.float32(alpha)) * (wide[0] @ wide[1]) + np.float64(np.float32(beta)) * wide[2]
        bound = tensorcore_bound(
            a, b, k_per_sum=how.group, fraction_bits=how.fraction_bits, output_dtype=output, c=c, alpha=alpha, beta=beta
        )
        if beta == 0:
            c[...] = np.nan
        around = c.base.copy() if layout == "sliced" else None
        run(text, spec, problem, a, b, c, sm)
        if exact:
            np.testing.assert_array_equal(c.astype(float), want.astype(c.dtype).astype(float))
        else:
            error = np.abs(c.astype(float) - want)
            assert (error <= bound).all(), f"{m}×{n}×{k}: {np.nanmax(error / bound)} bounds"
        if around is not None:
            around[1 : m + 1, 1 : n + 1] = c
            np.testing.assert_array_equal(around, c.base, "what lies round C is written")


@pytest.mark.parametrize("name", WMMA)
def test_infinities_and_nans_stay_in_their_row_and_column(ptx, name):
    """Beyond K both factors are zero, so that no Inf or NaN of one operand meets a zero of the other."""
    spec = FALLBACKS[name]
    a, b, c = np.ones((35, 40), np.float16), np.ones((40, 24), np.float16), np.zeros((35, 24), np.float32)
    a[34], b[:, 23] = np.nan, np.inf
    problem = problem_of(a, b, c, 1.0, 0.0)
    run(ptx(spec, (("dtype", "float16"),), (7, 5), cuda_source._find_compiler()), spec, problem, a, b, c, "sm_75")
    assert (c[:34, :23] == 40).all()
    assert np.isnan(c[34]).all()
    assert (c[:34, 23] == np.inf).all()


@pytest.mark.parametrize("name", ["v3-nvcc", "v6-nvcc", "t2-nvcc", "t3-nvcc"])
def test_every_barrier_closes_a_hazard(ptx, name):
    spec = FALLBACKS[name]
    whole = ptx(spec, spec.configs[0], (9, 0), cuda_source._find_compiler())
    barriers = list(re.finditer(r"\b(?:bar|barrier)\.sync[^;]*;", whole))
    assert len(barriers) == 2
    dtype = TYPES[spec.dtypes[0]]
    for barrier in barriers:
        text = whole[: barrier.start()] + whole[barrier.end() :]
        a, b, c = np.ones((64, 72), dtype), np.ones((72, 64), dtype), np.zeros((64, 64), np.float32)
        with pytest.raises(SharedMemoryRace):
            run(text, spec, problem_of(a, b, c, 1.0, 0.0), a, b, c)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("size", REPACK)
def test_repack_twin(ptx, size, compiler):
    """A stack of three: stepped, transposed, and with aligned rows that end in part of a group."""
    spec, used = REPACK[size], set()
    numbers = np.random.default_rng(3).integers(0, 2**16, (3, 70, 80)).astype(f"u{size}")
    for source in (numbers[:, :, ::-2], numbers.swapaxes(1, 2), numbers[:, :, :77]):
        rows, columns = source.shape[1:]
        target = np.zeros((3, rows, columns + -columns % 8), f"u{size}")[:, :, :columns]
        strides = [tuple(s // size for s in x.strides) for x in (source, target)]
        (copy,) = copies(size, source.shape, 0, strides[0], 0, strides[1])
        used.add(copy.config)
        text = ptx(spec, copy.config, (9, 0), compiler)
        sizes, others = [np.uint32(x) for x in copy.values[2:4]], [np.int64(x) for x in copy.values[4:]]
        emulator.launch(text, copy.grid, copy.threads, [source, target, *sizes, *others])
        np.testing.assert_array_equal(target, source)
    assert used == set(spec.configs)


# --- machine code


@pytest.mark.parametrize(("name", "config"), FORMS, ids=form_id)
def test_no_spills_and_the_launch_bounds_of_the_spec(cubin, request, name, config):
    """For the oldest architecture, sm_90, and of every third form, or with --slow, those between and after, too."""
    spec = FALLBACKS[name]
    every = request.config.getoption("--slow") or FORMS.index((name, config)) % 3 == 0
    for arch in ARCHS if every else ((7, 5), (9, 0)):
        if dict(config).get("dtype") == "bfloat16" and arch not in ((8, 0), (9, 0)):
            continue
        text, resources, _ = cubin(name, config, arch)
        assert not resources.uses_local_memory, arch
        assert resources.registers <= 65536 // (spec.threads * (spec.min_blocks_per_sm if spec.threads < 1024 else 1))
        assert re.search(r"\.maxntid (\d+)", text).group(1) == str(spec.threads)
        assert re.search(r"\.minnctapersm (\d+)", text).group(1) == str(spec.min_blocks_per_sm)


@pytest.mark.skipif(not (find_tool("nvdisasm") or find_tool("cuobjdump")), reason="no disassembler is installed")
@pytest.mark.parametrize("arch", [(7, 5), (9, 0)], ids=str)
@pytest.mark.parametrize("name", WMMA)
def test_wmma_runs_on_the_tensor_cores(cubin, name, arch):
    _, _, code = cubin(name, (("dtype", "float16"),), arch)
    report = disassemble(code)
    opcode, count = ("HMMA.1688", 4) if arch < (8, 0) else ("HMMA.16816", 2)
    mix = report.mix()
    assert mix[opcode] >= count * (1 if name == "t1-nvcc" else 8)  # of one 16×16×16, and of a warp's 4×2 of them
    if name == "t1-nvcc":
        return
    assert mix["LDSM"] == (12 if arch < (8, 0) else 6)  # 4 fragments of A and 2 of B, on Turing in halves
    assert mix["LDG.128"] >= {"t2-nvcc": 4, "t3-nvcc": 8}[name]  # t3: of the first tiles, and of the next
    classes = [i.opcode for i in report.instructions]
    barrier = next(i for i, op in enumerate(classes) if op.startswith("BAR"))
    multiply = next(i for i, op in enumerate(classes) if op.startswith("HMMA"))
    in_flight = sum(op.startswith("LDG") and "128" in op for op in classes[barrier:multiply])
    assert (in_flight >= 4) == (name == "t3-nvcc")


# --- compilers


@pytest.fixture
def no_compiler(monkeypatch):
    def missing():
        raise CompilerMissingError("libnvrtc could not be loaded (RuntimeError)")

    monkeypatch.setattr(cuda_source, "find_tool", lambda name: None)
    monkeypatch.setattr(cuda_source, "_nvrtc", missing)
    monkeypatch.delenv("NUMBA_GEMM_CUDA_COMPILER", raising=False)


def test_no_compiler_says_what_to_install(no_compiler):
    asked = (supported_archs, lambda: cuda_to_ptx(CUDA_FOLDER / "v1_naive.cu", (9, 0), name="v1"))
    for call in (*asked, lambda: fallback_for("t2", (7, 5), "no cp.async")):
        with pytest.raises(CompileError, match=r"nvcc is not on PATH.*libnvrtc.*cuda-toolkit\[nvcc\]==13\.0"):
            call()
    assert cuda_source.toolchain() == "none"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_cuda_13_has_no_volta(monkeypatch, compiler):
    monkeypatch.setenv("NUMBA_GEMM_CUDA_COMPILER", compiler)
    try:
        oldest = min(COMPILERS[compiler].archs())
    except CompilerMissingError as missing:
        pytest.skip(f"{compiler} is not installed: {missing}")
    if oldest < (7, 5):
        assert (7, 0) in supported_archs()
        return
    assert oldest == (7, 5)
    with pytest.raises(CompileError, match=r"can't compile for sm_70.*sm_75.*CUDA 12\.x.*==12\.9"):
        cuda_to_ptx(CUDA_FOLDER / "t1_direct.cu", (7, 0), name="t1")
    with pytest.raises(CompileError, match=r"compute capability 7\.0.*begins at 7\.5.*CUDA 12\.x"):
        fallback_for("t1", (7, 0), "no m16n8k16")


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_source_that_is_wrong_shows_the_compilers_message(ptx, monkeypatch, compiler):
    spec = FALLBACKS["v1-nvcc"]
    ptx(spec, (), (9, 0), compiler)  # or skip
    monkeypatch.setenv("NUMBA_GEMM_CUDA_COMPILER", compiler)
    with pytest.raises(CompileError, match=r"v6_vector\.cu\(\d+\): error") as caught:
        cuda_to_ptx(CUDA_FOLDER / "v6_vector.cu", (9, 0), defines={"VECTOR_WIDTH": "nonsense"}, name="v6")
    assert "nonsense" in caught.value.log


def test_nvrtc_names_the_headers_that_it_misses(ptx, monkeypatch):
    ptx(FALLBACKS["v1-nvcc"], (), (9, 0), "nvrtc")  # or skip
    monkeypatch.setenv("NUMBA_GEMM_CUDA_COMPILER", "nvrtc")
    monkeypatch.setattr(cuda_source, "header_folders", list)
    with pytest.raises(CompileError, match=r"mma\.h, which comes with: pip install 'cuda-toolkit\[cudart,crt\]"):
        cuda_to_ptx(CUDA_FOLDER / "t1_direct.cu", (9, 0), name="t1")
    assert ".entry v1" in cuda_to_ptx(CUDA_FOLDER / "v1_naive.cu", (9, 0), name="v1")  # needs none


def test_nvcc_without_a_host_compiler_leaves_the_work_to_nvrtc(ptx, monkeypatch, caplog):
    for compiler in COMPILERS:
        ptx(FALLBACKS["v1-nvcc"], (), (9, 0), compiler)  # or skip
    monkeypatch.delenv("NUMBA_GEMM_CUDA_COMPILER", raising=False)
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin /there/is/none")
    with caplog.at_level(logging.INFO, "numba_gemm"):
        assert ".entry v2" in cuda_to_ptx(CUDA_FOLDER / "v2_coalesced.cu", (9, 0), name="v2")
    assert "NVRTC compiles v2_coalesced.cu" in caplog.text


def test_a_gpu_newer_than_the_compiler_gets_the_newest_ptx_it_knows(monkeypatch):
    compiler = cuda_source._find_compiler()
    monkeypatch.setitem(COMPILERS, compiler, COMPILERS[compiler]._replace(archs=lambda: ((7, 5), (8, 0))))
    assert ".target sm_80" in cuda_to_ptx(CUDA_FOLDER / "v1_naive.cu", (15, 1), name="v1")


def test_an_unknown_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CUDA_COMPILER", "gcc")
    with pytest.raises(CompileError, match="'gcc' is not one of nvcc, nvrtc"):
        supported_archs()


# --- the rule


@pytest.fixture
def announced(caplog):
    fallback._announce.cache_clear()
    with caplog.at_level(logging.WARNING, "numba_gemm"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "numba_gemm"]


@pytest.mark.parametrize(
    ("name", "arch", "chosen"),
    [
        *[(f"v{i}", arch, f"v{i}-nvcc") for i in range(1, 8) for arch in ((7, 5), (9, 0))],
        *[(f"t{i}", (7, 5), f"t{i}-nvcc") for i in range(1, 4)],
        ("t4", (7, 5), "t3-nvcc"),
        ("repack", (7, 5), "repack-nvcc"),
    ],
)
def test_each_kernel_has_its_fallback_and_says_so_once(announced, name, arch, chosen):
    for _ in range(2):
        spec = fallback_for(name, arch, "the reason")
        assert (spec.name, spec.source) == (chosen, "cuda")
    assert announced() == [f"kernel {chosen} is used in place of {name}: the reason"]


@pytest.mark.parametrize(("name", "arch"), [("t2", (8, 0)), ("t4", (12, 0)), ("t9", (7, 5)), ("cpu", (7, 5))])
def test_no_fallback_where_none_is_needed_or_there_is_none(announced, name, arch):
    assert fallback_for(name, arch, "no reason") is None
    assert announced() == []


def test_what_a_gpu_is_too_old_for(announced):
    for name in ("v3", "t2"):
        with pytest.raises(KernelConstraintError, match=r"capability 6\.1 and .* needs 7\.0; needed is a GPU of 7\.5"):
            fallback_for(name, (6, 1), "whatever")
    with pytest.raises(KernelConstraintError, match=r"bfloat16 needs compute capability 8\.0.*float16 or float32"):
        fallback_for("t4", (7, 5), "no cp.async", dtype="bfloat16")
    assert announced() == []


@pytest.mark.parametrize("name", FALLBACKS)
def test_specs_have_the_geometry_of_the_kernels_that_they_replace(name):
    spec, original = FALLBACKS[name], LADDER[name.removesuffix("-nvcc")]
    same = ("block_tile", "threads", "configs", "abi", "dtypes", "loads_per_fma")
    assert [getattr(spec, field) for field in same] == [getattr(original, field) for field in same]
    for config in spec.configs:
        source = spec.build(**dict(config))
        assert {line for file in spec.files for line in (CUDA_FOLDER / file).read_text().splitlines()} == set(
            source.text().splitlines()
        )
    assert replace(spec, name="v1") != spec  # frozen and comparable, as cache keys need


def test_importing_the_fallbacks_imports_neither_numba_nor_cuda():
    code = "import sys, numba_gemm.fallback; print(sorted({'numba', 'cuda', 'llvmlite'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
