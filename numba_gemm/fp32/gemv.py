"""gemv: a matrix times a vector, y = alpha · W · x + beta · y, at the speed of memory.

Idea        each element of the matrix is used once, so nothing is worth staging: every thread keeps several 16-byte
            loads of W in flight, straight into registers, and all that is left is to add up in a fixed order.
            M = 1 (x · B) and N = 1 (A · x) are the same product. What differs is how W, with J outputs of K terms
            each, lies in memory: two forms.

``along``   K is contiguous (A row-major, B column-major). A warp owns ROWS outputs; its lanes lie along K, and a load
            of x serves ROWS loads of W. Per pass a lane has ROWS · UNROLL loads of W in flight. The sums of the lanes
            meet by shuffles, those of the K_WARPS warps that share the outputs through shared memory.
``across``  the outputs are contiguous (A column-major, B row-major). LANES lanes side by side own 4 outputs each; the
            THREADS / LANES groups of a block take UNROLL rows of W each per pass. The groups of a warp meet by
            shuffles, the warps through shared memory.

Each term   1 FMA for 4 bytes of W: 0.5 FLOP/byte, so time is bytes over bandwidth and nothing else matters.
Few outputs K is split over blocks where the outputs alone don't fill the GPU; the partial sums go to a workspace and a
            second launch adds them up. Every sum has one order, so the same call gives the same bits.
Edges       what lies outside is read from the last place inside and counted as zero, or not stored: no load waits for
            a branch. ``vector_width=1`` is the form for odd widths and misaligned rows: 4-byte loads, four times as
            many of them.

Tried       (H200, µs; a kernel that only reads takes 202 for 28672×8192) ``across``: 16 lanes 206, 32 lanes 207, 8
            lanes 208; 4 lanes, whose 64 bytes are half a line, 273. Of 4096×4096, 8 lanes and all of K in a block 16.9,
            split over 8 parts, with a second launch, 18.1; 16 lanes, which make 64 blocks for 132 SMs, 18.0. ``along``:
            8 warps on the same 2 rows 203, each on its own rows 206; of 4096×4096 16.8 and 17.2. 8 rows a warp spill.
"""

from __future__ import annotations

from numba_gemm.compile.unroll import unroll

WARP = 32
FULL_WARP = 0xFFFFFFFF
#: The launch that adds partial sums: outputs side by side in a block, and slices of the sums.
SUM_LANES, SUM_SLICES = 32, 8


def build(form: str, blocks_per_sm: int, **parameters: int):
    """The device function of a form; the parameters are those of :func:`build_along` or :func:`build_across`."""
    return (build_along if form == "along" else build_across)(**parameters)


