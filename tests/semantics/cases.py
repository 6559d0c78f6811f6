"""What np.matmul does, as tables: products, ways to lie in memory, and calls that are refused.

The tests run the same tables on np.matmul itself, so that a table that is wrong about NumPy fails there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from numba_gemm.validate import Reference, reference

F32 = np.float32
Shape = tuple[int, ...]
Array = NDArray[Any]

DTYPES = {"float32": np.dtype(F32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

#: Shapes of A and B whose product np.matmul computes. A 1-D factor is promoted, and the added dimension dropped again.
VECTORS: dict[str, tuple[Shape, Shape]] = {
    "vector · vector": ((7,), (7,)),
    "one · one": ((1,), (1,)),
    "vector · matrix": ((5,), (5, 3)),
    "matrix · vector": ((4, 6), (6,)),
    "matrix · vector of one": ((4, 1), (1,)),
    "vector · stack": ((3,), (4, 3, 2)),
    "stack · vector": ((4, 2, 3), (3,)),
    "vector · stack of stacks": ((3,), (2, 3, 3, 5)),
    "stack of stacks · vector": ((2, 3, 5, 3), (3,)),
}
MATRICES: dict[str, tuple[Shape, Shape]] = {
    "1×1×1": ((1, 1), (1, 1)),
    "2×4×3": ((2, 3), (3, 4)),
    "outer": ((5, 1), (1, 6)),
    "inner": ((1, 7), (7, 1)),
    "row": ((1, 9), (9, 5)),
    "column": ((5, 9), (9, 1)),
    "square": ((8, 8), (8, 8)),
    "odd": ((17, 19), (19, 13)),
}
STACKS: dict[str, tuple[Shape, Shape]] = {
    "same stack": ((3, 4, 5), (3, 5, 2)),
    "stack · matrix": ((3, 4, 5), (5, 2)),
    "matrix · stack": ((4, 5), (3, 5, 2)),
    "stack of one · stack": ((1, 4, 5), (3, 5, 2)),
    "stack · stack of one": ((3, 4, 5), (1, 5, 2)),
    "stack of one · matrix": ((1, 2, 3), (3, 4)),
    "both broadcast": ((2, 1, 3, 4), (3, 4, 5)),
    "outer stacks": ((2, 1, 2, 3), (1, 3, 3, 2)),
    "middle broadcast": ((2, 1, 3, 2, 4), (2, 2, 3, 4, 1)),
    "first and last broadcast": ((1, 2, 1, 3, 2), (2, 1, 3, 2, 3)),
    "vectors in stacks": ((4, 1, 6), (4, 6, 1)),
    "ten dimensions": ((1, 2, 1, 1, 1, 1, 1, 2, 2, 3), (2, 1, 1, 1, 1, 1, 1, 3, 2)),
}
EMPTY: dict[str, tuple[Shape, Shape]] = {
    "K = 0": ((2, 0), (0, 3)),
    "M = 0": ((0, 4), (4, 3)),
    "N = 0": ((2, 4), (4, 0)),
    "all 0": ((0, 0), (0, 0)),
    "M, K = 0": ((0, 0), (0, 3)),
    "vectors of nothing": ((0,), (0,)),
    "vector of nothing · matrix": ((0,), (0, 3)),
    "matrix · vector of nothing": ((3, 0), (0,)),
    "matrix without rows · vector": ((0, 3), (3,)),
    "no matrices": ((0, 2, 3), (0, 3, 4)),
    "no matrices · matrix": ((0, 2, 3), (3, 4)),
    "no matrices · one": ((0, 2, 3), (1, 3, 4)),
    "vector · no matrices": ((3,), (0, 3, 4)),
    "no matrices of nothing": ((0, 2, 0), (0, 0, 3)),
    "stack, K = 0": ((3, 2, 0), (0, 4)),
    "stack, N = 0": ((3, 2, 5), (3, 5, 0)),
    "2 × 0 matrices": ((2, 1, 3, 2), (0, 2, 3)),
}
PRODUCTS = {**VECTORS, **MATRICES, **STACKS, **EMPTY}

#: The shapes that tell the most where each product takes long.
TELLING = (
    "vector · vector",
    "matrix · vector",
    "vector · stack",
    "odd",
    "outer",
    "matrix · stack",
    "outer stacks",
    "K = 0",
    "stack, K = 0",
    "no matrices",
)

#: A result's shape → a larger ``out`` that NumPy lets the factors be broadcast to.
LARGER_OUTPUTS: dict[str, tuple[Shape, Shape, Shape]] = {
    "matrix": ((2, 3), (3, 4), (5, 2, 4)),
    "stack of one": ((1, 2, 3), (1, 3, 4), (5, 2, 4)),
    "stack": ((3, 2, 3), (3, 3, 4), (2, 3, 2, 4)),
    "stack with a one": ((3, 1, 2, 3), (3, 1, 3, 4), (3, 2, 2, 4)),
    "vector · matrix": ((3,), (3, 4), (2, 4)),
    "matrix · vector": ((2, 3), (3,), (5, 2)),
    "vector · vector": ((3,), (3,), (6,)),
    "vector · vector, two": ((3,), (3,), (2, 3)),
    "K = 0": ((2, 0), (0, 4), (3, 2, 4)),
    "to none": ((1, 2, 3), (3, 4), (0, 2, 4)),
}


def draw(shape: Shape, dtype: np.dtype[Any], kind: str, seed: int) -> Array:
    """Whole numbers whose product has no rounding in any dtype ("integer"), or normal ones."""
    generator = np.random.default_rng([seed, *shape])
    if kind == "integer":
        return generator.integers(-3, 4, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def _every(step: slice) -> Callable[[Array], Array]:
    """The same slice of every dimension; with the ellipsis, 0-d too gives a view."""
    return lambda base: base[(..., *(step,) * base.ndim)]


def _last(rows: slice, columns: slice) -> Callable[[Array], Array]:
    """Slices of the last two dimensions; a vector has only columns."""
    return lambda base: base[(..., *(rows, columns)[2 - min(base.ndim, 2) :])]


def _turned(base: Array) -> Array:
    """Rows and columns swapped, where there are both."""
    return base.swapaxes(-1, -2) if base.ndim > 1 else base


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], *shape[:-3:-1])


def _stack_last(shape: Shape) -> Shape:
    return (*shape[-2:], *shape[:-2])


ALL, BACKWARDS = slice(None), slice(None, None, -1)

#: A way to lie in memory: the shape of a C-ordered base array, and the view of it that has the shape asked for.
#: "stack last": the matrices of a stack lie interleaved, element by element, and no matrix has packed rows or columns.
LAYOUTS: dict[str, tuple[Callable[[Shape], Shape], Callable[[Array], Array]]] = {
    "packed": (lambda s: s, lambda base: base),
    "Fortran": (lambda s: s[::-1], lambda base: base.T),
    "transposed": (_swapped, _turned),
    "stack last": (_stack_last, lambda base: base.transpose(*range(2, base.ndim), 0, 1) if base.ndim > 1 else base),
    "reversed": (lambda s: s, _every(BACKWARDS)),
    "rows reversed": (lambda s: s, _last(BACKWARDS, ALL)),
    "columns reversed": (lambda s: s, _last(ALL, BACKWARDS)),
    "stepped": (lambda s: tuple(2 * n for n in s), _every(slice(None, None, 2))),
    "stepped backwards": (lambda s: tuple(3 * n for n in s), _every(slice(None, None, -3))),
    "sliced": (lambda s: tuple(n + 3 for n in s), _every(slice(1, -2))),
    "transposed slice": (
        lambda s: tuple(n + 3 for n in _swapped(s)),
        lambda base: _turned(_every(slice(1, -2))(base)),
    ),
}


class Poisoned:
    """An output array that lies in a larger one, and knows which elements of that aren't its own.

    Every element is a NaN beforehand: one left unwritten shows, and so does one that a kernel reads with beta = 0.
    """

    def __init__(self, shape: Shape, dtype: np.dtype[Any], layout: str = "packed", fill: float = np.nan) -> None:
        base_shape, take = LAYOUTS[layout]
        self.base = np.full(base_shape(shape), fill, dtype)
        self.view = take(self.base)
        self.outside = np.ones(self.base.shape, bool)
        take(self.outside)[...] = False
        assert self.view.shape == shape
        assert self.base.size == 0 or np.shares_memory(self.view, self.base) or 0 in shape
        self.before = bits(self.base)

    def fill(self, values: Array) -> None:
        """Put numbers in the view, for a call that reads them."""
        self.view[...] = values
        self.before = bits(self.base)

    @property
    def kept_to_itself(self) -> bool:
        """Whether no element outside the view has changed."""
        return np.array_equal(bits(self.base)[self.outside], self.before[self.outside])

    @property
    def untouched(self) -> bool:
        """Whether nothing at all has changed."""
        return np.array_equal(bits(self.base), self.before)


def bits(array: Array) -> Array:
    """The elements as they are in memory: NaNs compare equal to themselves."""
    return np.array(array, order="C", copy=True).view(f"u{array.itemsize}")


def lay_out(values: Array, layout: str) -> Array:
    """The same numbers as a view of a larger array; what lies between them is NaN."""
    view = Poisoned(values.shape, values.dtype, layout).view
    view[...] = values
    return view


def draw_factors(name: str, dtype: np.dtype[Any], kind: str, layouts: tuple[str, str] = ("packed", "packed")):
    """A and B of one of the :data:`PRODUCTS`."""
    shapes = PRODUCTS[name]
    return tuple(
        lay_out(draw(shape, dtype, kind, seed), layout)
        for seed, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
    )


def promoted(a: Array, b: Array) -> tuple[Array, Array, int]:
    """A as a stack of rows and B as one of columns if they are vectors; and how many dimensions of a matrix remain."""
    core = (a.ndim > 1) + (b.ndim > 1)
    return (a if a.ndim > 1 else a[np.newaxis, :]), (b if b.ndim > 1 else b[:, np.newaxis]), core


def expected(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    shape: Shape | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    c_dtype: str = "",
    tensor_core: tuple[int, int] | None = None,
) -> Reference:
    """alpha · A @ B + beta · C in float64, matrix by matrix, with each element's bound.

    ``shape`` is that of an ``out`` to which the product is broadcast.
    """
    a, b, core = promoted(np.asarray(a), np.asarray(b))
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if shape is not None:
        batch = shape[: len(shape) - core]
    m, n = a.shape[-2], b.shape[-1]
    a, b = np.broadcast_to(a, (*batch, *a.shape[-2:])), np.broadcast_to(b, (*batch, *b.shape[-2:]))
    value, bound = np.empty((*batch, m, n)), np.empty((*batch, m, n))
    for index in np.ndindex(batch):
        addend = None if c is None else c.reshape((*batch, m, n))[index]
        one = reference(a[index], b[index], addend, alpha=alpha, beta=beta, c_dtype=c_dtype, tensor_core=tensor_core)
        value[index], bound[index] = one.value, one.bound
    result = result_shape(a.shape, b.shape, core, batch)
    return Reference(value.reshape(result), bound.reshape(result))


def result_shape(a: Shape, b: Shape, core: int, batch: Shape) -> Shape:
    """The shape without the dimensions that promotion added: of core 0 both, of core 1 the one of size 1."""
    if core == 2:
        return (*batch, a[-2], b[-1])
    return batch if core == 0 else (*batch, a[-2] * b[-1])


#: That np.matmul takes a call which is refused here.
NUMPY_TAKES_IT = "NumPy takes it"
#: That np.matmul has no such argument, or answers in a way of its own.
NOT_NUMPYS = "not NumPy's"


@dataclass(frozen=True)
class Refusal:
    """A call that raises before anything is written.

    Attributes
    ----------
    make : the call's arguments by name, made anew each time.
    error, message : what is raised; the message matches this pattern.
    numpy : what np.matmul raises, or :data:`NUMPY_TAKES_IT` or :data:`NOT_NUMPYS`.
    """

    make: Callable[[], dict[str, Any]]
    error: type[Exception]
    message: str
    numpy: type[Exception] | tuple[type[Exception], ...] | str


def ones(*shape: int, dtype: Any = F32) -> Array:
    return np.ones(shape, dtype)


def full(*shape: int, dtype: Any = F32) -> Array:
    return np.full(shape, 7, dtype)


def readonly(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _call(a: Any, b: Any, out: Any = None, **options: Any) -> Callable[[], dict[str, Any]]:
    """Arguments of a call; those that are functions are called for a fresh one."""

    def make() -> dict[str, Any]:
        made = {"a": a, "b": b, "out": out, **options}
        return {name: value() if callable(value) else value for name, value in made.items()}

    return make


def _within_one(a: slice | tuple, b: slice | tuple, out: slice | tuple) -> Callable[[], dict[str, Any]]:
    """Three views of one 4×4×4 array."""

    def make() -> dict[str, Any]:
        memory = np.arange(64, dtype=F32).reshape(4, 4, 4)
        return {"a": memory[a], "b": memory[b], "out": memory[out]}

    return make


def _shapes(*, out: Shape, product: Shape) -> str:
    """Both shapes, in this order."""
    return ".*".join(str(shape).replace("(", r"\(").replace(")", r"\)") for shape in (out, product))


A, B = ones(2, 3), ones(3, 4)
OUT = lambda: full(2, 4)  # noqa: E731 - a fresh array for each call

SHAPE_REFUSALS: dict[str, Refusal] = {
    "a is 0-d": Refusal(
        _call(np.array(1, F32), B, OUT), ValueError, r"matmul: .*(enough dimensions|0 dimensions)", ValueError
    ),
    "b is 0-d": Refusal(
        _call(A, np.array(1, F32), OUT), ValueError, r"matmul: .*(enough dimensions|0 dimensions)", ValueError
    ),
    "K differs": Refusal(
        _call(A, ones(5, 4), OUT),
        ValueError,
        r"mismatch in its core dimension 0.*size 5 is different from 3",
        ValueError,
    ),
    "K differs, 1": Refusal(
        _call(A, ones(1, 4), OUT),
        ValueError,
        r"mismatch in its core dimension 0.*size 1 is different from 3",
        ValueError,
    ),
    "K is 0 and 1": Refusal(
        _call(ones(2, 0), ones(1, 4), OUT),
        ValueError,
        r"mismatch in its core dimension 0.*size 1 is different from 0",
        ValueError,
    ),
    "vectors differ": Refusal(
        _call(ones(3), ones(4), full), ValueError, r"mismatch.*size 4 is different from 3", ValueError
    ),
    "vector · matrix differ": Refusal(
        _call(ones(3), ones(4, 3), lambda: full(3)), ValueError, r"mismatch.*size 4 is different from 3", ValueError
    ),
    "matrix · vector differ": Refusal(
        _call(ones(4, 3), ones(4), lambda: full(4)), ValueError, r"mismatch.*size 4 is different from 3", ValueError
    ),
    "stacks' K differs": Refusal(
        _call(ones(2, 3, 4), ones(2, 3, 4), lambda: full(2, 3, 4)),
        ValueError,
        r"mismatch.*size 3 is different from 4",
        ValueError,
    ),
    "stacks differ": Refusal(
        _call(ones(2, 3, 4), ones(3, 4, 5), lambda: full(3, 3, 5)), ValueError, r"broadcast", ValueError
    ),
    "stacks differ inside": Refusal(
        _call(ones(2, 2, 3, 4), ones(1, 3, 4, 5), lambda: full(2, 3, 3, 5)), ValueError, r"broadcast", ValueError
    ),
    "none and two matrices": Refusal(
        _call(ones(0, 3, 4), ones(2, 4, 5), lambda: full(2, 3, 5)), ValueError, r"broadcast", ValueError
    ),
}

_OUT_SHAPES: dict[str, tuple[Shape, Shape, Shape, Shape]] = {  # a, b, out, product
    "out has another N": ((2, 3), (3, 4), (2, 5), (2, 4)),
    "out has another M": ((1, 3), (3, 4), (2, 4), (1, 4)),
    "out's N would be broadcast": ((2, 3), (3, 1), (2, 4), (2, 1)),
    "out is transposed": ((2, 3), (3, 4), (4, 2), (2, 4)),
    "out is flat": ((2, 3), (3, 4), (8,), (2, 4)),
    "out of one matrix": ((5, 2, 3), (3, 4), (2, 4), (5, 2, 4)),
    "out of a stack of one": ((5, 2, 3), (3, 4), (1, 2, 4), (5, 2, 4)),
    "out of another stack": ((5, 2, 3), (3, 4), (4, 2, 4), (5, 2, 4)),
    "out of no matrix": ((5, 2, 3), (3, 4), (0, 2, 4), (5, 2, 4)),
    "out has the promoted column": ((2, 3), (3,), (2, 1), (2,)),
    "out is 0-d": ((2, 3), (3,), (), (2,)),
    "out has a stack with a one": ((2, 3, 2, 3), (3, 4), (2, 1, 2, 4), (2, 3, 2, 4)),
    "out for none": ((0, 3), (3, 4), (1, 4), (0, 4)),
}

OUT_REFUSALS: dict[str, Refusal] = {
    **{
        name: Refusal(
            _call(ones(*a), ones(*b), lambda out=out: full(*out)),
            ValueError,
            _shapes(out=out, product=product),
            ValueError,
        )
        for name, (a, b, out, product) in _OUT_SHAPES.items()
    },
    "out is read-only": Refusal(_call(A, B, lambda: readonly(full(2, 4))), ValueError, "out.*read-only", ValueError),
    "out is a broadcast view": Refusal(
        _call(A, B, lambda: np.broadcast_to(full(4), (2, 4))), ValueError, "out.*read-only", ValueError
    ),
    "out's rows are one": Refusal(
        _call(A, B, lambda: np.lib.stride_tricks.as_strided(full(4), (2, 4), (0, 4))),
        ValueError,
        "out.*share",
        NUMPY_TAKES_IT,
    ),
    "out's matrices are one": Refusal(
        _call(ones(3, 2, 3), B, lambda: np.lib.stride_tricks.as_strided(full(2, 4), (3, 2, 4), (0, 16, 4))),
        ValueError,
        "out.*share",
        NUMPY_TAKES_IT,
    ),
    "out's matrices overlap": Refusal(
        _call(ones(3, 2, 3), B, lambda: np.lib.stride_tricks.as_strided(full(4, 4), (3, 2, 4), (16, 16, 4))),
        ValueError,
        "out.*share",
        NUMPY_TAKES_IT,
    ),
    "out is float64": Refusal(
        _call(A, B, lambda: full(2, 4, dtype=float)), TypeError, "out is float64", NUMPY_TAKES_IT
    ),
    "out is float16 of float32": Refusal(
        _call(A, B, lambda: full(2, 4, dtype=np.float16)), TypeError, "out is float16", NUMPY_TAKES_IT
    ),
    "out is int32": Refusal(_call(A, B, lambda: full(2, 4, dtype=np.int32)), TypeError, "out is int32", TypeError),
    "out is a list": Refusal(_call(A, B, lambda: [[7.0] * 4] * 2), TypeError, "out is a list", TypeError),
    "out is masked": Refusal(_call(A, B, lambda: np.ma.masked_array(full(2, 4))), TypeError, "masked", NOT_NUMPYS),
    "out is nothing of a tuple": Refusal(_call(A, B, lambda: ()), ValueError, "out", ValueError),
    "two outs": Refusal(_call(A, B, lambda: (full(2, 4), full(2, 4))), ValueError, "out", ValueError),
    "out's tuple holds a list": Refusal(_call(A, B, lambda: ([[7.0] * 4] * 2,)), TypeError, "out", TypeError),
    "out is a": Refusal(_within_one((0,), (1,), (0,)), ValueError, "out shares memory with a", NUMPY_TAKES_IT),
    "out is b": Refusal(_within_one((0,), (1,), (1,)), ValueError, "out shares memory with b", NUMPY_TAKES_IT),
    "out is a backwards": Refusal(
        _within_one((0,), (1,), (0, slice(None, None, -1))), ValueError, "out shares memory with a", NUMPY_TAKES_IT
    ),
    "out is a matrix of the stack a": Refusal(
        _within_one((slice(3, 4),), (1,), (slice(3, 4),)), ValueError, "out shares memory with a", NUMPY_TAKES_IT
    ),
    "out overlaps a stack": Refusal(
        _within_one((slice(0, 2),), (slice(0, 2),), (slice(1, 3),)),
        ValueError,
        "out shares memory with a",
        NUMPY_TAKES_IT,
    ),
}


def _typed(dtype: Any) -> Callable[[], dict[str, Any]]:
    return _call(A.astype(dtype), B.astype(dtype), OUT)


TYPE_REFUSALS: dict[str, Refusal] = {
    "float64": Refusal(_typed(np.float64), TypeError, r"a is float64.*astype\(", NUMPY_TAKES_IT),
    "int32": Refusal(_typed(np.int32), TypeError, r"a is int32.*astype\(", NUMPY_TAKES_IT),
    "uint8": Refusal(_typed(np.uint8), TypeError, r"a is uint8.*astype\(", NUMPY_TAKES_IT),
    "bool": Refusal(_typed(bool), TypeError, r"a is bool.*astype\(", NUMPY_TAKES_IT),
    "complex64": Refusal(_typed(np.complex64), TypeError, r"a is complex64.*astype\(", TypeError),
    "object": Refusal(_typed(object), TypeError, r"a is object.*astype\(", TypeError),
    "byte-swapped": Refusal(_typed(">f4"), TypeError, r"a is byte-swapped float32.*astype\(", NUMPY_TAKES_IT),
    "strings": Refusal(_call(np.full((2, 3), "x"), B, OUT), TypeError, r"a is str", TypeError),
    "dates": Refusal(_call(A.astype("m8[s]"), B, OUT), TypeError, r"a is timedelta64", TypeError),
    "structures": Refusal(_call(np.zeros((2, 3), "f4,f4"), B, OUT), TypeError, r"a is void", TypeError),
    "float64 · float32": Refusal(_call(A.astype(float), B, OUT), TypeError, "a is float64", NUMPY_TAKES_IT),
    "float32 · float16": Refusal(
        _call(A, B.astype(np.float16), OUT), TypeError, r"a is float32 and b is float16.*astype", NUMPY_TAKES_IT
    ),
    "float16 · bfloat16": Refusal(
        _call(A.astype(np.float16), B.astype(ml_dtypes.bfloat16), OUT),
        TypeError,
        r"a is float16 and b is bfloat16.*astype",
        NUMPY_TAKES_IT,
    ),
    "a list": Refusal(_call(A.tolist(), B, OUT), TypeError, r"a is a list.*np\.asarray\(a", NUMPY_TAKES_IT),
    "b list": Refusal(_call(A, B.tolist(), OUT), TypeError, r"b is a list.*np\.asarray\(b", NUMPY_TAKES_IT),
    "tuple": Refusal(_call(A, tuple(map(tuple, B)), OUT), TypeError, r"b is a tuple.*np\.asarray\(b", NUMPY_TAKES_IT),
    "buffer": Refusal(_call(memoryview(A), B, OUT), TypeError, r"a is a memoryview.*np\.asarray\(a", NUMPY_TAKES_IT),
    "None": Refusal(_call(None, B, OUT), TypeError, "a is a NoneType", (TypeError, ValueError)),
    "number": Refusal(_call(A, 2.0, OUT), TypeError, "b is a float", ValueError),
    "masked a": Refusal(_call(np.ma.masked_array(A), B, OUT), TypeError, r"a is a masked array.*filled", NOT_NUMPYS),
    "masked b": Refusal(_call(A, np.ma.masked_array(B), OUT), TypeError, r"b is a masked array.*filled", NOT_NUMPYS),
    "device=7": Refusal(_call(A, B, OUT, device=7), ValueError, "device is 7.*'emulator'", NOT_NUMPYS),
    "device='gpu'": Refusal(_call(A, B, OUT, device="gpu"), ValueError, "device is 'gpu'.*'cuda'", NOT_NUMPYS),
    "kernel='v0'": Refusal(_call(A, B, OUT, kernel="v0"), ValueError, "no kernel 'v0'.*v7", NOT_NUMPYS),
    "kernel=7": Refusal(_call(A, B, OUT, kernel=7), TypeError, "kernel is 7", NOT_NUMPYS),
}

REFUSALS = {**SHAPE_REFUSALS, **OUT_REFUSALS, **TYPE_REFUSALS}
