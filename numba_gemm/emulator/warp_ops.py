"""Votes, shuffles, matches and reductions within a warp (PTX ISA 9.7.9.6, 9.7.13.7 to 9.7.13.10)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .module import Instruction, Operand, Pair, Sink
from .program import Decoder, Run, op
from .registers import KEYS


def both(target: Operand) -> tuple[Operand, Operand]:
    """The two destinations of `d|p`, the second a sink where there is none."""
    return (target.first, target.second) if isinstance(target, Pair) else (target, Sink())


_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = 0xFFFFFFFF


def gather_warps(b: Any, mask_row: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Wait for the lanes that the mask names; returns (lanes' indices, member [warps, 32]).

    The warps are all of the batch; `member` is true for active lanes that their mask names.
    """
    index = b.indices()
    member = np.zeros(b.n, np.bool_)
    if mask_row is None:
        b.converge()
        member[index] = True
    else:
        mask = b.rows["u32"][mask_row][index]
        b.converge(None if b.sel is None else mask)
        member[index] = (mask >> (index & 31).astype(np.uint32) & np.uint32(1)).astype(np.bool_)
    b.ordered_warps()
    return index, member.reshape(-1, 32)


def ballot(member: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """One uint32 per warp from two [warps, 32] arrays."""
    return np.where(member & votes, _BITS, np.uint32(0)).sum(axis=1, dtype=np.uint32)


@op("activemask")
def activemask(d: Decoder, ins: Instruction) -> Run:
    row = d.dst(ins, ins.operands[0], "b32")

    def run(b: Any) -> None:
        index = b.indices()
        active = np.zeros(b.n, np.bool_)
        active[index] = True
        grid = active.reshape(-1, 32)
        b.rows["u32"][row][index] = ballot(grid, grid)[index >> 5]

    return run


@op("vote")
def vote(d: Decoder, ins: Instruction) -> Run:
    mode = next(m for m in ins.mods if m in ("all", "any", "uni", "ballot"))
    target = d.dst(ins, ins.operands[0], "b32" if mode == "ballot" else "pred")
    source, negated = d.predicate(ins, ins.operands[1])
    mask = d.src(ins, ins.operands[2], "b32") if "sync" in ins.mods else None

    def run(b: Any) -> None:
        index, member = gather_warps(b, mask)
        votes = (b.rows["pred"][source] ^ negated).reshape(-1, 32)
        if mode == "ballot":
            b.rows["u32"][target][index] = ballot(member, votes)[index >> 5]
            return
        every = (votes | ~member).all(axis=1)
        some = (votes & member).any(axis=1)
        result = {"all": every, "any": some, "uni": every | ~some}[mode]
        b.rows["pred"][target][index] = result[index >> 5]

    return run


@op("shfl")
def shfl(d: Decoder, ins: Instruction) -> Run:
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    target, second = both(ins.operands[0])
    row, predicate = d.dst(ins, target, "b32"), d.dst(ins, second, "pred")
    source, amount, clamp = (d.src(ins, o, "b32") for o in ins.operands[1:4])
    mask = d.src(ins, ins.operands[4], "b32") if "sync" in ins.mods else None

    def run(b: Any) -> None:
        index, _ = gather_warps(b, mask)
        rows = b.rows["u32"]
        lane = index & 31
        step = (rows[amount][index] & np.uint32(31)).astype(np.int64)
        c = rows[clamp][index].astype(np.int64)
        segment = c >> 8 & 31
        low = lane & segment
        top = low | (c & 31 & ~segment)
        if mode == "up":
            other = lane - step
            ok = other >= top
        elif mode == "down":
            other = lane + step
            ok = other <= top
        elif mode == "bfly":
            other = lane ^ step
            ok = other <= top
        else:
            other = low | (step & ~segment)
            ok = other <= top
        other = np.where(ok, other, lane)
        value = rows[source][(index & ~31) + other]
        rows[row][index] = value
        b.rows["pred"][predicate][index] = ok

    return run


@op("match")
def match(d: Decoder, ins: Instruction) -> Run:
    every = "all" in ins.mods
    kind = ins.mods[-1]
    target, second = both(ins.operands[0])
    row, predicate = d.dst(ins, target, "b32"), d.dst(ins, second, "pred")
    source = d.src(ins, ins.operands[1], kind)
    mask = d.src(ins, ins.operands[2], "b32")

    def run(b: Any) -> None:
        index, member = gather_warps(b, mask)
        values = b.rows[KEYS[kind]][source].reshape(-1, 32)
        equal = (values[:, :, None] == values[:, None, :]) & member[:, None, :]
        if not every:
            found = np.where(equal, _BITS, np.uint32(0)).sum(axis=2, dtype=np.uint32)
            b.rows["u32"][row][index] = found.reshape(-1)[index]
            return
        same = (equal | ~member[:, None, :]).all(axis=2).reshape(-1)[index]
        b.rows["u32"][row][index] = np.where(same, ballot(member, member)[index >> 5], np.uint32(0))
        b.rows["pred"][predicate][index] = same

    return run


_REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@op("redux")
def redux(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    if kind == "f32":
        raise d.unsupported(ins)
    name = next(m for m in ins.mods if m in _REDUCE)
    function = _REDUCE[name]
    row = d.dst(ins, ins.operands[0], kind)
    source = d.src(ins, ins.operands[1], kind)
    mask = d.src(ins, ins.operands[2], "b32")
    info = np.iinfo(np.int32 if kind == "s32" else np.uint32)
    neutral = {"min": info.max, "max": info.min, "and": info.max if kind != "s32" else -1}.get(name, 0)

    def run(b: Any) -> None:
        index, member = gather_warps(b, mask)
        values = b.rows[KEYS[kind]][source].reshape(-1, 32)
        filled = np.where(member, values, values.dtype.type(neutral))
        result = function.reduce(filled, axis=1, **({"dtype": filled.dtype} if name == "add" else {}))  # type: ignore[attr-defined]
        b.rows[KEYS[kind]][row][index] = result[index >> 5]

    return run


@op("elect")
def elect(d: Decoder, ins: Instruction) -> Run:
    target, second = both(ins.operands[0])
    row, predicate = d.dst(ins, target, "b32"), d.dst(ins, second, "pred")
    mask = d.src(ins, ins.operands[1], "b32")

    def run(b: Any) -> None:
        index, member = gather_warps(b, mask)
        leader = member.argmax(axis=1)[index >> 5]
        b.rows["u32"][row][index] = leader
        b.rows["pred"][predicate][index] = (index & 31) == leader

    return run
