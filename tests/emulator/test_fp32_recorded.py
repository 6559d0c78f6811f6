"""The FP32 kernels on the emulator against what an H200 gave, bit for bit.

``tests/gpu/record_fp32.py`` writes the record on the GPU; the inputs are made again here from their seeds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from fp32_inputs import (  # noqa: E402
    EXPONENTS,
    KERNELS,
    SEED,
    FormCase,
    bits_of,
    canonical,
    cases,
    digest,
    draw,
    emulate,
    entry_of,
    place,
    plan,
    tile_of,
)

from numba_gemm.cases import Case  # noqa: E402
from numba_gemm.catalog import LADDER  # noqa: E402
from numba_gemm.fp32.gemv_specs import GEMV  # noqa: E402
from numba_gemm.fp32.outer_specs import OUTER  # noqa: E402
from numba_gemm.fp32.thin_specs import THIN  # noqa: E402
from numba_gemm.fp32.thin_tiles import TILES  # noqa: E402
from numba_gemm.fp32.v8_choose import SHAPES  # noqa: E402

RECORD = TESTS / "data" / "h200_fp32.json"

needs_record = pytest.mark.skipif(
    not RECORD.exists(), reason=f"no record {RECORD.name}: run tests/gpu/record_fp32.py on an H200"
)


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


@needs_record
def test_the_record_is_of_an_h200_and_of_these_cases(record):
    assert "H200" in record["environment"]["gpu"]
    assert record["seed"] == SEED
    assert record["mismatches"] == []
    assert list(record["sha256"]) == KERNELS
    for kernel in KERNELS:
        recorded = record["sha256"][kernel]
        assert list(recorded) == [str(case) for case in cases(kernel)]
        # Forms of a fixed list are those that the alignment asks for; a model's choice may have changed since.
        if kernel in LADDER and LADDER[kernel].select is None:
            assert all(recorded[str(case)]["entry"] == entry_of(*plan(kernel, case)[1:3]) for case in cases(kernel))


@needs_record
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gpu_s_bits(record, kernel, request):
    """Of the kernels with a form for each problem, which take seconds to compile, every fourth case but with --slow.

    Of thin, which has most forms, every eighth.
    """
    few = kernel not in LADDER or LADDER[kernel].select is not None
    step = (8 if kernel == "thin" else 4) if few and not request.config.getoption("--slow") else 1
    change = canonical if record["nan"] == "canonical" else lambda bits: bits
    wrong = []
    for case in list(cases(kernel))[::step]:
        recorded = record["sha256"][kernel][str(case)]
        result, form = emulate(kernel, case, recorded["entry"])
        assert form == recorded["entry"], f"{case}: another form"
        if digest(change(bits_of(result))) != recorded["sha256"]:
            wrong.append(str(case))
    assert wrong == []


# --- the inputs, on which the record rests


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cases_cover_every_layout_form_and_edge(kernel):
    every = list(cases(kernel))
    assert len({str(case) for case in every}) == len(every)
    assert {case.layout for case in every} >= {"packed", "padded", "sliced"}
    assert {case.inputs for case in every} >= set(EXPONENTS)
    # Of outer such a product, 1031×257×1, is among those that `numba-gemm check` ran on the GPU (checks.json).
    assert kernel == "outer" or any(case.k == 1 and case.m > 100 for case in every)
    assert any(case.alpha != 1 and case.beta != 0 for case in every)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name in LADDER and LADDER[name].select is None])
def test_the_ladder_s_cases_cover_its_row_major_forms(kernel):
    row_major = {config for config in LADDER[kernel].configs if "column" not in dict(config).values()}
    assert {plan(kernel, case)[2] for case in cases(kernel)} == row_major


@needs_record
def test_v8_s_cases_cover_its_tiles_copies_and_splits(record):
    """In the forms that were recorded, which were the model's choice then."""
    every = list(cases("v8"))
    entries = [record["sha256"]["v8"][str(case)]["entry"] for case in every]
    plans = [plan("v8", case, entry) for case, entry in zip(every, entries, strict=True)]
    problems, _, configs, _ = zip(*plans, strict=True)
    forms = [dict(config) for config in configs]

    def tiles(chosen):
        keys = ("block_m", "block_n", "block_k", "thread_m", "thread_n")
        return {"{}x{}x{} {}x{}".format(*(form[key] for key in keys)) for form in chosen}

    named = [isinstance(case, FormCase) for case in every]
    shipped = {tile_of(shape) for shape in SHAPES}
    assert tiles(form for form, by_name in zip(forms, named, strict=True) if by_name) == shipped - {"32x32x32 4x8"}
    assert len(tiles(form for form, by_name in zip(forms, named, strict=True) if not by_name)) >= 4
    assert {form["copied"] for form in forms} == {"", "a", "ab"}
    for name in ("a", "b"):
        ways = {(form[f"{name}_layout"], form[f"{name}_width"]) for form in forms}
        assert ways == {("row", 1), ("column", 1), ("column" if name == "a" else "row", 4)}
    assert {form["c_width"] for form in forms} == {1, 4}
    # All tiles split, or the last ones, and shares that end in one tile and begin in the next.
    split = [form for form in forms if form["split_blocks"]]
    assert len(tiles(split)) >= 4
    assert len(tiles(form for form in split if form["c_width"] == 1)) >= 5  # parts whose sums are stored by rows
    assert any(form["split_blocks"] % form["split_tiles"] for form in split)
    whole = [
        form["split_tiles"] == -(-problem.m // form["block_m"]) * -(-problem.n // form["block_n"])
        for form, problem in zip(forms, problems, strict=True)
        if form["split_blocks"]
    ]
    assert any(whole)
    assert not all(whole)


def test_gemv_s_cases_cover_its_forms_and_parts():
    configs = [plan("gemv", case)[2] for case in cases("gemv")]
    code = {tuple(item for item in config if item[0] != "parts") for config in configs}
    assert code == set(GEMV.configs)
    split = [dict(config) for config in configs if dict(config).get("parts", 1) > 1]
    assert {(form["form"], form["vector_width"]) for form in split} == {
        (way, width) for way in ("along", "across") for width in (1, 4)
    }


def test_skinny_s_cases_cover_its_tiles_and_runs():
    plans = [plan("skinny", case) for case in cases("skinny")]
    forms = [dict(config) for _, _, config, _ in plans]
    assert {form["block_i"] for form in forms} == {8, 16, 32, 64}
    assert {(form["form"], form["vector_width"], form["turned"]) for form in forms} == {
        ("across", 4, 0), ("across", 1, 0), ("along", 4, 0), ("along", 1, 0), ("along", 1, 1)
    }  # fmt: skip
    launches = {len(spec.plan(problem, config).launches) for problem, spec, config, _ in plans}
    assert launches == {1, 2}


def test_thin_s_cases_cover_its_forms_and_parts():
    configs = [plan("thin", case)[2] for case in cases("thin")]
    assert {tuple(item for item in config if item[0] != "parts") for config in configs} == set(THIN.configs)
    split = [dict(config) for config in configs if dict(config).get("parts", 1) > 1]
    assert {(form["form"], form.get("vector_width", 1), form["narrow"]) for form in split} == set(TILES)


def test_outer_s_cases_cover_its_forms():
    assert {plan("outer", case)[2] for case in cases("outer")} == set(OUTER.configs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_special_values_make_some_results_nans_and_leave_others(kernel):
    for case in cases(kernel):
        if case.inputs == "special":
            a, b, c = draw(case)
            with np.errstate(all="ignore"):
                product = case.alpha * (a @ b) + (case.beta * c if case.beta else 0)
            assert 0 < np.isnan(product).mean() < 1, str(case)


def test_a_matrix_lies_in_memory_as_its_case_says():
    case = Case(3, 7, 5, layout="sliced")
    matrix = draw(case)[1]
    image = place(matrix)
    assert (image.offset, image.leading, image.layout) == (3, 10, "row")
    assert np.isnan(image.flat).sum() == image.flat.size - 35
    np.testing.assert_array_equal(image.view(image.flat), matrix)
    turned = draw(replace(case, layout="transposed"))[1]
    assert (place(turned).layout, place(turned).leading) == ("row", 7)
    column = place(turned, columns_too=True)
    assert (column.layout, column.leading, column.offset) == ("column", 5, 0)
    np.testing.assert_array_equal(column.view(column.flat), turned)
    spaced = place(draw(replace(case, layout="spaced"))[1], poison=True)
    assert (spaced.leading, spaced.offset) == (11, 0)
    assert np.isnan(spaced.flat).all()


def test_what_is_written_outside_a_matrix_is_found():
    image = place(draw(Case(3, 4, 5, layout="padded"))[1])
    after = image.flat.copy()
    image.view(after)[...] = 7
    np.testing.assert_array_equal(image.result(after), np.full((5, 4), 7))
    after[4] = 0
    with pytest.raises(RuntimeError, match="outside the output"):
        image.result(after)


def test_the_inputs_are_what_their_kinds_say():
    drawn = {kind: draw(Case(48, 48, 48, inputs=kind))[0] for kind in (*EXPONENTS, "integer", "onehot_a")}
    with np.errstate(all="ignore"):
        products = {kind: drawn[kind] @ draw(Case(48, 48, 48, inputs=kind))[1] for kind in EXPONENTS}
    tiny = np.finfo(np.float32).tiny
    assert np.isfinite(products["random"]).all()
    assert (np.abs(drawn["subnormal"]) < tiny).mean() > 0.2
    assert ((products["subnormal"] != 0) & (np.abs(products["subnormal"]) < tiny)).any()
    assert np.isinf(products["huge"]).any()
    assert np.isfinite(products["huge"]).any()
    for found in (np.isnan(drawn["special"]), np.isinf(drawn["special"]), np.isfinite(products["special"])):
        assert found.any()
    assert set(np.unique(drawn["integer"])) == set(range(-8, 9))
    assert (drawn["onehot_a"].sum(axis=1) == 1).all()


def test_the_generator_gives_the_bits_it_always_gave():
    a, b, c = draw(Case(5, 6, 7))
    assert digest(np.concatenate([bits_of(x).ravel() for x in (a, b, c)]))[:16] == "7aef158f3d9aed3f"
    special = draw(Case(64, 64, 64, inputs="special"))[0]
    assert digest(bits_of(special))[:16] == "9b96002877fb9cd8"
