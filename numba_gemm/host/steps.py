"""The steps of a product: what is copied where, multiplied and copied back, in order.

A step names the memory that it touches; which step waits for which follows from that, in
:class:`~numba_gemm.host.pipeline.Pipeline`, and isn't said here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from numba_gemm.host.blocks import Blocking, Frame, Shape, block_order, frame, ranges

Span: TypeAlias = tuple[int, int]


class Slot(NamedTuple):
    """A place in device memory for a block of A, B or C."""

    matrix: str
    number: int


class Part(NamedTuple):
    """A rectangle of one operand: which product of the list, and ranges of batch, rows and columns."""

    product: int
    batch: Span
    rows: Span
    columns: Span


@dataclass(frozen=True)
class Home:
    """A block in a slot: ``part`` is what of the operand it holds, ``frame`` how it lies."""

    slot: Slot
    part: Part
    frame: Frame
    column_major: bool = False

    def nbytes(self, dtype: np.dtype[Any]) -> int:
        """Bytes of the block."""
        return (self.part.batch[1] - self.part.batch[0]) * self.frame.elements * dtype.itemsize

    def element(self, batch: int, row: int, column: int) -> int:
        """Elements from the slot's start to an element of the operand."""
        line, place = row - self.part.rows[0], column - self.part.columns[0]
        if self.column_major:
            line, place = place, line
        return (batch - self.part.batch[0]) * self.frame.elements + line * self.frame.pitch + place


@dataclass(frozen=True)
class Claim:
    """From here on the slot holds another block: what comes next must wait for all that used the last one."""

    slot: Slot


@dataclass(frozen=True)
class Upload:
    """Copy a part of A, B or C from the host to its home."""

    part: Part
    home: Home


@dataclass(frozen=True)
class Multiply:
    """A strip of C: rows × columns, over ``depth`` of k; added to what is there if ``accumulate``.

    ``a`` and ``b`` are None for operands that were on the device before. ``copies`` is the number of uploads, of all
    those of the run, that it comes after.
    """

    part: Part
    depth: Span
    a: Home | None
    b: Home | None
    c: Home
    accumulate: bool
    copies: int = 0


@dataclass(frozen=True)
class Download:
    """Copy a strip of C from its home to the host."""

    part: Part
    home: Home


Step: TypeAlias = Claim | Upload | Multiply | Download


#: Uploads that may pass a multiplication: enough to keep the bus busy while a thread makes its launches.
AHEAD = 3


class _Ring:
    """The slots of one matrix, handed out in turn; a block that is still in one isn't copied again."""

    def __init__(self, matrix: str, count: int) -> None:
        self._held: list[tuple[Hashable, Slot]] = [(None, Slot(matrix, number)) for number in range(count)]

    def find(self, key: Hashable) -> tuple[Slot, bool]:
        """The slot of a block, and whether it is there already."""
        for index, (held, slot) in enumerate(self._held):
            if held == key:
                self._held.append(self._held.pop(index))  # the least recently used one goes first
                return slot, True
        _, slot = self._held.pop(0)
        self._held.append((key, slot))
        return slot, False


def product_steps(shape: Shape, blocking: Blocking, identities: Sequence[tuple[Hashable, Hashable]]) -> Iterator[Step]:
    """The steps of a list of products of one shape.

    ``identities`` has, for each product, what tells its A and its B from those of the others: an operand that two
    products share is copied once if it is still there.
    """
    rings = [_Ring(matrix, count) for matrix, count in zip("abc", blocking.slots, strict=True)]
    batches = ranges(shape.batch, blocking.group)
    blocks_m, blocks_n = ranges(shape.m, blocking.block_m), ranges(shape.n, blocking.block_n)
    blocks_k = ranges(shape.k, blocking.block_k)
    for product, (a_identity, b_identity) in enumerate(identities):
        for group, i, j, depth in block_order(blocking, shape):
            batch, rows, columns, ks = batches[group], blocks_m[i], blocks_n[j], blocks_k[depth]
            homes: list[Home | None] = []
            new = []
            for matrix, ring, itemsize, shared, column_major, identity, spans in (
                ("a", rings[0], shape.a_bytes, shape.a_shared, shape.a_column, a_identity, (rows, ks)),
                ("b", rings[1], shape.b_bytes, shape.b_shared, shape.b_column, b_identity, (ks, columns)),
            ):
                if not itemsize:
                    homes.append(None)
                    new.append(False)
                    continue
                held = (0, 1) if shared else batch
                slot, present = ring.find((matrix, identity, held, spans))
                place = frame(spans[0][1] - spans[0][0], spans[1][1] - spans[1][0], itemsize, column_major)
                homes.append(Home(slot, Part(product, held, *spans), place, column_major))
                new.append(not present)
                if not present:
                    yield Claim(slot)
            slot, present = rings[2].find((product, batch, rows, columns))
            c_home = Home(
                slot,
                Part(product, batch, rows, columns),
                frame(rows[1] - rows[0], columns[1] - columns[0], shape.c_bytes, False),
            )
            if not present:
                yield Claim(slot)
            yield from _strips(
                shape, blocking, homes[0], homes[1], c_home, new[0], new[1], ks, first=depth == 0,
                last=depth == len(blocks_k) - 1,
            )  # fmt: skip


