"""The choice of an FP32 kernel: what the models rank, on every shape, and against what an H200 measured. No GPU."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from numba_gemm.choose import choose
from numba_gemm.fp32 import choose_fp32, outer_choose, outer_tiles, skinny_specs, thin_choose, thin_tiles, v8_choose
from numba_gemm.fp32.choose_fp32 import SKINNY_COSTS, choose_kernel, corrected_skinny, skinny_cycles
from numba_gemm.fp32.v8_choose import SHAPES, Choice, choices, choose_form, cost
from numba_gemm.fp32.v8_parameters import V8Parameters
from numba_gemm.fp32.v8_pipelined import MOST_CANDIDATES, candidates
from numba_gemm.problem import Problem

RECORD = json.loads((Path(__file__).parents[1] / "data/h200_v8_forms.json").read_text())
H200 = {"arch": (9, 0), "sm_count": 132}
MHZ = 1980
#: What makes a tile shape: the measured forms of it differ in stages, parts and group_m as well.
TILE = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "thread_m", "thread_n", "k_slices")


def tile(parameters):
    return tuple(parameters[name] for name in TILE)


def measured():
    """Problem → (shape that the model knows or None, choice, µs) of each form that was timed; the suites' problems.

    Left out is what has become faster since the first run: copies of a factor that took two launches.
    """
    known = {tile(shape.parameters): shape for shape in SHAPES}
    found, suites = defaultdict(list), set()
    for values in RECORD["rows"]:
        row = dict(zip(RECORD["columns"], values, strict=True))
        m, n, k, run, copied, us = (row[name] for name in ("m", "n", "k", "run", "copied", "us"))
        parameters = RECORD["forms"][row["form"]]
        shape, problem = known.get(tile(parameters)), Problem.packed(m, n, k)
        suites |= {problem} if run < 2 else set()
        if run == 0 and any(extent % 4 for name, extent in (("a", m), ("b", n)) if name in copied):
            continue
        apart = tuple(row.get("apart", {}).items())
        split = row["split_tiles"], row["split_blocks"]
        choice = Choice(V8Parameters(**parameters), *split, copied, apart=apart)
        if shape is not None and parameters["stages"] != shape.parameters["stages"]:
            shape = None  # a depth of the ring that isn't shipped
        if choice.parameters.a_copies.mode == "staged" or parameters["group_m"] != 8:
            shape = None  # a way of copying, or of walking the tiles, that isn't shipped
        found[problem].append((shape, choice, us))
    return found, suites


MEASURED, SUITES = measured()
DRAWN = MEASURED.keys() - SUITES


def regret(problem):
    """How many times as long as the fastest form that was timed the one takes that costs the least by the model."""
    rows = MEASURED[problem]
    ranked = [(cost(shape, problem, 132, choice).cycles, us) for shape, choice, us in rows if shape is not None]
    return min(ranked)[1] / min(us for _, _, us in rows)


def errors(problems):
    return [
        abs(math.log(cost(shape, problem, 132, choice).cycles / MHZ / us))
        for problem in problems
        for shape, choice, us in MEASURED[problem]
        if shape is not None
    ]


@pytest.mark.parametrize("problem", sorted(SUITES, key=lambda p: (p.m, p.n, p.k)), ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_the_model_picks_what_was_measured_to_be_fast(problem):
    assert regret(problem) <= 1.01


def test_the_model_picks_what_was_measured_to_be_fast_on_random_shapes():
    regrets = sorted(map(regret, DRAWN))
    assert len(regrets) > 150
    assert sum(one <= 1.05 for one in regrets) >= 0.97 * len(regrets)
    assert regrets[-1] <= 1.16
    assert statistics.geometric_mean(regrets) < 1.01


def test_the_model_knows_the_times():
    for problems, median, most in ((SUITES, 0.03, 0.15), (DRAWN, 0.08, 0.3)):
        found = errors(problems)
        assert len(found) > 60
        assert statistics.median(found) < median
        assert statistics.quantiles(found, n=10)[-1] < most


def test_the_shapes_that_were_measured_are_those_of_the_suites_and_random_ones():
    assert RECORD["environment"]["gpu"] == "NVIDIA H200"
    assert {(4096, 4096, 4096), (1024, 1024, 1024), (128, 128, 65536)} <= {(p.m, p.n, p.k) for p in SUITES}
    assert len(SUITES) > 13
    assert (1664, 1860, 219) in {(p.m, p.n, p.k) for p in DRAWN}


# --- every shape


def drawn(count, seed=5):
    rng = random.Random(seed)
    for _ in range(count):
        m, n, k = (max(1, round(8192 ** rng.random())) for _ in range(3))
        layouts = rng.choice(("row", "column")), rng.choice(("row", "column"))
        batch = rng.choice((1, 1, 1, 2, 200))
        lda, ldb = (k if layouts[0] == "row" else m), (n if layouts[1] == "row" else k)
        yield Problem(
            m, n, k, "float32", lda, ldb, n, rng.choice((0, 0, 4)), rng.choice((0, 0, 8)), 0, 1.0, 0.0, "float32",
            *layouts, batch, *((m * k, k * n, m * n) if batch > 1 else (0, 0, 0)),
        )  # fmt: skip


@pytest.mark.parametrize("arch", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)])
def test_every_shape_gets_a_form_and_the_same_again(arch):
    for problem in drawn(150):
        spec, config = choose(problem, arch=arch, sm_count=60)
        assert spec.runs_on(arch)
        assert spec.unmet(problem, config) is None
        assert spec.plan(problem, config).launches
        choose_form.cache_clear()
        assert choose(problem, arch=arch, sm_count=60) == (spec, config)


def test_the_pick_costs_the_least_of_all_choices():
    for problem in drawn(100, seed=6):
        every = choices(problem, 132, (9, 0))
        best = choose_form(problem, 132, (9, 0))
        assert best.cycles == min(choice.cycles for choice in every)
        assert candidates(problem, 132, (9, 0))[0] == best.config
        assert len(candidates(problem, 132, (9, 0))) <= MOST_CANDIDATES
        name = choose_kernel(problem, 132, (9, 0))
        if 1 in (problem.m, problem.n):
            assert name == "gemv"
            continue
        costs = {"v8": best.cycles}
        if skinny_specs.refuses(problem) is None:
            costs["skinny"] = corrected_skinny(problem, 132, (9, 0))
        for kernel, tiles, choose_it in (("thin", thin_tiles, thin_choose), ("outer", outer_tiles, outer_choose)):
            if tiles.refuses(problem) is None:
                costs[kernel] = choose_it.choices(problem, 132, (9, 0))[0].cycles
        assert costs[name] == min(costs.values())


def test_a_dimension_of_every_size_is_taken():
    for size in range(1, 300):
        for problem in (
            Problem.packed(size, 200, 300),
            Problem.packed(200, size, 300),
            Problem.packed(200, 300, size),
        ):
            spec, config = choose(problem, **H200)
            assert spec.unmet(problem, config) is None


# --- the suites


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((1, 28672, 8192), "gemv"),
        ((4096, 1, 4096), "gemv"),
        ((1, 6727, 10), "outer"),
        ((1, 6727, 29), "v8"),
        ((1, 1458, 29), "gemv"),
        ((1, 1460, 11), "outer"),
        ((1, 1458, 11), "gemv"),
        ((1, 7, 2), "outer"),
        ((1, 7, 3), "gemv"),
        ((1, 8, 3), "outer"),
        ((1, 99, 8), "outer"),
        ((1, 6727, 33), "gemv"),
        ((6727, 1, 10), "outer"),
        ((6727, 1, 12), "gemv"),
        ((4224, 1, 10), "gemv"),
        ((1841, 3081, 5), "outer"),
        ((300, 301, 2), "outer"),
        ((4000, 4000, 33), "v8"),
        ((8, 28672, 8192), "skinny"),
        ((64, 28672, 8192), "skinny"),
        ((4, 2500, 900), "thin"),
        ((2500, 4, 900), "thin"),
        ((13, 401, 150), "thin"),
        ((8000, 2, 24), "thin"),
        ((28672, 8, 8192), "skinny"),
        ((65, 28672, 8192), "v8"),
        ((64, 64, 262144), "v8"),
        ((256, 256, 256), "v8"),
        ((16384, 16384, 16384), "v8"),
    ],
    ids=str,
)
def test_kernels_by_shape(shape, kernel):
    assert choose(Problem.packed(*shape), **H200)[0].name == kernel


def test_vectors_whose_matrix_lies_otherwise_are_gemv_s():
    tall = replace(Problem.packed(6727, 1, 10), a_layout="column", lda=6727)
    columns = replace(Problem.packed(1, 6727, 10), b_layout="column", ldb=10)
    batch = replace(Problem.packed(1, 6727, 10), batch=2, batch_stride_b=67270, batch_stride_c=6727)
    assert {choose(problem, **H200)[0].name for problem in (tall, columns)} == {"gemv"}
    assert choose(batch, **H200)[0].name == "v8"  # how outer does with a batch was not timed


def test_gpus_without_asynchronous_copies_get_the_rungs_that_need_none():
    assert choose(Problem.packed(2048, 2048, 2048), arch=(7, 5), sm_count=40)[0].name == "v7"
    assert choose(Problem.packed(256, 256, 256), arch=(7, 5), sm_count=40)[0].name == "v3"
    assert choose(Problem.packed(1, 256, 256), arch=(7, 5), sm_count=40)[0].name == "gemv"


def test_a_batch_counts_as_a_whole():
    one = Problem.packed(64, 64, 64)
    many = replace(one, batch=500, batch_stride_a=4096, batch_stride_b=4096, batch_stride_c=4096)
    assert choose_form(many, 132, (9, 0)).cycles > 2 * choose_form(one, 132, (9, 0)).cycles
    assert choose_form(many, 132, (9, 0)).split_blocks == 0


def test_every_tile_of_skinny_has_a_cost():
    tiles = {(form, height) for form, _, height in skinny_specs.TILES}
    assert tiles == set(SKINNY_COSTS)
    for m, columns in itertools.product((2, 9, 17, 33, 64), (False, True)):
        problem = Problem.packed(m, 28672, 8192)
        if columns:
            problem = replace(problem, b_layout="column", ldb=8192)
        read_once = problem.bytes_moved / (v8_choose.DRAM_BYTES * 132)
        assert skinny_cycles(problem, 132, (9, 0)) >= read_once
    assert choose_fp32.ASYNC_ARCH == (8, 0)
