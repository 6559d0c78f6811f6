"""mbarrier objects: counting, phases, who comes to know what, and what is a misuse."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_harness import execute, program

from numba_gemm import emulator

INIT = """
    .reg .pred %done; .reg .b64 %state, %out, %off; .reg .b32 %x, %at;
    @%first mbarrier.init.shared::cta.b64 [%smem], {count};
    bar.sync 0;
"""
STORE = """
    ld.param.u64 %out, [out]; mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off;
    st.global.u32 [%out], %x;
"""
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], 0;
    @!%done bra WAIT;
"""


def run(body, *, count=64, threads=64, shared=1024):
    out = np.zeros(threads, np.uint32)
    execute(program(INIT.format(count=count) + body, ".param .u64 out", shared=shared), [out], block=threads)
    return out


# Each thread passes its value on to thread t ^ 32 (of the other warp) by way of shared memory and an mbarrier.
EXCHANGE = """
    mad.lo.u32 %at, %t, 4, %smem;
    st.shared.u32 [%at+64], %t;
    {arrive}
    {wait}
    xor.b32 %at, %at, 128;
    ld.shared.u32 %x, [%at+64];
"""


def exchange(arrive="mbarrier.arrive.shared::cta.b64 %state, [%smem];", wait=WAIT, count=64):
    text = EXCHANGE.replace("[%at+64]", "[%at+512]").format(arrive=arrive, wait=wait)
    return run(text + STORE, count=count)


def test_arrivals_release_and_waits_acquire():
    np.testing.assert_array_equal(exchange(), np.arange(64) ^ 32)


def test_a_relaxed_arrival_publishes_nothing():
    with pytest.raises(emulator.SharedMemoryRace):
        exchange("mbarrier.arrive.relaxed.cta.shared::cta.b64 %state, [%smem];")


def test_without_the_wait_nothing_is_known():
    with pytest.raises(emulator.SharedMemoryRace):
        exchange(wait="")


def test_waiting_for_the_other_parity_is_no_wait():
    with pytest.raises(emulator.SharedMemoryRace):
        exchange(wait=WAIT.replace(", 0;", ", 1;"), count=128)


def test_arrivals_have_counts():
    np.testing.assert_array_equal(
        exchange("mbarrier.arrive.shared::cta.b64 %state, [%smem], 3;", count=192), np.arange(64) ^ 32
    )


@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_waits_by_state(form):
    wait = f"""
WAIT:
    mbarrier.{form}.shared::cta.b64 %done, [%smem], %state;
    @!%done bra WAIT;
"""
    np.testing.assert_array_equal(exchange(wait=wait), np.arange(64) ^ 32)


def test_a_thread_may_poll_while_others_work():
    """Warp 0 counts its vain polls until warp 1, which first counts to 100, arrives."""
    body = """
    .reg .b32 %polls; .reg .pred %other;
    setp.ge.u32 %other, %t, 32;
    mov.u32 %x, 0;
    @%other bra WORK;
POLL:
    mbarrier.test_wait.parity.shared::cta.b64 %done, [%smem], 0;
    @%done bra STORE;
    add.u32 %x, %x, 1;
    bra POLL;
WORK:
    add.u32 %x, %x, 1;
    setp.lt.u32 %done, %x, 100;
    @%done bra WORK;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
STORE:
"""
    out = run(body + STORE, count=32)
    assert (out[32:] == 100).all()


def test_the_pending_count_of_a_state():
    body = """
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
    mbarrier.pending_count.b64 %x, %state;
"""
    # the state is that from before the arrival; lanes arrive together
    assert set(run(body + STORE, count=100).tolist()) <= set(range(37, 101))


def test_transaction_bytes_hold_a_phase_open():
    body = """
    @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%smem], 48;
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
    mbarrier.test_wait.shared::cta.b64 %done, [%smem], %state;
    selp.u32 %x, 1, 0, %done;
    @%done trap;
    bar.sync 0;
    @%first mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%smem], 48;
"""
    assert (run(body + WAIT + "mov.u32 %x, 7;" + STORE, count=64) == 7).all()


