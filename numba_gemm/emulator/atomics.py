"""atom and red (PTX ISA 9.7.13.13, 9.7.13.14)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

from .dependence import check_access
from .float_ops import FLOATS, Kind
from .hazards import OutOfBounds, UninitialisedRead
from .memory import UINT, WINDOW_MASK
from .memory_ops import address_of, space_of, split_generic
from .module import WIDTHS, Instruction, Sink, Vec
from .program import Decoder, Run, op
from .rounding import sum_odd

_OPERATIONS = ("add", "inc", "dec", "min", "max", "and", "or", "xor", "exch", "cas")


def combine(name: str, kind: str, old: np.ndarray, a: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """What an operation stores, from unsigned images of the old value and the operands."""
    if name == "exch":
        return a
    if name == "cas":
        assert c is not None
        return np.where(old == a, c, old)
    if kind in FLOATS:
        return _combine_float(name, kind, old, a)
    dtype = f"{'i' if kind[0] == 's' else 'u'}{WIDTHS[kind] // 8}"
    x, y = old.view(dtype), a.view(dtype)
    if name == "inc":
        result = np.where(x >= y, x.dtype.type(0), x + x.dtype.type(1))
    elif name == "dec":
        result = np.where((x == 0) | (x > y), y, x - x.dtype.type(1))
    else:
        function = {
            "add": np.add, "min": np.minimum, "max": np.maximum,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[name]  # fmt: skip
        result = function(x, y)
    return result.view(old.dtype)


def _combine_float(name: str, kind: str, old: np.ndarray, a: np.ndarray) -> np.ndarray:
    form = Kind(kind)
    dtype = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}[form.base]
    x = np.ascontiguousarray(old).view(dtype)
    y = np.ascontiguousarray(a).view(dtype)
    if form.base == "f64":
        result = {"add": np.add, "min": np.fmin, "max": np.fmax}[name](x, y)
    elif name == "add":
        dummy = Instruction("add", (), [], None, False, 0)
        result = form.finish(sum_odd(form.widen(x), form.widen(y)), "rn", dummy)
    else:
        wide = {"min": np.fmin, "max": np.fmax}[name](form.widen(x), form.widen(y))
        result = form.pack(wide)
    return np.ascontiguousarray(result).view(old.dtype).reshape(old.shape)


@op("atom", "red")
def atom(d: Decoder, ins: Instruction) -> Run:
    name = next((m for m in ins.mods if m in _OPERATIONS), None)
    kind = ins.mods[-1]
    operands = list(ins.operands)
    if name is None or "async" in ins.mods or kind == "b128" or any(isinstance(o, Vec) for o in operands):
        raise d.unsupported(ins)
    target = d.dst(ins, operands.pop(0) if ins.op == "atom" else Sink(), kind)
    key, row, offset = d.address(ins, operands[0])
    values = [d.src(ins, o, kind) for o in operands[1 : 3 if name == "cas" else 2]]
    space = space_of(ins)
    if space == "cluster":
        raise d.unsupported(ins, "atomics on another block's shared memory")
    bits = WIDTHS[kind]
    width = bits // 8
    register = f"u{bits}"

    def run(b: Any) -> None:
        index = b.indices()
        address = address_of(b, key, row, offset)
        given = [b.rows[register][v][index] for v in values]
        parts = split_generic(b, address) if space == "generic" else [(space, None)]
        saved = b.sel
        b.counts["atomics"] += b.active_warps()
        for where, positions in parts:
            chosen = slice(None) if positions is None else positions
            b.sel = saved if positions is None else index[positions]
            plain = address[chosen]
            if space == "generic" and where != "global":
                plain = plain & ~np.int64(WINDOW_MASK)
            old = apply(b, where, plain, [g[chosen] for g in given], name, kind, width)
            b.rows[register][target][index[chosen]] = old
        b.sel = saved

    return run


def apply(
    b: Any, space: str, address: np.ndarray, given: list[np.ndarray], name: str, kind: str, width: int
) -> np.ndarray:
    """Perform the operation for the active lanes, one lane after the other where they share an address."""
    if space in ("shared", "cluster"):
        shared = b.shared
        flat = shared.place(b, address, width, b.sel)
        cells = shared.cells(flat, width)
        if name != "exch":
            unknown = shared.last[cells] == 0
            if unknown.any():
                lane = int(np.flatnonzero(unknown if unknown.ndim == 1 else unknown.any(axis=1))[0])
                b.fail(UninitialisedRead, "atomic on shared memory that nothing has written", lane, "shared", address)
        shared.check_write(b, cells, b.sel, address, None, atomic=True)
        return serialise([(shared.view(width, 1), flat >> (width.bit_length() - 1), None)], given, name, kind)
    if space != "global":
        b.fail(OutOfBounds, f"atomic on {space} memory; the ISA has them on global and shared", 0, space, address)
    check_access(b)
    unsigned = address.view(np.uint64)
    if name == "exch":
        pieces = b.memory.pieces(b, unsigned, width)
    else:
        b.memory.load(b, unsigned, width, 1)  # checks bounds, alignment and that something was written
        pieces = b.memory.pieces(b, unsigned, width)
    places = []
    for found, offsets, lanes in pieces:
        where = offsets >> (width.bit_length() - 1)
        places.append((found.view(width, 1), where, lanes))
        if found.known is not None:
            found.known.view(UINT[width])[where] = int.from_bytes(b"\1" * width, "little")
    return serialise(places, given, name, kind)


def serialise(
    places: list[tuple[np.ndarray, np.ndarray, Any]], given: list[np.ndarray], name: str, kind: str
) -> np.ndarray:
    result = np.empty_like(given[0])
    for view, where, lanes in places:
        mine = np.arange(where.size) if lanes is None else lanes
        order = np.argsort(where, kind="stable")
        ordered = where[order]
        fresh = np.ones(ordered.size, np.bool_)
        fresh[1:] = ordered[1:] != ordered[:-1]
        starts = np.flatnonzero(fresh)
        rank = np.arange(ordered.size) - starts[np.cumsum(fresh) - 1]
        for turn in range(int(rank.max()) + 1):
            now = order[rank == turn]
            operands = [g[mine[now]] for g in given]
            old = view[where[now]]
            view[where[now]] = combine(name, kind, old, operands[0], operands[1] if len(operands) > 1 else None)
            result[mine[now]] = old
    return result
