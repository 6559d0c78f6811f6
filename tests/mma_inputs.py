"""The random tiles on which ``mma.sync`` of a GPU and of the emulator are compared.

Every input comes from the raw 64-bit output of NumPy's PCG64, whose stream is fixed, by integer operations
alone: the same seed gives the same bits in every NumPy version, so that a recorded hash of 10**5 tiles'
outputs can be checked long after. (``Generator.standard_normal`` and the like may change between releases.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]

FLOAT_CATEGORIES = ("normal", "wide", "cancelling", "subnormal", "tiny", "zeros", "special")
INTEGER_CATEGORIES = ("uniform", "extreme")
BLOCK = 1500


class Form(NamedTuple):
    """A floating-point format in its register: unused low bits, fraction bits, exponent bits."""

    storage: str
    unused: int
    fraction: int
    exponent: int
    bias: int

    @property
    def top(self) -> int:
        """The exponent field of Inf and NaN."""
        return (1 << self.exponent) - 1


FORMS = {
    "f16": Form("u2", 0, 10, 5, 15),
    "bf16": Form("u2", 0, 7, 8, 127),
    "tf32": Form("u4", 13, 10, 8, 127),
    "f32": Form("u4", 0, 23, 8, 127),
    "e4m3": Form("u1", 0, 3, 4, 7),
    "e5m2": Form("u1", 0, 2, 5, 15),
    "f64": Form("u8", 0, 52, 11, 1023),
}


@dataclass(frozen=True)
class Case:
    """One instruction, ``mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{acc}``, and how many tiles to try."""

    name: str
    shape: tuple[int, int, int]
    a_type: str
    b_type: str
    acc_type: str
    d_type: str
    blocks_per_category: int
    seed: int

    @property
    def shape_name(self) -> str:
        return "m{}n{}k{}".format(*self.shape)

    @property
    def categories(self) -> tuple[str, ...]:
        return INTEGER_CATEGORIES if self.a_type == "s8" else FLOAT_CATEGORIES

    @property
    def tiles(self) -> int:
        return len(self.categories) * self.blocks_per_category * BLOCK


CASES = {
    case.name: case
    for case in (
        Case("f16_f32", (16, 8, 16), "f16", "f16", "f32", "f32", 10, 101),
        Case("bf16_f32", (16, 8, 16), "bf16", "bf16", "f32", "f32", 10, 102),
        Case("tf32_f32", (16, 8, 8), "tf32", "tf32", "f32", "f32", 10, 103),
        Case("f16_f16", (16, 8, 16), "f16", "f16", "f16", "f16", 10, 104),
        Case("e4m3_f32", (16, 8, 32), "e4m3", "e4m3", "f32", "f32", 10, 105),
        Case("s8_s32", (16, 8, 32), "s8", "s8", "s32", "s32", 34, 106),
        Case("f64_f64", (8, 8, 4), "f64", "f64", "f64", "f64", 1, 107),
    )
}


class _Source:
    """Raw 64-bit words, one stream for each block of tiles."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(list(key))

    def words(self, *shape: int) -> NDArray[np.uint64]:
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)

    def below(self, bound: int, *shape: int) -> NDArray[np.int64]:
        """Integers in [0, bound), for a bound far below 2**31 (the modulus is biased, immaterially)."""
        drawn: NDArray[np.int64] = ((self.words(*shape) >> np.uint64(33)) % np.uint64(bound)).astype(np.int64)
        return drawn


# Exponents of a bell-like density: frequent near 0, seldom far below.
_BELL = np.array([1, 0, 0, 0, -1, -1, -1, -1, -2, -2, -3, -3, -4, -5, -6, -8])