def _strips(
    shape: Shape,
    blocking: Blocking,
    a: Home | None,
    b: Home | None,
    c: Home,
    a_new: bool,
    b_new: bool,
    ks: Span,
    *,
    first: bool,
    last: bool,
) -> Iterator[Step]:
    """Bring pieces of A and B by turns; after each, multiply it with all that is there of the other."""
    product, batch, rows, columns = c.part
    row_pieces, column_pieces = _pieces(rows, blocking.piece_m), _pieces(columns, blocking.piece_n)
    if not a_new:
        row_pieces = [rows]
    if not b_new:
        column_pieces = [columns]

    def strip(rows: Span, columns: Span) -> Iterator[Step]:
        part = Part(product, batch, rows, columns)
        if first and shape.reads_c:
            yield Upload(part, c)
        yield Multiply(part, ks, a, b, c, accumulate=not first)
        if last:
            yield Download(part, c)

    if not a_new and not b_new:
        for piece in _pieces(rows, blocking.piece_m):
            yield from strip(piece, columns)
        return
    rows_there, columns_there = rows[0] if a_new else rows[1], columns[0] if b_new else columns[1]
    while (a_new and rows_there < rows[1]) or (b_new and columns_there < columns[1]):
        a_share = (rows_there - rows[0]) / (rows[1] - rows[0])
        b_share = (columns_there - columns[0]) / (columns[1] - columns[0])
        if a_share <= b_share:
            piece = row_pieces.pop(0)
            assert a is not None
            yield Upload(Part(a.part.product, a.part.batch, piece, ks), a)
            rows_there = piece[1]
            if columns_there > columns[0]:
                yield from strip(piece, (columns[0], columns_there))
        else:
            piece = column_pieces.pop(0)
            assert b is not None
            yield Upload(Part(b.part.product, b.part.batch, ks, piece), b)
            columns_there = piece[1]
            if rows_there > rows[0]:
                yield from strip((rows[0], rows_there), piece)


def uploads_first(steps: Iterable[Step], is_direct: Callable[[Upload], bool], ahead: int = AHEAD) -> Iterator[Step]:
    """The same steps with uploads moved to before multiplications and downloads, and the uploads before each counted.

    The bus isn't to wait for a thread that has launches to make, nor the first launch for all of that thread's copies:
    a step is passed by so many uploads as ``ahead`` says. Only uploads that need no staging buffer are moved
    (``is_direct``), and none past a claim, which is where a slot gets another block.
    """
    held: deque[tuple[int, Step]] = deque()
    uploads = 0
    for step in steps:
        if isinstance(step, Multiply):
            held.append((uploads, replace(step, copies=uploads)))
        elif isinstance(step, Download):
            held.append((uploads, step))
        else:
            while held and (isinstance(step, Claim) or not is_direct(step)):
                yield held.popleft()[1]
            uploads += isinstance(step, Upload)
            yield step
            while held and uploads - held[0][0] >= ahead:
                yield held.popleft()[1]
    for _, step in held:
        yield step


def _pieces(span: Span, step: int) -> list[Span]:
    return [(span[0] + start, span[0] + stop) for start, stop in ranges(span[1] - span[0], step)]
