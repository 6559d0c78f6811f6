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

Layouts     A and B may each be row-major or column-major (lda, ldb are then strides of columns). B row-major and A
            column-major are copied along their tile, A row-major and B column-major across it, transposed on the way
            (tile_loads); after that all is the same, to the last bit. A copy across costs 4 STS with two-way bank
            conflicts: lanes 2i and 2i + 1 hold one column at k = 0 and 4, 4 rows of 128 words apart.
Batch       ctaid.z picks the product; matrices lie strides apart that are signed, and 0 for one that all share.

Two compiled forms a layout, chosen at each launch. `vector_width=4` needs whole groups of 4 in the direction in which
the elements of A, B and C are neighbours (for row-major factors K % 4 == 0 and N % 4 == 0), and base pointers and
strides that are multiples of 16 bytes; a group of 4 is then wholly inside the matrix or wholly outside. Otherwise
`vector_width=1` does the same with guarded 4-byte global accesses; in shared memory both forms are alike.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll
from numba_gemm.spec import KernelSpec, layout_forms

BM, BN, BK = 128, 128, 8
TM, TN = 8, 8
THREADS = BM * BN // (TM * TN)
VECTOR = 4
A_TILE, B_TILE = BK * BM, BK * BN  # words of shared memory


def build(vector_width: int, a_layout: str = "row", b_layout: str = "row"):
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output, store_output_v4
    from numba_gemm.fp32.tile_loads import tile_copy
    from numba_gemm.intrinsics import load_shared_v4, offset_pointer

    vectorised = vector_width == VECTOR
    size = {"vector_width": vector_width, "depth": BK, "threads": THREADS}
    place_a, load_a, store_a = tile_copy(along=a_layout == "column", width=BM, **size)
    place_b, load_b, store_b = tile_copy(along=b_layout == "row", width=BN, **size)

    def sgemm_vector(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta, stride_a, stride_b, stride_c):
        As = cuda.shared.array(A_TILE, float32, alignment=16)  # transposed: As[k * BM + row]
        Bs = cuda.shared.array(B_TILE, float32, alignment=16)
        accumulator = cuda.local.array((TM, TN), float32)
        a_values = cuda.local.array(TM, float32)
        b_values = cuda.local.array(TN, float32)

        thread = uint32(cuda.threadIdx.x)
        batch = int64(uint32(cuda.blockIdx.z))
        A, B = offset_pointer(A, batch * stride_a), offset_pointer(B, batch * stride_b)
        tiles_n = (N + uint32(BN - 1)) // uint32(BN)
        tile_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(BM))
        tile_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(BN))

        # The group of 4 in each tile that this thread copies.
        a_k, a_row_in_tile = place_a(thread, uint32(0))
        b_k, b_column_in_tile = place_b(thread, uint32(0))
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
            a0, a1, a2, a3 = load_a(A, uint32(k0 + a_k), K, a_row, M, lda)
            b0, b1, b2, b3 = load_b(B, uint32(k0 + b_k), K, b_column, N, ldb)
            store_a(As, a_k, a_row_in_tile, a0, a1, a2, a3)
            store_b(Bs, b_k, b_column_in_tile, b0, b1, b2, b3)
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

        C = offset_pointer(C, batch * stride_c)
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
    abi="gemm_f32_batched",
    batched=True,
    configs=layout_forms(),
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.tile_loads"),
)
