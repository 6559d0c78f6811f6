"""Arrays of any package ↔ one internal view.

An :class:`Operand` is where an array lies, how, and whose it is: memory of NumPy, of a torch tensor on the CPU, or of
a Numba, CuPy, torch or JAX array on a GPU, of a ``numba_gemm.Matrix``, or of any other object with a
``__cuda_array_interface__`` or DLPack's methods. Nothing here copies data, and no package of arrays is imported that
the caller hasn't imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
    overlap,
    overlaps_itself,
)
from numba_gemm.arrays.probes import Probe, Probed, probe_for
from numba_gemm.arrays.readers import read_array, read_numpy
from numba_gemm.arrays.results import empty_like_operand, wrap_result
from numba_gemm.arrays.streams import as_stream, current_stream, hold_operands

__all__ = [
    "CUPY",
    "DLPACK",
    "HOST",
    "INTERFACE",
    "JAX",
    "MATRIX",
    "NUMBA",
    "TORCH",
    "Operand",
    "Probe",
    "Probed",
    "as_operand",
    "as_stream",
    "current_stream",
    "empty_like_operand",
    "hold_operands",
    "is_numba_array",
    "overlap",
    "overlaps_itself",
    "probe_for",
    "wrap_result",
]


def as_operand(name: str, array: Any, *, stream: int = 0) -> Operand:
    """View an argument as an :class:`Operand`.

    Parameters
    ----------
    name : the argument's name, for messages; ``"out"`` and ``"c"`` are written.
    array : an array of any package and of any number of dimensions.
    stream : handle of the stream that a producer without a public stream of its own, JAX and DLPack's, is asked to
        make the array ready on; the operand's ``stream`` is then this one. Others ignore it.

    Raises
    ------
    TypeError : if it is no array, or one whose meaning would be lost: masked or of a subclass with arithmetic of its
        own, a torch tensor that is sparse, quantized or needs a gradient, a JAX tracer, a JAX array to be written, an
        array on another device than a CPU or an NVIDIA GPU. The message says what to pass instead.
    ValueError : for strides that aren't whole elements, or an array that breaks its protocol's rules.
    """
    if isinstance(array, np.ndarray) and not is_numba_array(array):
        return read_numpy(name, array)
    operand = read_array(name, array, stream)
    if operand is None:
        raise TypeError(
            f"{name} is a {type(array).__name__}, not an array; pass a NumPy array "
            f"(np.asarray({name}, dtype=np.float32)), or a GPU's: one of Numba (numba.cuda.to_device({name})), CuPy, "
            "torch or JAX, or any with __cuda_array_interface__ or __dlpack__"
        )
    return operand


def is_numba_array(array: Any) -> bool:
    """Whether this is a Numba device array (found without importing Numba)."""
    return type(array).__module__.startswith("numba.")
