// v5 block, the twin of ../fp32/v5_block.py: an outer product in registers.
//
// Geometry    128x128x8 tile, 256 threads, 8x8 outputs a thread; 4 KB + 4 KB of shared memory. Thread t owns rows
//             8 (t / 16) ... + 7 and columns 8 (t mod 16) ... + 7.
// Each k      8 + 8 shared loads, 64 FMAs.
// Each tile   4 elements of A and 4 of B a thread, in strided loops whose lanes read consecutive addresses; 2 barriers
//             for 512 FMAs a thread.
// Bound by    instruction issue and bank conflicts: 16 scalar loads beside 64 FMAs.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v5_nvcc
#endif

constexpr unsigned BM = 128, BN = 128, BK = 8;
constexpr unsigned TM = 8, TN = 8;
constexpr unsigned THREADS = BM * BN / (TM * TN);
constexpr unsigned COPIES = BM * BK / THREADS;  // elements of each tile that one thread copies

extern "C" __global__ void __launch_bounds__(THREADS, 2)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    __shared__ float As[BM][BK];
    __shared__ float Bs[BK][BN];
    float accumulator[TM][TN] = {};
    float a_values[TM], b_values[TN];

    const unsigned thread = threadIdx.x;
    const unsigned tiles_n = (N + BN - 1) / BN;
    const unsigned tile_row = blockIdx.x / tiles_n * BM;
    const unsigned tile_column = blockIdx.x % tiles_n * BN;
    const unsigned first_row = thread / (BN / TN) * TM;
    const unsigned first_column = thread % (BN / TN) * TN;

    for (unsigned k0 = 0; k0 < K; k0 += BK) {
#pragma unroll
        for (unsigned copy = 0; copy < COPIES; ++copy) {
            const unsigned row_in_tile = thread / BK + copy * (THREADS / BK);
            const unsigned row = tile_row + row_in_tile;
            const unsigned column = k0 + thread % BK;
            As[row_in_tile][thread % BK] = row < M && column < K ? A[row * lda + column] : 0.0f;
        }
#pragma unroll
        for (unsigned copy = 0; copy < COPIES; ++copy) {
            const unsigned row_in_tile = thread / BN + copy * (THREADS / BN);
            const unsigned row = k0 + row_in_tile;
            const unsigned column = tile_column + thread % BN;
            Bs[row_in_tile][thread % BN] = row < K && column < N ? B[row * ldb + column] : 0.0f;
        }
        __syncthreads();  // the tile is whole before anyone reads it

#pragma unroll 1
        for (unsigned k = 0; k < BK; ++k) {
#pragma unroll
            for (unsigned i = 0; i < TM; ++i)
                a_values[i] = As[first_row + i][k];
#pragma unroll
            for (unsigned j = 0; j < TN; ++j)
                b_values[j] = Bs[k][first_column + j];
#pragma unroll
            for (unsigned i = 0; i < TM; ++i)
#pragma unroll
                for (unsigned j = 0; j < TN; ++j)
                    accumulator[i][j] = fmaf(a_values[i], b_values[j], accumulator[i][j]);
        }
        __syncthreads();  // everyone has read it before anyone overwrites it
    }

#pragma unroll
    for (unsigned i = 0; i < TM; ++i) {
        const unsigned row = tile_row + first_row + i;
#pragma unroll
        for (unsigned j = 0; j < TN; ++j) {
            const unsigned column = tile_column + first_column + j;
            if (row < M && column < N)
                store_output(C, row * ldc + column, accumulator[i][j], alpha, beta);
        }
    }
}
