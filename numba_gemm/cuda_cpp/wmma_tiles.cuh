// The 128x128x32 tile of t2 and t3 in WMMA: who copies what, how a warp multiplies it, how C is written.
//
// Geometry    256 threads, 8 warps of 64x32 in 2 rows of 4. As is 128 rows of 32 elements and Bs 32 rows of 128, each
//             padded by 8 elements (16 bytes) a row; together 18944 bytes.
// Banks       fragments of 8 rows of 16 bytes start at words 0, 20, 40 ... of As and 0, 68, 136 ... of Bs: modulo 32
//             those are 8 different multiples of 4. 8 lanes that copied two whole rows of As would meet in 4 banks, so
//             they copy 32 bytes of rows 0, 2, 4 and 6, or of rows 1, 3, 5 and 7.

#pragma once

#include "wmma_gemm.cuh"

constexpr unsigned BM = 128, BN = 128, BK = 32;
constexpr unsigned WM = 64, WN = 32;
constexpr unsigned WARPS = (BM / WM) * (BN / WN);
constexpr unsigned THREADS = 32 * WARPS;
constexpr unsigned FRAGMENTS_M = WM / MMA, FRAGMENTS_N = WN / MMA;  // of one warp
constexpr unsigned GROUP = 8;                                       // elements of one 16-byte copy
constexpr unsigned A_PITCH = BK + 8, B_PITCH = BN + 8;
constexpr unsigned C_PITCH = WN + 8;  // floats in a row of a warp's slab of C
constexpr unsigned B_OFFSET = BM * A_PITCH * sizeof(element);
constexpr unsigned TILE_BYTES = B_OFFSET + BK * B_PITCH * sizeof(element);
constexpr unsigned SLABS_BYTES = WARPS * MMA * C_PITCH * sizeof(float);
constexpr unsigned SHARED_BYTES = SLABS_BYTES > TILE_BYTES ? SLABS_BYTES : TILE_BYTES;

// Where a block and its threads stand.
struct Place {
    unsigned tile_row, tile_column;  // the block's tile of C
    unsigned warp_row, warp_column;  // the warp's part of it
    unsigned a_row, a_column;        // the thread's group of 8 in A's tile; a second one 64 rows further
    unsigned b_row, b_column;        // likewise in B's, 16 rows further

    __device__ __forceinline__ explicit Place(unsigned N)
    {
        const unsigned tiles_n = (N + BN - 1) / BN;
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        tile_row = blockIdx.x / tiles_n * BM;
        tile_column = blockIdx.x % tiles_n * BN;
        warp_row = warp / (BN / WN) * WM;
        warp_column = warp % (BN / WN) * WN;
        a_row = warp * 8 + (lane & 6) + (lane >> 3 & 1);
        a_column = ((lane & 1) + (lane >> 4) * 2) * GROUP;
        b_row = threadIdx.x / (BN / GROUP);
        b_column = threadIdx.x % (BN / GROUP) * GROUP;
    }
};

// The thread's part of one tile of A and one of B, in registers, and where it comes from.
struct Groups {
    uint4 a[2], b[2];
    const element *a_source, *b_source;

    __device__ __forceinline__ Groups(const Place& place, const element* A, const element* B, long long lda,
                                      long long ldb)
        : a_source(A + (place.tile_row + place.a_row) * lda + place.a_column),
          b_source(B + place.b_row * ldb + place.tile_column + place.b_column)
    {
    }

    // The groups of the tiles that begin at k0, zeros outside the matrices; then on to the next tiles.
    __device__ __forceinline__ void load(const Place& place, unsigned M, unsigned N, unsigned K, long long lda,
                                         long long ldb, unsigned k0, unsigned flags)
    {
        const unsigned a_left = less(K, k0 + place.a_column);
        const unsigned b_left = less(N, place.tile_column + place.b_column);
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
            a[i] = load_group(a_source + 64 * i * lda, place.tile_row + place.a_row + 64 * i < M ? a_left : 0,
                              flags & A_IS_ALIGNED);
            b[i] = load_group(b_source + 16 * i * ldb, k0 + place.b_row + 16 * i < K ? b_left : 0,
                              flags & B_IS_ALIGNED);
        }
        a_source += BK;
        b_source += BK * ldb;
    }

    __device__ __forceinline__ void store(const Place& place, element* As, element* Bs) const
    {
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
            *reinterpret_cast<uint4*>(As + (place.a_row + 64 * i) * A_PITCH + place.a_column) = a[i];
            *reinterpret_cast<uint4*>(Bs + (place.b_row + 16 * i) * B_PITCH + place.b_column) = b[i];
        }
    }
};

// A warp's 64x32 of C.
struct WarpTile {
    Accumulator accumulator[FRAGMENTS_M][FRAGMENTS_N];

    __device__ __forceinline__ WarpTile()
    {
#pragma unroll
        for (unsigned i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
            for (unsigned j = 0; j < FRAGMENTS_N; ++j)
                nvcuda::wmma::fill_fragment(accumulator[i][j], 0.0f);
    }

    // Both steps of 16 along k of one tile: each time 4 fragments of A and 2 of B feed 8 multiplications.
    __device__ __forceinline__ void multiply(const Place& place, const element* As, const element* Bs)
    {
#pragma unroll 1  // both steps at once would hold more fragments than 128 registers can
        for (unsigned k = 0; k < BK; k += MMA) {
            BFragment b[FRAGMENTS_N];
#pragma unroll
            for (unsigned j = 0; j < FRAGMENTS_N; ++j)
                nvcuda::wmma::load_matrix_sync(b[j], Bs + k * B_PITCH + place.warp_column + j * MMA, B_PITCH);
#pragma unroll
            for (unsigned i = 0; i < FRAGMENTS_M; ++i) {
                AFragment a;
                nvcuda::wmma::load_matrix_sync(a, As + (place.warp_row + i * MMA) * A_PITCH + k, A_PITCH);
#pragma unroll
                for (unsigned j = 0; j < FRAGMENTS_N; ++j)
                    nvcuda::wmma::mma_sync(accumulator[i][j], a, b[j], accumulator[i][j]);
            }
        }
    }

    // C leaves through the warp's slab of shared memory, 16 rows of 32 floats at a time; a lane writes one column.
    __device__ __forceinline__ void store(const Place& place, float* slabs, void* C, unsigned M, unsigned N,
                                          long long ldc, float alpha, float beta, bool c_is_float32) const
    {
        const unsigned lane = threadIdx.x % 32;
        const unsigned column = place.tile_column + place.warp_column + lane;
        float* slab = slabs + threadIdx.x / 32 * MMA * C_PITCH;
#pragma unroll
        for (unsigned i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
            for (unsigned j = 0; j < FRAGMENTS_N; ++j)
                nvcuda::wmma::store_matrix_sync(slab + j * MMA, accumulator[i][j], C_PITCH,
                                                nvcuda::wmma::mem_row_major);
            __syncwarp();  // the slab is whole before any lane reads it
#pragma unroll 4
            for (unsigned r = 0; r < MMA; ++r) {
                const unsigned row = place.tile_row + place.warp_row + i * MMA + r;
                if (row < M && column < N)
                    store_output(C, row * ldc + column, slab[r * C_PITCH + lane], alpha, beta, c_is_float32);
            }
            __syncwarp();  // all lanes have read the slab before it is filled again
        }
    }
};
