"""matmul against np.matmul: promotion, broadcasting, layouts, out=, empty products, special values, subclasses."""

from __future__ import annotations

import inspect
import warnings
from itertools import product

import numpy as np
import pytest
from cases import (
    DTYPES,
    EMPTY,
    F32,
    LARGER_OUTPUTS,
    LAYOUTS,
    PRODUCTS,
    TELLING,
    Poisoned,
    draw,
    draw_factors,
    expected,
    lay_out,
    readonly,
)
from places import CPU, EMULATOR, EMULATOR_16, EMULATOR_BY_RULE, GPU, GPU_16, GPU_BY_RULE, NUMPY, Place, on

import numba_gemm as ng
from numba_gemm.validate import check

SIXTEEN = ("float16", "bfloat16")


def verify(place, a, b, result, *, exact, shape=None, c_dtype=""):
    """The result has np.matmul's shape and is within its bound, or equal where nothing is rounded."""
    right = expected(a, b, shape=shape, c_dtype=c_dtype, tensor_core=place.tensor_core(a.dtype.name))
    verdict = check(np.asarray(result), right, exact=exact)
    assert verdict, verdict.message


# --- shapes


@pytest.mark.parametrize("name", PRODUCTS)
@on(NUMPY, *CPU, *GPU)
def test_shapes(place, name):
    for kind in ("integer", "random"):
        a, b = draw_factors(name, np.dtype(F32), kind)
        result = place.matmul(a, b)
        assert result.shape == np.matmul(a, b).shape
        assert result.dtype == F32
        verify(place, a, b, result, exact=kind == "integer")


