"""DLPack capsules, of NumPy's and made by hand: what is read, what is refused, and when the memory is given back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from arrays_fakes import CudaInterface, DLPackOnly, counted_capsule

from numba_gemm.arrays import DLPACK, as_operand, dlpack


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["dltensor", "dltensor_versioned"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8", "u1", "c8", "?"])
def test_capsules_of_numpy(dtype, version):
    array = np.zeros((4, 6), dtype)[::2, ::-1]
    tensor = dlpack.read(array.__dlpack__(max_version=version))
    assert tensor.pointer == array.__array_interface__["data"][0]
    assert (tensor.shape, tensor.strides) == ((2, 6), (12, -1))
    assert (tensor.dtype, tensor.itemsize) == (array.dtype.name, array.itemsize)
    assert (tensor.readonly, tensor.device_type) == (False, dlpack.CPU)


def test_the_readonly_flag_of_a_versioned_capsule():
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert dlpack.read(array.__dlpack__(max_version=(1, 0))).readonly


@pytest.mark.parametrize("versioned", [False, True], ids=["dltensor", "dltensor_versioned"])
@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        (2, 32, "float32"),
        (4, 16, "bfloat16"),
        (10, 8, "float8_e4m3fn"),
        (3, 64, "DLPack type 3"),
        (17, 4, "DLPack type 17"),
    ],
)
def test_capsules_made_by_hand(versioned, code, bits, name):
    capsule, alive = counted_capsule(
        4096, (2, 3), versioned=versioned, strides=(-3, 1), code=code, bits=bits, offset=64, flags=2
    )
    tensor = dlpack.read(capsule)
    assert (tensor.pointer, tensor.shape, tensor.strides) == (4160, (2, 3), (-3, 1))
    assert (tensor.dtype, tensor.readonly, tensor.device) == (name, False, 3)
    assert alive


@pytest.mark.parametrize("versioned", [False, True], ids=["dltensor", "dltensor_versioned"])
def test_missing_strides_are_packed_and_no_data_is_address_zero(versioned):
    capsule, alive = counted_capsule(None, (4, 0, 5), versioned=versioned)
    tensor = dlpack.read(capsule)
    assert (tensor.pointer, tensor.shape, tensor.strides) == (0, (4, 0, 5), (5, 5, 1))
    scalar, also_alive = counted_capsule(64, (), versioned=versioned)
    assert dlpack.read(scalar).strides == ()
    assert alive
    assert also_alive


@pytest.mark.parametrize("versioned", [False, True], ids=["dltensor", "dltensor_versioned"])
def test_the_memory_is_given_back_by_the_capsules_own_destructor(versioned):
    capsule, (dropped, *alive) = counted_capsule(4096, (2, 3), versioned=versioned)
    tensor = dlpack.read(capsule)
    del capsule
    gc.collect()
    assert dropped == []
    del tensor
    gc.collect()
    assert len(dropped) == 1
    assert alive


def test_what_is_refused():
    with pytest.raises(TypeError, match="no DLPack capsule, or one that was used before"):
        dlpack.read(object())
    used = np.zeros(3, np.float32).__dlpack__()
    np.from_dlpack(type("Once", (), {"__dlpack__": lambda self, **_: used, "__dlpack_device__": lambda self: (1, 0)})())
    with pytest.raises(TypeError, match="used before"):
        dlpack.read(used)
    newer, alive = counted_capsule(64, (2,), versioned=True, major=2)
    with pytest.raises(TypeError, match=r"version 2\.0, and 1 is the newest"):
        dlpack.read(newer)
    vectors, also_alive = counted_capsule(64, (2,), versioned=False, lanes=4)
    with pytest.raises(TypeError, match="vectors of 4"):
        dlpack.read(vectors)
    assert alive
    assert also_alive


@pytest.mark.parametrize("versions", [True, False], ids=["versioned", "before versions"])
@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (2, 2), (0xABC0, 0xABC0)])
@pytest.mark.parametrize("device_type", [dlpack.CUDA, dlpack.CUDA_MANAGED])
def test_an_array_is_asked_to_be_ready_on_the_stream(device_type, stream, asked, versions):
    """0 is no stream in the protocol: the legacy default stream is 1 there."""
    array = DLPackOnly(np.zeros((2, 3), np.float32), device=(device_type, 2), versions=versions)
    operand = as_operand("a", array, stream=stream)
    assert [call["stream"] for call in array.calls] == [asked]
    assert ("max_version" in array.calls[0]) is versions
    assert (operand.kind, operand.stream, operand.device, operand.array) == (DLPACK, stream, 2, array)
    assert operand.pointer == array.array.__array_interface__["data"][0]
    assert operand.owner is not None


def test_an_export_that_fails_says_why():
    class Refuses(DLPackOnly):
        def __dlpack__(self, **options):
            raise BufferError("it is quantized")

    with pytest.raises(TypeError, match="a can't be shared through DLPack: it is quantized; pass a plain copy"):
        as_operand("a", Refuses(np.zeros(2, np.float32)))


def test_an_interface_goes_before_dlpack():
    both = DLPackOnly(np.zeros((2, 3), np.float32))
    both.__cuda_array_interface__ = CudaInterface((2, 3)).__cuda_array_interface__
    as_operand("a", both)
    assert both.calls == []
