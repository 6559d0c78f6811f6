// What the WMMA kernels share: the 16-bit type, guarded loads of eight elements, and the last lines,
// C = alpha * accumulator + beta * C.
//
// WMMA is the tensor core's interface in CUDA C++, and the only one that GPUs before sm_80 share with later ones. It
// hides which lane holds which element of a fragment. So whatever needs a guard, tiles of A and B at the edge and all
// of C, goes through shared memory, where the place of an element is known.

#pragma once

#include <mma.h>  // with cuda_fp16.h and cuda_bf16.h

#ifdef BFLOAT16  // sm_80 and later
typedef __nv_bfloat16 element;
#else
typedef __half element;
#endif

// Bits of `flags`. Aligned: each row starts at a multiple of 16 bytes, and K (of A) or N (of B) is a multiple of 8, so
// that a group of 8 elements is wholly inside the matrix or wholly outside.
constexpr unsigned C_IS_FLOAT32 = 1, A_IS_ALIGNED = 2, B_IS_ALIGNED = 4;

// wmma's tile: 16 rows or columns of C, 16 along k.
constexpr unsigned MMA = 16;
typedef nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, MMA, MMA, MMA, element, nvcuda::wmma::row_major> AFragment;
typedef nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, MMA, MMA, MMA, element, nvcuda::wmma::row_major> BFragment;
typedef nvcuda::wmma::fragment<nvcuda::wmma::accumulator, MMA, MMA, MMA, float> Accumulator;

// Two neighbours of a row of 16-bit elements, of which `left` exist, packed; zero for one that doesn't.
__device__ __forceinline__ unsigned load_pair(const unsigned short* start, unsigned left)
{
    unsigned pair = 0;
    if (left > 0)
        pair = __ldg(start);
    if (left > 1)
        pair |= static_cast<unsigned>(__ldg(start + 1)) << 16;
    return pair;
}

__device__ __forceinline__ unsigned less(unsigned x, unsigned y) { return x > y ? x - y : 0; }

// Eight consecutive elements of a row, of which `left` exist, and zeros for the others: one 16-byte load, or guarded
// 2-byte loads. If `aligned`, all exist or none.
__device__ __forceinline__ uint4 load_group(const element* start, unsigned left, bool aligned)
{
    uint4 group = make_uint4(0, 0, 0, 0);
    if (aligned) {
        if (left > 0)
            group = __ldg(reinterpret_cast<const uint4*>(start));
    } else {
        const unsigned short* bits = reinterpret_cast<const unsigned short*>(start);
        group.x = load_pair(bits, left);
        group.y = load_pair(bits + 2, less(left, 2));
        group.z = load_pair(bits + 4, less(left, 4));
        group.w = load_pair(bits + 6, less(left, 6));
    }
    return group;
}

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ void round_to(__half* target, float value) { *target = __float2half_rn(value); }
__device__ __forceinline__ void round_to(__nv_bfloat16* target, float value) { *target = __float2bfloat16_rn(value); }

// One element of C, which is float32 or of the type of A and B. beta = 0 doesn't read C, which may hold anything.
__device__ __forceinline__ void store_output(void* C, long long index, float accumulator, float alpha, float beta,
                                             bool c_is_float32)
{
    float value = alpha * accumulator;
    if (c_is_float32) {
        float* c = static_cast<float*>(C) + index;
        if (beta != 0.0f)
            value = fmaf(beta, *c, value);
        *c = value;
    } else {
        element* c = static_cast<element*>(C) + index;
        if (beta != 0.0f)
            value = fmaf(beta, to_float(*c), value);
        round_to(c, value);
    }
}
