"""gemv: right at every shape it takes, in every layout, without hazards; what it refuses; what it compiles to."""

from __future__ import annotations

import numpy as np
import pytest
from special_products import Product, run

from numba_gemm.compile import compile_kernel
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.gemv_specs import GEMV, GEMV_SUM, SHORT_ROW, choose_form, config_of, roles, shipped_configs
from numba_gemm.problem import Problem

#: (M or N, K): tiny, odd, whole tiles, one more and one less, several passes.
SIZES = [
    (1, 1),
    (1, 4),
    (3, 1),
    (4, 4),
    (5, 7),
    (32, 64),
    (33, 65),
    (31, 255),
    (129, 100),
    (36, 1028),
    (5, 1103),
    (9, 2051),
]


def vector_products():
    for j, k in SIZES:
        for layout in ("row", "column"):
            yield Product(1, j, k, b_layout=layout)
            yield Product(j, 1, k, a_layout=layout)
    for layout in ("row", "column"):
        for skew, pad in ((0, 4), (1, 0), (0, 3), (2, 5)):
            yield Product(1, 72, 300, b_layout=layout, skew=skew, pad=pad, alpha=-1.5, beta=0.75)
            yield Product(72, 1, 300, a_layout=layout, skew=skew, pad=pad, alpha=0.5, beta=-2.0)
        yield Product(1, 40, 132, b_layout=layout, a_layout="column", pad=3)  # x with a stride
        yield Product(40, 1, 132, a_layout=layout, b_layout="row", pad=4)
        yield Product(1, 24, 520, b_layout=layout, inputs="integer")
        yield Product(24, 1, 520, a_layout=layout, inputs="integer", backwards=True)
        yield Product(1, 20, 96, b_layout=layout, backwards=True)
        yield Product(1, 12, 68, b_layout=layout, batch=3)
        yield Product(12, 1, 68, a_layout=layout, batch=3, shared="A", beta=1.0)
        yield Product(1, 13, 37, b_layout=layout, batch=2, shared="B", skew=1)
        yield Product(1, 16, 0, b_layout=layout, beta=2.0)
        yield Product(16, 1, 0, a_layout=layout)
    yield Product(1, 1, 9000)
    yield Product(1, 1, 4099, a_layout="column", pad=2)


@pytest.mark.parametrize("product", list(vector_products()), ids=str)
def test_products(product):
    run(GEMV, product)


@pytest.mark.parametrize(("k", "width"), [(4, 1), (SHORT_ROW, 1), (SHORT_ROW + 4, 4), (SHORT_ROW + 5, 1)])
def test_short_rows_are_read_a_word_at_a_time(k, width):
    """A matrix that is read across its columns is read 16 bytes at a time at any depth."""
    assert dict(choose_form(Problem.packed(4096, 1, k), 132, (9, 0)))["vector_width"] == width
    assert dict(choose_form(Problem.packed(1, 4096, k), 132, (9, 0)))["vector_width"] == 4


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_any_number_of_parts(layout, parts):
    product = Product(1, 40, 4100, b_layout=layout, batch=2, alpha=2.0, beta=-1.0)
    tile = {"along": {"warps": 4, "k_warps": 2, "rows": 2, "unroll_k": 2, "blocks_per_sm": 1},
            "across": {"warps": 4, "lanes": 4, "unroll_k": 4, "blocks_per_sm": 1}}  # fmt: skip
    run(GEMV, product, config=lambda problem: config_of(problem, parts, tile[roles(problem).form]))


def test_the_same_call_gives_the_same_bits():
    product = Product(1, 33, 4100)
    first, _, config = run(GEMV, product)
    assert dict(config).get("parts", 1) > 1
    np.testing.assert_array_equal(first, run(GEMV, product)[0])


@pytest.mark.parametrize("layout", ["row", "column"])
def test_an_infinity_at_the_edge_counts_once(layout):
    """The guarded pass reads the last place again for what lies outside; Inf times zero would be NaN."""
    run(GEMV, Product(1, 8, 44, b_layout=layout, inputs="infinite"))
    run(GEMV, Product(8, 1, 44, a_layout=layout, inputs="infinite"))


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("vector", ["M", "N"])
def test_loads_are_16_bytes_wide_and_nothing_is_read_twice(vector, layout):
    k, j = 2048, 64
    shape = (1, j, k, "row", layout) if vector == "M" else (j, 1, k, layout, "column")
    _, report, config = run(GEMV, Product(*shape), config=lambda problem: choose_form(problem, 1, (9, 0)))
    assert dict(config)["vector_width"] == 4
    w_sectors = j * k * 4 // 32
    assert w_sectors <= report.counters.global_load_sectors <= 1.6 * w_sectors  # the rest is x
    assert report.counters.shared_load_conflicts == 0


def test_other_shapes_are_refused_in_words():
    problem = Problem.packed(2, 3, 4)
    assert "neither M = 2 nor N = 3" in GEMV.unmet(problem, GEMV.configs[0])
    with pytest.raises(KernelConstraintError, match="kernel 'v7' can"):
        choose_form(problem, 132, (9, 0))


@pytest.mark.parametrize(
    "arch", [*(pytest.param(arch, marks=pytest.mark.slow) for arch in ((7, 5), (8, 0), (12, 0))), (9, 0)], ids=str
)
@pytest.mark.parametrize("config", shipped_configs(), ids=lambda config: "-".join(str(v) for _, v in config))
def test_no_form_spills(config, arch):
    resources = compile_kernel(GEMV, config, arch).resources
    assert not resources.uses_local_memory
    threads = GEMV.geometry(config).threads
    assert resources.registers * threads * dict(config)["blocks_per_sm"] <= 65536


def test_the_sum_does_not_spill():
    assert not compile_kernel(GEMV_SUM, (), (9, 0)).resources.uses_local_memory
