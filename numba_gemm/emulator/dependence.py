"""``griddepcontrol`` (PTX ISA 9.7.13.15): kernels that may start before the one before them is over.

Launches follow one another here, so neither instruction does anything. But in a launch with ``overlaps=True`` a block
that touches global memory before one of its threads has executed ``griddepcontrol.wait``, or that ends without it, is a
hazard: on a GPU the kernel before might still write there, or read, or be taken for finished by the one behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .hazards import UnwaitedDependency
from .module import Instruction
from .program import Decoder, Run, op


def check_access(b: Any) -> None:
    """Called for the active lanes' access to global memory."""
    if b.unwaited is None:
        return
    lanes = b.indices()
    early = b.unwaited[lanes // b.block_lanes]
    if early.any():
        message = "global memory is touched before griddepcontrol.wait, in a launch that overlaps the one before it,"
        raise b.fault(UnwaitedDependency, message, int(lanes[np.flatnonzero(early)[0]]))


def check_lane(b: Any, lane: int) -> None:
    """The same for a bulk copy of one lane."""
    if b.unwaited is not None and b.unwaited[lane // b.block_lanes]:
        message = "a bulk copy of global memory before griddepcontrol.wait, in a launch that overlaps the one before,"
        raise b.fault(UnwaitedDependency, message, lane)


def check_end(b: Any) -> None:
    """Called when all threads have ended."""
    if b.unwaited is not None and b.unwaited.any():
        lane = int(np.flatnonzero(b.unwaited)[0]) * b.block_lanes
        message = "the block ends without griddepcontrol.wait, in a launch that overlaps the one before it,"
        raise b.fault(UnwaitedDependency, message, lane)


@op("griddepcontrol")
def griddepcontrol(d: Decoder, ins: Instruction) -> Run:
    if ins.mods == ("launch_dependents",):
        return lambda b: None
    if ins.mods != ("wait",):
        raise d.unsupported(ins)

    def wait(b: Any) -> None:
        if b.unwaited is not None:
            b.unwaited[b.indices() // b.block_lanes] = False

    return wait
