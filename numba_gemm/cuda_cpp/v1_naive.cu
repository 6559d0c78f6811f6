// v1 naive, the twin of ../fp32/v1_naive.py: one thread computes one output, straight from global memory.
//
// Geometry    32x32 threads a block, one output a thread; no shared memory. Consecutive lanes own consecutive rows.
// Each k      2 global loads, 1 FMA.
// Bound by    the memory pipe: a warp's loads of A touch 32 rows, of whose 32-byte sectors it uses 4 bytes each.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v1_nvcc
#endif

constexpr unsigned TILE = 32;

extern "C" __global__ void __launch_bounds__(TILE * TILE, 1)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    const unsigned tiles_n = (N + TILE - 1) / TILE;
    const unsigned row = blockIdx.x / tiles_n * TILE + threadIdx.x % TILE;
    const unsigned column = blockIdx.x % tiles_n * TILE + threadIdx.x / TILE;
    if (row >= M || column >= N)
        return;

    float accumulator = 0.0f;
    const float* a = A + row * lda;
    const float* b = B + column;
#pragma unroll 4  // the compiler's own choice, 16, would leave room for half the warps
    for (unsigned k = 0; k < K; ++k) {
        accumulator = fmaf(*a, *b, accumulator);
        a += 1;
        b += ldb;
    }

    store_output(C, row * ldc + column, accumulator, alpha, beta);
}
