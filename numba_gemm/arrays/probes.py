"""Looking again at an array of a kind that was seen before, in well under a microsecond.

A probe gives what may differ between two calls with like arrays. It builds no ``__cuda_array_interface__``, checks
nothing, and is for arrays that :func:`numba_gemm.arrays.as_operand` has accepted once with the same shape, strides
and dtype. It doesn't say which GPU an array is on: with several, look at arrays in full.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

from numba_gemm.arrays.streams import LEGACY

#: Address, shape, strides and dtype as the package gives them (to be compared, not read), stream.
Probed = tuple[int, tuple[int, ...], Hashable, Hashable, int]
Probe = Callable[[Any], Probed]

#: In place of the dtype of an array that :func:`as_operand` refuses or that isn't a GPU's: like no array's that was
#: accepted, so that it is looked at in full.
IN_FULL = "look at it in full"

_probes: dict[type, Probe | None] = {}


def probe_for(array: Any) -> Probe | None:
    """The probe of an array's exact type: Numba's, CuPy's and torch's own arrays have one, others None.

    Raises nothing. Cached by type; a probe is valid for every array of that type.
    """
    cls = type(array)
    try:
        return _probes[cls]
    except KeyError:
        probe = _probes[cls] = _make_probe(cls)
        return probe


def _make_probe(cls: type) -> Probe | None:
    package = cls.__module__.partition(".")[0]
    if package == "numba" and cls.__name__ == "DeviceNDArray":
        return _numba_probe()
    if package == "cupy" and cls is getattr(sys.modules.get("cupy"), "ndarray", None):
        return _cupy_probe()
    torch = sys.modules.get("torch") if package == "torch" else None
    if torch is not None and cls in (torch.Tensor, torch.nn.Parameter):
        return _torch_probe(torch)
    return None


def _numba_probe() -> Probe:
    def probe(array: Any) -> Probed:
        stream, memory = array.stream, array.gpu_data  # no memory: an empty array
        return (
            (memory.device_ctypes_pointer.value or 0) if memory is not None else 0,
            array.shape,
            array.strides,
            array.dtype,
            int(stream) if stream else 0,
        )

    return probe


def _cupy_probe() -> Probe:
    cuda = sys.modules["cupy"].cuda
    current = cuda.get_current_stream

    def probe(array: Any) -> Probed:
        stream = current().ptr
        return array.data.ptr, array.shape, array.strides, array.dtype, 0 if stream == LEGACY else stream

    return probe


def _torch_probe(torch: Any) -> Probe:
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    grad_enabled = torch.is_grad_enabled

    def current(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    stream_of: Callable[[int], int] = current if raw is None else raw

    def probe(array: Any) -> Probed:
        device = array.get_device()
        try:
            if device >= 0 and not array.is_neg() and not (array.requires_grad and grad_enabled()):
                return array.data_ptr(), array.shape, array.stride(), array.dtype, stream_of(device)
        except RuntimeError:  # no strides or no memory of its own, as of a sparse tensor
            pass
        return 0, array.shape, (), IN_FULL, 0

    return probe
