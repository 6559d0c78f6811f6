"""Which lane and register hold which element of an ``mma.sync`` operand, and what ``ldmatrix`` puts where.

The layouts are those of the PTX ISA, "Matrix Fragments for mma.m8n8k4" to "... mma.m16n8k32" (9.7.14.5.1 to
9.7.14.5.10 in PTX ISA 8.7), written as formulas. Nearly all of them are one pattern. With g = lane / 4 (the
ISA's groupID), t = lane % 4 (threadID_in_group) and w = the elements that one 32-bit register packs (2 of 16
bits, 4 of 8, 1 of tf32 or f64), the operands are tiled by 8-row blocks, each 8 x 4w block held by all 32
lanes:

* A: element ``low`` of a register is (row g, column w t + low) of its block; blocks go down, then right;
* B: element ``low`` is (row w t + low, column g) of its block; blocks go down along k;
* C and D: each two elements make the pair (row g, columns 2t, 2t + 1) of each block of 8 rows.

The one exception is f16 ``m8n8k4``, four products at once by quarters of a warp, with its own formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.console import RenderableType

Operand = Literal["A", "B", "C", "D"]
IntArray = NDArray[np.int64]

WARP = 32
_REGISTER_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}
_ACCUMULATOR_BITS = {"f16": 16, "f32": 32, "s32": 32, "f64": 64}


class Supported(NamedTuple):
    """One row of the ISA's table of ``mma.sync``: B has the element type of A, or another of its family."""

    shape: str
    element: str
    accumulators: tuple[str, ...]
    arch: str


@dataclass(frozen=True, eq=False)
class Fragment:
    """The elements of one operand that each lane holds.

    ``row`` and ``col`` are int64 ``[32, n]``, read-only: lane ``l``'s element ``i`` (the ISA's a_i, b_i or
    c_i) is element (row[l, i], col[l, i]) of the operand. For B the row is the k index and the column the n
    index. Element ``i`` lies in register ``i // per_register``, lowest bits first; an f64 takes a 64-bit
    register of its own.
    """

    shape: str
    operand: Operand
    element: str
    row: IntArray
    col: IntArray
    per_register: int

    @property
    def registers(self) -> int:
        """Registers per lane: 32-bit ones, or 64-bit ones for f64."""
        return int(self.row.shape[1]) // self.per_register

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the operand's matrix."""
        m, n, k = parse_shape(self.shape)
        return {"A": (m, k), "B": (k, n)}.get(self.operand, (m, n))

    def name(self, index: int) -> str:
        """The ISA's name of element ``index`` of a lane: ``a0``, ``b3``, ``c1``, ``d2``."""
        return f"{self.operand.lower()}{index}"


class Holder(NamedTuple):
    """Where one element is: the lane, its number there (a3: 3), the register, its place in the register."""

    lane: int
    element: int
    register: int
    position: int


def parse_shape(shape: str) -> tuple[int, int, int]:
    """``"m16n8k16"`` to ``(16, 8, 16)``; a leading dot is allowed."""
    match = re.fullmatch(r"\.?m(\d+)n(\d+)k(\d+)", shape)
    if match is None:
        raise ValueError(f"shape {shape!r}: expected the form m16n8k16")
    return int(match[1]), int(match[2]), int(match[3])


@cache
def supported() -> tuple[Supported, ...]:
    """The dense ``mma.sync`` instructions that this map covers: shape, element, accumulators, lowest
    architecture.

    From the ISA's "Multiply-and-Accumulate Instruction: mma" (9.7.14.5.14), target notes included. Integers
    of 4 bits and 1 bit, and the formats of 6 and 4 bits, are not covered.
    """
    floats = ("f32", "f16")
    rows = [Supported("m8n8k4", "f16", floats, "sm_70"), Supported("m16n8k8", "f16", floats, "sm_75")]
    rows += [Supported("m16n8k16", "f16", floats, "sm_80")]
    rows += [Supported(shape, "bf16", ("f32",), "sm_80") for shape in ("m16n8k8", "m16n8k16")]
    rows += [Supported(shape, "tf32", ("f32",), "sm_80") for shape in ("m16n8k4", "m16n8k8")]
    rows += [Supported("m8n8k4", "f64", ("f64",), "sm_80")]
    rows += [Supported(shape, "f64", ("f64",), "sm_90") for shape in ("m16n8k4", "m16n8k8", "m16n8k16")]
    for element in ("s8", "u8"):
        rows += [Supported("m8n8k16", element, ("s32",), "sm_75")]
        rows += [Supported(shape, element, ("s32",), "sm_80") for shape in ("m16n8k16", "m16n8k32")]
    for element in ("e4m3", "e5m2"):
        rows += [Supported(shape, element, floats, "sm_89") for shape in ("m16n8k16", "m16n8k32")]
    return tuple(rows)


