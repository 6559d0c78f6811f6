"""The FP32 ladder on the emulator: every form on the project's correctness cases, the public calls, far blocks."""

from __future__ import annotations

import re

import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.abi import PARAMETERS
from numba_gemm.benchmark.correctness import EMULATOR, check_kernels
from numba_gemm.benchmark.emulated import emulated_runs
from numba_gemm.cases import LAYOUTS
from numba_gemm.catalog import LADDER
from numba_gemm.compile import compile_kernel
from numba_gemm.emulate import DEFAULT_ARCH
from numba_gemm.emulator import Machine, OutOfBounds, SharedMemoryRace, UninitialisedRead
from numba_gemm.spec import describe_config
from numba_gemm.validate import POISON_BYTE, check, reference

FP32 = [name for name, spec in LADDER.items() if "float32" in spec.dtypes]


# --- the correctness cases


@pytest.mark.parametrize("kernel", FP32)
def test_every_form_passes_the_correctness_cases(kernel):
    outcomes = check_kernels([kernel], {kernel: (EMULATOR,)}, quick=True, seed=5)
    assert [f"{o.form} {o.case}: {o.message}" for o in outcomes if o.message] == []
    if LADDER[kernel].select is None:  # else each problem has a form of its own
        own = LADDER[kernel].configs
        row_major = {describe_config(config) for config in own if "column" not in dict(config).values()}
        assert {outcome.form for outcome in outcomes} >= row_major


@pytest.mark.parametrize("kernel", FP32)
def test_the_cases_are_aligned_odd_tiny_sliced_and_scaled(kernel):
    cases = [run.case for run in emulated_runs(kernel)]
    block_m, block_n, step = LADDER[kernel].block_tile
    tile = max(block_m, block_n)
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert any((case.m, case.n, case.k) == (1, 1, 1) for case in cases)
    assert any((case.m, case.n, case.k) == (tile, tile, step) for case in cases)
    assert any(case.m % 2 and case.n % 2 and case.k % 2 for case in cases)
    assert any(case.alpha == 0 for case in cases)
    assert any(case.beta != 0 and case.layout == "sliced" for case in cases)
    assert any(case.exact for case in cases)
    assert not all(case.exact for case in cases)


# --- the public calls


@pytest.fixture
def matrices():
    generator = np.random.default_rng(8)
    return generator.standard_normal((37, 21), np.float32), generator.standard_normal((21, 45), np.float32)


@pytest.mark.parametrize("kernel", [None, "v2", "v6"])
def test_matmul_makes_an_array_or_fills_one(matrices, kernel):
    a, b = matrices
    c = ng.matmul(a, b, kernel=kernel, device="emulator")
    assert (c.shape, c.dtype) == ((37, 45), np.float32)
    assert check(c, reference(a, b))
    out = np.full((37, 45), np.nan, np.float32)
    assert ng.matmul(a, b, out=out, kernel=kernel, device="emulator") is out
    np.testing.assert_array_equal(out, c)


def test_gemm_scales_and_adds_in_place(matrices):
    a, b = matrices
    c = np.random.default_rng(9).standard_normal((37, 45), np.float32)
    expected = reference(a, b, c, alpha=-1.5, beta=0.5)
    assert ng.gemm(a, b, c, -1.5, 0.5, kernel="v5", device="emulator") is c
    assert check(c, expected)


def test_views_of_any_stride_are_multiplied(matrices):
    a, b = matrices
    out = np.zeros((45, 37), np.float32)
    ng.matmul(b.T, a.T, out=out, kernel="v3", device="emulator")
    assert check(out.T, reference(a, b))
    c = ng.matmul(a[::-2, 1::3], b[1::3, ::-1], device="emulator")
    assert check(c, reference(a[::-2, 1::3], b[1::3, ::-1]))


def test_beta_zero_reads_no_c_and_alpha_zero_no_factor(matrices):
    a, b = matrices
    c = np.full((37, 45), np.nan, np.float32)
    ng.gemm(a, b, c, 2.0, 0.0, kernel="v7", device="emulator")
    assert np.isfinite(c).all()
    before = c.copy()
    ng.gemm(np.full_like(a, np.nan), b, c, 0.0, 0.5, kernel="v7", device="emulator")
    np.testing.assert_array_equal(c, before * np.float32(0.5))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_dimensions_of_size_zero(m, n, k):
    c = ng.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32), device="emulator")
    np.testing.assert_array_equal(c, np.zeros((m, n), np.float32))


# --- errors: out is as it was


def without_barrier(text: str, number: int) -> str:
    """A PTX text whose barrier of that number, counted from 0, does nothing."""
    places = list(re.finditer(r"\b(?:bar\.sync|barrier\.sync)\b[^;]*;", text))
    return text[: places[number].start()] + text[places[number].end() :]


@pytest.fixture
def damage(monkeypatch):
    """Changes the PTX of every launch by a function of its text."""
    launch = Machine.launch

    def install(change):
        monkeypatch.setattr(
            Machine, "launch", lambda self, text, *rest, **more: launch(self, change(text), *rest, **more)
        )

    return install


