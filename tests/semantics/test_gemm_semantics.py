"""gemm: c = alpha · a @ b + beta · c in place, of stacks, with transposes by flag and c of any strides."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from cases import DTYPES, F32, LAYOUTS, Poisoned, bits, draw, expected, lay_out
from places import CPU, EMULATOR, EMULATOR_16, EMULATOR_BY_RULE, GPU, GPU_16, GPU_BY_RULE, Place, on

import numba_gemm as ng
from numba_gemm.validate import check

#: Shapes of A, B and C: C's has every matrix, A and B are broadcast to them.
STACKS = {
    "one": ((2, 3), (3, 4), (2, 4)),
    "odd": ((17, 9), (9, 13), (17, 13)),
    "stack": ((3, 4, 5), (3, 5, 2), (3, 4, 2)),
    "one A": ((4, 5), (3, 5, 2), (3, 4, 2)),
    "one B": ((3, 4, 5), (5, 2), (3, 4, 2)),
    "outer": ((2, 1, 2, 3), (3, 3, 2), (2, 3, 2, 2)),
    "one A and one B": ((2, 3), (3, 4), (3, 2, 4)),
    "C has more": ((3, 2, 3), (3, 4), (2, 3, 2, 4)),
}
SCALES = [(1.0, 0.0), (1.0, 1.0), (-0.5, 2.0), (0.75, 0.0), (2.5, -1.25), (0.0, 0.5), (0.0, 0.0), (0.1, 0.3)]
SIXTEEN = ("float16", "bfloat16")


def swapped(x):
    return x.swapaxes(-1, -2)


def run(place, shapes, scales, *, kind="random", dtype="float32", c_dtype="", layouts=("packed",) * 3, flags=(0, 0)):
    """One product on numbers drawn for it, held against float64."""
    alpha, beta = scales
    c_dtype = c_dtype or dtype
    a, b, before = (
        draw(shape, DTYPES[t], kind, seed)
        for seed, (shape, t) in enumerate(zip(shapes, (dtype, dtype, c_dtype), strict=True))
    )
    right = expected(
        a,
        b,
        before,
        shape=before.shape,
        alpha=alpha,
        beta=beta,
        c_dtype=c_dtype,
        tensor_core=place.tensor_core(dtype),
    )
    a, b = (swapped(x).copy() if flag else x for x, flag in zip((a, b), flags, strict=True))
    c = Poisoned(before.shape, DTYPES[c_dtype], layouts[2])
    if beta != 0:
        c.fill(before)
    a, b = lay_out(a, layouts[0]), lay_out(b, layouts[1])
    drawn = bits(a), bits(b)
    named = {name: True for name, flag in zip(("transpose_a", "transpose_b"), flags, strict=True) if flag}
    result = place.gemm(a, b, c, alpha, beta, **named)
    verdict = check(result, right, exact=kind == "integer" and float(alpha * 4).is_integer() and c_dtype == "float32")
    assert verdict, verdict.message
    assert np.array_equal(bits(a), drawn[0])
    assert np.array_equal(bits(b), drawn[1])


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("name", STACKS)
@on(*CPU, *GPU)
def test_stacks(place, name, scales):
    for kind in ("integer", "random"):
        run(place, STACKS[name], scales, kind=kind)


@pytest.mark.parametrize("scales", [(1.0, 0.0), (-0.5, 2.0), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("name", ["odd", "outer", "C has more"])
@on(*EMULATOR)
def test_stacks_on_the_emulator(place, name, scales):
    run(place, STACKS[name], scales)


@pytest.mark.parametrize("scales", [(1.0, 0.0), (-0.5, 2.0), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("c_dtype", ["", "float32"])
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", ["odd", "outer", "C has more"])
@on(Place("cpu"), *EMULATOR_16, *GPU_16)
def test_stacks_of_16_bit_factors(place, name, dtype, c_dtype, scales):
    run(place, STACKS[name], scales, dtype=dtype, c_dtype=c_dtype)


@pytest.mark.parametrize("scales", [(1.0, 0.0), (-0.5, 2.0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@on(*CPU, *EMULATOR_BY_RULE, *GPU)
def test_c_of_any_layout(place, layout, scales):
    run(place, STACKS["odd"], scales, layouts=("packed", "packed", layout))
    run(place, STACKS["outer"], scales, layouts=(layout, layout, layout))


@pytest.mark.parametrize("scales", [(1.0, 0.0), (-0.5, 2.0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@on(Place("cpu"), *EMULATOR_16, *GPU_16)
def test_c_of_any_layout_and_16_bit_factors(place, dtype, layout, scales):
    run(place, STACKS["odd"], scales, dtype=dtype, layouts=("packed", "packed", layout))
    run(place, STACKS["outer"], scales, dtype=dtype, c_dtype="float32", layouts=(layout, layout, layout))


@pytest.mark.parametrize("flags", [(1, 0), (0, 1), (1, 1)], ids=["a", "b", "ab"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["odd", "outer"])
@on(*CPU, *EMULATOR_BY_RULE, *GPU_BY_RULE)
def test_transposes_by_flag(place, name, layout, flags):
    run(place, STACKS[name], (-0.5, 2.0), layouts=(layout, "packed", "packed"), flags=flags)
    if place.device != "emulator":
        run(place, STACKS[name], (1.0, 0.0), layouts=("packed", layout, layout), flags=flags)


@pytest.mark.parametrize("flags", [(1, 0), (0, 1), (1, 1)], ids=["a", "b", "ab"])
@pytest.mark.parametrize("dtype", SIXTEEN)
@on(Place("cpu"), *EMULATOR_16, *GPU_16)
def test_transposes_of_16_bit_factors(place, dtype, flags):
    for name in ("odd", "outer"):
        run(place, STACKS[name], (-0.5, 2.0), dtype=dtype, flags=flags)


@on(*CPU, *EMULATOR_BY_RULE, *GPU)
def test_a_flag_is_the_transposed_view(place):
    """The same bits."""
    a, b = draw((3, 5, 9), np.dtype(F32), "random", 1), draw((7, 5), np.dtype(F32), "random", 2)
    by_flag, by_view = (Poisoned((3, 9, 7), np.dtype(F32)) for _ in range(2))
    place.gemm(a, b, by_flag, 0.3, transpose_a=True, transpose_b=True)
    place.gemm(swapped(a), b.T, by_view, 0.3)
    assert np.array_equal(by_flag.base.view(np.uint32), by_view.base.view(np.uint32))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@on(*CPU, Place("emulator"), *GPU)
def test_beta_zero_never_reads_c(place, dtype, poison):
    """So what was in it doesn't spread, whatever alpha and K are."""
    if dtype != "float32" and place.kernel == "v7":
        pytest.skip("v7 takes float32")
    dtype = DTYPES[dtype]
    a, b = draw((3, 4, 5), dtype, "integer", 1), draw((5, 6), dtype, "integer", 2)
    for alpha, factors in ((1.0, (a, b)), (2.0, (a, b)), (0.0, (a, b)), (3.0, (a[..., :0], b[:0]))):
        c = Poisoned((3, 4, 6), dtype, "sliced", fill=poison)
        right = alpha * np.matmul(*(x.astype(np.float64) for x in factors))
        assert np.array_equal(place.gemm(*factors, c, alpha, 0.0).astype(np.float64), right)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@on(*CPU, Place("emulator"), *GPU)
