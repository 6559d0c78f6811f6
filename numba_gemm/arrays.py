"""Arrays of any package ↔ one internal view.

An :class:`Operand` is where a matrix lies, how, and whose it is: NumPy's memory on the host or a Numba device array's
on a GPU. Nothing here reads or copies data.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

HOST = "numpy"
NUMBA = "numba"


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of a product.

    Attributes
    ----------
    name : ``"a"``, ``"b"``, ``"c"`` or ``"out"``, for messages.
    array : the caller's object.
    kind : ``"numpy"`` (host memory) or ``"numba"`` (device memory).
    pointer : address of element [0, 0].
    shape, strides : in elements, one entry a dimension; strides may be zero or negative.
    dtype : NumPy's name of the element type.
    itemsize : bytes of an element.
    readonly : whether it can't be written.
    stream : CUDA stream handle that the array's work is on, if it names one.
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

    @property
    def on_device(self) -> bool:
        """Whether the memory is a GPU's."""
        return self.kind != HOST

    @property
    def place(self) -> str:
        """For messages: ``"a NumPy array in host memory"``."""
        return "a NumPy array in host memory" if self.kind == HOST else "a device array in GPU memory"

    def byte_range(self) -> tuple[int, int]:
        """First and past-the-last byte address that any element occupies."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        low = high = 0
        for extent, stride in zip(self.shape, self.strides, strict=True):
            reach = (extent - 1) * stride * self.itemsize
            low, high = low + min(reach, 0), high + max(reach, 0)
        return self.pointer + low, self.pointer + high + self.itemsize


def as_operand(name: str, array: Any) -> Operand:
    """View an argument as an :class:`Operand`.

    Raises
    ------
    TypeError : if it is neither a NumPy array nor a Numba device array; the message says how to make one.
    """
    if isinstance(array, np.ndarray):
        return _from_numpy(name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        if is_numba_array(array):
            return _from_interface(name, array, interface)
        package = type(array).__module__.partition(".")[0]
        raise TypeError(f"{name} is a {package} array; pass numba.cuda.as_cuda_array({name}), which shares its memory")
    raise TypeError(
        f"{name} is a {type(array).__name__}, not an array; pass a NumPy array "
        f"(np.asarray({name}, dtype=np.float32)) or a Numba device array (numba.cuda.to_device({name}))"
    )


def is_numba_array(array: Any) -> bool:
    """Whether this is a Numba device array (found without importing Numba)."""
    return type(array).__module__.startswith("numba.")


def _from_numpy(name: str, array: npt.NDArray[Any]) -> Operand:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(0) instead")
    itemsize = array.itemsize
    return Operand(
        name=name,
        array=array,
        kind=HOST,
        pointer=array.__array_interface__["data"][0],
        shape=array.shape,
        strides=_in_elements(name, array.strides, itemsize),
        dtype=_dtype_name(array.dtype),
        itemsize=itemsize,
        readonly=not array.flags.writeable,
        stream=None,
    )


def _from_interface(name: str, array: Any, interface: dict[str, Any]) -> Operand:
    # The interface has no name for bfloat16, so an array's own dtype goes before the type string.
    dtype = np.dtype(getattr(array, "dtype", interface["typestr"]))
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = _packed_strides(shape, dtype.itemsize)
    pointer, readonly = interface["data"]
    return Operand(
        name=name,
        array=array,
        kind=NUMBA,
        pointer=int(pointer or 0),
        shape=shape,
        strides=_in_elements(name, strides, dtype.itemsize),
        dtype=_dtype_name(dtype),
        itemsize=dtype.itemsize,
        readonly=bool(readonly),
        stream=interface.get("stream"),
    )


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def _in_elements(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if itemsize == 0 or any(stride % itemsize for stride in strides):
        raise ValueError(
            f"{name} has strides of {strides} bytes, not multiples of its {itemsize}-byte elements "
            f"(a field of a structured array?); pass np.ascontiguousarray({name})"
        )
    return tuple(stride // itemsize for stride in strides)


def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def empty_like_operand(operand: Operand, shape: tuple[int, ...], stream: int) -> Any:
    """A new, uninitialised array of the operand's package and dtype."""
    if operand.kind == HOST:
        return np.empty(shape, operand.array.dtype)
    dtype = np.dtype(operand.array.dtype)
    cuda = sys.modules["numba.cuda"]  # it is there: the operand is one of its arrays
    if 0 in shape:  # Numba can't allocate nothing; a view of one element serves
        return cuda.device_array((1,), dtype)[:0].reshape(shape)
    return cuda.device_array(shape, dtype)


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
    """Whether two operands share an element, exactly where that is quick to decide, else whether their ranges meet."""
    if x.on_device != y.on_device:
        return False
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
    """Whether two indices name the same element, as in a broadcast view."""
    extents = sorted(
        (abs(stride), extent) for stride, extent in zip(operand.strides, operand.shape, strict=True) if extent > 1
    )
    reach = 0
    for stride, extent in extents:
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False
