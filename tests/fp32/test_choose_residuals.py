"""What is learnt of the cost models' errors: how trees are read, where they hold, how good picks are. No GPU."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numba_gemm.choose import choose
from numba_gemm.fp32 import choose_fp32, choose_residuals, outer_choose, outer_tiles, thin_choose, thin_tiles, v8_choose
from numba_gemm.fp32.choose_fp32 import choose_kernel, skinny_candidate, skinny_cycles
from numba_gemm.fp32.choose_residuals import (
    FEATURES,
    KINDS,
    LARGEST,
    NEAR,
    SM_COUNT,
    Candidate,
    Trees,
    corrected,
    features,
    known,
    load_trees,
)
from numba_gemm.fp32.thin_specs import THIN
from numba_gemm.fp32.v8_choose import SHAPES, candidate, choices, choose_form, modelled
from numba_gemm.fp32.v8_parameters import V8Parameters
from numba_gemm.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import fit_residuals as script  # noqa: E402
from chooser import label  # noqa: E402
from chooser_records import read_record, write_record  # noqa: E402

RECORD = json.loads((ROOT / "tests/data/h200_v8_forms.json").read_text())
H200 = ((9, 0), 132)
#: Runs of the record whose random shapes the trees haven't seen: other seeds than those of their records.
NOT_LEARNT_FROM = (3, 4)
#: What the trees may ask of thin and outer alone.
SPECIAL_FEATURES = FEATURES[-7:]


def one_of(problem, cycles=1e5, **values):
    plain = {"form": 0, "block_m": 128, "block_n": 128, "wide": (False, True, True), "copied": "", "tiles": 64}
    return Candidate(
        problem=problem, **(plain | {"stages": 64, "split_tiles": 0, "split_blocks": 0} | values), cycles=cycles
    )


# --- trees


def test_the_answers_are_the_bits_of_a_leaf():
    trees = Trees(
        features=np.array([0, 1, 1, 1], np.uint8),
        borders=np.array([0.5, 2.0, 1.0, np.inf], np.float32),
        asked=np.array([[0, 1], [2, 3]], np.uint16),
        leaves=np.array([[1.0, 2.0, 4.0, 8.0], [100.0, 200.0, -1.0, -1.0]]),
        bias=0.25,
    )
    rows = np.array([[0, 0], [1, 0], [0, 3], [1, 3], [0.5, 2.0]], np.float32)
    assert trees.predict(rows).tolist() == [101.25, 102.25, 204.25, 208.25, 201.25]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_trees_ask_about_features_that_there_are(kind):
    trees = load_trees(kind)
    count, questions = trees.asked.shape
    assert trees.borders.shape == trees.features.shape
    assert set(np.unique(trees.asked)) | {0} == set(range(len(trees.features)))
    assert trees.leaves.shape == (count, 2**questions)
    assert trees.features.max() < len(FEATURES)
    assert not np.isnan(trees.leaves).any()


def test_no_feature_is_there_for_nothing():
    asked = {kind: {FEATURES[index] for index in np.unique(load_trees(kind).features)} for kind in KINDS}
    assert asked["tiles"] | asked["thin"] == set(FEATURES)
    assert set(SPECIAL_FEATURES) == asked["thin"] - asked["tiles"]
    assert set(SPECIAL_FEATURES) <= asked["outer"]


def test_a_row_says_what_its_columns_are_called():
    problem = Problem.packed(130, 256, 1024)
    row = features(one_of(problem, form=2, copied="ab", tiles=200, split_tiles=68, split_blocks=132, cycles=2**17))
    assert len(row) == len(FEATURES)
    named = dict(zip(FEATURES, row, strict=True))
    assert named == {
        "kernel and form": 2,
        "lb M": math.log2(130),
        "lb N": 8.0,
        "lb K": 10.0,
        "A copied by 16 bytes": 0.0,
        "B copied by 16 bytes": 1.0,
        "C stored by 16 bytes": 1.0,
        "factors copied first (1: A, 2: B)": 3,
        "lb tiles": math.log2(200),
        "tiles whose k is shared": 68,
        "blocks that share it": 132,
        "tiles / SMs, the fraction": pytest.approx(200 / 132 - 1),
        "whole tiles of an SM": 1,
        "M / BM, the fraction": pytest.approx(2 / 128),
        "N / BN, the fraction": 0.0,
        "lb cycles": 17.0,
        "blocks / shared tiles": 132 / 68,
        "lb stages of a block": pytest.approx(math.log2(33)),
        "lb bytes": math.log2(4 * (130 * 1024 + 1024 * 256 + 130 * 256)),
        "blocks / SMs, the fraction": 0.0,
        "blocks of an SM": 2,
        "N beyond whole sectors of a row": 0,
        "K beyond whole lines of a row": 0,
        "stages beyond whole shares": 64 % 33,
        "stages that the shares have too many": 132 * 33 - 68 * 64,
        **dict.fromkeys(SPECIAL_FEATURES, 0.0),
    }


def test_thin_is_described_by_its_tile_and_parts():
    problem = Problem.packed(60, 4, 6000)
    tile = thin_tiles.tiles_of(problem)[2]
    one = thin_choose.candidate(problem, thin_choose.Choice(tile, 6, 1e4), 132, (9, 0))
    assert one.form == thin_choose.FIRST_FORM + 2 > len(SHAPES) + 1
    assert (one.kind, one_of(problem).kind) == ("thin", "tiles")
    last = thin_choose.candidate(
        Problem.packed(16, 61, 600),
        thin_choose.Choice(thin_tiles.TILES["across", 1, 16][-1], 1, 1e4),
        132,
        (9, 0),
    )
    assert last.form == thin_choose.FIRST_FORM + len(thin_tiles.shipped_configs()) - 1
    assert (last.split_tiles, last.split_blocks) == (0, 0)
    # Rows 4 × (32 / 8), by 4 warps of which all share k; passes of 4 · 8 · 4 terms.
    assert (one.block_m, one.block_n, one.tiles, one.stages) == (16, 0, 4, 47)
    assert (one.split_tiles, one.split_blocks) == (4, 24)
    named = dict(zip(FEATURES, features(one), strict=True))
    special = [named[name] for name in SPECIAL_FEATURES]
    room = 24 / (132 * tile["blocks_per_sm"])
    assert special == pytest.approx([room, 16, 8, 4, 4, 4, 1024 / 128 % 1])  # outputs, lanes, warps, of them k's, steps


def test_outer_is_described_by_its_tile():
    problem = Problem.packed(60, 400, 13)
    tile = outer_tiles.tiles_of(problem)[2]  # 4 × 4 outputs by 2 warps, 4 terms a pass, two passes ahead, 12 blocks
    one = outer_choose.candidate(problem, outer_choose.Choice(tile, 1e4), 132, (9, 0))
    assert (one.kind, one.block_m, one.block_n, one.tiles, one.stages) == ("outer", 8, 128, 32, 4)
    assert (one.wide, one.split_blocks) == ((False, True, True), 0)
    named = dict(zip(FEATURES, features(one), strict=True))
    assert [named[name] for name in SPECIAL_FEATURES] == pytest.approx([32 / (132 * 12), 4, 4, 2, 2, 4, 1 / 4])
    forms = {
        outer_choose.candidate(replace(problem, n=n, ldb=n, ldc=n), outer_choose.Choice(tile, 1e4), 132, (9, 0)).form
        for n in (400, 401)
        for tile in outer_tiles.tiles_of(replace(problem, n=n, ldb=n, ldc=n))
    }
    assert forms == set(range(11))  # a tile that serves any alignment has one number


def test_candidates_far_from_the_cheapest_keep_their_cycles():
    problem = Problem.packed(1000, 1000, 1000)
    near, far = one_of(problem, 1e5), one_of(problem, 1e5 * NEAR * 1.01)
    by_trees = math.exp(load_trees("tiles").predict(np.array([features(near)], np.float32))[0])
    assert corrected([near, far]) == [pytest.approx(1e5 * by_trees), far.cycles]
    assert by_trees != 1


# --- where they hold


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"m": 1}, False),
        ({"n": 1}, False),
        ({"k": 0}, False),
        ({"k": LARGEST, "lda": LARGEST}, True),
        ({"k": LARGEST + 1, "lda": LARGEST + 1}, False),
        ({"a_layout": "column", "lda": 300}, False),
        ({"b_layout": "column", "ldb": 500}, False),
        ({"batch": 2, "batch_stride_a": 150_000}, False),
    ],
    ids=str,
)
def test_they_hold_for_what_was_timed(change, holds):
    problem = replace(Problem.packed(300, 400, 500), **change)
    assert known(problem, SM_COUNT, (9, 0)) is holds
    assert not known(problem, SM_COUNT, (8, 0))
    assert not known(problem, 108, (9, 0))
    assert known(problem, SM_COUNT, (9, 0), vectors=True) is (holds or 1 in (problem.m, problem.n))


def test_elsewhere_the_model_stands_alone(monkeypatch):
    monkeypatch.setattr(
        choose_residuals, "load_trees", lambda kind: pytest.fail(f"{kind}'s trees of another GPU were read")
    )
    problem = Problem.packed(300, 400, 500)
    for sm_count, arch in ((132, (8, 0)), (108, (9, 0)), (188, (12, 0))):
        by_model = [one.choice.cycles for one in modelled(problem, sm_count, arch)]
        assert [choice.cycles for choice in choices(problem, sm_count, arch)] == by_model


def test_a_correction_can_change_the_pick(monkeypatch):
    """Of v8's forms, and between v8 and skinny."""
    problem = Problem.packed(20, 3000, 1500)  # thin doesn't take it
    by_model = min(modelled(problem, 132, (9, 0)), key=lambda one: one.choice.cycles).choice
    form, count = v8_choose._form_of(by_model.parameters), len(SHAPES)

    def slower(*forms):
        def correct(candidates):
            return [one.cycles * (1.9 if one.form in forms else 1.0) for one in candidates]

        for module in (v8_choose, choose_fp32):
            monkeypatch.setattr(module, "corrected", correct)
        v8_choose.choose_form.cache_clear()
        return choose_kernel(problem, 132, (9, 0)), choose_form(problem, 132, (9, 0))

    try:
        assert slower(form)[1].parameters != by_model.parameters
        assert slower(*range(count))[0] == "skinny"
        assert slower(count, count + 1)[0] == "v8"
    finally:
        v8_choose.choose_form.cache_clear()


