"""Wavefronts, conflicts, sectors and instruction counts of access patterns with known answers."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.emulator.banks import global_sectors, shared_wavefronts

LANE = np.arange(32)


def wavefronts(address, size, active=None):
    mask = None if active is None else np.asarray(active, bool).reshape(1, 32)
    return shared_wavefronts(np.asarray(address, np.int64).reshape(1, 32), mask, size)[0]


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (4 * LANE, 4, 1),  # consecutive words
        (0 * LANE, 4, 1),  # broadcast
        (8 * LANE, 4, 2),
        (16 * LANE, 4, 4),
        (128 * LANE, 4, 32),  # a column of 32 floats
        (132 * LANE, 4, 1),  # the same, padded by a word
        (LANE, 1, 1),
        (2 * LANE, 2, 1),  # two lanes a word
        (8 * LANE, 8, 2),  # consecutive 8 bytes: half-warp by half-warp
        (0 * LANE, 8, 1),  # broadcast: the halves merge
        (8 * (LANE // 2), 8, 1),  # pairs of lanes share: the halves merge
        (8 * (LANE % 16), 8, 2),  # the halves read the same, but neighbours don't share
        (16 * LANE, 8, 4),
        (16 * LANE, 16, 4),  # consecutive 16 bytes: quarter-warp by quarter-warp
        (0 * LANE, 16, 2),  # broadcast: quarters merge within each half-warp
        (16 * (LANE // 2), 16, 2),
        (16 * (LANE % 4), 16, 4),
        (32 * LANE, 16, 8),
        (144 * LANE, 16, 4),  # rows of 128 bytes padded by 16
        (128 * LANE, 16, 32),
    ],
)
def test_wavefronts_of_known_patterns(address, size, expected):
    assert wavefronts(address, size) == expected


def test_halves_of_stores_never_merge():
    for size, expected in ((4, 1), (8, 2), (16, 4)):
        assert shared_wavefronts(0 * LANE.reshape(1, 32), None, size, store=True) == (expected, expected)


def test_inactive_lanes_cost_nothing():
    assert wavefronts(128 * LANE, 4, LANE < 4) == 4
    assert wavefronts(16 * LANE, 16, LANE < 8) == 1
    assert wavefronts(8 * LANE, 8, LANE < 16) == 1


@pytest.mark.parametrize("size", [4, 8, 16])
def test_wavefronts_by_counting(size):
    """Random patterns against a count, group by group, with sets."""
    rng = np.random.default_rng(size)
    for _ in range(200):
        address = rng.integers(0, 64, 32) * size
        words = [{(a + 4 * i) // 4 for i in range(size // 4)} for a in address]

        def passes(lanes, words=words):
            banks = [set() for _ in range(32)]
            for lane in lanes:
                for word in words[lane]:
                    banks[word % 32].add(word)
            return max(len(b) for b in banks)

        groups = {4: [range(32)], 8: [range(16), range(16, 32)], 16: [range(i, i + 8) for i in range(0, 32, 8)]}[size]
        assert wavefronts(address, size) == sum(passes(g) for g in groups)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (4 * LANE, 4),
        (4 * LANE + 4, 5),
        (32 * LANE, 32),
        (0 * LANE, 1),
        (16 * LANE, 16),
        (8 * LANE, 8),
    ],
)
def test_sectors(address, expected):
    assert global_sectors(np.asarray(address, np.uint64).reshape(1, 32)) == expected


def test_counts_of_a_small_kernel():
    body = """
    .shared .align 16 .b8 s[16384];
    .reg .b32 %t, %i; .reg .f32 %x, %y; .reg .b64 %a; .reg .pred %p, %q;
    mov.u32 %t, %tid.x; ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, 4, %a;
    ld.global.f32 %x, [%a];
    shl.b32 %i, %t, 7; st.shared.f32 [%i], %x;
    ld.shared.f32 %y, [%i];
    setp.lt.u32 %p, %t, 40;
    @%p fma.rn.f32 %x, %y, %y, %x;
    mul.f32 %x, %x, %x;
    bar.sync 0;
    mov.u32 %i, 0;
    LOOP: add.f32 %x, %x, %x; add.u32 %i, %i, 1; setp.lt.u32 %q, %i, 10; @%q bra LOOP;
    @%p st.global.f32 [%a], %x;
    """
    a = np.zeros(64, np.float32)
    report = emulator.launch(harness.kernel_text(body, ".param .u64 a"), 3, 64, [a])
    c = report.counters
    assert c.ffma_threads == 3 * 40
    assert c.fmul_threads == 3 * 64
    assert c.fadd_threads == 3 * 64 * 10
    assert c.barriers == 3 * 2
    assert (c.shared_store_requests, c.shared_store_wavefronts, c.shared_store_conflicts) == (6, 6 * 32, 6 * 31)
    assert (c.shared_load_requests, c.shared_load_wavefronts) == (6, 6 * 32)
    assert (c.global_load_requests, c.global_load_sectors) == (6, 6 * 4)
    assert (c.global_store_requests, c.global_store_sectors) == (3 * 2, 3 * (4 + 1))
    assert c.instructions_by_class["fma.f32"] == 6
    assert c.instructions_by_class["add.f32"] == 60
    assert c.instructions == sum(c.instructions_by_class.values())
    assert sum(report.executed_by_line.values()) == c.instructions


def test_every_count_has_a_name_in_ncu_or_says_why():
    named = set(emulator.NCU_METRICS)
    assert named <= set(emulator.Counters().as_dict())
    # ncu has no metric of bulk copies by thread, nor of wgmma and mbarrier instructions alone
    unnamed = {
        f"{kind}_{verb}{what}" for kind in ("tensor", "bulk") for verb in ("load", "store") for what in ("s", "_bytes")
    }
    assert set(emulator.Counters().as_dict()) - named == {
        "atomics", "wgmma_instructions", "mbarrier_operations", *unnamed
    }  # fmt: skip
