"""What decoding has to know of asynchronous operations: whether a program has any, and which registers they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .module import Function, Instruction, Operand, Pair, Reg, Vec

_WRITES_NOTHING = {"st", "red", "stmatrix", "bar", "barrier", "mbarrier", "cp", "prefetch", "fence"}


def is_asynchronous(ins: Instruction) -> bool:
    """Whether an instruction needs `ProxiedSharedMemory` and what goes with it."""
    mods = ins.mods
    if ins.op in ("mbarrier", "wgmma", "mapa", "getctarank", "setmaxnreg"):
        return True
    if ins.op == "fence":
        return "proxy" in mods or "mbarrier_init" in mods
    if ins.op in ("barrier", "cp", "st"):
        return bool({"cluster", "bulk", "async"} & set(mods)) and not (ins.op == "cp" and "bulk" not in mods)
    return "shared::cluster" in mods


def matrix_registers(functions: list[Function]) -> dict[int, int]:
    """A place for each register (by identity) that a `wgmma` of these functions accumulates in or reads A from."""
    places: dict[int, int] = {}
    for function in functions:
        for ins in function.body or ():
            if ins.op == "wgmma" and ins.mods[0] == "mma_async":
                for operand in ins.operands[:2]:
                    if isinstance(operand, Vec):
                        for register in registers_in(operand):
                            places.setdefault(register, len(places))
    return places


def registers_in(operand: Operand) -> list[int]:
    if isinstance(operand, Reg):
        return [id(operand.reg)]
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in registers_in(item)]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    return []


def watched(run: Callable[[Any], Any], ins: Instruction, places: dict[int, int]) -> Callable[[Any], Any]:
    """The instruction, reporting the matrix registers that it names before it executes."""
    named = [[places[r] for r in registers_in(o) if r in places] for o in ins.operands]
    touched = np.array(sorted({p for some in named for p in some}), np.int64)
    if not touched.size:
        return run
    written = np.array([] if ins.op in _WRITES_NOTHING else named[0], np.int64)

    def watch(b: Any) -> None:
        b.warpgroups.touch(touched, written)
        run(b)

    return watch
