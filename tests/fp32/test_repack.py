"""Strided copies on the emulator: every form, stacks and strides of any sign; no hazard, no conflict, no spill."""

from __future__ import annotations

import itertools
import re
from itertools import product

import numpy as np
import pytest
from emulated_views import fetch, place

from numba_gemm.abi import PARAMETERS
from numba_gemm.compile import compile_kernel
from numba_gemm.emulator import Machine, SharedMemoryRace
from numba_gemm.fp32 import repack
from numba_gemm.fp32.repack import TILE, copies, form
from numba_gemm.spec import MAX_GRID_Z, describe_config

ARCHS = [(8, 0), (9, 0), (12, 0)]
FORMS = [(spec, config) for specs in (repack.SPECS, repack.PAIRS) for spec in specs.values() for config in spec.configs]
UNTOUCHED = 0xABCD


def run(source, target, change=lambda text: text):
    """Copy on the emulator; returns the launches and their reports."""
    machine = Machine("sm_90")
    strides = [tuple(stride // x.itemsize for stride in x.strides) for x in (source, target)]
    _, s = place(machine, source)
    base_address, t = place(machine, target)
    made = copies(source.itemsize, source.shape, s, strides[0], t, strides[1])
    reports = []
    for copy in made:
        text = change(compile_kernel(copy.spec, copy.config, (9, 0)).ptx)
        parameters = PARAMETERS[copy.spec.abi].pack(*copy.values)
        reports.append(machine.launch(text, copy.grid, copy.threads, parameters))
    fetch(machine, base_address, target)
    return made, reports


def numbers(shape, dtype):
    return np.random.default_rng(list(shape)).integers(0, 2**16, shape).astype(dtype)


def columns_first(shape, dtype, pad=0):
    """A view whose next to last axis is the closest in memory."""
    *batch, rows, columns = shape
    return np.swapaxes(numbers((*batch, columns, rows + pad), dtype)[..., :rows], -1, -2)


VIEWS = {
    "packed": numbers,
    "padded": lambda x, d: numbers((*x[:-1], x[-1] + 8), d)[..., : x[-1]],
    "odd": lambda x, d: numbers((*x[:-1], x[-1] + 3), d)[..., 1 : x[-1] + 1],
    "transposed": columns_first,
    "transposed and padded": lambda x, d: columns_first(x, d, 5),
    "transposed and reversed": lambda x, d: columns_first(x, d)[..., ::-1, ::-1],
    "stepped": lambda x, d: numbers((*x[:-1], 2 * x[-1]), d)[..., ::2],
    "reversed": lambda x, d: numbers(x, d)[..., ::-1, ::-1],
    "batch closest": lambda x, d: np.moveaxis(numbers((*x[1:], x[0]), d), -1, 0),
    "batch between": lambda x, d: np.moveaxis(numbers((x[1], x[0], *x[2:]), d), 1, 0),
    "one for all": lambda x, d: np.broadcast_to(numbers(x[-2:], d), x),
    "a row for all": lambda x, d: np.broadcast_to(numbers((1, x[-1]), d), x),
    "a column for all": lambda x, d: np.broadcast_to(numbers((x[-2], 1), d), x),
}


@pytest.mark.parametrize("dtype", ["u2", "u4"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_copied_and_nothing_else_is_written(view, dtype):
    shapes = ((1, 1), (3, 5), (64, 64), (67, 130), (1, 200), (200, 1), (9, 8))
    for shape, pad, batch in product(shapes, (0, 3, 8), (1, 17)):
        full = (batch, *shape)
        source = VIEWS[view](full, dtype)
        target = np.full((*full[:-1], full[-1] + pad), UNTOUCHED, dtype)
        made, _ = run(source, target[..., : full[-1]])
        np.testing.assert_array_equal(target[..., : full[-1]], source, f"{full} {pad}")
        assert len(made) == 1
        assert (target[..., full[-1] :] == UNTOUCHED).all()


def launch(machine, copy):
    text = compile_kernel(copy.spec, copy.config, (9, 0)).ptx
    return machine.launch(text, copy.grid, copy.threads, PARAMETERS[copy.spec.abi].pack(*copy.values), overlaps=True)


def filling(machine, source):
    """A copy into rows that are filled up, and what reads its target: all of it, whose rest must be zeros."""
    size = source.itemsize
    padded = -(-source.shape[-1] * size // 32) * 32 // size  # more than the 16 bytes that are filled
    target = machine.alloc(int(np.prod(source.shape[:-1])) * padded * size)
    strides = [stride // size for stride in source.strides]
    (copy,) = copies(
        size,
        source.shape,
        place(machine, source)[1],
        strides,
        target,
        (padded * source.shape[-2], padded, 1),
        filled=True,
    )

    def check():
        filled = -(-source.shape[-1] * size // 16) * 16 // size
        shape, steps = (*source.shape[:-1], filled), (padded * source.shape[-2] * size, padded * size, size)
        found, known = machine.memory.strided(target, source.dtype, shape, steps)
        np.testing.assert_array_equal(found[..., : source.shape[-1]], source)
        assert (found[..., source.shape[-1] :] == 0).all()
        assert known.all()
        if padded > filled:  # nothing is written past the 16 bytes
            rest = (*shape[:-1], padded - filled)
            assert not machine.memory.strided(target + filled * size, source.dtype, rest, steps)[1].any()

    return copy, check


@pytest.mark.parametrize("dtype", ["u2", "u4"])
@pytest.mark.parametrize("view", ["packed", "padded", "odd", "transposed", "reversed", "a row for all"])
def test_rows_are_filled_up_with_zeros(view, dtype):
    for columns in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 67, 255, 257):
        machine = Machine("sm_90")
        copy, check = filling(machine, VIEWS[view]((2, 19, columns), dtype))
        launch(machine, copy)
        check()


def test_odd_rows_are_read_by_words():
    machine = Machine("sm_90")
    source = numbers((64, 1001), "u2")
    copy, check = filling(machine, source[None])
    assert dict(copy.config).get("by_words")
    counters = launch(machine, copy).counters
    check()
    assert counters.global_store_sectors == 64 * 1008 * 2 // 32
    # a warp's eight groups of 16 bytes a lane: five words each, and the two ends of rows
    assert counters.global_load_sectors <= 5.5 * source.nbytes / 32


@pytest.mark.parametrize(
    ("dtype", "views"), [("u2", ("odd", "packed")), ("u4", ("transposed", "odd")), ("u4", ("odd", "transposed"))]
)
def test_two_copies_take_one_launch(dtype, views):
    shapes = ((3, 70, 67), (1, 19, 300))
    for first, second in (shapes, shapes[::-1]):
        machine = Machine("sm_90")
        made = [filling(machine, VIEWS[view](shape, dtype)) for view, shape in zip(views, (first, second), strict=True)]
        both = repack.paired(made[0][0], made[1][0])
        assert both.grid == (sum(copy.grid[0] for copy, _ in made), 1, 3)
        launch(machine, both)
        for _, check in made:
            check()


def test_copies_of_another_kind_are_not_paired():
    machine = Machine("sm_90")
    halves, words = (filling(machine, numbers((1, 5, 6), dtype))[0] for dtype in ("u2", "u4"))
    (plain,) = copies(2, (5, 6), 0, (6, 1), 1 << 20, (6, 1))
    assert repack.paired(halves, words) is None
    assert repack.paired(halves, plain) is None


@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_targets_may_lie_in_any_way_too(dtype):
    for shape in ((70, 66), (5, 33), (2, 300)):
        source = numbers(shape, dtype)
        for target in (
            np.zeros(shape[::-1], dtype).T,
            np.zeros((shape[0], 2 * shape[1]), dtype)[:, ::2],
            np.zeros((shape[1], 2 * shape[0]), dtype)[::-1, ::-2].T,
        ):
            run(source, target)
            np.testing.assert_array_equal(target, source)


def test_the_form_follows_the_strides():
    def of(source, target=None):
        target = np.zeros(source.shape, source.dtype) if target is None else target
        return [dict(copy.config) for copy in run(source, target)[0]]

    def expected(**what):
        return [dict(form(4, **what))]

    assert of(VIEWS["padded"]((64, 64), "u4")) == expected(aligned=True)
    assert of(VIEWS["odd"]((64, 64), "u4")) == expected()
    assert of(VIEWS["padded"]((3, 64, 63), "u4"), np.zeros((3, 64, 64), "u4")[..., :63]) == expected()  # 71 apart
    assert of(VIEWS["transposed"]((64, 64), "u4")) == expected(transposed=True)
    assert of(VIEWS["stepped"]((64, 64), "u4")) == expected()
    assert of(VIEWS["reversed"]((64, 64), "u4")) == expected()
    assert of(VIEWS["batch closest"]((64, 5, 64), "u4")) == expected(transposed=True)
    assert of(VIEWS["transposed"]((2, 64), "u4")) == expected()  # lanes along two rows would idle


def test_many_axes_merge_or_take_a_launch_each():
    merging = numbers((2, 3, 4, 5, 6), "u4")
    made, _ = run(merging[..., :5], np.zeros((2, 3, 4, 5, 5), "u4"))
    assert len(made) == 1
    apart = np.broadcast_to(numbers((2, 1, 4, 9, 6), "u4"), (2, 3, 4, 9, 6)).swapaxes(-1, -2)
    target = np.zeros(apart.shape, "u4")
    made, _ = run(apart, target)
    np.testing.assert_array_equal(target, apart)
    assert len(made) == 6


def test_a_stack_past_the_grid_takes_a_second_launch():
    source = VIEWS["transposed"]((2 * MAX_GRID_Z, 8, 9), "u2")
    stride = [s // 2 for s in source.strides]
    made = copies(2, source.shape, 0, stride, 1 << 40, (72, 9, 1))
    assert [copy.grid[2] for copy in made] == [MAX_GRID_Z, MAX_GRID_Z]
    assert made[1].values[:2] == (2 * 72 * MAX_GRID_Z, (1 << 40) + 2 * 72 * MAX_GRID_Z)
    assert copies(4, (3, 0, 5), 0, (1, 1, 1), 0, (1, 1, 1)) == ()


@pytest.mark.parametrize("size", [2, 4])
def test_no_bank_conflicts_and_no_more_sectors_than_needed(size):
    dtype = f"u{size}"
    for view in ("packed", "odd", "transposed"):
        source = VIEWS[view]((TILE, 4 * TILE), dtype)
        target = np.zeros((TILE, 4 * TILE), dtype)
        _, (report,) = run(source, target)
        counters = report.counters
        assert counters.shared_load_conflicts == counters.shared_store_conflicts == 0, view
        least = source.size * size // 32
        assert counters.global_store_sectors == least
        assert counters.global_load_sectors <= least * (1 if view != "odd" else 2)


@pytest.mark.parametrize("size", [2, 4])
def test_the_barrier_closes_a_race(size):
    source = VIEWS["transposed"]((64, 64), f"u{size}")
    with pytest.raises(SharedMemoryRace):
        run(source, np.zeros((64, 64), f"u{size}"), lambda text: re.sub(r"bar(rier)?\.sync[^;]*;", "", text))


def compiled():
    """All forms for sm_90; every fourth for others, and the rest with --slow."""
    for (index, (spec, config)), arch in itertools.product(enumerate(FORMS), ARCHS):
        marks = () if arch == (9, 0) or index % 4 == 0 else pytest.mark.slow
        yield pytest.param(spec, config, arch, marks=marks, id=f"{spec.abi}-{describe_config(config)}-{arch}")


@pytest.mark.parametrize(("spec", "config", "arch"), list(compiled()))
def test_no_spills_and_full_occupancy(spec, config, arch):
    resources = compile_kernel(spec, config, arch).resources
    assert not resources.uses_local_memory
    assert resources.registers <= 64  # four blocks an SM: 16 elements of 1024 threads in flight
