"""Exact floating-point arithmetic on arrays: one rounding, in any mode, to any format.

The means is round-to-odd: a float64 that holds an exact result truncated, with its last bit set if anything was
cut off, rounds to any format of at most 51 bits as the exact result would (Boldo and Melquiond, "Emulation of FMA
and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format: precision in bits with the hidden one, exponent of its smallest subnormal, largest value."""

    precision: int
    lowest: int
    largest: float


F32 = Format(24, -149, float(np.finfo(np.float32).max))
F16 = Format(11, -24, 65504.0)
BF16 = Format(8, -133, float((2 - 2.0**-7) * 2.0**127))
E4M3 = Format(4, -9, 448.0)
E5M2 = Format(3, -16, 57344.0)
FORMATS = {"f32": F32, "f16": F16, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2}

F32_NAN = np.uint32(0x7FFFFFFF)
F16_NAN = np.uint16(0x7FFF)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s + e = a + b exactly, s the rounded sum (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p + e = a · b exactly, away from overflow and underflow (Dekker)."""
    p = a * b
    t = a * 134217729.0
    a1 = t - (t - a)
    t = b * 134217729.0
    b1 = t - (t - b)
    a2, b2 = a - a1, b - b1
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def to_odd(s: np.ndarray, e: np.ndarray) -> np.ndarray:
    """The float64 that s + e truncates to, its last bit set if that was inexact; s is s + e rounded."""
    bits = s.view(np.int64)
    nudge = np.where((e > 0) == (s > 0), np.int64(1), np.int64(-1))
    inexact = (e != 0) & (bits & 1 == 0) & np.isfinite(s)
    return np.where(inexact, bits + nudge, bits).view(np.float64)


def sum_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 rounded to odd."""
    return to_odd(*two_sum(a, b))


def round_to(x: np.ndarray, form: Format, mode: str) -> np.ndarray:
    """float64 values rounded to a format; the results are float64 that the format can hold.

    mode: "rn", "rz", "rm", "rp", or "rna" (nearest, ties away). NaN and infinities pass.
    """
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - form.precision, form.lowest)
    scaled = np.ldexp(x, -quantum)
    if mode == "rn":
        scaled = np.rint(scaled)
    elif mode == "rz":
        scaled = np.trunc(scaled)
    elif mode == "rm":
        scaled = np.floor(scaled)
    elif mode == "rp":
        scaled = np.ceil(scaled)
    else:
        scaled = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    result = np.ldexp(scaled, quantum)
    over = np.abs(result) > form.largest
    if over.any():
        limit = np.copysign(form.largest, x)
        infinite = np.copysign(np.inf, x)
        if mode in ("rn", "rna"):
            replaced = infinite
        elif mode == "rz":
            replaced = limit
        else:
            replaced = np.where((x > 0) == (mode == "rp"), infinite, limit)
        result = np.where(over & np.isfinite(x), replaced, result)
    return np.where(np.isfinite(x), np.copysign(result, x), x)


def canonical32(r: np.ndarray) -> np.ndarray:
    """float32 with every NaN made the one that the hardware returns."""
    nan = np.isnan(r)
    if nan.any():
        r = np.where(nan, F32_NAN, r.view(np.uint32)).view(np.float32)
    return r


