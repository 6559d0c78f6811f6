"""The arithmetic of one ``mma.sync``, bit for bit, for each GPU architecture.

A tensor core does not chain FMAs. It adds a group of exact products and the accumulator at once:

1. Every product keeps the exponent ``exponent(a) + exponent(b)``; its significand lies in [1, 4) and is not
   normalised. A subnormal keeps its format's lowest exponent and a significand below 1. A zero takes no part.
2. The largest of these exponents and the accumulator's, but at least ``Rule.exponent_floor``, is the common
   one.
3. Every term is shifted to it and truncated toward zero to ``Rule.fraction_bits`` bits below it.
4. The truncated terms are added exactly.
5. The sum is rounded once: toward zero for an FP32 result, to nearest even for FP16. Overflow gives infinity.

What differs between architectures is the size of the group and two widths:

=====================  ==========  ======  =====  ===========  ==========================================
architecture           f16, bf16   tf32    bits   floor below  8-bit floating point
=====================  ==========  ======  =====  ===========  ==========================================
Volta (sm_70)          4           --      23     5            --
Turing (sm_75)         8           --      24     6            --
Ampere (sm_80, 86)     8           4       24     6            --
Ada (sm_89)            8           4       24     6            groups of 16, 13 bits in sum and FP32 result
Hopper (sm_90)         16          8       25     7            as f16, in two halves, C added last
Blackwell (sm_100)     16          8       25     7            as f16, in two halves, C added last
Blackwell (sm_120)     16          8       25     7            groups of 32, 25 bits
=====================  ==========  ======  =====  ===========  ==========================================

"Floor below" counts from the lowest normal exponent of the result (-126 or -14). Where K is larger than a
group, the groups follow one another in the order of k, each starting from the rounded result of the last.

f64 is a chain of fused multiply-adds in the order of k, each rounded to nearest even (the ISA promises no
less than an FMA; MMA-Sim found the order). Integers are exact.

Sources: Fasi, Higham, Mikaitis and Pranesh, PeerJ CS 7:e330 (2021), the method and Volta to Ampere; Xie et
al., "MMA-Sim", arXiv 2511.10909, groups, widths, roundings and NaN encodings; Khattak and Mikaitis, arXiv
2512.07004, zeros and the floor. Doubts, where nothing measured is at hand:

* The floor shows only if C is zero and every product is tiny. The two models disagree about it (MMA-Sim has
  -126 for FP32 whenever C is zero, and none for FP16); the one tuned on the most hardware is followed, and
  Turing's and Volta's FP32 values are extrapolated.
* FP8 on sm_90 and sm_100: ``ptxas`` unpacks to f16 and issues two HMMAs, the first for k % 4 in {0, 1} from a
  zero accumulator, the second for k % 4 in {2, 3}, then adds C by an ordinary rounded addition (read in SASS
  of CUDA 13.0). Another compiler may do otherwise. ``wgmma``'s FP8 path (13 bits) is a different one.
* A sum that is zero, or that rounds to zero, is +0.
* ``m8n8k4`` with f16 above sm_75 is not one tensor-core instruction; it gets the architecture's ordinary rule
  here.
* The one NaN given for f64 is ``CUDART_NAN``; whether hardware keeps an operand's payload there is not known.
* ``.satfinite`` is taken to clamp once, after the whole sum.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

#: Elements in one pass over the terms: 2**17 int32 values stay in the second-level cache.
_CHUNK_TERMS = 1 << 17
#: Exponent of a zero: below every sum of two real exponents, so that it never is the largest.
_ZERO_EXPONENT = -2000


class _Format(NamedTuple):
    bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int


_FORMATS = {
    "f16": _Format(16, 5, 10, 15),
    "bf16": _Format(16, 8, 7, 127),
    "tf32": _Format(32, 8, 10, 127),  # the low 13 bits of the register are ignored
    "f32": _Format(32, 8, 23, 127),
    "e4m3": _Format(8, 4, 3, 7),
    "e5m2": _Format(8, 5, 2, 15),
}
_STORAGE = {"f16": "u2", "bf16": "u2", "tf32": "u4", "f32": "u4", "e4m3": "u1", "e5m2": "u1", "f64": "u8"}
_INTEGERS = {"s8": np.int8, "u8": np.uint8}
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "f64": 0xFFF8 << 48}
_INFINITY = {"f32": 0x7F800000, "f16": 0x7C00}
_LOWEST_EXPONENT = {"f32": -126, "f16": -14}


@dataclass(frozen=True)
class Rule:
    """How one floating-point instruction adds (the module's table, for one row and type).

    ``group`` is the number of products in one sum; ``fraction_bits`` the bits kept below the common exponent;
    ``exponent_floor`` the least common exponent; ``result_bits`` the fraction bits of the rounded sum;
    ``through_f16`` says that 8-bit inputs are unpacked to f16 and C is added at the end.
    """

    group: int
    fraction_bits: int
    exponent_floor: int
    result_bits: int
    through_f16: bool = False


def _architecture(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match[1]) < 70:
        raise ValueError(f"architecture {arch!r}: expected 'sm_70' or later, such as 'sm_80' or 'sm_90a'")
    return int(match[1])


def rule(a_type: str, d_type: str, k: int, arch: str) -> Rule:
    """The rule by which ``arch`` adds the products of one instruction.

    Parameters: ``a_type`` "f16", "bf16", "tf32", "e4m3" or "e5m2"; ``d_type`` "f32" or "f16"; ``k`` the
    instruction's K; ``arch`` as in "sm_90". Raises ``ValueError`` for a type that the architecture lacks.
    """
    number = _architecture(arch)
    narrow = a_type in ("e4m3", "e5m2")
    lowest = 89 if narrow else {"f16": 70, "bf16": 80, "tf32": 80}[a_type]
    if number < lowest:
        raise ValueError(f"mma.sync with {a_type} needs sm_{lowest}, not {arch}")
    if number >= 90:
        bits, group = 25, 16
    elif number >= 75:
        bits, group = 24, 8
    else:
        bits, group = 23, 4
    result_bits = 23 if d_type == "f32" else 10
    floor = _LOWEST_EXPONENT[d_type] - (bits - 18)
    if a_type == "tf32":
        group //= 2
    if not narrow:
        return Rule(min(group, k), bits, floor, result_bits)
    if 90 <= number < 120:
        return Rule(min(group, k // 2), bits, floor, result_bits, through_f16=True)
    if number >= 120:
        return Rule(min(32, k), bits, floor, result_bits)
    return Rule(min(16, k), 13, floor, min(result_bits, 13))


def mma(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    a_type: str,
    b_type: str,
    acc_type: str,
    d_type: str,
    arch: str,
    saturate: bool = False,
    override: Rule | None = None,
) -> Array:
    """``D = A B + C`` as one ``mma.sync`` of ``arch`` computes it, over a batch of tiles.

    Parameters
    ----------
    a, b, c : arrays of raw bits
        Shapes ``[..., M, K]``, ``[..., K, N]``, ``[..., M, N]``; K is the K of the instruction, M and N are
        free. uint16 for "f16" and "bf16", uint32 for "tf32" and "f32", uint8 for "e4m3" and "e5m2", uint64
        for "f64", int8/uint8 for "s8"/"u8", int32 for "s32" (any integer type of that width will do).
    a_type, b_type : the multiplicands' types; they differ only among the FP8 or the integer ones.
    acc_type, d_type : "f32", "f16", "f64" or "s32", the types of C and D.
    arch : "sm_70" to "sm_121", with or without "a".
    saturate : ``.satfinite``: clamp an s32 result instead of wrapping.
    override : add by this rule instead of the architecture's (to test a hypothesis against hardware).

    Returns
    -------
    Raw bits of D, ``[..., M, N]``: uint32 for "f32", uint16 for "f16", uint64 for "f64", int32 for "s32".

    Raises ``ValueError`` for types that do not go together or that ``arch`` lacks.

    >>> one = np.full((16, 16), 0x3C00, np.uint16)                      # ones in f16
    >>> d = mma(one, one[:, :8], np.zeros((16, 8), np.uint32), a_type="f16", b_type="f16",
    ...         acc_type="f32", d_type="f32", arch="sm_90")
    >>> d.view(np.float32)[0, 0]
    np.float32(16.0)
    """
    _check_types(a_type, b_type, acc_type, d_type, arch)
    if a_type in _INTEGERS:
        return _integer(_bits(a, a_type), _bits(b, b_type), _bits(c, "s32"), saturate)
    a_bits, b_bits, c_bits = _bits(a, a_type), _bits(b, b_type), _bits(c, acc_type)
    rows, k = a_bits.shape[-2:]
    if b_bits.shape[-2] != k or c_bits.shape[-2:] != (rows, b_bits.shape[-1]):
        raise ValueError(f"shapes {a_bits.shape}, {b_bits.shape}, {c_bits.shape} are not [M, K], [K, N], [M, N]")
    if a_type == "f64":
        return _fma_chain(a_bits.view(np.float64), b_bits.view(np.float64), c_bits.view(np.float64)).view(np.uint64)
    how = override or rule(a_type, d_type, k, arch)
    if how.group < 1 or k % how.group:
        raise ValueError(f"K = {k} is not a multiple of the {how.group} products that {arch} adds at once")
    if not _FORMATS[a_type].fraction_bits + _FORMATS[b_type].fraction_bits <= how.fraction_bits <= 28:
        raise ValueError(f"{how.fraction_bits} bits: the model covers those of an exact product up to 28")

    batch = np.broadcast_shapes(a_bits.shape[:-2], b_bits.shape[:-2], c_bits.shape[:-2])
    columns = b_bits.shape[-1]
    # The batch goes last, so that the inner loop of every operation below is long and contiguous.
    a_flat = np.broadcast_to(a_bits, (*batch, rows, k)).reshape(-1, rows, k).transpose(2, 1, 0)
    b_flat = np.broadcast_to(b_bits, (*batch, k, columns)).reshape(-1, k, columns).transpose(1, 2, 0)
    c_flat = np.broadcast_to(c_bits, (*batch, rows, columns)).reshape(-1, rows, columns).transpose(1, 2, 0)
    tiles = c_flat.shape[-1]
    out = np.empty((tiles, rows, columns), _STORAGE[d_type])
    step = max(1, _CHUNK_TERMS // max(1, rows * columns * how.group))
    for start in range(0, tiles, step):
        part = slice(start, min(start + step, tiles))
        chunk = _instruction(
            np.ascontiguousarray(a_flat[..., part]),
            np.ascontiguousarray(b_flat[..., part]),
            np.ascontiguousarray(c_flat[..., part]),
            (a_type, b_type, acc_type, d_type),
            how,
        )
        out[part] = chunk.transpose(2, 0, 1)
    return out.reshape(*batch, rows, columns)


def _check_types(a_type: str, b_type: str, acc_type: str, d_type: str, arch: str) -> None:
    narrow = ("e4m3", "e5m2")
    number = _architecture(arch)
    if a_type in _INTEGERS and b_type in _INTEGERS:
        good = acc_type == d_type == "s32" and number >= 75
    elif a_type == "f64":
        good = b_type == acc_type == d_type == "f64" and number >= 80
    elif a_type in ("bf16", "tf32"):
        good = b_type == a_type and acc_type == d_type == "f32"
    elif a_type == "f16":
        good = b_type == "f16" and (acc_type, d_type) in (("f32", "f32"), ("f16", "f16"), ("f16", "f32"))
    else:
        good = a_type in narrow and b_type in narrow and acc_type == d_type and d_type in ("f16", "f32")
    if not good:
        raise ValueError(f"no mma.sync for A {a_type}, B {b_type}, C {acc_type}, D {d_type} on {arch}")


def _bits(values: ArrayLike, kind: str) -> Array:
    """``values`` as integers of ``kind``'s width, unsigned but for "s8" and "s32"; the bits are kept."""
    array = np.asarray(values)
    dtype = np.dtype(_INTEGERS.get(kind, np.int32) if kind in (*_INTEGERS, "s32") else _STORAGE[kind])
    if array.ndim < 2 or array.dtype.kind not in "iu" or array.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"{kind} matrix: expected {dtype} of at least 2 dimensions, got {array.dtype} {array.shape}")
    return np.ascontiguousarray(array).view(dtype)


