"""How long work takes on the GPU, measured so that two contenders can be compared.

The rules: CUDA events on one stream; a warm-up, so that module loads and clocks are out of the way; several sets of
random inputs, visited in turn, that together exceed the L2 cache several times over; the contenders interleaved,
A B A B …, so that drifting clocks and power hit all alike; medians, with the spread beside them; short work replayed
from a captured graph, so that what is timed is the GPU's work and not the host's launches. Clocks stay as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numba_gemm.device.stream import Event, Graph, Stream, capture

#: Work on one set of inputs: called with the number of the set and the stream to launch on.
Work = Callable[[int, int], None]

#: Inputs are rotated over at least this many times the L2 cache.
L2_MULTIPLE = 3

#: What is timed at once lasts about this long, so that an event's resolution of half a microsecond doesn't matter.
BATCH_US = 1000.0

#: Work shorter than this is replayed from a graph.
GRAPH_BELOW_US = 500.0


@dataclass(frozen=True)
class Timing:
    """Times of one contender, in µs for one piece of work.

    ``ratio`` is the median, over the rounds, of the first contender's time by this one's in the same round: above 1
    where this one is faster.
    """

    us: float
    us_min: float
    us_max: float
    ratio: float
    rounds: int


def set_count(bytes_per_set: int, l2_bytes: int, *, limit: int = 64) -> int:
    """Sets of inputs that exceed the L2 cache :data:`L2_MULTIPLE` times, at least 2, at most ``limit``."""
    return max(2, min(limit, -(-L2_MULTIPLE * l2_bytes // max(bytes_per_set, 1))))


def time_interleaved(
    contenders: Sequence[Work],
    *,
    sets: int,
    rounds: int = 7,
    hopeless: float = math.inf,
    kept: int = 1,
    batch_us: float = BATCH_US,
) -> list[Timing]:
    """Time several ways of doing the same work, interleaved.

    Parameters
    ----------
    contenders : each launches one piece of work on the set and the stream that it is given.
    sets : how many sets of inputs there are.
    rounds : times that each contender is measured.
    hopeless : after the first round, contenders beyond this multiple of the fastest, the first one (a reference) left
        aside, are measured no more.
    kept : so many, the first ones, are measured in every round whatever they take.
    batch_us : µs that are timed at once, about.

    Returns
    -------
    One :class:`Timing` a contender, in order.
    """
    stream = Stream()
    handle = int(stream)
    start, end = Event(), Event()

    def measure(run: Callable[[], None]) -> float:
        start.record(handle)
        run()
        end.record(handle)
        end.synchronize()
        return end.microseconds_since(start)

    runs: list[tuple[Callable[[], None], int]] = []
    for work in contenders:
        work(0, handle)  # loads the module
        stream.synchronize()
        estimate = measure(_launcher(work, sets, sets, handle)) / sets
        repeats = max(1, min(2000, round(batch_us / max(estimate, 0.5))))
        # Whole turns over the sets, so that every round sees the same data.
        count = -(-repeats // sets) * sets if estimate < batch_us else 1
        runs.append((_runner(work, count, sets, handle, graph=estimate < GRAPH_BELOW_US), count))

    for run, _ in runs:
        measure(run)  # warm-up
    times: list[list[float]] = [[] for _ in runs]
    going = list(range(len(runs)))
    for one in range(rounds):
        for index in going:
            run, count = runs[index]
            times[index].append(measure(run) / count)
        if one == 0:
            least = min((own[0] for own in times[1:]), default=math.inf)
            going = [index for index in going if index < kept or times[index][0] <= hopeless * least]
    return summarise(times)


def summarise(times: Sequence[Sequence[float]]) -> list[Timing]:
    """What the rounds of interleaved contenders come to: a list of µs for each; none has more rounds than the first."""
    return [
        Timing(
            us=statistics.median(own),
            us_min=min(own),
            us_max=max(own),
            ratio=statistics.median(first / mine for first, mine in zip(times[0], own, strict=False)),
            rounds=len(own),
        )
        for own in times
    ]


def _launcher(work: Work, count: int, sets: int, stream: int) -> Callable[[], None]:
    """Launches ``count`` pieces of work, each on the set of inputs after the one before."""
    position = 0

    def launch_all() -> None:
        nonlocal position
        for _ in range(count):
            work(position, stream)
            position = (position + 1) % sets

    return launch_all


def _runner(work: Work, count: int, sets: int, stream: int, *, graph: bool) -> Callable[[], None]:
    launch_all = _launcher(work, count, sets, stream)
    if not graph:
        return launch_all
    graphs: list[Graph] = []
    with capture(stream, graphs):
        launch_all()
    return lambda: graphs[0].replay(stream)
