"""The device code of repack; what it is and why, in repack.py."""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll

THREADS = 256
WARPS = THREADS // 32
TILE = 64  # of the transposed form, either way
STRAIGHT_ROWS = 32
SPANS = 4  # of 32 columns that a thread visits in the straight form
WORD_ROWS = 16  # of the form by words
ROUNDS, STRAIGHT_ROUNDS = TILE // WARPS, STRAIGHT_ROWS // WARPS  # rows or columns of a tile that a warp visits
WORD_ROUNDS = WORD_ROWS // WARPS
VALUES = 10  # parameters of one copy
PER_THREAD = TILE * TILE // THREADS  # values, in all forms but that by words
ALIGNMENT = 16  # bytes


def _bodies(bits: int, filled: int):
    """The code of each form for one block; ``block`` is its index among those of its copy."""
    from numba import int64, uint16, uint32

    from numba_gemm.compile.numba_source import cuda, device_function
    from numba_gemm.compile.unroll import expand_unrolled
    from numba_gemm.fp32.pointers import address_of, load_half_if, load_word_if, load_words, store_words
    from numba_gemm.intrinsics import offset_pointer

    element = uint16 if bits == 16 else uint32
    size = bits // 8
    padded = TILE + (2 if bits == 16 else 1)
    width = ALIGNMENT // size  # elements in 16 bytes
    span = 32 * width  # columns that a warp visits at once, 16 bytes a lane
    straight_columns = 32 * SPANS

    def transposed(
        S, D, block, rows, columns, source_row, source_column, target_row, target_column
    ):  # fmt: skip
        tile = cuda.shared.array((TILE, padded), element)
        values = cuda.local.array(PER_THREAD, element)
        stored = uint32((columns + uint32(width - 1)) // uint32(width) * uint32(width)) if filled else columns
        tiles_n = uint32((columns + uint32(TILE - 1)) // uint32(TILE))
        tile_row = uint32(block // tiles_n)
        tile_column = uint32(block - tile_row * tiles_n)
        first_row = uint32(tile_row * uint32(TILE))
        first_column = uint32(tile_column * uint32(TILE))
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)

        for half in unroll(2):
            row = uint32(first_row + lane + uint32(32 * half))
            s = offset_pointer(S, int64(row) * source_row + int64(uint32(first_column + warp)) * source_column)
            for step in unroll(ROUNDS):
                value = element(0)
                if row < rows and uint32(first_column + warp + uint32(WARPS * step)) < columns:
                    value = s[0]
                values[ROUNDS * half + step] = value
                s = offset_pointer(s, WARPS * source_column)
        for half in unroll(2):
            for step in unroll(ROUNDS):
                i, j = uint32(lane + uint32(32 * half)), uint32(warp + uint32(WARPS * step))
                tile[i, j] = values[ROUNDS * half + step]
        cuda.syncthreads()  # the tile is whole before it is read the other way round
        for half in unroll(2):
            column = uint32(first_column + lane + uint32(32 * half))
            d = offset_pointer(D, int64(uint32(first_row + warp)) * target_row + int64(column) * target_column)
            for step in unroll(ROUNDS):
                value = tile[uint32(warp + uint32(WARPS * step)), uint32(lane + uint32(32 * half))]
                if column < stored and uint32(first_row + warp + uint32(WARPS * step)) < rows:
                    d[0] = value
                d = offset_pointer(d, WARPS * target_row)

    def straight(
        S, D, block, rows, columns, source_row, source_column, target_row, target_column
    ):  # fmt: skip
        values = cuda.local.array(PER_THREAD, element)
        stored = uint32((columns + uint32(width - 1)) // uint32(width) * uint32(width)) if filled else columns
        tiles_n = uint32((columns + uint32(straight_columns - 1)) // uint32(straight_columns))
        tile_row = uint32(block // tiles_n)
        tile_column = uint32(block - tile_row * tiles_n)
        first_row = uint32(tile_row * uint32(STRAIGHT_ROWS))
        first_column = uint32(tile_column * uint32(straight_columns))
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)

        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + warp + uint32(WARPS * step))
            s = offset_pointer(S, int64(row) * source_row + int64(uint32(first_column + lane)) * source_column)
            for turn in unroll(SPANS):
                value = element(0)
                if row < rows and uint32(first_column + lane + uint32(32 * turn)) < columns:
                    value = s[0]
                values[SPANS * step + turn] = value
                s = offset_pointer(s, 32 * source_column)
        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + warp + uint32(WARPS * step))
            d = offset_pointer(D, int64(row) * target_row + int64(uint32(first_column + lane)) * target_column)
            for turn in unroll(SPANS):
                if row < rows and uint32(first_column + lane + uint32(32 * turn)) < stored:
                    d[0] = values[SPANS * step + turn]
                d = offset_pointer(d, 32 * target_column)

    def aligned(
        S, D, block, rows, columns, source_row, source_column, target_row, target_column
    ):  # fmt: skip
        values = cuda.local.array(PER_THREAD, uint32)
        tiles_n = uint32((columns + uint32(span - 1)) // uint32(span))
        tile_row = uint32(block // tiles_n)
        tile_column = uint32(block - tile_row * tiles_n)
        first_row = uint32(tile_row * uint32(STRAIGHT_ROWS))
        first_column = uint32(tile_column * uint32(span))
        row_in_tile = uint32(cuda.threadIdx.x) // uint32(32)
        column = uint32(first_column + uint32(cuda.threadIdx.x) % uint32(32) * uint32(width))
        whole = uint32(column + uint32(width)) <= columns

        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + row_in_tile + uint32(WARPS * step))
            x, y, z, w = uint32(0), uint32(0), uint32(0), uint32(0)
            if row < rows and whole:
                x, y, z, w = load_words(address_of(S) + (int64(row) * source_row + int64(column)) * int64(size))
            values[4 * step], values[4 * step + 1], values[4 * step + 2], values[4 * step + 3] = x, y, z, w
        for step in unroll(STRAIGHT_ROUNDS):
            row = uint32(first_row + row_in_tile + uint32(WARPS * step))
            if row < rows:
                if whole:
                    x, y, z, w = values[4 * step], values[4 * step + 1], values[4 * step + 2], values[4 * step + 3]
                    store_words(address_of(D) + (int64(row) * target_row + int64(column)) * int64(size), x, y, z, w)
                else:  # the end of a row that isn't a whole number of groups
                    for offset in range(width):
                        if uint32(column + uint32(offset)) < columns:
                            at = int64(uint32(column + uint32(offset)))
                            D[int64(row) * target_row + at] = S[int64(row) * source_row + at]

    def words(
        S, D, block, rows, columns, source_row, source_column, target_row, target_column
    ):  # fmt: skip
        values = cuda.local.array((WORD_ROUNDS, 7), uint32)
        tiles_n = uint32((columns + uint32(span - 1)) // uint32(span))
        tile_row = uint32(block // tiles_n)
        tile_column = uint32(block - tile_row * tiles_n)
        first_row = uint32(tile_row * uint32(WORD_ROWS) + uint32(cuda.threadIdx.x) // uint32(32))
        column = uint32(tile_column * uint32(span) + uint32(cuda.threadIdx.x) % uint32(32) * uint32(width))
        last = uint32(columns - uint32(1))

        for step in unroll(WORD_ROUNDS):
            row = uint32(first_row + uint32(WARPS * step))
            row_begin = address_of(S) + int64(row) * source_row * int64(size)
            begin = row_begin + int64(column) * int64(size)
            inside = uint32(row < rows) & uint32(column < columns)
            if bits == 32:
                for j in unroll(4):
                    on = inside & uint32(uint32(column + uint32(j)) < columns)
                    values[step, j] = load_word_if(begin + int64(4 * j), on)
            else:
                # Aligned words: where the row begins amid one, the first holds the element before this thread's first.
                # A word that isn't whole in the row, at either end of it, isn't read; its one element is.
                odd = uint32(begin >> int64(1)) & uint32(1)
                before = uint32(column - odd)  # 2^32 - 1 before the row's first element
                to_last = uint32(last - before)
                words_begin = begin - int64(2) * int64(odd)
                for j in unroll(5):
                    on = inside & uint32(uint32(before + uint32(2 * j)) < last)
                    if j == 4:
                        on = on & odd
                    values[step, j] = load_word_if(words_begin + int64(4 * j), on)
                values[step, 5] = load_half_if(row_begin, inside & uint32(before == uint32(0xFFFFFFFF)))
                alone = inside & uint32(to_last <= uint32(8)) & uint32(to_last % uint32(2) == uint32(0))
                values[step, 6] = load_half_if(row_begin + int64(2) * int64(last), alone)
        for step in unroll(WORD_ROUNDS):
            row = uint32(first_row + uint32(WARPS * step))
            if bits == 16:
                begin = address_of(S) + (int64(row) * source_row + int64(column)) * int64(2)
                odd = uint32(begin >> int64(1)) & uint32(1)
                to_last = uint32(last - uint32(column - odd))
                values[step, 0] |= uint32(values[step, 5] << uint32(16))
                for j in unroll(5):
                    if to_last == uint32(2 * j):
                        values[step, j] |= values[step, 6]
                for j in unroll(4):
                    if odd != uint32(0):
                        shifted = uint32(values[step, j] >> uint32(16))
                        values[step, j] = shifted | uint32(values[step, j + 1] << uint32(16))
            if row < rows and column < columns:
                place = address_of(D) + (int64(row) * target_row + int64(column)) * int64(size)
                store_words(place, values[step, 0], values[step, 1], values[step, 2], values[step, 3])

    found = {"transposed": transposed, "straight": straight, "aligned": aligned, "words": words}
    return {name: device_function(expand_unrolled(body)) for name, body in found.items()}


def build(bits: int, transposed: int, vector_width: int, by_words: int = 0, filled: int = 0):
    from numba import int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.intrinsics import griddepcontrol_launch_dependents, griddepcontrol_wait, offset_pointer

    name = "transposed" if transposed else "words" if by_words else "aligned" if vector_width > 1 else "straight"
    copy_block = _bodies(bits, bool(filled))[name]

    def repack(
        S, D, rows, columns, source_row, source_column, target_row, target_column, source_batch, target_batch
    ):  # fmt: skip
        griddepcontrol_wait()
        batch = int64(uint32(cuda.blockIdx.z))
        S = offset_pointer(S, batch * source_batch)
        D = offset_pointer(D, batch * target_batch)
        block = uint32(cuda.blockIdx.x)
        copy_block(S, D, block, rows, columns, source_row, source_column, target_row, target_column)
        griddepcontrol_launch_dependents()  # at the end: a kernel that takes whole SMs isn't to crowd out the copies

    return repack


def build_pair(bits: int, first: str, second: str, filled: int):
    """Two copies in one launch: the first blocks have the one, the others the other."""
    from numba import int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.intrinsics import griddepcontrol_launch_dependents, griddepcontrol_wait, offset_pointer

    bodies = _bodies(bits, bool(filled))
    copy_first, copy_second = bodies[first], bodies[second]
    alike = first == second

    def repack_pair(
        S1, D1, rows1, columns1, source_row1, source_column1, target_row1, target_column1, source_batch1, target_batch1,
        S2, D2, rows2, columns2, source_row2, source_column2, target_row2, target_column2, source_batch2, target_batch2,
        blocks1, count1, count2,
    ):  # fmt: skip
        griddepcontrol_wait()
        block = uint32(cuda.blockIdx.x)
        batch = uint32(cuda.blockIdx.z)
        is_first = block < blocks1
        if is_first:
            S, D, rows, columns, source_row, source_column = S1, D1, rows1, columns1, source_row1, source_column1
            target_row, target_column, source_batch, target_batch = (
                target_row1, target_column1, source_batch1, target_batch1,
            )  # fmt: skip
            count = count1
        else:
            S, D, rows, columns, source_row, source_column = S2, D2, rows2, columns2, source_row2, source_column2
            target_row, target_column, source_batch, target_batch = (
                target_row2, target_column2, source_batch2, target_batch2,
            )  # fmt: skip
            count = count2
            block = uint32(block - blocks1)
        if batch < count:
            S = offset_pointer(S, int64(batch) * source_batch)
            D = offset_pointer(D, int64(batch) * target_batch)
            if alike or is_first:
                copy_first(S, D, block, rows, columns, source_row, source_column, target_row, target_column)
            else:
                copy_second(S, D, block, rows, columns, source_row, source_column, target_row, target_column)
        griddepcontrol_launch_dependents()

    return repack_pair
