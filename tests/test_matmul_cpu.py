"""The calls on a machine without a GPU: NumPy's BLAS and the blocked baseline."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm import no_gpu as no_gpu_warning
from numba_gemm.cases import Case, small_cases
from numba_gemm.device.driver import is_available
from numba_gemm.validate import check, reference

CASES = [*small_cases(64, 8), Case(130, 70, 129), Case(64, 513, 65), Case(200, 300, 1)]


@pytest.mark.parametrize("kernel", ["cpu", None], ids=["baseline", "blas"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_right(case, kernel):
    a, b, c = case.make()
    expected = reference(a, b, c, alpha=case.alpha, beta=case.beta)
    if case.beta == 0:
        c[...] = np.nan  # beta = 0 never reads c
    result = ng.gemm(a, b, c, case.alpha, case.beta, kernel=kernel, device="cpu")
    assert result is c
    verdict = check(c, expected, exact=case.exact)
    assert verdict, verdict.message


@pytest.mark.parametrize("kernel", ["cpu", None], ids=["baseline", "blas"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 4, 0)], ids=str)
def test_zero_sized_dimensions_behave_as_in_numpy(shape, kernel):
    m, n, k = shape
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    result = ng.matmul(a, b, kernel=kernel, device="cpu")
    assert result.shape == (m, n)
    assert result.dtype == np.float32
    assert np.array_equal(result, np.matmul(a, b))


def test_k_zero_scales_c():
    c = np.full((2, 3), 4, np.float32)
    ng.gemm(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32), c, alpha=5.0, beta=0.5, device="cpu")
    assert (c == 2).all()


def test_alpha_zero_reads_neither_factor():
    nan = np.full((2, 2), np.nan, np.float32)
    c = np.full((2, 2), 3, np.float32)
    ng.gemm(nan, nan, c, alpha=0.0, beta=2.0, device="cpu")
    assert (c == 6).all()


def test_out_is_written_and_returned():
    a, b, _ = Case(5, 6, 7).make()
    backing = np.full((5, 12), np.nan, np.float32)
    out = backing[:, ::2]
    assert ng.matmul(a, b, out=out, kernel="cpu") is out
    assert check(out, reference(a, b))
    assert np.isnan(backing[:, 1::2]).all()


def test_readonly_inputs_are_welcome():
    a, b, _ = Case(5, 6, 7).make()
    a.flags.writeable = b.flags.writeable = False
    assert check(ng.matmul(a, b, device="cpu"), reference(a, b))


@pytest.mark.skipif(is_available(), reason="there is a GPU, so 'auto' uses it")
def test_auto_without_a_gpu_warns_once_and_computes(monkeypatch):
    monkeypatch.setattr(no_gpu_warning, "_warned", False)
    a, b, _ = Case(5, 6, 7).make()
    with pytest.warns(RuntimeWarning, match="no NVIDIA GPU") as caught:
        result = ng.matmul(a, b)
    assert caught[0].filename == __file__
    assert check(result, reference(a, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.matmul(a, b)


def test_cpu_device_does_not_warn():
    a, b, _ = Case(5, 6, 7).make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.matmul(a, b, device="cpu")


def test_kernels_is_a_table_in_ladder_order():
    table = ng.kernels()
    assert [row.name for row in table] == ["cpu", *(f"v{i}" for i in range(1, 9)), "t1", "t2", "t3", "t4", "w1", "w2"]
    assert table[6].block_tile == (128, 128, 8)
    text = repr(table)
    assert all(row.idea.split()[0] in text for row in table)


def test_geometry_is_the_ladders():
    """The ladder's table, word for word: block tile, threads, thread tile, shared loads per FMA."""
    rows = {row.name: (row.block_tile, row.threads, row.thread_tile, row.loads_per_fma) for row in ng.kernels()}
    assert rows["v1"] == ((32, 32, 1), 1024, (1, 1), None)
    assert rows["v2"] == ((32, 32, 1), 1024, (1, 1), None)
    assert rows["v3"] == ((32, 32, 32), 1024, (1, 1), 2.0)
    assert rows["v4"] == ((64, 64, 8), 512, (8, 1), 1.125)
    assert rows["v5"] == ((128, 128, 8), 256, (8, 8), 0.25)
    assert rows["v6"] == ((128, 128, 8), 256, (8, 8), 0.25)
    assert rows["v7"] == ((128, 128, 16), 128, (8, 16), 0.1875)
    assert rows["t1"][:2] == ((16, 16, 16), 32)
    assert rows["t2"][:2] == rows["t3"][:2] == ((128, 128, 32), 256)