def _assemble(form: Form, words: NDArray[np.uint64], exponent: NDArray[np.int64]) -> Bits:
    """A finite number of random sign and fraction with this exponent; subnormal below the format's range."""
    width = form.unused + form.fraction
    fraction = words & np.uint64((1 << width) - 1)
    sign = (words >> np.uint64(60)) & np.uint64(1)
    highest = form.top if form == FORMS["e4m3"] else form.top - 1
    field = np.clip(exponent + form.bias, 0, highest).astype(np.uint64)
    if form == FORMS["e4m3"]:  # fraction 7 of the highest exponent is its NaN
        fraction = np.where((field == highest) & (fraction == 7), np.uint64(6), fraction)
    bits: Bits = (sign << np.uint64(width + form.exponent)) | (field << np.uint64(width)) | fraction
    return bits.astype(form.storage)


def _special(form: Form, source: _Source, bits: Bits, one_in: int) -> Bits:
    """Some elements replaced by infinities and NaNs of either sign (e4m3 has NaN alone)."""
    width = form.unused + form.fraction
    words = source.words(*bits.shape)
    chosen = (words >> np.uint64(33)) % np.uint64(one_in) == 0
    fraction = np.where(words & np.uint64(1), np.uint64(0), (words >> np.uint64(1)) & np.uint64((1 << width) - 1))
    if form == FORMS["e4m3"]:
        fraction = np.full_like(words, 7)
    sign = (words >> np.uint64(63)) << np.uint64(width + form.exponent)
    special = (sign | np.uint64(form.top << width) | fraction).astype(form.storage)
    return np.where(chosen, special, bits)


def _ranges(case: Case) -> tuple[int, int]:
    """Exponents of the smallest and of the largest nonzero multiplicand."""
    form = FORMS[case.a_type]
    return 1 - form.bias - form.fraction, (form.top if case.a_type == "e4m3" else form.top - 1) - form.bias


