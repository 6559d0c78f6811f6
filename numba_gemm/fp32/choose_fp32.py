"""Which kernel an FP32 product gets by rule: the one that takes the fewest cycles by the models of its costs.

A vector goes to gemv, which reads the other factor once at the speed of memory; but many short columns go to v8. What
has one narrow side is v8's, skinny's or thin's: thin has no tiles, and a few vectors wait for what it reads; skinny's
tiles are as tall as that side, so that the wide factor is read once; v8's have more FMAs for each byte. With a K of 32
or less outer, which has no steps of K, may be faster than all of them. All else is v8's. GPUs before sm_80 have no
asynchronous copies, and get the rungs that don't need them.
"""

from __future__ import annotations

from typing import NamedTuple

from numba_gemm.fp32 import outer_choose, outer_tiles, skinny_specs, thin_choose, thin_tiles, v7_warptile
from numba_gemm.fp32.choose_residuals import Candidate, corrected, known
from numba_gemm.fp32.gemv_specs import GEMV
from numba_gemm.fp32.v8_choose import DRAM_BYTES, SHAPES, choose_form
from numba_gemm.problem import Problem

#: The first compute capability that has asynchronous copies, of which v8, skinny, thin and outer are made.
ASYNC_ARCH = (8, 0)

#: A row vector times a row-major B goes to outer where N is so much and more, by the longest K of each pair; whether
#: accesses of 16 bytes are aligned. Times of gemv and v8 over outer's on an H200: 1.0 to 1.7 inside, and mostly 0.7 to
#: 1.0 outside.
OUTER_ROWS = {
    True: ((8, 1), (12, 256), (16, 2048), (20, 4096)),
    False: ((2, 1), (4, 64), (8, 96), (16, 2048), (20, 4096)),
}
#: And v8's if it is no longer than one stage of v8's tiles: 1×2432×31 2.7 µs by gemv and 2.4 by v8; but 1×1458×29 2.5
#: and 2.7. Of a column vector v8 would copy one word for a whole tile.
FLAT_K, FLAT_OUTPUTS = 32, 2048
#: A column vector is outer's if gemv's blocks of so many rows are more than the SMs, and K no more than that: 1.05 to
#: 1.24 × as fast; 0.8 to 0.95 with fewer rows.
GEMV_ROWS, OUTER_COLUMN_K = 32, 11


class SkinnyCost(NamedTuple):
    """FMAs an SM and cycle with all its blocks on it, and bytes of the wide factor that it reads in a cycle at most."""

    rate: float
    bytes: float


#: By how the wide factor lies and the height of the tile. H200, 28672×8192: 8, 16, 32 and 64 rows in 220, 231, 316 and
#: 603 µs where it is contiguous along its outputs, 8, 32 and 64 in 254, 442 and 722 µs where it is along k. Where
#: memory is the bound, the rate is that of the tile's next neighbour; of 16 rows, from 11×3736×5684 in 40.5 µs.
SKINNY_COSTS = {
    ("across", 8): SkinnyCost(70, 16.2),
    ("across", 16): SkinnyCost(62, 15.6),
    ("across", 32): SkinnyCost(94, DRAM_BYTES),
    ("across", 64): SkinnyCost(100, DRAM_BYTES),
    ("along", 8): SkinnyCost(50, 14.2),
    ("along", 16): SkinnyCost(60, 14.2),
    ("along", 32): SkinnyCost(65, 14.2),
    ("along", 64): SkinnyCost(80, 14.2),
}
#: What is left of that rate as an SM has fewer and fewer blocks on it.
SKINNY_ALONE = 0.5
#: What is left of both where the wide factor is copied 4 bytes at a time.
SKINNY_NARROW = 0.78
#: A launch, and the one that adds pieces of tiles.
SKINNY_LAUNCH, SKINNY_SUM = 2040, 6000
#: Until a run's first stages are there; a piece of a tile in the second launch, which adds them one by one: cycles.
SKINNY_FILL, SKINNY_PIECE = 2000, 600
#: What a warp takes for a copy and for an FMA if it has a quarter of an SM to itself: cycles. A step is no shorter.
WARP_COPY, WARP_FMA = 40, 1.2


def choose_kernel(problem: Problem, sm_count: int, arch: tuple[int, int]) -> str:
    """The name of the kernel for an FP32 product with M, N ≥ 1.

    Parameters
    ----------
    problem : in any layout and alignment; a batch counts as a whole.
    sm_count : SMs of the GPU.
    arch : its compute capability.
    """
    if 1 in (problem.m, problem.n) and arch >= GEMV.min_arch:
        return _for_vector(problem, sm_count) if arch >= ASYNC_ARCH else "gemv"
    if arch < ASYNC_ARCH:
        return _without_async_copies(problem, sm_count)
    costs = {"v8": choose_form(problem, sm_count, arch).cycles}
    if skinny_specs.refuses(problem) is None:
        costs["skinny"] = corrected_skinny(problem, sm_count, arch)
    if thin_tiles.refuses(problem) is None:
        costs["thin"] = thin_choose.choices(problem, sm_count, arch)[0].cycles
    if outer_tiles.refuses(problem) is None:
        costs["outer"] = outer_choose.choices(problem, sm_count, arch)[0].cycles
    return min(costs, key=costs.__getitem__)


