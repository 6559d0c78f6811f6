"""Inputs of a benchmark, and the check of what comes out.

Normal values are drawn once, into a pool whose length is a prime; every matrix is a stretch of the pool, from an offset
of its own and wrapped round. Gigabytes of input then cost a copy, and no two rows of a matrix are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from numba_gemm.benchmark.suites import Shape
from numba_gemm.validate import Reference, check, reference

Matrix = npt.NDArray[np.float32]

#: Length of the pool, the least prime above 2²⁴: a row length can't divide it, so rows don't repeat.
POOL_LENGTH = 16_777_259

#: Products of at most this many terms are checked in full; larger ones on a sample.
FULL_CHECK_TERMS = 2048**3

#: Rows and columns of C in the sample.
SAMPLE = 64

_BLOCK_ELEMENTS = 2**25  # of a factor that is converted to float64 at once, to bound the memory


class Pool:
    """Normal values, of which matrices are made."""

    def __init__(self, seed: int = 0, length: int = POOL_LENGTH) -> None:
        self.values = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)

    def matrix(self, rows: int, columns: int, offset: int) -> Matrix:
        """The pool from ``offset`` on, wrapped round, as a matrix."""
        flat = np.empty(rows * columns, np.float32)
        length = len(self.values)
        start, done = offset % length, 0
        while done < flat.size:
            take = min(length - start, flat.size - done)
            flat[done : done + take] = self.values[start : start + take]
            done, start = done + take, 0
        return flat.reshape(rows, columns)

    def factors(self, shape: Shape, number: int) -> tuple[Matrix, Matrix]:
        """A and B of set ``number``: the same for the same number, different for different ones."""
        step = 1_000_003
        return (
            self.matrix(shape.m, shape.k, (2 * number) * step),
            self.matrix(shape.k, shape.n, (2 * number + 1) * step),
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
    """

    def __init__(self, a: Matrix, b: Matrix, *, seed: int = 0, full_check_terms: int = FULL_CHECK_TERMS) -> None:
        m, k = a.shape
        n = b.shape[1]
        self.shape = (m, n)
        self.parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Reference]] = []
        everything = np.arange(n)
        if m * n * k <= full_check_terms or m <= SAMPLE:
            self.extent = "all"
            for columns in _blocks(n, k):
                self._add(a, b, np.arange(m), columns)
            return
        self.extent = f"{SAMPLE} rows, {min(SAMPLE, n)} columns"
        generator = np.random.default_rng(seed)
        rows = np.sort(generator.choice(m, SAMPLE, replace=False))
        some = np.sort(generator.choice(n, min(SAMPLE, n), replace=False))
        for columns in _blocks(len(everything), k):
            self._add(a, b, rows, columns)
        for block in _blocks(m, k):
            self._add(a, b, block, some)

    def _add(self, a: Matrix, b: Matrix, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> None:
        own = a if len(rows) == a.shape[0] else a[rows]
        others = b if len(columns) == b.shape[1] else b[:, columns]
        self.parts.append((rows, columns, reference(own, others)))

    def check(self, c: Matrix) -> Validation:
        """Compare an output; NaN never passes, anywhere in it."""
        worst = 0.0
        for rows, columns, expected in self.parts:
            verdict = check(c[np.ix_(rows, columns)], expected)
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


def _blocks(extent: int, k: int) -> Iterator[npt.NDArray[np.int64]]:
    """Index ranges that cover ``extent`` such that ``k`` × the range stays within the memory bound."""
    size = max(1, _BLOCK_ELEMENTS // max(k, 1))
    for begin in range(0, extent, size):
        yield np.arange(begin, min(begin + size, extent))
