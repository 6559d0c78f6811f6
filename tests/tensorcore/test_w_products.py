"""Products by w1 and w2 through the public call, on the emulator: shapes, layouts, views, batches, split K."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.emulate import DEFAULT_ARCH as HOPPER
from numba_gemm.emulate import run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses
from numba_gemm.tensorcore.w_specs import W2
from numba_gemm.validate import check, reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def drawn(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def multiplied(a, b, kernel, *, c=None, c_dtype=None, alpha=1.0, beta=0.0):
    """The verdict on a product by the emulator; C is poisoned where it isn't read."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    out = np.full(shape, np.nan, c_dtype or a.dtype) if c is None else c
    expected = reference(
        a, b, out.copy() if beta else None, alpha=alpha, beta=beta, c_dtype=out.dtype.name, tensor_core=HOPPER
    )
    if (alpha, beta) == (1.0, 0.0):
        ng.matmul(a, b, out=out, kernel=kernel, device="emulator")
    else:
        ng.gemm(a, b, out, alpha, beta, kernel=kernel, device="emulator")
    return check(out, expected)


SHAPES = [(1, 1, 1), (128, 128, 64), (129, 65, 63), (70, 136, 200), (3, 300, 77), (300, 3, 77), (65, 66, 1)]


@pytest.mark.parametrize("kernel", ["w1", "w2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("types", [("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_products_of_any_shape(kernel, shape, types):
    m, n, k = shape
    dtype, c_dtype = (BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in types)
    verdict = multiplied(drawn((m, k), dtype, 1), drawn((k, n), dtype, 2), kernel, c_dtype=c_dtype)
    assert verdict, verdict.message


@pytest.mark.parametrize("kernel", ["w1", "w2"])
@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [(136, 144, 72), (131, 67, 33), (5, 200, 64)], ids=str)
def test_layouts(kernel, layouts, shape):
    m, n, k = shape
    a = drawn((m, k), np.float16, 3) if layouts[0] == "n" else drawn((k, m), np.float16, 3).T
    b = drawn((k, n), np.float16, 4) if layouts[1] == "n" else drawn((n, k), np.float16, 4).T
    verdict = multiplied(a, b, kernel)
    assert verdict, verdict.message


@pytest.mark.parametrize("kernel", ["w1", "w2"])
@pytest.mark.parametrize("out", ["row", "column", "padded", "odd", "stepped", "reversed"])
@pytest.mark.parametrize("scales", [(1.0, 0.0), (0.5, -2.0)], ids=str)
def test_where_the_result_lies(kernel, out, scales):
    m, n, k = 70, 72, 40
    alpha, beta = scales
    c = {
        "row": lambda: np.zeros((m, n), np.float16),
        "column": lambda: np.zeros((n, m), np.float16).T,
        "padded": lambda: np.zeros((m, n + 8), np.float16)[:, :n],
        "odd": lambda: np.zeros((m + 1, n + 1), np.float16)[1:, 1:],
        "stepped": lambda: np.zeros((m, 2 * n), np.float16)[:, ::2],
        "reversed": lambda: np.zeros((m, n), np.float16)[::-1],
    }[out]()
    c[...] = drawn((m, n), np.float16, 5) if beta else np.nan
    verdict = multiplied(
        drawn((m, k), np.float16, 6), drawn((k, n), np.float16, 7), kernel, c=c, alpha=alpha, beta=beta
    )
    assert verdict, verdict.message


@pytest.mark.parametrize("kernel", ["w1", "w2"])
def test_views_of_any_stride(kernel):
    """A reversed, a stepped and a broadcast factor: each is brought into shape first."""
    base = drawn((80, 96), BFLOAT16, 8)
    right = drawn((48, 40), BFLOAT16, 9)
    for a in (
        base[::-1, :48],
        base[:, ::2],
        base[:, 1:49],
        np.broadcast_to(base[:1, :48], (80, 48)),
        base[::-1, 47::-1],
    ):
        verdict = multiplied(a, right, kernel)
        assert verdict, verdict.message


@pytest.mark.parametrize("kernel", ["w1", "w2"])
@pytest.mark.parametrize("shape", [(40, 72, 64), (33, 35, 37)], ids=str)
def test_batches(kernel, shape):
    m, n, k = shape
    a, b = drawn((3, m, k), np.float16, 10), drawn((3, k, n), np.float16, 11)
    one = np.broadcast_to(a[0], (3, m, k))
    for left, right in ((a, b), (a[::-1], b), (one, b), (a, np.broadcast_to(b[:, :, ::-1][0], (3, k, n)))):
        verdict = multiplied(left, right, kernel)
        assert verdict, verdict.message


@pytest.mark.parametrize("shape", [(64, 64, 1100), (13, 24, 1100), (5, 257, 2049)], ids=str)
@pytest.mark.parametrize("c_dtype", ["bfloat16", "float32"])
def test_a_deep_product_is_split_and_added_in_order(shape, c_dtype):
    """Also one that is computed transposed, whose parts lie as those of any other."""
    m, n, k = shape
    a, b = drawn((m, k), BFLOAT16, 12), drawn((k, n), BFLOAT16, 13)
    kind = BFLOAT16 if c_dtype == "bfloat16" else np.dtype(np.float32)
    verdict = multiplied(a, b, "w2", c_dtype=kind)
    assert verdict, verdict.message
    c = drawn((m, n), kind, 14)
    verdict = multiplied(a, b, "w2", c=c, alpha=-0.5, beta=2.0)
    assert verdict, verdict.message


def forms(problem, wanted):
    """Candidates of a problem for many SMs that are of a kind, one for each tile."""
    found = {}
    for config in W2.candidates(problem, 132, HOPPER):
        parameters = dict(config)
        if wanted(parameters):
            found.setdefault((parameters["block_m"], parameters["block_n"]), config)
    return list(found.values())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("c_dtype", ["float16", "float32"])
@pytest.mark.parametrize("swapped", [False, True], ids=["straight", "swapped"])
def test_split_forms_on_batches(swapped, c_dtype, batch):
    """The parts of each product lie one after the other, row-major, also where its transpose is computed."""
    m, n, k = 5, 75, 600
    kinds = [np.dtype(np.float16)] * 2 + [np.dtype(c_dtype)]
    a, b, c = (drawn((batch, *s), kind, 15) for s, kind in zip(((m, k), (k, 80), (m, n)), kinds, strict=True))
    problem = Problem(
        m, n, k, "float16", k, 80, n, alpha=0.5, beta=-1.0, c_dtype=c_dtype,
        batch=batch, batch_stride_a=m * k, batch_stride_b=k * 80, batch_stride_c=m * n,
    )  # fmt: skip
    expected = reference(a, b[:, :, :n], c, alpha=0.5, beta=-1.0, c_dtype=c_dtype, tensor_core=HOPPER)
    chosen = forms(problem, lambda p: p.get("splits", 1) > 1 and bool(p.get("swapped")) == swapped)
    assert chosen
    for config in chosen[:2]:
        machine = Machine("sm_90")
        at = Addresses(machine.place(a), machine.place(b), machine.place(c))
        run_form(machine, problem, W2, config, at)
        out = np.full_like(c, np.nan)
        machine.fetch(at.c, out)
        verdict = check(out, expected)
        assert verdict, f"{dict(config)}: {verdict.message}"


@pytest.mark.parametrize("shape", [(24, 264, 136), (150, 264, 136)], ids=str)
def test_every_kind_of_form(shape):
    """Clusters either way, ping-pong, forms computed transposed: the same bits, as no sum is split."""
    m, n, k = shape
    a, b = drawn((m, k), BFLOAT16, 16), drawn((k, n), BFLOAT16, 17)
    problem = Problem.packed(m, n, k, dtype="bfloat16")
    chosen = {}
    for config in W2.candidates(problem, 132, HOPPER):
        d = dict(config)
        if "splits" not in d:
            chosen.setdefault((d["schedule"], d["cluster_m"], d["cluster_n"], d.get("swapped", 0)), config)
    assert len(chosen) >= 4
    outs = []
    for config in chosen.values():
        machine = Machine("sm_90")
        out = np.full((m, n), np.nan, BFLOAT16)
        at = Addresses(machine.place(a), machine.place(b), machine.place(out, written=False))
        run_form(machine, problem, W2, config, at)
        machine.fetch(at.c, out)
        outs.append(out)
    verdict = check(outs[0], reference(a, b, tensor_core=HOPPER))
    assert verdict, verdict.message
    for out, config in zip(outs, chosen.values(), strict=True):
        assert np.array_equal(out.view(np.uint16), outs[0].view(np.uint16)), dict(config)
