"""t4 with its tiles copied by TMA: on the emulator, its constraints, how it is chosen and assembled. Needs no GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from numba_gemm.compile.assembler import assemble, find_tool
from numba_gemm.compile.resources import read_resources
from numba_gemm.compile.sass import disassemble
from numba_gemm.emulate import run_form
from numba_gemm.emulator.hazards import Deadlock, MbarrierMisuse, MissingProxyFence, SharedMemoryRace, UnwaitedAsyncCopy
from numba_gemm.emulator.machine import Machine
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses
from numba_gemm.tensorcore import specs, tma
from numba_gemm.tensorcore.specs import T4, t4_config, t4_parameters
from numba_gemm.tensorcore.t4 import T4Parameters
from numba_gemm.tensorcore.t4_choose import FORMS, TMA_FORMS, choose_form

TYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
LONG = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
LAYOUTS = list(product(("row", "column"), repeat=2))
#: A form small enough for tests of one tile to be quick; every path of the template is in it.
SMALL = T4Parameters(block_m=64, block_n=64, block_k=32, warp_m=32, warp_n=32, stages=3, group_m=2, copies="tma")


def on_16_bytes(values, layout, dtype):
    """A stack of matrices whose rows (columns) begin at multiples of 16 bytes; NaN lies between them."""
    stored = values if layout == "row" else values.transpose(0, 2, 1)
    batch, rows, columns = stored.shape
    flat = np.full(batch * rows * (columns + 15) + 8, np.nan, dtype)
    flat = flat[-(flat.__array_interface__["data"][0] % 16) // 2 % 8 :]
    leading = columns + -columns % 8
    array = flat[: batch * rows * leading].reshape(batch, rows, leading)[:, :, :columns]
    array[...] = stored
    return array if layout == "row" else array.transpose(0, 2, 1)


def multiply(p, m, n, k, *, kind="integer", alpha=1.0, beta=0.0, splits=1, batch=1, c_pad=None):
    """C = alpha·A·B + beta·C by one form; returns C, what it should be in FP64, and the report."""
    rng = np.random.default_rng(m * 7 + n * 3 + k)

    def drawn(*shape):
        whole = rng.integers(-3, 4, shape).astype(np.float64)
        return whole if kind == "integer" else rng.standard_normal(shape)

    a = on_16_bytes(drawn(batch, m, k), p.a_layout, TYPES[p.dtype])
    b = on_16_bytes(drawn(batch, k, n), p.b_layout, TYPES[p.dtype])
    width = n + (-n % 8 if c_pad is None else c_pad)
    room = on_16_bytes(np.full((batch, m, width), np.nan), "row", TYPES[p.c_dtype])
    c = room[:, :, :n]
    if beta:
        c[...] = drawn(batch, m, n)
    want = alpha * (a.astype(np.float64) @ b.astype(np.float64))
    if beta:
        want += beta * c.astype(np.float64)

    def strides(x, layout):
        apart, rows, columns = (stride // x.itemsize for stride in x.strides)
        return apart, rows if layout == "row" else columns

    (batch_a, lda), (batch_b, ldb), (batch_c, ldc) = strides(a, p.a_layout), strides(b, p.b_layout), strides(c, "row")
    problem = Problem(
        m, n, k, lda=lda, ldb=ldb, ldc=ldc, alpha=alpha, beta=beta, dtype=LONG[p.dtype], c_dtype=LONG[p.c_dtype],
        a_layout=p.a_layout, b_layout=p.b_layout, batch=batch,
        batch_stride_a=batch_a, batch_stride_b=batch_b, batch_stride_c=batch_c,
    )  # fmt: skip
    machine = Machine("sm_90")
    at = Addresses(machine.place(a), machine.place(b), machine.place(c, written=beta != 0))
    report = run_form(machine, problem, T4, t4_config(p, splits), at)
    machine.fetch(at.c, c)
    assert np.isnan(room[:, :, n:].astype(np.float32)).all()
    return c, want, report


def check(p, m, n, k, **how):
    c, want, report = multiply(p, m, n, k, **how)
    np.testing.assert_array_equal(
        c.astype(np.float64), want.astype(np.float32).astype(TYPES[p.c_dtype]).astype(np.float64)
    )
    return report


# --- results


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
@pytest.mark.parametrize("block_k", [32, 64])
def test_whole_numbers_are_exact_in_all_layouts(layouts, block_k):
    p = replace(SMALL, a_layout=layouts[0], b_layout=layouts[1], block_k=block_k)
    for shape in ((1, 1, 1), (65, 1, 33), (70, 75, 99)):
        check(p, *shape)
    check(replace(p, dtype="bf16", c_dtype="f32", blocks=2), 130, 136, 257, alpha=0.5, beta=-2.0)


@pytest.mark.parametrize("block_k", [32, 64])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_number_of_k_blocks_goes_round_the_ring(stages, block_k):
    """One block takes three tiles, so that the second and the third begin at any stage and in either parity."""
    p = replace(SMALL, stages=stages, blocks=1, block_k=block_k)
    for depth in range(1, 2 * stages + 1):
        check(p, 64, 64 * 3, block_k * depth - 8)


@pytest.mark.parametrize("blocks", [2, 5])
def test_few_blocks_take_all_tiles_in_turn(blocks):
    check(replace(SMALL, blocks=blocks), 130, 192, 32 * 6)
    check(replace(SMALL, blocks=blocks, split_k=True), 70, 129, 99, splits=4)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_split_k_adds_all_parts_even_empty_ones(splits):
    """99 in nine parts of whole k-blocks: four of them have something to do."""
    p = replace(SMALL, split_k=True)
    check(p, 70, 75, 99, splits=splits, alpha=3.0, beta=-1.0)
    check(replace(p, block_k=64, dtype="bf16", c_dtype="f32"), 5, 130, 99, splits=splits)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
def test_a_batch_is_one_launch(layouts):
    p = replace(SMALL, a_layout=layouts[0], b_layout=layouts[1], blocks=2)
    check(p, 65, 72, 40, batch=3)
    check(replace(p, split_k=True), 65, 72, 70, batch=2, splits=2, beta=1.0)


def test_a_batch_beyond_the_grid_takes_several_launches(monkeypatch):
    monkeypatch.setattr(specs, "MAX_GRID_Z", 2)
    check(SMALL, 40, 24, 40, batch=5)


@pytest.mark.parametrize("c_dtype", ["f16", "f32"])
@pytest.mark.parametrize("pad", [0, 1, 4])
def test_any_alignment_of_c(c_dtype, pad):
    p = replace(SMALL, c_dtype=c_dtype)
    for n in (72, 77):
        check(p, 66, n, 40, c_pad=pad)
        check(p, 66, n, 40, c_pad=pad, alpha=-1.5, beta=0.5)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
def test_bits_are_those_of_the_other_form(layouts):
    """Each element is the same sum in the same order, whoever copies."""
    p = replace(SMALL, a_layout=layouts[0], b_layout=layouts[1], c_dtype="f32")
    changes = ({}, {"split_k": True}, {"block_k": 64})
    for change in changes[: 3 if layouts[0] == "row" else 1]:
        one = replace(p, **change)
        other = replace(one, copies="async")
        splits = 2 if one.split_k else 1
        c, _, _ = multiply(one, 70, 75, 140, kind="normal", splits=splits)
        same, _, _ = multiply(other, 70, 75, 140, kind="normal", splits=splits)
        assert c.tobytes() == same.tobytes()


@pytest.mark.parametrize("form", [*FORMS[:2], *FORMS[4:7]], ids=lambda f: "x".join(map(str, f.values())))
def test_shipped_shapes_are_right_and_free_of_bank_conflicts(form):
    layouts = LAYOUTS[FORMS.index(form) % 4]
    p = T4Parameters(**form, a_layout=layouts[0], b_layout=layouts[1], blocks=1, copies="tma")
    assert p.fits((9, 0))
    report = check(p, p.block_m, p.block_n + 8, p.block_k * (p.stages + 1) + 8)
    assert report.counters.shared_load_conflicts + report.counters.shared_store_conflicts == 0


# --- faults


def faulty(old, new):
    """Three tiles of a form of which one statement was changed, wherever it stands."""
    p = replace(SMALL, blocks=1)
    text = p.render()
    assert old in text, f"no {old!r}"
    text = text.replace(old, new)
    machine = Machine("sm_90")
    a, b = np.ones((64, 200), np.float16), np.ones((200, 192), np.float16)
    c = np.zeros((64, 192), np.float16)
    problem = Problem(64, 192, 200, lda=200, ldb=192, ldc=192, dtype="float16", c_dtype="float16")
    at = Addresses(machine.place(a), machine.place(b), machine.place(c))
    (launch,) = T4.plan(problem, t4_config(p)).launches
    values = [
        machine.tensor_map(v.address, v.element, v.dims, v.strides, v.box, swizzle=v.swizzle)
        if hasattr(v, "box")
        else v
        for v in launch.values(at)
    ]
    machine.launch(text, launch.grid, p.threads, launch.parameters.pack(*values), shared_bytes=p.dynamic_shared_bytes)
    machine.fetch(at.c, c)
    np.testing.assert_array_equal(c, np.float16(200))


def waiting(label):
    """A loop that waits for a phase to end."""
    found = re.search(rf"^{label}:\n.*try_wait.*\n.*bra +{label};$", SMALL.render(), re.M)
    assert found
    return found[0]


ASK = "@%more mbarrier.test_wait.parity.shared::cta.b64 %ready, [%full], %parity;"
RELEASE = "@%first_lane mbarrier.arrive.shared::cta.b64 _, [%release + 24];"
FAULTS = {
    "no wait for the first k-block": (waiting("WAIT_FIRST"), "", UnwaitedAsyncCopy),
    "no wait for the others": (ASK, "setp.eq.u32 %ready, 0, 0;", UnwaitedAsyncCopy),
    "the parity never flips": ("@%q xor.b32     %parity, %parity, 1;", "", (UnwaitedAsyncCopy, Deadlock)),
    "the copier's parity starts wrong": ("mov.u32         %fill_parity, 1;", "mov.u32 %fill_parity, 0;", Deadlock),
    "stages are never given back": (RELEASE, "", Deadlock),
    "stages are given back by all lanes": (RELEASE, RELEASE.replace("@%first_lane ", ""), (MbarrierMisuse, Deadlock)),
    "too many bytes": ("[%fill_full], 8192;", "[%fill_full], 8208;", Deadlock),
    "too few bytes": ("[%fill_full], 8192;", "[%fill_full], 8176;", MbarrierMisuse),
    "no fence": ("fence.mbarrier_init.release.cluster;", "", MissingProxyFence),
    "no barrier after the initialisation": ("bar.sync        0;", "", MbarrierMisuse),
}  # fmt: skip


def test_the_text_with_no_fault_is_right():
    faulty(".target sm_90", ".target sm_90")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    old, new, kind = FAULTS[fault]
    with pytest.raises(kind):
        faulty(old, new)


def test_a_stage_that_is_filled_too_early_is_found():
    with pytest.raises((SharedMemoryRace, UnwaitedAsyncCopy, MbarrierMisuse)):
        faulty(waiting("WAIT_EMPTY_NEXT"), "")


def test_a_stage_that_is_given_back_too_early_is_found():
    text = SMALL.render()
    begin = text.index("K_BLOCK:\n")
    loop = text[begin : text.index(RELEASE) + len(RELEASE)]
    early = loop.replace("K_BLOCK:", "K_BLOCK:\n    " + RELEASE.replace("%release", "%full")).replace(RELEASE, "")
    with pytest.raises(SharedMemoryRace):
        faulty(loop, early)


# --- parameters and choice


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"copies": "bulk"}, "copies = 'bulk'"),
        ({"aligned_b": False}, "copies = 'async'"),
        ({"block_m": 512, "warp_m": 128, "warp_n": 32, "block_n": 64}, "256 rows"),
        ({"stages": 8, "block_m": 256, "block_n": 256, "warp_m": 64, "warp_n": 128}, "registers"),
        ({"stages": 8, "block_m": 128, "block_n": 256, "block_k": 64, "warp_m": 64, "warp_n": 64}, "shared memory"),
    ],
    ids=str,
)
def test_constraints_are_named(change, named):
    with pytest.raises(KernelConstraintError, match=re.escape(named)):
        replace(SMALL, **change)


def test_maps_have_the_swizzle_by_which_fragments_are_read():
    p = replace(SMALL, a_layout="row", b_layout="row")
    assert (p.map_a_box, p.map_a_swizzle) == ((32, 64, 1), "64B")
    assert (p.map_b_box, p.map_b_swizzle) == ((64, 32, 1), "128B")
    p = replace(p, block_k=64)
    assert (p.map_a_box, p.map_a_swizzle) == ((64, 64, 1), "128B")


def problem(m=256, n=256, k=256, **changes):
    values = {"lda": k, "ldb": n, "ldc": n, "dtype": "bfloat16", "c_dtype": "bfloat16", **changes}
    return Problem(m, n, k, **values)


def chosen(arch=(9, 0), **changes):
    return t4_parameters(T4.select(problem(**{"m": 4096, "n": 4096, "k": 4096, **changes}), 132, arch))


def test_tma_copies_large_tiles_on_gpus_that_have_it_and_room():
    assert (chosen().copies, chosen().block_m, chosen().block_n) == ("tma", 128, 256)
    for layouts in LAYOUTS:
        assert chosen(a_layout=layouts[0], b_layout=layouts[1]).copies == "tma"
    assert chosen((10, 0)).copies == "tma"
    assert chosen(m=512, n=512, k=512).copies == "async"  # a smaller tile
    for arch in ((8, 0), (8, 6), (8, 9), (12, 0)):
        assert chosen(arch).copies == "async", arch


@pytest.mark.parametrize(
    "change", [{"a_offset": 2}, {"ldb": 4100}, {"lda": 0}, {"ldb": -4096}, {"k": 0, "lda": 8}], ids=str
)
def test_tma_does_not_copy_what_it_cannot_read(change):
    assert chosen(**change).copies == "async"
    given, config = problem(4096, 4096, 4096), T4.select(problem(4096, 4096, 4096), 132, (9, 0))
    assert T4.unmet(given, config) is None
    # A table of measured forms may hold one for a product that differs in this alone.
    assert T4.unmet(replace(given, **change), config) is not None


@pytest.mark.parametrize("arch", [(9, 0), (10, 0), (12, 0)], ids=str)
def test_rows_with_room_between_them_wait_for_a_run_on_a_gpu(arch):
    """TMA could read them whatever their length, where cp.async copies them element by element."""
    for size in (65, 513, 4097):
        assert chosen(arch, m=size, n=size, k=size, lda=size + 7, ldb=size + 7).copies == "async"


def test_a_form_for_such_rows_is_right():
    p, splits = choose_form(
        96, 80, 700, 4, compute_capability=(9, 0), by_tma=True, aligned_a=False, aligned_b=True, b_layout="column"
    )
    check(replace(p, copies="tma", aligned_a=True), 96, 80, 700, splits=splits)


def test_the_choice_among_the_other_forms_is_as_it_was():
    """By TMA the large tiles gain a little; a product gets its old tile, or a large one that wasn't far behind."""
    record = json.loads((Path(__file__).parents[1] / "data/h200_t4_forms.json").read_text())
    hopper = {"compute_capability": (9, 0), "dtype": "bf16", "c_dtype": "bf16"}
    large = 0
    for row in record["products"]:
        if not row["aligned"]:
            continue
        old, new = (choose_form(*row["shape"], record["sm_count"], by_tma=tma, **hopper) for tma in (False, True))
        if new[0].copies == "async":
            assert new == old
            continue
        large += 1
        label = "{0.block_m}x{0.block_n}x{0.block_k} {0.warp_m}x{0.warp_n} {0.stages} stages".format
        times = [row["us"][label(p)][str(splits)] for p, splits in (old, new)]
        assert times[1] < 1.06 * times[0], row["shape"]  # in the times by cp.async, which TMA betters
    assert large >= 8


