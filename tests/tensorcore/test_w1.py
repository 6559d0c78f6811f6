"""w1 on the emulator: products, the faults that one can seed in its pipeline, its constraints, and its SASS. No GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.abi import PARAMETERS
from numba_gemm.compile.assembler import assemble, find_tool
from numba_gemm.compile.resources import read_resources
from numba_gemm.compile.sass import disassemble
from numba_gemm.emulator.tensorcore import rule
from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore.bound import tensorcore_bound
from numba_gemm.tensorcore.w1 import MAX_BATCH, MAX_DIMENSION, W1Parameters

TYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
LAYOUTS = list(product(("row", "column"), repeat=2))
OUTPUTS = [("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]
#: A small form: one consumer and two stages, so that a few k-blocks go round the ring.
SMALL = W1Parameters(block_m=64, block_n=64, stages=2, group=2)


def place(machine, values, layout, dtype, pad, shift=0):
    """Matrices (batch, rows, columns) in storage poisoned with NaN: ``pad`` elements after each row or column and a
    row after each matrix, ``shift`` elements before the first.

    Returns the address of the first element, the storage's address and array, its view as matrices, the leading
    dimension and the batch stride.
    """
    batch, rows, columns = values.shape if layout == "row" else values.transpose(0, 2, 1).shape
    leading = columns + pad
    stride = (rows + 1) * leading
    flat = np.full(shift + batch * stride, np.nan, dtype)
    inner = flat[shift:].reshape(batch, rows + 1, leading)[:, :rows, :columns]
    matrices = inner if layout == "row" else inner.transpose(0, 2, 1)
    matrices[...] = values
    storage = machine.place(flat)
    return storage + shift * flat.itemsize, storage, flat, matrices, leading, stride


def numbers(kind, shape, rng):
    if kind == "integer":
        return rng.integers(-3, 4, shape).astype(np.float64)
    return rng.standard_normal(shape)


def check(p, m, n, k, *, kind="integer", alpha=1.0, beta=0.0, batch=1, c_pad=1, c_shift=1, text=None):
    """Run products and hold them against float64: equal for exact inputs, else within the bound.

    What surrounds A and B is NaN, what surrounds C must stay so, and C itself is NaN where beta is 0. Returns the
    report and C.
    """
    rng = np.random.default_rng([m, n, k])
    machine = emulator.Machine("sm_90a")
    maps, factors = [], []
    for x, rows, columns, box in (("a", m, k, p.map_a_box), ("b", k, n, p.map_b_box)):
        layout = getattr(p, f"{x}_layout")
        inner, outer = (columns, rows) if layout == "row" else (rows, columns)
        values = numbers(kind, (batch, rows, columns), rng)
        address, _, _, matrices, leading, stride = place(machine, values, layout, TYPES[p.dtype], 8 - inner % 8)
        strides = (2 * leading, 2 * stride)
        maps.append(machine.tensor_map(address, p.dtype, (inner, outer, batch), strides, box, swizzle="128B"))
        factors.append(matrices)
    before = numbers("integer", (batch, m, n), rng) if beta else np.full((batch, m, n), np.nan)
    c_address, storage, c_flat, c, ldc, c_stride = place(machine, before, "row", TYPES[p.c_dtype], c_pad, c_shift)
    outside = np.ones(c_flat.shape, bool)
    outside[c_shift:].reshape(batch, m + 1, ldc)[:, :m, :n] = False

    sizes = (m, n, k, batch, 1, -(-k // p.block_k))
    params = PARAMETERS["wgmma"].pack(*maps, bytes(128), c_address, ldc, c_stride, *sizes, alpha, beta)
    grid = p.grid(m, n, batch)
    report = machine.launch(text or p.render(), grid, p.threads, params, shared_bytes=p.dynamic_shared_bytes)
    machine.fetch(storage, c_flat)

    a, b = factors
    want = alpha * (a.astype(np.float64) @ b.astype(np.float64)) + (beta * before if beta else 0)
    got = c.astype(np.float64)
    if kind == "normal":
        how = rule(p.dtype, "f32", 16, "sm_90")
        limit = tensorcore_bound(
            a,
            b,
            k_per_sum=how.group,
            fraction_bits=how.fraction_bits,
            output_dtype=TYPES[p.c_dtype].name,
            c=before if beta else None,
            alpha=alpha,
            beta=beta,
        )
        assert (np.abs(got - want) <= limit).all()
    else:
        rounded = want.astype(np.float32).astype(TYPES[p.c_dtype]).astype(np.float64)
        np.testing.assert_array_equal(got, rounded)
    assert np.isnan(c_flat[outside].astype(np.float32)).all(), "wrote outside of C"
    return report, c


@pytest.mark.parametrize("shape", [(1, 1, 1), (130, 70, 200), (64, 136, 64)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
def test_whole_numbers_are_exact_in_all_layouts(layouts, shape):
    check(replace(SMALL, a_layout=layouts[0], b_layout=layouts[1]), *shape)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
def test_the_default_tile_in_all_layouts(layouts):
    """Two consumers, and B's boxes side by side."""
    check(W1Parameters(a_layout=layouts[0], b_layout=layouts[1]), 128, 128, 128, kind="normal", c_pad=0, c_shift=0)