def _integer(a: Array, b: Array, c: Array, saturate: bool) -> Array:
    # Exact in double: |product| <= 2**16, so even 2**20 of them stay below 2**53.
    total: Array = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64) + c
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)


class _Terms(NamedTuple):
    """Magnitude times sign times ``2**(exponent - fraction_bits)``; ``special`` marks Inf and NaN."""

    magnitude: Array  # int32, below 2**(fraction_bits + 1)
    sign: Array  # int32, -1 or 1
    exponent: Array  # int32
    special: Array  # bool
    fraction_bits: int


def _decode(bits: Array, kind: str) -> _Terms:
    form = _FORMATS[kind]
    word = bits.astype(np.int64 if form.bits == 32 else np.int32)
    if kind == "tf32":
        word = word >> 13
    word = word.astype(np.int32) if kind != "f32" else word
    fraction = word & ((1 << form.fraction_bits) - 1)
    field = (word >> form.fraction_bits) & ((1 << form.exponent_bits) - 1)
    negative = (word >> (form.fraction_bits + form.exponent_bits)) & 1
    magnitude = (fraction + ((field != 0).astype(word.dtype) << form.fraction_bits)).astype(np.int32)
    exponent = (np.maximum(field, 1) - form.bias).astype(np.int32)
    exponent[magnitude == 0] = _ZERO_EXPONENT
    special = field == (1 << form.exponent_bits) - 1
    if kind == "e4m3":  # has no infinity, and one NaN of each sign
        special &= fraction == 7
    return _Terms(magnitude, (1 - 2 * negative).astype(np.int32), exponent, special, form.fraction_bits)


