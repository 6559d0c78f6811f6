"""v8 on the emulator: every layout, alignment, edge, batch and split; no hazards, no bank conflicts. Needs no GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from numba_gemm.catalog import LADDER
from numba_gemm.choose import for_blocks, in_one_run, suits_blocks
from numba_gemm.emulate import run_form
from numba_gemm.emulator import Machine
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.v8_choose import SHAPES, Choice, choices, choose_form, modelled, parameters_for
from numba_gemm.fp32.v8_parameters import V8Parameters
from numba_gemm.fp32.v8_pipelined import SPEC, candidates
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses
from numba_gemm.validate import check, reference

#: Small enough for quick tests, with every loop and path of the kernel in it.
SMALL = V8Parameters(
    block_m=64, block_n=64, block_k=16, warp_m=32, warp_n=32, thread_m=8, thread_n=4, parts=2, blocks_per_sm=1
)
LAYOUTS = tuple(itertools.product(("row", "column"), repeat=2))


def form(p, **changes):
    """``p`` with changes; a factor whose tile can't be staged is transposed word by word."""
    return replace(p, **changes)


def placed(machine, values, layout, leading, offset, apart):
    """A stack of matrices in emulated memory, ``leading`` elements from a row (column) to the next; its address."""
    rows = values if layout == "row" else values.transpose(0, 2, 1)
    batch, count, length = rows.shape
    elements = (batch - 1) * apart + (count - 1) * leading + length
    base = machine.alloc(4 * elements + 16) + 4 * offset
    for z in range(batch):
        for r in range(count):
            machine.write(base + 4 * (z * apart + r * leading), np.ascontiguousarray(rows[z, r]))
    return base


def run(
    p,
    m,
    n,
    k,
    *,
    inputs="integer",
    alpha=1.0,
    beta=0.0,
    batch=1,
    tiles=0,
    blocks=0,
    copied="",
    misaligned="",
    shared="",
    b_stored="",
    vectors=(),
    arch="sm_90",
):
    """One product by one form, held against float64. ``misaligned`` matrices begin on an odd word, with odd strides;
    the factors in ``shared`` are the same for the whole batch; B lies as ``b_stored`` says if it is copied. Returns the
    report and C."""
    rng = np.random.default_rng(m * 7 + n * 3 + k)

    def draw(*shape):
        drawn = rng.integers(-3, 4, shape) if inputs == "integer" else rng.standard_normal(shape)
        return drawn.astype(np.float32)

    machine = Machine(arch)
    values = {"a": draw(1 if "a" in shared else batch, m, k), "b": draw(1 if "b" in shared else batch, k, n)}
    values["c"] = draw(batch, m, n)
    layouts = {"a": p.a_layout, "b": p.b_layout, "c": "row"}
    if "a" in copied:
        layouts["a"] = "row"
    if "b" in copied:
        layouts["b"] = b_stored or "row"
    address, leading, apart = {}, {}, {}
    for name, matrix in values.items():
        length = matrix.shape[2] if layouts[name] == "row" else matrix.shape[1]
        count = matrix.shape[1] if layouts[name] == "row" else matrix.shape[2]
        odd = name in misaligned
        leading[name] = length + (2 - length % 2 - 1 if odd else -length % 4)
        leading[name] += odd and leading[name] % 2 == 0
        apart[name] = count * leading[name] + (1 if odd else 0)
        offset = 1 if odd else 0
        stored = matrix if name != "c" or beta else matrix * 0
        address[name] = placed(machine, stored, layouts[name], leading[name], offset, apart[name])
    problem = Problem(
        m, n, k, "float32", leading["a"], leading["b"], leading["c"],
        *(address[name] % 16 for name in "abc"), alpha, beta, "float32", layouts["a"], layouts["b"], batch,
        0 if "a" in shared or batch == 1 else apart["a"], 0 if "b" in shared or batch == 1 else apart["b"],
        apart["c"] if batch > 1 else 0,
    )  # fmt: skip
    config = Choice(p, tiles, blocks, copied, apart=vectors).config
    at = Addresses(address["a"], address["b"], address["c"])
    report = run_form(machine, problem, SPEC, config, at)
    got = np.empty((batch, m, n), np.float32)
    for z in range(batch):
        for r in range(m):
            got[z, r] = machine.read(address["c"] + 4 * (z * apart["c"] + r * leading["c"]), np.float32, n)
        want = reference(
            values["a"][z % len(values["a"])],
            values["b"][z % len(values["b"])],
            values["c"][z] if beta else None,
            alpha=alpha,
            beta=beta,
        )
        verdict = check(got[z], want, exact=inputs == "integer")
        assert verdict, f"product {z}: {verdict.message}"
    assert report.counters.shared_load_conflicts == report.counters.shared_store_conflicts == 0
    return report, got


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{block_m}x{block_n}".format(**s.parameters))
def test_lanes_store_neighbours_where_rows_of_c_begin_anywhere(shape):
    p = parameters_for(shape, Problem.packed(127, 127, 127))
    size = p.block_m, p.block_n, 32
    report, _ = run(p, *size, misaligned="abc")
    # 32 floats touch at most five sectors; stores 16 bytes apart would touch 16.
    assert report.counters.global_store_sectors <= 5 * p.block_m * p.block_n / 32
    summed, _ = run(p, *size[:2], 64, misaligned="abc", tiles=1, blocks=2)
    assert summed.counters.shared_store_conflicts == 0


