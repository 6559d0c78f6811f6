"""Which of thin's tiles a product gets, and in how many parts of K: a model of what each of them costs."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.choose_residuals import Candidate, corrected, known
from numba_gemm.fp32.skinny_specs import LEAST_SHARED_BYTES, SHARED_BYTES, roles
from numba_gemm.fp32.thin import WARP, outputs_of, pass_of, shared_words
from numba_gemm.fp32.thin_tiles import TILES, Tile, config_of, k_per_part, narrow_of, refuses, tiles_of, width_of
from numba_gemm.problem import Problem
from numba_gemm.spec import Config

#: Parts of K that are considered make blocks for these shares of the GPU, and are at least so deep.
SHARES, SHALLOWEST_PART = (0.5, 1.0), 64
#: Forms that are worth timing cost at most so many times the cheapest.
NEAR = 1.5
#: What the forms are numbered from for the trees that correct the model, behind v8's and skinny's.
FIRST_FORM = 16


class Costs(NamedTuple):
    """What the model knows of an H200, in cycles of an SM, fitted to 2258 shapes: 10% off (standard deviation).

    ``launch``; ``fill`` until a block has its first loads, and for its sums in the end. Instructions of a pass:
    ``other`` than FMAs, ``load`` for a load of W, ``shared_load``; a warp takes ``alone`` for each, a quarter of an SM
    one. ``copy`` of 8 terms of 4 vectors. ``bytes`` that an SM gets from the L2 in a cycle, and from ``dram``.
    ``overlap``: how far these hide one another (the exponent of a norm). The second launch: ``sum``, for 8 parts
    (``sum_parts``), and for 20 bytes of the workspace (``sum_bytes``).
    """

    launch: float = 2207
    fill: float = 634
    other: float = 135
    load: float = 12.1
    shared_load: float = 2
    alone: float = 1.86
    copy: float = 5.5
    bytes: float = 27.7
    dram: float = 16.0
    overlap: float = 1.46
    sum: float = 2418
    sum_parts: float = 116
    sum_bytes: float = 10.6


COSTS = Costs()


class Choice(NamedTuple):
    """A tile, parts of K, and cycles by the model."""

    tile: Tile
    parts: int
    cycles: float


def resident_blocks(form: str, values: Tile, arch: tuple[int, int]) -> int:
    """Blocks that an SM holds at a time."""
    shared = SHARED_BYTES.get(arch, LEAST_SHARED_BYTES)
    return max(1, min(values["blocks_per_sm"], shared // (4 * shared_words(form, values) + 1024)))


def part_counts(problem: Problem, tile: Tile, sm_count: int, arch: tuple[int, int]) -> list[int]:
    """Numbers of parts of K that are worth a look: one, and those that fill the GPU."""
    form = roles(problem).form
    values = {**tile, "narrow": narrow_of(problem)}
    blocks = -(-roles(problem).outputs // outputs_of(form, values)) * problem.batch
    slots = sm_count * resident_blocks(form, values, arch)
    most = problem.k // max(SHALLOWEST_PART, pass_of(form, values))
    counts = [1, *(max(1, min(most, round(share * slots / blocks))) for share in SHARES)]
    return sorted({max(1, -(-problem.k // k_per_part(problem, count))) for count in counts})


def cycles(problem: Problem, tile: Tile, parts: int, sm_count: int, arch: tuple[int, int]) -> float:
    """What a form takes for a product, in SM cycles."""
    role, narrow, costs = roles(problem), narrow_of(problem), COSTS
    form, values = role.form, {**tile, "narrow": narrow}
    along = form == "along"
    depth = min(k_per_part(problem, parts), max(problem.k, 1))
    passes, warps = -(-depth // pass_of(form, values)), tile["warps"]
    per_k = tile["rows"] if along else tile["vector_width"]
    loads = tile["unroll_k"] * (tile["rows"] if along else 1)
    shared_loads = narrow // 4 * tile["unroll_k"]
    wavefronts = shared_loads * (4 if along and tile["lanes"] == WARP else 1)
    instructions = per_k * narrow * tile["unroll_k"] + costs.shared_load * shared_loads + costs.load * loads
    instructions += costs.other
    copies = depth * narrow / WARP * costs.copy
    loaded = WARP * loads * (4 if along else 4 * tile["vector_width"])

    def round_of(blocks: int) -> float:
        """Cycles of so many blocks on an SM."""
        work = blocks * warps * passes
        bounds = (
            passes * instructions * costs.alone,
            work * instructions / 4 + blocks * copies / 4,
            work * wavefronts + blocks * copies,
            work * loaded / costs.bytes,
        )
        return costs.fill + float(sum(bound**costs.overlap for bound in bounds) ** (1 / costs.overlap))

    blocks = -(-role.outputs // outputs_of(form, values)) * parts * problem.batch
    resident = resident_blocks(form, values, arch)
    rounds, rest = divmod(blocks, sm_count * resident)
    compute = (rounds * round_of(resident) if rounds else 0.0) + (round_of(-(-rest // sm_count)) if rest else 0.0)
    total = costs.launch + max(compute, problem.bytes_moved / (costs.dram * sm_count))
    if parts == 1:
        return total
    part_bytes = 4 * parts * role.outputs * role.narrow * problem.batch
    return total + costs.sum + costs.sum_parts * math.ceil(parts / 8) + costs.sum_bytes * part_bytes / (20 * sm_count)


@functools.lru_cache(maxsize=4096)
def choices(problem: Problem, sm_count: int, arch: tuple[int, int]) -> tuple[Choice, ...]:
    """All tiles that take a product, with the parts of K that are worth a look, the cheapest first."""
    found = modelled(problem, sm_count, arch)
    if known(problem, sm_count, arch):
        right = corrected([candidate(problem, choice, sm_count, arch) for choice in found])
        found = [choice._replace(cycles=cycles) for choice, cycles in zip(found, right, strict=True)]
    return tuple(sorted(found, key=lambda choice: choice.cycles))


def modelled(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Choice]:
    """The same in the order of the tiles, with the cycles of the model alone."""
    return [
        Choice(tile, parts, cycles(problem, tile, parts, sm_count, arch))
        for tile in tiles_of(problem)
        for parts in part_counts(problem, tile, sm_count, arch)
    ]


def candidate(problem: Problem, choice: Choice, sm_count: int, arch: tuple[int, int]) -> Candidate:
    """What is learnt of errors may depend on of a form for a product."""
    role, narrow = roles(problem), narrow_of(problem)
    values = {**choice.tile, "narrow": narrow}
    outputs = outputs_of(role.form, values)
    tiles = -(-role.outputs // outputs)
    blocks = tiles * choice.parts
    return Candidate(
        problem=problem,
        form=FIRST_FORM + _first_number(role.form, width_of(problem), narrow) + tiles_of(problem).index(choice.tile),
        block_m=outputs if role.wide == "A" else 0,
        block_n=outputs if role.wide == "B" else 0,
        wide=(False, width_of(problem) == 4, False),
        copied="",
        tiles=tiles,
        stages=max(1, -(-problem.k // pass_of(role.form, values))),
        split_tiles=tiles if choice.parts > 1 else 0,
        split_blocks=blocks if choice.parts > 1 else 0,
        cycles=choice.cycles,
        kind="thin",
        special=(
            blocks / (sm_count * resident_blocks(role.form, values, arch)),
            outputs,
            values["lanes"],
            values["warps"],
            values.get("k_warps", 0),
            values["unroll_k"],
            min(k_per_part(problem, choice.parts), problem.k) / pass_of(role.form, values) % 1,
        ),
    )


@functools.cache
def _first_number(form: str, width: int, narrow: int) -> int:
    """How many tiles come before those of a kind."""
    kinds = list(TILES)
    return sum(len(TILES[kind]) for kind in kinds[: kinds.index((form, width, narrow))])


def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    """The form for a product: the one that takes the fewest cycles by the model."""
    reason = refuses(problem)
    if reason is not None:
        raise KernelConstraintError(f"kernel thin can't take this product ({reason}); kernel 'v7' can")
    best = choices(problem, sm_count, arch)[0]
    return config_of(problem, best.tile, best.parts)


def candidates(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Config]:
    """The forms that are worth timing for a product: those within :data:`NEAR` of the cheapest."""
    found = choices(problem, sm_count, arch)
    near = [choice for choice in found if choice.cycles <= NEAR * found[0].cycles]
    return [config_of(problem, choice.tile, choice.parts) for choice in near]
