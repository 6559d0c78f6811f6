"""v2 coalesced: consecutive lanes own consecutive columns.

Idea        only the mapping of threads to outputs changes. The 32 lanes of a warp now share one row and own 32
            neighbouring columns, so a warp's load of B and its store of C are each one run of 128 bytes (4 full
            sectors), and its load of A is one address, broadcast to all lanes.
Geometry    1024 threads a block, a 32×32 tile of C, one output a thread; no shared memory.
Each k      2 global loads, 1 FMA; 5 sectors a warp where v1 fetched 33.
Bound by    the load pipe: two load instructions for each FMA, served by L1.
"""

from __future__ import annotations

from numba_gemm.spec import KernelSpec

TILE = 32


def build():
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output

    def sgemm_coalesced(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta):
        tiles_n = (N + uint32(TILE - 1)) // uint32(TILE)
        tile_m = uint32(cuda.blockIdx.x) // tiles_n
        tile_n = uint32(cuda.blockIdx.x) % tiles_n

        row = uint32(tile_m * uint32(TILE) + uint32(cuda.threadIdx.x) // uint32(TILE))
        column = uint32(tile_n * uint32(TILE) + uint32(cuda.threadIdx.x) % uint32(TILE))
        if row >= M or column >= N:
            return

        accumulator = float32(0)
        a = int64(row) * lda
        b = int64(column)
        for _ in range(int64(K)):
            accumulator += A[a] * B[b]
            a += 1
            b += ldb

        store_output(C, int64(row) * ldc + int64(column), accumulator, alpha, beta)

    return sgemm_coalesced


SPEC = KernelSpec(
    name="v2",
    title="coalesced",
    idea="consecutive lanes own consecutive columns",
    block_tile=(TILE, TILE, 1),
    thread_tile=(1, 1),
    threads=TILE * TILE,
    loads_per_fma=None,
    build=build,
)
