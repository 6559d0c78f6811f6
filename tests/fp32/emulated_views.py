"""NumPy views with their whole base arrays in emulated memory, so that strides and gaps are as they are in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.emulator import Machine


def base_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array that owns a view's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def place(machine: Machine, array: npt.NDArray[Any], shift: int = 0) -> tuple[int, int]:
    """Where the base array and the view begin in emulated memory, ``shift`` bytes past a multiple of 16."""
    base = base_of(array)
    address = machine.alloc(base.nbytes + shift) + shift
    machine.write(address, base.ravel("K"))
    return address, address + array.__array_interface__["data"][0] - base.__array_interface__["data"][0]


def fetch(machine: Machine, address: int, array: npt.NDArray[Any]) -> None:
    """Brings a view's base array back from where :func:`place` put it."""
    base = base_of(array)
    base.ravel("K")[...] = machine.read(address, base.dtype, base.size)
