"""What the rest of the library knows of thin: which products it takes, in which form, with how many parts of K."""

from __future__ import annotations

from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32.skinny_specs import roles
from numba_gemm.fp32.thin import SUM_LANES, SUM_SLICES, WARP, build, build_sum, outputs_of, pass_of
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

#: The narrow side; a vector is gemv's.
MIN_NARROW, MAX_NARROW = 2, 16
#: Vectors that forms have room for.
NARROW = (4, 8, 16)

Tile = dict[str, int]


def _along(*numbers: int) -> Tile:
    names = ("rows", "lanes", "warps", "k_warps", "unroll_k", "depth", "blocks_per_sm")
    return dict(zip(names, numbers, strict=True))


def _across(*numbers: int) -> Tile:
    names = ("vector_width", "lanes", "warps", "unroll_k", "depth", "blocks_per_sm")
    return dict(zip(names, numbers, strict=True))


#: Tiles by the form, the width of W's loads and the vectors that there is room for.
TILES: dict[tuple[str, int, int], tuple[Tile, ...]] = {
    ("along", 1, 4): (
        _along(2, 8, 4, 1, 2, 64, 8),
        _along(2, 8, 4, 4, 1, 64, 8),
        _along(4, 8, 4, 4, 4, 128, 6),
        _along(4, 8, 8, 8, 4, 256, 3),
        _along(4, 32, 8, 8, 2, 512, 4),
        _along(2, 32, 8, 8, 4, 1024, 4),
        _along(4, 32, 4, 4, 4, 512, 6),
        _along(8, 32, 8, 1, 2, 512, 2),
        _along(2, 32, 8, 1, 1, 512, 4),
    ),
    ("along", 1, 8): (
        _along(4, 8, 4, 4, 1, 64, 6),
        _along(2, 8, 4, 4, 4, 128, 8),
        _along(4, 8, 4, 2, 4, 64, 4),
        _along(2, 32, 8, 8, 2, 512, 4),
        _along(4, 32, 8, 8, 2, 512, 3),
        _along(4, 32, 4, 2, 4, 256, 4),
        _along(4, 32, 4, 1, 4, 256, 4),
        _along(4, 32, 8, 1, 4, 256, 2),
    ),
    ("along", 1, 16): (
        _along(2, 8, 4, 4, 1, 64, 6),
        _along(4, 8, 4, 2, 2, 64, 4),
        _along(2, 32, 8, 8, 1, 256, 3),
        _along(2, 32, 8, 4, 2, 256, 3),
        _along(2, 32, 4, 2, 2, 128, 6),
        _along(4, 32, 4, 2, 4, 256, 4),
        _along(4, 32, 4, 1, 4, 128, 4),
        _along(4, 32, 8, 1, 4, 128, 2),
    ),
    ("across", 4, 4): (
        _across(4, 8, 4, 2, 64, 6),
        _across(4, 4, 8, 4, 512, 3),
        _across(4, 4, 8, 8, 512, 2),
        _across(4, 8, 8, 8, 512, 2),
        _across(4, 16, 8, 4, 512, 3),
    ),
    ("across", 4, 8): (
        _across(4, 8, 4, 2, 64, 4),
        _across(4, 4, 4, 4, 256, 4),
        _across(4, 4, 8, 8, 512, 2),
        _across(4, 8, 4, 4, 256, 4),
        _across(4, 8, 8, 8, 256, 2),
    ),
    ("across", 4, 16): (
        _across(4, 8, 4, 1, 64, 4),
        _across(4, 4, 4, 1, 128, 4),
        _across(4, 4, 4, 2, 128, 4),
        _across(4, 4, 4, 4, 128, 4),
        _across(4, 8, 4, 4, 128, 4),
    ),
    ("across", 1, 4): (
        _across(1, 32, 2, 8, 64, 12),
        _across(1, 32, 4, 4, 128, 6),
        _across(1, 32, 8, 4, 512, 3),
        _across(1, 16, 8, 8, 512, 3),
        _across(1, 8, 8, 4, 512, 3),
        _across(1, 8, 8, 2, 512, 3),
        _across(1, 4, 8, 2, 512, 3),
    ),
    ("across", 1, 8): (
        _across(1, 32, 2, 8, 64, 12),
        _across(1, 32, 4, 4, 128, 6),
        _across(1, 32, 8, 8, 256, 3),
        _across(1, 8, 8, 8, 256, 3),
        _across(1, 8, 4, 2, 256, 6),
        _across(1, 4, 8, 4, 256, 3),
    ),
    ("across", 1, 16): (
        _across(1, 32, 2, 8, 64, 8),
        _across(1, 32, 4, 8, 128, 6),
        _across(1, 32, 8, 8, 128, 3),
        _across(1, 16, 8, 8, 128, 3),
        _across(1, 16, 4, 8, 128, 6),
        _across(1, 8, 4, 2, 128, 6),
        _across(1, 4, 4, 8, 256, 6),
    ),
}


def narrow_of(problem: Problem) -> int:
    """Vectors that the kernel's form has room for."""
    return next(narrow for narrow in NARROW if roles(problem).narrow <= narrow)


def width_of(problem: Problem) -> int:
    """Words of the wide factor that a thread loads at a time."""
    role = roles(problem)
    return 1 if role.form == "along" or problem.misaligned(role.wide, 4) else 4


def tiles_of(problem: Problem) -> tuple[Tile, ...]:
    """The tiles that take a product."""
    return TILES[roles(problem).form, width_of(problem), narrow_of(problem)]


