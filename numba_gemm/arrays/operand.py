"""An argument of a product, whichever package it comes from: where it lies, how, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

HOST = "numpy"
NUMBA = "numba"
CUPY = "cupy"
TORCH = "torch"
JAX = "jax"
MATRIX = "matrix"
INTERFACE = "interface"
DLPACK = "dlpack"

_NOUNS = {
    NUMBA: "a Numba device array",
    CUPY: "a CuPy array",
    TORCH: "a torch tensor",
    JAX: "a JAX array",
    MATRIX: "a numba_gemm Matrix",
}

#: Elements up to which :func:`overlaps_itself` looks at each one when the strides alone don't tell.
_ENUMERATED = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One argument of a product.

    Attributes
    ----------
    name : ``"a"``, ``"b"``, ``"c"`` or ``"out"``, for messages.
    array : the caller's object; for host memory of another package than NumPy, NumPy's view of it.
    kind : ``HOST``, ``NUMBA``, ``CUPY``, ``TORCH``, ``JAX``, ``MATRIX`` (a ``numba_gemm.Matrix``), ``INTERFACE``
        (another package's ``__cuda_array_interface__``) or ``DLPACK`` (another package's DLPack tensor on a GPU).
    pointer : address of element [0, …, 0].
    shape, strides : in elements, one entry a dimension; strides may be zero or negative.
    dtype : NumPy's name of the element type, ``"bfloat16"`` too.
    itemsize : bytes of an element.
    readonly : whether it can't be written.
    stream : handle of the CUDA stream that the array's work is on, 0 for the legacy default stream; None if it names
        none.
    device : ordinal of the GPU, or None for host memory and for arrays that don't say.
    owner : what keeps the memory alive besides ``array``: a DLPack capsule, or the caller's object behind a NumPy
        view.
    """

    name: str
    array: Any
    kind: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    readonly: bool
    stream: int | None
    device: int | None = None
    owner: Any = None

    @property
    def on_device(self) -> bool:
        """Whether the memory is a GPU's."""
        return self.kind != HOST

    @property
    def source(self) -> Any:
        """The caller's object."""
        return self.array if self.owner is None or self.on_device else self.owner

    @property
    def package(self) -> str:
        """The top-level package that the array's type comes from, for instance ``"torch"``."""
        return type(self.source).__module__.partition(".")[0]

    @property
    def place(self) -> str:
        """For messages: ``"a NumPy array in host memory"``, ``"a CuPy array on GPU 0"``."""
        if self.kind == HOST:
            nouns = {"torch": "a torch tensor", "jax": "a JAX array", "jaxlib": "a JAX array"}
            plain = "a NumPy array" if isinstance(self.source, np.ndarray) else _article(self.source)
            noun = nouns.get(self.package, plain)
            return f"{noun} in host memory"
        noun = _NOUNS.get(self.kind) or _article(self.array)
        return f"{noun} in GPU memory" if self.device is None else f"{noun} on GPU {self.device}"

    @property
    def to_host(self) -> str:
        """For messages: the expression that copies this device array to the host."""
        return {
            NUMBA: f"{self.name}.copy_to_host()",
            CUPY: f"cupy.asnumpy({self.name})",
            TORCH: f"{self.name}.cpu()",
            JAX: f"numpy.asarray({self.name})",
            MATRIX: f"{self.name}.numpy()",
            HOST: self.name,
        }.get(self.kind, f"numba.cuda.as_cuda_array({self.name}).copy_to_host()")

    def to_device(self, like: Operand) -> str:
        """For messages: the expression that copies this host array to where the device array ``like`` is."""
        name, gpu = self.name, like.device or 0
        if like.kind == TORCH:
            tensor = name if self.package == "torch" else f"torch.from_numpy({name})"
            return f"{tensor}.to('cuda:{gpu}')"
        return {
            CUPY: f"cupy.asarray({name})",
            JAX: f"jax.device_put({name}, jax.devices('cuda')[{gpu}])",
            MATRIX: f"numba_gemm.device_put({name})",
        }.get(like.kind, f"numba.cuda.to_device({name})")

    def transposed(self) -> Operand:
        """The same memory with the last two axes exchanged."""
        order = (*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2)
        array = self.array
        if self.kind in (HOST, MATRIX):
            array = array.swapaxes(-1, -2)
        shape, strides = (tuple(values[axis] for axis in order) for values in (self.shape, self.strides))
        return replace(self, array=array, shape=shape, strides=strides)

    def byte_range(self) -> tuple[int, int]:
        """First and past-the-last byte address that any element occupies."""
        strides = tuple(stride * self.itemsize for stride in self.strides)
        return byte_range(self.pointer, self.shape, strides, self.itemsize)


def byte_range(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First and past-the-last byte address that any element of an array occupies; ``strides`` in bytes."""
    if 0 in shape:
        return pointer, pointer
    low = high = 0
    for extent, stride in zip(shape, strides, strict=True):
        reach = (extent - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return pointer + low, pointer + high + itemsize


def _article(array: Any) -> str:
    name = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, ``"bfloat16"`` and the other types of ml_dtypes too."""
    dtype: np.dtype[Any]
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    return dtype


def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a dtype; one of foreign byte order says so, and so is none that a kernel takes."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def strides_in_elements(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides as element strides.

    Raises
    ------
    ValueError : if an element's stride isn't a multiple of its size.
    """
    if itemsize == 0 or any(stride % itemsize for stride in strides):
        raise ValueError(
            f"{name} has strides of {strides} bytes, not multiples of its {itemsize}-byte elements "
            f"(a field of a structured array?); pass a contiguous copy of {name}, for instance "
            f"np.ascontiguousarray({name})"
        )
    return tuple(stride // itemsize for stride in strides)


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element strides of a C-ordered array without gaps."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class _AddressOnly:
    """An address range dressed as an array, so that NumPy can compare it with another; never dereferenced."""

    def __init__(self, operand: Operand) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{operand.itemsize}",
            "shape": operand.shape,
            "strides": tuple(stride * operand.itemsize for stride in operand.strides),
            "data": (operand.pointer, True),
        }


def overlap(x: Operand, y: Operand) -> bool:
    """Whether two operands share an element, exactly where that is quick to decide, else whether their ranges meet.

    Addresses of all GPUs and of the host are of one space, so that managed memory is compared rightly too.
    """
    x_low, x_high = x.byte_range()
    y_low, y_high = y.byte_range()
    if x_low >= y_high or y_low >= x_high:
        return False
    first, second = (np.asarray(_AddressOnly(operand)) for operand in (x, y))
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(operand: Operand) -> bool:
    """Whether two indices name the same element, as in a broadcast view.

    Exact for arrays of up to 65536 elements and for strides of which each steps over all shorter ones; others count
    as overlapping.
    """
    if 0 in operand.shape:
        return False
    axes = sorted(
        (abs(stride), extent) for stride, extent in zip(operand.strides, operand.shape, strict=True) if extent > 1
    )
    reach = 0
    for stride, extent in axes:
        if stride == 0:
            return True
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    elements = 1
    for _, extent in axes:
        elements *= extent
    if elements > _ENUMERATED:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, extent in axes:
        offsets = np.add.outer(offsets, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return len(np.unique(offsets)) < elements
