"""outer: a product with a short K, as a sum of outer products: C is written at the speed of memory.

Idea        with K terms to an output, C is nearly all there is to move, and there is nothing to pipeline: v8 would copy
            and multiply whole steps of 16 or 32 terms, most of them zeros, and wait for them at a barrier. Here a
            thread holds ROWS × COLUMNS outputs, and each k is one outer product of a piece of A's column k and a piece
            of B's row k. The latencies of a block are hidden by the other blocks of its SM.
Roles       the warps of a block lie below one another; each has ROWS rows and the same 32 · COLUMNS columns as the
            others, so that B's lines come to an SM once for a block.

``row``     B's rows are contiguous: each thread loads its pieces of them straight into registers, UNROLL_K at a time,
            AHEAD times before it needs the first. 16-byte loads and stores (4 columns side by side) where B and C
            allow them, else 4-byte ones 32 columns apart, of which a warp's are as good from any address.
``column``  B's columns are contiguous: it comes by way of shared memory, as A does.
A           any strides. The block's rows come whole, by 4-byte cp.async, which turn them round, into shared memory,
            from where a 16-byte load brings 4 rows at one k for all lanes of a warp at once.
Sums        every output's terms in the order of k, by one thread: a product cut into blocks gives the same bits.
Edges       A's rows and terms outside count as zero and are not read; outputs outside are not stored.
Bound by    the launch below some 4 MB; stores of C at K = 1, 2; past that by the issue of instructions, more than half
            of them not FMAs (82% of the slots at 4014×3026×5, 4-byte accesses). Past K = 16 v8's tiles take over.

Tried       (H200) 8 columns a thread by 16 bytes: no product of 3 million outputs and more has one of them among its
            fastest two. One pointer that walks along B's rows in place of an address for each: 15% faster with 4×1
            outputs a thread, 0 to 3% with more, but the choice between forms was learnt without it (docs/fp32.md).
"""

from __future__ import annotations

from numba_gemm.compile.unroll import expand_unrolled, unroll

WARP = 32
#: The longest K, for which shared memory has room.
MAX_K = 32
#: Words between the k of shared memory, beyond the rows: 8 terms of 4 rows are copied to 32 banks.
PAD = 4
#: Terms and lines that a warp copies at a time.
COPIED_K, COPIED_LINES = 8, 4
#: Words of shared memory of a block, beyond which it would have to be asked for.
MOST_WORDS = 12 * 1024


def unmet(
    form: str, rows: int, columns: int, vector_width: int, warps: int, unroll_k: int, ahead: int, blocks_per_sm: int
) -> str | None:
    """The rule of the kernel's geometry that these parameters break, in words, or None."""
    if rows not in (4, 8, 16):
        return f"rows = {rows} is not 4, 8 or 16"
    if columns % vector_width:
        return f"columns = {columns} is not a multiple of the vector width, {vector_width}"
    if MAX_K % unroll_k:
        return f"unroll_k = {unroll_k} does not divide {MAX_K}"
    if form == "column" and ahead != 1:
        return f"ahead = {ahead}: nothing of a B whose columns are contiguous is loaded ahead"
    if form == "column" and WARP * columns % (COPIED_LINES * warps):
        return f"{warps} warps don't share the copies of {WARP * columns} columns"
    words = shared_words(form, rows, columns, warps)
    return None if words <= MOST_WORDS else f"{words} words of shared memory are more than {MOST_WORDS}"


def shared_words(form: str, rows: int, columns: int, warps: int) -> int:
    """Words of shared memory: A, and a B whose columns are contiguous."""
    return MAX_K * (warps * rows + PAD + (WARP * columns + PAD if form == "column" else 0))


