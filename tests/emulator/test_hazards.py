"""Every class of hazard: the right kernel runs, the same with one barrier, wait or guard removed is caught."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator

# Each thread passes its value on through shared memory: thread t reads what thread t ^ 32 (another warp) or t ^ 1
# (the same warp) wrote.
EXCHANGE = """
    .shared .align 16 .b8 buffer[1024];
    .reg .b32 %t, %x, %slot, %other; .reg .b64 %out, %off;
    mov.u32 %t, %tid.x;
    shl.b32 %slot, %t, 2;
    mov.u32 %x, buffer;
    add.u32 %slot, %slot, %x;
    st.shared.u32 [%slot], %t;
    {first}
    xor.b32 %other, %slot, {distance};
    ld.shared.u32 %x, [%other];
    {second}
    st.shared.u32 [%slot], %x;
    ld.param.u64 %out, [out];
    mul.wide.u32 %off, %t, 4;
    add.u64 %out, %out, %off;
    st.global.u32 [%out], %x;
"""


def exchange(first, second, distance):
    text = harness.kernel_text(EXCHANGE.format(first=first, second=second, distance=distance), ".param .u64 out")
    out = np.zeros(64, np.uint32)
    emulator.launch(text, 1, 64, [out])
    return out


def test_exchange_between_warps_with_both_barriers():
    np.testing.assert_array_equal(exchange("bar.sync 0;", "bar.sync 0;", 128), np.arange(64) ^ 32)


@pytest.mark.parametrize(
    ("first", "second", "verb"), [("", "bar.sync 0;", "read of"), ("bar.sync 0;", "", "overwrite of")]
)
def test_exchange_without_a_barrier_is_a_race(first, second, verb):
    with pytest.raises(emulator.SharedMemoryRace, match=verb) as caught:
        exchange(first, second, 128)
    assert caught.value.space == "shared"
    assert "shared" in caught.value.text
    assert caught.value.block == (0, 0, 0)
    assert caught.value.thread is not None


def test_lanes_of_a_warp_are_ordered_by_warp_barriers():
    np.testing.assert_array_equal(exchange("bar.warp.sync -1;", "bar.warp.sync -1;", 4), np.arange(64) ^ 1)


def test_warp_barriers_do_not_order_other_warps():
    with pytest.raises(emulator.SharedMemoryRace):
        exchange("bar.warp.sync -1;", "bar.warp.sync -1;", 128)


def test_lanes_of_a_warp_without_a_warp_barrier_race():
    with pytest.raises(emulator.SharedMemoryRace):
        exchange("", "bar.warp.sync -1;", 4)


def test_any_sync_instruction_orders_lanes():
    shuffle = "shfl.sync.idx.b32 %other, %t, 0, 31, -1;"
    np.testing.assert_array_equal(exchange(shuffle, shuffle, 4), np.arange(64) ^ 1)


def test_neighbouring_halves_of_a_word_are_no_conflict():
    body = """
    .shared .align 4 .b8 buffer[128];
    .reg .b32 %t, %s; .reg .b16 %h;
    mov.u32 %t, %tid.x; shl.b32 %s, %t, 1; mov.u16 %h, 7;
    st.shared.u16 [%s], %h;
    ld.shared.u16 %h, [%s];
    """
    emulator.launch(harness.kernel_text(body), 1, 64, [])


@pytest.mark.parametrize(("value", "ok"), [("7", True), ("%t", False)])
def test_lanes_that_write_one_word_in_one_instruction_must_agree(value, ok):
    body = f"""
    .shared .align 4 .b8 buffer[4];
    .reg .b32 %t;
    mov.u32 %t, %tid.x;
    st.shared.u32 [0], {value};
    """
    text = harness.kernel_text(body)
    if ok:
        emulator.launch(text, 1, 32, [])
    else:
        with pytest.raises(emulator.SharedMemoryRace, match="same instruction"):
            emulator.launch(text, 1, 32, [])


def test_warps_that_write_one_word_race_even_if_they_agree():
    body = ".shared .align 4 .b8 buffer[4]; st.shared.u32 [0], 7;"
    with pytest.raises(emulator.SharedMemoryRace):
        emulator.launch(harness.kernel_text(body), 1, 64, [])


def test_atomics_do_not_race_but_a_plain_read_does():
    body = """
    .shared .align 4 .b8 buffer[4];
    .reg .b32 %t, %x; .reg .pred %p; .reg .b64 %out;
    mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
    @%p st.shared.u32 [0], 0;
    bar.sync 0;
    atom.shared.add.u32 %x, [0], 1;
    {barrier}
    ld.shared.u32 %x, [0];
    ld.param.u64 %out, [out];
    @%p st.global.u32 [%out], %x;
    """
    out = np.zeros(1, np.uint32)
    emulator.launch(harness.kernel_text(body.format(barrier="bar.sync 0;"), ".param .u64 out"), 1, 128, [out])
    assert out[0] == 128
    with pytest.raises(emulator.SharedMemoryRace):
        emulator.launch(harness.kernel_text(body.format(barrier=""), ".param .u64 out"), 1, 128, [out])


# Warps 0 and 1 fill, warps 2 and 3 use: a named barrier of 128 threads at which the first two only arrive.
PRODUCER = """
    .shared .align 4 .b8 buffer[256];
    .reg .b32 %t, %s, %x; .reg .pred %p; .reg .b64 %out, %off;
    mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 64;
    @%p bra USE;
    shl.b32 %s, %t, 2;
    st.shared.u32 [%s], %t;
    {arrive}
    ret;
