"""How far a tensor-core product may be from the exact one, element by element.

A tensor core adds k products and the accumulator at once (``numba_gemm.emulator.tensorcore`` has the rule and its
sources): it aligns all k + 1 terms to the largest exponent e among them, truncates each toward zero to F fraction bits
at that exponent, adds them exactly and truncates the sum toward zero to FP32. On Ampere and Ada k = 8 and F = 24, on
Hopper and later k = 16 and F = 25 (16-bit inputs). What follows from that, with s the accumulator before a step, p the
products of the step, t the sum of the truncated terms and s' the accumulator after it:

1. A term with exponent e loses nothing: a product of 16-bit numbers has at most 20 fraction bits and an FP32
   accumulator 23, both no more than F. So at most k terms lose something, each less than 2^(e - F).
2. Truncating t to FP32 loses less than 2^-23 |t|, or 2^-149 where the result is subnormal.
3. Both truncations are toward zero, so they never make anything larger: |t| <= |s| + sum |p| and |s'| <= |t|. Hence
   after i steps |s| <= Q_i, the sum of |p| over the first i steps, with no growth factor, and |t| <= Q_(i+1).
4. 2^e is at most the largest magnitude among the terms, hence at most Q_(i+1), where no operand is subnormal. A
   subnormal operand counts with the lowest exponent of its type. So let Q' be Q with every non-zero operand's
   magnitude raised to at least the smallest normal number. A subnormal accumulator likewise has exponent -126, and e is
   never taken below a floor that lies under -126; the term 2^-126 covers both. 2^e <= Q'_(i+1) + 2^-126.

The error of step i is therefore less than (k 2^-F + 2^-23) Q'_(i+1) + k 2^-F 2^-126 + 2^-149, and it is carried to the
end unchanged, since the steps after it add to the computed accumulator exactly but for their own errors. With S steps,
the products of step i (from 0) are in Q' of this and every later step, S - i times, so that

    error <= (k 2^-F + 2^-23) · sum over the products of (S - i) |a|' |b|'  +  S (k 2^-F 2^-126 + 2^-149).

The leading factor is 5 · 2^-23 on each of these architectures. Zeros beyond the end of K, in a partial step or in
whole ones, add nothing: a zero takes no part, and an FP32 accumulator alone is truncated to itself.

What comes after the product is ordinary rounded arithmetic: alpha times it (if alpha is not 1), beta times C added by
one FMA (if beta is not 0), one rounding to the type of C (if that isn't FP32), each with its unit roundoff times the
result's magnitude, or half of the smallest subnormal. Nothing is added for good measure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

_FP32_ROUNDOFF = 2.0**-24
_FP32_HALF_SUBNORMAL = 2.0**-150
_FP32_LARGEST = float(np.finfo(np.float32).max)
#: Lowest normal number of the types of A and B.
_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
#: Of the types of C but FP32: unit roundoff, half of the smallest subnormal, where rounding overflows.
_OUTPUT = {
    "float16": (2.0**-11, 2.0**-25, 65520.0),
    "bfloat16": (2.0**-8, 2.0**-134, (2 - 2.0**-8) * 2.0**127),
}


def tensorcore_bound(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    *,
    k_per_sum: int,
    fraction_bits: int,
    output_dtype: str,
    c: npt.NDArray[Any] | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    product: Float64Array | None = None,
    k_per_split: int = 0,
) -> Float64Array:
    """The largest error that each element of alpha · a @ b + beta · c may have, from the tensor core's arithmetic.

    Parameters
    ----------
    a, b : (M, K) and (K, N) arrays of float16, or of bfloat16 (``ml_dtypes``), or stacks of them.
    k_per_sum, fraction_bits : k and F above: 8 and 24 on sm_80 to sm_89, 16 and 25 from sm_90 on;
        ``emulator.tensorcore.rule`` has them as ``group`` and ``fraction_bits``.
    output_dtype : ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    c : (M, N) array, needed if ``beta`` isn't 0.
    alpha, beta : taken as FP32.
    product : a @ b in float64, if it is at hand.
    k_per_split : depth of one part of split-K, whose sums start from zero and are then added in FP32; 0 for one part.

    Returns
    -------
    (M, N) array of float64. Infinite where a partial sum or the result may overflow its type, for an infinity is right
    there too. For finite inputs.

    Raises
    ------
    ValueError : for types that it doesn't cover, an accumulator wider than ``fraction_bits``, or a missing ``c``.

    >>> a = np.ones((2, 16), np.float16)
    >>> float(tensorcore_bound(a, a.T, k_per_sum=16, fraction_bits=25, output_dtype="float32")[0, 0] / 2**-23)
    80.0
    """
    names = {np.dtype(a.dtype).name, np.dtype(b.dtype).name}
    if len(names) > 1 or not names <= _SMALLEST_NORMAL.keys():
        raise ValueError(f"a and b are {' and '.join(sorted(names))}; the bound is for float16 or bfloat16 in both")
    if fraction_bits < 23:
        raise ValueError(f"fraction_bits = {fraction_bits}: below 23 the accumulator itself is cut, see step 1")
    if output_dtype != "float32" and output_dtype not in _OUTPUT:
        raise ValueError(f"output_dtype {output_dtype!r} is not float32, float16 or bfloat16")
    if beta != 0 and c is None:
        raise ValueError("beta isn't 0, so c is needed")
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    alpha, beta = float(np.float32(alpha)), float(np.float32(beta))
    least = _SMALLEST_NORMAL[names.pop()]
    k = a.shape[-1]
    steps = -(-k // k_per_sum)
    depth = k_per_split or max(k, 1)
    parts = max(-(-k // depth), 1)
    later = -(-min(depth, k) // k_per_sum) - np.arange(k) % depth // k_per_sum
    a_size, b_size = _raised(a64, least), _raised(b64, least)

    cut = k_per_sum * 2.0**-fraction_bits
    error: Float64Array = (cut + 2.0**-23) * ((a_size * later) @ b_size)
    # k · 2^-F · 2^-126 underflows nothing in float64
    error += (steps + parts - 1) * (cut * 2.0**-126 + 2.0**-149)
    if parts > 1:  # parts - 1 additions, whose roundings concern no more than all products together
        error += (parts - 1) * (_FP32_ROUNDOFF * (a_size @ b_size + error) + _FP32_HALF_SUBNORMAL)
    overflows = a_size @ b_size >= _FP32_LARGEST

    value = a64 @ b64 if product is None else product
    error, value = abs(alpha) * error, alpha * value
    if alpha not in (1.0, -1.0, 0.0):
        error += _FP32_ROUNDOFF * (np.abs(value) + error) + _FP32_HALF_SUBNORMAL
    if beta != 0 and c is not None:
        value = value + beta * c.astype(np.float64)
        error += _FP32_ROUNDOFF * (np.abs(value) + error) + _FP32_HALF_SUBNORMAL
    return np.where(overflows, np.inf, output_bound(value, error, output_dtype))


def output_bound(value: Float64Array, error: Float64Array, output_dtype: str) -> Float64Array:
    """The error bound of FP32 results once they are rounded to their type; infinite where they may overflow it."""
    limit = _FP32_LARGEST
    rounded = error
    if output_dtype != "float32":
        roundoff, half_subnormal, limit = _OUTPUT[output_dtype]
        rounded = error + roundoff * (np.abs(value) + error) + half_subnormal
    return np.where(np.abs(value) + error >= limit, np.inf, rounded)


def _raised(values: Float64Array, least: float) -> Float64Array:
    """Magnitudes, those of non-zero elements at least ``least``."""
    size = np.abs(values)
    return np.where(size == 0, 0.0, np.maximum(size, least))
