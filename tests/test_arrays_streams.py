"""Streams of any package as handles, and operands that are kept alive until a stream has used them."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import cuda.bindings.driver as cu
import cuda.bindings.runtime
import numpy as np
import pytest
from arrays_fakes import CudaInterface, DLPackOnly, FakeDriver, FakeNumbaArray, fake_cupy, fake_torch

from numba_gemm.arrays import as_operand, as_stream, current_stream, hold_operands
from numba_gemm.device import lifetime


class Protocol:
    def __init__(self, described):
        self.described = described

    def __cuda_stream__(self):
        return self.described


def stream_of(package, **attributes):
    return type("Stream", (), {"__module__": f"{package}.streams", **attributes})()


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (1, 0),
        (2, 2),
        (0xABC0, 0xABC0),
        (np.int64(7), 7),
        (Protocol((0, 64)), 64),
        (Protocol((0, 1)), 0),
        (Protocol([0, cu.CUstream(96)]), 96),
        (SimpleNamespace(__cuda_stream__=(0, 64)), 64),
        (cu.CUstream(0xABC0), 0xABC0),
        (cuda.bindings.runtime.cudaStream_t(48), 48),
        (stream_of("cupy", ptr=80), 80),
        (stream_of("torch", cuda_stream=112), 112),
        (stream_of("numba", handle=SimpleNamespace(value=128)), 128),
        (stream_of("numba", handle=SimpleNamespace(value=None)), 0),
        (stream_of("numba", handle=cu.CUstream(144)), 144),
        (stream_of("numba_gemm", __int__=lambda self: 160), 160),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_streams_of_all_kinds(stream, handle):
    found = as_stream(stream)
    assert type(found) is int
    assert found == handle


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        ("7", TypeError, r"stream is '7'; pass an object with __cuda_stream__ \(numba.cuda.stream\(\), cupy"),
        (7.0, TypeError, "stream is 7.0; pass"),
        (True, TypeError, "stream is True; pass"),
        (stream_of("torch"), TypeError, "pass an object with __cuda_stream__"),
        (stream_of("mine", __int__=lambda self: 7), TypeError, "pass an object with __cuda_stream__"),
        (-1, ValueError, "stream is -1"),
        (Protocol((1, 64)), TypeError, "of version 1, and 0 is known here"),
        (Protocol(64), TypeError, "gave 64; it must give a pair"),
        (Protocol((0, None)), TypeError, "must give a pair"),
    ],
    ids=lambda value: value if isinstance(value, (int, str)) else type(value).__name__,
)
def test_what_is_no_stream(stream, error, message):
    with pytest.raises(error, match=message):
        as_stream(stream)


def test_the_current_stream_is_the_packages_or_the_arrays(monkeypatch):
    cupy, torch = fake_cupy(stream=64), fake_torch(stream=80)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", torch)
    on_cupy, on_torch = as_operand("a", cupy.ndarray((2, 2))), as_operand("a", torch.Tensor((2, 2)))
    assert (on_cupy.stream, on_torch.stream) == (64, 80)
    with cupy.cuda.ExternalStream(1), torch.cuda.stream(96):
        assert (current_stream(on_cupy), current_stream(on_torch)) == (0, 96)
    assert current_stream(as_operand("a", CudaInterface((2, 2), stream=112))) == 112
    assert current_stream(as_operand("a", CudaInterface((2, 2)))) == 0
    assert current_stream(as_operand("a", DLPackOnly(np.zeros(2, np.float32)), stream=128)) == 128


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(lifetime, "driver", lambda: fake)
    monkeypatch.setattr(lifetime, "_kept", [])
    return fake


class Kept:
    pass


def test_what_is_kept_is_let_go_when_its_stream_is_done(driver):
    first, second = Kept(), Kept()
    gone = [weakref.ref(first), weakref.ref(second)]
    driver.pending = {64, 80}
    lifetime.keep_until_done(64, first)
    lifetime.keep_until_done(80, second)
    del first, second
    driver.pending = {64}
    lifetime.release_done()
    gc.collect()
    assert [ref() is None for ref in gone] == [False, True]
    driver.pending = set()
    lifetime.keep_until_done(96, Kept())  # a later call lets go too
    assert [ref() is None for ref in gone] == [True, True]
    assert len(driver.destroyed) == len(driver.events) == 3
    assert lifetime._kept == []


def test_nothing_is_kept_for_a_captured_stream(driver):
    driver.capturing = True
    lifetime.keep_until_done(64, Kept())
    assert driver.events == {}


def test_an_operand_is_held_where_its_package_could_free_it_too_early(driver, monkeypatch):
    cupy = fake_cupy(stream=64)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    driver.pending = {0, 64, 80}

    def held(array, stream):
        before = len(lifetime._kept)
        hold_operands([as_operand("a", array)], stream)
        return len(lifetime._kept) - before

    assert held(np.zeros((2, 2)), 64) == 0
    assert held(cupy.ndarray((2, 2)), 64) == 0  # CuPy's pool gives the memory to later work of this stream only
    assert held(cupy.ndarray((2, 2)), 80) == 1
    assert held(DLPackOnly(np.zeros(2, np.float32)), 0) == 1
    assert held(CudaInterface((2, 2)), 0) == 1
    assert held(FakeNumbaArray((2, 2)), 0) == 0
    assert held(FakeNumbaArray((2, 2), stream=80), 64) == 1