def build(
    form: str, rows: int, columns: int, vector_width: int, warps: int, unroll_k: int, ahead: int, blocks_per_sm: int
):
    """The device function of a form."""
    broken = unmet(form, rows, columns, vector_width, warps, unroll_k, ahead, blocks_per_sm)
    if broken is not None:
        raise ValueError(f"outer: {broken}")
    from numba import float32, int32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.v8_intrinsics import outer_product
    from numba_gemm.intrinsics import (
        cp_async_commit,
        cp_async_wait,
        load_shared_v4_at,
        offset_pointer,
        shared_address,
    )

    by_shared = form == "column"
    block_m, block_n, sums, held = warps * rows, WARP * columns, rows * columns, unroll_k * ahead
    a_pitch, b_pitch = block_m + PAD, block_n + PAD
    words = shared_words(form, rows, columns, warps)
    copy_a = line_copies(block_m, warps, unroll_k)
    copy_b = line_copies(block_n, warps, unroll_k) if by_shared else None
    load_b = shared_rows(columns, vector_width, unroll_k) if by_shared else global_rows(columns, vector_width, unroll_k)
    multiply = outer_product(rows, columns)
    store = row_stores(columns, vector_width)

    def outer(A, B, C, M, N, K, a_stride_i, a_stride_k, ldb, ldc, alpha, beta, stride_a, stride_b, stride_c):
        shared = cuda.shared.array(words, float32, alignment=16)
        total = cuda.local.array(sums, float32)
        a_values = cuda.local.array(rows, float32)
        b_values = cuda.local.array((held, columns), float32)
        column_of = cuda.local.array(columns, uint32)

        batch = int64(cuda.blockIdx.z)
        left_factor = offset_pointer(A, batch * stride_a)
        right_factor = offset_pointer(B, batch * stride_b)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread % uint32(WARP), thread // uint32(WARP)
        across = uint32((N + uint32(block_n - 1)) // uint32(block_n))
        tile = uint32(cuda.blockIdx.x)
        first_row = uint32(tile // across * uint32(block_m))
        first_column = uint32(tile % across * uint32(block_n))
        column = uint32(first_column + lane * uint32(vector_width))
        for c in unroll(0, columns, vector_width):
            column_of[c] = min(uint32(column + uint32(c * WARP)), uint32(N - uint32(vector_width)))
        for s in unroll(sums):
            total[s] = float32(0)

        a_shared = shared_address(shared, uint32(0))
        b_shared = uint32(a_shared + uint32(4 * MAX_K * a_pitch))
        a_at = uint32(a_shared + warp * uint32(4 * rows))
        b_at = uint32(b_shared + lane * uint32(4 * vector_width))
        copy_a(offset_pointer(left_factor, int64(first_row) * a_stride_i), a_shared, int32(M - first_row), int32(K),
               a_stride_i, a_stride_k, thread)  # fmt: skip
        if by_shared:
            copy_b(offset_pointer(right_factor, int64(first_column) * ldb), b_shared, int32(N - first_column), int32(K),
                   ldb, int64(1), thread)  # fmt: skip
        cp_async_commit()
        if not by_shared:
            for s in unroll(ahead):
                load_b(right_factor, ldb, column_of, uint32(s * unroll_k), K, b_values, s)
        cp_async_wait(0)
        cuda.syncthreads()  # what comes by shared memory is there
        k = uint32(0)
        while k < K:
            for s in unroll(ahead):
                if k < K:
                    if by_shared:
                        load_b(uint32(b_at + k * uint32(4 * b_pitch)), b_values)
                    for u in unroll(unroll_k):
                        a_row = uint32(a_at + k * uint32(4 * a_pitch) + uint32(4 * u * a_pitch))
                        for r in unroll(0, rows, 4):
                            w, x, y, z = load_shared_v4_at(uint32(a_row + uint32(4 * r)))
                            a_values[r], a_values[r + 1], a_values[r + 2], a_values[r + 3] = w, x, y, z
                        multiply(total, a_values, uint32(0), b_values, uint32((s * unroll_k + u) * columns))
                    if not by_shared:
                        load_b(right_factor, ldb, column_of, uint32(k + uint32(held)), K, b_values, s)
                    k = uint32(k + uint32(unroll_k))

        row = uint32(first_row + warp * uint32(rows))
        at = batch * stride_c + int64(row) * ldc + int64(column)
        for r in unroll(rows):
            if uint32(row + uint32(r)) < M:
                store(C, at, column, N, total, uint32(r * columns), alpha, beta)
            at += ldc

    return outer


def line_copies(lines: int, warps: int, unroll_k: int):
    """The device function that copies ``lines`` lines of K terms, and zeros up to a whole pass, to shared memory.

    What lies past the last line becomes zero too.
    """
    from numba import int32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import cp_async_4_zfill

    pitch, turn = lines + PAD, COPIED_LINES * warps

    def copy_lines(source, target, lines_left, K, stride_line, stride_k, thread):
        k = int32(thread % uint32(COPIED_K))
        line = int32(thread // uint32(COPIED_K))
        slot = uint32(target + (uint32(k) * uint32(pitch) + uint32(line)) * uint32(4))
        at = int64(k) * stride_k + int64(line) * stride_line
        past = int32(K + int32(unroll_k - 1)) // int32(unroll_k) * int32(unroll_k)
        while k < past:
            for t in unroll(0, lines, turn):
                inside = k < K and int32(line + int32(t)) < lines_left
                valid = uint32(4) if inside else uint32(0)
                cp_async_4_zfill(uint32(slot + uint32(4 * t)), source, at + int64(t) * stride_line, valid)
            k = int32(k + int32(COPIED_K))
            slot = uint32(slot + uint32(4 * COPIED_K * pitch))
            at += int64(COPIED_K) * stride_k

    return device_function(expand_unrolled(copy_lines))


def global_rows(columns: int, vector_width: int, unroll_k: int):
    """The device function that loads a thread's columns of ``unroll_k`` rows of B; zeros from the end of K on."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import load_global, load_global_v4, offset_pointer

    vectorised = vector_width == 4

    def load_rows(matrix, ldb, column_of, k, end, values, slot):
        for u in unroll(unroll_k):
            at, into = uint32(k + uint32(u)), slot * unroll_k + u
            if at < end:
                row = offset_pointer(matrix, int64(at) * ldb)
                for c in unroll(0, columns, vector_width):
                    if vectorised:
                        w, x, y, z = load_global_v4(row, column_of[c])
                        values[into, c], values[into, c + 1], values[into, c + 2], values[into, c + 3] = w, x, y, z
                    else:
                        values[into, c] = load_global(row, column_of[c])
            else:
                for c in unroll(columns):
                    values[into, c] = float32(0)

    return device_function(expand_unrolled(load_rows))


def shared_rows(columns: int, vector_width: int, unroll_k: int):
    """The same from B in shared memory, where zeros are."""
    from numba import uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import load_shared_at, load_shared_v4_at

    vectorised, pitch = vector_width == 4, WARP * columns + PAD

    def load_rows(at, values):
        for u in unroll(unroll_k):
            for c in unroll(0, columns, vector_width):
                if vectorised:
                    w, x, y, z = load_shared_v4_at(uint32(at + uint32(4 * (u * pitch + c * WARP))))
                    values[u, c], values[u, c + 1], values[u, c + 2], values[u, c + 3] = w, x, y, z
                else:
                    values[u, c] = load_shared_at(uint32(at + uint32(4 * (u * pitch + c * WARP))))

    return device_function(expand_unrolled(load_rows))


def row_stores(columns: int, vector_width: int):
    """The device function that stores a thread's columns of one row of C."""
    from numba import uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.fp32.epilogue import store_output, store_output_v4

    vectorised = vector_width == 4

    def store_row(C, at, column, N, total, first, alpha, beta):
        for c in unroll(0, columns, vector_width):
            if uint32(column + uint32(c * WARP)) < N:
                s = uint32(first + uint32(c))
                if vectorised:
                    store_output_v4(C, at + c * WARP, total[s], total[s + 1], total[s + 2], total[s + 3], alpha, beta)
                else:
                    store_output(C, at + c * WARP, total[s], alpha, beta)

    return device_function(expand_unrolled(store_row))
