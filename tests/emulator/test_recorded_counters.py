"""Counts that Nsight Compute read on an H200, for access patterns and for kernels that nvcc made."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.emulator.banks import shared_wavefronts

RECORD = json.loads((Path(__file__).parent / "data" / "h200_shared_memory.json").read_text())


@pytest.mark.parametrize("op", ["load", "store"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_wavefronts_and_conflicts_of_every_recorded_pattern(op, size):
    entries = [e for e in RECORD["patterns"] if (e["op"], e["size"]) == (op, size)]
    assert entries
    for entry in entries:
        address = np.array(entry["address"]).reshape(1, 32)
        found = shared_wavefronts(address, address >= 0, size, store=op == "store")
        expected = (entry["wavefronts"], entry["wavefronts"] - entry["conflicts"])
        assert found == expected, f"{entry['pattern']} of {size} bytes"


KERNELS = {
    # kernel: (source, grid, block, dynamic shared bytes, size of the square matrices, dtype of a and b)
    "register_blocked": ("gemm_simt.O3", 1, 256, 4096, 64, np.float32),
    "vectorised": ("gemm_simt.O3", (2, 2), 64, 0, 64, np.float32),
    "tiled": ("gemm_simt.O3", (4, 4), (16, 16), 0, 64, np.float32),
    "mma_async": ("gemm_tensor.O3", 1, 256, 0, 128, np.float16),
}
# What the assembler (here the driver's JIT) or the hardware does beyond the PTX:
EXCEPT = {
    "tiled": {"shared_load_requests", "shared_load_wavefronts"},  # four scalar loads joined to one of 16 bytes
    "vectorised": {"shared_store_requests"},
    "mma_async": {"shared_load_requests", "global_load_sectors"},  # ldmatrix is another op; cp.async replays
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_counters_of_compiled_kernels(kernel):
    source, grid, block, shared, size, dtype = KERNELS[kernel]
    a, b, c = np.zeros((size, size), dtype), np.zeros((size, size), dtype), np.zeros((size, size), np.float32)
    args = [a, b, c, *[np.int32(size)] * 3]
    report = emulator.launch(harness.fixture(source), grid, block, args, kernel=kernel, shared_bytes=shared)
    found = report.counters.as_dict()
    recorded = RECORD["kernels"][kernel]
    different = {name for name, value in recorded.items() if found[name] != value}
    assert different == EXCEPT.get(kernel, set())
