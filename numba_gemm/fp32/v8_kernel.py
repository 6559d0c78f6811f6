"""The device code of v8; what it is and why, in v8_pipelined.py."""

from __future__ import annotations

from numba import float32, int64, uint32

from numba_gemm.compile.numba_source import cuda, device_function
from numba_gemm.compile.unroll import unroll
from numba_gemm.fp32 import v8_intrinsics as ptx
from numba_gemm.fp32 import v8_sums as sums
from numba_gemm.fp32.v8_parameters import VECTOR, WARP, V8Parameters
from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents, griddepcontrol_wait
from numba_gemm.spec import make_config


@device_function
def origin_of_tile(tile, M, N, block_m, block_n, group_m):
    """First row and column of a tile: they are walked in bands of ``group_m`` rows of tiles, column by column."""
    tiles_m = uint32((M + uint32(block_m - 1)) // uint32(block_m))
    tiles_n = uint32((N + uint32(block_n - 1)) // uint32(block_n))
    first_band_row = uint32(tile // uint32(uint32(group_m) * tiles_n) * uint32(group_m))
    in_band = uint32(tile - first_band_row * tiles_n)
    band_rows = min(uint32(tiles_m - first_band_row), uint32(group_m))
    tile_row = uint32(uint32(first_band_row + in_band % band_rows) * uint32(block_m))
    tile_column = uint32(in_band // band_rows * uint32(block_n))
    return tile_row, tile_column


def row_tile(p):
    """How a warp's outputs pass through shared memory: one row of each thread's at a time, four rows apart in C."""
    rows, columns = range(p.lanes_m), range(0, p.warp_n, WARP)
    return ptx.RowTile(
        sums=p.thread_m * p.thread_n,
        together=p.thread_n,
        put=tuple(4 * column for column in p.columns_of_thread[::VECTOR]),
        get=tuple(4 * (row * p.passing_row + column) for row in rows for column in columns),
        places=tuple(
            tuple((first + VECTOR * row, column) for row in rows for column in columns) for first in p.rows_of_thread
        ),
        warps=p.slice_threads // WARP,
    )


def build(**config):
    """The kernel of one form."""
    p = V8Parameters.of(make_config(**config))
    BM, BN, BK = p.block_m, p.block_n, p.block_k
    TM, TN = p.thread_m, p.thread_n
    WM, WN, WARPS_N, LANES_M = p.warp_m, p.warp_n, p.block_n // p.warp_n, p.lanes_m
    STAGES, GROUP_M = p.stages, p.group_m
    SLICES, SLICE_THREADS = p.k_slices, p.slice_threads
    STEPS = BK // SLICES  # of k in a stage, for one slice
    LAST = STEPS - 1
    EXCHANGES = SLICES.bit_length() - 1
    PARTS, PART_STEPS = p.parts, STEPS // p.parts
    # What is staged in registers is fetched with the first part of the copies and put in place with the second half.
    PUT_FROM, PUTS = PARTS - PARTS // 2, max(1, PARTS // 2)

    a, b = p.a_copies, p.b_copies
    A_DIRECT, A_STAGED, A_LANES, A_WIDTH = a.mode == "direct", a.mode == "staged", a.lanes, a.width
    B_DIRECT, B_STAGED, B_LANES, B_WIDTH = b.mode == "direct", b.mode == "staged", b.lanes, b.width
    A_STEPS_E, A_E_STEP, A_K_STEP, A_STAGED_WORDS = a.steps_e, a.e_step, a.k_step, max(1, a.staged_words)
    B_STEPS_E, B_E_STEP, B_K_STEP, B_STAGED_WORDS = b.steps_e, b.e_step, b.k_step, max(1, b.staged_words)
    # Rows of A (columns of B) that one copy is of.
    A_ACROSS, B_ACROSS = (a.width if A_DIRECT else 1), (b.width if B_DIRECT else 1)
    # Bytes in shared memory: from a row of a tile to the next, from A's tile to B's, from a stage to the next.
    A_ROW, B_ROW = 4 * a.row_words, 4 * b.row_words
    B_TILE, STAGE = BK * A_ROW, 4 * p.stage_words
    RING = STAGES * STAGE

    a_steps = ptx.Steps(a.width, a.steps_e, a.steps_k, 4 * a.e_step, A_ROW * a.k_step, a.k_step, A_ROW)
    b_steps = ptx.Steps(b.width, b.steps_e, b.steps_k, 4 * b.e_step, B_ROW * b.k_step, b.k_step, B_ROW)
    copy_a, copy_b = ptx.copy_tile(a_steps, PARTS), ptx.copy_tile(b_steps, PARTS)
    copy_first_a, copy_first_b = ptx.copy_first_tile(a_steps), ptx.copy_first_tile(b_steps)
    fetch_a, fetch_b = ptx.fetch_tile(a_steps), ptx.fetch_tile(b_steps)
    fetch_first_a, fetch_first_b = ptx.fetch_first_tile(a_steps), ptx.fetch_first_tile(b_steps)
    put_a, put_b = ptx.put_tile(a_steps, PUTS), ptx.put_tile(b_steps, PUTS)
    commit_copies, wait_copies = ptx.commit_copies, ptx.wait_copies(STAGES - 2)
    shared_address, global_address = ptx.shared_address, ptx.global_address
    thread_tile = ptx.ThreadTile(p.rows_of_thread, p.columns_of_thread)
    load_a = ptx.load_fragment(TM // VECTOR, 4 * VECTOR * p.lanes_m)
    load_b = ptx.load_fragment(TN // VECTOR, 4 * VECTOR * p.lanes_n)
    clear, multiply = sums.clear(TM * TN), ptx.outer_product(TM, TN)
    send_sums, add_sums = sums.send_sums(TM * TN, 16 * SLICE_THREADS), sums.add_sums(TM * TN, 16 * SLICE_THREADS)
    store_partial, store_tile = sums.store_partial(thread_tile, BN), sums.store_tile(thread_tile)
    BY_ROWS, PASSING_ROW, PASSING = p.c_width == 1, 4 * p.passing_row, 4 * p.passing_words
    store_rows = sums.store_rows(row_tile(p))

    @device_function
    def place_of_thread(thread):
        lane = thread % uint32(WARP)
        warp = thread % uint32(SLICE_THREADS) // uint32(WARP)
        slice_of_k = thread // uint32(SLICE_THREADS)
        lane_m = (lane >> uint32(1)) % uint32(LANES_M)
        lane_n = lane % uint32(2) + lane // uint32(2 * LANES_M) * uint32(2)
        return lane, warp, slice_of_k, lane_m, lane_n

    def sgemm_pipelined(
        A, B, C, M, N, K, lda, ldb, ldc, alpha, beta, stride_a, stride_b, stride_c,
        workspace, split_tiles, split_blocks, per_block,
    ):  # fmt: skip
        griddepcontrol_wait()  # the factors are copied, and nobody reads the workspace or C any more
        griddepcontrol_launch_dependents()
        shared = shared_address(cuda.shared.array(0, float32, alignment=16))
        accumulator = cuda.local.array((TM, TN), float32)
        a_values = cuda.local.array((2, TM), float32)
        b_values = cuda.local.array((2, TN), float32)
        a_source = cuda.local.array(A_STEPS_E, int64)
        b_source = cuda.local.array(B_STEPS_E, int64)
        a_staged = cuda.local.array(A_STAGED_WORDS, float32)
        b_staged = cuda.local.array(B_STAGED_WORDS, float32)

        thread = uint32(cuda.threadIdx.x)
        block = uint32(cuda.blockIdx.x)
        batch = int64(uint32(cuda.blockIdx.z))

        # The part of the tile that this thread owns. Lanes lie so that lane and lane ^ 1 read the same rows, lane and
        # lane ^ 2 the same columns: then two quarters of a warp share each pass over shared memory.
        lane, warp, slice_of_k, lane_m, lane_n = place_of_thread(thread)
        first_row = uint32(warp // uint32(WARPS_N) * uint32(WM) + lane_m * uint32(VECTOR))
        first_column = uint32(warp % uint32(WARPS_N) * uint32(WN) + lane_n * uint32(VECTOR))
        a_read = uint32(shared + slice_of_k * uint32(STEPS * A_ROW) + first_row * uint32(4))
        b_read = uint32(shared + uint32(B_TILE) + slice_of_k * uint32(STEPS * B_ROW) + first_column * uint32(4))

        # Where this thread's copies begin in a tile, and the bytes that lead to the next k it copies.
        if A_DIRECT:
            a_e, a_k = thread % uint32(A_LANES) * uint32(A_WIDTH), thread // uint32(A_LANES)
            a_step = lda * int64(4 * A_K_STEP)
        else:
            a_e, a_k = thread // uint32(A_LANES), thread % uint32(A_LANES) * uint32(A_WIDTH)
            a_step = int64(4 * A_K_STEP)
        if B_DIRECT:
            b_e, b_k = thread % uint32(B_LANES) * uint32(B_WIDTH), thread // uint32(B_LANES)
            b_step = ldb * int64(4 * B_K_STEP)
        else:
            b_e, b_k = thread // uint32(B_LANES), thread % uint32(B_LANES) * uint32(B_WIDTH)
            b_step = int64(4 * B_K_STEP)
        a_write = uint32(shared + a_k * uint32(A_ROW) + a_e * uint32(4))
        b_write = uint32(shared + uint32(B_TILE) + b_k * uint32(B_ROW) + b_e * uint32(4))

        # The work of this block: `remaining` stages, from stage `first` of tile `tile` on. The first `split_blocks`
        # blocks share the stages of the first `split_tiles` tiles evenly; each other block has a tile of its own.
        stages_in_k = (K + uint32(BK - 1)) // uint32(BK)
        if stages_in_k == uint32(0):
            stages_in_k = uint32(1)
        tile = uint32(block - split_blocks + split_tiles)
        first = uint32(0)
        remaining = stages_in_k
        if block < split_blocks:
            position = uint32(block * per_block)
            tile = uint32(position // stages_in_k)
            first = uint32(position % stages_in_k)
            remaining = min(uint32(split_tiles * stages_in_k - position), per_block)
        row_end = uint32((M + uint32(A_ACROSS - 1)) // uint32(A_ACROSS) * uint32(A_ACROSS))
        column_end = uint32((N + uint32(B_ACROSS - 1)) // uint32(B_ACROSS) * uint32(B_ACROSS))

        while remaining > uint32(0):
            stages = min(uint32(stages_in_k - first), remaining)
            tile_row, tile_column = origin_of_tile(tile, M, N, BM, BN, GROUP_M)

            # k of the first element that this thread copies. The stages end with K, so that only the first one of a
            # tile can hold fewer than BK: it starts at a negative k, where copies give zeros.
            begin = int64(K) - int64(uint32(stages_in_k - first)) * int64(BK)
            a_begin = begin + int64(a_k)
            b_begin = begin + int64(b_k)
            # Rows and columns past the edge of C read the first ones: what they add up is never stored. (Copies of one
            # element to 32 places, of the last column, take as long as 32 copies.)
            for e in unroll(A_STEPS_E):
                row_read = uint32(tile_row + a_e + uint32(e * A_E_STEP))
                if row_read >= row_end:
                    row_read = uint32(row_read % row_end)
                at = int64(row_read)
                offset = at + a_begin * lda if A_DIRECT else at * lda + a_begin
                a_source[e] = global_address(A) + int64(4) * (batch * stride_a + offset)
            for e in unroll(B_STEPS_E):
                column_read = uint32(tile_column + b_e + uint32(e * B_E_STEP))
                if column_read >= column_end:
                    column_read = uint32(column_read % column_end)
                at = int64(column_read)
                offset = at + b_begin * ldb if B_DIRECT else at * ldb + b_begin
                b_source[e] = global_address(B) + int64(4) * (batch * stride_b + offset)

            # Start the copies of the first STAGES - 1 stages, each a group.
            if A_STAGED:
                fetch_first_a(a_source, a_step, a_begin, a_staged)
            else:
                copy_first_a(a_write, a_source, a_step, a_begin)
            if B_STAGED:
                fetch_first_b(b_source, b_step, b_begin, b_staged)
            else:
                copy_first_b(b_write, b_source, b_step, b_begin)
            commit_copies()
            if A_STAGED:
                put_a(a_write, a_staged, PUTS)
            if B_STAGED:
                put_b(b_write, b_staged, PUTS)
            for s in unroll(1, STAGES - 1):
                on = uint32(stages > uint32(s))
                if A_STAGED:
                    fetch_a(a_source, a_step, on, a_staged)
                else:
                    copy_a(uint32(a_write + uint32(s * STAGE)), a_source, a_step, on, PARTS)
                if B_STAGED:
                    fetch_b(b_source, b_step, on, b_staged)
                else:
                    copy_b(uint32(b_write + uint32(s * STAGE)), b_source, b_step, on, PARTS)
                commit_copies()
                if A_STAGED:
                    put_a(uint32(a_write + uint32(s * STAGE)), a_staged, PUTS)
                if B_STAGED:
                    put_b(uint32(b_write + uint32(s * STAGE)), b_staged, PUTS)

            clear(accumulator)
            wait_copies()
            cuda.syncthreads()  # the first stage is whole
            read = uint32(0)  # offsets in the ring of the stage that is read, and of the one that is filled
            write = uint32((STAGES - 1) * STAGE)
            load_a(a_values, uint32(0), a_read)
            load_b(b_values, uint32(0), b_read)

            stage = uint32(0)
            while stage < stages:
                on = uint32(uint32(stage + uint32(STAGES - 1)) < stages)
                a_target = uint32(a_write + write)
                b_target = uint32(b_write + write)
                for part in unroll(PARTS):
                    # A part of the copies of the stage that is STAGES - 1 ahead.
                    if not A_STAGED:
                        copy_a(a_target, a_source, a_step, on, part)
                    elif part == 0:
                        fetch_a(a_source, a_step, on, a_staged)
                    elif part >= PUT_FROM:
                        put_a(a_target, a_staged, uint32(part - PUT_FROM))
                    if not B_STAGED:
                        copy_b(b_target, b_source, b_step, on, part)
                    elif part == 0:
                        fetch_b(b_source, b_step, on, b_staged)
                    elif part >= PUT_FROM:
                        put_b(b_target, b_staged, uint32(part - PUT_FROM))
                    for k in unroll(part * PART_STEPS, (part + 1) * PART_STEPS):
                        if k == LAST:
                            # The next stage has landed, and all have read what they need of this one, which the
                            # copies of the next turn overwrite. Behind the last stage this one is read again, for
                            # nothing.
                            commit_copies()
                            wait_copies()
                            cuda.syncthreads()
                            write = read
                            if uint32(stage + uint32(1)) < stages:
                                read = uint32(read + uint32(STAGE))
                                if read == uint32(RING):
                                    read = uint32(0)
                        # The values of the next step are loaded while those of this one are multiplied.
                        step, now, ahead = (k + 1) % STEPS, k % 2, (k + 1) % 2
                        load_a(a_values, uint32(ahead * TM), uint32(a_read + read + uint32(step * A_ROW)))
                        load_b(b_values, uint32(ahead * TN), uint32(b_read + read + uint32(step * B_ROW)))
                        multiply(accumulator, a_values, uint32(now * TM), b_values, uint32(now * TN))
                stage = uint32(stage + uint32(1))

            # Slices of k: the upper half hands its sums to the lower half, until one slice has them all.
            for exchange in unroll(EXCHANGES):
                half = uint32(SLICES >> (exchange + 1))
                cuda.syncthreads()  # the ring, or what was exchanged before, has been read
                place = uint32(shared + thread % uint32(SLICE_THREADS) * uint32(16))
                if slice_of_k >= half and slice_of_k < half + half:
                    send_sums(uint32(place + uint32(slice_of_k - half) * uint32(BM * BN * 4)), accumulator)
                cuda.syncthreads()  # the sums are there
                if slice_of_k < half:
                    add_sums(uint32(place + slice_of_k * uint32(BM * BN * 4)), accumulator)

            if BY_ROWS:
                cuda.syncthreads()  # the ring has been read, or what slices of k exchanged
                lane, warp, slice_of_k, lane_m, lane_n = place_of_thread(ptx.thread_again())
                first_row = uint32(warp // uint32(WARPS_N) * uint32(WM) + lane_m * uint32(VECTOR))
                first_column = uint32(warp % uint32(WARPS_N) * uint32(WN) + lane_n * uint32(VECTOR))
            if SLICES == 1 or slice_of_k == uint32(0):
                if stages < stages_in_k:
                    # A part of this tile's k: the sums go to the workspace, tile by tile.
                    slot = batch * int64(uint32(split_blocks + split_tiles)) + int64(uint32(block + tile))
                    offset = slot * int64(BM * BN) + int64(uint32(first_row * uint32(BN) + first_column))
                    store_partial(global_address(workspace) + int64(4) * offset, accumulator)
                elif BY_ROWS:
                    passing = uint32(shared + warp * uint32(PASSING))
                    put = uint32(passing + lane_m * uint32(PASSING_ROW) + lane_n * uint32(4 * VECTOR))
                    get = uint32(passing + (lane ^ uint32(1)) * uint32(4))  # neighbours have changed places in pairs
                    row = int64(uint32(tile_row + warp // uint32(WARPS_N) * uint32(WM)))
                    column = int64(uint32(tile_column + warp % uint32(WARPS_N) * uint32(WN) + lane))
                    address = global_address(C) + int64(4) * (batch * stride_c + row * ldc + column)
                    rows, columns = int64(M) - row, int64(N) - column
                    store_rows(put, get, address, int64(4) * ldc, rows, columns, alpha, beta, accumulator)
                else:
                    row, column = int64(uint32(tile_row + first_row)), int64(uint32(tile_column + first_column))
                    address = global_address(C) + int64(4) * (batch * stride_c + row * ldc + column)
                    rows, columns = int64(M) - row, int64(N) - column
                    store_tile(address, int64(4) * ldc, rows, columns, alpha, beta, accumulator)

            remaining = uint32(remaining - stages)
            first = uint32(0)
            tile = uint32(tile + uint32(1))
            cuda.syncthreads()  # the ring has been read before the next tile's copies overwrite it

    return sgemm_pipelined
