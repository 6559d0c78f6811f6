"""Floating-point instructions against exact rational arithmetic, bit for bit."""

from __future__ import annotations

import math

import exact
import harness
import numpy as np
import pytest

RNG = np.random.default_rng(11)
BITS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
COUNT = 1024


def patterns(name: str, count: int = COUNT) -> np.ndarray:
    """Random patterns: any bits, magnitudes near one, subnormals, and the special values."""
    dtype = BITS[name]
    precision, _, _, bits = exact.FORMATS[name]
    anything = RNG.integers(0, 2**bits, count, dtype=np.uint64).astype(dtype)
    one = exact.encode(exact.Fraction(1), name)
    near = (one + RNG.integers(-(4 << (precision - 1)), 4 << (precision - 1), count)).astype(dtype)
    tiny = RNG.integers(0, 2 << (precision - 1), count, dtype=np.uint64).astype(dtype)
    sign = (RNG.integers(0, 2, count, dtype=np.uint64) << np.uint64(bits - 1)).astype(dtype)
    inf = exact.encode(math.inf, name)
    special = [0, 1, inf, inf + 1, inf - 1, one, 1 << (bits - 1), 1 << (bits - 1) | inf, 1 << (precision - 1)]
    kind = RNG.integers(0, 10, count)
    chosen = np.where(kind < 4, anything, np.where(kind < 8, near | sign, np.where(kind < 9, tiny | sign, 0)))
    where = np.flatnonzero(kind == 9)
    chosen[where] = RNG.choice(np.array(special, np.uint64), where.size)
    return chosen.astype(dtype)


def canonical(found: int, name: str) -> int:
    """float64 results keep NaN payloads, which no reference here predicts."""
    if name == "f64" and math.isnan(exact.decode(found, name)):
        return (1 << 63) - 1
    return found


def compare(code, name, inputs, reference):
    (found,) = harness.run_op(code, inputs, [BITS[name]])
    values = [[exact.decode(int(p), name) for p in x] for x in inputs]
    for i in range(inputs[0].size):
        args = [v[i] for v in values]
        expected = reference(*args)
        got = canonical(int(found[i]), name)
        assert got == expected, f"{code} {[hex(int(x[i])) for x in inputs]}: {got:#x}, expected {expected:#x}"


MODES = {"f32": ["rn", "rz", "rm", "rp"], "f64": ["rn", "rz", "rm", "rp"], "f16": ["rn"], "bf16": ["rn"]}
CASES = [(name, mode) for name, modes in MODES.items() for mode in modes]


def chained(name):
    """Three operands whose sum cancels in part: the third is near minus the product of the others."""
    a, b = patterns(name), patterns(name)
    c = patterns(name)
    for i in range(0, a.size, 3):
        x, y = exact.decode(int(a[i]), name), exact.decode(int(b[i]), name)
        if isinstance(x, exact.Fraction) and isinstance(y, exact.Fraction):
            near = exact.encode(-(x * y), name) + int(RNG.integers(-2, 3))
            c[i] = max(near, 0) & ((1 << exact.FORMATS[name][3]) - 1)
    return a, b, c


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_fma(name, mode):
    compare(
        f"fma.{mode}.{name} %d, %a, %b, %c;", name, list(chained(name)), lambda a, b, c: exact.fma(a, b, c, name, mode)
    )


def test_fma_ties_of_the_wider_sum():
    """Sums that land half-way between two float32 after rounding to float64, but not before."""
    count = 2048
    a = (RNG.integers(1 << 23, 1 << 24, count) | 1).astype(np.float64)
    b = (RNG.integers(1 << 23, 1 << 24, count) | 1).astype(np.float64)
    c = np.ldexp(RNG.integers(1 << 23, 1 << 24, count).astype(np.float64), RNG.integers(20, 50, count))
    inputs = [x.astype(np.float32).view(np.uint32) for x in (a * 2.0**-30, -b * 2.0**-25, c)]
    compare("fma.rn.f32 %d, %a, %b, %c;", "f32", inputs, lambda a, b, c: exact.fma(a, b, c, "f32"))
    # c + half an ulp of c, plus or minus a little that float64 drops
    big = np.float32(2.0**60) * (1 + RNG.integers(0, 1 << 20, 64) * np.float32(2.0**-20)).astype(np.float32)
    small = np.array([2.0**36 * (1 + s * 2.0**-23) for s in RNG.integers(-3, 4, 64)], np.float32)
    inputs = [x.view(np.uint32) for x in (small, np.full(64, np.float32(1 + 2.0**-23)), big)]
    compare("fma.rn.f32 %d, %a, %b, %c;", "f32", inputs, lambda a, b, c: exact.fma(a, b, c, "f32"))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_add_sub_mul(name, mode):
    a, b = patterns(name), patterns(name)
    b[::3] = (a[::3] ^ BITS[name](1 << (exact.FORMATS[name][3] - 1))) + RNG.integers(0, 2, b[::3].size).astype(
        BITS[name]
    )
    one, zero = exact.Fraction(1), exact.Fraction(0)
    compare(f"add.{mode}.{name} %d, %a, %b;", name, [a, b], lambda x, y: exact.fma(x, one, y, name, mode))
    compare(f"sub.{mode}.{name} %d, %a, %b;", name, [a, b], lambda x, y: exact.fma(x, one, _negated(y), name, mode))

    def multiply(x, y):
        # a zero of the product's own sign leaves the product alone
        positive = exact._positive(x) == exact._positive(y)
        return exact.fma(x, y, zero if positive else -0.0, name, mode)

    compare(f"mul.{mode}.{name} %d, %a, %b;", name, [a, b], multiply)