def _for_vector(problem: Problem, sm_count: int) -> str:
    """The kernel for a product with a vector: gemv, where the other factor doesn't have many outputs of a few terms."""
    m, n, k = problem.m, problem.n, problem.k
    if m == 1 and problem.b_layout == "row":
        least = next((least for longest, least in OUTER_ROWS[outer_tiles.by_16_bytes(problem)] if k <= longest), None)
        if least is not None and n >= least and problem.batch == 1:
            return "outer"
        return "v8" if k <= FLAT_K and n >= FLAT_OUTPUTS else "gemv"
    if n == 1 and problem.a_layout == "row" and problem.batch == 1:
        return "outer" if m > GEMV_ROWS * sm_count and k <= OUTER_COLUMN_K else "gemv"
    return "gemv"


def corrected_skinny(problem: Problem, sm_count: int, arch: tuple[int, int]) -> float:
    """The same as :func:`skinny_cycles`, times what is known of its error."""
    cycles = skinny_cycles(problem, sm_count, arch)
    if known(problem, sm_count, arch):
        (cycles,) = corrected([skinny_candidate(problem, sm_count, arch, cycles)])
    return cycles


def skinny_cycles(problem: Problem, sm_count: int, arch: tuple[int, int]) -> float:
    """What skinny takes for a product that it doesn't refuse, in SM cycles.

    Its runs are of equal length, so each SM has as many as there are runs for it. A step of all of them takes as long
    as their FMAs; with few warps on the SM, as long as a warp needs for its copies and FMAs, one behind the other. The
    bytes of the product over the bandwidth of memory are a floor.
    """
    role, tile = skinny_specs.roles(problem), skinny_specs.tile_of(problem)
    cost = SKINNY_COSTS[role.form, tile["block_i"]]
    narrow = problem.misaligned(role.wide, 4) is not None
    slowed = SKINNY_NARROW if narrow else 1.0
    runs, steps = skinny_specs.runs(problem, tile, sm_count, arch), skinny_specs.steps_of(problem, tile)
    of_an_sm, resident = -(-runs * problem.batch // sm_count), skinny_specs.resident_blocks(problem, tile, arch)
    rate = cost.rate * (SKINNY_ALONE + (1 - SKINNY_ALONE) * min(1.0, of_an_sm / resident)) * slowed
    outputs, per_thread = tile["block_i"] * tile["block_j"], tile["thread_i"] * tile["thread_j"]
    width = 1 if narrow or tile["turned"] else 4
    copies = (tile["block_j"] / width + tile["block_i"]) * per_thread / outputs  # of a warp, by k
    of_a_warp = (WARP_COPY * copies + WARP_FMA * per_thread) * -(-of_an_sm // resident)
    step = tile["depth"] * max(of_a_warp, of_an_sm * outputs / rate)
    compute = SKINNY_FILL + -(-steps // runs) * step
    cycles = SKINNY_LAUNCH + max(compute, problem.bytes_moved / (cost.bytes * slowed * sm_count))
    tiles = steps // max(1, -(-problem.k // tile["depth"]))
    return cycles if tiles % runs == 0 else cycles + SKINNY_SUM + SKINNY_PIECE * -(-runs // tiles)


def skinny_candidate(problem: Problem, sm_count: int, arch: tuple[int, int], cycles: float) -> Candidate:
    """What is learnt of errors may depend on of skinny's form for a product."""
    role, tile = skinny_specs.roles(problem), skinny_specs.tile_of(problem)
    stages = max(1, -(-problem.k // tile["depth"]))
    tiles = skinny_specs.steps_of(problem, tile) // stages
    return Candidate(
        problem=problem,
        form=len(SHAPES) + (role.form == "along"),
        block_m=0,
        block_n=0,
        wide=(False, problem.misaligned(role.wide, 4) is None, False),
        copied="",
        tiles=tiles,
        stages=stages,
        split_tiles=tiles,
        split_blocks=skinny_specs.runs(problem, tile, sm_count, arch),
        cycles=cycles,
    )


def _without_async_copies(problem: Problem, sm_count: int) -> str:
    """The warp-tiled kernel where its tiles fill the GPU; below that, smaller tiles or more threads a tile.

    The limits are where the rungs' times cross on an H200: at 1024³ (64 tiles of 128×128 for 132 SMs) v6 leads, at 512³
    (16 tiles) v3 does, whose 32×32 tiles reach every SM. It reads rows only, and making them costs more than it brings.
    """
    tiles = v7_warptile.SPEC.grid(problem.m, problem.n) * problem.batch
    if tiles >= sm_count:
        return "v7"
    return "v6" if 6 * tiles >= sm_count or not problem.is_row_major else "v3"
