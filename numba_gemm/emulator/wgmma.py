"""`wgmma`: matrix products of four warps on operands in shared memory (PTX ISA 9.7.15).

The product is computed when the four warps have come together; until its group is waited for, its registers are in
flight and its operands in shared memory are being read. The arithmetic is `tensorcore.mma`, each K a single sum.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tensorcore
from .convergence import Park
from .hazards import DivergentBarrier, InvalidOperand, MissingWgmmaFence, OutOfBounds, RegistersInFlight
from .matrix_descriptor import Descriptor, chunk_addresses
from .module import Imm, Instruction, Not, Vec
from .program import Decoder, Run, op
from .proxies import ProxiedSharedMemory

if TYPE_CHECKING:
    from .batch import Batch

GROUP = 128
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1}
_RAW = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "s8": np.int8, "u8": np.uint8}
_TERMS = 1 << 17  # products in one call of tensorcore.mma, for the sake of the cache


class WarpgroupUnit:
    """What the `wgmma` of a batch have in flight.

    Operations are numbered by warpgroup. The registers that any `wgmma` of the program names have a place each;
    `accumulates[place, warp]` and `supplies[place, warp]` are the number of the last operation that used it as
    accumulator or as A, `touched` says that another instruction touched it since the last `wgmma.fence`, and
    `shape[place, warp]` is the N of the `wgmma` that accumulated in it since then.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        warps = batch.n >> 5
        places = len(batch.program.matrix_registers)
        self.accumulates = np.zeros((places, warps), np.int32)
        self.supplies = np.zeros((places, warps), np.int32)
        self.touched = np.ones((places, warps), np.bool_)
        self.shape = np.zeros((places, warps), np.int16)
        self.done = np.zeros(warps, np.int32)
        self.issued = np.zeros(warps, np.int32)
        self.groups: list[list[int]] = [[] for _ in range(warps)]
        self.last: tuple[Any, Any] = (None, slice(None))

    def warps(self) -> Any:
        """The active warps, as a selection."""
        sel = self.batch.sel
        if sel is None:
            return slice(None)
        if self.last[0] is not sel:
            self.last = (sel, np.unique(sel >> 5))
        return self.last[1]

    # --- registers

    def touch(self, places: np.ndarray, written: np.ndarray) -> None:
        """Another instruction is about to touch registers, and to write some of them."""
        warps = self.warps()
        done = self.done[warps]
        busy = self.accumulates[places][:, warps] > done
        if written.size:
            busy = np.concatenate([busy, self.supplies[written][:, warps] > done])
        if busy.any():
            index = self.batch.indices()
            raise self.batch.fault(
                RegistersInFlight, "a register that a wgmma still uses: wait for its group first,", int(index[0])
            )
        if isinstance(warps, slice):
            self.touched[places] = True
        else:
            self.touched[places[:, None], warps] = True

    def fence(self) -> None:
        self.touched[:, self.warps()] = False
        self.shape[:, self.warps()] = 0

    def use(self, lane: int, warps: slice, accumulators: np.ndarray, fragments: np.ndarray, n: int) -> int:
        """A `wgmma` of a warpgroup takes its registers; returns its number."""
        both = np.concatenate([accumulators, fragments])
        done = self.done[warps]
        if (self.accumulates[fragments, warps] > done).any() or (self.supplies[accumulators, warps] > done).any():
            raise self.batch.fault(
                RegistersInFlight,
                "registers of A that an earlier wgmma accumulates in, or an accumulator that one still reads as A:"
                " wait for its group first,",
                lane,
            )
        shape = self.shape[accumulators, warps]
        if self.touched[both, warps].any() or ((shape != 0) & (shape != n)).any():
            raise self.batch.fault(
                MissingWgmmaFence,
                "wgmma on registers that other instructions, or another shape of wgmma, used: no wgmma.fence since,",
                lane,
            )
        number = int(self.issued[warps].max()) + 1
        self.issued[warps] = number
        self.accumulates[accumulators, warps] = number
        self.supplies[fragments, warps] = number
        self.shape[accumulators, warps] = n
        return number

    # --- groups

    def commit(self, warps: np.ndarray) -> None:
        for warp in warps.tolist():
            self.groups[warp].append(int(self.issued[warp]))

    def wait(self, warps: np.ndarray, keep: int) -> None:
        shared: ProxiedSharedMemory = self.batch.shared  # type: ignore[assignment]
        for warp in warps.tolist():
            pending = self.groups[warp]
            if len(pending) > keep:
                number = pending[len(pending) - keep - 1]
                del pending[: len(pending) - keep]
                self.done[warp] = number
                shared.learn(warp, self.agent(warp), number)

    def agent(self, warp: int) -> int:
        shared: ProxiedSharedMemory = self.batch.shared  # type: ignore[assignment]
        rank, place = divmod(warp % shared.warps, shared.block_warps)
        return shared.agent("wgmma", rank * 8 + place // 4)

    # --- operands in shared memory

    def gather(
        self, lane: int, number: int, descriptor: Descriptor, rows: int, k: int, k_major: bool, element: str
    ) -> np.ndarray:
        """An operand as [rows, k], checked against who else touches it."""
        b = self.batch
        shared: ProxiedSharedMemory = b.shared  # type: ignore[assignment]
        size = _BYTES[element]
        address = chunk_addresses(descriptor, rows, k * size // 16 if k_major else k, k_major)
        if address.max() > shared.size - 16:
            raise b.fault(
                OutOfBounds,
                f"a wgmma operand beyond the {shared.size} bytes of shared memory,",
                lane,
                "shared",
                int(address.max()),
            )
        flat = address.reshape(-1) + lane // b.block_lanes * shared.stride
        cells = (flat[:, None] >> shared.cell_shift) + np.arange(16 >> shared.cell_shift)
        cells = cells.reshape(-1)
        first = lane >> 5
        shared.check_async(b, lane, list(range(first, first + 4)), cells, "read")
        shared.note_async_read(cells, self.agent(first), number)
        chunks = shared.view(8, 2)[flat >> 4].view(_RAW[element])
        if k_major:
            return chunks.reshape(rows, k)
        return chunks.reshape(rows // 8, k, 8).swapaxes(1, 2).reshape(rows, k)


def whole_warpgroups(b: Any) -> np.ndarray:
    """Wait for the lanes of the active warpgroups; returns them as [warpgroups, 128]."""
    index = b.indices()
    group = index // b.block_lanes * 8 + index % b.block_lanes // GROUP
    names, counts = np.unique(group, return_counts=True)
    if (counts != GROUP).any():
        short = names[counts != GROUP]
        waits = np.zeros(b.n >> 5, np.bool_)
        for name in short.tolist():
            start = name // 8 * b.block_lanes + name % 8 * GROUP
            lanes = slice(start, start + GROUP)
            if name % 8 * GROUP + GROUP > b.block_lanes or not b.live[lanes].all():
                lane = int(index[group == name][0])
                raise b.fault(
                    DivergentBarrier, "a wgmma in a warpgroup of which threads are missing or have exited,", lane
                )
            waits[start >> 5 : (start + GROUP) >> 5] = True
        raise Park(waits)
    return index.reshape(-1, GROUP)


# --- instructions


@op("wgmma")
def wgmma(d: Decoder, ins: Instruction) -> Run:
    if not d.module.target.startswith("sm_90a"):
        raise d.unsupported(ins, f"it needs .target sm_90a, not {d.module.target}")
    kind = ins.mods[0]
    if kind == "mma_async":
        return mma_async(d, ins)
    keep = 0
    if kind == "wait_group":
        if not isinstance(ins.operands[0], Imm):
            raise d.syntax(ins, "the number of groups must be an immediate")
        keep = int(ins.operands[0].value)
    elif kind not in ("fence", "commit_group"):
        raise d.unsupported(ins)

    def run(b: Any) -> None:
        b.converge()
        unit = b.warpgroups
        if kind == "fence":
            unit.fence()
            return
        warps = np.unique(b.indices() >> 5)
        if kind == "commit_group":
            unit.commit(warps)
        else:
            unit.wait(warps, keep)

    return run


def mma_async(d: Decoder, ins: Instruction) -> Run:
    shape = next(m for m in ins.mods if re.fullmatch(r"m64n\d+k\d+", m))
    n, k = (int(x) for x in re.findall(r"\d+", shape)[1:])
    types = [m for m in ins.mods if m in (*_BYTES, "f32", "s32")]
    if len(types) != 3 or "sp" in ins.mods:
        raise d.unsupported(ins)
    d_type, a_type, b_type = types
    if k * _BYTES[a_type] != 32 or n % 8 or not 8 <= n <= 256:
        raise d.syntax(ins, f"no shape {shape} for {a_type}")
    operands = list(ins.operands)
    accumulators = [d.row_of(o.reg) for o in d.vector(operands[0])]  # type: ignore[union-attr]
    packed = d_type == "f16"
    if len(accumulators) != (n // 4 if packed else n // 2):
        raise d.syntax(ins, f"the accumulator takes {n // 4 if packed else n // 2} registers, not {len(accumulators)}")
    places = d.program.matrix_registers
    acc_places = np.array([places[id(o.reg)] for o in d.vector(operands[0])])  # type: ignore[union-attr]
    from_registers = isinstance(operands[1], Vec)
    fragments = [d.src(ins, o, "b32") for o in d.vector(operands[1])] if from_registers else []
    a_places = np.array([places[id(o.reg)] for o in d.vector(operands[1])] if from_registers else [], np.int64)  # type: ignore[union-attr]
    if from_registers and len(fragments) != 4:
        raise d.syntax(ins, "A takes 4 registers")
    a_row = -1 if from_registers else d.src(ins, operands[1], "b64")
    b_row = d.src(ins, operands[2], "b64")
    rest = operands[3:]
    scale: Any = None
    if rest:
        first = rest.pop(0)
        scale = bool(first.value) if isinstance(first, Imm) else d.predicate(ins, first)
        if isinstance(first, Not):
            raise d.syntax(ins, "a negated scale-d")
    numbers = [int(o.value) for o in rest if isinstance(o, Imm)]
    wide = _BYTES[a_type] == 2
    expected = 0 if d_type == "s32" else 2 + (wide and not from_registers) + wide
    if len(numbers) != len(rest) or len(numbers) != expected:
        raise d.syntax(ins, f"expected {expected} immediates after scale-d")
    scale_a, scale_b, *transposed = numbers or [1, 1]
    b_transposed = bool(transposed.pop()) if transposed else False
    a_transposed = bool(transposed.pop()) if transposed else False
    saturate = "satfinite" in ins.mods
    block = _consecutive(accumulators)

    def descriptors(b: Any, lanes: np.ndarray, row: int) -> Descriptor:
        bits = b.rows["u64"][row][lanes]
        if (bits != bits[0]).any():
            raise b.fault(InvalidOperand, "a matrix descriptor that differs within the warpgroup,", int(lanes[0]))
        return Descriptor.of(int(bits[0]))

    def run(b: Any) -> None:
        unit = b.warpgroups
        groups = whole_warpgroups(b)
        for lanes in groups:
            lane = int(lanes[0])
            span = slice(lane, lane + GROUP)
            number = unit.use(lane, slice(lane >> 5, (lane >> 5) + 4), acc_places, a_places, n)
            keep = scale if not isinstance(scale, tuple) else b.rows["pred"][scale[0]][span]
            if isinstance(scale, tuple):
                if keep.any() != keep.all():
                    raise b.fault(InvalidOperand, "scale-d differs within the warpgroup,", lane)
                keep = bool(keep[0])
            if from_registers:
                a = _fragment(b, fragments, span, a_type)
            else:
                a = unit.gather(lane, number, descriptors(b, lanes, a_row), 64, k, not a_transposed, a_type)
            right = unit.gather(lane, number, descriptors(b, lanes, b_row), n, k, not b_transposed, b_type).T
            if scale_a == -1:
                a = _negated(a)
            if scale_b == -1:
                right = _negated(right)
            held = _read_rows(b, accumulators, block, span)
            c = _to_matrix(held, n, packed) if keep is not False else _zeros(n, d_type)
            result = product(a, right, c, a_type, b_type, d_type, b.launch.arch, saturate)
            _write_rows(b, accumulators, block, span, _from_matrix(result, n))
        b.counts["wgmma_instructions"] += 4 * groups.shape[0]

    return run


def product(
    a: np.ndarray, right: np.ndarray, c: np.ndarray, a_type: str, b_type: str, d_type: str, arch: str, saturate: bool
) -> np.ndarray:
    """D = A · B + C on raw bits, [64, k] by [k, n]."""
    k, n = right.shape
    step = max(1, min(64, _TERMS // (k * n)))
    types: dict[str, Any] = {"a_type": a_type, "b_type": b_type, "acc_type": d_type, "d_type": d_type}
    parts = []
    for start in range(0, 64, step):
        rows = slice(start, start + step)
        parts.append(tensorcore.mma(a[rows], right, c[rows], arch=arch, saturate=saturate, **types))
    return np.concatenate(parts)


def _zeros(n: int, d_type: str) -> np.ndarray:
    return np.zeros((64, n), {"f16": np.uint16, "s32": np.int32}.get(d_type, np.uint32))


def _negated(values: np.ndarray) -> np.ndarray:
    return values ^ values.dtype.type(1 << (8 * values.dtype.itemsize - 1))


def _consecutive(rows: list[int]) -> slice | None:
    """The rows as one slice of the register file, where they are one."""
    first = rows[0]
    return slice(first, first + len(rows)) if rows == list(range(first, first + len(rows))) else None


def _read_rows(b: Any, rows: list[int], block: slice | None, lanes: slice) -> np.ndarray:
    file = b.rows.arrays[32]
    return file[block, lanes] if block is not None else file[rows, lanes]


def _write_rows(b: Any, rows: list[int], block: slice | None, lanes: slice, values: np.ndarray) -> None:
    file = b.rows.arrays[32]
    if block is not None:
        file[block, lanes] = values
    else:
        file[rows, lanes] = values


def _to_matrix(held: np.ndarray, n: int, packed: bool) -> np.ndarray:
    """Registers [registers, 128 lanes] to the 64 x n accumulator.

    Lane 4 g + t of warp w holds, for each 8 columns, columns 2 t and 2 t + 1 of rows 16 w + g and 16 w + g + 8.
    """
    if packed:
        pairs = np.ascontiguousarray(held.T).view(np.uint16).reshape(4, 8, 4, n // 8, 2, 2)
    else:
        pairs = held.T.reshape(4, 8, 4, n // 8, 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 4, 1, 3, 2, 5)).reshape(64, n)


def _from_matrix(matrix: np.ndarray, n: int) -> np.ndarray:
    pairs = np.ascontiguousarray(matrix.reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)).reshape(GROUP, -1)
    return pairs.view(np.uint32).T


def _fragment(b: Any, rows: list[int], lanes: slice, element: str) -> np.ndarray:
    """A from registers: [64, k]. Registers 0 to 3 hold rows g, g + 8, g, g + 8; the last two the upper half of K."""
    held = b.rows.arrays[32][rows, lanes].T  # [128 lanes, 4]
    per = 4 // _BYTES[element]
    parts = np.ascontiguousarray(held).view(_RAW[element]).reshape(4, 8, 4, 2, 2, per)
    return np.ascontiguousarray(parts.transpose(0, 4, 1, 3, 2, 5)).reshape(64, 8 * per)
