"""Launches that are repeated become graphs: when, of what, and what is done where they can't be used; without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from numba_gemm.device import repeat
from numba_gemm.errors import CudaError


@pytest.fixture
def driver(monkeypatch):
    """Replaces graphs and the driver's functions; returns what was launched, and the switches of the fakes."""
    state = SimpleNamespace(direct=[], made=[], replayed=[], captured=set(), failing=set(), no_memory=False)

    def make_graph(launch):
        if state.no_memory:
            raise CudaError("out of memory")
        before = len(state.direct)
        launch(99)
        (recorded,) = state.direct[before:]
        del state.direct[before:]
        state.made.append(recorded[:3])
        return SimpleNamespace(handle=len(state.made))

    def replay(handle, stream):
        state.replayed.append((handle, stream))
        return int(handle in state.failing)

    monkeypatch.setattr(repeat, "make_graph", make_graph)
    monkeypatch.setattr(repeat, "driver_function", lambda name, *types: {"cuGraphLaunch": replay}[name])
    monkeypatch.setattr(repeat, "_is_captured", lambda stream: stream in state.captured)
    repeat._graphs.clear()
    repeat._counts.clear()
    state.launch, _ = repeat.repeated(lambda *at: state.direct.append(at))
    yield state
    repeat._graphs.clear()
    repeat._counts.clear()


def launch(state, count, *at):
    for _ in range(count):
        state.launch(*at)


def test_a_launch_that_is_repeated_becomes_a_graph(driver):
    launch(driver, repeat.REPEATS, 1, 2, 3, 0)
    assert driver.direct == [(1, 2, 3, 0)] * repeat.REPEATS
    assert driver.made == [(1, 2, 3)]
    launch(driver, 5, 1, 2, 3, 0)
    assert driver.replayed == [(1, 0)] * 5
    assert len(driver.direct) == repeat.REPEATS


@pytest.mark.parametrize("other", [(9, 2, 3, 0), (1, 9, 3, 0), (1, 2, 9, 0), (1, 2, 3, 9)], ids=str)
def test_other_addresses_and_streams_are_launched_as_before(driver, other):
    launch(driver, repeat.REPEATS, 1, 2, 3, 0)
    launch(driver, repeat.REPEATS - 1, *other)
    assert driver.direct[repeat.REPEATS :] == [other] * (repeat.REPEATS - 1)
    assert not driver.replayed
    launch(driver, 2, *other)
    assert driver.replayed == [(2, other[3])]
    launch(driver, 1, 1, 2, 3, 0)
    assert driver.replayed[-1] == (1, 0)


def test_another_launch_on_the_same_addresses_has_its_own_graph(driver):
    launch(driver, repeat.REPEATS, 1, 2, 3, 0)
    other = []
    second, _ = repeat.repeated(lambda *at: other.append(at))
    second(1, 2, 3, 0)
    assert other == [(1, 2, 3, 0)]
    assert not driver.replayed


def test_each_thread_has_its_own_graph(driver):
    launch(driver, repeat.REPEATS, 1, 2, 3, 0)
    thread = threading.Thread(target=launch, args=(driver, repeat.REPEATS + 1, 1, 2, 3, 0))
    thread.start()
    thread.join()
    assert driver.replayed == [(2, 0)]


def test_a_captured_launch_is_captured_itself(driver):
    """A graph can't be launched on a stream that is captured, and what is captured is no repetition."""
    stream = 7
    launch(driver, repeat.REPEATS + 1, 1, 2, 3, stream)
    driver.captured.add(stream)
    direct = len(driver.direct)
    launch(driver, 3, 1, 2, 3, stream)
    assert len(driver.direct) == direct + 3
    launch(driver, 2 * repeat.REPEATS, 4, 5, 6, stream)
    assert driver.made == [(1, 2, 3)]
    driver.captured.clear()
    launch(driver, 2, 4, 5, 6, stream)
    assert driver.replayed[-1] == (2, stream)


def test_a_graph_that_fails_is_dropped_and_the_launch_says_why(driver):
    launch(driver, repeat.REPEATS, 1, 2, 3, 0)
    driver.failing.add(1)
    launch(driver, 1, 1, 2, 3, 0)
    assert driver.direct[repeat.REPEATS :] == [(1, 2, 3, 0)]
    launch(driver, 1, 1, 2, 3, 0)
    assert len(driver.replayed) == 1


def test_without_memory_for_a_graph_launches_go_on(driver):
    driver.no_memory = True
    launch(driver, 3 * repeat.REPEATS, 1, 2, 3, 0)
    assert len(driver.direct) == 3 * repeat.REPEATS
    driver.no_memory = False
    launch(driver, repeat.REPEATS + 1, 1, 2, 3, 0)
    assert driver.replayed == [(1, 0)]


def test_counts_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(repeat, "COUNTS_LIMIT", 5)
    for at in range(20):
        launch(driver, 1, at, 2, 4, 0)
        assert len(repeat._counts) <= 5


def test_graphs_are_bounded_and_give_way_in_the_end(driver, monkeypatch):
    """Not at once: where more addresses take turns than there may be graphs, each would be made anew all the time."""
    monkeypatch.setattr(repeat, "GRAPHS_LIMIT", 3)
    monkeypatch.setattr(repeat, "PATIENCE", 100)
    for at in range(4):
        launch(driver, repeat.REPEATS, at, 2, 3, 0)
    assert len(driver.made) == len(repeat._graphs) == 3
    launch(driver, 200, 9, 2, 3, 0)
    assert driver.made[3] == (9, 2, 3)
    assert driver.replayed
    launch(driver, repeat.REPEATS + 1, 0, 2, 3, 0)
    assert driver.made[4:] == [(0, 2, 3)]
    assert len(repeat._graphs) == 2
