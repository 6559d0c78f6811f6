"""Products of NumPy arrays through the GPU, beside CuPy's, and beside what the bus and the kernel allow."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from numba_gemm.benchmark.record import Record, Row, environment
from numba_gemm.device.context import Context, current_context
from numba_gemm.device.driver import check as check_code
from numba_gemm.device.driver import driver
from numba_gemm.device.stream import Event, Stream
from numba_gemm.errors import NumbaGemmError
from numba_gemm.execute import prepare
from numba_gemm.host import device_put, multiply_host, pinned_empty
from numba_gemm.problem import Problem
from numba_gemm.validate import check, reference

SIZES = (64, 512, 1024, 2048, 4096, 8192)
SUITE = "host_transfers"
CHECKED_ROWS = 8
_BANDWIDTH_BYTES = 256 << 20

Array = np.ndarray[Any, Any]


def record(*, rounds: int, commit: str | None) -> Record:
    """Measure, print, and return the record: times of NumPy → NumPy, interleaved with CuPy's."""
    context = current_context()
    to_device, to_host = bus_gbs()
    print(f"page-locked copies: {to_device:.1f} GB/s to the GPU, {to_host:.1f} GB/s back", flush=True)
    try:
        cupy = importlib.import_module("cupy")
        peer = f"cupy {cupy.__version__}"
    except ImportError as error:
        cupy, peer = None, ""
        print(f"no CuPy to compare with: {error}")
    rows = []
    for size in SIZES:
        for row in rows_of(size, rounds, cupy, (to_device, to_host), context):
            rows.append(row)
            shown = f"{row.us or 0:10.0f} µs  peer {row.peer_us or 0:10.0f}  ratio {row.ratio or 0:5.2f}  "
            print(f"{size:5d} {row.kernel:40s} {shown}{row.config} {row.error}", flush=True)
    more = {"pinned_gbs_to_device": to_device, "pinned_gbs_to_host": to_host}
    return Record(environment(context.device, peer=peer, commit=commit, **more), rows)


def rows_of(size: int, rounds: int, cupy: Any, gbs: tuple[float, float], context: Context) -> list[Row]:
    """Every way to multiply at one size.

    The bound of the page-locked one is what takes longer: the kernel, or all three matrices at the bus's rate, one
    after the other. With both directions of the bus full all the time copies would take as long as the busier one.
    """
    generator = np.random.default_rng(size)
    a, b, c = (generator.standard_normal((size, size), dtype=np.float32) for _ in range(3))
    locked = [pinned_empty((size, size)) for _ in range(3)]
    locked[0][...], locked[1][...] = a, b
    weights = device_put(b)
    rounds = min(rounds, 5) if size >= 4096 else rounds
    kernel_us = kernel_time(size, context)
    up_us, down_us = 2 * a.nbytes / gbs[0] / 1e3, c.nbytes / gbs[1] / 1e3
    bound_us = max(up_us + down_us, kernel_us)
    least_us = max(up_us, down_us, kernel_us)

    def new_result() -> Array:
        out = np.empty((size, size), np.float32)
        multiply_host(a, b, out)
        return out

    def given_result() -> Array:
        multiply_host(a, b, c)
        return c

    def page_locked() -> Array:
        multiply_host(locked[0], locked[1], locked[2])
        return locked[2]

    def with_matrix() -> Array:
        multiply_host(a, weights, c)
        return c

    def limited() -> Array:
        multiply_host(a, b, c, memory_limit=3 * a.nbytes // 4)
        return c

    ways: dict[str, Callable[[], Array]] = {
        "NumPy arrays, new result": new_result,
        "NumPy arrays, out given": given_result,
        "page-locked arrays": page_locked,
        "b on the GPU": with_matrix,
    }
    if size >= 2048:
        ways["NumPy arrays, a quarter fits the GPU"] = limited
    if cupy is not None:
        ways["cupy"] = lambda: cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    sample = np.linspace(0, size - 1, CHECKED_ROWS).astype(int)
    expected = reference(a[sample], b)
    rows = {}
    times: dict[str, list[float]] = {}
    for name, way in ways.items():
        row = Row(SUITE, name, "", "float32", "nn", size, size, size)
        try:
            c[...] = locked[2][...] = np.nan
            verdict = check(way()[sample], expected)
            way()
            error = verdict.message
            rows[name] = replace(
                row, error_over_bound=verdict.error_over_bound, validated=f"{CHECKED_ROWS} rows", error=error
            )
            times[name] = []
        except NumbaGemmError as error:
            rows[name] = replace(row, error=f"{type(error).__name__}: {str(error)[:200]}")
    for _ in range(rounds):
        for name, own in times.items():
            start = time.perf_counter()
            ways[name]()
            own.append((time.perf_counter() - start) * 1e6)
    peer = times.get("cupy")
    moved = 3 * a.nbytes
    for name, own in times.items():
        us = statistics.median(own)
        more: dict[str, Any] = {}
        if peer and name != "cupy":
            ratios = [theirs / ours for theirs, ours in zip(peer, own, strict=True)]
            more = {"peer": "cupy", "peer_us": statistics.median(peer), "ratio": statistics.median(ratios)}
        if name == "page-locked arrays":
            parts = f"copies {up_us:.0f} and {down_us:.0f}, kernel {kernel_us:.0f}"
            both = f"{us / least_us:.2f} of {least_us:.0f} µs with both directions at once"
            more["config"] = f"{us / bound_us:.2f} of {bound_us:.0f} µs, {both}: {parts}"
            more["roof_tflops"] = 2e-6 * size**3 / least_us
        rows[name] = replace(
            rows[name],
            us=us,
            us_min=min(own),
            us_max=max(own),
            tflops=2e-6 * size**3 / us,
            gbs=moved / us / 1e3,
            **more,
        )
    return list(rows.values())


def bus_gbs() -> tuple[float, float]:
    """Bandwidth of copies of page-locked memory to the GPU and back, in GB/s."""
    cu, stream = driver(), Stream()
    host = pinned_empty(_BANDWIDTH_BYTES, np.uint8)
    device = int(check_code(cu.cuMemAlloc(_BANDWIDTH_BYTES), "cuMemAlloc"))
    address = host.__array_interface__["data"][0]
    try:
        rates = []
        for copy in (
            lambda: cu.cuMemcpyHtoDAsync(device, address, _BANDWIDTH_BYTES, int(stream)),
            lambda: cu.cuMemcpyDtoHAsync(address, device, _BANDWIDTH_BYTES, int(stream)),
        ):
            rates.append(_BANDWIDTH_BYTES / _event_us(copy, int(stream), 5) / 1e3)
    finally:
        check_code(cu.cuMemFree(device), "cuMemFree")
    return rates[0], rates[1]


def kernel_time(size: int, context: Context) -> float:
    """Time of the product alone, on matrices that are on the GPU, in µs."""
    matrices = [device_put(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)) for _ in range(3)]
    prepared = prepare(Problem.packed(size, size, size), None, context)
    stream = Stream()
    a, b, c = (matrix.pointer for matrix in matrices)
    us = _event_us(lambda: prepared.launch(a, b, c, int(stream)), int(stream), 7)
    for matrix in matrices:
        matrix.free()
    return us


def _event_us(work: Callable[[], Any], stream: int, count: int) -> float:
    work()
    times = []
    for _ in range(count):
        start, end = Event(), Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        times.append(end.microseconds_since(start))
    return statistics.median(times)