def _negated(y):
    if y == 0:
        return -0.0 if exact._positive(y) else exact.Fraction(0)
    return -y


@pytest.mark.parametrize(("name", "mode"), [c for c in CASES if c[0] in ("f32", "f64")])
def test_division(name, mode):
    a, b = patterns(name), patterns(name)
    if name == "f64":  # directed quotients are exact away from the ends of the range
        a, b = ((x & np.uint64(0x8FFFFFFFFFFFFFFF)) | np.uint64(0x3000000000000000) for x in (a, b))
    compare(f"div.{mode}.{name} %d, %a, %b;", name, [a, b], lambda x, y: exact.divide(x, y, name, mode))


@pytest.mark.parametrize("mode", MODES["f32"])
def test_roots_and_reciprocals(mode):
    a = patterns("f32")
    compare(f"rcp.{mode}.f32 %d, %a;", "f32", [a], lambda x: exact.divide(exact.Fraction(1), x, "f32", mode))

    def root(x):
        if isinstance(x, float) or x <= 0:
            return exact.encode(
                math.nan if (x != 0 and not x > 0) or exact.isnan(x) else x if x != math.inf else math.inf, "f32"
            )
        # 60 bits more than the format has
        scaled = x * 4**200
        whole = math.isqrt(int(scaled))
        value = exact.Fraction(whole, 2**200)
        if value * value != x:
            value += exact.Fraction(1, 2**202)
        return exact.encode(value, "f32", mode)

    compare(f"sqrt.{mode}.f32 %d, %a;", "f32", [a], root)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["fma", "add", "sub", "mul"])
def test_packed_halves(kind, op):
    """Packed instructions do to each half what the scalar ones do."""
    wide = [patterns(kind, 512).view(np.uint32) for _ in range(3)]
    narrow = [w.view(np.uint16) for w in wide]
    if op == "fma":
        (packed,) = harness.run_op(f"fma.rn.{kind}x2 %d, %a, %b, %c;", wide, [np.uint32])
        (single,) = harness.run_op(f"fma.rn.{kind} %d, %a, %b, %c;", narrow, [np.uint16])
    else:
        (packed,) = harness.run_op(f"{op}.{kind}x2 %d, %a, %b;", wide[:2], [np.uint32])
        (single,) = harness.run_op(f"{op}.{kind} %d, %a, %b;", narrow[:2], [np.uint16])
    np.testing.assert_array_equal(packed.view(np.uint16), single)


def flushed(x, name="f32"):
    smallest = exact.Fraction(2) ** {"f32": -126, "f16": -14}[name]
    if isinstance(x, exact.Fraction) and x != 0 and abs(x) < smallest:
        return exact.Fraction(0) if x > 0 else -0.0
    return x


@pytest.mark.parametrize("name", ["f32", "f16"])
def test_flush_to_zero(name):
    a, b, c = chained(name)

    def reference(x, y, z):
        pattern = exact.fma(*(flushed(v, name) for v in (x, y, z)), name)
        return exact.encode(flushed(exact.decode(pattern, name), name), name)

    compare(f"fma.rn.ftz.{name} %d, %a, %b, %c;", name, [a, b, c], reference)


