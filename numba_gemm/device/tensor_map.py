"""Tensor maps for TMA, made by the driver (``cuTensorMapEncodeTiled``) and kept.

A map's 128 bytes follow from its description alone, the address among it, so the description is the key: two arrays at
one address with other shapes, strides or types have maps of their own, and so has an array that takes a freed one's
place. The driver's function is called through :mod:`ctypes` like a launch; making a map takes a few microseconds and
finding one that was made before a fraction of one.
"""

from __future__ import annotations

import ctypes
import functools

from numba_gemm.device.launch import driver_function
from numba_gemm.errors import CudaError, KernelConstraintError
from numba_gemm.spec import TensorMap

#: Maps that are kept; the least recently used goes first.
MAPS_LIMIT = 8192
MAP_BYTES = 128
_ALIGNMENT = 64  # of the driver's CUtensorMap

# CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_ELEMENTS = {"f16": 6, "f32": 7, "bf16": 9}
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
_NO_INTERLEAVE, _FILL_ZERO = 0, 0
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


@functools.lru_cache(maxsize=MAPS_LIMIT)
def encode(tensor: TensorMap) -> bytes:
    """The 128 bytes of a tensor map, as a kernel takes them on a GPU.

    Raises
    ------
    KernelConstraintError : for a tensor that TMA can't address, with the description that the driver refused.
    CudaError : if the driver has no tensor maps (before CUDA 12).
    """
    rank = len(tensor.dims)
    function = driver_function(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
        *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4,
    )  # fmt: skip
    room = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    dims = (ctypes.c_uint64 * rank)(*tensor.dims)
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*tensor.strides)
    box = (ctypes.c_uint32 * rank)(*tensor.box)
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    code = function(
        at,
        _ELEMENTS[tensor.element],
        rank,
        tensor.address,
        ctypes.addressof(dims),
        ctypes.addressof(strides),
        ctypes.addressof(box),
        ctypes.addressof(steps),
        _NO_INTERLEAVE,
        _SWIZZLES[tensor.swizzle],
        _PROMOTIONS[tensor.l2_promotion],
        _FILL_ZERO,
    )
    if code == _INVALID_VALUE:
        raise KernelConstraintError(
            f"TMA can't address this matrix: the driver refused {tensor}; use another kernel, for instance 't4'"
        )
    if code != 0:
        raise CudaError(f"cuTensorMapEncodeTiled({tensor}) failed with error {code}", code=code)
    return ctypes.string_at(at, MAP_BYTES)
