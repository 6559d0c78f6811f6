"""How fast the emulator is: `python bench/emulator_speed.py [--json FILE]`.

Times, on one core: an FP32 kernel of the ladder at 512x512x64, a pipelined 128x128x32-tile tensor-core kernel at
256x256x128, the smallest launch there is, and parsing and decoding. The JSON is a recorded run as the other benches
write it: `us` is the median of the repetitions, `us_min` the best, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 (after the number of threads is set)

from numba_gemm import emulator  # noqa: E402
from numba_gemm.benchmark.record import Record, Row, cpu_name, environment  # noqa: E402
from numba_gemm.emulator import program  # noqa: E402

TENSOR = ROOT / "tests" / "emulator" / "cuda" / "gemm_tensor.O3.ptx"


def measure(call: Callable[[], Any], repeat: int) -> tuple[list[float], Any]:
    """Microseconds of each of `repeat` calls after a first one, and the last result."""
    call()
    times = []
    result = None
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        times.append((time.perf_counter() - start) * 1e6)
    return times, result


def row(kernel: str, dtype: str, shape: tuple[int, int, int], times: list[float], error: float | None) -> Row:
    m, n, k = shape
    us = statistics.median(times)
    return Row(
        "emulator_speed", kernel, "", dtype, "nn", m, n, k, us=us, us_min=min(times), us_max=max(times),
        tflops=2 * m * n * k / us * 1e-6, error_over_bound=error, device="emulator sm_90",
    )  # fmt: skip


def v7(m: int, n: int, k: int, repeat: int) -> Row:
    """The warp-tile kernel of the FP32 ladder, vector form."""
    from numba_gemm.compile.numba_source import numba_to_ptx
    from numba_gemm.fp32.v7_warptile import SPEC

    config = SPEC.configs[0]
    text = numba_to_ptx(
        SPEC.build(**dict(config)), SPEC.abi, (9, 0), threads=SPEC.threads,
        min_blocks_per_sm=SPEC.min_blocks_per_sm, name=SPEC.entry(config),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    c = np.zeros((m, n), np.float32)
    sizes = [np.uint32(m), np.uint32(n), np.uint32(k), np.int64(k), np.int64(n), np.int64(n)]
    args = [a, b, c, *sizes, np.float32(1), np.float32(0)]
    times, _ = measure(lambda: emulator.launch(text, SPEC.grid(m, n), SPEC.threads, args), repeat)
    wide = a.astype(np.float64), b.astype(np.float64)
    bound = (k + 2) * 2.0**-24 * (np.abs(wide[0]) @ np.abs(wide[1]))
    return row("v7", "float32", (m, n, k), times, float((np.abs(c - wide[0] @ wide[1]) / bound).max()))


def tensor(m: int, n: int, k: int, repeat: int) -> Row:
    text = TENSOR.read_text()
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    c = np.zeros((m, n), np.float32)
    args = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    times, _ = measure(lambda: emulator.launch(text, (n // 128, m // 128), 256, args, kernel="mma_async"), repeat)
    wide = a.astype(np.float64), b.astype(np.float64)
    bound = 2 * k * 2.0**-23 * (np.abs(wide[0]) @ np.abs(wide[1]))
    return row("mma_async", "float16", (m, n, k), times, float((np.abs(c - wide[0] @ wide[1]) / bound).max()))


def tiny(repeat: int) -> Row:
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }"
    times, _ = measure(lambda: emulator.launch(text, 1, 32, []), repeat)
    return row("empty launch", "float32", (1, 1, 1), times, None)


def decode(repeat: int) -> Row:
    text = TENSOR.read_text()

    def call() -> None:
        program._PROGRAMS.clear()
        emulator.compile_program(text, "mma_async")

    times, _ = measure(call, repeat)
    return row(f"parse and decode {text.count(chr(10))} lines", "float16", (1, 1, 1), times, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the recorded run here")
    parser.add_argument("--repeat", type=int, default=9, help="measurements of each product (default: 9)")
    options = parser.parse_args()
    rows = [v7(512, 512, 64, options.repeat), tensor(256, 256, 128, options.repeat), tiny(200), decode(9)]
    for entry in rows:
        assert entry.us is not None
        assert entry.us_min is not None
        shape = f"{entry.m}x{entry.n}x{entry.k}"
        print(f"{entry.kernel:32} {shape:>14} {entry.us_min / 1e6:10.4f} s, median {entry.us / 1e6:.4f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak / 2**20:.0f} MiB")
    if options.json:
        where = environment(peak_memory_bytes=peak) | {"host": f"{cpu_name()}, one core"}
        Record(where, rows).write(options.json)


if __name__ == "__main__":
    main()
