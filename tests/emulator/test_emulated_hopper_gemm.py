"""A whole Hopper pipeline (see `hopper_gemm`): right at awkward shapes, and every fault that one can seed is caught."""

from __future__ import annotations

import hopper_gemm
import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import replaced
from hopper_harness import assembly_log, check_assembly

from numba_gemm import emulator
from numba_gemm.validate import check, reference

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def factors(m, n, k, element="f16", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(s).astype(np.float32).astype(DTYPES[element]) for s in ((m, k), (k, n)))


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_the_assembler_takes_the_kernel(consumers, element, b_major):
    text = hopper_gemm.gemm(2, consumers, element, b_major)
    if assembly_log(text) is None:
        pytest.skip("ptxas is not installed")
    check_assembly(text)


@pytest.mark.parametrize(
    ("m", "n", "k", "stages", "consumers", "element", "b_major", "blocks"),
    [
        (128, 128, 64, 2, 2, "f16", "k", 0),  # one tile, one k-tile
        (64, 8, 8, 4, 1, "f16", "k", 0),  # the smallest
        (256, 256, 256, 3, 2, "f16", "k", 0),
        (200, 136, 200, 2, 2, "f16", "k", 1),  # tails everywhere; even number of k-tiles, tiles in turn
        (200, 136, 72, 4, 2, "f16", "n", 1),  # a k-tail, fewer k-tiles than stages
        (136, 264, 136, 2, 1, "bf16", "k", 2),  # odd number of k-tiles: phases differ from tile to tile
        (72, 120, 328, 3, 1, "bf16", "n", 1),
    ],
)  # fmt: skip
def test_products(m, n, k, stages, consumers, element, b_major, blocks):
    a, b = factors(m, n, k, element)
    text = hopper_gemm.gemm(stages, consumers, element, b_major)
    options = {"stages": stages, "consumers": consumers, "element": element, "b_major": b_major, "blocks": blocks}
    c, _ = hopper_gemm.run(text, a, b, **options)
    verdict = check(c, reference(a, b, tensor_core=(9, 0)))
    assert verdict, verdict.message


def test_the_arithmetic_is_that_of_one_sum_every_sixteen():
    """C in FP16 is the rounded FP32 sum of `mma.sync` with the same sixteen products at a time."""
    from numba_gemm.emulator import tensorcore

    a, b = factors(64, 128, 128)
    c, _ = hopper_gemm.run(hopper_gemm.gemm(2, 1), a, b, stages=2, consumers=1)
    total = np.zeros((64, 128), np.uint32)
    types = {"a_type": "f16", "b_type": "f16", "acc_type": "f32", "d_type": "f32", "arch": "sm_90"}
    for k in range(0, 128, 16):
        left, right = a[:, k : k + 16].view(np.uint16), b[k : k + 16].view(np.uint16)
        total = tensorcore.mma(left, right, total, **types)
    np.testing.assert_array_equal(c.view(np.uint16), total.view(np.float32).astype(np.float16).view(np.uint16))


def test_counters():
    a, b = factors(256, 256, 256)
    _, report = hopper_gemm.run(hopper_gemm.gemm(), a, b)
    counters = report.counters
    tiles, k_tiles = 4, 4
    assert counters.tensor_loads == tiles * k_tiles * 2
    assert counters.tensor_load_bytes == tiles * k_tiles * (128 + 128) * 64 * 2
    assert counters.tensor_stores == tiles * 2
    assert counters.tensor_store_bytes == 256 * 256 * 2
    assert counters.wgmma_instructions == tiles * k_tiles * 4 * 8
    assert counters.instructions_by_class["wgmma.mma_async"] == counters.wgmma_instructions


