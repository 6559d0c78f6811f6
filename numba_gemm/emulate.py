"""A checked product, carried out on the PTX emulator: choose → compile → launch on emulated memory.

Matrices keep their row strides and their alignment there, and the bytes between rows stay unwritten, so that a kernel
that reads past a row, or past the matrix, is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.choose import choose
from numba_gemm.compile import compile_kernel, kernel_ptx
from numba_gemm.device.memory import rows_are_contiguous
from numba_gemm.emulator.machine import Machine
from numba_gemm.emulator.report import Report
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Addresses, Config, KernelSpec

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
    """C = alpha · A · B + beta · C on NumPy arrays by running a GPU kernel's PTX on the CPU; m, n ≥ 1.

    Returns
    -------
    The emulator's report with its counters. C is written only if the kernel finished without a hazard.
    """
    machine = Machine(f"sm_{arch[0]}{arch[1]}")
    a_address, lda = _place(machine, a)
    b_address, ldb = _place(machine, b)
    c_address, ldc = _place(machine, c, written=beta != 0)
    (m, k), n = a.shape, b.shape[1]
    problem = Problem(
        m,
        n,
        k if alpha != 0 else 0,
        a.dtype.name,
        lda,
        ldb,
        ldc,
        a_address % ALIGNMENT,
        b_address % ALIGNMENT,
        c_address % ALIGNMENT,
        alpha,
        beta,
        c.dtype.name,
    )
    spec, config = choose(problem, kernel, arch=arch)
    report = run_form(machine, problem, spec, config, Addresses(a_address, b_address, c_address), arch, progress)
    for row in range(m):
        c[row] = machine.read(c_address + row * ldc * c.itemsize, c.dtype, n)
    return report


def run_form(
    machine: Machine,
    problem: Problem,
    spec: KernelSpec,
    config: Config,
    at: Addresses,
    arch: tuple[int, int] = DEFAULT_ARCH,
    progress: Progress | None = None,
) -> Report:
    """Run one form of a kernel on matrices that lie in emulated memory; the report is that of its first launch."""
    plan = spec.plan(problem, config)
    if plan.workspace_bytes:
        at = at._replace(workspace=machine.alloc(plan.workspace_bytes))
    reports = []
    for one in plan.launches:
        geometry = one.geometry
        reports.append(
            machine.launch(
                _ptx(one.spec, one.config, arch),
                one.grid,
                geometry.threads,
                one.parameters.pack(*one.values(at)),
                shared_bytes=geometry.shared_bytes,
                progress=progress,
            )
        )
    return reports[0]


def _ptx(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> str:
    """A kernel's PTX: written by hand it is at hand; compiled, it is in the cache beside its cubin."""
    return kernel_ptx(spec, config, arch) if spec.source == "ptx" else compile_kernel(spec, config, arch).ptx


def _place(machine: Machine, array: npt.NDArray[Any], *, written: bool = True) -> tuple[int, int]:
    """A matrix in emulated memory: its address and its row stride in elements."""
    rows, columns = array.shape
    if not rows_are_contiguous(array):
        array = np.ascontiguousarray(array)
    itemsize = array.itemsize
    stride = array.strides[0] if rows > 1 else columns * itemsize
    offset = array.__array_interface__["data"][0] % ALIGNMENT
    if array.size == 0:
        return 0, columns
    address = machine.alloc(offset + (rows - 1) * stride + columns * itemsize) + offset
    if written and stride == columns * itemsize:
        machine.write(address, array)
    elif written:
        for row in range(rows):
            machine.write(address + row * stride, array[row])
    return address, stride // itemsize
