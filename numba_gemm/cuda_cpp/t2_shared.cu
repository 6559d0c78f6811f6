// t2 shared in WMMA: tiles of A and B are staged in shared memory, and fragments are reused from registers.
//
// Geometry    block tile 128x128x32, 256 threads, 8 warps of 64x32 (wmma_tiles.cuh); 20 KB of shared memory.
// Each step   (16 along k) 6 fragments feed 8 multiplications of 16x16x16 a warp.
// Each tile   2 + 2 16-byte loads and as many shared stores a thread, 2 barriers.
// Bound by    its own rhythm: load, wait, compute, wait. t3 starts here.

#include "wmma_tiles.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME t2_nvcc
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
    Groups groups(place, A, B, lda, ldb);
    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        groups.load(place, M, N, K, lda, ldb, k0, flags);
        groups.store(place, As, Bs);
        __syncthreads();  // the tiles are whole before any warp reads them
        tile.multiply(place, As, Bs);
        __syncthreads();  // every warp has read them before they, or C's slabs, are written over them
    }
    tile.store(place, reinterpret_cast<float*>(shared), C, M, N, ldc, alpha, beta, flags & C_IS_FLOAT32);
}
