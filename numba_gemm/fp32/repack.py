"""repack: a strided array copied into another at memory speed, whatever the strides of both.

What no kernel multiplies as it lies (a stepped view, misaligned rows) is brought into rows of neighbours by these
kernels first, and an ``out`` that can't be written in place is filled by them afterwards; a whole stack of matrices
by one launch. :func:`copies` says which form, and with which parameters.

Roles        a copy has three axes: *columns*, along which the target's elements are closest; *rows*, along which the
             source's are, where that is another axis; *batch*, which is ctaid.z. Bits are moved, whatever they mean.
straight     source and target are closest along the same axis, and lanes run along it. 32×128 elements a block, 256
             threads, 16 elements a thread, all loaded before the first is stored.
aligned      the same where rows of both begin at multiples of 16 bytes: 16 bytes an access, 32 × 32 groups a block.
by words     the same where those of the target do and have room to be filled up to them: 16-byte stores of what 4-byte
             loads bring, of which every two are shifted together where a row of 16-bit elements begins amid a word.
             16 × 32 groups a block.
transposed   64×64 elements a block, 256 threads, 16 elements a thread, through shared memory: lanes read along rows and
             write along columns. A row of the tile is padded to an odd number of words, so that lanes which walk down a
             column meet 32 banks. 16-bit elements that are neighbours along both read and write share a word.
filled       what is missing to whole 16 bytes at the end of the target's rows is zeros then, in any form.
pair         two copies in one launch, as both factors of a product need: the first blocks have the one.
Overlap      a block waits for the launch before it, and lets the next one start: KernelLaunch.overlaps.
Bound by     device memory: an element is read once and written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32.repack_kernel import (
    ALIGNMENT,
    ROUNDS,
    SPANS,
    STRAIGHT_ROWS,
    THREADS,
    TILE,
    VALUES,
    WORD_ROWS,
    build,
    build_pair,
)
from numba_gemm.spec import MAX_GRID, MAX_GRID_Z, Addresses, Config, Geometry, KernelLaunch, KernelSpec, make_config

MAX_EXTENT = 2**31 - 1

#: Parts of a workspace begin at multiples of this many bytes.
WORKSPACE_ALIGNMENT = 256

#: Below this many elements along the source's closest axis, lanes that ran along it would mostly idle.
FEWEST_ROWS = 8


class Copy(NamedTuple):
    """One launch: the kernel and its form, blocks, threads a block, and the values of its parameters."""

    spec: KernelSpec
    config: Config
    grid: tuple[int, int, int]
    threads: int
    values: tuple[int, ...]

    def launch(self, addresses: Callable[[Addresses], tuple[int, int]]) -> KernelLaunch:
        """The launch where source and target, as :func:`copies` was given them, are so far past two later addresses."""
        source, target, *rest = self.values

        def values(at: Addresses) -> tuple[Any, ...]:
            from_address, to_address = addresses(at)
            return (from_address + source, to_address + target, *rest)

        return KernelLaunch(self.spec, self.config, self.grid, PARAMETERS[self.spec.abi], values)


class Workspace:
    """The workspace of a plan while it is parcelled out to copies and partial sums; ``size`` is in bytes."""

    def __init__(self) -> None:
        self.size = 0

    def reserve(self, nbytes: int) -> int:
        """Room for so many bytes: its offset."""
        begin = -(-self.size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self.size = begin + nbytes
        return begin


def copies(
    itemsize: int,
    shape: Sequence[int],
    source: int,
    source_strides: Sequence[int],
    target: int,
    target_strides: Sequence[int],
    *,
    filled: bool = False,
) -> tuple[Copy, ...]:
    """The launches that copy an array into another.

    One is enough for a matrix, and for a stack of up to 65535 of them whose batch axes merge into one.

    Parameters
    ----------
    itemsize : bytes of an element, 2 or 4.
    shape : of both arrays, any number of axes below 2³¹ each.
    source, target : addresses of their first elements; the arrays may not overlap.
    source_strides, target_strides : in elements; negative and 0 will do for the source, those of the target must keep
        its elements apart.
    filled : whether the target's rows are to be filled up with zeros to whole 16 bytes. They have the room, and
        ``target`` and all strides but that of neighbours, which is 1, are multiples of 16 bytes.

    Returns
    -------
    Launches in any order, none if the array is empty; ``PARAMETERS[copy.spec.abi].pack(*copy.values)`` are a launch's
    parameters.
    """
    if 0 in shape:
        return ()
    given = [_Axis(*axis) for axis in zip(shape, source_strides, target_strides, strict=True)]
    rows_of = [given.pop()] if filled else []  # they stay the columns, be there only one
    axes = _merged([axis for axis in given if axis.extent > 1])
    while len(axes) < 3 - len(rows_of):
        axes.append(_Axis(1, 0, 0))
    columns = rows_of[0] if filled else min(axes, key=lambda axis: (axis.extent == 1, abs(axis.target)))
    if not filled:
        axes.remove(columns)
    near = min(axes, key=lambda axis: (axis.extent < FEWEST_ROWS, not axis.source, abs(axis.source)))
    transposed = near.extent >= FEWEST_ROWS and 0 < abs(near.source) < abs(columns.source)
    rows = near if transposed else max(axes, key=lambda axis: axis.extent)
    axes.remove(rows)
    batch = max(axes, key=lambda axis: axis.extent)
    axes.remove(batch)

    made = []
    width = ALIGNMENT // itemsize
    for index in itertools.product(*(range(axis.extent) for axis in axes)):
        a = source + itemsize * sum(i * axis.source for i, axis in zip(index, axes, strict=True))
        b = target + itemsize * sum(i * axis.target for i, axis in zip(index, axes, strict=True))
        for first in range(0, batch.extent, MAX_GRID_Z):
            begin = a + itemsize * first * batch.source, b + itemsize * first * batch.target
            aligned = (
                columns.source == columns.target == 1
                and not any(x % ALIGNMENT for x in begin)
                and not any(x % width for axis in (rows, batch) for x in (axis.source, axis.target))
            )
            by_words = filled and not transposed and columns.source == 1
            config = form(itemsize, transposed=transposed, aligned=aligned, by_words=by_words, filled=filled)
            spec = SPECS[itemsize]
            grid = spec.grid(rows.extent, columns.extent, config), 1, min(MAX_GRID_Z, batch.extent - first)
            strides = (rows.source, columns.source, rows.target, columns.target, batch.source, batch.target)
            made.append(Copy(spec, config, grid, THREADS, (*begin, rows.extent, columns.extent, *strides)))
    return tuple(made)


def in_one(launches: Sequence[KernelLaunch]) -> list[KernelLaunch]:
    """Launches of copies that have nothing to do with one another, two in one where that can be; they overlap."""
    made: list[KernelLaunch] = []
    left = list(launches)
    while left:
        first = left.pop(0)
        both = paired(_copy_of(first), _copy_of(left[0])) if left else None
        if both is None:
            made.append(replace(first, overlaps=True))
            continue
        second = left.pop(0)
        tail = (first.grid[0], first.grid[2], second.grid[2])

        def values(
            at: Addresses,
            first: KernelLaunch = first,
            second: KernelLaunch = second,
            tail: tuple[int, int, int] = tail,
        ) -> tuple[Any, ...]:
            return (*first.values(at), *second.values(at), *tail)

        made.append(KernelLaunch(both.spec, both.config, both.grid, PARAMETERS[both.spec.abi], values, overlaps=True))
    return made


def _copy_of(launch: KernelLaunch) -> Copy:
    return Copy(launch.spec, launch.config, launch.grid, THREADS, ())


def one_by_one(launch: KernelLaunch) -> list[KernelLaunch]:
    """The copies of a launch, one or two, each by a form that fills no rows up: what the twin in CUDA C++ has."""
    given = dict(launch.config)
    itemsize = int(given["bits"]) // 8
    pair = launch.spec.name == PAIRS[itemsize].name
    names = [str(given["first"]), str(given["second"])] if pair else [_form_name(launch.config)]
    all_values = launch.values(Addresses(0, 0, 0))
    counts = all_values[-2:] if pair else (launch.grid[2],)
    made = []
    for index, (name, count) in enumerate(zip(names, counts, strict=True)):
        part = slice(VALUES * index, VALUES * (index + 1))
        config = form(itemsize, transposed=name == "transposed", aligned=name == "aligned")
        spec = SPECS[itemsize]
        rows, columns = all_values[part][2:4]
        grid = spec.grid(rows, columns, config), 1, count

        def values(at: Addresses, part: slice = part) -> tuple[Any, ...]:
            return launch.values(at)[part]

        made.append(KernelLaunch(spec, config, grid, PARAMETERS[spec.abi], values, launch.overlaps))
    return made


class _Axis(NamedTuple):
    """Elements along an axis, and the strides there."""

    extent: int
    source: int
    target: int


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """The same copy with as few axes as it can have, but not fewer than three."""
    axes = sorted(axes, key=lambda axis: abs(axis.target), reverse=True)
    for at in reversed(range(1, len(axes))):
        if len(axes) <= 3:
            break
        outer, inner = axes[at - 1], axes[at]
        apart = (inner.source * inner.extent, inner.target * inner.extent)
        extent = outer.extent * inner.extent
        if (outer.source, outer.target) == apart and extent <= MAX_EXTENT:
            axes[at - 1 : at + 1] = [_Axis(extent, inner.source, inner.target)]
    return axes


def form(
    itemsize: int,
    *,
    transposed: bool = False,
    aligned: bool = False,
    by_words: bool = False,
    filled: bool = False,
) -> Config:
    """The form of a kernel for a copy; ``transposed`` goes before ``aligned``, which doesn't fill rows up."""
    width = ALIGNMENT // itemsize if aligned and not transposed and not filled else 1
    more = {key: 1 for key, value in (("by_words", by_words), ("filled", filled)) if value}
    return make_config(bits=8 * itemsize, transposed=int(transposed), vector_width=width, **more)


