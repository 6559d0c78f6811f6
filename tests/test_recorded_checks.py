"""What the record says of a real GPU: every kernel right on every case, and clean under compute-sanitizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numba_gemm.catalog import LADDER, SPECIAL
from numba_gemm.fallback import FALLBACKS

RECORD = json.loads((Path(__file__).parents[1] / "bench/results/nvidia-h200/checks.json").read_text())
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
    assert set(RECORD["sanitizer"]) == set(TOOLS)
    assert all(summary.startswith("0 ") for summary in RECORD["sanitizer"].values())
