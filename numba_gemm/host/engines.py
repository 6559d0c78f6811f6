"""Engines and small lanes in use and at rest: each product takes one for itself, so that threads don't meet.

What is at rest keeps its staging memory for the next product: at most :data:`AT_REST` engines and lanes a context.
:func:`release` lets go of them.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from numba_gemm.device.context import Context, current_context
from numba_gemm.host.engine import CudaEngine, trim_memory
from numba_gemm.host.lane import Lane
from numba_gemm.host.pipeline import Executors
from numba_gemm.host.threads import copier_count, copiers

#: Kept for each context and kind; products that run at the same time in more threads make their own and drop them.
AT_REST = 2

_lock = threading.Lock()
_engines: dict[int, list[tuple[CudaEngine, Executors]]] = {}
_lanes: dict[tuple[int, int], list[Lane]] = {}


@contextmanager
def engine(context: Context) -> Iterator[tuple[CudaEngine, Executors]]:
    """An engine and its threads, for one pipeline."""
    with _lock:
        resting = _engines.setdefault(context.identity, [])
        own = resting.pop() if resting else None
    if own is None:
        drainer = ThreadPoolExecutor(1, thread_name_prefix="numba_gemm-drain")
        own = (CudaEngine(context), Executors(copiers(), drainer, copier_count()))
    try:
        yield own
    except BaseException:
        own[1].drainer.shutdown(wait=False)  # its streams may carry an error: not to be used again
        raise
    with _lock:
        if len(resting) < AT_REST:
            resting.append(own)
            return
    own[1].drainer.shutdown(wait=False)


@contextmanager
def lane(context: Context, nbytes: int) -> Iterator[Lane]:
    """A lane for one product of at most ``nbytes``."""
    resting = _lanes.get((context.identity, nbytes))
    if resting is None:
        resting = _lanes.setdefault((context.identity, nbytes), [])
    try:
        own = resting.pop()  # one operation of a list, which needs no lock
    except IndexError:
        own = Lane(context, nbytes)
    try:
        yield own
    except ValueError:  # the product was refused, and nothing launched
        resting.append(own)
        raise
    except BaseException:
        own.free()
        raise
    if len(resting) < AT_REST:
        resting.append(own)
    else:
        own.free()


def release() -> None:
    """Give back the staging buffers, streams and device memory that are kept for the next product.

    Products that are running keep theirs. The next product makes its own anew, which takes some 10 ms.
    """
    context = current_context()
    with _lock:
        engines = _engines.pop(context.identity, [])
        lanes = [one for key in list(_lanes) if key[0] == context.identity for one in _lanes.pop(key)]
    for _, executors in engines:
        executors.drainer.shutdown(wait=True)
    for own in lanes:
        own.free()
    trim_memory(context)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - a forked child has none of its parent's threads, and can't use its context
    _lock = threading.Lock()
    _engines.clear()
    _lanes.clear()


@atexit.register
def _let_go() -> None:
    """Destroy what is at rest while the driver's module is still there to do it."""
    for _, executors in (own for resting in _engines.values() for own in resting):
        executors.drainer.shutdown(wait=True)
    _engines.clear()
    _lanes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
