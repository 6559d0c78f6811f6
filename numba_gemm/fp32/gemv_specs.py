"""What the rest of the library knows of gemv: which products it takes, in which form, with how many parts of K."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numba_gemm.abi import PARAMETERS
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.gemv import SUM_LANES, SUM_SLICES, WARP, build, build_sum
from numba_gemm.problem import Problem
from numba_gemm.spec import (
    MAX_GRID_Z,
    Addresses,
    Config,
    Geometry,
    KernelLaunch,
    KernelSpec,
    LaunchPlan,
    batch_addresses,
    make_config,
)

#: Tiles by the form and the width of W's loads; the first that fills the GPU in one launch, else the last. Rows of W no
#: longer than ``SHORT_ROW`` are read 4 bytes at a time, aligned or not: one pass of the aligned tile takes 4096 terms
#: of two rows. µs on an H200 by either: 8192×1×64 3.3 and 10.3, 8192×1×508 6.9 and 13.1, 28672×1×1024 31.6 and 43.9,
#: 1000×1×1024 4.1 and 3.7; 28672×1×2048 59.1 and 56.2, 1000×1×2048 6.4 and 4.3.
TILES: dict[tuple[str, int], tuple[dict[str, int], ...]] = {
    ("along", 4): ({"warps": 8, "k_warps": 8, "rows": 2, "unroll_k": 4, "blocks_per_sm": 3},),
    ("along", 1): ({"warps": 8, "k_warps": 4, "rows": 4, "unroll_k": 2, "blocks_per_sm": 3},),
    ("across", 4): (
        {"warps": 16, "lanes": 8, "unroll_k": 8, "blocks_per_sm": 2},
        {"warps": 16, "lanes": 16, "unroll_k": 8, "blocks_per_sm": 2},
    ),
    ("across", 1): ({"warps": 16, "lanes": 16, "unroll_k": 8, "blocks_per_sm": 2},),
}

SHORT_ROW = 1024

#: A part of K is at least so many passes of a block, or splitting costs more than it brings.
SHALLOWEST_PASSES = 2

#: With fewer waves of blocks the last one leaves too much of the GPU idle; splitting K makes so many.
FEWEST_WAVES, SPLIT_WAVES = 5, 6


@dataclass(frozen=True)
class Roles:
    """Which factor is the matrix W and which the vector x, and how they lie (strides in elements)."""

    form: Literal["along", "across"]
    matrix: Literal["A", "B"]
    outputs: int
    ldw: int
    incx: int
    incy: int


def roles(problem: Problem) -> Roles:
    """The roles of the factors; a product of two vectors takes the matrix that is contiguous along K."""
    p = problem
    of_a = Roles(
        "along" if p.a_layout == "row" else "across", "A", p.m, p.lda, p.ldb if p.b_layout == "row" else 1, p.ldc
    )
    of_b = Roles(
        "along" if p.b_layout == "column" else "across", "B", p.n, p.ldb, 1 if p.a_layout == "row" else p.lda, 1
    )
    if p.n != 1:
        return of_b
    if p.m != 1:
        return of_a
    return of_b if of_a.form == "across" and of_b.form == "along" else of_a


def refuses(problem: Problem) -> str | None:
    """Why gemv can't take a product, in words, or None."""
    if problem.m != 1 and problem.n != 1:
        return f"neither M = {problem.m} nor N = {problem.n} is 1"
    return None


def refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form can't take a product that it wasn't chosen for, in words, or None."""
    role, values = roles(problem), dict(config)
    if values["form"] != role.form:
        return f"{role.matrix}, the matrix, isn't read {values['form']}"
    if values.get("x_width") == 4 and not _aligned_vector(problem):
        return "the vector isn't contiguous and aligned"
    return problem.misaligned(role.matrix, 4) if values["vector_width"] == 4 else None


def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    """The form for a product: how W lies decides the form, its alignment the width of the loads.

    A GPU is filled by ``FEWEST_WAVES`` waves of blocks, or by one that gives all SMs but a few a block each. Where the
    outputs alone make fewer, K is split into the fewest parts that make ``SPLIT_WAVES``, with at least
    ``SHALLOWEST_PASSES`` passes in each. ``parts`` is in the config beside what decides the code, as it is only the
    launch's.
    """
    reason = refuses(problem)
    if reason is not None:
        raise KernelConstraintError(f"kernel gemv can't take this product ({reason}); kernel 'v7' can")
    for tile in _tiles(problem):
        if _waves(problem, tile, sm_count) is None:
            return config_of(problem, 1, tile)
    return config_of(problem, parts_for(problem, sm_count), tile)


def parts_for(problem: Problem, sm_count: int) -> int:
    """Parts of K with which the last tile of its kind fills the GPU; see :func:`choose_form`."""
    tile = _tiles(problem)[-1]
    waves = _waves(problem, tile, sm_count)
    if waves is None:
        return 1
    depth = SHALLOWEST_PASSES * pass_of(roles(problem).form, width_of(problem), tile)
    return max(1, min(math.ceil(SPLIT_WAVES / waves), problem.k // depth))


def in_parts(problem: Problem, parts: int) -> Config:
    """The config of a product with the last tile of its kind, K in so many parts."""
    return config_of(problem, parts, _tiles(problem)[-1])


def config_of(problem: Problem, parts: int, tile: dict[str, int]) -> Config:
    """The config of a product with a tile of one's own, K in so many parts."""
    role, width = roles(problem), width_of(problem)
    values: dict[str, Any] = {**tile, "form": role.form, "vector_width": width}
    if role.form == "along":
        values["x_width"] = 4 if width == 4 and _aligned_vector(problem) else 1
    return make_config(**values, **({"parts": parts} if parts > 1 else {}))


def _aligned_vector(problem: Problem) -> bool:
    """Whether the vector can be read 16 bytes at a time."""
    role = roles(problem)
    offset = problem.b_offset if role.matrix == "A" else problem.a_offset
    apart = problem.batch_stride_b if role.matrix == "A" else problem.batch_stride_a
    return role.incx == 1 and offset == 0 and apart % 4 == 0


def width_of(problem: Problem) -> int:
    """Words of the matrix that a thread loads at a time."""
    role = roles(problem)
    short = role.form == "along" and problem.k <= SHORT_ROW
    return 1 if short or problem.misaligned(role.matrix, 4) else 4


def _tiles(problem: Problem) -> tuple[dict[str, int], ...]:
    return TILES[roles(problem).form, width_of(problem)]


