"""One launcher for every kernel: parameters packed into a buffer, one driver call.

A kernel's parameters are the bytes that its PTX declares, in order, each at its natural alignment. They are packed
with :mod:`struct` into a buffer that belongs to the calling thread and handed over through
``CU_LAUNCH_PARAM_BUFFER_POINTER``; the driver copies them before the call returns.

The driver's function is called through :mod:`ctypes` at the address that ``cuGetProcAddress`` gives, with the launch's
configuration (``CUlaunchConfig``) and the parameters side by side in that buffer: a prepared launch is one
``pack_into`` and one call with four arguments.

A launch that *overlaps* carries one attribute: it may start before the kernel before it on the stream is over, and
waits for that one itself (see :class:`numba_gemm.spec.KernelLaunch`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import threading
from collections.abc import Callable
from typing import Any

from numba_gemm.device.driver import describe, function_address
from numba_gemm.device.module import Function
from numba_gemm.errors import CudaError

_PARAM_END, _PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_* in cuda.h
_MAX_PARAMETERS = 4096  # bytes

#: CUlaunchConfig: grid, block, dynamic shared bytes; stream; attributes and their number. Then the size of the
#: parameters, which the driver reads through a pointer, and the parameters.
_HEAD = struct.Struct("<7I4xQQI4xQ")
_SIZE_AT = 56
_PARAMETERS_AT = 64
#: A prepared launch writes all of it at once: grid … shared bytes; stream; attributes … size; the parameters.
_PREPARED = "<32sQ24s3Q{}s"
_PACKED = "<32sQ24s{}x{}s"

#: CUlaunchAttribute: its number, and 64 bytes of value, here an int.
_ATTRIBUTE = struct.Struct("<I4xi60x")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_overlap = ctypes.create_string_buffer(_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1), _ATTRIBUTE.size)


def _attributes(overlaps: bool) -> tuple[int, int]:
    """Where a launch's attributes lie, and how many they are."""
    return (ctypes.addressof(_overlap), 1) if overlaps else (0, 0)


class _LaunchBuffer(threading.local):
    """A thread's buffer: ``parts`` are the buffer, its address, and that of the list by which the driver reads it."""

    def __init__(self) -> None:
        data = ctypes.create_string_buffer(_PARAMETERS_AT + _MAX_PARAMETERS)
        address = ctypes.addressof(data)
        self._extra = (ctypes.c_void_p * 5)(
            _PARAM_BUFFER_POINTER,
            address + _PARAMETERS_AT,
            _PARAM_BUFFER_SIZE,
            address + _SIZE_AT,
            _PARAM_END,
        )
        self.parts = (data, address, ctypes.addressof(self._extra))


_buffer = _LaunchBuffer()


