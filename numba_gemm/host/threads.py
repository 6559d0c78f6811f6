"""The CPU threads that copy between arrays and staging memory.

NumPy releases the interpreter's lock while it copies, so a pool of threads is enough. What they are given never waits
for the GPU, so they always get on.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from numba_gemm.processes import usable_cores

#: Copying gains little from more, and every thread more contends for the interpreter's lock between its copies.
MAX_THREADS = 8

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def copier_count() -> int:
    """Threads in the pool: one a core, up to :data:`MAX_THREADS`."""
    return min(MAX_THREADS, usable_cores())


def copiers() -> ThreadPoolExecutor:
    """The pool; what it is given must never wait."""
    global _pool  # noqa: PLW0603 - one for the process, made when it is first needed
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(copier_count(), thread_name_prefix="numba_gemm-copy")
        return _pool


def _after_fork() -> None:
    global _lock, _pool  # noqa: PLW0603 - a forked child has none of its parent's threads
    _lock = threading.Lock()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
