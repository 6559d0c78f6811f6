"""The tensor-core ladder on a GPU, in both 16-bit types: right on every case, from NumPy and from device memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.benchmark.correctness import References, cases_for, check_case, device_view
from numba_gemm.cases import LAYOUTS, Case, typed
from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.problem import Problem
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu

#: Of w1 and w2, which not every GPU has, ``test_gpu_hopper.py`` knows; None is w2 where there is one.
NAMES = [name for name in kernels_for("float16") if LADDER[name].max_arch is None]
TYPES = ["float16", "bfloat16"]
DEEP = (128, 128, 65536)

REFERENCES = References(seed=0)  # several kernels share a case's


def wrong(outcomes):
    return [f"{outcome.case}, {outcome.place}: {outcome.message}" for outcome in outcomes if outcome.message]


def arch():
    from numba_gemm.device.context import current_context

    return current_context().device.compute_capability


def expected(a, b, c=None, **options):
    return reference(a, b, c, tensor_core=arch(), **options)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_numpy_arrays(name, dtype):
    cases = [case for case in cases_for(name, quick=False) if case.dtype == dtype]
    assert wrong(check_case(name, case, "numpy", REFERENCES) for case in cases) == []


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*NAMES, None])
def test_device_arrays_of_any_layout(name, layout, dtype):
    cases = []
    # Padded, the second ends its rows of B and C within 16 bytes, the third those of A.
    for shape in ((65, 132, 68), (130, 67, 33), (130, 64, 67), (256, 264, 128)):
        for scales in ({}, {"alpha": 0.5, "beta": 2.0}):
            case = Case(*shape, layout=layout, dtype=dtype, c_dtype=dtype, **scales)
            cases += [case, replace(case, c_dtype="float32")]
        cases.append(typed(Case(*shape, layout=layout, inputs="integer"), dtype))
    for case in cases:
        assert wrong([check_case(name, case, "device", REFERENCES)]) == []


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", ["a", "b", "ab"])
@pytest.mark.parametrize("name", ["t3", "t4", None])
def test_column_major_factors_are_multiplied_as_they_lie(name, columns, dtype):
    """By t4 and by the library's choice; the lesson kernels get a repacked copy."""
    for shape in ((136, 144, 72), (130, 67, 33)):
        a, b, c = Case(*shape, dtype=dtype).make()
        a, b = (x.T.copy().T if letter in columns else x for x, letter in ((a, "a"), (b, "b")))
        out, base = device_view(np.full_like(c, np.nan))
        factors = device_view(a)[0], device_view(b)[0]
        assert ng.matmul(*factors, out=out, kernel=name) is out
        copied = ng.plan(*factors, out=out, kernel=name).explain().count("is repacked first")
        assert copied == (len(columns) if name == "t3" else 0)
        verdict = check(base.copy_to_host().view(c.dtype).reshape(c.shape), expected(a, b))
        assert verdict, f"{shape}: {verdict.message}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", ["", "a", "b", "ab"])
def test_large_products_by_t4(columns, dtype):
    """On GPUs that have TMA it copies the tiles, of which the last ones reach past all edges."""
    from numba_gemm.device.context import current_context

    device = current_context().device
    for scales in ({}, {"alpha": 0.5, "beta": 2.0}):
        a, b, c = Case(1528, 1544, 1512, dtype=dtype, **scales).make()
        a, b = (x.T.copy().T if letter in columns else x for x, letter in ((a, "a"), (b, "b")))
        out, base = device_view(c if scales else np.full_like(c, np.nan))
        want = expected(a, b, c, **scales) if scales else expected(a, b)
        ng.gemm(device_view(a)[0], device_view(b)[0], out, **scales, kernel="t4")
        verdict = check(base.copy_to_host().view(c.dtype).reshape(c.shape), want)
        assert verdict, verdict.message
        by_tma = "copies=tma" in ng.plan(device_view(a)[0], device_view(b)[0], out=out, kernel="t4").explain()
        assert by_tma <= (device.compute_capability >= (9, 0))
        assert by_tma or (device.compute_capability, device.sm_count) != ((9, 0), 132)


@pytest.mark.parametrize("c_dtype", ["", "float32"])
@pytest.mark.parametrize("dtype", TYPES)
def test_split_k_gives_the_same_bits_twice(dtype, c_dtype):
    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare

    m, n, k = DEEP
    a, b, c = Case(*DEEP, dtype=dtype, c_dtype=c_dtype).make()
    problem = Problem.packed(m, n, k, dtype=dtype, c_dtype=c_dtype)
    per_split = prepare(problem, None, current_context()).k_per_split
    assert 0 < per_split < k
    results = []
    for _ in range(2):
        out, base = device_view(np.full_like(c, np.nan))
        ng.matmul(device_view(a)[0], device_view(b)[0], out=out)
        results.append(base.copy_to_host())
    assert np.array_equal(results[0], results[1])
    verdict = check(results[0].view(c.dtype).reshape(m, n), expected(a, b, c_dtype=c.dtype.name, k_per_split=per_split))
    assert verdict, verdict.message


@pytest.mark.parametrize("name", [*NAMES, None])
def test_the_same_call_gives_the_same_bits(name):
    a, b, _ = Case(300, 200, 1000, dtype="float16").make()
    first, second = (ng.matmul(a, b, kernel=name, device="cuda") for _ in range(2))
    assert np.array_equal(first.view(np.uint16), second.view(np.uint16))