def _form_name(config: Config) -> str:
    parameters = dict(config)
    if parameters["transposed"]:
        return "transposed"
    if parameters.get("by_words"):
        return "words"
    return "aligned" if int(parameters["vector_width"]) > 1 else "straight"


def paired(first: Copy, second: Copy) -> Copy | None:
    """Two copies of elements of one size as one launch, or None if only one of them fills rows up."""
    one, other = dict(first.config), dict(second.config)
    filled = one.get("filled", 0)
    blocks = first.grid[0] + second.grid[0]
    if one["bits"] != other["bits"] or filled != other.get("filled", 0) or blocks > MAX_GRID:
        return None
    config = pair_form(int(one["bits"]) // 8, _form_name(first.config), _form_name(second.config), bool(filled))
    counts = first.grid[2], second.grid[2]
    values = (*first.values, *second.values, first.grid[0], *counts)
    return Copy(PAIRS[int(one["bits"]) // 8], config, (blocks, 1, max(counts)), THREADS, values)


def pair_form(itemsize: int, first: str, second: str, filled: bool) -> Config:
    """The form of the kernel that makes two copies at once: "straight", "aligned", "transposed" or "words" each."""
    return make_config(bits=8 * itemsize, first=first, second=second, filled=int(filled))


def _geometry(config: Config) -> Geometry:
    name = _form_name(config)
    width = ALIGNMENT // (int(dict(config)["bits"]) // 8)
    tiles = {
        "transposed": (TILE, TILE, 1),
        "straight": (STRAIGHT_ROWS, 32 * SPANS, 1),
        "aligned": (STRAIGHT_ROWS, 32 * width, 1),
        "words": (WORD_ROWS, 32 * width, 1),
    }
    return Geometry(tiles[name], THREADS)


def _spec(itemsize: int) -> KernelSpec:
    forms = (
        form(itemsize),
        form(itemsize, aligned=True),
        form(itemsize, transposed=True),
        form(itemsize, by_words=True, filled=True),
    )
    return KernelSpec(
        name="repack",
        title="repack",
        idea="any strides to any strides, coalesced both ways",
        block_tile=(TILE, TILE, 1),
        thread_tile=(ROUNDS, TILE // 32),
        threads=THREADS,
        loads_per_fma=None,
        build=build,
        configs=forms,
        abi=f"repack_{8 * itemsize}",
        helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.pointers"),
        geometry_of=_geometry,
    )


def _pair_spec(itemsize: int) -> KernelSpec:
    pairs = [("words", "words")] + [("transposed", "words"), ("transposed", "transposed")] * (itemsize == 4)
    return KernelSpec(
        name="repack_pair",
        title="repack two",
        idea="two copies in one launch",
        block_tile=(TILE, TILE, 1),
        thread_tile=(ROUNDS, TILE // 32),
        threads=THREADS,
        loads_per_fma=None,
        build=build_pair,
        configs=tuple(pair_form(itemsize, first, second, True) for first, second in pairs),
        abi=f"repack_pair_{8 * itemsize}",
        helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.pointers"),
    )


#: Bytes of an element → the kernel that repacks it.
SPECS = {itemsize: _spec(itemsize) for itemsize in (2, 4)}
#: The same → the kernel that makes two copies in one launch.
PAIRS = {itemsize: _pair_spec(itemsize) for itemsize in (2, 4)}