_LOW = np.uint64(0x1FFFFFFF)
_HALF = np.uint64(0x10000000)
_ONE32 = np.uint32(1)
_TINY32 = np.uint32(0x01000001)
_SPECIAL32 = np.uint32(0xFDFFFFFF)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32 in one rounding to nearest even, NaN canonical.

    The product is exact in float64. Rounding the float64 sum again is wrong only where that sum came out exactly
    half-way between two float32 (normal results: a pattern of its low bits), so only there, and for subnormal
    results, zeros and NaN, is the exact way taken.
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    s = p + wide
    r = s.astype(np.float32)
    tie = (s.view(np.uint64) & _LOW) == _HALF
    # twice the magnitude, less that of the smallest normal: wraps for subnormals and zeros, huge for NaN
    special = ((r.view(np.uint32) << _ONE32) - _TINY32) > _SPECIAL32
    tie |= special
    if tie.any():
        where = np.nonzero(tie)
        fixed = sum_odd(p[where], wide[where]).astype(np.float32)
        r[where] = canonical32(fixed)
    return r


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a · b + c of float64 in one rounding."""
    p, low = two_product(a, b)
    uh, ul = two_sum(c, low)
    th, tl = two_sum(p, uh)
    result = th + sum_odd(tl, ul)
    magnitude = np.abs(p)
    size = np.abs(result)
    safe = (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990) & (magnitude < 2.0**1000) & (np.abs(c) < 2.0**1000)
    safe &= (magnitude > 2.0**-900) & (size > 2.0**-900) & ((c == 0) | (np.abs(c) > 2.0**-1000))
    if mode == "rn" and safe.all():
        return result
    out = np.array(result)
    for i in np.flatnonzero(~safe) if mode == "rn" else range(out.size):
        out[i] = _fma_exact(float(a[i]), float(b[i]), float(c[i]), mode)
    return out


def _fma_exact(a: float, b: float, c: float, mode: str) -> float:
    if np.isfinite(a) and np.isfinite(b) and np.isinf(c):
        return c  # even where the host's product overflows
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product_negative = np.signbit(a) != np.signbit(b)
        if a != 0 and b != 0 and c != 0:
            return -0.0 if mode == "rm" else 0.0  # an exact cancellation
        if c == 0 and product_negative == np.signbit(c):
            return -0.0 if product_negative else 0.0
        return -0.0 if mode == "rm" else 0.0
    return round_fraction(exact, mode)


def round_fraction(x: Fraction, mode: str, precision: int = 53, lowest: int = -1074, top: int = 1024) -> float:
    """A non-zero fraction rounded to a binary format of at most double precision."""
    sign = -1 if x < 0 else 1
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = max(exponent - precision + 1, lowest)
    scaled = magnitude / Fraction(2) ** quantum
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1 == 1),
        "rz": False, "rm": rest > 0 and sign < 0, "rp": rest > 0 and sign > 0,
    }[mode]  # fmt: skip
    whole += up
    if Fraction(whole) * Fraction(2) ** quantum >= Fraction(2) ** top:
        if mode in ("rn", "rp" if sign > 0 else "rm"):
            return sign * float("inf")
        return sign * float((2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** (top - 1))
    return sign * float(np.ldexp(float(whole), quantum))


def directed64(s: np.ndarray, e: np.ndarray, mode: str) -> np.ndarray:
    """The float64 s = rounded(s + e) moved to what a directed mode gives."""
    if mode == "rn":
        return s
    if mode == "rz":
        move, target = (e != 0) & ((e > 0) != (s > 0)), np.zeros_like(s)
    elif mode == "rp":
        move, target = e > 0, np.full_like(s, np.inf)
    else:
        move, target = e < 0, np.full_like(s, -np.inf)
    return np.where(move & np.isfinite(s), np.nextafter(s, target), s)


def directed_sum64(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b of float64 in any mode."""
    s, e = two_sum(a, b)
    if mode == "rn":
        return s
    r = directed64(s, np.where(np.isfinite(s), e, 0.0), mode)
    # a finite sum that overflows stays finite in the modes that don't round away from zero
    over = np.isinf(s) & np.isfinite(a) & np.isfinite(b)
    stays = over if mode == "rz" else over & ((s < 0) if mode == "rp" else (s > 0))
    r = np.where(stays, np.copysign(np.finfo(np.float64).max, s), r)
    return negative_zero(r, a, b) if mode == "rm" else r


def quieted(x: np.ndarray) -> np.ndarray:
    """float64 with signalling NaN made quiet."""
    return np.where(np.isnan(x), x.view(np.uint64) | np.uint64(1 << 51), x.view(np.uint64)).view(np.float64)


def negative_zero(s: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """s = a + b, where rounding down makes a zero sum -0 unless both terms are +0."""
    return np.where((s == 0) & ((a != 0) | np.signbit(a) | np.signbit(b)), -0.0, s)


def quotient_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b of values of at most 24 bits, as a float64 good for directed rounding to at most 24 bits."""
    q = a / b
    # only a quotient that looks representable can be mistaken for exact; its product with b is then exact
    looks = (q.view(np.uint64) & _LOW) == 0
    rest = np.where(looks & np.isfinite(q) & np.isfinite(b), a - q * b, 0.0)
    rest = np.where(b < 0, -rest, rest)
    return to_odd(q, rest)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 patterns, to nearest even, NaN canonical."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & _ONE32)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), F16_NAN, rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 patterns to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