def build_along(vector_width: int, x_width: int, warps: int, k_warps: int, rows: int, unroll_k: int):
    """K contiguous. ``x_width`` 4: x is contiguous and 16-byte-aligned."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output
    from numba_gemm.intrinsics import (
        load_global,
        load_global_stream,
        load_global_stream_v4,
        load_global_v4,
        offset_pointer,
    )

    vectorised, x_vectorised = vector_width == 4, x_width == 4
    step_k = WARP * vector_width
    pass_k = step_k * unroll_k  # terms that a warp takes per pass
    block_k = pass_k * k_warps
    row_warps = warps // k_warps
    outputs = row_warps * rows
    all_sums, w_shape, x_shape, total_shape = (
        warps * rows,
        (unroll_k * rows, vector_width),
        (unroll_k, vector_width),
        (rows, vector_width),
    )

    def gemv_along(W, X, Y, J, K, k_per_split, ldw, incx, incy, alpha, beta, stride_w, stride_x, stride_y, stride_part):
        sums = cuda.shared.array(all_sums, float32)
        w_values = cuda.local.array(w_shape, float32)
        x_values = cuda.local.array(x_shape, float32)
        total = cuda.local.array(total_shape, float32)
        row_offsets = cuda.local.array(rows, int64)

        batch = int64(cuda.blockIdx.z)
        matrix = offset_pointer(W, batch * stride_w)
        vector = offset_pointer(X, batch * stride_x)
        thread = uint32(cuda.threadIdx.x)
        lane = thread % uint32(WARP)
        warp = thread // uint32(WARP)
        first = uint32(uint32(cuda.blockIdx.x) * uint32(outputs) + warp // uint32(k_warps) * uint32(rows))
        begin = uint32(uint32(cuda.blockIdx.y) * k_per_split)
        end = min(K, uint32(begin + k_per_split))
        for r in unroll(rows):
            for v in unroll(vector_width):
                total[r, v] = float32(0)
            row_offsets[r] = int64(min(uint32(first + uint32(r)), uint32(J - uint32(1)))) * ldw

        warp_k = uint32(begin + warp % uint32(k_warps) * uint32(pass_k))
        if first >= J:  # a warp without outputs has nothing to read
            warp_k = end
        for guarded in unroll(2):  # whole passes, then the rest of one
            while (warp_k < end) if guarded else (uint32(warp_k + uint32(pass_k)) <= end):
                for u in unroll(unroll_k):
                    at = uint32(warp_k + uint32(u * step_k) + lane * uint32(vector_width))
                    inside = at < end
                    if guarded:
                        at = min(at, uint32(end - uint32(vector_width)))
                    for r in unroll(rows):
                        if vectorised:
                            a, b, c, d = load_global_stream_v4(matrix, row_offsets[r] + int64(at))
                            w_values[u * rows + r, 0], w_values[u * rows + r, 1] = a, b
                            w_values[u * rows + r, 2], w_values[u * rows + r, 3] = c, d
                        else:
                            w_values[u * rows + r, 0] = load_global_stream(matrix, row_offsets[r] + int64(at))
                    if x_vectorised:
                        a, b, c, d = load_global_v4(vector, int64(at))
                        x_values[u, 0], x_values[u, 1], x_values[u, 2], x_values[u, 3] = a, b, c, d
                    else:
                        for v in unroll(vector_width):
                            x_values[u, v] = load_global(vector, (int64(at) + int64(v)) * incx)
                    if guarded:  # both factors, since zero times Inf or NaN isn't zero
                        for v in unroll(vector_width):
                            x_values[u, v] = x_values[u, v] if inside else float32(0)
                            for r in unroll(rows):
                                i = u * rows + r
                                w_values[i, v] = w_values[i, v] if inside else float32(0)
                for u in unroll(unroll_k):
                    for r in unroll(rows):
                        for v in unroll(vector_width):
                            total[r, v] += w_values[u * rows + r, v] * x_values[u, v]
                warp_k = uint32(warp_k + uint32(block_k))

        for r in unroll(rows):
            value = total[r, 0]
            if vectorised:
                value = (total[r, 0] + total[r, 1]) + (total[r, 2] + total[r, 3])
            for distance in unroll(5):
                value += cuda.shfl_xor_sync(FULL_WARP, value, 16 >> distance)
            if lane == uint32(r):
                sums[warp * uint32(rows) + uint32(r)] = value
        cuda.syncthreads()  # every warp's sums are there
        output = uint32(uint32(cuda.blockIdx.x) * uint32(outputs) + thread)
        if thread < uint32(outputs) and output < J:
            slot = uint32(thread // uint32(rows) * uint32(k_warps * rows) + thread % uint32(rows))
            value = sums[slot]
            for part in unroll(1, k_warps):
                value += sums[uint32(slot + uint32(part * rows))]
            y_offset = batch * stride_y + int64(cuda.blockIdx.y) * stride_part
            store_output(Y, y_offset + int64(output) * incy, value, alpha, beta)

    return gemv_along


def build_across(vector_width: int, warps: int, lanes: int, unroll_k: int):
    """Outputs contiguous."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output
    from numba_gemm.intrinsics import load_global, load_global_stream, load_global_stream_v4, offset_pointer

    vectorised = vector_width == 4
    groups = warps * WARP // lanes
    pass_k = groups * unroll_k
    outputs = lanes * vector_width
    all_sums, w_shape = warps * outputs, (unroll_k, vector_width)
    shuffles = (WARP // lanes).bit_length() - 1

    def gemv_across(
        W, X, Y, J, K, k_per_split, ldw, incx, incy, alpha, beta, stride_w, stride_x, stride_y, stride_part
    ):
        sums = cuda.shared.array(all_sums, float32)
        w_values = cuda.local.array(w_shape, float32)
        x_values = cuda.local.array(unroll_k, float32)
        total = cuda.local.array(vector_width, float32)

        batch = int64(cuda.blockIdx.z)
        vector = offset_pointer(X, batch * stride_x)
        thread = uint32(cuda.threadIdx.x)
        first = uint32(uint32(cuda.blockIdx.x) * uint32(outputs))
        column = uint32(first + thread % uint32(lanes) * uint32(vector_width))
        matrix = offset_pointer(W, batch * stride_w + int64(min(column, uint32(J - uint32(vector_width)))))
        begin = uint32(uint32(cuda.blockIdx.y) * k_per_split)
        end = min(K, uint32(begin + k_per_split))
        for v in unroll(vector_width):
            total[v] = float32(0)

        block_k = begin
        own = uint32(thread // uint32(lanes) * uint32(unroll_k))
        for guarded in unroll(2):  # whole passes, then the rest of one
            while (block_k < end) if guarded else (uint32(block_k + uint32(pass_k)) <= end):
                k = uint32(block_k + own)
                offset = int64(k) * ldw
                x_offset = int64(k) * incx
                for u in unroll(unroll_k):
                    at, x_at = offset + int64(u) * ldw, x_offset + int64(u) * incx
                    if guarded:
                        inside_k = min(uint32(k + uint32(u)), uint32(end - uint32(1)))
                        at, x_at = int64(inside_k) * ldw, int64(inside_k) * incx
                    if vectorised:
                        a, b, c, d = load_global_stream_v4(matrix, at)
                        w_values[u, 0], w_values[u, 1], w_values[u, 2], w_values[u, 3] = a, b, c, d
                    else:
                        w_values[u, 0] = load_global_stream(matrix, at)
                    x_values[u] = load_global(vector, x_at)
                    if guarded:  # both factors, since zero times Inf or NaN isn't zero
                        inside = uint32(k + uint32(u)) < end
                        x_values[u] = x_values[u] if inside else float32(0)
                        for v in unroll(vector_width):
                            w_values[u, v] = w_values[u, v] if inside else float32(0)
                for u in unroll(unroll_k):
                    for v in unroll(vector_width):
                        total[v] += w_values[u, v] * x_values[u]
                block_k = uint32(block_k + uint32(pass_k))

        lane = thread % uint32(WARP)
        warp = thread // uint32(WARP)
        for v in unroll(vector_width):
            value = total[v]
            for distance in unroll(shuffles):
                value += cuda.shfl_xor_sync(FULL_WARP, value, 16 >> distance)
            if lane < uint32(lanes):
                sums[warp * uint32(outputs) + lane * uint32(vector_width) + uint32(v)] = value
        cuda.syncthreads()  # every warp's sums are there
        for share in unroll(-(-outputs // (warps * WARP))):  # one turn unless a single warp owns 128 outputs
            mine = uint32(thread + uint32(share * warps * WARP))
            output = uint32(first + mine)
            if mine < uint32(outputs) and output < J:
                value = sums[mine]
                for part in unroll(1, warps):
                    value += sums[uint32(mine + uint32(part * outputs))]
                y_offset = batch * stride_y + int64(cuda.blockIdx.y) * stride_part
                store_output(Y, y_offset + int64(output) * incy, value, alpha, beta)

    return gemv_across


def build_sum():
    """Adds the partial sums of each output: slice s of a block takes parts s, s + SLICES, …, then slices in order."""
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.fp32.epilogue import store_output

    all_sums = SUM_LANES * SUM_SLICES

    def gemv_sum(P, Y, J, parts, incy, alpha, beta, stride_y):
        sums = cuda.shared.array(all_sums, float32)
        batch = int64(cuda.blockIdx.z)
        thread = uint32(cuda.threadIdx.x)
        lane = thread % uint32(SUM_LANES)
        output = uint32(uint32(cuda.blockIdx.x) * uint32(SUM_LANES) + lane)
        value = float32(0)
        if output < J:
            for part in range(thread // uint32(SUM_LANES), parts, uint32(SUM_SLICES)):
                value += P[(batch * int64(parts) + int64(part)) * int64(J) + int64(output)]
        sums[thread] = value
        cuda.syncthreads()  # every slice's sum is there
        if thread < uint32(SUM_LANES) and output < J:
            for part in unroll(1, SUM_SLICES):
                value += sums[uint32(thread + uint32(part * SUM_LANES))]
            store_output(Y, batch * stride_y + int64(output) * incy, value, alpha, beta)

    return gemv_sum