def test_skinny_is_described_by_its_tiles_and_runs():
    problem = Problem.packed(8, 4099, 1000)  # rows of B begin anywhere
    cycles = skinny_cycles(problem, *H200[::-1])
    one = skinny_candidate(problem, 132, (9, 0), cycles)
    assert (one.form, one.wide, one.cycles) == (len(SHAPES), (False, False, False), cycles)
    assert (one.tiles, one.split_tiles, one.stages) == (17, 17, 63)
    assert one.split_blocks == 17 * 63 // 8
    tall = replace(one.problem, m=4096, n=8, lda=1000, ldb=8, ldc=8)
    assert skinny_candidate(tall, 132, (9, 0), 1.0).form == len(SHAPES) + 1
    assert skinny_candidate(tall, 132, (9, 0), 1.0).wide == (False, True, False)


# --- picks


def test_picks_on_random_shapes_that_the_trees_have_not_seen():
    """Of v8's forms; each shape's were timed on an H200."""
    timed = defaultdict(dict)
    forms = [V8Parameters(**values) for values in RECORD["forms"]]
    for values in RECORD["rows"]:
        row = dict(zip(RECORD["columns"], values, strict=True))
        if row["run"] in NOT_LEARNT_FROM:
            problem = Problem.packed(row["m"], row["n"], row["k"])
            form = forms[row["form"]], row["split_tiles"], row["split_blocks"], row["copied"]
            timed[problem][form] = row["us"]
    regrets, by_model = [], []
    for problem, times in timed.items():
        found = [one for one in modelled(problem, 132, (9, 0)) if not one.choice.apart]
        keys = [(c.parameters, c.split_tiles, c.split_blocks, c.copied) for c in (one.choice for one in found)]
        there = [index for index, key in enumerate(keys) if key in times]
        assert len(there) == len(times)
        cycles = {"model": [found[index].choice.cycles for index in there]}
        if known(problem, 132, (9, 0)):
            cycles["trees"] = corrected([candidate(found[index].rest, found[index].choice) for index in there])
        for name, into in (("model", by_model), ("trees", regrets)):
            costs = cycles.get(name, cycles["model"])
            pick = there[costs.index(min(costs))]
            into.append(times[keys[pick]] / min(times.values()))
    assert len(regrets) > 350
    assert sum(one <= 1.05 for one in regrets) >= 0.985 * len(regrets)
    assert statistics.geometric_mean(regrets) < 1.004
    assert statistics.geometric_mean(regrets) < statistics.geometric_mean(by_model)