def test_configs_of_the_other_form_are_what_they_were():
    assert [dict(config).get("copies") for config in T4.configs].count("tma") == 2 * len(TMA_FORMS)
    for config in T4.configs:
        assert "producer" not in dict(config)
        assert dict(config).get("copies", "tma") == "tma"
        assert t4_config(t4_parameters(config)) == config
    assert t4_parameters(t4_config(SMALL)) == SMALL


def test_forms_need_a_gpu_with_tma():
    for form in TMA_FORMS:
        p = T4Parameters(**form)
        assert [arch for arch in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)) if p.fits(arch)] == [(9, 0), (10, 0)]
    assert SMALL.fits((12, 0))
    assert not SMALL.fits((8, 9))


@pytest.mark.parametrize("matrix", ["A", "B"])
def test_what_tma_cannot_read_is_said(matrix):
    stride = f"ld{matrix.lower()}"
    for change, named in (
        ({f"{matrix.lower()}_offset": 8}, "8 bytes past"),
        ({stride: 260}, "not a multiple of 8"),
        ({stride: 8}, "not one of 256"),
        ({"batch": 2, f"batch_stride_{matrix.lower()}": 4}, "batch stride"),
        ({"batch": 2, f"batch_stride_{matrix.lower()}": -8}, "batch stride"),
    ):
        assert named in (tma.unreadable(problem(**change), matrix) or "")
    assert tma.unreadable(problem(), matrix) is None


