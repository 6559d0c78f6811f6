"""Clusters: ranks, their barrier, one another's shared memory, multicast; and the pool of registers."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_harness import execute, program

from numba_gemm import emulator

STORE = """
    .reg .b64 %out, %off; .reg .b32 %x, %at, %far, %rank, %other, %where, %width;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %where, %ctaid.x; mov.u32 %width, %ntid.x;
    mad.lo.u32 %where, %where, %width, %t;
    ld.param.u64 %out, [out]; mul.wide.u32 %off, %where, 4; add.u64 %out, %out, %off;
"""
ARRIVE = "barrier.cluster.arrive.aligned;"
WAIT = "barrier.cluster.wait.aligned;"
BOTH = f"{ARRIVE} {WAIT}"


def special(name, grid, cluster):
    out = np.zeros(int(np.prod(grid)), np.uint32)
    text = f"""
    .reg .b64 %out, %off; .reg .b32 %x, %y, %z, %nx, %ny;
    mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %nx, %nctaid.x; mov.u32 %ny, %nctaid.y;
    mad.lo.u32 %y, %z, %ny, %y; mad.lo.u32 %x, %y, %nx, %x;
    ld.param.u64 %out, [out]; mul.wide.u32 %off, %x, 4; add.u64 %out, %out, %off;
    mov.u32 %x, {name};
    st.global.u32 [%out], %x;
"""
    execute(program(text, ".param .u64 out"), [out], grid=grid, cluster=cluster, block=1)
    return out.reshape(grid[::-1])


def test_special_registers():
    grid, cluster = (4, 6, 2), (2, 3, 1)
    z, y, x = np.indices(grid[::-1])
    expected = {
        "%cluster_ctarank": y % 3 * 2 + x % 2, "%cluster_nctarank": 6, "%cluster_ctaid.x": x % 2,
        "%cluster_ctaid.y": y % 3, "%cluster_ctaid.z": 0, "%cluster_nctaid.y": 3, "%clusterid.x": x // 2,
        "%clusterid.y": y // 3, "%clusterid.z": z, "%nclusterid.x": 2, "%nclusterid.y": 2, "%nclusterid.z": 2,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_array_equal(special(name, grid, cluster), np.broadcast_to(value, grid[::-1]), name)


def test_without_clusters_every_block_is_one():
    assert special("%cluster_nctarank", (3, 1, 1), None).tolist() == [[[1, 1, 1]]]
    assert special("%clusterid.x", (3, 1, 1), None).tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize(
    ("grid", "cluster", "directives", "message"),
    [
        (3, 2, "", "whole number of clusters"),
        (32, 32, "", "more than 16"),
        (4, 4, ".reqnctapercluster 2, 1, 1", "reqnctapercluster"),
    ],
)
def test_launches_that_cannot_be(grid, cluster, directives, message):
    text = program("barrier.cluster.arrive; barrier.cluster.wait;", directives=directives)
    with pytest.raises(emulator.LaunchError, match=message):
        execute(text, grid=grid, cluster=cluster)


# Each block reads what its neighbour in the cluster wrote.
EXCHANGE = STORE + """
    mad.lo.u32 %at, %t, 4, %smem;
    st.shared.u32 [%at], %where;
    {first}
    xor.b32 %other, %rank, 1;
    {read}
    {second}
    st.global.u32 [%out], %x;
