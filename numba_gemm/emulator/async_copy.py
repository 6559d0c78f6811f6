"""`cp.async` and its groups (PTX ISA 9.7.9.25)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

from .bulk_copy import bulk
from .dependence import check_access
from .memory_ops import address_of, count_global
from .module import Imm, Instruction, Reg
from .program import Decoder, Run, op


@op("cp")
def cp(d: Decoder, ins: Instruction) -> Run:
    mods = ins.mods
    if mods[:2] == ("async", "bulk"):
        return bulk(d, ins)
    if mods[0] != "async" or {"bulk", "mbarrier", "reduce"} & set(mods):
        raise d.unsupported(ins)
    if "commit_group" in mods:

        def commit(b: Any) -> None:
            b.async_group[slice(None) if b.sel is None else b.sel] += 1

        return commit
    if "wait_all" in mods or "wait_group" in mods:
        keep = -1
        if "wait_group" in mods:
            count = ins.operands[0]
            if not isinstance(count, Imm):
                raise d.syntax(ins, "the number of groups must be an immediate")
            keep = int(count.value)

        def wait(b: Any) -> None:
            threshold = np.full(b.n, -1, np.int64)
            sel = slice(None) if b.sel is None else b.sel
            threshold[sel] = b.async_group[sel] - keep
            b.shared.complete(threshold)

        return wait
    return copy(d, ins)


def copy(d: Decoder, ins: Instruction) -> Run:
    target = d.address(ins, ins.operands[0])
    source = d.address(ins, ins.operands[1])
    amount = ins.operands[2]
    if not isinstance(amount, Imm) or amount.value not in (4, 8, 16):
        raise d.syntax(ins, "the size must be 4, 8 or 16")
    size = int(amount.value)
    if "cg" in ins.mods and size != 16:
        raise d.syntax(ins, "cp.async.cg copies 16 bytes")
    extra = list(ins.operands[3:])
    if any(m.endswith("cache_hint") for m in ins.mods):
        extra.pop()
    limit: int | None = None
    ignore: tuple[int, bool] | None = None
    if extra:
        operand = extra[0]
        if (isinstance(operand, Reg) and operand.reg.bits == 1) or type(operand).__name__ == "Not":
            ignore = d.predicate(ins, operand)
        else:
            limit = d.src(ins, operand, "u32")
    width, words = (4, 1) if size == 4 else (8, size // 8)

    def run(b: Any) -> None:
        sel = b.sel
        index = b.indices()
        take = np.full(index.size, size, np.int64)
        if limit is not None:
            take = np.minimum(b.rows["u32"][limit][index].astype(np.int64), size)
        elif ignore is not None:
            take = np.where(b.rows["pred"][ignore[0]][index] ^ ignore[1], 0, size)
        destination = address_of(b, *target)
        origin = address_of(b, *source)
        shared = b.shared
        flat = shared.place(b, destination, size, sel)
        cells = shared.cells(flat, size)
        data = fetch(b, origin, take, size, width, words)
        shared.check_write(b, cells, sel, destination, data, pending=True)
        view = shared.data.view(f"u{width}")
        (view.reshape(-1, words) if words > 1 else view)[flat >> (size.bit_length() - 1)] = data
        shared.pending.append((index, b.async_group[index], cells))
        b.counts["async_copies"] += b.active_warps()

    return run


def fetch(b: Any, origin: np.ndarray, take: np.ndarray, size: int, width: int, words: int) -> np.ndarray:
    """Read `take` bytes for each lane, zeros after them."""
    check_access(b)
    if (take == size).all():
        data = b.memory.load(b, origin.view(np.uint64), width, words)
        count_global(b, "load", origin)
        return data
    octets = np.zeros((origin.size, size), np.uint8)
    saved, index = b.sel, b.indices()
    for amount in np.unique(take):
        if not amount:
            continue
        lanes = np.flatnonzero(take == amount)
        b.sel = index[lanes]
        if amount == size:
            data = b.memory.load(b, origin[lanes].view(np.uint64), width, words)
            octets[lanes] = data.reshape(lanes.size, -1).view(np.uint8)
        else:
            for byte in range(int(amount)):
                octets[lanes, byte] = b.memory.load(b, (origin[lanes] + byte).view(np.uint64), 1, 1)
        count_global(b, "load", origin[lanes])
    b.sel = saved
    result = octets.view(f"u{width}")
    return result if words > 1 else result[:, 0]
