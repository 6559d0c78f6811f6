"""Arrays of each package → :class:`Operand`. Nothing here copies data or imports a package of arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays import dlpack
from numba_gemm.arrays.operand import (
    CUPY,
    DLPACK,
    HOST,
    INTERFACE,
    JAX,
    MATRIX,
    NUMBA,
    TORCH,
    Operand,
    dtype_name,
    packed_strides,
    strides_in_elements,
)
from numba_gemm.arrays.results import PendingArray
from numba_gemm.arrays.streams import LEGACY, as_stream, cupy_stream, torch_stream

#: Arguments that are written.
OUTPUTS = ("c", "out")

Reader = Callable[[str, Any, int], Operand | None]


def read_numpy(name: str, array: npt.NDArray[Any]) -> Operand:
    """A NumPy array, of a subclass too."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(0) instead")
    if type(array).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise TypeError(
            f"{name} is a {type(array).__name__}, which has an arithmetic of its own that would be lost (units?); "
            f"pass np.asarray({name})"
        )
    return host_operand(name, array, array)


def host_operand(name: str, array: Any, view: npt.NDArray[Any]) -> Operand:
    """An operand in host memory: the caller's array, and its memory as a NumPy array."""
    return Operand(
        name=name,
        array=view,
        kind=HOST,
        pointer=view.__array_interface__["data"][0],
        shape=view.shape,
        strides=strides_in_elements(name, view.strides, view.itemsize),
        dtype=dtype_name(view.dtype),
        itemsize=view.itemsize,
        readonly=not view.flags.writeable,
        stream=None,
        owner=None if array is view else array,
    )


