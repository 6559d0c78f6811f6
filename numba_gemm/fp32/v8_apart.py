"""The last row and column of C apart: where they alone would begin tiles, they are products with a vector instead.

4097 columns make 33 tiles of 128, the last of which has one: 3% of the FMAs. gemv computes it behind the rest of the
product while it reads A once (H200, 4095×4097×4099: 2.61 ms in place of 2.64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_gemm.problem import ALIGNMENT, ITEMSIZE, Problem


@dataclass(frozen=True)
class Apart:
    """A row or column of C as a product of its own, and how many bytes its matrices begin past the whole product's."""

    name: str
    problem: Problem
    a_bytes: int
    b_bytes: int
    c_bytes: int


def set_apart(problem: Problem, *, row: bool, column: bool) -> tuple[list[Apart], Problem]:
    """The last column of C, and the last row of what is left, as asked; and the product without them."""
    vectors, p = [], problem
    itemsize = ITEMSIZE[p.dtype]
    if column:
        last = p.n - 1
        b_bytes = itemsize * last * (1 if p.b_layout == "row" else p.ldb)
        vectors.append(_vector(p, "column", 0, b_bytes, itemsize * last))
        p = replace(p, n=last)
    if row:
        last = p.m - 1
        a_bytes = itemsize * last * (p.lda if p.a_layout == "row" else 1)
        vectors.append(_vector(p, "row", a_bytes, 0, itemsize * last * p.ldc))
        p = replace(p, m=last)
    return vectors, p


def _vector(p: Problem, name: str, a_bytes: int, b_bytes: int, c_bytes: int) -> Apart:
    return Apart(
        name,
        replace(
            p,
            m=1 if name == "row" else p.m,
            n=1 if name == "column" else p.n,
            a_offset=(p.a_offset + a_bytes) % ALIGNMENT,
            b_offset=(p.b_offset + b_bytes) % ALIGNMENT,
            c_offset=(p.c_offset + c_bytes) % ALIGNMENT,
        ),
        a_bytes,
        b_bytes,
        c_bytes,
    )
