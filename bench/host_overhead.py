"""What one call costs on the host, and how long the first call in a new process takes."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from numba_gemm.benchmark.record import Record, Row, environment
from numba_gemm.device.context import current_context, synchronize

ROOT = Path(__file__).resolve().parents[1]
SIZE = 64  # of the product whose call is timed: small enough that the GPU is never behind
CALLS = 100  # between two waits for the GPU
FIRST_SIZE = 256  # of the first product of a process

_FIRST_CALL = f"""
import time
start = time.perf_counter()
import numpy as np
import numba_gemm
imported = time.perf_counter()
a = np.ones(({FIRST_SIZE}, {FIRST_SIZE}), np.float32)
c = numba_gemm.matmul(a, a, device="cuda")
done = time.perf_counter()
assert c[0, 0] == {FIRST_SIZE}, c[0, 0]
print(imported - start, done - start)
"""

Call = Callable[[], Any]


def record(*, rounds: int, commit: str | None) -> Record:
    """Measure both, print them, and return the record."""
    context = current_context()
    blank = Row("host_overhead", "", "", "float32", "nn", SIZE, SIZE, SIZE)
    contenders: dict[str, Call] = {}
    rows: list[Row] = []
    for name, make in _MAKERS.items():
        try:
            call = make()
            for _ in range(20):
                call()
            synchronize()
            contenders[name] = call
        except Exception as error:  # a package that isn't there is a row with an error
            rows.append(replace(blank, kernel=name, error=f"{type(error).__name__}: {str(error)[:200]}"))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            synchronize()
    for name, own in times.items():
        rows.append(replace(blank, kernel=name, us=statistics.median(own), us_min=min(own), us_max=max(own)))
    rows += first_calls()
    for row in rows:
        print(f"{row.kernel:48s} {f'{row.us:12.1f} µs' if row.us is not None else row.error}", flush=True)
    return Record(environment(context.device, commit=commit), rows)


def first_calls(warm: int = 3) -> list[Row]:
    """Wall time in a new process from before the import to the result: with an empty cache, then with a full one."""
    blank = Row("first_call", "", "", "float32", "nn", FIRST_SIZE, FIRST_SIZE, FIRST_SIZE)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as cache:
        surroundings = os.environ | {"NUMBA_GEMM_CACHE_DIR": cache, "PYTHONPATH": path}
        seconds: list[tuple[float, float]] = []
        for _ in range(1 + warm):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL], env=surroundings, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or ["no output"]
                return [replace(blank, kernel="first call", error=lines[-1][:300])]
            imported, total = map(float, done.stdout.split())
            seconds.append((imported, total))
    totals = [total * 1e6 for _, total in seconds[1:]]
    imports = [imported * 1e6 for imported, _ in seconds[1:]]
    return [
        replace(blank, kernel="first matmul of a process, empty cache", us=seconds[0][1] * 1e6),
        _spread(replace(blank, kernel="first matmul of a process, warm cache"), totals),
        _spread(replace(blank, kernel="of which imports"), imports),
    ]


def _spread(row: Row, times: list[float]) -> Row:
    return replace(row, us=statistics.median(times), us_min=min(times), us_max=max(times))


def _host_arrays() -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(3)]


def _numba_cuda() -> Any:
    with contextlib.suppress(ImportError):
        importlib.import_module("_numba_cuda_redirector")  # `pip install --target` leaves its .pth file unread
    return importlib.import_module("numba.cuda")


def _own(**keywords: Any) -> Call:
    import numba_gemm

    cuda = _numba_cuda()
    a, b, c = (cuda.to_device(array) for array in _host_arrays())
    return lambda: numba_gemm.matmul(a, b, out=c, **keywords)


def _numba_launch() -> Call:
    cuda = _numba_cuda()
    a, b, c = (cuda.to_device(array) for array in _host_arrays())

    def touch(a: Any, b: Any, c: Any) -> None:
        i = cuda.grid(1)
        if i < a.shape[0]:
            c[i, 0] = a[i, 0] + b[i, 0]

    configured = cuda.jit(touch)[1, SIZE]
    return lambda: configured(a, b, c)


def _torch() -> Call:
    torch = importlib.import_module("torch")
    a, b, c = (torch.from_numpy(array).cuda() for array in _host_arrays())
    return lambda: torch.matmul(a, b, out=c)


def _cupy() -> Call:
    cupy = importlib.import_module("cupy")
    a, b, c = (cupy.asarray(array) for array in _host_arrays())
    return lambda: cupy.matmul(a, b, out=c)


_MAKERS: dict[str, Callable[[], Call]] = {
    "numba_gemm.matmul(a, b, out=c)": _own,
    'numba_gemm.matmul(a, b, out=c, kernel="v7")': lambda: _own(kernel="v7"),
    "a bare Numba launch": _numba_launch,
    "torch.matmul(a, b, out=c)": _torch,
    "cupy.matmul(a, b, out=c)": _cupy,
}