def read_interface(name: str, array: Any, kind: str = INTERFACE, device: int | None = None) -> Operand | None:
    """Whatever has a ``__cuda_array_interface__``, of versions 0 to 3; None if there is none."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if not isinstance(interface, dict):
        return None
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask, which would be lost; pass the array of its values, with masked ones set")
    dtype = _interface_dtype(array, interface)
    shape = tuple(int(extent) for extent in interface["shape"])
    strides = interface.get("strides")
    pointer, readonly = interface["data"]
    return Operand(
        name=name,
        array=array,
        kind=kind,
        pointer=int(pointer or 0),
        shape=shape,
        strides=packed_strides(shape)
        if strides is None
        else strides_in_elements(name, tuple(int(stride) for stride in strides), dtype.itemsize),
        dtype=dtype_name(dtype),
        itemsize=dtype.itemsize,
        readonly=bool(readonly),
        stream=_interface_stream(name, interface.get("stream")),
        device=device,
    )


def _interface_dtype(array: Any, interface: dict[str, Any]) -> np.dtype[Any]:
    """The array's own dtype, where it is one of NumPy's: the type string has no name for bfloat16."""
    described: np.dtype[Any] = np.dtype(interface["typestr"])
    try:
        own: np.dtype[Any] = np.dtype(array.dtype)
    except (AttributeError, TypeError):
        return described
    return own if own.itemsize == described.itemsize else described


def _interface_stream(name: str, stream: Any) -> int | None:
    if stream is None:
        return None
    handle = int(stream)
    if handle == 0:
        raise ValueError(
            f"{name}'s __cuda_array_interface__ has stream 0, which the protocol doesn't allow; its exporter must give "
            "1 for the legacy default stream, 2 for the per-thread one, or None"
        )
    return 0 if handle == LEGACY else handle


def _read_numba(name: str, array: Any, stream: int) -> Operand | None:
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    device = getattr(getattr(context, "device", None), "id", None)
    if isinstance(array, np.ndarray):
        # Managed or mapped memory: the GPU's and NumPy's at one address. A view of it has lost Numba's own attributes.
        own_stream = as_stream(getattr(array, "stream", 0) or 0) or None
        return replace(host_operand(name, array, array), kind=NUMBA, stream=own_stream, device=device)
    operand = read_interface(name, array, NUMBA, device)
    strides = getattr(array, "strides", None)
    if operand is None or strides is None:
        return operand
    # Numba's interface gives no strides for an array that would be packed but for axes of stride 0.
    return replace(operand, strides=strides_in_elements(name, tuple(strides), operand.itemsize))


def _read_cupy(name: str, array: Any, stream: int) -> Operand | None:
    if not isinstance(array, sys.modules["cupy"].ndarray):
        return None
    device = int(array.data.device_id)
    return Operand(
        name=name,
        array=array,
        kind=CUPY,
        pointer=int(array.data.ptr),
        shape=array.shape,
        strides=strides_in_elements(name, array.strides, array.itemsize),
        dtype=dtype_name(array.dtype),
        itemsize=array.itemsize,
        readonly=False,
        stream=cupy_stream(device),
        device=device,
    )


def _read_torch(name: str, array: Any, stream: int) -> Operand | None:
    torch = sys.modules["torch"]
    if not isinstance(array, torch.Tensor):
        return None
    place = array.device.type
    if place not in ("cpu", "cuda") or (place == "cuda" and torch.version.cuda is None):
        raise TypeError(f"{name} is a torch tensor on {array.device}; pass one on the CPU or on an NVIDIA GPU")
    if array.layout is not torch.strided:
        raise TypeError(f"{name} is a torch tensor of layout {array.layout}; pass {name}.to_dense()")
    if array.is_quantized:
        raise TypeError(f"{name} is a quantized torch tensor; pass {name}.dequantize()")
    if array.is_conj() or array.is_neg():
        bit, remedy = ("conjugate", "resolve_conj") if array.is_conj() else ("negative", "resolve_neg")
        raise TypeError(f"{name} is a lazily {bit} view of a torch tensor; pass {name}.{remedy}()")
    if array.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} is a torch tensor that requires a gradient, and the product would not be in its graph; pass "
            f"{name}.detach(), or call under torch.no_grad()"
        )
    if place == "cpu":
        return host_operand(name, array, torch_view(array))
    try:
        pointer = array.data_ptr()
    except RuntimeError as error:
        raise TypeError(f"{name} is a torch tensor without memory of its own ({error}); pass a plain tensor") from None
    device = array.get_device()
    return Operand(
        name=name,
        array=array,
        kind=TORCH,
        pointer=pointer,
        shape=tuple(array.shape),
        strides=tuple(array.stride()),
        dtype=str(array.dtype).removeprefix("torch."),
        itemsize=array.element_size(),
        readonly=False,
        stream=torch_stream(device),
        device=device,
    )


def torch_view(tensor: Any) -> npt.NDArray[Any]:
    """The memory of a torch tensor on the CPU as a NumPy array."""
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # NumPy has it from ml_dtypes, which torch doesn't know
        import ml_dtypes

        bits: npt.NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    view: npt.NDArray[Any] = tensor.numpy()
    return view


def _read_jax(name: str, array: Any, stream: int) -> Operand | None:
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return None
    if name in OUTPUTS:
        raise TypeError(
            f"{name} is a JAX array, which can't be written; leave {name} out and use the array that is returned, or "
            "pass an array of another package"
        )
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer: the product can't be traced by jax.jit, grad or vmap; call it on arrays, outside "
            "of them"
        )
    if array.is_deleted():
        raise ValueError(f"{name} is a JAX array that was deleted or donated; pass one that still has its memory")
    try:
        device_type, _ = array.__dlpack_device__()
    except BufferError as error:
        raise TypeError(
            f"{name} is a JAX array that isn't one piece of memory on a CPU or a GPU ({error}); pass it shard by "
            f"shard, {name}.addressable_shards[0].data"
        ) from None
    if int(device_type) == dlpack.CPU:
        return host_operand(name, array, np.asarray(array))
    if int(device_type) == dlpack.CUDA_HOST:
        raise TypeError(f"{name} is a JAX array in pinned host memory; pass np.asarray({name}), or device_put it")
    # JAX's own stream has no public name: the capsule makes `stream` wait, on the GPU, for the array's value.
    return _tensor_operand(name, array, JAX, dlpack.read(dlpack.export(array, stream)), stream, readonly=True)


def _tensor_operand(
    name: str, array: Any, kind: str, tensor: dlpack.Tensor, stream: int, *, readonly: bool = False
) -> Operand:
    return Operand(
        name=name,
        array=array,
        kind=kind,
        pointer=tensor.pointer,
        shape=tensor.shape,
        strides=tensor.strides,
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        readonly=readonly or tensor.readonly,
        stream=stream,
        device=tensor.device,
        owner=tensor.capsule,
    )


def _read_own(name: str, array: Any, stream: int) -> Operand | None:
    if isinstance(array, PendingArray):
        return _tensor_operand(name, array, JAX, array.tensor, array.stream)
    return None


def _read_protocols(name: str, array: Any, stream: int) -> Operand | None:
    """Any other package's array, by the protocols it has: on a GPU first, then in host memory."""
    if isinstance(array, np.generic):  # it has NumPy's protocols, and is no array
        return None
    if getattr(array, "__numba_gemm_matrix__", False):
        return read_interface(name, array, MATRIX)
    operand = read_interface(name, array)
    has_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    if operand is not None and not (operand.dtype.startswith("void") and has_dlpack):
        return operand
    device_type = int(array.__dlpack_device__()[0]) if has_dlpack else dlpack.CPU
    if device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        try:
            tensor = dlpack.read(dlpack.export(array, stream))
        except BufferError as error:
            raise TypeError(f"{name} can't be shared through DLPack: {error}; pass a plain copy of it") from None
        return _tensor_operand(name, array, DLPACK, tensor, stream)
    if device_type not in (dlpack.CPU, dlpack.CUDA_HOST):
        raise TypeError(
            f"{name} is on a device of DLPack type {device_type}; pass an array in host memory or on an NVIDIA GPU"
        )
    return _read_host(name, array, has_dlpack)


