"""v3 tiled: both operands staged through shared memory.

Idea        a 32×32 tile of A and one of B are copied into shared memory once and read 32 times from there, so
            each value crosses from global memory once per block instead of 32 times.
Geometry    32×32×32 tile, 1024 threads, one output a thread; 4 KB + 4.1 KB of shared memory. B's rows are padded by
            one word, so that a walk down a column of B visits all 32 banks.
Each k      2 shared loads, 1 FMA (the A load is a broadcast: a warp shares its row).
Each tile   2 global loads, 2 shared stores, 2 barriers for 32 FMAs a thread.
Bound by    shared-memory bandwidth: an SM issues 4 warp-wide FMAs a cycle but one warp-wide shared load, so two
            loads per FMA cap it at an eighth of the FMA rate.
"""

from __future__ import annotations

from numba_gemm.spec import KernelSpec

TILE = 32
PADDED = TILE + 1  # words in a row of B's tile


def build():
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output

    def sgemm_tiled(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta):
        As = cuda.shared.array((TILE, TILE), float32)
        Bs = cuda.shared.array((TILE, PADDED), float32)

        tiles_n = (N + uint32(TILE - 1)) // uint32(TILE)
        tile_m = uint32(cuda.blockIdx.x) // tiles_n
        tile_n = uint32(cuda.blockIdx.x) % tiles_n
        row_in_tile = uint32(cuda.threadIdx.x) // uint32(TILE)
        column_in_tile = uint32(cuda.threadIdx.x) % uint32(TILE)
        row = uint32(tile_m * uint32(TILE) + row_in_tile)
        column = uint32(tile_n * uint32(TILE) + column_in_tile)

        accumulator = float32(0)
        k0 = uint32(0)
        while k0 < K:
            # Outside the matrix a tile holds zeros, so the loop over k needs no guard.
            a_column = uint32(k0 + column_in_tile)
            b_row = uint32(k0 + row_in_tile)
            a = float32(0)
            if row < M and a_column < K:
                a = A[int64(row) * lda + int64(a_column)]
            b = float32(0)
            if b_row < K and column < N:
                b = B[int64(b_row) * ldb + int64(column)]
            As[row_in_tile, column_in_tile] = a
            Bs[row_in_tile, column_in_tile] = b
            cuda.syncthreads()  # the tile is whole before anyone reads it

            for k in range(TILE):
                accumulator += As[row_in_tile, uint32(k)] * Bs[uint32(k), column_in_tile]
            cuda.syncthreads()  # everyone has read it before anyone overwrites it
            k0 = uint32(k0 + uint32(TILE))

        if row < M and column < N:
            store_output(C, int64(row) * ldc + int64(column), accumulator, alpha, beta)

    return sgemm_tiled


SPEC = KernelSpec(
    name="v3",
    title="tiled",
    idea="both operands staged through 32×32 shared tiles",
    block_tile=(TILE, TILE, TILE),
    thread_tile=(1, 1),
    threads=TILE * TILE,
    loads_per_fma=2.0,
    build=build,
    min_blocks_per_sm=2,  # 32 registers a thread, so that two blocks of 1024 threads fit
)
