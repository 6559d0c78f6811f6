"""How a product is cut into blocks that fit GPU memory, and in what order the blocks are taken.

Pure arithmetic on shapes: the same shapes and the same limit give the same blocks, whatever the timing. Two levels:

* **Blocks** are what GPU memory holds at a time, in a few slots for each of A, B and C. A product that fits is one
  block. One that doesn't streams: a panel of B stays while blocks of rows of A pass by (or the other way round,
  whichever moves fewer bytes).
* **Pieces** divide a block's A by rows and its B by columns, so that computing starts when the first pieces are there
  and each finished strip of C travels back while later pieces arrive.

K is divided only if the shortest blocks with all of K don't fit: only that changes the order in which an element's
terms are added, hence its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Rows of at least this many bytes are padded on the device to a multiple of 16 bytes, so that each begins aligned.
PADDED_FROM = 256
ALIGNMENT = 16
SLOT_ALIGNMENT = 512


@dataclass(frozen=True)
class Grain:
    """Sizes that the cutting goes by.

    Attributes
    ----------
    tile : edges of blocks are multiples of this.
    piece_bytes : of A or B to wait for before computing starts: long enough to be a fast copy.
    max_pieces : of A, or of B, in a block: each is another launch.
    piece_rows : least height of a piece of A, where its rows are contiguous (likewise width of B's columns).
    piece_row_bytes : least bytes of a row that a piece cuts out of a longer one: shorter copies are slower.
    group_bytes : of a batch of small products to take at a time.
    whole_bytes : a product of at most so many bytes is one piece, page-locked or not: its one launch has the bits of
        a product that is staged whole.
    block_cost : bytes of traffic that a block more is worth; launches and waits take time too.
    """

    tile: int = 64
    piece_bytes: int = 8 << 20
    max_pieces: int = 8
    piece_rows: int = 256
    piece_row_bytes: int = 4096
    group_bytes: int = 16 << 20
    whole_bytes: int = 48 << 20
    block_cost: int = 1 << 20


GRAIN = Grain()


@dataclass(frozen=True)
class Shape:
    """A product as the cutting sees it.

    Attributes
    ----------
    batch, m, n, k : dimensions, all at least 1.
    a_bytes, b_bytes, c_bytes : of an element on the device; 0 for an operand that is there already.
    a_shared, b_shared : whether all products of the batch use the same matrix.
    a_column, b_column : whether columns, not rows, are contiguous.
    reads_c : whether C goes to the device first.
    """

    batch: int
    m: int
    n: int
    k: int
    a_bytes: int = 4
    b_bytes: int = 4
    c_bytes: int = 4
    a_shared: bool = False
    b_shared: bool = False
    a_column: bool = False
    b_column: bool = False
    reads_c: bool = False


@dataclass(frozen=True)
class Frame:
    """How a block lies in its slot: ``lines`` contiguous runs of ``width`` elements, ``pitch`` elements apart."""

    lines: int
    width: int
    pitch: int

    @property
    def elements(self) -> int:
        """Elements from a matrix of the batch to the next."""
        return self.lines * self.pitch


def frame(rows: int, columns: int, itemsize: int, column_major: bool) -> Frame:
    """The place of a block of ``rows`` × ``columns``, rows padded to 16 bytes where they aren't short."""
    lines, width = (columns, rows) if column_major else (rows, columns)
    pitch = width
    if width * itemsize >= PADDED_FROM:
        step = ALIGNMENT // itemsize
        pitch = -(-width // step) * step
    return Frame(lines, width, pitch)


@dataclass(frozen=True)
class Blocking:
    """The chosen cut of a :class:`Shape`.

    Attributes
    ----------
    group : products of the batch in a block.
    block_m, block_n, block_k : edges of a block.
    slots : of A, B and C in device memory.
    rows_inner : whether blocks of rows pass by a panel of B; else panels of columns pass by a block of A.
    piece_m, piece_n : rows of A and columns of B in a piece.
    """

    group: int
    block_m: int
    block_n: int
    block_k: int
    slots: tuple[int, int, int] = (1, 1, 1)
    rows_inner: bool = True
    piece_m: int = 0
    piece_n: int = 0

    def counts(self, shape: Shape) -> tuple[int, int, int, int]:
        """Groups, and blocks along m, n and k."""
        return (
            -(-shape.batch // self.group),
            -(-shape.m // self.block_m),
            -(-shape.n // self.block_n),
            -(-shape.k // self.block_k),
        )

    def slot_bytes(self, shape: Shape) -> tuple[int, int, int]:
        """Bytes of a slot of A, B and C."""
        a = frame(self.block_m, self.block_k, shape.a_bytes, shape.a_column) if shape.a_bytes else None
        b = frame(self.block_k, self.block_n, shape.b_bytes, shape.b_column) if shape.b_bytes else None
        c = frame(self.block_m, self.block_n, shape.c_bytes, False)
        a_count, b_count = (1 if shared else self.group for shared in (shape.a_shared, shape.b_shared))
        return (
            _rounded(a_count * a.elements * shape.a_bytes if a else 0),
            _rounded(b_count * b.elements * shape.b_bytes if b else 0),
            _rounded(self.group * c.elements * shape.c_bytes),
        )

    def device_bytes(self, shape: Shape) -> int:
        """Bytes of GPU memory that the slots take."""
        return sum(count * size for count, size in zip(self.slots, self.slot_bytes(shape), strict=True))

    def loads(self, shape: Shape) -> tuple[int, int]:
        """How often all of A, and all of B, goes to the device."""
        _, blocks_m, blocks_n, blocks_k = self.counts(shape)
        a = b = 1
        if blocks_m * blocks_k > self.slots[0] and (self.rows_inner or blocks_k > 1):
            a = blocks_n
        if blocks_n * blocks_k > self.slots[1] and (not self.rows_inner or blocks_k > 1):
            b = blocks_m
        return a, b


def _rounded(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def choose_blocks(shape: Shape, limit: int, grain: Grain = GRAIN) -> Blocking:
    """The cut that moves the fewest bytes within ``limit`` bytes of GPU memory.

    Raises
    ------
    ValueError : if not even the smallest blocks fit.
    """
    group = min(shape.batch, max(1, grain.group_bytes // _product_bytes(shape)))
    while True:  # one block for each group, if that fits
        for copies in (2, 1):
            whole = _with_slots(Blocking(group, shape.m, shape.n, shape.k), shape, copies)
            if whole.device_bytes(shape) <= limit and (copies == 2 or group == 1):
                return _with_pieces(whole, shape, grain)
        if group == 1:
            break
        group //= 2
    for depths in ([shape.k], _edges(shape.k, grain.tile)[1:]):
        for copies in (2, 1):
            fitting = [
                (_cost(blocking, shape, grain), blocking)
                for depth in depths
                for block_m in _edges(shape.m, grain.tile)
                for block_n in _edges(shape.n, grain.tile)
                for rows_inner in (True, False)
                if (
                    blocking := _with_slots(Blocking(1, block_m, block_n, depth, rows_inner=rows_inner), shape, copies)
                ).device_bytes(shape)
                <= limit
            ]
            if fitting:
                return _with_pieces(min(fitting, key=lambda pair: pair[0])[1], shape, grain)
    least = Blocking(1, min(shape.m, grain.tile), min(shape.n, grain.tile), min(shape.k, grain.tile))
    raise ValueError(
        f"memory_limit = {limit} bytes can't hold the smallest blocks of this product; it takes "
        f"{least.device_bytes(shape)} bytes at least"
    )


def is_taken_whole(shape: Shape, grain: Grain = GRAIN) -> bool:
    """Whether a product is so small that, where no limit forbids, one launch takes it: see ``Grain.whole_bytes``."""
    total = shape.batch * _product_bytes(shape) + shape.a_shared * shape.m * shape.k * shape.a_bytes
    total += shape.b_shared * shape.k * shape.n * shape.b_bytes
    return total <= grain.whole_bytes


def _product_bytes(shape: Shape) -> int:
    a, b = (
        0 if shared else size for shared, size in ((shape.a_shared, shape.a_bytes), (shape.b_shared, shape.b_bytes))
    )
    return shape.m * shape.k * a + shape.k * shape.n * b + shape.m * shape.n * shape.c_bytes


def _edges(extent: int, tile: int) -> list[int]:
    """``extent`` itself, then every smaller tile · 2ⁱ."""
    edges = [extent]
    edge = tile
    while edge < extent:
        edges.append(edge)
        edge *= 2
    return edges


def _with_slots(blocking: Blocking, shape: Shape, copies: int) -> Blocking:
    """Slots enough for ``copies`` blocks of each matrix, but no more than there are different blocks."""
    groups, blocks_m, blocks_n, blocks_k = blocking.counts(shape)
    a = blocks_m * blocks_k * (1 if shape.a_shared else groups)
    b = blocks_k * blocks_n * (1 if shape.b_shared else groups)
    c = groups * blocks_m * blocks_n
    return replace(blocking, slots=(min(copies, a), min(copies, b), min(copies, c)))


def _cost(blocking: Blocking, shape: Shape, grain: Grain) -> tuple[int, int, int]:
    groups, blocks_m, blocks_n, blocks_k = blocking.counts(shape)
    a_loads, b_loads = blocking.loads(shape)
    traffic = a_loads * shape.m * shape.k * shape.a_bytes + b_loads * shape.k * shape.n * shape.b_bytes
    blocks = blocks_m * blocks_n * blocks_k
    return (groups * (traffic + blocks * grain.block_cost), -blocking.block_m, -blocking.block_n)


def _with_pieces(blocking: Blocking, shape: Shape, grain: Grain) -> Blocking:
    if blocking.group > 1 or is_taken_whole(shape, grain):
        return replace(blocking, piece_m=blocking.block_m, piece_n=blocking.block_n)

    def piece(extent: int, depth: int, itemsize: int, cuts_rows: bool) -> int:
        least = max(grain.piece_rows, grain.piece_row_bytes // itemsize if cuts_rows else 0)
        wanted = max(
            -(-grain.piece_bytes // (depth * itemsize)),  # for a fast copy
            -(-extent // grain.max_pieces),  # for few launches
        )
        return min(extent, -(-max(wanted, 1) // least) * least)

    return replace(
        blocking,
        piece_m=piece(blocking.block_m, blocking.block_k, shape.a_bytes, shape.a_column)
        if shape.a_bytes
        else piece(blocking.block_m, blocking.block_n, shape.c_bytes, False),  # only C's copies are to overlap
        piece_n=piece(blocking.block_n, blocking.block_k, shape.b_bytes, not shape.b_column)
        if shape.b_bytes
        else blocking.block_n,
    )


def ranges(extent: int, step: int) -> list[tuple[int, int]]:
    """``(0, step), (step, 2·step) …`` up to ``extent``."""
    return [(start, min(start + step, extent)) for start in range(0, extent, step)]


def block_order(blocking: Blocking, shape: Shape) -> Iterator[tuple[int, int, int, int]]:
    """(group, block along m, along n, along k), in the order in which they are computed."""
    groups, blocks_m, blocks_n, blocks_k = blocking.counts(shape)
    for group in range(groups):
        for outer in range(blocks_n if blocking.rows_inner else blocks_m):
            for inner in range(blocks_m if blocking.rows_inner else blocks_n):
                i, j = (inner, outer) if blocking.rows_inner else (outer, inner)
                for depth in range(blocks_k):
                    yield group, i, j, depth
