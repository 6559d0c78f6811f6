// repack, the twin of ../fp32/repack.py: a strided matrix copied into another, at memory speed, whatever its strides.
//
// Geometry    32x32 elements a block, 256 threads, 4 elements a thread, staged through shared memory whose rows are
//             padded by one word: reading along the source's smaller stride and writing along the target's both stay
//             coalesced, and neither walks one bank.
//
// BITS is 16 or 32: bits are moved, whatever they mean. TRANSPOSED is 1 if the source's smaller stride is that of rows.

#ifndef KERNEL_NAME
#define KERNEL_NAME repack_nvcc
#endif
#ifndef BITS
#define BITS 32
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif

#if BITS == 16
typedef unsigned short word;
#else
typedef unsigned word;
#endif

constexpr unsigned TILE = 32, THREADS = 256, STEP = THREADS / TILE;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
KERNEL_NAME(const word* source, word* target, unsigned rows, unsigned columns, long long source_row,
            long long source_column, long long target_row, long long target_column)
{
    __shared__ word tile[TILE][TILE + 1];

    const unsigned tiles_n = (columns + TILE - 1) / TILE;
    const unsigned first_row = blockIdx.x / tiles_n * TILE;
    const unsigned first_column = blockIdx.x % tiles_n * TILE;
    const unsigned fast = threadIdx.x % TILE, slow = threadIdx.x / TILE;

#pragma unroll
    for (unsigned step = 0; step < TILE; step += STEP) {
        // Lanes run along the source's dimension of smaller stride.
        const unsigned i = TRANSPOSED ? fast : slow + step, j = TRANSPOSED ? slow + step : fast;
        const unsigned row = first_row + i, column = first_column + j;
        if (row < rows && column < columns)
            tile[i][j] = source[row * source_row + column * source_column];
    }
    __syncthreads();  // the tile is whole before it is read the other way round
#pragma unroll
    for (unsigned step = 0; step < TILE; step += STEP) {
        const unsigned i = slow + step, row = first_row + i, column = first_column + fast;
        if (row < rows && column < columns)
            target[row * target_row + column * target_column] = tile[i][fast];
    }
}
