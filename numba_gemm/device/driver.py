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
        raise _no_device(f"cuda-python could not be imported ({error})") from None
    try:
        (code,) = module.cuInit(0)
    except Exception as error:  # cuda-python raises its own types when libcuda.so is missing
        told = str(error).rstrip(".")
        raise _no_device(f"no NVIDIA driver: libcuda.so could not be loaded ({told})") from None
    if int(code) != 0:
        raise _no_device(f"the NVIDIA driver found no usable GPU (cuInit: {code.name})")
    if check(module.cuDeviceGetCount(), "cuDeviceGetCount") == 0:
        raise _no_device("the NVIDIA driver is there but sees no GPU")
    return module


def _no_device(reason: str) -> NoDeviceError:
    return NoDeviceError(f"{reason}. {_REMEDY}", reason=reason)


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


def function_address(name: str, version: int = 12000) -> int:
    """Where a function of the driver is, to be called through :mod:`ctypes` where a microsecond counts.

    ``version`` is that of CUDA to which the arguments belong.

    Raises
    ------
    CudaError : if the driver has no such function.
    """
    pointer = int(check(driver().cuGetProcAddress(name.encode(), version, 0), f"cuGetProcAddress({name})")[0])
    if pointer == 0:
        raise CudaError(f"the CUDA driver has no {name}; update it to R525 or later", code=500)
    return pointer


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
