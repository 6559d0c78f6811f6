// v6 vector, the twin of ../fp32/v6_vector.py: 16 bytes an instruction, and the A tile stored transposed.
//
// Geometry    128x128x8 tile, 256 threads, 8x8 outputs a thread; 4 KB + 4 KB of shared memory. Threads as in v5.
// Each k      4 16-byte shared loads, 64 FMAs.
// Each tile   one 16-byte load of A and one of B a thread; 4 scalar stores for the transposed A, one of 16 bytes for B;
//             2 barriers for 512 FMAs a thread.
// Bound by    the two barriers round each tile, and two-way bank conflicts in the reads of B.
//
// VECTOR_WIDTH=4 needs K % 4 == 0 and N % 4 == 0, and base pointers and row strides that are multiples of 16 bytes.
// VECTOR_WIDTH=1 does the same with guarded 4-byte global accesses; in shared memory both forms are alike.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v6_nvcc
#endif
#ifndef VECTOR_WIDTH
#define VECTOR_WIDTH 4
#endif

constexpr unsigned BM = 128, BN = 128, BK = 8;
constexpr unsigned TM = 8, TN = 8;
constexpr unsigned THREADS = BM * BN / (TM * TN);
constexpr unsigned VECTOR = 4;
constexpr unsigned A_GROUPS = BK / VECTOR, B_GROUPS = BN / VECTOR;  // 16-byte groups in one row of each tile

extern "C" __global__ void __launch_bounds__(THREADS, 2)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta)
{
    __shared__ __align__(16) float As[BK][BM];  // transposed
    __shared__ __align__(16) float Bs[BK][BN];
    float accumulator[TM][TN] = {};
    float a_values[TM], b_values[TN];

    const unsigned thread = threadIdx.x;
    const unsigned tiles_n = (N + BN - 1) / BN;
    const unsigned tile_row = blockIdx.x / tiles_n * BM;
    const unsigned tile_column = blockIdx.x % tiles_n * BN;

    // The group of 4 in each tile that this thread copies.
    const unsigned a_row_in_tile = thread / A_GROUPS, a_column_in_tile = thread % A_GROUPS * VECTOR;
    const unsigned b_row_in_tile = thread / B_GROUPS, b_column_in_tile = thread % B_GROUPS * VECTOR;

    // The block of outputs that this thread owns.
    const unsigned first_row = thread / (BN / TN) * TM;
    const unsigned first_column = thread % (BN / TN) * TN;

    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        const float4 a = load_group<VECTOR_WIDTH>(A, tile_row + a_row_in_tile, M, k0 + a_column_in_tile, K, lda);
        const float4 b = load_group<VECTOR_WIDTH>(B, k0 + b_row_in_tile, K, tile_column + b_column_in_tile, N, ldb);
        As[a_column_in_tile][a_row_in_tile] = a.x;
        As[a_column_in_tile + 1][a_row_in_tile] = a.y;
        As[a_column_in_tile + 2][a_row_in_tile] = a.z;
        As[a_column_in_tile + 3][a_row_in_tile] = a.w;
        *reinterpret_cast<float4*>(&Bs[b_row_in_tile][b_column_in_tile]) = b;
        __syncthreads();  // the tile is whole before anyone reads it

#pragma unroll
        for (unsigned k = 0; k < BK; ++k) {
#pragma unroll
            for (unsigned i = 0; i < TM; i += VECTOR)
                load_shared_v4(&a_values[i], &As[k][first_row + i]);
#pragma unroll
            for (unsigned j = 0; j < TN; j += VECTOR)
                load_shared_v4(&b_values[j], &Bs[k][first_column + j]);
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
        for (unsigned j = 0; j < TN; j += VECTOR) {
            const unsigned column = tile_column + first_column + j;
            const long long index = row * ldc + column;
#if VECTOR_WIDTH == 4
            if (row < M && column < N)
                store_output_v4(C, index, &accumulator[i][j], alpha, beta);
#else
#pragma unroll
            for (unsigned offset = 0; offset < VECTOR; ++offset)
                if (row < M && column + offset < N)
                    store_output(C, index + offset, accumulator[i][j + offset], alpha, beta);
#endif
        }
    }
}
