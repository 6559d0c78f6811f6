"""skinny: right at every shape it takes, in every layout; its runs and their pieces; what it compiles to."""

from __future__ import annotations

import numpy as np
import pytest
from special_products import Product, run

from numba_gemm.compile import compile_kernel
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.skinny import build, unmet
from numba_gemm.fp32.skinny_specs import (
    MAX_NARROW,
    SKINNY,
    SKINNY_FIXUP,
    TILES,
    choose_form,
    config_of,
    fixup_configs,
    roles,
    runs,
    shipped_configs,
)
from numba_gemm.problem import Problem

LAYOUTS = [("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")]


def tile(block_i, block_j, thread_i, thread_j, depth, stages, turned=0):
    names = ("block_i", "block_j", "thread_i", "thread_j", "depth", "stages", "blocks_per_sm", "turned")
    return dict(zip(names, (block_i, block_j, thread_i, thread_j, depth, stages, 1, turned), strict=True))


def narrow_products():
    """With the shipped tiles: small, odd, both roles, all layouts."""
    for narrow, other, k in ((2, 3, 1), (8, 8, 8), (5, 300, 37), (13, 70, 100), (32, 260, 20), (33, 257, 19)):
        for a_layout, b_layout in LAYOUTS:
            # The tiles of 16 and 64 in other layouts take Numba a quarter of a minute each.
            slow = narrow in (13, 33) and (a_layout, b_layout) != ("row", "row")
            for m, n in ((narrow, other), (other, narrow)):
                product = Product(m, n, k, a_layout, b_layout)
                yield pytest.param(product, marks=pytest.mark.slow if slow else (), id=str(product))


def awkward_products():
    for a_layout, b_layout in LAYOUTS:
        yield Product(8, 260, 68, a_layout, b_layout, pad=4, alpha=-1.5, beta=0.75)
        product = Product(260, 12, 68, a_layout, b_layout, pad=4, alpha=0.5, beta=-2.0)
        slow = () if (a_layout, b_layout) == ("row", "row") else pytest.mark.slow  # as above
        yield pytest.param(product, marks=slow, id=str(product))
        yield Product(7, 130, 45, a_layout, b_layout, skew=1, beta=1.0)
        yield Product(6, 36, 28, a_layout, b_layout, batch=3, alpha=2.0)
        yield Product(36, 6, 28, a_layout, b_layout, batch=3, shared="A", beta=1.0)
        yield Product(4, 24, 40, a_layout, b_layout, backwards=True, inputs="integer")
    yield Product(64, 300, 24, inputs="integer")
    yield Product(3, 40, 0, beta=2.0)
    yield Product(40, 3, 0)
    yield Product(1, 33, 65)


@pytest.mark.parametrize("product", [*narrow_products(), *awkward_products()], ids=str)
def test_products(product):
    _, report, _ = run(SKINNY, product)
    assert report.counters.shared_load_conflicts == 0


SMALL_TILES = {
    "across": tile(8, 128, 8, 4, 8, 3),
    "along": tile(8, 128, 8, 4, 8, 3),
    "turned": tile(16, 128, 8, 8, 8, 2, 1),
}


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7, 11, 24])
@pytest.mark.parametrize("form", SMALL_TILES)
def test_any_number_of_runs(form, blocks):
    """3 tiles of 9 steps: runs of whole tiles, of parts of one, of pieces of two, and several pieces inside a tile."""
    product = Product(8, 330, 70, b_layout="row" if form == "across" else "column", beta=-1.0, batch=2)
    run(SKINNY, product, config=lambda problem: config_of(problem, SMALL_TILES[form], blocks))


def test_more_stages_than_steps():
    product = Product(8, 130, 10)
    run(SKINNY, product, config=lambda problem: config_of(problem, tile(8, 128, 8, 4, 8, 5), 3))