def test_saturation():
    def reference(x, y, z):
        value = exact.decode(exact.fma(x, y, z, "f32"), "f32")
        if exact.isnan(value) or value <= 0:
            return 0
        return exact.encode(min(value, exact.Fraction(1)), "f32")

    compare("fma.rn.sat.f32 %d, %a, %b, %c;", "f32", list(chained("f32")), reference)


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_minimum_and_maximum(name):
    a, b = patterns(name), patterns(name)
    b[::7] = a[::7] ^ BITS[name](1 << (exact.FORMATS[name][3] - 1))

    def key(x):
        return (x, exact._positive(x))

    def smallest(x, y):
        if exact.isnan(x) or exact.isnan(y):
            return exact.encode(y if exact.isnan(x) else x, name)
        return exact.encode(min(x, y, key=key), name)

    def largest(x, y):
        if exact.isnan(x) or exact.isnan(y):
            return exact.encode(y if exact.isnan(x) else x, name)
        return exact.encode(max(x, y, key=key), name)

    compare(f"min.{name} %d, %a, %b;", name, [a, b], smallest)
    compare(f"max.{name} %d, %a, %b;", name, [a, b], largest)
    nan = exact.encode(math.nan, name)
    if name != "f64":
        compare(
            f"max.NaN.{name} %d, %a, %b;",
            name,
            [a, b],
            lambda x, y: nan if exact.isnan(x) or exact.isnan(y) else largest(x, y),
        )


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_comparisons(name):
    a, b = patterns(name), patterns(name)
    b[::4] = a[::4]
    values = [[exact.decode(int(p), name) for p in x] for x in (a, b)]
    ordered = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for op, symbol in ordered.items():
        for unordered in (False, True):
            (found,) = harness.run_op(f"setp.{op}{'u' * unordered}.{name} %d, %a, %b;", [a, b], [np.bool_])
            for x, y, got in zip(*values, found, strict=True):
                nan = exact.isnan(x) or exact.isnan(y)
                expected = unordered if nan else {
                    "==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y
                }[symbol]  # fmt: skip
                assert got == expected, f"{op} {x} {y}"
    (found,) = harness.run_op(f"setp.nan.{name} %d, %a, %b;", [a, b], [np.bool_])
    np.testing.assert_array_equal(found, [exact.isnan(x) or exact.isnan(y) for x, y in zip(*values, strict=True)])


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_sign_operations(name):
    a = patterns(name)
    bit = BITS[name](1 << (exact.FORMATS[name][3] - 1))
    number = np.array([not exact.isnan(exact.decode(int(p), name)) for p in a])
    (found,) = harness.run_op(f"abs.{name} %d, %a;", [a], [BITS[name]])
    np.testing.assert_array_equal(found[number], (a & ~bit)[number])
    if name != "f64":
        assert (found[~number] == exact.encode(math.nan, name)).all()
    (found,) = harness.run_op(f"neg.{name} %d, %a;", [a], [BITS[name]])
    np.testing.assert_array_equal(found[number], (a ^ bit)[number])


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_signs_and_classes(name):
    a, b = patterns(name), patterns(name)
    bit = BITS[name](1 << (exact.FORMATS[name][3] - 1))
    (found,) = harness.run_op(f"copysign.{name} %d, %a, %b;", [a, b], [BITS[name]])
    np.testing.assert_array_equal(found, (a & bit) | (b & ~bit))
    x = a.view(np.float32 if name == "f32" else np.float64)
    tests = {"finite": np.isfinite(x), "infinite": np.isinf(x), "number": ~np.isnan(x), "notanumber": np.isnan(x),
             "subnormal": (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)}  # fmt: skip
    for test, expected in tests.items():
        (found,) = harness.run_op(f"testp.{test}.{name} %d, %a;", [a], [np.bool_])
        np.testing.assert_array_equal(found, expected)


APPROXIMATE = {
    # bounds of the ISA's tables, on the intervals that they state
    "rcp.approx.f32": (lambda x: 1 / x, 0.1, 100, 2**-22, 0),
    "rsqrt.approx.f32": (lambda x: x**-0.5, 0.1, 100, 2**-22, 0),
    "sqrt.approx.f32": (np.sqrt, 0.1, 100, 2**-22, 0),
    "ex2.approx.f32": (np.exp2, -20, 20, 2**-22, 0),
    "lg2.approx.f32": (np.log2, 0.01, 100, 2**-21, 2**-22),
    "sin.approx.f32": (np.sin, -3, 3, 0, 2**-20),
    "cos.approx.f32": (np.cos, -3, 3, 0, 2**-20),
    "tanh.approx.f32": (np.tanh, -4, 4, 2**-10, 0),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions_keep_their_bounds(name):
    function, low, high, relative, absolute = APPROXIMATE[name]
    x = RNG.uniform(low, high, 512).astype(np.float32)
    (found,) = harness.run_op(f"{name} %d, %a;", [x], [np.float32])
    expected = function(x.astype(np.float64))
    assert (np.abs(found - expected) <= relative * np.abs(expected) + absolute).all()


def test_special_values_of_approximate_functions():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0], np.float32)
    expected = {
        "rcp.approx.f32": [np.inf, -np.inf, 0.0, -0.0, np.nan, -1.0],
        "rsqrt.approx.f32": [np.inf, -np.inf, 0.0, np.nan, np.nan, np.nan],
        "ex2.approx.f32": [1.0, 1.0, np.inf, 0.0, np.nan, 0.5],
        "lg2.approx.f32": [-np.inf, -np.inf, np.inf, np.nan, np.nan, np.nan],
    }
    for name, values in expected.items():
        (found,) = harness.run_op(f"{name} %d, %a;", [x], [np.float32])
        np.testing.assert_array_equal(found, np.array(values, np.float32))
