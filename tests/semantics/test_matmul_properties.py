"""Drawn at random: shapes, stacks, strides, alignments, scales. Held against float64 within the bound.

The seeds are fixed (``derandomize``), so that a run fails or passes by the code alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import DTYPES, F32, expected
from drawn_views import Laid, arrangements, factors
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from places import EMULATED_ARCH, Place

import numba_gemm as ng
from numba_gemm.validate import check

MANY = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(MANY, max_examples=15)

SEEDS = st.integers(0, 2**31)
SCALES = st.sampled_from([0.0, 1.0, -1.0, 0.5, -2.0, 3.0]) | st.floats(-4, 4, width=32, allow_subnormal=False)


def numbers(shape, dtype, kind, seed):
    generator = np.random.default_rng(seed)
    if kind == "integer":
        return generator.integers(-3, 4, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def draw_laid(data, shape, dtype, kind, seed, *, broadcast=True):
    how = data.draw(arrangements(shape, broadcast=broadcast))
    return Laid(how, dtype, numbers(shape, dtype, kind, seed))


def multiply(data, device, kernel, dtype, *, largest):
    """One product drawn and checked: its shape, its value, and that nothing but ``out`` is written."""
    shapes = data.draw(factors(largest=largest, larger_out=True))
    kind, seed = data.draw(st.sampled_from(["integer", "normal"])), data.draw(SEEDS)
    a, b = (draw_laid(data, shape, DTYPES[dtype], kind, seed + i) for i, shape in enumerate((shapes.a, shapes.b)))
    out_dtype = data.draw(st.sampled_from(sorted({dtype, "float32"})))
    out = Laid(data.draw(arrangements(shapes.out, broadcast=False)), DTYPES[out_dtype])
    tensor_core = EMULATED_ARCH if device == "emulator" and dtype != "float32" else None
    options = {"kernel": kernel, "device": device}

    assert ng.matmul(a.view, b.view, out.view, **options) is out.view
    right = expected(a.view, b.view, shape=shapes.out, c_dtype=out_dtype, tensor_core=tensor_core)
    verdict = check(out.view, right, exact=kind == "integer")
    assert verdict, verdict.message
    assert out.kept_to_itself
    assert a.untouched
    assert b.untouched

    if device == "cpu":
        result = ng.matmul(a.view, b.view, **options)
        assert result.dtype == DTYPES[dtype]
        assert result.shape == np.matmul(a.view, b.view).shape
        verdict = check(np.asarray(result), expected(a.view, b.view), exact=kind == "integer")
        assert verdict, verdict.message


def update(data, device, kernel, dtype, *, largest):
    """One gemm drawn and checked."""
    shapes = data.draw(factors(vectors=False, largest=largest, larger_out=True))
    kind, seed = data.draw(st.sampled_from(["integer", "normal"])), data.draw(SEEDS)
    alpha, beta = data.draw(SCALES), data.draw(SCALES)
    flags = {"transpose_a": data.draw(st.booleans()), "transpose_b": data.draw(st.booleans())}
    assume(beta == 0 or abs(beta) > 1e-6)
    c_dtype = data.draw(st.sampled_from(sorted({dtype, "float32"})))

    stored = [
        (*shape[:-2], *shape[:-3:-1]) if flag else shape
        for shape, flag in zip((shapes.a, shapes.b), flags.values(), strict=True)
    ]
    a, b = (draw_laid(data, shape, DTYPES[dtype], kind, seed + i) for i, shape in enumerate(stored))
    c_values = numbers(shapes.out, DTYPES[c_dtype], kind, seed + 2) if beta != 0 else None
    c = Laid(data.draw(arrangements(shapes.out, broadcast=False)), DTYPES[c_dtype], c_values)
    x, y = (v.swapaxes(-1, -2) if flag else v for v, flag in zip((a.view, b.view), flags.values(), strict=True))
    right = expected(
        x,
        y,
        c.view.copy() if beta != 0 else None,
        shape=shapes.out,
        alpha=alpha,
        beta=beta,
        c_dtype=c_dtype,
        tensor_core=EMULATED_ARCH if device == "emulator" and dtype != "float32" else None,
    )
    if alpha == 0:  # no factor is read
        for laid in (a, b):
            laid.base[...] = np.nan

    assert ng.gemm(a.view, b.view, c.view, alpha, beta, **flags, kernel=kernel, device=device) is c.view
    exact = kind == "integer" and all((8 * scale).is_integer() for scale in (alpha, beta)) and c_dtype == "float32"
    verdict = check(c.view, right, exact=exact)
    assert verdict, verdict.message
    assert c.kept_to_itself
    if alpha != 0:
        assert a.untouched
        assert b.untouched


@MANY
@given(st.data(), st.sampled_from(["float32", "float32", "float16", "bfloat16"]), st.sampled_from([None, None, "cpu"]))
def test_matmul_on_the_cpu(data, dtype, kernel):
    multiply(data, "cpu", kernel, dtype, largest=17)


@MANY
@given(st.data(), st.sampled_from(["float32", "float32", "float16", "bfloat16"]), st.sampled_from([None, None, "cpu"]))
def test_gemm_on_the_cpu(data, dtype, kernel):
    update(data, "cpu", kernel, dtype, largest=17)


EMULATED = [("float32", None), ("float32", "v7"), ("float16", None), ("bfloat16", "t4")]


@pytest.mark.parametrize(("dtype", "kernel"), EMULATED)
@FEW
@given(st.data())
def test_matmul_on_the_emulator(dtype, kernel, data):
    multiply(data, "emulator", kernel, dtype, largest=17)


@pytest.mark.parametrize(("dtype", "kernel"), EMULATED)
@FEW
@given(st.data())
def test_gemm_on_the_emulator(dtype, kernel, data):
    update(data, "emulator", kernel, dtype, largest=17)


def multiply_on_gpu(data, kernel, dtype):
    """The same from NumPy's memory and from the GPU's own, of a size that has several tiles."""
    shapes = data.draw(factors(largest=data.draw(st.sampled_from([17, 140]))))
    kind, seed = data.draw(st.sampled_from(["integer", "normal"])), data.draw(SEEDS)
    a, b = (draw_laid(data, shape, DTYPES[dtype], kind, seed + i) for i, shape in enumerate((shapes.a, shapes.b)))
    device = data.draw(st.sampled_from(["cuda", "device arrays"]))
    assume(device == "cuda" or shapes.out != ())
    place = Place(device, kernel)
    right = expected(a.view, b.view, tensor_core=place.tensor_core(dtype))
    out = Laid(data.draw(arrangements(shapes.out, broadcast=False)), DTYPES[dtype])
    for result in (place.matmul(a.view, b.view), place.matmul(a.view, b.view, out)):
        verdict = check(np.asarray(result), right, exact=kind == "integer")
        assert verdict, verdict.message


ON_GPU = [*EMULATED, ("float32", "v3"), ("float16", "t2")]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kernel"), ON_GPU)
@settings(MANY, max_examples=100)
@given(st.data())
def test_matmul_on_a_gpu(dtype, kernel, data):
    multiply_on_gpu(data, kernel, dtype)


@MANY
@given(st.data())
def test_shapes_are_refused_where_numpy_refuses_them(data):
    """Any shapes at all, with and without an output: both compute the product, or both raise ValueError."""
    extents = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    a_shape, b_shape = data.draw(extents), data.draw(extents)
    if data.draw(st.booleans()) and a_shape and len(b_shape) > 1:  # else the inner dimensions hardly ever agree
        b_shape = (*b_shape[:-2], a_shape[-1], b_shape[-1])
    a, b = np.ones(a_shape, F32), np.ones(b_shape, F32)
    out_shape = data.draw(st.none() | extents)
    if out_shape is not None and data.draw(st.booleans()):
        try:
            out_shape = (*out_shape[:1], *np.shape(np.matmul(a, b)))
        except ValueError:
            assume(False)
    outputs = [None if out_shape is None else np.full(out_shape, 7, F32) for _ in range(2)]
    try:
        right = np.matmul(a, b, out=outputs[0])
    except ValueError:
        right = None
    # NumPy takes an ``out`` of fewer dimensions where all that it lacks are some of size 1; that isn't mirrored.
    result_ndim = max(a.ndim, b.ndim, 2) - 2 + (a.ndim > 1) + (b.ndim > 1)
    assume(right is None or out_shape is None or len(out_shape) >= result_ndim)
    if right is None:
        with pytest.raises(ValueError, match=r"matmul|out"):
            ng.matmul(a, b, outputs[1], device="cpu")
        assert outputs[1] is None or (outputs[1] == 7).all()
    else:
        result = ng.matmul(a, b, outputs[1], device="cpu")
        assert type(result) is type(right)
        assert np.shape(result) == np.shape(right)
        assert np.array_equal(result, right)
