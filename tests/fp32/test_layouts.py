"""v6 and v7 on the emulator: all four layouts, stacks, strides of any sign; no hazard, no spill, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_views import fetch, place
from ladder_forms import forms

from numba_gemm.catalog import LADDER
from numba_gemm.compile import compile_kernel
from numba_gemm.compile.cuda_source import supported_archs
from numba_gemm.compile.sass import disassemble
from numba_gemm.emulate import run_form
from numba_gemm.emulator import Machine
from numba_gemm.errors import CompileError
from numba_gemm.fallback import FALLBACKS
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Addresses
from numba_gemm.validate import check, reference

KERNELS = ("v6", "v7", "v6-nvcc", "v7-nvcc")
LAYOUTS = [(a, b) for a in ("row", "column") for b in ("row", "column")]
SPECS = {**LADDER, **FALLBACKS}
ARCHS = [(7, 5), (8, 0), (9, 0), (12, 0)]


@pytest.fixture(autouse=True)
def _twins_need_a_compiler(request):
    if request.node.callspec.params["kernel"].endswith("-nvcc"):
        try:
            supported_archs()
        except CompileError as error:
            pytest.skip(str(error))


def stack(matrices, layout, pad=0, start=0):
    """The matrices (batch, rows, columns) as views that lie in a layout, ``pad`` elements between rows or columns.

    ``start`` elements lie before the first; what is between is NaN.
    """
    inner = matrices if layout == "row" else matrices.swapaxes(1, 2)
    count, rows, columns = inner.shape
    base = np.full(start + count * rows * (columns + pad), np.nan, np.float32)
    view = base[start:].reshape(count, rows, columns + pad)[:, :, :columns]
    view[...] = inner
    return view if layout == "row" else view.swapaxes(1, 2)


def multiply(kernel, a, b, c, layouts, *, alpha=1.0, beta=0.0, width=None):
    """C = alpha · A · B + beta · C on stacks of views, by the form that fits; returns its config and the report."""
    spec = SPECS[kernel]
    machine = Machine("sm_90")
    places = [place(machine, x) for x in (a, b, c)]
    closest = [layout == "row" for layout in (*layouts, "row")]
    problem = Problem(
        a.shape[1],
        b.shape[2],
        a.shape[2],
        "float32",
        *(x.strides[1 if row else 2] // 4 for x, row in zip((a, b, c), closest, strict=True)),
        *(at % ALIGNMENT for _, at in places),
        alpha,
        beta,
        a_layout=layouts[0],
        b_layout=layouts[1],
        batch=len(c),
        **{f"batch_stride_{name}": x.strides[0] // 4 for name, x in zip("abc", (a, b, c), strict=True)},
    )
    fitting = [config for config in spec.configs if spec.unmet(problem, config) is None]
    config = next(config for config in fitting if width in (None, dict(config)["vector_width"]))
    report = run_form(machine, problem, spec, config, Addresses(*(at for _, at in places)))
    fetch(machine, places[2][0], c)
    return config, report


def draw(*shape):
    return np.random.default_rng(list(shape)).standard_normal(shape, np.float32)


SHAPES = [(1, 1, 1), (3, 5, 7), (4, 8, 4), (129, 131, 17), (132, 136, 20)]


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layout_shape_width_and_batch_is_right(kernel, layouts):
    used = set()
    for m, n, k in SHAPES:
        for batch in (1, 3):
            a, b, c = draw(batch, m, k), draw(batch, k, n), draw(batch, m, n)
            aligned = not (m % 4 or n % 4 or k % 4)
            for width in (4, 1) if aligned else (1,):
                out = stack(c, "row", 4)
                laid = stack(a, layouts[0], 4), stack(b, layouts[1], 4)
                config, _ = multiply(kernel, *laid, out, layouts, alpha=1.5, beta=-0.5, width=width)
                used.add(config)
                for i in range(batch):
                    verdict = check(out[i], reference(a[i], b[i], c[i], alpha=1.5, beta=-0.5))
                    assert verdict, f"{m}×{n}×{k}, matrix {i} of {batch}, width {width}: {verdict.message}"
                assert np.isnan(out.base.reshape(batch, m, n + 4)[:, :, n:]).all()
    assert {dict(config)["vector_width"] for config in used} == {1, 4}
    assert {(dict(c).get("a_layout", "row"), dict(c).get("b_layout", "row")) for c in used} == {layouts}


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_and_widths_give_the_same_bits(kernel):
    a, b = draw(2, 132, 36), draw(2, 36, 140)
    results = []
    for layouts in LAYOUTS:
        for width in (4, 1):
            c = np.full((2, 132, 140), np.nan, np.float32)
            multiply(kernel, stack(a, layouts[0]), stack(b, layouts[1]), c, layouts, width=width)
            results.append(c.view(np.uint32))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_of_any_sign_and_one_matrix_for_all(kernel, layouts):
    a, b = draw(3, 20, 12), draw(1, 12, 28)
    backwards = (slice(None, None, -1), slice(None, None, -1), slice(None))
    turned = stack(a, layouts[0])
    # Rows (columns) and the stack from the last to the first; the direction of neighbours stays.
    turned = turned[backwards] if layouts[0] == "row" else turned.swapaxes(1, 2)[backwards].swapaxes(1, 2)
    same = np.broadcast_to(stack(b, layouts[1]), (3, 12, 28))
    for width in (4, 1):
        c = np.zeros((3, 40, 28), np.float32)[::-1, ::-2]
        multiply(kernel, turned, same, c, layouts, width=width)
        for i in range(3):
            assert check(c[i], reference(np.ascontiguousarray(turned[i]), b[0]))
        assert (c.base[:, ::2] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_misaligned_stack_takes_the_scalar_form(kernel):
    a, b = draw(2, 8, 8), draw(2, 8, 8)
    for start, apart in ((1, 0), (0, 2)):
        base = np.full(start + 2 * (64 + apart), np.nan, np.float32)
        view = np.lib.stride_tricks.as_strided(base[start:], (2, 8, 8), (4 * (64 + apart), 32, 4))
        view[...] = a
        placed = np.ndarray((2, 8, 8), np.float32, base, 4 * start, (4 * (64 + apart), 32, 4))
        c = np.zeros((2, 8, 8), np.float32)
        config, _ = multiply(kernel, placed, b, c, ("row", "row"))
        assert dict(config)["vector_width"] == 1
        assert check(c[1], reference(a[1], b[1]))


@pytest.mark.parametrize(
    ("kernel", "layouts", "expected"),
    [
        # Passes that the stores of one tile of A and B take beyond the fewest: 8×128 and 16×128 elements. Along, a
        # warp's 16-byte stores lie end to end. Across, its lanes are a column of groups, 2 (v6) or 4 (v7) of which
        # meet in a bank.
        ("v6", ("column", "row"), 0),
        ("v6", ("row", "row"), 32),
        ("v6", ("column", "column"), 32),
        ("v6", ("row", "column"), 64),
        ("v7", ("column", "row"), 0),
        ("v7", ("row", "row"), 192),
        ("v7", ("column", "column"), 192),
        ("v7", ("row", "column"), 384),
    ],
)
def test_bank_conflicts_of_the_copies(kernel, layouts, expected):
    a, b = draw(1, 128, 16), draw(1, 16, 128)
    steps = 16 // LADDER[kernel].block_tile[2]
    c = np.zeros((1, 128, 128), np.float32)
    _, report = multiply(kernel, stack(a, layouts[0]), stack(b, layouts[1]), c, layouts)
    assert report.counters.shared_store_conflicts == steps * expected


@pytest.mark.parametrize(("kernel", "config", "arch"), forms(["v6", "v7"], ARCHS))
def test_no_form_spills_and_all_loops_are_alike(kernel, config, arch):
    """Registers: two blocks of v6 an SM, three of v7; the k loop reads shared memory in 16-byte accesses alone."""
    limit = {"v6": 128, "v7": 168}[kernel]
    compiled = compile_kernel(LADDER[kernel], config, arch)
    assert not compiled.resources.uses_local_memory
    assert compiled.resources.registers <= limit
    mix = disassemble(compiled.cubin).mix()
    _, _, depth = LADDER[kernel].block_tile
    fmas, loads = {"v6": (64, 4), "v7": (128, 6)}[kernel]
    assert mix["FFMA"] >= depth * fmas
    assert (mix["LDS.128"], mix["LDS.64"], mix["LDS"]) == (depth * loads, 0, 0)
