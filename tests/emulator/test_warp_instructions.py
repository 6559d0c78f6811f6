"""Shuffles, votes, matches and reductions, and divergence and reconvergence."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator

RNG = np.random.default_rng(3)


def shuffle_reference(mode, lane, b, c):
    """PTX ISA 9.7.9.6, for one lane: (source lane, predicate)."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    top = (lane & segment) | (clamp & ~segment)
    low = lane & segment
    if mode == "up":
        source, ok = lane - b, lane - b >= top
    elif mode == "down":
        source, ok = lane + b, lane + b <= top
    elif mode == "bfly":
        source, ok = lane ^ b, lane ^ b <= top
    else:
        source = low | (b & ~segment)
        ok = source <= top
    return (source if ok else lane), ok


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0, 0x1F, 0x180F, 0x1C1F, 0x181F])
@pytest.mark.parametrize("b", [0, 1, 5, 16, 31])
def test_shuffle(mode, b, c):
    x = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    d, e = harness.run_op(f"shfl.sync.{mode}.b32 %d|%e, %a, {b}, {c}, -1;", [x], [np.uint32, np.bool_])
    for i in range(64):
        source, ok = shuffle_reference(mode, i % 32, b, c)
        assert d[i] == x[i // 32 * 32 + source]
        assert e[i] == ok


def test_shuffle_by_a_different_amount_in_each_lane():
    x, index = RNG.integers(0, 2**32, 64, dtype=np.uint32), RNG.integers(0, 32, 64, dtype=np.uint32)
    (d,) = harness.run_op("shfl.sync.idx.b32 %d, %a, %b, 31, -1;", [x, index], [np.uint32])
    np.testing.assert_array_equal(d, x[np.arange(64) // 32 * 32 + index])


def test_votes():
    x = np.concatenate([np.zeros(32), np.ones(32), RNG.integers(0, 2, 64)]).astype(np.uint32)
    warps = x.reshape(-1, 32).astype(bool)
    expected = {"all": warps.all(1), "any": warps.any(1), "uni": warps.all(1) | ~warps.any(1)}
    for mode, values in expected.items():
        (d,) = harness.run_op(f"setp.ne.u32 %p, %a, 0; vote.sync.{mode}.pred %d, %p, -1;", [x], [np.bool_])
        np.testing.assert_array_equal(d, np.repeat(values, 32))
    (d,) = harness.run_op("setp.ne.u32 %p, %a, 0; vote.sync.ballot.b32 %d, !%p, -1;", [x], [np.uint32])
    np.testing.assert_array_equal(d, np.repeat((~warps * 2 ** np.arange(32)).sum(1), 32))


def test_ballot_within_a_mask_of_lanes():
    code = """
    .reg .b32 %l; mov.u32 %l, %laneid; setp.lt.u32 %p, %l, 8; mov.u32 %d, 0;
    @!%p bra SKIP;
    setp.ne.u32 %q, %a, 0;
    vote.sync.ballot.b32 %d, %q, 255;
    SKIP: bar.warp.sync -1;
    """
    x = RNG.integers(0, 2, 32, dtype=np.uint32)
    (d,) = harness.run_op(code, [x], [np.uint32])
    np.testing.assert_array_equal(d, np.where(np.arange(32) < 8, (x[:8] * 2 ** np.arange(8)).sum(), 0))


def test_active_mask_and_lane_masks():
    code = """
    .reg .b32 %l; mov.u32 %l, %laneid; mov.u32 %d, 0; mov.u32 %e, %lanemask_lt;
    setp.ge.u32 %p, %l, 20; @%p bra SKIP; activemask.b32 %d; SKIP:
    """
    d, e = harness.run_op(code, [], [np.uint32, np.uint32])
    np.testing.assert_array_equal(d, np.where(np.arange(32) < 20, 2**20 - 1, 0))
    np.testing.assert_array_equal(e, 2 ** np.arange(32) - 1)


def test_match():
    x = RNG.integers(0, 4, 64, dtype=np.uint32)
    (d,) = harness.run_op("match.any.sync.b32 %d, %a, -1;", [x], [np.uint32])
    for i in range(64):
        warp = x[i // 32 * 32 : i // 32 * 32 + 32]
        assert d[i] == ((warp == x[i]) * 2 ** np.arange(32)).sum()
    x[:32] = 5
    d, e = harness.run_op("match.all.sync.b32 %d|%e, %a, -1;", [x], [np.uint32, np.bool_])
    np.testing.assert_array_equal(d, np.repeat([2**32 - 1, 0], 32))
    np.testing.assert_array_equal(e, np.repeat([True, False], 32))


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_warp_reductions(kind):
    x = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    values = x.view(np.int32 if kind == "s32" else np.uint32).reshape(2, 32)
    for name, function in {"min": np.min, "max": np.max}.items():
        (d,) = harness.run_op(f"redux.sync.{name}.{kind} %d, %a, -1;", [x], [values.dtype])
        np.testing.assert_array_equal(d, np.repeat(function(values, axis=1), 32))
    (d,) = harness.run_op(f"redux.sync.add.{kind} %d, %a, -1;", [x], [np.uint32])
    np.testing.assert_array_equal(d, np.repeat(x.reshape(2, 32).astype(object).sum(1) % 2**32, 32).astype(np.uint32))
    for name, function in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        (d,) = harness.run_op(f"redux.sync.{name}.b32 %d, %a, -1;", [x], [np.uint32])
        np.testing.assert_array_equal(d, np.repeat(function.reduce(x.reshape(2, 32), axis=1), 32))


def test_barrier_reductions():
    x = RNG.integers(0, 2, 96, dtype=np.uint32)
    (d,) = harness.run_op("setp.ne.u32 %p, %a, 0; bar.red.popc.u32 %d, 0, %p;", [x], [np.uint32])
    np.testing.assert_array_equal(d, x.sum())
    for name, value in {"and": x.all(), "or": x.any()}.items():
        (d,) = harness.run_op(f"setp.ne.u32 %p, %a, 0; bar.red.{name}.pred %d, 0, %p;", [x], [np.bool_])
        np.testing.assert_array_equal(d, value)


def test_nested_divergence_and_loops():
    """Collatz steps: every lane loops its own number of times, with a branch inside."""
    code = """
    .reg .b32 %x, %r; mov.u32 %x, %a; mov.u32 %d, 0;
    LOOP: setp.le.u32 %p, %x, 1; @%p bra DONE;
    and.b32 %r, %x, 1; setp.eq.u32 %q, %r, 0;
    @%q bra EVEN;
    mad.lo.u32 %x, %x, 3, 1; bra NEXT;
    EVEN: shr.u32 %x, %x, 1;
    NEXT: add.u32 %d, %d, 1; bra LOOP;
    DONE: bar.sync 0;
    """
    x = RNG.integers(1, 2000, 256, dtype=np.uint32)

    def steps(v):
        count = 0
        while v > 1:
            v = v // 2 if v % 2 == 0 else 3 * v + 1
            count += 1
        return count

    (d,) = harness.run_op(code, [x], [np.uint32])
    np.testing.assert_array_equal(d, [steps(int(v)) for v in x])


def test_indexed_branch():
    code = """
    .reg .b32 %i2; rem.u32 %i2, %a, 3;
    TABLE: .branchtargets A, B, C;
    brx.idx %i2, TABLE;
    A: mov.u32 %d, 10; bra END;
    B: mov.u32 %d, 20; bra END;
    C: mov.u32 %d, 30;
    END:
    """
    x = RNG.integers(0, 100, 64, dtype=np.uint32)
    (d,) = harness.run_op(code, [x], [np.uint32])
    np.testing.assert_array_equal(d, x % 3 * 10 + 10)


def test_calls_with_parameters_and_divergent_callers():
    before = """
    .func (.param .b32 result) square(.param .b32 x, .param .b64 more) {
        .reg .b32 %v; .reg .b64 %m;
        ld.param.u32 %v, [x]; ld.param.u64 %m, [more];
        mul.lo.u32 %v, %v, %v; cvt.u64.u32 %m, %v; st.param.b32 [result], %v; ret;
    }
    """
    body = """
    .reg .b32 %t, %y; .reg .b64 %o, %f; .reg .pred %p;
    mov.u32 %t, %tid.x; mov.u32 %y, %t; and.b32 %y, %t, 1; setp.eq.u32 %p, %y, 0; mov.u32 %y, %t;
    @%p bra SKIP;
    { .param .b32 p0; .param .b64 p1; .param .b32 r0;
      st.param.b32 [p0], %t; st.param.b64 [p1], 9;
      call.uni (r0), square, (p0, p1);
      ld.param.b32 %y, [r0]; }
    SKIP:
    ld.param.u64 %o, [out]; mul.wide.u32 %f, %t, 4; add.u64 %o, %o, %f; st.global.u32 [%o], %y;
    """
    out = np.zeros(40, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 out", before=before), 1, 40, [out])
    t = np.arange(40)
    np.testing.assert_array_equal(out, np.where(t % 2, t * t, t))


def test_special_registers_of_a_three_dimensional_launch():
    names = ["tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "ntid.x", "ntid.y", "ntid.z",
             "nctaid.x", "nctaid.y", "nctaid.z", "laneid", "warpid"]  # fmt: skip
    body = [".reg .b32 %v, %i, %j; .reg .b64 %o, %f;"]
    # linear thread over the whole grid
    body.append("mov.u32 %i, %ctaid.z;")
    for register, extent in (("ctaid.y", 3), ("ctaid.x", 2), ("tid.z", 3), ("tid.y", 4), ("tid.x", 5)):
        body.append(f"mov.u32 %j, %{register}; mad.lo.u32 %i, %i, {extent}, %j;")
    body.append(f"ld.param.u64 %o, [out]; mul.wide.u32 %f, %i, {4 * len(names)}; add.u64 %o, %o, %f;")
    body += [f"mov.u32 %v, %{n}; st.global.u32 [%o+{4 * i}], %v;" for i, n in enumerate(names)]
    out = np.zeros((2, 3, 2, 3, 4, 5, len(names)), np.uint32)
    emulator.launch(harness.kernel_text("\n".join(body), ".param .u64 out"), (2, 3, 2), (5, 4, 3), [out])
    for index in np.ndindex(out.shape[:-1]):
        cz, cy, cx, z, y, x = index
        linear = (z * 4 + y) * 5 + x
        assert out[index].tolist() == [x, y, z, cx, cy, cz, 5, 4, 3, 2, 3, 2, linear % 32, linear // 32]
