"""Which form of v8, whether K is split, and whether a misaligned factor is copied first: a cost model in SM cycles.

The busiest SM decides. A form computes so many FMAs in a cycle with all its blocks on an SM, fewer with one; a launch
costs a fixed time. What a product costs is

    launch + tiles of an SM · BM·BN·K / rate  [+ parts of split tiles, written and added]  [+ copies of factors]

and at least its bytes over the bandwidth of device memory. The tiles of an SM are those that can't be shared out
evenly: the last wave of tiles costs as much as a full one, unless its tiles are split among all SMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.v8_parameters import VECTOR, V8Parameters
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, make_config


class Shape(NamedTuple):
    """A tile shape that is shipped.

    ``rate`` and ``rate_alone`` are FMAs an SM and cycle (128 are the most) with ``blocks_per_sm`` blocks on it and with
    one. ``staged``: a factor whose k is contiguous goes through registers, 16 bytes a load, if it is aligned.
    """

    parameters: dict[str, int]
    rate: float
    rate_alone: float
    staged: bool


def _shape(numbers: str, *, slices: int, stages: int, parts: int, blocks: int, rate: float, alone: float) -> Shape:
    names = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "thread_m", "thread_n")
    parameters = dict(zip(names, map(int, numbers.split()), strict=True))
    parameters.update(k_slices=slices, stages=stages, parts=parts, blocks_per_sm=blocks)
    return Shape(parameters, rate, alone, staged=parts > 1)


#: Rates from an H200 at 1980 MHz: 4096³ for the first two, 256³ … 1024³ for the others. They were taken before the FMAs
#: of an outer product were put in serpentine order and with A column-major for the first, so what they rank is the
#: shapes; bench/tune_v8.py measures them anew.
SHAPES = (
    _shape("128 128 16 64 64 16 8", slices=1, stages=2, parts=4, blocks=2, rate=104, alone=68),
    _shape("128 128 16 64 32 8 8", slices=1, stages=3, parts=1, blocks=2, rate=99, alone=93),
    _shape("128 64 16 64 32 8 8", slices=2, stages=4, parts=1, blocks=1, rate=86, alone=86),
    _shape("64 64 32 64 32 8 8", slices=4, stages=3, parts=1, blocks=1, rate=82, alone=82),
    _shape("32 64 32 32 64 8 8", slices=8, stages=3, parts=1, blocks=1, rate=66, alone=66),
    _shape("32 32 32 32 32 4 8", slices=4, stages=3, parts=1, blocks=1, rate=64, alone=64),
)

#: A launch with the start and the end of its blocks, in cycles; one more launch behind it on the stream.
LAUNCH, NEXT_LAUNCH = 5000, 4000
#: Bytes an SM and cycle: of device memory, of parts that are written and added up, of copies of a factor.
DRAM_BYTES, PART_BYTES, COPY_BYTES = 16.0, 16.0, 11.0
#: What a rate falls to for each factor that is copied 4 bytes at a time because it is misaligned.
MISALIGNED = 0.87
#: A block's share of split tiles is no fewer stages than this, and must shorten the whole to this share of its time.
SHALLOWEST_SHARE, SPLIT_GAIN = 4, 0.93


@dataclass(frozen=True)
class Choice:
    """A form, the tiles whose k is shared, the blocks that share it, and the factors that are copied first."""

    parameters: V8Parameters
    split_tiles: int = 0
    split_blocks: int = 0
    copied: str = ""
    cycles: float = 0.0

    @property
    def config(self) -> Config:
        """The config of the kernel ``v8``."""
        launch: dict[str, int | str] = {"split_tiles": self.split_tiles, "split_blocks": self.split_blocks}
        return make_config(**dict(self.parameters.config), **launch, copied=self.copied)


def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Choice:
    """The cheapest choice by the model.

    Parameters
    ----------
    problem : an FP32 product, in any layout and alignment.
    sm_count : SMs of the GPU.
    arch : its compute capability.
    """
    return min(choices(problem, sm_count, arch), key=lambda choice: choice.cycles)


def choices(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Choice]:
    """Every choice that the model compares, with its cost."""
    found = []
    for shape, copied in itertools.product(SHAPES, _copies(problem)):
        parameters = parameters_for(shape, problem, copied)
        if parameters is None or not parameters.fits(arch):
            continue
        for tiles, blocks in _splits(parameters, problem, sm_count):
            cycles = _cycles(shape, parameters, problem, sm_count, tiles, blocks, copied)
            found.append(Choice(parameters, tiles, blocks, copied, cycles))
    return found


def parameters_for(shape: Shape, problem: Problem, copied: str = "") -> V8Parameters | None:
    """The form of a shape for a problem; None if there is none. ``copied`` factors lie as the copy does: A in columns,
    B in rows, aligned."""
    values: dict[str, Any] = {**shape.parameters, "c_width": 1 if problem.misaligned("C", VECTOR) else VECTOR}
    for name, side in (("a", "A"), ("b", "B")):
        direct = "column" if name == "a" else "row"
        layout = direct if name in copied else getattr(problem, f"{name}_layout")
        aligned = name in copied or problem.misaligned(side, VECTOR) is None
        wide = aligned and (layout == direct or shape.staged)
        values[f"{name}_layout"], values[f"{name}_width"] = layout, VECTOR if wide else 1
    try:
        return V8Parameters(**values)
    except KernelConstraintError:
        return None


def _copies(problem: Problem) -> list[str]:
    """Sets of factors that may be copied first: misaligned ones, where there is anything to copy."""
    names = [name for name in "ab" if problem.k and problem.misaligned(name.upper(), VECTOR)]
    return ["".join(chosen) for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


def _splits(p: V8Parameters, problem: Problem, sm_count: int) -> Iterator[tuple[int, int]]:
    """(tiles whose k is shared, blocks that share it): none; the last wave's; all, if they don't fill the GPU."""
    yield 0, 0
    tiles, stages = p.tiles(problem.m, problem.n), p.stages_in(problem.k)
    slots = max(1, sm_count // problem.batch)
    shared = tiles if tiles < slots else tiles % slots
    for most in sorted({slots, slots * p.blocks_per_sm}):
        blocks = min(most, shared * stages // SHALLOWEST_SHARE)
        if blocks > shared and shared * stages + blocks * stages < 2**31:
            # every block has its share to the last: none is left without
            per_block = -(-shared * stages // blocks)
            yield shared, -(-shared * stages // per_block)


def _cycles(
    shape: Shape, p: V8Parameters, problem: Problem, sm_count: int, split_tiles: int, split_blocks: int, copied: str
) -> float:
    tile = p.block_m * p.block_n * max(1, problem.k)
    narrow = [side for side, width in (("A", p.a_width), ("B", p.b_width)) if width == 1]
    slow = MISALIGNED ** sum(problem.misaligned(side, VECTOR) is not None for side in narrow)
    whole = -(-(p.tiles(problem.m, problem.n) - split_tiles) * problem.batch // sm_count)
    if split_blocks:
        # Blocks of both kinds are on an SM together to the end, unless there is only one.
        shares = -(-split_blocks * problem.batch // sm_count)
        rate = shape.rate if whole + shares >= p.blocks_per_sm else shape.rate_alone
        per_block = -(-split_tiles * p.stages_in(problem.k) // split_blocks) * p.block_k
        cycles = (whole * tile + shares * p.block_m * p.block_n * per_block) / rate / slow
        parts = 4 * p.block_m * p.block_n * (split_blocks + split_tiles) * problem.batch
        cycles = (cycles + NEXT_LAUNCH + 2 * parts / (PART_BYTES * sm_count)) / SPLIT_GAIN
    else:
        together = whole // p.blocks_per_sm * p.blocks_per_sm
        cycles = tile * (together / shape.rate + (whole - together) / shape.rate_alone) / slow
    cycles = max(cycles, problem.bytes_moved / (DRAM_BYTES * sm_count))
    for name, elements in (("a", problem.m * problem.k), ("b", problem.k * problem.n)):
        if name in copied:
            matrices = problem.batch if getattr(problem, f"batch_stride_{name}") else 1
            cycles += NEXT_LAUNCH + 8 * elements * matrices / (COPY_BYTES * sm_count)
    return LAUNCH + cycles
