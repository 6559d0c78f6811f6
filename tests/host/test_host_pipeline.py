"""The pipeline without a GPU: right for every shape, stride and limit, whatever order the streams work in."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_engine import STREAMS, LazyEngine, Threads
from test_host_blocks import SMALL

from numba_gemm.host import pipeline as pipeline_module
from numba_gemm.host.blocks import choose_blocks
from numba_gemm.host.multiply import run_blocks
from numba_gemm.host.operands import describe
from numba_gemm.host.steps import Claim, Download, Multiply, Upload, product_steps, uploads_first

GRAIN = replace(SMALL, group_bytes=1024)
#: Streams that hurry while the others do nothing until they must.
POLICIES = [
    {"eager": ()},
    {"eager": STREAMS},
    {"eager": ("up",)},
    {"eager": ("down",)},
    {"eager": ("first",)},
    {"eager": ("first", "second")},
    {"eager": ("up", "down")},
    {"eager": ("up", "second")},
    {"eager": ("up", "first", "second")},
    {"seed": 1},
    {"seed": 2},
]


def run(a, b, c, *, alpha=1.0, beta=0.0, limit=1 << 30, progress=None, grain=GRAIN, **policy):
    """C = alpha·A·B + beta·C by the pipeline on a lazy engine; the blocks and the engine."""
    stacks, call = describe(a, b, c, alpha, beta)
    blocking = choose_blocks(call.shape, limit, grain)
    engine = LazyEngine(**policy)
    total = len(stacks.c) * call.batch * call.m * call.n * call.k
    with Threads() as executors:
        run_blocks(engine, executors, call, blocking, stacks, None, progress, total)
    assert not engine.memory, "device memory is left"
    assert engine.peak <= limit
    return blocking, engine


def integers(generator, shape, dtype=np.float32):
    return generator.integers(-4, 5, shape).astype(dtype)


def laid_out(generator, shape, how):
    """Random integers in a view of the given kind."""
    *batch, rows, columns = shape
    if how == "F":
        return integers(generator, (*batch, columns, rows)).swapaxes(-1, -2)
    if how == "gaps":
        return integers(generator, (*batch, rows * 2, columns * 3))[..., ::2, 1::3]
    if how == "backwards":
        return integers(generator, shape)[..., ::-1, ::-1]
    if how == "wide":
        return integers(generator, (*batch, rows, columns + 5))[..., 2 : columns + 2]
    if how == "one row":
        return np.broadcast_to(integers(generator, (*batch, 1, columns)), shape)
    return integers(generator, shape)


LAYOUTS = ("C", "F", "gaps", "backwards", "wide", "one row")
extents = st.integers(1, 40)


@settings(max_examples=150, deadline=None)
@given(
    m=extents,
    n=extents,
    k=extents,
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS[:-1])),
    limit=st.sampled_from([2048, 3072, 4096, 8192, 1 << 20]),
    scales=st.sampled_from([(1.0, 0.0), (2.0, 1.0), (1.0, -2.0)]),
    policy=st.sampled_from(POLICIES),
    buffer_bytes=st.sampled_from([64, 256, 4096]),
)
def test_any_product(m, n, k, layouts, limit, scales, policy, buffer_bytes):
    generator = np.random.default_rng(m * 10000 + n * 100 + k)
    a, b, c = (laid_out(generator, shape, how) for shape, how in zip(((m, k), (k, n), (m, n)), layouts, strict=True))
    alpha, beta = scales
    expected = alpha * (a @ b) + (beta * c if beta else 0)
    if not beta:
        c[...] = np.nan
    run(a, b, c, alpha=alpha, beta=beta, limit=limit, buffer_bytes=buffer_bytes, **policy)
    np.testing.assert_array_equal(c, expected)


@settings(max_examples=100, deadline=None)
@given(
    batches=st.sampled_from(
        [((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((2, 3), (2, 3)), ((5,), ())]
    ),
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    k=st.integers(1, 12),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS[:-1])] * 3),
    limit=st.sampled_from([3072, 8192, 1 << 20]),
    beta=st.sampled_from([0.0, 1.0]),
    policy=st.sampled_from(POLICIES),
)
def test_any_batch(batches, m, n, k, layouts, limit, beta, policy):
    generator = np.random.default_rng(m * 10000 + n * 100 + k)
    a = laid_out(generator, (*batches[0], m, k), layouts[0])
    b = laid_out(generator, (*batches[1], k, n), layouts[1])
    batch = np.broadcast_shapes(*batches)
    c = laid_out(generator, (*batch, m, n), layouts[2])
    expected = a @ b + (beta * c if beta else 0)
    if not beta:
        c[...] = np.nan
    a, b = np.broadcast_to(a, (*batch, m, k)), np.broadcast_to(b, (*batch, k, n))
    run(a, b, c, beta=beta, limit=limit, **policy)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("layout", ["C", "F", "wide"])
def test_page_locked_arrays_are_copied_as_they_lie(layout, policy):
    generator = np.random.default_rng(0)
    a, b, c = (laid_out(generator, shape, layout) for shape in ((300, 140), (140, 200), (300, 200)))
    expected = a @ b
    c[...] = np.nan
    _, engine = run(a, b, c, page_locked=lambda address: True, **policy)
    np.testing.assert_array_equal(c, expected)
    assert engine.direct_copies > 0


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("limit", [1 << 20, 8192])
def test_direct_copies_to_the_device_pass_the_multiplications_of_their_block(limit, beta):
    generator = np.random.default_rng(0)
    a, b, c = integers(generator, (64, 16)), integers(generator, (16, 64)), integers(generator, (64, 64))
    _, call = describe(a, b, c, 1.0, beta)
    blocking = choose_blocks(call.shape, limit, GRAIN)
    steps = list(product_steps(call.shape, blocking, [(1, 2)]))
    for ahead in (1, 3, len(steps)):
        moved = list(uploads_first(steps, lambda step: True, ahead))
        for kind in (Upload, (Multiply, Download), (Upload, Claim), (Multiply, Download, Claim)):  # each in its order
            assert [strip_of(step) for step in moved if isinstance(step, kind)] == [
                step for step in steps if isinstance(step, kind)
            ]
        uploads = 0
        for at, step in enumerate(moved):
            uploads += isinstance(step, Upload)
            if isinstance(step, Multiply):
                passed = uploads - step.copies
                rest = itertools.takewhile(lambda one: not isinstance(one, Claim), moved[at:])
                assert passed == ahead or (passed < ahead and not any(isinstance(one, Upload) for one in rest))
    moved = list(uploads_first(steps, lambda step: True))
    # Each waits for the uploads that came before it as the steps were, and no more.
    before = [
        sum(isinstance(one, Upload) for one in steps[:at])
        for at, step in enumerate(steps)
        if isinstance(step, Multiply)
    ]
    assert [step.copies for step in moved if isinstance(step, Multiply)] == before
    staged = list(uploads_first(steps, lambda step: False))
    assert [type(step) for step in staged] == [type(step) for step in steps]


def strip_of(step):
    """The step without the number of copies that it waits for."""
    return replace(step, copies=0) if isinstance(step, Multiply) else step


def test_half_precision_sums_pass_from_block_to_block_in_single():
    """2048 + 1 is 2048 in float16: a sum rounded between blocks of k would lose every 1."""
    k = 300
    a = np.ones((4, k), np.float16)
    b = np.ones((k, 4), np.float16)
    b[0] = 2048
    c = np.full((4, 4), np.nan, np.float16)
    stacks, call = describe(a, b, c, 1.0, 0.0)
    call = replace(call, c_dtype=np.dtype(np.float32))  # as plan_blocks does where k is cut
    blocking = choose_blocks(call.shape, 1536, GRAIN)
    assert blocking.block_k < k
    with Threads() as executors:
        run_blocks(LazyEngine(), executors, call, blocking, stacks, None)
    assert np.array_equal(c, np.full((4, 4), np.float16(2048 + k - 1)))


def test_k_is_whole_in_every_multiplication_unless_memory_forbids():
    generator = np.random.default_rng(0)
    k = 300
    a, b = integers(generator, (40, k)), integers(generator, (k, 40))
    for limit in (1 << 20, 65536, 32768, 16384):
        c = np.full((40, 40), np.nan, np.float32)
        _, engine = run(a, b, c, limit=limit)
        assert {problem.k for problem in engine.problems} == {k}, limit
    c = np.full((40, 40), np.nan, np.float32)
    _, engine = run(a, b, c, limit=8192)
    assert {problem.k for problem in engine.problems} != {k}
    np.testing.assert_array_equal(c, a @ b)


def scenarios():
    """Products that between them need every kind of wait: one block in pieces, streamed blocks, cut k, C read."""
    generator = np.random.default_rng(5)
    for (m, n, k), limit, beta in (
        ((40, 40, 24), 1 << 20, 0.0),
        ((64, 64, 16), 8192, 0.0),
        ((64, 64, 16), 8192, 1.0),
        ((96, 160, 16), 34000, 0.0),  # lines long enough to be copied as they lie
        ((96, 160, 16), 34000, 1.0),
        ((24, 24, 300), 6144, 0.0),
        ((24, 24, 300), 6144, 1.0),
    ):
        yield integers(generator, (m, k)), integers(generator, (k, n)), integers(generator, (m, n)), limit, beta


def wrong_scenarios(**engine_options):
    """How many of the scenarios come out wrong under some policy."""
    wrong = 0
    for a, b, c_before, limit, beta in scenarios():
        expected = a @ b + beta * c_before
        for policy, page_locked in itertools.product(POLICIES, (True, False)):
            c = c_before.copy() if beta else np.full_like(c_before, np.nan)
            options = engine_options | policy | {"page_locked": lambda address, answer=page_locked: answer}
            run(a, b, c, beta=beta, limit=limit, **options)
            if not np.array_equal(c, expected):
                wrong += 1
                break
    return wrong


def is_compute(stream):
    return stream in ("first", "second")


#: A kind of wait, by who waits (None: the host) for work on which stream, and how many scenarios need it at least.
WAITS = {
    "a multiplication waits for its inputs": (lambda who, whom: is_compute(who) and whom == "up", 5),
    "a copy to a slot waits for what read the last block": (lambda who, whom: who == "up" and is_compute(whom), 1),
    "a multiplication waits for copies out of its slot of C": (lambda who, whom: is_compute(who) and whom == "down", 1),
    "adding to C waits for what is added to": (lambda who, whom: is_compute(who) and is_compute(whom), 1),
    "a copy of C to its slot waits for the copy out of it": (lambda who, whom: who == "up" and whom == "down", 1),
    "a copy to the host waits for its multiplication": (lambda who, whom: who == "down" and is_compute(whom), 5),
    "filling a buffer waits for the copy out of it": (lambda who, whom: who is None and whom == "up", 5),
    "emptying a buffer waits for the copy into it": (lambda who, whom: who is None and whom == "down", 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", WAITS)
def test_a_forgotten_wait_is_noticed(kind):
    """The other tests can fail: without any one kind of wait some order of the streams' work gives a wrong product."""
    forgotten, least = WAITS[kind]
    assert wrong_scenarios(forgotten=forgotten) >= least


