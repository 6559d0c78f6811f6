"""How products are cut, and what the steps of a cut add up to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from numba_gemm.host.blocks import GRAIN, Blocking, Grain, Shape, choose_blocks
from numba_gemm.host.steps import Download, Multiply, Upload, product_steps

#: Everything small, so that small products are cut in many blocks and pieces.
SMALL = Grain(
    tile=4,
    piece_bytes=64,
    max_pieces=4,
    piece_rows=4,
    piece_row_bytes=16,
    group_bytes=256,
    block_cost=16,
    whole_bytes=0,
)

shapes = st.builds(
    Shape,
    batch=st.integers(1, 4),
    m=st.integers(1, 30),
    n=st.integers(1, 30),
    k=st.integers(1, 30),
    a_bytes=st.sampled_from([0, 2, 4]),
    b_bytes=st.sampled_from([0, 2, 4]),
    c_bytes=st.sampled_from([2, 4]),
    a_shared=st.booleans(),
    b_shared=st.booleans(),
    a_column=st.booleans(),
    b_column=st.booleans(),
    reads_c=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(shape=shapes, limit=st.integers(1500, 40_000))
def test_the_steps_cover_the_product_once(shape, limit):
    try:
        blocking = choose_blocks(shape, limit, SMALL)
    except ValueError:
        assume(False)
    assert blocking.device_bytes(shape) <= limit
    done = np.zeros((shape.batch, shape.m, shape.n, shape.k), int)
    copied = np.zeros((shape.batch, shape.m, shape.n), int)
    for step in product_steps(shape, blocking, [("a", "b")]):
        if isinstance(step, Multiply):
            _, batch, rows, columns = step.part
            region = done[slice(*batch), slice(*rows), slice(*columns)]
            assert step.accumulate == (region > 0).any()
            assert not region[..., step.depth[0] :].any(), "depths are taken in order"
            region[..., slice(*step.depth)] += 1
        elif isinstance(step, Download):
            _, batch, rows, columns = step.part
            assert (done[slice(*batch), slice(*rows), slice(*columns)] == 1).all(), "copied back before it is done"
            copied[slice(*batch), slice(*rows), slice(*columns)] += 1
        elif isinstance(step, Upload):
            assert shape.reads_c or step.home.slot.matrix != "c"
    assert (done == 1).all()
    assert (copied == 1).all()


@settings(max_examples=200, deadline=None)
@given(shape=shapes, limit=st.integers(1500, 40_000))
def test_k_is_cut_only_where_the_least_blocks_with_all_of_it_dont_fit(shape, limit):
    try:
        blocking = choose_blocks(shape, limit, SMALL)
    except ValueError:
        assume(False)
    least = Blocking(1, min(shape.m, SMALL.tile), min(shape.n, SMALL.tile), shape.k)
    if blocking.block_k < shape.k:
        assert least.device_bytes(shape) > limit


def test_a_product_that_fits_is_one_block_in_a_few_pieces():
    shape = Shape(1, 8192, 8192, 8192)
    blocking = choose_blocks(shape, 1 << 32)
    assert blocking.counts(shape) == (1, 1, 1, 1)
    assert blocking.loads(shape) == (1, 1)
    assert (blocking.piece_m, blocking.piece_n) == (1024, 1024)
    assert blocking.piece_n * 4 >= GRAIN.piece_row_bytes


def test_a_product_that_would_be_staged_whole_is_one_piece():
    """Page-locked or not, the kernel then sees the same problem, and its bits are the same."""
    for shape in (Shape(1, 2048, 2048, 2048), Shape(2, 1500, 1400, 1000)):
        blocking = choose_blocks(shape, 1 << 30)
        assert (blocking.piece_m, blocking.piece_n) == (shape.m, shape.n)


def test_a_product_that_does_not_fit_moves_little_more_than_it_must():
    """Half of the operands fit: A or B is copied a few times, not once a block."""
    shape = Shape(1, 16384, 16384, 16384)
    blocking = choose_blocks(shape, 3 << 29)
    a_loads, b_loads = blocking.loads(shape)
    assert min(a_loads, b_loads) == 1
    assert max(a_loads, b_loads) <= 4
    assert blocking.block_k == shape.k


def test_small_products_of_a_batch_are_taken_in_groups():
    shape = Shape(10_000, 64, 64, 64)
    blocking = choose_blocks(shape, 1 << 30)
    assert blocking.group * 3 * 64 * 64 * 4 <= GRAIN.group_bytes < (blocking.group + 1) * 3 * 64 * 64 * 4
    assert blocking.slots == (2, 2, 2)


def test_a_limit_that_nothing_fits_says_what_would():
    with pytest.raises(ValueError, match=r"memory_limit = 1000 bytes .* 49152 bytes at least"):
        choose_blocks(Shape(1, 4096, 4096, 4096), 1000)
    assert choose_blocks(Shape(1, 4096, 4096, 4096), 49152)
