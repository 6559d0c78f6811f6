"""Loads, stores and what merely hints at them (PTX ISA 9.7.9)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

from .banks import by_warp, global_sectors, shared_wavefronts
from .dependence import check_access
from .hazards import Misaligned, OutOfBounds
from .memory import LOCAL_WINDOW, SHARED_WINDOW, UINT, WINDOW_MASK
from .module import WIDTHS, Addr, Instruction, Operand, Reg, Sink, Sym, Vec
from .program import OPS, Decoder, Run, op

_SPACES = ("global", "shared", "local", "param", "const")
_MASK = np.uint64(WINDOW_MASK)
_SHARED = np.uint64(SHARED_WINDOW)
_LOCAL = np.uint64(LOCAL_WINDOW)


def space_of(ins: Instruction) -> str:
    """The state space of an access; "generic" if the instruction names none, "cluster" for shared::cluster."""
    for mod in ins.mods:
        stem, _, where = mod.partition("::")
        if stem in _SPACES:
            if where == "cluster":
                return "cluster"
            if where not in ("", "cta", "entry", "func"):
                break
            return stem
    return "generic"


def address_of(b: Any, key: str, row: int, offset: int) -> np.ndarray:
    """The active lanes' addresses as int64."""
    base = b.rows[key][row]
    if b.sel is not None:
        base = base[b.sel]
    address = base.astype(np.int64) if key == "u32" else base.view(np.int64)
    return address + offset if offset else address


# --- counting


def remembered(b: Any, tag: str, key: np.ndarray) -> Any:
    """What was counted last time at this instruction, if the lanes and the pattern are the same."""
    old = b.patterns.get((b.pc, tag))
    if old is None:
        return None
    sel = b.sel
    if old[0] is not sel and (old[0] is None or sel is None or not np.array_equal(old[0], sel)):
        return None
    return old[2] if np.array_equal(old[1], key) else None


def count_shared(b: Any, verb: str, address: np.ndarray, size: int) -> None:
    key = address - address[0]
    found = remembered(b, "shared", key)
    if found is None:
        grid, active = by_warp(address, b.sel)
        passes, ideal = shared_wavefronts(grid, active, size, store=verb == "store")
        found = (grid.shape[0], passes, passes - ideal)
        b.patterns[(b.pc, "shared")] = (b.sel, key, found)
    counts = b.counts
    counts[f"shared_{verb}_requests"] += found[0]
    counts[f"shared_{verb}_wavefronts"] += found[1]
    counts[f"shared_{verb}_conflicts"] += found[2]


def count_global(b: Any, verb: str, address: np.ndarray) -> None:
    # what matters is where in its sector each address lies
    key = address - (address[0] & ~np.int64(31))
    found = remembered(b, "global", key)
    if found is None:
        grid, _ = by_warp(address.view(np.uint64), b.sel)
        found = (grid.shape[0], global_sectors(grid))
        b.patterns[(b.pc, "global")] = (b.sel, key, found)
    b.counts[f"global_{verb}_requests"] += found[0]
    b.counts[f"global_{verb}_sectors"] += found[1]


# --- access by space


def local_place(b: Any, address: np.ndarray, size: int, sel: Any) -> np.ndarray:
    if size > 1 and (address & (size - 1)).any():
        b.fail(Misaligned, f"{size}-byte access", int(np.flatnonzero(address & (size - 1))[0]), "local", address)
    if address.min() < 0 or address.max() > b.local_bytes - size:
        lane = int(np.flatnonzero((address < 0) | (address > b.local_bytes - size))[0])
        b.fail(OutOfBounds, f"{size}-byte access", lane, "local", address)
    return address + (b.local_base if sel is None else b.local_base[sel])


