"""Reading DLPack capsules, both forms of the protocol's ``dlpack.h``: ``dltensor`` and ``dltensor_versioned``.

A capsule is read and kept, never taken over. Its memory lives as long as the capsule object, whose own destructor
hands it back to the producer; so nothing here calls a producer's deleter, and nothing of Python's is called when an
interpreter that is shutting down drops the last reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from numba_gemm.arrays.operand import packed_strides

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13

#: Version asked of producers; they answer with this one or an older one.
MAX_VERSION = (1, 0)
_READ_ONLY = 1 << 0

_NUMBERS = {0: "int", 1: "uint", 2: "float", 5: "complex"}
#: Codes that stand for one type each, of the bits given.
_TYPES = {
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# An own handle: the argument types of ctypes.pythonapi's functions are shared by everyone who sets them.
_python = ctypes.PyDLL(None)
_python.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a capsule describes: address of the first element, shape and strides in elements, dtype, device."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    readonly: bool
    device_type: int
    device: int
    capsule: Any


def export(array: Any, stream: int | None) -> Any:
    """The capsule of an array, ready to be used on ``stream`` (0 for the legacy default stream, None on the host).

    Raises
    ------
    BufferError, or what else the producer raises, if it can't export the array.
    """
    options = {} if stream is None else {"stream": stream or 1}  # the protocol's name of the legacy stream is 1
    try:
        return array.__dlpack__(max_version=MAX_VERSION, **options)
    except TypeError:  # a producer from before the protocol had versions
        return array.__dlpack__(**options)


def read(capsule: Any) -> Tensor:
    """What a capsule describes. The capsule must be kept as long as the memory is used; it is in the result.

    Raises
    ------
    TypeError : for an object that is no unused DLPack capsule, a newer form of the protocol, or vector elements.
    """
    readonly = False
    if _python.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = _python.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        versioned = _ManagedVersioned.from_address(address)
        if versioned.major > MAX_VERSION[0]:
            raise TypeError(
                f"the DLPack capsule is of version {versioned.major}.{versioned.minor}, and {MAX_VERSION[0]} is the "
                "newest that is known here; use a newer numba_gemm"
            )
        readonly = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.tensor
    elif _python.PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = _Managed.from_address(_python.PyCapsule_GetPointer(capsule, b"dltensor")).tensor
    else:
        raise TypeError(
            f"__dlpack__() returned {capsule!r}, no DLPack capsule, or one that was used before; "
            "return a new capsule from each call"
        )
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    if lanes != 1:
        raise TypeError(f"the DLPack tensor has vectors of {lanes} as elements; pass one of scalars")
    dtype = _TYPES.get((code, bits)) or (f"{_NUMBERS[code]}{bits}" if code in _NUMBERS else f"DLPack type {code}")
    shape = tuple(tensor.shape[: tensor.ndim])
    return Tensor(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else packed_strides(shape),
        dtype=dtype,
        itemsize=(bits + 7) // 8,
        readonly=readonly,
        device_type=tensor.device.type,
        device=tensor.device.ordinal,
        capsule=capsule,
    )
