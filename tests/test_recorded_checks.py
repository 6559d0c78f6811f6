"""What the record says of a real GPU: every kernel right on every case, and clean under compute-sanitizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from numba_gemm.catalog import LADDER, SPECIAL
from numba_gemm.fallback import FALLBACKS

BENCH = Path(__file__).parents[1] / "bench"
RECORD = json.loads((BENCH / "results/nvidia-h200/checks.json").read_text())
TOOLS = ("memcheck", "racecheck", "synccheck")


@pytest.mark.parametrize("suite", ["check", *TOOLS])
def test_every_kernel_passed_on_numpy_and_on_device_arrays(suite):
    rows = [row for row in RECORD["rows"] if row["suite"] == suite]
    assert {(row["kernel"].split()[0], row["arrays"]) for row in rows} == {
        (kernel, arrays) for kernel in (*LADDER, *SPECIAL, *FALLBACKS) for arrays in ("numpy", "device")
    }
    assert all(row["checks"] >= 20 and row["failed"] == 0 for row in rows)
    assert all(0 < row["error_over_bound"] <= 1 for row in rows)


def test_the_sanitizer_found_nothing():
    assert "H200" in RECORD["environment"]["gpu"]
    assert set(RECORD["sanitizer"]) >= set(TOOLS)
    assert all(summary.startswith("0 ") for summary in RECORD["sanitizer"].values())


def test_the_recorders_lines_become_rows():
    """What ``tests/gpu/recording.py`` prints when it compares with a record, as bench/sanitizer.py reads it."""
    sys.path.insert(0, str(BENCH))
    from sanitizer import parse_forms

    output = "===\nv8: 29 cases in 18 forms, 0 wrong\nw2: 55 cases in 33 forms, 2 wrong\n  64×64×64\n"
    assert parse_forms("memcheck record_fp32", output) == [
        {"suite": "memcheck record_fp32", "kernel": "v8", "forms": 18, "checks": 29, "failed": 0},
        {"suite": "memcheck record_fp32", "kernel": "w2", "forms": 33, "checks": 55, "failed": 2},
    ]