def split_generic(b: Any, address: np.ndarray) -> list[tuple[str, Any]]:
    """[(space, positions or None for all)] of generic addresses."""
    window = address.view(np.uint64) & _MASK
    first = window[0]
    names = {0: "global", SHARED_WINDOW: "cluster" if b.proxied else "shared", LOCAL_WINDOW: "local"}
    if (window == first).all():
        return [(names.get(int(first), "global"), None)]
    return [(names.get(int(value), "global"), np.flatnonzero(window == value)) for value in np.unique(window)]


def load(b: Any, space: str, address: np.ndarray, width: int, words: int) -> np.ndarray:
    """Gather for the active lanes: [lanes] or [lanes, words] unsigned integers of `width` bytes."""
    size = width * words
    if space == "generic":
        parts = split_generic(b, address)
        plain = address & ~np.int64(WINDOW_MASK)
        if parts[0][1] is None:
            return load(b, parts[0][0], address if parts[0][0] == "global" else plain, width, words)
        result = np.zeros((address.size, words) if words > 1 else address.size, UINT[width])
        index, saved = b.indices(), b.sel
        for name, positions in parts:
            b.sel = index[positions]
            result[positions] = load(b, name, (address if name == "global" else plain)[positions], width, words)
        b.sel = saved
        return result
    if space == "global":
        check_access(b)
        data = b.memory.load(b, address.view(np.uint64), width, words)
        count_global(b, "load", address)
        return data
    if space == "const":
        return b.memory.load(b, address.view(np.uint64), width, words)
    if space in ("shared", "cluster"):
        shared = b.shared
        place = shared.place if space == "shared" else shared.place_cluster
        flat = place(b, address, size, b.sel)
        shared.check_read(b, shared.cells(flat, size), b.sel, address)
        count_shared(b, "load", address, size)
        return shared.view(width, words)[flat >> (size.bit_length() - 1)]
    flat = local_place(b, address, size, b.sel)
    if space == "local":
        b.counts["local_load_requests"] += b.active_warps()
    view = b.local.view(UINT[width])
    return (view.reshape(-1, words) if words > 1 else view)[flat >> (size.bit_length() - 1)]


def store(b: Any, space: str, address: np.ndarray, values: np.ndarray, width: int, words: int) -> None:
    """Scatter from the active lanes."""
    size = width * words
    if space == "generic":
        parts = split_generic(b, address)
        plain = address & ~np.int64(WINDOW_MASK)
        if parts[0][1] is None:
            return store(b, parts[0][0], address if parts[0][0] == "global" else plain, values, width, words)
        index, saved = b.indices(), b.sel
        for name, positions in parts:
            b.sel = index[positions]
            store(b, name, (address if name == "global" else plain)[positions], values[positions], width, words)
        b.sel = saved
        return None
    if space == "global":
        check_access(b)
        b.memory.store(b, address.view(np.uint64), values, width, words)
        count_global(b, "store", address)
    elif space in ("shared", "cluster"):
        shared = b.shared
        place = shared.place if space == "shared" else shared.place_cluster
        flat = place(b, address, size, b.sel)
        shared.check_write(b, shared.cells(flat, size), b.sel, address, values)
        count_shared(b, "store", address, size)
        shared.view(width, words)[flat >> (size.bit_length() - 1)] = values
    else:
        flat = local_place(b, address, size, b.sel)
        if space == "local":
            b.counts["local_store_requests"] += b.active_warps()
        view = b.local.view(UINT[width])
        (view.reshape(-1, words) if words > 1 else view)[flat >> (size.bit_length() - 1)] = values
    return None


# --- instructions


