"""Shared memory of programs with asynchronous operations: who knows of whose accesses, thread by thread and by proxy.

Bulk copies and `wgmma` touch shared memory through the asynchronous proxy (PTX ISA 8.2, 9.7.9.25). Three things come to
what `SharedMemory` keeps:

* **Agents.** What an asynchronous operation writes or reads belongs to an agent: the mbarrier that a load signals, the
  thread that issued a bulk store, the warpgroup that issued a `wgmma`. Each has a clock (the mbarrier's phases, the
  numbers of the operations) and a column of `seen`: whoever waits for it comes to know its clock.
* **Threads.** An mbarrier's arrival publishes the accesses of the threads that arrived, not of their warp.
  `known[w, t]` is the clock up to which thread t's accesses come before warp w's next one.
* **Fences.** `fenced[w, t]` is the clock up to which thread t's writes were followed by its own `fence.proxy.async`, as
  far as warp w knows. An asynchronous operation needs it of everything that ordinary accesses wrote.

The blocks of a cluster share one set of clocks, since they touch one another's shared memory. A cell's last writer is
then a thread of the cluster or, where the tag has `AGENT`, an agent; `MBARRIER` marks the bytes of an mbarrier.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

from .hazards import (
    EarlyExit,
    Hazard,
    MbarrierMisuse,
    MissingProxyFence,
    OutOfBounds,
    SharedMemoryRace,
    UnfinishedAsyncRead,
    UninitialisedRead,
    UnwaitedAsyncCopy,
)
from .shared import ASYNC, ATOMIC, BELOW_CLOCK, CLOCK_SHIFT, PENDING, THREAD, SharedMemory

AGENT = 1 << 61
MBARRIER = 1 << 60
RANK_SHIFT = 24
"""In a cluster an address of shared memory, one's own included, is an offset in a block with the block's rank above."""
_CLOCKS = MBARRIER - 1
_AGENTS = 16
Where = Any  # a slice or an index array of cells


class ProxiedSharedMemory(SharedMemory):
    """`blocks` blocks of `warps` warps each; every `cluster` of them share their clocks."""

    def __init__(self, blocks: int, size: int, warps: int, cell: int, cluster: int) -> None:
        super().__init__(blocks, size, warps, cell)
        self.cluster = cluster
        self.block_warps = warps
        self.block_lanes = warps * 32
        self.warps = warps * cluster
        self.threads = self.warps * 32
        lanes = np.arange(blocks * self.block_lanes)
        self.warp = self.warp_index % self.warps
        self.thread = lanes % self.threads
        self.thread16 = self.thread.astype(np.int16)
        self.touched = np.zeros(lanes.size, np.int64)
        self.agents: dict[tuple[str, int], int] = {}
        self.agent_names: list[tuple[str, int]] = []
        self.capacity = _AGENTS
        self.state = np.zeros((blocks * warps, 2 * self.threads + self.warps + self.capacity), np.int64)
        self.reads = np.zeros((self.last.size, self.warps + self.capacity), np.int32)
        # remote[block, thread of the cluster]: clock of that thread's last touch of the block's memory from outside
        self.remote = np.zeros((blocks, self.threads), np.int64)
        self.alive = np.ones(blocks, np.bool_)
        # where each lane's own shared memory begins in the cluster's addresses
        self.window = lanes // self.block_lanes % cluster << RANK_SHIFT
        self.split()
        self.refresh()

    @staticmethod
    def proxied_bytes(size: int, warps: int, cell: int, cluster: int) -> int:
        """Host memory for one block, about."""
        columns = warps * cluster + 2 * _AGENTS
        state = warps * (2 * warps * cluster * 32 + columns) * 8
        return size + size // cell * (8 + 4 * columns + 2) + state

    def split(self) -> None:
        threads = self.threads
        self.known = self.state[:, :threads]
        self.fenced = self.state[:, threads : 2 * threads]
        self.seen = self.state[:, 2 * threads :]

    def refresh(self) -> None:
        super().refresh()
        # an agent's tag is above every floor
        self.floor = (self.seen[:, : self.warps].min(axis=1) << CLOCK_SHIFT | BELOW_CLOCK)[self.warp_index]

    # --- agents

    def agent(self, kind: str, number: int) -> int:
        """The agent's index; its column of `seen` and `reads` is `warps` further on."""
        key = (kind, number)
        found = self.agents.get(key)
        if found is None:
            found = self.agents[key] = len(self.agent_names)
            self.agent_names.append(key)
            if found >= self.capacity:
                self.state = np.pad(self.state, ((0, 0), (0, self.capacity)))
                self.reads = np.pad(self.reads, ((0, 0), (0, self.capacity)))
                self.capacity *= 2
                self.split()
        return found

    def agent_name(self, agent: int) -> str:
        kind, number = self.agent_names[agent]
        if kind == "mbarrier":
            rank, offset = divmod(number, 1 << RANK_SHIFT)
            where = f" of the cluster's block {rank}" if self.cluster > 1 else ""
            return f"a bulk copy that signals the mbarrier at shared {offset:#x}{where}"
        if kind == "bulk":
            return "an unfinished bulk store"
        return "a wgmma"

    def learn(self, warp: int, agent: int, clock: int) -> None:
        """The warp (of the batch) comes to know what the agent did up to its clock."""
        column = self.warps + agent
        self.seen[warp, column] = max(self.seen[warp, column], clock)

    # --- order

    def own(self, warp: int) -> tuple[int, slice]:
        """Columns of a warp of the batch: its own in `seen`, its lanes' in `known`."""
        column = warp % self.warps
        return column, slice(column * 32, column * 32 + 32)

    def sync_warps(self, warps: np.ndarray | None) -> None:
        chosen = np.arange(self.clock.size) if warps is None else warps
        column = chosen % self.warps
        clock = self.clock[chosen]
        self.seen[chosen, column] = clock
        self.known[chosen[:, None], column[:, None] * 32 + np.arange(32)] = clock[:, None]
        self.clock[chosen] += 1
        self.dirty = True

    def barrier_all(self, blocks: np.ndarray | None) -> None:
        for block in range(self.blocks) if blocks is None else blocks.tolist():
            rows = slice(block * self.block_warps, (block + 1) * self.block_warps)
            first = rows.start % self.warps
            top = self.state[rows].max(axis=0)
            clock = self.clock[rows]
            top[2 * self.threads + first : 2 * self.threads + first + self.block_warps] = clock
            top[first * 32 : (first + self.block_warps) * 32] = np.repeat(clock, 32)
            self.state[rows] = top
            self.clock[rows] += 1
        self.dirty = True

    def join(self, a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
        if a is None:
            return b.copy()
        if a.size < b.size:
            a = np.pad(a, (0, b.size - a.size))
        np.maximum(a[: b.size], b, out=a[: b.size])
        return a

    def arrive(self, warp: int) -> np.ndarray:
        row = self.state[warp].copy()
        column, lanes = self.own(warp)
        row[2 * self.threads + column] = self.clock[warp]
        row[lanes] = self.clock[warp]
        self.clock[warp] += 1
        self.dirty = True
        return row

    def release(self, warp: int, lanes: np.ndarray) -> np.ndarray:
        """What these lanes of one warp publish by a release of their own."""
        column = warp % self.warps
        others = np.ones(32, np.bool_)
        others[lanes & 31] = False
        busy = self.touched[warp * 32 : warp * 32 + 32][others] > self.seen[warp, column]
        if not busy.any():
            return self.arrive(warp)
        row = self.state[warp].copy()
        row[self.thread[lanes]] = self.clock[warp]
        self.clock[warp] += 1
        self.dirty = True
        return row

    def acquire(self, warp: int, row: np.ndarray) -> None:
        """The warp comes to know what `row` has."""
        mine = self.state[warp, : row.size]
        np.maximum(mine, row, out=mine)
        self.dirty = True

    def depart(self, warp: int, published: np.ndarray) -> None:
        self.acquire(warp, published)
        column, lanes = self.own(warp)
        self.seen[warp, column] = self.clock[warp]
        self.known[warp, lanes] = self.clock[warp]
        self.clock[warp] += 1

    def proxy_fence(self, lanes: np.ndarray) -> None:
        """`fence.proxy.async` of these lanes of the batch."""
        warps = self.warp_index[lanes]
        self.fenced[warps, self.thread[lanes]] = self.clock[warps]
        self.clock[np.unique(warps)] += 1
        self.dirty = True

    # --- the cluster's memory

    def locate(
        self, batch: Any, address: np.ndarray, lanes: np.ndarray, cluster: bool, counted: bool = False
    ) -> tuple[Any, Any]:
        """(block of the batch, offset in its shared memory) of addresses of lanes; checks the rank.

        `counted` is for what an mbarrier counts: its phase, not its thread, tells when it is over.
        """
        block = lanes // self.block_lanes
        if not cluster:
            return block, address - self.window[lanes]
        field = address >> RANK_SHIFT
        wrong = (field < 0) | (field >= self.cluster)
        if wrong.any():
            lane = int(lanes[np.flatnonzero(wrong)[0]])
            raise batch.fault(
                OutOfBounds,
                f"an address of no block of the cluster of {self.cluster},",
                lane,
                "shared::cluster",
                int(address[wrong][0]),
            )
        target = block - block % self.cluster + field
        far = target != block
        if far.any():
            dead = far & ~self.alive[target]
            if dead.any():
                place = int(np.flatnonzero(dead)[0])
                self.visit(batch, int(lanes[place]), int(target[place]))
            if not counted:
                visitors = lanes[far]
                self.remote[target[far], self.thread[visitors]] = self.clock[self.warp_index[visitors]]
        return target, address & ((1 << RANK_SHIFT) - 1)

    def visit(self, batch: Any, lane: int, target: int) -> None:
        """A lane is about to touch another block's shared memory: raise if that block has exited."""
        if not self.alive[target]:
            raise batch.fault(
                EarlyExit, f"access to the shared memory of block {int(batch.blocks[target])}, which has exited,", lane
            )

    def place(self, batch: Any, address: np.ndarray, size: int, sel: Any) -> np.ndarray:
        """Byte positions of addresses in the lanes' own blocks."""
        if self.cluster > 1:
            address = address - (self.window if sel is None else self.window[sel])
        return super().place(batch, address, size, sel)

    def place_cluster(self, batch: Any, address: np.ndarray, size: int, sel: Any) -> np.ndarray:
        """`place` for shared::cluster addresses."""
        lanes = np.arange(self.thread.size) if sel is None else sel
        target, offset = self.locate(batch, address, lanes, True)
        flat = super().place(batch, offset, size, sel)
        return flat + (target - lanes // self.block_lanes) * self.stride

    # --- ordinary accesses

    def check_read(self, batch: Any, cells: np.ndarray, sel: Any, address: np.ndarray, atomic: bool = False) -> None:
        super().check_read(batch, cells, sel, address, atomic)
        self.touch(sel)

    def check_write(
        self,
        batch: Any,
        cells: np.ndarray,
        sel: Any,
        address: np.ndarray,
        values: np.ndarray | None,
        atomic: bool = False,
        pending: bool = False,
    ) -> None:
        super().check_write(batch, cells, sel, address, values, atomic, pending)
        self.touch(sel)

    def touch(self, sel: Any) -> None:
        if sel is None:
            self.touched[...] = self.clock32
        else:
            self.touched[sel] = self.clock32[sel]

    def judge(
        self, batch: Any, last: np.ndarray, doubtful: np.ndarray, sel: Any, address: np.ndarray, verb: str, atomic: bool
    ) -> None:
        lanes = np.nonzero(doubtful)[0]
        tags = last[doubtful]
        me = lanes if sel is None else sel[lanes]
        row = self.warp_index[me]
        writer, clock = tags & THREAD, (tags & _CLOCKS) >> CLOCK_SHIFT
        agent = (tags & AGENT) != 0
        thread = np.where(agent, 0, writer)
        ordered = (clock <= self.known[row, thread]) | (thread == self.thread[me])
        if atomic:
            ordered |= (tags & ATOMIC) != 0
        if agent.any():
            column = np.where(agent, self.warps + writer, 0)
            ordered = np.where(agent, clock <= self.seen[row, column], ordered)
        ordered &= (tags & (PENDING | MBARRIER)) == 0
        bad = np.flatnonzero(~ordered)
        if not bad.size:
            return
        kind, message = self.problem(batch, int(tags[bad[0]]), verb)
        batch.fail(kind, message, int(lanes[bad[0]]), "shared", address)

    def problem(self, batch: Any, tag: int, verb: str) -> tuple[type[Hazard], str]:
        """What is wrong with an access to bytes of this tag that nothing ordered after it."""
        if tag & MBARRIER:
            return MbarrierMisuse, f"{verb} of the bytes of an mbarrier that was not invalidated,"
        if tag & AGENT:
            name = self.agent_name(tag & THREAD)
            return UnwaitedAsyncCopy, f"{verb} of data that {name} writes: its phase was not waited for,"
        who = self.who(batch, tag & THREAD)
        if tag >= PENDING:
            return UnwaitedAsyncCopy, f"{verb} of data that a cp.async of {who} still writes: it was not waited for,"
        if tag & ASYNC:
            return UnwaitedAsyncCopy, f"{verb} of data that {who} copied and waited for, with no barrier since,"
        return SharedMemoryRace, f"{verb} of what {who} wrote with nothing in between to order the two,"

    def judge_reads(self, batch, cells, ok, thread, warp, address, atomic) -> None:  # type: ignore[no-untyped-def]
        bad = np.argwhere(~ok)
        lanes, columns = bad[:, 0], bad[:, -1]
        touched = cells[lanes] if cells.ndim == 1 else cells[lanes, bad[:, 1]]
        readers = self.reader[touched]
        later = columns >= self.warps
        single = ~later & (readers >= 0) & (readers >> 5 == columns)
        batch_lane = lanes if batch.sel is None else batch.sel[lanes]
        known = self.known[self.warp_index[batch_lane], np.where(single, readers, 0)]
        fine = single & ((readers == thread[lanes]) | (known >= self.reads[touched, columns]))
        if atomic:
            fine |= ~later & ((self.last[touched] & ATOMIC) != 0)
        if fine.all():
            return
        first = int(np.flatnonzero(~fine)[0])
        if later[first]:
            name = self.agent_name(int(columns[first]) - self.warps)
            message = f"overwrite of what {name} still reads: nothing waited for it,"
            batch.fail(UnfinishedAsyncRead, message, int(lanes[first]), "shared", address)
        reader = int(readers[first])
        who = self.who(batch, reader) if single[first] else f"a lane of warp {int(columns[first]) % self.block_warps}"
        batch.fail(
            SharedMemoryRace,
            f"overwrite of what {who} read with nothing in between to order the two,",
            int(lanes[first]), "shared", address,
        )  # fmt: skip

    def who(self, batch: Any, thread: int) -> str:
        rank, place = divmod(thread, self.block_lanes)
        where = f" of the cluster's block {rank}" if self.cluster > 1 else ""
        return f"thread {batch.thread_of(place)}{where}"

    # --- asynchronous accesses

    def blame(self, batch: Any, kind: type[Hazard], message: str, lane: int, cell: int) -> Hazard:
        return batch.fault(kind, message, lane, "shared", (cell << self.cell_shift) % self.stride)

    def cells_at(self, where: Where, index: int) -> int:
        return where.start + index if isinstance(where, slice) else int(where[index])

    def check_async(
        self, batch: Any, lane: int, warps: list[int], where: Where, verb: str, *, proxy: bool = True
    ) -> None:
        """Raise unless an asynchronous operation of these warps (issued by `lane`) may touch the cells.

        `proxy` says that it goes through the asynchronous proxy, so that ordinary writes need their fences.
        """
        last = self.last[where]
        low, high = int(last.min()), int(last.max())
        tags = [low] if low == high else np.unique(last).tolist()
        view = self.state[warps[0]] if len(warps) == 1 else self.state[warps].min(axis=0)
        mine = int(self.thread[lane]) if len(warps) == 1 else -1
        for tag in tags:
            found = self.async_problem(batch, tag, view, mine, verb, proxy)
            if found is not None:
                cell = self.cells_at(where, int(np.flatnonzero(last == tag)[0]))
                raise self.blame(batch, *found, lane, cell)

    def async_problem(
        self, batch: Any, tag: int, view: np.ndarray, mine: int, verb: str, proxy: bool
    ) -> tuple[type[Hazard], str] | None:
        if tag == 0:
            return (UninitialisedRead, "read of shared memory that nothing has written") if verb == "read" else None
        writer, clock = tag & THREAD, (tag & _CLOCKS) >> CLOCK_SHIFT
        if tag & AGENT:
            ordered = view[2 * self.threads + self.warps + writer] >= clock
        else:
            ordered = tag < PENDING and not tag & MBARRIER and (writer == mine or view[writer] >= clock)
        if not ordered:
            return self.problem(batch, tag, verb)
        if proxy and not tag & AGENT and view[self.threads + writer] < clock:
            who = self.who(batch, writer)
            return (
                MissingProxyFence,
                f"asynchronous {verb} of what {who} wrote, without a fence.proxy.async by it since,",
            )
        return None

    def check_bulk_write(self, batch: Any, lane: int, where: slice, tag: int, *, proxy: bool = True) -> None:
        """An asynchronous write issued by `lane`; `tag` is what it leaves behind."""
        warp = int(self.warp_index[lane])
        self.check_async(batch, lane, [warp], where, "overwrite", proxy=proxy)
        reads, limit = self.reads[where], self.seen[warp]
        late = np.flatnonzero(reads.max(axis=0) > limit)
        for column in late.tolist():
            clocks = reads[:, column]
            bad = clocks > limit[column]
            if column < self.warps:
                readers = self.reader[where]
                single = (readers >= 0) & (readers >> 5 == column)
                bad &= ~(single & ((readers == self.thread[lane]) | (self.known[warp, readers * single] >= clocks)))
            if not bad.any():
                continue
            place = int(np.flatnonzero(bad)[0])
            cell = self.cells_at(where, place)
            if column >= self.warps:
                name = self.agent_name(column - self.warps)
                message = f"overwrite by a bulk copy of what {name} still reads: nothing waited for it,"
                raise self.blame(batch, UnfinishedAsyncRead, message, lane, cell)
            message = f"overwrite by a bulk copy of what warp {column % self.block_warps} read"
            message += " with nothing in between to order the two,"
            raise self.blame(batch, SharedMemoryRace, message, lane, cell)
        self.last[where] = tag

    def agent_tag(self, agent: int, clock: int) -> int:
        return AGENT | clock << CLOCK_SHIFT | agent

    def note_async_read(self, where: Where, agent: int, number: int) -> None:
        self.reads[where, self.warps + agent] = number

    # --- exit

    def leave(self, batch: Any, block: int, lane: int) -> None:
        """All threads of a block have exited: nobody may still touch its memory."""
        self.alive[block] = False
        rows = slice(block * self.block_warps, (block + 1) * self.block_warps)
        late = np.flatnonzero(self.remote[block] > self.known[rows].max(axis=0))
        if late.size:
            raise batch.fault(
                EarlyExit,
                f"the block exits while {self.who(batch, int(late[0]))} may still access its shared memory:"
                " end with barrier.cluster,",
                lane,
            )
