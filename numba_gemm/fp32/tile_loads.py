"""Four consecutive elements of a matrix row, or zeros outside it: how v6 and v7 fill their tiles."""

from __future__ import annotations

from numba import float32, int64, uint32

from numba_gemm.compile.numba_source import device_function
from numba_gemm.intrinsics import load_global_v4


@device_function
def load_group_v4(X, row, rows, column, columns, leading_dimension):
    """One 16-byte load. ``columns`` is a multiple of 4, so a group is wholly inside the matrix or wholly outside."""
    group = (float32(0), float32(0), float32(0), float32(0))
    if row < rows and column < columns:
        group = load_global_v4(X, int64(row) * leading_dimension + int64(column))
    return group


@device_function
def load_group_scalar(X, row, rows, column, columns, leading_dimension):
    """Four guarded 4-byte loads: for odd widths and misaligned rows."""
    index = int64(row) * leading_dimension + int64(column)
    x = float32(0)
    y = float32(0)
    z = float32(0)
    w = float32(0)
    if row < rows:
        if column < columns:
            x = X[index]
        if uint32(column + uint32(1)) < columns:
            y = X[index + 1]
        if uint32(column + uint32(2)) < columns:
            z = X[index + 2]
        if uint32(column + uint32(3)) < columns:
            w = X[index + 3]
    return (x, y, z, w)
