"""`setmaxnreg`: registers that warpgroups give back to their block, and take from it (PTX ISA 9.7.19.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .hazards import InvalidOperand
from .module import Imm, Instruction
from .program import Decoder, Terminator, op

if TYPE_CHECKING:
    from .batch import Batch

REGISTERS = 65536
_MOST = 255


class RegisterPool:
    """Registers per thread of each warp, and how many each block has to spare.

    A kernel starts with what `.maxnreg` states, or else with an equal share of the multiprocessor's registers among the
    threads that `.maxntid` (or `.reqntid`) and `.minnctapersm` promise, in steps of 8; nothing is to spare then.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.held = np.full(batch.n >> 5, at_launch(batch.program.kernel.directives, batch.block_threads), np.int64)
        self.spare = np.zeros(batch.blocks.size, np.int64)
        self.waiters: list[tuple[int, int, int, np.ndarray]] = []  # (pc, count, warp, lanes)

    def set(self, pc: int, lanes: np.ndarray, count: int, more: bool) -> Any:
        b = self.batch
        warps = lanes >> 5
        going = []
        for warp in np.unique(warps).tolist():
            mine = lanes[warps == warp]
            held = int(self.held[warp])
            if (count < held) if more else (count > held):
                raise b.hazard(
                    InvalidOperand,
                    f"setmaxnreg.{'inc' if more else 'dec'} to {count} registers of a warp that has {held},",
                    int(mine[0]),
                    pc,
                )
            if self.give(warp, count):
                going.append(mine)
            else:
                self.waiters.append((pc, count, warp, mine))
        if not more:
            self.settle()
        if not going:
            return []
        moved = np.concatenate(going)
        return pc + 1 if moved.size == lanes.size else [(pc + 1, b.normal(moved))]

    def give(self, warp: int, count: int) -> bool:
        """Bring a warp to `count` registers a thread, if its block has them."""
        block = warp // self.batch.warps
        needed = (count - int(self.held[warp])) * 32
        if needed > self.spare[block]:
            return False
        self.spare[block] -= needed
        self.held[warp] = count
        return True

    def settle(self) -> None:
        sleeping, self.waiters = self.waiters, []
        for waiter in sleeping:
            pc, count, warp, lanes = waiter
            if self.give(warp, count):
                self.batch.add(pc + 1, self.batch.normal(lanes))
            else:
                self.waiters.append(waiter)

    def describe(self) -> list[str]:
        found = []
        for pc, count, warp, _ in self.waiters:
            block = warp // self.batch.warps
            line, _ = self.batch.program.text_of(pc)
            found.append(
                f"warp {warp % self.batch.warps} of block {int(self.batch.blocks[block])} waits at line {line} for "
                f"{count} registers a thread: it has {int(self.held[warp])}, the block {int(self.spare[block]) // 32} "
                "for one warp's thread to spare"
            )
        return found


def at_launch(directives: dict[str, tuple[int, ...]], threads: int) -> int:
    """Registers per thread with which a kernel of these directives starts, in steps of 8."""
    if ".maxnreg" in directives:
        return directives[".maxnreg"][0] // 8 * 8
    bound = directives.get(".reqntid") or directives.get(".maxntid") or (threads,)
    blocks = directives.get(".minnctapersm", (1,))[0]
    return min(REGISTERS // (-(-math.prod(bound) // 32) * 32 * blocks), _MOST) // 8 * 8


@op("setmaxnreg")
def setmaxnreg(d: Decoder, ins: Instruction) -> Terminator:
    count = ins.operands[0]
    if not isinstance(count, Imm) or not 24 <= count.value <= 256 or int(count.value) % 8:
        raise d.syntax(ins, "the number of registers must be an immediate multiple of 8 in 24 to 256")
    if not {".maxntid", ".reqntid", ".maxnreg"} & set(d.program.kernel.directives):
        raise d.syntax(ins, "without .maxntid, .reqntid or .maxnreg in the kernel the assembler ignores it")
    amount, more = int(count.value), "inc" in ins.mods

    def run(b: Any, pc: int) -> Any:
        b.converge()
        return b.pool.set(pc, b.indices(), amount, more)

    return Terminator(run)
