"""Copies of whole arrays between the host and a :class:`~numba_gemm.host.matrix.Matrix`, through the pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.device.context import current_context
from numba_gemm.host.blocks import Frame
from numba_gemm.host.engines import engine
from numba_gemm.host.matrix import Matrix
from numba_gemm.host.pipeline import Pipeline
from numba_gemm.host.steps import Download, Home, Part, Slot, Upload

_SLOT = Slot("a", 0)


def upload(source: npt.NDArray[Any], matrix: Matrix) -> None:
    """Copy an array of the same shape and dtype into a matrix without gaps; returns when the copy is done.

    Raises
    ------
    ValueError : if the matrix has gaps.
    """
    pointer = matrix.pointer  # after free() an error, also where there are no elements
    if matrix.size == 0:
        return
    order = sorted(range(matrix.ndim), key=lambda axis: -abs(matrix.strides[axis]) * (matrix.shape[axis] > 1))
    if not _is_packed(matrix, order):
        raise ValueError(
            "this Matrix is a view with gaps between its elements, which can't be copied to; copy to the whole matrix, "
            "or make a new one with device_put"
        )
    flat = np.ascontiguousarray(source.transpose(order)) if source.ndim else source
    _run(flat.reshape(1, 1, -1), pointer, matrix, to_device=True)


def download(matrix: Matrix) -> npt.NDArray[Any]:
    """A copy on the host, in C order, or in Fortran order where the matrix is in it."""
    pointer = matrix.pointer  # after free() an error, also where there are no elements
    if matrix.size == 0:
        return np.empty(matrix.shape, matrix.dtype)
    reaches = [(extent - 1) * stride for extent, stride in zip(matrix.shape, matrix.strides, strict=True)]
    low = sum(min(reach, 0) for reach in reaches)
    nbytes = sum(abs(reach) for reach in reaches) + matrix.itemsize
    memory = np.empty(nbytes, np.uint8)
    _run(memory.reshape(1, 1, -1), pointer + low, matrix, to_device=False)
    # The elements where they lie on the device: no copy of all but a view with gaps.
    view: npt.NDArray[Any] = np.ndarray(matrix.shape, matrix.dtype, memory, -low, matrix.strides)
    return view if nbytes == matrix.nbytes and low == 0 else view.copy()


def _is_packed(matrix: Matrix, order: list[int]) -> bool:
    expected = matrix.itemsize
    for axis in reversed(order):
        if matrix.shape[axis] > 1 and matrix.strides[axis] != expected:
            return False
        expected *= matrix.shape[axis]
    return True


def _run(array: npt.NDArray[Any], pointer: int, matrix: Matrix, *, to_device: bool) -> None:
    """Copy a (1, 1, elements) array to or from ``pointer``, after the work on the matrix's stream."""
    context = current_context()
    matrix.check_context(context)
    extent = array.shape[2]
    part = Part(0, (0, 1), (0, 1), (0, extent))
    home = Home(_SLOT, part, Frame(1, extent, extent))
    with engine(context) as (own, executors):
        matrix.order_before(own.up if to_device else own.down)
        pipeline = Pipeline(
            own, executors, slots={_SLOT: pointer}, arrays={"a": [array]}, dtypes={"a": array.dtype}
        )  # fmt: skip
        pipeline.run([Upload(part, home) if to_device else Download(part, home)])
