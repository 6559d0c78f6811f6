"""as_operand on NumPy arrays and on objects that speak a protocol: what is seen, and what is refused with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from arrays_fakes import CudaInterface, DLPackOnly, FakeNumbaArray

from numba_gemm.arrays import (
    DLPACK,
    HOST,
    INTERFACE,
    MATRIX,
    NUMBA,
    Operand,
    as_operand,
    dlpack,
    overlap,
    overlaps_itself,
)

FakeMatrix = type("Matrix", (CudaInterface,), {"__module__": "numba_gemm.host", "__numba_gemm_matrix__": True})


def seen(array, name="a", **options):
    operand = as_operand(name, array, **options)
    return operand.kind, operand.shape, operand.strides, operand.dtype


def test_numba_arrays_with_repeated_axes():
    """Numba's interface gives no strides for an array that would be packed but for axes of stride 0."""
    repeated = FakeNumbaArray((2, 3))
    assert repeated.__cuda_array_interface__["strides"] is None
    repeated.strides = (4, 0)
    assert seen(repeated) == (NUMBA, (2, 3), (1, 0), "float32")


@pytest.mark.parametrize(
    ("array", "strides"),
    [
        (np.zeros((2, 3), np.float32), (3, 1)),
        (np.zeros((2, 3), np.float32).T, (1, 3)),
        (np.zeros((4, 6), np.float32)[::-2, ::3], (-12, 3)),
        (np.broadcast_to(np.zeros(3, np.float32), (2, 3)), (0, 1)),
        (np.zeros((), np.float32), ()),
        (np.zeros(5, np.float16), (1,)),
        (np.zeros((2, 3, 4, 5), ml_dtypes.bfloat16), (60, 20, 5, 1)),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_numpy_arrays(array, strides):
    operand = as_operand("a", array)
    assert operand.array is array
    assert (operand.kind, operand.shape, operand.strides) == (HOST, array.shape, strides)
    assert operand.dtype == array.dtype.name
    assert operand.itemsize == array.itemsize
    assert operand.pointer == array.__array_interface__["data"][0]
    assert operand.readonly is not array.flags.writeable
    assert (operand.on_device, operand.stream, operand.device) == (False, None, None)
    assert operand.place == "a NumPy array in host memory"


class Quantity(np.ndarray):
    def __array_ufunc__(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        ([[1.0]], TypeError, r"a is a list, not an array; pass a NumPy array \(np.asarray\(a"),
        (None, TypeError, "a is a NoneType"),
        (np.float32(1), TypeError, "a is a float32, not an array"),
        (1.0, TypeError, "a is a float,"),
        (np.ma.masked_array([1.0]), TypeError, r"masked.*a.filled\(0\)"),
        (np.zeros(2).view(Quantity), TypeError, r"Quantity, which has an arithmetic of its own.*np.asarray\(a\)"),
        (np.zeros((3, 4), "f4,i1")["f0"], ValueError, "structured"),
        (CudaInterface((2, 2), mask=CudaInterface((2, 2))), TypeError, "a has a mask"),
        (CudaInterface((2, 2), stream=0), ValueError, "stream 0.*must give 1 for the legacy default stream"),
        (CudaInterface((2, 2), strides=(10, 4)), ValueError, "not multiples of its 4-byte elements"),
        (DLPackOnly(np.zeros(2, np.float32), device=(10, 0)), TypeError, "device of DLPack type 10; pass an array in"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_what_is_refused(array, error, message):
    with pytest.raises(error, match=message):
        as_operand("a", array)


@pytest.mark.parametrize("kind", [INTERFACE, NUMBA, MATRIX])
def test_cuda_array_interfaces(kind):
    make = {INTERFACE: CudaInterface, NUMBA: FakeNumbaArray, MATRIX: FakeMatrix}[kind]
    array = make((5, 2, 3), pointer=4096, readonly=True)
    operand = as_operand("a", array)
    assert operand.kind == kind
    assert operand.array is array
    assert (operand.pointer, operand.shape, operand.strides) == (4096, (5, 2, 3), (6, 3, 1))
    assert (operand.dtype, operand.itemsize, operand.readonly, operand.stream) == ("float32", 4, True, None)
    assert operand.on_device
    assert seen(make((2, 3), strides=(-24, 8))) == (kind, (2, 3), (-6, 2), "float32")
    assert as_operand("a", make((0, 3), pointer=0)).pointer == 0
    assert as_operand("a", make((), pointer=None)).shape == ()


@pytest.mark.parametrize(("stream", "handle"), [(None, None), (1, 0), (2, 2), (0xABC0, 0xABC0)])
def test_an_interfaces_stream(stream, handle):
    """1 is the protocol's name of the legacy default stream, whose handle is 0 here."""
    assert as_operand("a", CudaInterface((2, 2), stream=stream)).stream == handle
    old = CudaInterface((2, 2))
    old.__cuda_array_interface__ = {"shape": (2, 2), "typestr": "<f4", "data": (64, False), "version": 0}
    assert as_operand("a", old).stream is None


def test_an_arrays_own_dtype_goes_before_the_interfaces():
    array = CudaInterface((2, 2), typestr="<V2")
    assert as_operand("a", array).dtype == "void16"
    array.dtype = np.dtype(ml_dtypes.bfloat16)
    assert as_operand("a", array).dtype == "bfloat16"
    array.dtype = "not NumPy's"
    assert as_operand("a", array).dtype == "void16"
    array.dtype = np.dtype(np.float64)  # of another size: the interface says what is in memory
    assert as_operand("a", array).dtype == "void16"
    assert as_operand("a", CudaInterface((2, 2), typestr=">f4")).dtype == "byte-swapped float32"


@pytest.mark.parametrize(
    ("array", "place"),
    [
        (FakeNumbaArray((2, 2)), "a Numba device array in GPU memory"),
        (FakeMatrix((2, 2)), "a numba_gemm Matrix in GPU memory"),
        (CudaInterface((2, 2)), "an arrays_fakes.CudaInterface in GPU memory"),
        (DLPackOnly(np.zeros(2, np.float32), device=(dlpack.CUDA, 1)), "an arrays_fakes.DLPackOnly on GPU 1"),
    ],
)
def test_places(array, place):
    assert as_operand("a", array).place == place


class HostInterface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


class HostDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Converted:
    """Has nothing but ``__array__``, and makes a new array each time unless it is told not to."""

    def __init__(self, array, *, shares):
        self.array = array
        self.shares = shares

    def __array__(self, dtype=None, copy=None):
        return self.array if self.shares else self.array.copy()


@pytest.mark.parametrize("wrap", [HostInterface, HostDLPack, lambda array: Converted(array, shares=True)])
def test_host_arrays_of_other_packages_share_their_memory(wrap):
    memory = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    array = wrap(memory)
    for name in ("a", "out"):
        operand = as_operand(name, array)
        assert operand.kind == HOST
        assert operand.source is array
        assert np.shares_memory(operand.array, memory)
        assert (operand.pointer, operand.strides) == (memory.__array_interface__["data"][0], (3, -1))
        assert operand.place.endswith(f"{type(array).__name__} in host memory")


def test_an_output_must_share_its_memory():
    array = Converted(np.zeros((2, 2), np.float32), shares=False)
    assert as_operand("a", array).kind == HOST
    with pytest.raises(TypeError, match="out is a Converted, whose memory NumPy can't share; pass a NumPy array"):
        as_operand("out", array)


@pytest.mark.parametrize("typestr", ["<V2", "|V2"])
def test_dlpack_goes_before_an_interface_that_cannot_name_the_dtype(typestr):
    array = DLPackOnly(np.zeros((2, 3), np.float16))
    array.__cuda_array_interface__ = CudaInterface((2, 3), typestr=typestr).__cuda_array_interface__
    assert seen(array) == (DLPACK, (2, 3), (3, 1), "float16")
    array.__cuda_array_interface__ = CudaInterface((2, 3), typestr="<f2").__cuda_array_interface__
    assert as_operand("a", array).kind == INTERFACE


def test_managed_memory_of_numba_is_the_gpus_also_as_a_view():
    """Numba's managed arrays are NumPy arrays too; a view of one has lost the attributes that Numba gave it."""
    managed = type("ManagedNDArray", (np.ndarray,), {"__module__": "numba.cuda.cudadrv.devicearray"})
    array = np.zeros((4, 6), np.float32).view(managed)
    assert seen(array[1:, ::2]) == (NUMBA, (3, 3), (6, 2), "float32")
    assert as_operand("a", array).pointer == array.__array_interface__["data"][0]
    assert as_operand("a", np.asarray(array)).kind == HOST


def test_transposed_exchanges_the_last_two_axes():
    array = np.zeros((2, 3, 4), np.float32)
    operand = as_operand("a", array).transposed()
    assert (operand.shape, operand.strides) == ((2, 4, 3), (12, 1, 4))
    assert operand.array.shape == (2, 4, 3)
    assert np.shares_memory(operand.array, array)
    device = as_operand("a", CudaInterface((3, 4))).transposed()
    assert (device.shape, device.strides) == ((4, 3), (1, 4))


def operand(shape, strides, pointer=1 << 16, kind=NUMBA):
    return Operand("x", None, kind, pointer, shape, strides, "float32", 4, False, None)


def test_byte_range_of_any_number_of_dimensions():
    assert operand((), ()).byte_range() == (1 << 16, (1 << 16) + 4)
    assert operand((3, 0), (1, 1)).byte_range() == (1 << 16, 1 << 16)
    assert operand((2, 3, 4), (-100, 10, 1)).byte_range() == ((1 << 16) - 400, (1 << 16) + 4 * 24)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4,), (1,)),
        ((4,), (0,)),
        ((1,), (0,)),
        ((2, 3), (3, 2)),  # offsets 0 2 4 3 5 7: the strides alone don't tell
        ((2, 4), (3, 2)),
        ((3, 3), (2, 1)),
        ((2, 3, 4), (12, 4, 1)),
        ((2, 3, 4), (1, 2, 6)),
        ((2, 3, 4), (12, -4, 1)),
        ((2, 3, 4), (0, 4, 1)),
        ((5, 1, 4), (4, 0, 1)),
        ((2, 2, 2), (1, 1, 4)),
        ((3, 5, 2), (7, 3, 1)),
        ((0, 4), (0, 0)),
        ((), ()),
    ],
    ids=str,
)
def test_overlaps_itself_agrees_with_enumeration(shape, strides):
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    assert overlaps_itself(operand(shape, strides)) is (len(set(offsets)) < len(offsets))


