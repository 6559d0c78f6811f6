"""Every rung on a GPU: right on every case, from NumPy and from device memory of any layout."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.cases import LAYOUTS, Case, large_cases, lay_out, small_cases
from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.problem import Problem
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu

NAMES = kernels_for("float32")


def to_device(view):
    """The same matrix in GPU memory with the same strides and the same offset from its allocation's start."""
    from numba import cuda

    base = view
    while base.base is not None:
        base = base.base
    flat_base = base if base.flags.c_contiguous else base.T
    flat = np.lib.stride_tricks.as_strided(flat_base, (flat_base.size,), (4,))
    offset = (view.__array_interface__["data"][0] - flat_base.__array_interface__["data"][0]) // 4
    memory = cuda.to_device(flat)
    interface = dict(memory.__cuda_array_interface__)
    interface.update(
        shape=view.shape, strides=view.strides, data=(memory.device_ctypes_pointer.value + 4 * offset, False)
    )
    holder = type("View", (), {"__cuda_array_interface__": interface, "memory": memory})()
    return cuda.as_cuda_array(holder)


def back(device_view, like):
    """A strided device matrix on the host, through a packed copy made by the GPU."""
    identity = to_device(np.eye(like.shape[1], dtype=np.float32))
    return ng.matmul(device_view, identity, kernel="v3").copy_to_host()


@pytest.mark.parametrize("name", NAMES)
def test_numpy_arrays(name):
    tile = max(LADDER[name].block_tile[:2])
    for case in [*small_cases(tile, LADDER[name].block_tile[2]), *large_cases()]:
        a, b, c = case.make()
        expected = reference(a, b, c, alpha=case.alpha, beta=case.beta)
        if case.beta == 0:
            c[...] = np.nan
        ng.gemm(a, b, c, case.alpha, case.beta, kernel=name, device="cuda")
        verdict = check(c, expected, exact=case.exact)
        assert verdict, f"{case}: {verdict.message}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_device_arrays_of_any_layout(name, layout):
    for shape in ((65, 132, 68), (130, 67, 33)):
        case = Case(*shape, layout=layout, alpha=0.5, beta=2.0)
        a, b, c = case.make()
        expected = reference(a, b, c, alpha=0.5, beta=2.0)
        out = to_device(c)
        assert ng.gemm(to_device(a), to_device(b), out, 0.5, 2.0, kernel=name) is out
        verdict = check(back(out, c), expected)
        assert verdict, f"{case}: {verdict.message}"


@pytest.mark.parametrize("offset", range(5))
def test_a_call_repeated_at_another_alignment_takes_another_form(offset):
    """The shortcut for repeated calls must not carry a 16-byte kernel over to a misaligned matrix."""
    from numba import cuda

    a, b, _ = Case(64, 64, 64).make()
    expected = reference(a, b)
    memory = cuda.to_device(np.zeros(64 * 64 + 8, np.float32))
    for start in (0, offset, 0):
        a_device = memory[start : start + 64 * 64].reshape(64, 64)
        a_device.copy_to_device(a)
        out = cuda.to_device(np.full((64, 64), np.nan, np.float32))
        ng.matmul(a_device, cuda.to_device(b), out=out)
        assert check(out.copy_to_host(), expected)


def test_a_repeated_call_still_refuses_shared_memory():
    from numba import cuda

    a, b, _ = Case(64, 64, 64).make()
    da, db, out = cuda.to_device(a), cuda.to_device(b), cuda.device_array((64, 64), np.float32)
    for _ in range(2):
        ng.matmul(da, db, out=out)
    with pytest.raises(ValueError, match="out shares memory with a"):
        ng.matmul(da, db, out=da)
    with pytest.raises(ValueError, match="out shares memory with b"):
        ng.matmul(da, db, out=db)
    assert np.array_equal(da.copy_to_host(), a)


def test_a_new_device_array_comes_back_for_device_arrays():
    from numba import cuda

    a, b, _ = Case(70, 50, 30).make()
    result = ng.matmul(cuda.to_device(a), cuda.to_device(b))
    assert cuda.is_cuda_array(result)
    assert check(result.copy_to_host(), reference(a, b))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_zero_sized_dimensions(shape):
    from numba import cuda

    m, n, k = shape
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    assert np.array_equal(ng.matmul(a, b, device="cuda"), np.matmul(a, b))
    if k == 0:
        c = cuda.to_device(np.full((m, n), 3, np.float32))
        empty_a, empty_b = (cuda.device_array((1,), np.float32)[:0].reshape(s) for s in ((m, 0), (0, n)))
        ng.gemm(empty_a, empty_b, c, beta=2.0)
        assert (c.copy_to_host() == 6).all()


