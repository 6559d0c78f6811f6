"""What the rest of the library knows of the tensor-core kernels t1 … t4."""

from __future__ import annotations

import functools
from dataclasses import asdict, fields
from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.problem import ALIGNMENT, Problem
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
from numba_gemm.tensorcore import splitk_reduce, t4, t4_choose, tma
from numba_gemm.tensorcore.source import HALF_DTYPES, LONG_NAMES, SHORT_NAMES, load_ptx, specialise


def _lesson_kernel(
    name: str,
    title: str,
    idea: str,
    block_tile: tuple[int, int, int],
    thread_tile: tuple[int, int],
    threads: int,
) -> KernelSpec:
    def build(dtype: str) -> str:
        return specialise(load_ptx(name), dtype)

    return KernelSpec(
        name=name,
        title=title,
        idea=idea,
        block_tile=block_tile,
        thread_tile=thread_tile,
        threads=threads,
        loads_per_fma=None,
        build=build,
        source="ptx",
        dtypes=HALF_DTYPES,
        min_arch=(8, 0),
        configs=tuple(make_config(dtype=dtype) for dtype in HALF_DTYPES),
        abi="gemm_16",
        helpers=("numba_gemm.tensorcore.source",),
        files=(f"{name}.ptx",),
        entry_name=name,
    )


T1 = _lesson_kernel(
    "t1", "direct", "a warp per 16×16 tile, fragments straight from global memory", (16, 16, 16), (4, 2), 32
)
T2 = _lesson_kernel(
    "t2", "shared", "padded shared tiles, ldmatrix, fragments reused from registers", (128, 128, 32), (16, 4), 256
)
T3 = _lesson_kernel(
    "t3", "async", "cp.async into a double buffer: the next tile is in flight", (128, 128, 32), (16, 4), 256
)


# --- t4: one form for each problem


def t4_parameters(config: Config) -> t4.T4Parameters:
    """The parameters that a config of t4 names (its number of splits is not one of them)."""
    known = {field.name for field in fields(t4.T4Parameters)}
    values: dict[str, Any] = {key: value for key, value in config if key in known}
    for flag in ("aligned_a", "aligned_b", "split_k"):
        values[flag] = bool(values.get(flag, False))
    for key in ("dtype", "c_dtype"):
        values[key] = SHORT_NAMES[values[key]]
    return t4.T4Parameters(**values)


def t4_config(parameters: t4.T4Parameters, splits: int = 1) -> Config:
    """The config of t4 with these parameters; ``splits`` is in it only if K is split."""
    values = {key: int(value) if isinstance(value, bool) else value for key, value in asdict(parameters).items()}
    if not parameters.tma:  # as these configs are written in records that are older than the other ones
        del values["copies"]
    for key in ("dtype", "c_dtype"):
        values[key] = LONG_NAMES[str(values[key])]
    return make_config(**values, **({"splits": splits} if parameters.split_k else {}))


def _t4_text_config(config: Config) -> Config:
    """What decides the text of the kernel: the numbers of splits and of blocks are only its launch's."""
    return tuple(item for item in config if item[0] not in ("splits", "blocks"))


def _t4_build(**values: int | str) -> str:
    return t4_parameters(make_config(**values)).render()


def _t4_geometry(config: Config) -> Geometry:
    p = t4_parameters(config)
    return Geometry((p.block_m, p.block_n, p.block_k), p.threads, p.dynamic_shared_bytes)


