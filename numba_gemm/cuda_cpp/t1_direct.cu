// t1 direct in WMMA, for GPUs without m16n8k16: a warp multiplies with the tensor core, straight from global memory.
//
// Geometry    block tile 16x16x16, one warp; grid: the tiles of C, row by row.
// Each step   one fragment of A and one of B from global memory, one 16x16x16 multiplication, no barrier.
// Bound by    load latency: each multiplication waits for its own loads, and only other warps fill the wait.
//
// Edges       a fragment can't be loaded with a guard, so that a tile at the edge of the matrix goes through 512 bytes
//             of shared memory, zeros outside; so does every tile of a matrix whose address isn't a multiple of 32
//             bytes, which wmma asks for. C always does, as 1 KB of floats.

#include "wmma_gemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME t1_nvcc
#endif

constexpr unsigned TILE = MMA;
constexpr long long MAX_DIRECT_PITCH = 1 << 26;  // wmma's row stride has 32 bits

// Half a row of the tile a lane: 8 elements.
__device__ __forceinline__ void copy_tile(element* tile, const element* X, unsigned row, unsigned rows,
                                          unsigned column, unsigned columns, long long leading_dimension, bool aligned)
{
    const unsigned row_in_tile = threadIdx.x / 2, column_in_tile = threadIdx.x % 2 * 8;
    row += row_in_tile;
    column += column_in_tile;
    const unsigned left = row < rows ? less(columns, column) : 0;
    __syncwarp();  // every lane has read the tile before
    *reinterpret_cast<uint4*>(tile + row_in_tile * TILE + column_in_tile) =
        load_group(X + row * leading_dimension + column, left, aligned);
    __syncwarp();  // the tile is whole before any lane reads it
}

__device__ __forceinline__ bool loads_directly(const element* X, long long leading_dimension, bool aligned)
{
    const bool whole_sectors = reinterpret_cast<unsigned long long>(X) % 32 == 0;
    return aligned && whole_sectors && leading_dimension > 0 && leading_dimension <= MAX_DIRECT_PITCH;
}

extern "C" __global__ void __launch_bounds__(32, 1)
KERNEL_NAME(const element* __restrict__ A, const element* __restrict__ B, void* C, unsigned M, unsigned N, unsigned K,
            long long lda, long long ldb, long long ldc, float alpha, float beta, unsigned flags)
{
    __shared__ __align__(32) element a_tile[TILE * TILE];
    __shared__ __align__(32) element b_tile[TILE * TILE];
    __shared__ __align__(32) float c_tile[TILE * TILE];

    const unsigned tiles_n = (N + TILE - 1) / TILE;
    const unsigned tile_row = blockIdx.x / tiles_n * TILE;
    const unsigned tile_column = blockIdx.x % tiles_n * TILE;

    const bool a_aligned = flags & A_IS_ALIGNED, b_aligned = flags & B_IS_ALIGNED;
    const bool a_direct = loads_directly(A, lda, a_aligned) && M - tile_row >= TILE;
    const bool b_direct = loads_directly(B, ldb, b_aligned) && N - tile_column >= TILE;

    AFragment a;
    BFragment b;
    Accumulator accumulator;
    nvcuda::wmma::fill_fragment(accumulator, 0.0f);

    for (unsigned k0 = 0; k0 < K; k0 += TILE) {
        const bool whole = K - k0 >= TILE;
        if (a_direct && whole) {
            nvcuda::wmma::load_matrix_sync(a, A + tile_row * lda + k0, lda);
        } else {
            copy_tile(a_tile, A, tile_row, M, k0, K, lda, a_aligned);
            nvcuda::wmma::load_matrix_sync(a, a_tile, TILE);
        }
        if (b_direct && whole) {
            nvcuda::wmma::load_matrix_sync(b, B + k0 * ldb + tile_column, ldb);
        } else {
            copy_tile(b_tile, B, k0, K, tile_column, N, ldb, b_aligned);
            nvcuda::wmma::load_matrix_sync(b, b_tile, TILE);
        }
        nvcuda::wmma::mma_sync(accumulator, a, b, accumulator);
    }

    nvcuda::wmma::store_matrix_sync(c_tile, accumulator, TILE, nvcuda::wmma::mem_row_major);
    __syncwarp();  // the tile is whole before any lane reads it
    const unsigned column = tile_column + threadIdx.x % TILE;
#pragma unroll
    for (unsigned i = threadIdx.x / TILE; i < TILE; i += 2) {
        const unsigned row = tile_row + i;
        if (row < M && column < N)
            store_output(C, row * ldc + column, c_tile[i * TILE + threadIdx.x % TILE], alpha, beta,
                         flags & C_IS_FLOAT32);
    }
}
