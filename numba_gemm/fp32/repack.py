"""repack: a strided matrix copied into another, at memory speed, whatever its strides.

The kernels of the ladder want rows whose elements are neighbours. A transposed or stepped view of device memory is
brought into that form by this kernel first (and an ``out`` that isn't in it is filled by it afterwards).

Geometry    32×32 elements a block, 256 threads, 4 elements a thread, staged through shared memory whose rows are
            padded by one word: reading along the source's smaller stride and writing along the destination's both
            stay coalesced, and neither walks one bank.
"""

from __future__ import annotations

from numba_gemm.spec import KernelSpec, make_config

TILE = 32
PADDED = TILE + 1
THREADS = 256
STEP = THREADS // TILE


def build(transposed: int, bits: int):
    from numba import int64, uint16, uint32

    from numba_gemm.compile.numba_source import cuda

    element = uint16 if bits == 16 else uint32  # bits are moved, whatever they mean

    def repack(S, D, rows, columns, source_row, source_column, target_row, target_column):
        tile = cuda.shared.array((TILE, PADDED), element)
        tiles_n = (columns + uint32(TILE - 1)) // uint32(TILE)
        first_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(TILE))
        first_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(TILE))
        fast = uint32(cuda.threadIdx.x) % uint32(TILE)
        slow = uint32(cuda.threadIdx.x) // uint32(TILE)

        for step in range(0, TILE, STEP):
            # Lanes run along the source's dimension of smaller stride.
            if transposed:
                i, j = fast, uint32(slow + uint32(step))
            else:
                i, j = uint32(slow + uint32(step)), fast
            row, column = uint32(first_row + i), uint32(first_column + j)
            if row < rows and column < columns:
                tile[i, j] = S[int64(row) * source_row + int64(column) * source_column]
        cuda.syncthreads()  # the tile is whole before it is read the other way round
        for step in range(0, TILE, STEP):
            i, j = uint32(slow + uint32(step)), fast
            row, column = uint32(first_row + i), uint32(first_column + j)
            if row < rows and column < columns:
                D[int64(row) * target_row + int64(column) * target_column] = tile[i, j]

    return repack


def _spec(bits: int) -> KernelSpec:
    return KernelSpec(
        name="repack",
        title="repack",
        idea="any strides to any strides, coalesced both ways",
        block_tile=(TILE, TILE, 1),
        thread_tile=(TILE // STEP, 1),
        threads=THREADS,
        loads_per_fma=None,
        build=build,
        configs=tuple(make_config(bits=bits, transposed=transposed) for transposed in (0, 1)),
        abi=f"repack_{bits}",
        helpers=(),
    )


#: Bytes of an element → the kernel that repacks it; its configs are for a source that is not, or is, transposed.
SPECS = {2: _spec(16), 4: _spec(32)}
