"""Branches, calls and barriers (PTX ISA 9.7.12, 9.7.13)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .hazards import Trap
from .module import Group, Imm, Instruction, Operand, Sym, Variable
from .program import OPS, Decoder, Run, Terminator, call_target, op


def _label(d: Decoder, ins: Instruction, name: str) -> int:
    place = ins.scope.label(name) if ins.scope is not None else None
    if place is None:
        raise d.syntax(ins, f"no label {name!r}")
    return d.start + place


@op("bra")
def bra(d: Decoder, ins: Instruction) -> Any:
    target = ins.operands[0]
    if not isinstance(target, Sym):
        raise d.syntax(ins, "expected a label")
    place = _label(d, ins, target.name)
    return Terminator(lambda b, pc: place)


@op("brx")
def brx(d: Decoder, ins: Instruction) -> Any:
    table = ins.operands[1]
    if not isinstance(table, Sym) or ins.scope is None:
        raise d.syntax(ins, "expected a list of branch targets")
    row = d.src(ins, ins.operands[0], "u32")
    names = ins.scope.table(table.name)
    if names is None:
        raise d.syntax(ins, f"no list of branch targets {table.name!r}")
    places = np.array([_label(d, ins, name) for name in names])

    def run(b: Any, pc: int) -> Any:
        index = b.indices()
        which = b.rows["u32"][row][index]
        if which.max() >= places.size:
            b.fail(Trap, "brx.idx past the end of its table", int(which.argmax()))
        chosen = places[which]
        return [(int(place), b.normal(index[chosen == place])) for place in np.unique(chosen)]

    return Terminator(run)


def _exit(b: Any, pc: int) -> Any:
    index = b.indices()
    b.retire(b.sel)
    if not b.barriers.open:
        return []
    return b.barriers.merge(b.barriers.settle(set(np.unique(index // b.block_lanes).tolist())))


@op("exit")
def exit_(d: Decoder, ins: Instruction) -> Any:
    return Terminator(_exit)


@op("ret")
def ret(d: Decoder, ins: Instruction) -> Any:
    if d.function.entry:
        return Terminator(_exit)
    row = d.returns[d.function.name]
    sites = d.call_sites

    def run(b: Any, pc: int) -> Any:
        index = b.indices()
        callers = b.rows["u32"][row][index]
        result = []
        for caller in np.unique(callers):
            back = index[callers == caller]
            for source, target, size in sites[int(caller)]:
                _copy_local(b, back, source, target, size)
            result.append((int(caller) + 1, b.normal(back)))
        return result

    return Terminator(run)


def _copy_local(b: Any, index: Any, source: int, target: int, size: int) -> None:
    frame = b.local.reshape(b.n, -1)
    frame[index, target : target + size] = frame[index, source : source + size]


@op("call")
def call(d: Decoder, ins: Instruction) -> Any:
    target = call_target(ins)
    if target is None:
        raise d.unsupported(ins, "an indirect call")
    name = target.name
    callee = d.module.functions.get(name)
    if callee is None or callee.body is None:

        def missing(b: Any, pc: int) -> Any:
            if name == "__assertfail":
                b.fail(Trap, "an assertion of the kernel failed", 0)
            raise d.unsupported(ins, f"{name} is not defined in this module")

        return Terminator(missing)
    before = [o for o in ins.operands[: ins.operands.index(target)] if isinstance(o, Group)]
    after = [o for o in ins.operands[ins.operands.index(target) + 1 :] if isinstance(o, Group)]
    given = _parameters(d, ins, after[0].items if after else ())
    taken = _parameters(d, ins, before[0].items if before else ())
    if len(given) != len(callee.params) or len(taken) != len(callee.returns):
        raise d.syntax(ins, f"{name} takes {len(callee.params)} parameters and returns {len(callee.returns)}")
    copies = [(v.offset, p.offset, p.size) for v, p in zip(given, callee.params, strict=True)]
    here = len(d.program.code)
    d.call_sites[here] = [(r.offset, v.offset, r.size) for v, r in zip(taken, callee.returns, strict=True)]
    row = d.returns[name]
    start = d.starts[name]

    def run(b: Any, pc: int) -> Any:
        index = slice(None) if b.sel is None else b.sel
        for source, destination, size in copies:
            _copy_local(b, index, source, destination, size)
        b.rows["u32"][row][index] = pc
        return start

    return Terminator(run)


def _parameters(d: Decoder, ins: Instruction, items: tuple[Operand, ...]) -> list[Variable]:
    found = []
    for item in items:
        if not isinstance(item, Sym) or item.variable is None or item.variable.space != "param":
            raise d.unsupported(ins, "an argument that is no .param variable")
        found.append(item.variable)
    return found


@op("trap", "brkpt")
def trap(d: Decoder, ins: Instruction) -> Any:
    def run(b: Any, pc: int) -> Any:
        b.fail(Trap, f"{ins.op} executed", 0)

    return Terminator(run)


@op("nanosleep")
def nanosleep(d: Decoder, ins: Instruction) -> Any:
    def run(b: Any, pc: int) -> Any:
        # give way: whoever is waited for may be a group further on
        b.impatient = True
        return pc + 1

    return Terminator(run)


# --- barriers


@op("bar", "barrier")
def bar(d: Decoder, ins: Instruction) -> Run | Terminator:
    mods = [m for m in ins.mods if m not in ("cta", "aligned")]
    if mods[0] == "warp":
        return warp_barrier(d, ins)
    if mods[0] == "cluster":
        cluster: Terminator = OPS["barrier.cluster"](d, ins)
        return cluster
    aligned = ins.op == "bar" or "aligned" in ins.mods
    kind = mods[0]
    operands = list(ins.operands)
    vote = None
    if kind == "red":
        operation = next(m for m in mods if m in ("popc", "and", "or"))
        target = d.dst(ins, operands.pop(0), "u32" if operation == "popc" else "pred")
        vote = (operation, target, *d.predicate(ins, operands.pop()))
    name = d.src(ins, operands[0] if operands else Imm(0, "int"), "u32")
    count = d.src(ins, operands[1], "u32") if len(operands) > 1 else None

    def run(b: Any, pc: int) -> Any:
        sel = slice(None) if b.sel is None else b.sel
        b.counts["barriers"] += b.active_warps()
        names = b.rows["u32"][name][sel]
        counts = None if count is None else b.rows["u32"][count][sel]
        ballot = None
        if vote is not None:
            ballot = (vote[0], vote[1], b.rows["pred"][vote[2]][sel] ^ vote[3])
        if names.max() > 15:
            b.fail(Trap, "a barrier number above 15", int(names.argmax()))
        return b.barriers.arrive(pc, names, counts, kind, aligned, ballot)

    return Terminator(run)


def warp_barrier(d: Decoder, ins: Instruction) -> Run:
    mask = d.src(ins, ins.operands[0], "b32")

    def run(b: Any) -> None:
        if b.sel is not None:
            b.converge(b.rows["u32"][mask][b.sel])
        b.ordered_warps()

    return run
