"""The kernel whose rate is the ceiling of memory-bound kernels reads every byte once."""

from __future__ import annotations

import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.benchmark.ceiling import LOADS, READERS, read_ptx


def test_the_reading_kernel_reads_each_sector_once():
    blocks, rounds = 2, 3
    buffer = np.ones(4 * READERS * LOADS * blocks * rounds, np.float32)
    out = np.zeros(4, np.float32)
    report = emulator.launch(read_ptx(), blocks, READERS, [buffer, out, np.uint32(rounds)])
    assert report.counters.global_load_sectors == buffer.nbytes // 32
    assert not out.any()


def test_it_reads_a_whole_round_of_the_grid():
    """A buffer that is 16 bytes shorter is too short."""
    buffer = np.ones(4 * READERS * LOADS * 2 - 4, np.float32)
    out = np.zeros(4, np.float32)
    with pytest.raises(emulator.OutOfBounds):
        emulator.launch(read_ptx(), 2, READERS, [buffer, out, np.uint32(1)])
