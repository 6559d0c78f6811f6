"""A product that GPU memory can't hold streams through it, with progress shown.

python examples/larger_than_gpu_memory.py [SIZE [MEMORY_IN_MB]]
"""

import sys
import time

import numpy as np

import numba_gemm as ng


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 12288
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    small = np.ones((256, 256), np.float32)
    ng.matmul(small, small, device="cuda")  # starts the GPU, which isn't to be timed below
    generator = np.random.default_rng(0)
    a, b, c = (ng.pinned_empty((size, size), np.float32) for _ in range(3))  # page-locked: no staging copies
    a[...] = generator.standard_normal(a.shape, dtype=np.float32)
    b[...] = generator.standard_normal(b.shape, dtype=np.float32)
    print(f"operands and result take {3 * a.nbytes >> 20} MB; the product may take {megabytes} MB of GPU memory")

    def show(done: int, total: int) -> None:
        print(f"\r{100 * done / total:5.1f} %", end="", flush=True)

    start = time.perf_counter()
    ng.matmul(a, b, out=c, memory_limit=megabytes << 20, progress=show)
    elapsed = time.perf_counter() - start

    rows = np.linspace(0, size - 1, 4).astype(int)
    expected = a[rows].astype(np.float64) @ b.astype(np.float64)
    print(f"\r{elapsed:.2f} s, {2e-12 * size**3 / elapsed:.1f} TFLOP/s")
    print(f"largest error of {len(rows)} rows: {np.abs(c[rows] - expected).max():.1e}")


if __name__ == "__main__":
    try:
        main()
    except ng.NoDeviceError as error:
        print(f"this example needs a GPU: {error.reason}")