"""  # fmt: skip
READ = "mapa.shared::cluster.u32 %far, %at, %other; ld.shared::cluster.u32 %x, [%far];"


def exchange(first=BOTH, second=BOTH, read=READ, cluster=None, directives=".reqnctapercluster 2, 1, 1"):
    out = np.zeros(4 * 64, np.uint32)
    text = program(EXCHANGE.format(first=first, second=second, read=read), ".param .u64 out", directives=directives)
    execute(text, [out], grid=4, block=64, cluster=cluster)
    return out.reshape(4, 64)


EXPECTED = np.arange(256).reshape(4, 64)[[1, 0, 3, 2]]


def test_a_block_reads_its_neighbour_s_shared_memory():
    np.testing.assert_array_equal(exchange(), EXPECTED)
    np.testing.assert_array_equal(exchange(cluster=2, directives=""), EXPECTED)


def test_generic_addresses_of_the_cluster():
    read = """.reg .b64 %generic; cvt.u64.u32 %generic, %at; cvta.shared.u64 %generic, %generic;
    mapa.u64 %generic, %generic, %other; ld.u32 %x, [%generic];"""
    np.testing.assert_array_equal(exchange(read=read), EXPECTED)


def test_the_rank_of_an_address():
    read = "mapa.shared::cluster.u32 %far, %at, %other; getctarank.shared::cluster.u32 %x, %far;"
    np.testing.assert_array_equal(exchange(read=read), np.array([[1], [0], [1], [0]]) + np.zeros((1, 64)))


def test_a_block_s_own_addresses_have_its_rank():
    offset = exchange(read="mov.u32 %x, %smem;", directives="")[0, 0]
    ranks = np.repeat([[0], [1], [0], [1]], 64, axis=1)
    own = (ranks << 24) + offset
    np.testing.assert_array_equal(exchange(read="mov.u32 %x, %smem;"), own)
    mapped = "mapa.shared::cluster.u32 %x, %smem, %rank;"
    np.testing.assert_array_equal(exchange(read=mapped), own)
    np.testing.assert_array_equal(exchange(read="getctarank.shared::cluster.u32 %x, %smem;"), ranks)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"first": ""}, emulator.SharedMemoryRace),
        ({"first": "bar.sync 0;"}, emulator.SharedMemoryRace),
        ({"first": "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"}, emulator.SharedMemoryRace),
        ({"second": ""}, emulator.EarlyExit),
        ({"second": ARRIVE}, emulator.EarlyExit),
        ({"first": WAIT}, emulator.DivergentBarrier),
        ({"first": ARRIVE + ARRIVE}, emulator.DivergentBarrier),
        ({"read": READ.replace("%other;", "2;")}, emulator.InvalidOperand),
        ({"read": "add.u32 %far, %at, 0x5000000; ld.shared::cluster.u32 %x, [%far];"}, emulator.OutOfBounds),
        ({"read": READ.replace("ld.shared::cluster", "ld.shared")}, emulator.OutOfBounds),
        ({"read": "and.b32 %far, %at, 0xFFFFFF; ld.shared.u32 %x, [%far];"}, emulator.OutOfBounds),
        ({"second": "setp.eq.u32 %first, %rank, 0; @%first bra SKIP; " + BOTH + " SKIP: bar.sync 0;"},
         (emulator.EarlyExit, emulator.Deadlock)),
    ],
)  # fmt: skip
def test_cluster_hazards(options, kind):
    with pytest.raises(kind):
        exchange(**options)


def test_a_write_to_the_neighbour_races_with_its_own_read():
    write = "mapa.shared::cluster.u32 %far, %at, %other; st.shared::cluster.u32 [%far], 5; {} ld.shared.u32 %x, [%at];"
    assert (exchange(read=write.format(BOTH)) == 5).all()
    with pytest.raises(emulator.SharedMemoryRace):
        exchange(read=write.format(""))


def test_a_cluster_s_deadlock():
    with pytest.raises(emulator.Deadlock, match="cluster has 64 of 128 threads, waiting at lines"):
        exchange(second="setp.eq.u32 %first, %rank, 0; @!%first bra HANG; " + BOTH + " ret; HANG: bar.sync 1, 128;")


def test_chosen_blocks_bring_their_clusters():
    out = np.zeros(4 * 64, np.uint32)
    text = program(EXCHANGE.format(first=BOTH, second=BOTH, read=READ), ".param .u64 out")
    report = emulator.launch(text, 4, 64, [out], cluster=2, blocks=[3])
    assert report.blocks_run == 2
    np.testing.assert_array_equal(out.reshape(4, 64)[2:], EXPECTED[2:])
    assert not out[:128].any()


# --- mbarriers and bulk copies across a cluster

REMOTE = STORE + """
    .reg .pred %done, %lead, %writer;
    setp.eq.u32 %lead, %rank, 0;
    setp.eq.and.u32 %writer, %rank, 1, %first;
    @%first mbarrier.init.shared::cta.b64 [%smem+1016], 2;
    @%first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %far, %smem, 0;
    @%writer st.shared::cluster.u32 [%far], 7;
    @%first mbarrier.arrive.{semantics}.cluster.shared::cluster.b64 _, [%far+1016];
    @!%lead bra END;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%smem+1016], 0;
    @!%done bra WAIT;
    ld.shared.u32 %x, [%smem];
    st.global.u32 [%out], %x;
END:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""  # fmt: skip


