"""Tensor-core arithmetic against a scalar reference in exact fractions, and facts from the literature.

The reference shares nothing with the implementation: it reads values through ml_dtypes, works in
``Fraction``, and has its own table of rules, from Xie et al., arXiv 2511.10909, and Khattak and Mikaitis,
arXiv 2512.07004.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_gemm.emulator.tensorcore import Rule, mma

REAL = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f64": np.float64,
}
LEAST_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "f32": -126, "e4m3": -6, "e5m2": -14}
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "e4m3": 1, "e5m2": 1, "f64": 8, "s32": 4}

# architecture: (products in a sum of f16 or bf16, of tf32, bits below the largest exponent, depth of the
# floor)
RULES = {
    "sm_70": (4, None, 23, 5),
    "sm_75": (8, None, 24, 6),
    "sm_80": (8, 4, 24, 6),
    "sm_86": (8, 4, 24, 6),
    "sm_89": (8, 4, 24, 6),
    "sm_90": (16, 8, 25, 7),
    "sm_90a": (16, 8, 25, 7),
    "sm_100": (16, 8, 25, 7),
    "sm_120": (16, 8, 25, 7),
}
# (type, K of the instruction, result) and the architectures that have it
INSTRUCTIONS = [
    ("f16", 4, "f32", ("sm_70", "sm_75")),
    ("f16", 8, "f32", ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120")),
    ("f16", 8, "f16", ("sm_75", "sm_80", "sm_90a")),
    ("f16", 16, "f32", ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")),
    ("f16", 16, "f16", ("sm_80", "sm_89", "sm_90", "sm_120")),
    ("bf16", 8, "f32", ("sm_80", "sm_90")),
    ("bf16", 16, "f32", ("sm_80", "sm_89", "sm_90", "sm_100")),
    ("tf32", 4, "f32", ("sm_80", "sm_90")),
    ("tf32", 8, "f32", ("sm_80", "sm_89", "sm_90", "sm_120")),
    ("e4m3", 16, "f32", ("sm_89", "sm_90", "sm_120")),
    ("e4m3", 32, "f32", ("sm_89", "sm_90", "sm_100", "sm_120")),
    ("e5m2", 32, "f32", ("sm_89", "sm_90", "sm_120")),
    ("e5m2", 32, "f16", ("sm_89", "sm_90", "sm_120")),
]
EACH = [(a, k, d, arch) for a, k, d, archs in INSTRUCTIONS for arch in archs]


def bits(values, kind):
    """Real numbers rounded to ``kind``, as raw bits."""
    return np.asarray(values, np.float64).astype(REAL[kind]).view(f"u{WIDTH[kind]}")


def real(raw, kind):
    raw = np.asarray(raw, f"u{WIDTH[kind]}")
    if kind == "tf32":
        raw = raw & ~np.uint32(0x1FFF)
    return raw.view(REAL[kind]).astype(np.float64)


def exponent_of(value, kind):
    """Unbiased exponent field: a subnormal's is the least normal one's."""
    return max(math.frexp(value)[1] - 1, LEAST_EXPONENT[kind])


def encode(value, kind, fraction_bits=None):
    """A Fraction rounded to ``kind``, toward zero for f32 and to nearest even for f16; raw bits."""
    if kind == "f16":
        unit = Fraction(2) ** -24
        while abs(value) >= unit * 2**11:
            unit *= 2
        whole = round(value / unit)  # Python rounds a Fraction to nearest even
    else:
        fraction_bits = 23 if fraction_bits is None else fraction_bits
        unit = Fraction(2) ** (-126 - fraction_bits)
        while abs(value) >= unit * 2 ** (fraction_bits + 1):
            unit *= 2
        whole = math.trunc(value / unit)
    if whole == 0:
        return 0
    rounded = float(whole * unit)
    with np.errstate(over="ignore"):
        return int(REAL[kind](rounded).view(f"u{WIDTH[kind]}"))


def one_sum(pairs, kinds, start, start_kind, d_kind, *, kept, depth, fraction_bits=None):
    """The accumulator ``start`` plus the products of ``pairs``, in one fused sum; raw bits of the result."""
    canonical = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}[d_kind]
    numbers = [x for pair in pairs for x in pair] + [start]
    if not all(map(math.isfinite, numbers)):
        # a finite product cannot overflow a double, so IEEE arithmetic gives the sum's class
        with np.errstate(invalid="ignore"):
            total = np.sum([np.float64(a) * np.float64(b) for a, b in pairs]) + start
        if math.isnan(total):
            return canonical
        return int(REAL[d_kind](total).view(f"u{WIDTH[d_kind]}"))
    terms = [
        (Fraction(a) * Fraction(b), exponent_of(a, kinds[0]) + exponent_of(b, kinds[1]))
        for a, b in pairs
        if a != 0 and b != 0
    ]
    if start != 0:
        terms.append((Fraction(start), exponent_of(start, start_kind)))
    common = max([e for _, e in terms] + [LEAST_EXPONENT[d_kind] - depth])
    quantum = Fraction(2) ** (common - kept)
    return encode(sum(math.trunc(v / quantum) for v, _ in terms) * quantum, d_kind, fraction_bits)


def reference_element(a, b, c, *types):
    """One element of D: raw bits from the raw bits of a row of A, a column of B and an element of C."""
    kind, d_kind, arch = types
    wide, narrow, kept, depth = RULES[arch]
    xs, ys = (list(map(float, real(v, kind))) for v in (a, b))
    pairs = list(zip(xs, ys, strict=True))
    start, start_kind = float(real(c, d_kind)), d_kind
    eight_bit = kind in ("e4m3", "e5m2")
    fraction_bits = None
    group = narrow if kind == "tf32" else wide
    kinds = (kind, kind)
    if eight_bit and arch in ("sm_90", "sm_90a", "sm_100"):
        # unpacked to f16: k = 0, 1 of every four, then k = 2, 3, from zero; C added in ordinary arithmetic
        group = len(pairs) // 2
        ordered = sorted(enumerate(pairs), key=lambda pair: pair[0] % 4 >= 2)
        ordered = [pair for _, pair in ordered]
        total = 0.0
        for at in (0, group):
            raw = one_sum(ordered[at : at + group], ("f16", "f16"), total, d_kind, d_kind, kept=kept, depth=depth)
            total = float(real(raw, d_kind))
        with np.errstate(all="ignore"):
            last = REAL[d_kind](total) + REAL[d_kind](start)
        if np.isnan(last):
            return {"f32": 0x7FFFFFFF, "f16": 0x7FFF}[d_kind]
        return int(last.view(f"u{WIDTH[d_kind]}"))
    if eight_bit and arch == "sm_89":
        group, kept, fraction_bits = 16, 13, 13
    elif eight_bit:
        group = 32
    for at in range(0, len(pairs), group):
        piece, widths = pairs[at : at + group], {"kept": kept, "depth": depth, "fraction_bits": fraction_bits}
        raw = one_sum(piece, kinds, start, start_kind, d_kind, **widths)
        start = float(real(raw, d_kind))
    return raw


def run(a, b, c, *types, b_kind=None, acc_kind=None, **more):
    kind, d_kind, arch = types
    names = {"a_type": kind, "b_type": b_kind or kind, "acc_type": acc_kind or d_kind, "d_type": d_kind}
    return mma(a, b, c, arch=arch, **names, **more)


def dot(products, c, kind="f16", d_kind="f32", arch="sm_90"):
    """One element: ``products`` are pairs of reals, padded by zeros to the K of the type's largest MMA."""
    k = {"sm_70": 4, "sm_75": 8}.get(arch, {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}[kind])
    a, b = np.zeros((1, k)), np.zeros((k, 1))
    for i, (x, y) in enumerate(products):
        a[0, i], b[i, 0] = x, y
    return float(real(run(bits(a, kind), bits(b, kind), bits([[c]], d_kind), kind, d_kind, arch), d_kind)[0, 0])


