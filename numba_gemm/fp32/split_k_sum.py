"""split_k_sum: adds the parts of tiles whose k several blocks of v8 shared, and finishes C.

Input       a workspace of BM×BN parts, four neighbours in the order that v8 stores them in. Block x of v8 leaves its
            part of tile t in slot x + t, so the parts of a tile lie one behind the other, in the order of k.
Geometry    256 threads. A thread adds up four neighbouring outputs. Where a tile has many parts, eight slices of 32
            threads add up an eighth of them each, and the first slice then adds the eight: in order, always the same.
Each turn   eight 16-byte loads are under way before the first is added.
Bound by    reading the parts from L2, and the launch itself.

A tile that one block computed whole is left alone: v8 has stored it already.
"""

from __future__ import annotations

from numba_gemm.spec import Config, Geometry, KernelSpec, make_config

THREADS, WARP = 256, 32
#: Slices of a tile's parts where a tile has more than this many.
SLICES, MANY_PARTS = 8, 16
ROUND = 8  # parts that a thread loads at once


def form(block_m: int, block_n: int, group_m: int, c_width: int, parts: int) -> Config:
    """The form for tiles of v8 of which a tile has at most ``parts`` parts."""
    slices = SLICES if parts > MANY_PARTS else 1
    return make_config(block_m=block_m, block_n=block_n, group_m=group_m, c_width=c_width, slices=slices)


def blocks_of_tile(config: Config) -> int:
    """Blocks that add up one tile."""
    p = {key: int(value) for key, value in config}
    return -(-p["block_m"] * p["block_n"] // 4 // (THREADS // p["slices"]))


def build(block_m: int, block_n: int, group_m: int, c_width: int, slices: int):
    from numba import float32, int64, uint32

    from numba_gemm.compile.numba_source import cuda
    from numba_gemm.compile.unroll import unroll
    from numba_gemm.fp32 import v8_intrinsics as ptx
    from numba_gemm.fp32 import v8_sums as sums
    from numba_gemm.fp32.v8_kernel import origin_of_tile
    from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents, griddepcontrol_wait

    lanes = THREADS // slices
    groups = block_m * block_n // 4
    blocks = -(-groups // lanes)
    part_bytes = 4 * block_m * block_n
    exchange_words = 4 * THREADS
    shared_address, global_address = ptx.shared_address, ptx.global_address
    clear, add_partials = sums.clear(4), sums.add_partials(ROUND)
    send_sums, add_sums = sums.send_sums(4, 0), sums.add_sums(4, 0)
    store_tile = sums.store_tile(ptx.ThreadTile((0,), (0, 1, 2, 3)))
    # The 128 outputs of a warp are neighbours, of one row or, in narrow tiles, of two or four.
    by_rows, turns = c_width == 1, range(0, 128, WARP)
    places = tuple((at // block_n, at % block_n) for at in turns)
    store_rows = sums.store_rows(ptx.RowTile(4, 4, (0,), tuple(4 * at for at in turns), (places,), lanes // WARP))

    def split_k_sum(
        workspace, C, M, N, ldc, alpha, beta, stride_c, split_tiles, split_blocks, per_block, stages_in_k
    ):  # fmt: skip
        griddepcontrol_wait()  # the parts are there
        griddepcontrol_launch_dependents()
        exchange = shared_address(cuda.shared.array(exchange_words, float32, alignment=16))
        sums = cuda.local.array(4, float32)
        thread = uint32(cuda.threadIdx.x)
        batch = int64(uint32(cuda.blockIdx.z))
        tile = uint32(uint32(cuda.blockIdx.x) // uint32(blocks))
        group = uint32(uint32(cuda.blockIdx.x) % uint32(blocks) * uint32(lanes) + thread % uint32(lanes))
        slice_of_parts = thread // uint32(lanes)

        # The blocks of v8 that have a part of this tile, and this slice's share of them.
        begin = uint32(tile * stages_in_k)
        first = uint32(begin // per_block)
        last = uint32(uint32(begin + stages_in_k - uint32(1)) // per_block)
        parts = uint32(last - first + uint32(1))
        mine = uint32(parts * slice_of_parts // uint32(slices))
        end = uint32(parts * uint32(slice_of_parts + uint32(1)) // uint32(slices))

        if parts > uint32(1):
            clear(sums)
            slot = batch * int64(uint32(split_blocks + split_tiles)) + int64(uint32(first + tile + mine))
            address = global_address(workspace) + slot * int64(part_bytes) + int64(group) * int64(16)
            while mine < end:
                if group < uint32(groups):
                    add_partials(address, int64(part_bytes), uint32(end - mine), sums)
                address += int64(ROUND * part_bytes)
                mine = uint32(mine + uint32(ROUND))
            if slices > 1:
                send_sums(uint32(exchange + thread * uint32(16)), sums)
                cuda.syncthreads()  # all slices' sums are there
                for other in unroll(1, slices):
                    if slice_of_parts == uint32(0):
                        add_sums(uint32(exchange + uint32(thread + uint32(other * lanes)) * uint32(16)), sums)
            if slice_of_parts == uint32(0) and group < uint32(groups):
                tile_row, tile_column = origin_of_tile(tile, M, N, block_m, block_n, group_m)
                lane = thread % uint32(WARP)
                if by_rows:
                    group = uint32(group - lane)  # the warp's first one
                row = int64(uint32(tile_row + group // uint32(block_n // 4)))
                column = int64(uint32(tile_column + group % uint32(block_n // 4) * uint32(4)))
                if by_rows:
                    column += int64(lane)
                address = global_address(C) + int64(4) * (batch * stride_c + row * ldc + column)
                rows, columns = int64(M) - row, int64(N) - column
                if by_rows:
                    put = uint32(exchange + thread * uint32(16))
                    get = uint32(exchange + uint32(thread - lane) * uint32(16) + (lane ^ uint32(1)) * uint32(4))
                    store_rows(put, get, address, int64(4) * ldc, rows, columns, alpha, beta, sums)
                else:
                    store_tile(address, int64(4) * ldc, rows, columns, alpha, beta, sums)

    return split_k_sum


def _geometry(config: Config) -> Geometry:
    slices = int(dict(config)["slices"])
    return Geometry((1, 4 * THREADS // slices, 1), THREADS)


SPEC = KernelSpec(
    name="split_k_sum",
    title="sum of parts",
    idea="adds the parts of tiles whose k was shared, in a fixed order",
    block_tile=(1, 4 * THREADS, 1),
    thread_tile=(1, 4),
    threads=THREADS,
    loads_per_fma=None,
    build=build,
    min_arch=(8, 0),
    configs=(form(128, 128, 8, 4, 2), form(128, 128, 8, 4, MANY_PARTS + 1)),
    abi="split_k_sum",
    helpers=(
        "numba_gemm.fp32.v8_intrinsics",
        "numba_gemm.fp32.v8_sums",
        "numba_gemm.fp32.v8_kernel",
        "numba_gemm.intrinsics.dependence",
    ),
    geometry_of=_geometry,
)
