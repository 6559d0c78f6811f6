"""CuPy, torch and JAX: real packages on the CPU where they are installed, stand-ins for what needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from arrays_fakes import CudaInterface, DLPackOnly, FakeNumbaArray, fake_cupy, fake_torch

from numba_gemm.arrays import CUPY, HOST, TORCH, as_operand, empty_like_operand, probe_for, wrap_result
from numba_gemm.arrays.probes import IN_FULL
from numba_gemm.problem import check_same_place


@pytest.fixture(params=[13, 14])
def cupy(monkeypatch, request):
    module = fake_cupy(stream=64, version=request.param)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch(stream=80)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_cupy_arrays_on_the_current_stream(cupy):
    array = cupy.ndarray((2, 3), strides=(-16, 4), ptr=4096)
    operand = as_operand("a", array)
    assert (operand.kind, operand.array, operand.place) == (CUPY, array, "a CuPy array on GPU 0")
    assert (operand.pointer, operand.shape, operand.strides) == (4096, (2, 3), (-4, 1))
    assert (operand.dtype, operand.itemsize, operand.stream, operand.device) == ("float32", 4, 64, 0)
    assert as_operand("a", cupy.ndarray((2, 3), ml_dtypes.bfloat16)).dtype == "bfloat16"
    with cupy.cuda.ExternalStream(1):
        assert as_operand("a", array).stream == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_on_the_current_stream(torch, dtype):
    tensor = torch.Tensor((2, 3), dtype, strides=(1, 2), pointer=4096)
    operand = as_operand("a", tensor)
    assert (operand.kind, operand.array, operand.place) == (TORCH, tensor, "a torch tensor on GPU 0")
    assert (operand.pointer, operand.shape, operand.strides) == (4096, (2, 3), (1, 2))
    assert (operand.dtype, operand.stream, operand.device) == (dtype, 80, 0)
    assert operand.itemsize == (4 if dtype == "float32" else 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device": "meta"}, "a is a torch tensor on .*; pass one on the CPU or on an NVIDIA GPU"),
        ({"device": "xpu"}, "pass one on the CPU or on an NVIDIA GPU"),
        ({"layout": "sparse_coo"}, r"layout sparse_coo; pass a.to_dense\(\)"),
        ({"is_quantized": True}, r"a.dequantize\(\)"),
        ({"conj": True}, r"lazily conjugate view.*a.resolve_conj\(\)"),
        ({"neg": True}, r"lazily negative view.*a.resolve_neg\(\)"),
        ({"requires_grad": True}, r"requires a gradient.*a.detach\(\).*torch.no_grad\(\)"),
        ({"pointer": None}, "without memory of its own"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_torch_tensors_that_are_refused(torch, flags, message):
    with pytest.raises(TypeError, match=message):
        as_operand("a", torch.Tensor((2, 3), **flags))


def test_a_gradient_is_no_matter_where_none_is_recorded(torch):
    torch.is_grad_enabled = lambda: False
    assert as_operand("a", torch.Tensor((2, 3), requires_grad=True)).kind == TORCH


def test_amds_torch_is_refused(torch):
    torch.version.cuda = None
    with pytest.raises(TypeError, match="NVIDIA"):
        as_operand("a", torch.Tensor((2, 3)))


def test_arrays_in_different_places_are_moved_by_their_own_package(cupy, torch):
    host = as_operand("b", np.zeros((2, 2), np.float32))
    matrix = type("Matrix", (CudaInterface,), {"__module__": "numba_gemm.host", "__numba_gemm_matrix__": True})
    for array, remedy in (
        (cupy.ndarray((2, 2)), r"cupy.asarray\(b\), or cupy.asnumpy\(a\)"),
        (torch.Tensor((2, 2)), r"torch.from_numpy\(b\).to\('cuda:0'\), or a.cpu\(\)"),
        (FakeNumbaArray((2, 2)), r"numba.cuda.to_device\(b\), or a.copy_to_host\(\)"),
        (matrix((2, 2)), r"numba_gemm.device_put\(b\), or a.numpy\(\)"),
        (CudaInterface((2, 2)), r"numba.cuda.to_device\(b\), or numba.cuda.as_cuda_array\(a\).copy_to_host\(\)"),
    ):
        with pytest.raises(TypeError, match=rf"b is a NumPy array in host memory .*; move one of them: {remedy}$"):
            check_same_place(host, as_operand("a", array))


@pytest.mark.parametrize(("stream", "taken_from"), [(None, 64), (64, 64), (96, 96), (0, 0)])
def test_new_cupy_arrays_come_from_the_pool_of_the_stream(cupy, stream, taken_from):
    result = empty_like_operand(as_operand("a", cupy.ndarray((2, 3))), (5, 2, 4), stream)
    assert (type(result), result.shape, result.dtype) == (cupy.ndarray, (5, 2, 4), np.float32)
    assert cupy.made == [taken_from]
    assert empty_like_operand(as_operand("a", cupy.ndarray((2, 3))), (), stream, "bfloat16").dtype.name == "bfloat16"


@pytest.mark.parametrize(("stream", "taken_from"), [(None, 80), (80, 80), (96, 96), (0, 0)])
def test_new_torch_tensors_come_from_the_pool_of_the_stream(torch, stream, taken_from):
    result = empty_like_operand(as_operand("a", torch.Tensor((2, 3))), (5, 2, 4), stream, "bfloat16")
    assert (type(result), result.shape, result.dtype) == (torch.Tensor, (5, 2, 4), "torch.bfloat16")
    assert torch.made == [taken_from]


def test_probes_see_what_operands_see(cupy, torch):
    array = cupy.ndarray((2, 3), strides=(16, 4), ptr=4096)
    assert probe_for(array)(array) == (4096, (2, 3), (16, 4), np.dtype("f4"), 64)
    with cupy.cuda.ExternalStream(1):
        assert probe_for(array)(array)[-1] == 0
    tensor = torch.Tensor((2, 3), pointer=4096)
    assert probe_for(tensor) is probe_for(torch.Tensor((4, 4)))
    assert probe_for(tensor)(tensor) == (4096, (2, 3), (3, 1), "torch.float32", 80)
    numba_array = FakeNumbaArray((2, 3))
    numba_array.__dict__.update(
        shape=(2, 3),
        strides=(12, 4),
        dtype=np.dtype("f4"),
        stream=0,
        gpu_data=SimpleNamespace(device_ctypes_pointer=SimpleNamespace(value=4096)),
    )
    assert probe_for(numba_array)(numba_array) == (4096, (2, 3), (12, 4), np.dtype("f4"), 0)
    numba_array.stream = 96
    assert probe_for(numba_array)(numba_array)[-1] == 96
    numba_array.gpu_data = None  # of an empty array
    assert probe_for(numba_array)(numba_array)[0] == 0


@pytest.mark.parametrize(
    "flags", [{"requires_grad": True}, {"neg": True}, {"layout": "sparse_coo"}, {"device": "cpu"}], ids=str
)
def test_probes_leave_a_changed_tensor_to_the_full_checks(torch, flags):
    probe = probe_for(torch.Tensor((2, 3)))
    assert probe(torch.Tensor((2, 3), **flags))[3] == IN_FULL


def test_there_are_no_probes_for_others(torch):
    subclass = type("Mine", (torch.Tensor,), {})
    for array in (np.zeros(2), CudaInterface((2, 2)), DLPackOnly(np.zeros(2)), subclass((2, 2)), [1], None):
        assert probe_for(array) is None


# Real packages, on the CPU.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_real_torch_tensors_on_the_cpu_share_their_memory(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(getattr(torch, dtype))[::2, 1:].T
    operand = as_operand("out", tensor)
    assert (operand.kind, operand.dtype, operand.source) == (HOST, dtype, tensor)
    assert (operand.shape, operand.strides, operand.readonly) == ((5, 2), (1, 12), False)
    assert (operand.pointer, operand.place) == (tensor.data_ptr(), "a torch tensor in host memory")
    operand.array[0, 0] = 99
    assert tensor[0, 0] == 99
    result = empty_like_operand(operand, (3, 4))
    assert (type(result), result.dtype, tuple(result.shape)) == (torch.Tensor, tensor.dtype, (3, 4))
    assert empty_like_operand(operand, (3,), None, "float32").dtype == torch.float32
    assert wrap_result(result, (tensor, tensor)) is result


def test_real_torch_tensors_that_are_refused():
    torch = pytest.importorskip("torch")
    z = torch.zeros((2, 2), dtype=torch.complex64)
    cases = {
        "to_dense": torch.zeros((2, 2)).to_sparse(),
        "dequantize": torch.quantize_per_tensor(torch.zeros((2, 2)), 0.1, 0, torch.qint8),
        "resolve_conj": z.conj(),
        "resolve_neg": z.conj().imag,
        "detach": torch.zeros((2, 2), requires_grad=True),
        "on meta": torch.zeros((2, 2), device="meta"),
    }
    for remedy, tensor in cases.items():
        with pytest.raises(TypeError, match=remedy):
            as_operand("a", tensor)
    with torch.no_grad():
        assert as_operand("a", torch.nn.Parameter(torch.zeros((2, 2)))).kind == HOST


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_jax_arrays_on_the_cpu(dtype):
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((3, 4), dtype)
    operand = as_operand("a", array)
    assert (operand.kind, operand.dtype, operand.readonly) == (HOST, dtype, True)
    assert operand.place == "a JAX array in host memory"
    assert operand.pointer == array.unsafe_buffer_pointer()
    result = empty_like_operand(operand, (3, 3))
    result[...] = 7
    wrapped = wrap_result(result, (array, array))
    assert isinstance(wrapped, jax.Array)
    assert (wrapped.dtype, wrapped.shape, float(wrapped[0, 0])) == (dtype, (3, 3), 7.0)


def test_real_jax_arrays_that_are_refused():
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((3, 4))
    for name in ("out", "c"):
        with pytest.raises(TypeError, match=f"{name} is a JAX array, which can't be written; leave {name} out"):
            as_operand(name, array)
    with pytest.raises(TypeError, match=r"a is a JAX tracer.*outside"):
        jax.jit(lambda x: as_operand("a", x))(array)
    array.delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        as_operand("a", array)


# Subclasses of NumPy's array, as np.matmul treats them.


class Labelled(np.ndarray):
    label = ""

    def __array_finalize__(self, parent):
        self.label = getattr(parent, "label", "")


class First(Labelled):
    __array_priority__ = 5.0


class Never(Labelled):
    __array_priority__ = -1.0


class Wrapping(np.ndarray):
    def __array_wrap__(self, array, context=None, return_scalar=False):
        return ("wrapped", context[0], array.shape, return_scalar)


def labelled(kind, label):
    array = np.ones((2, 2), np.float32).view(kind)
    array.label = label
    return array


PLAIN = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    "inputs",
    [
        (PLAIN, PLAIN),
        (PLAIN.view(np.matrix), PLAIN),
        (PLAIN, PLAIN.view(np.matrix)),
        (labelled(Labelled, "a"), labelled(Labelled, "b")),
        (labelled(Labelled, "a"), labelled(First, "b")),
        (labelled(First, "a"), PLAIN.view(np.matrix)),
        (PLAIN, labelled(Labelled, "b")),
        (np.asfortranarray(PLAIN), PLAIN.view(np.recarray)),
    ],
    ids=lambda pair: "-".join(type(array).__name__ for array in pair),
)
def test_results_are_wrapped_as_by_numpy(inputs):
    expected = np.matmul(*inputs)
    result = wrap_result(np.asarray(expected).copy(), inputs)
    assert type(result) is type(expected)
    assert getattr(result, "label", None) == getattr(expected, "label", None)
    assert np.array_equal(result, expected)


def test_a_low_priority_wraps_nothing():
    assert type(wrap_result(PLAIN, (labelled(Never, "a"), PLAIN))) is np.ndarray


def test_what_a_wrapper_is_told():
    wrapping = PLAIN.view(Wrapping)
    assert wrap_result(PLAIN, (PLAIN, wrapping)) == ("wrapped", np.matmul, (2, 2), False)


def test_a_result_without_dimensions_is_a_scalar():
    result = wrap_result(np.array(3, np.float32), (PLAIN[0], PLAIN[0]))
    assert type(result) is type(np.matmul(PLAIN[0], PLAIN[0])) is np.float32
