"""The 16 named barriers of each block (PTX ISA 9.7.13.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .hazards import DivergentBarrier

if TYPE_CHECKING:
    from .batch import Batch


@dataclass
class Barrier:
    """One barrier of one block while somebody waits at it."""

    expected: int | None = None
    warps: set[int] = field(default_factory=set)  # warps of the batch that have arrived in full
    arrived: int = 0  # warps, `bar.arrive` included
    lanes: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict)  # by warp: (pc, lanes)
    sync: list[tuple[int, np.ndarray]] = field(default_factory=list)
    published: np.ndarray | None = None
    reduce: list[tuple[int, str, int, np.ndarray]] = field(default_factory=list)
    votes: list[np.ndarray] = field(default_factory=list)


class BarrierUnit:
    """All barriers of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.open: dict[tuple[int, int], Barrier] = {}

    def waiting(self) -> tuple[int, int] | None:
        """(lane, pc) of somebody who waits, or None."""
        for barrier in self.open.values():
            for waits in barrier.lanes.values():
                return int(waits[0][1][0]), waits[0][0]
            if barrier.sync:
                pc, lanes = barrier.sync[0]
                return int(lanes[0]), pc
        return None

    def partial(self) -> tuple[int, int] | None:
        for barrier in self.open.values():
            for waits in barrier.lanes.values():
                return int(waits[0][1][0]), waits[0][0]
        return None

    def describe(self) -> list[str]:
        found = []
        for (block, name), barrier in self.open.items():
            lines = sorted({self.batch.program.text_of(pc)[0] for pc, _ in barrier.sync})
            linear = int(self.batch.blocks[block])
            count = "all its warps" if barrier.expected is None else f"{barrier.expected} warps"
            found.append(f"barrier {name} of block {linear} has {barrier.arrived} of {count}, waiting at lines {lines}")
            for warp, waits in barrier.lanes.items():
                have = sum(lanes.size for _, lanes in waits)
                found.append(f"warp {warp % self.batch.warps} of block {linear} has {have} lanes at barrier {name}")
        return found[:6]

    def arrive(
        self, pc: int, names: np.ndarray, counts: np.ndarray | None, kind: str, aligned: bool, vote: Any = None
    ) -> Any:
        """The active threads reach a barrier instruction.

        names, counts: barrier number and thread count (or None) of each active thread. kind: "sync", "arrive" or
        "red"; `vote` is then (operation, destination row, predicates). Returns as a terminator does.
        """
        b = self.batch
        sel = b.sel
        uniform = names.size and (names == names[0]).all()
        # a count names threads, so with one given those that have left are still waited for
        whole = counts is None or ((counts == b.block_threads).all() and b.nlive == b.started)
        if uniform and whole and kind != "arrive" and not self.open and (sel is None or sel.size == b.nlive):
            if b.launch.shared_bytes:
                blocks = None if sel is None else np.unique(sel // b.block_lanes)
                b.shared.barrier_all(blocks)
            if vote is not None:
                self.reduce_whole(vote)
            return pc + 1
        index = b.indices()
        moved: list[tuple[int, np.ndarray]] = []
        block_of = index // b.block_lanes
        keys = block_of * 16 + names
        for key in np.unique(keys):
            chosen = np.flatnonzero(keys == key)
            block, name = int(key) // 16, int(key) % 16
            barrier = self.open.setdefault((block, name), Barrier())
            lanes = index[chosen]
            if counts is not None:
                barrier.expected = -(-int(counts[chosen[0]]) // 32)
            warp_of = lanes >> 5
            for warp in np.unique(warp_of):
                mine = lanes[warp_of == warp]
                waits = barrier.lanes.setdefault(int(warp), [])
                if aligned and any(other != pc for other, _ in waits):
                    line, _ = b.program.text_of(waits[0][0])
                    raise b.hazard(
                        DivergentBarrier,
                        f"lanes of this warp wait at another barrier instruction, on line {line},",
                        int(mine[0]), pc,
                    )  # fmt: skip
                waits.append((pc, mine))
            if kind == "arrive":
                moved.append((pc + 1, lanes))
            else:
                barrier.sync.append((pc, lanes))
            if vote is not None:
                operation, row, values = vote
                barrier.reduce.append((pc, operation, row, lanes))
                barrier.votes.append(values[chosen])
        moved += self.settle(set(np.unique(block_of).tolist()))
        return self.merge(moved)

    def merge(self, moved: list[tuple[int, np.ndarray]]) -> list[tuple[int, Any]]:
        by_pc: dict[int, list[np.ndarray]] = {}
        for pc, lanes in moved:
            by_pc.setdefault(pc, []).append(lanes)
        return [(pc, self.batch.normal(np.sort(np.concatenate(parts)))) for pc, parts in by_pc.items()]

    def settle(self, blocks: set[int]) -> list[tuple[int, np.ndarray]]:
        """Complete what can be completed in these blocks; returns who goes on."""
        b = self.batch
        moved: list[tuple[int, np.ndarray]] = []
        for key in [key for key in self.open if key[0] in blocks]:
            barrier = self.open[key]
            for warp in list(barrier.lanes):
                here = sum(lanes.size for _, lanes in barrier.lanes[warp])
                if here < int(np.count_nonzero(b.live[warp * 32 : warp * 32 + 32])):
                    continue
                del barrier.lanes[warp]
                barrier.arrived += 1
                barrier.warps.add(warp)
                if b.launch.shared_bytes:
                    barrier.published = b.shared.join(barrier.published, b.shared.arrive(warp))
            expected = barrier.expected
            if expected is None:
                span = b.live[key[0] * b.block_lanes : (key[0] + 1) * b.block_lanes]
                expected = int(np.count_nonzero(span.reshape(-1, 32).any(axis=1)))
            if barrier.arrived >= expected and not barrier.lanes:
                del self.open[key]
                moved += self.release(barrier)
        return moved

    def release(self, barrier: Barrier) -> list[tuple[int, np.ndarray]]:
        b = self.batch
        if barrier.published is not None:
            for warp in {int(w) for _, lanes in barrier.sync for w in np.unique(lanes >> 5)}:
                b.shared.depart(warp, barrier.published)
        if barrier.reduce:
            votes = np.concatenate(barrier.votes)
            for _, operation, row, lanes in barrier.reduce:
                self.write_vote(operation, row, lanes, votes)
        return [(pc + 1, lanes) for pc, lanes in barrier.sync]

    def write_vote(self, operation: str, row: int, lanes: np.ndarray, votes: np.ndarray) -> None:
        rows = self.batch.rows
        if operation == "popc":
            rows["u32"][row][lanes] = int(np.count_nonzero(votes))
        else:
            rows["pred"][row][lanes] = bool(votes.all() if operation == "and" else votes.any())

    def reduce_whole(self, vote: tuple[str, int, np.ndarray]) -> None:
        b = self.batch
        operation, row, values = vote
        index = b.indices()
        blocks = index // b.block_lanes
        for block in np.unique(blocks):
            chosen = blocks == block
            self.write_vote(operation, row, index[chosen], values[chosen])
