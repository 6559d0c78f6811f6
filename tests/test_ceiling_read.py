"""The kernel whose rate is the ceiling of memory-bound kernels reads every byte once."""

from __future__ import annotations

import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.benchmark.ceiling import CHUNK_BYTES, READERS, read_ptx


@pytest.mark.parametrize(("blocks", "chunks"), [(2, 6), (2, 5), (3, 2), (1, 1)])
def test_the_reading_kernel_reads_each_sector_once(blocks, chunks):
    buffer = np.ones(chunks * CHUNK_BYTES // 4, np.float32)
    out = np.zeros(4, np.float32)
    report = emulator.launch(read_ptx(), blocks, READERS, [buffer, out, np.uint32(chunks)])
    assert report.counters.global_load_sectors == buffer.nbytes // 32
    assert not out.any()


def test_it_reads_whole_chunks():
    """A buffer that is 16 bytes shorter is too short."""
    buffer = np.ones(2 * CHUNK_BYTES // 4 - 4, np.float32)
    out = np.zeros(4, np.float32)
    with pytest.raises(emulator.OutOfBounds):
        emulator.launch(read_ptx(), 2, READERS, [buffer, out, np.uint32(2)])
