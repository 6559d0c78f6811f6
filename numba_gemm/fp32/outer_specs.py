"""What the rest of the library knows of outer: its launch and its spec."""

from __future__ import annotations

from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32.outer import MAX_K, WARP, build
from numba_gemm.fp32.outer_choose import candidates, choose_form
from numba_gemm.fp32.outer_tiles import blocks_of, refuses, refuses_form, shipped_configs
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
    tile = (values["warps"] * values["rows"], WARP * values["columns"], MAX_K)
    return Geometry(tile, values["warps"] * WARP)


#: From sm_120 on a form with more blocks on an SM would get 48 registers and spill two of them.
FEWER_FROM, FEWER_BLOCKS = (12, 0), 18


def _occupancy(config: Config, arch: tuple[int, int]) -> int:
    blocks = int(dict(config)["blocks_per_sm"])
    return min(blocks, FEWER_BLOCKS) if arch >= FEWER_FROM else blocks


def _plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, tile = problem, {name: int(value) for name, value in config if isinstance(value, int)}
    a_strides = (p.lda, 1) if p.a_layout == "row" else (1, p.lda)

    def launch(first: int) -> KernelLaunch:
        count = min(MAX_GRID_Z, p.batch - first)

        def values(at: Addresses) -> tuple[Any, ...]:
            apart = (p.batch_stride_a, p.batch_stride_b, p.batch_stride_c)
            addresses = batch_addresses(problem, at, first)
            return (*addresses, p.m, p.n, p.k, *a_strides, p.ldb, p.ldc, p.alpha, p.beta, *apart)

        return KernelLaunch(spec, config, (blocks_of(problem, tile), 1, count), PARAMETERS["outer"], values)

    return LaunchPlan(tuple(launch(first) for first in range(0, p.batch, MAX_GRID_Z)), 0, 0)


OUTER = KernelSpec(
    name="outer",
    title="short K",
    idea="each k is one outer product in registers; C is written at the speed of memory",
    block_tile=_geometry(shipped_configs()[0]).block_tile,
    thread_tile=(4, 1),
    threads=_geometry(shipped_configs()[0]).threads,
    loads_per_fma=None,
    build=build,
    min_arch=(8, 0),
    configs=shipped_configs(),
    abi="outer",
    batched=True,
    helpers=("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue", "numba_gemm.fp32.v8_intrinsics"),
    geometry_of=_geometry,
    occupancy_of=_occupancy,
    select=choose_form,
    plan_of=_plan,
    candidates=candidates,
    refuses=refuses,
    refuses_form=refuses_form,
)