def _value(bits: Array, kind: str) -> Array:
    """The values in float64, Inf and NaN included."""
    terms = _decode(bits, kind)
    finite = np.ldexp((terms.magnitude * terms.sign).astype(np.float64), terms.exponent - terms.fraction_bits)
    infinite = terms.sign * np.inf if kind != "e4m3" else np.nan
    mantissa = terms.magnitude & ((1 << terms.fraction_bits) - 1)
    return np.where(terms.special, np.where(mantissa == 0, infinite, np.nan), finite)


def _instruction(a: Array, b: Array, c: Array, types: tuple[str, str, str, str], how: Rule) -> Array:
    """All the groups of one instruction; ``a`` is [K, M, tiles], ``b`` [K, N, tiles], ``c`` [M, N, tiles]."""
    a_type, b_type, acc_type, d_type = types
    if how.through_f16:
        a, b = _to_f16(a, a_type), _to_f16(b, b_type)
        order = np.arange(a.shape[0]).reshape(-1, 2, 2).transpose(1, 0, 2).ravel()
        plain = replace(how, through_f16=False)
        total = _instruction(a[order], b[order], np.zeros_like(c), ("f16", "f16", acc_type, d_type), plain)
        return _ieee_add(total, c, d_type)
    for start in range(0, a.shape[0], how.group):
        part = slice(start, start + how.group)
        c = _fused_sum(a[part], b[part], c, (a_type, b_type, acc_type, d_type), how)
        acc_type = d_type
    return c


