// v6 vector, the twin of ../fp32/v6_vector.py: 16 bytes an instruction, and the A tile stored transposed.
//
// Geometry    128x128x8 tile, 256 threads, 8x8 outputs a thread; 4 KB + 4 KB of shared memory. Threads as in v5.
// Each k      4 16-byte shared loads, 64 FMAs.
// Each tile   one 16-byte load of A and one of B a thread; 4 scalar stores for the transposed A, one of 16 bytes for B;
//             2 barriers for 512 FMAs a thread.
// Bound by    the two barriers round each tile, and two-way bank conflicts in the reads of B.
//
// VECTOR_WIDTH=4 needs whole groups of 4 in the direction in which elements are neighbours, N % 4 == 0 for C, and base
// pointers and strides that are multiples of 16 bytes.
// VECTOR_WIDTH=1 does the same with guarded 4-byte global accesses; in shared memory both forms are alike.
// A_COLUMN_MAJOR, B_COLUMN_MAJOR: the layouts; lda, ldb are then the strides of columns. blockIdx.z is the batch index.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v6_nvcc
#endif
#ifndef VECTOR_WIDTH
#define VECTOR_WIDTH 4
#endif
#ifndef A_COLUMN_MAJOR
#define A_COLUMN_MAJOR 0
#endif
#ifndef B_COLUMN_MAJOR
#define B_COLUMN_MAJOR 0
#endif

constexpr unsigned BM = 128, BN = 128, BK = 8;
constexpr unsigned TM = 8, TN = 8;
constexpr unsigned THREADS = BM * BN / (TM * TN);
constexpr unsigned VECTOR = 4;
typedef TileCopy<A_COLUMN_MAJOR, VECTOR_WIDTH, BM, BK, THREADS> ACopy;
typedef TileCopy<!B_COLUMN_MAJOR, VECTOR_WIDTH, BN, BK, THREADS> BCopy;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta,
            long long stride_a, long long stride_b, long long stride_c)
{
    __shared__ __align__(16) float As[BK][BM];  // transposed
    __shared__ __align__(16) float Bs[BK][BN];
    float accumulator[TM][TN] = {};
    float a_values[TM], b_values[TN];

    A += blockIdx.z * stride_a;
    B += blockIdx.z * stride_b;
    C += blockIdx.z * stride_c;
    const unsigned thread = threadIdx.x;
    const unsigned tiles_n = (N + BN - 1) / BN;
    const unsigned tile_row = blockIdx.x / tiles_n * BM;
    const unsigned tile_column = blockIdx.x % tiles_n * BN;

    // The group of 4 in each tile that this thread copies.
    const unsigned a_k = ACopy::k(thread, 0), a_row_in_tile = ACopy::x(thread, 0);
    const unsigned b_k = BCopy::k(thread, 0), b_column_in_tile = BCopy::x(thread, 0);

    // The block of outputs that this thread owns.
    const unsigned first_row = thread / (BN / TN) * TM;
    const unsigned first_column = thread % (BN / TN) * TN;

    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        const float4 a = ACopy::load(A, k0 + a_k, K, tile_row + a_row_in_tile, M, lda);
        const float4 b = BCopy::load(B, k0 + b_k, K, tile_column + b_column_in_tile, N, ldb);
        ACopy::store(As, a_k, a_row_in_tile, a);
        BCopy::store(Bs, b_k, b_column_in_tile, b);
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
