"""A batch in one launch of t4: the bits of its products one by one, whatever the strides. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from numba_gemm import spec as spec_module
from numba_gemm.emulate import run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.problem import ITEMSIZE, Problem
from numba_gemm.spec import Addresses
from numba_gemm.tensorcore import specs
from numba_gemm.tensorcore.specs import T4, t4_config
from numba_gemm.tensorcore.t4 import T4Parameters
from numba_gemm.tensorcore.t4_choose import choose_form

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def drawn(shape, dtype, rng):
    return rng.standard_normal(shape).astype(TYPES[dtype])


def element_strides(x):
    return tuple(stride // x.itemsize for stride in x.strides)


def problem_of(a, b, c, layouts, **scales):
    """The problem of three stacks of matrices whose rows, or columns, are contiguous."""
    (batch, m, n), k = c.shape, a.shape[-1]
    found = {}
    for x, array, layout in (("a", a, layouts[0]), ("b", b, layouts[1]), ("c", c, "row")):
        apart, rows, columns = element_strides(array)
        assert (columns if layout == "row" else rows) == 1
        found[f"ld{x}"] = rows if layout == "row" else columns
        found[f"batch_stride_{x}"] = apart
        found[f"{x}_offset"] = array.__array_interface__["data"][0] % 16
    names = {"dtype": a.dtype.name, "c_dtype": c.dtype.name, "a_layout": layouts[0], "b_layout": layouts[1]}
    return Problem(m, n, k, batch=batch, **names, **found, **scales)


def form_of(problem, **changes):
    """A small form that suits a problem's alignment."""
    p = T4Parameters(
        **{
            "dtype": SHORT[problem.dtype],
            "c_dtype": SHORT[problem.c_dtype],
            "block_m": 64,
            "block_n": 64,
            "warp_m": 32,
            "warp_n": 32,
            "stages": 3,
            "a_layout": problem.a_layout,
            "b_layout": problem.b_layout,
            "aligned_a": problem.misaligned("A", 8) is None,
            "aligned_b": problem.misaligned("B", 8) is None,
            **{key: value for key, value in changes.items() if key != "splits"},
        }
    )
    return t4_config(p, changes.get("splits", 1))


def run(problem, config, a, b, c):
    """C of a problem by t4, in a machine of its own."""
    machine = Machine("sm_90")
    at = Addresses(machine.place(a), machine.place(b), machine.place(c, written=problem.beta != 0))
    run_form(machine, problem, T4, config, at)
    before = c.copy()
    machine.fetch(at.c, c)  # which wants C's own strides
    result, c[...] = c.copy(), before
    return result


def assert_same_as_one_by_one(a, b, c, layouts=("row", "row"), scales=None, **changes):
    problem = problem_of(a, b, c, layouts, **(scales or {}))
    config = form_of(problem, **changes)
    together = run(problem, config, a, b, c)
    single = replace(problem, batch=1, batch_stride_a=0, batch_stride_b=0, batch_stride_c=0)
    for i in range(problem.batch):
        alone = run(single, config, a[i], b[i], c[i])
        assert together[i].tobytes() == alone.tobytes(), f"product {i}"
    want = problem.alpha * (a.astype(np.float64) @ b.astype(np.float64))
    if problem.beta:
        want += problem.beta * c.astype(np.float64)
    np.testing.assert_allclose(together.astype(np.float64), want, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("split", [{}, {"split_k": True, "splits": 2}], ids=["whole", "split-K"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("c_dtype", ["", "float32"])
def test_a_packed_batch(dtype, c_dtype, split):
    rng = np.random.default_rng(1)
    a, b = drawn((3, 70, 136), dtype, rng), drawn((3, 136, 72), dtype, rng)
    c = drawn((3, 70, 72), c_dtype or dtype, rng)
    assert_same_as_one_by_one(a, b, c, **split)
    assert_same_as_one_by_one(a, b, c, scales={"alpha": 2.0, "beta": -1.0}, blocks=1, **split)


@pytest.mark.parametrize("split", [{}, {"split_k": True, "splits": 2}], ids=["whole", "split-K"])
def test_an_operand_that_all_products_share(split):
    rng = np.random.default_rng(2)
    one, many = drawn((40, 72), "float16", rng), drawn((3, 72, 64), "float16", rng)
    c = np.zeros((3, 40, 64), np.float16)
    shared = np.broadcast_to(one, (3, 40, 72))
    assert shared.strides[0] == 0
    assert_same_as_one_by_one(shared, many, c, **split)
    other = np.broadcast_to(many[0], (3, 72, 64))
    assert_same_as_one_by_one(shared, other, c, **split)


@pytest.mark.parametrize("split", [{}, {"split_k": True, "splits": 2}], ids=["whole", "split-K"])
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column")], ids="/".join)
@pytest.mark.parametrize("width", [72, 75], ids=["aligned", "unaligned"])
def test_strides_of_any_sign(layouts, width, split):
    """Rows, columns and the batch itself may be walked backwards, and a row may stand for all."""
    rng = np.random.default_rng(3)
    m, k, n, batch = width, width + 64, width, 2

    def stack(rows, columns, layout):
        x = drawn((batch, rows, columns) if layout == "row" else (batch, columns, rows), "bfloat16", rng)
        x = x[::-1, ::-1]
        return x if layout == "row" else x.swapaxes(1, 2)

    a, b = stack(m, k, layouts[0]), stack(k, n, layouts[1])
    c = np.zeros((batch, m, n), np.float32)[:, ::-1]
    assert_same_as_one_by_one(a, b, c, layouts, **split)
    rows = np.broadcast_to(drawn((batch, 1, k), "bfloat16", rng), (batch, m, k))
    if layouts[0] == "row":
        assert rows.strides[1] == 0
        assert_same_as_one_by_one(rows, b, c, layouts, **split)


def test_more_products_than_a_grid_has_z_take_several_launches(monkeypatch):
    monkeypatch.setattr(specs, "MAX_GRID_Z", 2)
    rng = np.random.default_rng(4)
    a, b, c = drawn((5, 8, 64), "float16", rng), drawn((5, 64, 16), "float16", rng), np.zeros((5, 8, 16), np.float16)
    for changes in ({}, {"split_k": True, "splits": 2}):
        problem = problem_of(a, b, c, ("row", "row"))
        plan = T4.plan(problem, form_of(problem, **changes))
        assert [one.grid[2] for one in plan.launches if one.spec is T4] == [2, 2, 1]
        assert_same_as_one_by_one(a, b, c, **changes)
    assert plan.workspace_bytes == 2 * 2 * 8 * 16 * 4, "the parts of two products at a time"


def test_the_limit_is_that_of_a_grid():
    assert specs.MAX_GRID_Z == spec_module.MAX_GRID_Z == 65535
    problem = replace(Problem.packed(8, 16, 64, dtype="float16"), batch=65536, batch_stride_c=128)
    first, second = T4.plan(problem, form_of(problem)).launches
    assert (first.grid[2], second.grid[2]) == (65535, 1)
    at = Addresses(1 << 40, 2 << 40, 3 << 40)
    assert second.values(at)[:3] == (at.a, at.b, at.c + 65535 * 128 * ITEMSIZE["float16"])


def test_a_batch_that_fills_the_gpu_is_not_split():
    """The products of a batch are tiles like any others."""
    common = {"compute_capability": (9, 0), "dtype": "bf16", "c_dtype": "bf16"}
    _, alone = choose_form(128, 128, 8192, 132, **common)
    p, together = choose_form(128, 128, 8192, 132, batch=264, **common)
    assert alone > 1
    assert together == 1
    assert p.blocks * 264 >= 132
