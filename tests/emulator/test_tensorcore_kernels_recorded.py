"""The tensor-core ladder on the emulator against what an H200 gave, bit for bit.

``tests/gpu/record_tensorcore.py`` writes the record on the GPU; the inputs are made again here from their seeds.
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

from halves_inputs import (  # noqa: E402
    EXPONENTS,
    SEED,
    TYPES,
    HalfCase,
    bits_of,
    canonical,
    cases,
    digest,
    emulate,
    fill,
    form_of,
    place,
    plan,
)

from numba_gemm.catalog import kernels_for  # noqa: E402
from numba_gemm.tensorcore.specs import T4  # noqa: E402

RECORD = TESTS / "data" / "h200_tensorcore.json"
KERNELS = kernels_for("float16")

needs_record = pytest.mark.skipif(
    not RECORD.exists(), reason=f"no record {RECORD.name}: run tests/gpu/record_tensorcore.py on an H200"
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
        assert list(record["sha256"][kernel]) == [str(case) for case in cases(kernel)]


@needs_record
@pytest.mark.parametrize(("dtype", "c_dtype"), TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gpu_s_bits(record, kernel, dtype, c_dtype, request):
    """Every second case but with --slow: t4's tiles alone take a minute on the emulator."""
    step = 1 if request.config.getoption("--slow") else 2
    change = canonical if record["nan"] == "canonical" else bits_of
    wrong = []
    for case in [case for case in cases(kernel) if (case.dtype, case.c_dtype) == (dtype, c_dtype)][::step]:
        recorded = record["sha256"][kernel][str(case)]
        # In the form that ran on the GPU, whatever would be chosen today.
        result, _ = emulate(kernel, case, recorded["form"])
        if digest(change(result)) != recorded["sha256"]:
            wrong.append(f"{case} ({recorded['form']})")
    assert wrong == []


# --- the inputs, on which the record rests


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cases_cover_every_type_and_edge(kernel):
    every = list(cases(kernel))
    assert len({str(case) for case in every}) == len(every)
    assert {(case.dtype, case.c_dtype) for case in every} == set(TYPES)
    assert {case.inputs for case in every} == set(EXPONENTS)
    for dtype, c_dtype in TYPES:
        own = [case for case in every if (case.dtype, case.c_dtype) == (dtype, c_dtype)]
        assert any(case.k == 1 and case.m > 1 for case in own)
        assert any(case.m % 2 and case.n % 2 and case.k % 2 and case.offset for case in own)
        assert any(case.alpha != 1 and case.beta != 0 for case in own)


def test_t4_s_cases_cover_its_layouts_tiles_and_splits():
    every = list(cases("t4"))
    assert {case.layouts for case in every} == {"row/row", "row/column", "column/row", "column/column"}
    forms = [dict(plan("t4", case)[2]) for case in every]
    assert {(form["aligned_a"], form["aligned_b"]) for form in forms} >= {(0, 0), (1, 1)}
    assert {form["c_dtype"] for form in forms if form.get("splits", 1) > 1} == {"float16", "bfloat16", "float32"}
    tiles = {(form["block_m"], form["block_n"], form["block_k"], form.get("copies", "async")) for form in forms}
    forced = {case.form: form for case, form in zip(every, forms, strict=True) if case.form}
    assert forced.keys() == {form_of(T4, config) for config in T4.configs}
    assert len(tiles) == len(forced)
    by_tma = [case for case in every if case.form.endswith("tma")]
    assert {case.layouts for case in by_tma} >= {"row/row", "row/column", "column/column"}
    assert {case.inputs for case in by_tma} >= {"random", "special", "wide"}
    # Each of these products in both forms, which give the same bits.
    both = [case for case in every if case.layouts != "row/row" and case.form == "128x256x64"]
    assert len(both) == 6
    assert {str(replace(case, form="128x256x64 tma")) for case in both} <= {str(case) for case in by_tma}


def test_t4_s_two_forms_give_the_same_bits():
    case = HalfCase(136, 72, 88, "bfloat16", "float32", layouts="row/column", form="128x256x64")
    one, form = emulate("t4", case)
    other, by_tma = emulate("t4", replace(case, form="128x256x64 tma"))
    assert "copies=tma" in by_tma
    assert "tma" not in form
    assert bits_of(one).tobytes() == bits_of(other).tobytes()


def test_w2_s_cases_cover_its_layouts_tiles_splits_and_schedules():
    every = list(cases("w2"))
    assert {case.layouts for case in every} == {"row/row", "row/column", "column/row", "column/column"}
    forms = [dict(plan("w2", case)[2]) for case in every]
    assert {form["schedule"] for form in forms} == {"cooperative", "pingpong"}
    assert {form.get("swapped", 0) for form in forms} == {0, 1}
    assert {form["c_dtype"] for form in forms if form.get("splits", 1) > 1} == {"float16", "bfloat16", "float32"}
    assert len({(form["block_m"], form["block_n"]) for form in forms}) >= 7
    assert {form["cluster_m"] * form["cluster_n"] for form in forms} == {1, 2}


def test_a_matrix_lies_in_memory_as_its_case_says():
    case = HalfCase(3, 4, 5, layouts="column/row", gap=2, offset=1)
    a, b = place(case, 0), place(case, 1)
    left, right = a.view(a.flat), b.view(b.flat)
    assert (left.shape, a.leading, left.strides) == ((3, 5), 5, (2, 10))
    assert (right.shape, b.leading, right.strides) == ((5, 4), 6, (12, 2))
    assert np.isnan(a.flat).sum() == a.flat.size - 15
    np.testing.assert_array_equal(left, fill(case, 0, (3, 5)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_inputs_are_what_their_kinds_say(dtype):
    drawn = {kind: fill(HalfCase(48, 48, 48, dtype, inputs=kind), 0, (48, 48)) for kind in EXPONENTS}
    tiny = 2.0**-14 if dtype == "float16" else 2.0**-126
    for kind in ("random", "wide", "subnormal"):
        assert np.isfinite(drawn[kind]).all()
    size = np.abs(drawn["subnormal"].astype(np.float64))
    assert ((size < tiny) & (size > 0)).mean() > 0.05
    with np.errstate(invalid="ignore"):  # signalling NaNs
        special = drawn["special"].astype(np.float32)
    for found in (np.isnan(special), np.isinf(special), special == 0):
        assert found.any()
        assert not found.all()


def test_the_generator_gives_the_bits_it_always_gave():
    for dtype, expected in (("float16", "7254e750a8a2968a"), ("bfloat16", "7d513161898a78cc")):
        case = HalfCase(5, 6, 7, dtype, "float32", inputs="special")
        drawn = [bits_of(fill(case, which, shape)).ravel() for which, shape in enumerate(((5, 7), (7, 6), (5, 6)))]
        assert digest(np.concatenate(drawn).astype(np.uint32))[:16] == expected
