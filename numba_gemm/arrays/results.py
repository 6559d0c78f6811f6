"""New arrays for results, of the package that the operands come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from numba_gemm.arrays import dlpack
from numba_gemm.arrays.operand import CUPY, HOST, JAX, MATRIX, TORCH, Operand, numpy_dtype
from numba_gemm.arrays.streams import LEGACY, as_stream, cupy_stream, current_stream, torch_stream


def empty_like_operand(
    operand: Operand, shape: tuple[int, ...], stream: int | None = None, dtype: str | None = None
) -> Any:
    """A new, uninitialised, C-ordered array of the operand's package, on its GPU.

    Parameters
    ----------
    operand : whose package, and whose dtype unless ``dtype`` names another.
    shape : of any number of dimensions.
    stream : handle of the stream that will write the array first, None for the operand's current one. A package whose
        memory pool is ordered by streams takes the memory from that stream's.

    Returns
    -------
    An array of NumPy for host memory of NumPy, of torch for a tensor's, of CuPy or torch for theirs, a Matrix for a
    Matrix, of Numba for a Numba array and for those that are known by a protocol alone. For a JAX array a
    :class:`PendingArray`, which :func:`wrap_result` turns into a JAX array once the work that writes it has been
    launched.
    """
    name = dtype or operand.dtype
    if operand.kind == HOST:
        if operand.package == "torch":
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=getattr(torch, name))
        return np.empty(shape, numpy_dtype(name))
    if stream is None:
        stream = current_stream(operand)
    if operand.kind == CUPY:
        return _empty_cupy(operand, shape, stream, name)
    if operand.kind == TORCH:
        return _empty_torch(operand, shape, stream, name)
    if operand.kind == JAX:
        return _empty_jax(operand, shape, stream, name)
    if operand.kind == MATRIX:
        return operand.array.empty_like(shape, numpy_dtype(name), stream)
    return _empty_numba(operand, shape, stream, name)


def _empty_numba(operand: Operand, shape: tuple[int, ...], stream: int, dtype: str) -> Any:
    from numba import cuda

    owner = 0
    if stream:
        own = getattr(operand.array, "stream", 0)  # the same stream object, where it is the same stream
        owner = own if own and as_stream(own) == stream else cuda.external_stream(stream)
    if 0 in shape:  # Numba can't allocate nothing; a view of one element serves
        return cuda.device_array((1,), numpy_dtype(dtype), stream=owner)[:0].reshape(shape)
    return cuda.device_array(shape, numpy_dtype(dtype), stream=owner)


def _empty_cupy(operand: Operand, shape: tuple[int, ...], stream: int, dtype: str) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(operand.device):
        here: AbstractContextManager[Any] = nullcontext()
        if stream != cupy_stream(operand.device):
            here = _cupy_scope(cupy, stream)
        with here:
            return cupy.empty(shape, numpy_dtype(dtype))


def _cupy_scope(cupy: Any, stream: int) -> AbstractContextManager[Any]:
    """A scope in which a stream of another package is CuPy's current one."""
    scope: AbstractContextManager[Any]
    if not stream:
        scope = cupy.cuda.Stream.null
    elif hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        scope = cupy.cuda.Stream.from_external(_Handle(stream))
    else:
        scope = cupy.cuda.ExternalStream(stream)
    return scope


class _Handle:
    """A stream's handle as an object of CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def _empty_torch(operand: Operand, shape: tuple[int, ...], stream: int, dtype: str) -> Any:
    torch = sys.modules["torch"]
    device = torch.device("cuda", operand.device)
    here: AbstractContextManager[Any] = nullcontext()
    if stream != torch_stream(operand.device or 0):
        external = torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)
        here = torch.cuda.stream(external)
    with here:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _empty_jax(operand: Operand, shape: tuple[int, ...], stream: int, dtype: str) -> PendingArray:
    jax = sys.modules["jax"]
    device = next(iter(operand.array.devices()))
    return PendingArray(jax.numpy.empty(shape, numpy_dtype(dtype), device=device), stream)


class PendingArray:
    """The memory of a new JAX array that is still to be written.

    JAX arrays never change, and JAX orders its own work after an array's birth only. So the memory comes from JAX, is
    written through its DLPack capsule, and is given back to JAX as a new array by :meth:`finish`, which makes JAX's
    stream wait, on the GPU, for the stream that wrote it. Nothing is copied.

    Attributes
    ----------
    stream : handle of the stream that is to write it, ordered after JAX's own use of the memory.
    tensor : where the memory is.
    """

    def __init__(self, array: Any, stream: int) -> None:
        self.stream = stream
        self.tensor = dlpack.read(dlpack.export(array, stream))
        self._array = array

    def finish(self, stream: int | None = None) -> Any:
        """The JAX array, complete once what has been given to ``stream`` is done (None for the stream it is for)."""
        from numba_gemm.device.lifetime import keep_until_done

        if stream is None:
            stream = self.stream
        result = sys.modules["jax"].dlpack.from_dlpack(_Handover(self.tensor, stream))
        keep_until_done(stream, self._array)  # JAX may free its array at once, if the caller drops the result
        return result


class _Handover:
    """DLPack's producer for :class:`PendingArray`: passes JAX's own capsule on, ordered after a stream."""

    def __init__(self, tensor: dlpack.Tensor, stream: int) -> None:
        self._tensor = tensor
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        consumer = LEGACY if stream is None else int(stream)
        if consumer != -1 and as_stream(consumer) != self._stream:
            from numba_gemm.device.stream import Event, wait_event

            event = Event()
            event.record(self._stream)
            wait_event(consumer, event)
        return self._tensor.capsule


def wrap_result(result: Any, inputs: Sequence[Any], stream: int | None = None) -> Any:
    """The result of a product as its caller is to get it, once the work that writes it has been launched.

    Parameters
    ----------
    result : from :func:`empty_like_operand`.
    inputs : the factors, as the caller gave them. As with ``np.matmul``, the one of a NumPy subclass with the highest
        ``__array_priority__`` wraps a NumPy result (``np.matrix``, for instance), and a NumPy result without
        dimensions becomes a scalar.
    stream : handle of the stream that the work was given to; None for the one that the result was made for.

    Returns
    -------
    ``result``, a wrapped view of it, or the JAX array of its memory.
    """
    if isinstance(result, PendingArray):
        return result.finish(stream)
    if type(result) is not np.ndarray:
        return result
    if inputs and type(inputs[0]).__module__.partition(".")[0] in ("jax", "jaxlib"):  # JAX arrays on the CPU
        return sys.modules["jax"].device_put(result, next(iter(inputs[0].devices())))
    subclasses = [array for array in inputs if isinstance(array, np.ndarray) and type(array) is not np.ndarray]
    wrapper = max(subclasses, key=_priority, default=None)
    if wrapper is not None and _priority(wrapper) >= 0:
        context = (np.matmul, tuple(inputs), 0)
        if np.lib.NumpyVersion(np.__version__) < "2.0.0":
            return wrapper.__array_wrap__(result, context)
        return wrapper.__array_wrap__(result, context, result.ndim == 0)
    return result if result.ndim else result[()]


def _priority(array: Any) -> float:
    return float(getattr(array, "__array_priority__", 0.0))