def test_remote_arrivals_order_remote_writes():
    """Rank 1 writes to rank 0 and arrives at its mbarrier."""
    out = np.zeros(64, np.uint32)
    directives = ".reqnctapercluster 2, 1, 1"
    execute(program(REMOTE.format(semantics="release"), ".param .u64 out", directives=directives), [out], grid=2)
    assert out.tolist() == [7] * 32 + [0] * 32
    with pytest.raises(emulator.SharedMemoryRace, match="cluster's block 1 wrote"):
        execute(program(REMOTE.format(semantics="relaxed"), ".param .u64 out", directives=directives), [out], grid=2)


def test_an_exit_while_a_neighbour_may_still_arrive():
    """Rank 0 does not wait for the phase at whose mbarrier rank 1 arrives."""
    text = STORE + """
    @%first mbarrier.init.shared::cta.b64 [%smem+1024], 2;
    @%first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %far, %smem, 0;
    @%first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far+1024];
    {end}
"""  # fmt: skip
    params = {"params": ".param .u64 out", "shared": 1040, "directives": ".reqnctapercluster 2, 1, 1"}
    execute(program(text.format(end=BOTH), **params), [np.zeros(64, np.uint32)], grid=2)
    with pytest.raises(emulator.EarlyExit, match=r"end with barrier\.cluster|which has exited"):
        execute(program(text.format(end=""), **params), [np.zeros(64, np.uint32)], grid=2)


def test_st_async_completes_bytes_at_the_neighbour():
    text = STORE + """
    .reg .pred %done; .reg .b32 %bar;
    @%first mbarrier.init.shared::cta.b64 [%smem+1024], 1;
    @%first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+1024], 128;
    xor.b32 %other, %rank, 1;
    mad.lo.u32 %at, %t, 4, %smem;
    mapa.shared::cluster.u32 %far, %at, %other;
    mapa.shared::cluster.u32 %bar, %smem, %other;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%far], %where, [%bar+1024];
    {wait}
    ld.shared.u32 %x, [%at];
    st.global.u32 [%out], %x;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""  # fmt: skip
    wait = """
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%smem+1024], 0;
    @!%done bra WAIT;"""
    params = {"params": ".param .u64 out", "shared": 1040, "directives": ".reqnctapercluster 2, 1, 1"}
    out = np.zeros(64, np.uint32)
    execute(program(text.format(wait=wait), **params), [out], grid=2)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    with pytest.raises(emulator.UnwaitedAsyncCopy):
        execute(program(text.format(wait=""), **params), [out], grid=2)


def test_a_bulk_copy_from_block_to_block():
    """Each block sends its words to the neighbour; it may neither leave nor overwrite them before they have arrived."""
    text = STORE + """
    .reg .pred %done; .reg .b32 %bar;
    @%first mbarrier.init.shared::cta.b64 [%smem+1016], 1;
    @%first fence.mbarrier_init.release.cluster;
    mad.lo.u32 %at, %t, 4, %smem;
    st.shared.u32 [%at], %where;
    {fence}
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+1016], 128;
    xor.b32 %other, %rank, 1;
    mapa.shared::cluster.u32 %far, %smem, %other;
    @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%far+512], [%smem], 128, [%far+1016];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%smem+1016], 0;
    @!%done bra WAIT;
    {late}
    ld.shared.u32 %x, [%at+512];
    st.global.u32 [%out], %x;
    {end}
"""  # fmt: skip
    options = {"params": ".param .u64 out", "directives": ".reqnctapercluster 2, 1, 1"}
    good = {"fence": "fence.proxy.async.shared::cta;", "late": "", "end": BOTH}
    out = np.zeros(64, np.uint32)
    execute(program(text.format(**good), **options), [out], grid=2)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    for change, kind in [
        ({"fence": ""}, emulator.MissingProxyFence),
        ({"late": "st.shared.u32 [%at], 5;"}, emulator.UnfinishedAsyncRead),
        ({"end": ""}, emulator.EarlyExit),
    ]:
        with pytest.raises(kind):
            execute(program(text.format(**{**good, **change}), **options), [out], grid=2)


# Each block loads half of a tile and multicasts it to both.
MULTICAST = STORE + """
    .reg .pred %done; .reg .b64 %map; .reg .b32 %row; .reg .b16 %mask;
    @%first mbarrier.init.shared::cta.b64 [%smem+2048], 1;
    @%first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+2048], {bytes};
    mov.b64 %map, map; cvta.param.u64 %map, %map;
    shl.b32 %row, %rank, 3;
    mad.lo.u32 %at, %rank, 1024, %smem;
    mov.u16 %mask, {mask};
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%at], [%map, {{0, %row}}], [%smem+2048], %mask;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem+2048], 0;
    @!%done bra WAIT;
    mad.lo.u32 %at, %t, 4, %smem;
    ld.shared.u32 %x, [%at];
    st.global.u32 [%out], %x;
    {end}
