"""cvt between floating formats and integers, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import exact
import harness
import numpy as np
import pytest
from test_float_instructions import BITS, patterns

RNG = np.random.default_rng(13)
INTS = {f"{s}{w}": np.dtype(f"{'i' if s == 's' else 'u'}{w // 8}") for s in "us" for w in (16, 32, 64)}
FLOATS = ["f16", "bf16", "f32", "f64"]


# bf16 converts from and to float32 alone on the common architectures
PAIRS = [(t, s) for t in FLOATS for s in FLOATS if t != s and ("bf16" not in (t, s) or "f32" in (t, s))]


@pytest.mark.parametrize(("target", "source"), PAIRS)
def test_between_floats(target, source):
    narrowing = exact.FORMATS[target][0] < exact.FORMATS[source][0]
    modes = [""] if not narrowing else ["rn", "rz", "rm", "rp"] if target == "f32" else ["rn", "rz"]
    a = patterns(source)
    for mode in modes:
        (found,) = harness.run_op(f"cvt{'.' if mode else ''}{mode}.{target}.{source} %d, %a;", [a], [BITS[target]])
        for pattern, got in zip(a.tolist(), found.tolist(), strict=True):
            value = exact.decode(pattern, source)
            if exact.isnan(value) and (source in ("f64", "bf16") or target == "f64"):
                assert exact.isnan(exact.decode(got, target))  # with a payload of its own
            else:
                assert got == exact.encode(value, target, mode or "rn"), f"{mode} {pattern:#x}"


@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(target, source, mode):
    a = patterns(source)
    scale = (
        RNG.uniform(-70000, 70000, 512)
        if source == "f16"
        else RNG.uniform(-1, 1, 512) * 2.0 ** RNG.integers(0, 70, 512)
    )
    with np.errstate(over="ignore"):
        a[:512] = scale.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[source]).view(a.dtype)
    a[512:640] = (
        (RNG.integers(-999, 999, 128) / 2)
        .astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[source])
        .view(a.dtype)
    )
    (found,) = harness.run_op(f"cvt.{mode}.{target}.{source} %d, %a;", [a], [INTS[target]])
    info = np.iinfo(INTS[target])
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for pattern, got in zip(a.tolist(), found.tolist(), strict=True):
        x = exact.decode(pattern, source)
        if exact.isnan(x):
            expected = 1 << (info.bits - 1) if source == "f64" or info.bits == 64 else 0
            expected = expected - (1 << info.bits) if info.min < 0 and expected else expected
        elif isinstance(x, float) and math.isinf(x):
            expected = info.max if x > 0 else info.min
        else:
            expected = min(max(function(Fraction(x)), info.min), info.max)
        assert got == expected, f"{mode} {x}"


@pytest.mark.parametrize("source", INTS)
@pytest.mark.parametrize(
    ("target", "mode"), [("f16", "rn"), ("f32", "rn"), ("f32", "rz"), ("f32", "rp"), ("f64", "rn"), ("f64", "rm")]
)
def test_integer_to_float(target, source, mode):
    info = np.iinfo(INTS[source])
    raw = RNG.integers(0, 2**63, 1024, dtype=np.uint64) >> RNG.integers(0, 63, 1024).astype(np.uint64)
    a = raw.astype(INTS[source])
    a[:4] = [info.min, info.max, 0, 1]
    (found,) = harness.run_op(f"cvt.{mode}.{target}.{source} %d, %a;", [a], [BITS[target]])
    for value, got in zip(a.tolist(), found.tolist(), strict=True):
        assert got == exact.encode(Fraction(value), target, mode), f"{value}"


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_rounding_to_integral_floats(mode):
    a = RNG.uniform(-9, 9, 512).astype(np.float32)
    a[:4] = [0.5, 1.5, -0.5, -0.0]
    (found,) = harness.run_op(f"cvt.{mode}.f32.f32 %d, %a;", [a], [np.float32])
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    np.testing.assert_array_equal(found.view(np.uint32), function(a).view(np.uint32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packing_two_floats(kind):
    a, b = patterns("f32"), patterns("f32")
    (found,) = harness.run_op(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", [a, b], [np.uint32])
    for x, y, got in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        high, low = (exact.encode(exact.decode(v, "f32"), kind) for v in (x, y))
        assert got == high << 16 | low


def test_saturating_and_flushing_conversions():
    a = patterns("f32")
    (found,) = harness.run_op("cvt.rn.sat.f16.f32 %d, %a;", [a], [np.uint16])
    for pattern, got in zip(a.tolist(), found.tolist(), strict=True):
        x = exact.decode(pattern, "f32")
        expected = 0 if exact.isnan(x) or x <= 0 else exact.encode(min(Fraction(1), x), "f16")
        assert got == expected
    (found,) = harness.run_op("cvt.ftz.f64.f32 %d, %a;", [a], [np.float64])
    with np.errstate(invalid="ignore"):
        values = a.view(np.float32).astype(np.float64)
        values = np.where(np.abs(values) < 2.0**-126, 0 * values, values)
    np.testing.assert_array_equal(found[~np.isnan(values)], values[~np.isnan(values)])


def test_tf32_rounds_to_nearest_ties_away():
    a = patterns("f32")
    a[:8] = [0x3F801000, 0x3F800FFF, 0x3F803000, 0xBF801000, 0x7F7FFFFF, 0x00001000, 0x7F800000, 0x7F800001]
    (found,) = harness.run_op("cvt.rna.tf32.f32 %d, %a;", [a], [np.uint32])
    for pattern, got in zip(a.tolist(), found.tolist(), strict=True):
        x = exact.decode(pattern, "f32")
        if isinstance(x, float):
            assert got == pattern & 0xFFFFE000  # an infinity, or a NaN cut short
        else:
            quantum = Fraction(2) ** max(math.floor(math.log2(abs(x))) - 10 if x else -149, -136)
            scaled = abs(x) / quantum
            rounded = math.floor(scaled + Fraction(1, 2)) * quantum
            expected = exact.encode(rounded if x > 0 else -rounded if rounded else -0.0, "f32") if x else pattern
            assert got == expected, f"{pattern:#x}"


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8(kind):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    every = np.arange(0, 65536, 219).astype(np.uint16)
    (found,) = harness.run_op(f"cvt.rn.f16x2.{kind}x2 %d, %a;", [every], [np.uint32])
    expected = every.view(np.uint8).view(dtype).astype(np.float16)
    halves = found.view(np.float16)
    np.testing.assert_array_equal(halves[~np.isnan(expected)], expected[~np.isnan(expected)])
    assert (found.view(np.uint16)[np.isnan(expected)] == 0x7FFF).all()
    # .satfinite: what doesn't fit becomes the largest value
    x = (RNG.standard_normal(2048) * 2.0 ** RNG.integers(-12, 9, 2048)).astype(np.float32)
    x[:6] = [448, 1e9, -1e9, np.nan, 0.0, -0.0]
    limit = float(ml_dtypes.finfo(dtype).max)
    (found,) = harness.run_op(f"cvt.rn.satfinite.{kind}x2.f32 %d, %a, %b;", [x, x[::-1].copy()], [np.uint16])
    low, high = (np.clip(v, -limit, limit).astype(dtype).view(np.uint8) for v in (x[::-1], x))
    pair = found.view(np.uint8).reshape(-1, 2)
    keep = ~np.isnan(x)
    np.testing.assert_array_equal(pair[keep, 1], high[keep])
    np.testing.assert_array_equal(pair[keep[::-1], 0], low[keep[::-1]])
    assert (pair[~keep, 1] == 0x7F).all()