def test_picks_of_all_kernels_on_random_shapes_that_the_trees_have_not_seen():
    """The shapes of chooser.json, whose seed is none of those that were learnt from."""
    record = json.loads((ROOT / "bench/results/nvidia-h200/chooser.json").read_text())
    assert record["seed"] not in range(100, 110)
    regrets, by_kernel = [], defaultdict(int)
    for row in record["rows"]:
        spec, config = choose(Problem.packed(row["m"], row["n"], row["k"]), arch=(9, 0), sm_count=132)
        times = {name: us for _, name, us, _ in row["times"]}
        regrets.append(times[label(spec, config)] / min(times.values()))
        by_kernel[spec.name] += 1
    assert len(regrets) == 200
    assert max(regrets) <= 1.05
    assert statistics.geometric_mean(regrets) < 1.0015
    assert min(by_kernel[name] for name in ("gemv", "outer", "thin", "v8")) > 10


def test_times_of_thin_are_known_to_a_few_percent_at_shapes_that_the_trees_have_not_seen():
    """Of its forms within a quarter of the fastest; the model alone is 10% off."""
    record = json.loads((ROOT / "bench/results/nvidia-h200/chooser.json").read_text())
    errors = []
    for row in record["rows"]:
        problem = Problem.packed(row["m"], row["n"], row["k"])
        if thin_tiles.refuses(problem) is None:
            times = {name: us for _, name, us, _ in row["times"]}
            for choice in thin_choose.choices(problem, 132, (9, 0)):
                us = times.get(label(THIN, thin_tiles.config_of(problem, choice.tile, choice.parts)), math.inf)
                if us <= 1.25 * row["best_us"]:
                    errors.append(math.log(us * 1980 / choice.cycles))
    assert len(errors) > 350
    assert statistics.stdev(errors) < 0.03
    assert abs(statistics.mean(errors)) < 0.01


