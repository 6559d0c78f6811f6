"""The example that mixes Numba's kernels with a product runs, in both orders of import, with a GPU and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numba_gemm.device.driver import is_available

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "numba_interop.py"


@pytest.mark.parametrize("first", ["numba", "numba_gemm"])
def test_numba_interop(first):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--import-first", first, "--size", "150"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    imported, how, verdict = done.stdout.splitlines()
    assert imported.startswith(f"imported {first}")
    assert ("one stream of the GPU" in how) is is_available()
    assert ("no GPU was found" in how) is not is_available()
    assert verdict.endswith("right")