def test_alpha_zero_reads_no_factor(place, dtype, poison):
    if dtype != "float32" and place.kernel == "v7":
        pytest.skip("v7 takes float32")
    dtype = DTYPES[dtype]
    a, b = np.full((3, 4, 5), poison, dtype), np.full((5, 6), poison, dtype)
    for beta in (0.0, 1.0, -0.5):
        c = Poisoned((3, 4, 6), dtype, "transposed", fill=4.0)
        assert (place.gemm(a, b, c, 0.0, beta) == 4 * beta).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@on(*CPU, Place("emulator"), *GPU)
def test_k_zero_scales_c(place, layout, dtype):
    if dtype != "float32" and place.kernel == "v7":
        pytest.skip("v7 takes float32")
    dtype = DTYPES[dtype]
    a, b = np.empty((3, 2, 0), dtype), np.empty((0, 4), dtype)
    for alpha, beta in ((1.0, 0.5), (5.0, 2.0), (1.0, 1.0), (1.0, 0.0)):
        c = Poisoned((3, 2, 4), dtype, layout, fill=6.0)
        assert (place.gemm(a, b, c, alpha, beta) == 6 * beta).all()


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 3), (3, 4), (0, 4)),
        ((2, 3), (3, 0), (2, 0)),
        ((0, 2, 3), (3, 4), (0, 2, 4)),
        ((2, 3), (3, 4), (0, 2, 4)),
        ((3, 0, 0), (0, 0), (3, 0, 0)),
    ],
    ids=str,
)
@on(*CPU, Place("emulator"), *GPU)
def test_nothing_to_do(place, shapes):
    a, b = (np.ones(shape, F32) for shape in shapes[:2])
    for layout in ("packed", "sliced", "transposed"):
        place.gemm(a, b, Poisoned(shapes[2], np.dtype(F32), layout), 2.0, 3.0)


@on(*CPU, *EMULATOR_BY_RULE, *GPU)
def test_nan_in_c_spreads_where_it_is_and_nowhere_else(place):
    """With beta ≠ 0, an element of C that is NaN makes that one NaN, even where beta · NaN meets alpha = 0."""
    a, b = draw((2, 5, 3), np.dtype(F32), "integer", 1), draw((3, 4), np.dtype(F32), "integer", 2)
    for alpha in (1.0, 0.0):
        c = Poisoned((2, 5, 4), np.dtype(F32), fill=1.0)
        c.view[1, 2, 3] = np.nan
        nan = np.isnan(place.gemm(a, b, c, alpha, 0.5))
        assert nan[1, 2, 3]
        assert nan.sum() == 1


@on(*CPU, Place("emulator"))
def test_c_is_updated_again_and_again(place):
    a, b = draw((3, 4, 5), np.dtype(F32), "integer", 1), draw((5, 6), np.dtype(F32), "integer", 2)
    c = Poisoned((3, 4, 6), np.dtype(F32), "stack last", fill=0.0)
    for _ in range(3):
        place.gemm(a, b, c, 1.0, 1.0)
    assert np.array_equal(c.view, 3 * (a @ b))


def test_the_signature():
    parameters = inspect.signature(ng.gemm).parameters
    names = ["a", "b", "c", "alpha", "beta", "transpose_a", "transpose_b", "kernel", "device", "stream"]
    assert list(parameters) == [*names, "memory_limit", "progress"]
    assert [p.default for p in parameters.values()][3:] == [1.0, 0.0, False, False, None, "auto", None, None, None]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[5:])


def test_c_of_a_subclass_is_returned_as_it_is():
    class Plain(np.ndarray):
        pass

    a, b = np.ones((2, 3), F32).view(Plain), np.ones((3, 4), F32)
    for c in (np.zeros((2, 4), F32), np.zeros((2, 4), F32).view(Plain)):
        assert ng.gemm(a, b, c, device="cpu") is c
        assert (np.asarray(c) == 3).all()
