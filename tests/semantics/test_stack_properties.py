"""The arithmetic of stacks against enumeration: which elements multiply which, before an arrangement and after it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from drawn_views import arrangements, factors
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from numba_gemm.stack import (
    MAX_DIMENSION,
    Batches,
    Stack,
    broadcast,
    launch_axis,
    offsets,
    product_shape,
    result_stack,
    simplified,
    stack_of,
)

SETTINGS = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


def element_offsets(stack, batch_offset):
    """Where the elements of one matrix lie, as a (rows, columns) array."""
    i, j = np.ogrid[: stack.rows, : stack.columns]
    return batch_offset + i * stack.row_stride + j * stack.column_stride


def products(batches):
    """For each element of C, by where it lies: the pairs of places that are multiplied for it, in order of k."""
    found = {}
    matrices = [offsets(batches.extents, stack.batch_strides) for stack in (batches.a, batches.b, batches.c)]
    for a_at, b_at, c_at in zip(*matrices, strict=True):
        a, b, c = (
            element_offsets(stack, at)
            for stack, at in zip((batches.a, batches.b, batches.c), (a_at, b_at, c_at), strict=True)
        )
        for i, j in np.ndindex(c.shape):
            place = int(c[i, j])
            assert place not in found, "an element of C is computed twice"
            found[place] = tuple(zip(a[i].tolist(), b[:, j].tolist(), strict=True))
    return found


@st.composite
def batches(draw):
    """Three stacks as a call makes them, with C's elements apart from one another; and the views that they describe."""
    shapes = draw(factors(largest=3))
    assume(0 not in shapes.out)
    shape = product_shape(shapes.a, shapes.b)
    how = [draw(arrangements(one, broadcast=index < 2)) for index, one in enumerate((shapes.a, shapes.b, shapes.out))]
    places = [one.take(np.arange(one.base_size)) for one in how]
    # In elements: a base of int8 has strides of bytes.
    strides = [one.take(np.zeros(one.base_size, np.int8)).strides for one in how]
    a = stack_of(shapes.a, strides[0], shape.batch)
    b = stack_of(shapes.b, strides[1], shape.batch, column=True)
    c = result_stack(shape, strides[2], a_is_vector=len(shapes.a) == 1, b_is_vector=len(shapes.b) == 1)
    return Batches(shape.batch, a, b, c), [place - place.reshape(-1)[0] if place.size else place for place in places]


@SETTINGS
@given(batches())
def test_stacks_are_the_views_that_they_came_from(drawn):
    """matmul on the places themselves says what is multiplied with what."""
    stacks, (a, b, c) = drawn
    a2, b2 = (a if a.ndim > 1 else a[np.newaxis]), (b if b.ndim > 1 else b[:, np.newaxis])
    m, n = a2.shape[-2], b2.shape[-1]
    a2 = np.broadcast_to(a2, (*stacks.extents, *a2.shape[-2:]))
    b2 = np.broadcast_to(b2, (*stacks.extents, *b2.shape[-2:]))
    c2 = c.reshape((*stacks.extents, m, n))
    right = {
        int(c2[(*index, i, j)]): tuple(zip(a2[index][i].tolist(), b2[index][:, j].tolist(), strict=True))
        for index in np.ndindex(stacks.extents)
        for i, j in itertools.product(range(m), range(n))
    }
    assert products(stacks) == right


@SETTINGS
@given(batches())
def test_simplifying_changes_no_product(drawn):
    stacks, _ = drawn
    simple = simplified(stacks)
    assert products(simple) == products(stacks)
    assert len(simple.extents) <= sum(extent != 1 for extent in stacks.extents)
    assert simplified(simple).count <= simple.count
    assert 1 not in simple.extents


@st.composite
def packed_batches(draw):
    """Packed stacks of one to three axes, of which A and B have all, none or the last ones: what simplifies most."""
    m, n, k = (draw(st.integers(1, 3)) for _ in range(3))
    batch = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))

    def stack(rows, columns, axes):
        strides, size = [], rows * columns
        for axis in reversed(range(len(batch))):
            strides.append(size if axis >= len(batch) - axes else 0)
            size *= batch[axis] if axis >= len(batch) - axes else 1
        return Stack(rows, columns, columns, 1, tuple(reversed(strides)))

    axes = st.integers(0, len(batch))
    return Batches(batch, stack(m, k, draw(axes)), stack(k, n, draw(axes)), stack(m, n, len(batch)))


