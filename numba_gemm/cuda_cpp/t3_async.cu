// t3 async in WMMA: the next tiles are on their way while these are computed.
//
// Idea        GPUs before sm_80 have no cp.async, but a load doesn't stall a thread before its value is used. So each
//             thread loads its part of the next tiles into registers, computes on the tiles in shared memory, and only
//             then stores the registers: they are the second buffer.
// Geometry    block tile 128x128x32, 256 threads, 8 warps of 64x32 (wmma_tiles.cuh); 20 KB of shared memory, as in t2,
//             and 16 registers a thread.
// Each tile   as in t2: 2 + 2 16-byte loads and as many shared stores a thread, 2 barriers; but the loads have the
//             whole computation to arrive.
// Bound by    shared memory, and the shared stores between the two barriers, when no warp computes.

#include "wmma_tiles.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME t3_nvcc
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
KERNEL_NAME(const element* __restrict__ A, const element* __restrict__ B, void* C, unsigned M, unsigned N, unsigned K,
            long long lda, long long ldb, long long ldc, float alpha, float beta, unsigned flags)
{
    __shared__ __align__(32) unsigned char shared[SHARED_BYTES];
    element* As = reinterpret_cast<element*>(shared);
    element* Bs = reinterpret_cast<element*>(shared + B_OFFSET);

    const Place place(N);
    WarpTile tile;
    Groups next(place, A, B, lda, ldb);
    next.load(place, M, N, K, lda, ldb, 0, flags);
    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        next.store(place, As, Bs);
        __syncthreads();  // the tiles are whole before any warp reads them
        if (k0 + BK < K)
            next.load(place, M, N, K, lda, ldb, k0 + BK, flags);
        tile.multiply(place, As, Bs);
        __syncthreads();  // every warp has read them before they, or C's slabs, are written over them
    }
    tile.store(place, reinterpret_cast<float*>(shared), C, M, N, ldc, alpha, beta, flags & C_IS_FLOAT32);
}