@functools.cache
def driver_function(name: str, *argument_types: Any, version: int = 12000) -> Callable[..., int]:
    """A function of the CUDA driver by name, for calls where a microsecond counts; returns its error code.

    ``version`` is that of CUDA to which the arguments belong.

    Raises
    ------
    CudaError : if the driver has no such function.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(function_address(name, version))


@functools.cache
def quick_driver_function(name: str, *argument_types: Any) -> Callable[..., int]:
    """As :func:`driver_function`, for functions that return at once: the interpreter's lock is kept meanwhile.

    Where many threads want the lock, having it back takes far longer than such a call.
    """
    return ctypes.PYFUNCTYPE(ctypes.c_int, *argument_types)(function_address(name))


def _launch_function() -> Callable[..., int]:
    return driver_function("cuLaunchKernelEx", *[ctypes.c_void_p] * 4)


def launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: struct.Struct,
    values: tuple[Any, ...],
    *,
    dynamic_shared_bytes: int = 0,
    stream: int = 0,
    overlaps: bool = False,
) -> None:
    """Launch ``function`` asynchronously on ``stream`` (a CUstream handle; 0 is the legacy default stream).

    ``overlaps`` needs compute capability 9.0; the kernel then waits itself for the one before it on the stream.

    Raises
    ------
    CudaError : names the kernel, its grid and block. An error of an earlier asynchronous kernel also shows here,
        and the message says so.
    """
    data, config, extra = _buffer.parts
    _HEAD.pack_into(data, 0, *grid, *block, dynamic_shared_bytes, stream, *_attributes(overlaps), parameters.size)
    parameters.pack_into(data, _PARAMETERS_AT, *values)
    code = _launch_function()(config, int(function.handle), None, extra)
    if code != 0:
        raise _failed(code, function, grid, block)


#: Where the first parameter lies on sm_90 if it is aligned to 64 bytes: see :func:`first_parameter`.
_ALIGNED_ON_SM_90 = 0x240 - 0x210


def first_parameter(function: Function) -> int:
    """Bytes of a parameter buffer before the first parameter.

    None for most kernels. Parameters lie in a bank of constants, on sm_90 from 0x210 on, so a tensor map, which is
    aligned to 64 bytes, comes after a gap that the PTX doesn't show and a buffer must have.
    """
    try:
        info = driver_function("cuFuncGetParamInfo", *[ctypes.c_void_p] * 4, version=12040)
    except CudaError:  # before R550
        return _ALIGNED_ON_SM_90
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    code = info(int(function.handle), 0, ctypes.addressof(offset), ctypes.addressof(size))
    if code != 0:
        raise CudaError(f"cuFuncGetParamInfo({function.name}) failed with error {code}", code=code)
    return offset.value


#: Launches with these bytes as all of the kernel's parameters, on a stream: ``launch(parameters, stream)``.
PackedLaunch = Callable[[bytes, int], None]


def prepare_packed_launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    size: int,
    *,
    dynamic_shared_bytes: int = 0,
    overlaps: bool = False,
) -> PackedLaunch:
    """A launch whose parameters, ``size`` bytes, are packed by the caller, as where tensor maps are among them.

    ``overlaps`` is as for :func:`launch`. The function that is returned launches asynchronously and raises
    :class:`CudaError` as :func:`launch` does.
    """
    handle = int(function.handle)
    call = _launch_function()
    head = struct.pack("<7I4x", *grid, *block, dynamic_shared_bytes)
    gap = first_parameter(function)
    attributes_and_size = struct.pack("<QI4xQ", *_attributes(overlaps), gap + size)
    pack_into = struct.Struct(_PACKED.format(gap, size)).pack_into
    buffer = _buffer

    def packed(parameters: bytes, stream: int) -> None:
        data, config, extra = buffer.parts
        pack_into(data, 0, head, stream, attributes_and_size, parameters)
        if code := call(config, handle, None, extra):
            raise _failed(code, function, grid, block)

    return packed


#: Launches with these as the kernel's first three parameters, on a stream: ``launch(first, second, third, stream)``.
PreparedLaunch = Callable[[int, int, int, int], None]


def prepare_launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: bytes,
    *,
    dynamic_shared_bytes: int = 0,
) -> PreparedLaunch:
    """A launch of which only the first three parameters, addresses, and the stream are left open.

    ``parameters`` are all of the kernel's, those three with any value. The function that is returned launches
    asynchronously and raises :class:`CudaError` as :func:`launch` does.
    """
    handle = int(function.handle)
    call = _launch_function()
    head = struct.pack("<7I4x", *grid, *block, dynamic_shared_bytes)
    attributes_and_size = struct.pack("<QI4xQ", 0, 0, len(parameters))  # a single launch overlaps nothing
    tail = parameters[24:]
    pack_into = struct.Struct(_PREPARED.format(len(tail))).pack_into
    buffer = _buffer

    def prepared(first: int, second: int, third: int, stream: int) -> None:
        data, config, extra = buffer.parts
        pack_into(data, 0, head, stream, attributes_and_size, first, second, third, tail)
        if code := call(config, handle, None, extra):
            raise _failed(code, function, grid, block)

    return prepared


def _failed(code: int, function: Function, grid: tuple[int, int, int], block: tuple[int, int, int]) -> CudaError:
    result = importlib.import_module("cuda.bindings.driver").CUresult(code)
    return CudaError(
        f"launching kernel {function.name} with grid {grid} and block {block} failed: {describe(result)} "
        "(a fault of an earlier kernel in this context is also reported here)",
        code=code,
    )