def test_stores_by_rows_before_sm_90():
    """There a warp waits at a barrier of its own."""
    for shape in (SHAPES[1], SHAPES[3]):  # one slice of k, and four
        p = parameters_for(shape, Problem.packed(127, 127, 127), arch=(8, 0))
        run(p, p.block_m + 3, p.block_n - 1, 37, misaligned="abc", beta=-0.5, arch="sm_80")
    run(p, 67, 61, 165, misaligned="abc", tiles=2, blocks=5, arch="sm_80")


# --- the last row and column apart


@pytest.mark.parametrize(
    ("layouts", "vectors"),
    [
        (("row", "row"), {"column": 1}),
        (("row", "row"), {"row": 3}),
        *((layouts, {"column": 2, "row": 1}) for layouts in LAYOUTS),
    ],
    ids=str,
)
def test_a_row_and_a_column_apart(layouts, vectors):
    p = form(SMALL, a_layout=layouts[0], b_layout=layouts[1], a_width=1, b_width=1, c_width=1)
    m, n = 64 + ("row" in vectors), 64 + ("column" in vectors)
    report, _ = run(p, m, n, 300, misaligned="abc", vectors=tuple(vectors.items()))
    assert report.blocks_run == p.tiles(64, 64)
    run(p, m, n, 40, inputs="normal", misaligned="bc", batch=2, alpha=-0.5, beta=2.0, vectors=tuple(vectors.items()))


def test_parts_of_vectors_and_of_tiles_have_workspaces_of_their_own():
    p = form(SMALL, a_width=1, b_width=1, c_width=1)
    vectors = (("column", 2), ("row", 2))
    run(p, 129, 129, 1200, misaligned="abc", tiles=4, blocks=8, vectors=vectors, beta=1.0)


def test_what_would_be_tiles_of_one_column_or_row_is_apart_in_large_products():
    for shape, names in (
        ((4095, 4097, 4099), {"column"}),
        ((4097, 4096, 4096), {"row"}),
        ((4097, 4097, 4097), {"row", "column"}),
        ((4096, 4098, 4096), set()),
        ((513, 513, 513), set()),
    ):
        assert {name for name, _ in by_model(*shape).apart} == names
        tied = shape in ((4097, 4096, 4096), (4097, 4097, 4097))  # by the trees another form is as fast there
        if not tied:
            assert {name for name, _ in chosen(*shape).apart} == names
        every = choices(Problem.packed(*shape), 132, (9, 0))
        these = [choice.cycles for choice in every if {name for name, _ in choice.apart} == names]
        most = 1.005 if tied else 1.001  # the trees know times to some 1%
        assert min(these) <= most * min(choice.cycles for choice in every)