# --- the script that learns


def test_records_become_rows_of_features(tmp_path):
    path = ROOT / "bench/results/nvidia-h200/chooser_seed100.json.gz"
    rows = [row for row in read_record(path)[1] if 1 not in (row["m"], row["n"])][:20]
    write_record(tmp_path / "some.json", {"schema": 1}, rows)
    timings = script.read(script.read_records([tmp_path / "some.json"]), random=True)
    assert timings.rows.shape == (len(timings.us), len(FEATURES))
    assert sorted(set(timings.shape)) == list(range(20))
    fastest = np.array([min(us for _, _, us, _ in row["times"]) for row in rows])
    start = script.START_US / 1000  # of a batch of 1 ms
    np.testing.assert_allclose(timings.fastest, fastest - start * np.maximum(fastest, script.LAUNCH_US))
    known_kernels = sum(kernel in ("v8", "skinny", "thin") for row in rows for kernel, *_ in row["times"])
    assert len(timings.us) == known_kernels
    # The record's own pick was the model's.
    picked = [next(us for _, name, us, _ in row["times"] if name == row["pick"]) for row in rows]
    ratios = script.picks(timings, 0.0)
    found = zip(ratios, picked, fastest, strict=True)
    assert sum(abs(one - us / best) < 2e-3 for one, us, best in found) >= 19


@pytest.mark.parametrize("name", ["some.json", "some.json.gz"])
def test_records_are_read_as_they_were_written(tmp_path, name):
    times = [["v8", "v8 b", 2.5, 3], ["thin", "thin a=1", 2.25, 3], ["v8", "v8 c", 7.0, 1]]
    rows = [
        {"m": 2, "n": 3, "k": 4, "cublas_us": 3.125, "pick": "v8 b", "times": times},
        {"m": 5, "n": 6, "k": 7, "cublas_us": 4.0, "pick": None, "times": times[1:]},
    ]
    write_record(tmp_path / name, {"schema": 1}, rows)
    assert read_record(tmp_path / name) == ({"schema": 1}, rows)


def test_the_tuners_forms_of_the_suites_are_read_too():
    timings = script.read(script.read_suites(script.SUITES), random=False)
    assert len(timings.fastest) >= 10
    assert (timings.apart > 0).any()
    every = np.ones(len(timings.us), bool)
    trees = [load_trees(kind) for kind in KINDS]
    assert script.picks(timings, script.predict(trees, timings, every)).max() < 1.05


def test_trees_are_written_as_they_are_read(tmp_path, monkeypatch):
    trees = [load_trees(kind) for kind in KINDS]
    path = tmp_path / "trees.npz"
    script.save(trees, path)
    monkeypatch.setattr(choose_residuals, "TREES", path)
    rows = np.array([features(one_of(Problem.packed(m, 500, 600))) for m in (2, 70, 4000)], np.float32)
    for kind, before in zip(KINDS, trees, strict=True):
        again = load_trees.__wrapped__(kind)
        np.testing.assert_allclose(again.predict(rows), before.predict(rows), atol=1e-6)
