// What the FP32 kernels share: guarded loads of four, and the last lines, C = alpha * accumulator + beta * C.
//
// They are twins of the Numba kernels in ../fp32: the same threads own the same outputs, each output is one chain of
// FMAs in the order of k, and the epilogue rounds in the same places, so that both give the same bits. Needs no
// header of the CUDA toolkit.

#pragma once

// One element of C. beta = 0 doesn't read C, which may hold anything.
__device__ __forceinline__ void store_output(float* C, long long index, float accumulator, float alpha, float beta)
{
    asm volatile("" : "+f"(beta));  // keeps nvcc from writing the whole epilogue twice, by beta, which spills
    const float value = alpha * accumulator;
    C[index] = beta != 0.0f ? fmaf(beta, C[index], value) : value;
}

// Four consecutive elements of C, whose address is a multiple of 16 bytes.
__device__ __forceinline__ void store_output_v4(float* C, long long index, const float* accumulator, float alpha,
                                                float beta)
{
    float4 value = make_float4(alpha * accumulator[0], alpha * accumulator[1], alpha * accumulator[2],
                               alpha * accumulator[3]);
    if (beta != 0.0f) {
        const float4 c = *reinterpret_cast<const float4*>(C + index);
        value = make_float4(fmaf(beta, c.x, value.x), fmaf(beta, c.y, value.y), fmaf(beta, c.z, value.z),
                            fmaf(beta, c.w, value.w));
    }
    *reinterpret_cast<float4*>(C + index) = value;
}

// Four consecutive elements of a matrix row, zeros outside the matrix: one 16-byte load, or four guarded 4-byte loads.
// With 16-byte loads `columns` is a multiple of 4, so that a group is wholly inside the matrix or wholly outside.
template <int vector_width>
__device__ __forceinline__ float4 load_group(const float* __restrict__ X, unsigned row, unsigned rows, unsigned column,
                                             unsigned columns, long long leading_dimension)
{
    float4 group = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const long long index = row * leading_dimension + column;
    if (vector_width == 4) {
        if (row < rows && column < columns)
            group = __ldg(reinterpret_cast<const float4*>(X + index));
    } else if (row < rows) {
        if (column < columns)
            group.x = X[index];
        if (column + 1 < columns)
            group.y = X[index + 1];
        if (column + 2 < columns)
            group.z = X[index + 2];
        if (column + 3 < columns)
            group.w = X[index + 3];
    }
    return group;
}

// How a tile[k][x] of shared memory is filled, x being a row of A or a column of B, in groups of four. Along: the
// neighbours in global memory are neighbours in x, and a group is one 16-byte store (A column-major, B row-major).
// Across: they are neighbours in k, and a group goes down a column of the tile (A row-major, B column-major).
template <bool along, int vector_width, unsigned width, unsigned depth, unsigned threads>
struct TileCopy {
    static constexpr unsigned GROUPS = (along ? width : depth) / 4;  // side by side in global memory

    // Where the first element of a thread's group lies in the tile.
    static __device__ __forceinline__ unsigned k(unsigned thread, unsigned copy)
    {
        return along ? thread / GROUPS + copy * (threads / GROUPS) : thread % GROUPS * 4;
    }

    static __device__ __forceinline__ unsigned x(unsigned thread, unsigned copy)
    {
        return along ? thread % GROUPS * 4 : thread / GROUPS + copy * (threads / GROUPS);
    }

    static __device__ __forceinline__ float4 load(const float* __restrict__ X, unsigned k, unsigned K, unsigned x,
                                                  unsigned extent, long long leading_dimension)
    {
        return along ? load_group<vector_width>(X, k, K, x, extent, leading_dimension)
                     : load_group<vector_width>(X, x, extent, k, K, leading_dimension);
    }

    static __device__ __forceinline__ void store(float (*tile)[width], unsigned k, unsigned x, float4 group)
    {
        if (along) {
            *reinterpret_cast<float4*>(&tile[k][x]) = group;
        } else {
            tile[k][x] = group.x;
            tile[k + 1][x] = group.y;
            tile[k + 2][x] = group.z;
            tile[k + 3][x] = group.w;
        }
    }
};

// Four consecutive floats of shared memory in one 16-byte access.
__device__ __forceinline__ void load_shared_v4(float* values, const float* shared)
{
    const float4 group = *reinterpret_cast<const float4*>(shared);
    values[0] = group.x;
    values[1] = group.y;
    values[2] = group.z;
    values[3] = group.w;
}
