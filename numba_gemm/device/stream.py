"""Streams, events and captured graphs of the CUDA driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba_gemm.device.driver import check, driver


class Stream:
    """A non-blocking stream. ``int(stream)`` is its handle."""

    def __init__(self) -> None:
        cu = driver()
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._handle = check(cu.cuStreamCreate(int(flags)), "cuStreamCreate")

    def __int__(self) -> int:
        return int(self._handle)

    def synchronize(self) -> None:
        """Wait for the work on this stream; a kernel's fault shows here."""
        synchronize_stream(int(self))

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle is not None:
            driver().cuStreamDestroy(handle)  # work already given to it is still done


def synchronize_stream(stream: int, *, after: str = "") -> None:
    """Wait for a stream; ``after`` names the work in the error if it failed."""
    check(driver().cuStreamSynchronize(stream), f"waiting for {after or 'the stream'}")


class Event:
    """A point in a stream's work, with a time."""

    def __init__(self) -> None:
        cu = driver()
        self._handle = check(cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DEFAULT)), "cuEventCreate")

    def record(self, stream: int) -> None:
        """Mark the work given to ``stream`` so far."""
        check(driver().cuEventRecord(self._handle, stream), "cuEventRecord")

    def synchronize(self) -> None:
        """Wait until the marked work is done."""
        check(driver().cuEventSynchronize(self._handle), "cuEventSynchronize")

    def microseconds_since(self, start: Event) -> float:
        """GPU time between two finished events, in µs."""
        milliseconds = check(driver().cuEventElapsedTime(start._handle, self._handle), "cuEventElapsedTime")
        return float(milliseconds) * 1e3

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle is not None:
            driver().cuEventDestroy(handle)


class Graph:
    """Work captured from a stream, to be replayed by one launch; ``handle`` is the driver's."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable
        self.handle = int(executable)

    def replay(self, stream: int) -> None:
        """Launch the captured work on ``stream``."""
        check(driver().cuGraphLaunch(self._executable, stream), "cuGraphLaunch")

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process the bindings may be gone before the graph
            driver().cuGraphExecDestroy(self._executable)


@contextmanager
def capture(stream: int, into: list[Graph]) -> Iterator[None]:
    """Capture what is launched on ``stream`` inside the block and append the graph to ``into``."""
    cu = driver()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(cu.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
    try:
        yield
    finally:
        graph = check(cu.cuStreamEndCapture(stream), "cuStreamEndCapture")
    executable = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
    into.append(Graph(executable))


def wait_event(stream: int, event: Event) -> None:
    """Make later work on ``stream`` wait for what ``event`` marks, without stopping the host."""
    check(driver().cuStreamWaitEvent(stream, event._handle, 0), "cuStreamWaitEvent")
