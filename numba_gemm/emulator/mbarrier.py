"""mbarrier objects (PTX ISA 9.7.13.15): arrivals, transaction bytes, phases and those who wait for them.

An mbarrier holds a phase, the arrivals still pending in it, and a count of bytes. The phase ends when both are zero;
the next one starts with the expected arrivals. An arrival publishes what its thread did and knew; whoever finds a phase
ended takes that over, and with it the bulk copies that the phase counted. A thread whose wait is in vain sleeps until
the phase ends. Where nobody else can go on, it is told that the phase has not ended, as the hardware does after a
while; when that helps nobody either, it is a deadlock.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .hazards import EarlyExit, MbarrierMisuse, Misaligned, MissingProxyFence, OutOfBounds
from .memory import SHARED_WINDOW, WINDOW_MASK
from .memory_ops import address_of
from .module import Imm, Instruction, Sink
from .program import Decoder, Run, Terminator, op
from .proxies import MBARRIER, RANK_SHIFT, ProxiedSharedMemory

if TYPE_CHECKING:
    from .batch import Batch

LARGEST = (1 << 20) - 1
"""Largest arrival count, and largest magnitude of the count of bytes."""
_ROUNDS = 8
_OFFSET = (1 << RANK_SHIFT) - 1


@dataclass
class Waiter:
    """Threads that sleep until a phase ends: of a parity, or of a number."""

    pc: int
    lanes: np.ndarray
    parity: int | None
    phase: int
    predicate: int
    acquire: bool

    def satisfied(self, barrier: Mbarrier) -> bool:
        if self.parity is not None:
            return barrier.phase & 1 != self.parity
        return barrier.phase > self.phase


@dataclass
class Mbarrier:
    """One mbarrier object. `base` is the agent's clock before its first phase; `clock` and `lane` are the init's."""

    block: int
    offset: int
    expected: int
    agent: int
    base: int
    lane: int
    clock: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    visible: bool = False
    written: int = 0  # the agent's clock of the last bulk copy
    published: np.ndarray | None = None
    completed: np.ndarray | None = None
    waiters: list[Waiter] = field(default_factory=list)

    @property
    def next_clock(self) -> int:
        """The agent's clock that those who wait for the current phase come to know."""
        return self.base + self.phase + 1