def _to_f16(bits: Array, kind: str) -> Array:
    """FP8 to f16, exact for every value (``cvt.rn.f16x2.e4m3x2``)."""
    if kind == "e5m2":
        wide: Array = bits.astype(np.uint16) << np.uint16(8)
        return wide
    with np.errstate(invalid="ignore"):
        return _value(bits, kind).astype(np.float16).view(np.uint16)


def _ieee_add(x: Array, y: Array, kind: str) -> Array:
    """``add.rn`` of raw bits. float16 goes through float32, wide enough for rounding twice to be harmless."""
    real = np.float32 if kind == "f32" else np.float16
    with np.errstate(all="ignore"):
        total: Array = x.view(real) + y.view(real)
    return np.where(np.isnan(total), x.dtype.type(_NAN[kind]), total.view(x.dtype))


def _fused_sum(a: Array, b: Array, c: Array, types: tuple[str, str, str, str], how: Rule) -> Array:
    """One group: the accumulator and ``a.shape[0]`` products, added as the module describes.

    Widths: a product of f16 or tf32 significands is below 2**22 with 20 fraction bits, and ``keep >= 13``
    bits are kept below an exponent that is at least the product's, so an aligned term is below ``2**(keep +
    2) <= 2**27``: it fits int32. The accumulator's is below ``2**(keep + 1)``. The at most 33 terms are added
    in int64.
    """
    a_type, b_type, acc_type, d_type = types
    keep = how.fraction_bits
    left, right, start = _decode(a, a_type), _decode(b, b_type), _decode(c, acc_type)
    if acc_type == "f16" and d_type == "f32":  # C is widened first, so that its subnormals are normalised
        start = _decode(c.view(np.float16).astype(np.float32).view(np.uint32), "f32")

    exponent = left.exponent[:, :, None, :] + right.exponent[:, None, :, :]
    common = np.maximum(exponent.max(axis=0), start.exponent)
    np.maximum(common, how.exponent_floor, out=common)

    # Every rule keeps at least the product's fraction bits, so scaling to `keep` bits is a shift to the left.
    scaled = left.magnitude << (keep - left.fraction_bits - right.fraction_bits)
    magnitude = scaled[:, :, None, :] * right.magnitude[:, None, :, :]
    np.subtract(common, exponent, out=exponent)
    np.minimum(exponent, 31, out=exponent)
    np.right_shift(magnitude, exponent, out=magnitude)
    magnitude *= left.sign[:, :, None, :] * right.sign[:, None, :, :]
    total = magnitude.sum(axis=0, dtype=np.int64)

    shift = np.minimum(common - start.exponent, 62) + (start.fraction_bits - keep)
    wide = start.magnitude.astype(np.int64)
    aligned = np.where(shift < 0, wide << np.maximum(-shift, 0), wide >> np.minimum(np.maximum(shift, 0), 63))
    total += aligned * start.sign

    result = _round(total, common - keep, how, d_type).astype(_STORAGE[d_type])
    if left.special.any() or right.special.any() or start.special.any():
        _apply_special(result, (a, b, c), (left, right, start), types)
    return result


