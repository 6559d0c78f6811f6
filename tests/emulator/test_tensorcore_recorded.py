"""The emulator's ``mma.sync`` against what an H200 gave, bit for bit, on 10**5 tiles of each instruction.

``tests/gpu/record_mma.py`` writes the record on the GPU; the inputs are made again here from their seeds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from mma_inputs import BLOCK, CASES, block, blocks, comparable  # noqa: E402

from numba_gemm.emulator.tensorcore import mma  # noqa: E402

RECORD = TESTS / "data" / "h200_mma.npz"
EVERY = [(name, category) for name, case in CASES.items() for category in case.categories]

needs_record = pytest.mark.skipif(
    not RECORD.exists(), reason=f"no record {RECORD.name}: run tests/gpu/record_mma.py on a Hopper GPU"
)


@pytest.fixture(scope="module")
def record():
    with np.load(RECORD) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["meta"] = json.loads(str(arrays["meta"]))
    return arrays


def emulate(case, arch, a, b, c):
    types = {"a_type": case.a_type, "b_type": case.b_type, "acc_type": case.acc_type, "d_type": case.d_type}
    return comparable(case, mma(a, b, c, arch=arch, **types))


@needs_record
def test_the_record_is_of_a_gpu_and_of_these_cases(record):
    meta = record["meta"]
    assert "H200" in meta["device"]
    assert meta["arch"] == "sm_90"
    assert set(meta["cases"]) == set(CASES)
    for name, case in CASES.items():
        assert meta["cases"][name]["seed"] == case.seed
        assert meta["cases"][name]["tiles"] == case.tiles
        assert set(meta["cases"][name]["sha256"]) == set(case.categories)
    for name in ("f16_f32", "bf16_f32", "tf32_f32"):
        assert CASES[name].tiles >= 100_000


@needs_record
@pytest.mark.parametrize("name", CASES)
def test_recorded_tiles(record, name):
    """Whole tiles, inputs and outputs as they were on the GPU; also pins the generator of the inputs."""
    case = CASES[name]
    a, b, c, d = (record[f"{name}_{part}"] for part in "abcd")
    kept = len(a) // len(case.categories)
    assert kept > 0
    for at, category in enumerate(case.categories):
        part = slice(at * kept, (at + 1) * kept)
        for made, stored in zip(block(case, category, 0), (a, b, c), strict=True):
            np.testing.assert_array_equal(made[:kept], stored[part])
        np.testing.assert_array_equal(emulate(case, "sm_90", a[part], b[part], c[part]), d[part])


@needs_record
@pytest.mark.parametrize(("name", "category"), EVERY, ids=lambda x: x)
def test_every_tile_of_the_gpu(record, name, category):
    case = CASES[name]
    digest = hashlib.sha256()
    for a, b, c in blocks(case, category):
        digest.update(np.ascontiguousarray(emulate(case, "sm_90", a, b, c)).tobytes())
    assert digest.hexdigest() == record["meta"]["cases"][name]["sha256"][category]


@pytest.mark.parametrize("name", CASES)
def test_the_inputs_are_what_their_categories_say(name):
    """The generator, on which the record rests: shapes, widths, and something of each category's kind."""
    case = CASES[name]
    m, n, k = case.shape
    made = {category: block(case, category, 0, 60) for category in case.categories}
    for a, b, c in made.values():
        assert (a.shape, b.shape, c.shape) == ((60, m, k), (60, k, n), (60, m, n))
    again = block(case, case.categories[0], 0, 60)
    assert all((x == y).all() for x, y in zip(again, made[case.categories[0]], strict=True))
    assert (block(case, case.categories[0], 1, 60)[0] != again[0]).any()
    assert BLOCK * case.blocks_per_category * len(case.categories) == case.tiles
    if case.a_type == "s8":
        assert {-128, 127} <= set(made["extreme"][0].ravel().tolist())
        return
    results = {category: emulate(case, "sm_90", *inputs) for category, inputs in made.items()}
    real = {2: np.float16, 4: np.float32, 8: np.float64}[results["normal"].itemsize]
    values = {category: d.view(real).astype(np.float64) for category, d in results.items()}
    assert np.isfinite(values["normal"]).all()
    assert np.isnan(values["special"]).any()
    assert np.isinf(values["special"]).any()
    assert (values["zeros"] == 0).any()
    assert np.median(np.abs(values["cancelling"])) < np.median(np.abs(values["normal"])) / 2
    if case.a_type in ("bf16", "tf32", "f64"):  # products of the others stay above D's subnormals
        least_normal = float(np.finfo(real).tiny)
        assert (np.abs(values["tiny"]) < least_normal).mean() > 0.5