USE:
    {sync}
    sub.u32 %t, %t, 64; shl.b32 %s, %t, 2;
    ld.shared.u32 %x, [%s];
    ld.param.u64 %out, [out]; mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off;
    st.global.u32 [%out], %x;
"""


def producer(arrive, sync):
    out = np.zeros(64, np.uint32)
    emulator.launch(harness.kernel_text(PRODUCER.format(arrive=arrive, sync=sync), ".param .u64 out"), 1, 128, [out])
    return out


def test_named_barrier_orders_those_who_arrive_before_those_who_wait():
    np.testing.assert_array_equal(producer("bar.arrive 1, 128;", "bar.sync 1, 128;"), np.arange(64))


def test_named_barrier_left_out_is_a_race():
    with pytest.raises((emulator.SharedMemoryRace, emulator.UninitialisedRead)):
        producer("", "")


def test_wait_for_an_arrival_that_never_comes_is_a_deadlock():
    with pytest.raises(emulator.Deadlock, match="barrier 1"):
        producer("", "bar.sync 1, 128;")


def test_wrong_count_of_a_named_barrier_is_a_deadlock():
    with pytest.raises(emulator.Deadlock, match="of 5 warps"):
        producer("bar.arrive 1, 160;", "bar.sync 1, 160;")


DIVERGENT = """
    .reg .b32 %t; .reg .pred %p;
    mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, {threshold};
    @%p bra INSIDE;
    bra AFTER;
INSIDE:
    bar.sync 0;
AFTER:
    bar.sync 0;
"""


def test_barrier_reached_by_half_a_warp_is_divergent():
    with pytest.raises(emulator.DivergentBarrier) as caught:
        emulator.launch(harness.kernel_text(DIVERGENT.format(threshold=16)), 1, 32, [])
    assert "bar.sync" in caught.value.text


def test_barrier_reached_by_all_is_not_divergent():
    emulator.launch(harness.kernel_text(DIVERGENT.format(threshold=32)), 1, 32, [])


def test_threads_that_left_early_are_not_waited_for():
    body = """
    .reg .b32 %t; .reg .pred %p;
    mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 40;
    @%p ret;
    bar.sync 0;
    """
    emulator.launch(harness.kernel_text(body), 2, 96, [])


def test_shuffle_without_some_of_its_lanes_is_divergent():
    body = """
    .reg .b32 %t, %x; .reg .pred %p;
    mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 16;
    @%p bra OTHER;
    shfl.sync.bfly.b32 %x, %t, 1, 31, -1;
    bar.warp.sync {mask};
    bra DONE;
OTHER:
    bar.sync 0;
DONE:
    """
    with pytest.raises(emulator.DivergentBarrier, match="shfl"):
        emulator.launch(harness.kernel_text(body.format(mask="-1")), 1, 32, [])


GUARDED = """
    .reg .b32 %t, %n, %x; .reg .pred %p; .reg .b64 %a, %off;
    mov.u32 %t, %tid.x; ld.param.u32 %n, [n];
    setp.ge.u32 %p, %t, %n;
    {guard}
    ld.param.u64 %a, [a]; mul.wide.u32 %off, %t, 4; add.u64 %a, %a, %off;
    ld.global.u32 %x, [%a];
    add.u32 %x, %x, 1;
    st.global.u32 [%a], %x;
