"""What a launch gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from .counters import Counters


@dataclass(frozen=True)
class Report:
    """A finished launch.

    Attributes
    ----------
    kernel : the entry's name in the PTX text.
    arch : the architecture that was emulated.
    grid, block : launch dimensions (x, y, z).
    blocks_run : how many blocks ran (fewer than the grid has where `blocks=` chose).
    shared_bytes : shared memory per block, static and dynamic.
    counters : what was counted, see `Counters`.
    executed_by_line : PTX line number to instructions executed by warps.
    """

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    blocks_run: int
    shared_bytes: int
    counters: Counters
    executed_by_line: dict[int, int] = field(default_factory=dict)