def test_blocks_of_a_product_have_a_form_without_a_row_or_column_apart():
    problem = Problem.packed(4095, 4097, 4099)
    apart = choose_form(problem, 132, (9, 0)).config
    assert dict(apart)["column_apart"]
    form = for_blocks(problem, (9, 0), 132)
    assert suits_blocks(form)
    assert not suits_blocks(apart)
    for block in (problem, replace(problem, m=1), replace(problem, n=1), replace(problem, m=640, n=1024)):
        assert SPEC.unmet(block, form) is None
    assert SPEC.unmet(replace(problem, n=1), apart) == "C has no column beside the last one, which is apart"


# --- edges, layouts, alignment

SIZES = [(1, 1, 1), (3, 65, 33), (64, 64, 16), (70, 72, 100), (130, 67, 31)]


@pytest.mark.parametrize("layouts", LAYOUTS, ids="/".join)
@pytest.mark.parametrize("width", [4, 1])
def test_whole_numbers_are_exact_in_all_layouts(layouts, width):
    p = form(SMALL, a_layout=layouts[0], b_layout=layouts[1], a_width=width, b_width=width, c_width=width)
    for m, n, k in SIZES:
        size = tuple(-(-x // width) * width for x in (m, n, k))
        run(p, *size, misaligned="" if width == 4 else "abc")
    run(p, 68, 72, 20, misaligned="" if width == 4 else "abc", alpha=-0.5, beta=2.0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{block_m}x{block_n}".format(**s.parameters))
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
def test_shipped_forms(shape, odd):
    p = parameters_for(shape, Problem.packed(127, 127, 127) if odd else Problem.packed(128, 128, 128))
    m, n, k = p.block_m + 4, p.block_n - 4, 2 * p.block_k + 8
    run(p, m - odd, n - odd, k - odd, inputs="normal", misaligned="abc" if odd else "", alpha=1.5, beta=-1.0)


def test_a_tile_past_the_edge_reads_different_columns():
    """One element copied to all lanes takes as long as many: a tile with one column reads as much as any other."""
    p = form(SMALL, a_width=1, b_width=1, c_width=1)
    whole, _ = run(p, 64, 128, 64)
    edge, _ = run(p, 64, 65, 64, misaligned="b")
    assert edge.counters.global_load_sectors >= whole.counters.global_load_sectors


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_ring_and_slices(slices, stages):
    p = form(SMALL, k_slices=slices, stages=stages, block_k=8 * slices, a_width=1, parts=1)
    for k in (1, 8 * slices, 8 * slices * stages + 3, 100):
        run(p, 66, 60, k, misaligned="a")


def test_nothing_is_read_for_k_0():
    run(SMALL, 60, 64, 0, beta=2.0)
    run(SMALL, 60, 64, 0)


# --- batches and splits


def test_a_batch_is_one_launch_and_may_share_a_factor():
    run(SMALL, 68, 60, 36, batch=3, beta=1.0)
    run(SMALL, 68, 60, 36, batch=2, shared="a")
    run(form(SMALL, a_width=1, b_width=1), 67, 61, 35, batch=2, shared="b", misaligned="ab")


@pytest.mark.parametrize(("tiles", "blocks"), [(1, 2), (1, 5), (2, 3), (4, 4), (4, 7), (6, 19), (6, 60)])
def test_shared_tiles(tiles, blocks):
    """Blocks that begin and end inside tiles, tiles that one block computes whole, tiles beside the shared ones."""
    m, n, k = 132, 124, 164  # 3×2 tiles, 11 stages
    per_block = -(-tiles * SMALL.stages_in(k) // blocks)
    blocks = -(-tiles * SMALL.stages_in(k) // per_block)
    run(SMALL, m, n, k, tiles=tiles, blocks=blocks, alpha=2.0, beta=-1.0)


def test_shared_tiles_of_a_batch_and_of_slices():
    run(SMALL, 68, 60, 100, batch=2, tiles=2, blocks=5)
    run(
        form(SMALL, k_slices=2, parts=2, block_k=16, a_width=1, c_width=1),
        67,
        60,
        101,
        tiles=2,
        blocks=7,
        misaligned="ac",
    )


def test_many_parts_are_added_in_slices():
    run(SMALL, 60, 64, 16 * 41, tiles=1, blocks=41)


def test_a_split_product_has_the_same_bits_again():
    first = run(SMALL, 68, 60, 400, inputs="normal", tiles=2, blocks=9)[1]
    second = run(SMALL, 68, 60, 400, inputs="normal", tiles=2, blocks=9)[1]
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def test_forms_that_add_in_one_run_give_the_same_bits_wherever_c_is_cut():
    """Which is why a product of host arrays has the same bits in any blocks: each may have another of these forms."""
    m, n, k = 131, 70, 37
    large, small = (parameters_for(shape, Problem.packed(m, n, k)) for shape in SHAPES[:2])
    assert (large.thread_m, small.thread_m) == (16, 8)
    ones = [run(p, m, n, k, inputs="normal", misaligned="abc")[1] for p in (large, small)]
    np.testing.assert_array_equal(ones[0].view(np.uint32), ones[1].view(np.uint32))
    halves = run(small, m, n, k, inputs="normal", misaligned="abc", tiles=1, blocks=2)[1]
    assert (halves != ones[0]).any()


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (512, 4096, 4096), (300, 200, 5000), (64, 64, 8192), (1, 9, 5)])
def test_a_form_that_adds_in_one_run(shape):
    problem = Problem.packed(*shape)
    config, times = in_one_run(SPEC, problem, (9, 0), 132)
    p = dict(config)
    assert (p["split_blocks"], p["k_slices"], p["copied"]) == (0, 1, "")
    best = choose_form(problem, 132, (9, 0))
    assert times >= 1
    assert (times == 1) == (config == best.config)
    assert in_one_run(LADDER["v7"], problem, (9, 0), 132) is None


def test_large_products_lose_little_in_one_run_and_deep_ones_much():
    assert in_one_run(SPEC, Problem.packed(4096, 4096, 4096), (9, 0), 132)[1] < 1.25
    assert in_one_run(SPEC, Problem.packed(128, 128, 65536), (9, 0), 132)[1] > 10


@pytest.mark.parametrize("copied", ["a", "b", "ab"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
def test_misaligned_factors_are_copied_first(copied, b_layout):
    p = form(
        SMALL,
        a_layout="column" if "a" in copied else "row",
        a_width=4 if "a" in copied else 1,
        b_layout="row" if "b" in copied else b_layout,
        b_width=4 if "b" in copied else 1,
        c_width=1,
    )
    for batch in (1, 2):
        run(p, 67, 61, 35, copied=copied, misaligned="abc", batch=batch, tiles=1, blocks=2)


@pytest.mark.parametrize("copied", ["a", "b", "ab"])
def test_aligned_factors_are_turned_first(copied):
    """What large products get: k-contiguous factors as the tiles want them, here of several tiles and a shared one."""
    p = form(
        SMALL,
        a_layout="column" if "a" in copied else "row",
        b_layout="row",
        parts=1 if "a" in copied else SMALL.parts,
    )
    run(p, 132, 72, 44, copied=copied, b_stored="column", inputs="normal", tiles=1, blocks=2)
    run(p, 64, 68, 20, copied=copied, b_stored="column", batch=2, shared="b", beta=1.0)


# --- the choice


@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("sm_count", [1, 28, 132])
def test_every_problem_gets_a_form(arch, sm_count):
    for m, n, k in ((1, 1, 0), (1, 1, 1), (256, 256, 256), (1000, 1001, 1002), (128, 128, 65536), (70000, 3, 5)):
        for layouts in LAYOUTS:
            problem = replace(Problem.packed(m, n, k), a_layout=layouts[0], b_layout=layouts[1])
            choice = choose_form(problem, sm_count, arch)
            assert choice.parameters.fits(arch)
            assert (choice.parameters.a_layout == layouts[0]) or "a" in choice.copied
            assert choice.config in candidates(problem, sm_count, arch)


def chosen(m, n, k):
    return choose_form(Problem.packed(m, n, k), 132, (9, 0))


def by_model(m, n, k):
    """What the cost model alone would choose."""
    found = modelled(Problem.packed(m, n, k), 132, (9, 0))
    return min(found, key=lambda one: one.choice.cycles + one.apart).choice


def test_large_products_get_large_tiles_and_small_ones_small_tiles():
    def tile(m, n, k):
        p = chosen(m, n, k).parameters
        return p.block_m * p.block_n

    assert tile(4096, 4096, 4096) == tile(16384, 16384, 16384) == 128 * 128
    assert tile(1024, 1024, 1024) in (128 * 64, 64 * 64)  # as fast as each other
    assert tile(512, 512, 512) == 32 * 64
    assert tile(256, 256, 256) == 32 * 32


def test_k_is_split_where_tiles_are_few_or_the_last_wave_is_not_full():
    assert chosen(128, 128, 65536).split_blocks >= 128
    assert chosen(2048, 2048, 2048).split_blocks == 0  # two waves, all but 3% of them full
    assert chosen(4096, 4096, 4096).split_blocks > 132
    assert chosen(4095, 4096, 4097).split_blocks > 0


def test_every_sm_gets_as_many_tiles_and_shares_as_it_holds_blocks():
    for shape, tiles in (((4096, 4096, 4097), 232), ((256, 14336, 4096), 224)):
        choice = by_model(*shape)
        assert (choice.split_tiles, choice.split_blocks) == (tiles, 264)
        assert (choice.parameters.tiles(*shape[:2]) - choice.split_tiles) % 264 == 0
    assert chosen(256, 14336, 4096).split_blocks == 264


@pytest.mark.parametrize(("extent", "stride"), [(4097, 4128), (4095, 4096), (4096, 4096), (31, 32), (5, 8)])
def test_rows_of_copied_factors_begin_at_lines_of_the_l2(extent, stride):
    problem = Problem.packed(extent, extent, 1000)
    p = parameters_for(SHAPES[1], problem, "ab")
    plan = SPEC.plan(problem, Choice(p, copied="ab").config)
    main = plan.launches[-1].values(Addresses(0, 0, 0, 0))
    assert (main[6], main[7]) == (stride, stride)
    assert all(address % 256 == 0 for address in main[:2])
    assert plan.workspace_bytes >= 2 * 4 * 1000 * stride


def test_factors_of_large_products_are_copied_if_tiles_would_be_copied_by_words():
    assert chosen(8191, 8193, 8195).copied == "ab"
    assert chosen(8192, 8192, 8192).copied == "a"  # row-major: turned once, not by every tile
    assert chosen(2048, 2048, 2048).copied == chosen(256, 256, 256).copied == ""
    columns = replace(Problem.packed(8192, 8192, 8192), a_layout="column")
    assert choose_form(columns, 132, (9, 0)).copied == ""
    huge = Problem.packed(2**16, 2**12, 2**16)  # an aligned A of 16 GB is read as it lies
    assert "a" not in choose_form(huge, 132, (9, 0)).copied


def test_a_split_covers_every_stage_of_its_tiles():
    for m, n, k in ((128, 128, 65536), (64, 64, 262144), (256, 512, 32768), (1332, 1316, 1567)):
        choice = chosen(m, n, k)
        stages = choice.parameters.stages_in(k)
        per_block = -(-choice.split_tiles * stages // choice.split_blocks)
        assert (choice.split_blocks - 1) * per_block < choice.split_tiles * stages <= choice.split_blocks * per_block


# --- constraints


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_m": 48}, "block_m = 48 is not a multiple"),
        ({"warp_m": 48}, "not a multiple of warp_m"),
        ({"thread_n": 5}, "thread_n = 5"),
        ({"warp_m": 64, "thread_m": 4}, "lanes"),
        ({"block_k": 12}, "block_k = 12"),
        ({"k_slices": 3}, "k_slices = 3"),
        ({"stages": 1}, "stages = 1"),
        ({"parts": 1}, "staged"),
        ({"parts": 3}, "parts = 3"),
        ({"blocks_per_sm": 8}, "registers"),
        ({"a_width": 2}, "a_width = 2"),
        ({"b_layout": "diagonal"}, "b_layout"),
        ({"stages": 64}, "shared memory"),
        ({"block_k": 8, "k_slices": 4, "a_width": 1, "parts": 1}, "evenly"),
        ({"group_m": 0}, "group_m = 0"),
    ],
)
def test_a_constraint_that_does_not_hold_is_named(changes, words):
    with pytest.raises(KernelConstraintError, match=words):
        replace(V8Parameters(), **changes)