@pytest.mark.parametrize(
    "shape",
    [
        (16, 128, 16, 4),
        pytest.param((32, 128, 16, 8), marks=pytest.mark.slow),
        (64, 128, 8, 8),
        pytest.param((64, 256, 16, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shapes_of_the_thread_tile(shape):
    block_i, block_j, thread_i, thread_j = shape
    small = tile(block_i, block_j, thread_i, thread_j, 8, 3)
    product = Product(block_i - 3, block_j + 9, 30, inputs="integer")
    _, report, _ = run(SKINNY, product, config=lambda problem: config_of(problem, small, 3))
    assert report.counters.shared_load_conflicts == 0


def test_the_wide_factor_is_read_once():
    k, n = 64, 512
    _, report, _ = run(SKINNY, Product(8, n, k), config=lambda p: config_of(p, tile(8, 256, 8, 4, 16, 3), 2))
    w_sectors, x_sectors = k * n * 4 // 32, 2 * 8 * k * 4 // 32  # X once a tile
    assert report.counters.global_load_sectors == w_sectors + x_sectors


def test_loads_take_two_wavefronts():
    """Neighbouring lanes share rows or columns, so a 16-byte load of a warp takes 2 passes and not 4."""
    small = tile(64, 128, 8, 8, 8, 3)
    _, report, _ = run(SKINNY, Product(64, 128, 16), config=lambda problem: config_of(problem, small, 1))
    assert report.counters.shared_load_wavefronts == 2 * report.counters.shared_load_requests


def test_the_same_call_gives_the_same_bits():
    product = Product(9, 700, 130)
    first, _, config = run(SKINNY, product, sm_count=3)
    assert dict(config)["blocks"] > 1
    np.testing.assert_array_equal(first, run(SKINNY, product, sm_count=3)[0])


def test_an_infinity_at_the_edge_counts_once():
    run(SKINNY, Product(4, 24, 13, inputs="infinite"))


def test_the_narrower_factor_is_the_narrow_one():
    wide_b, wide_a = roles(Problem.packed(16, 1000, 50)), roles(Problem.packed(1000, 16, 50))
    assert (wide_b.wide, wide_b.form, wide_b.outputs, wide_b.narrow) == ("B", "across", 1000, 16)
    assert (wide_a.wide, wide_a.form, wide_a.outputs, wide_a.narrow) == ("A", "along", 1000, 16)
    assert (wide_a.c_stride_i, wide_a.c_stride_j) == (1, 16)


def test_every_sm_has_the_same_number_of_steps():
    problem = Problem.packed(8, 28672, 8192)
    small = TILES["across", 4, 8]
    blocks = runs(problem, small, 132, (9, 0))
    assert blocks % 132 == 0
    steps = -(-28672 // small["block_j"]) * (8192 // small["depth"])
    assert steps / blocks > 100  # the remainder of a step is less than 1 %


def test_small_shared_memory_means_fewer_blocks():
    problem = Problem.packed(8, 28672, 8192)
    tall = dict(TILES["across", 4, 8], stages=3, block_j=512, blocks_per_sm=2)
    assert runs(problem, tall, 100, (9, 0)) == 2 * runs(problem, tall, 100, (8, 9))


def test_other_shapes_are_refused_in_words():
    problem = Problem.packed(65, 66, 4)
    assert "neither M = 65 nor N = 66" in SKINNY.unmet(problem, SKINNY.configs[0])
    with pytest.raises(KernelConstraintError, match="kernel 'v7' can"):
        choose_form(problem, 132, (9, 0))
    choose_form(Problem.packed(MAX_NARROW, 66, 4), 132, (9, 0))


GOOD = {"form": "across", "vector_width": 4, **tile(32, 256, 8, 8, 16, 3)}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"thread_i": 6}, "thread_i = 6 is not a multiple of 4"),
        ({"block_j": 260}, "is not made of thread tiles"),
        ({"block_j": 96}, "don't make whole warps"),
        ({"turned": 1}, "only W that lies along K"),
        ({"form": "along", "turned": 1}, "vector_width must be 1"),
        ({"block_i": 64, "thread_i": 4, "thread_j": 4, "depth": 8}, "1024 threads don't share 8 lines"),
        ({"depth": 24}, "4 warps don't share the 3 groups"),
        ({"depth": 12}, "evenly"),
        ({"stages": 1}, "2 are needed"),
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_in_words(change, rule):
    assert unmet(**GOOD) is None
    assert rule in unmet(**{**GOOD, **change})
    with pytest.raises(ValueError, match="skinny: "):
        build(**{**GOOD, **change})


def test_every_shipped_form_keeps_the_rules():
    assert all(unmet(**dict(config)) is None for config in shipped_configs())


@pytest.mark.parametrize(
    "arch",
    [pytest.param((8, 0), marks=pytest.mark.slow), (9, 0), pytest.param((12, 0), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("config", shipped_configs(), ids=lambda config: "-".join(str(v) for _, v in config))
def test_no_form_spills(config, arch):
    resources = compile_kernel(SKINNY, config, arch).resources
    assert not resources.uses_local_memory
    geometry = SKINNY.geometry(config)
    assert resources.registers * geometry.threads * dict(config)["blocks_per_sm"] <= 65536
    assert geometry.shared_bytes <= 99 * 1024 or dict(config)["block_i"] == 8


@pytest.mark.parametrize("config", fixup_configs(), ids=lambda config: "-".join(str(v) for _, v in config))
def test_the_second_launch_does_not_spill(config):
    assert not compile_kernel(SKINNY_FIXUP, config, (9, 0)).resources.uses_local_memory
