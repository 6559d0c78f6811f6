"""outer: right at every shape it takes, in every form and layout; what it refuses; what it compiles to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from special_products import Product, run

from numba_gemm.compile import compile_kernel
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32 import outer_choose
from numba_gemm.fp32.outer import MAX_K, WARP, build, unmet
from numba_gemm.fp32.outer_choose import candidates, choices, choose_form, cycles
from numba_gemm.fp32.outer_specs import OUTER
from numba_gemm.fp32.outer_tiles import TILES, by_16_bytes, config_of, shipped_configs, tiles_of
from numba_gemm.problem import Problem

H200 = (132, (9, 0))
LAYOUTS = [("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")]
#: Small tiles, of which a product of a few rows has several.
SMALL = {"rows": 4, "columns": 1, "vector_width": 1, "warps": 2, "unroll_k": 2, "ahead": 1, "blocks_per_sm": 1}
SMALL_16_BYTES = {**SMALL, "columns": 4, "vector_width": 4}


def small_tile(problem):
    return SMALL_16_BYTES if by_16_bytes(problem) else SMALL


def form_products():
    """Every shipped tile, on a product that ends inside a block both ways and inside a pass."""
    for (layout, aligned), tiles in TILES.items():
        for number, tile in enumerate(tiles):
            m, n = tile["warps"] * tile["rows"] + 5, WARP * tile["columns"] + (4 if aligned else 5)
            a_layout = ("row", "column")[number % 2]
            product = Product(m, n, (7, 19, 30)[number % 3], a_layout, layout, alpha=-1.5, beta=0.5)
            yield pytest.param(product, tile, id=f"{layout}-{aligned}-{number}")


@pytest.mark.parametrize(("product", "tile"), list(form_products()))
def test_every_form(product, tile):
    _, _, config = run(OUTER, product, config=lambda problem: config_of(problem, tile))
    assert config in shipped_configs()


def awkward_products():
    for a_layout, b_layout in LAYOUTS:
        yield Product(12, 132, 8, a_layout, b_layout, pad=4, alpha=-1.5, beta=0.75)
        yield Product(19, 33, 11, a_layout, b_layout, skew=1, beta=1.0)
        yield Product(10, 36, 5, a_layout, b_layout, batch=3, alpha=2.0)
        yield Product(9, 36, 5, a_layout, b_layout, batch=2, shared="B", beta=1.0)
        yield Product(9, 24, 6, a_layout, b_layout, backwards=True, inputs="integer")
        yield Product(3, 260, 32, a_layout, b_layout, inputs="integer")
    yield Product(20, 40, 0, beta=2.0)
    yield Product(20, 41, 0)
    yield Product(1, 1, 1)
    yield Product(1, 77, 3)
    yield Product(77, 1, 3)


@pytest.mark.parametrize("product", list(awkward_products()), ids=str)
def test_products(product):
    run(OUTER, product, config=lambda problem: config_of(problem, small_tile(problem)))


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32])
def test_every_rest_of_a_pass(k, ahead):
    tile = {**SMALL, "ahead": ahead}
    run(OUTER, Product(9, 33, k, inputs="integer"), config=lambda problem: config_of(problem, tile))


def test_terms_are_added_in_the_order_of_k():
    """One thread, one FMA a term, from zero: the bits of a plain loop, in every form."""
    m, n, k = 21, 40, 29
    rng = np.random.default_rng([m, n, k, 1])  # as run draws
    a, b = (rng.standard_normal((1, *shape)).astype(np.float32)[0] for shape in ((m, k), (k, n)))
    expected = np.zeros((m, n), np.float32)
    for one in range(k):  # a product of two float32 is exact in float64, and so is a sum that isn't far apart, but once
        expected = (a[:, one, None].astype(np.float64) * b[one].astype(np.float64) + expected).astype(np.float32)
    for layout in ("row", "column"):
        for tile in TILES[layout, True]:
            result, _, _ = run(OUTER, Product(m, n, k, b_layout=layout), config=lambda p, tile=tile: config_of(p, tile))
            assert np.mean(result[0] == expected) > 0.999  # float64 rounds twice, once in some 10⁹ sums
            np.testing.assert_allclose(result[0], expected, rtol=0, atol=1e-6)


def test_nothing_is_read_or_written_twice_or_with_conflicts():
    """C once, by whole sectors; B once for a block's rows; A once for a block's columns; 32 banks for the copies."""
    m, n, k = 16, 256, 8
    tile = {**SMALL_16_BYTES, "warps": 2}
    _, report, _ = run(OUTER, Product(m, n, k), config=lambda problem: config_of(problem, tile))
    counters = report.counters
    assert counters.global_store_sectors == m * n * 4 // 32
    of_b = m // 8 * 2 * k * n * 4 // 32  # each of the block's two warps, the second one from L1
    of_a = n // 128 * m * k * 4 // 32
    assert counters.global_load_sectors == of_b + of_a
    assert counters.shared_load_conflicts == 0
    assert counters.shared_store_conflicts == 0


def test_columns_come_through_shared_memory_without_conflicts():
    for tile in (SMALL, SMALL_16_BYTES):
        product = Product(16, 256, 8, b_layout="column")
        _, report, _ = run(OUTER, product, config=lambda problem, tile=tile: config_of(problem, tile))
        assert report.counters.shared_load_conflicts == report.counters.shared_store_conflicts == 0


def test_an_infinity_at_the_edge_counts_once():
    for layout in ("row", "column"):
        run(OUTER, Product(20, 41, 3, b_layout=layout, inputs="infinite"))


def test_a_longer_k_is_refused_in_words():
    problem = Problem.packed(100, 100, MAX_K + 1)
    assert "K = 33 is more than 32" in OUTER.unmet(problem, OUTER.configs[0])
    with pytest.raises(KernelConstraintError, match="kernel 'v7' can"):
        choose_form(problem, *H200)
    choose_form(Problem.packed(100, 100, MAX_K), *H200)


GOOD = {"form": "row", **SMALL}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rows": 6}, "rows = 6 is not 4, 8 or 16"),
        ({"vector_width": 4, "columns": 2}, "columns = 2 is not a multiple of the vector width, 4"),
        ({"unroll_k": 3}, "unroll_k = 3 does not divide 32"),
        ({"form": "column", "ahead": 2}, "ahead = 2: nothing"),
        ({"form": "column", "warps": 16}, "16 warps don't share the copies of 32 columns"),
        ({"rows": 16, "warps": 32}, "words of shared memory are more than"),
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_in_words(change, rule):
    assert unmet(**GOOD) is None
    assert rule in unmet(**{**GOOD, **change})
    with pytest.raises(ValueError, match="outer: "):
        build(**{**GOOD, **change})


def test_every_shipped_form_keeps_the_rules():
    assert all(unmet(**dict(config)) is None for config in shipped_configs())


# --- the choice


@pytest.mark.parametrize(
    ("change", "wide"),
    [
        ({}, True),
        ({"n": 101, "ldb": 101, "ldc": 101}, False),
        ({"ldb": 102}, False),
        ({"b_offset": 4}, False),
        ({"c_offset": 8}, False),
        ({"b_layout": "column", "ldb": 7}, True),
        ({"b_layout": "column", "ldb": 7, "ldc": 101}, False),
        ({"a_offset": 4, "lda": 9}, True),
    ],
    ids=str,
)
def test_b_s_rows_and_c_decide_how_they_are_accessed(change, wide):
    problem = replace(Problem.packed(50, 100, 7), **change)
    assert by_16_bytes(problem) is wide
    assert tiles_of(problem) is TILES[problem.b_layout, wide]


def test_the_pick_costs_the_least_and_is_the_first_candidate():
    for shape in ((300, 400, 9), (7000, 401, 2), (60, 3000, 31), (1, 300, 4)):
        problem = Problem.packed(*shape)
        every = choices(problem, *H200)
        assert every[0].cycles == min(choice.cycles for choice in every)
        found = candidates(problem, *H200)
        assert found[0] == choose_form(problem, *H200) == config_of(problem, every[0].tile)
        assert len(set(found)) == len(found)


def test_the_model_knows_what_costs():
    """More bytes, more terms and a batch cost more; no product less than storing its bytes."""

    def cost(problem, tile):
        return cycles(problem, tile, *H200)

    problem, small = Problem.packed(8000, 4000, 16), Problem.packed(60, 40, 10)
    shorter, smaller = Problem.packed(8000, 4000, 8), Problem.packed(4000, 4000, 8)
    many = replace(small, batch=5000, batch_stride_a=600, batch_stride_b=400, batch_stride_c=2400)
    for tile in tiles_of(problem):
        assert cost(problem, tile) > cost(shorter, tile) > cost(smaller, tile)
        assert cost(problem, tile) >= problem.bytes_moved / (132 * outer_choose.COSTS.bytes)
        assert cost(many, tile) > 5 * cost(small, tile)


# --- what it compiles to


def compiled_forms():
    for arch in ((8, 0), (9, 0), (12, 0)):
        for config in shipped_configs():
            name = "-".join(str(value) for _, value in config)
            yield pytest.param(config, arch, marks=pytest.mark.slow if arch != (9, 0) else (), id=f"{arch}-{name}")


@pytest.mark.parametrize(("config", "arch"), list(compiled_forms()))
def test_no_form_spills(config, arch):
    resources = compile_kernel(OUTER, config, arch).resources
    assert not resources.uses_local_memory
    geometry = OUTER.geometry(config)
    assert resources.registers * geometry.threads * OUTER.blocks_per_sm(config, arch) <= 65536


def test_sm_120_gets_registers_for_fewer_blocks():
    most = max(OUTER.configs, key=lambda config: dict(config)["blocks_per_sm"])
    assert [OUTER.blocks_per_sm(most, arch) for arch in ((8, 0), (9, 0), (12, 0))] == [20, 20, 18]
    others = [config for config in OUTER.configs if config != most]
    assert all(OUTER.blocks_per_sm(config, (12, 0)) == dict(config)["blocks_per_sm"] for config in others)
