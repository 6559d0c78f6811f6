// Single-precision matrix products for the emulator's tests: C (M x N) = A (M x K) * B (K x N), row-major.
// Compiled to PTX by regenerate.py; the results are kept beside this file so that the tests need no nvcc.
#include <cstdint>

constexpr int TILE = 16;

// One output a thread, both operands staged in shared memory.
extern "C" __global__ void tiled(const float *a, const float *b, float *c, int m, int n, int k)
{
    __shared__ float as[TILE][TILE];
    __shared__ float bs[TILE][TILE + 1];
    const int row = blockIdx.y * TILE + threadIdx.y;
    const int column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        const int ka = k0 + threadIdx.x;
        const int kb = k0 + threadIdx.y;
        as[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0.0f;
        bs[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i)
            sum = fmaf(as[threadIdx.y][i], bs[i][threadIdx.x], sum);
        __syncthreads();
    }
    if (row < m && column < n)
        c[row * n + column] = sum;
}

// 4 x 4 outputs a thread of a 64 x 64 tile; dynamic shared memory of (64 + 64) * 8 floats.
extern "C" __global__ void __launch_bounds__(256) register_blocked(const float *a, const float *b, float *c, int m, int n, int k)
{
    extern __shared__ float shared[];
    float *as = shared;           // [8][64], transposed
    float *bs = shared + 8 * 64;  // [8][64]
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += 8) {
        for (int i = threadIdx.x; i < 64 * 8; i += 256) {
            const int r = i / 8, kk = i % 8;
            as[kk * 64 + r] = row0 + r < m && k0 + kk < k ? a[(row0 + r) * k + k0 + kk] : 0.0f;
            const int kb = i / 64, col = i % 64;
            bs[i] = k0 + kb < k && column0 + col < n ? b[(k0 + kb) * n + column0 + col] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            float x[4], y[4];
            for (int i = 0; i < 4; ++i) {
                x[i] = as[kk * 64 + ty * 4 + i];
                y[i] = bs[kk * 64 + tx * 4 + i];
            }
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j)
                    sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            if (row0 + ty * 4 + i < m && column0 + tx * 4 + j < n)
                c[(row0 + ty * 4 + i) * n + column0 + tx * 4 + j] = sum[i][j];
}

// 16-byte loads and stores; needs m, n multiples of 32 and k of 16. 64 threads, 32 x 32 tile, 4 x 4 outputs a thread.
extern "C" __global__ void vectorised(const float4 *__restrict__ a, const float4 *__restrict__ b, float4 *c, int m, int n, int k)
{
    __shared__ float4 as[32][4];  // 32 rows of 16
    __shared__ float4 bs[16][8];  // 16 rows of 32
    const int tx = threadIdx.x % 8, ty = threadIdx.x / 8;
    float4 sum[4] = {};
    for (int k0 = 0; k0 < k; k0 += 16) {
        for (int i = threadIdx.x; i < 128; i += 64) {
            as[i / 4][i % 4] = __ldg(&a[(blockIdx.y * 32 + i / 4) * (k / 4) + k0 / 4 + i % 4]);
            bs[i / 8][i % 8] = __ldg(&b[(k0 + i / 8) * (n / 4) + blockIdx.x * 8 + i % 8]);
        }
        __syncthreads();
        for (int q = 0; q < 4; ++q) {
            float4 y[4];
            for (int j = 0; j < 4; ++j)
                y[j] = bs[q * 4 + j][tx];
            for (int i = 0; i < 4; ++i) {
                const float4 x = as[ty * 4 + i][q];
                const float xs[4] = {x.x, x.y, x.z, x.w};
                for (int j = 0; j < 4; ++j) {
                    sum[i].x += xs[j] * y[j].x;
                    sum[i].y += xs[j] * y[j].y;
                    sum[i].z += xs[j] * y[j].z;
                    sum[i].w += xs[j] * y[j].w;
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        c[(blockIdx.y * 32 + ty * 4 + i) * (n / 4) + blockIdx.x * 8 + tx] = sum[i];
}

// One warp an output: lanes stride over k, then reduce by shuffles; blocks of 128 threads, outputs by a grid stride.
extern "C" __global__ void warp_shuffle(const float *a, const float *b, float *c, int m, int n, int k)
{
    const int lane = threadIdx.x % 32;
    const int warps = gridDim.x * blockDim.x / 32;
    for (int out = (blockIdx.x * blockDim.x + threadIdx.x) / 32; out < m * n; out += warps) {
        const int row = out / n, column = out % n;
        float sum = 0.0f;
        for (int i = lane; i < k; i += 32)
            sum += a[row * k + i] * b[i * n + column];
        for (int step = 16; step > 0; step /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0)
            c[out] = sum;
    }
}

// A division, a switch and a call that is not inlined, for what compilers make of them.
__device__ __noinline__ float mix(float x, int how)
{
    switch (how % 6) {
    case 0: return x * 2.0f;
    case 1: return x / 3.0f;
    case 2: return sqrtf(fabsf(x));
    case 3: return x + 1.0f;
    case 4: return -x;
    default: return floorf(x);
    }
}

extern "C" __global__ void branches(const float *x, float *y, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float value = x[i];
        for (int j = 0; j < i % 5; ++j)
            value = mix(value, i + j);
        y[i] = value;
    }
}