def _read_host(name: str, array: Any, has_dlpack: bool) -> Operand | None:
    if isinstance(getattr(array, "__array_interface__", None), dict):
        return host_operand(name, array, np.asarray(array))
    if has_dlpack:
        return host_operand(name, array, np.from_dlpack(array))
    if not hasattr(array, "__array__"):
        return None
    view = np.asarray(array)
    if name in OUTPUTS and not (view.flags.writeable and np.may_share_memory(view, np.asarray(array))):
        raise TypeError(
            f"{name} is a {type(array).__name__}, whose memory NumPy can't share; pass a NumPy array as {name}"
        )
    return host_operand(name, array, view)


_PACKAGES: dict[str, Reader] = {
    "numba": _read_numba,
    "cupy": _read_cupy,
    "torch": _read_torch,
    "jax": _read_jax,
    "jaxlib": _read_jax,
    "numba_gemm": _read_own,
}
_reader_of: dict[type, Reader] = {}


def read_array(name: str, array: Any, stream: int) -> Operand | None:
    """The operand of any object but a plain NumPy array, or None if it is no array that is known."""
    cls = type(array)
    reader = _reader_of.get(cls)
    if reader is None:
        reader = _reader_of[cls] = _find_reader(cls)
    operand = reader(name, array, stream)
    if operand is None and reader is not _read_protocols:
        operand = _read_protocols(name, array, stream)
    return operand


def _find_reader(cls: type) -> Reader:
    """The reader of the package that a class or one of its bases comes from."""
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        reader = _PACKAGES.get(package)
        # A class that only says that it comes from a package, which isn't loaded, is none of its arrays.
        if reader is not None and (reader in (_read_numba, _read_own) or package in sys.modules):
            return reader
    return _read_protocols
