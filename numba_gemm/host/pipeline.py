"""Runs the steps of a product on an engine: copies in both directions and multiplications, all at the same time.

==================  ==========================================================================================
who                 does what
==================  ==========================================================================================
calling thread      takes the steps in order; has chunks copied to staging buffers; puts copies to the device,
                    launches and event waits on their streams, strictly in order; calls ``progress``
copiers             copy from the arrays into staging buffers, and from staging buffers into C; never wait
drainer             takes strips of a C that isn't page-locked in order; puts the copies to the host on their stream,
                    waits for each, and has its staging buffer emptied
stream ``up``       copies to the device
streams ``compute`` multiplications, by turns
stream ``down``     copies to the host
==================  ==========================================================================================

What may run when is decided by events alone:

* a multiplication waits for the last of the copies to the device that come before it in the order of the steps (the
  ``up`` stream is in order; copies that need no staging buffer are put on it ahead of multiplications before them);
* what is first to write to a slot after a :class:`~numba_gemm.host.steps.Claim` waits for all that used the slot
  before; what adds to a strip of C waits for all that wrote to its slot;
* the copy of a strip to the host waits for its multiplication;
* a staging buffer is filled again once the copy out of it is done, and is copied to again once it is emptied.

Nothing waits in a circle: copiers never wait, and everything else waits only for what is before it in the order of the
steps.

Threads of one interpreter take its lock by turns, and each turn costs some ten µs where the next thread was asleep, so
chunks are megabytes long, and the engine's short calls keep the lock. Where all three arrays are page-locked there are
no chunks, and the calling thread does everything: with strips handed to the drainer, each launch took 0.2 ms to come
back from (4096 cubed on an H200's host), about as long as its strip took to multiply.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays.operand import byte_range
from numba_gemm.host.engine import Engine
from numba_gemm.host.steps import Claim, Download, Home, Multiply, Part, Slot, Span, Step, Upload, uploads_first
from numba_gemm.host.transfer import Chunk, Transfer, copy_elements, staged_view

#: Told how many multiply-adds are done, of how many.
Progress = Callable[[int, int], Any]

#: Called with a multiplication, the addresses of A and B if they were on the device before, else their homes' and
#: C's; launches it on a stream.
Launch = Callable[[Multiply, Callable[[Home], int], Any], None]


@dataclass
class _SlotState:
    """What a slot's next user may have to wait for: by stream the last event, or the future of one.

    A stream is in order, so that waiting for its last event is waiting for all before it.
    """

    users: dict[Any, Any] = field(default_factory=dict)  # since the last claim
    before: dict[Any, Any] = field(default_factory=dict)  # of the block before
    waited: set[Any] = field(default_factory=set)  # streams that have waited for all of ``before``
    ready: Any = None  # the last copy into it
    depth: Span | None = None  # of k, of the last multiplication into it
    below: dict[Any, Any] = field(default_factory=dict)  # multiplications of the depths before that


@dataclass
class _Buffer:
    """A staging buffer and what was last done with it."""

    memory: npt.NDArray[np.uint8]
    event: Any = None  # of the last copy out of it to the device, or into it from there
    job: Future[Any] | None = None  # that fills or empties it


@dataclass(frozen=True)
class Executors:
    """The threads of a pipeline; ``drainer`` has one."""

    copiers: Executor
    drainer: Executor
    threads: int


class Pipeline:
    """One run of a list of steps.

    Parameters
    ----------
    engine : to run on; used by this pipeline alone until :meth:`run` is done.
    executors : its threads.
    slots : address of each slot.
    arrays : for each of ``"a"``, ``"b"``, ``"c"`` that is on the host, the (batch, rows, columns) array of each product
        of the list; of any strides.
    dtypes : element type of each on the device.
    launch : launches a multiplication.
    progress, total : called from the calling thread with the multiply-adds done so far, and ``total``.
    """

    def __init__(
        self,
        engine: Engine,
        executors: Executors,
        *,
        slots: Mapping[Slot, int],
        arrays: Mapping[str, Sequence[npt.NDArray[Any]]],
        dtypes: Mapping[str, np.dtype[Any]],
        launch: Launch | None = None,
        progress: Progress | None = None,
        total: int = 0,
    ) -> None:
        self._engine = engine
        self._executors = executors
        self._addresses = slots
        self._arrays = arrays
        self._dtypes = dtypes
        self._launch = launch
        self._progress = progress
        self._total = total
        self._slots = {slot: _SlotState() for slot in slots}
        self._queue: deque[tuple[Future[Any] | None, Callable[[], None]]] = deque()
        self._in: deque[_Buffer] = deque()
        self._out: deque[_Buffer] = deque()
        self._drains: deque[Future[Any]] = deque()
        self._copied: deque[tuple[Any, _Buffer, npt.NDArray[Any], npt.NDArray[Any]]] = deque()
        self._jobs: deque[Future[Any]] = deque()
        self._launched: deque[tuple[Any, int]] = deque()
        self._done = self._reported = 0
        self._multiplications = 0
        self._uploaded: deque[Any] = deque()  # events of the uploads that a multiplication may still wait for
        self._uploads_passed = 0  # those that came before them
        self._page_locked: dict[tuple[str, int], bool] = {}
        self._last: Any = None  # event of the last multiplication
        self._aborted = False

    def run(self, steps: Iterable[Step]) -> None:
        """Carry the steps out; returns when everything is done.

        Whatever is raised, by ``progress`` too, nothing of this run touches an array or device memory any more when
        it leaves here.
        """
        try:
            for step in uploads_first(steps, self._is_direct):
                if isinstance(step, Upload):
                    self._upload(step)
                else:
                    self._queue.append((None, self._action(step)))
                self._advance()
                self._report()
            while self._queue:
                self._take()
            for waiting in (self._drains, self._jobs):
                while waiting:
                    waiting[0].result()
                    waiting.popleft()
                    self._report()
            while self._launched:
                self._engine.synchronize(self._launched[0][0])
                self._report()
            self._engine.synchronize_all()
        except BaseException:
            self._abort()
            raise

    # --- the queue: actions in the order of the steps; a chunk's waits until the chunk is filled

    def _advance(self) -> None:
        """Do what can be done without waiting for a copier."""
        while self._queue:
            filled = self._queue[0][0]
            if filled is not None and not filled.done():
                return
            self._take()

    def _take(self) -> None:
        filled, action = self._queue[0]
        if filled is not None:
            filled.result()
        self._queue.popleft()
        action()

    def _action(self, step: Claim | Multiply | Download) -> Callable[[], None]:
        if isinstance(step, Claim):
            return lambda: self._claim(step.slot)
        if isinstance(step, Multiply):
            return lambda: self._multiply(step)
        return lambda: self._download(step)

    # --- copies to the device

    def _upload(self, step: Upload) -> None:
        transfer = self._transfer(step.part, step.home)
        engine, up, slot = self._engine, self._engine.up, step.home.slot
        self._queue.append((None, lambda: self._wait_before(self._slots[slot], up)))
        lines = self._lines(step, transfer)
        if lines is not None:
            address, pitch, count = lines
            device = transfer.device

            def copy() -> None:
                engine.copy(device, transfer.pitch, address, pitch, transfer.line_bytes, count, up, to_device=True)

            self._queue.append((None, copy))
        else:
            for chunk in transfer.chunks(
                engine.staging_in[0].nbytes, self._executors.threads, step.home.nbytes(transfer.dtype)
            ):
                self._fill(transfer, chunk)
        self._queue.append((None, lambda: self._ready(self._slots[slot])))

    def _fill(self, transfer: Transfer, chunk: Chunk) -> None:
        engine = self._engine
        if not self._in:
            self._in.extend(_Buffer(memory) for memory in engine.staging_in)
        buffer = self._in.popleft()
        while buffer.job is not None:  # its copy to the device isn't on the stream yet
            self._take()
        self._advance()  # the stream should not run dry while this thread waits
        if buffer.event is not None:
            engine.synchronize(buffer.event)
            buffer.event = None
        staged = staged_view(chunk, buffer.memory, transfer.dtype)
        buffer.job = self._executors.copiers.submit(copy_elements, staged, transfer.host[chunk.index])
        self._in.append(buffer)

        def copy() -> None:
            source = buffer.memory.__array_interface__["data"][0]
            width = chunk.shape[2] * transfer.dtype.itemsize
            lines = chunk.lines
            if chunk.staged_pitch == chunk.pitch:
                width, lines = chunk.pitch * lines, 1
            engine.copy(
                chunk.device, chunk.pitch, source, chunk.staged_pitch, width, lines, engine.up, to_device=True
            )  # fmt: skip
            buffer.event = engine.record(engine.up)
            buffer.job = None

        self._queue.append((buffer.job, copy))

    def _ready(self, state: _SlotState) -> None:
        state.ready = state.users[self._engine.up] = self._engine.record(self._engine.up)
        self._uploaded.append(state.ready)

    def _lines(self, step: Upload | Download, transfer: Transfer) -> tuple[int, int, int] | None:
        """Address, pitch and number of the host's lines if they can be copied without staging, else None."""
        lines = transfer.direct()
        if lines is None or self._is_direct(step):
            return lines
        return lines if self._engine.is_page_locked(*_extent(lines, transfer.line_bytes)) else None

    def _is_direct(self, step: Upload | Download) -> bool:
        """Whether the whole array that is copied from or to lies in page-locked memory."""
        key = step.home.slot.matrix, step.part.product
        if key not in self._page_locked:
            array = self._arrays[key[0]][key[1]]
            start = array.__array_interface__["data"][0]
            low, high = byte_range(start, array.shape, array.strides, array.itemsize)
            self._page_locked[key] = self._engine.is_page_locked(low, high - low)
        return self._page_locked[key]

    # --- slots

    def _claim(self, slot: Slot) -> None:
        self._slots[slot] = _SlotState(before=self._slots[slot].users)

    def _wait_before(self, state: _SlotState, stream: Any) -> None:
        """Let a stream wait for all that used the slot's last block."""
        if stream not in state.waited:
            state.waited.add(stream)
            self._wait(stream, state.before)

    def _wait(self, stream: Any, users: Mapping[Any, Any]) -> None:
        for other, user in users.items():
            event = user.result() if isinstance(user, Future) else user
            if other != stream and event is not None:
                self._engine.wait(stream, event)

    # --- multiplications

    def _multiply(self, step: Multiply) -> None:
        engine = self._engine
        stream = engine.compute[self._multiplications % len(engine.compute)]
        self._multiplications += 1
        target = self._slots[step.c.slot]
        used = [self._slots[home.slot] for home in (step.a, step.b) if home is not None]
        if step.copies:
            while self._uploads_passed < step.copies - 1:
                self._uploaded.popleft()
                self._uploads_passed += 1
            engine.wait(stream, self._uploaded[0])
        if step.depth != target.depth:
            target.depth = step.depth
            target.below = {other: user for other, user in target.users.items() if other in engine.compute}
        if step.accumulate:
            self._wait(stream, target.below)
        elif target.ready is not None:
            engine.wait(stream, target.ready)
        else:
            self._wait_before(target, stream)
        assert self._launch is not None
        self._launch(step, self._address, stream)
        done = self._last = engine.record(stream)
        for state in (target, *used):
            state.users[stream] = done
        if self._progress is None:
            return
        _, batch, rows, columns = step.part
        size = (batch[1] - batch[0]) * (rows[1] - rows[0]) * (columns[1] - columns[0])
        self._launched.append((done, size * (step.depth[1] - step.depth[0])))

    def _address(self, home: Home) -> int:
        return self._addresses[home.slot]

    # --- copies to the host

    def _download(self, step: Download) -> None:
        state = self._slots[step.home.slot]
        written = self._last  # its multiplication, the step before
        transfer = self._transfer(step.part, step.home)
        engine, down = self._engine, self._engine.down
        lines = self._lines(step, transfer)
        if lines is not None:
            address, pitch, count = lines
            if written is not None:
                engine.wait(down, written)
            engine.copy(
                address, pitch, transfer.device, transfer.pitch, transfer.line_bytes, count, down, to_device=False
            )
            state.users[down] = engine.record(down)
            return
        strip = self._executors.drainer.submit(self._drain, transfer, written, step.home.nbytes(transfer.dtype))
        state.users[down] = strip
        self._drains.append(strip)

    def _drain(self, transfer: Transfer, written: Any, block_bytes: int) -> Any:
        """In the drainer: put a strip's copies on the stream; the event that marks them."""
        engine, down = self._engine, self._engine.down
        if self._aborted:
            return None
        engine.bind()
        if written is not None:
            engine.wait(down, written)
        event = None
        if not self._out:
            self._out.extend(_Buffer(memory) for memory in engine.staging_out)
        for chunk in transfer.chunks(engine.staging_out[0].nbytes, self._executors.threads, block_bytes):
            buffer = self._out.popleft()
            self._out.append(buffer)
            while buffer.event is not None:
                self._empty_first()
            if buffer.job is not None:
                buffer.job.result()
            if self._aborted:
                return event
            target = buffer.memory.__array_interface__["data"][0]
            width, count = chunk.shape[2] * transfer.dtype.itemsize, chunk.lines
            if chunk.staged_pitch == chunk.pitch:
                width, count = chunk.pitch * count, 1
            engine.copy(target, chunk.staged_pitch, chunk.device, chunk.pitch, width, count, down, to_device=False)
            event = engine.record(down)
            staged = staged_view(chunk, buffer.memory, transfer.dtype)
            buffer.event = event
            self._copied.append((event, buffer, transfer.host[chunk.index], staged))
        # After the strips that are waiting already, whose copies should be on the stream first.
        self._drains.append(self._executors.drainer.submit(self._empty_all))
        return event

    def _empty_all(self) -> None:
        """In the drainer: have all staging buffers emptied that a copy was put on the stream for."""
        self._engine.bind()
        while self._copied and not self._aborted:
            self._empty_first()

    def _empty_first(self) -> None:
        event, buffer, target, staged = self._copied[0]
        self._engine.synchronize(event)
        self._copied.popleft()
        buffer.event = None
        buffer.job = self._executors.copiers.submit(copy_elements, target, staged)
        self._jobs.append(buffer.job)

    # --- where things lie

    def _transfer(self, part: Part, home: Home) -> Transfer:
        matrix = home.slot.matrix
        dtype = self._dtypes[matrix]
        view = self._arrays[matrix][part.product][slice(*part.batch), slice(*part.rows), slice(*part.columns)]
        if home.column_major:
            view = view.swapaxes(1, 2)
        offset = home.element(part.batch[0], part.rows[0], part.columns[0])
        return Transfer(
            view,
            self._addresses[home.slot] + offset * dtype.itemsize,
            home.frame.pitch * dtype.itemsize,
            home.frame.elements * dtype.itemsize,
            dtype,
            view.shape[2] == home.frame.width,
        )

    # --- progress, and the end

    def _report(self) -> None:
        while self._launched and self._engine.is_done(self._launched[0][0]):
            self._done += self._launched.popleft()[1]
        while len(self._jobs) > 1 and self._jobs[0].done():
            self._jobs.popleft().result()
        while len(self._drains) > 1 and self._drains[0].done():
            self._drains.popleft().result()
        if self._progress is not None and self._done > self._reported:
            self._reported = self._done
            self._progress(self._done, self._total)

    def _abort(self) -> None:
        """Stop, and wait for everything that still touches an array or device memory."""
        self._aborted = True
        waiting = [filled for filled, _ in self._queue if filled is not None]
        self._queue.clear()
        for future in waiting:
            future.cancel()
        for futures in (deque(waiting), self._drains, self._jobs):  # in this order: each may add to the next
            while futures:
                with contextlib.suppress(BaseException):
                    futures.popleft().result()
        with contextlib.suppress(Exception):
            self._engine.synchronize_all()


def _extent(lines: tuple[int, int, int], width: int) -> tuple[int, int]:
    """First address and bytes of lines that lie ``pitch`` apart."""
    address, pitch, count = lines
    return address, pitch * (count - 1) + width
