"""Stacks of matrices in memory: np.matmul's broadcasting, and how few launches a broadcast stack needs.

Pure arithmetic on shapes and strides, in elements. Nothing here knows of arrays, kernels or devices.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

#: Rows, columns and depth that a kernel can have: its indices are 32 bits.
MAX_DIMENSION = 2**31 - 1

Shape = tuple[int, ...]
Layout = Literal["row", "column"]


class ProductShape(NamedTuple):
    """The shapes of ``a @ b``: of one product, of the stack, and of the result with the axes that 1-D factors lose."""

    m: int
    n: int
    k: int
    batch: Shape
    result: Shape


def product_shape(a: Shape, b: Shape) -> ProductShape:
    """np.matmul's rules for two shapes of one dimension or more.

    A 1-D ``a`` is a row and a 1-D ``b`` a column, whose axis the result doesn't have. All axes but the last two are
    broadcast against each other.

    Raises
    ------
    ValueError : if the inner dimensions or the stacks don't match.
    """
    m, k = (1, a[0]) if len(a) == 1 else a[-2:]
    k_of_b, n = (b[0], 1) if len(b) == 1 else b[-2:]
    if k != k_of_b:
        columns = "elements" if len(a) == 1 else "columns"
        rows = "elements" if len(b) == 1 else "rows"
        raise ValueError(
            "matmul: Input operand 1 has a mismatch in its core dimension 0, with gufunc signature "
            f"(n?,k),(k,m?)->(n?,m?) (size {k_of_b} is different from {k}): a has shape {a}, b has shape {b}, and the "
            f"{columns} of a must be as many as the {rows} of b"
        )
    batch = broadcast(a[:-2], b[:-2])
    if batch is None:
        raise ValueError(
            f"matmul: operands could not be broadcast together with remapped shapes: a has shape {a} and b has shape "
            f"{b}; the axes before the last two must be equal or 1"
        )
    result = (*batch, *((m,) if len(a) > 1 else ()), *((n,) if len(b) > 1 else ()))
    return ProductShape(m, n, k, batch, result)


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape that both broadcast to, or None."""
    pairs = list(itertools.zip_longest(reversed(a), reversed(b), fillvalue=1))
    if any(x != y and 1 not in (x, y) for x, y in pairs):
        return None
    return tuple(y if x == 1 else x for x, y in reversed(pairs))


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape: element (i, j) of matrix (p, q, …) lies at i·row_stride + j·column_stride + p·… + q·….

    Attributes
    ----------
    rows, columns : of each matrix.
    row_stride, column_stride : in elements, of any sign; 0 where all rows (columns) are the same memory.
    batch_strides : one for each axis of the stack, outermost first.
    """

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    batch_strides: Shape = ()

    @property
    def transposed(self) -> Stack:
        """The same memory with rows and columns exchanged."""
        return Stack(self.columns, self.rows, self.column_stride, self.row_stride, self.batch_strides)

    def layout(self, *, columns_too: bool = True) -> tuple[Layout, int] | None:
        """How a kernel can read it as it lies: ``("row", row stride)`` or ``("column", column stride)``.

        Rows whose elements are neighbours go before columns whose elements are. A single column can be read either way,
        by columns where that makes whole groups of 16 bytes. None if neither are neighbours, or, without
        ``columns_too``, if rows aren't.
        """
        by_row = ("row", self.row_stride if self.rows > 1 else self.columns)
        by_column = ("column", self.column_stride if self.columns > 1 else self.rows)
        if self.column_stride == 1 and self.columns > 1:
            return by_row  # type: ignore[return-value]
        if columns_too and self.row_stride == 1 and (self.columns > 1 or self.rows % 4 == 0 < self.rows):
            return by_column  # type: ignore[return-value]
        if self.columns <= 1:  # a single column has no neighbours to part
            return by_row  # type: ignore[return-value]
        if columns_too and self.rows <= 1:
            return by_column  # type: ignore[return-value]
        return None

    def packed(self, extents: Shape, row_stride: int | None = None) -> tuple[Stack, int]:
        """This stack copied row-major without gaps, and the elements of the copy.

        Axes along which the same matrix is repeated (stride 0) stay repeated and take no memory. Rows are
        ``row_stride`` elements apart, or follow one another.
        """
        row_stride = row_stride or self.columns
        size = self.rows * row_stride
        strides = []
        for extent, stride in zip(reversed(extents), reversed(self.batch_strides), strict=True):
            strides.append(size if stride else 0)
            size *= extent if stride else 1
        return Stack(self.rows, self.columns, row_stride, 1, tuple(reversed(strides))), size


def stack_of(shape: Shape, strides: Shape, batch: Shape, *, column: bool = False) -> Stack:
    """An array of one dimension or more as a stack that is broadcast to ``batch``.

    A 1-D array is one row, or with ``column`` one column.
    """
    if len(shape) == 1:
        row = Stack(1, shape[0], 0, strides[0], (0,) * len(batch))
        return row.transposed if column else row
    missing = len(batch) - (len(shape) - 2)
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(shape[:-2], strides[:-2], strict=True))
    return Stack(shape[-2], shape[-1], strides[-2], strides[-1], (0,) * missing + own)


def result_stack(shape: ProductShape, strides: Shape, *, a_is_vector: bool, b_is_vector: bool) -> Stack:
    """The result of a product as a stack of m×n matrices, with an axis for each that a 1-D factor took away."""
    axes = list(strides)
    column_stride = 0 if b_is_vector else axes.pop()
    row_stride = 0 if a_is_vector else axes.pop()
    return Stack(shape.m, shape.n, row_stride, column_stride, tuple(axes))


@dataclass(frozen=True)
class Batches:
    """Three stacks and the extents of the axes that they are stacked along."""

    extents: Shape
    a: Stack
    b: Stack
    c: Stack

    @property
    def count(self) -> int:
        """Products in all."""
        return math.prod(self.extents)


def simplified(batches: Batches) -> Batches:
    """The same products along as few axes as their strides allow, folded into M or N where all share a factor.

    Axes of extent 1 go; two axes that every stack walks with one stride become one; and where B is the same for
    matrices of A that follow each other like rows of one (as in ``(batch, m, k) @ (k, n)``), they are rows of one.
    """
    stacks = (batches.a, batches.b, batches.c)
    axes = [
        (extent, a_stride, b_stride, c_stride)
        for extent, a_stride, b_stride, c_stride in zip(
            batches.extents, *(stack.batch_strides for stack in stacks), strict=True
        )
        if extent != 1
    ]
    axes.sort(key=lambda axis: -abs(axis[3]))  # C's memory order, whatever order the axes were given in
    merged: list[tuple[int, int, int, int]] = []
    for axis in axes:
        if merged and all(outer == inner * axis[0] for outer, inner in zip(merged[-1][1:], axis[1:], strict=True)):
            merged[-1] = (merged[-1][0] * axis[0], axis[1], axis[2], axis[3])
        else:
            merged.append(axis)
    a, b, c = stacks
    for axis in list(reversed(merged)):
        extent, a_stride, b_stride, c_stride = axis
        if max(a.rows, b.columns) * extent > MAX_DIMENSION:
            continue
        if b_stride == 0 and _follow(a_stride, a.rows, a.row_stride) and _follow(c_stride, c.rows, c.row_stride):
            a = _with_rows(a, a.rows * extent, a_stride)
            c = _with_rows(c, c.rows * extent, c_stride)
        elif (
            a_stride == 0
            and _follow(b_stride, b.columns, b.column_stride)
            and _follow(c_stride, c.columns, c.column_stride)
        ):
            b = _with_rows(b.transposed, b.columns * extent, b_stride).transposed
            c = _with_rows(c.transposed, c.columns * extent, c_stride).transposed
        else:
            continue
        merged.remove(axis)
    a, b, c = (
        replace(stack, batch_strides=tuple(axis[1 + index] for axis in merged)) for index, stack in enumerate((a, b, c))
    )
    return Batches(tuple(axis[0] for axis in merged), a, b, c)


def _follow(batch_stride: int, rows: int, row_stride: int) -> bool:
    """Whether the first row of a matrix follows the last row of the one before it."""
    return rows == 1 or batch_stride == rows * row_stride


def _with_rows(stack: Stack, rows: int, batch_stride: int) -> Stack:
    row_stride = stack.row_stride if stack.rows > 1 else batch_stride
    return replace(stack, rows=rows, row_stride=row_stride)


def launch_axis(batches: Batches) -> int | None:
    """The axis along which one launch takes all products: the longest; None if there is no axis."""
    if not batches.extents:
        return None
    return max(range(len(batches.extents)), key=lambda axis: batches.extents[axis])


def offsets(extents: Shape, strides: Shape) -> list[int]:
    """The offset of each matrix of a stack, in elements, last axis fastest; one 0 for no axes."""
    found = [0]
    for extent, stride in zip(extents, strides, strict=True):
        found = [offset + index * stride for offset in found for index in range(extent)]
    return found
