"""Which form of v8, whether K is split, and whether a factor is copied first: a cost model in SM cycles.

The busiest SM decides. It has its tiles in rounds, as many at a time as blocks fit on it, and a round costs

    fill + tiles · (k · BM·BN / rate + words + exchange + stores)

``rate`` is FMAs an SM and cycle, fewer where fewer blocks are on it; ``words`` what copies of 4 bytes cost beside them;
``fill`` the wait for the first stages; ``exchange`` the sums of the slices of k. Stores of C are hidden in part, those
of the last tiles not at all, and a tile beyond C's edge stores only what is in C. Then come a launch, parts of split
tiles that are written and added, and copies of factors; the bytes over the bandwidth of device memory are a floor. The
tiles of an SM are those that can't be shared out evenly: the last round costs as much as a full one, unless its tiles
are split among all SMs. A share of split tiles that ends in one and begins in the next has the costs of two.

All numbers were fitted to times on an H200: those in ``tests/data/h200_v8_forms.json``, of the suites by
``bench/tune_v8.py`` and of random shapes by ``bench/chooser.py``, and FP32's in ``h200_tuned_forms.json``. What they
get wrong there is learnt apart, in ``choose_residuals.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.choose_residuals import Candidate, corrected, known
from numba_gemm.fp32.gemv_specs import parts_for
from numba_gemm.fp32.v8_apart import Apart, set_apart
from numba_gemm.fp32.v8_parameters import VECTOR, V8Parameters
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, make_config


class Shape(NamedTuple):
    """A tile shape that is shipped.

    ``rate`` and ``rate_alone`` are FMAs an SM and cycle (128 are the most) with ``blocks_per_sm`` blocks on it and with
    one. ``turned`` and ``narrow`` are cycles by word of a factor that is copied 4 bytes at a time: because it is
    transposed on its way, and because it is misaligned. ``store`` and ``scatter`` are cycles by output that is stored,
    16 bytes and 4 bytes at a time: where K is short, they are most of the time.
    """

    parameters: dict[str, int]
    rate: float
    rate_alone: float
    turned: float
    narrow: float
    store: float
    scatter: float


def _shape(
    tile: str,
    launch: tuple[int, int, int, int],
    *,
    rates: tuple[float, float],
    words: tuple[float, float],
    stores: tuple[float, float],
) -> Shape:
    names = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "thread_m", "thread_n")
    parameters = dict(zip(names, map(int, tile.split()), strict=True))
    parameters.update(zip(("k_slices", "stages", "parts", "blocks_per_sm"), launch, strict=True))
    return Shape(parameters, *rates, *words, *stores)


#: An H200 at 1980 MHz. The first is faster with whole waves of tiles, the second where their number is odd.
SHAPES = (
    _shape("128 128 16 64 64 16 8", (1, 3, 4, 2), rates=(111.3, 52.4), words=(0.010, 0.075), stores=(0.273, 0.349)),
    _shape("128 128 16 64 32 8 8", (1, 3, 1, 2), rates=(107.3, 89.7), words=(0.031, 0.250), stores=(0.169, 0.170)),
    _shape("128 64 16 64 32 8 8", (2, 4, 2, 1), rates=(92.1, 91.8), words=(0.001, 0.008), stores=(0.091, 0.099)),
    _shape("64 64 32 64 32 8 8", (4, 3, 2, 2), rates=(96.7, 95.6), words=(0.010, 0.106), stores=(0.044, 0.257)),
    _shape("32 64 32 32 64 8 8", (8, 4, 1, 2), rates=(91.8, 86.7), words=(0.007, 0.045), stores=(0.207, 0.334)),
    _shape("32 32 32 32 32 4 8", (4, 3, 1, 4), rates=(78.0, 52.3), words=(0.051, 0.024), stores=(0.012, 0.135)),
)

#: A launch, one behind it that adds up parts, one before it that copies factors, the wait for a round's first stages.
LAUNCH, SUM_LAUNCH, COPY_LAUNCH, FILL = 1567, 3152, 3727, 1837
#: Bytes an SM and cycle: of device memory, of parts that are written and added up, of copies of a factor.
DRAM_BYTES, PART_BYTES, COPY_BYTES = 16.0, 16.9, 14.5
#: Bytes of C an SM and cycle.
WRITTEN_BYTES = 8.122
#: Cycles by output and slice of k that is added to another; by slice beyond the first; by word that is copied
#: before the first step of k; by part of a tile that the second launch adds to the others; by tile.
EXCHANGE, MEETING, FIRST_WORD, PIECE, START = 0.141, 3, 0.1223, 1.9, 15
#: Where C is narrower than a tile, several copies of a tile have one source. Words of a row of B (or a column of A)
#: wait for one another in the SM: so many cycles by k and by copy beyond the first. Copies of 16 bytes of all tiles do
#: so at the few lines of the L2 that such a factor has: cycles of the GPU by k and by 4 copies beyond the first, of a
#: tile's first stages, which all tiles want at once, and of the others.
SAME_WORD, SAME_LINE_FIRST, SAME_LINE = 0.628, 1.142, 0.005
#: Stores of tiles before an SM's last ones are hidden by so much of the time that they take; but this part isn't.
HIDDEN, EXPOSED = 0.102, 0.934
#: The 4-byte stores of an SM's last tiles come together: no fewer cycles by output than this, in any form.
LAST_SCATTER = 0.116
#: So much of a second tile's fill, exchange and stores a share costs that ends in one tile and begins in the next.
BOTH = 0.715
#: Shares that fill the GPU end together, and the tiles that follow are put on half of the SMs, two on each: so much
#: more a last, odd tile costs, divided by the square of the number of tiles that had time to even it out.
PAIRED = 0.487
#: The part of a tile by which SMs end apart where each has one share beside whole tiles.
UNEVEN = 0.639
#: What a row or column apart costs beside reading its matrix: launches, and a vector that lies across rows. Products
#: of fewer terms have none.
APART, FEWEST_TERMS_APART = 26_000, 2**31
#: A block's share of split tiles is no fewer stages than this.
SHALLOWEST_SHARE = 4
#: A factor that could be read as it lies is copied only if it is no larger than this: bytes of workspace.
LARGEST_COPY = 2**30


@dataclass(frozen=True)
class Choice:
    """A form, the tiles whose k is shared, the blocks that share it, and the factors that are copied first.

    ``apart`` has "row" or "column" with the parts of K that gemv takes for it, where the last one of C is left to gemv.
    """

    parameters: V8Parameters
    split_tiles: int = 0
    split_blocks: int = 0
    copied: str = ""
    cycles: float = 0.0
    apart: tuple[tuple[str, int], ...] = ()

    @property
    def config(self) -> Config:
        """The config of the kernel ``v8``."""
        launch: dict[str, int | str] = {"split_tiles": self.split_tiles, "split_blocks": self.split_blocks}
        apart = {f"{name}_apart": parts for name, parts in self.apart}
        return make_config(**dict(self.parameters.config), **launch, copied=self.copied, **apart)


@functools.lru_cache(maxsize=1024)
def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Choice:
    """The cheapest choice by the model.

    Parameters
    ----------
    problem : an FP32 product, in any layout and alignment.
    sm_count : SMs of the GPU.
    arch : its compute capability.
    """
    return min(choices(problem, sm_count, arch), key=lambda choice: choice.cycles)


@functools.lru_cache(maxsize=1024)
def choose_together(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Choice:
    """The cheapest choice of those that leave no row or column to gemv."""
    found = choices(problem, sm_count, arch)
    return min((choice for choice in found if not choice.apart), key=lambda choice: choice.cycles)


def choose_in_one_run(problem: Problem, sm_count: int, arch: tuple[int, int]) -> tuple[Choice, float] | None:
    """The cheapest choice of those that add an element's terms in one run, and how many times the cheapest's cost.

    They differ in nothing that rounding depends on: neither blocks nor slices of a stage share K, and gemv has no part
    in it. Nor do they copy factors first, which would be done again for every block of a product. None if no such form
    fits on the GPU.
    """
    found = choices(problem, sm_count, arch)
    alone = [one for one in found if not (one.split_blocks or one.copied or one.apart)]
    in_one_run = [one for one in alone if one.parameters.k_slices == 1]
    if not in_one_run:
        return None
    best = min(in_one_run, key=lambda choice: choice.cycles)
    return best, best.cycles / min(choice.cycles for choice in found)


def choices(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Choice]:
    """Every choice that the model compares, with its cost."""
    found = modelled(problem, sm_count, arch)
    cycles = [one.choice.cycles for one in found]
    if found and known(problem, sm_count, arch):
        cycles = corrected([candidate(one.rest, one.choice) for one in found])
    return [replace(one.choice, cycles=own + one.apart) for own, one in zip(cycles, found, strict=True)]


class Modelled(NamedTuple):
    """A choice with the cycles that the model gives v8's part of it, the product of that part, and gemv's cycles."""

    choice: Choice
    rest: Problem
    apart: float


def modelled(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Modelled]:
    """Every choice, as the model sees it."""
    found = []
    for shape, (row, column) in itertools.product(SHAPES, itertools.product((False, True), repeat=2)):
        if (row and not _worth_apart(problem, problem.m, shape.parameters["block_m"])) or (
            column and not _worth_apart(problem, problem.n, shape.parameters["block_n"])
        ):
            continue
        vectors, rest = set_apart(problem, row=row, column=column)
        apart = tuple((one.name, parts_for(one.problem, sm_count)) for one in vectors)
        for copied in _copies(rest):
            parameters = parameters_for(shape, rest, copied, arch)
            if parameters is None:
                continue
            tile = _Tile(shape, parameters, rest)
            for tiles, blocks in _splits(parameters, rest, sm_count, shape.parameters["blocks_per_sm"]):
                cycles = _cycles(tile, rest, sm_count, tiles, blocks, copied)
                choice = Choice(parameters, tiles, blocks, copied, cycles, apart)
                found.append(Modelled(choice, rest, _apart_cycles(vectors, sm_count)))
    return found


def candidate(problem: Problem, choice: Choice) -> Candidate:
    """What is learnt of errors may depend on of a choice."""
    p = choice.parameters
    return Candidate(
        problem=problem,
        form=_form_of(p),
        block_m=p.block_m,
        block_n=p.block_n,
        wide=(p.a_width > 1, p.b_width > 1, p.c_width > 1),
        copied=choice.copied,
        tiles=p.tiles(problem.m, problem.n),
        stages=p.stages_in(problem.k),
        split_tiles=choice.split_tiles,
        split_blocks=choice.split_blocks,
        cycles=choice.cycles,
    )


@functools.cache
def _form_of(parameters: V8Parameters) -> int:
    """The number of the shape that parameters belong to."""
    tile = ("block_m", "block_n", "thread_m", "k_slices")
    own = [getattr(parameters, name) for name in tile]
    return next(index for index, one in enumerate(SHAPES) if [one.parameters[name] for name in tile] == own)


def _worth_apart(problem: Problem, extent: int, block: int) -> bool:
    """Whether a row or column of C may be left to gemv: it would begin tiles of its own, of a large product."""
    return extent > block and extent % block == 1 and problem.m * problem.n * problem.k >= FEWEST_TERMS_APART


def _apart_cycles(vectors: list[Apart], sm_count: int) -> float:
    return sum(APART + one.problem.bytes_moved / (DRAM_BYTES * sm_count) for one in vectors)


def parameters_for(
    shape: Shape, problem: Problem, copied: str = "", arch: tuple[int, int] = (9, 0)
) -> V8Parameters | None:
    """The form of a shape for a problem; None if there is none that fits on the GPU. ``copied`` factors lie as the copy
    does: A in columns, B in rows, aligned."""
    values: dict[str, Any] = {"c_width": 1 if problem.misaligned("C", VECTOR) else VECTOR}
    for name, side in (("a", "A"), ("b", "B")):
        direct = _DIRECT[name]
        layout = direct if name in copied else getattr(problem, f"{name}_layout")
        aligned = name in copied or problem.misaligned(side, VECTOR) is None
        values[f"{name}_layout"], values[f"{name}_width"] = layout, VECTOR if aligned and layout == direct else 1
    if shape is UNBOUND and arch < UNBOUND_BELOW and values["a_width"] < values["b_width"]:
        values["blocks_per_sm"] = 1
    return _parameters(SHAPES.index(shape), arch, **values)


#: Two blocks of this shape fit on an SM without asking for it if only B is copied 16 bytes at a time, before that
#: compute capability; and the code is faster if the assembler isn't asked: 1024³ in 47.3 µs, not in 48.8.
UNBOUND, UNBOUND_BELOW = SHAPES[3], (10, 0)

#: How a factor lies in global memory if it does as in shared memory, k by k.
_DIRECT = {"a": "column", "b": "row"}


@functools.cache
def _parameters(shape: int, arch: tuple[int, int], **values: Any) -> V8Parameters | None:
    try:
        parameters = V8Parameters(**(SHAPES[shape].parameters | values))
    except KernelConstraintError:
        return None
    return parameters if parameters.fits(arch) else None


def _copies(problem: Problem) -> list[str]:
    """Sets of factors that may be copied first: those that tiles would have to be copied from 4 bytes at a time."""
    names = []
    for name, elements in _elements(problem):
        turned = getattr(problem, f"{name}_layout") != _DIRECT[name] and 4 * elements <= LARGEST_COPY
        if elements and (turned or problem.misaligned(name.upper(), VECTOR)):
            names.append(name)
    return ["".join(chosen) for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


def _elements(problem: Problem) -> Iterator[tuple[str, int]]:
    """How many elements each factor has, in all products of the batch if they differ."""
    for name, elements in (("a", problem.m * problem.k), ("b", problem.k * problem.n)):
        yield name, elements * (problem.batch if getattr(problem, f"batch_stride_{name}") else 1)


def _splits(p: V8Parameters, problem: Problem, sm_count: int, resident: int) -> list[tuple[int, int]]:
    """(tiles whose k is shared, blocks that share it): none; the last wave's; all, if they don't fill the GPU.

    A wave is a tile for each SM or, where an SM holds two blocks, two: then every SM has two of everything.
    """
    found = [(0, 0)]
    tiles, stages = p.tiles(problem.m, problem.n), p.stages_in(problem.k)
    slots = max(1, sm_count // problem.batch)
    full = slots * resident
    for wave, most in dict.fromkeys(((slots, slots), (slots, full), (full, full))):
        shared = tiles if tiles < wave else tiles % wave
        if wave > slots and shared == (tiles if tiles < slots else tiles % slots):
            continue
        blocks = min(most, shared * stages // SHALLOWEST_SHARE)
        if blocks <= shared or shared * stages + blocks * stages >= 2**31:
            continue
        per_block = -(-shared * stages // blocks)
        if per_block < stages:  # shares of whole tiles would be no split
            # every block has its share to the last: none is left without
            found.append((shared, -(-shared * stages // per_block)))
    return list(dict.fromkeys(found))


class _Tile:
    """What a tile of a form costs."""

    def __init__(self, shape: Shape, p: V8Parameters, problem: Problem) -> None:
        self.shape, self.most, self.output = shape, shape.parameters["blocks_per_sm"], p.block_m * p.block_n
        self.tiles, self.stages, self.depth = p.tiles(problem.m, problem.n), p.stages_in(problem.k), p.block_k
        written = 4 * problem.batch * problem.m * problem.n
        self.floor = (problem.bytes_moved - written) / DRAM_BYTES + written / WRITTEN_BYTES
        self.words = self.same = first = lines = 0.0
        for name, extent, size, width, layout in (
            ("a", p.block_m, problem.m, p.a_width, p.a_layout),
            ("b", p.block_n, problem.n, p.b_width, p.b_layout),
        ):
            if width > 1:
                lines += max(0.0, extent / (-(-size // width) * width) - 1) / width
                continue
            direct = layout == _DIRECT[name]
            self.words += extent * (shape.narrow if direct else shape.turned)
            self.same += max(0.0, extent / size - 1) * SAME_WORD if direct else 0.0
            first += extent * FIRST_WORD
        # The copies of the first stages are waited for, those of the others run beside the FMAs.
        self.ahead = (p.stages - 1) * p.block_k
        self.fill = FILL + first * min(self.ahead, self.stages * p.block_k)
        later = max(0, problem.k - self.ahead)
        self.waits = self.tiles * lines * (SAME_LINE_FIRST * min(problem.k, self.ahead) + SAME_LINE * later)
        # Of a tile that is larger than C only that much is stored.
        stored = min(p.block_m, problem.m) * min(p.block_n, problem.n)
        self.stores = stored * (shape.scatter if p.c_width == 1 else shape.store)
        self.last = max(self.stores, stored * LAST_SCATTER) if p.c_width == 1 else self.stores
        self.part = self.output * shape.store
        self.finish = START + (p.k_slices - 1) * (self.output * EXCHANGE + MEETING)

    def steps(self, k: float, blocks: int) -> float:
        """Cycles of a tile's steps of k with so many blocks on the SM."""
        # The second block brings more than the third.
        alone = (self.most / blocks - 1) / (self.most - 1) if blocks < self.most else 0.0
        rate = self.shape.rate + alone * (self.shape.rate_alone - self.shape.rate)
        return k * (self.output / rate + self.same) + max(0.0, k - self.ahead) * self.words

    def rounds(self, tiles: int, k: float, *, parts: bool = False) -> float:
        """Cycles of an SM that has so many tiles, each so deep, or shares of tiles whose parts it stores."""
        full, odd = divmod(tiles, self.most)
        cycles = full * (self.fill + self.most * (self.steps(k, self.most) + self.finish))
        if odd:
            cycles += self.fill + odd * (self.steps(k, odd) + self.finish)
        if not tiles:
            return 0.0
        # The stores of the tiles before the last ones can be hidden.
        stores, of_last = (self.part, self.part) if parts else (self.stores, self.last)
        last = min(odd or self.most, tiles)
        rest = (tiles - last) * stores
        return cycles + last * of_last + max(EXPOSED * rest, rest - HIDDEN * cycles * (tiles - last) / tiles)


