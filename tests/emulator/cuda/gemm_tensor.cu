// Half-precision products on tensor cores for the emulator's tests, by WMMA and by inline PTX.
#include <cstdint>
#include <cuda_fp16.h>
#include <mma.h>

// One warp a 16 x 16 tile of C (float), straight from global memory; m, n, k multiples of 16.
extern "C" __global__ void wmma_direct(const half *a, const half *b, float *c, int m, int n, int k)
{
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
    wmma::fill_fragment(acc, 0.0f);
    const int row = blockIdx.y * 16, column = blockIdx.x * 16;
    for (int k0 = 0; k0 < k; k0 += 16) {
        wmma::load_matrix_sync(fa, a + row * k + k0, k);
        wmma::load_matrix_sync(fb, b + k0 * n + column, n);
        wmma::mma_sync(acc, fa, fb, acc);
    }
    for (int i = 0; i < acc.num_elements; ++i)
        acc.x[i] *= 2.0f;
    wmma::store_matrix_sync(c + row * n + column, acc, n, wmma::mem_row_major);
}

// 128 x 128 x 32 tile, 8 warps of 64 x 32: cp.async into two stages, ldmatrix, mma.sync.m16n8k16; c is float.
// m, n multiples of 128, k of 32. 256 threads.
extern "C" __global__ void __launch_bounds__(256) mma_async(const half *a, const half *b, float *c, int m, int n, int k)
{
    constexpr int BM = 128, BN = 128, BK = 32, PAD = 8;
    __shared__ __align__(16) half as[2][BM][BK + PAD];
    __shared__ __align__(16) half bs[2][BK][BN + PAD];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    float acc[4][4][4] = {};

    auto fetch = [&](int stage, int k0) {
        for (int i = threadIdx.x; i < BM * BK / 8; i += 256) {
            const int r = i / (BK / 8), q = i % (BK / 8) * 8;
            const uint32_t to = (uint32_t)__cvta_generic_to_shared(&as[stage][r][q]);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(&a[(blockIdx.y * BM + r) * k + k0 + q]) : "memory");
        }
        for (int i = threadIdx.x; i < BK * BN / 8; i += 256) {
            const int r = i / (BN / 8), q = i % (BN / 8) * 8;
            const uint32_t to = (uint32_t)__cvta_generic_to_shared(&bs[stage][r][q]);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(&b[(k0 + r) * n + blockIdx.x * BN + q]) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    fetch(0, 0);
    for (int k0 = 0; k0 < k; k0 += BK) {
        const int stage = k0 / BK % 2;
        if (k0 + BK < k) {
            fetch(stage ^ 1, k0 + BK);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        for (int kk = 0; kk < BK; kk += 16) {
            uint32_t fa[4][4], fb[4][2];
            for (int i = 0; i < 4; ++i) {
                const uint32_t from = (uint32_t)__cvta_generic_to_shared(&as[stage][warp_row + i * 16 + lane % 16][kk + lane / 16 * 8]);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(fa[i][0]), "=r"(fa[i][1]), "=r"(fa[i][2]), "=r"(fa[i][3]) : "r"(from));
            }
            for (int j = 0; j < 4; ++j) {
                const uint32_t from = (uint32_t)__cvta_generic_to_shared(&bs[stage][kk + lane % 16][warp_column + j * 8]);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(fb[j][0]), "=r"(fb[j][1]) : "r"(from));
            }
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j)
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                                 : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3])
                                 : "r"(fa[i][0]), "r"(fa[i][1]), "r"(fa[i][2]), "r"(fa[i][3]), "r"(fb[j][0]), "r"(fb[j][1]));
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            const int row = blockIdx.y * BM + warp_row + i * 16 + lane / 4;
            const int column = blockIdx.x * BN + warp_column + j * 8 + lane % 4 * 2;
            *(float2 *)&c[row * n + column] = make_float2(acc[i][j][0], acc[i][j][1]);
            *(float2 *)&c[(row + 8) * n + column] = make_float2(acc[i][j][2], acc[i][j][3]);
        }
}
