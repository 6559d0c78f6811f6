"""thin: a product with a side of 2 … 16, at the speed of memory: gemv with several vectors at a time.

Idea        so few vectors make tiles of little use: what the wide factor W (J outputs by K terms) brings is used up by
            one thread. As in gemv, every thread keeps loads of W in flight, straight into registers; the I vectors of
            X are all that is staged, in shared memory, from where a 16-byte load brings 4 of them at one k.
Roles       M ≤ 16: W is B and X is A. N ≤ 16: W is A and X is B, and C is written transposed.

``along``   K is contiguous in W (A row-major, B column-major). LANES lanes lie along K, so the 32 / LANES groups of a
            warp read as many rows at a time; each thread has ROWS of them. 4-byte loads, of which 32 lanes read whole
            lines from any address: one form for every K and alignment. K_WARPS warps share a chunk's k.
``across``  the outputs are contiguous in W (A column-major, B row-major). LANES lanes side by side own 4 outputs each,
            or 1 where rows are misaligned, and each all I vectors; the THREADS / LANES groups of a block take a k each.

Chunks      X comes by DEPTH terms at a time, by cp.async into one of two buffers, the next one while this one is used.
            The first loads of W are under way before a thread waits for its chunk. Two barriers a chunk: it is whole;
            it has been read. Rows of a buffer are 4, 12 or 20 words apart, so that neither copies nor loads collide.
Each k      ``along``: ROWS loads of 4 bytes and NARROW / 4 LDS.128 for ROWS · NARROW FMAs; ``across``: one load of 16
            bytes for 4 · NARROW.
Sums        the lanes that share outputs halve what they hold with each shuffle (one sends the upper half of its sums
            and keeps the lower, its partner the other way round), 31 shuffles for 32 sums in place of 160. Warps meet
            in shared memory. Few outputs: K is split over blocks, the parts go to a workspace, and a second launch,
            which starts before the first is over, adds them up. Every sum has one order: the same bits every time.
Edges       what lies outside counts as zero and is not read, or not stored.
Bound by    memory, and by the launch below some 4 MB; with 16 vectors by instructions. Reads of 28672×8192: 8 vectors
            at 3.9 TB/s across, 3.2 along (skinny 4.2 and 3.6), so large products of 8 and more are skinny's.

Tried       (H200, µs) X copied a whole chunk deep, whatever K is: 4×8001×24 by 512 deep chunks 4.8, by v8 3.1; so the
            copies and passes end with K. Of 36 to 112 tiles of each kind, timed at 107 shapes, 5 to 9 are left: one
            tile is 10 to 30% slower than they are on the mean. X straight from global memory was not tried, as its
            loads take 32 lines for what lies along the vectors.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import expand_unrolled, unroll

WARP = 32
FULL_WARP = 0xFFFFFFFF
PAD = 4  # words
#: The launch that adds partial sums: outputs side by side in a block, and slices of the sums.
SUM_LANES, SUM_SLICES = 32, 8
#: Terms of X that a warp copies at a time, of 4 vectors: whole sectors of a matrix that lies along K, and 32 banks.
COPIED_K = 8
#: Words of shared memory of a block, beyond which it would have to be asked for.
MOST_WORDS = 12 * 1024


def x_pitch(narrow: int) -> int:
    """Words from one k of a chunk of X to the next."""
    return narrow if narrow == PAD else narrow + PAD


def build(form: str, blocks_per_sm: int, **parameters: int):
    """The device function of a form; the parameters are those of :func:`build_along` or :func:`build_across`."""
    broken = unmet(form, blocks_per_sm, **parameters)
    if broken is not None:
        raise ValueError(f"thin: {broken}")
    return (build_along if form == "along" else build_across)(**parameters)


def unmet(form: str, blocks_per_sm: int, **parameters: int) -> str | None:
    """The rule of the kernel's geometry that these parameters break, in words, or None."""
    p = parameters
    narrow, warps, lanes, depth = p["narrow"], p["warps"], p["lanes"], p["depth"]
    if narrow not in (4, 8, 16):
        return f"narrow = {narrow} is not 4, 8 or 16"
    if lanes not in (4, 8, 16, 32):
        return f"lanes = {lanes} is not 4, 8, 16 or 32"
    if form == "along" and warps % p["k_warps"]:
        return f"{warps} warps don't share k by groups of {p['k_warps']}"
    in_a_pass = pass_of(form, p)
    if depth % in_a_pass:
        return f"depth = {depth} is not made of passes of {in_a_pass}"
    if depth % (COPIED_K * warps):
        return f"depth = {depth} is not a multiple of the {COPIED_K * warps} terms that {warps} warps copy at a time"
    words = shared_words(form, p)
    return None if words <= MOST_WORDS else f"{words} words of shared memory are more than {MOST_WORDS}"