def cost(shape: Shape, problem: Problem, sm_count: int, choice: Choice) -> Choice:
    """The choice with the cycles that it takes by the model."""
    apart = dict(choice.apart)
    vectors, rest = set_apart(problem, row="row" in apart, column="column" in apart)
    tile = _Tile(shape, choice.parameters, rest)
    cycles = _cycles(tile, rest, sm_count, choice.split_tiles, choice.split_blocks, choice.copied)
    return replace(choice, cycles=cycles + _apart_cycles(vectors, sm_count))


def _cycles(tile: _Tile, problem: Problem, sm_count: int, split_tiles: int, split_blocks: int, copied: str) -> float:
    stages, batch = tile.stages, problem.batch
    k = stages * tile.depth
    whole = -(-(tile.tiles - split_tiles) * batch // sm_count)
    if split_blocks:
        shares = -(-split_blocks * batch // sm_count)
        stages_of_share = -(-split_tiles * stages // split_blocks)
        share = stages_of_share * tile.depth
        if shares < tile.most:  # they share an SM with whole tiles, to the end
            blocks = min(whole + shares, tile.most)
            cycles = (whole + (UNEVEN if whole else 0)) * tile.steps(k, blocks) + shares * tile.steps(share, blocks)
            cycles += tile.fill * -(-(whole + shares) // tile.most) + (whole + shares) * tile.finish
            cycles += whole * EXPOSED * tile.stores + shares * tile.part
        else:
            cycles = tile.rounds(shares, share, parts=True) + tile.rounds(whole, k)
            if whole % tile.most:
                cycles += PAIRED / whole**2 * tile.steps(k, 1)
        if stages % stages_of_share:  # shares that end in one tile and begin in the next one
            both = -(-split_tiles * batch // sm_count)
            cycles += BOTH * both * (tile.fill + tile.finish + tile.part)
        parts = 4 * tile.output * (split_blocks + split_tiles) * batch
        cycles += SUM_LAUNCH + 2 * parts / (PART_BYTES * sm_count) + PIECE * split_blocks / split_tiles
    else:
        cycles = tile.rounds(whole, k)
    cycles = max(cycles, tile.floor / sm_count)
    if copied:
        elements = sum(count for name, count in _elements(problem) if name in copied)
        cycles += COPY_LAUNCH + 8 * elements / (COPY_BYTES * sm_count)
    return LAUNCH + cycles + tile.waits