def _t4_select(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    width = ALIGNMENT // 2
    parameters, splits = t4_choose.choose_form(
        problem.m,
        problem.n,
        problem.k,
        sm_count,
        compute_capability=arch,
        dtype=SHORT_NAMES[problem.dtype],
        c_dtype=SHORT_NAMES[problem.c_dtype],
        a_layout=problem.a_layout,
        b_layout=problem.b_layout,
        aligned_a=problem.misaligned("A", width) is None,
        aligned_b=problem.misaligned("B", width) is None,
        batch=problem.batch,
        by_tma=tma.reads_both(problem),
    )
    return t4_config(parameters, splits)


def _t4_refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form whose tiles TMA copies can't take a problem; the other ones were chosen for its alignment."""
    if dict(config).get("copies") != "tma":
        return None
    if problem.k == 0:
        return "TMA has no map of an empty factor"
    return tma.unreadable(problem, "A") or tma.unreadable(problem, "B")


def _t4_plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, parameters = problem, t4_parameters(config)
    splits = int(dict(config).get("splits", 1))
    per_split = parameters.k_per_split(p.k, splits) if parameters.split_k else 0
    plan = functools.partial(_t4_launches, spec, problem, config)
    launches = [one for first in range(0, p.batch, MAX_GRID_Z) for one in plan(first, min(MAX_GRID_Z, p.batch - first))]
    if not parameters.split_k:
        return LaunchPlan(tuple(launches))
    # Launches follow one another on a stream, so the parts of the next 65535 products take the place of the last.
    workspace = splitk_reduce.workspace_bytes(p.m, p.n, splits) * min(MAX_GRID_Z, p.batch)
    return LaunchPlan(tuple(launches), workspace, per_split)


def _t4_launches(
    spec: KernelSpec, problem: Problem, config: Config, first: int, count: int
) -> tuple[KernelLaunch, ...]:
    """The launches of ``count`` products of a batch: t4, and if K is split the reduction."""
    p, parameters = problem, t4_parameters(config)
    splits = int(dict(config).get("splits", 1))
    form = _t4_text_config(config)
    x, y, _ = parameters.grid(p.m, p.n, splits)
    scalars = (p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alpha, p.beta)
    strides = (p.batch_stride_a, p.batch_stride_b, p.batch_stride_c)

    def values(at: Addresses) -> tuple[Any, ...]:
        a, b, c = batch_addresses(p, at, first)
        if not parameters.tma:
            return (a, b, c, *scalars, *strides)
        maps = (
            tma.factor_map(p, "A", a, parameters.dtype, parameters.map_a_box, parameters.map_a_swizzle, count),
            tma.factor_map(p, "B", b, parameters.dtype, parameters.map_b_box, parameters.map_b_swizzle, count),
        )
        return (*maps, a, b, c, *scalars, *strides)

    abi = "t4_tma" if parameters.tma else "t4"
    if not parameters.split_k:
        return (KernelLaunch(spec, form, (x, y, count), PARAMETERS[abi], values),)
    per_split = parameters.k_per_split(p.k, splits)

    def part_values(at: Addresses) -> tuple[Any, ...]:
        return (*values(at), at.workspace, per_split)

    return (
        KernelLaunch(spec, form, (x, y, count), PARAMETERS[f"{abi}_split_k"], part_values),
        splitk_reduce.reduction(p, first, count, splits),
    )


def _t4_forms() -> list[Config]:
    """The forms of the tile shapes that are shipped, for packed row-major matrices; the largest first."""
    shapes: list[dict[str, Any]] = [*t4_choose.FORMS[:3], *t4_choose.TMA_FORMS, *t4_choose.FORMS[3:]]
    return [
        t4_config(t4.T4Parameters(dtype=element, c_dtype=element, **shape))
        for element in ("f16", "bf16")
        for shape in shapes
    ]


_T4_CONFIGS = tuple(_t4_forms())

T4 = KernelSpec(
    name="t4",
    title="pipelined",
    idea="a ring of stages, XOR swizzle, fragments double-buffered, split-K",
    block_tile=_t4_geometry(_T4_CONFIGS[0]).block_tile,
    thread_tile=(16, 8),
    threads=_t4_geometry(_T4_CONFIGS[0]).threads,
    loads_per_fma=None,
    build=_t4_build,
    source="ptx",
    dtypes=HALF_DTYPES,
    min_arch=(8, 0),
    configs=_T4_CONFIGS,
    abi="t4",
    batched=True,
    helpers=tuple(f"numba_gemm.tensorcore.{name}" for name in ("t4", "t4_operand", "templates", "source")),
    files=("t4.ptx.j2", "t4_tma.ptx.j2", "t4_macros.ptx.j2", "t4_epilogue.ptx.j2"),
    entry_name="t4",
    geometry_of=_t4_geometry,
    select=_t4_select,
    plan_of=_t4_plan,
    refuses_form=_t4_refuses_form,
)
