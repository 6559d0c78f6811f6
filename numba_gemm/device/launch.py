"""One launcher for every kernel: parameters packed into a buffer, one driver call.

A kernel's parameters are the bytes that its PTX declares, in order, each at its natural alignment. They are packed
with :mod:`struct` into a buffer that belongs to the calling thread and handed over through
``CU_LAUNCH_PARAM_BUFFER_POINTER``; the driver copies them before the call returns.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from numba_gemm.device.driver import describe, driver
from numba_gemm.device.module import Function
from numba_gemm.errors import CudaError

_BUFFER_BYTES = 1024
_PARAM_END, _PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_* in cuda.h


class _ParameterBuffer(threading.local):
    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(_BUFFER_BYTES)
        self.size = ctypes.c_size_t(0)
        self.extra = (ctypes.c_void_p * 5)(
            _PARAM_BUFFER_POINTER,
            ctypes.addressof(self.data),
            _PARAM_BUFFER_SIZE,
            ctypes.addressof(self.size),
            _PARAM_END,
        )
        self.address = ctypes.addressof(self.extra)


_buffer = _ParameterBuffer()


def launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: struct.Struct,
    values: tuple[Any, ...],
    *,
    dynamic_shared_bytes: int = 0,
    stream: int = 0,
) -> None:
    """Launch ``function`` asynchronously on ``stream`` (a CUstream handle; 0 is the legacy default stream).

    Raises
    ------
    CudaError : names the kernel, its grid and block. An error of an earlier asynchronous kernel also shows here,
        and the message says so.
    """
    buffer = _buffer
    parameters.pack_into(buffer.data, 0, *values)
    buffer.size.value = parameters.size
    (code,) = driver().cuLaunchKernel(function.handle, *grid, *block, dynamic_shared_bytes, stream, 0, buffer.address)
    if int(code) != 0:
        raise CudaError(
            f"launching kernel {function.name} with grid {grid} and block {block} failed: {describe(code)} "
            "(a fault of an earlier kernel in this context is also reported here)",
            code=int(code),
        )
