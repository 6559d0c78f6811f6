"""Which of outer's tiles a product gets: a model of what each of them costs."""

from __future__ import annotations

import functools
from typing import NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.choose_residuals import Candidate, corrected, known
from numba_gemm.fp32.outer import WARP
from numba_gemm.fp32.outer_tiles import TILES, Tile, blocks_of, config_of, refuses, tiles_of
from numba_gemm.problem import Problem
from numba_gemm.spec import Config

#: Forms that are worth timing cost at most so many times the cheapest.
NEAR = 1.5


class Costs(NamedTuple):
    """What the model knows of an H200, in cycles of an SM, fitted to 8500 times: 10% off (standard deviation).

    ``launch``; ``wait`` for each load of B that isn't under way from the start; ``alone`` for an FMA of a warp before
    others hide it. Of a warp, in a quarter of an SM's time: ``shared_load``, ``load``, ``store``. ``bytes`` that an SM
    stores in a cycle. ``overlap``: how far the last two hide one another (the exponent of a norm). ``columns``: what is
    left of all if B's columns are contiguous, from 80 shapes.
    """

    launch: float = 3970
    wait: float = 387
    alone: float = 3.22
    shared_load: float = 3.21
    load: float = 2.91
    store: float = 4.6
    bytes: float = 14.3
    overlap: float = 1.41
    columns: float = 0.9


COSTS = Costs()


class Choice(NamedTuple):
    """A tile, and cycles by the model."""

    tile: Tile
    cycles: float


def cycles(problem: Problem, tile: Tile, sm_count: int, arch: tuple[int, int]) -> float:
    """What a form takes for a product, in SM cycles."""
    costs, rows, columns = COSTS, tile["rows"], tile["columns"]
    by_shared = problem.b_layout == "column"
    passes = -(-problem.k // tile["unroll_k"])
    terms, accesses = passes * tile["unroll_k"], columns // tile["vector_width"]
    blocks = blocks_of(problem, tile) * problem.batch
    rounds = -(-blocks // (sm_count * tile["blocks_per_sm"]))
    waits = 0 if by_shared else max(0, -(-passes // tile["ahead"]) - 1)
    latency = costs.wait * waits + costs.alone * terms * rows * columns
    warp = terms * (costs.shared_load * rows / 4 + costs.load * accesses) + costs.store * rows * accesses
    work = -(-blocks // sm_count) * tile["warps"] * warp
    moved = problem.bytes_moved / (sm_count * costs.bytes)
    both = float((work**costs.overlap + moved**costs.overlap) ** (1 / costs.overlap))
    return (costs.launch + rounds * latency + both) * (costs.columns if by_shared else 1.0)


@functools.lru_cache(maxsize=4096)
def choices(problem: Problem, sm_count: int, arch: tuple[int, int]) -> tuple[Choice, ...]:
    """All tiles that take a product, the cheapest first."""
    found = modelled(problem, sm_count, arch)
    if known(problem, sm_count, arch, vectors=True):
        right = corrected([candidate(problem, choice, sm_count, arch) for choice in found])
        found = [choice._replace(cycles=cycles) for choice, cycles in zip(found, right, strict=True)]
    return tuple(sorted(found, key=lambda choice: choice.cycles))


def modelled(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Choice]:
    """The same in the order of the tiles, with the cycles of the model alone."""
    return [Choice(tile, cycles(problem, tile, sm_count, arch)) for tile in tiles_of(problem)]


def candidate(problem: Problem, choice: Choice, sm_count: int, arch: tuple[int, int]) -> Candidate:
    """What is learnt of errors may depend on of a form for a product."""
    tile = choice.tile
    blocks = blocks_of(problem, tile)
    passes = -(-problem.k // tile["unroll_k"])
    return Candidate(
        problem=problem,
        form=_forms().index((problem.b_layout, tuple(tile.values()))),
        block_m=tile["warps"] * tile["rows"],
        block_n=WARP * tile["columns"],
        wide=(False, tile["vector_width"] == 4, tile["vector_width"] == 4),
        copied="",
        tiles=blocks,
        stages=passes,
        split_tiles=0,
        split_blocks=0,
        cycles=choice.cycles,
        kind="outer",
        special=(
            blocks / (sm_count * tile["blocks_per_sm"]),
            tile["rows"],
            tile["columns"],
            tile["warps"],
            tile["ahead"],
            tile["unroll_k"],
            problem.k / tile["unroll_k"] % 1,
        ),
    )


@functools.cache
def _forms() -> list[tuple[str, tuple[int, ...]]]:
    every = ((layout, tuple(tile.values())) for (layout, _), tiles in TILES.items() for tile in tiles)
    return list(dict.fromkeys(every))


def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    """The form for a product: the one that takes the fewest cycles by the model."""
    reason = refuses(problem)
    if reason is not None:
        raise KernelConstraintError(f"kernel outer can't take this product ({reason}); kernel 'v7' can")
    return config_of(problem, choices(problem, sm_count, arch)[0].tile)


def candidates(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Config]:
    """The forms that are worth timing for a product: those within :data:`NEAR` of the cheapest."""
    found = choices(problem, sm_count, arch)
    near = [choice for choice in found if choice.cycles <= NEAR * found[0].cycles]
    return [config_of(problem, choice.tile) for choice in near]
