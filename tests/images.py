"""Matrices as they lie in memory, for products that a GPU and the emulator are compared on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Image(NamedTuple):
    """A matrix as it lies in memory: every element round it is a NaN, so that a read past an edge shows.

    Attributes
    ----------
    flat : all of the memory.
    shape : rows and columns.
    offset : elements before the first of the matrix.
    leading : elements from row to row, or from column to column.
    layout : ``"row"`` or ``"column"``, whichever are contiguous.
    """

    flat: NDArray[Any]
    shape: tuple[int, int]
    offset: int
    leading: int
    layout: str

    def view(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The matrix in memory that looks like this."""
        lines, length = self.shape if self.layout == "row" else self.shape[::-1]
        item = flat.itemsize
        stored = np.lib.stride_tricks.as_strided(flat[self.offset :], (lines, length), (item * self.leading, item))
        return stored if self.layout == "row" else stored.T

    def result(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The matrix in the memory that a product has left.

        Raises
        ------
        RuntimeError : if elements outside of the matrix were written.
        """
        around = flat.copy()
        self.view(around)[...] = self.view(self.flat)
        bits = f"u{flat.itemsize}"
        if not np.array_equal(around.view(bits), self.flat.view(bits)):
            raise RuntimeError("elements outside the output were written")
        return self.view(flat).copy()
