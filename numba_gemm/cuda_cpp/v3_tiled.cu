// v3 tiled, the twin of ../fp32/v3_tiled.py: both operands staged through shared memory.
//
// Geometry    32x32x32 tile, 1024 threads, one output a thread; 4 KB + 4.1 KB of shared memory, B's rows padded by one
//             word.
// Each k      2 shared loads, 1 FMA (the load of A is a broadcast: a warp shares its row).
// Each tile   2 global loads, 2 shared stores, 2 barriers for 32 FMAs a thread.
// Bound by    shared-memory bandwidth: two loads for each FMA.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v3_nvcc
#endif

constexpr unsigned TILE = 32;

// Two blocks an SM: 32 registers a thread.
extern "C" __global__ void __launch_bounds__(TILE * TILE, 2)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    __shared__ float As[TILE][TILE];
    __shared__ float Bs[TILE][TILE + 1];

    const unsigned tiles_n = (N + TILE - 1) / TILE;
    const unsigned row_in_tile = threadIdx.x / TILE;
    const unsigned column_in_tile = threadIdx.x % TILE;
    const unsigned row = blockIdx.x / tiles_n * TILE + row_in_tile;
    const unsigned column = blockIdx.x % tiles_n * TILE + column_in_tile;

    float accumulator = 0.0f;
    for (unsigned k0 = 0; k0 < K; k0 += TILE) {
        // Outside the matrix a tile holds zeros, so the loop over k needs no guard.
        const unsigned a_column = k0 + column_in_tile;
        const unsigned b_row = k0 + row_in_tile;
        As[row_in_tile][column_in_tile] = row < M && a_column < K ? A[row * lda + a_column] : 0.0f;
        Bs[row_in_tile][column_in_tile] = b_row < K && column < N ? B[b_row * ldb + column] : 0.0f;
        __syncthreads();  // the tile is whole before anyone reads it

#pragma unroll
        for (unsigned k = 0; k < TILE; ++k)
            accumulator = fmaf(As[row_in_tile][k], Bs[k][column_in_tile], accumulator);
        __syncthreads();  // everyone has read it before anyone overwrites it
    }

    if (row < M && column < N)
        store_output(C, row * ldc + column, accumulator, alpha, beta);
}
