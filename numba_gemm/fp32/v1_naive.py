"""v1 naive: one thread computes one output, straight from global memory.

Idea        the definition of the product, and nothing else: C[row, column] = Σ_k A[row, k] · B[k, column].
Geometry    32×32 threads a block, one output a thread; no shared memory.
Each k      2 global loads, 1 FMA.
Bound by    the memory pipe. Consecutive lanes own consecutive *rows*, so a warp's 32 loads of A touch 32 rows and
            thus 32 sectors of 32 bytes, of which it uses 4 bytes each, and its 32 stores of C do the same. v2 turns
            this round and changes nothing else.
"""

from __future__ import annotations

from numba_gemm.spec import KernelSpec

TILE = 32


def build():
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output

    def sgemm_naive(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta):
        tiles_n = (N + uint32(TILE - 1)) // uint32(TILE)
        tile_m = uint32(cuda.blockIdx.x) // tiles_n
        tile_n = uint32(cuda.blockIdx.x) % tiles_n

        row = uint32(tile_m * uint32(TILE) + uint32(cuda.threadIdx.x) % uint32(TILE))
        column = uint32(tile_n * uint32(TILE) + uint32(cuda.threadIdx.x) // uint32(TILE))
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

    return sgemm_naive


SPEC = KernelSpec(
    name="v1",
    title="naive",
    idea="one output a thread, straight from global memory",
    block_tile=(TILE, TILE, 1),
    thread_tile=(1, 1),
    threads=TILE * TILE,
    loads_per_fma=None,
    build=build,
)