@pytest.mark.parametrize("name", TELLING)
@on(*EMULATOR)
def test_shapes_on_the_emulator(place, name):
    kind = "random" if name == "odd" else "integer"
    a, b = draw_factors(name, np.dtype(F32), kind)
    result = place.matmul(a, b)
    assert result.shape == np.matmul(a, b).shape
    verify(place, a, b, result, exact=kind == "integer")


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", PRODUCTS)
@on(*CPU, *GPU_16)
def test_shapes_of_16_bit_factors(place, name, dtype):
    for kind in ("integer", "random"):
        a, b = draw_factors(name, DTYPES[dtype], kind)
        result = place.matmul(a, b)
        assert result.shape == np.matmul(a, b).shape
        assert result.dtype == DTYPES[dtype]
        verify(place, a, b, result, exact=kind == "integer")


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", TELLING)
@on(*EMULATOR_16)
def test_shapes_of_16_bit_factors_on_the_emulator(place, name, dtype):
    a, b = draw_factors(name, DTYPES[dtype], "random")
    result = place.matmul(a, b)
    assert result.shape == np.matmul(a, b).shape
    assert result.dtype == DTYPES[dtype]
    verify(place, a, b, result, exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_vectors_give_a_scalar(dtype):
    """As np.matmul does: no 0-d array, but a scalar of the dtype."""
    x = np.arange(4).astype(DTYPES[dtype])
    result = ng.matmul(x, x, device="cpu")
    assert type(result) is DTYPES[dtype].type
    assert result == 14
    if dtype != "bfloat16":  # which np.matmul casts to float32
        assert type(result) is type(np.matmul(x, x))
    nothing = ng.matmul(x[:0], x[:0], device="cpu")
    assert type(nothing) is DTYPES[dtype].type
    assert nothing == 0


@on(NUMPY, Place("cpu"), Place("emulator"))
def test_a_new_result_is_the_callers(place):
    """It can be written, and shares no memory with a factor, not even where it is equal to one."""
    a = lay_out(draw((3, 4, 4), np.dtype(F32), "integer", 0), "stack last")
    result = place.matmul(a, np.eye(4, dtype=F32))
    assert np.array_equal(result, a)
    assert result.flags.writeable
    assert not np.shares_memory(result, a)
    result[...] = 0
    assert a.any()


# --- layouts


LAYOUT_PRODUCTS = ("2×4×3", "odd", "same stack", "outer stacks", "vector · matrix", "stack · vector", "vector · vector")


@pytest.mark.parametrize("layouts", list(product(LAYOUTS, LAYOUTS)), ids=" · ".join)
@on(NUMPY, Place("cpu"), *GPU_BY_RULE)
def test_layouts_of_factors(place, layouts):
    for name in LAYOUT_PRODUCTS:
        a, b = draw_factors(name, np.dtype(F32), "integer", layouts)
        verify(place, a, b, place.matmul(a, b), exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@on(*CPU, *EMULATOR)
def test_layouts_of_factors_in_turn(place, layout):
    """Each beside a packed one, of the two products that tell the most."""
    for layouts in ((layout, "packed"), ("packed", layout)):
        a, b = draw_factors("both broadcast" if place.device == "cpu" else "odd", np.dtype(F32), "random", layouts)
        verify(place, a, b, place.matmul(a, b), exact=False)
    a, b = draw_factors("outer stacks", np.dtype(F32), "integer", (layout, layout))
    verify(place, a, b, place.matmul(a, b), exact=True)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("layout", LAYOUTS)
@on(Place("cpu"), *EMULATOR_16, *GPU_16)
def test_layouts_of_16_bit_factors(place, layout, dtype):
    for name, layouts in (("odd", (layout, "packed")), ("odd", ("packed", layout)), ("outer stacks", (layout, layout))):
        a, b = draw_factors(name, DTYPES[dtype], "integer", layouts)
        verify(place, a, b, place.matmul(a, b), exact=True)


def repeated(shape, axis, seed):
    """A read-only view in which one number, row, column or matrix stands for many: a stride of 0."""
    once = tuple(1 if axis in ("all", index - len(shape)) else extent for index, extent in enumerate(shape))
    return np.broadcast_to(draw(once, np.dtype(F32), "integer", seed), shape)


@pytest.mark.parametrize("axis", [-1, -2, -3, -4, "all"], ids=str)
@on(NUMPY, *CPU, *EMULATOR_BY_RULE, *GPU)
def test_broadcast_views(place, axis):
    for a_shape, b_shape in (((5, 7), (7, 6)), ((2, 3, 2, 4), (2, 3, 4, 3))):
        if axis != "all" and -axis > len(a_shape):
            continue
        a, b = repeated(a_shape, axis, 1), repeated(b_shape, axis, 2)
        for x, y in ((a, b), (a, np.array(b)), (np.array(a), b)):
            verify(place, x, y, place.matmul(x, y), exact=True)


@on(NUMPY, *CPU, *EMULATOR_BY_RULE)
def test_one_array_twice(place):
    """A factor may be the other one, or its transpose."""
    a = draw((2, 5, 5), np.dtype(F32), "integer", 3)
    for x, y in ((a, a), (a, a.swapaxes(-1, -2)), (a[0], a), (a[:, 0], a[0]), (a[0, 0], a[0, 0])):
        verify(place, x, y, place.matmul(x, y), exact=True)


@pytest.mark.parametrize("start", range(5))
@on(NUMPY, *CPU, *EMULATOR)
def test_every_alignment(place, start):
    """Views that start 0, 4, 8 and 12 bytes past a multiple of 16, packed and with other distances between rows."""
    memory = draw((400,), np.dtype(F32), "integer", 4)
    a = memory[start : start + 96].reshape(8, 12)[:, :8]
    b = memory[100 + start : 100 + start + 64].reshape(8, 8)
    c = Poisoned((8, 8), np.dtype(F32), "sliced" if start % 2 else "packed")
    verify(place, a, b, place.matmul(a, b, c), exact=True)


def test_readonly_factors_are_welcome():
    a, b = (readonly(draw(shape, np.dtype(F32), "integer", 5)) for shape in ((3, 2, 4), (4, 5)))
    for place in (NUMPY, *CPU, Place("emulator")):
        verify(place, a, b, place.matmul(a, b), exact=True)


# --- out


OUT_PRODUCTS = ("2×4×3", "odd", "outer stacks", "vector · stack", "matrix · vector", "vector · vector", "stack, K = 0")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OUT_PRODUCTS)
@on(NUMPY, *CPU, *EMULATOR_BY_RULE, *GPU_BY_RULE)
def test_out_of_any_layout(place, name, layout):
    a, b = draw_factors(name, np.dtype(F32), "integer")
    if name == "vector · vector" and place.device == "device arrays":
        pytest.skip("Numba has no 0-d array to write to")
    out = Poisoned(np.matmul(a, b).shape, np.dtype(F32), layout)
    verify(place, a, b, place.matmul(a, b, out), exact=True)


@pytest.mark.parametrize("c_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("layout", LAYOUTS)
@on(Place("cpu"), *EMULATOR_16, *GPU_16)
def test_out_of_16_bit_factors(place, layout, dtype, c_dtype):
    c_dtype = dtype if c_dtype == "same" else c_dtype
    for name in ("odd", "outer stacks", "stack, K = 0"):
        a, b = draw_factors(name, DTYPES[dtype], "random")
        out = Poisoned(np.matmul(a, b).shape, DTYPES[c_dtype], layout)
        verify(place, a, b, place.matmul(a, b, out), exact=False, c_dtype=c_dtype)


@pytest.mark.parametrize("name", EMPTY)
@on(NUMPY, *CPU, Place("emulator"), *GPU_BY_RULE)
def test_out_of_empty_products(place, name):
    a, b = draw_factors(name, np.dtype(F32), "integer")
    shape = np.matmul(a, b).shape
    if shape == () and place.device == "device arrays":
        pytest.skip("Numba has no 0-d array to write to")
    out = Poisoned(shape, np.dtype(F32), "sliced")
    assert not place.matmul(a, b, out).any()


@pytest.mark.parametrize("name", LARGER_OUTPUTS)
@on(NUMPY, *CPU, *EMULATOR_BY_RULE, *GPU)
def test_out_may_have_more_matrices_than_the_factors(place, name):
    """NumPy broadcasts the factors to the stack of ``out``."""
    a_shape, b_shape, shape = LARGER_OUTPUTS[name]
    a, b = draw(a_shape, np.dtype(F32), "integer", 6), draw(b_shape, np.dtype(F32), "integer", 7)
    out = Poisoned(shape, np.dtype(F32), "sliced")
    verify(place, a, b, place.matmul(a, b, out), exact=True, shape=shape)


@pytest.mark.parametrize("function", [np.matmul, ng.matmul], ids=["numpy", "numba_gemm"])
def test_out_is_positional_or_named_or_in_a_tuple(function):
    options = {} if function is np.matmul else {"device": "cpu"}
    a, b = draw_factors("2×4×3", np.dtype(F32), "integer")
    right = np.array(a) @ np.array(b)
    for pass_out in (
        lambda out: function(a, b, out, **options),
        lambda out: function(a, b, out=out, **options),
        lambda out: function(a, b, out=(out,), **options),
    ):
        out = np.full((2, 4), np.nan, F32)
        assert pass_out(out) is out
        assert np.array_equal(out, right)
    for nothing in (None, (None,)):
        assert np.array_equal(function(a, b, out=nothing, **options), right)
    assert np.array_equal(function(a, b, None, **options), right)


def test_out_of_two_vectors_is_0d():
    x = np.arange(4, dtype=F32)
    for function, options in ((np.matmul, {}), (ng.matmul, {"device": "cpu"}), (ng.matmul, {"device": "emulator"})):
        out = np.full((), np.nan, F32)
        assert function(x, x, out, **options) is out
        assert out == 14


@on(NUMPY, *CPU, Place("emulator"))
def test_out_beside_a_factor_in_one_array(place):
    """Interleaved but sharing no element: allowed, of stacks too."""
    memory = np.zeros((3, 4, 12), F32)
    a, c = memory[:, :, 0:8:2], memory[:, :, 1:8:2]
    a[...] = draw((3, 4, 4), np.dtype(F32), "integer", 8)
    b = draw((4, 4), np.dtype(F32), "integer", 9)
    if place is NUMPY:
        np.matmul(a, b, out=c)
    else:
        ng.matmul(a, b, c, **place.options)
    verify(place, a, b, c, exact=True)
    assert not memory[:, :, 8:].any()


def test_the_signature_is_numpys_first_three():
    parameters = inspect.signature(ng.matmul).parameters
    assert list(parameters) == ["a", "b", "out", "kernel", "device", "stream", "memory_limit", "progress"]
    assert [p.default for p in parameters.values()][2:] == [None, None, "auto", None, None, None]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[3:])


# --- values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [None, "larger"])
def test_k_zero_gives_zeros(dtype, name):
    a, b = np.ones((3, 2, 0), DTYPES[dtype]), np.ones((0, 4), DTYPES[dtype])
    out = np.full((3, 2, 4) if name is None else (2, 3, 2, 4), np.nan, DTYPES[dtype])
    for device in ("cpu", "emulator"):
        assert not ng.matmul(a, b, device=device).any()
        out[...] = np.nan
        assert not ng.matmul(a, b, out, device=device).any()


@on(NUMPY, *CPU, *EMULATOR, *GPU)
def test_infinities_and_nans_go_where_they_do_in_numpy(place):
    a, b = draw_factors("odd", np.dtype(F32), "integer")
    a[2, 3], a[5, 0], a[8, 8], b[4, 4], b[3, 6] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    b[3, 2] = 0  # times infinity
    with np.errstate(invalid="ignore"):
        right = a.astype(np.float64) @ b.astype(np.float64)
        result = place.matmul(a, b)
    assert np.array_equal(np.isnan(result), np.isnan(right))
    assert np.array_equal(result, right, equal_nan=True)


@on(*CPU, *EMULATOR_BY_RULE)
def test_the_same_call_gives_the_same_bits(place):
    a, b = draw_factors("same stack", np.dtype(F32), "random")
    first, second = (place.matmul(a, b) for _ in range(2))
    assert np.array_equal(first.view(np.uint32), second.view(np.uint32))


@on(Place("emulator"), Place("emulator", "v7"))
def test_a_matrix_of_a_stack_is_the_product_of_its_matrices(place):
    """To the bit, where one kernel computes both."""
    a, b = draw_factors("outer stacks", np.dtype(F32), "random")
    stack = place.matmul(a, b)
    for i, j in np.ndindex(stack.shape[:2]):
        alone = place.matmul(a[i, 0], b[0, j])
        assert np.array_equal(stack[i, j].view(np.uint32), alone.view(np.uint32))


# --- subclasses


class Plain(np.ndarray):
    pass


class Tagged(np.ndarray):
    """Carries a tag through views, and through results by __array_wrap__."""

    __array_priority__ = 1.0

    def __array_finalize__(self, parent):
        self.tag = getattr(parent, "tag", None)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        wrapped = array.view(type(self))
        wrapped.tag = f"wrapped by {self.tag}"
        return wrapped


class Preferred(Tagged):
    __array_priority__ = 2.0


def as_class(kind, array, tag):
    view = array.view(kind)
    if isinstance(view, Tagged):
        view.tag = tag
    return view


CLASSES = {"ndarray": np.ndarray, "Plain": Plain, "Tagged": Tagged, "Preferred": Preferred, "recarray": np.recarray}


@pytest.mark.parametrize("b_class", CLASSES)
@pytest.mark.parametrize("a_class", CLASSES)
def test_subclasses_come_back_as_from_numpy(a_class, b_class):
    for name in ("2×4×3", "both broadcast", "vector · matrix", "matrix · vector", "vector · vector", "K = 0", "N = 0"):
        a, b = draw_factors(name, np.dtype(F32), "integer")
        a, b = as_class(CLASSES[a_class], a, "a"), as_class(CLASSES[b_class], b, "b")
        right = np.matmul(a, b)
        result = ng.matmul(a, b, device="cpu")
        assert type(result) is type(right)
        assert getattr(result, "tag", None) == getattr(right, "tag", None)
        assert result.shape == right.shape
        assert np.array_equal(np.asarray(result), np.asarray(right))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 0), (0, 4))], ids=str)
