"""Products that fit a staging buffer whole: A and B there, one launch, one copy back, on one stream.

Everything is at hand: page-locked staging memory, a stream, and, for calls like one before, the views to copy through
and the prepared launch. Small products have device memory at hand too, and A and B, packed one behind the other, go
there in one copy, since latency is all. In larger ones several threads share each array, and A is on its way while B is
packed; up to some 50 MB that is faster than to overlap everything with everything, which takes many more turns of the
interpreter's lock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.device.context import Context
from numba_gemm.device.driver import driver
from numba_gemm.device.stream import Stream, synchronize_stream
from numba_gemm.execute import Prepared
from numba_gemm.host.blocks import GRAIN, SLOT_ALIGNMENT, Frame, frame
from numba_gemm.host.engine import allocate_device, copy_lines, quick_wait
from numba_gemm.host.matrix import Matrix
from numba_gemm.host.operands import Array, Call, Stacks
from numba_gemm.host.pinned import page_locked
from numba_gemm.host.transfer import copy_by_threads

#: Operands and result of a small product, in bytes; one thread copies them faster than several.
SMALL_BYTES = 4 << 20
#: The same of the largest product that is staged whole.
MEDIUM_BYTES = GRAIN.whole_bytes
#: What padding between and in the operands may take beside them: of rows of 256 bytes and more, 16 bytes each.
_PADDING = 1 / 16
_CALLS_LIMIT = 256


@dataclass(frozen=True)
class _Packed:
    """Where an operand lies in a lane: offset in bytes, and a (batch, lines, elements) array's shape and strides."""

    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: np.dtype[Any]
    column_major: bool

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.strides[0]

    def view(self, memory: npt.NDArray[np.uint8]) -> Array:
        """The operand in staging memory, as (batch, rows, columns)."""
        array: Array = np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)
        return array.swapaxes(1, 2) if self.column_major else array


@dataclass(frozen=True)
class _Staged:
    """Staging memory in the shape of the caller's operand, or of its one matrix, which is at ``index``."""

    view: Array
    index: tuple[int, ...]
    nbytes: int  # with padding


@dataclass(frozen=True)
class _Ready:
    """A product like one before, ready to be carried out.

    ``first`` and ``second`` are the caller's operands, None where it is on the device; ``swapped`` says that the second
    is the kernel's A.
    """

    prepared: Prepared
    first: _Staged | None
    second: _Staged | None
    result: Array
    swapped: bool
    a_offset: int
    b_offset: int
    c_offset: int
    reads_c: bool
    up_bytes: int
    down_bytes: int
    total_bytes: int


