"""Which forms ``bench/chooser.py`` times beside the library's pick. No GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from numba_gemm.choose import choose
from numba_gemm.fp32 import outer_choose, outer_tiles, thin_choose, thin_tiles, v8_choose
from numba_gemm.problem import Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import chooser

THIN, WIDE = Problem.packed(1500, 5, 800), Problem.packed(300, 400, 500)
SHORT = Problem.packed(300, 401, 20)


def names(problem, **which):
    return [spec.name for spec, _ in chooser.contenders(problem, *chooser.H200, **which)]


@pytest.mark.parametrize("which", [{}, {"wide": True}, {"near": True}, {"kernel": "thin"}], ids=str)
@pytest.mark.parametrize("problem", [THIN, WIDE, SHORT], ids=["thin", "wide", "short"])
def test_the_pick_is_first_and_no_form_is_there_twice(problem, which):
    found = chooser.contenders(problem, *chooser.H200, **which)
    assert found[0] == choose(problem, arch=(9, 0), sm_count=132)
    assert len(set(found)) == len(found)


def test_what_is_nearly_equal_is_near_by_the_choice():
    cycles = {
        thin_tiles.config_of(THIN, choice.tile, choice.parts): choice.cycles
        for choice in thin_choose.choices(THIN, 132, (9, 0))
    }
    near = [
        cycles[config] for spec, config in chooser.contenders(THIN, *chooser.H200, near=True) if spec.name == "thin"
    ]
    assert chooser.FEWEST_NEAR <= len(near) <= chooser.MOST_NEAR
    assert near == sorted(near)
    assert max(near[chooser.FEWEST_NEAR :], default=0.0) <= chooser.NEAR * near[0]
    left_out = sorted(set(cycles.values()) - set(near))
    assert len(near) == chooser.MOST_NEAR or left_out[0] > chooser.NEAR * near[0]


def test_short_products_can_be_left_out():
    us = thin_choose.choices(THIN, 132, (9, 0))[0].cycles / chooser.MHZ
    assert chooser.contenders(THIN, *chooser.H200, near=True, over=0.99 * us)
    assert not chooser.contenders(THIN, *chooser.H200, near=True, over=1.01 * us)


def test_all_forms_of_thin_are_wide():
    found = thin_choose.choices(THIN, 132, (9, 0))
    wide = sum(choice.cycles <= chooser.WIDE * found[0].cycles for choice in found)
    assert names(THIN, wide=True).count("thin") == names(THIN, wide=True, kernel="thin").count("thin") == wide
    assert names(THIN, kernel="thin").count("thin") <= wide
    assert "thin" not in names(WIDE, wide=True)


def test_all_forms_of_outer_are_wide_and_vectors_have_them_too():
    for problem in (SHORT, Problem.packed(1, 401, 20)):
        found = outer_choose.choices(problem, 132, (9, 0))
        wide = sum(choice.cycles <= chooser.WIDE * found[0].cycles for choice in found)
        assert wide == len(outer_tiles.tiles_of(problem)) > 1
        assert (
            names(problem, wide=True).count("outer") == names(problem, wide=True, kernel="outer").count("outer") == wide
        )
    assert "outer" in names(Problem.packed(300, 401, 5), near=True)
    assert "outer" not in names(WIDE, wide=True)


def test_all_near_forms_of_v8_are_wide():
    found = v8_choose.choices(WIDE, 132, (9, 0))
    wide = sum(choice.cycles <= chooser.WIDE * min(one.cycles for one in found) for choice in found)
    assert names(WIDE, wide=True).count("v8") >= min(wide, chooser.MOST_WIDE)


def test_processes_find_the_same(monkeypatch):
    problems = [THIN, WIDE, Problem.packed(20, 30, 40)] * 4
    here = chooser.contenders_of_all(problems, *chooser.H200, near=True)
    assert len({tuple(one) for one in here}) == 3
    monkeypatch.setattr(chooser, "MANY", 10)
    assert chooser.contenders_of_all(problems, *chooser.H200, near=True) == here
