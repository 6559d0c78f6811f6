// v7 warp tile, the twin of ../fp32/v7_warptile.py: each warp owns a square of the block tile.
//
// Geometry    128x128x16 tile, 4 warps of 64x64, 128 threads; 8 KB + 8 KB of shared memory, A transposed as in v6. A
//             warp tile is WNITER = 4 strips of 16 columns. In each strip a lane owns 8 rows x 4 columns: lane / 4
//             picks the rows, lane % 4 the columns, so that a thread owns 8x16 outputs.
// Each k      2 + 4 16-byte shared loads, 128 FMAs.
// Each tile   4 16-byte loads of A and 4 of B a thread; 2 barriers for 2048 FMAs a thread.
// Bound by    the barriers round each tile, and 128 accumulators a thread, which leave room for 12 warps an SM.
//
// VECTOR_WIDTH is 4 or 1, A_COLUMN_MAJOR and B_COLUMN_MAJOR are 1 or 0, as in v6. blockIdx.z is the batch index.

#include "sgemm.cuh"

#ifndef KERNEL_NAME
#define KERNEL_NAME v7_nvcc
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

constexpr unsigned BM = 128, BN = 128, BK = 16;
constexpr unsigned WM = 64, WN = 64;
constexpr unsigned WNITER = 4;
constexpr unsigned TM = 8, TN = 4;  // of one strip; a thread owns TM x (WNITER TN) outputs
constexpr unsigned STRIP = WN / WNITER;
constexpr unsigned LANES_N = STRIP / TN;  // lanes side by side in a strip
constexpr unsigned COLUMNS = WNITER * TN;
constexpr unsigned THREADS = 32 * (BM / WM) * (BN / WN);
constexpr unsigned VECTOR = 4;
constexpr unsigned COPIES = BM * BK / (VECTOR * THREADS);  // groups of each tile that one thread copies
typedef TileCopy<A_COLUMN_MAJOR, VECTOR_WIDTH, BM, BK, THREADS> ACopy;
typedef TileCopy<!B_COLUMN_MAJOR, VECTOR_WIDTH, BN, BK, THREADS> BCopy;

// Three blocks an SM: 168 registers a thread.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
KERNEL_NAME(const float* __restrict__ A, const float* __restrict__ B, float* C,
            unsigned M, unsigned N, unsigned K, long long lda, long long ldb, long long ldc, float alpha, float beta,
            long long stride_a, long long stride_b, long long stride_c)
{
    __shared__ __align__(16) float As[BK][BM];  // transposed
    __shared__ __align__(16) float Bs[BK][BN];
    float accumulator[TM][COLUMNS] = {};
    float a_values[TM], b_values[COLUMNS];

    A += blockIdx.z * stride_a;
    B += blockIdx.z * stride_b;
    C += blockIdx.z * stride_c;
    const unsigned thread = threadIdx.x;
    const unsigned tiles_n = (N + BN - 1) / BN;
    const unsigned tile_row = blockIdx.x / tiles_n * BM;
    const unsigned tile_column = blockIdx.x % tiles_n * BN;

    // Which 64x64 square the warp owns, and which 8x4 block of each strip the lane owns.
    const unsigned warp = thread / 32, lane = thread % 32;
    const unsigned first_row = warp / (BN / WN) * WM + lane / LANES_N * TM;
    const unsigned first_column = warp % (BN / WN) * WN + lane % LANES_N * TN;

    for (unsigned k0 = 0; k0 < K; k0 += BK) {
        // Two groups of A, two of B, in turn, and the loop kept a loop: more would hold too many values at once for 168
        // registers.
#pragma unroll 1
        for (unsigned begin = 0; begin < COPIES; begin += 2) {
#pragma unroll
            for (unsigned copy = begin; copy < begin + 2; ++copy) {
                const unsigned k = ACopy::k(thread, copy), row = ACopy::x(thread, copy);
                ACopy::store(As, k, row, ACopy::load(A, k0 + k, K, tile_row + row, M, lda));
            }
#pragma unroll
            for (unsigned copy = begin; copy < begin + 2; ++copy) {
                const unsigned k = BCopy::k(thread, copy), column = BCopy::x(thread, copy);
                BCopy::store(Bs, k, column, BCopy::load(B, k0 + k, K, tile_column + column, N, ldb));
            }
        }
        __syncthreads();  // the tile is whole before anyone reads it

#pragma unroll
        for (unsigned k = 0; k < BK; ++k) {
#pragma unroll
            for (unsigned i = 0; i < TM; i += VECTOR)
                load_shared_v4(&a_values[i], &As[k][first_row + i]);
#pragma unroll
            for (unsigned strip = 0; strip < WNITER; ++strip)
                load_shared_v4(&b_values[strip * TN], &Bs[k][first_column + strip * STRIP]);
#pragma unroll
            for (unsigned i = 0; i < TM; ++i)
#pragma unroll
                for (unsigned j = 0; j < COLUMNS; ++j)
                    accumulator[i][j] = fmaf(a_values[i], b_values[j], accumulator[i][j]);
        }
        __syncthreads();  // everyone has read it before anyone overwrites it
    }

#pragma unroll
    for (unsigned i = 0; i < TM; ++i) {
        const unsigned row = tile_row + first_row + i;
#pragma unroll
        for (unsigned strip = 0; strip < WNITER; ++strip) {
            const unsigned column = tile_column + first_column + strip * STRIP;
            const long long index = row * ldc + column;
#if VECTOR_WIDTH == 4
            if (row < M && column < N)
                store_output_v4(C, index, &accumulator[i][strip * TN], alpha, beta);
#else
#pragma unroll
            for (unsigned offset = 0; offset < TN; ++offset)
                if (row < M && column + offset < N)
                    store_output(C, index + offset, accumulator[i][strip * TN + offset], alpha, beta);
#endif
        }
    }
}