def test_many_phases_alternate_in_parity():
    body = """
    .reg .b32 %phase, %n;
    mov.u32 %phase, 0; mov.u32 %n, 0;
NEXT:
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], %phase;
    @!%done bra WAIT;
    xor.b32 %phase, %phase, 1;
    add.u32 %n, %n, 1;
    setp.lt.u32 %done, %n, 7;
    @%done bra NEXT;
    mov.u32 %x, %n;
"""
    assert (run(body + STORE) == 7).all()


def test_a_dropped_arrival_is_not_expected_again():
    body = """
    .reg .pred %upper;
    setp.ge.u32 %upper, %t, 32;
    @%upper bra DROP;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
    bra WAIT;
DROP:
    mbarrier.arrive_drop.shared::cta.b64 %state, [%smem];
    mov.u32 %x, 1;
    bra END;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], 0;
    @!%done bra WAIT;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], 1;
    @!%done bra AGAIN;
    mov.u32 %x, 2;
END:
"""
    assert run(body + STORE).tolist() == [2] * 32 + [1] * 32


def test_an_invalidated_mbarrier_is_memory_again():
    body = """
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
""" + WAIT + """
    bar.sync 0;
    @%first mbarrier.inval.shared::cta.b64 [%smem];
    bar.sync 0;
    @%first st.shared.u32 [%smem], 5;
    bar.sync 0;
    ld.shared.u32 %x, [%smem];
"""  # fmt: skip
    assert (run(body + STORE) == 5).all()


def test_generic_addresses():
    body = """
    .reg .b64 %generic;
    cvt.u64.u32 %generic, %smem;
    cvta.shared.u64 %generic, %generic;
    mbarrier.arrive.b64 %state, [%generic];
WAIT:
    mbarrier.try_wait.parity.b64 %done, [%generic], 0;
    @!%done bra WAIT;
    mov.u32 %x, 3;
"""
    assert (run(body + STORE) == 3).all()


# Lane 0 of warp 0 arrives for its warp, whose lanes have written; warp 1 reads.
FOR_THE_WARP = """
    .reg .pred %upper, %lane0;
    setp.ge.u32 %upper, %t, 32;
    setp.eq.u32 %lane0, %t, 0;
    mad.lo.u32 %at, %lane, 4, %smem;
    @%upper bra WAIT;
    st.shared.u32 [%at+512], %t;
    {sync}
    @%lane0 mbarrier.arrive.shared::cta.b64 %state, [%smem];
    ret;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], 0;
    @!%done bra WAIT;
    ld.shared.u32 %x, [%at+512];
"""


def test_one_lane_arrives_for_a_warp_after_a_warp_barrier():
    out = run(FOR_THE_WARP.format(sync="bar.warp.sync -1;") + STORE, count=1)
    assert out[32:].tolist() == list(range(32))


def test_one_lane_alone_publishes_only_its_own_accesses():
    with pytest.raises(emulator.SharedMemoryRace) as caught:
        run(FOR_THE_WARP.format(sync="") + STORE, count=1)
    assert caught.value.thread != (32, 0, 0), "lane 0's own word was published"


