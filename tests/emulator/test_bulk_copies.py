"""`cp.async.bulk`: what it moves, what orders it, and what it must not do."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_harness import BARRIER, WAIT, execute, program

from numba_gemm import emulator

# 512 bytes from global to shared memory, each word plus one, and back
ROUND_TRIP = (
    BARRIER
    + """
    ld.param.u64 %in, [in]; ld.param.u64 %out, [out];
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+{barrier}], 512;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%in], {size}, [%smem+{barrier}];
"""
    + "{wait}"
    + """
    mad.lo.u32 %at, %t, 4, %smem;
    ld.shared.u32 %x, [%at];
    add.u32 %x, %x, 1;
    st.shared.u32 [%at], %x;
    {fence}
    {barrier_after}
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 512;
    @%first cp.async.bulk.commit_group;
    {done}
"""
)
GOOD = {
    "barrier": 1024,
    "init_fence": "fence.mbarrier_init.release.cluster;",
    "size": 512,
    "wait": WAIT.format(barrier=1024),
    "fence": "fence.proxy.async.shared::cta;",
    "barrier_after": "bar.sync 0;",
    "done": "@%first cp.async.bulk.wait_group 0;",
}


def round_trip(data=None, offset=0, **changes):
    data = np.arange(128, dtype=np.uint32) if data is None else data
    out = np.zeros(128, np.uint32)
    text = program(ROUND_TRIP.format(**{**GOOD, **changes}), ".param .u64 in, .param .u64 out", shared=1040)
    machine = emulator.Machine("sm_90a")
    source, target = machine.alloc(data.nbytes + 64), machine.alloc(out.nbytes)
    machine.write(source, data)
    report = execute(text, [np.uint64(source + offset), np.uint64(target)], block=128, machine=machine)
    return machine.read(target, np.uint32, 128), report


def test_a_bulk_round_trip():
    out, report = round_trip()
    np.testing.assert_array_equal(out, np.arange(128) + 1)
    counters = report.counters
    assert (counters.bulk_loads, counters.bulk_load_bytes) == (1, 512)
    assert (counters.bulk_stores, counters.bulk_store_bytes) == (1, 512)


def test_the_block_s_own_memory_as_destination_and_hints():
    text = program(ROUND_TRIP.format(**GOOD), ".param .u64 in, .param .u64 out", shared=1040)
    hinted = text.replace("bulk.shared::cluster.global", "bulk.shared::cta.global")
    hinted = hinted.replace("complete_tx::bytes [%smem]", "complete_tx::bytes.L2::cache_hint [%smem]")
    hinted = hinted.replace("512, [%smem+1024];", "512, [%smem+1024], %policy;")
    hinted = hinted.replace(
        "ld.param.u64 %in, [in];",
        ".reg .b64 %policy; createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;"
        " ld.param.u64 %in, [in]; cp.async.bulk.prefetch.L2.global [%in], 512;",
    )
    hinted = hinted.replace(
        "bulk_group [%out], [%smem], 512;", "bulk_group.L2::cache_hint [%out], [%smem], 512, %policy;"
    )
    assert hinted.count("%policy") == 4
    data, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    execute(hinted, [data, out], block=128)
    np.testing.assert_array_equal(out, data + 1)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"init_fence": ""}, emulator.MissingProxyFence),
        ({"wait": ""}, emulator.UnwaitedAsyncCopy),
        # a copy lands at once here, so that a wait for the other parity sleeps; a GPU may as well let it pass too early
        ({"wait": WAIT.format(barrier=1024).replace(", 0;", ", 1;")}, emulator.Deadlock),
        ({"fence": ""}, emulator.MissingProxyFence),
        ({"fence": "@%first fence.proxy.async.shared::cta;"}, emulator.MissingProxyFence),
        ({"fence": "fence.proxy.async.global;"}, emulator.MissingProxyFence),
        ({"fence": "", "barrier_after": "bar.sync 0; fence.proxy.async;"}, emulator.MissingProxyFence),
        ({"barrier_after": ""}, emulator.SharedMemoryRace),
        ({"done": ""}, emulator.EarlyExit),
        ({"done": "@%first cp.async.bulk.wait_group 1;"}, emulator.EarlyExit),
        ({"done": "@%first cp.async.bulk.wait_group.read 0; st.shared.u32 [%at], 7;"}, emulator.UnfinishedAsyncRead),
        ({"done": "st.shared.u32 [%at], 7;"}, emulator.UnfinishedAsyncRead),
        ({"size": 528}, emulator.MbarrierMisuse),
        ({"size": 496}, emulator.Deadlock),
        ({"barrier": 512 - 8}, emulator.MbarrierMisuse),
    ],
)  # fmt: skip
def test_bulk_hazards(changes, kind):
    if changes.get("barrier"):
        changes["wait"] = WAIT.format(barrier=changes["barrier"])
    with pytest.raises(kind) as caught:
        round_trip(np.arange(144, dtype=np.uint32), **changes)
    assert caught.value.line > 0


@pytest.mark.parametrize("space", ["", ".shared::cta", ".shared::cluster"])
def test_every_proxy_fence_of_shared_memory(space):
    fence = f"fence.proxy.async{space};"
    np.testing.assert_array_equal(round_trip(fence=fence, init_fence=fence)[0], np.arange(128) + 1)


def test_waiting_for_the_reads_lets_everybody_write_after_a_barrier():
    out, _ = round_trip(done="@%first cp.async.bulk.wait_group.read 0; bar.sync 0; st.shared.u32 [%at], 7;")
    np.testing.assert_array_equal(out, np.arange(128) + 1)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"size": "%x", "init_fence": "mov.u32 %x, 500; fence.proxy.async;"}, emulator.InvalidOperand),
        ({"offset": 4}, emulator.Misaligned),
        ({"offset": 4096}, emulator.OutOfBounds),
        ({"offset": 16}, emulator.UninitialisedRead),
    ],
)
def test_bulk_operands(changes, kind):
    with pytest.raises(kind):
        round_trip(**changes)


def test_an_exit_before_the_load_has_landed():
    with pytest.raises(emulator.EarlyExit, match="nobody waited for phase 0"):
        round_trip(wait="ret;")


def test_groups_are_waited_for_in_order():
    """Two stores in two groups: after wait_group.read 1 the first buffer may be overwritten, not the second."""
    body = """
    .reg .b64 %out; .reg .b32 %x;
    ld.param.u64 %out, [out];
    @!%first ret;
    st.shared.u32 [%smem], 1; st.shared.u32 [%smem+4], 2; st.shared.u32 [%smem+8], 3; st.shared.u32 [%smem+12], 4;
    st.shared.v4.u32 [%smem+16], {{5, 6, 7, 8}};
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%out+16], [%smem+16], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 1;
    st.shared.u32 [%smem+{offset}], 9;
    cp.async.bulk.wait_group.read 0;
