"""Products of NumPy arrays through a GPU: right however they are cut, without growth, with operands that stay there."""

from __future__ import annotations

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from numba_gemm.device.context import current_context
from numba_gemm.errors import CudaError
from numba_gemm.host import device_put, multiply_host, pinned_empty, release
from numba_gemm.host import engine as engine_module
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu


def random(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def product(a, b, **keywords):
    c = np.full((*a.shape[:-1], b.shape[-1]), np.nan, np.result_type(a.dtype))
    multiply_host(a, b, c, **keywords)
    return c


def pinned_copy(array):
    copy = pinned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


SHAPES = [(1, 1, 1), (3, 5, 7), (64, 64, 64), (1, 4096, 4096), (1025, 1030, 999), (3000, 2000, 1500), (64, 64, 100_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pageable_and_page_locked_arrays_give_the_same_bits(shape):
    m, n, k = shape
    a, b = random(m, k), random(k, n, seed=1)
    c = product(a, b)
    assert check(c, reference(a, b))
    locked = pinned_empty((m, n))
    locked[...] = np.nan
    multiply_host(pinned_copy(a), pinned_copy(b), locked)
    np.testing.assert_array_equal(locked, c)


def test_however_it_is_cut_by_rows_and_columns_the_bits_are_the_same():
    a, b = random(2100, 1000), random(1000, 3001, seed=1)
    expected = reference(a, b)
    whole = product(a, b, kernel="v7")  # one run over k, whatever the shape
    assert check(whole, expected)
    for limit in (40 << 20, 20 << 20, 8 << 20, 3 << 20):
        np.testing.assert_array_equal(product(a, b, kernel="v7", memory_limit=limit), whole)
        chosen, again = (product(a, b, memory_limit=limit) for _ in range(2))
        assert check(chosen, expected)
        np.testing.assert_array_equal(chosen, again)


@pytest.mark.parametrize(("rows", "columns"), [(18 * 1024 + 5, 40), (18 * 1024 + 3, 9), (18 * 1024 + 1, 1)], ids=str)
def test_a_last_block_of_fewer_rows_than_columns_is_right(rows, columns):
    """Blocks have 1024 rows; kernels for a narrow side read the last one the other way, by another form."""
    a, b = random(rows, 300), random(300, columns, seed=1)
    for first, second in ((a, b), (b.T, a.T)):
        result = product(first, second, memory_limit=3 << 20)
        assert check(result, reference(first, second))


def test_where_memory_forces_k_to_be_cut_the_product_is_right_and_repeatable():
    a, b = random(500, 100_000), random(100_000, 300, seed=1)
    first, second = (product(a, b, memory_limit=20 << 20) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert check(first, reference(a, b))


def test_half_precision_with_cut_k_is_rounded_once():
    """Sums of these integers are exact in FP32 and not in FP16: whatever is rounded in between would show."""
    draw = np.random.default_rng(0).integers
    a, b = (draw(-4, 5, shape).astype(np.float16) for shape in ((200, 60_000), (60_000, 100)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert (exact != exact.astype(np.float16)).any()
    for limit in (None, 8 << 20):
        np.testing.assert_array_equal(product(a, b, memory_limit=limit), exact.astype(np.float16))


@pytest.mark.parametrize("layout", ["F", "backwards", "gaps"])
@pytest.mark.parametrize("extent", [100, 1300])
def test_any_strides(extent, layout):
    def view(array):
        if layout == "F":
            return np.asfortranarray(array)
        if layout == "backwards":
            return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
        wide = np.full((2 * array.shape[0], 3 * array.shape[1]), np.nan, array.dtype)
        wide[::2, ::3] = array
        return wide[::2, ::3]

    a, b, c = random(extent, extent - 1), random(extent - 1, extent + 1, seed=1), random(extent, extent + 1, seed=2)
    expected = reference(a, b, c, alpha=0.5, beta=2.0)
    out = view(c.copy())
    multiply_host(view(a), view(b), out, alpha=0.5, beta=2.0)
    assert check(out, expected)


@pytest.mark.parametrize("extent", [30, 700])
@pytest.mark.parametrize("batches", [((3,), (3,)), ((4,), (1,)), ((2, 1), (1, 3))], ids=str)
def test_batches(batches, extent):
    a, b = random(*batches[0], extent, extent + 3), random(*batches[1], extent + 3, extent + 1, seed=1)
    batch = np.broadcast_shapes(*batches)
    c = np.full((*batch, extent, extent + 1), np.nan, np.float32)
    multiply_host(np.broadcast_to(a, (*batch, *a.shape[-2:])), np.broadcast_to(b, (*batch, *b.shape[-2:])), c)
    for index in np.ndindex(*batch):
        x = np.broadcast_to(a, (*batch, *a.shape[-2:]))[index]
        y = np.broadcast_to(b, (*batch, *b.shape[-2:]))[index]
        assert check(c[index], reference(x, y)), index


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(dtype):
    a, b = random(1500, 1201, dtype=dtype), random(1201, 1302, seed=1, dtype=dtype)
    for c_dtype in (dtype, np.float32):
        c = np.zeros((1500, 1302), c_dtype)
        multiply_host(a, b, c)
        arch = current_context().device.compute_capability
        expected = reference(a, b, c_dtype=np.dtype(c_dtype).name, tensor_core=arch)
        assert check(c, expected)


def used_memory():
    """Bytes of GPU memory that the pools hold from which all of the library's memory comes, of this process alone."""
    from numba_gemm.device.driver import check as checked
    from numba_gemm.device.driver import driver
    from numba_gemm.device.memory import memory_pool

    cu, context = driver(), current_context()
    checked(cu.cuCtxSynchronize(), "waiting")
    pools = [
        memory_pool(context),
        checked(cu.cuDeviceGetDefaultMemPool(context.device.ordinal), "the default pool"),
    ]
    reserved = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    return sum(int(checked(cu.cuMemPoolGetAttribute(pool, reserved), "its size")) for pool in pools)


def test_no_growth_over_ten_thousand_calls():
    a, b = random(40, 40), random(40, 40, seed=1)
    c = np.empty((40, 40), np.float32)
    big_a, big_b = random(1500, 1100), random(1100, 1200, seed=1)
    big_c = np.empty((1500, 1200), np.float32)

    def rounds(count):
        for index in range(count):
            multiply_host(a, b, c)
            if index % 100 == 0:
                multiply_host(big_a, big_b, big_c)
                device_put(big_a).free()
                device_put(big_b)

    rounds(200)
    before = used_memory()
    rounds(10_000)
    assert used_memory() <= before
    kept = used_memory()
    release()
    assert used_memory() < kept
    multiply_host(a, b, c)
    assert check(c, reference(a, b))


def test_products_of_several_threads_at_once():
    shapes = [(1500, 1400, 1300), (64, 64, 64), (1000, 2000, 900), (300, 300, 300)]
    cases = [(random(m, k, seed=m), random(k, n, seed=n)) for m, n, k in shapes]
    expected = [product(a, b) for a, b in cases]
    failures = []

    def work(number):
        for turn in range(8):
            index = (number + turn) % len(cases)
            if not np.array_equal(product(*cases[index]), expected[index]):
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_product_from_inside_progress():
    """Each product takes its own streams and buffers, so one may start another."""
    a, b = random(2000, 1500), random(1500, 1600, seed=1)
    inner = []

    def progress(done, total):
        if not inner:
            inner.append(product(b, b.T.copy()))

    c = product(a, b, progress=progress)
    assert check(c, reference(a, b))
    assert len(inner) == 1
    assert check(inner[0], reference(b, b.T))


def test_an_exception_in_progress_leaves_everything_usable():
    a, b = random(2000, 1500), random(1500, 1600, seed=1)

    class StopError(Exception):
        pass

    def stop(done, total):
        raise StopError

    with pytest.raises(StopError):
        product(a, b, progress=stop)
    assert check(product(a, b), reference(a, b))


def test_too_little_memory_names_memory_limit():
    context = current_context()
    with pytest.raises(CudaError, match="memory_limit"):
        engine_module.allocate_device(context, 1 << 50, 0)
    with pytest.raises(ValueError, match="memory_limit = 1000 bytes"):
        product(random(2000, 2000), random(2000, 2000), memory_limit=1000)


def test_the_environment_limits_memory(monkeypatch):
    a, b = random(2000, 1000), random(1000, 1500, seed=1)
    monkeypatch.setenv("NUMBA_GEMM_MEMORY_LIMIT", "1000")
    with pytest.raises(ValueError, match="memory_limit = 1000"):
        product(a, b)
    monkeypatch.setenv("NUMBA_GEMM_MEMORY_LIMIT", "much")
    with pytest.raises(ValueError, match="NUMBA_GEMM_MEMORY_LIMIT"):
        product(a, b)


# --- Matrix


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (300, 200), (3, 40, 50), (2000, 3000)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.float64])
def test_a_matrix_comes_back_as_it_went(shape, dtype):
    array = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    with device_put(array) as matrix:
        assert (matrix.shape, matrix.dtype, matrix.nbytes, matrix.ndim) == (shape, dtype, array.nbytes, array.ndim)
        np.testing.assert_array_equal(matrix.numpy(), array)
        np.testing.assert_array_equal(np.asarray(matrix.T), array.T)
    with pytest.raises(ValueError, match="freed"):
        matrix.numpy()


def test_a_matrix_of_an_array_of_any_strides():
    array = random(300, 400)
    for view in (array.T, array[::2, ::3], array[::-1], np.broadcast_to(array[:1], (5, 400))):
        np.testing.assert_array_equal(device_put(view).numpy(), view)


def test_views_of_a_matrix():
    array = random(30, 40, 50)
    matrix = device_put(array)
    for index in (0, slice(3, 20, 2), (..., 3), (slice(None), 4), (1, 2, 3), (slice(None, None, -1), None, 5)):
        np.testing.assert_array_equal(matrix[index].numpy(), array[index])


def test_copy_from():
    matrix = device_put(np.zeros((700, 900), np.float32))
    array = random(700, 900)
    assert matrix.copy_from(array) is matrix
    np.testing.assert_array_equal(matrix.numpy(), array)
    matrix.T.copy_from(array.T + 1)
    np.testing.assert_array_equal(matrix.numpy(), array + 1)
    with pytest.raises(ValueError, match="gaps"):
        matrix[:, ::2].copy_from(array[:, ::2])


@pytest.mark.parametrize("m", [1, 50, 2000])
def test_products_with_matrices(m):
    a, b = random(m, 1500), random(1500, 1700, seed=1)
    expected = product(a, b)
    assert check(expected, reference(a, b))
    a_there, b_there = device_put(a), device_put(b)
    for x, y in ((a, b_there), (a_there, b), (a_there, b_there)):
        c = np.full((m, 1700), np.nan, np.float32)
        multiply_host(x, y, c)
        assert check(c, reference(a, b))
    c = np.full((m, 1700), np.nan, np.float32)
    multiply_host(a, device_put(np.ascontiguousarray(b.T)).T, c)
    assert check(c, reference(a, b))
    c = np.full((m, 850), np.nan, np.float32)
    multiply_host(a, b_there[:, ::2], c)  # with gaps: through the host
    assert check(c, reference(a, b[:, ::2]))


def test_a_matrix_multiplies_after_the_work_on_its_stream():
    cupy = pytest.importorskip("cupy")
    a, b = random(900, 900), random(900, 900, seed=1)
    stream = cupy.cuda.Stream(non_blocking=True)
    matrix = device_put(b, stream)
    assert matrix.stream == stream.ptr
    with stream:
        shared = cupy.asarray(matrix)
        for _ in range(50):
            shared += 1
    c = np.empty((900, 900), np.float32)
    multiply_host(a, matrix, c)
    assert check(c, reference(a, matrix.numpy()))
    np.testing.assert_allclose(matrix.numpy(), b + 50, rtol=1e-5)


# --- page-locked memory


def test_page_locked_memory_is_known_and_given_back():
    from numba_gemm.host.pinned import is_page_locked

    array = pinned_empty((1000, 1000))
    address = array.ctypes.data
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert is_page_locked(address, array.nbytes)
    view = array[5:10]
    del array
    assert is_page_locked(address, 100)
    del view
    assert not is_page_locked(address, 100)
    assert not is_page_locked(np.empty(1000).ctypes.data, 8000)


def test_a_process_with_everything_in_use_ends_quietly():
    script = (
        "import numpy as np\n"
        "from numba_gemm.host import multiply_host, pinned_empty, device_put\n"
        "a, m = pinned_empty((1536, 1536)), device_put(np.ones((1536, 1536), np.float32))\n"
        "a[:] = 1\n"
        "c = np.empty((1536, 1536), np.float32)\n"
        "multiply_host(a, m, c); multiply_host(c, c, a)\n"
        "assert a[3, 4] == 1536.0**3, a[3, 4]\n"  # as each partial sum, 9 · 2¹⁸ times a number up to 1536
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
