"""Inputs of a benchmark, and the check of what comes out.

Normal values are drawn once, into a pool whose length is a prime; every matrix is a stretch of the pool, from an offset
of its own and wrapped round. Gigabytes of input then cost a copy, and no two rows of a matrix are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.benchmark.suites import Shape
from numba_gemm.processes import usable_cores
from numba_gemm.validate import Reference, check, reference

Matrix = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
T = TypeVar("T")

#: Length of the pool, the least prime above 2²⁴: a row length can't divide it, so rows don't repeat.
POOL_LENGTH = 16_777_259

#: Products of at most this many terms are checked in full; larger ones on a sample.
FULL_CHECK_TERMS = 2048**3

#: Rows and columns of C in the sample.
SAMPLE = 64

#: Roundings to 16 bits that a peer's partial sums may have.
REDUCED_SUMS = 4

_BLOCK_ELEMENTS = 2**22  # of a factor that a thread converts to float64 at once; both bound the memory
_THREADS = 8


class Pool:
    """Normal values, of which matrices are made."""

    def __init__(self, seed: int = 0, length: int = POOL_LENGTH) -> None:
        self.values = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
        self._typed: dict[str, Matrix] = {"float32": self.values}

    def matrix(self, rows: int, columns: int, offset: int, dtype: str = "float32") -> Matrix:
        """The pool from ``offset`` on, wrapped round and rounded to a type, as a matrix."""
        if dtype not in self._typed:
            self._typed[dtype] = self.values.astype(numpy_dtype(dtype))
        values = self._typed[dtype]
        flat = np.empty(rows * columns, values.dtype)
        length = len(values)
        start, done = offset % length, 0
        while done < flat.size:
            take = min(length - start, flat.size - done)
            flat[done : done + take] = values[start : start + take]
            done, start = done + take, 0
        return flat.reshape(rows, columns)

    def factors(self, shape: Shape, number: int, dtype: str = "float32") -> tuple[Matrix, Matrix]:
        """A and B of set ``number``: the same for the same number, different for different ones."""
        step = 1_000_003
        return (
            self.matrix(shape.m, shape.k, (2 * number) * step, dtype),
            self.matrix(shape.k, shape.n, (2 * number + 1) * step, dtype),
        )


@dataclass(frozen=True)
class Validation:
    """Whether an output is right: the largest error as a share of its bound, what was looked at, and what is wrong."""

    ok: bool
    error_over_bound: float
    extent: str
    message: str


class Checker:
    """The reference of one product, computed once and compared with each kernel's output.

    Products of up to 2048³ terms are checked in full. Of larger ones 64 rows and 64 columns of C, drawn at random, are
    checked in full, and every element for having been written; a matrix of at most 64 rows is checked whole anyway.

    Parameters
    ----------
    a, b : the factors; C has their type.
    seed : of the sample.
    full_check_terms : see above.
    tensor_core : compute capability whose tensor cores multiply them; None for FP32 arithmetic.
    """

    def __init__(
        self,
        a: Matrix,
        b: Matrix,
        *,
        seed: int = 0,
        full_check_terms: int = FULL_CHECK_TERMS,
        tensor_core: tuple[int, int] | None = None,
    ) -> None:
        (m, k), n = a.shape, b.shape[1]
        self._a, self._b, self._tensor_core = a, b, tensor_core
        #: Rows and columns of each part of C that is looked at.
        self.parts: list[tuple[Indices, Indices]] = []
        self._references: dict[int, list[Reference]] = {}
        if m * n * k <= full_check_terms or m <= SAMPLE:
            self.extent = "all"
            self.parts = [(np.arange(m), columns) for columns in _blocks(n, k)]
            return
        self.extent = f"{SAMPLE} rows, {min(SAMPLE, n)} columns"
        generator = np.random.default_rng(seed)
        rows = np.sort(generator.choice(m, SAMPLE, replace=False))
        some = np.sort(generator.choice(n, min(SAMPLE, n), replace=False))
        self.parts = [(rows, columns) for columns in _blocks(n, k)] + [(block, some) for block in _blocks(m, k)]

    def check(self, c: Matrix, *, k_per_split: int = 0, reduced: bool = False) -> Validation:
        """Compare an output; NaN never passes, anywhere in it.

        ``k_per_split`` is the depth of one part where K was split. ``reduced`` allows for partial sums that are rounded
        to the type of C before they are added, as cuBLAS may do in 16 bits.
        """
        worst = 0.0
        references = self._expected(k_per_split)
        if reduced and c.dtype.itemsize == 2:
            more = self._of_parts(lambda rows, columns: self._reductions(rows, columns, c.dtype.name))
            references = [Reference(one.value, one.bound + own) for one, own in zip(references, more, strict=True)]
        for (rows, columns), allowed in zip(self.parts, references, strict=True):
            verdict = check(c[np.ix_(rows, columns)], allowed)
            worst = max(worst, verdict.error_over_bound)
            if not verdict:
                at = tuple(int(i) for i in verdict.worst)
                where = (int(rows[at[0]]), int(columns[at[1]])) if at else ()
                return Validation(False, worst, self.extent, f"element {where}: {verdict.message}")
        unwritten = int(c.size - np.count_nonzero(np.isfinite(c)))
        if unwritten:
            return Validation(
                False, float("inf"), self.extent, f"{unwritten} of {c.size} elements are unwritten or not finite"
            )
        return Validation(True, worst, self.extent, "")

    def _expected(self, k_per_split: int) -> list[Reference]:
        if k_per_split not in self._references:
            self._references[k_per_split] = self._of_parts(
                lambda rows, columns: reference(
                    *self._factors(rows, columns), tensor_core=self._tensor_core, k_per_split=k_per_split
                )
            )
        return self._references[k_per_split]

    def _of_parts(self, work: Callable[[Indices, Indices], T]) -> list[T]:
        """What ``work`` makes of each part's rows and columns, by several threads: NumPy lets others run meanwhile."""
        with ThreadPoolExecutor(min(_THREADS, usable_cores(), len(self.parts))) as threads:
            return list(threads.map(lambda part: work(*part), self.parts))

    def _factors(self, rows: Indices, columns: Indices) -> tuple[Matrix, Matrix]:
        a, b = self._a, self._b
        return (a if len(rows) == a.shape[0] else a[rows]), (b if len(columns) == b.shape[1] else b[:, columns])

    def _reductions(self, rows: Indices, columns: Indices, dtype: str) -> npt.NDArray[np.float64]:
        """:data:`REDUCED_SUMS` roundings to a 16-bit type, each of no more than the sum of magnitudes."""
        a, b = (np.abs(factor.astype(np.float32)) for factor in self._factors(rows, columns))
        bound: npt.NDArray[np.float64] = (a @ b).astype(np.float64)
        return REDUCED_SUMS * (2.0**-11 if dtype == "float16" else 2.0**-8) * bound


def _blocks(extent: int, k: int) -> Iterator[npt.NDArray[np.int64]]:
    """Index ranges that cover ``extent`` such that ``k`` × the range stays within the memory bound."""
    size = max(1, _BLOCK_ELEMENTS // max(k, 1))
    for begin in range(0, extent, size):
        yield np.arange(begin, min(begin + size, extent))
