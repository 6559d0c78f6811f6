"""The baseline on the CPU against NumPy's BLAS, on one core and on all of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from numba_gemm.benchmark.inputs import Checker, Matrix, Pool
from numba_gemm.benchmark.record import Row
from numba_gemm.benchmark.suites import Shape
from numba_gemm.catalog import CPU_BASELINE
from numba_gemm.problem import Problem
from numba_gemm.processes import usable_cores
from numba_gemm.timing import Timing, summarise

PEER = "numpy"
_POOL_LENGTH = 2_097_169  # a prime above 2²¹: plenty for a CPU's sizes, and quick to draw
_BATCH_SECONDS = 0.02  # what is timed at once lasts about this long
_THREADS_SLEEP = 0.1  # BLAS threads spin for a while after a product, on the cores that the other contender needs


@contextlib.contextmanager
def limited_to(threads: int) -> Iterator[int]:
    """Limit NumPy's BLAS and Numba's threads to the same number; yields that number."""
    import numba
    from threadpoolctl import threadpool_limits

    before = numba.get_num_threads()
    threads = min(threads, numba.config.NUMBA_NUM_THREADS)
    try:
        numba.set_num_threads(threads)
        with threadpool_limits(threads, user_api="blas"):
            yield threads
    finally:
        numba.set_num_threads(before)


def bench_cpu(
    shapes: Sequence[Shape],
    *,
    rounds: int = 7,
    threads: Sequence[int] | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Validate the baseline on each shape, then time it against ``np.matmul``, interleaved.

    Parameters
    ----------
    shapes : products.
    rounds : measurements of each.
    threads : how many cores to use, one run for each; None takes one core and all cores.
    on_step : told what is being done.
    """
    from numba_gemm.api import matmul
    from numba_gemm.fp32.cpu import blocked_matmul

    if threads is None:
        threads = (1, usable_cores()) if usable_cores() > 1 else (1,)
    pool = Pool(length=_POOL_LENGTH)
    rows = []
    for count in threads:
        with limited_to(count) as used:
            for shape in shapes:
                on_step(f"{shape} on {used} core{'s' if used > 1 else ''}")
                a, b = pool.factors(shape, 0)
                problem = Problem.packed(shape.m, shape.n, shape.k)
                row = Row("cpu", CPU_BASELINE, "", problem.dtype, "nn", *(shape.m, shape.n, shape.k), threads=used)
                out = np.full((shape.m, shape.n), np.nan, np.float32)
                matmul(a, b, out=out, kernel=CPU_BASELINE, device="cpu")
                validation = Checker(a, b).check(out)
                row = replace(row, error_over_bound=validation.error_over_bound, validated=validation.extent)
                if not validation.ok:
                    rows.append(replace(row, error=f"wrong result: {validation.message}"))
                    continue
                pause = _THREADS_SLEEP if used > 1 else 0.0
                peer, own = time_calls([np.matmul, blocked_matmul], a, b, rounds=rounds, pause=pause)
                rows.append(
                    replace(
                        row,
                        us=own.us,
                        us_min=own.us_min,
                        us_max=own.us_max,
                        tflops=problem.flops / own.us * 1e-6,
                        gbs=problem.bytes_moved / own.us * 1e-3,
                        peer=PEER,
                        peer_us=peer.us,
                        ratio=own.ratio,
                    )
                )
    return rows


def time_calls(
    functions: Sequence[Callable[[Matrix, Matrix], Matrix]], a: Matrix, b: Matrix, *, rounds: int, pause: float = 0.0
) -> list[Timing]:
    """Wall time of functions of two matrices, interleaved; the ratio is to the first one's time.

    ``pause`` seconds pass before each measurement.
    """
    counts = []
    for function in functions:
        function(a, b)  # compiles, and wakes the threads
        counts.append(max(1, round(_BATCH_SECONDS / max(_seconds(function, a, b, 1), 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for index, function in enumerate(functions):
            time.sleep(pause)
            times[index].append(1e6 * _seconds(function, a, b, counts[index]) / counts[index])
    return summarise(times)


def _seconds(function: Callable[[Matrix, Matrix], Matrix], a: Matrix, b: Matrix, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function(a, b)
    return time.perf_counter() - start
