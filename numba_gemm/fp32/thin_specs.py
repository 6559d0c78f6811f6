"""What the rest of the library knows of thin: its launches and its spec."""

from __future__ import annotations

from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32.skinny_specs import roles
from numba_gemm.fp32.thin import SUM_LANES, SUM_SLICES, WARP, build, build_sum, outputs_of, pass_of
from numba_gemm.fp32.thin_choose import candidates, choose_form
from numba_gemm.fp32.thin_tiles import k_per_part, refuses, refuses_form, shipped_configs
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
)


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
    select=choose_form,
    plan_of=_plan,
    candidates=candidates,
    refuses=refuses,
    refuses_form=refuses_form,
)