def _registers(d: Decoder, ins: Instruction, operand: Operand, kind: str, reading: bool) -> list[tuple[str, int]]:
    """(key, row) of the data registers, which may be wider than the type."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    signed = kind[0] == "s"
    found = []
    for item in items:
        if isinstance(item, Reg):
            if item.reg.bits < WIDTHS[kind]:
                raise d.syntax(ins, f"register {item.reg.name} is too narrow")
            key = f"{'s' if signed and not reading else 'u'}{item.reg.bits}"
            found.append((key, d.row_of(item.reg)))
        elif isinstance(item, Sink) and not reading:
            found.append((f"u{max(16, WIDTHS[kind])}", d.new_row(max(16, WIDTHS[kind]))))
        else:
            found.append((f"u{max(16, WIDTHS[kind])}", d.src(ins, item, kind)))
    return found


def _shape(d: Decoder, ins: Instruction, registers: list[tuple[str, int]], kind: str) -> tuple[int, int]:
    width, words = WIDTHS[kind] // 8, len(registers)
    if width * words > 16 or words not in (1, 2, 4):
        raise d.unsupported(ins, f"an access of {words} x {width} bytes")
    return width, words


@op("ld", "ldu")
def ld(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    if kind == "b128":
        raise d.unsupported(ins)
    space = space_of(ins)
    if space == "param" and d.function.entry:
        constant = _kernel_parameter(d, ins, kind)
        if constant is not None:
            return constant
    targets = _registers(d, ins, ins.operands[0], kind, False)
    width, words = _shape(d, ins, targets, kind)
    key, row, offset = d.address(ins, ins.operands[1])
    signed = f"i{width}" if kind[0] == "s" else None

    def run(b: Any) -> None:
        data = load(b, space, address_of(b, key, row, offset), width, words)
        if signed is not None:
            data = data.view(signed)
        sel = slice(None) if b.sel is None else b.sel
        if words == 1:
            k, r = targets[0]
            b.rows[k][r][sel] = data
        else:
            for i, (k, r) in enumerate(targets):
                b.rows[k][r][sel] = data[:, i]

    return run


def _kernel_parameter(d: Decoder, ins: Instruction, kind: str) -> Run | None:
    """A load of a kernel's parameter by name: the same for all threads."""
    address = ins.operands[1]
    if not (isinstance(address, Addr) and isinstance(address.base, Sym)):
        return None
    variable = address.base.variable
    if variable is None or variable not in d.program.kernel.params:
        return None
    targets = _registers(d, ins, ins.operands[0], kind, False)
    width = WIDTHS[kind] // 8
    start = variable.offset + address.offset
    dtype = f"{'i' if kind[0] == 's' else 'u'}{width}"
    if start < 0 or start + width * len(targets) > d.program.param_bytes:
        raise d.syntax(ins, "the load lies outside the kernel's parameters")

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        for i, (key, row) in enumerate(targets):
            b.rows[key][row][sel] = np.frombuffer(b.launch.params, dtype, 1, start + i * width)[0]

    return run


@op("st")
def st(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    if ins.mods[0] == "async":
        return OPS["st.async"](d, ins)
    if kind == "b128" or "async" in ins.mods or "bulk" in ins.mods:
        raise d.unsupported(ins)
    space = space_of(ins)
    sources = _registers(d, ins, ins.operands[1], kind, True)
    width, words = _shape(d, ins, sources, kind)
    key, row, offset = d.address(ins, ins.operands[0])
    dtype = UINT[width]

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        if words == 1:
            k, r = sources[0]
            values = b.rows[k][r][sel].astype(dtype, copy=False)
        else:
            first = b.rows[sources[0][0]][sources[0][1]][sel]
            values = np.empty((first.size, words), dtype)
            values[:, 0] = first
            for i in range(1, words):
                k, r = sources[i]
                values[:, i] = b.rows[k][r][sel]
        store(b, space, address_of(b, key, row, offset), values, width, words)

    return run


def _nothing(b: Any) -> None:
    """Hints have no effect on results."""


@op("prefetch", "prefetchu", "applypriority", "discard", "nop")
def hint(d: Decoder, ins: Instruction) -> Run:
    return _nothing


@op("createpolicy")
def createpolicy(d: Decoder, ins: Instruction) -> Run:
    row = d.dst(ins, ins.operands[0], "b64")

    def run(b: Any) -> None:
        b.rows["u64"][row][slice(None) if b.sel is None else b.sel] = 0

    return run