def test_beta_zero_never_reads_c():
    a, b, c = Case(40, 48, 32).make()
    for poison in (np.nan, np.inf):
        for name in NAMES:
            c[...] = poison
            ng.gemm(a, b, c, 2.0, 0.0, kernel=name, device="cuda")
            assert check(c, reference(a, b, alpha=2.0))


def test_the_same_call_gives_the_same_bits():
    a, b, _ = Case(300, 200, 1000).make()
    for name in NAMES:
        first, second = (ng.matmul(a, b, kernel=name, device="cuda") for _ in range(2))
        assert np.array_equal(first.view(np.uint32), second.view(np.uint32))


def test_all_rungs_agree_bit_for_bit():
    """Each output is one chain of FMAs in order of k, in every rung and both forms; with enough tiles in v8 too."""
    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare

    for shape, names in (((150, 140, 333), [name for name in NAMES if name != "v8"]), ((1500, 1400, 333), NAMES)):
        assert not any(prepare(Problem.packed(*shape), name, current_context()).k_per_split for name in names)
        a, b, _ = Case(*shape).make()
        results = {name: ng.matmul(a, b, kernel=name, device="cuda").view(np.uint32) for name in names}
        assert all(np.array_equal(result, results["v1"]) for result in results.values())


def test_out_is_untouched_by_a_refused_call():
    from numba import cuda

    a, b, _ = Case(8, 8, 8).make()
    out = cuda.to_device(np.full((8, 9), 7, np.float32))
    with pytest.raises(ValueError, match="out has shape"):
        ng.matmul(cuda.to_device(a), cuda.to_device(b), out=out)
    with pytest.raises(TypeError, match="host memory"):
        ng.matmul(a, cuda.to_device(b), out=out)
    with pytest.raises(ValueError, match="no kernel"):
        ng.matmul(a, b, kernel="v0")
    assert (out.copy_to_host() == 7).all()


def test_threads_multiply_at_once():
    cases = [Case(100 + 10 * i, 90, 80) for i in range(8)]
    verdicts = [None] * len(cases)

    def work(i):
        a, b, _ = cases[i].make()
        expected = reference(a, b)
        verdicts[i] = all(check(ng.matmul(a, b, device="cuda"), expected) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(verdicts)


def test_a_products_stream_is_the_arrays_stream():
    from numba import cuda

    a, b, _ = Case(256, 256, 256).make()
    stream = cuda.stream()
    da, db = cuda.to_device(a, stream=stream), cuda.to_device(b, stream=stream)
    out = cuda.device_array((256, 256), np.float32, stream=stream)
    for _ in range(3):
        ng.matmul(da, db, out=out)
    stream.synchronize()
    assert check(out.copy_to_host(), reference(a, b))


def test_indices_past_two_to_the_31():
    """A matrix of 2.2e9 elements: the last row lies past what 32 bits can index."""
    from numba import cuda

    rows, columns = 2_200_000, 1000
    a = cuda.device_array((rows, columns), np.float32)
    last = np.arange(columns, dtype=np.float32) % 7
    a[rows - 1].copy_to_device(last)
    b = lay_out(np.random.default_rng(3).integers(-4, 5, (columns, 4)).astype(np.float32), "packed")
    for name in NAMES:
        out = ng.matmul(a, cuda.to_device(b), kernel=name)
        assert np.array_equal(out[rows - 1 :].copy_to_host()[0], last @ b), name


def test_every_assembler_makes_a_working_kernel(tmp_path):
    program = (
        "import numpy as np, numba_gemm as ng\n"
        "a = np.arange(12, dtype=np.float32).reshape(3, 4)\n"
        "b = np.arange(20, dtype=np.float32).reshape(4, 5)\n"
        "assert np.array_equal(ng.matmul(a, b, kernel='v6', device='cuda'), a @ b)\n"
    )
    for assembler in ("nvjitlink", "ptxas", "driver"):
        environment = {**os.environ, "NUMBA_GEMM_ASSEMBLER": assembler, "NUMBA_GEMM_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
