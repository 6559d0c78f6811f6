"""Objects kept alive until a stream has done the work that uses them, without waiting for it."""

from __future__ import annotations

import atexit
import threading
from typing import Any

from numba_gemm.device.driver import check, driver

_lock = threading.Lock()
_kept: list[tuple[Any, Any]] = []  # (event, what it keeps)
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def keep_until_done(stream: int, kept: Any) -> None:
    """Keep an object alive at least until the work given to ``stream`` so far is done.

    What earlier calls kept and is done with is let go. While the stream is being captured into a graph nothing is
    kept: the graph can be replayed at any time, and its arrays are for the caller to keep as long as the graph.
    """
    cu = driver()
    status = check(cu.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    if int(status) != 0:
        return
    event = check(cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)), "cuEventCreate")
    check(cu.cuEventRecord(event, stream), "cuEventRecord")
    with _lock:
        _kept.append((event, kept))
    release_done()


def release_done() -> None:
    """Let go of everything whose stream has done its work."""
    cu = driver()
    with _lock:
        # An event that reports an error counts as done: the work it marks will never run.
        done = [entry for entry in _kept if int(cu.cuEventQuery(entry[0])[0]) != _NOT_READY]
        if not done:
            return
        events = {id(event) for event, _ in done}
        _kept[:] = [entry for entry in _kept if id(entry[0]) not in events]
    for event, _ in done:
        cu.cuEventDestroy(event)
    # `done` goes here, outside the lock: what it keeps may run code of its own when it is let go.


@atexit.register
def _wait_for_all() -> None:
    with _lock:
        remaining, _kept[:] = list(_kept), []
    for event, _ in remaining:
        driver().cuEventSynchronize(event)
