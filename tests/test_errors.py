"""Bad input: a Python error that names the remedy, before anything is launched, with `out` untouched."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from arrays_fakes import FakeNumbaArray

import numba_gemm as ng
from numba_gemm.arrays import NUMBA, Operand, as_operand, overlap, overlaps_itself
from numba_gemm.choose import choose
from numba_gemm.device.driver import is_available
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem, check_inputs, check_output
from numba_gemm.stack import MAX_DIMENSION, product_shape

F32 = np.float32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


A, B = ones(3, 4), ones(4, 5)

BAD_INPUTS = {
    "inner dimensions": (lambda: (ones(3, 4), ones(5, 6)), ValueError, "mismatch in its core dimension"),
    "0-d": (lambda: (np.ones((), F32), B), ValueError, "a has 0 dimensions"),
    "scalar": (lambda: (np.float32(1), B), TypeError, "float32, not an array"),
    "vector": (lambda: (A, ones(5)), ValueError, "columns of a must be as many as the elements of b"),
    "stacks": (lambda: (ones(2, 3, 4), ones(3, 4, 5)), ValueError, "could not be broadcast together"),
    "float64": (lambda: (A.astype(float), B.astype(float)), TypeError, r"a is float64.*astype\(np.float32\)"),
    "mixed dtypes": (lambda: (A, B.astype(np.float16)), TypeError, "b is float16"),
    "complex": (lambda: (A.astype(complex), B), TypeError, "a is complex128"),
    "object": (lambda: (A.astype(object), B), TypeError, "a is object"),
    "integers": (lambda: (A.astype(int), B), TypeError, "a is int64"),
    "boolean": (lambda: (A > 0, B), TypeError, "a is bool"),
    "strings": (lambda: (np.array([["x"]]), B), TypeError, "a is str32"),
    "byte-swapped": (lambda: (A.astype(">f4"), B), TypeError, "byte-swapped float32"),
    "list": (lambda: ([[1.0, 2.0]], B), TypeError, r"a is a list, not an array.*np.asarray"),
    "None": (lambda: (None, B), TypeError, "a is a NoneType"),
    "masked": (lambda: (np.ma.masked_array(A), B), TypeError, "masked"),
    "odd strides": (lambda: (np.zeros((3, 4), "f4,i1")["f0"], B), ValueError, "structured"),
}


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs(name, device):
    make, error, message = BAD_INPUTS[name]
    a, b = make()
    out = np.full((3, 5), 7, F32)
    with pytest.raises(error, match=message):
        ng.matmul(a, b, out=out, device=device)
    with pytest.raises(error, match=message):
        ng.gemm(a, b, out, device=device)
    assert (out == 7).all()


def readonly(array):
    array.flags.writeable = False
    return array


BAD_OUTPUTS = {
    "shape": (lambda: ones(5, 3), ValueError, r"out has shape \(5, 3\); the product has shape \(3, 5\)"),
    "dimensions": (lambda: ones(15), ValueError, "out has shape"),
    "dtype": (lambda: ones(3, 5, dtype=np.float64), TypeError, "out is float64.*pass out as float32"),
    "read-only": (lambda: readonly(ones(3, 5)), ValueError, "out is read-only"),
    "broadcast": (
        lambda: np.lib.stride_tricks.as_strided(ones(5), (3, 5), (0, 4)),
        ValueError,
        "share memory with one another",
    ),
    "list": (lambda: [[0.0] * 5] * 3, TypeError, "out is a list"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_bad_outputs(name):
    make, error, message = BAD_OUTPUTS[name]
    out = make()
    before = np.array(out, copy=True)
    with pytest.raises(error, match=message):
        ng.matmul(A, B, out=out, device="cpu")
    assert np.array_equal(np.asarray(out), before)


def test_overlapping_out_is_refused_and_untouched():
    memory = np.arange(64, dtype=F32).reshape(8, 8)
    before = memory.copy()
    for out in (memory, memory.T, memory[::-1]):
        with pytest.raises(ValueError, match="out shares memory with a"):
            ng.matmul(memory, np.eye(8, dtype=F32), out=out, device="cpu")
        with pytest.raises(ValueError, match="out shares memory with b"):
            ng.matmul(np.eye(8, dtype=F32), memory, out=out, device="cpu")
    assert np.array_equal(memory, before)


def test_interleaved_views_of_one_array_do_not_overlap():
    memory = np.zeros((8, 16), F32)
    memory[:, :8] = np.eye(8)
    ng.matmul(memory[:, :8], ones(8, 8), out=memory[:, 8:], device="cpu")
    assert (memory[:, 8:] == 1).all()


@pytest.mark.parametrize(
    ("alpha", "error", "message"),
    [
        (1j, TypeError, "real number"),
        ("2", TypeError, "real number"),
        (None, TypeError, "real number"),
        (True, TypeError, "real number"),
        (np.array(2.0), TypeError, "of type ndarray; it must be a real number, for instance float"),
        (1e39, ValueError, "past the range of float32"),
        (10**400, ValueError, "past the range of float32"),
    ],
)
def test_bad_scales(alpha, error, message):
    c = np.full((3, 5), 7, F32)
    with pytest.raises(error, match=f"alpha.*{message}"):
        ng.gemm(A, B, c, alpha=alpha, device="cpu")
    with pytest.raises(error, match=f"beta.*{message}"):
        ng.gemm(A, B, c, beta=alpha, device="cpu")
    assert (c == 7).all()


@pytest.mark.parametrize("letter", ["N", "T", None, 2, np.array([True, False])], ids=repr)
def test_transpositions_are_true_or_false(letter):
    """A letter of BLAS is refused: as a truth value "N" would transpose."""
    square, c = ones(4, 4), np.full((4, 4), 7, F32)
    for name in ("transpose_a", "transpose_b"):
        with pytest.raises(TypeError, match=f"{name} is .*; pass True or False"):
            ng.gemm(square, square, c, device="cpu", **{name: letter})
    assert (c == 7).all()
    for flag in (1, np.True_):
        ng.gemm(A.T, B, np.empty((3, 5), F32), transpose_a=flag, device="cpu")


def test_shapes_that_do_not_fit_after_a_transposition_are_named_as_such():
    with pytest.raises(ValueError, match=r"a has shape \(4, 3\).*\(the shapes after transpose_a=True, transpose_b=Fal"):
        ng.gemm(A, B, np.empty((3, 5), F32), transpose_a=True, device="cpu")


def test_gemm_needs_c():
    with pytest.raises(TypeError, match="c is None"):
        ng.gemm(A, B, None)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_unknown_kernels_are_named_with_those_there_are(device):
    out = np.full((3, 5), 7, F32)
    with pytest.raises(ValueError, match=r"no kernel 'v99'; the kernels are cpu, v1, .*v7"):
        ng.matmul(A, B, kernel="v99", out=out, device=device)
    with pytest.raises(TypeError, match="kernel is 7"):
        ng.matmul(A, B, kernel=7, device=device)
    assert (out == 7).all()


def test_unknown_devices_are_named_with_those_there_are():
    with pytest.raises(ValueError, match="device is 'tpu'; it must be one of 'auto', 'cuda', 'cpu', 'emulator'"):
        ng.matmul(A, B, device="tpu")


@pytest.mark.parametrize(
    ("kernel", "device", "message"),
    [
        ("v7", "cpu", "use device='cuda', or kernel='cpu', .*device='emulator'"),
        ("cpu", "cuda", "use device='cpu'"),
        ("cpu", "emulator", "use device='cpu'"),
    ],
)
def test_kernels_on_the_wrong_device(kernel, device, message):
    with pytest.raises(ValueError, match=message):
        ng.matmul(A, B, kernel=kernel, device=device)


@pytest.mark.skipif(is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"kernel": "v7"}, {"kernel": "v7", "device": "cuda"}], ids=str)
def test_no_gpu(options):
    out = np.full((3, 5), 7, F32)
    with pytest.raises(ng.NoDeviceError, match=r"libcuda|driver.*device='cpu'.*numba-gemm info") as caught:
        ng.matmul(A, B, out=out, **options)
    assert (out == 7).all()
    assert caught.value.__suppress_context__  # the frames of the search for libcuda tell nobody anything
    assert str(caught.value).startswith(f"{caught.value.reason}. Use device=")


@pytest.mark.parametrize("order", ["host first", "device first"])
def test_host_and_device_mixed(order):
    a, b = (A, FakeNumbaArray((4, 5))) if order == "host first" else (FakeNumbaArray((3, 4)), B)
    host, device = ("a", "b") if order == "host first" else ("b", "a")
    message = rf"{host} is a NumPy array in host memory and {device} is a .* in GPU memory.*to_device\({host}\)"
    with pytest.raises(TypeError, match=message):
        ng.matmul(a, b)


def test_host_out_of_device_inputs():
    with pytest.raises(TypeError, match="out is a NumPy array in host memory"):
        ng.matmul(FakeNumbaArray((3, 4)), FakeNumbaArray((4, 5)), out=ones(3, 5))


def test_device_arrays_do_not_run_on_the_cpu():
    for options in ({"device": "cpu"}, {"kernel": "cpu"}):
        with pytest.raises(ValueError, match="copy_to_host"):
            ng.matmul(FakeNumbaArray((3, 4)), FakeNumbaArray((4, 5)), **options)


SHAPE = product_shape((4, 4), (4, 4))


def test_device_outputs_are_checked_too():
    a, b = as_operand("a", FakeNumbaArray((4, 4), pointer=4096)), as_operand("b", FakeNumbaArray((4, 4), pointer=8192))
    for pointer, problem in ((4096, "shares memory with a"), (8192 + 60, "shares memory with b")):
        out = as_operand("out", FakeNumbaArray((4, 4), pointer=pointer))
        with pytest.raises(ValueError, match=problem):
            check_output(out, a, b, SHAPE)
    readonly_out = as_operand("out", FakeNumbaArray((4, 4), pointer=1 << 16, readonly=True))
    with pytest.raises(ValueError, match="read-only"):
        check_output(readonly_out, a, b, SHAPE)
    check_output(as_operand("out", FakeNumbaArray((4, 4), pointer=4096 + 64)), a, b, SHAPE)


def operand(shape, strides, pointer=0):
    return Operand("x", None, NUMBA, pointer, shape, strides, "float32", 4, False, None)


def test_overlap_is_exact_for_interleaved_columns():
    left = operand((8, 8), (16, 1), pointer=4096)
    assert not overlap(left, operand((8, 8), (16, 1), pointer=4096 + 32))
    assert overlap(left, operand((8, 8), (16, 1), pointer=4096 + 28))
    assert overlap(left, operand((8, 8), (-16, 1), pointer=4096 + 7 * 64))


@pytest.mark.parametrize(
    ("shape", "strides", "itself"),
    [
        ((4, 4), (4, 1), False),
        ((4, 4), (1, 4), False),
        ((4, 4), (-4, -1), False),
        ((4, 4), (3, 1), True),
        ((4, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((4, 4), (2, 8), False),
    ],
)
def test_self_overlap(shape, strides, itself):
    assert overlaps_itself(operand(shape, strides)) is itself


def test_dimensions_past_the_limit_are_refused():
    huge = operand((MAX_DIMENSION + 1, 1), (1, 1))
    with pytest.raises(ValueError, match="split the product"):
        check_inputs(huge, operand((1, 1), (1, 1)))


def test_a_gpu_that_is_too_old_is_refused():
    with pytest.raises(KernelConstraintError, match=re.escape("needed is a GPU of 7.5 or later")):
        choose(Problem.packed(4, 4, 4), "v1", arch=(6, 1))


def test_a_named_kernel_says_which_constraint_failed_and_which_kernel_can():
    problem = Problem.packed(2**31 - 1, 2**31 - 1, 1)
    with pytest.raises(KernelConstraintError, match=r"kernel v1 can't take.*grid.*split the product"):
        choose(problem, "v1", arch=(9, 0))
    narrow = Problem.packed(2**31 - 1, 1024, 1)
    with pytest.raises(KernelConstraintError, match=r"kernel v1 can't take.*kernel 'v8' can"):
        choose(narrow, "v1", arch=(9, 0))


def test_checks_ignore_what_a_namespace_pretends():
    """An object with a wrong attribute of the interface's name is no array."""
    with pytest.raises(TypeError, match="not an array"):
        ng.matmul(SimpleNamespace(__cuda_array_interface__=None), B)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_limit": 0}, ValueError, "positive number of bytes"),
        ({"memory_limit": -1}, ValueError, "positive number of bytes"),
        ({"memory_limit": 1e9}, TypeError, "number of bytes"),
        ({"memory_limit": True}, TypeError, "number of bytes"),
        ({"progress": 3}, TypeError, "function that takes"),
        ({"stream": "first"}, TypeError, "stream"),
        ({"stream": 7}, TypeError, "host memory.*leave stream out"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_bad_options(options, error, message, device):
    out = np.full((3, 5), 7, F32)
    with pytest.raises(error, match=message):
        ng.matmul(A, B, out=out, device=device, **options)
    with pytest.raises(error, match=message):
        ng.gemm(A, B, out, device=device, **options)
    assert (out == 7).all()
