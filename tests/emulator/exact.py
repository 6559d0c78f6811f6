"""Floating-point arithmetic from rational numbers, for references: slow, and independent of the emulator."""

from __future__ import annotations

import math
from fractions import Fraction

# name: (precision, smallest exponent of a subnormal's last bit, largest exponent + 1, bits)
FORMATS = {
    "f16": (11, -24, 16, 16),
    "bf16": (8, -133, 128, 16),
    "f32": (24, -149, 128, 32),
    "f64": (53, -1074, 1024, 64),
}


def isnan(value: Fraction | float) -> bool:
    return isinstance(value, float) and math.isnan(value)


def decode(pattern: int, name: str) -> Fraction | float:
    """A pattern's value: a Fraction, or a float for infinities, NaN and -0.0."""
    precision, lowest, _, bits = FORMATS[name]
    mantissa_bits = precision - 1
    sign = -1 if pattern >> (bits - 1) else 1
    exponent = pattern >> mantissa_bits & ((1 << (bits - precision)) - 1)
    mantissa = pattern & ((1 << mantissa_bits) - 1)
    if exponent == (1 << (bits - precision)) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        if mantissa == 0 and sign < 0:
            return -0.0
        return sign * mantissa * Fraction(2) ** lowest
    return sign * (mantissa + (1 << mantissa_bits)) * Fraction(2) ** (lowest + exponent - 1)


def encode(value: Fraction | float, name: str, mode: str = "rn") -> int:
    """The pattern nearest to a value in a rounding mode; NaN canonical (0x7fff…)."""
    precision, lowest, top, bits = FORMATS[name]
    mantissa_bits = precision - 1
    infinity = ((1 << (bits - precision)) - 1) << mantissa_bits
    negative = (value < 0) if isinstance(value, Fraction) else math.copysign(1, value) < 0
    sign = 1 << (bits - 1) if negative else 0
    if isinstance(value, float):
        if math.isnan(value):
            return (1 << (bits - 1)) - 1
        if math.isinf(value):
            return sign | infinity
        value = Fraction(value)
    if value == 0:
        return sign
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    quantum = max(exponent - mantissa_bits, lowest)
    scaled = magnitude / Fraction(2) ** quantum
    whole = math.floor(scaled)
    rest = scaled - whole
    if mode == "rn":
        whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    elif mode == "rp":
        whole += rest > 0 and not negative
    elif mode == "rm":
        whole += rest > 0 and negative
    if whole * Fraction(2) ** quantum >= Fraction(2) ** top:
        away = mode == "rn" or (mode == "rp" and not negative) or (mode == "rm" and negative)
        return sign | (infinity if away else infinity - 1)
    if whole >> mantissa_bits == 0:
        return sign | whole
    while whole >> precision:
        whole >>= 1
        quantum += 1
    return sign | (quantum - lowest + 1) << mantissa_bits | (whole & ((1 << mantissa_bits) - 1))


def fma(a, b, c, name: str, mode: str = "rn") -> int:
    """Pattern of a · b + c for values as `decode` gives them."""
    if all(isinstance(x, Fraction) or x == 0 for x in (a, b, c)):
        total = Fraction(a) * Fraction(b) + Fraction(c)
        if total == 0:
            signs = [math.copysign(1, float(a)) * math.copysign(1, float(b)), math.copysign(1, float(c))]
            product_zero = Fraction(a) * Fraction(b) == 0
            if product_zero and signs[0] == signs[1]:
                return encode(math.copysign(0.0, signs[0]), name)
            return encode(-0.0 if mode == "rm" else 0.0, name)
        return encode(total, name, mode)
    product = special_product(a, b)
    if math.isnan(product) or (isinstance(c, float) and math.isnan(c)):
        return encode(math.nan, name)
    infinite = [x for x in (product, c) if isinstance(x, float) and math.isinf(x)]
    if len(infinite) == 2 and infinite[0] != infinite[1]:
        return encode(math.nan, name)
    return encode(infinite[0], name)


def special_product(a, b) -> float:
    """A product of which a factor may be infinite or NaN, as a float of the right kind and sign."""
    if any(isinstance(x, float) and math.isnan(x) for x in (a, b)):
        return math.nan
    infinite = any(isinstance(x, float) and math.isinf(x) for x in (a, b))
    if infinite and (a == 0 or b == 0):
        return math.nan
    sign = (1 if _positive(a) else -1) * (1 if _positive(b) else -1)
    return sign * (math.inf if infinite else 1.0)


def _positive(x) -> bool:
    return x > 0 if isinstance(x, Fraction) and x != 0 else math.copysign(1, float(x) if x == 0 else x) > 0


def divide(a, b, name: str, mode: str = "rn") -> int:
    if any(isinstance(x, float) and math.isnan(x) for x in (a, b)):
        return encode(math.nan, name)
    sign = (1 if _positive(a) else -1) * (1 if _positive(b) else -1)
    inf_a, inf_b = (isinstance(x, float) and math.isinf(x) for x in (a, b))
    if (inf_a and inf_b) or (a == 0 and b == 0):
        return encode(math.nan, name)
    if inf_a or b == 0:
        return encode(sign * math.inf, name)
    if inf_b or a == 0:
        return encode(sign * 0.0, name)
    return encode(Fraction(a) / Fraction(b), name, mode)
