"""Whether a product is right: a float64 reference, an elementwise bound from the arithmetic, a verdict.

The bound. A kernel whose products and sums are FP32 (one rounding for each FMA, in any order) computes each element of
A·B with an error of at most γ(K)·(|A|·|B|), γ(K) = K·u / (1 − K·u), u = 2⁻²⁴. Source: Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 3.1. Scaling by alpha and beta and adding c adds three roundings, the last of
them of the sum of magnitudes; results so small that they underflow add at most half of the smallest subnormal for
each operation. Nothing is added for good measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_UNIT_ROUNDOFF = 2.0**-24
_SMALLEST_SUBNORMAL = 2.0**-149

#: Byte that outputs are filled with before a run: four of them are a NaN, so an element left unwritten shows.
POISON_BYTE = 0xFF


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes
    ----------
    ok : whether every element is within its bound.
    error_over_bound : the largest ratio of error to bound, inf if an element isn't finite where it should be.
    worst : index of that element.
    message : what is wrong with it, empty if nothing is.
    """

    ok: bool
    error_over_bound: float
    worst: tuple[int, ...]
    message: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Reference:
    """The right answer in float64 and how far from it each element may be."""

    value: npt.NDArray[np.float64]
    bound: npt.NDArray[np.float64]


def gamma_fp32(terms: int) -> float:
    """γ(terms): the relative error of a sum of so many products with FP32 roundings."""
    return terms * _UNIT_ROUNDOFF / (1 - terms * _UNIT_ROUNDOFF)


def reference(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    c: npt.NDArray[Any] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c_dtype: str = "",
    tensor_core: tuple[int, int] | None = None,
    k_per_split: int = 0,
) -> Reference:
    """alpha · a @ b + beta · c in float64, with the bound of the arithmetic that computes it.

    Parameters
    ----------
    a, b : (M, K) and (K, N) arrays, or stacks of them.
    c : (M, N), needed if ``beta`` isn't 0.
    c_dtype : element type of the result, for the rounding to it; empty for that of ``a``.
    tensor_core : compute capability whose tensor cores multiply the 16-bit factors; None for FP32 arithmetic.
    k_per_split : depth of one part of a product whose K is split; 0 if it isn't.
    """
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    alpha, beta = float(np.float32(alpha)), float(np.float32(beta))
    c_dtype = c_dtype or a.dtype.name
    if beta != 0 and c is None:
        raise ValueError("beta isn't 0, so c is needed")
    product = a64 @ b64
    value = alpha * product
    c_part = np.float64(0) if c is None or beta == 0 else beta * c.astype(np.float64)
    value = value + c_part
    if tensor_core is not None:
        from numba_gemm.tensorcore.bound import tensorcore_bound

        k_per_sum, fraction_bits = (16, 25) if tensor_core >= (9, 0) else (8, 24)
        bound = tensorcore_bound(
            a,
            b,
            k_per_sum=k_per_sum,
            fraction_bits=fraction_bits,
            output_dtype=c_dtype,
            c=c if beta != 0 else None,
            alpha=alpha,
            beta=beta,
            product=product,
            k_per_split=k_per_split,
        )
        return Reference(value, bound)

    magnitude = abs(alpha) * (np.abs(a64) @ np.abs(b64)) + np.abs(c_part)
    roundings = a.shape[-1] + (0 if alpha == 1 and beta == 0 else 1) + (2 if beta != 0 else 0)
    bound = gamma_fp32(roundings) * magnitude + (roundings + 1) * 0.5 * _SMALLEST_SUBNORMAL
    if c_dtype != "float32":
        from numba_gemm.tensorcore.bound import output_bound

        bound = output_bound(value, bound, c_dtype)
    return Reference(value, bound)


def check(result: npt.NDArray[Any], expected: Reference, *, exact: bool = False) -> Verdict:
    """Compare a product with its reference.

    ``exact`` asks for equality with the reference rounded to the result's type, for inputs whose products and sums
    have no rounding. NaN never passes.
    """
    if result.shape != expected.value.shape:
        return Verdict(False, np.inf, (), f"the result has shape {result.shape}, not {expected.value.shape}")
    if result.size == 0:
        return Verdict(True, 0.0, (), "")
    with np.errstate(invalid="ignore", over="ignore"):
        target = expected.value.astype(result.dtype).astype(np.float64) if exact else expected.value
        error = np.abs(result.astype(np.float64) - target)
    bound = np.zeros_like(expected.bound) if exact else expected.bound
    # 0/0 is right and x/0 is wrong; a NaN is turned into the worst there is.
    ratio = np.where(error <= bound, np.divide(error, bound, out=np.zeros_like(error), where=bound > 0), np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where((error > bound) & (bound > 0) & np.isfinite(error), error / bound, ratio)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    largest = float(ratio[worst])
    if largest <= 1.0:
        return Verdict(True, largest, worst, "")
    wrong = int(np.count_nonzero(ratio > 1.0))
    return Verdict(
        False,
        largest,
        worst,
        f"{wrong} of {ratio.size} elements are out of bounds; element {worst} is {result[worst]!r}, should be "
        f"{expected.value[worst]:.9g} ± {bound[worst]:.3g}",
    )
