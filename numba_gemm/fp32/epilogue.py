"""C = alpha · accumulator + beta · C, the last lines of every FP32 kernel. beta = 0 never reads C.

The FMA is written out: left to itself the compiler fuses one product in some kernels and the other one in others, and
the last bit would depend on which form of a kernel an alignment picks.
"""

from __future__ import annotations

from numba import float32

from numba_gemm.compile.numba_source import cuda, device_function
from numba_gemm.intrinsics import store_global_v4


@device_function
def store_output(C, index, accumulator, alpha, beta):
    """One element of C; ``index`` is its 64-bit offset in elements."""
    value = alpha * accumulator
    if beta != float32(0):
        value = cuda.fma(beta, C[index], value)
    C[index] = value


@device_function
def store_output_v4(C, index, x, y, z, w, alpha, beta):
    """Four consecutive elements of C, whose address is a multiple of 16 bytes."""
    x *= alpha
    y *= alpha
    z *= alpha
    w *= alpha
    if beta != float32(0):
        x = cuda.fma(beta, C[index], x)
        y = cuda.fma(beta, C[index + 1], y)
        z = cuda.fma(beta, C[index + 2], z)
        w = cuda.fma(beta, C[index + 3], w)
    store_global_v4(C, index, x, y, z, w)