@SETTINGS
@given(packed_batches())
def test_packed_stacks_need_few_axes(packed):
    simple = simplified(packed)
    assert products(simple) == products(packed)
    strides = list(zip(packed.extents, packed.a.batch_strides, packed.b.batch_strides, strict=True))
    strides = [axis for axis in strides if axis[0] > 1]
    if all(b == 0 for _, _, b in strides) and all(a for _, a, _ in strides):
        assert simple.extents == ()  # (batch, m, k) @ (k, n) is one product of more rows
        assert simple.a.rows == packed.a.rows * packed.count
    if all(a and b for _, a, b in strides):
        assert len(simple.extents) <= 1


def test_folding_stops_at_what_a_kernel_can_index():
    rows = 2**20
    a, b, c = Stack(rows, 2, 2, 1, (2 * rows,)), Stack(2, 2, 2, 1, (0,)), Stack(rows, 2, 2, 1, (2 * rows,))
    folded = simplified(Batches((2**10,), a, b, c))
    assert folded.extents == ()
    assert folded.a.rows == 2**30 <= MAX_DIMENSION
    assert simplified(Batches((2**11,), a, b, c)).extents == (2**11,)


@SETTINGS
@given(SHAPES, SHAPES)
def test_broadcasting_is_numpys(a, b):
    try:
        right = np.broadcast_shapes(a, b)
    except ValueError:
        right = None
    assert broadcast(a, b) == right


@SETTINGS
@given(SHAPES.filter(len), SHAPES.filter(len), st.booleans())
def test_product_shapes_are_numpys(a, b, agree):
    if agree:
        b = (*b[:-2], a[-1], b[-1]) if len(b) > 1 else a[-1:]
    try:
        right = np.shape(np.matmul(np.empty(a, np.int8), np.empty(b, np.int8)))
    except ValueError:
        with pytest.raises(ValueError, match="matmul"):
            product_shape(a, b)
        return
    shape = product_shape(a, b)
    assert shape.result == right
    assert shape.k == a[-1]


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=4))
def test_offsets_are_a_views(axes):
    extents, strides = tuple(axis[0] for axis in axes), tuple(axis[1] for axis in axes)
    right = [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*(range(extent) for extent in extents))
    ]
    assert offsets(extents, strides) == right


STACKS = st.builds(
    Stack, st.integers(1, 4), st.integers(1, 4), st.integers(-9, 9), st.integers(-9, 9), st.just(())
) | st.sampled_from([Stack(3, 4, 4, 1), Stack(3, 4, 1, 3), Stack(1, 4, 7, 1), Stack(4, 1, 1, 9), Stack(1, 1, 5, 6)])


@SETTINGS
@given(STACKS, st.booleans())
def test_a_layout_says_where_every_element_is(stack, columns_too):
    layout = stack.layout(columns_too=columns_too)
    if layout is None:
        assert stack.column_stride != 1
        assert stack.columns > 1
        return
    order, leading = layout
    assert columns_too or order == "row"
    i, j = np.ogrid[: stack.rows, : stack.columns]
    read = i * leading + j if order == "row" else j * leading + i
    assert np.array_equal(read, element_offsets(stack, 0))


@SETTINGS
@given(batches())
def test_a_packed_copy_fills_its_places_with_one_element_each(drawn):
    stacks, _ = drawn
    for stack in (stacks.a, stacks.b):
        copy, size = stack.packed(stacks.extents)
        assert (copy.rows, copy.columns) == (stack.rows, stack.columns)
        copied: dict[int, int] = {}
        matrices = (offsets(stacks.extents, one.batch_strides) for one in (copy, stack))
        for to, source in zip(*matrices, strict=True):
            pairs = zip(element_offsets(copy, to).flat, element_offsets(stack, source).flat, strict=True)
            for place, element in pairs:
                assert copied.setdefault(int(place), int(element)) == element
        assert sorted(copied) == list(range(size if stacks.count else 0))


@SETTINGS
@given(batches())
def test_the_axis_of_a_launch_is_the_longest(drawn):
    stacks, _ = drawn
    axis = launch_axis(stacks)
    if stacks.extents:
        assert stacks.extents[axis] == max(stacks.extents)
    else:
        assert axis is None
