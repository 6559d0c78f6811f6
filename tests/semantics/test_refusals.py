"""Calls that are refused: the error that np.matmul raises, or one of our own, and nothing written before it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import (
    F32,
    NOT_NUMPYS,
    NUMPY_TAKES_IT,
    OUT_REFUSALS,
    REFUSALS,
    SHAPE_REFUSALS,
    bits,
    full,
    ones,
    readonly,
)

import numba_gemm as ng
from numba_gemm.device.driver import is_available

DEVICES = ["auto", "cpu", "emulator", pytest.param("cuda", marks=pytest.mark.gpu)]


def memory_of(array):
    """Everything that lies around an array too; that of what a tuple holds; a copy of anything else."""
    if isinstance(array, tuple):
        return [memory_of(one) for one in array]
    if not isinstance(array, np.ndarray):
        return repr(array)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bits(np.asarray(array)) if array.dtype.kind not in "OV" else array.tolist()


def same(before, after):
    if isinstance(before, list):
        return len(before) == len(after) and all(map(same, before, after))
    return np.array_equal(before, after)


@pytest.mark.parametrize("name", REFUSALS)
def test_numpy_refuses_it_or_takes_it(name):
    """The table is right about NumPy: the same error, or none where this library is the stricter one."""
    refusal = REFUSALS[name]
    if refusal.numpy == NOT_NUMPYS:
        return
    call = refusal.make()
    if refusal.numpy == NUMPY_TAKES_IT:
        np.matmul(call["a"], call["b"], out=call["out"], casting="unsafe")
        return
    with pytest.raises(refusal.numpy):
        np.matmul(call["a"], call["b"], out=call["out"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REFUSALS)
def test_matmul_refuses_it_and_writes_nothing(name, device):
    refusal = REFUSALS[name]
    call = {"device": device, **refusal.make()}
    before = {argument: memory_of(call[argument]) for argument in ("a", "b", "out")}
    with pytest.raises(refusal.error, match=refusal.message):
        ng.matmul(**call)
    for argument, memory in before.items():
        assert same(memory, memory_of(call[argument])), argument


@pytest.mark.parametrize("name", [name for name, refusal in REFUSALS.items() if name not in OUT_REFUSALS])
def test_it_is_refused_without_out_too(name):
    refusal = REFUSALS[name]
    call = {"device": "cpu", **refusal.make(), "out": None}
    with pytest.raises(refusal.error, match=refusal.message):
        ng.matmul(**call)


#: Whose a or b is a vector, which gemm needn't promote, or whose c would be a tuple.
NOT_OF_GEMM = {
    name for name, refusal in REFUSALS.items() if 1 in (np.ndim(refusal.make()["a"]), np.ndim(refusal.make()["b"]))
} | {"out is nothing of a tuple", "two outs", "out's tuple holds a list"}


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in REFUSALS if name not in NOT_OF_GEMM])
def test_gemm_refuses_it_and_writes_nothing(name, device, beta):
    refusal = REFUSALS[name]
    call = {"device": device, **refusal.make()}
    a, b, c = call.pop("a"), call.pop("b"), call.pop("out")
    before = memory_of(c)
    message = re.sub(r"\bout\b", "c", refusal.message)
    message = message.replace("matmul: ", "")
    with pytest.raises(refusal.error, match=message):
        ng.gemm(a, b, c, 2.0, beta, **call)
    assert same(before, memory_of(c))


FLAGS = [
    {"transpose_a": True},
    {"transpose_b": True},
    {"transpose_a": True, "transpose_b": True},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_gemm_refuses_factors_that_dont_match_once_transposed(flags, device):
    """(2, 3) and (3, 4) match as they are, and in no other way."""
    c = full(2, 4)
    with pytest.raises(ValueError, match="mismatch"):
        ng.gemm(ones(2, 3), ones(3, 4), c, **flags, device=device)
    assert (c == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_gemm_refuses_c_of_the_untransposed_shape(device):
    c = full(3, 4)
    with pytest.raises(ValueError, match=r"c has shape \(3, 4\).*\(2, 4\)"):
        ng.gemm(ones(3, 2), ones(3, 4), c, transpose_a=True, device=device)
    with pytest.raises(ValueError, match=r"c has shape \(3, 4\).*\(3, 2\)"):
        ng.gemm(ones(3, 4), ones(2, 4), c, transpose_b=True, device=device)
    assert (c == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(1j, TypeError), ("2", TypeError), (None, TypeError), (True, TypeError), ([1.0], TypeError), (1e39, ValueError)],
    ids=str,
)
def test_gemm_refuses_scales_that_are_no_real_numbers(which, value, error, device):
    c = full(3, 2, 4)
    with pytest.raises(error, match=which):
        ng.gemm(ones(3, 2, 3), ones(3, 4), c, **{which: value}, device=device)
    assert (c == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.float16])
def test_gemm_takes_numpys_scalars_as_scales(dtype):
    c = full(2, 4)
    ng.gemm(ones(2, 3), ones(3, 4), c, dtype(2), dtype(3), device="cpu")
    assert (c == 2 * 3 + 3 * 7).all()


def test_gemm_needs_c():
    with pytest.raises(TypeError, match="c is None"):
        ng.gemm(ones(2, 3), ones(3, 4), None, device="cpu")
    with pytest.raises(TypeError):
        ng.gemm(ones(2, 3), ones(3, 4), device="cpu")


STACK = ones(3, 2, 3), ones(3, 4)


@pytest.mark.skipif(is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"kernel": "v7"}], ids=str)
def test_without_a_gpu_nothing_is_written(options):
    out = full(3, 2, 4)
    with pytest.raises(ng.NoDeviceError):
        ng.matmul(*STACK, out, **options)
    with pytest.raises(ng.NoDeviceError):
        ng.gemm(*STACK, out, 2.0, 0.0, **options)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("device", "kernel", "dtype"),
    [
        ("emulator", "t4", np.float32),
        ("emulator", "v7", np.float16),
        pytest.param("cuda", "t4", np.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", "v7", np.float16, marks=pytest.mark.gpu),
        ("cpu", "v7", np.float32),
        ("emulator", "cpu", np.float32),
    ],
)
def test_a_kernel_that_cant_take_it_writes_nothing(device, kernel, dtype):
    a, b = (x.astype(dtype) for x in STACK)
    out = full(3, 2, 4, dtype=dtype)
    with pytest.raises(ValueError, match=rf"kernel '?{kernel}"):
        ng.matmul(a, b, out, kernel=kernel, device=device)
    with pytest.raises(ValueError, match=rf"kernel '?{kernel}"):
        ng.gemm(a, b, out, 2.0, 1.0, kernel=kernel, device=device)
    assert (out == 7).all()


@pytest.mark.parametrize("name", SHAPE_REFUSALS)
def test_shapes_are_refused_where_nothing_would_be_computed(name):
    """With alpha = 0 no factor is read, but its shape is still checked."""
    if name in NOT_OF_GEMM:
        return
    call = SHAPE_REFUSALS[name].make()
    with pytest.raises(ValueError, match=r"mismatch|broadcast|dimensions"):
        ng.gemm(call["a"], call["b"], call["out"], 0.0, 1.0, device="cpu")


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_an_empty_out_is_checked_like_any_other(device):
    nothing = np.empty((0, 3), F32)
    for out, error in (
        (np.empty((0, 5), F32), ValueError),
        (np.empty((4, 0), F32), ValueError),
        (np.empty((0, 4), np.float64), TypeError),
        (readonly(np.empty((0, 4), F32)), ValueError),
    ):
        with pytest.raises(error, match="out"):
            ng.matmul(nothing, ones(3, 4), out, device=device)


@pytest.mark.parametrize(
    "arguments",
    [{"kernel": "v0"}, {"device": "gpu"}, {"kernel": "v7", "device": "cpu"}, {"kernel": "cpu", "device": "emulator"}],
    ids=str,
)
def test_options_are_checked_where_nothing_is_to_be_done(arguments):
    with pytest.raises(ValueError, match=r"kernel|device"):
        ng.matmul(np.empty((0, 3), F32), ones(3, 4), **arguments)


def test_options_are_named():
    with pytest.raises(TypeError):
        ng.matmul(ones(2, 3), ones(3, 4), None, "v7")
    with pytest.raises(TypeError):
        ng.gemm(ones(2, 3), ones(3, 4), full(2, 4), 1.0, 0.0, True)
    with pytest.raises(TypeError):
        ng.matmul(ones(2, 3), ones(3, 4), axes=[(0, 1), (0, 1), (0, 1)])
