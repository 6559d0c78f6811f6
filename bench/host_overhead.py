"""What one call costs on the host, and how long the first call in a new process takes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
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
_BLANK = Row("host_overhead", "", "", "float32", "nn", 64, 64, 64)
SIZE = 64  # of the product whose call is timed: small enough that the GPU is never behind
CALLS = 100  # between two waits for the GPU
PLACES = 5000  # of results, where each call has another one
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
    """Measure both, print them, and return the record.

    Calls on one package's arrays are timed in a process that has imported no other: the streams and pools that each
    makes in the context cost every launch on the default stream time.
    """
    context = current_context()
    rows: list[Row] = []
    for group in _MAKERS:
        done = subprocess.run(
            [sys.executable, __file__, group, str(rounds)],
            env=os.environ | {"PYTHONPATH": _path()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no output"]
            rows.append(replace(_BLANK, kernel=f"calls on arrays of {group}", error=lines[-1][:300]))
            continue
        rows += [replace(_BLANK, **fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    rows += first_calls()
    for row in rows:
        print(f"{row.kernel:48s} {f'{row.us:12.1f} µs' if row.us is not None else row.error}", flush=True)
    return Record(environment(context.device, commit=commit), rows)


def time_group(group: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one package, timed in this process: contenders take turns, ``CALLS`` calls at a time."""
    contenders: dict[str, Call] = {}
    rows: list[dict[str, Any]] = []
    for name, make in _MAKERS[group].items():
        try:
            call = make()
            for _ in range(20):
                call()
            synchronize()
            contenders[name] = call
        except Exception as error:  # a package that isn't there is a row with an error
            rows.append({"kernel": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            synchronize()
    for name, own in times.items():
        rows.append({"kernel": name, "us": statistics.median(own), "us_min": min(own), "us_max": max(own)})
    return rows


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def first_calls(warm: int = 3) -> list[Row]:
    """Wall time in a new process from before the import to the result: with an empty cache, then with a full one."""
    blank = Row("first_call", "", "", "float32", "nn", FIRST_SIZE, FIRST_SIZE, FIRST_SIZE)
    with tempfile.TemporaryDirectory() as cache:
        surroundings = os.environ | {"NUMBA_GEMM_CACHE_DIR": cache, "PYTHONPATH": _path()}
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


def _planned() -> Call:
    import numba_gemm

    cuda = _numba_cuda()
    a, b, c = (cuda.to_device(array) for array in _host_arrays())
    plan = numba_gemm.plan(a, b, c)
    return lambda: plan(a, b, c)


def _own_on(package: str) -> Call:
    """The library's call on another package's arrays."""
    import numba_gemm

    module = importlib.import_module(package)
    if package == "torch":
        a, b, c = (module.from_numpy(array).cuda() for array in _host_arrays())
    else:
        a, b, c = (module.asarray(array) for array in _host_arrays())
    return lambda: numba_gemm.matmul(a, b, out=c)


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


def _own_on_others() -> Call:
    """A result in another place at each call, so many that no place comes often enough for a graph."""
    import numba_gemm

    cuda = _numba_cuda()
    a, b, _ = (cuda.to_device(array) for array in _host_arrays())
    many = cuda.device_array((PLACES, SIZE, SIZE), np.float32)
    outs = itertools.cycle([many[place] for place in range(PLACES)])
    return lambda: numba_gemm.matmul(a, b, out=next(outs))


def _bare_launch(graph: bool) -> Call:
    """The driver's own launch of the same kernel, or of its graph, called from Python with everything prepared."""
    import numba_gemm
    from numba_gemm.arrays import as_operand
    from numba_gemm.calls import prepare_device
    from numba_gemm.device.launch import driver_function
    from numba_gemm.device.repeat import make_graph
    from numba_gemm.problem import check_inputs

    cuda = _numba_cuda()
    a, b, c = (cuda.to_device(array) for array in _host_arrays())
    numba_gemm.matmul(a, b, out=c)
    operands = [as_operand(*named) for named in (("a", a), ("b", b), ("out", c))]
    shape = check_inputs(operands[0], operands[1])
    prepared = prepare_device(operands[0], operands[1], operands[2], shape, (1.0, 0.0, None))
    assert prepared.quick is not None
    launch = prepared.quick[0]
    first, second, third = (operand.pointer for operand in operands)
    if not graph:
        return lambda: launch(first, second, third, 0)
    made = make_graph(lambda stream: launch(first, second, third, stream))
    replay = driver_function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p)
    return lambda: replay(made.handle, 0)


_MAKERS: dict[str, dict[str, Call]] = {
    "numba": {
        "numba_gemm.matmul(a, b, out=c)": _own,
        'numba_gemm.matmul(a, b, out=c, kernel="v7")': lambda: _own(kernel="v7"),
        "plan(a, b, out=c)": _planned,
        "numba_gemm.matmul(a, b, out=c), c elsewhere at each call": _own_on_others,
        "the driver's launch alone": lambda: _bare_launch(graph=False),
        "the driver's launch of a graph alone": lambda: _bare_launch(graph=True),
        "a bare Numba launch": _numba_launch,
    },
    "torch": {
        "numba_gemm.matmul(a, b, out=c) on torch tensors": lambda: _own_on("torch"),
        "torch.matmul(a, b, out=c)": _torch,
    },
    "cupy": {
        "numba_gemm.matmul(a, b, out=c) on CuPy arrays": lambda: _own_on("cupy"),
        "cupy.matmul(a, b, out=c)": _cupy,
    },
}

if __name__ == "__main__":
    print(json.dumps(time_group(sys.argv[1], int(sys.argv[2]))))