@pytest.mark.parametrize("barrier", [0, 1])
@pytest.mark.parametrize("kernel", ["v3", "v5"])
def test_a_missing_barrier_is_a_race_and_out_is_untouched(damage, kernel, barrier):
    a, b = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    out = np.full((64, 64), 7, np.float32)
    ng.matmul(a, b, out=out.copy(), kernel=kernel, device="emulator")
    damage(lambda text: without_barrier(text, barrier))
    with pytest.raises(SharedMemoryRace, match=r"line \d+"):
        ng.matmul(a, b, out=out, kernel=kernel, device="emulator")
    with pytest.raises(SharedMemoryRace):
        ng.gemm(a, b, out, 1.0, 1.0, kernel=kernel, device="emulator")
    np.testing.assert_array_equal(out, np.full((64, 64), 7, np.float32))


def test_a_missing_guard_is_out_of_bounds_and_out_is_untouched(damage):
    a, b = np.ones((33, 5), np.float32), np.ones((5, 33), np.float32)
    out = np.full((33, 33), 7, np.float32)
    damage(lambda text: re.sub(r"(or\.pred\s+(%p\d+),[^;]*;)\s*@\2 bra[^;]*;", r"\1", text, count=1))
    with pytest.raises((OutOfBounds, UninitialisedRead)):
        ng.matmul(a, b, out=out, kernel="v1", device="emulator")
    assert (out == 7).all()


def test_check_prints_a_hazard_as_a_failure(damage, capsys):
    from numba_gemm.cli import main

    damage(lambda text: without_barrier(text, 0))
    assert main(["check", "v3", "--device", "emulator"]) == 1
    text = capsys.readouterr().out
    assert "failed: v3, emulator" in text
    assert "SharedMemoryRace: " in text
    assert "v3: and more" in text
    assert "checks failed" in text


def test_a_wrong_call_leaves_out_alone(matrices):
    a, b = matrices
    out = np.full((37, 45), 7, np.float32)
    for arguments, options, error in (
        ((a, b), {"kernel": "v99"}, ValueError),
        ((a, b), {"kernel": "cpu"}, ValueError),
        ((a, b[:-1]), {}, ValueError),
        ((a, b.astype(np.float64)), {}, TypeError),
    ):
        with pytest.raises(error):
            ng.matmul(*arguments, out=out, device="emulator", **options)
    assert (out == 7).all()


def device_array(pointer):
    """A 4×4 Numba device array as far as its description goes; nothing looks at its memory."""
    interface = {"version": 3, "shape": (4, 4), "strides": None, "typestr": "<f4", "data": (pointer, False)}
    names = {"__module__": "numba.cuda.cudadrv.devicearray", "__cuda_array_interface__": interface}
    return type("DeviceNDArray", (), names)()


def test_device_arrays_are_refused():
    a, b, out = (device_array(pointer << 20) for pointer in (1, 2, 3))
    host = np.ones((4, 4), np.float32)
    for arguments, error, words in (
        ((a, b, None), ValueError, r"a is a Numba device array in GPU memory.*copy_to_host"),
        ((a, b, out), ValueError, "copy_to_host"),
        ((a, host, None), TypeError, "b is a NumPy array in host memory"),
        ((host, b, None), TypeError, "b is a Numba device array"),
        ((host, host, out), TypeError, "out is a Numba device array"),
    ):
        with pytest.raises(error, match=words):
            ng.matmul(*arguments[:2], out=arguments[2], device="emulator")


# --- one block of a huge product


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (kernel, config)
        for kernel in ("v1", "v5", "v7")
        for config in LADDER[kernel].configs
        if "column" not in dict(config).values()
    ],
    ids=str,
)
def test_a_far_block_is_indexed_in_64_bits(kernel, config):
    """A, B and C each reach past 2³² elements; the last block of the grid runs, and only what it needs is written."""
    spec = LADDER[kernel]
    block_m, block_n, _ = spec.block_tile
    k = 32
    m, n = (1 << 21) + block_m, 2 * block_n
    lda, ldb, ldc = (1 << 11) + 4, 1 << 28, (1 << 11) + 8
    first_row, first_column = m - block_m, n - block_n
    assert first_row * lda > 1 << 32
    assert first_row * ldc > 1 << 32
    assert (k - 1) * ldb > 1 << 32

    generator = np.random.default_rng(4)
    rows = generator.standard_normal((block_m, k), np.float32)
    columns = generator.standard_normal((k, block_n), np.float32)
    machine = Machine("sm_90")
    a, b, c = (machine.alloc(4 * count) for count in (m * lda, k * ldb, m * ldc))
    for row in range(block_m):
        machine.write(a + 4 * (first_row + row) * lda, rows[row])
        machine.write(c + 4 * (first_row + row) * ldc, np.full(4 * (n + 8), POISON_BYTE, np.uint8))
    for row in range(k):
        machine.write(b + 4 * (row * ldb + first_column), columns[row])

    grid = spec.grid(m, n)
    strides = (1 << 40,) * 3 if spec.batched else ()  # of block (x, 0, 0) none counts
    parameters = PARAMETERS[spec.abi].pack(a, b, c, m, n, k, lda, ldb, ldc, 1.0, 0.0, *strides)
    compiled = compile_kernel(spec, config, DEFAULT_ARCH)
    report = machine.launch(compiled.ptx, grid, spec.threads, parameters, blocks=[grid - 1])
    assert report.blocks_run == 1
    assert report.counters.ffma_threads == block_m * block_n * k

    found = np.stack([machine.read(c + 4 * (first_row + i) * ldc, np.float32, n + 8) for i in range(block_m)])
    assert check(found[:, first_column:n], reference(rows, columns))
    assert np.isnan(found[:, :first_column]).all(), "columns of another block"
    assert np.isnan(found[:, n:]).all(), "the gap between rows"
