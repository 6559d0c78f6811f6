"""CUDA streams of any package, as handles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from numba_gemm.arrays.operand import CUPY, DLPACK, INTERFACE, JAX, TORCH, Operand

#: The legacy default stream has two handles, 0 and 1; here it is always 0.
LEGACY = 1

_ACCEPTED = (
    "an object with __cuda_stream__ (numba.cuda.stream(), cupy.cuda.Stream, torch.cuda.Stream, cuda.core.Stream), a "
    "CUstream of cuda.bindings, a stream's handle as an int, or None for the arrays' own stream"
)


def as_stream(stream: Any) -> int:
    """The handle of a CUDA stream of any package.

    Parameters
    ----------
    stream : None, a handle, an object with ``__cuda_stream__``, or a stream of Numba, CuPy, torch, cuda.core or
        cuda.bindings.

    Returns
    -------
    The handle: 0 for None and the legacy default stream, 2 for the per-thread default stream.

    Raises
    ------
    TypeError : for anything else; ValueError for a negative handle.
    """
    if stream is None:
        return 0
    if isinstance(stream, Integral) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"stream is {stream}; a stream's handle is positive, or 0 for the legacy default stream")
        return 0 if stream == LEGACY else int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        described = protocol() if callable(protocol) else protocol
        try:
            version, handle = described
            version, handle = int(version), int(handle)
        except (TypeError, ValueError):
            raise TypeError(
                f"stream's __cuda_stream__ gave {described!r}; it must give a pair, version 0 and the handle"
            ) from None
        if version != 0:
            raise TypeError(
                f"stream's __cuda_stream__ is of version {version}, and 0 is known here; pass the handle as an int"
            )
        return 0 if handle == LEGACY else handle
    read = _READERS.get(type(stream).__module__.partition(".")[0])
    handle = None if read is None else read(stream)
    if handle is None:
        raise TypeError(f"stream is {stream!r}; pass {_ACCEPTED}")
    return 0 if handle == LEGACY else int(handle)


def _numba_handle(stream: Any) -> int | None:
    handle = getattr(stream, "handle", None)
    if handle is None:
        return None
    return int(getattr(handle, "value", handle) or 0)


def _number(stream: Any) -> int | None:
    return int(stream) if hasattr(type(stream), "__int__") else None


#: Streams of versions that don't have ``__cuda_stream__`` yet.
_READERS: dict[str, Callable[[Any], int | None]] = {
    "numba": _numba_handle,
    "cupy": lambda stream: getattr(stream, "ptr", None),
    "torch": lambda stream: getattr(stream, "cuda_stream", None),
    "cuda": _number,
    "numba_gemm": _number,
}


def current_stream(operand: Operand) -> int:
    """The handle of the stream that work on an array belongs on: its package's current one, or the array's own.

    CuPy and torch have a current stream for each GPU, a Numba array and a ``__cuda_array_interface__`` name their
    own, a DLPack tensor was made ready on the stream that was asked of it. Where none is named it is the legacy
    default stream, 0, which orders itself after every blocking stream.
    """
    if operand.kind == CUPY:
        return cupy_stream(operand.device)
    if operand.kind == TORCH:
        return torch_stream(operand.device or 0)
    return operand.stream or 0


def cupy_stream(device: int | None) -> int:
    """The handle of CuPy's current stream on a GPU; CuPy has been imported."""
    cuda = sys.modules["cupy"].cuda
    if device is None or device == cuda.runtime.getDevice():
        return _zero_if_legacy(cuda.get_current_stream().ptr)
    with cuda.Device(device):
        return _zero_if_legacy(cuda.get_current_stream().ptr)


def torch_stream(device: int) -> int:
    """The handle of torch's current stream on a GPU; torch has been imported."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle = raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
    return _zero_if_legacy(handle)


def _zero_if_legacy(handle: Any) -> int:
    return 0 if handle == LEGACY else int(handle)


def hold_operands(operands: Sequence[Operand], stream: int) -> None:
    """Keep device arrays alive until the work given to ``stream`` so far is done, where their package wouldn't.

    A package that frees memory in the order of a stream (CuPy, torch) may be told that an array is gone while a
    kernel on that stream still reads it; on another stream it may not, and neither may JAX, whose stream is its own,
    nor a producer that names no stream. Call this after the launch. It waits for nothing.
    """
    held = [
        (operand.array, operand.owner)
        for operand in operands
        if operand.on_device and (operand.kind in (JAX, DLPACK, INTERFACE) or (operand.stream or 0) != stream)
    ]
    if held:
        from numba_gemm.device.lifetime import keep_until_done

        keep_until_done(stream, held)