def pass_of(form: str, p: dict[str, int]) -> int:
    """Terms of K that one block takes at a time."""
    if form == "along":
        return p["k_warps"] * p["lanes"] * p["unroll_k"]
    return p["warps"] * WARP // p["lanes"] * p["unroll_k"]


def outputs_of(form: str, p: dict[str, int]) -> int:
    """Outputs of one block, each of them for every vector."""
    if form == "along":
        return p["warps"] // p["k_warps"] * p["rows"] * (WARP // p["lanes"])
    return p["lanes"] * p["vector_width"]


def shared_words(form: str, p: dict[str, int]) -> int:
    """Words of shared memory: two chunks of X, or the sums of all warps."""
    if form == "along":
        sums = p["warps"] * p["rows"] * p["narrow"] * (WARP // p["lanes"])
    else:
        sums = p["warps"] * p["narrow"] * p["vector_width"] * (p["lanes"] + 1)
    return max(2 * p["depth"] * x_pitch(p["narrow"]), sums)


def build_along(narrow: int, rows: int, lanes: int, warps: int, k_warps: int, unroll_k: int, depth: int):
    """K contiguous in W."""
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
    from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents

    parameters = {
        "narrow": narrow, "rows": rows, "lanes": lanes, "warps": warps, "k_warps": k_warps, "unroll_k": unroll_k,
        "depth": depth,
    }  # fmt: skip
    threads, pitch, groups = warps * WARP, x_pitch(narrow), WARP // lanes
    outputs, in_a_pass = outputs_of("along", parameters), pass_of("along", parameters)
    rows_of_warp = rows * groups
    words, chunk_words = shared_words("along", parameters), depth * pitch
    sums_of_thread = rows * narrow
    copy_x = chunk_copies(narrow, warps, depth, in_a_pass)
    load_w = row_loads(rows, lanes, unroll_k)
    multiply = outer_product(narrow, rows)
    add_lanes = halving_sums(sums_of_thread, lanes // 2, 1)
    held = max(1, sums_of_thread // lanes)  # sums that a thread holds in the end
    shares = -(-outputs * narrow // threads)

    def thin_along(W, X, C, J, NARROW, K, k_per_part, ldw, x_stride_i, x_stride_k, c_stride_i, c_stride_j, alpha, beta,
                   stride_w, stride_x, stride_c, stride_part):  # fmt: skip
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array(words, float32, alignment=16)
        total = cuda.local.array(sums_of_thread, float32)
        w_values = cuda.local.array((unroll_k, rows), float32)
        x_values = cuda.local.array(narrow, float32)
        row_offsets = cuda.local.array(rows, int64)

        batch = int64(cuda.blockIdx.z)
        matrix = offset_pointer(W, batch * stride_w)
        vectors = offset_pointer(X, batch * stride_x)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread % uint32(WARP), thread // uint32(WARP)
        lane_k, group = lane % uint32(lanes), lane // uint32(lanes)
        warp_k, warp_row = warp % uint32(k_warps), warp // uint32(k_warps)
        tile = uint32(uint32(cuda.blockIdx.x) * uint32(outputs))
        first = uint32(tile + warp_row * uint32(rows_of_warp) + group)
        begin = uint32(uint32(cuda.blockIdx.y) * k_per_part)
        end = min(K, uint32(begin + k_per_part))
        for r in unroll(rows):
            row_offsets[r] = int64(min(uint32(first + uint32(r * groups)), uint32(J - uint32(1)))) * ldw
        for s in unroll(sums_of_thread):
            total[s] = float32(0)

        x_ring = shared_address(shared, uint32(0))
        own_k = uint32(warp_k * uint32(lanes * unroll_k) + lane_k)  # of a pass
        x_at = uint32(x_ring + own_k * uint32(4 * pitch))
        x_from = int64(begin) * x_stride_k
        left = int32(uint32(end - begin))
        copy_x(vectors, x_from, x_ring, NARROW, left, x_stride_i, x_stride_k, thread)
        cp_async_commit()
        k = uint32(begin + own_k)
        load_w(matrix, row_offsets, k, end, w_values)

        read, fill = uint32(0), uint32(4 * chunk_words)
        while left > int32(0):
            chunk_end = uint32(read + min(uint32(left), uint32(depth)) * uint32(4 * pitch))
            x_from += int64(depth) * x_stride_k
            left = int32(left - int32(depth))
            copy_x(vectors, x_from, uint32(x_ring + fill), NARROW, left, x_stride_i, x_stride_k, thread)
            cp_async_commit()
            cp_async_wait(1)
            cuda.syncthreads()  # this chunk is whole
            done = read  # bytes into the buffers
            while done < chunk_end:
                for u in unroll(unroll_k):
                    for i in unroll(0, narrow, 4):
                        a, b, c, d = load_shared_v4_at(uint32(x_at + done + uint32(4 * (u * lanes * pitch + i))))
                        x_values[i], x_values[i + 1], x_values[i + 2], x_values[i + 3] = a, b, c, d
                    multiply(total, x_values, uint32(0), w_values, uint32(u * rows))
                done = uint32(done + uint32(4 * pitch * in_a_pass))
                k = uint32(k + uint32(in_a_pass))
                load_w(matrix, row_offsets, k, end, w_values)
            cuda.syncthreads()  # it has been read
            read, fill = fill, read

        place = add_lanes(total, lane)
        for s in unroll(held):
            shared[uint32((warp * uint32(groups) + group) * uint32(sums_of_thread) + place + uint32(s))] = total[s]
        cuda.syncthreads()  # every warp's sums are there
        part_offset = batch * stride_c + int64(cuda.blockIdx.y) * stride_part
        for share in unroll(shares):
            element = uint32(thread + uint32(share * threads))
            row, i = element // uint32(narrow), element % uint32(narrow)
            output = uint32(tile + row)
            if row < uint32(outputs) and output < J and i < NARROW:
                within = row % uint32(rows_of_warp)
                slot = uint32(
                    (row // uint32(rows_of_warp) * uint32(k_warps * groups) + within % uint32(groups))
                    * uint32(sums_of_thread)
                    + i * uint32(rows)
                    + within // uint32(groups)
                )
                value = shared[slot]
                for part in unroll(1, k_warps):
                    value += shared[uint32(slot + uint32(part * groups * sums_of_thread))]
                index = part_offset + int64(output) * c_stride_j + int64(i) * c_stride_i
                store_output(C, index, value, alpha, beta)

    return thin_along


def build_across(narrow: int, vector_width: int, lanes: int, warps: int, unroll_k: int, depth: int):
    """The outputs contiguous in W."""
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
    from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents

    parameters = {
        "narrow": narrow, "vector_width": vector_width, "lanes": lanes, "warps": warps, "unroll_k": unroll_k,
        "depth": depth,
    }  # fmt: skip
    threads, pitch, groups = warps * WARP, x_pitch(narrow), warps * WARP // lanes
    outputs, in_a_pass = outputs_of("across", parameters), pass_of("across", parameters)
    words, chunk_words = shared_words("across", parameters), depth * pitch
    sums_of_thread = narrow * vector_width
    copy_x = chunk_copies(narrow, warps, depth, in_a_pass)
    load_w = column_loads(vector_width, groups, unroll_k)
    multiply = outer_product(narrow, vector_width)
    add_lanes = halving_sums(sums_of_thread, WARP // 2, lanes)
    held = max(1, sums_of_thread * lanes // WARP)
    sums_row = lanes + 1  # a word of padding: lanes with other outputs write to other banks
    shares = -(-outputs * narrow // threads)

    def thin_across(W, X, C, J, NARROW, K, k_per_part, ldw, x_stride_i, x_stride_k, c_stride_i, c_stride_j, alpha, beta,
                    stride_w, stride_x, stride_c, stride_part):  # fmt: skip
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array(words, float32, alignment=16)
        total = cuda.local.array(sums_of_thread, float32)
        w_values = cuda.local.array((unroll_k, vector_width), float32)
        x_values = cuda.local.array(narrow, float32)

        batch = int64(cuda.blockIdx.z)
        vectors = offset_pointer(X, batch * stride_x)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread % uint32(WARP), thread // uint32(WARP)
        tile = uint32(uint32(cuda.blockIdx.x) * uint32(outputs))
        column = uint32(tile + thread % uint32(lanes) * uint32(vector_width))
        matrix = offset_pointer(W, batch * stride_w + int64(min(column, uint32(J - uint32(vector_width)))))
        begin = uint32(uint32(cuda.blockIdx.y) * k_per_part)
        end = min(K, uint32(begin + k_per_part))
        for s in unroll(sums_of_thread):
            total[s] = float32(0)

        x_ring = shared_address(shared, uint32(0))
        own_k = thread // uint32(lanes)  # of a pass
        x_at = uint32(x_ring + own_k * uint32(4 * pitch))
        x_from = int64(begin) * x_stride_k
        left = int32(uint32(end - begin))
        copy_x(vectors, x_from, x_ring, NARROW, left, x_stride_i, x_stride_k, thread)
        cp_async_commit()
        k = uint32(begin + own_k)
        load_w(matrix, ldw, k, end, w_values)

        read, fill = uint32(0), uint32(4 * chunk_words)
        while left > int32(0):
            chunk_end = uint32(read + min(uint32(left), uint32(depth)) * uint32(4 * pitch))
            x_from += int64(depth) * x_stride_k
            left = int32(left - int32(depth))
            copy_x(vectors, x_from, uint32(x_ring + fill), NARROW, left, x_stride_i, x_stride_k, thread)
            cp_async_commit()
            cp_async_wait(1)
            cuda.syncthreads()  # this chunk is whole
            done = read  # bytes into the buffers
            while done < chunk_end:
                for u in unroll(unroll_k):
                    for i in unroll(0, narrow, 4):
                        a, b, c, d = load_shared_v4_at(uint32(x_at + done + uint32(4 * (u * groups * pitch + i))))
                        x_values[i], x_values[i + 1], x_values[i + 2], x_values[i + 3] = a, b, c, d
                    multiply(total, x_values, uint32(0), w_values, uint32(u * vector_width))
                done = uint32(done + uint32(4 * pitch * in_a_pass))
                k = uint32(k + uint32(in_a_pass))
                load_w(matrix, ldw, k, end, w_values)
            cuda.syncthreads()  # it has been read
            read, fill = fill, read

        place = add_lanes(total, lane)
        for s in unroll(held):
            slot = uint32((warp * uint32(sums_of_thread) + place + uint32(s)) * uint32(sums_row) + lane % uint32(lanes))
            shared[slot] = total[s]
        cuda.syncthreads()  # every warp's sums are there
        part_offset = batch * stride_c + int64(cuda.blockIdx.y) * stride_part
        for share in unroll(shares):
            element = uint32(thread + uint32(share * threads))
            i, mine = element // uint32(outputs), element % uint32(outputs)
            output = uint32(tile + mine)
            if i < NARROW and output < J:
                slot = uint32(
                    (i * uint32(vector_width) + mine % uint32(vector_width)) * uint32(sums_row)
                    + mine // uint32(vector_width)
                )
                value = shared[slot]
                for part in unroll(1, warps):
                    value += shared[uint32(slot + uint32(part * sums_of_thread * sums_row))]
                index = part_offset + int64(output) * c_stride_j + int64(i) * c_stride_i
                store_output(C, index, value, alpha, beta)

    return thin_across


def row_loads(rows: int, lanes: int, unroll_k: int):
    """The device function that loads a pass of rows of W, from a thread's k on; zeros from the end of K on."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import load_global_stream

    def load_rows(matrix, row_offsets, k, end, values):
        for u in unroll(unroll_k):
            at = uint32(k + uint32(u * lanes))
            if at < end:
                for r in unroll(rows):
                    values[u, r] = load_global_stream(matrix, row_offsets[r] + int64(at))
            else:
                for r in unroll(rows):
                    values[u, r] = float32(0)

    return device_function(expand_unrolled(load_rows))


def column_loads(vector_width: int, groups: int, unroll_k: int):
    """The same of a thread's columns of W."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import load_global_stream, load_global_stream_v4

    vectorised = vector_width == 4

    def load_columns(matrix, ldw, k, end, values):
        for u in unroll(unroll_k):
            at = uint32(k + uint32(u * groups))
            if at < end:
                if vectorised:
                    a, b, c, d = load_global_stream_v4(matrix, int64(at) * ldw)
                    values[u, 0], values[u, 1], values[u, 2], values[u, 3] = a, b, c, d
                else:
                    values[u, 0] = load_global_stream(matrix, int64(at) * ldw)
            else:
                for v in unroll(vector_width):
                    values[u, v] = float32(0)

    return device_function(expand_unrolled(load_columns))


def chunk_copies(narrow: int, warps: int, depth: int, in_a_pass: int):
    """The device function that copies a chunk of X, or as much as is left of K, up to a whole pass, into a buffer.

    What lies past the last vector or the last k becomes zero.
    """
    from numba import int32, int64, uint32

    from numba_gemm.compile.numba_source import device_function
    from numba_gemm.intrinsics import cp_async_4_zfill

    pitch, turn_k = x_pitch(narrow), COPIED_K * warps

    @device_function
    def copy_chunk(source, start, target, vectors, left, stride_i, stride_k, thread):
        k = int32(thread // uint32(WARP) * uint32(COPIED_K) + thread % uint32(COPIED_K))
        i = int32(thread % uint32(WARP) // uint32(COPIED_K))
        slot = uint32(target + (uint32(k) * uint32(pitch) + uint32(i)) * uint32(4))
        at = start + int64(k) * stride_k + int64(i) * stride_i
        # The last pass may reach past K; what it reads there has to be zero. A turn may copy more than that.
        past = min(int32(left + int32(in_a_pass - 1)), int32(depth)) if left > int32(0) else int32(0)
        while k < past:
            for group in range(0, narrow, PAD):
                inside = k < left and group + i < int32(vectors)
                valid = uint32(4) if inside else uint32(0)
                cp_async_4_zfill(uint32(slot + uint32(4 * group)), source, at + int64(group) * stride_i, valid)
            k = int32(k + int32(turn_k))
            slot = uint32(slot + uint32(4 * turn_k * pitch))
            at += int64(turn_k) * stride_k

    return copy_chunk


def halving_sums(count: int, furthest: int, nearest: int):
    """An intrinsic ``(sums, lane)`` that adds ``count`` sums of each lane over lanes ``furthest``, … ``nearest`` apart.

    With each step a lane sends half of its sums to its partner and keeps the other half, until one is left, which both
    keep. It returns the number of the lane's first sum in the end; the next ones follow, all at the front of ``sums``.
    """
    from numba_gemm.compile.numba_source import intrinsic
    from numba_gemm.fp32.v8_intrinsics import FLOAT, UINT32_TYPE, LocalArray, assembly, i32

    @intrinsic
    def add_lanes(typingctx, sums, lane):
        def codegen(context, builder, signature, args):
            sums = LocalArray(context, builder, signature.args[0], args[0])
            values, place, distance = [sums[s] for s in range(count)], i32(0), furthest
            while distance >= nearest:
                text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
                upper = builder.icmp_unsigned("!=", builder.and_(args[1], i32(distance)), i32(0))
                half = len(values) // 2
                low, high = (values[:half], values[half:]) if half else (values, values)
                values = []
                for kept, given in zip(low, high, strict=True):
                    sent = builder.select(upper, kept, given)
                    received = assembly(builder, text, "=f,f", [sent], FLOAT)
                    values.append(builder.fadd(builder.select(upper, given, kept), received))
                place = builder.add(place, builder.select(upper, i32(half), i32(0)))
                distance //= 2
            for s, value in enumerate(values):
                sums[s] = value
            return place

        return UINT32_TYPE(sums, UINT32_TYPE), codegen

    return add_lanes


def build_sum():
    """Adds the partial sums of each output: slice s of a block takes parts s, s + SLICES, …, then slices in order."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output
    from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents, griddepcontrol_wait

    all_sums = SUM_LANES * SUM_SLICES

    def thin_sum(P, C, J, NARROW, parts, c_stride_i, c_stride_j, alpha, beta, stride_c):
        griddepcontrol_wait()  # the parts are there
        griddepcontrol_launch_dependents()
        sums = cuda.shared.array(all_sums, float32)
        batch = int64(cuda.blockIdx.z)
        thread = uint32(cuda.threadIdx.x)
        lane = thread % uint32(SUM_LANES)
        output = uint32(uint32(cuda.blockIdx.x) * uint32(SUM_LANES) + lane)
        outputs = uint32(J * NARROW)
        value = float32(0)
        if output < outputs:
            for part in range(thread // uint32(SUM_LANES), parts, uint32(SUM_SLICES)):
                value += P[(batch * int64(parts) + int64(part)) * int64(outputs) + int64(output)]
        sums[thread] = value
        cuda.syncthreads()  # every slice's sum is there
        if thread < uint32(SUM_LANES) and output < outputs:
            for part in unroll(1, SUM_SLICES):
                value += sums[uint32(thread + uint32(part * SUM_LANES))]
            i, j = output // J, output % J
            index = batch * stride_c + int64(i) * c_stride_i + int64(j) * c_stride_j
            store_output(C, index, value, alpha, beta)

    return thin_sum
