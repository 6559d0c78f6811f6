"""The CUDA driver through cuda-python: initialised on first use, every return code checked."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from numba_gemm.errors import CudaError, NoDeviceError

_REMEDY = (
    "Use device='auto' or device='cpu' to compute with NumPy on this machine, device='emulator' to run a GPU kernel on "
    "the CPU, or a machine with an NVIDIA GPU of compute capability 7.5 or later and its driver; `numba-gemm info` "
    "shows what was found."
)


@functools.cache
def driver() -> Any:
    """The initialised ``cuda.bindings.driver`` module.

    Raises
    ------
    NoDeviceError : if cuda-python, the driver library or a GPU is missing, with what was looked for.
    """
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoDeviceError(f"cuda-python could not be imported ({error}). {_REMEDY}") from error
    try:
        (code,) = module.cuInit(0)
    except Exception as error:  # cuda-python raises its own types when libcuda.so is missing
        raise NoDeviceError(f"no NVIDIA driver: libcuda.so could not be loaded ({error}). {_REMEDY}") from error
    if int(code) != 0:
        raise NoDeviceError(f"the NVIDIA driver found no usable GPU (cuInit: {code.name}). {_REMEDY}")
    if check(module.cuDeviceGetCount(), "cuDeviceGetCount") == 0:
        raise NoDeviceError(f"the NVIDIA driver is there but sees no GPU. {_REMEDY}")
    return module


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call's result, or :class:`CudaError` naming the call.

    An error reported here may come from an earlier asynchronous launch; see :func:`numba_gemm.device.launch`.
    """
    code = result[0]
    if int(code) != 0:
        raise CudaError(f"{what} failed: {describe(code)}", code=int(code))
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def describe(code: Any) -> str:
    """``"CUDA_ERROR_OUT_OF_MEMORY: out of memory"`` for a driver return code."""
    module = importlib.import_module("cuda.bindings.driver")
    _, text = module.cuGetErrorString(code)
    return f"{code.name}: {text.decode() if text else 'unknown error'}"


def is_available() -> bool:
    """Whether a GPU can be used from this process."""
    try:
        driver()
    except NoDeviceError:
        return False
    return True
