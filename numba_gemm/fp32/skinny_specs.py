"""What the rest of the library knows of skinny: which products it takes, in which form, in how many runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from numba_gemm.abi import PARAMETERS
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32.skinny import FIXUP_THREADS, build, build_fixup, stage_words
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

#: The widest narrow side.
MAX_NARROW = 64

#: Tiles by the form, the width of W's copies and BLOCK_I.
TILES: dict[tuple[str, int, int], dict[str, int]] = {}


def _tile(
    form: str,
    width: int,
    block_i: int,
    block_j: int,
    thread_i: int,
    thread_j: int,
    depth: int,
    stages: int,
    blocks: int,
    turned: int = 0,
) -> None:
    TILES[form, width, block_i] = {
        "block_i": block_i,
        "block_j": block_j,
        "thread_i": thread_i,
        "thread_j": thread_j,
        "depth": depth,
        "stages": stages,
        "blocks_per_sm": blocks,
        "turned": turned,
    }


_tile("across", 4, 8, 256, 8, 4, 16, 3, 4)
_tile("across", 4, 16, 256, 8, 4, 16, 4, 3)
_tile("across", 4, 32, 256, 8, 8, 16, 3, 4)
_tile("across", 4, 64, 256, 8, 8, 16, 3, 2)
_tile("across", 1, 8, 256, 8, 4, 16, 3, 4)
_tile("across", 1, 16, 128, 8, 8, 16, 3, 6)
_tile("across", 1, 32, 256, 8, 8, 16, 3, 3)
_tile("across", 1, 64, 256, 8, 8, 16, 3, 2)
_tile("along", 4, 8, 128, 8, 4, 32, 3, 3)
_tile("along", 4, 16, 256, 8, 4, 32, 2, 2)
_tile("along", 4, 32, 128, 8, 8, 16, 4, 4)
_tile("along", 4, 64, 256, 8, 8, 16, 3, 2, turned=1)
_tile("along", 1, 8, 128, 8, 4, 32, 3, 3)
_tile("along", 1, 16, 256, 8, 4, 32, 2, 2)
_tile("along", 1, 32, 128, 8, 8, 16, 4, 4)
_tile("along", 1, 64, 256, 8, 8, 16, 3, 2, turned=1)

#: A run has so many k-steps at least: filling the ring and adding up the pieces must be worth it.
SHORTEST_RUN = 8

#: Shared memory of an SM that blocks can have, by compute capability; the least for those not named.
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
LEAST_SHARED_BYTES = 99 * 1024


@dataclass(frozen=True)
class Roles:
    """Which factor is the wide W and which the narrow X, and how they and C lie (strides in elements)."""

    form: Literal["across", "along"]
    wide: Literal["A", "B"]
    outputs: int  # J
    narrow: int  # I
    ldw: int
    x_stride_i: int
    x_stride_k: int
    c_stride_i: int
    c_stride_j: int


def roles(problem: Problem) -> Roles:
    """The roles of the factors: the narrower one is X."""
    p = problem
    if p.m <= p.n:
        x_strides = (p.lda, 1) if p.a_layout == "row" else (1, p.lda)
        return Roles("across" if p.b_layout == "row" else "along", "B", p.n, p.m, p.ldb, *x_strides, p.ldc, 1)
    x_strides = (1, p.ldb) if p.b_layout == "row" else (p.ldb, 1)
    return Roles("along" if p.a_layout == "row" else "across", "A", p.m, p.n, p.lda, *x_strides, 1, p.ldc)


def refuses(problem: Problem) -> str | None:
    """Why skinny can't take a product, in words, or None."""
    if min(problem.m, problem.n) > MAX_NARROW:
        return f"neither M = {problem.m} nor N = {problem.n} is {MAX_NARROW} or less"
    if steps_of(problem, tile_of(problem)) >= 2**31:
        return f"K = {problem.k} and {roles(problem).outputs} outputs make more than 2³¹ steps"
    return None


def refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form can't take a product that it wasn't chosen for, in words, or None."""
    role, values = roles(problem), dict(config)
    if values["form"] != role.form:
        return f"{role.wide}, the wide factor, isn't read {values['form']}"
    if role.narrow > int(values["block_i"]):
        return f"the narrow side, {role.narrow}, is more than {values['block_i']}"
    if int(values.get("blocks", 1)) > steps_of(problem, {name: int(values[name]) for name in ("block_j", "depth")}):
        return f"there are fewer steps than {values['blocks']} runs"
    return problem.misaligned(role.wide, 4) if values["vector_width"] == 4 else None


def choose_form(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    """The form for a product: the lowest tile that holds its narrow side, and as many runs as blocks fit on the GPU.

    The runs are of equal length, so every SM is busy until the end whatever the number of tiles; a product too small
    for ``SHORTEST_RUN`` steps in each has fewer. ``blocks``, the number of runs, is in the config beside what decides
    the code, as it is only the launch's.
    """
    reason = refuses(problem)
    if reason is not None:
        raise KernelConstraintError(f"kernel skinny can't take this product ({reason}); kernel 'v7' can")
    tile = tile_of(problem)
    return config_of(problem, tile, runs(problem, tile, sm_count, arch))


def tile_of(problem: Problem) -> dict[str, int]:
    """The lowest tile that holds a product's narrow side."""
    role = roles(problem)
    return TILES[role.form, 1 if problem.misaligned(role.wide, 4) else 4, _block_i(role.narrow)]


