"""An engine without a GPU: device memory is a NumPy array, and streams do their work when it suits them least.

A stream's work is done in order, but when is up to the policy: a stream in ``eager`` does everything as soon as its
events allow, one that isn't does nothing until somebody waits for it; with a ``seed`` streams move at random. Any order
that happens here could happen on a GPU, so a wait that is missing shows as a wrong result. Device memory is full of
NaN wherever nothing has been written.
"""

from __future__ import annotations

import ctypes
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numba_gemm.host.pipeline import Executors

STREAMS = ("up", "down", "first", "second")


def multiply_at(problem, a, b, c):
    """What a kernel does: alpha · A · B + beta · C on matrices at these addresses."""
    p = problem
    assert (a % 16, b % 16, c % 16) == (p.a_offset, p.b_offset, p.c_offset)

    def view(pointer, rows, columns, pitch, apart, layout, dtype):
        dtype = np.dtype(dtype)
        item = dtype.itemsize
        strides = (pitch * item, item) if layout == "row" else (item, pitch * item)
        lines, width = (rows, columns) if layout == "row" else (columns, rows)
        extent = ((p.batch - 1) * apart + (lines - 1) * pitch + width) * item
        raw = (ctypes.c_uint8 * extent).from_address(pointer)
        return np.ndarray((p.batch, rows, columns), dtype, raw, 0, (apart * item, *strides))

    x = view(a, p.m, p.k, p.lda, p.batch_stride_a, p.a_layout, p.dtype).astype(np.float64)
    y = view(b, p.k, p.n, p.ldb, p.batch_stride_b, p.b_layout, p.dtype).astype(np.float64)
    z = view(c, p.m, p.n, p.ldc, p.batch_stride_c, "row", p.c_dtype)
    result = p.alpha * (x @ y)
    if p.beta != 0:
        result = result + p.beta * z
    z[...] = result


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.done = False


class LazyEngine:
    def __init__(
        self, *, eager=(), seed=None, buffer_bytes=64, buffers=3, page_locked=lambda address: False, forgotten=None
    ):
        self.up, self.down, *compute = STREAMS
        self.compute = tuple(compute)
        self.staging_in = [np.full(buffer_bytes, 0xFF, np.uint8) for _ in range(buffers)]
        self.staging_out = [np.full(buffer_bytes, 0xFF, np.uint8) for _ in range(buffers)]
        self.page_locked = page_locked
        self.work = {stream: [] for stream in STREAMS}
        self.eager = set(eager)
        self.random = random.Random(seed) if seed is not None else None
        self.lock = threading.RLock()
        self.memory = {}
        self.peak = 0
        self.direct_copies = 0
        self.problems = []
        # Whether to leave out waits of one stream (None: the host) for another, as if the pipeline had forgotten them.
        self.forgotten = forgotten or (lambda who, whom: False)

    # --- the engine's interface

    def bind(self):
        pass

    def allocate(self, nbytes):
        memory = np.full(max(nbytes, 1) + 512, 0xFF, np.uint8)
        address = memory.ctypes.data
        pointer = -(-address // 512) * 512
        self.memory[pointer] = memory
        self.peak = max(self.peak, nbytes)
        return pointer

    def free(self, pointer):
        with self.lock:
            assert not any(self.work.values()), "device memory is freed while work is left"
        self.memory.pop(pointer)[:] = 0xFF

    def record(self, stream):
        event = Event(stream)

        def done():
            event.done = True

        self._give(stream, done)
        return event

    def wait(self, stream, event):
        if not self.forgotten(stream, event.stream):
            self._give(stream, event)

    def synchronize(self, event):
        if not self.forgotten(None, event.stream):
            with self.lock:
                self._force(event)

    def is_done(self, event):
        return event.done

    def synchronize_all(self):
        with self.lock:
            for stream in STREAMS:
                while self.work[stream]:
                    self._step(stream)

    def is_page_locked(self, address, nbytes):
        return self.page_locked(address)

    def copy(self, target, target_pitch, source, source_pitch, width, lines, stream, *, to_device):
        self._check_device(target if to_device else source)
        staging = self.staging_in if to_device else self.staging_out
        host = source if to_device else target
        if not any(0 <= host - buffer.ctypes.data < buffer.nbytes for buffer in staging):
            self.direct_copies += 1

        def copy():
            for line in range(lines):
                ctypes.memmove(target + line * target_pitch, source + line * source_pitch, width)

        self._give(stream, copy)

    def multiply(self, problem, form, a, b, c, stream):
        self.problems.append(problem)
        self._give(stream, lambda: multiply_at(problem, a, b, c))

    # --- when work is done

    def _give(self, stream, work):
        with self.lock:
            self.work[stream].append(work)
            if self.random is not None:
                for _ in range(self.random.randrange(6)):
                    self._try(self.random.choice(STREAMS))
            while any(self._try(eager) for eager in STREAMS if eager in self.eager):
                pass

    def _try(self, stream):
        """Do a stream's next work if it needs no other stream's first."""
        if not self.work[stream]:
            return False
        head = self.work[stream][0]
        if isinstance(head, Event) and not head.done:
            return False
        self._step(stream)
        return True

    def _step(self, stream):
        head = self.work[stream][0]
        if isinstance(head, Event):
            self._force(head)
        self.work[stream].pop(0)
        if not isinstance(head, Event):
            head()

    def _force(self, event):
        while not event.done:
            self._step(event.stream)

    def _check_device(self, pointer):
        assert any(base <= pointer < base + memory.nbytes for base, memory in self.memory.items()), (
            "not an address in device memory"
        )


class Threads:
    """Executors that are shut down at the end of a ``with``."""

    def __enter__(self):
        self.pools = [ThreadPoolExecutor(2), ThreadPoolExecutor(1)]
        return Executors(*self.pools, threads=2)

    def __exit__(self, *error):
        for pool in self.pools:
            pool.shutdown()
