"""``tensorcore.mma`` beyond the fused sums: f64, integers, batches, and what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from numba_gemm.emulator.tensorcore import Rule, mma, rule

STORAGE = {"f16": "u2", "bf16": "u2", "f32": "u4", "e4m3": "u1", "s8": "i1", "f64": "u8"}


def f16(values):
    return np.asarray(values, np.float16).view(np.uint16)


def f32(values):
    return np.asarray(values, np.float32).view(np.uint32)


def half(a, b, c, arch="sm_90"):
    """f16 multiplicands, FP32 accumulator."""
    return mma(a, b, c, a_type="f16", b_type="f16", acc_type="f32", d_type="f32", arch=arch)


def double(a, b, c):
    raw = (x.view(np.uint64) for x in (a, b, c))
    d = mma(*raw, a_type="f64", b_type="f64", acc_type="f64", d_type="f64", arch="sm_80")
    return d.view(np.float64)


# --- f64


def fma(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@pytest.mark.parametrize("category", ["normal", "cancelling", "ties", "tiny", "huge", "zeros"])
def test_f64_is_a_chain_of_fmas(category):
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(s) for s in ((20, 4, 4), (20, 4, 4), (20, 4, 4)))
    if category == "cancelling":
        c = -(a[..., :1] * b[..., :1, :]) * (1 + rng.integers(-2, 3, c.shape) * 2.0**-52)
    elif category == "ties":
        # products halfway between two doubles, and a C far below that says which way to round
        a, b = 1 + rng.integers(0, 64, a.shape) * 2.0**-26, 1 + rng.integers(0, 64, b.shape) * 2.0**-27
        a[..., 1:] = 0
        c = rng.choice([-(2.0**-120), 0.0, 2.0**-120], c.shape)
    elif category == "tiny":
        a, b, c = a * 2.0**-530, b * 2.0 ** rng.integers(-545, -490, b.shape), c * 2.0**-1060
    elif category == "huge":
        a, b, c = a * 2.0**520, b * 2.0 ** rng.integers(490, 505, b.shape), c * 2.0**1022
    elif category == "zeros":
        a, c = a * rng.integers(0, 2, a.shape), c * rng.integers(0, 2, c.shape) * -1
    got = double(a, b, c)
    chained = 0
    for t, i, j in np.ndindex(got.shape):
        want = float(c[t, i, j])
        for k in range(4):
            want = fma(float(a[t, i, k]), float(b[t, k, j]), want) if math.isfinite(want) else want
        assert got[t, i, j].tobytes() == np.float64(want).tobytes()
        with np.errstate(all="ignore"):
            chained += want != float(c[t, i, j] + np.sum(a[t, i] * b[t, :, j]))
    assert category in ("zeros", "huge") or chained > 0  # plain arithmetic would not have passed


def test_f64_specials():
    a, b = np.zeros((1, 4)), np.zeros((4, 1))
    a[0, 0], b[0, 0] = 1e200, 1e200
    for c, want in ((-math.inf, -math.inf), (0.0, math.inf), (math.nan, math.nan)):
        np.testing.assert_equal(double(a, b, np.array([[c]]))[0, 0], want)


# --- integers


@pytest.mark.parametrize(("a_type", "b_type"), [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")])
def test_integers_are_exact_and_wrap_or_saturate(a_type, b_type):
    rng = np.random.default_rng(3)
    low = {"s8": -128, "u8": 0}
    dtype = {"s8": np.int8, "u8": np.uint8}
    a = rng.integers(low[a_type], low[a_type] + 256, (5, 16, 32)).astype(dtype[a_type])
    b = rng.integers(low[b_type], low[b_type] + 256, (5, 32, 8)).astype(dtype[b_type])
    c = rng.integers(-(2**31), 2**31, (5, 16, 8)).astype(np.int32)
    c[0], c[1] = 2**31 - 1, -(2**31)
    exact = a.astype(object) @ b.astype(object) + c.astype(object)
    types = {"a_type": a_type, "b_type": b_type, "acc_type": "s32", "d_type": "s32", "arch": "sm_80"}
    wrapped = ((exact + 2**31) % 2**32 - 2**31).astype(np.int32)
    clamped = np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32)
    assert (wrapped != clamped).any()
    np.testing.assert_array_equal(mma(a, b, c, **types), wrapped)
    np.testing.assert_array_equal(mma(a, b, c, **types, saturate=True), clamped)


# --- the call itself


def test_a_batch_is_its_tiles_one_by_one():
    rng = np.random.default_rng(9)
    a = rng.integers(0, 0x7C00, (300, 16, 16), np.uint16)
    b, c = f16(rng.standard_normal((1, 16, 8))), f32(rng.standard_normal((300, 16, 8)))
    d = half(a, b, c)
    assert d.dtype == np.uint32
    for t in (0, 63, 64, 299):
        np.testing.assert_array_equal(d[t], half(a[t], b[0], c[t]))
    np.testing.assert_array_equal(
        half(a.reshape(3, 100, 16, 16), b, c.reshape(3, 100, 16, 8)),
        d.reshape(3, 100, 16, 8),
    )
    assert half(a[:0], b, c[:0]).shape == (0, 16, 8)


def test_inputs_are_left_alone():
    a, b, c = (
        np.full((16, 16), 0x3C00, np.uint16),
        np.full((16, 8), 0x3C00, np.uint16),
        np.zeros((16, 8), np.uint32),
    )
    copies = a.copy(), b.copy(), c.copy()
    half(a, b, c, "sm_80")
    for array, copy in zip((a, b, c), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    ("types", "arch"),
    [
        (("f16", "bf16", "f32", "f32"), "sm_90"),
        (("bf16", "bf16", "f16", "f16"), "sm_90"),
        (("f16", "f16", "f32", "f16"), "sm_90"),
        (("s8", "s8", "f32", "f32"), "sm_90"),
        (("bf16", "bf16", "f32", "f32"), "sm_75"),
        (("e4m3", "e4m3", "f32", "f32"), "sm_86"),
        (("f64", "f64", "f64", "f64"), "sm_75"),
        (("f16", "f16", "f32", "f32"), "sm_61"),
        (("f16", "f16", "f32", "f32"), "gfx90a"),
    ],
)
def test_what_no_instruction_does_is_refused(types, arch):
    names = dict(zip(("a_type", "b_type", "acc_type", "d_type"), types, strict=True))
    a, b, c = (np.zeros((16, 16), STORAGE[t]) for t in types[:3])
    with pytest.raises(ValueError, match=r"sm_|architecture"):
        mma(a, b, c, arch=arch, **names)


def test_wrong_shapes_and_widths_are_refused():
    short, word = np.zeros((16, 16), np.uint16), np.zeros((16, 8), np.uint32)
    with pytest.raises(ValueError, match="shapes"):
        half(short, short[:8], word)
    with pytest.raises(ValueError, match="expected uint16"):
        half(short.astype(np.uint32), short[:, :8], word)
    with pytest.raises(ValueError, match="multiple"):
        half(short[:, :12], short[:12, :8], word, "sm_80")


def test_rules_are_the_tables():
    assert rule("f16", "f32", 16, "sm_80") == Rule(8, 24, -132, 23)
    assert rule("f16", "f16", 16, "sm_90a") == Rule(16, 25, -21, 10)
    assert rule("tf32", "f32", 8, "sm_120") == Rule(8, 25, -133, 23)
    assert rule("e4m3", "f32", 32, "sm_89") == Rule(16, 13, -132, 13)
    assert rule("e5m2", "f32", 32, "sm_100") == Rule(16, 25, -133, 23, through_f16=True)