@cache
def fragment(shape: str, operand: Operand, element: str, *, layout: Literal["row", "col"] | None = None) -> Fragment:
    """The fragment of ``operand`` ("A", "B", "C" or "D") of ``mma.sync`` of ``shape`` with ``element``s.

    ``element`` is the operand's own type: a multiplicand's for A and B, an accumulator's for C and D.
    ``layout`` matters for A and B of the f16 ``m8n8k4`` alone, whose registers follow the instruction's
    ``.row`` or ``.col``; left out, it is ``.row.col`` as in every other shape. Raises ``ValueError`` where
    the ISA has no such operand.

    >>> a = fragment("m16n8k16", "A", "f16")
    >>> a.registers, a.row[5].tolist(), a.col[5].tolist()
    (4, [1, 1, 9, 9, 1, 1, 9, 9], [2, 3, 2, 3, 10, 11, 10, 11])
    """
    shape = shape.removeprefix(".")
    m, n, k = parse_shape(shape)
    known = [s for s in supported() if s.shape == shape]
    if operand in ("A", "B"):
        known = [s for s in known if s.element == element]
    elif operand in ("C", "D"):
        known = [s for s in known if element in s.accumulators]
    else:
        raise ValueError(f"operand {operand!r}: expected 'A', 'B', 'C' or 'D'")
    if not known:
        raise ValueError(f"mma.sync {shape} has no operand {operand} of {element}; see fragments.supported()")

    lane = np.arange(WARP)[:, None]
    bits = (_REGISTER_BITS if operand in ("A", "B") else _ACCUMULATOR_BITS)[element]
    per_register = max(1, 32 // bits)
    if shape == "m8n8k4" and element in ("f16", "f32"):
        row, col = _quarter_warp(lane, operand, element, layout)
    else:
        if layout not in (None, "row" if operand == "A" else "col"):
            raise ValueError(f"mma.sync {shape} takes A by rows and B by columns only")
        group, thread = lane // 4, lane % 4
        count = {"A": m * k, "B": k * n}.get(operand, m * n) // WARP
        i = np.arange(count)[None, :]
        if operand in ("C", "D"):
            row, col = group + 8 * (i // 2), 2 * thread + i % 2
        else:
            register, low = i // per_register, i % per_register
            along = per_register * thread + low
            if operand == "A":
                blocks = m // 8
                row, col = group + 8 * (register % blocks), along + 4 * per_register * (register // blocks)
            else:
                row, col = along + 4 * per_register * register, group + 0 * i
    row, col = (np.ascontiguousarray(np.broadcast_to(x, np.broadcast(row, col).shape), np.int64) for x in (row, col))
    row.setflags(write=False)
    col.setflags(write=False)
    return Fragment(shape, operand, element, row, col, per_register)


def _quarter_warp(lane: Any, operand: str, element: str, layout: str | None) -> tuple[Any, Any]:
    """f16 ``m8n8k4`` (ISA 9.7.14.5.1): lanes 4q..4q+3 and 16+4q..16+4q+3 hold product q."""
    high, within = 4 * (lane >= 16), lane % 4
    i = np.arange(4)[None, :]
    if operand == "A":
        return (high + i, within) if layout == "col" else (high + within, i)
    if operand == "B":
        return (within, high + i) if layout == "row" else (i, high + within)
    i = np.arange(8)[None, :]
    if element == "f16":
        return high + within, i
    return high + (lane & 1) + (i & 2), (i & 4) + (lane & 2) + (i & 1)


def holder(shape: str, operand: Operand, element: str, i: int, j: int) -> Holder:
    """The lane and register that hold element (``i``, ``j``) of the operand.

    Of the four copies of f16 ``m8n8k4``'s map, the first product's (lanes 0-3 and 16-19) is returned.

    >>> holder("m16n8k16", "B", "f16", 10, 1)
    Holder(lane=5, element=2, register=1, position=0)
    """
    held = fragment(shape, operand, element)
    found = np.argwhere((held.row == i) & (held.col == j))
    if not len(found):
        raise ValueError(f"({i}, {j}) is outside the {held.extent[0]}x{held.extent[1]} operand {operand} of {shape}")
    lane, index = (int(x) for x in found[0])
    return Holder(lane, index, index // held.per_register, index % held.per_register)


def pack(held: Fragment, matrix: NDArray[Any]) -> NDArray[Any]:
    """A warp's registers: raw bits ``[..., rows, cols]`` to ``[..., 32, registers]``, uint32 (f64: uint64).

    For f16 ``m8n8k4``, all four products of the warp get the matrix.
    """
    bits = np.asarray(matrix)[..., held.row, held.col]
    wide = np.uint64 if held.element == "f64" else np.uint32
    width = (64 if held.element == "f64" else 32) // held.per_register
    unsigned = bits.view(np.dtype(f"u{bits.dtype.itemsize}")).astype(wide)
    parts = unsigned.reshape(*unsigned.shape[:-1], held.registers, held.per_register)
    shifts = (np.arange(held.per_register) * width).astype(wide)
    words: NDArray[Any] = np.bitwise_or.reduce(parts << shifts, axis=-1)
    return words


def unpack(held: Fragment, registers: NDArray[Any]) -> NDArray[Any]:
    """The inverse of ``pack``: ``[..., 32, registers]`` to the operand's raw bits, unsigned ``[..., rows,
    cols]``.

    Raises ``ValueError`` for f16 ``m8n8k4``, whose warp holds four matrices: index by ``row`` and ``col``
    there.
    """
    if held.row.size > held.extent[0] * held.extent[1]:
        raise ValueError(f"{held.shape} holds four {held.operand} matrices in a warp, not one")
    width = (64 if held.element == "f64" else 32) // held.per_register
    words = np.asarray(registers)
    shifts = (np.arange(held.per_register) * width).astype(words.dtype)
    parts = (words[..., None] >> shifts).astype(np.dtype(f"u{width // 8}"))
    matrix = np.empty((*words.shape[:-2], *held.extent), parts.dtype)
    matrix[..., held.row, held.col] = parts.reshape(*words.shape[:-1], -1)
    return matrix


@dataclass(frozen=True, eq=False)
class MatrixRows:
    """What ``ldmatrix`` loads, or ``stmatrix`` stores: int64 arrays ``[32, num, 2]``, last axis the low and
    high half.

    Half ``h`` of register ``r`` of lane ``l`` is element (row[l, r, h], col[l, r, h]) of the ``r``-th 8x8
    matrix of 16-bit elements, whose row ``i`` starts at the address that lane ``address_lane[r, i]`` gives.
    """

    row: IntArray
    col: IntArray
    address_lane: IntArray


@cache
def ldmatrix_rows(num: int, trans: bool = False) -> MatrixRows:
    """The map of ``ldmatrix.sync.aligned.m8n8.x{num}{.trans}.shared.b16`` (ISA 9.7.14.5.15); ``stmatrix`` is
    its inverse.

    Lane ``l`` gets the pair at row l / 4, columns 2 (l % 4) and the next; with ``.trans`` the same pair of
    the transposed matrix. Lanes 8r to 8r + 7 give the row addresses of matrix r. ``num`` is 1, 2 or 4.
    """
    if num not in (1, 2, 4):
        raise ValueError(f"ldmatrix .x{num}: expected x1, x2 or x4")
    lane = np.arange(WARP)[:, None, None]
    size = (WARP, num, 2)
    first = np.broadcast_to(lane // 4, size).astype(np.int64)
    second = np.broadcast_to(2 * (lane % 4) + np.arange(2), size).astype(np.int64)
    row, col = (second, first) if trans else (first, second)
    address = np.arange(8 * num).reshape(num, 8)
    for array in (row, col, address):
        array.setflags(write=False)
    return MatrixRows(row, col, address)


def stmatrix_rows(num: int, trans: bool = False) -> MatrixRows:
    """The map of ``stmatrix``: each half of a register goes where ``ldmatrix`` would have read it."""
    return ldmatrix_rows(num, trans)


def _grid(held: Fragment, lane: int) -> list[list[tuple[str, bool]]]:
    """A cell per element: the lane that holds it, or for ``lane`` itself the element's name and True."""
    rows, cols = held.extent
    cells = [["" for _ in range(cols)] for _ in range(rows)]
    # Backwards, so that of repeated maps (f16 m8n8k4) the lowest lane shows.
    for other in reversed(range(WARP)):
        for r, c in zip(held.row[other], held.col[other], strict=True):
            cells[r][c] = str(other)
    mine = {(int(r), int(c)): held.name(i) for i, (r, c) in enumerate(zip(held.row[lane], held.col[lane], strict=True))}
    return [[(mine.get((r, c), cells[r][c]), (r, c) in mine) for c in range(cols)] for r in range(rows)]


def _operands(shape: str, element: str, accumulator: str | None) -> list[Fragment]:
    known = [s for s in supported() if s.shape == shape.removeprefix(".") and s.element == element]
    if not known:
        raise ValueError(f"mma.sync has no {shape} with {element}; see fragments.supported()")
    chosen = accumulator or known[0].accumulators[0]
    if chosen not in known[0].accumulators:
        sums = " or ".join(known[0].accumulators)
        raise ValueError(f"mma.sync {known[0].shape} with {element} adds in {sums}, not in {chosen!r}")
    return [fragment(shape, "A", element), fragment(shape, "B", element), fragment(shape, "C", chosen)]


def _check_lane(lane: int) -> None:
    if not 0 <= lane < WARP:
        raise ValueError(f"lane {lane}: a warp has lanes 0 to {WARP - 1}")


def _title(held: Fragment, lane: int) -> str:
    rows, cols = held.extent
    kind = "64-bit" if held.element == "f64" else "32-bit"
    return f"{held.operand} {held.element} {rows}x{cols}: lane {lane} holds {held.registers} {kind} registers"


def draw_text(shape: str, lane: int = 5, element: str = "f16", accumulator: str | None = None) -> str:
    """The grids of A, B and C as plain text: each cell the lane that holds it, ``lane``'s own as ``[a0]``."""
    _check_lane(lane)
    lines = []
    for held in _operands(shape, element, accumulator):
        lines.append(_title(held, lane))
        cells = [[f"[{text}]" if own else text for text, own in row] for row in _grid(held, lane)]
        width = max(len(cell) for row in cells for cell in row)
        lines.append("    " + " ".join(f"{c:>{width}}" for c in range(len(cells[0]))))
        lines += [f"{r:>3} " + " ".join(f"{cell:>{width}}" for cell in row) for r, row in enumerate(cells)]
        lines.append("")
    return "\n".join(lines)


def draw(shape: str, lane: int = 5, element: str = "f16", accumulator: str | None = None) -> RenderableType:
    """The same grids for a terminal, a rich renderable with ``lane``'s elements in reverse video.

    Without rich installed, ``draw_text``'s string is returned.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return draw_text(shape, lane, element, accumulator)
    _check_lane(lane)
    parts: list[RenderableType] = []
    for held in _operands(shape, element, accumulator):
        # One space between columns keeps m16n8k32's A, 32 columns wide, within 130 characters.
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("", justify="right", style="dim", no_wrap=True)
        for c in range(held.extent[1]):
            table.add_column(str(c), justify="right", header_style="dim", no_wrap=True)
        for r, cells in enumerate(_grid(held, lane)):
            table.add_row(str(r), *(Text(t, style="bold reverse" if own else "") for t, own in cells))
        # The title is a line of its own: a table's title would wrap at the width of a narrow table.
        parts += [Text(_title(held, lane), style="bold"), table, Text("")]
    return Group(*parts)