class Lane:
    """What products of at most ``nbytes``, of one thread at a time, need, kept between them."""

    def __init__(self, context: Context, nbytes: int) -> None:
        self.context = context
        self.nbytes = nbytes
        self._keeps_device = nbytes <= SMALL_BYTES
        capacity = int(nbytes * (1 + _PADDING)) + 4 * SLOT_ALIGNMENT
        self._stream = Stream()
        self.stream = int(self._stream)
        self._staging = page_locked(capacity)
        self._host: int = self._staging.__array_interface__["data"][0]
        self._device = allocate_device(context, capacity, self.stream) if self._keeps_device else 0
        self._ready: dict[Hashable, _Ready] = {}
        self._event: list[int] = []

    def find(self, key: Hashable) -> _Ready | None:
        """A product with this key, if there was one."""
        return self._ready.get(key)

    def make(
        self, key: Hashable, a: Array | Matrix, b: Array | Matrix, c: Array, stacks: Stacks, call: Call, form: Prepared
    ) -> _Ready:
        """Lay a product out and remember it. ``call`` has the layouts that the kernel ``form`` takes."""
        itemsize, c_itemsize = call.dtype.itemsize, call.c_dtype.itemsize
        end = 0
        packed: list[_Packed | None] = []
        for operand, rows, columns in ((call.a, call.m, call.k), (call.b, call.k, call.n)):
            if operand.on_device:
                packed.append(None)
                continue
            place = frame(rows, columns, itemsize, operand.column_major)
            one = _pack(end, call.batch if operand.apart else 1, place, call.dtype, operand.column_major)
            packed.append(one)
            end = -(-one.end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        result = _pack(end, call.batch, frame(call.m, call.n, c_itemsize, False), call.c_dtype, False)
        order = packed[::-1] if stacks.swapped else packed
        staged = [
            self._staged(one, operand, stacks.swapped) if one is not None else None
            for one, operand in zip(order, (a, b), strict=True)
        ]
        reads_c = call.beta != 0
        ready = _Ready(
            form,
            staged[0],
            staged[1],
            self._staged(result, c, stacks.swapped).view,
            stacks.swapped,
            packed[0].offset if packed[0] is not None else 0,
            packed[1].offset if packed[1] is not None else 0,
            result.offset,
            reads_c,
            result.end if reads_c else end,
            result.end - result.offset,
            result.end,
        )
        if len(self._ready) >= _CALLS_LIMIT:
            self._ready.clear()
        self._ready[key] = ready
        return ready

    def _staged(self, packed: _Packed, operand: Array | Matrix, swapped: bool) -> _Staged:
        view = packed.view(self._staging)
        batch, (rows, columns) = operand.shape[:-2], operand.shape[-2:]
        if swapped:
            rows, columns = columns, rows
        shared = view.size == rows * columns  # one matrix for the whole batch, or a batch of one
        if not shared:
            view = view.reshape(math.prod(batch), rows, columns)  # a view: only the rows' dimension is divided
        if swapped:
            view = view.swapaxes(1, 2)
        if shared:
            return _Staged(view[0], (0,) * len(batch), packed.end - packed.offset)
        return _Staged(view.reshape(operand.shape), (), packed.end - packed.offset)

    def multiply(self, ready: _Ready, a: Array | Matrix, b: Array | Matrix, c: Array) -> None:
        """C = alpha · A · B + beta · C on operands like those that ``ready`` was made for."""
        stream = self.stream
        device = self._device if self._keeps_device else allocate_device(self.context, ready.total_bytes, stream)
        try:
            self._multiply(ready, a, b, c, device)
        finally:
            if not self._keeps_device:
                driver().cuMemFreeAsync(device, stream)  # after an error of the context it would only report that again

    def _multiply(self, ready: _Ready, a: Array | Matrix, b: Array | Matrix, c: Array, device: int) -> None:
        stream = self.stream
        addresses = []
        for staged, operand, offset in (
            (ready.first, a, ready.b_offset if ready.swapped else ready.a_offset),
            (ready.second, b, ready.a_offset if ready.swapped else ready.b_offset),
        ):
            if staged is not None:
                copy_by_threads(staged.view, operand[staged.index] if staged.index else operand)  # type: ignore[arg-type]
                addresses.append(device + offset)
                if not self._keeps_device:
                    self._send(device, offset, staged.nbytes)
            else:
                assert isinstance(operand, Matrix)
                quick_wait(stream, operand.stream, self._event)
                addresses.append(operand.pointer)
        result = ready.result if ready.result.ndim == c.ndim else ready.result.reshape(c.shape)
        if ready.reads_c:
            copy_by_threads(result, c)
            if not self._keeps_device:
                self._send(device, ready.c_offset, ready.down_bytes)
        if self._keeps_device and ready.up_bytes:
            self._send(device, 0, ready.up_bytes)
        if ready.swapped:
            addresses.reverse()
        c_offset = ready.c_offset
        ready.prepared.launch(addresses[0], addresses[1], device + c_offset, stream)
        copy_lines(self._host + c_offset, 0, device + c_offset, 0, ready.down_bytes, 1, stream, to_device=False)
        synchronize_stream(stream, after=f"kernel {ready.prepared.function.name} of a small product")
        copy_by_threads(c, result)

    def _send(self, device: int, offset: int, nbytes: int) -> None:
        copy_lines(device + offset, 0, self._host + offset, 0, nbytes, 1, self.stream, to_device=True)

    def free(self) -> None:
        """Give the device memory back once nothing uses it; the rest goes with the object."""
        pointer, self._device = self._device, 0
        if pointer:
            driver().cuMemFreeAsync(pointer, self.stream)
        driver().cuStreamSynchronize(self.stream)  # an error of its work has been raised where it was waited for


def _pack(offset: int, batch: int, place: Frame, dtype: np.dtype[Any], column_major: bool) -> _Packed:
    itemsize = dtype.itemsize
    strides = (place.elements * itemsize, place.pitch * itemsize, itemsize)
    return _Packed(offset, (batch, place.lines, place.width), strides, dtype, column_major)
