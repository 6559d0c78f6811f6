"""Arrays of any strides for hypothesis: permuted axes, steps of any sign, slices, odd alignments, broadcast axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Array, Shape, bits
from hypothesis import strategies as st


@dataclass(frozen=True)
class Axis:
    """How one axis lies in the axis of a base array: elements skipped before and after it, and the step."""

    extent: int
    step: int = 1
    before: int = 0
    after: int = 0

    @property
    def base_extent(self) -> int:
        """Of the base array."""
        if self.step == 0:
            return self.before + min(self.extent, 1) + self.after
        return self.before + max(self.extent - 1, 0) * abs(self.step) + min(self.extent, 1) + self.after

    @property
    def taken(self) -> slice:
        """The part of the base's axis, before it is broadcast."""
        if self.extent == 0:
            return slice(0, 0)
        if self.step == 0:
            return slice(self.before, self.before + 1)
        end = self.before + (self.extent - 1) * abs(self.step)
        if self.step > 0:
            return slice(self.before, end + 1, self.step)
        return slice(end, None if self.before == 0 else self.before - 1, self.step)


@dataclass(frozen=True)
class Arrangement:
    """An array's axes, the order in which they lie in memory, outermost first, and elements before all of them."""

    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    start: int = 0

    @property
    def shape(self) -> Shape:
        """Of the view."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def base_size(self) -> int:
        """Elements of the base, which is flat."""
        return self.start + math.prod(axis.base_extent for axis in self.axes) + 1

    def take(self, base: Array) -> Array:
        """The view of a flat base of ``base_size`` elements."""
        extents = [self.axes[axis].base_extent for axis in self.order]
        whole = base[self.start : self.start + math.prod(extents)].reshape(extents)
        part = whole.transpose(np.argsort(self.order))[(..., *(axis.taken for axis in self.axes))]
        return np.broadcast_to(part, self.shape) if any(axis.step == 0 for axis in self.axes) else part


class Laid:
    """An array of a shape laid out as drawn, the memory that it lies in, and which of that isn't its own."""

    def __init__(self, how: Arrangement, dtype: np.dtype[Any], values: Array | None = None) -> None:
        base = np.full(how.base_size, np.nan, dtype)
        if values is not None:
            owned = np.zeros(how.base_size, bool)
            owned[how.take(np.arange(how.base_size)).reshape(-1)] = True
            base[owned] = values.reshape(-1)[: np.count_nonzero(owned)]
        # NumPy's memory begins at a multiple of 16 bytes or more, so `start` decides the alignment.
        self.base = base
        self.view = how.take(base)
        self.outside = np.ones(how.base_size, bool)
        self.outside[how.take(np.arange(how.base_size)).reshape(-1)] = False
        self.before = bits(base)
        assert self.view.shape == how.shape

    @property
    def kept_to_itself(self) -> bool:
        """Whether no element outside the view has changed."""
        return np.array_equal(bits(self.base)[self.outside], self.before[self.outside])

    @property
    def untouched(self) -> bool:
        """Whether nothing at all has changed."""
        return np.array_equal(bits(self.base), self.before)


@st.composite
def arrangements(draw: Any, shape: Shape, *, broadcast: bool) -> Arrangement:
    """A way to lie in memory; with ``broadcast``, some axes may have a stride of 0."""
    steps = [1, 1, 1, 2, 3, -1, -2] + ([0] if broadcast else [])
    gaps = st.sampled_from([0, 0, 0, 1, 3])
    axes = tuple(Axis(extent, draw(st.sampled_from(steps)), draw(gaps), draw(gaps)) for extent in shape)
    order = tuple(range(len(shape)))
    if draw(st.booleans()):
        order = tuple(draw(st.permutations(order)))
    elif len(shape) > 1 and draw(st.booleans()):
        order = (*order[:-2], order[-1], order[-2])
    return Arrangement(axes, order, draw(st.integers(0, 4)))


@dataclass(frozen=True)
class Factors:
    """Shapes of A, B and of an output to which both are broadcast."""

    a: Shape
    b: Shape
    out: Shape


@st.composite
def factors(draw: Any, *, vectors: bool = True, largest: int = 17, larger_out: bool = False) -> Factors:
    """Shapes that np.matmul multiplies: vectors, matrices, and stacks of up to three axes that broadcast."""
    extents = st.one_of(st.integers(0, largest), st.sampled_from([1, 2, 4, 8, largest]))
    m, n, k = draw(extents), draw(extents), draw(extents)
    batch = draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 3]), max_size=3).map(tuple))

    def stack() -> Shape:
        kept = draw(st.integers(0, len(batch)))
        return tuple(1 if draw(st.integers(0, 3)) == 0 else extent for extent in batch[len(batch) - kept :])

    a_is_vector, b_is_vector = (vectors and draw(st.integers(0, 4)) == 0 for _ in range(2))
    a = (k,) if a_is_vector else (*stack(), m, k)
    b = (k,) if b_is_vector else (*stack(), k, n)
    core = (*(() if a_is_vector else (m,)), *(() if b_is_vector else (n,)))
    stacked = np.broadcast_shapes(a[:-2], b[:-2])
    if larger_out and draw(st.booleans()):
        stacked = np.broadcast_shapes(batch, stacked)
    return Factors(a, b, (*stacked, *core))
