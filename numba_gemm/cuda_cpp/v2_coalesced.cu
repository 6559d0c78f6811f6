// v2 coalesced, the twin of ../fp32/v2_coalesced.py: consecutive lanes own consecutive columns.
//
// Geometry    1024 threads a block, a 32x32 tile of C, one output a thread; no shared memory.
// Each k      2 global loads, 1 FMA; a warp's load of B is one run of 128 bytes, its load of A one address.
// Bound by    the load pipe: two load instructions for each FMA, served by L1.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v2_nvcc
#endif

constexpr unsigned TILE = 32;

extern "C" __global__ void __launch_bounds__(TILE * TILE, 1)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    const unsigned tiles_n = (N + TILE - 1) / TILE;
    const unsigned row = blockIdx.x / tiles_n * TILE + threadIdx.x / TILE;
    const unsigned column = blockIdx.x % tiles_n * TILE + threadIdx.x % TILE;
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
