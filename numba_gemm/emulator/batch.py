"""The state of a batch of blocks, and the scheduler that drives it.

All threads of a batch that stand at the same instruction execute it together, whatever block they belong to. Of
several such groups the one that is furthest behind in the text runs, up to the place of the next one, where the
two join: that is where compilers let divergent paths meet. A group that loops for long while others could run
gives way, so that a thread may spin on what another one writes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import BarrierUnit
from .bulk_copy import BulkUnit
from .clusters import ClusterUnit
from .convergence import Park
from .dependence import check_end
from .hazards import Deadlock, DivergentBarrier, Hazard, StepLimit
from .mbarrier import MbarrierUnit
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .program import Program
from .proxies import ProxiedSharedMemory
from .register_pool import RegisterPool
from .registers import STORAGE, RegisterFile
from .shared import SharedMemory
from .wgmma import WarpgroupUnit

if TYPE_CHECKING:
    from .machine import LaunchState

PATIENCE = 4096  # backward jumps of one group before another runnable one gets a turn
FAR = 1 << 60
Threads = Any  # an index array, or None for all threads of the batch


class Batch:
    """`blocks` (linear indices) of one launch, side by side."""

    def __init__(self, launch: LaunchState, program: Program, blocks: np.ndarray) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.memory = launch.machine.memory
        self.program = program
        self.counts = launch.counts
        self.blocks = blocks
        self.block_shape = launch.block
        self.block_threads = int(np.prod(launch.block))
        self.warps = -(-self.block_threads // 32)
        self.block_lanes = self.warps * 32
        self.n = blocks.size * self.block_lanes
        self.rows = RegisterFile(self.n, program.counts)
        self.lane_in_block = np.tile(np.arange(self.block_lanes), blocks.size)
        self.live = self.lane_in_block < self.block_threads
        self.nlive = self.started = int(np.count_nonzero(self.live))
        self.sel: Threads = None
        self.pc = 0
        cell = program.cell if launch.shared_bytes else 4
        self.proxied = launch.proxied
        self.shared: Any
        if self.proxied:
            self.shared = ProxiedSharedMemory(
                blocks.size, launch.shared_bytes, self.warps, cell, math.prod(launch.cluster)
            )
            self.mbarriers = MbarrierUnit(self)
            self.bulk = BulkUnit(self)
            self.warpgroups = WarpgroupUnit(self)
            self.cluster = ClusterUnit(self)
            self.pool = RegisterPool(self)
        else:
            self.shared = SharedMemory(blocks.size, launch.shared_bytes, self.warps, cell)
        self.local_bytes = program.local_bytes
        self.local = np.zeros(self.n * max(self.local_bytes, 16), np.uint8)
        self.local_base = np.arange(self.n, dtype=np.int64) * max(self.local_bytes, 16)
        if program.param_bytes:
            frame = self.local.reshape(self.n, -1)
            frame[:, : program.param_bytes] = np.frombuffer(launch.params, np.uint8)[: program.param_bytes]
        self.predicated: dict[int, int] = {}
        self.segments: dict[tuple[int, int], list[int]] = {}
        self.patterns: dict[tuple[int, str], Any] = {}
        self.barriers = BarrierUnit(self)
        self.async_group = np.zeros(self.n, np.int64)
        self.groups: dict[int, Threads] = {}
        self.parked: dict[int, Threads] = {}
        self.steps = 0
        self.clock = 0
        self.impatient = False
        # Blocks that have not waited for the launch before, if this one may overlap it.
        self.unwaited = np.ones(blocks.size, np.bool_) if launch.overlaps else None
        self.fill()

    # --- constant rows

    def fill(self) -> None:
        program, rows = self.program, self.rows
        for bits, row, value in program.constants:
            rows.arrays[bits][row] = STORAGE[bits](value)
        for offset, bits, row in program.shared_addresses:
            window = self.shared.window if self.proxied else 0  # of each lane's own block
            rows.arrays[bits][row] = (window + offset) & ((1 << bits) - 1)
        for variable, offset, bits, row in program.addresses:
            rows.arrays[bits][row] = (self.launch.symbol_address(variable) + offset) & ((1 << bits) - 1)
        for name, bits, row in program.specials:
            rows.arrays[bits][row] = self.special(name)

    def special(self, name: str) -> Any:
        stem, _, axis = name.partition(".")
        axis_index = {"": 0, "x": 0, "y": 1, "z": 2, "w": 3}[axis]
        if axis_index == 3:
            return 0 if stem in ("%tid", "%ctaid", "%clusterid", "%cluster_ctaid") else 1
        lane = np.arange(self.n) & 31
        linear = np.repeat(self.blocks, self.block_lanes)
        shape = self.block_shape
        grid = self.launch.grid
        one = np.uint64(1)
        if self.proxied and "cluster" in stem:
            return self.cluster.special(stem, axis_index)
        if stem == "%tid":
            place = self.lane_in_block
            return (place % shape[0], place // shape[0] % shape[1], place // (shape[0] * shape[1]))[axis_index]
        if stem in ("%ctaid", "%clusterid"):
            return (linear % grid[0], linear // grid[0] % grid[1], linear // (grid[0] * grid[1]))[axis_index]
        if stem == "%ntid":
            return shape[axis_index]
        if stem in ("%nctaid", "%nclusterid"):
            return grid[axis_index]
        if stem == "%laneid":
            return lane
        if stem == "%warpid":
            return self.lane_in_block >> 5
        if stem == "%nwarpid":
            return 64
        if stem == "%smid":
            return linear % 132
        if stem == "%nsmid":
            return 132
        if stem.startswith("%lanemask_"):
            bit = one << lane.astype(np.uint64)
            return {
                "eq": bit, "lt": bit - one, "le": bit * np.uint64(2) - one,
                "gt": np.uint64(0x1_0000_0000) - bit * np.uint64(2), "ge": np.uint64(0x1_0000_0000) - bit,
            }[stem[10:]] & np.uint64(0xFFFFFFFF)  # fmt: skip
        if stem == "%dynamic_smem_size":
            return self.launch.dynamic_shared
        if stem in ("%total_smem_size", "%aggr_smem_size"):
            return self.launch.shared_bytes
        if stem in ("%cluster_nctaid", "%cluster_nctarank"):
            return 1
        # clocks are read afresh by `mov`; the rest is zero on a machine of one context and no clusters
        return 0

    # --- naming threads

    def coordinates(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(block, thread) coordinates of a lane of the batch."""
        linear = int(self.blocks[lane // self.block_lanes])
        grid = self.launch.grid
        block = (linear % grid[0], linear // grid[0] % grid[1], linear // (grid[0] * grid[1]))
        return block, self.thread_of(lane % self.block_lanes)

    def thread_of(self, place: int) -> tuple[int, int, int]:
        shape = self.block_shape
        return (place % shape[0], place // shape[0] % shape[1], place // (shape[0] * shape[1]))

    def hazard(self, kind: type[Hazard], message: str, lane: int | None, pc: int, **more: Any) -> Hazard:
        line, text = self.program.text_of(pc)
        block, thread = self.coordinates(lane) if lane is not None else (None, None)
        return kind(message, line=line, text=text, block=block, thread=thread, **more)

    def fail(
        self, kind: type[Hazard], message: str, position: int, space: str | None = None, addresses: Any = None
    ) -> None:
        """Raise a hazard on behalf of the active lane at `position` of the selection."""
        lane = position if self.sel is None else int(self.sel[position])
        address = None if addresses is None else int(addresses[position])
        if address is not None and space == "shared":
            address &= SHARED_WINDOW - 1
        if address is not None and space == "local":
            address &= LOCAL_WINDOW - 1
        raise self.hazard(kind, message, lane, self.pc, space=space, address=address)

    def fault(
        self, kind: type[Hazard], message: str, lane: int, space: str | None = None, address: int | None = None
    ) -> Hazard:
        """A hazard of one lane at the instruction that executes."""
        return self.hazard(kind, message, lane, self.pc, space=space, address=address)

    # --- selections

    def indices(self) -> np.ndarray:
        return np.arange(self.n) if self.sel is None else self.sel

    def active_warps(self) -> int:
        """Warps with an active lane."""
        if self.sel is None:
            return self.n >> 5
        warps = self.sel >> 5
        return int(np.count_nonzero(warps[1:] != warps[:-1])) + 1 if warps.size else 0

    def union(self, a: Threads, b: Threads) -> Threads:
        if a is None or b is None:
            return None
        merged = np.concatenate([a, b])
        merged.sort()
        return self.normal(merged)

    def normal(self, threads: np.ndarray) -> Threads:
        return None if threads.size == self.n else threads

    def converge(self, mask: np.ndarray | None = None) -> None:
        """Raise `Park` unless all live lanes that `mask` names (uint32 per active lane) are active together."""
        sel = self.sel
        if sel is None:
            return
        active = np.zeros(self.n, np.bool_)
        active[sel] = True
        wanted = np.zeros(self.n, np.bool_)
        if mask is None:
            wanted.reshape(-1, 32)[np.unique(sel >> 5)] = True
        else:
            per_warp = np.zeros(self.n >> 5, np.uint32)
            np.bitwise_or.at(per_warp, sel >> 5, mask)
            wanted = (per_warp[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.bool_).reshape(-1)
        missing = (wanted & self.live & ~active).reshape(-1, 32).any(axis=1)
        missing &= active.reshape(-1, 32).any(axis=1)
        if missing.any():
            raise Park(np.asarray(missing))

    def ordered_warps(self) -> None:
        """A `.sync` instruction orders the memory accesses of its warps' lanes."""
        if self.launch.shared_bytes:
            self.shared.sync_warps(None if self.sel is None else np.unique(self.sel >> 5))

    # --- the scheduler

    def add(self, pc: int, threads: Threads) -> None:
        if threads is not None and not threads.size:
            return
        if pc in self.parked:
            threads = self.union(self.parked.pop(pc), threads)
        if pc in self.groups:
            threads = self.union(self.groups[pc], threads)
        self.groups[pc] = threads

    def count(self, start: int, stop: int, warps: int, threads: int) -> None:
        entry = self.segments.get((start, stop))
        if entry is None:
            self.segments[(start, stop)] = [warps, threads]
        else:
            entry[0] += warps
            entry[1] += threads

    def run(self) -> None:
        """Run all threads to their end."""
        groups = self.groups
        start = None if self.nlive == self.n else np.flatnonzero(self.live)
        self.add(self.program.entry_pc, start)
        after = -1
        while True:
            if not groups:
                if self.proxied and self.mbarriers.unstick():
                    continue
                if self.parked or self.barriers.waiting() or self.asleep():
                    self.stuck()
                break
            if after >= 0:
                later = [pc for pc in groups if pc > after]
                pc = min(later) if later else min(groups)
            else:
                pc = min(groups)
            after = self.run_group(pc, groups.pop(pc))
        self.finish()

    def run_group(self, pc: int, threads: Threads) -> int:
        """Run one group until it joins another, splits, blocks or ends; returns where it gave way, or -1."""
        code = self.program.code
        upcoming = self.program.next_terminator
        terminators = self.program.terminators
        self.sel = threads
        warps = self.active_warps()
        size = self.n if threads is None else threads.size
        jumps = 0
        while True:
            nearest = FAR
            for other in self.groups:
                if pc < other < nearest:
                    nearest = other
            for other in self.parked:
                if pc < other < nearest:
                    nearest = other
            end = upcoming[pc]
            stop = min(end, nearest)
            at = pc
            try:
                for at in range(pc, stop):
                    self.pc = at
                    code[at](self)
            except Park as park:
                self.count(pc, at, warps, size)
                self.sel = threads
                self.park(at, threads, park)
                return -1
            if stop > pc:
                self.count(pc, stop, warps, size)
            if stop == nearest and nearest <= end:
                self.add(nearest, threads)
                return -1
            self.pc = end
            try:
                result = self.terminate(terminators[end], end)
            except Park as park:
                self.sel = threads
                self.park(end, threads, park)
                return -1
            self.count(end, end + 1, warps, size)
            self.steps += 1
            if self.steps > self.launch.limit:
                raise self.hazard(StepLimit, f"more than {self.launch.limit} jumps", None, end)
            if not isinstance(result, int):
                for target, split in result:
                    self.add(target, split)
                return -1
            if self.groups or self.parked:
                if result in self.groups or result in self.parked or (self.groups and min(self.groups) < result):
                    self.add(result, threads)
                    return -1
                if result <= end or self.impatient:
                    jumps += 1
                    if (jumps > PATIENCE or self.impatient) and self.groups:
                        self.impatient = False
                        self.add(result, threads)
                        return result
            pc = result

    def terminate(self, terminator: Any, pc: int) -> Any:
        """Execute a terminator under its guard."""
        ins = self.program.instructions[pc]
        if ins.guard is None:
            return terminator.run(self, pc)
        mask = self.rows["pred"][ins.guard.row]
        sel = self.sel
        if sel is not None:
            mask = mask[sel]
        if ins.guard_negated:
            mask = ~mask
        count = int(np.count_nonzero(mask))
        self.predicated[pc] = self.predicated.get(pc, 0) + count
        if count == mask.size:
            return terminator.run(self, pc)
        if not count:
            return pc + 1
        taken = np.flatnonzero(mask) if sel is None else sel[mask]
        rest = np.flatnonzero(~mask) if sel is None else sel[~mask]
        self.sel = taken
        result = terminator.run(self, pc)
        if isinstance(result, int):
            result = [(result, taken)]
        return [*result, (pc + 1, rest)]

    def park(self, pc: int, threads: Threads, park: Park) -> None:
        index = np.arange(self.n) if threads is None else threads
        waits = park.warps[index >> 5]
        stay, go = index[waits], index[~waits]
        if go.size:
            self.groups[pc] = go
        if pc in self.parked:
            stay = np.sort(np.concatenate([self.parked[pc], stay]))
        self.parked[pc] = stay

    def retire(self, threads: Threads) -> None:
        """Threads exit."""
        index = np.flatnonzero(self.live) if threads is None else threads
        self.live[index] = False
        self.nlive -= index.size
        # those that wait for lanes of the same warp may have waited for these
        for pc in list(self.parked):
            self.add(pc, self.parked.pop(pc))
        if self.proxied:
            self.leave(index)

    def leave(self, lanes: np.ndarray) -> None:
        """Threads have exited: nothing that they started may still use their shared memory."""
        self.bulk.leave(lanes)
        for block in np.unique(lanes // self.block_lanes).tolist():
            span = slice(block * self.block_lanes, (block + 1) * self.block_lanes)
            if not self.live[span].any():
                self.mbarriers.leave(block, int(lanes[0]))
                self.bulk.leave_block(block, int(lanes[0]))
                self.shared.leave(self, block, int(lanes[0]))
            self.cluster.settle(block // self.cluster.size)

    def asleep(self) -> list[tuple[int, int]]:
        """(lane, pc) of threads that wait for an mbarrier, their cluster or registers."""
        if not self.proxied:
            return []
        found = [(int(w.lanes[0]), w.pc) for _, w in self.mbarriers.waiting()]
        cluster = self.cluster.waiting()
        found += [cluster] if cluster is not None else []
        return found + [(int(lanes[0]), pc) for pc, _, _, lanes in self.pool.waiters]

    def stuck(self) -> None:
        """No thread can go on: say why."""
        where = []
        for pc, threads in sorted(self.parked.items()):
            line, text = self.program.text_of(pc)
            where.append(f"{threads.size} threads at line {line} ({text.strip()})")
        asleep = self.asleep()
        if asleep:
            states = self.mbarriers.describe() + self.cluster.describe() + self.pool.describe()
            states += self.barriers.describe() + [f"{text} wait for others of their warpgroup" for text in where]
            raise self.hazard(Deadlock, "nobody can go on: " + "; ".join(states), *asleep[0])
        if self.parked:
            pc, threads = next(iter(sorted(self.parked.items())))
            raise self.hazard(
                DivergentBarrier,
                "lanes wait for lanes of their warp or warpgroup that never come: "
                + "; ".join(where + self.barriers.describe()),
                int(threads[0]), pc,
            )  # fmt: skip
        partial = self.barriers.partial()
        lane, pc = partial or self.barriers.waiting()  # type: ignore[misc]
        kind = DivergentBarrier if partial else Deadlock
        raise self.hazard(kind, "nobody can go on: " + "; ".join(self.barriers.describe()), lane, pc)

    def finish(self) -> None:
        check_end(self)
        self.launch.collect(self)