"""


def test_bounds_guard():
    a = np.arange(50, dtype=np.uint32)
    params = ".param .u64 a, .param .u32 n"
    emulator.launch(harness.kernel_text(GUARDED.format(guard="@%p ret;"), params), 1, 64, [a, np.uint32(50)])
    np.testing.assert_array_equal(a, np.arange(50) + 1)
    before = a.copy()
    with pytest.raises(emulator.OutOfBounds) as caught:
        emulator.launch(harness.kernel_text(GUARDED.format(guard=""), params), 1, 64, [a, np.uint32(50)])
    assert caught.value.thread == (50, 0, 0)
    assert caught.value.space == "global"
    assert caught.value.text.startswith("ld.global.u32")
    np.testing.assert_array_equal(a, before, err_msg="a launch that fails leaves its arrays alone")


@pytest.mark.parametrize(
    ("space", "body"),
    [
        ("shared", ".shared .align 16 .b8 s[64]; st.shared.u32 [64], 1;"),
        ("shared", ".shared .align 16 .b8 s[64]; .reg .b64 %g; cvta.shared.u64 %g, s; st.u32 [%g+64], 1;"),
        ("local", ".local .align 16 .b8 s[16]; .reg .b32 %x; st.local.u32 [s+16], 1;"),
        ("global", ".reg .b64 %g; mov.u64 %g, 0; st.global.u32 [%g], 1;"),
    ],
)
def test_out_of_bounds_in_each_space(space, body):
    with pytest.raises(emulator.OutOfBounds) as caught:
        emulator.launch(harness.kernel_text(body), 1, 32, [])
    assert caught.value.space == space


@pytest.mark.parametrize(("offset", "ok"), [(16, True), (4, False), (8, False), (2, False)])
@pytest.mark.parametrize("space", ["shared", "global", "local"])
def test_misaligned_vector_access(space, offset, ok):
    declare = {
        "shared": ".shared .align 16 .b8 s[64]; .reg .b64 %s; mov.u64 %s, s;",
        "local": ".local .align 16 .b8 s[64]; .reg .b64 %s; mov.u64 %s, s;",
        "global": ".reg .b64 %s; ld.param.u64 %s, [a];",
    }[space]
    body = f"{declare} .reg .f32 %x; mov.f32 %x, 0f3F800000; st.{space}.v4.f32 [%s+{offset}], {{%x, %x, %x, %x}};"
    text = harness.kernel_text(body, ".param .u64 a")
    if ok:
        emulator.launch(text, 1, 1, [np.zeros(16, np.float32)])
    else:
        with pytest.raises(emulator.Misaligned) as caught:
            emulator.launch(text, 1, 1, [np.zeros(16, np.float32)])
        assert caught.value.space == space


def test_uninitialised_shared_memory():
    body = ".shared .align 4 .b8 s[64]; .reg .b32 %x; st.shared.u32 [4], 1; ld.shared.u32 %x, [{offset}];"
    emulator.launch(harness.kernel_text(body.format(offset=4)), 1, 1, [])
    with pytest.raises(emulator.UninitialisedRead) as caught:
        emulator.launch(harness.kernel_text(body.format(offset=8)), 1, 1, [])
    assert (caught.value.space, caught.value.address) == ("shared", 8)


def test_uninitialised_global_memory():
    machine = emulator.Machine()
    address = machine.alloc(64)
    machine.write(address, np.zeros(4, np.float32))
    body = ".reg .b64 %a; .reg .f32 %x; ld.param.u64 %a, [a]; ld.global.f32 %x, [%a+{offset}];"
    machine.launch(harness.kernel_text(body.format(offset=12), ".param .u64 a"), 1, 1, [np.uint64(address)])
    with pytest.raises(emulator.UninitialisedRead) as caught:
        machine.launch(harness.kernel_text(body.format(offset=16), ".param .u64 a"), 1, 1, [np.uint64(address)])
    assert (caught.value.space, caught.value.address) == ("global", address + 16)
    store = ".reg .b64 %a; ld.param.u64 %a, [a]; st.global.f32 [%a+16], 0f3F800000;" + body.format(offset=16).replace(
        ".reg .b64 %a; ", ""
    )
    machine.launch(harness.kernel_text(store, ".param .u64 a"), 1, 1, [np.uint64(address)])


# Each thread copies 16 bytes; after the wait it reads its own, after the barrier a neighbour's.
COPY = """
    .shared .align 16 .b8 s[2048];
    .reg .b32 %t, %slot, %x; .reg .b64 %a, %off, %out;
    mov.u32 %t, %tid.x; shl.b32 %slot, %t, 4;
    ld.param.u64 %a, [a]; mul.wide.u32 %off, %t, 16; add.u64 %a, %a, %off;
    cp.async.cg.shared.global [%slot], [%a], 16;
    cp.async.commit_group;
    {wait}
    {barrier}
    xor.b32 %slot, %slot, {distance};
    ld.shared.u32 %x, [%slot];
    ld.param.u64 %out, [out]; mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off;
    st.global.u32 [%out], %x;