def _round(total: Array, exponent: Array, how: Rule, d_type: str) -> Array:
    """``total * 2**exponent`` as raw bits: toward zero for f32, to nearest even for f16; int64."""
    magnitude = np.abs(total)
    # frexp is exact here: |total| < 33 * 2**27 < 2**53
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)
    # the unit in the last place of the result, which in the subnormal range stops shrinking
    lowest = _LOWEST_EXPONENT[d_type] - how.result_bits
    unit = np.maximum(exponent + length - 1 - how.result_bits, lowest)
    shift = unit - exponent
    right = np.clip(shift, 0, 62)
    mantissa = np.where(shift < 0, magnitude << np.clip(-shift, 0, 62), magnitude >> right)
    if d_type == "f16":
        rest = magnitude & ((np.int64(1) << right) - 1)
        half = (np.int64(1) << right) >> 1
        up = (shift > 0) & ((rest > half) | ((rest == half) & ((mantissa & 1) == 1)))
        mantissa += up
    # A mantissa with its leading one adds one to the exponent field below; so does a carry out of rounding.
    full = 23 if d_type == "f32" else 10
    bits = (((unit - lowest) << how.result_bits) + mantissa) << (full - how.result_bits)
    bits = np.where(mantissa == 0, 0, np.minimum(bits, _INFINITY[d_type]))
    negative = (total < 0) & (mantissa != 0)
    signed: Array = bits | (negative.astype(np.int64) << (31 if d_type == "f32" else 15))
    return signed


