"""v7 warp tile: each warp owns a square of the block tile.

Idea        what a warp reads at each k is the perimeter of its region, what it computes is the area. v6's warps own
            16×128 strips (144 values a step for 2048 outputs); here each of four warps owns a 64×64 square (128
            values for 4096 outputs). The warp is also the unit that tensor cores work on, so t2 … t4 are laid out
            in the same way.
Geometry    128×128×16 tile, 4 warps of 64×64, 128 threads; 8 KB + 8 KB of shared memory, A transposed as in v6.
            A warp tile is WNITER = 4 strips of 16 columns. In each strip a lane owns 8 rows × 4 columns:
            lane / 4 picks the rows, lane % 4 the columns, so a thread owns 8×16 outputs.
Each k      2 + 4 LDS.128, 128 FMAs: 0.1875 values per FMA, where v6 has 0.25.
Each tile   4 16-byte loads of A and 4 of B a thread; 2 barriers for 2048 FMAs a thread.
Bound by    the barriers round each tile with no loads in flight across them, and 128 accumulators a thread, which
            leave room for 8 to 12 warps an SM. v8 takes up from here.

Tried       (H200, 4096³, TFLOP/s) the k loop left rolled 34.4; written out, 201 registers, two blocks an SM 37.0; 168
            registers and so three blocks 38.9, but two steps at a time 33.6. At 1024³, where a block has no
            neighbours to hide behind, the rolled loop leads: 13.1 against 9.7, its code is fetched once.

Layouts     as in v6. A copy across costs 4 STS with four-way bank conflicts: four lanes hold one column at k = 0, 4, 8
            and 12.
Batch       as in v6.

Two compiled forms a layout, as in v6: `vector_width=4` and, for odd widths and misaligned rows, `vector_width=1`.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll
from numba_gemm.spec import KernelSpec, layout_forms

BM, BN, BK = 128, 128, 16
WM, WN = 64, 64
WNITER = 4
TM, TN = 8, 4  # of one strip; a thread owns TM × (WNITER · TN) outputs
STRIP = WN // WNITER
LANES_N = STRIP // TN  # lanes side by side in a strip
COLUMNS = WNITER * TN
THREADS = 32 * (BM // WM) * (BN // WN)
VECTOR = 4
A_TILE, B_TILE = BK * BM, BK * BN  # words of shared memory
COPIES = A_TILE // (VECTOR * THREADS)  # groups of each tile that one thread copies


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

    def sgemm_warptile(A, B, C, M, N, K, lda, ldb, ldc, alpha, beta, stride_a, stride_b, stride_c):
        As = cuda.shared.array(A_TILE, float32, alignment=16)  # transposed: As[k * BM + row]
        Bs = cuda.shared.array(B_TILE, float32, alignment=16)
        accumulator = cuda.local.array((TM, COLUMNS), float32)
        a_values = cuda.local.array(TM, float32)
        b_values = cuda.local.array(COLUMNS, float32)

        thread = uint32(cuda.threadIdx.x)
        batch = int64(uint32(cuda.blockIdx.z))
        A, B = offset_pointer(A, batch * stride_a), offset_pointer(B, batch * stride_b)
        tiles_n = (N + uint32(BN - 1)) // uint32(BN)
        tile_row = uint32(uint32(cuda.blockIdx.x) // tiles_n * uint32(BM))
        tile_column = uint32(uint32(cuda.blockIdx.x) % tiles_n * uint32(BN))

        # Which 64×64 square the warp owns, and which 8×4 block of each strip the lane owns.
        warp = thread // uint32(32)
        lane = thread % uint32(32)
        first_row = uint32(warp // uint32(BN // WN) * uint32(WM) + lane // uint32(LANES_N) * uint32(TM))
        first_column = uint32(warp % uint32(BN // WN) * uint32(WN) + lane % uint32(LANES_N) * uint32(TN))

        for i in range(TM):
            for j in range(COLUMNS):
                accumulator[i, j] = float32(0)

        # The loop over the copies stays a loop where its bound is known at run time alone; written out, 16-byte copies
        # are held in too many registers.
        copies = COPIES
        if vectorised:
            copies = int64(uint32(cuda.blockDim.x) // uint32(THREADS // COPIES))
        k0 = uint32(0)
        while k0 < K:
            # The thread's number: k0 >> 31 is 0, but the compiler doesn't know. Without it each address of the copies
            # that no k changes is kept in registers from tile to tile, or what A and B share between their copies, and
            # 168 don't suffice for that.
            a_copier = uint32(thread + (k0 >> uint32(31)))
            b_copier = uint32(thread | (k0 >> uint32(31)))
            # Two groups of A, two of B, in turn: all of A first would hold so many values at once that 168 registers
            # don't suffice.
            for begin in range(0, copies, 2):
                for step in range(2):
                    k, row_in_tile = place_a(a_copier, uint32(begin + step))
                    x, y, z, w = load_a(A, uint32(k0 + k), K, uint32(tile_row + row_in_tile), M, lda)
                    store_a(As, k, row_in_tile, x, y, z, w)
                for step in range(2):
                    k, column_in_tile = place_b(b_copier, uint32(begin + step))
                    x, y, z, w = load_b(B, uint32(k0 + k), K, uint32(tile_column + column_in_tile), N, ldb)
                    store_b(Bs, k, column_in_tile, x, y, z, w)
            cuda.syncthreads()  # the tile is whole before anyone reads it

            for k in unroll(BK):
                for i in range(0, TM, VECTOR):
                    x, y, z, w = load_shared_v4(As, uint32(uint32(k * BM) + first_row + uint32(i)))
                    a_values[i], a_values[i + 1], a_values[i + 2], a_values[i + 3] = x, y, z, w
                for strip in range(WNITER):
                    j = strip * TN
                    x, y, z, w = load_shared_v4(Bs, uint32(uint32(k * BN) + first_column + uint32(strip * STRIP)))
                    b_values[j], b_values[j + 1], b_values[j + 2], b_values[j + 3] = x, y, z, w
                for i in range(TM):
                    for j in range(COLUMNS):
                        accumulator[i, j] += a_values[i] * b_values[j]
            cuda.syncthreads()  # everyone has read it before anyone overwrites it
            k0 = uint32(k0 + uint32(BK))

        C = offset_pointer(C, batch * stride_c)
        for i in unroll(TM):
            row = uint32(tile_row + first_row + uint32(i))
            for strip in range(WNITER):
                column = uint32(tile_column + first_column + uint32(strip * STRIP))
                index = int64(row) * ldc + int64(column)
                j = strip * TN
                if vectorised:
                    if row < M and column < N:
                        x, y = accumulator[i, j], accumulator[i, j + 1]
                        z, w = accumulator[i, j + 2], accumulator[i, j + 3]
                        store_output_v4(C, index, x, y, z, w, alpha, beta)
                else:
                    for offset in range(TN):
                        if row < M and uint32(column + uint32(offset)) < N:
                            store_output(C, index + offset, accumulator[i, j + offset], alpha, beta)

    return sgemm_warptile


SPEC = KernelSpec(
    name="v7",
    title="warp tile",
    idea="each warp owns a 64×64 square, each lane 8×4 of its 4 strips",
    block_tile=(BM, BN, BK),
    thread_tile=(TM, COLUMNS),
    threads=THREADS,
    loads_per_fma=0.1875,
    build=build,
    min_blocks_per_sm=3,  # 168 registers a thread, 12 warps an SM
    abi="gemm_f32_batched",
    batched=True,
    configs=layout_forms(),
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.tile_loads"),
)
