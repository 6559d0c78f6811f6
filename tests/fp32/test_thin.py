"""thin: right at every shape it takes, in every form, layout and split; what it refuses; what it compiles to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from special_products import Product, run

from numba_gemm.compile import compile_kernel
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32 import thin_choose
from numba_gemm.fp32.thin import build, outputs_of, pass_of, unmet
from numba_gemm.fp32.thin_choose import candidates, choices, choose_form, cycles, part_counts
from numba_gemm.fp32.thin_specs import THIN, THIN_SUM
from numba_gemm.fp32.thin_tiles import (
    MAX_NARROW,
    NARROW,
    TILES,
    config_of,
    k_per_part,
    narrow_of,
    shipped_configs,
    tiles_of,
    width_of,
)
from numba_gemm.problem import Problem

H200 = (132, (9, 0))
LAYOUTS = [("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")]
#: Small tiles, of which a product of a few rows has several, and chunks of several passes.
ALONG = {"rows": 2, "lanes": 8, "warps": 4, "k_warps": 2, "unroll_k": 2, "depth": 64, "blocks_per_sm": 1}
ACROSS = {"lanes": 4, "warps": 2, "unroll_k": 1, "depth": 32, "blocks_per_sm": 1}


def small_tile(problem):
    return {**ACROSS, "vector_width": width_of(problem)} if layout_of_wide(problem) == "row" else ALONG


def layout_of_wide(problem):
    """Of B, or of A seen as its transpose: "row" if the outputs are contiguous."""
    if problem.m <= problem.n:
        return problem.b_layout
    return "row" if problem.a_layout == "column" else "column"


def form_products():
    """Every shipped tile at an odd shape, K in one part or three: of each kind, a chunk or two and a rest.

    By default every second one for 16 vectors, whose registers are looked at as well, and a third of the others.
    """
    for (form, width, narrow), tiles in TILES.items():
        for number, tile in enumerate(tiles):
            values = {**tile, "narrow": narrow}
            j = max(20, min(2 * outputs_of(form, values), 64)) + (5 if width == 1 else 4)
            k = pass_of(form, values) + 37
            product = Product(narrow - 1, j, k, b_layout="column" if form == "along" else "row", beta=0.5)
            if number % 2:
                product = Product(j, narrow - 1, k, a_layout="row" if form == "along" else "column", alpha=-1.5)
            yield pytest.param(
                *(product, tile, 1 if number % 3 else 3),
                marks=pytest.mark.slow if (number % 2 if narrow == max(NARROW) else number % 3 != 1) else (),
                id=f"{form}-{width}-{narrow}-{number}",
            )


@pytest.mark.parametrize(("product", "tile", "parts"), list(form_products()))
def test_every_form(product, tile, parts):
    _, _, config = run(THIN, product, config=lambda problem: config_of(problem, tile, parts))
    assert config in shipped_configs() or dict(config)["parts"] == parts


def awkward_products():
    for a_layout, b_layout in LAYOUTS:
        yield Product(4, 68, 68, a_layout, b_layout, pad=4, alpha=-1.5, beta=0.75)
        yield Product(68, 4, 68, a_layout, b_layout, pad=4, alpha=0.5, beta=-2.0)
        yield Product(3, 33, 101, a_layout, b_layout, skew=1, beta=1.0)
        yield Product(2, 36, 28, a_layout, b_layout, batch=3, alpha=2.0)
        yield Product(36, 2, 28, a_layout, b_layout, batch=3, shared="A", beta=1.0)
        yield Product(4, 24, 40, a_layout, b_layout, backwards=True, inputs="integer")
    yield Product(24, 4, 67, inputs="integer")
    yield Product(3, 40, 0, beta=2.0)
    yield Product(40, 3, 0)
    yield Product(2, 2, 1)
    yield Product(3, 2, 1)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("product", list(awkward_products()), ids=str)
def test_products(product, parts):
    run(THIN, product, config=lambda problem: config_of(problem, small_tile(problem), parts))


@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_every_rest_of_a_pass_and_of_a_chunk(k):
    """Passes of 32, chunks of 64 terms; of 8 and 32 across."""
    for product in (Product(20, 3, k, inputs="integer"), Product(3, 20, k, inputs="integer")):
        run(THIN, product, config=lambda problem: config_of(problem, small_tile(problem)))


def test_chunks_are_copied_and_read_without_conflicts():
    """Rows of X 4, 12 or 20 words apart: 8 terms of 4 vectors, and 16-byte loads, each fall into 32 banks."""
    for narrow in NARROW:
        tile = {**ALONG, "lanes": 32, "depth": 128}
        _, report, _ = run(THIN, Product(70, narrow, 256), config=lambda problem, tile=tile: config_of(problem, tile))
        sums = 70 * narrow  # the last lines read a value of each warp's sums
        assert report.counters.shared_load_conflicts <= sums


def test_the_wide_factor_is_read_once():
    k, n = 64, 128
    tile = {**ACROSS, "vector_width": 4}
    _, report, _ = run(THIN, Product(4, n, k), config=lambda problem: config_of(problem, tile))
    blocks = n // outputs_of("across", {**tile, "narrow": 4})
    assert report.counters.global_load_sectors == k * n * 4 // 32 + blocks * 4 * k * 4 // 32


def test_the_same_call_gives_the_same_bits():
    for parts in (1, 3):
        product = Product(9, 70, 230)
        first = run(THIN, product, config=lambda problem, parts=parts: config_of(problem, small_tile(problem), parts))
        again = run(THIN, product, config=lambda problem, parts=parts: config_of(problem, small_tile(problem), parts))
        np.testing.assert_array_equal(first[0], again[0])


def test_an_infinity_at_the_edge_counts_once():
    run(THIN, Product(4, 24, 13, inputs="infinite"))
    run(THIN, Product(24, 4, 13, inputs="infinite"))


def test_other_shapes_are_refused_in_words():
    problem = Problem.packed(17, 18, 4)
    assert "neither M = 17 nor N = 18 is 16" in THIN.unmet(problem, THIN.configs[0])
    with pytest.raises(KernelConstraintError, match="kernel 'v7' can"):
        choose_form(problem, *H200)
    choose_form(Problem.packed(MAX_NARROW, 66, 4), *H200)
    assert "M is 1; that is a product with a vector, which gemv takes" in THIN.unmet(
        Problem.packed(1, 66, 4), THIN.configs[0]
    )
    assert "N is 1" in THIN.unmet(Problem.packed(66, 1, 4), THIN.configs[0])


GOOD = {"form": "along", "narrow": 4, **ALONG}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"narrow": 6}, "narrow = 6 is not 4, 8 or 16"),
        ({"lanes": 64}, "lanes = 64 is not"),
        ({"k_warps": 3}, "4 warps don't share k by groups of 3"),
        ({"depth": 48}, "depth = 48 is not made of passes of 32"),
        ({"warps": 16, "k_warps": 2}, "depth = 64 is not a multiple of the 128 terms"),
        ({"depth": 2048}, "words of shared memory are more than"),
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_in_words(change, rule):
    assert unmet(**GOOD) is None
    assert rule in unmet(**{**GOOD, **change})
    with pytest.raises(ValueError, match="thin: "):
        build(**{**GOOD, **change})


def test_every_shipped_form_keeps_the_rules():
    assert all(unmet(**dict(config)) is None for config in shipped_configs())
    assert len(set(shipped_configs())) == sum(map(len, TILES.values()))


# --- the choice


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 100, 50), ("across", 4, 4)),
        ((5, 101, 50), ("across", 1, 8)),
        ((16, 100, 50), ("across", 4, 16)),
        ((100, 2, 50), ("along", 1, 4)),
        ((101, 8, 50), ("along", 1, 8)),
        ((100, 9, 50), ("along", 1, 16)),
    ],
    ids=str,
)
def test_layout_alignment_and_narrow_side_decide_the_kind(shape, kind):
    problem = Problem.packed(*shape)
    assert tiles_of(problem) is TILES[kind]
    assert narrow_of(problem) == kind[2]


def test_parts_of_k_fill_the_gpu_and_none_is_empty():
    problem = Problem.packed(60, 4, 6000)
    for tile in tiles_of(problem):
        counts = part_counts(problem, tile, *H200)
        assert counts[0] == 1
        assert len(counts) > 1
        for count in counts:
            assert -(-problem.k // k_per_part(problem, count)) == count
    full = Problem.packed(8192, 2, 4000)  # 1024 blocks of 8 rows, of which the GPU holds 1056
    assert part_counts(full, tiles_of(full)[1], *H200) == [1]


def test_the_pick_costs_the_least_and_is_the_first_candidate():
    for shape in ((3, 400, 900), (7, 401, 6000), (2500, 4, 150), (60, 13, 6000)):
        problem = Problem.packed(*shape)
        every = choices(problem, *H200)
        assert every[0].cycles == min(choice.cycles for choice in every)
        found = candidates(problem, *H200)
        assert found[0] == choose_form(problem, *H200) == config_of(problem, every[0].tile, every[0].parts)
        assert len(set(found)) == len(found)


def test_the_model_knows_what_costs():
    """More bytes, a second launch, and a batch cost more; no product less than reading its bytes."""

    def cost(problem, tile, parts=1):
        return cycles(problem, tile, parts, *H200)

    problem, small = Problem.packed(8000, 4, 6000), Problem.packed(60, 4, 100)
    shallower, smaller = Problem.packed(8000, 4, 3000), Problem.packed(4000, 4, 3000)
    many = replace(small, batch=5000, batch_stride_a=6000, batch_stride_b=400, batch_stride_c=240)
    for tile in tiles_of(problem):
        assert cost(problem, tile) > cost(shallower, tile) >= cost(smaller, tile)
        assert cost(problem, tile) >= problem.bytes_moved / (132 * thin_choose.COSTS.dram)
        assert cost(small, tile, 2) > cost(small, tile)  # the second launch
        assert cost(many, tile) > 5 * cost(small, tile)


# --- what it compiles to


def compiled_forms():
    """Every form for every architecture; by default half of those for 16 vectors, which need most, for one."""
    numbers = [number for tiles in TILES.values() for number in range(len(tiles))]
    for arch in ((8, 0), (9, 0), (12, 0)):
        for number, config in zip(numbers, shipped_configs(), strict=True):
            slow = arch != (9, 0) or dict(config)["narrow"] < max(NARROW) or number % 2
            name = "-".join(str(value) for _, value in config)
            yield pytest.param(config, arch, marks=pytest.mark.slow if slow else (), id=f"{arch}-{name}")


@pytest.mark.parametrize(("config", "arch"), list(compiled_forms()))
def test_no_form_spills(config, arch):
    resources = compile_kernel(THIN, config, arch).resources
    assert not resources.uses_local_memory
    geometry = THIN.geometry(config)
    assert resources.registers * geometry.threads * dict(config)["blocks_per_sm"] <= 65536


def test_the_second_launch_does_not_spill():
    assert not compile_kernel(THIN_SUM, (), (9, 0)).resources.uses_local_memory
