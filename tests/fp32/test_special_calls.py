"""The kernels for special shapes through the library's call: views of any strides, stacks, wrong shapes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from special_products import Product, run

import numba_gemm as ng
from numba_gemm.arrange import pointer_slots
from numba_gemm.choose import choose
from numba_gemm.fp32.gemv_specs import GEMV
from numba_gemm.fp32.outer_specs import OUTER
from numba_gemm.fp32.skinny_specs import SKINNY
from numba_gemm.fp32.thin_choose import choose_form
from numba_gemm.fp32.thin_specs import THIN
from numba_gemm.host import engine
from numba_gemm.problem import Problem
from numba_gemm.validate import check, reference

F32 = np.float32


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


CALLS = {
    "row": ("gemv", draw(1, 40), draw(40, 68, seed=1)),
    "column": ("gemv", draw(36, 40), draw(40, 1, seed=1)),
    "vectors": ("gemv", draw(40), draw(40, seed=1)),
    "vector and stack": ("gemv", draw(40), draw(3, 40, 12, seed=1)),
    "odd K": ("gemv", draw(1, 19), draw(19, 4, seed=1)),
    "stepped": ("gemv", draw(21, 24)[:, ::2], draw(12, 2, seed=1)[:, :1]),
    "backwards": ("gemv", draw(21, 12)[::-1, ::-1], draw(12, 1, seed=1)[::-1]),
    "column-major": ("gemv", draw(1, 40), draw(68, 40, seed=1).T),
    "few rows": ("skinny", draw(5, 40), draw(40, 68, seed=1)),
    "few columns": ("skinny", draw(70, 40), draw(40, 3, seed=1)),
    "few rows, odd": ("skinny", draw(7, 19), draw(19, 33, seed=1)),
    "few rows, stepped": ("skinny", draw(8, 24)[:, ::2], draw(12, 36, seed=1)),
    "few vectors": ("thin", draw(5, 40), draw(40, 68, seed=1)),
    "few vectors, columns": ("thin", draw(70, 40), draw(40, 3, seed=1)),
    "few vectors, odd": ("thin", draw(7, 19), draw(19, 33, seed=1)),
    "few vectors, stepped": ("thin", draw(8, 24)[:, ::2], draw(12, 36, seed=1)),
    "short K": ("outer", draw(40, 5), draw(5, 68, seed=1)),
    "short K, columns": ("outer", draw(40, 6), draw(44, 6, seed=1).T),
    "short K, odd": ("outer", draw(37, 9), draw(9, 33, seed=1)),
    "short K, stepped": ("outer", draw(20, 24)[:, ::2], draw(12, 36, seed=1)),
    "short K, stack": ("outer", draw(3, 20, 7), draw(7, 24, seed=1)),
    "few vectors, stack": ("thin", draw(3, 5, 12), draw(12, 20, seed=1)),
    "large": ("v8", draw(70, 45), draw(45, 67, seed=1)),
    "large, transposed": ("v8", draw(44, 72).T, draw(68, 44, seed=1).T),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_right(name):
    kernel, a, b = CALLS[name]
    expected = reference(np.atleast_2d(a), b if b.ndim > 1 else b[:, np.newaxis])
    result = ng.matmul(a, b, kernel=kernel, device="emulator")
    assert np.shape(result) == np.matmul(a, b).shape
    verdict = check(np.reshape(result, expected.value.shape), expected)
    assert verdict, verdict.message


def test_other_shapes_name_a_kernel_that_can():
    for kernel, k in (("gemv", 8), ("skinny", 8), ("thin", 8), ("outer", 33)):
        with pytest.raises(ng.KernelConstraintError, match="kernel 'v7' can"):
            ng.matmul(draw(100, k), draw(k, 100), kernel=kernel, device="emulator")


@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 256, 256), (1, 68, 40), (8, 256, 40)], ids=str)
def test_a_single_launch_is_repeated_by_its_three_addresses_alone(shape):
    """A pointer into a workspace that isn't used would make every repeated call pack its parameters anew."""
    problem = Problem.packed(*shape)
    spec, config = choose(problem, arch=(9, 0), sm_count=132)
    plan = spec.plan(problem, config)
    assert (len(plan.launches), plan.workspace_bytes) == (1, 0), "another shape would test it"
    slots = pointer_slots(plan.launches[0])
    assert slots is not None
    assert sorted(name for name, _ in slots) == ["a", "b", "c"]


#: A product, and blocks of it that take its form, and that don't: the last rows may be fewer than the columns.
BLOCKS = [
    (SKINNY, (1000, 40, 64), [(64, 40, 64), (300, 40, 64)], [((5, 40, 64), "isn't read along")]),
    (SKINNY, (40, 1000, 64), [(40, 64, 64)], [((40, 7, 64), "isn't read across"), ((40, 65, 64), "multiple of 4")]),
    (SKINNY, (6, 1000, 640), [(6, 512, 640)], [((9, 512, 640), "the narrow side, 9"), ((6, 64, 16), "runs")]),
    (THIN, (1000, 8, 64), [(64, 8, 64), (9, 8, 64)], [((5, 8, 64), "isn't read along"), ((64, 1, 64), "gemv")]),
    (THIN, (4, 1000, 64), [(4, 64, 64), (3, 8, 64)], [((4, 6, 64), "multiple of 4"), ((6, 64, 64), "narrow side, 6")]),
    (OUTER, (1000, 100, 5), [(64, 100, 5), (3, 40, 32)], [((64, 99, 5), "multiple of 4"), ((64, 100, 33), "K = 33")]),
    (OUTER, (1000, 99, 5), [(64, 99, 5), (64, 100, 5), (2, 1, 1)], [((64, 99, 40), "K = 40 is more than 32")]),
    (GEMV, (1, 1000, 64), [(1, 64, 64)], [((1, 1, 64), "isn't read across"), ((1, 63, 64), "multiple of 4")]),
    (GEMV, (1000, 1, 2048), [(64, 1, 2048), (1, 1, 2048)], [((64, 1, 2047), "multiple of 4")]),
]


@pytest.mark.parametrize(
    ("spec", "shape", "fitting", "others"), BLOCKS, ids=[f"{spec.name}-{shape}" for spec, shape, _, _ in BLOCKS]
)
def test_a_form_takes_blocks_that_lie_as_the_whole_does_and_refuses_others(spec, shape, fitting, others):
    whole = spec.select(Problem.packed(*shape), 4, (9, 0))
    for block in fitting:
        assert spec.unmet(Problem.packed(*block), whole) is None
        run(spec, Product(*block), config=whole)
    for block, reason in others:
        assert reason in spec.unmet(Problem.packed(*block), whole)


def test_the_blocks_of_a_product_that_its_form_refuses_get_another(monkeypatch):
    monkeypatch.setattr(engine, "prepare_form", lambda problem, spec, config, context: (spec.name, config))
    monkeypatch.setattr(engine, "prepare", lambda problem, kernel, context: kernel)
    whole = SimpleNamespace(spec=THIN, config=choose_form(Problem.packed(1000, 8, 64), 132, (9, 0)))
    context = SimpleNamespace(device=None)

    def form_of(*block):
        return engine.form_for.__wrapped__(Problem.packed(*block), engine.BlockForm(whole), context)

    assert form_of(64, 8, 64) == ("thin", whole.config)
    assert form_of(5, 8, 64) == "thin"  # read the other way
    assert form_of(1, 8, 64) is None  # a vector: whatever kernel suits it