class MbarrierUnit:
    """All mbarriers of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.live: dict[tuple[int, int], Mbarrier] = {}
        self.clocks: dict[tuple[int, int], int] = {}
        self.events = 0
        self.quiet = (0, 0)  # rounds of waking everybody in vain, and the events before them

    @property
    def shared(self) -> ProxiedSharedMemory:
        return self.batch.shared  # type: ignore[return-value]

    def misuse(self, message: str, lane: int, offset: int) -> Any:
        return self.batch.fault(MbarrierMisuse, message, lane, "shared", offset)

    # --- objects

    def find(self, block: int, offset: int, lanes: int | np.ndarray, *, proxy: bool = False) -> Mbarrier:
        """The mbarrier at an offset, for a use by lanes; by the asynchronous proxy if `proxy`."""
        found = self.live.get((block, offset))
        lane = lanes if isinstance(lanes, int) else int(lanes[0])
        if found is None:
            raise self.misuse("no mbarrier was initialised", lane, offset)
        shared = self.shared
        early = shared.known[shared.warp_index[lanes], shared.thread[found.lane]] < found.clock
        early &= lanes != found.lane
        if early.any():
            who = shared.who(self.batch, int(shared.thread[found.lane]))
            lane = lane if isinstance(lanes, int) else int(lanes[early][0])
            raise self.misuse(f"nothing orders this after the initialisation by {who},", lane, offset)
        if proxy and not found.visible:
            raise self.batch.fault(
                MissingProxyFence,
                "a bulk copy signals an mbarrier that was initialised without a fence.mbarrier_init or"
                " fence.proxy.async by the same thread since,",
                lane,
                "shared",
                offset,
            )
        return found

    def init(self, lanes: np.ndarray, blocks: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
        b, shared = self.batch, self.shared
        saved = b.sel
        b.sel = lanes
        flat = offsets + blocks * shared.stride
        cells = shared.cells(flat, 8)
        shared.check_write(b, cells, lanes, offsets, None)
        shared.last[cells] |= MBARRIER
        b.sel = saved
        for lane, block, offset, count in zip(lanes, blocks, offsets, counts, strict=True):
            if not 1 <= count <= LARGEST:
                raise self.misuse(
                    f"an arrival count of {count}: it must lie in 1 to {LARGEST},", int(lane), int(offset)
                )
            key = (int(block), int(offset))
            agent = shared.agent("mbarrier", int(block) % shared.cluster << RANK_SHIFT | int(offset))
            clock = int(shared.clock[shared.warp_index[lane]])
            self.live[key] = Mbarrier(
                *key, int(count), agent, self.clocks.get(key, 0), int(lane), clock, pending=int(count)
            )  # fmt: skip
        self.events += 1

    def invalidate(self, lanes: np.ndarray, blocks: np.ndarray, offsets: np.ndarray) -> None:
        b, shared = self.batch, self.shared
        for lane, block, offset in zip(lanes.tolist(), blocks.tolist(), offsets.tolist(), strict=True):
            found = self.find(block, offset, lane)
            if found.waiters:
                raise self.misuse("invalidated while threads wait for it,", lane, offset)
            if found.written > found.base + found.phase:
                raise self.misuse("invalidated while a bulk copy still signals it,", lane, offset)
            del self.live[(block, offset)]
            self.clocks[(block, offset)] = found.base + found.phase
            cells = shared.cells(np.array([offset + block * shared.stride]), 8)
            shared.last[cells] = 0
        b.shared.refresh()

    def leave(self, block: int, lane: int) -> None:
        """All threads of a block have exited."""
        shared = self.shared
        rows = slice(block * shared.block_warps, (block + 1) * shared.block_warps)
        for barrier in self.live.values():
            known = shared.seen[rows, shared.warps + barrier.agent].max()
            if barrier.block == block and barrier.written > known:
                raise self.batch.fault(
                    EarlyExit,
                    "the block exits while a bulk copy may still write its shared memory: nobody waited for phase "
                    f"{barrier.written - barrier.base - 1} of the mbarrier at shared {barrier.offset:#x},",
                    lane,
                )

    def fenced(self, lanes: np.ndarray) -> None:
        """Those lanes made what they initialised visible to the asynchronous proxy and the cluster."""
        if self.live:
            mine = set(lanes.tolist())
            for barrier in self.live.values():
                if barrier.lane in mine:
                    barrier.visible = True

    # --- counting

    def expect(self, barrier: Mbarrier, lane: int, amount: int) -> None:
        """Add to the count of bytes; a negative amount completes them."""
        barrier.bytes += amount
        if abs(barrier.bytes) > LARGEST:
            raise self.misuse(f"the count of bytes becomes {barrier.bytes}, beyond ±{LARGEST},", lane, barrier.offset)
        self.events += 1
        self.settle(barrier, lane)

    def arrive(self, barrier: Mbarrier, lanes: np.ndarray, counts: np.ndarray, publish: bool, drop: bool) -> np.ndarray:
        """Lanes arrive, one after the other; returns the state that each one gets."""
        self.events += 1
        if publish:
            shared = self.shared
            warps = shared.warp_index[lanes]
            for warp in np.unique(warps).tolist():
                barrier.published = shared.join(barrier.published, shared.release(warp, lanes[warps == warp]))
        if not drop and 0 < int(counts.sum()) <= barrier.pending and counts.min() > 0:
            states = np.full(lanes.size, state_of(barrier), np.uint64)
            barrier.pending -= int(counts.sum())
            self.settle(barrier, int(lanes[-1]))
            return states
        states = np.empty(lanes.size, np.uint64)
        for place, (lane, count) in enumerate(zip(lanes.tolist(), counts.tolist(), strict=True)):
            if not 1 <= count <= LARGEST:
                raise self.misuse(f"{count} arrivals: the count must lie in 1 to {LARGEST},", lane, barrier.offset)
            if count > barrier.pending:
                raise self.misuse(
                    f"{count} arrivals where phase {barrier.phase} has {barrier.pending} of {barrier.expected} pending"
                    + (f" and waits for {barrier.bytes} bytes" if barrier.bytes else "") + ",",
                    lane, barrier.offset,
                )  # fmt: skip
            states[place] = state_of(barrier)
            barrier.pending -= count
            if drop:
                barrier.expected -= count
            self.settle(barrier, lane)
        return states

    def settle(self, barrier: Mbarrier, lane: int) -> None:
        """End the phase if nothing is pending in it."""
        if barrier.pending:
            return
        if barrier.bytes < 0:
            raise self.misuse(
                f"{-barrier.bytes} bytes more than phase {barrier.phase} expected have arrived: it ends too early,",
                lane, barrier.offset,
            )  # fmt: skip
        if barrier.bytes:
            return
        shared = self.shared
        barrier.phase += 1
        barrier.pending = barrier.expected
        row = shared.join(barrier.published, np.zeros(shared.state.shape[1], np.int64))
        row[2 * shared.threads + shared.warps + barrier.agent] = barrier.base + barrier.phase
        barrier.published = row
        barrier.completed = row.copy()
        sleeping = barrier.waiters
        barrier.waiters = []
        for waiter in sleeping:
            if waiter.satisfied(barrier):
                self.wake(barrier, waiter, True)
            else:
                barrier.waiters.append(waiter)

    # --- waiting

    def wait(
        self,
        pc: int,
        lanes: np.ndarray,
        blocks: np.ndarray,
        offsets: np.ndarray,
        wanted: np.ndarray,
        by_parity: bool,
        predicate: int,
        acquire: bool,
    ) -> Any:
        """Threads wait; `wanted` is a parity, or a state. Returns as a terminator does."""
        b = self.batch
        going: list[np.ndarray] = []
        keys = (blocks << 32 | offsets) << 1 | (wanted & 1 if by_parity else 0)
        for chosen in alike(keys if by_parity else np.arange(lanes.size)):
            mine = lanes[chosen]
            barrier = self.find(int(blocks[chosen][0]), int(offsets[chosen][0]), mine)
            value = int(wanted[chosen][0])
            phase = 0 if by_parity else value >> 20 & 0xFFFFFFFF
            waiter = Waiter(pc, mine, value & 1 if by_parity else None, phase, predicate, acquire)
            if waiter.satisfied(barrier):
                self.grant(barrier, waiter)
                going.append(mine)
            else:
                barrier.waiters.append(waiter)
        if not going:
            return []
        moved = np.sort(np.concatenate(going))
        return pc + 1 if moved.size == lanes.size else [(pc + 1, b.normal(moved))]

    def grant(self, barrier: Mbarrier, waiter: Waiter) -> None:
        self.batch.rows["pred"][waiter.predicate][waiter.lanes] = True
        if waiter.acquire and barrier.completed is not None:
            for warp in np.unique(waiter.lanes >> 5).tolist():
                self.shared.acquire(warp, barrier.completed)

    def wake(self, barrier: Mbarrier, waiter: Waiter, ended: bool) -> None:
        b = self.batch
        if ended:
            self.grant(barrier, waiter)
        else:
            b.rows["pred"][waiter.predicate][waiter.lanes] = False
        b.add(waiter.pc + 1, b.normal(waiter.lanes))

    def waiting(self) -> Iterator[tuple[Mbarrier, Waiter]]:
        for barrier in self.live.values():
            for waiter in barrier.waiters:
                yield barrier, waiter

    def unstick(self) -> bool:
        """Nobody else can go on: tell those who sleep that their phase has not ended. False if that is of no use."""
        sleeping = list(self.waiting())
        if not sleeping:
            return False
        rounds, events = self.quiet
        rounds = rounds + 1 if events == self.events else 0
        self.quiet = (rounds, self.events)
        if rounds >= _ROUNDS:
            return False
        for barrier, waiter in sleeping:
            barrier.waiters.remove(waiter)
            self.wake(barrier, waiter, False)
        return True

    def describe(self) -> list[str]:
        """The state of every mbarrier of the first cluster in which somebody waits for one."""
        size = self.shared.cluster
        clusters = sorted({barrier.block // size for barrier, _ in self.waiting()})
        found = []
        for barrier in self.live.values():
            if barrier.block // size not in clusters[:1]:
                continue
            text = (
                f"mbarrier at shared {barrier.offset:#x} of block {int(self.batch.blocks[barrier.block])} is in phase "
                f"{barrier.phase} (parity {barrier.phase & 1}) with {barrier.pending} of {barrier.expected} arrivals "
                f"and {barrier.bytes} bytes pending"
            )
            for waiter in barrier.waiters:
                line, _ = self.batch.program.text_of(waiter.pc)
                what = f"phase {waiter.phase}" if waiter.parity is None else f"parity {waiter.parity}"
                text += f", {waiter.lanes.size} threads at line {line} wait for {what}"
            found.append(text)
        if len(clusters) > 1:
            found.append(f"threads of {len(clusters) - 1} more {'clusters' if size > 1 else 'blocks'} wait as well")
        return found


def state_of(barrier: Mbarrier) -> int:
    return (barrier.phase & 0xFFFFFFFF) << 20 | barrier.pending


def alike(keys: np.ndarray) -> list[Any]:
    """The places that share a key, as selections."""
    if keys.size == 1 or (keys == keys[0]).all():
        return [slice(None)]
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


# --- instructions


def target_of(
    b: Any, place: tuple[str, int, int], generic: bool, cluster: bool, align: int = 8, *, counted: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lanes, blocks, offsets) of an address operand in shared memory; checks bounds and alignment."""
    lanes = b.indices()
    address = address_of(b, *place)
    if generic:
        if ((address & WINDOW_MASK) != SHARED_WINDOW).any():
            b.fail(OutOfBounds, "a generic address that is not in shared memory,", 0, "global", address)
        address = address & ~np.int64(WINDOW_MASK)
    blocks, offsets = b.shared.locate(b, address, lanes, cluster or generic, counted)
    if (offsets & (align - 1)).any():
        wrong = int(np.flatnonzero(offsets & (align - 1))[0])
        b.fail(Misaligned, f"an address that is no multiple of {align}", wrong, "shared", offsets)
    if offsets.min() < 0 or offsets.max() > b.shared.size - 8:
        wrong = int(np.flatnonzero((offsets < 0) | (offsets > b.shared.size - 8))[0])
        b.fail(OutOfBounds, f"beyond the {b.shared.size} bytes of shared memory,", wrong, "shared", offsets)
    return lanes, blocks, offsets


