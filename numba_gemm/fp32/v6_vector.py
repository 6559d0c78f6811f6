"""v6 vector: 16 bytes an instruction, and the A tile stored transposed.

Idea        issue slots are a resource too. Global loads and stores move 4 floats at once, and A lies transposed in
            shared memory, `As[BK][BM]`, so that the 8 values of A that a thread needs at one k are contiguous, as
            those of B already are: 4 LDS.128 do the work of v5's 16 LDS.
Geometry    128×128×8 tile, 256 threads, 8×8 outputs a thread; 4 KB + 4 KB of shared memory. Threads as in v5.
Each k      4 LDS.128, 64 FMAs: v5's 0.25 values per FMA in a quarter of the instructions.
Each tile   one 16-byte load of A (half a row) and one of B (a warp reads 512 bytes of one row) a thread; 4 STS for
            the transposed A, 1 STS.128 for B; 2 barriers for 512 FMAs a thread.
Bound by    the two barriers round each tile, with nothing in flight across them, and two-way bank conflicts: the
            lanes' 16-byte reads of B are 32 bytes apart.

Tried       (H200, 4096³, TFLOP/s) the k loop left rolled 31.6, written out 34.0; the register limit that two blocks an
            SM need, stated: no change, 118 registers keep it anyway.

Two compiled forms, chosen at each launch. `vector_width=4` needs K % 4 == 0 and N % 4 == 0, and base pointers and row
strides that are multiples of 16 bytes; a group of 4 is then wholly inside the matrix or wholly outside. Otherwise
`vector_width=1` does the same with guarded 4-byte global accesses; in shared memory both forms are alike.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll
from numba_gemm.spec import KernelSpec, make_config

BM, BN, BK = 128, 128, 8
TM, TN = 8, 8
THREADS = BM * BN // (TM * TN)
VECTOR = 4
A_TILE, B_TILE = BK * BM, BK * BN  # words of shared memory
A_GROUPS, B_GROUPS = BK // VECTOR, BN // VECTOR  # 16-byte groups in one row of each tile


def build(vector_width: int):
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output, store_output_v4
    from numba_gemm.fp32.tile_loads import load_group_scalar, load_group_v4
    from numba_gemm.intrinsics import load_shared_v4, store_shared_v4

    vectorised = vector_width == VECTOR
    load_group = load_group_v4 if vectorised else load_group_scalar

    def sgemm_vector(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta):
        As = cuda.shared.array(A_TILE, float32, alignment=16)  # transposed: As[k * BM + row]
        Bs = cuda.shared.array(B_TILE, float32, alignment=16)
        accumulator = cuda.local.array((TM, TN), float32)
        a_values = cuda.local.array(TM, float32)
        b_values = cuda.local.array(TN, float32)

        thread = uint32(cuda.threadIdx.x)
        tiles_n = (N + uint32(BN - 1)) // uint32(BN)
        tile_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(BM))
        tile_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(BN))

        # The group of 4 in each tile that this thread copies.
        a_row_in_tile = thread // uint32(A_GROUPS)
        a_column_in_tile = thread % uint32(A_GROUPS) * uint32(VECTOR)
        b_row_in_tile = thread // uint32(B_GROUPS)
        b_column_in_tile = thread % uint32(B_GROUPS) * uint32(VECTOR)
        a_row = uint32(tile_row + a_row_in_tile)
        b_column = uint32(tile_column + b_column_in_tile)

        # The block of outputs that this thread owns.
        first_row = thread // uint32(BN // TN) * uint32(TM)
        first_column = thread % uint32(BN // TN) * uint32(TN)

        for i in range(TM):
            for j in range(TN):
                accumulator[i, j] = float32(0)

        k0 = uint32(0)
        while k0 < K:
            a0, a1, a2, a3 = load_group(A, a_row, M, uint32(k0 + a_column_in_tile), K, lda)
            b0, b1, b2, b3 = load_group(B, uint32(k0 + b_row_in_tile), K, b_column, N, ldb)
            a_slot = uint32(a_column_in_tile * uint32(BM) + a_row_in_tile)
            As[a_slot] = a0
            As[uint32(a_slot + uint32(BM))] = a1
            As[uint32(a_slot + uint32(2 * BM))] = a2
            As[uint32(a_slot + uint32(3 * BM))] = a3
            store_shared_v4(Bs, uint32(b_row_in_tile * uint32(BN) + b_column_in_tile), b0, b1, b2, b3)
            cuda.syncthreads()  # the tile is whole before anyone reads it

            for k in unroll(BK):
                for i in range(0, TM, VECTOR):
                    x, y, z, w = load_shared_v4(As, uint32(uint32(k * BM) + first_row + uint32(i)))
                    a_values[i], a_values[i + 1], a_values[i + 2], a_values[i + 3] = x, y, z, w
                for j in range(0, TN, VECTOR):
                    x, y, z, w = load_shared_v4(Bs, uint32(uint32(k * BN) + first_column + uint32(j)))
                    b_values[j], b_values[j + 1], b_values[j + 2], b_values[j + 3] = x, y, z, w
                for i in range(TM):
                    for j in range(TN):
                        accumulator[i, j] += a_values[i] * b_values[j]
            cuda.syncthreads()  # everyone has read it before anyone overwrites it
            k0 = uint32(k0 + uint32(BK))

        for i in unroll(TM):
            row = uint32(tile_row + first_row + uint32(i))
            for j in range(0, TN, VECTOR):
                column = uint32(tile_column + first_column + uint32(j))
                index = int64(row) * ldc + int64(column)
                if vectorised:
                    if row < M and column < N:
                        store_output_v4(
                            C,
                            index,
                            accumulator[i, j],
                            accumulator[i, j + 1],
                            accumulator[i, j + 2],
                            accumulator[i, j + 3],
                            alpha,
                            beta,
                        )
                else:
                    for lane in range(VECTOR):
                        if row < M and uint32(column + uint32(lane)) < N:
                            store_output(C, index + lane, accumulator[i, j + lane], alpha, beta)

    return sgemm_vector


SPEC = KernelSpec(
    name="v6",
    title="vector",
    idea="16-byte accesses; the A tile stored transposed",
    block_tile=(BM, BN, BK),
    thread_tile=(TM, TN),
    threads=THREADS,
    loads_per_fma=0.25,
    build=build,
    configs=(make_config(vector_width=4), make_config(vector_width=1)),
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.tile_loads"),
)
