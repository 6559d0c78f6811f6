"""The arguments of a product with NumPy arrays as lists of stacks that the pipeline takes.

A stack is (batch, rows, columns) with one stride from matrix to matrix, 0 where all use the same one. Batch dimensions
that don't merge into one such stride for A, B and C alike are looped over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.host.blocks import Frame, Shape, frame
from numba_gemm.host.matrix import Matrix
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.stack import MAX_DIMENSION

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Stack:
    """Matrices of one operand, on the host or the device.

    Attributes
    ----------
    array : (batch, rows, columns) on the host, else None.
    pointer : address of the first element.
    shape : (batch, rows, columns).
    strides : in bytes.
    """

    array: Array | None
    pointer: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def on_device(self) -> bool:
        """Whether it needs no copy."""
        return self.array is None

    @property
    def shared(self) -> bool:
        """Whether all products of the batch use one matrix."""
        return self.shape[0] > 1 and self.strides[0] == 0


@dataclass(frozen=True)
class Stacks:
    """A product as a list of products of stacks of the same shape and strides.

    ``swapped`` says that it is the transposed one: A comes from the caller's second operand.
    """

    a: list[Stack]
    b: list[Stack]
    c: list[Stack]
    swapped: bool = False


def is_column_major(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the columns, and not the rows, of matrices are contiguous; shape and strides may have a batch first."""
    rows, columns = shape[-2:]
    return columns > 1 and strides[-1] != itemsize and rows > 1 and strides[-2] == itemsize


@dataclass(frozen=True)
class Operand:
    """How a kernel finds A or B: its pitch, layout and distance between matrices, in elements.

    ``offset`` is the address modulo 16 bytes, which isn't 0 only for an operand that was on the device before.
    """

    pitch: int
    column_major: bool
    apart: int
    offset: int
    on_device: bool


@dataclass(frozen=True)
class Call:
    """Everything that the choice of kernel and blocks depends on."""

    batch: int
    m: int
    n: int
    k: int
    dtype: np.dtype[Any]
    c_dtype: np.dtype[Any]
    alpha: float
    beta: float
    a: Operand
    b: Operand

    def problem(self) -> Problem:
        """The whole product, as it lies on the device."""
        c = frame(self.m, self.n, self.c_dtype.itemsize, False)
        return Problem(
            self.m,
            self.n,
            self.k,
            self.dtype.name,
            self.a.pitch,
            self.b.pitch,
            c.pitch,
            self.a.offset,
            self.b.offset,
            0,
            self.alpha,
            self.beta,
            self.c_dtype.name,
            "column" if self.a.column_major else "row",
            "column" if self.b.column_major else "row",
            self.batch,
            self.a.apart,
            self.b.apart,
            c.elements if self.batch > 1 else 0,
        )

    @property
    def shape(self) -> Shape:
        """The product as its cutting sees it."""
        itemsize = self.dtype.itemsize
        return Shape(
            self.batch,
            self.m,
            self.n,
            self.k,
            0 if self.a.on_device else itemsize,
            0 if self.b.on_device else itemsize,
            self.c_dtype.itemsize,
            self.batch > 1 and self.a.apart == 0,
            self.batch > 1 and self.b.apart == 0,
            self.a.column_major,
            self.b.column_major,
            self.beta != 0,
        )


def describe(a: Array | Matrix, b: Array | Matrix, c: Array, alpha: float, beta: float) -> tuple[Stacks, Call]:
    """The operands as stacks, and the call, with A and B in the layouts in which they lie."""
    swapped = is_column_major(c.shape, c.strides, c.itemsize)
    if swapped:  # Cᵀ = Bᵀ Aᵀ, whose rows are contiguous
        a, b, c = _transposed(b), _transposed(a), c.swapaxes(-1, -2)
    stacks = replace(as_stacks(a, b, c), swapped=swapped)
    return stacks, _call(stacks, a.dtype, c.dtype, alpha, beta)