def _apply_special(
    result: Array,
    inputs: tuple[Array, Array, Array],
    decoded: tuple[_Terms, _Terms, _Terms],
    types: tuple[str, str, str, str],
) -> None:
    """Overwrite what an Inf or a NaN reaches by the IEEE result of the sum, with one encoding of NaN."""
    a_type, b_type, acc_type, d_type = types
    a, b, c = inputs
    left, right, start = decoded
    tiles = np.flatnonzero(
        left.special.any(axis=(0, 1)) | right.special.any(axis=(0, 1)) | start.special.any(axis=(0, 1))
    )
    with np.errstate(invalid="ignore"):
        # Finite terms cannot overflow a double: the largest product is below 2**256.
        products = _value(a[..., tiles], a_type)[:, :, None, :] * _value(b[..., tiles], b_type)[:, None, :, :]
        total = products.sum(axis=0) + _value(c[..., tiles], acc_type)
    bits = result[..., tiles]
    sign = np.signbit(total).astype(np.int64) << (31 if d_type == "f32" else 15)
    bits = np.where(np.isinf(total), _INFINITY[d_type] | sign, bits)
    bits = np.where(np.isnan(total), _NAN[d_type], bits)
    result[..., tiles] = bits.astype(result.dtype)


def _fma_chain(a: Array, b: Array, c: Array) -> Array:
    """``C + A B`` in float64: for each k in turn, one FMA of column k of A and row k of B into C."""
    for k in range(a.shape[-1]):
        c = _fma(*np.broadcast_arrays(a[..., :, k, None], b[..., k, None, :], c))
    return np.where(np.isnan(c), np.uint64(_NAN["f64"]).view(np.float64), c)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """``round(a * b + c)``, rounded once, elementwise in float64.

    The product and the sums are split exactly into a head and a tail (Dekker, Knuth), and the tails are added
    with rounding to odd, after which one ordinary addition rounds correctly (Boldo and Melquiond, IEEE TC
    57(4), 2008). That needs exponents away from the ends of the range; elements outside go through integers,
    one by one.
    """
    with np.errstate(all="ignore"):
        result = a * b + c
        finite = np.isfinite(a) & np.isfinite(b)
        # A finite product that overflows must not meet an infinite C.
        result = np.where(finite & np.isinf(c), c, result)
        _, a_exponent = np.frexp(a)
        _, b_exponent = np.frexp(b)
        _, c_exponent = np.frexp(c)
        reach = a_exponent + b_exponent
        needed = finite & np.isfinite(c) & (a != 0) & (b != 0)
        inside = (reach > -900) & (reach < 990) & (c_exponent < 990) & (a_exponent < 990) & (b_exponent < 990)
        head, tail = _two_product(a, b)
        upper, lower = _two_sum(c, tail)
        top, rest = _two_sum(head, upper)
        odd, error = _two_sum(lower, rest)
        bits = odd.view(np.int64)
        toward = np.where((error > 0) == (odd > 0), 1, -1)
        bits = np.where((error != 0) & (bits & 1 == 0), bits + toward, bits)
        split = top + bits.view(np.float64)
    result = np.where(needed & inside, split, result)
    for index in zip(*np.nonzero(needed & ~inside), strict=True):
        result[index] = _exact_fma(float(a[index]), float(b[index]), float(c[index]))
    return result


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _two_product(x: Array, y: Array) -> tuple[Array, Array]:
    product = x * y
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low


def _halves(x: Array) -> tuple[Array, Array]:
    big = x * 134217729.0  # 2**27 + 1
    high = big - (big - x)
    return high, x - high


def _exact_fma(a: float, b: float, c: float) -> float:
    (p, q), (r, s), (t, u) = a.as_integer_ratio(), b.as_integer_ratio(), c.as_integer_ratio()
    numerator = p * r * u + t * q * s
    try:
        return numerator / (q * s * u) if numerator else 0.0  # int / int rounds once, to nearest even
    except OverflowError:
        return float("inf") if numerator > 0 else float("-inf")
