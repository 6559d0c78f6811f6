"""plan: checked and chosen once, then called with other arrays that lie the same way."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from cases import (
    DTYPES,
    F32,
    LAYOUTS,
    PRODUCTS,
    REFUSALS,
    TELLING,
    Poisoned,
    bits,
    draw,
    draw_factors,
    expected,
    lay_out,
    readonly,
)
from places import CPU, EMULATOR_16, Place, on

import numba_gemm as ng
from numba_gemm.catalog import SPECIAL
from numba_gemm.validate import check

HOST = (*CPU, Place("emulator"), Place("cuda"), Place("cuda", "v7"))


def verify(place, a, b, c, *, alpha=1.0, beta=0.0, before=None, exact=True):
    c = np.asarray(c)
    right = expected(
        a,
        b,
        before,
        shape=c.shape,
        alpha=alpha,
        beta=beta,
        c_dtype=c.dtype.name,
        tensor_core=place.tensor_core(a.dtype.name),
    )
    verdict = check(c, right, exact=exact)
    assert verdict, verdict.message


@pytest.mark.parametrize("name", TELLING)
@on(*HOST)
def test_a_plan_multiplies_other_numbers(place, name):
    a, b = draw_factors(name, np.dtype(F32), "integer")
    plan = ng.plan(a, b, **place.options)
    for seed in (10, 20):
        x, y = (draw(one.shape, one.dtype, "integer", seed + i) for i, one in enumerate((a, b)))
        out = Poisoned(np.matmul(a, b).shape, np.dtype(F32))
        assert plan(x, y, out=out.view) is out.view
        verify(place, x, y, out.view)
        result = plan(x, y)
        assert result.shape == out.view.shape
        verify(place, x, y, result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@on(Place("cpu"), *EMULATOR_16, Place("cuda"))
def test_a_plan_of_16_bit_factors(place, dtype):
    a, b = draw_factors("outer stacks", DTYPES[dtype], "random")
    for c_dtype in (dtype, "float32"):
        out = Poisoned(np.matmul(a, b).shape, DTYPES[c_dtype])
        plan = ng.plan(a, b, out.view, **place.options)
        plan(a, b, out=out.view)
        verify(place, a, b, out.view, exact=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@on(*HOST)
def test_a_plan_is_for_arrays_of_any_layout(place, layout):
    for name in ("odd", "outer stacks"):
        a, b = draw_factors(name, np.dtype(F32), "integer", (layout, "packed"))
        out = Poisoned(np.matmul(a, b).shape, np.dtype(F32), layout)
        plan = ng.plan(a, b, out.view, **place.options)
        for _ in range(2):
            out.view[...] = np.nan
            assert plan(a, b, out=out.view) is out.view
            verify(place, a, b, out.view)
            assert out.kept_to_itself


@pytest.mark.parametrize("scales", [(-0.5, 2.0), (0.0, 0.5), (0.75, 0.0)], ids=str)
@on(*HOST)
def test_a_plan_scales(place, scales):
    alpha, beta = scales
    a, b = draw_factors("outer stacks", np.dtype(F32), "integer")
    before = draw((2, 3, 2, 2), np.dtype(F32), "integer", 5)
    c = lay_out(before, "sliced")
    plan = ng.plan(a, b, c, alpha=alpha, beta=beta, **place.options)
    assert np.array_equal(c, before)  # planning computes nothing
    plan(a, b, out=c)
    verify(place, a, b, c, alpha=alpha, beta=beta, before=before)


@on(*HOST)
def test_planning_writes_nothing_and_reads_no_number(place):
    a, b = (np.full(shape, np.nan, F32) for shape in ((4, 5), (5, 6)))
    out = Poisoned((4, 6), np.dtype(F32), "sliced")
    plan = ng.plan(a, b, out.view, **place.options)
    assert out.untouched
    x, y = draw_factors("2×4×3", np.dtype(F32), "integer")
    with pytest.raises(ValueError, match="shape"):
        plan(x, y, out=out.view)
    assert out.untouched


@on(*HOST)
def test_what_a_plan_tells(place):
    a, b = draw_factors("odd", np.dtype(F32), "integer")
    plan = ng.plan(a, b, **place.options)
    names = {kernel.name for kernel in ng.kernels()} | set(SPECIAL)
    if place.kernel is not None:
        assert plan.kernel == place.kernel
    elif place.device != "cpu":  # whose BLAS isn't one of the kernels
        assert plan.kernel in names
    assert isinstance(plan.kernel, str)
    assert hasattr(plan, "config")
    assert isinstance(plan.workspace_bytes, int)
    assert plan.workspace_bytes >= 0
    text = plan.explain()
    assert isinstance(text, str)
    assert plan.kernel in text.lower()
    for extent in ("17", "13", "19"):
        assert extent in text


SAME = ((3, 4, 5), (5, 6), (3, 4, 6))

#: Arrays that a plan for packed ones of the shapes SAME refuses, and what its message names of both.
OTHERS = {
    "a's shape": (lambda a, b, c: (a[:2], b, c), ValueError, "a", ["(2, 4, 5)", "(3, 4, 5)"]),
    "a's M": (lambda a, b, c: (a[:, :3].copy(), b, c), ValueError, "a", ["(3, 3, 5)", "(3, 4, 5)"]),
    "one matrix": (lambda a, b, c: (a[0], b, c), ValueError, "a", ["(4, 5)", "(3, 4, 5)"]),
    "b's shape": (lambda a, b, c: (a, b[:, :5].copy(), c), ValueError, "b", ["(5, 5)", "(5, 6)"]),
    "b in a stack of one": (lambda a, b, c: (a, b[np.newaxis], c), ValueError, "b", ["(1, 5, 6)", "(5, 6)"]),
    "out's shape": (lambda a, b, c: (a, b, c[:, :3]), ValueError, "out", ["(3, 3, 6)", "(3, 4, 6)"]),
    "out's stack": (lambda a, b, c: (a, b, c[:1]), ValueError, "out", ["(1, 4, 6)", "(3, 4, 6)"]),
    "a's dtype": (lambda a, b, c: (a.astype(np.float16), b, c), TypeError, "a", ["float16", "float32"]),
    "b's dtype": (lambda a, b, c: (a, b.astype(np.float64), c), TypeError, "b", ["float64", "float32"]),
    "out's dtype": (lambda a, b, c: (a, b, c.astype(np.float64)), TypeError, "out", ["float64", "float32"]),
    "a's strides": (lambda a, b, c: (lay_out(a, "transposed"), b, c), ValueError, "a", ["strides"]),
    "b's strides": (lambda a, b, c: (a, lay_out(b, "sliced"), c), ValueError, "b", ["strides"]),
    "b backwards": (lambda a, b, c: (a, b[::-1], c), ValueError, "b", ["strides"]),
    "b broadcast": (lambda a, b, c: (a, np.broadcast_to(b[0], (5, 6)), c), ValueError, "b", ["strides"]),
    "out's strides": (lambda a, b, c: (a, b, lay_out(c, "Fortran")), ValueError, "out", ["strides"]),
    "out is read-only": (lambda a, b, c: (a, b, readonly(c.copy())), ValueError, "out", ["read-only"]),
    "a is a list": (lambda a, b, c: (a.tolist(), b, c), TypeError, "a", ["list"]),
    "out is a list": (lambda a, b, c: (a, b, c.tolist()), TypeError, "out", ["list"]),
    "b is None": (lambda a, b, c: (a, None, c), TypeError, "b", ["NoneType"]),
}


@pytest.mark.parametrize("name", OTHERS)
@on(Place("cpu"), Place("emulator"), Place("cuda"))
def test_a_plan_refuses_arrays_that_it_wasnt_made_for(place, name):
    change, error, argument, named = OTHERS[name]
    a, b, c = (draw(shape, np.dtype(F32), "integer", 1) for shape in SAME)
    plan = ng.plan(a, b, c, **place.options)
    arguments = change(a, b, c)
    before = [bits(x) if isinstance(x, np.ndarray) else x for x in arguments]
    with pytest.raises(error) as caught:
        plan(*arguments[:2], out=arguments[2])
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message)
    assert all(part in message for part in named), message
    if named == ["strides"]:  # in elements or in bytes: those of the plan and those of the array
        assert len(re.findall(r"\([-\d, ]+\)", message)) >= 2, message
    for x, was in zip(arguments, before, strict=True):
        assert np.array_equal(bits(x), was) if isinstance(x, np.ndarray) else x == was


@on(Place("cpu"), Place("emulator"), Place("cuda"))
def test_a_plan_refuses_an_out_that_shares_memory(place):
    memory = np.arange(200, dtype=F32)
    a, b, c = (np.ndarray(shape, F32, memory, 4 * start) for shape, start in zip(SAME, (0, 60, 90), strict=True))
    plan = ng.plan(a, b, c, **place.options)
    for start, name in ((20, "a"), (88, "b")):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            plan(a, b, out=np.ndarray((3, 4, 6), F32, memory, 4 * start))
    assert np.array_equal(memory, np.arange(200))


@on(*HOST)
def test_a_plan_at_another_alignment_is_right_or_refused(place):
    """The strides are the same, but a 16-byte access would be misaligned."""
    memory = draw((1000,), np.dtype(F32), "integer", 1)
    at = next(start for start in range(4) if memory[start:].ctypes.data % 16 == 0)
    b, out = draw((16, 16), np.dtype(F32), "integer", 2), np.empty((16, 16), F32)
    plan = ng.plan(memory[at : at + 256].reshape(16, 16), b, out, **place.options)
    for start in range(at, at + 5):
        a = memory[start : start + 256].reshape(16, 16)
        out[...] = np.nan
        try:
            plan(a, b, out=out)
        except ValueError as error:
            refusal = str(error)
        else:
            verify(place, a, b, out)
            continue
        assert start % 4 != at % 4
        assert re.search("align|bytes", refusal)
        assert np.isnan(out).all()


@on(Place("cpu"), Place("emulator"))
def test_planning_refuses_what_matmul_refuses(place):
    for name, refusal in REFUSALS.items():
        if name in ("out is nothing of a tuple", "two outs", "out's tuple holds a list"):
            continue
        call = refusal.make()
        a, b, out = call.pop("a"), call.pop("b"), call.pop("out")
        with pytest.raises(refusal.error, match=refusal.message.replace("matmul: ", "")):
            ng.plan(a, b, out, **{**place.options, **call})


@on(Place("cpu"), Place("emulator"), Place("cuda"))
def test_a_plan_whose_beta_isnt_0_needs_out(place):
    """A new array would be scaled and added as it comes, unwritten."""
    a, b, c = (draw(shape, np.dtype(F32), "integer", 1) for shape in SAME)
    plan = ng.plan(a, b, c, beta=1.0, **place.options)
    with pytest.raises(TypeError, match=r"this plan's beta is 1\.0 and out is None; pass out"):
        plan(a, b)


def test_every_product_of_the_table_can_be_planned():
    for name in PRODUCTS:
        a, b = draw_factors(name, np.dtype(F32), "integer")
        result = ng.plan(a, b, device="cpu")(a, b)
        assert type(result) is type(np.matmul(a, b))
        assert np.array_equal(result, np.matmul(a, b))


def test_the_signature():
    parameters = inspect.signature(ng.plan).parameters
    assert list(parameters)[:3] == ["a", "b", "out"]
    assert parameters["out"].default is None
    named = dict(list(parameters.items())[3:])
    assert {"kernel", "device", "alpha", "beta"} <= set(named)
    assert all(p.kind is p.KEYWORD_ONLY for p in named.values())
    assert [named[name].default for name in ("kernel", "device", "alpha", "beta")] == [None, "auto", 1.0, 0.0]
