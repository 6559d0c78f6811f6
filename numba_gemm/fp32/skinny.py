"""skinny: a product with one narrow side (2 … 64), which must read the wide factor once and do nothing else.

Idea        the wide factor W (J × K, J outputs by K terms) is read from memory exactly once, so a block's tile is as
            tall as the narrow side I and all that is left is to keep the reads going: every SM has the same number of
            k-steps to do, whatever J is ("stream-K"), and the reads of the next steps are in flight while one is
            computed.
Roles       M ≤ 64: W is B and the narrow factor X is A. N ≤ 64: W is A and X is B, and C is written transposed.
            ``across``: W is contiguous along its outputs (B row-major); ``along``: along K (B column-major).
Geometry    block tile BLOCK_I × BLOCK_J × DEPTH, thread tile THREAD_I × THREAD_J, in groups of 4 that are spread over
            the tile so that neighbouring lanes read neighbouring 16 bytes. In a warp, lane bit 0 counts rows and bit 1
            columns: then both kinds of 16-byte shared loads take 2 wavefronts and not 4. (With BLOCK_I = THREAD_I all
            lanes lie along the columns, and W's loads do take 4; there is time for them, such a product waits for
            memory.)
Memory      a ring of STAGES tiles of W and X, filled by cp.async. W's tile lies as W does: [DEPTH][BLOCK_J], or
            [BLOCK_J][DEPTH + 4] along K; X's is [DEPTH][BLOCK_I + 4], copied 4 bytes at a time, which needs no
            alignment and turns it round on the way. The 4 words of padding keep the copies and the loads apart.
            W along K can be turned round as well (``turned``), at four times the copies.
Each k      (THREAD_I + THREAD_J) / 4 LDS.128 for THREAD_I · THREAD_J FMAs, in v8's serpentine order (at 64 rows 3.6% of
            them read three registers of one bank without it, none with it); one barrier for each DEPTH of them, which
            closes two hazards: the stage is whole before anyone reads it, and the stage that is filled next has been
            read by everyone. The copies stand between the first FMAs, without a branch: past the end they copy zeros.
Work        the k-steps of all tiles, end to end, are cut into equal runs, one for each block. A run that covers a tile
            writes C; one that begins or ends inside a tile writes its sums to a workspace, at most twice a block, and
            a second launch adds the pieces of such tiles in the order of k. No sum's order depends on timing.
Edges       what lies outside is filled with zeros by cp.async (no bytes are read), and not stored.
            ``vector_width=1``: W by 4-byte copies, for odd widths and misaligned rows.
Bound by    memory up to 16 rows (M = 8, 28672×8192: 0.91 of the rate at which a kernel that does nothing else reads);
            from 32 on the FMA pipe: 0.88 of the instructions of the main loop are FMAs.

Tried       (H200, N = 28672, K = 8192, µs) copies in a branch behind the barrier, their addresses worked out anew at
            each step: M = 64 693, M = 32 354, where the loop without a branch takes 611 and 318. Thread tiles of 16×8:
            fewer loads, but 8 warps an SM can't hide them: 632 and 344. M = 64 by 64×128 tiles 627, by 32 deep in 2
            stages 626. M = 16 by 8×8 thread tiles 238, by 8×4 233. B along K, M = 8: turned round 562, read along K
            254; M = 32 591 and 442; but M = 64 722 and 894. M = 8 by tiles of 1024 columns 237, of 256 and 512 222.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll

WARP = 32
PAD = 4  # words
VECTOR = 4
#: Threads of a block of the second launch, each of which takes care of 4 elements of a tile.
FIXUP_THREADS = 256


def stage_words(form: str, turned: int, block_i: int, block_j: int, depth: int) -> tuple[int, int]:
    """Words of shared memory of one stage: the tile of W, and both tiles."""
    w_words = depth * (block_j + PAD) if turned else block_j * (depth + PAD)
    if form == "across":
        w_words = depth * block_j
    return w_words, w_words + depth * (block_i + PAD)


def unmet(
    form: str,
    vector_width: int,
    turned: int,
    block_i: int,
    block_j: int,
    thread_i: int,
    thread_j: int,
    depth: int,
    stages: int,
    blocks_per_sm: int,
) -> str | None:
    """The rule of the kernel's geometry that these parameters break, in words, or None."""
    for name, value in (("thread_i", thread_i), ("thread_j", thread_j), ("block_i", block_i), ("depth", depth)):
        if value % VECTOR or value <= 0:
            return f"{name} = {value} is not a multiple of {VECTOR}"
    if block_i % thread_i or block_j % thread_j:
        return f"the tile {block_i}×{block_j} is not made of thread tiles {thread_i}×{thread_j}"
    threads_i, threads_j = block_i // thread_i, block_j // thread_j
    threads, lanes_i = threads_i * threads_j, min(4, threads_i)
    if threads % WARP or threads > 1024 or threads_i % lanes_i or threads_j % (WARP // lanes_i):
        return f"{threads_i}×{threads_j} threads don't make whole warps of {lanes_i}×{WARP // lanes_i}"
    if form == "across" and turned:
        return "only W that lies along K can be turned"
    if turned and vector_width != 1:
        return "turning W takes copies of one element; vector_width must be 1"
    chunks, lines = (block_j // vector_width, depth) if form == "across" else (depth // vector_width, block_j)
    if not turned and (max(threads, chunks) % min(threads, chunks) or lines % max(1, threads // chunks)):
        return f"{threads} threads don't share {lines} lines of {chunks} copies evenly"
    groups_k, warps = depth // 8, threads // WARP
    if depth % 8 or max(groups_k, warps) % min(groups_k, warps):
        return f"{warps} warps don't share the {groups_k} groups of 8 along a depth of {depth} evenly"
    if stages < 2:
        return f"stages = {stages}: one is read while another is filled, so 2 are needed"
    return None


def build(
    form: str,
    vector_width: int,
    turned: int,
    block_i: int,
    block_j: int,
    thread_i: int,
    thread_j: int,
    depth: int,
    stages: int,
    blocks_per_sm: int,
):
    """The kernel that multiplies. ``turned``: W lies along K and is turned round while it is copied."""
    from numba import float32, int32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output
    from numba_gemm.fp32.v8_intrinsics import outer_product
    from numba_gemm.intrinsics import (
        cp_async_commit,
        cp_async_wait,
        load_shared_v4_at,
        offset_pointer,
        shared_address,
    )

    broken = unmet(
        form, vector_width, turned, block_i, block_j, thread_i, thread_j, depth, stages, blocks_per_sm
    )  # fmt: skip
    if broken is not None:
        raise ValueError(f"skinny: {broken}")
    across = form == "across"
    rows_of_k = across or bool(turned)  # W's tile is [DEPTH][BLOCK_J]
    threads_i, threads_j = block_i // thread_i, block_j // thread_j
    threads = threads_i * threads_j
    w_words, words = stage_words(form, turned, block_i, block_j, depth)
    stage_bytes, ring_bytes = 4 * words, 4 * words * stages
    x_row = block_i + PAD
    w_line = block_j if across else (block_j if turned else depth) + PAD
    in_flight = stages - 2  # groups that may be pending when a stage is read
    thread_place = place_of_threads(threads_i, threads_j)
    column_of = column_in_tile(rows_of_k, threads_j)
    first_step = first_step_of()

    if across:
        copy_w = line_copies(threads, depth, block_j, w_line, vector_width, k_is_line=True)
    elif turned:
        copy_w = element_copies(threads, block_j, depth, w_line)
    else:
        copy_w = line_copies(threads, block_j, depth, w_line, vector_width, k_is_line=False)
    copy_x = element_copies(threads, block_i, depth, x_row)
    # Copies go between the FMAs: W's after one set of loads, X's after another.
    terms = 1 if rows_of_k else VECTOR  # of K, that one set of loads of W brings
    w_at_k, x_at_k = 0, (terms if depth > terms else 0)

    sums_shape, w_shape = (thread_i, thread_j), (terms, thread_j)
    multiply = outer_product(thread_i, thread_j)
    i_group, j_group = threads_i * VECTOR, threads_j * VECTOR  # from one group of 4 of a thread to its next
    w_first = 4 * VECTOR if rows_of_k else 4 * w_line  # bytes from a thread's values of W to its neighbour's

    def skinny(W, X, C, P, J, NARROW, K, ldw, x_stride_i, x_stride_k, c_stride_i, c_stride_j, alpha, beta,
               stride_w, stride_x, stride_c):  # fmt: skip
        ring = cuda.shared.array(0, float32)
        sums = cuda.local.array(sums_shape, float32)
        x_values = cuda.local.array(thread_i, float32)
        w_values = cuda.local.array(w_shape, float32)

        batch = int64(cuda.blockIdx.z)
        matrix = offset_pointer(W, batch * stride_w)
        narrow = offset_pointer(X, batch * stride_x)
        w_ring = shared_address(ring, uint32(0))
        x_ring = uint32(w_ring + uint32(4 * w_words))
        thread = uint32(cuda.threadIdx.x)
        thread_row, thread_column = thread_place(thread)
        x_at = uint32(x_ring + thread_row * uint32(4 * VECTOR))
        w_at = uint32(w_ring + thread_column * uint32(w_first))
        w_stride_j, w_stride_k = (int64(1), ldw) if across else (ldw, int64(1))

        # The run of k-steps that is this block's; K = 0 has one, of zeros.
        steps_a_tile = max(uint32(1), uint32((K + uint32(depth - 1)) // uint32(depth)))
        steps = uint32((J + uint32(block_j - 1)) // uint32(block_j) * steps_a_tile)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        step = first_step(block, blocks, steps)
        last = first_step(uint32(block + uint32(1)), blocks, steps)

        while step < last:
            tile = step // steps_a_tile
            first = uint32(step - tile * steps_a_tile)
            count = min(uint32(last - step), uint32(steps_a_tile - first))
            tile_j = uint32(tile * uint32(block_j))
            columns = uint32(J - tile_j)
            for i in range(thread_i):
                for j in range(thread_j):
                    sums[i, j] = float32(0)

            # Where the next copies read; nothing from the run's last k on, so that no turn of the loop needs a branch.
            k0 = uint32(first * uint32(depth))
            left = int32(min(uint32(K - k0), uint32(count * uint32(depth))))
            w_from = int64(tile_j) * w_stride_j + int64(k0) * w_stride_k
            x_from = int64(k0) * x_stride_k
            cp_async_wait(0)  # the empty copies past the end of the tile before
            cuda.syncthreads()  # its last stages have been read
            fill = uint32(0)  # bytes into the ring
            for _ in range(stages - 1):
                copy_w(matrix, w_from, uint32(w_ring + fill), columns, left, w_stride_j, w_stride_k, thread)
                copy_x(narrow, x_from, uint32(x_ring + fill), NARROW, left, x_stride_i, x_stride_k, thread)
                cp_async_commit()
                fill = uint32(fill + uint32(stage_bytes))
                w_from += int64(depth) * w_stride_k
                x_from += int64(depth) * x_stride_k
                left = int32(left - int32(depth))

            read = uint32(0)
            now = uint32(0)
            while now < count:
                cp_async_wait(in_flight)
                cuda.syncthreads()  # this stage is whole, and everyone has read the one that is filled next
                x_stage, w_stage = uint32(x_at + read), uint32(w_at + read)
                for k in unroll(0, depth, terms):
                    if rows_of_k:
                        for j in range(0, thread_j, VECTOR):
                            a, b, c, d = load_shared_v4_at(
                                uint32(w_stage + uint32(4 * k * w_line) + uint32(j * j_group))
                            )
                            w_values[0, j], w_values[0, j + 1], w_values[0, j + 2], w_values[0, j + 3] = a, b, c, d
                    else:
                        for j in range(thread_j):
                            a, b, c, d = load_shared_v4_at(
                                uint32(w_stage + uint32(4 * k) + uint32(j * (4 * threads_j * w_line)))
                            )
                            w_values[0, j], w_values[1, j], w_values[2, j], w_values[3, j] = a, b, c, d
                    for term in unroll(terms):
                        for i in range(0, thread_i, VECTOR):
                            a, b, c, d = load_shared_v4_at(
                                uint32(x_stage + uint32(4 * k * x_row) + uint32(4 * x_row * term) + uint32(i * i_group))
                            )
                            x_values[i], x_values[i + 1], x_values[i + 2], x_values[i + 3] = a, b, c, d
                        multiply(sums, x_values, uint32(0), w_values, uint32(term * thread_j))
                    if k == w_at_k:
                        copy_w(matrix, w_from, uint32(w_ring + fill), columns, left, w_stride_j, w_stride_k, thread)
                    if k == x_at_k:
                        copy_x(narrow, x_from, uint32(x_ring + fill), NARROW, left, x_stride_i, x_stride_k, thread)
                        cp_async_commit()
                w_from += int64(depth) * w_stride_k
                x_from += int64(depth) * x_stride_k
                left = int32(left - int32(depth))
                fill = uint32(fill + uint32(stage_bytes))
                if fill == uint32(ring_bytes):
                    fill = uint32(0)
                read = uint32(read + uint32(stage_bytes))
                if read == uint32(ring_bytes):
                    read = uint32(0)
                now = uint32(now + uint32(1))

            # C, or a tile of the workspace: a block has two, for the piece that ends a tile and one that begins one.
            target, stride_i, stride_j, scale, keep = C, c_stride_i, c_stride_j, alpha, beta
            place, width = batch * stride_c + int64(tile_j) * c_stride_j, columns
            if count != steps_a_tile:
                target, stride_i, stride_j, scale, keep = P, int64(block_j), int64(1), float32(1), float32(0)
                piece = (batch * int64(blocks) + int64(block)) * int64(2) + int64(1 if first == uint32(0) else 0)
                place, width = (
                    piece * int64(block_i * block_j),
                    uint32(block_j),
                )  # whole lines, which are added by fours
            for i in unroll(thread_i):
                row = uint32(thread_row * uint32(VECTOR) + uint32(i // VECTOR * i_group + i % VECTOR))
                if row < NARROW:
                    for j in range(thread_j):
                        column = column_of(thread_column, j)
                        if column < width:
                            index = place + int64(row) * stride_i + int64(column) * stride_j
                            store_output(target, index, sums[i, j], scale, keep)
            step = uint32(step + count)

    return skinny


def line_copies(threads: int, lines: int, length: int, pitch: int, width: int, *, k_is_line: bool):
    """The device function that copies a tile line by line, ``width`` elements at a time, as it lies in memory.

    ``lines`` of ``length`` elements, ``pitch`` words apart; a turn of all threads covers whole lines or part of one.
    """
    from numba import int32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import cp_async_4_zfill, cp_async_16_zfill

    copy = cp_async_16_zfill if width == VECTOR else cp_async_4_zfill
    size = 4 * width
    chunks = length // width
    lines_a_turn, parts = max(1, threads // chunks), max(1, chunks // threads)
    turns = lines // lines_a_turn
    part = threads * width

    @device_function
    def copy_lines(source, start, target, columns, left, stride_j, stride_k, thread):
        line = thread // uint32(chunks)
        chunk = uint32(thread % uint32(chunks) * uint32(width))
        slot = uint32(target + (line * uint32(pitch) + chunk) * uint32(4))
        stride = stride_k if k_is_line else stride_j
        at = start + int64(line) * stride + int64(chunk)
        lines_left = int32((left if k_is_line else int32(columns)) - int32(line))
        length_left = int32((int32(columns) if k_is_line else left) - int32(chunk))
        for turn in range(turns):
            for i in range(parts):
                inside = turn * lines_a_turn < lines_left and i * part < length_left
                valid = uint32(size) if inside else uint32(0)
                copy(uint32(slot + uint32(4 * i * part)), source, at + int64(i * part), valid)
            at += int64(lines_a_turn) * stride
            slot = uint32(slot + uint32(4 * lines_a_turn * pitch))

    return copy_lines


def element_copies(threads: int, extent: int, depth: int, pitch: int):
    """The device function that copies a tile element by element into [DEPTH][extent], ``pitch`` words a row.

    A warp copies 8 k × 4 outputs: whole sectors of a matrix that lies along K, half sectors of another (which the next
    warp finds in L1), and 32 banks whichever.
    """
    from numba import int32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import cp_async_4_zfill

    size_k, size_o = 8, 4
    groups_k, groups = depth // size_k, depth // size_k * (extent // size_o)
    warps = threads // WARP
    # The groups of a turn: side by side along K, then along the outputs.
    turns_k, step_k = max(1, groups_k // warps), warps * size_k
    turns_o, step_o = -(-extent // (size_o * max(1, warps // groups_k))), size_o * max(1, warps // groups_k)
    idle = groups < warps  # warps without a group

    @device_function
    def copy_elements(source, start, target, columns, left, stride_o, stride_k, thread):
        lane, warp = thread % uint32(WARP), thread // uint32(WARP)
        k, o = lane % uint32(size_k), lane // uint32(size_k)
        k = uint32(k + warp % uint32(groups_k) * uint32(size_k))
        o = uint32(o + warp // uint32(groups_k) * uint32(size_o))
        slot = uint32(target + (k * uint32(pitch) + o) * uint32(4))
        at = start + int64(k) * stride_k + int64(o) * stride_o
        k_left, o_left = int32(left - int32(k)), int32(int32(columns) - int32(o))
        if not idle or warp < uint32(groups):
            for turn_o in range(turns_o):
                for turn_k in range(turns_k):
                    inside = turn_k * step_k < k_left and turn_o * step_o < o_left
                    valid = uint32(4) if inside else uint32(0)
                    offset = uint32(4 * (turn_o * step_o + turn_k * step_k * pitch))
                    cp_async_4_zfill(uint32(slot + offset), source, at + int64(turn_k * step_k) * stride_k, valid)
                at += int64(step_o) * stride_o

    return copy_elements


def build_fixup(block_i: int, block_j: int, depth: int):
    """Adds the pieces of the tiles that no block computed as a whole; a thread owns 4 elements of a tile.

    Block x looks at the border between runs x and x + 1, and does nothing unless it is the first border inside a tile.
    """
    from numba import int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output
    from numba_gemm.intrinsics import load_global_v4

    first_step = first_step_of()
    tile_words = block_i * block_j

    def skinny_fixup(P, C, J, NARROW, K, blocks, c_stride_i, c_stride_j, alpha, beta, stride_c):
        batch = int64(cuda.blockIdx.z)
        steps_a_tile = max(uint32(1), uint32((K + uint32(depth - 1)) // uint32(depth)))
        steps = uint32((J + uint32(block_j - 1)) // uint32(block_j) * steps_a_tile)
        before = uint32(cuda.blockIdx.x)
        border = first_step(uint32(before + uint32(1)), blocks, steps)
        tile = border // steps_a_tile
        tile_begin = uint32(tile * steps_a_tile)
        tile_end = uint32(tile_begin + steps_a_tile)
        element = uint32((uint32(cuda.blockIdx.y) * uint32(FIXUP_THREADS) + uint32(cuda.threadIdx.x)) * uint32(VECTOR))
        row = element // uint32(block_j)
        column = uint32(tile * uint32(block_j) + element % uint32(block_j))
        if border != tile_begin and first_step(before, blocks, steps) <= tile_begin and row < NARROW and column < J:
            place = ((batch * int64(blocks) + int64(before)) * 2 + 1) * int64(tile_words) + int64(element)
            x, y, z, w = load_global_v4(P, place)
            piece = uint32(before + uint32(1))
            while piece < blocks and first_step(piece, blocks, steps) < tile_end:
                place = (batch * int64(blocks) + int64(piece)) * int64(2 * tile_words) + int64(element)
                a, b, c, d = load_global_v4(P, place)
                x += a
                y += b
                z += c
                w += d
                piece = uint32(piece + uint32(1))
            index = batch * stride_c + int64(row) * c_stride_i + int64(column) * c_stride_j
            store_output(C, index, x, alpha, beta)
            if uint32(column + uint32(1)) < J:
                store_output(C, index + c_stride_j, y, alpha, beta)
            if uint32(column + uint32(2)) < J:
                store_output(C, index + 2 * c_stride_j, z, alpha, beta)
            if uint32(column + uint32(3)) < J:
                store_output(C, index + 3 * c_stride_j, w, alpha, beta)

    return skinny_fixup


def place_of_threads(threads_i: int, threads_j: int):
    """Which thread tile a thread owns: (row, column) in the block's grid of them."""
    from numba import uint32

    from numba_gemm.compile.numba_source import device_function

    lanes_i = min(4, threads_i)
    lanes_j = WARP // lanes_i
    warps_j = threads_j // lanes_j

    @device_function
    def thread_place(thread):
        lane, warp = thread % uint32(WARP), thread // uint32(WARP)
        if lanes_i == 1:
            lane_i, lane_j = uint32(0), lane
        elif lanes_i == 2:
            lane_i, lane_j = lane % uint32(2), lane // uint32(2)
        else:
            lane_i = uint32(lane % uint32(2) + lane // uint32(4) % uint32(2) * uint32(2))
            lane_j = uint32(lane // uint32(2) % uint32(2) + lane // uint32(8) * uint32(2))
        row = uint32(warp // uint32(warps_j) * uint32(lanes_i) + lane_i)
        return row, uint32(warp % uint32(warps_j) * uint32(lanes_j) + lane_j)

    return thread_place


def column_in_tile(grouped: bool, threads_j: int):
    """Column of the tile of a thread's j-th value: groups of 4 side by side, or single columns along K."""
    from numba import uint32

    from numba_gemm.compile.numba_source import device_function

    @device_function
    def column_of(thread_column, j):
        if grouped:
            group, within = uint32(j) // uint32(VECTOR), uint32(j) % uint32(VECTOR)
            return uint32(thread_column * uint32(VECTOR) + group * uint32(threads_j * VECTOR) + within)
        return uint32(thread_column + uint32(j) * uint32(threads_j))

    return column_of


def first_step_of():
    """The first k-step of a block's run: equal shares, one more for the first blocks where they don't come out even."""
    from numba import uint32

    from numba_gemm.compile.numba_source import device_function

    @device_function
    def first_step(block, blocks, steps):
        return uint32(block * (steps // blocks) + min(block, uint32(steps % blocks)))

    return first_step