"""
    out = np.zeros(8, np.uint32)
    execute(program(body.format(offset=0), ".param .u64 out"), [out])
    np.testing.assert_array_equal(out, np.arange(8) + 1)
    with pytest.raises(emulator.UnfinishedAsyncRead):
        execute(program(body.format(offset=16), ".param .u64 out"), [out])


def test_a_load_over_what_was_read_needs_order():
    """Stage reuse: the second load overwrites what warp 1 read; a barrier between orders the two."""
    text = BARRIER + """
    .reg .pred %second;
    ld.param.u64 %in, [in];
    @%first mbarrier.init.shared::cta.b64 [%smem+520], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+512], 512;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%in], 512, [%smem+512];
""" + WAIT + """
    mad.lo.u32 %at, %t, 4, %smem;
    ld.shared.u32 %x, [%at];
    {order}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+520], 512;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%in], 512, [%smem+520];
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem+520], 0;
    @!%done bra AGAIN;
"""  # fmt: skip
    data = np.arange(128, dtype=np.uint32)
    good = {"barrier": 512, "init_fence": "fence.mbarrier_init.release.cluster;"}
    execute(program(text.format(order="bar.sync 0;", **good), ".param .u64 in"), [data], block=128)
    with pytest.raises(emulator.SharedMemoryRace, match="overwrite by a bulk copy of what warp"):
        execute(program(text.format(order="", **good), ".param .u64 in"), [data], block=128)


@pytest.mark.parametrize("fence", ["fence.proxy.async.shared::cta;", ""])
def test_stmatrix_is_an_ordinary_write(fence):
    """An epilogue's last steps: stmatrix, a proxy fence, a barrier, a store."""
    body = f"""
    .reg .b64 %out; .reg .b32 %at, %x<4>;
    ld.param.u64 %out, [out];
    mov.b32 %x0, %t; mov.b32 %x1, %t; mov.b32 %x2, %t; mov.b32 %x3, %t;
    mad.lo.u32 %at, %t, 16, %smem;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%at], {{%x0, %x1, %x2, %x3}};
    {fence}
    bar.sync 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 512;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""
    out = np.zeros(128, np.uint32)
    if fence:
        execute(program(body, ".param .u64 out"), [out])
        np.testing.assert_array_equal(out, np.tile(np.arange(32), 4))
    else:
        with pytest.raises(emulator.MissingProxyFence):
            execute(program(body, ".param .u64 out"), [out])


@pytest.mark.parametrize(
    ("wait", "fence", "kind"),
    [
        ("cp.async.wait_all;", "fence.proxy.async;", None),
        ("cp.async.wait_all;", "", emulator.MissingProxyFence),
        ("", "fence.proxy.async;", emulator.UnwaitedAsyncCopy),
    ],
)
def test_cp_async_is_an_ordinary_write(wait, fence, kind):
    body = f"""
    .reg .b64 %in, %out, %off; .reg .b32 %at;
    ld.param.u64 %in, [in]; ld.param.u64 %out, [out];
    mul.wide.u32 %off, %t, 16; add.u64 %in, %in, %off;
    mad.lo.u32 %at, %t, 16, %smem;
    cp.async.cg.shared.global [%at], [%in], 16;
    {wait}
    {fence}
    bar.sync 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 512;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""
    data, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    text = program(body, ".param .u64 in, .param .u64 out")
    if kind is None:
        execute(text, [data, out])
        np.testing.assert_array_equal(out, data)
    else:
        with pytest.raises(kind):
            execute(text, [data, out])


@pytest.mark.parametrize(
    "statement",
    [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd], [%smem], 16;",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%smem], [%rd, {0, 0, 0}], [%smem], {0};",
        "cp.async.mbarrier.arrive.shared.b64 [%smem];",
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
    ],
)
def test_what_is_not_modelled_says_so(statement):
    with pytest.raises(emulator.UnsupportedInstruction) as caught:
        emulator.compile_program(program(f".reg .b64 %rd; mov.u64 %rd, 0;\n{statement}"))
    assert statement.split(" ")[0].rstrip(";") in caught.value.text
