"""Bulk copies and their groups: `cp.async.bulk` and `cp.async.bulk.tensor` (PTX ISA 9.7.9.25.4 to 9.7.9.27).

A copy moves its bytes when it is issued; what makes it asynchronous is what the others know of it. A load belongs to
the phase of the mbarrier that it signals, a store to its thread's bulk groups.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .dependence import check_lane
from .errors import EmulatorError
from .hazards import EarlyExit, InvalidOperand, Misaligned, OutOfBounds, UninitialisedRead
from .mbarrier import target_of
from .memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_MASK
from .memory_ops import address_of
from .module import Addr, Imm, Instruction, Vec
from .program import Decoder, Run
from .proxies import ProxiedSharedMemory
from .tensor_map import MAP_BYTES, SPANS, TensorMap, decode, swizzled

if TYPE_CHECKING:
    from .batch import Batch


class BulkUnit:
    """The bulk copies of a batch's threads."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.committed = np.zeros(batch.n, np.int64)
        self.stores: dict[int, int] = {}  # by lane: how many it issued
        self.open: dict[int, list[tuple[int, int]]] = {}  # by lane: (group, number) of stores that may still read
        self.sent: list[tuple[int, int, int]] = []  # (block, agent, clock) of copies from a block's shared memory
        self.maps: dict[bytes, TensorMap] = {}

    @property
    def shared(self) -> ProxiedSharedMemory:
        return self.batch.shared  # type: ignore[return-value]

    # --- shared memory

    def cells(self, block: int, offset: int, nbytes: int) -> slice:
        shared = self.shared
        first = block * shared.stride + offset
        return slice(first >> shared.cell_shift, -(-(first + nbytes) // shared.cell))

    def check(self, lane: int, offset: int, nbytes: int, align: int, what: str) -> None:
        b = self.batch
        if offset % align:
            raise b.fault(Misaligned, f"{what} that must start at a multiple of {align} bytes", lane, "shared", offset)
        if offset < 0 or offset + nbytes > b.shared.size:
            raise b.fault(
                OutOfBounds,
                f"{what} of {nbytes} bytes, {b.shared.size} bytes of shared memory,",
                lane,
                "shared",
                offset,
            )

    def deliver(
        self, lane: int, block: int, offset: int, data: np.ndarray, signal: tuple[int, int], *, proxy: bool = True
    ) -> None:
        """Write bytes to a block's shared memory and complete them on the mbarrier at `signal` (block, offset)."""
        shared, barriers = self.shared, self.batch.mbarriers
        barrier = barriers.find(*signal, lane, proxy=proxy)
        tag = shared.agent_tag(barrier.agent, barrier.next_clock)
        shared.check_bulk_write(self.batch, lane, self.cells(block, offset, data.size), tag, proxy=proxy)
        first = block * shared.stride + offset
        shared.data[first : first + data.size] = data
        barrier.written = barrier.next_clock
        barriers.expect(barrier, lane, -data.size)

    def send(self, lane: int, source: int, data: np.ndarray, signal: tuple[int, int]) -> None:
        """A copy reads its own block's shared memory at `source` until the phase of its mbarrier ends."""
        barrier = self.batch.mbarriers.find(*signal, lane, proxy=True)
        block = lane // self.batch.block_lanes
        self.shared.note_async_read(self.cells(block, source, data.size), barrier.agent, barrier.next_clock)
        self.sent.append((block, barrier.agent, barrier.next_clock))

    def take(self, lane: int, block: int, offset: int, nbytes: int) -> np.ndarray:
        """Read bytes of shared memory for a store of `lane`."""
        shared = self.shared
        where = self.cells(block, offset, nbytes)
        shared.check_async(self.batch, lane, [int(shared.warp_index[lane])], where, "read")
        number = self.stores[lane] = self.stores.get(lane, 0) + 1
        shared.note_async_read(where, shared.agent("bulk", int(shared.thread[lane])), number)
        self.open.setdefault(lane, []).append((int(self.committed[lane]), number))
        first = block * shared.stride + offset
        return shared.data[first : first + nbytes]

    # --- groups

    def wait(self, lanes: np.ndarray, keep: int) -> None:
        """Lanes wait until at most `keep` of their groups may still read."""
        if not self.open:
            return
        shared = self.shared
        for lane in sorted(set(self.open) & set(lanes.tolist())):
            pending = self.open[lane]
            done = [number for group, number in pending if group < self.committed[lane] - keep]
            if done:
                agent = shared.agent("bulk", int(shared.thread[lane]))
                shared.learn(int(shared.warp_index[lane]), agent, done[-1])
                left = pending[len(done) :]
                if left:
                    self.open[lane] = left
                else:
                    del self.open[lane]

    def leave_block(self, block: int, lane: int) -> None:
        """All threads of a block have exited."""
        shared = self.shared
        rows = slice(block * shared.block_warps, (block + 1) * shared.block_warps)
        for source, agent, clock in self.sent:
            if source == block and clock > shared.seen[rows, shared.warps + agent].max():
                message = f"the block exits while {shared.agent_name(agent)} may still read its shared memory,"
                raise self.batch.fault(EarlyExit, message, lane)

    def leave(self, lanes: np.ndarray) -> None:
        """Lanes exit."""
        if self.open:
            late = set(self.open) & set(lanes.tolist())
            if late:
                raise self.batch.fault(
                    EarlyExit,
                    "the thread exits while its bulk store may still read shared memory: wait for its group first,",
                    min(late),
                )

    # --- tensor maps

    def map_at(self, lane: int, address: int) -> TensorMap:
        """The tensor map at a generic address."""
        b = self.batch
        window = address & WINDOW_MASK
        plain = address & ~WINDOW_MASK
        if plain % 64:
            raise b.fault(
                Misaligned,
                "a tensor map that must start at a multiple of 64 bytes",
                lane,
                "global" if window == 0 else "param",
                plain,
            )
        try:
            if window == LOCAL_WINDOW:
                if plain + MAP_BYTES > b.program.param_bytes:
                    raise EmulatorError("these bytes are no parameter of the kernel")
                frame = int(b.local_base[lane]) + plain
                data = b.local[frame : frame + MAP_BYTES].tobytes()
            elif window == SHARED_WINDOW:
                raise EmulatorError("a tensor map in shared memory is not supported")
            else:
                data = b.memory.read(address, np.uint8, MAP_BYTES).tobytes()
            found = self.maps.get(data)
            if found is None:
                found = self.maps[data] = b.machine.tensor_maps[decode(data)]
        except (EmulatorError, IndexError) as error:
            message = f"{error or 'no such tensor map'}: make it by Machine.tensor_map,"
            raise b.fault(InvalidOperand, message, lane, "global", plain) from None
        return found

    def window(self, lane: int, tensor: TensorMap, corner: list[int], *, stored: bool = False) -> Any:
        b = self.batch
        check_lane(b, lane)
        if len(corner) != len(tensor.dims):
            raise b.fault(
                InvalidOperand, f"{len(corner)} coordinates for a tensor map of {len(tensor.dims)} dimensions,", lane
            )
        try:
            return tensor.window(b.memory, corner, stored=stored)
        except EmulatorError as error:
            raise b.fault(OutOfBounds, f"the tensor map's elements: {error},", lane) from None

    def load_box(self, lane: int, tensor: TensorMap, corner: list[int]) -> np.ndarray:
        """The bytes of a box as they lie in shared memory."""
        place, data, known = self.window(lane, tensor, corner)
        box = tensor.empty_box()
        if data is not None:
            if known is not None and not known.all():
                raise self.batch.fault(
                    UninitialisedRead, f"the box at {tuple(corner)} reads memory that nothing has written", lane
                )
            box[place] = data
        octets = box.reshape(-1).view(np.uint8)
        span = SPANS[tensor.swizzle]
        if not span:
            return octets
        chunks = octets.reshape(-1, 16)
        result = np.empty_like(chunks)
        result[swizzled(chunks.shape[0], span)] = chunks
        return result.reshape(-1)

    def store_box(self, lane: int, tensor: TensorMap, corner: list[int], octets: np.ndarray) -> None:
        span = SPANS[tensor.swizzle]
        if span:
            chunks = octets.reshape(-1, 16)
            octets = chunks[swizzled(chunks.shape[0], span)]
        place, data, known = self.window(lane, tensor, corner, stored=True)
        if data is not None:
            box = np.ascontiguousarray(octets).reshape(-1).view(f"u{tensor.itemsize}").reshape(tensor.extent[::-1])
            data[...] = box[place]
            if known is not None:
                known[...] = 1


# --- instructions


def bulk(d: Decoder, ins: Instruction) -> Run:
    """`cp.async.bulk…`, called by the builder of `cp`."""
    mods = ins.mods
    if "commit_group" in mods:

        def commit(b: Any) -> None:
            b.bulk.committed[slice(None) if b.sel is None else b.sel] += 1

        return commit
    if "wait_group" in mods:
        count = ins.operands[0]
        if not isinstance(count, Imm):
            raise d.syntax(ins, "the number of groups must be an immediate")
        keep = int(count.value)
        return lambda b: b.bulk.wait(b.indices(), keep)
    if "prefetch" in mods:
        return lambda b: None
    if {"im2col", "im2col::w", "im2col_no_offs", "tile::gather4", "tile::scatter4"} & set(mods):
        raise d.unsupported(ins, "modes other than .tile")
    if "cp_mask" in mods or any(m.startswith("cta_group") for m in mods):
        raise d.unsupported(ins)
    spaces = [m for m in mods if m in ("global", "shared::cta", "shared::cluster")]
    dims = next((m for m in mods if re.fullmatch("[1-5]d", m)), None)
    if spaces[:1] == ["global"]:
        if spaces != ["global", "shared::cta"] or "bulk_group" not in mods:
            raise d.unsupported(ins)
        return store_tensor(d, ins) if dims else store_bytes(d, ins)
    if "mbarrier::complete_tx::bytes" not in mods or len(spaces) != 2:
        raise d.unsupported(ins)
    return load(d, ins, spaces, dims)


def _coordinates(d: Decoder, ins: Instruction, operand: Any, dims: str | None) -> tuple[Any, list[int]]:
    """(where the map's address is, rows of the coordinates) of `[map, {x, y}]`."""
    if not isinstance(operand, Addr) or len(operand.more) != 1:
        raise d.syntax(ins, "expected a tensor map and its coordinates in brackets")
    items = operand.more[0].items if isinstance(operand.more[0], Vec) else (operand.more[0],)
    if dims is None or len(items) != int(dims[0]):
        raise d.syntax(ins, f"{len(items)} coordinates")
    return d.address(ins, Addr(operand.base, operand.offset)), [d.src(ins, o, "s32") for o in items]


def _corner(b: Any, rows: list[int], lane: int) -> list[int]:
    return [int(b.rows["s32"][row][lane]) for row in rows]


def load(d: Decoder, ins: Instruction, spaces: list[str], dims: str | None) -> Run:
    operands = list(ins.operands)
    if any(m.startswith("L2::cache_hint") for m in ins.mods):
        operands.pop()
    multicast = "multicast::cluster" in ins.mods
    mask = d.src(ins, operands.pop(), "b16") if multicast else -1
    target = d.address(ins, operands[0])
    signal = d.address(ins, operands[-1])
    cluster = spaces[0] == "shared::cluster"
    if dims:
        if len(operands) != 3 or spaces[1] != "global":
            raise d.unsupported(ins)
        origin, coordinates = _coordinates(d, ins, operands[1], dims)
        size = -1
    else:
        if len(operands) != 4:
            raise d.unsupported(ins)
        origin, coordinates = d.address(ins, operands[1]), []
        size = d.src(ins, operands[2], "u32")
    local = spaces[1] == "shared::cta"
    name = "tensor" if dims else "bulk"

    def run(b: Any) -> None:
        unit = b.bulk
        lanes, blocks, offsets = target_of(b, target, False, cluster, 16, counted=True)
        _, signal_blocks, signals = target_of(b, signal, False, cluster, counted=True)
        sources = address_of(b, *origin)
        for place, lane in enumerate(lanes.tolist()):
            block, offset = int(blocks[place]), int(offsets[place])
            there, source = (int(signal_blocks[place]), int(signals[place])), int(sources[place])
            if local:
                source -= int(b.shared.window[lane])
            if there[0] != block:
                raise b.fault(InvalidOperand, "the mbarrier lies in another block than the data,", lane)
            if dims:
                tensor = unit.map_at(lane, source)
                data = unit.load_box(lane, tensor, _corner(b, coordinates, lane))
                align = tensor.alignment
            else:
                align = 16
                data = fetch(b, lane, source, int(b.rows["u32"][size][lane]), local)
            targets = [block]
            if multicast:
                first = block - block % b.shared.cluster
                chosen = int(b.rows["u16"][mask][lane])
                if not chosen or chosen >> b.shared.cluster:
                    raise b.fault(
                        InvalidOperand, f"multicast mask {chosen:#x} for a cluster of {b.shared.cluster},", lane
                    )
                targets = [first + rank for rank in range(b.shared.cluster) if chosen >> rank & 1]
            for one in targets:
                unit.check(lane, offset, data.size, align, "a box" if dims else "a bulk copy")
                b.shared.visit(b, lane, one)
                if local:
                    unit.send(lane, source, data, (one, there[1]))
                unit.deliver(lane, one, offset, data, (one, there[1]))
                b.counts[f"{name}_load_bytes"] += data.size
            b.counts[f"{name}_loads"] += 1

    return run


def fetch(b: Any, lane: int, source: int, size: int, local: bool) -> np.ndarray:
    """The bytes that a plain bulk copy reads, from global memory or the block's own shared memory."""
    if size % 16 or size <= 0:
        raise b.fault(InvalidOperand, f"a bulk copy of {size} bytes: it must be a multiple of 16,", lane)
    if local:
        unit = b.bulk
        block = lane // b.block_lanes
        unit.check(lane, source, size, 16, "a bulk copy")
        shared = b.shared
        shared.check_async(b, lane, [int(shared.warp_index[lane])], unit.cells(block, source, size), "read")
        first = block * shared.stride + source
        return shared.data[first : first + size].copy()
    if source % 16:
        raise b.fault(Misaligned, "a bulk copy from an address that is no multiple of 16", lane, "global", source)
    data, known = global_bytes(b, lane, source, size)
    if known is not None and not known.all():
        raise b.fault(UninitialisedRead, "a bulk copy of memory that nothing has written", lane, "global", source)
    return data


def global_bytes(b: Any, lane: int, address: int, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    check_lane(b, lane)
    try:
        return b.memory.strided(address, np.uint8, (size,), (1,))
    except EmulatorError:
        raise b.fault(OutOfBounds, f"a bulk copy of {size} bytes", lane, "global", address) from None


def store_bytes(d: Decoder, ins: Instruction) -> Run:
    target, source = d.address(ins, ins.operands[0]), d.address(ins, ins.operands[1])
    size = d.src(ins, ins.operands[2], "u32")

    def run(b: Any) -> None:
        unit = b.bulk
        lanes, blocks, offsets = target_of(b, source, False, False, 16)
        addresses = address_of(b, *target)
        for place, lane in enumerate(lanes.tolist()):
            count, address = int(b.rows["u32"][size][lane]), int(addresses[place])
            if count % 16 or count <= 0 or address % 16:
                raise b.fault(
                    InvalidOperand, f"a bulk copy of {count} bytes to {address:#x}: both must be multiples of 16,", lane
                )
            unit.check(lane, int(offsets[place]), count, 16, "a bulk copy")
            data, known = global_bytes(b, lane, address, count)
            data[...] = unit.take(lane, int(blocks[place]), int(offsets[place]), count)
            if known is not None:
                known[...] = 1
            b.counts["bulk_stores"] += 1
            b.counts["bulk_store_bytes"] += count

    return run


def store_tensor(d: Decoder, ins: Instruction) -> Run:
    dims = next(m for m in ins.mods if re.fullmatch("[1-5]d", m))
    origin, coordinates = _coordinates(d, ins, ins.operands[0], dims)
    source = d.address(ins, ins.operands[1])

    def run(b: Any) -> None:
        unit = b.bulk
        lanes, blocks, offsets = target_of(b, source, False, False, 16)
        maps = address_of(b, *origin)
        for place, lane in enumerate(lanes.tolist()):
            tensor = unit.map_at(lane, int(maps[place]))
            unit.check(lane, int(offsets[place]), tensor.nbytes, tensor.alignment, "a box")
            octets = unit.take(lane, int(blocks[place]), int(offsets[place]), tensor.nbytes)
            unit.store_box(lane, tensor, _corner(b, coordinates, lane), octets)
            b.counts["tensor_stores"] += 1
            b.counts["tensor_store_bytes"] += tensor.nbytes

    return run
