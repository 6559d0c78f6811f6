"""A checked product, carried out on the PTX emulator: arrange → compile → launch on emulated memory.

Arrays keep their strides and their alignment there, and the bytes between their elements stay unwritten, so that a
kernel that reads past a row, or past the matrix, is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from numba_gemm.arrange import arrange, pack, request_for
from numba_gemm.arrays import as_operand
from numba_gemm.choose import DEFAULT_SM_COUNT
from numba_gemm.compile import compile_kernel, kernel_ptx
from numba_gemm.emulator.machine import Machine
from numba_gemm.emulator.report import Report
from numba_gemm.problem import Problem, check_inputs, check_output
from numba_gemm.spec import OVERLAP_SINCE, Addresses, Config, KernelLaunch, KernelSpec, TensorMap, first_alone

#: The architecture that is emulated unless another is named.
DEFAULT_ARCH = (9, 0)

#: Called with the blocks done and the blocks in all.
Progress = Callable[[int, int], None]


def multiply_emulated(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    c: npt.NDArray[Any],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    kernel: str | None = None,
    arch: tuple[int, int] = DEFAULT_ARCH,
    progress: Progress | None = None,
) -> Report:
    """C = alpha · A · B + beta · C on NumPy arrays by running GPU kernels' PTX on the CPU; C has an element at least.

    Returns
    -------
    The emulator's report of the kernel that multiplies, with its counters. C is written only if every launch finished
    without a hazard.
    """
    machine = Machine(f"sm_{arch[0]}{arch[1]}")
    at = Addresses(machine.place(a), machine.place(b), machine.place(c, written=beta != 0))
    operands = as_operand("a", a), as_operand("b", b), as_operand("c", c)
    shape = check_output(operands[2], *operands[:2], check_inputs(*operands[:2]))
    arrangement = arrange(request_for(*operands, shape, (alpha, beta, kernel)), arch, DEFAULT_SM_COUNT)
    if arrangement.workspace_bytes:
        at = at._replace(workspace=machine.alloc(arrangement.workspace_bytes))
    reports = [_run(machine, one, at, arch, progress) for one in arrangement.launches]
    machine.fetch(at.c, c)
    return reports[arrangement.main]


def run_form(
    machine: Machine,
    problem: Problem,
    spec: KernelSpec,
    config: Config,
    at: Addresses,
    arch: tuple[int, int] = DEFAULT_ARCH,
    progress: Progress | None = None,
) -> Report:
    """Run one form of a kernel on matrices in emulated memory; the report is that of the launch that multiplies."""
    plan = spec.plan(problem, config)
    if plan.workspace_bytes:
        at = at._replace(workspace=machine.alloc(plan.workspace_bytes))
    reports = [_run(machine, one, at, arch, progress) for one in first_alone(plan.launches)]
    return reports[plan.main]


def _run(
    machine: Machine, one: KernelLaunch, at: Addresses, arch: tuple[int, int], progress: Progress | None
) -> Report:
    geometry = one.geometry

    def encode(tensor: TensorMap) -> bytes:
        address, element, dims, strides, box, swizzle, promotion = tensor
        return machine.tensor_map(address, element, dims, strides, box, swizzle=swizzle, l2_promotion=promotion)

    return machine.launch(
        _ptx(one.spec, one.config, arch),
        one.grid,
        geometry.threads,
        pack(one, at, encode),
        shared_bytes=geometry.shared_bytes,
        overlaps=one.overlaps and arch >= OVERLAP_SINCE,
        progress=progress,
    )


def _ptx(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> str:
    """A kernel's PTX: written by hand it is at hand; compiled, it is in the cache beside its cubin."""
    return kernel_ptx(spec, config, arch) if spec.source == "ptx" else compile_kernel(spec, config, arch).ptx
