"""What Numba's compiler emits, at several compute capabilities."""

from __future__ import annotations

import math

import harness
import numpy as np
import pytest

from numba_gemm import emulator

numba_cuda = pytest.importorskip("numba.cuda")
from numba import cuda, float32, float64, int32, types  # noqa: E402

TILE = 16
PADDED = TILE + 1


def tiled(a, b, c, m, n, k):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, PADDED), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
    total = float32(0)
    for start in range(0, k, TILE):
        a_tile[y, x] = a[row * k + start + x] if row < m and start + x < k else float32(0)
        b_tile[y, x] = b[(start + y) * n + column] if start + y < k and column < n else float32(0)
        cuda.syncthreads()
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
        cuda.syncthreads()
    if row < m and column < n:
        c[row * n + column] = total


def blocked(a, b, c, m, n, k):
    """4 x 4 outputs a thread, accumulators in a local array, 32 x 32 tile, 64 threads."""
    a_tile = cuda.shared.array(32 * 8, float32)
    b_tile = cuda.shared.array(8 * 32, float32)
    total = cuda.local.array((4, 4), float32)
    t = cuda.threadIdx.x
    ty, tx = t // 8, t % 8
    for i in range(4):
        for j in range(4):
            total[i, j] = float32(0)
    for start in range(0, k, 8):
        for e in range(t, 256, 64):
            r, q = cuda.blockIdx.y * 32 + e // 8, start + e % 8
            a_tile[e] = a[r * k + q] if r < m and q < k else float32(0)
            r, q = start + e // 32, cuda.blockIdx.x * 32 + e % 32
            b_tile[e] = b[r * n + q] if r < k and q < n else float32(0)
        cuda.syncthreads()
        for q in range(8):
            for i in range(4):
                for j in range(4):
                    total[i, j] += a_tile[(ty * 4 + i) * 8 + q] * b_tile[q * 32 + tx * 4 + j]
        cuda.syncthreads()
    for i in range(4):
        for j in range(4):
            r, q = cuda.blockIdx.y * 32 + ty * 4 + i, cuda.blockIdx.x * 32 + tx * 4 + j
            if r < m and q < n:
                c[r * n + q] = total[i, j]


def elementary(x, y, n):
    i = cuda.grid(1)
    if i < n:
        v = x[i]
        y[i] = math.exp(v) + math.sqrt(abs(v)) * math.sin(v) - math.log(1.0 + v * v) / 3.0 + math.floor(v) % 3.0


def reduce_rows(x, out, n):
    lane = cuda.threadIdx.x % 32
    row = cuda.threadIdx.x // 32
    total = float32(0)
    for i in range(lane, n, 32):
        total += x[row * n + i]
    step = 16
    while step > 0:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step //= 2
    if lane == 0:
        out[row] = total


def compiled(function, signature, cc):
    return cuda.compile_ptx(function, signature, cc=cc)[0]


F32 = types.CPointer(float32)
GEMM = types.void(F32, F32, F32, int32, int32, int32)
CAPABILITIES = [(7, 5), (8, 0), (9, 0), (12, 0)]


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize(("kernel", "block", "tile"), [(tiled, (16, 16), 16), (blocked, 64, 32)])
def test_products(kernel, block, tile, cc):
    m, n, k = 37, 33, 19
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    c = np.full((m, n), np.nan, np.float32)
    text = compiled(kernel, GEMM, cc)
    emulator.launch(
        text,
        (-(-n // tile), -(-m // tile)),
        block,
        [a, b, c, np.int32(m), np.int32(n), np.int32(k)],
        arch=f"sm_{cc[0]}{cc[1]}",
    )
    assert (np.abs(c - a.astype(np.float64) @ b) <= harness.error_bound(a, b, k)).all()


@pytest.mark.parametrize("kind", [float32, float64])
def test_libdevice_functions(kind):
    dtype = np.float32 if kind is float32 else np.float64
    pointer = types.CPointer(kind)
    x = np.random.default_rng(2).uniform(-20, 20, 500).astype(dtype)
    y = np.zeros_like(x)
    emulator.launch(compiled(elementary, types.void(pointer, pointer, int32), (9, 0)), 4, 128, [x, y, np.int32(x.size)])
    v = x.astype(np.float64)
    expected = np.exp(v) + np.sqrt(np.abs(v)) * np.sin(v) - np.log(1 + v * v) / 3 + np.floor(v) % 3
    np.testing.assert_allclose(
        y, expected, rtol=1e-6 if dtype == np.float32 else 1e-13, atol=1e-6 if dtype == np.float32 else 1e-13
    )


def test_shuffles():
    x = np.random.default_rng(3).integers(-9, 9, (4, 75)).astype(np.float32)
    out = np.zeros(4, np.float32)
    emulator.launch(compiled(reduce_rows, types.void(F32, F32, int32), (8, 0)), 1, 128, [x, out, np.int32(75)])
    np.testing.assert_array_equal(out, x.sum(axis=1))