def test_all_rungs_agree_bit_for_bit():
    """Each output is one chain of tensor-core sums in order of k, 16 at a time, in every rung."""
    for dtype in TYPES:
        a, b, _ = Case(150, 136, 328, dtype=dtype).make()
        outputs = [np.full((150, 136), np.nan, np.float32) for _ in NAMES]
        for name, out in zip(NAMES, outputs, strict=True):
            ng.matmul(a, b, out=out, kernel=name, device="cuda")
        for out in outputs[1:]:
            assert np.array_equal(out.view(np.uint32), outputs[0].view(np.uint32))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_a_call_repeated_at_another_alignment_takes_another_form(offset, dtype):
    from numba import cuda

    kind = numpy_dtype(dtype)
    a, b, _ = Case(64, 64, 64, dtype=dtype).make()
    right = expected(a, b)
    memory = cuda.to_device(np.zeros(64 * 64 + 8, np.int16)).view(kind)
    b_device = device_view(b)[0]
    for start in (0, offset, 0, offset):
        a_device = memory[start : start + 64 * 64].reshape(64, 64)
        a_device.view(np.int16).copy_to_device(a.view(np.int16))
        out, base = device_view(np.full((64, 64), np.nan, kind))
        ng.matmul(a_device, b_device, out=out)
        assert check(base.copy_to_host().view(kind).reshape(64, 64), right)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_call_repeated_with_other_values_multiplies_those(dtype):
    kind = numpy_dtype(dtype)
    for seed in range(4):
        a, b, _ = Case(96, 80, 64, dtype=dtype).make(seed)
        out, base = device_view(np.full((96, 80), np.nan, kind))
        for _ in range(2):
            ng.matmul(device_view(a)[0], device_view(b)[0], out=out)
        assert check(base.copy_to_host().view(kind).reshape(96, 80), expected(a, b))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_new_device_array_has_the_inputs_type(dtype):
    a, b, _ = Case(70, 50, 30, dtype=dtype).make()
    result = ng.matmul(device_view(a)[0], device_view(b)[0])
    assert type(result).__module__.startswith("numba.")
    assert (result.shape, np.dtype(result.dtype)) == ((70, 50), numpy_dtype(dtype))
    assert check(result.view(np.int16).copy_to_host().view(numpy_dtype(dtype)), expected(a, b))


def test_bfloat16_arrays_reach_the_gpu_as_integers():
    """Numba's copy to the GPU asks for NumPy's buffer protocol, which has no bfloat16; a view of int16 has one."""
    from numba import cuda

    a, b, _ = Case(40, 48, 32, dtype="bfloat16").make()
    device_a, device_b = (cuda.to_device(matrix.view(np.int16)).view(matrix.dtype) for matrix in (a, b))
    assert check(ng.matmul(device_a, device_b).copy_to_host(), expected(a, b))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_zero_sized_dimensions(shape):
    m, n, k = shape
    for dtype in TYPES:
        a, b = np.ones((m, k), numpy_dtype(dtype)), np.ones((k, n), numpy_dtype(dtype))
        for name in [*NAMES, None]:
            result = ng.matmul(a, b, kernel=name, device="cuda")
            assert result.shape == (m, n)
            assert not result.astype(np.float32).any()


def test_beta_zero_never_reads_c():
    a, b, _ = Case(40, 48, 32, dtype="bfloat16").make()
    for poison in (np.nan, np.inf):
        for name in NAMES:
            c = np.full((40, 48), poison, ml_dtypes.bfloat16)
            ng.gemm(a, b, c, 2.0, 0.0, kernel=name, device="cuda")
            assert check(c, expected(a, b, alpha=2.0))


def test_alpha_zero_reads_no_factor():
    a, b = np.full((40, 16), np.nan, np.float16), np.full((16, 48), np.nan, np.float16)
    for name in NAMES:
        c = np.full((40, 48), 3, np.float16)
        ng.gemm(a, b, c, 0.0, 0.5, kernel=name, device="cuda")
        assert (c == 1.5).all(), name


def test_a_repeated_call_still_refuses_shared_memory():
    a, b, c = Case(64, 64, 64, dtype="float16").make()
    da, db, out = (device_view(matrix)[0] for matrix in (a, b, c))
    for _ in range(2):
        ng.matmul(da, db, out=out)
    with pytest.raises(ValueError, match="out shares memory with a"):
        ng.matmul(da, db, out=da)


def test_threads_multiply_at_once():
    cases = [Case(100 + 10 * i, 96, 2048, dtype=TYPES[i % 2]) for i in range(8)]
    right = [expected(*case.make()[:2]) for case in cases]  # a bound that holds for split-K as well
    verdicts = [None] * len(cases)

    def work(i):
        a, b, _ = cases[i].make()
        verdicts[i] = all(check(ng.matmul(a, b, device="cuda"), right[i]) for _ in range(10))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(verdicts)


def test_indices_past_two_to_the_31():
    """A matrix of 2.2e9 elements: the last row lies past what 32 bits can index."""
    from numba import cuda

    rows, columns = 2_200_000, 1000
    a = cuda.device_array((rows, columns), np.float16)
    last = (np.arange(columns) % 7).astype(np.float16)
    a[rows - 1].copy_to_device(last)
    b = np.random.default_rng(3).integers(-4, 5, (columns, 8)).astype(np.float16)
    out = cuda.device_array((rows, 8), np.float32)
    for name in NAMES:
        ng.matmul(a, cuda.to_device(b), out=out, kernel=name)
        found = out[rows - 1 :].copy_to_host()[0]
        assert np.array_equal(found, last.astype(np.float32) @ b.astype(np.float32)), name