"""


def copy(wait, barrier, distance):
    a = np.arange(64 * 4, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    text = harness.kernel_text(
        COPY.format(wait=wait, barrier=barrier, distance=distance), ".param .u64 a, .param .u64 out"
    )
    emulator.launch(text, 1, 64, [a, out])
    return out


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_async_copy_waited_for(wait):
    np.testing.assert_array_equal(copy(wait, "bar.sync 0;", 512), (np.arange(64) ^ 32) * 4)
    np.testing.assert_array_equal(copy(wait, "", 0), np.arange(64) * 4)


@pytest.mark.parametrize(
    ("wait", "barrier", "distance"),
    [
        ("", "bar.sync 0;", 0),  # never waited for, not even by the issuer
        ("cp.async.wait_group 1;", "bar.sync 0;", 512),  # one group too many left in flight
        ("cp.async.wait_group 0;", "", 512),  # waited for, but nobody told the others
        ("", "bar.sync 0; cp.async.wait_group 0;", 512),  # the barrier before the wait
    ],
)
def test_async_copy_with_a_wait_or_barrier_missing(wait, barrier, distance):
    with pytest.raises(emulator.UnwaitedAsyncCopy) as caught:
        copy(wait, barrier, distance)
    assert caught.value.space == "shared"


@pytest.mark.parametrize("which", range(2))
def test_pipelined_kernel_with_a_barrier_removed(which):
    """A compiled, double-buffered kernel: either of the loop's two barriers is needed."""
    text = harness.fixture("gemm_tensor.O3")
    start = text.index(".entry mma_async")
    loop = text.index("wait_group", start)
    places = []
    at = text.index("bar.sync", loop)
    while at >= 0:
        places.append(at)
        at = text.find("bar.sync", at + 1)
    chosen = places[which]
    broken = text[:chosen] + "//" + text[chosen:]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 128)).astype(np.float16), rng.standard_normal((128, 128)).astype(np.float16)
    c = np.zeros((128, 128), np.float32)
    args = [a, b, c, np.int32(128), np.int32(128), np.int32(128)]
    emulator.launch(text, 1, 256, args, kernel="mma_async", arch="sm_80")
    with pytest.raises((emulator.UnwaitedAsyncCopy, emulator.SharedMemoryRace)):
        emulator.launch(broken, 1, 256, args, kernel="mma_async", arch="sm_80")


def test_pipelined_kernel_with_a_wait_removed():
    text = harness.fixture("gemm_tensor.O3")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 128)).astype(np.float16), rng.standard_normal((128, 128)).astype(np.float16)
    args = [a, b, np.zeros((128, 128), np.float32), np.int32(128), np.int32(128), np.int32(128)]
    for wait in ("cp.async.wait_group 1;", "cp.async.wait_group 0;"):
        assert wait in text
        with pytest.raises(emulator.UnwaitedAsyncCopy):
            emulator.launch(text.replace(wait, ""), 1, 256, args, kernel="mma_async", arch="sm_80")


def test_spinning_on_another_thread_does_not_hang():
    body = """
    .reg .b32 %t, %x; .reg .pred %p, %q; .reg .b64 %a;
    mov.u32 %t, %tid.x; ld.param.u64 %a, [a]; setp.eq.u32 %p, %t, 40;
    @%p bra RELEASE;
SPIN:
    {sleep}
    ld.volatile.global.u32 %x, [%a];
    setp.eq.u32 %q, %x, 0;
    @%q bra SPIN;
    ret;
RELEASE:
    st.volatile.global.u32 [%a], 1;
    """
    for sleep in ("", "nanosleep.u32 20;"):
        flag = np.zeros(1, np.uint32)
        emulator.launch(harness.kernel_text(body.format(sleep=sleep), ".param .u64 a"), 1, 64, [flag])
        assert flag[0] == 1


def test_a_loop_without_end_meets_the_limit():
    machine = emulator.Machine(limit=1000)
    with pytest.raises(emulator.StepLimit):
        machine.launch(harness.kernel_text("AGAIN: bra AGAIN;"), 1, 32, [])


def test_trap():
    with pytest.raises(emulator.Trap):
        emulator.launch(harness.kernel_text("trap;"), 1, 32, [])


def test_an_atomic_on_local_memory_is_out_of_bounds():
    """A generic address can turn out to be local when the kernel runs, and there the ISA has no atomics."""
    text = harness.kernel_text(
        ".local .align 4 .b8 own[16]; .reg .b64 %own; .reg .b32 %old;"
        " mov.u64 %own, own; cvta.local.u64 %own, %own; atom.add.u32 %old, [%own], 1;"
    )
    with pytest.raises(emulator.OutOfBounds, match="atomic on local memory"):
        emulator.launch(text, 1, 32, [])