@pytest.mark.parametrize(
    ("body", "count", "message"),
    [
        ("mbarrier.arrive.shared::cta.b64 %state, [%smem+8];", 64, "no mbarrier"),
        ("mbarrier.arrive.shared::cta.b64 %state, [%smem], 2;", 1, "2 arrivals where phase 0 has 1 of 1"),
        ("mov.u32 %x, 0; mbarrier.arrive.shared::cta.b64 %state, [%smem], %x;", 64, "0 arrivals"),
        ("@%first mbarrier.init.shared::cta.b64 [%smem], 1;", 64, "not invalidated"),
        ("@%first mbarrier.init.shared::cta.b64 [%smem+64], 0;", 64, "arrival count of 0"),
        ("@%first mbarrier.init.shared::cta.b64 [%smem+64], 1048576;", 64, "arrival count of 1048576"),
        ("@%first st.shared.u32 [%smem+4], 5;", 64, "bytes of an mbarrier"),
        ("ld.shared.u32 %x, [%smem];", 64, "bytes of an mbarrier"),
        ("@%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%smem], 1048575;"
         "@%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%smem], 1;", 64, "count of bytes becomes 1048576"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %state, [%smem], 1;", 32, "noComplete"),
        ("@%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%smem], 16;"
         "@%first mbarrier.arrive.shared::cta.b64 %state, [%smem];", 1, "waits for 16 bytes"),
        ("@%first mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%smem], 16;"
         "@%first mbarrier.arrive.shared::cta.b64 %state, [%smem];", 1, "16 bytes more than phase 0 expected"),
    ],
)  # fmt: skip
def test_misuse(body, count, message):
    with pytest.raises(emulator.MbarrierMisuse, match=message) as caught:
        run(body, count=count)
    assert caught.value.space == "shared"
    assert caught.value.thread is not None


def test_use_without_order_after_the_initialisation():
    text = """
    .reg .b64 %state;
    @%first mbarrier.init.shared::cta.b64 [%smem], 64;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
"""
    with pytest.raises(emulator.MbarrierMisuse, match="nothing orders this after the initialisation by thread"):
        execute(program(text), block=64)


def test_a_misaligned_mbarrier():
    with pytest.raises(emulator.Misaligned):
        run("mbarrier.arrive.shared::cta.b64 %state, [%smem+4];")


def test_a_deadlock_tells_every_barrier_s_state():
    body = """
    @%first mbarrier.init.shared::cta.b64 [%smem+8], 5;
    bar.sync 0;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%smem+8], 256;
""" + WAIT  # fmt: skip
    with pytest.raises(emulator.Deadlock) as caught:
        run(body)
    message = str(caught.value)
    assert "mbarrier at shared 0x0 of block 0 is in phase 0 (parity 0) with 64 of 64 arrivals and 0 bytes" in message
    assert "mbarrier at shared 0x8 of block 0 is in phase 0 (parity 0) with 4 of 5 arrivals and 256 bytes" in message
    assert "64 threads at line" in message
    assert "wait for parity 0" in message
    assert "try_wait" in caught.value.text
    with pytest.raises(emulator.Deadlock, match="threads of 2 more blocks wait as well") as caught:
        execute(program(INIT.format(count=65) + WAIT), grid=3, block=64)
    assert str(caught.value).count("mbarrier at") == 1


def test_many_mbarriers():
    """More than there is room for at first, set up while a phase and a named barrier are half arrived at."""
    setup = "".join(
        f"@%first mbarrier.init.shared::cta.b64 [%smem+{8 * i}], 1;\n"
        f"@%first mbarrier.arrive.shared::cta.b64 _, [%smem+{8 * i}];\n"
        for i in range(1, 40)
    )
    body = f"""
    .reg .pred %upper;
    setp.ge.u32 %upper, %t, 32;
    mad.lo.u32 %at, %t, 4, %smem;
    @%upper bra UPPER;
    st.shared.u32 [%at+512], %t;
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
    bar.arrive 1, 64;
    {setup}
    mov.u32 %x, %t;
    bra END;
UPPER:
    bar.sync 1, 64;
    ld.shared.u32 %x, [%at+384];
    mbarrier.arrive.shared::cta.b64 %state, [%smem];
END:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem], 0;
    @!%done bra END;
    st.shared.u32 [%at+512], %x;
    ld.shared.u32 %x, [%at+512];
"""
    assert run(body + STORE).tolist() == [*range(32), *range(32)]


def test_operations_are_counted():
    report = execute(
        program(INIT.format(count=64) + "mbarrier.arrive.shared::cta.b64 %state, [%smem];" + WAIT, ".param .u64 out"),
        [np.zeros(64, np.uint32)],
        block=64,
    )
    # an init, and for each warp an arrival and a wait
    assert report.counters.mbarrier_operations == 1 + 2 + 2
