"""v5 block: an outer product in registers.

Idea        each thread owns an 8×8 block of outputs. At each k it loads 8 values of A and 8 of B, and every pair of
            them is one of its 64 FMAs: the perimeter is loaded, the area is computed.
Geometry    128×128×8 tile, 256 threads, 8×8 outputs a thread; 4 KB + 4 KB of shared memory. Thread t owns rows
            8·(t / 16) … + 7 and columns 8·(t mod 16) … + 7.
Each k      8 + 8 shared loads, 64 FMAs: 0.25 loads per FMA.
Each tile   4 elements of A and 4 of B a thread, in strided loops whose lanes read consecutive addresses (8 floats of
            a row of A, a whole run of a row of B); 2 barriers for 512 FMAs a thread.
Bound by    instruction issue and bank conflicts: 16 scalar LDS beside 64 FFMA, and the reads of B step by 8 words
            from lane to lane, so 16 distinct words fall into 4 banks.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll
from numba_gemm.spec import KernelSpec

BM, BN, BK = 128, 128, 8
TM, TN = 8, 8
THREADS = BM * BN // (TM * TN)
COPIES = BM * BK // THREADS  # elements of each tile that one thread copies


def build():
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output

    def sgemm_block(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta):
        As = cuda.shared.array((BM, BK), float32)
        Bs = cuda.shared.array((BK, BN), float32)
        accumulator = cuda.local.array((TM, TN), float32)
        a_values = cuda.local.array(TM, float32)
        b_values = cuda.local.array(TN, float32)

        thread = uint32(cuda.threadIdx.x)
        tiles_n = (N + uint32(BN - 1)) // uint32(BN)
        tile_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(BM))
        tile_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(BN))
        first_row = thread // uint32(BN // TN) * uint32(TM)
        first_column = thread % uint32(BN // TN) * uint32(TN)

        for i in range(TM):
            for j in range(TN):
                accumulator[i, j] = float32(0)

        k0 = uint32(0)
        while k0 < K:
            for copy in range(COPIES):
                row_in_tile = uint32(thread // uint32(BK) + uint32(copy * THREADS // BK))
                row = uint32(tile_row + row_in_tile)
                column = uint32(k0 + thread % uint32(BK))
                a = float32(0)
                if row < M and column < K:
                    a = A[int64(row) * lda + int64(column)]
                As[row_in_tile, thread % uint32(BK)] = a
            for copy in range(COPIES):
                row_in_tile = uint32(thread // uint32(BN) + uint32(copy * THREADS // BN))
                row = uint32(k0 + row_in_tile)
                column = uint32(tile_column + thread % uint32(BN))
                b = float32(0)
                if row < K and column < N:
                    b = B[int64(row) * ldb + int64(column)]
                Bs[row_in_tile, thread % uint32(BN)] = b
            cuda.syncthreads()  # the tile is whole before anyone reads it

            for k in range(BK):
                for i in range(TM):
                    a_values[i] = As[first_row + uint32(i), uint32(k)]
                for j in range(TN):
                    b_values[j] = Bs[uint32(k), first_column + uint32(j)]
                for i in range(TM):
                    for j in range(TN):
                        accumulator[i, j] += a_values[i] * b_values[j]
            cuda.syncthreads()  # everyone has read it before anyone overwrites it
            k0 = uint32(k0 + uint32(BK))

        for i in unroll(TM):
            row = uint32(tile_row + first_row + uint32(i))
            for j in range(TN):
                column = uint32(tile_column + first_column + uint32(j))
                if row < M and column < N:
                    store_output(C, int64(row) * ldc + int64(column), accumulator[i, j], alpha, beta)

    return sgemm_block


SPEC = KernelSpec(
    name="v5",
    title="block",
    idea="an outer product in registers: 8 + 8 loads feed 64 FMAs",
    block_tile=(BM, BN, BK),
    thread_tile=(TM, TN),
    threads=THREADS,
    loads_per_fma=0.25,
    build=build,
)