def spaces(ins: Instruction) -> tuple[bool, bool]:
    """(generic, in the cluster) of an instruction's address."""
    named = [m for m in ins.mods if m.split("::")[0] == "shared"]
    return not named, "shared::cluster" in named


@op("mbarrier")
def mbarrier(d: Decoder, ins: Instruction) -> Run | Terminator:
    kind = ins.mods[0]
    if kind == "pending_count":
        target, state = d.dst(ins, ins.operands[0], "b32"), d.src(ins, ins.operands[1], "b64")

        def pending_count(b: Any) -> None:
            sel = slice(None) if b.sel is None else b.sel
            b.rows["u32"][target][sel] = b.rows["u64"][state][sel] & np.uint64(LARGEST)

        return pending_count
    if kind in ("test_wait", "try_wait"):
        return wait(d, ins)
    if kind in ("arrive", "arrive_drop"):
        return arrive(d, ins)
    generic, cluster = spaces(ins)
    if kind not in ("init", "inval", "expect_tx", "complete_tx") or (cluster and kind in ("init", "inval")):
        raise d.unsupported(ins)
    place = d.address(ins, ins.operands[0])
    amount = d.src(ins, ins.operands[1], "b32") if kind != "inval" else -1

    def run(b: Any) -> None:
        unit = b.mbarriers
        lanes, blocks, offsets = target_of(b, place, generic, cluster)
        b.counts["mbarrier_operations"] += b.active_warps()
        if kind == "inval":
            unit.invalidate(lanes, blocks, offsets)
            return
        values = b.rows["u32"][amount][lanes].astype(np.int64)
        if kind == "init":
            unit.init(lanes, blocks, offsets, values)
            return
        sign = 1 if kind == "expect_tx" else -1
        for lane, block, offset, value in zip(
            lanes.tolist(), blocks.tolist(), offsets.tolist(), values.tolist(), strict=True
        ):
            unit.expect(unit.find(block, offset, lane), lane, sign * value)

    return run