# --- the assembler

needs_ptxas = pytest.mark.skipif(find_tool("ptxas") is None, reason="ptxas is not installed")
needs_nvdisasm = pytest.mark.skipif(find_tool("nvdisasm") is None, reason="nvdisasm is not installed")


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("form", [*FORMS[:2], *FORMS[3:7]], ids=lambda f: "x".join(map(str, f.values())))
def test_shipped_shapes_do_not_spill(form, arch):
    layouts = LAYOUTS[(FORMS.index(form) + (arch == "sm_120")) % 4]
    p = T4Parameters(**form, a_layout=layouts[0], b_layout=layouts[1], copies="tma", split_k=form["warp_n"] == 32)
    number = int(arch[3:])
    cubin, log, _ = assemble(p.render(), arch)
    found = read_resources(log, cubin, "t4", (number // 10, number % 10))
    assert not found.uses_local_memory
    assert found.registers <= p.registers


@needs_ptxas
@needs_nvdisasm
def test_the_main_loop_is_mma_and_ldmatrix_and_little_else():
    p = T4Parameters(**FORMS[0], copies="tma")
    cubin, _, _ = assemble(p.render(), "sm_90")
    mix = disassemble(cubin).main_loop_mix()
    assert mix["HMMA.16816"] == 2 * p.block_k
    assert mix["LDSM"] == 2 * p.block_k // 4
    assert not mix["BAR"]
    assert not mix["LDGSTS"]
    assert sum(mix.values()) / mix["HMMA.16816"] < 2.6  # a good half of the rest is for the first warp alone


def test_the_text_is_tidy():
    text = T4Parameters(**FORMS[0], copies="tma").render()
    assert text.isascii()
    assert "\n\n\n" not in text
    assert text.startswith("// t4 fed by TMA")
    assert not re.search(r"[ \t]$", text, re.M)
    assert "%%" not in text
