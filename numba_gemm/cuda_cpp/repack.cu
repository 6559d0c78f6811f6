// repack, the twin of ../fp32/repack.py: a strided array copied into another, at memory speed, whatever the strides.
//
// Roles        *columns* is the axis along which the target's elements are closest, *rows* that along which the
//              source's are, where it is another; *batch* is blockIdx.z.
// straight     lanes along columns: 32x128 elements a block, 256 threads, 16 elements a thread, all loaded before the
//              first is stored.
// aligned      the same where rows of both begin at multiples of 16 bytes: 16 bytes an access, 32x32 groups a block.
// transposed   64x64 elements a block through shared memory: lanes read along rows and write along columns. A row of
//              the tile is padded to an odd number of words, so that lanes which walk down a column meet 32 banks.
//
// BITS is 16 or 32: bits are moved, whatever they mean. TRANSPOSED is 1 for that form; VECTOR_WIDTH, the elements in
// 16 bytes, makes the aligned one.

#ifndef KERNEL_NAME
#define KERNEL_NAME repack_nvcc
#endif
#ifndef BITS
#define BITS 32
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif
#ifndef VECTOR_WIDTH
#define VECTOR_WIDTH 1
#endif

#if BITS == 16
typedef unsigned short word;
#else
typedef unsigned word;
#endif

constexpr unsigned THREADS = 256, WARPS = THREADS / 32;
constexpr unsigned TILE = 64, ROUNDS = TILE / WARPS;
constexpr unsigned PADDED = TILE + 32 / BITS;
constexpr unsigned STRAIGHT_ROWS = 32, STRAIGHT_ROUNDS = STRAIGHT_ROWS / WARPS, SPANS = 4;
constexpr unsigned STRAIGHT_COLUMNS = 32 * (VECTOR_WIDTH > 1 ? VECTOR_WIDTH : SPANS);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
KERNEL_NAME(const word* __restrict__ source, word* __restrict__ target, unsigned rows, unsigned columns,
            long long source_row, long long source_column, long long target_row, long long target_column,
            long long source_batch, long long target_batch)
{
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    source += blockIdx.z * source_batch;
    target += blockIdx.z * target_batch;

#if TRANSPOSED
    __shared__ word tile[TILE][PADDED];
    word values[2][ROUNDS];
    const unsigned tiles_n = (columns + TILE - 1) / TILE;
    const unsigned first_row = blockIdx.x / tiles_n * TILE, first_column = blockIdx.x % tiles_n * TILE;

#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        const unsigned row = first_row + lane + 32 * half;
        const word* s = source + row * source_row + (first_column + warp) * source_column;
#pragma unroll
        for (unsigned step = 0; step < ROUNDS; ++step, s += WARPS * source_column)
            values[half][step] = row < rows && first_column + warp + WARPS * step < columns ? *s : 0;
    }
#pragma unroll
    for (unsigned half = 0; half < 2; ++half)
#pragma unroll
        for (unsigned step = 0; step < ROUNDS; ++step)
            tile[lane + 32 * half][warp + WARPS * step] = values[half][step];
    __syncthreads();  // the tile is whole before it is read the other way round
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        const unsigned column = first_column + lane + 32 * half;
        word* t = target + (first_row + warp) * target_row + column * target_column;
#pragma unroll
        for (unsigned step = 0; step < ROUNDS; ++step, t += WARPS * target_row)
            if (column < columns && first_row + warp + WARPS * step < rows)
                *t = tile[warp + WARPS * step][lane + 32 * half];
    }
#else
    const unsigned tiles_n = (columns + STRAIGHT_COLUMNS - 1) / STRAIGHT_COLUMNS;
    const unsigned first_row = blockIdx.x / tiles_n * STRAIGHT_ROWS;
    const unsigned first_column = blockIdx.x % tiles_n * STRAIGHT_COLUMNS;
#if VECTOR_WIDTH == 1
    word values[STRAIGHT_ROUNDS][SPANS];
    const unsigned column = first_column + lane;
#pragma unroll
    for (unsigned step = 0; step < STRAIGHT_ROUNDS; ++step) {
        const unsigned row = first_row + warp + WARPS * step;
        const word* s = source + row * source_row + column * source_column;
#pragma unroll
        for (unsigned span = 0; span < SPANS; ++span, s += 32 * source_column)
            values[step][span] = row < rows && column + 32 * span < columns ? *s : 0;
    }
#pragma unroll
    for (unsigned step = 0; step < STRAIGHT_ROUNDS; ++step) {
        const unsigned row = first_row + warp + WARPS * step;
        word* t = target + row * target_row + column * target_column;
#pragma unroll
        for (unsigned span = 0; span < SPANS; ++span, t += 32 * target_column)
            if (row < rows && column + 32 * span < columns)
                *t = values[step][span];
    }
#else
    uint4 values[STRAIGHT_ROUNDS];
    const unsigned column = first_column + lane * VECTOR_WIDTH;
    const bool whole = column + VECTOR_WIDTH <= columns;
#pragma unroll
    for (unsigned step = 0; step < STRAIGHT_ROUNDS; ++step) {
        const unsigned row = first_row + warp + WARPS * step;
        values[step] = make_uint4(0, 0, 0, 0);
        if (row < rows && whole)
            values[step] = __ldg(reinterpret_cast<const uint4*>(source + row * source_row + column));
    }
#pragma unroll
    for (unsigned step = 0; step < STRAIGHT_ROUNDS; ++step) {
        const unsigned row = first_row + warp + WARPS * step;
        if (row < rows && whole)
            *reinterpret_cast<uint4*>(target + row * target_row + column) = values[step];
        else if (row < rows)  // the end of a row that isn't a whole number of groups
            for (unsigned offset = 0; offset < VECTOR_WIDTH; ++offset)
                if (column + offset < columns)
                    target[row * target_row + column + offset] = source[row * source_row + column + offset];
    }
#endif
#endif
}