def arrive(d: Decoder, ins: Instruction) -> Run:
    generic, cluster = spaces(ins)
    operands = list(ins.operands)
    if len(operands) < 2 and not (operands and cluster):
        raise d.syntax(ins, "expected a state and an address")
    first = operands.pop(0)
    if cluster and not isinstance(first, Sink):
        raise d.syntax(ins, "an arrival at an mbarrier of the cluster gives no state; write _")
    state = d.dst(ins, first, "b64")
    place = d.address(ins, operands.pop(0))
    expecting = "expect_tx" in ins.mods
    no_complete = "noComplete" in ins.mods
    if not operands and (expecting or no_complete):
        raise d.syntax(ins, "the count is missing")
    amount = d.src(ins, operands[0] if operands else Imm(1, "int"), "b32")
    publish = "relaxed" not in ins.mods
    drop = ins.mods[0] == "arrive_drop"

    def run(b: Any) -> None:
        unit = b.mbarriers
        lanes, blocks, offsets = target_of(b, place, generic, cluster)
        b.counts["mbarrier_operations"] += b.active_warps()
        values = b.rows["u32"][amount][lanes].astype(np.int64)
        for chosen in alike(blocks << 32 | offsets):
            mine, given = lanes[chosen], values[chosen]
            barrier = unit.find(int(blocks[chosen][0]), int(offsets[chosen][0]), mine)
            phase = barrier.phase
            if expecting and mine.size > 1:
                # each lane expects and arrives in turn
                for place_, lane in enumerate(mine):
                    unit.expect(barrier, int(lane), int(given[place_]))
                    one = unit.arrive(barrier, mine[place_ : place_ + 1], np.ones(1, np.int64), publish, drop)
                    b.rows["u64"][state][lane] = one[0]
                continue
            if expecting:
                unit.expect(barrier, int(mine[0]), int(given[0]))
                given = np.ones(1, np.int64)
            b.rows["u64"][state][mine] = unit.arrive(barrier, mine, given, publish, drop)
            if no_complete and barrier.phase != phase:
                raise unit.misuse("an arrival with .noComplete that ends the phase,", int(mine[0]), barrier.offset)

    return run


def wait(d: Decoder, ins: Instruction) -> Terminator:
    generic, cluster = spaces(ins)
    if cluster:
        raise d.unsupported(ins, "a wait at an mbarrier of another block")
    predicate = d.dst(ins, ins.operands[0], "pred")
    place = d.address(ins, ins.operands[1])
    by_parity = "parity" in ins.mods
    wanted = d.src(ins, ins.operands[2], "b32" if by_parity else "b64")
    acquire = "relaxed" not in ins.mods

    def run(b: Any, pc: int) -> Any:
        lanes, blocks, offsets = target_of(b, place, generic, False)
        b.counts["mbarrier_operations"] += b.active_warps()
        values = b.rows["u32" if by_parity else "u64"][wanted][lanes].astype(np.int64)
        if by_parity and (values > 1).any():
            raise b.mbarriers.misuse("a parity that is neither 0 nor 1,", int(lanes[0]), int(offsets[0]))
        return b.mbarriers.wait(pc, lanes, blocks, offsets, values, by_parity, predicate, acquire)

    return Terminator(run)
