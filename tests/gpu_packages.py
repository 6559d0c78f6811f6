"""The packages of GPU arrays in one manner, for tests on a GPU: arrays, streams, and work that keeps a stream busy."""

from __future__ import annotations

import contextlib
import functools
import importlib

import ml_dtypes
import numpy as np
import pytest

DTYPES = ("float32", "float16", "bfloat16")

_BUSY_PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry busy(.param .u64 nanoseconds)
{
    .reg .u64 %start, %now, %wanted;
    .reg .pred %more;
    ld.param.u64 %wanted, [nanoseconds];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %more, %now, %wanted;
    @%more bra again;
    ret;
}
"""


@functools.cache
def _busy_function():
    from numba_gemm.device.context import current_context
    from numba_gemm.device.driver import check, driver

    current_context()
    module = check(driver().cuModuleLoadData(_BUSY_PTX.encode() + b"\0"), "cuModuleLoadData")
    return check(driver().cuModuleGetFunction(module, b"busy"), "cuModuleGetFunction")


def keep_busy(stream, milliseconds=100):
    """Give a stream work of one thread that lasts."""
    import ctypes

    from numba_gemm.device.driver import check, driver

    parameters = ((milliseconds * 1_000_000,), (ctypes.c_uint64,))
    check(driver().cuLaunchKernel(_busy_function(), 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0), "cuLaunchKernel")


def is_done(stream):
    """Whether a stream has no work left."""
    from numba_gemm.device.driver import driver

    return int(driver().cuStreamQuery(stream)[0]) == 0


def numpy_type(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class Numba:
    """Arrays carry their stream; there is no current one."""

    def __init__(self):
        self.cuda = importlib.import_module("numba.cuda")
        self.bound = 0

    def array(self, host):
        if host.dtype.name == "bfloat16":  # Numba's copies ask for NumPy's buffer protocol, which has no bfloat16
            return self.cuda.to_device(host.view(np.int16), stream=self.bound).view(host.dtype)
        return self.cuda.to_device(host, stream=self.bound)

    def empty(self, shape, dtype):
        return self.cuda.device_array(shape, numpy_type(dtype), stream=self.bound)

    def back(self, array):
        if array.dtype.name == "bfloat16":
            return array.view(np.int16).copy_to_host().view(array.dtype)
        return array.copy_to_host()

    def pointer(self, array):
        return array.device_ctypes_pointer.value

    def copy_into(self, target, source):
        target.copy_to_device(source, stream=self.bound)

    def new_stream(self):
        return self.cuda.stream()

    @contextlib.contextmanager
    def current(self, stream):
        self.bound = stream
        try:
            yield
        finally:
            self.bound = 0


class Cupy:
    def __init__(self):
        self.cupy = importlib.import_module("cupy")

    def array(self, host):
        return self.cupy.asarray(host)

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, numpy_type(dtype))

    def back(self, array):
        return self.cupy.asnumpy(array)

    def pointer(self, array):
        return array.data.ptr

    def copy_into(self, target, source):
        target[...] = source

    def new_stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def current(self, stream):
        return stream


class Torch:
    def __init__(self):
        self.torch = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise ImportError("torch sees no GPU")

    def array(self, host):
        if host.dtype.name == "bfloat16":
            return self.torch.from_numpy(host.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(host).cuda()

    def empty(self, shape, dtype):
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device="cuda")

    def back(self, array):
        if array.dtype is self.torch.bfloat16:
            return array.view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()

    def pointer(self, array):
        return array.data_ptr()

    def copy_into(self, target, source):
        target.copy_(source)

    def new_stream(self):
        return self.torch.cuda.Stream()

    def current(self, stream):
        return self.torch.cuda.stream(stream)


class Jax:
    """Arrays can't be written, and the stream is JAX's own."""

    def __init__(self):
        self.jax = importlib.import_module("jax")
        try:
            self.device = self.jax.devices("cuda")[0]
        except RuntimeError as error:
            raise ImportError(f"JAX sees no GPU ({error})") from None

    def array(self, host):
        return self.jax.device_put(host, self.device)

    def back(self, array):
        return np.asarray(array)

    def pointer(self, array):
        return array.unsafe_buffer_pointer()


_ADAPTERS = {"numba": Numba, "cupy": Cupy, "torch": Torch, "jax": Jax}


def package(name):
    """The adapter of a package; the test is skipped, with the reason, where it isn't installed or sees no GPU."""
    try:
        return _ADAPTERS[name]()
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
