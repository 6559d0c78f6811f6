"""repack: a strided array copied into another at memory speed, whatever the strides of both.

What no kernel multiplies as it lies (a stepped view, misaligned rows) is brought into rows of neighbours by these
kernels first, and an ``out`` that can't be written in place is filled by them afterwards; a whole stack of matrices
by one launch. :func:`copies` says which form, and with which parameters.

Roles        a copy has three axes: *columns*, along which the target's elements are closest; *rows*, along which the
             source's are, where that is another axis; *batch*, which is ctaid.z. Bits are moved, whatever they mean.
straight     source and target are closest along the same axis, and lanes run along it. 32×128 elements a block, 256
             threads, 16 elements a thread, all loaded before the first is stored.
aligned      the same where rows of both begin at multiples of 16 bytes: 16 bytes an access, 32 × 32 groups a block.
transposed   64×64 elements a block, 256 threads, 16 elements a thread, through shared memory: lanes read along rows and
             write along columns. A row of the tile is padded to an odd number of words, so that lanes which walk down a
             column meet 32 banks. 16-bit elements that are neighbours along both read and write share a word.
Bound by     device memory: an element is read once and written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from numba_gemm.compile.unroll import unroll
from numba_gemm.spec import MAX_GRID_Z, Config, Geometry, KernelSpec, make_config

THREADS = 256
WARPS = THREADS // 32
TILE = 64  # of the transposed form, either way
STRAIGHT_ROWS = 32
SPANS = 4  # of 32 columns that a thread visits in the straight form
ROUNDS, STRAIGHT_ROUNDS = TILE // WARPS, STRAIGHT_ROWS // WARPS  # rows or columns of a tile that a warp visits
PER_THREAD = TILE * TILE // THREADS  # values, in all forms
ALIGNMENT = 16  # bytes
MAX_EXTENT = 2**31 - 1

#: Below this many elements along the source's closest axis, lanes that ran along it would mostly idle.
FEWEST_ROWS = 8


class Copy(NamedTuple):
    """One launch: the kernel and its form, blocks, threads a block, and the values of its parameters."""

    spec: KernelSpec
    config: Config
    grid: tuple[int, int, int]
    threads: int
    values: tuple[int, ...]


def copies(
    itemsize: int,
    shape: Sequence[int],
    source: int,
    source_strides: Sequence[int],
    target: int,
    target_strides: Sequence[int],
) -> tuple[Copy, ...]:
    """The launches that copy an array into another.

    One is enough for a matrix, and for a stack of up to 65535 of them whose batch axes merge into one.

    Parameters
    ----------
    itemsize : bytes of an element, 2 or 4.
    shape : of both arrays, any number of axes below 2³¹ each.
    source, target : addresses of their first elements; the arrays may not overlap.
    source_strides, target_strides : in elements; negative and 0 will do for the source, those of the target must keep
        its elements apart.

    Returns
    -------
    Launches in any order, none if the array is empty; ``PARAMETERS[copy.spec.abi].pack(*copy.values)`` are a launch's
    parameters.
    """
    if 0 in shape:
        return ()
    axes = _merged([_Axis(*axis) for axis in zip(shape, source_strides, target_strides, strict=True) if axis[0] > 1])
    while len(axes) < 3:
        axes.append(_Axis(1, 0, 0))
    columns = min(axes, key=lambda axis: (axis.extent == 1, abs(axis.target)))
    axes.remove(columns)
    near = min(axes, key=lambda axis: (axis.extent < FEWEST_ROWS, not axis.source, abs(axis.source)))
    transposed = near.extent >= FEWEST_ROWS and 0 < abs(near.source) < abs(columns.source)
    rows = near if transposed else max(axes, key=lambda axis: axis.extent)
    axes.remove(rows)
    batch = max(axes, key=lambda axis: axis.extent)
    axes.remove(batch)

    made = []
    width = ALIGNMENT // itemsize
    for index in itertools.product(*(range(axis.extent) for axis in axes)):
        a = source + itemsize * sum(i * axis.source for i, axis in zip(index, axes, strict=True))
        b = target + itemsize * sum(i * axis.target for i, axis in zip(index, axes, strict=True))
        for first in range(0, batch.extent, MAX_GRID_Z):
            begin = a + itemsize * first * batch.source, b + itemsize * first * batch.target
            aligned = (
                columns.source == columns.target == 1
                and not any(x % ALIGNMENT for x in begin)
                and not any(x % width for axis in (rows, batch) for x in (axis.source, axis.target))
            )
            config = form(itemsize, transposed=transposed, aligned=aligned)
            spec = SPECS[itemsize]
            grid = spec.grid(rows.extent, columns.extent, config), 1, min(MAX_GRID_Z, batch.extent - first)
            strides = (rows.source, columns.source, rows.target, columns.target, batch.source, batch.target)
            made.append(Copy(spec, config, grid, THREADS, (*begin, rows.extent, columns.extent, *strides)))
    return tuple(made)


class _Axis(NamedTuple):
    """Elements along an axis, and the strides there."""

    extent: int
    source: int
    target: int


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """The same copy with as few axes as it can have, but not fewer than three."""
    axes = sorted(axes, key=lambda axis: abs(axis.target), reverse=True)
    for at in reversed(range(1, len(axes))):
        if len(axes) <= 3:
            break
        outer, inner = axes[at - 1], axes[at]
        apart = (inner.source * inner.extent, inner.target * inner.extent)
        extent = outer.extent * inner.extent
        if (outer.source, outer.target) == apart and extent <= MAX_EXTENT:
            axes[at - 1 : at + 1] = [_Axis(extent, inner.source, inner.target)]
    return axes


def form(itemsize: int, *, transposed: bool = False, aligned: bool = False) -> Config:
    """The form of a kernel for a copy; ``transposed`` goes before ``aligned``."""
    width = ALIGNMENT // itemsize if aligned and not transposed else 1
    return make_config(bits=8 * itemsize, transposed=int(transposed), vector_width=width)


def build(bits: int, transposed: int, vector_width: int):
    from numba import float32, int64, uint16, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.pointers import float_pointer
    from numba_gemm.intrinsics import load_global_v4, offset_pointer, store_global_v4

    element = uint16 if bits == 16 else uint32
    padded = TILE + (2 if bits == 16 else 1)
    halving = 1 if bits == 16 else 0  # element index → word index
    straight_columns = 32 * (vector_width if vector_width > 1 else SPANS)

    def repack_transposed(
        S, D, rows, columns, source_row, source_column, target_row, target_column, source_batch, target_batch
    ):
        tile = cuda.shared.array((TILE, padded), element)
        values = cuda.local.array(PER_THREAD, element)
        S = offset_pointer(S, int64(uint32(cuda.blockIdx.z)) * source_batch)
        D = offset_pointer(D, int64(uint32(cuda.blockIdx.z)) * target_batch)
        tiles_n = (columns + uint32(TILE - 1)) // uint32(TILE)
        first_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(TILE))
        first_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(TILE))
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)

        for half in unroll(2):
            row = uint32(first_row + lane + uint32(32 * half))
            s = offset_pointer(S, int64(row) * source_row + int64(uint32(first_column + warp)) * source_column)
            for step in unroll(ROUNDS):
                value = element(0)
                if row < rows and uint32(first_column + warp + uint32(WARPS * step)) < columns:
                    value = s[0]
                values[ROUNDS * half + step] = value
                s = offset_pointer(s, WARPS * source_column)
        for half in unroll(2):
            for step in unroll(ROUNDS):
                i, j = uint32(lane + uint32(32 * half)), uint32(warp + uint32(WARPS * step))
                tile[i, j] = values[ROUNDS * half + step]
        cuda.syncthreads()  # the tile is whole before it is read the other way round
        for half in unroll(2):
            column = uint32(first_column + lane + uint32(32 * half))
            d = offset_pointer(D, int64(uint32(first_row + warp)) * target_row + int64(column) * target_column)
            for step in unroll(ROUNDS):
                value = tile[uint32(warp + uint32(WARPS * step)), uint32(lane + uint32(32 * half))]
                if column < columns and uint32(first_row + warp + uint32(WARPS * step)) < rows:
                    d[0] = value
                d = offset_pointer(d, WARPS * target_row)

    def repack_straight(
        S, D, rows, columns, source_row, source_column, target_row, target_column, source_batch, target_batch
    ):
        values = cuda.local.array(PER_THREAD, element)
        S = offset_pointer(S, int64(uint32(cuda.blockIdx.z)) * source_batch)
        D = offset_pointer(D, int64(uint32(cuda.blockIdx.z)) * target_batch)
        tiles_n = (columns + uint32(straight_columns - 1)) // uint32(straight_columns)
        first_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(STRAIGHT_ROWS))
        first_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(straight_columns))
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)

        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + warp + uint32(WARPS * step))
            s = offset_pointer(S, int64(row) * source_row + int64(uint32(first_column + lane)) * source_column)
            for span in unroll(SPANS):
                value = element(0)
                if row < rows and uint32(first_column + lane + uint32(32 * span)) < columns:
                    value = s[0]
                values[SPANS * step + span] = value
                s = offset_pointer(s, 32 * source_column)
        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + warp + uint32(WARPS * step))
            d = offset_pointer(D, int64(row) * target_row + int64(uint32(first_column + lane)) * target_column)
            for span in unroll(SPANS):
                if row < rows and uint32(first_column + lane + uint32(32 * span)) < columns:
                    d[0] = values[SPANS * step + span]
                d = offset_pointer(d, 32 * target_column)

    def repack_aligned(
        S, D, rows, columns, source_row, source_column, target_row, target_column, source_batch, target_batch
    ):
        values = cuda.local.array(PER_THREAD, float32)
        S = offset_pointer(S, int64(uint32(cuda.blockIdx.z)) * source_batch)
        D = offset_pointer(D, int64(uint32(cuda.blockIdx.z)) * target_batch)
        S_words, D_words = float_pointer(S), float_pointer(D)
        tiles_n = (columns + uint32(straight_columns - 1)) // uint32(straight_columns)
        first_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(STRAIGHT_ROWS))
        first_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(straight_columns))
        row_in_tile = uint32(cuda.threadIdx.x) // uint32(32)
        column = uint32(first_column + uint32(cuda.threadIdx.x) % uint32(32) * uint32(vector_width))
        whole = uint32(column + uint32(vector_width)) <= columns

        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + row_in_tile + uint32(WARPS * step))
            x, y, z, w = float32(0), float32(0), float32(0), float32(0)
            if row < rows and whole:
                x, y, z, w = load_global_v4(S_words, (int64(row) * source_row + int64(column)) >> halving)
            values[4 * step], values[4 * step + 1], values[4 * step + 2], values[4 * step + 3] = x, y, z, w
        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + row_in_tile + uint32(WARPS * step))
            if row < rows:
                if whole:
                    x, y, z, w = values[4 * step], values[4 * step + 1], values[4 * step + 2], values[4 * step + 3]
                    store_global_v4(D_words, (int64(row) * target_row + int64(column)) >> halving, x, y, z, w)
                else:  # the end of a row that isn't a whole number of groups
                    for offset in range(vector_width):
                        if uint32(column + uint32(offset)) < columns:
                            at = int64(uint32(column + uint32(offset)))
                            D[int64(row) * target_row + at] = S[int64(row) * source_row + at]

    if transposed:
        return repack_transposed
    return repack_aligned if vector_width > 1 else repack_straight


def _geometry(config: Config) -> Geometry:
    parameters = dict(config)
    width = int(parameters["vector_width"])
    tile = (TILE, TILE, 1) if parameters["transposed"] else (STRAIGHT_ROWS, 32 * (width if width > 1 else SPANS), 1)
    return Geometry(tile, THREADS)


def _spec(itemsize: int) -> KernelSpec:
    return KernelSpec(
        name="repack",
        title="repack",
        idea="any strides to any strides, coalesced both ways",
        block_tile=(TILE, TILE, 1),
        thread_tile=(ROUNDS, TILE // 32),
        threads=THREADS,
        loads_per_fma=None,
        build=build,
        configs=(form(itemsize), form(itemsize, aligned=True), form(itemsize, transposed=True)),
        abi=f"repack_{8 * itemsize}",
        helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.pointers"),
        geometry_of=_geometry,
    )


#: Bytes of an element → the kernel that repacks it.
SPECS = {itemsize: _spec(itemsize) for itemsize in (2, 4)}