def _floats(case: Case, category: str, source: _Source, count: int) -> tuple[Bits, Bits, Bits]:
    m, n, k = case.shape
    a_form, b_form, c_form = FORMS[case.a_type], FORMS[case.b_type], FORMS[case.acc_type]
    sizes = (count, m, k), (count, k, n), (count, m, n)
    words = [source.words(*size) for size in sizes]
    bell = [_BELL[source.below(16, *size)] for size in sizes]
    low, high = _ranges(case)
    c_low = 1 - c_form.bias - c_form.fraction
    ea, eb, ec = bell
    if category == "wide":
        # Even tiles draw from the whole range, odd ones from a window of 24 about a centre of their own.
        # Half the range where the product of two numbers of the whole range overflows D.
        part = 1 if a_form.exponent < c_form.exponent else 2
        whole = [low // part + source.below((high - low) // part + 1, *size) for size in sizes]
        near = [source.below(24, *size) - 12 for size in sizes]
        centre = low + 12 + source.below(max(1, high - low - 24), count, 1, 1)
        odd = (np.arange(count) % 2 == 1)[:, None, None]
        ea = np.where(odd, centre + near[0], whole[0])
        eb = np.where(odd, near[1] - np.sign(centre) * np.minimum(abs(centre), high // 2), whole[1])
        ec = np.where(
            odd,
            ea.max(axis=2, keepdims=True) + eb.max(axis=1, keepdims=True) + near[2],
            (3 - part) * whole[2],
        )
    elif category == "cancelling":
        ec = bell[2] - source.below(28, count, 1, 1)
    elif category == "subnormal":
        tiny = [source.below(2, *size) == 0 for size in sizes]
        large = source.below(high, count, 1, 1)
        ea = np.where(tiny[0], low - 99, ea - large // 2)
        eb = np.where(tiny[1], low - 99, eb + large)
        ec = np.where(tiny[2], c_low - 99, low + bell[2] + large)
    elif category == "tiny":
        # Products about the least subnormal of D, or as near to it as the format goes; C is zero.
        target = (1 - FORMS[case.d_type].bias - FORMS[case.d_type].fraction) // 2
        ea = np.maximum(target - 6 + source.below(14, *sizes[0]), low)
        eb = np.maximum(target - 6 + source.below(14, *sizes[1]), low)
    elif category == "zeros":
        eb = high - source.below(8, *sizes[1])
        ea = high // 2 - source.below(high, *sizes[0])
        # low + high: what a zero read as the least subnormal would push out of the sum
        ec = np.where(source.below(2, count, 1, 1) == 0, c_low + source.below(60, *sizes[2]), low + bell[2])
    elif category == "special":
        # Every third tile is near overflow as well.
        near_top = (np.arange(count) % 3 == 0)[:, None, None]
        ea = np.where(near_top, high // 2 + bell[0], ea)
        eb = np.where(near_top, high - high // 2 + bell[1], eb)
        ec = np.where(near_top, c_form.top - 1 - c_form.bias + bell[2], ec)
    a, b, c = (_assemble(f, w, e) for f, w, e in zip((a_form, b_form, c_form), words, (ea, eb, ec), strict=True))
    if category == "cancelling":
        # Products k and k + K/2 cancel but for the last fraction bit of some.
        half = k // 2
        a[:, :, half:] = a[:, :, :half]
        flip = (words[1][:, half:] >> np.uint64(50) & np.uint64(1)).astype(b.dtype) << b.dtype.type(b_form.unused)
        b[:, half:] = b[:, :half] ^ b.dtype.type(1 << (8 * b.itemsize - 1)) ^ flip
        if case.a_type == "e4m3":
            b[(b & 0x7F) == 0x7F] ^= 1
    elif category == "tiny":
        c[:] = 0
    elif category == "zeros":
        sign = a.dtype.type(1 << (8 * a.itemsize - 1))
        # Of every four tiles: two are mostly zero, one is zero in A, one in B as well; then C is zero in
        # part.
        kind = (np.arange(count) % 4)[:, None, None]
        dropped = (source.below(5, *sizes[0]) < 3) | (kind >= 2)
        a = np.where(dropped, a & sign, a)
        b = np.where((kind == 3) & (source.below(2, *sizes[1]) == 0), b & sign, b)
        c = np.where((kind == 3) | (source.below(4, *sizes[2]) == 0), c & c.dtype.type(1 << (8 * c.itemsize - 1)), c)
    elif category == "special":
        a = _special(a_form, source, a, 64)
        b = _special(b_form, source, b, 64)
        c = _special(c_form, source, c, 32)
    return a, b, c


def _integers(case: Case, category: str, source: _Source, count: int) -> tuple[Bits, Bits, Bits]:
    m, n, k = case.shape
    a = source.words(count, m, k).astype(np.uint8)
    b = source.words(count, k, n).astype(np.uint8)
    c = source.words(count, m, n).astype(np.uint32)
    if category == "extreme":
        # Ends of the range, and accumulators that the largest sums push past int32.
        ends = np.array([0x80, 0x80, 0x7F, 0x81], np.uint8)
        a, b = ends[a & 3], ends[b & 3]
        c = np.where(c & 1, np.uint32(0x7FFFFFFF), np.uint32(0x80000000)) ^ (c & np.uint32(0xFFFE))
    return a.view(np.int8), b.view(np.int8), c.view(np.int32)


def block(case: Case, category: str, index: int, count: int = BLOCK) -> tuple[Bits, Bits, Bits]:
    """Block ``index`` of a category: raw bits of A ``[count, M, K]``, B ``[count, K, N]`` and C ``[count, M,
    N]``.

    A smaller ``count`` is another block, not a part of this one.
    """
    source = _Source(case.seed, case.categories.index(category), index, count)
    make = _integers if case.a_type == "s8" else _floats
    return make(case, category, source, count)


def blocks(case: Case, category: str) -> Iterator[tuple[Bits, Bits, Bits]]:
    """All blocks of a category, in the order of the recorded hashes."""
    for index in range(case.blocks_per_category):
        yield block(case, category, index)


def comparable(case: Case, d: Bits) -> Bits:
    """``d`` as compared and hashed: raw bits, but for f64 with one NaN, since payloads are not modelled."""
    if case.d_type != "f64":
        return d
    return np.where(np.isnan(d.view(np.float64)), np.uint64(0xFFF8 << 48), d)