STAGES = 2
AT = hopper_gemm.layout(STAGES, 2)
BYTES = AT["a_bytes"] + AT["b_bytes"]
FULL, EMPTY = AT["full"], AT["empty"]
GIVE_BACK = f"mbarrier.arrive.shared::cta.b64 _, [%given_back+{EMPTY}];"
READ_WAIT = "@%chief cp.async.bulk.wait_group.read 0;"
INIT = f"mbarrier.init.shared::cta.b64 [%smem+{FULL}], 1;"
NO_WAIT = "setp.eq.u32 %done, 0, 0;"
FAULTS = {
    "the producer expects bytes without arriving": (
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full]",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%full]",
        emulator.Deadlock, f"mbarrier at shared {FULL:#x} .* with 1 of 1 arrivals and 0 bytes",
    ),
    "the full barrier expects two arrivals": (
        INIT, INIT.replace("], 1", "], 2"), emulator.Deadlock, f"mbarrier at shared {FULL:#x} .* with 1 of 2 arrivals",
    ),
    "consumers never give stages back": (
        f"@%later {GIVE_BACK}", "", emulator.Deadlock, "1 threads at line .* wait for parity 0",
    ),
    "consumers keep a tile's last stage": (f"@%chief {GIVE_BACK}", "", emulator.Deadlock, "wait for parity"),
    "consumers start with the wrong parity": (
        "mov.u32 %phase, 0;", "mov.u32 %phase, 1;", emulator.UninitialisedRead, "nothing has written",
    ),
    "the producer starts with the wrong parity": (
        "mov.u32 %phase, 1;", "mov.u32 %phase, 0;", emulator.Deadlock, f"mbarrier at shared {EMPTY:#x}",
    ),
    "a consumer's parity never flips": ("@%wrap xor.b32 %phase, %phase, 1;", "", emulator.Deadlock, "wait for parity"),
    "no fence after the initialisation": (
        "fence.mbarrier_init.release.cluster;", "", emulator.MissingProxyFence, "initialised without",
    ),
    "no barrier after the initialisation": (
        "INITIALISED:\n    bar.sync 0;", "INITIALISED:", emulator.MbarrierMisuse, "nothing orders this after",
    ),
    "a barrier is not initialised": (INIT, "", emulator.MbarrierMisuse, "no mbarrier was initialised"),
    "a barrier is initialised twice": (INIT, INIT + INIT, emulator.MbarrierMisuse, "not invalidated"),
    "nobody waits for the tiles": (
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [%full], %phase;", NO_WAIT,
        emulator.UninitialisedRead, "nothing has written",
    ),
    "the producer does not wait for free stages": (
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [%empty], %phase;", NO_WAIT,
        emulator.UnwaitedAsyncCopy, "overwrite of data that a bulk copy",
    ),
    "128 bytes too few expected": (
        f"[%full], {BYTES};", f"[%full], {BYTES - 128};",
        emulator.MbarrierMisuse, "128 bytes more than phase 0 expected",
    ),
    "the bytes of one box expected": (
        f"[%full], {BYTES};", f"[%full], {BYTES // 2};", emulator.UnwaitedAsyncCopy, "its phase was not waited for",
    ),
    "128 bytes too many expected": (
        f"[%full], {BYTES};", f"[%full], {BYTES + 128};", emulator.Deadlock, "0 of 1 arrivals and 128 bytes pending",
    ),
    "every lane of the producer issues": (
        "@!%leader ret;", "", emulator.MbarrierMisuse, f"0 of 1 pending and waits for {2 * BYTES} bytes",
    ),
    "no wgmma.fence": (
        "wgmma.fence.sync.aligned;", "", emulator.MissingWgmmaFence, "no wgmma.fence since",
    ),
    "no commit": ("wgmma.commit_group.sync.aligned;", "", emulator.UnfinishedAsyncRead, "a wgmma still reads"),
    "a stage is given back while its group is in flight": (
        "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;",
        emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "the accumulators are read early": (
        "wgmma.wait_group.sync.aligned 0;", "", emulator.RegistersInFlight, "wait for its group first",
    ),
    "no proxy fence before the store": (
        "fence.proxy.async.shared::cta;", "", emulator.MissingProxyFence, "without a fence.proxy.async",
    ),
    "only the issuing thread fences": (
        "fence.proxy.async.shared::cta;", "@%chief fence.proxy.async.shared::cta;", emulator.MissingProxyFence,
        "without a fence.proxy.async",
    ),
    "no barrier before the store": (
        "fence.proxy.async.shared::cta;\n    bar.sync %name, 128;", "fence.proxy.async.shared::cta;",
        emulator.SharedMemoryRace, "nothing in between to order",
    ),
    "the buffer of C is written while it is still stored": (
        READ_WAIT, "", emulator.UnfinishedAsyncRead, "an unfinished bulk store still reads",
    ),
    "only the issuing thread knows that the store has read": (
        f"{READ_WAIT}\n    bar.sync %name, 128;", READ_WAIT, emulator.UnfinishedAsyncRead, "bulk store still reads",
    ),
    "an exit before the store has read": (
        "@%chief cp.async.bulk.wait_group 0;", "", emulator.EarlyExit, "wait for its group first",
    ),
    "a box off its swizzle's period": (
        f"mad.lo.u32 %b_at, %stage, {AT['b_bytes']}, %smem;\n    add.u32 %b_at, %b_at, {AT['b']};\n    cp",
        f"mad.lo.u32 %b_at, %stage, {AT['b_bytes']}, %smem;\n    add.u32 %b_at, %b_at, {AT['b'] + 128};\n    cp",
        emulator.Misaligned, "multiple of 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults(fault):
    old, new, kind, message = FAULTS[fault]
    text = replaced(hopper_gemm.gemm(STAGES), old, new)
    check_assembly(text)
    a, b = factors(200, 136, 328)
    with pytest.raises(kind, match=message):
        hopper_gemm.run(text, a, b, stages=STAGES, blocks=1)


def test_the_faultless_kernel_of_the_same_shape_passes():
    a, b = factors(200, 136, 328)
    c, _ = hopper_gemm.run(hopper_gemm.gemm(STAGES), a, b, stages=STAGES, blocks=1)
    assert check(c, reference(a, b, tensor_core=(9, 0)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"or.b64 %desc_b, %desc_b, {1 << 62 | 64 << 32 | 1 << 16};",
         f"or.b64 %desc_b, %desc_b, {2 << 62 | 64 << 32 | 1 << 16};"),
        ("add.u64 %desc_a, %desc_a, 2;", "add.u64 %desc_a, %desc_a, 0;"),
    ],
)  # fmt: skip
def test_a_wrong_descriptor_gives_a_wrong_product(old, new):
    """No hazard, since the bytes are there; the bound notices."""
    a, b = factors(128, 128, 64)
    c, _ = hopper_gemm.run(replaced(hopper_gemm.gemm(), old, new), a, b)
    assert not check(c, reference(a, b, tensor_core=(9, 0)))
