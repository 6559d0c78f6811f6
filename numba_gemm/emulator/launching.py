"""The public call: NumPy arrays in, NumPy arrays changed."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .errors import LaunchError
from .machine import Dimensions, Machine
from .program import compile_program
from .report import Report


def launch(
    ptx_text: str,
    grid: Dimensions,
    block: Dimensions,
    args: Sequence[Any],
    *,
    kernel: str | None = None,
    shared_bytes: int = 0,
    arch: str = "sm_90",
    blocks: Iterable[Any] | None = None,
    cluster: Dimensions | None = None,
) -> Report:
    """Run a kernel of a PTX text on the CPU.

    Parameters
    ----------
    ptx_text : the PTX, as a compiler or a person wrote it.
    grid, block : an int, or 1 to 3 ints.
    args : one per kernel parameter. A NumPy array is copied to emulated device memory, passed as a pointer to its
        first element and written back in place after the launch, unless it is read-only (a view keeps its strides; an
        array given twice has one address). A NumPy scalar is passed by value and must have the parameter's size;
        `np.uint64` for a pointer parameter is an address.
    kernel : the entry's name, where the text has several.
    shared_bytes : dynamic shared memory per block.
    arch : decides how tensor cores add ("sm_80", "sm_90", …).
    blocks : run only these blocks of the grid (linear indices or (x, y, z)), and those of their clusters.
    cluster : blocks in a cluster; None for what the kernel's `.reqnctapercluster` says, or no clusters.

    Returns a `Report`. Raises `PtxSyntaxError` or `UnsupportedInstruction` for a text it can't run, `LaunchError` for
    a launch that can't be, and a `Hazard` where the kernel does what it must not; arrays are then left as they were.
    """
    program = compile_program(ptx_text, kernel)
    machine = Machine(arch)
    placed: list[tuple[np.ndarray, int]] = []
    params: list[Any] = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            params.append(np.uint64(_place(machine, arg, placed)))
        elif isinstance(arg, np.generic):
            params.append(arg)
        else:
            raise LaunchError(
                f"arguments are NumPy arrays or NumPy scalars, not {type(arg).__name__}; pass it as one, for instance "
                "np.float32(2) or np.asarray(x)"
            )
    report = machine.launch(program, grid, block, params, shared_bytes=shared_bytes, blocks=blocks, cluster=cluster)
    for array, address in placed:
        if array.size and array.flags.writeable:
            array[...] = _strided(machine, array, address)
    return report


def _span(array: np.ndarray) -> tuple[int, int]:
    """(lowest, highest + 1) byte offsets from the first element that the array's elements occupy."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    return low, high + array.itemsize


def _strided(machine: Machine, array: np.ndarray, address: int) -> np.ndarray:
    """The emulated memory under an array, as a view of its shape and strides."""
    low, high = _span(array)
    found, offset = machine.memory.span(address + low, high - low)
    return np.ndarray(array.shape, array.dtype, found.data, offset - low, array.strides)


def _place(machine: Machine, array: np.ndarray, placed: list[tuple[np.ndarray, int]]) -> int:
    for other, address in placed:
        if other is array or (
            other.ctypes.data == array.ctypes.data and other.shape == array.shape and other.strides == array.strides
        ):
            return address
    if not array.size:
        address = machine.alloc(0)
        placed.append((array, address))
        return address
    low, high = _span(array)
    # a view starts where it would if its base array lay at a 256-byte boundary, as device arrays do
    skew = 0
    if array.base is not None and isinstance(array.base, np.ndarray):
        skew = (array.ctypes.data + low - array.base.ctypes.data) % 16
    base = machine.alloc(high - low + skew)
    address = base + skew - low
    placed.append((array, address))
    known, offset = machine.memory.span(base + skew, high - low)
    view = np.ndarray(array.shape, array.dtype, known.data, offset - low, array.strides)
    view[...] = array
    assert known.known is not None
    marks = np.ndarray((*array.shape, array.itemsize), np.uint8, known.known, offset - low, (*array.strides, 1))
    marks[...] = 1
    return address