def refuses(problem: Problem) -> str | None:
    """Why thin can't take a product, in words, or None."""
    least = min(problem.m, problem.n)
    if least > MAX_NARROW:
        return f"neither M = {problem.m} nor N = {problem.n} is {MAX_NARROW} or less"
    if least < MIN_NARROW:
        return f"{'M' if problem.m < MIN_NARROW else 'N'} is 1; that is a product with a vector, which gemv takes"
    if problem.k >= 2**31:
        return f"K = {problem.k} is 2³¹ or more"
    return None


def k_per_part(problem: Problem, parts: int) -> int:
    """Depth of one part of K, the same for all but the last: whole lines of a matrix that lies along K."""
    return max(WARP, -(-problem.k // (parts * WARP)) * WARP)


def config_of(problem: Problem, tile: Tile, parts: int = 1) -> Config:
    """The config of a product with a tile, K in so many parts.

    ``parts`` is in the config beside what decides the code, as it is only the launch's.
    """
    return make_config(
        **_code(roles(problem).form, narrow_of(problem), tile), **({"parts": parts} if parts > 1 else {})
    )


def _code(form: str, narrow: int, tile: Tile) -> dict[str, Any]:
    return {**tile, "form": form, "narrow": narrow}


def _geometry(config: Config) -> Geometry:
    values: dict[str, Any] = dict(config)
    form = values["form"]
    tile = (values["narrow"], outputs_of(form, values), pass_of(form, values))
    return Geometry(tile, values["warps"] * WARP)


def _plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, role = problem, roles(problem)
    code = tuple(item for item in config if item[0] != "parts")
    depth = k_per_part(problem, int(dict(config).get("parts", 1)))
    parts = max(1, -(-p.k // depth))
    split = parts > 1
    tiles = -(-role.outputs // spec.geometry(code).block_tile[1])
    outputs = role.outputs * role.narrow
    extents = (role.outputs, role.narrow, p.k, depth)
    if split:
        target: tuple[Any, ...] = (role.outputs, 1, 1.0, 0.0)
        c_apart = (parts * outputs, outputs)
    else:
        target = (role.c_stride_i, role.c_stride_j, p.alpha, p.beta)
        c_apart = (p.batch_stride_c, 0)
    apart = (p.batch_stride_a, p.batch_stride_b) if role.wide == "A" else (p.batch_stride_b, p.batch_stride_a)
    part_bytes = 4 * parts * outputs

    def launches(first: int) -> tuple[KernelLaunch, ...]:
        count = min(MAX_GRID_Z, p.batch - first)

        def values(at: Addresses) -> tuple[Any, ...]:
            a, b, c = batch_addresses(problem, at, first)
            factors = (a, b) if role.wide == "A" else (b, a)
            there = at.workspace + first * part_bytes if split else c
            strides = (role.ldw, role.x_stride_i, role.x_stride_k)
            return (*factors, there, *extents, *strides, *target, *apart, *c_apart)

        def sum_values(at: Addresses) -> tuple[Any, ...]:
            _, _, c = batch_addresses(problem, at, first)
            source = at.workspace + first * part_bytes
            strides = (role.c_stride_i, role.c_stride_j)
            return (source, c, role.outputs, role.narrow, parts, *strides, p.alpha, p.beta, p.batch_stride_c)

        product = KernelLaunch(spec, code, (tiles, parts, count), PARAMETERS["thin"], values)
        if not split:
            return (product,)
        grid = (-(-outputs // SUM_LANES), 1, count)
        return (product, KernelLaunch(THIN_SUM, (), grid, PARAMETERS["thin_sum"], sum_values, overlaps=True))

    steps = [launches(first) for first in range(0, p.batch, MAX_GRID_Z)]
    return LaunchPlan(
        tuple(one for step in steps for one in step), p.batch * part_bytes if split else 0, depth if split else 0
    )


THIN_SUM = KernelSpec(
    name="thin_sum",
    title="sum",
    idea="adds the partial sums of thin in a fixed order",
    block_tile=(1, SUM_LANES, 1),
    thread_tile=(1, 1),
    threads=SUM_LANES * SUM_SLICES,
    loads_per_fma=None,
    build=build_sum,
    abi="thin_sum",
)


def shipped_configs() -> tuple[Config, ...]:
    """Every form that can be chosen, without the number of parts."""
    return tuple(
        make_config(**_code(form, narrow, tile)) for (form, _, narrow), tiles in TILES.items() for tile in tiles
    )


def _select(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    from numba_gemm.fp32.thin_choose import choose_form

    return choose_form(problem, sm_count, arch)


def _candidates(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Config]:
    from numba_gemm.fp32.thin_choose import candidates

    return candidates(problem, sm_count, arch)


THIN = KernelSpec(
    name="thin",
    title="few vectors",
    idea="loads of the wide factor go straight into registers, a few vectors wait for them in shared memory",
    block_tile=_geometry(shipped_configs()[0]).block_tile,
    thread_tile=(2, 4),
    threads=_geometry(shipped_configs()[0]).threads,
    loads_per_fma=None,
    build=build,
    min_arch=(8, 0),
    configs=shipped_configs(),
    abi="thin",
    batched=True,
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.v8_intrinsics"),
    geometry_of=_geometry,
    select=_select,
    plan_of=_plan,
    candidates=_candidates,
    refuses=refuses,
)
