"""Thread-block clusters: their barrier, addresses in one another's shared memory, `st.async` (PTX ISA 9.7.13.6)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .hazards import DivergentBarrier, InvalidOperand
from .mbarrier import target_of
from .memory import SHARED_WINDOW
from .module import WIDTHS, Instruction
from .program import Decoder, Run, Terminator, op
from .proxies import RANK_SHIFT, ProxiedSharedMemory

if TYPE_CHECKING:
    from .batch import Batch

_NEVER = -1
_LOW = (1 << RANK_SHIFT) - 1


@dataclass
class ClusterBarrier:
    """The hardware barrier of one cluster."""

    generation: int = 0
    published: np.ndarray | None = None
    completed: np.ndarray | None = None
    waiters: list[tuple[int, np.ndarray, bool]] = field(default_factory=list)  # (pc, lanes, acquire)


class ClusterUnit:
    """The clusters of a batch; `shape` is a cluster's (x, y, z), `rank` that of each block of the batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shape = batch.launch.cluster
        self.size = int(np.prod(self.shape))
        self.rank = np.arange(batch.blocks.size) % self.size
        self.lanes = self.size * batch.block_lanes
        self.barriers = [ClusterBarrier() for _ in range(batch.blocks.size // self.size)]
        # the generation in which each lane arrived without having waited since
        self.arrived = np.full(batch.n, _NEVER, np.int64)

    @property
    def shared(self) -> ProxiedSharedMemory:
        return self.batch.shared  # type: ignore[return-value]

    def special(self, stem: str, axis: int) -> Any:
        """A special register of clusters, per lane or for all."""
        shape, grid = self.shape, self.batch.launch.grid
        x, y, _ = shape
        rank = np.repeat(self.rank, self.batch.block_lanes)
        if stem == "%cluster_ctarank":
            return rank
        if stem == "%cluster_nctarank":
            return self.size
        if stem == "%is_explicit_cluster":
            return self.size > 1
        if stem == "%cluster_ctaid":
            return (rank % x, rank // x % y, rank // (x * y))[axis]
        if stem == "%cluster_nctaid":
            return shape[axis]
        if stem == "%nclusterid":
            return grid[axis] // shape[axis]
        block = np.repeat(self.batch.blocks, self.batch.block_lanes)
        return (block % grid[0], block // grid[0] % grid[1], block // (grid[0] * grid[1]))[axis] // shape[axis]

    # --- the barrier

    def arrive(self, lanes: np.ndarray, publish: bool) -> None:
        b, shared = self.batch, self.shared
        if (self.arrived[lanes] != _NEVER).any():
            lane = int(lanes[np.flatnonzero(self.arrived[lanes] != _NEVER)[0]])
            raise b.fault(DivergentBarrier, "a second barrier.cluster.arrive with no wait between,", lane)
        cluster = lanes // self.lanes
        for number in np.unique(cluster).tolist():
            barrier = self.barriers[number]
            mine = lanes[cluster == number]
            self.arrived[mine] = barrier.generation
            if publish:
                warps = mine >> 5
                for warp in np.unique(warps).tolist():
                    barrier.published = shared.join(barrier.published, shared.release(warp, mine[warps == warp]))
            self.settle(number)

    def settle(self, number: int) -> None:
        """Release a cluster's barrier if every thread that is left has arrived."""
        barrier = self.barriers[number]
        span = slice(number * self.lanes, (number + 1) * self.lanes)
        live = self.batch.live[span]
        here = self.arrived[span] == barrier.generation
        if not here.any() or (live & ~here).any():
            return
        barrier.generation += 1
        barrier.completed = barrier.published
        barrier.published = None
        sleeping, barrier.waiters = barrier.waiters, []
        for pc, lanes, acquire in sleeping:
            self.go(barrier, lanes, acquire)
            self.batch.add(pc + 1, self.batch.normal(lanes))

    def go(self, barrier: ClusterBarrier, lanes: np.ndarray, acquire: bool) -> None:
        self.arrived[lanes] = _NEVER
        if acquire and barrier.completed is not None:
            for warp in np.unique(lanes >> 5).tolist():
                self.shared.acquire(warp, barrier.completed)

    def wait(self, pc: int, lanes: np.ndarray, acquire: bool) -> Any:
        b = self.batch
        if (self.arrived[lanes] == _NEVER).any():
            lane = int(lanes[np.flatnonzero(self.arrived[lanes] == _NEVER)[0]])
            raise b.hazard(DivergentBarrier, "barrier.cluster.wait without an arrive before it,", lane, pc)
        cluster = lanes // self.lanes
        going = []
        for number in np.unique(cluster).tolist():
            barrier = self.barriers[number]
            mine = lanes[cluster == number]
            past = self.arrived[mine] < barrier.generation
            if past.any():
                self.go(barrier, mine[past], acquire)
                going.append(mine[past])
            if not past.all():
                barrier.waiters.append((pc, mine[~past], acquire))
        if not going:
            return []
        moved = np.sort(np.concatenate(going))
        return pc + 1 if moved.size == lanes.size else [(pc + 1, b.normal(moved))]

    def waiting(self) -> tuple[int, int] | None:
        for barrier in self.barriers:
            for pc, lanes, _ in barrier.waiters:
                return int(lanes[0]), pc
        return None

    def describe(self) -> list[str]:
        found = []
        for number, barrier in enumerate(self.barriers):
            if barrier.waiters:
                span = slice(number * self.lanes, (number + 1) * self.lanes)
                have = int(np.count_nonzero(self.arrived[span] == barrier.generation))
                lines = sorted({self.batch.program.text_of(pc)[0] for pc, _, _ in barrier.waiters})
                left = int(np.count_nonzero(self.batch.live[span]))
                block = int(self.batch.blocks[number * self.size])
                found.append(
                    f"the barrier of block {block}'s cluster has {have} of {left} threads, waiting at lines {lines}"
                )
        return found


# --- instructions


@op("barrier.cluster")
def cluster_barrier(d: Decoder, ins: Instruction) -> Terminator:
    """`barrier.cluster.arrive` and `.wait`, called by the builder of `barrier`."""
    waiting = "wait" in ins.mods
    ordered = "relaxed" not in ins.mods
    aligned = "aligned" in ins.mods

    def run(b: Any, pc: int) -> Any:
        if aligned:
            b.converge()
        lanes = b.indices()
        b.counts["barriers"] += b.active_warps()
        if waiting:
            return b.cluster.wait(pc, lanes, ordered)
        b.cluster.arrive(lanes, ordered)
        return pc + 1

    return Terminator(run)


@op("mapa")
def mapa(d: Decoder, ins: Instruction) -> Run:
    generic = "shared::cluster" not in ins.mods
    kind = ins.mods[-1]
    target = d.dst(ins, ins.operands[0], kind)
    source = d.src(ins, ins.operands[1], kind)
    rank = d.src(ins, ins.operands[2], "u32")
    bits = WIDTHS[kind]

    def run(b: Any) -> None:
        index = b.indices()
        wanted = b.rows["u32"][rank][index].astype(np.int64)
        if (wanted >= b.cluster.size).any():
            wrong = int(np.flatnonzero(wanted >= b.cluster.size)[0])
            raise b.fault(
                InvalidOperand, f"rank {int(wanted[wrong])} in a cluster of {b.cluster.size},", int(index[wrong])
            )
        offset = b.rows[f"u{bits}"][source][index].astype(np.int64) & _LOW
        address = (wanted << RANK_SHIFT) | offset | (SHARED_WINDOW if generic else 0)
        b.rows[f"u{bits}"][target][index] = address.astype(f"u{bits // 8}")

    return run


@op("getctarank")
def getctarank(d: Decoder, ins: Instruction) -> Run:
    kind = "u32" if "shared::cluster" in ins.mods else "u64"
    target = d.dst(ins, ins.operands[0], "u32")
    source = d.src(ins, ins.operands[1], kind)

    def run(b: Any) -> None:
        index = b.indices()
        b.rows["u32"][target][index] = b.rows[kind][source][index].astype(np.int64) >> RANK_SHIFT & 0xFF

    return run


@op("st.async")
def st_async(d: Decoder, ins: Instruction) -> Run:
    """`st.async` to a block of the cluster, called by the builder of `st`."""
    kind = ins.mods[-1]
    if "mbarrier::complete_tx::bytes" not in ins.mods or WIDTHS[kind] not in (32, 64):
        raise d.unsupported(ins)
    place = d.address(ins, ins.operands[0])
    values = [d.src(ins, o, kind) for o in d.vector(ins.operands[1])]
    signal = d.address(ins, ins.operands[2])
    width = WIDTHS[kind] // 8
    size = width * len(values)

    def run(b: Any) -> None:
        lanes, blocks, offsets = target_of(b, place, False, True, size, counted=True)
        _, signal_blocks, signals = target_of(b, signal, False, True, counted=True)
        for i, lane in enumerate(lanes.tolist()):
            data = np.array([b.rows[f"u{8 * width}"][row][lane] for row in values], f"u{width}").view(np.uint8)
            there = (int(signal_blocks[i]), int(signals[i]))
            b.bulk.deliver(lane, int(blocks[i]), int(offsets[i]), data, there, proxy=False)

    return run
