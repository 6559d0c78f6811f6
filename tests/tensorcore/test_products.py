"""16-bit products through the public call, on the emulator and on the CPU: every kernel, type, layout and edge."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.cases import Case, accepted_cases, small_cases
from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.choose import choose
from numba_gemm.compile import compile_kernel
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem
from numba_gemm.tensorcore.specs import t4_parameters
from numba_gemm.validate import check, reference

TYPES = [("float16", ""), ("float16", "float32"), ("bfloat16", ""), ("bfloat16", "float32")]
CASES = [*small_cases(32, 16), Case(70, 131, 97), Case(129, 64, 33, layout="sliced"), Case(17, 23, 300)]


@pytest.mark.parametrize(("dtype", "c_dtype"), TYPES)
@pytest.mark.parametrize("kernel", [*kernels_for("float16"), None, "cpu"])
def test_products_are_right(kernel, dtype, c_dtype):
    device = "cpu" if kernel in (None, "cpu") else "emulator"
    for plain in CASES:
        case = replace(plain, dtype=dtype, c_dtype=c_dtype)
        if kernel in LADDER and not accepted_cases(case, LADDER[kernel].refuses):
            assert case.alpha == 0, "w1 and w2 read what they multiply"
            continue
        a, b, c = case.make()
        expected = reference(
            a,
            b,
            c,
            alpha=case.alpha,
            beta=case.beta,
            c_dtype=c.dtype.name,
            tensor_core=None if device == "cpu" else (9, 0),
        )
        if case.beta == 0:
            c[...] = np.nan
        assert ng.gemm(a, b, c, case.alpha, case.beta, kernel=kernel, device=device) is c
        verdict = check(c, expected, exact=case.exact)
        assert verdict, f"{case}: {verdict.message}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_new_array_has_the_inputs_type(dtype):
    a, b, _ = Case(5, 6, 7, dtype=dtype).make()
    for device in ("cpu", "emulator"):
        assert ng.matmul(a, b, device=device).dtype == a.dtype
        assert ng.matmul(a, b, out=np.empty((5, 6), np.float32), device=device).dtype == np.float32


def test_split_k_is_deterministic_and_right():
    """A deep product fills the GPU by splitting K; its partial sums are added in a fixed order."""
    a, b, _ = Case(64, 64, 4096, dtype="float16").make()
    _, config = choose(Problem.packed(64, 64, 4096, dtype="float16"), "t4", arch=(9, 0), sm_count=132)
    assert dict(config)["splits"] > 1
    first, second = (ng.matmul(a, b, kernel="t4", device="emulator") for _ in range(2))
    assert np.array_equal(first.view(np.uint16), second.view(np.uint16))
    per_split = t4_parameters(config).k_per_split(4096, int(dict(config)["splits"]))
    verdict = check(first, reference(a, b, tensor_core=(9, 0), k_per_split=per_split))
    assert verdict, verdict.message


def test_overflow_to_infinity_is_float16s():
    a, b = np.full((4, 8), 200, np.float16), np.full((8, 4), 200, np.float16)
    for device in ("cpu", "emulator"):
        assert np.isinf(ng.matmul(a, b, device=device)).all()
        assert (ng.matmul(a, b, out=np.empty((4, 4), np.float32), device=device) == 320000).all()


def test_kernels_refuse_the_other_precision():
    half, single = np.ones((4, 4), np.float16), np.ones((4, 4), np.float32)
    with pytest.raises(KernelConstraintError, match=r"kernel v7 can't take.*float16.*kernel 'w2' can"):
        ng.matmul(half, half, kernel="v7", device="emulator")
    with pytest.raises(KernelConstraintError, match=r"kernel t3 can't take.*float32.*kernel 'v8' can"):
        ng.matmul(single, single, kernel="t3", device="emulator")


def test_types_are_not_mixed():
    half, brain = np.ones((4, 4), np.float16), np.ones((4, 4), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="a is float16 and b is bfloat16"):
        ng.matmul(half, brain, device="emulator")
    with pytest.raises(TypeError, match="out is bfloat16 and the product is float16; pass out as float16 or float32"):
        ng.matmul(half, half, out=brain, device="emulator")


def test_gpus_without_cp_async_get_the_wmma_kernels():
    problem = Problem.packed(64, 64, 64, dtype="float16")
    chosen = {kernel: choose(problem, kernel, arch=(7, 5))[0].name for kernel in (None, "t1", "t2", "t3", "t2-nvcc")}
    assert chosen == {None: "t3-nvcc", "t1": "t1-nvcc", "t2": "t2-nvcc", "t3": "t3-nvcc", "t2-nvcc": "t2-nvcc"}
    with pytest.raises(KernelConstraintError, match=r"t4 needs compute capability 8\.0 .* use kernel 't3-nvcc'"):
        choose(problem, "t4", arch=(7, 5))
    with pytest.raises(KernelConstraintError, match=r"bfloat16 needs compute capability 8\.0"):
        choose(Problem.packed(64, 64, 64, dtype="bfloat16"), None, arch=(7, 5))


def test_the_stand_ins_run_by_name():
    a, b, _ = Case(40, 33, 50, dtype="float16").make()
    for kernel in ("t1-nvcc", "t2-nvcc", "t3-nvcc"):
        verdict = check(ng.matmul(a, b, kernel=kernel, device="emulator"), reference(a, b, tensor_core=(9, 0)))
        assert verdict, verdict.message
    a, b, _ = Case(40, 33, 50).make()
    assert check(ng.matmul(a, b, kernel="v6-nvcc", device="emulator"), reference(a, b))


@pytest.mark.parametrize("arch", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("name", ["t1", "t2", "t3"])
def test_the_lesson_kernels_compile_for_every_type(name, arch):
    for config in LADDER[name].configs:
        assert not compile_kernel(LADDER[name], config, arch).resources.uses_local_memory
