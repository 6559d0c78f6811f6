"""How t4 copies the tiles of A and B into shared memory and reads fragments from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Bytes of one 16-byte piece, the unit of copies and of the swizzle, and the 16-bit elements in it.
PIECE_BYTES, PIECE = 16, 8
#: A tile whose k isn't contiguous lies in shared memory as panels of 64 columns, 128 bytes a row.
PANEL = 64


class Copy(NamedTuple):
    """One ``cp.async`` of a thread: where in the stage, how far from the pointer, what its guard compares with."""

    operand: str
    shared_offset: int
    global_offset: int
    guard_row: int
    guard_column: int
    advance: Literal["", "step", "rewind"]


@dataclass(frozen=True)
class Operand:
    """How one of A and B is copied into a stage and read from it.

    ``extent`` is its side along M or N, ``k_contiguous`` whether neighbours in k are neighbours in memory.
    """

    name: str
    k_contiguous: bool
    aligned: bool
    extent: int
    warp_extent: int
    block_k: int
    threads: int
    stage_offset: int

    @property
    def matrix(self) -> str:
        return self.name.upper()

    @property
    def side(self) -> str:
        """The dimension that is not K."""
        return "M" if self.name == "a" else "N"

    @property
    def bytes(self) -> int:
        return self.extent * self.block_k * 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in shared memory: block_k elements, or one row of a panel."""
        return 2 * self.block_k if self.k_contiguous else 2 * PANEL

    @property
    def pieces_per_row(self) -> int:
        return self.row_bytes // PIECE_BYTES

    @property
    def rows_per_copy(self) -> int:
        """Rows of shared memory that all threads together fill with one copy each."""
        return self.threads // self.pieces_per_row

    @property
    def copies(self) -> list[Copy]:
        """The copies of one thread for one stage, in the order that its pointer walks."""
        rows = self.rows_per_copy
        found = []
        if self.k_contiguous:
            count = self.extent // rows
            for i in range(count):
                advance: Literal["step", "rewind"] = "rewind" if i == count - 1 else "step"
                found.append(Copy(self.name, i * rows * self.row_bytes, 0, i * rows, 0, advance))
            return found
        panels, groups = self.extent // PANEL, self.block_k // rows
        for group in range(groups):
            for panel in range(panels):
                offset = (panel * self.block_k + group * rows) * self.row_bytes
                last: Literal["", "step"] = "step" if panel == panels - 1 else ""
                found.append(
                    Copy(self.name, offset, panel * 2 * PANEL, group * rows, panel * PANEL, last),
                )
        return found

    @property
    def box(self) -> tuple[int, int, int]:
        """Elements of a box that TMA copies, innermost first: all rows of the tile, or one panel."""
        return (self.block_k, self.extent, 1) if self.k_contiguous else (PANEL, self.block_k, 1)

    @property
    def boxes(self) -> int:
        """Boxes in a stage."""
        return 1 if self.k_contiguous else self.extent // PANEL

    @property
    def swizzle(self) -> str:
        """TMA's name for the order of pieces in which fragments are read."""
        return f"{self.row_bytes}B"

    @property
    def read_bases(self) -> int:
        """Addresses that ``ldmatrix`` needs: one per 16-step of k, or one per 16 columns within a panel."""
        return self.block_k // 16 if self.k_contiguous else min(4, self.warp_extent // 16)

    @property
    def bases_by_xor(self) -> bool:
        """Whether base j is base 0 with 32·j flipped in: no carry out of the swizzled bits."""
        return self.k_contiguous or self.warp_extent in (16, 32) or self.warp_extent % PANEL == 0

    def fragment_address(self, tile: int, step: int) -> tuple[int, int]:
        """(base, byte offset) of the 16×16 block ``tile`` of the warp's side at 16-step ``step`` of k."""
        if self.k_contiguous:
            return step, tile * 16 * self.row_bytes
        return tile % 4, (tile // 4) * self.block_k * self.row_bytes + step * 16 * self.row_bytes

    @property
    def transposed(self) -> bool:
        """Whether ``ldmatrix`` needs ``.trans``: the fragments hold pairs along k."""
        return not self.k_contiguous