def _call(stacks: Stacks, dtype: np.dtype[Any], c_dtype: np.dtype[Any], alpha: float, beta: float) -> Call:
    a, b, c = stacks.a[0], stacks.b[0], stacks.c[0]
    batch, m, n = c.shape
    itemsize = dtype.itemsize
    operands = []
    for stack in (a, b):
        _, rows, columns = stack.shape
        column_major = is_column_major(stack.shape, stack.strides, itemsize)
        if stack.on_device:
            column_major |= columns > 1 and stack.strides[2] != itemsize  # one row, its elements apart
            pitch = stack.strides[2 if column_major else 1] // itemsize
            operands.append(
                Operand(
                    pitch,
                    column_major,
                    stack.strides[0] // itemsize if batch > 1 else 0,
                    stack.pointer % ALIGNMENT,
                    True,
                )
            )
        else:
            operands.append(hosted(rows, columns, itemsize, column_major, batch > 1 and not stack.shared))
    return Call(batch, m, n, a.shape[2], dtype, c_dtype, float(alpha), float(beta), *operands)


def hosted(rows: int, columns: int, itemsize: int, column_major: bool, batched: bool) -> Operand:
    """How a kernel finds a host matrix of rows × columns, or a batch of them, once it is in its slot."""
    place: Frame = frame(rows, columns, itemsize, column_major)
    return Operand(place.pitch, column_major, place.elements if batched else 0, 0, False)


def _transposed(operand: Array | Matrix) -> Array | Matrix:
    transposed: Array | Matrix = operand.swapaxes(-1, -2)
    return transposed


def as_stacks(a: Array | Matrix, b: Array | Matrix, c: Array) -> Stacks:
    """Bring a product of operands that are broadcast to one batch shape into the pipeline's form."""
    operands = (a, b, c)
    outer, inner, inner_strides = _merge(c.shape[:-2], [operand.strides[:-2] for operand in operands])
    taller = _is_one_taller_product(a, c, inner, inner_strides)
    lists = []
    for operand, batch_stride in zip(operands, inner_strides, strict=True):
        rows, columns = operand.shape[-2:]
        row_stride, column_stride = operand.strides[-2:]
        shape, strides = (inner, rows, columns), (batch_stride, row_stride, column_stride)
        if taller:
            stacked = inner if operand is not b else 1
            shape = (1, rows * stacked, columns)
            strides = (0, batch_stride if rows == 1 and operand is not b else row_stride, column_stride)
        lists.append([_stack(operand, place, shape, strides) for place in _places(c.ndim - 2, outer)])
    return Stacks(lists[0], lists[1], lists[2])


def _merge(
    batch: tuple[int, ...], strides: list[tuple[int, ...]]
) -> tuple[list[tuple[int, int]], int, tuple[int, ...]]:
    """The outer dimensions as (axis, extent), the extent of the merged inner one, and its stride in each operand."""
    dims = [(axis, extent, tuple(own[axis] for own in strides)) for axis, extent in enumerate(batch) if extent != 1]
    if not dims:
        return [], 1, (0,) * len(strides)
    _, inner, inner_strides = dims.pop()
    while dims and dims[-1][2] == tuple(stride * inner for stride in inner_strides):
        inner *= dims.pop()[1]
    return [(axis, extent) for axis, extent, _ in dims], inner, inner_strides


def _is_one_taller_product(a: Array | Matrix, c: Array, batch: int, strides: tuple[int, ...]) -> bool:
    """Whether all A share a B, and the rows of A, and of C, follow one another from matrix to matrix."""
    rows = c.shape[-2]
    if batch == 1 or strides[1] != 0 or batch * rows > MAX_DIMENSION:
        return False
    if isinstance(a, Matrix) and rows == 1 and a.shape[-1] > 1 and a.strides[-1] != a.itemsize:
        return False  # neither rows nor columns would be contiguous, and it can't be packed
    return all(
        stride != 0 and (rows == 1 or stride == rows * operand.strides[-2])
        for operand, stride in ((a, strides[0]), (c, strides[2]))
    )


def _places(dimensions: int, outer: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Batch indices of the first matrix of each stack."""
    for index in itertools.product(*(range(extent) for _, extent in outer)):
        place = [0] * dimensions
        for (axis, _), at in zip(outer, index, strict=True):
            place[axis] = at
        yield tuple(place)


def _stack(
    operand: Array | Matrix, place: tuple[int, ...], shape: tuple[int, int, int], strides: tuple[int, int, int]
) -> Stack:
    if isinstance(operand, Matrix):
        offset = sum(at * stride for at, stride in zip(place, operand.strides[:-2], strict=True))
        return Stack(None, operand.pointer + offset, shape, strides)
    view = np.lib.stride_tricks.as_strided(operand[place], shape, strides)
    return Stack(view, view.__array_interface__["data"][0], shape, strides)
