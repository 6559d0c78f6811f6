"""One rectangle on its way between a NumPy array and device memory: how it is cut into chunks, and how they are copied.

The NumPy array may have any strides; its last axis is the one along which the device's lines run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.host.threads import MAX_THREADS, copier_count, copiers

#: A chunk isn't made smaller than this to give every thread some.
LEAST_CHUNK = 2 << 20
#: The same of what a thread copies of an array that several share.
LEAST_SHARE = 1 << 20
#: The largest pitch that the driver's two-dimensional copies take, in bytes.
MAX_PITCH = 2**31 - 1
#: Shorter runs than this, in bytes, are packed in staging memory even if they are page-locked.
LEAST_RUN = 512
_SQUARE = 128  # edge of the squares in which an array is copied whose own lines run the other way


@dataclass(frozen=True)
class Chunk:
    """A part of a transfer that fits a staging buffer.

    Attributes
    ----------
    index : of the host array.
    shape : batch, lines, elements of a line.
    device : address of its first element.
    pitch : bytes from line to line on the device.
    staged_pitch : the same in the staging buffer.
    """

    index: tuple[slice, slice, slice]
    shape: tuple[int, int, int]
    device: int
    pitch: int
    staged_pitch: int

    @property
    def lines(self) -> int:
        """Lines of all products together, ``pitch`` apart."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Transfer:
    """A (batch, lines, elements) host array and where its counterpart lies.

    ``pitch`` and ``apart`` are bytes from line to line and from product to product on the device; ``dtype`` is the
    element type there. ``whole`` says that the lines are whole ones, with nothing but padding after each.
    """

    host: npt.NDArray[Any]
    device: int
    pitch: int
    apart: int
    dtype: np.dtype[Any]
    whole: bool = True

    @property
    def line_bytes(self) -> int:
        """Bytes of a line on the device."""
        return int(self.host.shape[2] * self.dtype.itemsize)

    def direct(self) -> tuple[int, int, int] | None:
        """Address, pitch and number of the host's lines if they can be copied as they lie, else None."""
        batch, lines, _ = self.host.shape
        batch_stride, line_stride, stride = self.host.strides
        if self.host.dtype != self.dtype or (self.host.shape[2] > 1 and stride != self.dtype.itemsize):
            return None
        pitch = line_stride if lines > 1 else batch_stride if batch > 1 else self.line_bytes
        if batch > 1 and (batch_stride != lines * pitch or self.apart != lines * self.pitch):
            return None
        together = pitch == self.pitch == self.line_bytes
        if not self.line_bytes <= pitch <= MAX_PITCH or self.pitch > MAX_PITCH:
            return None
        if batch * lines > 1 and not together and self.line_bytes < LEAST_RUN:
            return None
        return self.host.__array_interface__["data"][0], pitch, batch * lines

    def chunks(self, capacity: int, threads: int, block_bytes: int) -> Iterator[Chunk]:
        """Cut into chunks of at most ``capacity`` bytes, smaller where the whole block has less than two a thread."""
        batch, lines, width = self.host.shape
        itemsize = self.dtype.itemsize
        # Lines that lie whole and one after the other are copied with their padding, as one run.
        line = self.pitch if self.whole else self.line_bytes
        target = min(capacity, max(LEAST_CHUNK, block_bytes // (2 * threads)))
        if line > target:
            step = target // itemsize
            for product in range(batch):
                for at in range(lines):
                    for start in range(0, width, step):
                        stop = min(start + step, width)
                        index = (slice(product, product + 1), slice(at, at + 1), slice(start, stop))
                        address = self.device + product * self.apart + at * self.pitch + start * itemsize
                        size = (stop - start) * itemsize
                        yield Chunk(index, (1, 1, stop - start), address, size, size)
            return
        whole = slice(0, width)
        group = min(batch, target // (lines * line)) if self.apart == lines * self.pitch else 1
        if group > 1:
            for first in range(0, batch, group):
                last = min(first + group, batch)
                index = (slice(first, last), slice(0, lines), whole)
                yield Chunk(index, (last - first, lines, width), self.device + first * self.apart, self.pitch, line)
            return
        step = max(1, target // line)
        for product in range(batch):
            for first in range(0, lines, step):
                last = min(first + step, lines)
                index = (slice(product, product + 1), slice(first, last), whole)
                address = self.device + product * self.apart + first * self.pitch
                yield Chunk(index, (1, last - first, width), address, self.pitch, line)


def staged_view(chunk: Chunk, buffer: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The chunk's elements in a staging buffer."""
    products, lines, width = chunk.shape
    view: npt.NDArray[Any] = np.ndarray(
        (products, lines, width),
        dtype,
        buffer,
        strides=(lines * chunk.staged_pitch, chunk.staged_pitch, dtype.itemsize),
    )
    return view


def copy_by_threads(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy an array, each of several threads a part of it; returns when all is copied."""
    axis = next((axis for axis, extent in enumerate(target.shape) if extent >= MAX_THREADS), 0)
    parts = min(copier_count() + 1, target.nbytes // LEAST_SHARE, target.shape[axis] if target.ndim else 0)
    if parts < 2:
        np.copyto(target, source)
        return
    step = -(-target.shape[axis] // parts)
    before = (slice(None),) * axis
    shares = [(*before, slice(start, start + step)) for start in range(0, target.shape[axis], step)]
    jobs = [copiers().submit(_copy_share, target[share], source[share]) for share in shares[1:]]
    try:
        _copy_share(target[shares[0]], source[shares[0]])
    finally:
        for job in jobs:
            job.result()


def _copy_share(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    if target.ndim == 2:
        copy_elements(target[np.newaxis], source[np.newaxis])
    else:
        np.copyto(target, source)


def copy_elements(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy (batch, lines, elements) arrays, converting if their dtypes differ.

    Where one's lines run across the other's, in squares, so that the cache holds what is read in one direction and
    written in the other.
    """
    _, lines, width = source.shape
    across = any(
        array.shape[1] > 1 and array.shape[2] > 1 and abs(array.strides[1]) < abs(array.strides[2])
        for array in (target, source)
    )
    if not across:
        np.copyto(target, source, casting="unsafe")
        return
    for first in range(0, lines, _SQUARE):
        for start in range(0, width, _SQUARE):
            square = (slice(None), slice(first, first + _SQUARE), slice(start, start + _SQUARE))
            np.copyto(target[square], source[square], casting="unsafe")