def test_nothing_is_forgotten():
    assert wrong_scenarios() == 0


class StopError(Exception):
    pass


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("limit", [1 << 20, 8192])
def test_an_exception_in_progress_ends_the_product_cleanly(limit, at, error):
    generator = np.random.default_rng(0)
    a, b, c = integers(generator, (64, 32)), integers(generator, (32, 64)), np.zeros((64, 64), np.float32)
    calls = []

    def progress(done, total):
        calls.append((done, total, threading.current_thread()))
        if len(calls) == at:
            raise error

    before = threading.active_count()
    with pytest.raises(error):
        run(a, b, c, limit=limit, progress=progress, eager=STREAMS)
    assert len(calls) == at
    assert threading.active_count() == before
    left = c.copy()
    a[...] = 100
    np.testing.assert_array_equal(c, left)
    assert np.isin(c[c != 0], (integers(np.random.default_rng(0), (64, 32)) @ b)).all()


@pytest.mark.parametrize("limit", [1 << 20, 8192, 3072])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_progress_grows_to_the_total_in_the_calling_thread(limit, policy):
    generator = np.random.default_rng(0)
    a, b, c = integers(generator, (40, 64)), integers(generator, (64, 24)), np.empty((40, 24), np.float32)
    calls = []
    run(a, b, c, limit=limit, progress=lambda *call: calls.append((*call, threading.current_thread())), **policy)
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert done[-1] == 40 * 64 * 24
    assert {call[1:] for call in calls} == {(40 * 64 * 24, threading.current_thread())}


@pytest.mark.parametrize("method", ["copy", "multiply", "record", "wait", "synchronize"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_an_error_of_the_device_comes_out_and_leaves_no_thread_waiting(method, at, monkeypatch):
    generator = np.random.default_rng(0)
    a, b, c = integers(generator, (64, 32)), integers(generator, (32, 64)), np.zeros((64, 64), np.float32)
    calls = []
    plain = getattr(LazyEngine, method)

    def failing(self, *arguments, **keywords):
        calls.append(method)
        if len(calls) == at + 1:
            raise StopError(method)
        return plain(self, *arguments, **keywords)

    monkeypatch.setattr(LazyEngine, method, failing)
    with pytest.raises(StopError, match=method):
        run(a, b, c, limit=8192)


def test_an_error_while_filling_comes_out(monkeypatch):
    def failing(target, source):
        raise StopError("filling")

    monkeypatch.setattr(pipeline_module, "copy_elements", failing)
    a = np.ones((40, 40), np.float32)
    with pytest.raises(StopError, match="filling"):
        run(a, a, np.empty_like(a))
