"""PTX that a compiler wrote: what nvcc emits for GEMM kernels, optimised and for debugging."""

from __future__ import annotations

import shutil
import sys

import harness
import numpy as np
import pytest

from numba_gemm import emulator

MODES = ("O3", "G")


def _nvcc(source: str, mode: str, arch: str) -> str:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed, so nothing can be compiled afresh")
    sys.path.insert(0, str(harness.CUDA))
    try:
        from regenerate import compile_source
    finally:
        sys.path.pop(0)
    return compile_source(source, mode, arch)


def _operands(m: int, n: int, k: int, dtype=np.float32, integers: bool = False):
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    if integers:
        a, b = rng.integers(-5, 6, (m, k)), rng.integers(-5, 6, (k, n))
    else:
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    return a.astype(dtype), b.astype(dtype)


SIMT = {
    # kernel: (grid of (m, n), block, dynamic shared bytes, shapes)
    "tiled": (lambda m, n: (-(-n // 16), -(-m // 16)), (16, 16), 0, [(33, 19, 21), (1, 1, 1), (32, 48, 16)]),
    "register_blocked": (lambda m, n: (-(-n // 64), -(-m // 64)), 256, 4096, [(70, 65, 17), (64, 64, 8)]),
    "vectorised": (lambda m, n: (n // 32, m // 32), 64, 0, [(32, 64, 32), (96, 32, 16)]),
    "warp_shuffle": (lambda m, n: 3, 128, 0, [(5, 7, 70), (2, 3, 31)]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "shape"), [(k, s) for k, v in SIMT.items() for s in v[3]])
@pytest.mark.parametrize("integers", [False, True])
def test_simt_products(kernel, shape, mode, integers):
    check_simt(harness.fixture(f"gemm_simt.{mode}"), kernel, shape, integers)


def check_simt(text, kernel, shape, integers):
    m, n, k = shape
    grid, block, shared, _ = SIMT[kernel]
    a, b = _operands(m, n, k, integers=integers)
    c = np.full((m, n), np.nan, np.float32)
    args = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    emulator.launch(text, grid(m, n), block, args, kernel=kernel, shared_bytes=shared, arch="sm_80")
    reference = a.astype(np.float64) @ b.astype(np.float64)
    if integers:
        np.testing.assert_array_equal(c, reference)
    else:
        assert (np.abs(c - reference) <= harness.error_bound(a, b, k)).all()


@pytest.mark.parametrize("mode", MODES)
def test_calls_switches_and_divergence(mode):
    x = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    y = np.zeros_like(x)
    emulator.launch(harness.fixture(f"gemm_simt.{mode}"), 2, 96, [x, y, np.int32(x.size)], kernel="branches")
    expected = x.copy()
    cases = [
        lambda v: v * np.float32(2), lambda v: v / np.float32(3), lambda v: np.sqrt(np.abs(v)),
        lambda v: v + np.float32(1), lambda v: -v, np.floor,
    ]  # fmt: skip
    for i in range(x.size):
        for j in range(i % 5):
            expected[i] = cases[(i + j) % 6](expected[i])
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("integers", [False, True])
def test_wmma_product(mode, integers):
    m, n, k = 32, 48, 32
    a, b = _operands(m, n, k, np.float16, integers)
    c = np.full((m, n), np.nan, np.float32)
    args = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    report = emulator.launch(
        harness.fixture(f"gemm_tensor.{mode}"), (n // 16, m // 16), 32, args, kernel="wmma_direct", arch="sm_80"
    )
    _check_half(a, b, c / 2, integers)
    assert report.counters.mma_instructions == m * n * k // 16**3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_pipelined_mma_product(mode, arch):
    m, n, k = 128, 128, 96
    a, b = _operands(m, n, k, np.float16, integers=mode == "G")
    c = np.full((m, n), np.nan, np.float32)
    args = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    report = emulator.launch(
        harness.fixture(f"gemm_tensor.{mode}"), (n // 128, m // 128), 256, args, kernel="mma_async", arch=arch
    )
    _check_half(a, b, c, mode == "G")
    assert report.counters.mma_instructions == m * n * k // (16 * 8 * 16)
    assert report.counters.shared_load_conflicts == 0, "rows padded by 16 bytes keep ldmatrix free of conflicts"


def _check_half(a, b, c, integers):
    reference = a.astype(np.float64) @ b.astype(np.float64)
    if integers:
        np.testing.assert_array_equal(c, reference)
    else:
        # a tensor core truncates: at most one unit of the last of 24 bits for each product and accumulation
        bound = 2 * a.shape[1] * 2.0**-23 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
        assert (np.abs(c - reference) <= bound).all()


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_freshly_compiled(arch):
    text = _nvcc("gemm_simt", "O3", arch)
    for kernel in ("tiled", "warp_shuffle"):
        check_simt(text, kernel, SIMT[kernel][3][0], True)
