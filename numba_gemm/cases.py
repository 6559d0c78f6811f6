"""One generator of test problems, for the tests, `numba-gemm check` and the benchmark alike.

A :class:`Case` is a shape, a kind of input and a way for the matrices to lie in memory; :meth:`Case.make` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.problem import Problem

Matrix = npt.NDArray[Any]

#: Kinds of input. "random": normal; "integer": small whole numbers, whose product has no rounding; "onehot": each row
#: of A and each column of B picks one element of the other factor, so that a wrong index shows as a wrong value.
INPUTS = ("random", "integer", "onehot_a", "onehot_b")

#: How matrices lie. "packed": rows end to end; "padded": rows 5 elements apart; "sliced": the base address is one row
#: and one element into a larger array, so not on a 16-byte boundary; "transposed": a view of an (N, M) array;
#: "stepped": every second column; "reversed": rows and columns backwards, with negative strides.
LAYOUTS = ("packed", "padded", "sliced", "transposed", "stepped", "reversed")


@dataclass(frozen=True)
class Case:
    """One problem: C = alpha · A @ B + beta · C with (M, K) and (K, N) factors of a dtype, and C of ``c_dtype``."""

    m: int
    n: int
    k: int
    inputs: str = "random"
    layout: str = "packed"
    alpha: float = 1.0
    beta: float = 0.0
    dtype: str = "float32"
    c_dtype: str = ""  # empty: that of A and B

    def __str__(self) -> str:
        scale = "" if (self.alpha, self.beta) == (1.0, 0.0) else f" alpha={self.alpha:g} beta={self.beta:g}"
        types = "" if self.dtype == "float32" else f" {self.dtype}"
        if self.c_dtype not in ("", self.dtype):
            types += f"→{self.c_dtype}"
        return f"{self.m}×{self.n}×{self.k} {self.inputs} {self.layout}{scale}{types}"

    @property
    def exact(self) -> bool:
        """Whether no product or sum is rounded, so that the answer must be equal, not close."""
        return self.inputs != "random"

    def make(self, seed: int = 0) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and C as NumPy views, the same for the same case and seed."""
        generator = np.random.default_rng([seed, self.m, self.n, self.k])
        a = _fill(generator, (self.m, self.k), self.inputs, onehot="onehot_a")
        b = _fill(generator, (self.k, self.n), self.inputs, onehot="onehot_b")
        c = _fill(generator, (self.m, self.n), "integer" if self.exact else "random", onehot="")
        dtype, c_dtype = numpy_dtype(self.dtype), numpy_dtype(self.c_dtype or self.dtype)
        return (
            lay_out(a.astype(dtype), self.layout),
            lay_out(b.astype(dtype), self.layout),
            lay_out(c.astype(c_dtype), self.layout),
        )


def _fill(generator: np.random.Generator, shape: tuple[int, int], inputs: str, *, onehot: str) -> Matrix:
    rows, columns = shape
    if inputs == "random":
        return generator.standard_normal(shape, dtype=np.float32)
    if inputs == onehot:
        matrix = np.zeros(shape, np.float32)
        if onehot == "onehot_a":
            matrix[np.arange(rows), generator.integers(0, columns, rows)] = 1
        else:
            matrix[generator.integers(0, rows, columns), np.arange(columns)] = 1
        return matrix
    # 16 values at most 8 keep every partial sum of up to 2¹⁸ products below 2²⁴, where FP32 holds all integers.
    return generator.integers(-8, 9, shape).astype(np.float32)


def lay_out(matrix: Matrix, layout: str) -> Matrix:
    """The same matrix as a view that lies in memory in the given way."""
    rows, columns = matrix.shape
    if layout == "packed":
        return np.ascontiguousarray(matrix)
    if layout == "padded":
        view = np.full((rows, columns + 5), np.nan, matrix.dtype)[:, :columns]
    elif layout == "sliced":
        view = np.full((rows + 2, columns + 3), np.nan, matrix.dtype)[1 : rows + 1, 1 : columns + 1]
    elif layout == "transposed":
        view = np.full((columns, rows), np.nan, matrix.dtype).T
    elif layout == "stepped":
        view = np.full((rows, 2 * columns), np.nan, matrix.dtype)[:, ::2]
    elif layout == "reversed":
        view = np.full((rows, columns), np.nan, matrix.dtype)[::-1, ::-1]
    else:
        raise ValueError(f"there is no layout {layout!r}; the layouts are {', '.join(LAYOUTS)}")
    view[...] = matrix
    return view