@pytest.mark.parametrize(("dtype", "c_dtype"), OUTPUTS)
@pytest.mark.parametrize("n", [63, 70], ids=["elements", "pairs"])
def test_outputs_scaled_and_added(dtype, c_dtype, n):
    p = replace(SMALL, dtype=dtype, c_dtype=c_dtype)
    pad, shift = (0, 1) if n % 2 else (2, 2)
    check(p, 65, n, 24, alpha=0.5, beta=-2.0, c_pad=pad, c_shift=shift)
    check(p, 65, n, 24, kind="normal", alpha=-1.25, beta=0.75, c_pad=pad, c_shift=shift)


@pytest.mark.parametrize(("c_pad", "c_shift"), [(0, 0), (1, 0), (0, 1), (0, 2)])
@pytest.mark.parametrize("c_dtype", ["f16", "f32"])
def test_both_ways_to_store_give_the_same(c_dtype, c_pad, c_shift):
    """Pairs where C is aligned to them and has an even number of columns, elements elsewhere."""
    p = replace(SMALL, c_dtype=c_dtype)
    report, c = check(p, 40, 34, 40, kind="normal", c_pad=c_pad, c_shift=c_shift)
    _, odd = check(p, 40, 34, 40, kind="normal", c_pad=1, c_shift=1)
    assert c.tobytes() == odd.tobytes()
    stores = report.counters.instructions_by_class["st.global"]
    pairs = c_pad % 2 == c_shift % 2 == 0
    assert stores == (4 * 32 // 2 if pairs else 4 * 32)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 128, 129, 192, 320, 328])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_depth_of_k(k, stages):
    """One k-block, fewer than stages, as many, odd and even numbers beyond, each with and without a tail."""
    check(replace(SMALL, stages=stages), 64, 64, k)


@pytest.mark.parametrize("shape", [(300, 200, 8), (64, 320, 8), (320, 64, 8)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_tile_is_walked_once(shape, group):
    check(replace(SMALL, group=group), *shape)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
def test_batches(layouts):
    p = replace(SMALL, a_layout=layouts[0], b_layout=layouts[1], dtype="bf16", c_dtype="bf16")
    check(p, 70, 66, 72, batch=3, alpha=2.0, beta=1.0)


@pytest.mark.parametrize(
    "form",
    [
        {"block_m": 192, "block_n": 64, "stages": 3},
        {"block_m": 256, "block_n": 72, "stages": 2, "b_layout": "column"},
        {"block_m": 64, "block_n": 200, "stages": 2, "b_layout": "column"},
        {"block_m": 64, "block_n": 256, "stages": 2, "a_layout": "column"},
        {"block_m": 128, "block_n": 192, "stages": 3, "dtype": "bf16", "c_dtype": "f32"},
    ],
    ids=lambda form: f"{form['block_m']}x{form['block_n']}",
)
def test_other_tiles(form):
    p = W1Parameters(**form)
    check(p, p.block_m - 3, p.block_n + 5, 72)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
@pytest.mark.parametrize(("dtype", "c_dtype"), OUTPUTS)
def test_larger_products(layouts, dtype, c_dtype):
    p = W1Parameters(dtype=dtype, c_dtype=c_dtype, a_layout=layouts[0], b_layout=layouts[1])
    check(p, 515, 389, 777, kind="normal", alpha=0.5, beta=1.5)


def test_zero_times_infinity_is_not_made_up():
    """What fills a box past K, M or N is zero in both factors: an Inf in A's last column meets a number of B."""
    p = replace(SMALL, c_dtype="f32")
    machine = emulator.Machine("sm_90a")
    a, b = np.full((8, 8), np.inf, np.float16), np.ones((8, 8), np.float16)
    maps = [
        machine.tensor_map(machine.place(x), "f16", (8, 8, 1), (16, 128), box, swizzle="128B")
        for x, box in ((a, p.map_a_box), (b, p.map_b_box))
    ]
    c = np.zeros((8, 8), np.float32)
    at = machine.place(c)
    params = PARAMETERS["wgmma"].pack(*maps, bytes(128), at, 8, 64, 8, 8, 8, 1, 1, 1, 1.0, 0.0)
    machine.launch(p.render(), 1, p.threads, params, shared_bytes=p.dynamic_shared_bytes)
    machine.fetch(at, c)
    assert (c == np.inf).all()


def test_the_work_is_what_the_header_says():
    p = W1Parameters(stages=2)
    report, _ = check(p, 256, 128, 192, c_pad=0, c_shift=0)
    tiles, k_blocks = 2, 3
    counters = report.counters
    assert counters.tensor_loads == tiles * k_blocks * (p.a_boxes + p.b_boxes)
    assert counters.tensor_load_bytes == tiles * k_blocks * p.stage_bytes
    assert counters.wgmma_instructions == tiles * k_blocks * 4 * 4 * p.consumers
    assert counters.barriers == tiles * (p.threads // 32)
    assert counters.global_load_sectors == 0
    assert counters.global_store_sectors == 256 * 128 * 2 // 16  # 4 lanes with 4 bytes each fill half a sector


# --- faults: each is one of the mistakes that such a pipeline invites

FULL, EMPTY = SMALL.barriers_offset, SMALL.barriers_offset + 8 * SMALL.stages
BYTES = SMALL.stage_bytes
EXPECT = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {BYTES};"
INIT_FULL = "mbarrier.init.shared::cta.b64 [%barriers + 0], 1;"
INIT_EMPTY = f"mbarrier.init.shared::cta.b64 [%barriers + {8 * SMALL.stages}], 4;"
RELEASE = "@%release mbarrier.arrive.shared::cta.b64 _, [%previous_empty];"
ONE_LANE = "setp.eq.and.u32 %release, %lane, 0, %release;"
FLIP = "@%wrap xor.b32  %parity, %parity, 1;"
NO_WAIT = "setp.eq.u32     %done, 0, 0;"
FAULTS = {
    "the producer expects bytes without arriving": (
        EXPECT, f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%full], {BYTES};",
        emulator.Deadlock, f"mbarrier at shared {FULL:#x} .* with 1 of 1 arrivals and 0 bytes",
    ),
    "the producer arrives without expecting bytes": (
        EXPECT, "mbarrier.arrive.shared::cta.b64 _, [%full];", emulator.UnwaitedAsyncCopy, "was not waited for",
    ),
    "128 bytes too few are expected": (
        EXPECT, EXPECT.replace(str(BYTES), str(BYTES - 128)),
        emulator.MbarrierMisuse, "128 bytes more than phase 0 expected",
    ),
    "128 bytes too many are expected": (
        EXPECT, EXPECT.replace(str(BYTES), str(BYTES + 128)),
        emulator.Deadlock, "0 of 1 arrivals and 128 bytes pending",
    ),
    "the bytes of A alone are expected": (
        EXPECT, EXPECT.replace(str(BYTES), str(SMALL.a_bytes)), emulator.UnwaitedAsyncCopy, "was not waited for",
    ),
    "every lane of the producer copies": ("@!%elected ret;", "", emulator.MbarrierMisuse, "0 of 1 pending"),
    "a full barrier waits for two arrivals": (
        INIT_FULL, INIT_FULL.replace("], 1", "], 2"), emulator.Deadlock, "1 of 2 arrivals",
    ),
    "an empty barrier waits for a fifth warp": (
        INIT_EMPTY, INIT_EMPTY.replace("], 4", "], 5"), emulator.Deadlock, "1 of 5 arrivals",
    ),
    "an empty barrier waits for one warp of four": (
        INIT_EMPTY, INIT_EMPTY.replace("], 4", "], 1"), emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "every lane of a consumer gives the stage back": (
        ONE_LANE, "", emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "one warp gives the stage back for all": (
        ONE_LANE, "setp.eq.and.u32 %release, %thread, 0, %release;", emulator.Deadlock, "3 of 4 arrivals",
    ),
    "stages are never given back": (RELEASE, "", emulator.Deadlock, "wait for parity 0"),
    "a stage is given back before the first": (
        "setp.ne.u32     %release, %k, 0;", "setp.eq.u32     %release, 0, 0;",
        emulator.MbarrierMisuse, "no mbarrier was initialised",
    ),
    "the stage in use is given back": (
        "setp.ne.u32     %release, %k, 0;",
        f"setp.eq.u32 %release, 0, 0; add.u32 %previous_empty, %full, {8 * SMALL.stages};",
        emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "consumers start with the wrong parity": (
        "mov.u32         %parity, 0;", "mov.u32         %parity, 1;", emulator.Deadlock, "wait for parity 1",
    ),
    "the producer starts with the wrong parity": (
        "mov.u32         %parity, 1;", "mov.u32         %parity, 0;",
        emulator.Deadlock, f"mbarrier at shared {EMPTY:#x}",
    ),
    "the producer's parity never flips": (FLIP, "", emulator.UnwaitedAsyncCopy, "was not waited for"),
    "a barrier is not initialised": (INIT_FULL, "", emulator.MbarrierMisuse, "no mbarrier was initialised"),
    "no fence after the initialisation": (
        "fence.mbarrier_init.release.cluster;", "", emulator.MissingProxyFence, "initialised without",
    ),
    "no barrier after the initialisation": (
        "bar.sync        0;", "", emulator.MbarrierMisuse, "nothing orders this after",
    ),
    "consumers don't wait for the tiles": (
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [%full], %parity;", NO_WAIT,
        emulator.UnwaitedAsyncCopy, "read of data that a bulk copy",
    ),
    "the producer doesn't wait for an empty stage": (
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [%empty], %parity;", NO_WAIT,
        emulator.UnwaitedAsyncCopy, "overwrite of data that a bulk copy",
    ),
    "no wgmma.fence": ("wgmma.fence.sync.aligned;", "", emulator.MissingWgmmaFence, "no wgmma.fence since"),
    "no commit": ("wgmma.commit_group.sync.aligned;", "", emulator.UnfinishedAsyncRead, "a wgmma still reads"),
    "two groups stay in flight": (
        "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;",
        emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "accumulators are stored while wgmma adds to them": (
        "wgmma.wait_group.sync.aligned 0;", "", emulator.RegistersInFlight, "wait for its group first",
    ),
    "a tile off the swizzle's period": (
        f"%b_box, %a_tile, {SMALL.a_bytes};", f"%b_box, %a_tile, {SMALL.a_bytes + 128};",
        emulator.Misaligned, "multiple of 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_caught(fault):
    old, new, kind, message = FAULTS[fault]
    text = SMALL.render()
    assert old in text
    with pytest.raises(kind, match=message):
        check(SMALL, 64, 64, 328, text=text.replace(old, new, 1))


def test_the_faultless_kernel_of_that_shape_passes():
    check(SMALL, 64, 64, 328)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x40000040", "0x80000040"),  # swizzle of 64 bytes
        ("0x40000040", "0x40000020"),  # 512 bytes from 8 rows to the next
        ("add.u32         %a_tile, %a_tile, 2;", ""),
        ("add.u32         %b_tile, %b_tile, 128;", ""),
        ("setp.ne.u32     %accumulate, %k, 0;", "setp.eq.u32     %accumulate, %k, 0;"),
        ("1, 1, 0, 1;", "1, 1, 0, 0;"),
    ],
)
def test_what_is_no_hazard_gives_a_wrong_product(old, new):
    text = SMALL.render()
    assert old in text
    with pytest.raises((AssertionError, emulator.EmulatorError)):
        check(SMALL, 64, 64, 72, text=text.replace(old, new, 1))


def test_the_example_of_the_lesson_runs():
    lesson = Path(__file__).resolve().parents[2] / "docs" / "hopper.md"
    example = lesson.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    assert "assert" in example
    exec(example, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f32"}, "neither 'f16' nor 'bf16'"),
        ({"c_dtype": "bf16"}, "neither 'f16' nor 'f32'"),
        ({"a_layout": "diagonal"}, "a_layout"),
        ({"block_m": 96}, "64 rows for each of 1 to 4 consumers"),
        ({"block_n": 72}, "multiple of 64"),
        ({"block_n": 76, "b_layout": "column"}, "multiple of 8"),
        ({"block_n": 264, "b_layout": "column"}, "64 … 256"),
        ({"block_k": 32}, "128 bytes of the swizzle"),
        ({"stages": 1}, "stages = 1"),
        ({"stages": 8}, "take fewer stages"),
        ({"block_m": 256, "block_n": 256, "stages": 2}, "registers"),
        ({"group": 0}, "group = 0"),
    ],
)
def test_constraints_are_named(change, message):
    with pytest.raises(KernelConstraintError, match=message):
        W1Parameters(**change)


def test_grid():
    p = W1Parameters()
    assert p.grid(129, 128, 5) == (2, 1, 5)
    assert p.work_units(129, 129, 5) == 20
    for m, n, batch, message in (
        (0, 1, 1, "M = 0"),
        (1, MAX_DIMENSION + 1, 1, "N = "),
        (1, 1, MAX_BATCH + 1, "take several"),
        (MAX_DIMENSION, MAX_DIMENSION, 1, "tiles"),
    ):
        with pytest.raises(KernelConstraintError, match=message):
            p.grid(m, n, batch)


FORMS = [
    *({"a_layout": a, "b_layout": b} for a, b in LAYOUTS),
    {"stages": 3},
    {"stages": 3, "dtype": "bf16", "c_dtype": "bf16"},
    {"stages": 3, "dtype": "bf16", "c_dtype": "f32"},
    {"block_n": 256, "stages": 4},
    {"block_n": 256, "stages": 3, "c_dtype": "f32", "b_layout": "column"},
    {"block_m": 192, "block_n": 192},
    {"block_m": 256, "block_n": 128},
    {"block_m": 64, "block_n": 64, "stages": 2},
    {"block_m": 64, "block_n": 248, "b_layout": "column"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
def test_the_assembler_takes_it_without_a_word(form):
    """No spill, and no warning: the assembler warns where it has to serialise wgmma."""
    if find_tool("ptxas") is None:
        pytest.skip("ptxas is not installed")
    p = W1Parameters(**form)
    cubin, log, _ = assemble(p.render(), "sm_90a")
    assert "warning" not in log.lower()
    assert "serialized" not in log
    resources = read_resources(log, cubin, "w1", (9, 0))
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert resources.registers <= p.registers


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
def test_sass():
    cubin, _, _ = assemble(W1Parameters(dtype="bf16", c_dtype="bf16").render(), "sm_90a")
    sass = disassemble(cubin)
    loop = sass.main_loop_mix()
    assert loop["HGMMA"] == 4
    assert sum(loop.values()) < 75  # a few instructions to each, so that issuing them doesn't matter
    opcodes = [i.opcode for i in sass.instructions]
    assert sum(name.startswith("UTMALDG.3D") for name in opcodes) == 3
    assert not any(name.startswith(("HMMA", "LDS", "STS", "LDL", "STL")) for name in opcodes)