def resident_blocks(problem: Problem, tile: dict[str, int], arch: tuple[int, int]) -> int:
    """Blocks that an SM holds at a time."""
    _, words = stage_words(roles(problem).form, tile["turned"], tile["block_i"], tile["block_j"], tile["depth"])
    shared = SHARED_BYTES.get(arch, LEAST_SHARED_BYTES)
    return max(1, min(tile["blocks_per_sm"], shared // (4 * words * tile["stages"] + 1024)))


def runs(problem: Problem, tile: dict[str, int], sm_count: int, arch: tuple[int, int]) -> int:
    """Blocks of one product's launch."""
    slots = max(1, resident_blocks(problem, tile, arch) * sm_count // problem.batch)
    return max(1, min(slots, steps_of(problem, tile) // SHORTEST_RUN))


def config_of(problem: Problem, tile: dict[str, int], blocks: int) -> Config:
    """The config of a product with a tile of one's own, in so many runs."""
    role = roles(problem)
    width = 1 if problem.misaligned(role.wide, 4) else 4
    return make_config(**_code(role.form, width, tile), blocks=blocks)


def _code(form: str, width: int, tile: dict[str, int]) -> dict[str, Any]:
    """What decides the code: turning W round takes copies of one element, however it is aligned."""
    return {**tile, "form": form, "vector_width": 1 if tile["turned"] else width}


def _block_i(narrow: int) -> int:
    return next(block for block in (8, 16, 32, 64) if narrow <= block)


def steps_of(problem: Problem, tile: dict[str, int]) -> int:
    """Steps of k of all tiles of one product."""
    return -(-roles(problem).outputs // tile["block_j"]) * max(1, -(-problem.k // tile["depth"]))


def _geometry(config: Config) -> Geometry:
    values: dict[str, Any] = dict(config)
    block_i, block_j, depth = values["block_i"], values["block_j"], values["depth"]
    threads = block_i // values["thread_i"] * (block_j // values["thread_j"])
    _, words = stage_words(values["form"], values["turned"], block_i, block_j, depth)
    return Geometry((block_i, block_j, depth), threads, 4 * words * values.get("stages", 0))


def _plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, role = problem, roles(problem)
    values: dict[str, Any] = dict(config)
    blocks = int(values["blocks"])
    code = tuple(item for item in config if item[0] != "blocks")
    fixup = tuple(item for item in code if item[0] in _FIXUP_KEYS)
    steps_a_tile = max(1, -(-p.k // values["depth"]))
    # Runs of whole tiles leave no pieces.
    steps = steps_of(problem, values)
    split = steps % blocks != 0 or (steps // blocks) % steps_a_tile != 0
    piece_bytes = 8 * blocks * values["block_i"] * values["block_j"] if split else 0  # of one product: 2 a block
    extents = (role.outputs, role.narrow, p.k)
    strides = (role.ldw, role.x_stride_i, role.x_stride_k, role.c_stride_i, role.c_stride_j)
    apart = (p.batch_stride_a, p.batch_stride_b) if role.wide == "A" else (p.batch_stride_b, p.batch_stride_a)

    def launches(first: int) -> tuple[KernelLaunch, ...]:
        count = min(MAX_GRID_Z, p.batch - first)

        def product_values(at: Addresses) -> tuple[Any, ...]:
            a, b, c = batch_addresses(problem, at, first)
            factors = (a, b) if role.wide == "A" else (b, a)
            workspace = at.workspace + first * piece_bytes if split else 0
            return (*factors, c, workspace, *extents, *strides, p.alpha, p.beta, *apart, p.batch_stride_c)

        def fixup_values(at: Addresses) -> tuple[Any, ...]:
            _, _, c = batch_addresses(problem, at, first)
            workspace = at.workspace + first * piece_bytes
            c_strides = (role.c_stride_i, role.c_stride_j)
            return (workspace, c, *extents, blocks, *c_strides, p.alpha, p.beta, p.batch_stride_c)

        product = KernelLaunch(spec, code, (blocks, 1, count), PARAMETERS["skinny"], product_values)
        if not split:
            return (product,)
        shares = -(-values["block_i"] * values["block_j"] // (4 * FIXUP_THREADS))
        grid = (blocks - 1, shares, count)
        return (product, KernelLaunch(SKINNY_FIXUP, fixup, grid, PARAMETERS["skinny_fixup"], fixup_values))

    steps_of_batch = [launches(first) for first in range(0, p.batch, MAX_GRID_Z)]
    return LaunchPlan(tuple(one for step in steps_of_batch for one in step), p.batch * piece_bytes, 0)


def shipped_configs() -> tuple[Config, ...]:
    """Every form that :func:`choose_form` can pick, without the number of runs."""
    return tuple(dict.fromkeys(make_config(**_code(form, width, tile)) for (form, width, _), tile in TILES.items()))


_FIXUP_KEYS = ("block_i", "block_j", "depth")


def fixup_configs() -> tuple[Config, ...]:
    """The forms of the second launch that belong to :func:`shipped_configs`."""
    return tuple(
        dict.fromkeys(tuple(item for item in config if item[0] in _FIXUP_KEYS) for config in shipped_configs())
    )


def _fixup_geometry(config: Config) -> Geometry:
    values: dict[str, Any] = dict(config)
    return Geometry((values["block_i"], values["block_j"], values["depth"]), FIXUP_THREADS)


SKINNY_FIXUP = KernelSpec(
    name="skinny_fixup",
    title="pieces",
    idea="adds the pieces of tiles that several blocks computed, in the order of k",
    block_tile=_fixup_geometry(fixup_configs()[0]).block_tile,
    thread_tile=(1, 1),
    threads=FIXUP_THREADS,
    loads_per_fma=None,
    build=build_fixup,
    min_arch=(8, 0),
    configs=fixup_configs(),
    abi="skinny_fixup",
    geometry_of=_fixup_geometry,
)

SKINNY = KernelSpec(
    name="skinny",
    title="narrow",
    idea="the wide factor is read once; equal runs of k-steps for all SMs",
    block_tile=_geometry(shipped_configs()[0]).block_tile,
    thread_tile=(8, 4),
    threads=_geometry(shipped_configs()[0]).threads,
    loads_per_fma=0.375,
    build=build,
    min_arch=(8, 0),
    configs=shipped_configs(),
    abi="skinny",
    batched=True,
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.v8_intrinsics"),
    geometry_of=_geometry,
    select=choose_form,
    plan_of=_plan,
    refuses=refuses,
    refuses_form=refuses_form,
)
