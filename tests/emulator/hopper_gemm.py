"""A small Hopper product in PTX, for the emulator's tests: TMA, mbarriers, `wgmma`, a TMA store; persistent.

One producer warp fills a ring of stages; each consumer warpgroup multiplies 64 rows of the tile, keeps one `wgmma`
group in flight and gives the stage before it back. Tiles are (64 · consumers) x 128 x 64.

| barrier | arrivals a phase | who |
|---|---|---|
| full[stage] | 1, with the bytes of both boxes | producer |
| empty[stage] | one for each consumer warpgroup | its first thread |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_gemm import emulator

BLOCK_N = 128
BLOCK_K = 64
ROW = 128  # bytes of a row of a swizzled box


def layout(stages: int, consumers: int) -> dict[str, int]:
    """Offsets in dynamic shared memory, and its size."""
    a_bytes, b_bytes = 64 * consumers * ROW, BLOCK_N * ROW
    c = stages * (a_bytes + b_bytes)
    full = c + consumers * 64 * 2 * BLOCK_N
    return {
        "a_bytes": a_bytes, "b_bytes": b_bytes, "b": stages * a_bytes, "c": c, "full": full,
        "empty": full + 8 * stages, "size": full + 16 * stages,
    }  # fmt: skip


def gemm(stages: int = 3, consumers: int = 2, element: str = "f16", b_major: str = "k") -> str:
    """The kernel's text. `b_major`: "k" takes B as N rows of K elements, "n" as K rows of N."""
    at = layout(stages, consumers)
    threads = 128 * consumers + 32
    accumulators = ", ".join(f"%acc{i}" for i in range(64))
    n_major = b_major == "n"
    transposed = int(n_major)
    # descriptors: offsets in units of 16 bytes, 128-byte swizzle
    a_fields = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    b_fields = 1 << 62 | (1024 >> 4) << 32 | ((64 * ROW) >> 4 if n_major else 1) << 16
    a_step, b_step = 2, (16 * ROW) >> 4 if n_major else 2
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    if n_major:
        b_loads = f"""
    {load} [%b_at], [%map_b, {{%col, %k}}], [%full];
    add.u32 %b_half, %b_at, {64 * ROW};
    add.u32 %col_half, %col, 64;
    {load} [%b_half], [%map_b, {{%col_half, %k}}], [%full];"""
    else:
        b_loads = f"\n    {load} [%b_at], [%map_b, {{%k, %col}}], [%full];"
    products = "".join(
        f"""
    wgmma.mma_async.sync.aligned.m64n128k16.f32.{element}.{element}
        {{{accumulators}}},
        %desc_a, %desc_b, %more, 1, 1, 0, {transposed};
    mov.pred %more, %true;
    add.u64 %desc_a, %desc_a, {a_step};
    add.u64 %desc_b, %desc_b, {b_step};"""
        for _ in range(BLOCK_K // 16)
    )
    stores = "".join(
        f"""
    cvt.rn.{element}x2.f32 %pair, %acc{4 * j + 2 * half + 1}, %acc{4 * j + 2 * half};
    st.shared.b32 [%c_row+{16 * j + 8 * 2 * BLOCK_N * half}], %pair;"""
        for j in range(BLOCK_N // 8)
        for half in range(2)
    )
    barriers = "".join(
        f"""
    mbarrier.init.shared::cta.b64 [%smem+{at["full"] + 8 * s}], 1;
    mbarrier.init.shared::cta.b64 [%smem+{at["empty"] + 8 * s}], {consumers};"""
        for s in range(stages)
    )
    advance = f"""
    add.u32 %stage, %stage, 1;
    setp.eq.u32 %wrap, %stage, {stages};
    selp.b32 %stage, 0, %stage, %wrap;
    @%wrap xor.b32 %phase, %phase, 1;"""
    where_is_tile = f"""
    div.u32 %tile_row, %tile, %tiles_n;
    mul.lo.u32 %tile_col, %tile_row, %tiles_n;
    sub.u32 %tile_col, %tile, %tile_col;
    mul.lo.u32 %row, %tile_row, {64 * consumers};
    mul.lo.u32 %col, %tile_col, {BLOCK_N};"""
    return f""".version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry gemm(
    .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128], .param .align 64 .b8 map_c[128],
    .param .u32 k_tiles, .param .u32 tiles_n, .param .u32 tiles)
.maxntid {threads}, 1, 1
.minnctapersm 1
{{
    .reg .f32 %acc<64>;
    .reg .b32 %smem, %thread, %stage, %phase, %tile, %tiles, %tiles_n, %k_tiles, %step, %blocks;
    .reg .b32 %tile_row, %tile_col, %row, %col, %col_half, %k, %a_at, %b_at, %b_half, %full, %empty, %given_back;
    .reg .b32 %group, %name, %in_group, %pair, %c_at, %c_row, %lane, %t, %warp, %previous;
    .reg .b64 %map_a, %map_b, %map_c, %desc_a, %desc_b, %wide;
    .reg .pred %first, %producer, %leader, %done, %end, %wrap, %more, %true, %chief, %later;
    mov.u32 %thread, %tid.x;
    mov.u32 %smem, smem;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %tile, %ctaid.x;
    ld.param.u32 %tiles, [tiles];
    ld.param.u32 %tiles_n, [tiles_n];
    ld.param.u32 %k_tiles, [k_tiles];
    mov.u32 %stage, 0;
    mov.u32 %phase, 0;

    // --- barriers
    setp.eq.u32 %first, %thread, 0;
    @!%first bra INITIALISED;{barriers}
    fence.mbarrier_init.release.cluster;
INITIALISED:
    bar.sync 0;
    setp.ge.u32 %producer, %thread, {128 * consumers};
    @%producer bra PRODUCER;

    // --- consumers
    setp.eq.u32 %true, 0, 0;
    shr.u32 %group, %thread, 7;
    and.b32 %in_group, %thread, 127;
    setp.eq.u32 %chief, %in_group, 0;
    add.u32 %name, %group, 1;
    mad.lo.u32 %c_at, %group, {64 * 2 * BLOCK_N}, %smem;
    add.u32 %c_at, %c_at, {at["c"]};
    shr.u32 %warp, %in_group, 5;
    and.b32 %lane, %in_group, 31;
    shr.u32 %row, %lane, 2;
    and.b32 %t, %lane, 3;
    mad.lo.u32 %row, %warp, 16, %row;
    mad.lo.u32 %c_row, %row, {2 * BLOCK_N}, %c_at;
    mad.lo.u32 %c_row, %t, 4, %c_row;
NEXT_TILE:
    setp.ge.u32 %end, %tile, %tiles;
    @%end bra CONSUMED;
    mov.u32 %step, 0;
    mov.u32 %previous, 0;
    setp.ne.u32 %more, 0, 0;
NEXT_STEP:
    mad.lo.u32 %full, %stage, 8, %smem;
    add.u32 %full, %full, {at["full"]};
WAIT_FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%full], %phase;
    @!%done bra WAIT_FULL;
    mad.lo.u32 %a_at, %stage, {at["a_bytes"]}, %smem;
    mad.lo.u32 %a_at, %group, {64 * ROW}, %a_at;
    mad.lo.u32 %b_at, %stage, {at["b_bytes"]}, %smem;
    add.u32 %b_at, %b_at, {at["b"]};
    shr.u32 %a_at, %a_at, 4;
    shr.u32 %b_at, %b_at, 4;
    cvt.u64.u32 %desc_a, %a_at;
    or.b64 %desc_a, %desc_a, {a_fields};
    cvt.u64.u32 %desc_b, %b_at;
    or.b64 %desc_b, %desc_b, {b_fields};
    wgmma.fence.sync.aligned;{products}
    wgmma.commit_group.sync.aligned;
    // the group before this one is done: its stage goes back
    wgmma.wait_group.sync.aligned 1;
    setp.ne.u32 %later, %step, 0;
    and.pred %later, %later, %chief;
    mad.lo.u32 %given_back, %previous, 8, %smem;
    @%later mbarrier.arrive.shared::cta.b64 _, [%given_back+{at["empty"]}];
    mov.u32 %previous, %stage;{advance}
    add.u32 %step, %step, 1;
    setp.lt.u32 %more, %step, %k_tiles;
    @%more bra NEXT_STEP;
    wgmma.wait_group.sync.aligned 0;
    mad.lo.u32 %given_back, %previous, 8, %smem;
    @%chief mbarrier.arrive.shared::cta.b64 _, [%given_back+{at["empty"]}];

    // --- the tile of C, by way of shared memory
    @%chief cp.async.bulk.wait_group.read 0;
    bar.sync %name, 128;{stores}
    fence.proxy.async.shared::cta;
    bar.sync %name, 128;
    @!%chief bra STORED;{where_is_tile}
    mad.lo.u32 %row, %group, 64, %row;
    mov.b64 %wide, map_c;
    cvta.param.u64 %map_c, %wide;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map_c, {{%col, %row}}], [%c_at];
    cp.async.bulk.commit_group;
STORED:
    add.u32 %tile, %tile, %blocks;
    bra NEXT_TILE;
CONSUMED:
    @%chief cp.async.bulk.wait_group 0;
    ret;

    // --- producer
PRODUCER:
    elect.sync _|%leader, -1;
    @!%leader ret;
    mov.b64 %wide, map_a;
    cvta.param.u64 %map_a, %wide;
    mov.b64 %wide, map_b;
    cvta.param.u64 %map_b, %wide;
    mov.u32 %phase, 1;
LOAD_TILE:
    setp.ge.u32 %end, %tile, %tiles;
    @%end bra PRODUCED;{where_is_tile}
    mov.u32 %step, 0;
LOAD_STEP:
    mad.lo.u32 %empty, %stage, 8, %smem;
    add.u32 %full, %empty, {at["full"]};
    add.u32 %empty, %empty, {at["empty"]};
WAIT_EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%empty], %phase;
    @!%done bra WAIT_EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {at["a_bytes"] + at["b_bytes"]};
    mul.lo.u32 %k, %step, {BLOCK_K};
    mad.lo.u32 %a_at, %stage, {at["a_bytes"]}, %smem;
    mad.lo.u32 %b_at, %stage, {at["b_bytes"]}, %smem;
    add.u32 %b_at, %b_at, {at["b"]};
    {load} [%a_at], [%map_a, {{%k, %row}}], [%full];{b_loads}{advance}
    add.u32 %step, %step, 1;
    setp.lt.u32 %done, %step, %k_tiles;
    @%done bra LOAD_STEP;
    add.u32 %tile, %tile, %blocks;
    bra LOAD_TILE;
PRODUCED:
    ret;
}}
"""


def replaced(text: str, old: str, new: str, count: int = 1) -> str:
    """The text with the first `count` of an expected statement changed."""
    assert old in text, old
    return text.replace(old, new, count)


def run(
    text: str,
    a: np.ndarray,
    b: np.ndarray,
    *,
    stages: int = 3,
    consumers: int = 2,
    element: str = "f16",
    b_major: str = "k",
    blocks: int = 0,
    machine: emulator.Machine | None = None,
) -> tuple[np.ndarray, Any]:
    """A · B with A (M x K) and B (K x N), of 16-bit elements; returns C and the report."""
    machine = machine or emulator.Machine("sm_90a")
    (m, k), n = a.shape, b.shape[1]
    c = np.zeros((m, n), a.dtype)
    stored_b = np.ascontiguousarray(b if b_major == "n" else b.T)
    at_a, at_b = machine.place(np.ascontiguousarray(a)), machine.place(stored_b)
    at_c = machine.place(c, written=False)
    b_dims, b_box = ((n, k), (64, BLOCK_K)) if b_major == "n" else ((k, n), (BLOCK_K, BLOCK_N))
    block_m = 64 * consumers
    maps = [
        machine.tensor_map(at_a, element, (k, m), (2 * k,), (BLOCK_K, block_m), swizzle="128B"),
        machine.tensor_map(at_b, element, b_dims, (2 * b_dims[0],), b_box, swizzle="128B"),
        machine.tensor_map(at_c, element, (n, m), (2 * n,), (BLOCK_N, 64)),
    ]
    tiles_m, tiles_n = -(-m // block_m), -(-n // BLOCK_N)
    tiles = tiles_m * tiles_n
    numbers = [np.uint32(-(-k // BLOCK_K)), np.uint32(tiles_n), np.uint32(tiles)]
    report = machine.launch(
        text, blocks or tiles, 128 * consumers + 32, [*maps, *numbers], shared_bytes=layout(stages, consumers)["size"]
    )
    machine.fetch(at_c, c)
    return c, report