def random_tiles(kind, d_kind, k, category, rng):
    """Raw bits of A [4, 3, k], B [4, k, 3] and C [4, 3, 3]."""
    shapes = (4, 3, k), (4, k, 3), (4, 3, 3)
    if category == "any bits":
        return [
            rng.integers(0, 1 << (8 * WIDTH[t]), s, np.uint64).astype(f"u{WIDTH[t]}")
            for t, s in zip((kind, kind, d_kind), shapes, strict=True)
        ]
    a, b, c = (rng.standard_normal(s) for s in shapes)
    span = {"f16": 12, "bf16": 60, "tf32": 60, "e4m3": 6, "e5m2": 12}[kind]
    if category == "wide":
        a, b, c = (x * 2.0 ** rng.integers(-span, span // 2, x.shape) for x in (a, b, c))
    elif category == "cancelling":
        a[..., k // 2 :] = a[..., : k // 2]
        b[..., k // 2 :, :] = -b[..., : k // 2, :] * (1 + rng.integers(-1, 2, b[..., : k // 2, :].shape) / 16)
        c *= 2.0**-12
    elif category == "subnormal":
        least = 2.0 ** LEAST_EXPONENT[kind]
        a *= np.where(rng.integers(0, 2, a.shape), least / 4, 1)
        b *= np.where(rng.integers(0, 2, b.shape), least / 4, 1)
        c *= 2.0 ** (LEAST_EXPONENT[d_kind] - 2)
    elif category == "tiny":
        half = LEAST_EXPONENT[d_kind] // 2
        a *= 2.0 ** (half - rng.integers(4, 14, a.shape))
        b *= 2.0 ** (half - rng.integers(0, 10, b.shape))
        c[:] = 0
    elif category == "zeros":
        a *= rng.integers(0, 2, a.shape)
        b *= rng.integers(0, 2, b.shape) * 2.0 ** (span // 2)
        c *= 2.0**-20 * rng.integers(0, 2, c.shape)
    return [bits(x, t) for x, t in zip((a, b, c), (kind, kind, d_kind), strict=True)]


CATEGORIES = ("normal", "wide", "cancelling", "subnormal", "tiny", "zeros", "any bits")


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize(("kind", "k", "d_kind", "arch"), EACH, ids=str)
def test_random_tiles_match_the_reference(kind, k, d_kind, arch):
    rng = np.random.default_rng([k, *map(ord, kind + d_kind + arch)])
    for category in CATEGORIES:
        a, b, c = random_tiles(kind, d_kind, k, category, rng)
        got = run(a, b, c, kind, d_kind, arch)
        for index in np.ndindex(got.shape):
            t, i, j = index
            want = reference_element(a[t, i], b[t, :, j], c[index], kind, d_kind, arch)
            assert int(got[index]) == want, f"{category} {index}: {int(got[index]):#x}, not {want:#x}"


@settings(max_examples=150, deadline=None)
@given(
    arch=st.sampled_from(["sm_80", "sm_90"]),
    d_kind=st.sampled_from(["f32", "f16"]),
    raw=st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32),
    c=st.integers(0, 0xFFFFFFFF),
)
def test_any_f16_bits_match_the_reference(arch, d_kind, raw, c):
    a, b = np.array(raw[:16], np.uint16), np.array(raw[16:], np.uint16)
    start = np.array([[c]], np.uint32) if d_kind == "f32" else np.array([[c & 0xFFFF]], np.uint16)
    got = run(a[None, :], b[:, None], start, "f16", d_kind, arch)[0, 0]
    with np.errstate(all="ignore"):
        assert int(got) == reference_element(a, b, start[0, 0], "f16", d_kind, arch)


# --- how many bits, and how many products at once


@pytest.mark.parametrize(
    ("arch", "least"),
    [("sm_70", -23), ("sm_75", -24), ("sm_80", -24), ("sm_89", -24), ("sm_90", -25), ("sm_120", -25)],
)
def test_bits_kept_beside_one(arch, least):
    """Fasi et al., 3.3: beside 1, products of 2**least count, two of half that are each cut to nothing."""
    assert dot([(2.0**-12, 2.0 ** (least + 12))] * 4, 1.0, arch=arch) == 1 + math.trunc(2 ** (least + 25)) * 2.0**-23
    assert dot([(2.0**-12, 2.0 ** (least + 11))] * 4, 1.0, arch=arch) == 1.0


@pytest.mark.parametrize(("arch", "want"), [("sm_80", 0.5), ("sm_89", 0.5), ("sm_90", 0.0), ("sm_100", 0.0)])
def test_ampere_adds_in_halves(arch, want):
    """2**28 - 2**28 cancels in the first half of K, so Ampere keeps the 0.5 of the second half."""
    assert dot([(2.0**14, 2.0**14)] + [(0, 0)] * 7 + [(0.5, 1)], -(2.0**28), arch=arch) == want


@pytest.mark.parametrize(("arch", "want"), [("sm_80", 0.5), ("sm_90", 0.0)])
def test_ampere_adds_tf32_by_fours(arch, want):
    assert dot([(2.0**14, 2.0**14)] + [(0, 0)] * 3 + [(0.5, 1)], -(2.0**28), kind="tf32", arch=arch) == want


def test_addition_is_not_monotonic():
    """Fasi et al., 3.4: raising C from 1 - 2**-24 to 1 moves the cut past the products, and the sum falls."""
    small = [(2.0**-13, 2.0**-13)] * 16
    assert dot(small, 1 - 2.0**-24) == 1 + 2.0**-23
    assert dot(small, 1.0) == 1.0


def test_terms_and_sum_are_cut_toward_zero():
    for sign in (1, -1):
        # 1.5 * 2**-24 beside 1: 2**-24 + 2**-25 are kept, and the FP32 result drops them
        assert dot([(1.5 * 2.0**-12, 2.0**-12 * sign)], sign * 1.0) == sign
        assert dot([(2.0**-12, 2.0**-11 * sign), (1.5 * 2.0**-12, 2.0**-12 * sign)], sign) == sign * (1 + 2.0**-23)


def test_the_products_are_not_normalised():
    """1.5 * 1.5 = 2.25 has exponent 0, not 1, so 25 bits beneath reach a C of 2**-25."""
    cancelling = [(1.5, 1.5), (1.5, -1.5)]
    assert dot(cancelling, 2.0**-25) == 2.0**-25
    assert dot(cancelling, 2.0**-26) == 0
    assert dot([(1.5, 1.5), (2.0**-13, 2.0**-12)], -2.25) == 0


def test_subnormals_are_exact():
    assert dot([(2.0**-24, 1.0)], 0.0) == 2.0**-24
    assert dot([(2.0**-24, 2.0**-24)], 0.0) == 2.0**-48
    assert dot([(0.0, 0.0)], 2.0**-149) == 2.0**-149
    assert dot([(2.0**-133, 1.0)], 2.0**-149, kind="bf16") == 2.0**-133 + 2.0**-149


def test_a_zero_has_no_exponent():
    """Were 0 * 65504 aligned as a product with 65504's exponent, the smallest C would be lost."""
    assert dot([(0.0, 65504.0)] * 16, 2.0**-149) == 2.0**-149
    assert dot([(0.0, 2.0**127), (2.0**-60, 2.0**-60)], 0.0, kind="bf16") == 2.0**-120


@pytest.mark.parametrize(("arch", "floor"), [("sm_80", -132), ("sm_90", -133)])
def test_the_least_common_exponent(arch, floor):
    """With C zero, products count down to the floor's last bit, beneath FP32's least number."""
    last = floor - {"sm_80": 24, "sm_90": 25}[arch]
    half = last // 2
    assert last < -150
    assert dot([(2.0**half, 2.0 ** (-151 - half))] * 4, 0.0, kind="bf16", arch=arch) == 2.0**-149
    rules = Rule(8, 25, -126, 23)  # a floor of -126 would lose products below 2**-151
    a, b = bits(np.full((1, 8), 2.0**-76), "bf16"), bits(np.full((8, 1), 2.0**-76), "bf16")
    zero = np.zeros((1, 1), np.uint32)
    assert run(a, b, zero, "bf16", "f32", arch)[0, 0] == 1  # 8 * 2**-152 = 2**-149
    assert run(a, b, zero, "bf16", "f32", arch, override=rules)[0, 0] == 0


# --- results


def test_f16_results_round_to_nearest_even():
    assert dot([(1.0, 2.0**-11)], 1.0, d_kind="f16") == 1.0
    assert dot([(1.0, 2.0**-11)], 1 + 2.0**-10, d_kind="f16") == 1 + 2.0**-9
    assert dot([(1.0, 2.0**-11), (2.0**-12, 2.0**-12)], 1.0, d_kind="f16") == 1 + 2.0**-10
    assert dot([(2.0**-12, 2.0**-13)], 0.0, d_kind="f16") == 0.0  # half of the least subnormal
    assert dot([(2.0**-12, 1.5 * 2.0**-13)], 0.0, d_kind="f16") == 2.0**-24


def test_overflow():
    top = float(np.finfo(np.float32).max)
    assert dot([(1.0, 1.0)], top) == top
    assert dot([(2.0**63, 2.0**64)] * 2, 0.0, kind="bf16") == math.inf
    assert dot([(2.0**63, -(2.0**64))] * 2, 0.0, kind="bf16") == -math.inf
    assert dot([(2.0**63, 2.0**64)] * 2, -(2.0**127), kind="bf16") == 2.0**127  # the sum itself has room
    assert dot([(15.0, 1.0)], 65504.0, d_kind="f16") == 65504.0
    assert dot([(16.0, 1.0)], 65504.0, d_kind="f16") == math.inf


@pytest.mark.parametrize("d_kind", ["f32", "f16"])
@pytest.mark.parametrize(
    ("x", "y", "c", "want"),
    [
        (math.inf, 1.0, 0.0, math.inf),
        (-math.inf, 1.0, 5.0, -math.inf),
        (1.0, 1.0, -math.inf, -math.inf),
        (math.inf, 0.0, 0.0, math.nan),
        (math.inf, 1.0, -math.inf, math.nan),
        (math.nan, 0.0, 0.0, math.nan),
        (1.0, 1.0, -math.nan, math.nan),
    ],
)
def test_infinities_and_nans(d_kind, x, y, c, want):
    a, b = np.zeros((1, 16)), np.zeros((16, 1))
    a[0, 3], b[3, 0] = x, y
    got = run(bits(a, "f16"), bits(b, "f16"), bits([[c]], d_kind), "f16", d_kind, "sm_80")[0, 0]
    canonical = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}[d_kind]
    assert int(got) == (canonical if math.isnan(want) else int(bits(want, d_kind)))


@pytest.mark.parametrize("c", [0.0, -0.0])
def test_a_zero_sum_is_positive(c):
    d = run(
        bits(np.full((1, 16), -0.0), "f16"),
        bits(np.ones((16, 1)), "f16"),
        bits([[c]], "f32"),
        "f16",
        "f32",
        "sm_90",
    )
    assert d[0, 0] == 0
    assert np.copysign(1, dot([(1, 1), (-1, 1)], c)) == 1


def test_tf32_ignores_13_bits():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 30, (8, 16, 8), np.uint32), rng.integers(0, 1 << 30, (8, 8, 8), np.uint32)
    c = bits(rng.standard_normal((8, 16, 8)), "f32")
    d = run(a, b, c, "tf32", "f32", "sm_90")
    mask = np.uint32(0xFFFFE000)
    np.testing.assert_array_equal(d, run(a & mask, b & mask, c, "tf32", "f32", "sm_90"))
    assert (d != run(a ^ np.uint32(0x2000), b, c, "tf32", "f32", "sm_90")).any()


def test_fp8_differs_between_architectures():
    """448 * 448 beside 1: Ada keeps 13 bits below 2**16, sm_120 25; Hopper adds C at the end, rounding."""
    pairs = [(448.0, 448.0), (2.0**-6, 1.0)]
    assert dot(pairs, 1.0, kind="e4m3", arch="sm_89") == 448.0**2
    assert dot(pairs, 1.0, kind="e4m3", arch="sm_120") == 448.0**2 + 1 + 2.0**-6
    # Hopper: C = 2**-7 + 2**-8 beside 448**2 rounds up to the unit 2**-6; the others cut
    assert dot(pairs[:1], 1.5 * 2.0**-7, kind="e4m3", arch="sm_90") == 448.0**2 + 2.0**-6
    assert dot(pairs[:1], 1.5 * 2.0**-7, kind="e4m3", arch="sm_120") == 448.0**2


def test_mixed_fp8_types():
    a, b = bits(np.full((2, 32), 1.25), "e4m3"), bits(np.full((32, 2), 1.75), "e5m2")
    d = run(a, b, bits(np.full((2, 2), 3.0), "f32"), "e4m3", "f32", "sm_89", b_kind="e5m2")
    assert (real(d, "f32") == 73.0).all()


def test_an_f16_accumulator_may_give_f32():
    """m8n8k4.f32.f16.f16.f16, Volta: the result keeps what f16 could not."""
    types = ("f16", "f32", "sm_70")
    a, b = bits(np.ones((1, 4)), "f16"), bits(np.full((4, 1), 2.0**-12), "f16")
    d = run(a, b, bits([[1.0]], "f16"), *types, acc_kind="f16")
    assert real(d, "f32")[0, 0] == 1 + 2.0**-10
    # C is widened first: its subnormal has exponent -24, not f16's -14, and the product beside it survives
    a[:, 1:], b[0, 0], a[0, 0] = 0, *bits([2.0**-24, 2.0**-16], "f16")
    tiny = run(a, b, bits([[2.0**-24]], "f16"), *types, acc_kind="f16")
    assert real(tiny, "f32")[0, 0] == 2.0**-24 + 2.0**-40
