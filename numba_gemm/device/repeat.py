"""A launch that is repeated on the same addresses, as a graph of one node, which takes half of the driver's time.

On an H200's host a launch from Python takes 4.8 µs and one of a graph that holds nothing else 1.9 µs
(bench/host_overhead.py). A graph holds the launch's parameters, so each is for one set of addresses; and one graph may
not be launched by two threads at a time, so each is one thread's. It is made once a thread has launched on the same
addresses :data:`REPEATS` times. When :data:`GRAPHS_LIMIT` are there, launches on other addresses go without, and after
:data:`PATIENCE` of them all graphs are let go of. One that is still running is freed when it is done.

Only calls with an ``out`` go this way: results that are made anew lie here and there, and would only leave graphs
behind, of some 0.1 MiB each. While a stream is captured, a graph can't be launched on it, and the launch itself is
what is captured.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

from numba_gemm.device.driver import check, driver
from numba_gemm.device.launch import PreparedLaunch, driver_function, quick_driver_function
from numba_gemm.device.stream import Graph, Stream, capture
from numba_gemm.errors import CudaError

#: Launches on the same addresses, in one thread, before a graph is made, which takes as long as some twenty of them.
REPEATS = 16
#: Graphs that are kept, and sets of addresses whose launches are counted.
GRAPHS_LIMIT, COUNTS_LIMIT = 128, 4096
#: Launches without a graph after which graphs that were made before give way.
PATIENCE = 100_000
#: The default stream of all threads, which can't be captured; it has a second handle.
LEGACY_STREAM, _LEGACY_TOO = 0, 1

#: Which launch, which thread, addresses, stream.
Key = tuple[int, int, int, int, int, int]
_graphs: dict[Key, Graph] = {}
_counts: dict[Key, int] = {}
_numbers = itertools.count()


def repeated(direct: PreparedLaunch) -> tuple[PreparedLaunch, int]:
    """The same launch, by a graph where it is repeated; and its number, the first part of its graphs' keys.

    Parameters
    ----------
    direct : launches on three addresses and a stream of the current context, which is the same at every call.
    """
    number, get_ident = next(_numbers), threading.get_ident
    replay: Callable[..., int] | None = None

    def launch(first: int, second: int, third: int, stream: int) -> None:
        nonlocal replay
        key = (number, get_ident(), first, second, third, stream)
        graph = find_graph(key)
        if graph is not None and (stream <= _LEGACY_TOO or not _is_captured(stream)):
            replay = replay or load_replay()
            if not replay(graph.handle, stream):
                return
            _graphs.pop(key, None)  # the launch itself says what is wrong
        direct(first, second, third, stream)
        if graph is None:
            _count(key, direct)

    return launch, number


#: The graph of a :data:`Key`, or None.
find_graph: Callable[[Key], Graph | None] = _graphs.get


def load_replay() -> Callable[..., int]:
    """What launches a graph's handle on a stream and returns the driver's error code."""
    return driver_function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p)


_turned_away = itertools.count(1)


def _count(key: Key, direct: PreparedLaunch) -> None:
    """Note a launch; after enough of them make the graph."""
    if len(_graphs) >= GRAPHS_LIMIT:
        if next(_turned_away) % PATIENCE == 0:
            _graphs.clear()
        return
    count = _counts.get(key, 0) + 1
    if count < REPEATS:
        if len(_counts) >= COUNTS_LIMIT:
            _counts.clear()
        _counts[key] = count
        return
    *_, first, second, third, stream = key
    if stream > _LEGACY_TOO and _is_captured(stream):
        return
    _counts.pop(key, None)
    try:
        _graphs[key] = make_graph(lambda stream: direct(first, second, third, stream))
    except CudaError:  # for want of memory, say; launches go on as before, and are counted anew
        return


def make_graph(launch: Callable[[int], None]) -> Graph:
    """The graph of what is launched on the stream that is passed."""
    cu = driver()
    # So that a capture by another thread neither forbids this nor is spoilt by it.
    mode = check(
        cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
        "cuThreadExchangeStreamCaptureMode",
    )
    try:
        stream, graphs = Stream(), list[Graph]()
        with capture(int(stream), graphs):
            launch(int(stream))
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")
    return graphs[0]


class _Status(threading.local):
    def __init__(self) -> None:
        value = ctypes.c_int(0)
        self.parts = (value, ctypes.addressof(value))


_status = _Status()


def _is_captured(stream: int) -> bool:
    """Whether what is launched on a stream is captured into a graph."""
    value, address = _status.parts
    code = quick_driver_function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(stream, address)
    return code != 0 or value.value != 0
