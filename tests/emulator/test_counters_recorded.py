"""The emulator's counts against those that ncu gave on an H200.

``tests/gpu/record_counters.py`` writes the record on the GPU.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from numba_gemm.catalog import get_spec, kernels_for
from numba_gemm.emulator.counters import NCU_METRICS
from numba_gemm.profile import profile_emulated
from numba_gemm.profile_job import Job

RECORD = Path(__file__).resolve().parents[1] / "data" / "h200_counters.json"

pytestmark = pytest.mark.skipif(
    not RECORD.exists(), reason=f"no record {RECORD.name}: run tests/gpu/record_counters.py on an H200 with ncu"
)

#: Counts that must be equal: the same instructions in PTX and in machine code.
EQUAL = (
    "ffma_threads",
    "shared_load_requests",
    "shared_store_requests",
    "global_load_requests",
    "global_store_requests",
)

#: Counts of which the hardware's own include some that arbitration adds.
CLOSE = ("shared_load_wavefronts", "shared_store_wavefronts", "global_load_sectors", "global_store_sectors")
TOLERANCE = 0.005


@cache
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def launches():
    return record()["launches"] if RECORD.exists() else []


@cache
def emulated(job):
    return profile_emulated(Job.parse(job), (9, 0))


def test_the_record_is_of_an_h200_and_of_every_form():
    assert "H200" in record()["environment"]["gpu"]
    jobs = [Job.parse(launch["job"]) for launch in launches()]
    for spec in map(get_spec, kernels_for("float32")):
        if spec.select is not None:  # v8 makes a form for each problem
            continue
        row_major = {config for config in spec.configs if "column" not in dict(config).values()}
        assert {job.config for job in jobs if job.kernel == spec.name} == row_major
    assert any(job.m % 4 and job.k % 2 for job in jobs)


@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch["job"])
def test_counts_are_ncu_s(launch):
    values, metrics = emulated(launch["job"]).values, launch["metrics"]
    for name in EQUAL:
        assert values[name] == metrics[NCU_METRICS[name]], name
    for name in CLOSE:
        assert values[name] == pytest.approx(metrics[NCU_METRICS[name]], rel=TOLERANCE), name
    for verb in ("load", "store"):  # arbitration adds to these as to the wavefronts, but they can be 0
        conflicts, wavefronts = (f"shared_{verb}_{what}" for what in ("conflicts", "wavefronts"))
        allowed = TOLERANCE * metrics[NCU_METRICS[wavefronts]]
        assert abs(values[conflicts] - metrics[NCU_METRICS[conflicts]]) <= allowed, conflicts
