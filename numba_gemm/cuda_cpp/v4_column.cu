// v4 column, the twin of ../fp32/v4_column.py: a column of eight outputs a thread.
//
// Geometry    64x64x8 tile, 512 threads, 8x1 outputs a thread; 2 KB + 2 KB of shared memory. Thread t owns column
//             t mod 64 and rows 8 (t / 64) ... + 7, so that a warp shares its rows and the reads of A are broadcasts.
// Each k      1 + 8 shared loads, 8 FMAs.
// Each tile   one element of A and one of B a thread: 2 global loads, 2 shared stores, 2 barriers for 64 FMAs.
// Bound by    shared-memory bandwidth still.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v4_nvcc
#endif

constexpr unsigned BM = 64, BN = 64, BK = 8;
constexpr unsigned TM = 8;
constexpr unsigned THREADS = BM * BN / TM;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    __shared__ float As[BM][BK];
    __shared__ float Bs[BK][BN];
    float accumulator[TM] = {};

    const unsigned thread = threadIdx.x;
    const unsigned tiles_n = (N + BN - 1) / BN;
    const unsigned tile_row = blockIdx.x / tiles_n * BM;
    const unsigned tile_column = blockIdx.x % tiles_n * BN;

    // The element of each tile that this thread copies.
    const unsigned a_row_in_tile = thread / BK, a_column_in_tile = thread % BK;
    const unsigned b_row_in_tile = thread / BN, b_column_in_tile = thread % BN;
    const unsigned a_row = tile_row + a_row_in_tile;
    const unsigned b_column = tile_column + b_column_in_tile;

    // The column of outputs that this thread owns.
    const unsigned first_row = thread / BN * TM;
    const unsigned column_in_tile = thread % BN;

    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        const unsigned a_column = k0 + a_column_in_tile;
        const unsigned b_row = k0 + b_row_in_tile;
        As[a_row_in_tile][a_column_in_tile] = a_row < M && a_column < K ? A[a_row * lda + a_column] : 0.0f;
        Bs[b_row_in_tile][b_column_in_tile] = b_row < K && b_column < N ? B[b_row * ldb + b_column] : 0.0f;
        __syncthreads();  // the tile is whole before anyone reads it

#pragma unroll 2
        for (unsigned k = 0; k < BK; ++k) {
            const float b = Bs[k][column_in_tile];  // one load ...
#pragma unroll
            for (unsigned i = 0; i < TM; ++i)
                accumulator[i] = fmaf(As[first_row + i][k], b, accumulator[i]);  // ... reused TM times
        }
        __syncthreads();  // everyone has read it before anyone overwrites it
    }

    const unsigned column = tile_column + column_in_tile;
#pragma unroll
    for (unsigned i = 0; i < TM; ++i) {
        const unsigned row = tile_row + first_row + i;
        if (row < M && column < N)
            store_output(C, row * ldc + column, accumulator[i], alpha, beta);
    }
}
