"""How v6 and v7 fill their tiles: groups of four elements, copied along the tile or across it.

The tiles of A and B lie in shared memory alike, a row for each k: ``tile[k * width + x]``, where x is a row of A or a
column of B. In global memory either x or k is the direction in which elements are neighbours, by the matrix's layout:

======  ==================================  ====================================================================
along   A column-major, B row-major         four neighbours in x are neighbours in the tile: one 16-byte store
across  A row-major, B column-major         four neighbours in k go down a column of the tile, transposed: four
                                            stores, whose bank conflicts the kernels' headers count
======  ==================================  ====================================================================

Either way lanes read global memory in the direction of its neighbours, and threads copy equally many groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import float32, int64, uint32

from numba_gemm.compile.numba_source import device_function
from numba_gemm.intrinsics import load_global_v4, store_shared_v4

VECTOR = 4


class TileCopy(NamedTuple):
    """Device functions that copy one group of four.

    ``place(thread, copy)`` is where in the tile it goes, as (k, x); ``load(X, k, depth, x, extent, leading_dimension)``
    reads it from the matrix, of ``depth`` × ``extent`` elements, zeros outside; ``store(tile, k, x, …)`` writes it.
    """

    place: Any
    load: Any
    store: Any


def tile_copy(*, along: bool, vector_width: int, width: int, depth: int, threads: int) -> TileCopy:
    """The copies of a tile of ``depth`` rows of ``width`` elements by a block of ``threads``."""
    load_group = load_group_v4 if vector_width == VECTOR else load_group_scalar
    groups = (width if along else depth) // VECTOR  # side by side in global memory
    apart = threads // groups  # rows of global memory between two groups of one thread

    @device_function
    def place_along(thread, copy):
        return uint32(thread // uint32(groups) + copy * uint32(apart)), thread % uint32(groups) * uint32(VECTOR)

    @device_function
    def load_along(X, k, depth, x, extent, leading_dimension):
        return load_group(X, k, depth, x, extent, leading_dimension)

    @device_function
    def store_along(tile, k, x, e0, e1, e2, e3):
        store_shared_v4(tile, uint32(k * uint32(width) + x), e0, e1, e2, e3)

    @device_function
    def place_across(thread, copy):
        return thread % uint32(groups) * uint32(VECTOR), uint32(thread // uint32(groups) + copy * uint32(apart))

    @device_function
    def load_across(X, k, depth, x, extent, leading_dimension):
        return load_group(X, x, extent, k, depth, leading_dimension)

    @device_function
    def store_across(tile, k, x, e0, e1, e2, e3):
        slot = uint32(k * uint32(width) + x)
        tile[slot] = e0
        tile[uint32(slot + uint32(width))] = e1
        tile[uint32(slot + uint32(2 * width))] = e2
        tile[uint32(slot + uint32(3 * width))] = e3

    return TileCopy(*(place_along, load_along, store_along) if along else (place_across, load_across, store_across))


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
    # One limit a group and no branch round the four: v7 has no register left for the difference.
    end = columns if row < rows else uint32(0)
    if column < end:
        x = X[index]
    if uint32(column + uint32(1)) < end:
        y = X[index + 1]
    if uint32(column + uint32(2)) < end:
        z = X[index + 2]
    if uint32(column + uint32(3)) < end:
        w = X[index + 3]
    return (x, y, z, w)
