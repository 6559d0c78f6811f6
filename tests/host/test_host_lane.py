"""Products that are staged whole, without a GPU: the driver's calls that a lane makes are done at once, in memory."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_engine import multiply_at
from test_host_pipeline import LAYOUTS, integers, laid_out

from numba_gemm.errors import KernelConstraintError
from numba_gemm.host import lane as lane_module
from numba_gemm.host import multiply as multiply_module
from numba_gemm.host import transfer as transfer_module


class FakeDriver:
    def __init__(self):
        self.freed = []

    def cuMemFreeAsync(self, pointer, stream):  # noqa: N802 - the driver's name
        self.freed.append(pointer)
        return (0,)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        return (0,)


@pytest.fixture
def lanes(monkeypatch):
    """multiply_host's way for products that fit a staging buffer, with kernels that take rows only, or columns too."""
    state = SimpleNamespace(memory={}, driver=FakeDriver(), made=[], columns_too=True)

    def allocate(context, nbytes, stream):
        memory = np.full(nbytes + 512, 0xFF, np.uint8)
        pointer = -(-memory.ctypes.data // 512) * 512
        state.memory[pointer] = memory
        return pointer

    def page_locked(nbytes):
        memory = np.full(nbytes + 512, 0xFF, np.uint8)
        start = -memory.ctypes.data % 512
        return memory[start : start + nbytes]

    def copy_lines(target, target_pitch, source, source_pitch, width, lines, stream, *, to_device):
        assert lines == 1
        ctypes.memmove(target, source, width)

    def prepare(problem, kernel, context):
        if not state.columns_too and not problem.is_row_major:
            raise KernelConstraintError("a matrix is column-major")
        launch = lambda a, b, c, stream: multiply_at(problem, a, b, c)  # noqa: E731
        return SimpleNamespace(launch=launch, function=SimpleNamespace(name="fake"), problem=problem, config=())

    @contextlib.contextmanager
    def lane(context, nbytes):
        kept = next((own for own in state.made if own.nbytes == nbytes), None)
        if kept is None:
            kept = lane_module.Lane(context, nbytes)
            state.made.append(kept)
        yield kept

    monkeypatch.setattr(lane_module, "Stream", lambda: 7)
    monkeypatch.setattr(lane_module, "allocate_device", allocate)
    monkeypatch.setattr(lane_module, "page_locked", page_locked)
    monkeypatch.setattr(lane_module, "copy_lines", copy_lines)
    monkeypatch.setattr(lane_module, "synchronize_stream", lambda stream, after: None)
    monkeypatch.setattr(lane_module, "driver", lambda: state.driver)
    monkeypatch.setattr(multiply_module, "prepare", prepare)
    monkeypatch.setattr(multiply_module, "lane", lane)
    monkeypatch.setattr(multiply_module, "current_context", lambda: "context")
    monkeypatch.setattr(multiply_module, "is_page_locked", lambda address, nbytes: False)
    multiply_module.prepare_call.cache_clear()
    yield state
    multiply_module.prepare_call.cache_clear()


def test_any_product_and_batch(lanes):
    @settings(max_examples=250, deadline=None)
    @given(
        m=st.integers(1, 90),
        n=st.integers(1, 90),
        k=st.integers(1, 90),
        layouts=st.tuples(*[st.sampled_from(LAYOUTS[:-1])] * 3),
        batches=st.sampled_from([((), ()), ((1,), (1,)), ((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((2, 3), (2, 3))]),
        scales=st.sampled_from([(1.0, 0.0), (2.0, 1.0), (1.0, -2.0)]),
        columns_too=st.booleans(),
    )
    def product(m, n, k, layouts, batches, scales, columns_too):
        if lanes.columns_too != columns_too:  # what was laid out for the other kind of kernel
            lanes.columns_too = columns_too
            multiply_module.prepare_call.cache_clear()
            lanes.made.clear()
        generator = np.random.default_rng(m * 10000 + n * 100 + k)
        batch = np.broadcast_shapes(*batches)
        a = np.broadcast_to(laid_out(generator, (*batches[0], m, k), layouts[0]), (*batch, m, k))
        b = np.broadcast_to(laid_out(generator, (*batches[1], k, n), layouts[1]), (*batch, k, n))
        c = laid_out(generator, (*batch, m, n), layouts[2])
        alpha, beta = scales
        for _ in range(2):  # laid out, then as before
            expected = alpha * (a @ b) + (beta * c if beta else 0)
            if not beta:
                c[...] = np.nan
            multiply_module.multiply_host(a, b, c, alpha=alpha, beta=beta)
            np.testing.assert_array_equal(c, expected)

    product()


@pytest.mark.parametrize("layout", LAYOUTS[:-1])
def test_threads_share_larger_arrays(lanes, layout, monkeypatch):
    monkeypatch.setattr(transfer_module, "LEAST_SHARE", 1 << 12)
    monkeypatch.setattr(transfer_module, "copier_count", lambda: 3)
    generator = np.random.default_rng(0)
    a, b, c = (laid_out(generator, shape, layout) for shape in ((1100, 900), (900, 1000), (1100, 1000)))
    expected = a @ b
    c[...] = np.nan
    multiply_module.multiply_host(a, b, c)
    np.testing.assert_array_equal(c, expected)


def test_only_small_products_keep_device_memory(lanes):
    for extent in (64, 700):
        a = integers(np.random.default_rng(0), (extent, extent))
        multiply_module.multiply_host(a, a, np.empty_like(a))
    small, medium = lanes.made
    assert len(lanes.driver.freed) == 1, "the larger product's memory goes back after it"
    small.free()
    medium.free()
    assert sorted(lanes.driver.freed) == sorted(lanes.memory)


def test_operands_of_other_strides_or_scales_are_not_taken_for_ones_before(lanes):
    a = integers(np.random.default_rng(0), (40, 40))
    c = np.empty_like(a)
    for x, y, alpha in ((a, a, 1.0), (a.T, a, 1.0), (a, a.T, 1.0), (a, a, 3.0), (a[::-1], a, 1.0)):
        multiply_module.multiply_host(x, y, c, alpha=alpha)
        np.testing.assert_array_equal(c, alpha * (x @ y))


def test_progress_of_a_product_in_one_piece(lanes):
    a = np.ones((10, 20), np.float32)
    calls = []
    multiply_module.multiply_host(a, a.T, np.empty((10, 10), np.float32), progress=lambda *call: calls.append(call))
    assert calls == [(2000, 2000)]


@pytest.mark.parametrize("k", [0, 5])
def test_without_terms_c_is_scaled_on_the_host(k):
    """No GPU is asked for: NumPy has nothing to multiply."""
    a, b = np.full((3, k), np.nan, np.float32), np.full((k, 4), np.nan, np.float32)
    c = np.full((3, 4), 2, np.float32)
    multiply_module.multiply_host(a, b, c, alpha=0.0, beta=3.0)
    assert (c == 6).all()
    c[0, 0] = np.nan
    multiply_module.multiply_host(a, b, c, alpha=0.0)
    assert (c == 0).all()