"""  # fmt: skip


def multicast(mask="3", nbytes=2048, end=BOTH, swizzle="none"):
    machine = emulator.Machine("sm_90a")
    array = np.arange(512, dtype=np.uint32).reshape(16, 32)
    out = np.zeros(1024, np.uint32)
    at_out = machine.place(out)
    blob = machine.tensor_map(machine.place(array), "u32", (32, 16), (128,), (32, 8), swizzle=swizzle)
    text = program(
        MULTICAST.format(mask=mask, bytes=nbytes, end=end), ".param .align 64 .b8 map[128], .param .u64 out",
        shared=2064, directives=".reqnctapercluster 2, 1, 1",
    )  # fmt: skip
    report = execute(text, [blob, np.uint64(at_out)], grid=2, block=512, machine=machine)
    machine.fetch(at_out, out)
    return out.reshape(2, 512), report


def test_multicast():
    out, report = multicast()
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(512), (2, 512)))
    assert (report.counters.tensor_loads, report.counters.tensor_load_bytes) == (2, 4096)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"mask": "1"}, (emulator.Deadlock, emulator.MbarrierMisuse)),
        ({"mask": "4"}, emulator.InvalidOperand),
        ({"mask": "0"}, emulator.InvalidOperand),
        ({"nbytes": 1024}, (emulator.MbarrierMisuse, emulator.UnwaitedAsyncCopy, emulator.UninitialisedRead)),
    ],
)
def test_multicast_hazards(options, kind):
    with pytest.raises(kind):
        multicast(**options)


# --- registers

POOL = """
    .reg .pred %producer; .reg .b32 %x;
    setp.ge.u32 %producer, %t, 256;
    @%producer bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {more};
    bra END;
PRODUCER:
    {less}
END:
"""


def pool(more=240, less="setmaxnreg.dec.sync.aligned.u32 24;", directives=".maxntid 384, 1, 1\n.minnctapersm 1"):
    text = program(POOL.format(more=more, less=less), directives=directives)
    return execute(text, block=384)


def test_consumers_take_what_the_producer_gives_back():
    """384 threads start with 168 registers each: 168 · 3 = 24 + 2 · 240."""
    pool()
    pool(more=168)
    pool(less="setmaxnreg.dec.sync.aligned.u32 40;", more=232)


def test_more_than_the_pool_has_is_a_deadlock():
    with pytest.raises(emulator.Deadlock, match=r"waits at line .* for 248 registers a thread: it has 168"):
        pool(more=248)
    with pytest.raises(emulator.Deadlock):
        pool(less="")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"more": 160}, emulator.InvalidOperand),
        ({"less": "setmaxnreg.dec.sync.aligned.u32 176;"}, emulator.InvalidOperand),
    ],
)
def test_register_counts_in_the_wrong_direction(options, kind):
    with pytest.raises(kind):
        pool(**options)


@pytest.mark.parametrize(
    ("statement", "directives"),
    [
        ("setmaxnreg.inc.sync.aligned.u32 20;", ".maxntid 128, 1, 1"),
        ("setmaxnreg.inc.sync.aligned.u32 100;", ".maxntid 128, 1, 1"),
        ("setmaxnreg.inc.sync.aligned.u32 264;", ".maxntid 128, 1, 1"),
        ("setmaxnreg.inc.sync.aligned.u32 128;", ""),
    ],
)
def test_register_counts_that_cannot_be(statement, directives):
    with pytest.raises(emulator.PtxSyntaxError, match="setmaxnreg"):
        emulator.compile_program(program(statement, directives=directives))


def test_elected_lanes_and_dependent_launches():
    """elect.sync names one lane of each warp; griddepcontrol has nothing to wait for."""
    out = np.zeros(64, np.uint32)
    body = STORE + """
    .reg .pred %leader;
    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    elect.sync %x|%leader, -1;
    selp.u32 %x, 1, 0, %leader;
    st.global.u32 [%out], %x;
"""  # fmt: skip
    execute(program(body, ".param .u64 out"), [out], block=64)
    assert out.reshape(2, 32).sum(axis=1).tolist() == [1, 1]
