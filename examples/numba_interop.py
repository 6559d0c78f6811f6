"""Numba kernels of your own and numba_gemm on the same device arrays, on one stream.

    python examples/numba_interop.py [--import-first numba|numba_gemm] [--size N]

A small layer of a network, relu(x @ w + bias): the product by numba_gemm, the rest by a kernel written with
``@cuda.jit``. Everything is given to one stream of Numba's, in order, and nothing waits until the answer is wanted:

1. ``cuda.to_device(..., stream=stream)``: a Numba device array remembers the stream that it was made on;
2. a Numba kernel scales ``x`` in place, on the stream;
3. ``numba_gemm.matmul(x, w, out=y)``: runs on the arrays' stream, after that kernel, and returns at once;
4. a Numba kernel adds the bias and applies relu to ``y``, on the stream;
5. ``y.copy_to_host(stream=stream)`` and ``stream.synchronize()``.

Either package may be imported first: both work in the GPU's primary context. The answer is checked against float64.
Without a GPU the same layer is computed on the CPU, by ``numba_gemm.matmul`` on NumPy arrays.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import numpy as np

SCALE = 0.5


def main() -> int:
    """Compute the layer, check it, and say what was done; the exit status is 1 if the answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--import-first", choices=("numba", "numba_gemm"), default="numba")
    parser.add_argument("--size", type=int, default=500, help="rows, columns and depth of the product (default 500)")
    options = parser.parse_args()

    # The order of the two imports must not matter; this makes it the one that was asked for.
    order = ("numba.cuda", "numba_gemm") if options.import_first == "numba" else ("numba_gemm", "numba.cuda")
    for name in order:
        importlib.import_module(name)
    print(f"imported {order[0]}, then {order[1]}")

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((options.size, options.size), dtype=np.float32) for _ in range(2))
    bias = rng.standard_normal(options.size, dtype=np.float32)

    if sys.modules["numba.cuda"].is_available():
        y = on_gpu(x, w, bias)
        print("two Numba kernels and a product on one stream of the GPU")
    else:
        y = on_cpu(x, w, bias)
        print("no GPU was found, so this was computed on the CPU (`numba-gemm info` tells what was looked for)")

    expected = np.maximum(SCALE * x.astype(np.float64) @ w.astype(np.float64) + bias, 0)
    error = np.abs(y - expected).max()
    # An FP32 sum of K products, each up to |x|·|w|, is this close, and far closer as a rule.
    bound = 2.0**-24 * options.size * (SCALE * np.abs(x) @ np.abs(w) + np.abs(bias)).max()
    right = bool(error <= bound)
    print(f"largest error {error:.2e}, bound {bound:.2e}: {'right' if right else 'WRONG'}")
    return 0 if right else 1


def on_gpu(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The layer by two Numba kernels with a product of numba_gemm between them, all on one stream."""
    from numba import cuda

    import numba_gemm

    @cuda.jit
    def scale(matrix, factor):
        row, column = cuda.grid(2)
        if row < matrix.shape[0] and column < matrix.shape[1]:
            matrix[row, column] *= factor

    @cuda.jit
    def add_bias_and_relu(matrix, bias):
        row, column = cuda.grid(2)
        if row < matrix.shape[0] and column < matrix.shape[1]:
            matrix[row, column] = max(matrix[row, column] + bias[column], 0.0)

    stream = cuda.stream()
    x_gpu, w_gpu, bias_gpu = (cuda.to_device(array, stream=stream) for array in (x, w, bias))
    y_gpu = cuda.device_array((x.shape[0], w.shape[1]), np.float32, stream=stream)

    block = (16, 16)

    def grid(matrix):
        return tuple(-(-extent // threads) for extent, threads in zip(matrix.shape, block, strict=True))

    scale[grid(x_gpu), block, stream](x_gpu, np.float32(SCALE))
    result = numba_gemm.matmul(x_gpu, w_gpu, out=y_gpu)
    assert result is y_gpu
    add_bias_and_relu[grid(y_gpu), block, stream](y_gpu, bias_gpu)

    y = y_gpu.copy_to_host(stream=stream)
    stream.synchronize()
    return y


def on_cpu(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The layer by NumPy, with the product of numba_gemm on the CPU."""
    import numba_gemm

    return np.maximum(numba_gemm.matmul(np.float32(SCALE) * x, w, device="cpu") + bias, 0)


if __name__ == "__main__":
    raise SystemExit(main())
