// Hopper kernels for the emulator's tests, compiled for sm_90a.
//
// bulk_round_trip: a bulk copy in and out with libcu++'s barrier and PTX wrappers.
// gemm_cluster: C (M x N, half) = A (M x K) * B^T (N x K). Clusters of two blocks that share B: each loads half of its
// rows and multicasts them. A producer warpgroup gives its registers to two consumer warpgroups of 64 x 128 each; the
// epilogue goes through stmatrix and a tensor-map store.
//
//   full[stage]   one arrival with bytes, by the block's producer; data from both blocks
//   empty[stage]  one arrival from each consumer warpgroup of both blocks
#include <cstdint>
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda/barrier>
#include <cuda/ptx>

namespace ptx = cuda::ptx;

extern "C" __global__ void bulk_round_trip(int *data)
{
    using barrier_t = cuda::barrier<cuda::thread_scope_block>;
    __shared__ alignas(16) int buffer[256];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ barrier_t barrier;
    if (threadIdx.x == 0)
        init(&barrier, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0)
        ptx::fence_proxy_async(ptx::space_shared);
    barrier_t::arrival_token token;
    int *mine = data + 256 * blockIdx.x;
    if (threadIdx.x == 0) {
        cuda::memcpy_async(buffer, mine, cuda::aligned_size_t<16>(sizeof(buffer)), barrier);
        token = barrier.arrive();
    } else {
        token = barrier.arrive();
    }
    barrier.wait(std::move(token));
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        buffer[i] += i;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, mine, buffer, sizeof(buffer));
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
    }
}

constexpr int STAGES = 3;
constexpr int A_BYTES = 128 * 128;
constexpr int B_BYTES = 128 * 128;

struct __align__(1024) Shared {
    unsigned char a[STAGES][A_BYTES];
    unsigned char b[STAGES][B_BYTES];
    unsigned char c[2][2][64 * 128];  // by warpgroup, in two halves of 64 columns with swizzled rows
    unsigned long long full[STAGES], empty[STAGES];
};

__device__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait(uint32_t barrier, uint32_t parity)
{
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
        "@ready bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ uint64_t descriptor(uint32_t at)
{
    return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | uint64_t((at & 0x3FFFF) >> 4);
}

__device__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int accumulate)
{
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ void give_back(uint32_t empty, uint32_t rank)
{
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(empty), "r"(rank) : "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm_cluster(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                 const __grid_constant__ CUtensorMap map_c, int k_tiles, int tiles_m, int tiles)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&s.full[i])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(address(&s.empty[i])));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    int stage = 0;
    uint32_t phase = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int row = tile % tiles_m * 128, column = tile / tiles_m * 128;
                for (int k = 0; k < k_tiles; ++k) {
                    wait(address(&s.empty[stage]), phase ^ 1);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&s.full[stage])),
                                 "r"(A_BYTES + B_BYTES) : "memory");
                    asm volatile(
                        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                        " [%0], [%1, {%2, %3}], [%4];" ::"r"(address(s.a[stage])), "l"(&map_a), "r"(64 * k), "r"(row),
                        "r"(address(&s.full[stage])) : "memory");
                    asm volatile(
                        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(s.b[stage] + rank * B_BYTES / 2)), "l"(&map_b),
                        "r"(64 * k), "r"(column + 64 * rank), "r"(address(&s.full[stage])), "h"(uint16_t(3)) : "memory");
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int half = group - 1, thread = threadIdx.x % 128;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row = tile % tiles_m * 128, column = tile / tiles_m * 128;
            float d[64];
            for (int k = 0; k < k_tiles; ++k) {
                wait(address(&s.full[stage]), phase);
                const uint64_t a = descriptor(address(s.a[stage] + half * 64 * 128));
                const uint64_t b = descriptor(address(s.b[stage]));
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    multiply(d, a + 2 * step, b + 2 * step, k + step != 0);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
                if (thread < 2)
                    give_back(address(&s.empty[stage]), thread);
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            if (thread == 0)
                ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
            for (int i = 0; i < 64; i += 8) {  // 16 columns
                const int line = thread % 16 + thread / 32 * 16, chunk = i / 8 * 2 + thread % 32 / 16;
                const uint32_t at = address(s.c[half][chunk / 8]) + line * 128 + ((chunk % 8) ^ line % 8) * 16;
                uint32_t pair[4];
                for (int j = 0; j < 4; ++j) {
                    const half2 both = __floats2half2_rn(d[i + 2 * j], d[i + 2 * j + 1]);
                    pair[j] = *reinterpret_cast<const uint32_t *>(&both);
                }
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pair[0]),
                             "r"(pair[1]), "r"(pair[2]), "r"(pair[3]) : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
            if (thread == 0) {
                for (int part = 0; part < 2; ++part)
                    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map_c),
                                 "r"(column + 64 * part), "r"(row + 64 * half), "r"(address(s.c[half][part])) : "memory");
                ptx::cp_async_bulk_commit_group();
            }
        }
        if (thread == 0)
            ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
    }
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
