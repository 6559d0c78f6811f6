"""C = alpha · accumulator + beta · C, the last lines of every FP32 kernel. beta = 0 never reads C."""

from __future__ import annotations

from numba import float32

from numba_gemm.compile.numba_source import device_function
from numba_gemm.intrinsics import store_global_v4


@device_function
def store_output(C, index, accumulator, alpha, beta):
    """One element of C; ``index`` is its 64-bit offset in elements."""
    value = alpha * accumulator
    if beta != float32(0):
        value += beta * C[index]
    C[index] = value


@device_function
def store_output_v4(C, index, x, y, z, w, alpha, beta):
    """Four consecutive elements of C, whose address is a multiple of 16 bytes."""
    x *= alpha
    y *= alpha
    z *= alpha
    w *= alpha
    if beta != float32(0):
        x += beta * C[index]
        y += beta * C[index + 1]
        z += beta * C[index + 2]
        w += beta * C[index + 3]
    store_global_v4(C, index, x, y, z, w)
