"""The error bound of a tensor-core product: never exceeded, nearly reached, and refusing what it doesn't cover."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_gemm.emulator.tensorcore import mma, rule
from numba_gemm.tensorcore.bound import tensorcore_bound

KIND = {"float16": "f16", "bfloat16": "bf16"}
TYPE = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def chain(a, b, dtype, arch):
    """A @ B by one MMA after the other along k, in float32."""
    (m, k), n = a.shape, b.shape[1]
    total = np.zeros((m, n), np.uint32)
    for start in range(0, k, 16):
        parts = a[:, start : start + 16].view(np.uint16), b[start : start + 16].view(np.uint16)
        kind = KIND[dtype]
        total = mma(*parts, total, a_type=kind, b_type=kind, acc_type="f32", d_type="f32", arch=arch)
    return total.view(np.float32).astype(np.float64)


def exact(a, b):
    """A @ B in extended precision: 64 bits are enough for these sums to be far better than the bound."""
    return np.asarray(a.astype(np.longdouble) @ b.astype(np.longdouble))


def limits(a, b, dtype, arch, output="float32", **more):
    how = rule(KIND[dtype], "f32", 16, arch)
    sums = {"k_per_sum": how.group, "fraction_bits": how.fraction_bits}
    return tensorcore_bound(a, b, output_dtype=output, **sums, **more)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("inputs", ["normal", "positive", "wide", "cancelling", "subnormal"])
def test_no_error_exceeds_it(arch, dtype, inputs):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((32, 128)), rng.standard_normal((128, 24))
    if inputs == "positive":
        a, b = np.abs(a), np.abs(b)
    elif inputs == "wide":
        a, b = a * 2.0 ** rng.integers(-9, 4, a.shape), b * 2.0 ** rng.integers(-9, 4, b.shape)
    elif inputs == "cancelling":
        a[:, 64:], b[64:] = a[:, :64], -b[:64]
    elif inputs == "subnormal":
        least = 2.0**-24 if dtype == "float16" else 2.0**-133
        a = rng.integers(-9, 10, a.shape) * least
        b = b if dtype == "float16" else b * 2.0 ** rng.integers(-20, 3, b.shape)
    a, b = a.astype(TYPE[dtype]), b.astype(TYPE[dtype])
    error = np.abs(chain(a, b, dtype, arch) - exact(a, b))
    limit = limits(a, b, dtype, arch)
    assert (error <= limit).all()
    if inputs == "positive":
        assert error.max() > 0  # something was cut


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_it_is_nearly_reached(arch):
    """After a 1, products just below one unit of the aligned sum vanish: k units a step, of the k + 4 allowed."""
    how = rule("f16", "f32", 16, arch)
    unit = 2.0**-how.fraction_bits
    a, b = np.zeros((1, 4096), np.float16), np.zeros((4096, 1), np.float16)
    a[0, 0] = b[0, 0] = 1
    a[0, 16:] = 2.0**-12
    b[16:, 0] = unit * 2.0**12 * (1 - 2.0**-11)
    assert chain(a, b, "float16", arch)[0, 0] == 1
    ratio = float((exact(a, b) - 1)[0, 0] / limits(a, b, "float16", arch)[0, 0])
    assert 0.7 < ratio <= 1


def test_the_output_type_adds_its_rounding():
    a = np.ones((1, 16), np.float16)
    base = limits(a, a.T, "float16", "sm_90")[0, 0]
    assert base == pytest.approx(16 * 5 * 2.0**-23, rel=1e-6)
    assert limits(a, a.T, "float16", "sm_90", "float16")[0, 0] == pytest.approx(16 * 2.0**-11, rel=1e-2)
    assert limits(a, a.T, "float16", "sm_90", "bfloat16")[0, 0] == pytest.approx(16 * 2.0**-8, rel=1e-2)


def test_alpha_and_beta_add_theirs():
    a, c = np.ones((1, 16), np.float16), np.full((1, 1), 1000.0)
    plain = limits(a, a.T, "float16", "sm_90")[0, 0]
    assert limits(a, a.T, "float16", "sm_90", alpha=-2.0)[0, 0] == pytest.approx(2 * plain + 32 * 2.0**-24, rel=1e-6)
    added = limits(a, a.T, "float16", "sm_90", c=c, beta=3.0)[0, 0]
    assert added == pytest.approx(plain + 3016 * 2.0**-24, rel=1e-6)
    with pytest.raises(ValueError, match="c is needed"):
        limits(a, a.T, "float16", "sm_90", beta=1.0)


def test_where_the_result_may_overflow_infinity_is_right():
    a = np.full((1, 16), 100.0, np.float16)
    b = np.full((16, 2), 100.0, np.float16)
    b[:, 1] = 1
    assert limits(a, b, "float16", "sm_90", "float16").tolist()[0][0] == np.inf
    assert np.isfinite(limits(a, b, "float16", "sm_90", "float16")[0, 1])
    assert np.isfinite(limits(a, b, "float16", "sm_90")).all()
    huge = np.full((1, 16), 2.0**64, TYPE["bfloat16"])
    assert np.isinf(limits(huge, huge.T, "bfloat16", "sm_90")).all()


def test_a_zero_and_a_longer_k_of_zeros_cost_nothing():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((3, 32)).astype(np.float16)
    b = rng.standard_normal((32, 5)).astype(np.float16)
    a[1] = 0
    limit = limits(a, b, "float16", "sm_90")
    assert (limit[1] < 2.0**-140).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"fraction_bits": 22}, "fraction_bits"), ({"output_dtype": "float64"}, "output_dtype")],
)
def test_what_it_does_not_cover(changes, message):
    a = np.ones((1, 16), np.float16)
    usual = {"k_per_sum": 16, "fraction_bits": 25, "output_dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        tensorcore_bound(a, a.T, **{**usual, **changes})
    with pytest.raises(ValueError, match="float16 or bfloat16 in both"):
        tensorcore_bound(a.astype(np.float32), a.T, **usual)
