"""The FP32 ladder on the emulator against what an H200 gave, bit for bit.

``tests/gpu/record_fp32.py`` writes the record on the GPU; the inputs are made again here from their seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from fp32_inputs import EXPONENTS, SEED, bits_of, canonical, cases, digest, draw  # noqa: E402

from numba_gemm.cases import Case  # noqa: E402
from numba_gemm.catalog import LADDER, kernels_for  # noqa: E402
from numba_gemm.emulate import multiply_emulated  # noqa: E402

RECORD = TESTS / "data" / "h200_fp32.json"
#: The rungs with a fixed list of forms; v8's form, and with it the order of its sums, depends on the GPU's SMs.
KERNELS = [name for name in kernels_for("float32") if LADDER[name].select is None]

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
        assert list(record["sha256"][kernel]) == [str(case) for case in cases(kernel)]
        entries = {row["entry"] for row in record["sha256"][kernel].values()}
        row_major = [config for config in LADDER[kernel].configs if "column" not in dict(config).values()]
        assert entries == {LADDER[kernel].entry(config) for config in row_major}


@needs_record
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gpu_s_bits(record, kernel):
    change = canonical if record["nan"] == "canonical" else lambda bits: bits
    wrong = []
    for case in cases(kernel):
        a, b, c = draw(case)
        report = multiply_emulated(a, b, c, alpha=case.alpha, beta=case.beta, kernel=kernel)
        recorded = record["sha256"][kernel][str(case)]
        # Recorded are row-major forms, of transposed views made row-major; all forms add in the same order.
        other = case.layout == "transposed" or "column" in report.kernel
        assert other or report.kernel == recorded["entry"], f"{case}: another form"
        if digest(change(bits_of(c))) != recorded["sha256"]:
            wrong.append(str(case))
    assert wrong == []


# --- the inputs, on which the record rests


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cases_cover_every_layout_form_and_edge(kernel):
    every = list(cases(kernel))
    assert len({str(case) for case in every}) == len(every)
    assert {case.layout for case in every} >= {"packed", "padded", "sliced"}
    assert {case.inputs for case in every} >= set(EXPONENTS)
    assert any(case.k == 1 and case.m > 100 for case in every)
    assert any(case.alpha != 1 and case.beta != 0 for case in every)


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