def test_matrices_of_class_matrix(shapes):
    a, b = (draw(shape, np.dtype(F32), "integer", 11) for shape in shapes)
    for as_matrix in ("a", "b", "ab"):
        x = np.matrix(a) if "a" in as_matrix and a.ndim == 2 else a
        y = np.matrix(b) if "b" in as_matrix and b.ndim == 2 else b
        right = np.matmul(x, y)
        result = ng.matmul(x, y, device="cpu")
        assert type(result) is type(right)
        assert result.shape == right.shape
        assert np.array_equal(result, right)


def test_memory_maps_are_arrays(tmp_path):
    a, b = (np.memmap(tmp_path / name, F32, "w+", shape=shape) for name, shape in (("a", (2, 3)), ("b", (3, 4))))
    a[...], b[...] = draw((2, 3), a.dtype, "integer", 12), draw((3, 4), b.dtype, "integer", 13)
    for x, y in ((a, b), (a[0], b), (a, b[:, 0]), (a[0], b[:, 0])):
        right, result = np.matmul(x, y), ng.matmul(x, y, device="cpu")
        assert type(result) is type(right)
        assert np.array_equal(result, right)


@pytest.mark.parametrize("function", [np.matmul, ng.matmul], ids=["numpy", "numba_gemm"])
@pytest.mark.parametrize("name", CLASSES)
def test_out_is_returned_as_it_is(name, function):
    """Whatever the classes of factors and ``out`` are."""
    options = {} if function is np.matmul else {"device": "cpu"}
    a, b = draw_factors("2×4×3", np.dtype(F32), "integer")
    for x, out_class in ((as_class(CLASSES[name], a, "a"), np.ndarray), (a, CLASSES[name])):
        out = as_class(out_class, np.full((2, 4), np.nan, F32), "out")
        result = function(x, b, out=out, **options)
        if out_class in (Tagged, Preferred):  # NumPy lets its __array_wrap__ make a view
            assert np.shares_memory(result, out)
        else:
            assert result is out
        assert np.array_equal(np.asarray(out), np.array(a) @ np.array(b))


# --- without surprises


def test_products_raise_no_warning():
    a, b = draw_factors("both broadcast", np.dtype(F32), "random", ("Fortran", "reversed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.matmul(a, b, device="cpu")
        ng.matmul(a[..., :0], b[..., :0, :], device="cpu")
        ng.matmul(a[:0], b[:, :, :], device="cpu")


def test_factors_are_not_written():
    a, b = draw_factors("both broadcast", np.dtype(F32), "random", ("stepped", "stack last"))
    before = a.copy(), b.copy()
    for device in ("cpu", "emulator"):
        ng.matmul(a, b, device=device)
    assert np.array_equal(a, before[0])
    assert np.array_equal(b, before[1])
