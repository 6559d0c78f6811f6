"""What the driver knows of an address, and device arrays that can't be used together, on a stand-in of the driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from arrays_fakes import CudaInterface, DLPackOnly, FakeDriver, fake_torch

from numba_gemm.arrays import as_operand
from numba_gemm.device import pointer
from numba_gemm.device.pointer import PointerInfo, check_device_operands, check_stream, pointer_info

HOST_TYPE, DEVICE_TYPE = 1, 2
CONTEXT = SimpleNamespace(handle=7, identity=107, device=SimpleNamespace(ordinal=0))
MEMORY = {
    0x1000: (DEVICE_TYPE, False, 0, 7),
    0x2000: (DEVICE_TYPE, False, 0, 0),  # of a stream-ordered pool: no one context's
    0x3000: (DEVICE_TYPE, False, 1, 8),
    0x4000: (DEVICE_TYPE, True, 0, 7),
    0x5000: (HOST_TYPE, False, 0, 7),
    0x6000: (DEVICE_TYPE, False, 0, 9),
    0x8000: (DEVICE_TYPE, False, 1, 8),
}


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    fake = FakeDriver(MEMORY, streams={64: 7, 80: 8})
    monkeypatch.setattr(pointer, "driver", lambda: fake)
    monkeypatch.setattr(pointer, "describe", lambda code: f"error {code}")
    return fake


@pytest.mark.parametrize(
    ("address", "info"),
    [
        (0x1000, PointerInfo("device", 0, 107)),
        (0x2000, PointerInfo("device", 0, None)),
        (0x3000, PointerInfo("device", 1, 108)),
        (0x4000, PointerInfo("managed", 0, 107)),
        (0x5000, PointerInfo("pinned", 0, 107)),
        (0x7000, PointerInfo("unregistered", None, None)),
    ],
    ids=lambda value: hex(value) if isinstance(value, int) else value.kind,
)
def test_pointer_info(address, info):
    assert pointer_info(address) == info


def array(address, name="a", shape=(2, 2)):
    return as_operand(name, CudaInterface(shape, pointer=address))


def test_arrays_that_go_together():
    operands = [array(0x1000, "a"), array(0x2000, "b"), array(0x4000, "out"), array(0x5000, "c")]
    for stream in (0, 1, 2, 64):
        check_device_operands(operands, CONTEXT, stream)
    host = as_operand("b", np.zeros((2, 2), np.float32))
    check_device_operands([array(0x1000), host, array(0x7000, shape=(0, 2))], CONTEXT, 0)


def test_arrays_on_two_gpus():
    message = r"a is on GPU 0 and b on GPU 1; copy one to the other's GPU: with numba.cuda.gpus\[0\]: b = "
    with pytest.raises(ValueError, match=message):
        check_device_operands([array(0x1000), array(0x3000, "b")], CONTEXT, 0)


def test_arrays_on_another_gpu_than_the_contexts(monkeypatch):
    with pytest.raises(ValueError, match=r"a is on GPU 1 and the current context is GPU 0's; .*numba.cuda.gpus\[1\]"):
        check_device_operands([array(0x3000), array(0x8000, "b")], CONTEXT, 0)
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    tensor = as_operand("b", torch.Tensor((2, 2), pointer=0x3000))
    message = r"with torch.cuda.device\(1\):\), or copy it: b.to\('cuda:0'\)"
    with pytest.raises(ValueError, match=message):
        check_device_operands([tensor], CONTEXT, 0)


def test_memory_of_another_context_of_the_same_gpu():
    with pytest.raises(ValueError, match=r"b was allocated in another CUDA context of GPU 0.*cuCtxSetCurrent"):
        check_device_operands([array(0x1000), array(0x6000, "b")], CONTEXT, 0)


def test_memory_that_was_freed(monkeypatch):
    message = "b, an arrays_fakes.CudaInterface in GPU memory, has address 0x10, .*was freed.*keep the array that owns"
    with pytest.raises(ValueError, match=message):
        check_device_operands([array(0x1000), array(0x10, "b")], CONTEXT, 0)
    lost = as_operand("a", DLPackOnly(np.zeros((2, 2), np.float32)))
    monkeypatch.setattr(pointer, "_is_host_memory", lambda address: False)
    with pytest.raises(ValueError, match=r"a, an arrays_fakes.DLPackOnly on GPU 0, has address .*was freed"):
        check_device_operands([lost], CONTEXT, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what an address is")
def test_host_memory_in_an_array_that_says_it_is_a_gpus():
    memory = np.zeros((2, 2), np.float32)
    lies = array(memory.__array_interface__["data"][0], "b")
    with pytest.raises(TypeError, match=r"b, .*, which is plain host memory; pass it as a NumPy array, or copy it"):
        check_device_operands([array(0x1000), lies], CONTEXT, 0)


def test_streams():
    check_stream(64, CONTEXT)
    with pytest.raises(ValueError, match=r"stream 0x50 belongs to another CUDA context.*GPU 0's; pass a stream"):
        check_stream(80, CONTEXT)
    with pytest.raises(ValueError, match=r"stream 0x60 can't be used \(error 400\); pass a stream that hasn't been"):
        check_device_operands([array(0x1000)], CONTEXT, 96)
