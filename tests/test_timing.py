"""Which contenders are timed, and how often, on a clock that works by the piece."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from numba_gemm import timing


class Clock:
    """A stream, events and launches for which time passes only as work says."""

    def __init__(self) -> None:
        self.us = 0.0
        self.launches: dict[str, int] = {}

    def work(self, name: str, us: float) -> timing.Work:
        def launch(_set: int, _stream: int) -> None:
            self.us += us
            self.launches[name] = self.launches.get(name, 0) + 1

        return launch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()

    class Stream:
        def __int__(self) -> int:
            return 1

        def synchronize(self) -> None: ...

    class Event:
        us = 0.0

        def record(self, _stream: int) -> None:
            self.us = clock.us

        def synchronize(self) -> None: ...

        def microseconds_since(self, start: Event) -> float:
            return self.us - start.us

    monkeypatch.setattr(timing, "Stream", Stream)
    monkeypatch.setattr(timing, "Event", Event)
    monkeypatch.setattr(timing, "GRAPH_BELOW_US", 0.0)
    return clock


def test_what_takes_longer_is_timed_as_longer(clock: Clock) -> None:
    slow, fast = timing.time_interleaved([clock.work("slow", 8.0), clock.work("fast", 4.0)], sets=2, rounds=3)
    assert (slow.us, slow.rounds, slow.ratio) == (8.0, 3, 1.0)
    assert (fast.us, fast.rounds, fast.ratio) == (4.0, 3, 2.0)


def test_contenders_far_behind_are_timed_once(clock: Clock) -> None:
    works = [clock.work(name, us) for name, us in [("reference", 1.0), ("pick", 9.0), ("near", 5.5), ("far", 8.0)]]
    works.append(clock.work("fastest", 5.0))
    found = timing.time_interleaved(works, sets=2, rounds=4, hopeless=1.5, kept=2)
    assert [one.rounds for one in found] == [4, 4, 4, 1, 4]
    assert [one.us for one in found] == [1.0, 9.0, 5.5, 8.0, 5.0]
    assert found[3].ratio == 1.0 / 8.0


def test_short_batches_launch_less(clock: Clock) -> None:
    for name, batch in (("long", 1000.0), ("short", 100.0)):
        timing.time_interleaved([clock.work(name, 5.0)], sets=2, rounds=5, batch_us=batch)
    assert clock.launches["long"] > 9 * (clock.launches["short"] - 3)
    assert clock.launches["short"] == 1 + 2 + 6 * 20
