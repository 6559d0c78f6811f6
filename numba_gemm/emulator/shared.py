"""The shared memory of a batch of blocks, with what is needed to tell whether two accesses were ordered.

Order is happens-before, by vector clocks per warp. Every warp has a clock; a barrier makes all that its
participants did visible to each of them; a `.sync` instruction orders the lanes of its own warp. A cell (1, 2 or 4
bytes: the smallest shared access of the program) remembers its last writer, and for each warp the clock of its
last read. Tags are integers: clock << 18 | atomic << 17 | asynchronous << 16 | thread in block; `proxies` adds more.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from .hazards import Misaligned, OutOfBounds, SharedMemoryRace, UninitialisedRead, UnwaitedAsyncCopy
from .memory import UINT

ASYNC = 1 << 16
ATOMIC = 1 << 17
CLOCK_SHIFT = 18
BELOW_CLOCK = (1 << CLOCK_SHIFT) - 1
PENDING = 1 << 62
THREAD = 0xFFFF


class SharedMemory:
    """`size` bytes for each of `blocks` blocks of `warps` warps."""

    def __init__(self, blocks: int, size: int, warps: int, cell: int) -> None:
        self.size = size
        self.cell = cell
        self.cell_shift = cell.bit_length() - 1
        self.blocks = blocks
        self.warps = warps
        self.stride = -(-size // 16) * 16
        self.data = np.zeros(blocks * self.stride, np.uint8)
        cells = blocks * self.stride // cell
        self.last = np.zeros(cells, np.int64)
        self.reads = np.zeros((cells, warps), np.int32)
        self.reader = np.full(cells, -1, np.int16)
        threads = warps * 32
        self.base = np.repeat(np.arange(blocks, dtype=np.int64) * self.stride, threads)
        self.warp_index = np.arange(blocks * threads) >> 5  # over all warps of the batch
        self.warp = self.warp_index % warps
        self.thread = np.tile(np.arange(threads), blocks)
        self.thread16 = self.thread.astype(np.int16)
        self.clock = np.ones(blocks * warps, np.int64)
        # seen[w, v]: the clock up to which warp v's accesses (of the same block) come before warp w's next one
        self.seen = np.zeros((blocks * warps, warps), np.int64)
        self.views: dict[tuple[int, int], np.ndarray] = {}
        self.pending: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.refresh()

    @staticmethod
    def bytes_per_block(size: int, warps: int, cell: int) -> int:
        return size + size // cell * (8 + 4 * warps + 2)

    def refresh(self) -> None:
        self.dirty = False
        self.tag = (self.clock << CLOCK_SHIFT)[self.warp_index] | self.thread
        self.clock32 = self.clock.astype(np.int32)[self.warp_index]
        self.floor = (self.seen.min(axis=1) << CLOCK_SHIFT | BELOW_CLOCK)[self.warp_index]

    # --- order

    def sync_warps(self, warps: np.ndarray | None) -> None:
        """A `.sync` instruction of these warps (of the batch; None: all): orders each one's own lanes."""
        own = np.arange(self.clock.size) % self.warps
        if warps is None:
            self.seen[np.arange(self.clock.size), own] = self.clock
            self.clock += 1
        else:
            self.seen[warps, own[warps]] = self.clock[warps]
            self.clock[warps] += 1
        self.dirty = True

    def barrier_all(self, blocks: np.ndarray | None) -> None:
        """A barrier of every warp of these blocks (None: of all)."""
        clock = self.clock.reshape(self.blocks, self.warps)
        seen = self.seen.reshape(self.blocks, self.warps, self.warps)
        chosen = slice(None) if blocks is None else blocks
        top = clock[chosen].max(axis=1)
        seen[chosen] = top[:, None, None]
        clock[chosen] = top[:, None] + 1
        self.dirty = True

    def join(self, a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
        """What two who arrive at a barrier publish together; `a` may be overwritten."""
        return b if a is None else np.maximum(a, b)

    def arrive(self, warp: int) -> np.ndarray:
        """What a warp of the batch publishes by arriving at a barrier: its row of clocks, itself included."""
        row = self.seen[warp].copy()
        row[warp % self.warps] = self.clock[warp]
        return row

    def depart(self, warp: int, published: np.ndarray) -> None:
        """The warp leaves a barrier at which `published` was gathered."""
        np.maximum(self.seen[warp], published, out=self.seen[warp])
        self.seen[warp, warp % self.warps] = self.clock[warp]
        self.clock[warp] += 1
        self.dirty = True

    # --- addresses

    def place(self, batch: Any, address: np.ndarray, size: int, sel: Any) -> np.ndarray:
        """Byte positions in `data` for int64 addresses of the active lanes; checks bounds and alignment."""
        if size > 1:
            wrong = address & (size - 1)
            if wrong.any():
                batch.fail(Misaligned, f"{size}-byte access", int(np.flatnonzero(wrong)[0]), "shared", address)
        if address.min() < 0 or address.max() > self.size - size:
            lane = int(np.flatnonzero((address < 0) | (address > self.size - size))[0])
            batch.fail(OutOfBounds, f"{size}-byte access, {self.size} bytes of shared memory,", lane, "shared", address)
        return address + (self.base if sel is None else self.base[sel])

    def cells(self, flat: np.ndarray, size: int) -> np.ndarray:
        """The cells under `size` bytes at each position: [lanes], or [lanes, n] where an access covers n."""
        first = flat >> self.cell_shift
        count = size >> self.cell_shift
        return first if count <= 1 else first[:, None] + np.arange(count)

    def view(self, width: int, words: int) -> np.ndarray:
        key = (width, words)
        found = self.views.get(key)
        if found is None:
            found = self.data.view(UINT[width])
            if words > 1:
                found = found.reshape(-1, words)
            self.views[key] = found
        return found

    # --- checks

    def check_read(self, batch: Any, cells: np.ndarray, sel: Any, address: np.ndarray, atomic: bool = False) -> None:
        """Raise if the cells may not be read now by the active lanes, and remember the read."""
        if self.dirty:
            self.refresh()
        last = self.last[cells]
        floor, tag, thread = self.floor, self.tag, self.thread16
        clock, warp = self.clock32, self.warp
        if sel is not None:
            floor, tag, thread, clock, warp = floor[sel], tag[sel], thread[sel], clock[sel], warp[sel]
        if cells.ndim == 2:
            floor, tag, thread = floor[:, None], tag[:, None], thread[:, None]
            clock, warp = clock[:, None], warp[:, None]
        ok = last <= floor
        if not ok.all():
            self.judge(batch, last, ~ok, sel, address, "read", atomic)
        if last.min() == 0:
            where = last == 0
            lane = int(np.flatnonzero(where if where.ndim == 1 else where.any(axis=1))[0])
            batch.fail(UninitialisedRead, "read of shared memory that nothing has written", lane, "shared", address)
        self.reads[cells, warp] = clock
        self.reader[cells] = thread
        if cells.ndim == 1:
            shared = self.reader[cells] != thread
            if shared.any():
                self.reader[cells[shared]] = -2
        else:
            shared = self.reader[cells[:, 0]] != thread[:, 0]
            if shared.any():
                self.reader[cells[shared]] = -2

    def judge(
        self, batch: Any, last: np.ndarray, doubtful: np.ndarray, sel: Any, address: np.ndarray, verb: str, atomic: bool
    ) -> None:
        """Decide about accesses whose last write isn't known to all warps; raises the hazard if there is one."""
        if last.ndim == 2:
            lanes, _ = np.nonzero(doubtful)
        else:
            lanes = np.flatnonzero(doubtful)
        tags = last[doubtful]
        me = lanes if sel is None else sel[lanes]
        writer = tags & THREAD
        clock = tags >> CLOCK_SHIFT
        ordered = (clock <= self.seen[self.warp_index[me], writer >> 5]) | (writer == self.thread[me])
        ordered &= tags < PENDING
        if atomic:
            ordered |= (tags & ATOMIC) != 0
        bad = np.flatnonzero(~ordered)
        if not bad.size:
            return
        first = bad[0]
        other = batch.thread_of(int(writer[first]))
        if tags[first] >= PENDING:
            batch.fail(
                UnwaitedAsyncCopy,
                f"{verb} of data that a cp.async of thread {other} still writes: it was not waited for,",
                int(lanes[first]), "shared", address,
            )  # fmt: skip
        if tags[first] & ASYNC:
            batch.fail(
                UnwaitedAsyncCopy,
                f"{verb} of data that thread {other} copied and waited for, with no barrier since,",
                int(lanes[first]), "shared", address,
            )  # fmt: skip
        batch.fail(
            SharedMemoryRace,
            f"{verb} of what thread {other} wrote with nothing in between to order the two,",
            int(lanes[first]), "shared", address,
        )  # fmt: skip

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
        """Raise if the cells may not be written now by the active lanes, and remember the write.

        `values`, one row per lane, decides whether lanes of one warp that write the same cell in one instruction
        agree.
        """
        if self.dirty:
            self.refresh()
        last = self.last[cells]
        floor, tag, thread = self.floor, self.tag, self.thread16
        clock, warp, index = self.clock32, self.warp, self.warp_index
        if sel is not None:
            floor, tag, thread = floor[sel], tag[sel], thread[sel]
            clock, warp, index = clock[sel], warp[sel], index[sel]
        two = cells.ndim == 2
        wide = floor[:, None] if two else floor
        ok = last <= wide
        if not ok.all():
            self.judge(batch, last, ~ok, sel, address, "overwrite", atomic)
        reads = self.reads[cells]
        limit = self.seen[index]
        ok = reads <= (limit[:, None, :] if two else limit)
        if not ok.all():
            self.judge_reads(batch, cells, ok, thread, warp, address, atomic)
        if pending:
            tag = thread.astype(np.int64) | PENDING
        elif atomic:
            tag = tag | ATOMIC
        wide = tag[:, None] if two else tag
        self.last[cells] = wide
        if atomic:
            return
        clash = self.last[cells] != wide
        if clash.any():
            self.judge_clash(batch, cells, clash, tag, address, values)

    def judge_reads(self, batch, cells, ok, thread, warp, address, atomic) -> None:  # type: ignore[no-untyped-def]
        bad = np.argwhere(~ok)
        lanes, reader_warps = bad[:, 0], bad[:, -1]
        touched = cells[lanes] if cells.ndim == 1 else cells[lanes, bad[:, 1]]
        readers = self.reader[touched]
        guilty = (reader_warps != warp[lanes]) | (readers != thread[lanes])
        if atomic:
            guilty &= (self.last[touched] & ATOMIC) == 0
        if not guilty.any():
            return
        first = int(np.flatnonzero(guilty)[0])
        reader, reader_warp = int(readers[first]), int(reader_warps[first])
        who = f"thread {batch.thread_of(reader)}" if reader >> 5 == reader_warp else f"a lane of warp {reader_warp}"
        batch.fail(
            SharedMemoryRace,
            f"overwrite of what {who} read with nothing in between to order the two,",
            int(lanes[first]), "shared", address,
        )  # fmt: skip

    def judge_clash(self, batch, cells, clash, tag, address, values) -> None:  # type: ignore[no-untyped-def]
        """Lanes that wrote the same cell in one instruction: allowed within a warp if the values agree."""
        lanes, columns = np.nonzero(clash) if clash.ndim == 2 else (np.flatnonzero(clash), None)
        winner_of = {}
        flat = cells if cells.ndim == 2 else cells[:, None]
        final = self.last[flat]
        for lane, column in np.argwhere(final == tag[:, None]):
            winner_of[int(flat[lane, column])] = int(lane)
        for place, lane in enumerate(lanes.tolist()):
            column = 0 if columns is None else int(columns[place])
            winner = winner_of.get(int(flat[lane, column]))
            if winner is None:
                continue
            same_warp = (tag[winner] ^ tag[lane]) & (THREAD & ~31) == 0
            if same_warp and values is not None and np.array_equal(values[winner], values[lane]):
                continue
            other = batch.thread_of(int(tag[winner]) & THREAD)
            batch.fail(
                SharedMemoryRace,
                f"write to the bytes that thread {other} writes in the same instruction,",
                lane, "shared", address,
            )  # fmt: skip

    # --- asynchronous copies

    def complete(self, threshold: np.ndarray) -> None:
        """End the pending copies of group number < threshold[thread of the batch] (int64, all threads)."""
        if self.dirty:
            self.refresh()
        left: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        for entry in self.pending:
            done = entry[1] < threshold[entry[0]]
            if not done.any():
                left.append(entry)
                continue
            if not done.all():
                left.append((entry[0][~done], entry[1][~done], entry[2][~done]))
            lanes, cells = entry[0][done], entry[2][done]
            tag = self.tag[lanes] | ASYNC
            old = self.last[cells]
            self.last[cells] = np.where(old >= PENDING, tag if cells.ndim == 1 else tag[:, None], old)
        self.pending = left