def small_cases(tile: int = 32, step: int = 8) -> Iterator[Case]:
    """Problems of a few thousand FMAs that touch every kind of edge of a kernel with this block tile and k step."""
    for m, n, k in (
        (1, 1, 1),
        (2, 3, 1),
        (1, 1, 2 * step + 1),
        (4, 4, 4),
        (tile, tile, step),
        (tile - 1, tile + 1, step + 1),
        (tile + 1, tile - 1, step - 1 or 1),
        (1, tile + 5, 13),
        (tile + 5, 1, 13),
        (tile, tile + 4, 2 * step),
        (17, 19, 23),
        (3, 2 * tile + 4, 8),
    ):
        yield Case(m, n, k)
    yield Case(tile + 3, 37, 11, inputs="integer")
    yield Case(tile + 4, 40, 12, inputs="integer")
    yield Case(33, tile + 2, 19, inputs="onehot_a")
    yield Case(36, tile + 4, 20, inputs="onehot_b")
    for layout in LAYOUTS[1:]:
        yield Case(21, 28, 12, layout=layout)
    yield Case(13, 16, 8, alpha=-0.5, beta=2.0)
    yield Case(13, 17, 9, alpha=1.5, beta=-1.0, layout="sliced")
    yield Case(5, 6, 7, alpha=0.0, beta=0.5)


#: The K of a case for kernels that take short ones alone.
SHORT_K = 32


def typed(case: Case, dtype: str) -> Case:
    """A case in an element type; C is of it too, or float32 where nothing is rounded, so that the sums are compared."""
    return replace(case, dtype=dtype, c_dtype="float32" if case.exact else dtype)


def accepted_cases(case: Case, refuses: Callable[[Problem], str | None] | None) -> list[Case]:
    """A case, or what is left of it for a kernel of special shapes: with few rows, and with few columns, or a short K.

    ``refuses`` is the kernel's: why it can't take a problem, or None. Empty if it takes no narrow form either.
    """
    if refuses is None:
        return [case]
    for deepest in (case.k, SHORT_K):
        for most in (max(case.m, case.n), 64, 16, 1):
            shorter = replace(case, k=min(case.k, deepest))
            narrowed = dict.fromkeys((replace(shorter, m=min(case.m, most)), replace(shorter, n=min(case.n, most))))
            taken = [one for one in narrowed if refuses(_packed(one)) is None]
            if taken:
                return taken
    return []


def _packed(case: Case) -> Problem:
    """The problem of a case that lies packed; without depth, as for a call, if it reads neither factor."""
    k = case.k if case.alpha != 0 else 0
    return Problem.packed(case.m, case.n, k, dtype=case.dtype, alpha=case.alpha, beta=case.beta)


def large_cases() -> Iterator[Case]:
    """Problems for a GPU: many tiles, odd primes, long and flat shapes, and every layout at a size of several tiles."""
    for m, n, k in (
        (128, 128, 128),
        (127, 129, 131),
        (256, 384, 64),
        (512, 512, 512),
        (509, 521, 541),
        (1000, 1001, 1002),
        (1024, 1024, 1024),
        (1, 4096, 1024),
        (4096, 1, 1024),
        (1, 1, 65536),
        (8, 2048, 512),
        (2048, 8, 512),
        (64, 64, 16384),
        (3, 70000, 5),
        (70000, 3, 5),
        (1031, 257, 1),
    ):
        yield Case(m, n, k)
    yield Case(385, 511, 300, inputs="integer")
    yield Case(384, 512, 256, inputs="integer")
    yield Case(640, 383, 129, inputs="onehot_a")
    yield Case(383, 640, 256, inputs="onehot_b")
    for layout in LAYOUTS[1:]:
        yield Case(260, 388, 132, layout=layout)
        yield Case(261, 389, 133, layout=layout)
    yield Case(256, 256, 256, alpha=-0.5, beta=2.0)
    yield Case(257, 255, 253, alpha=1.5, beta=-1.0, layout="sliced")
    yield Case(128, 132, 64, alpha=0.0, beta=0.5)