def _waves(problem: Problem, tile: dict[str, int], sm_count: int) -> float | None:
    """Waves of blocks that the outputs make with a tile; None if they fill the GPU."""
    role = roles(problem)
    blocks = -(-role.outputs // outputs_of(role.form, width_of(problem), tile)) * problem.batch
    waves = blocks / (sm_count * tile["blocks_per_sm"])
    filled = waves >= FEWEST_WAVES or 0.9 * sm_count <= blocks <= sm_count
    return None if filled else waves


def outputs_of(form: str, width: int, tile: Mapping[str, int]) -> int:
    """Outputs of one block."""
    return tile["warps"] // tile["k_warps"] * tile["rows"] if form == "along" else tile["lanes"] * width


def pass_of(form: str, width: int, tile: Mapping[str, int]) -> int:
    """Terms of K that one block takes per pass."""
    if form == "along":
        return tile["k_warps"] * WARP * width * tile["unroll_k"]
    return tile["warps"] * WARP // tile["lanes"] * tile["unroll_k"]


def k_per_part(problem: Problem, config: Config) -> int:
    """Depth of one part of K: whole passes, the same for all but the last."""
    values: dict[str, Any] = dict(config)
    depth = pass_of(values["form"], values["vector_width"], values)
    parts = int(values.get("parts", 1))
    return max(depth, -(-problem.k // (parts * depth)) * depth)


def _geometry(config: Config) -> Geometry:
    values: dict[str, Any] = dict(config)
    form, width = values["form"], values["vector_width"]
    return Geometry((1, outputs_of(form, width, values), pass_of(form, width, values)), values["warps"] * WARP)


def _plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, role = problem, roles(problem)
    code = tuple(item for item in config if item[0] != "parts")
    depth = k_per_part(problem, config)
    parts = max(1, -(-p.k // depth))
    split = parts > 1
    tiles = -(-role.outputs // spec.geometry(code).block_tile[1])
    if split:
        scalars: tuple[Any, ...] = (role.outputs, p.k, depth, role.ldw, role.incx, 1, 1.0, 0.0)
        y_strides = (parts * role.outputs, role.outputs)
    else:
        scalars = (role.outputs, p.k, depth, role.ldw, role.incx, role.incy, p.alpha, p.beta)
        y_strides = (p.batch_stride_c, 0)
    strides = (p.batch_stride_a, p.batch_stride_b) if role.matrix == "A" else (p.batch_stride_b, p.batch_stride_a)
    workspace_stride = 4 * parts * role.outputs

    def launches(first: int) -> tuple[KernelLaunch, ...]:
        count = min(MAX_GRID_Z, p.batch - first)

        def values(at: Addresses) -> tuple[Any, ...]:
            a, b, c = batch_addresses(problem, at, first)
            factors = (a, b) if role.matrix == "A" else (b, a)
            target = at.workspace + first * workspace_stride if split else c
            return (*factors, target, *scalars, *strides, *y_strides)

        def sum_values(at: Addresses) -> tuple[Any, ...]:
            _, _, c = batch_addresses(problem, at, first)
            source = at.workspace + first * workspace_stride
            return (source, c, role.outputs, parts, role.incy, p.alpha, p.beta, p.batch_stride_c)

        product = KernelLaunch(spec, code, (tiles, parts, count), PARAMETERS["gemv"], values)
        if not split:
            return (product,)
        grid = (-(-role.outputs // SUM_LANES), 1, count)
        return (product, KernelLaunch(GEMV_SUM, (), grid, PARAMETERS["gemv_sum"], sum_values))

    steps = [launches(first) for first in range(0, p.batch, MAX_GRID_Z)]
    return LaunchPlan(
        tuple(one for step in steps for one in step),
        p.batch * workspace_stride if split else 0,
        depth if split else 0,
    )


GEMV_SUM = KernelSpec(
    name="gemv_sum",
    title="sum",
    idea="adds the partial sums of gemv in a fixed order",
    block_tile=(1, SUM_LANES, 1),
    thread_tile=(1, 1),
    threads=SUM_LANES * SUM_SLICES,
    loads_per_fma=None,
    build=build_sum,
    abi="gemv_sum",
)


def shipped_configs() -> tuple[Config, ...]:
    """Every form that :func:`choose_form` can pick, without the number of parts."""
    return tuple(
        make_config(**tile, form=form, vector_width=width, **({"x_width": x_width} if form == "along" else {}))
        for (form, width), tiles in TILES.items()
        for tile in tiles
        for x_width in ((4, 1) if (form, width) == ("along", 4) else (1,))
    )


GEMV = KernelSpec(
    name="gemv",
    title="matrix-vector",
    idea="every thread keeps 16-byte loads in flight, sums meet in a fixed order",
    block_tile=_geometry(shipped_configs()[0]).block_tile,
    thread_tile=(1, 4),
    threads=_geometry(shipped_configs()[0]).threads,
    loads_per_fma=None,
    build=build,
    configs=shipped_configs(),
    abi="gemv",
    batched=True,
    geometry_of=_geometry,
    select=choose_form,
    plan_of=_plan,
    refuses=refuses,
    refuses_form=refuses_form,
)