def test_overlaps_itself_is_careful_where_enumeration_is_long():
    assert overlaps_itself(operand((2, 40_000), (3, 2)))
    assert not overlaps_itself(operand((40_000, 2), (2, 1)))


def test_overlap_of_stacks():
    stack = operand((4, 8, 8), (64, 8, 1))
    assert overlap(stack, operand((8, 8), (8, 1), pointer=(1 << 16) + 3 * 256))
    assert not overlap(stack, operand((8, 8), (8, 1), pointer=(1 << 16) + 4 * 256))
    even = operand((2, 8, 8), (128, 8, 1))
    assert not overlap(even, operand((2, 8, 8), (128, 8, 1), pointer=(1 << 16) + 256))
    assert overlap(even, operand((2, 8, 8), (128, 8, 1), pointer=(1 << 16) + 252))
    assert overlap(operand((), ()), operand((), ()))


def test_overlap_of_managed_memory_seen_from_both_sides():
    assert overlap(operand((4, 4), (4, 1)), operand((4, 4), (4, 1), kind=HOST))


def test_nothing_is_imported_for_arrays_of_no_package():
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from arrays_fakes import CudaInterface\n"
        "import numpy as np\n"
        "from numba_gemm.arrays import as_operand, probe_for, as_stream\n"
        "as_operand('a', np.zeros((2, 2))); as_operand('b', CudaInterface((2, 2)))\n"
        "probe_for(np.zeros(2)); as_stream(7)\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not loaded & {'numba', 'cupy', 'torch', 'jax', 'cuda'}, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
