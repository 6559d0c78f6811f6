"""Which factors TMA can read as they lie, whether it can store C, and the tensor maps by which it does."""

from __future__ import annotations

from typing import Literal

from numba_gemm.problem import ALIGNMENT, ITEMSIZE, Problem
from numba_gemm.spec import TensorMap

#: Elements of 16 bits in 16 bytes, and the stride in bytes from which on TMA can't follow.
_WIDTH, _STRIDE_LIMIT = 8, 1 << 40

Matrix = Literal["A", "B"]


def unreadable(problem: Problem, matrix: Matrix) -> str | None:
    """Why TMA can't read a factor of 16-bit elements as it lies, in words, or None."""
    p = problem
    inner, outer, stride, apart = extents(p, matrix)
    offset, layout = (p.a_offset, p.a_layout) if matrix == "A" else (p.b_offset, p.b_layout)
    if offset:
        return f"{matrix} starts {offset} bytes past a multiple of {ALIGNMENT}"
    if outer > 1:
        if stride % _WIDTH:
            return f"the {layout} stride of {matrix}, {stride} elements, is not a multiple of {_WIDTH}"
        if not inner <= stride < _STRIDE_LIMIT // 2:
            return f"the {layout} stride of {matrix}, {stride} elements, is not one of {inner} to 2**39"
    if p.batch > 1:
        if apart % _WIDTH:
            return f"the batch stride of {matrix}, {apart} elements, is not a multiple of {_WIDTH}"
        if not 0 <= apart < _STRIDE_LIMIT // 2:
            return f"the batch stride of {matrix}, {apart} elements, is not one of 0 to 2**39"
    return None


def reads_both(problem: Problem) -> bool:
    """Whether TMA can read both factors as they lie; it has no maps of empty ones."""
    return problem.k > 0 and unreadable(problem, "A") is None and unreadable(problem, "B") is None


def factor_map(
    problem: Problem, matrix: Matrix, address: int, element: str, box: tuple[int, ...], swizzle: str, count: int
) -> TensorMap:
    """The map of ``count`` matrices of a batch, of which the first lies at ``address``; see :func:`unreadable`."""
    inner, outer, stride, apart = extents(problem, matrix)
    # Where there is one row, or one matrix, the stride is never used, but has to be one that TMA knows.
    row_bytes = 2 * (stride if outer > 1 else _rounded(inner))
    batch_bytes = 2 * apart if count > 1 else row_bytes
    return TensorMap(address, element, (inner, outer, count), (row_bytes, batch_bytes), box, swizzle)


def stores(problem: Problem) -> bool:
    """Whether TMA can store C as it lies: it writes rows in whole chunks of 16 bytes, also the last one of a row."""
    p = problem
    itemsize = ITEMSIZE[p.c_dtype]
    if p.n * itemsize % ALIGNMENT:
        return False
    strides = [p.ldc] * (p.m > 1) + [p.batch_stride_c] * (p.batch > 1)
    whole = all(s * itemsize % ALIGNMENT == 0 and 0 < s * itemsize < _STRIDE_LIMIT for s in strides)
    return not p.c_offset and whole and (p.m == 1 or p.ldc >= p.n)


def output_map(
    problem: Problem, address: int, element: str, box: tuple[int, ...], swizzle: str, count: int
) -> TensorMap:
    """The map of ``count`` matrices C of a batch, of which the first lies at ``address``; see :func:`stores`."""
    p = problem
    itemsize = ITEMSIZE[p.c_dtype]
    row_bytes = itemsize * (p.ldc if p.m > 1 else _rounded(p.n))
    batch_bytes = itemsize * p.batch_stride_c if count > 1 else row_bytes
    return TensorMap(address, element, (p.n, p.m, count), (row_bytes, batch_bytes), box, swizzle, "none")


def _rounded(elements: int) -> int:
    """A stride of 16-bit elements that holds so many and is a multiple of 16 bytes."""
    return -(-elements // _WIDTH) * _WIDTH


def extents(problem: Problem, matrix: Matrix) -> tuple[int, int, int, int]:
    """Neighbouring elements, rows of them, and the strides in elements of rows and of matrices."""
    p = problem
    if matrix == "A":
        inner, outer = (p.k, p.m) if p.a_layout == "row" else (p.m, p.k)
        return inner, outer, p.lda, p.batch_stride_a
    inner, outer = (p.n, p.k) if p.b_layout == "row" else (p.k, p.n)
    return inner, outer, p.ldb, p.batch_stride_b
