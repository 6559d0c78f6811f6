"""GPU kernels on the emulator: each compiled form on a problem, for ``check``, and its counters, for ``bench``.

Kernels of 16-bit types get the same cases in each of their types; C is of that type too, or float32 where the inputs
are whole numbers, so that the sums themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from numba_gemm.benchmark.forms import typed_forms
from numba_gemm.benchmark.record import Row
from numba_gemm.benchmark.suites import Shape
from numba_gemm.cases import Case, accepted_cases, small_cases, typed
from numba_gemm.catalog import get_spec
from numba_gemm.choose import DEFAULT_SM_COUNT, choose
from numba_gemm.compile import arch_name
from numba_gemm.emulate import DEFAULT_ARCH, multiply_emulated, run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.emulator.report import Report
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses, Config, KernelSpec, describe_config
from numba_gemm.validate import Reference, check, reference

Matrix = npt.NDArray[Any]
Arch = tuple[int, int]


class Run(NamedTuple):
    """One kernel on one case; ``config`` is the form to force, or None for the library's choice."""

    kernel: str
    case: Case
    config: Config | None = None


def expected_product(case: Case, a: Matrix, b: Matrix, c: Matrix, arch: Arch, k_per_split: int = 0) -> Reference:
    """The right answer to a case, and the bound that follows from the arithmetic of its types."""
    return reference(
        a,
        b,
        c,
        alpha=case.alpha,
        beta=case.beta,
        c_dtype=c.dtype.name,
        tensor_core=None if case.dtype == "float32" else arch,
        k_per_split=k_per_split,
    )


def depth_of_split(run: Run, arch: Arch) -> int:
    """The depth of one part where a run splits K, else 0; the bound depends on it."""
    case, spec = run.case, get_spec(run.kernel)
    if spec.plan_of is None or case.alpha == 0:
        return 0
    problem = _packed(case)
    config = choose(problem, run.kernel, arch=arch)[1] if run.config is None else run.config
    return spec.plan(problem, config).k_per_split


def _packed(case: Case) -> Problem:
    return Problem.packed(case.m, case.n, case.k, dtype=case.dtype, c_dtype=case.c_dtype)


def runs_emulated(spec: KernelSpec, arch: Arch) -> bool:
    """Whether the kernel exists on this architecture."""
    return spec.runs_on(arch)


def fitting_forms(spec: KernelSpec, problem: Problem) -> list[Config]:
    """The compiled forms that take a problem, best first; of a kernel that makes a form for each problem, that one."""
    if spec.select is not None:
        return [spec.select(problem, DEFAULT_SM_COUNT, DEFAULT_ARCH)]
    return [config for config in spec.configs if spec.unmet(problem, config) is None]


def emulated_runs(kernel: str, *, quick: bool = False) -> Iterator[Run]:
    """The small cases of a kernel's tile: each as a call would run it, and packed ones in every other form.

    A kernel that makes a form for each problem runs a product whose K is split as well, and, unless ``quick``, some of
    its listed forms by force, each on whole tiles and on ragged ones.
    """
    spec = get_spec(kernel)
    block_m, block_n, step = spec.block_tile
    for dtype in spec.dtypes:
        for case in small_cases(max(block_m, block_n), step):
            for own in accepted_cases(typed(case, dtype), spec.refuses):
                yield Run(kernel, own)
                if case.layout == "packed":
                    for config in fitting_forms(spec, _packed(own))[1:]:
                        yield Run(kernel, own, config)
        if spec.select is not None:
            deep = Case(13, 24, 1100, dtype=dtype, c_dtype=dtype, alpha=0.5, beta=2.0)
            for own in accepted_cases(deep, spec.refuses):
                yield Run(kernel, own)
            if not quick:
                # Those of a kernel for special shapes aren't for the shape of a tile.
                forced = _forced_runs(spec, dtype) if spec.refuses is None or spec.source == "ptx" else ()
                yield from (run for run in forced if accepted_cases(run.case, spec.refuses) == [run.case])


def _forced_runs(spec: KernelSpec, dtype: str) -> Iterator[Run]:
    """The first, the middle and the last of the listed forms of a type, and the first whose tiles TMA copies."""
    forms = typed_forms(spec.name, DEFAULT_ARCH, dtype)
    by_tma = [config for config in forms if dict(config).get("copies") == "tma"]
    for config in dict.fromkeys((forms[0], forms[len(forms) // 2], forms[-1], *by_tma[:1])):
        block_m, block_n, step = spec.geometry(config).block_tile
        yield Run(spec.name, Case(block_m, block_n, 4 * step, dtype=dtype, c_dtype=dtype), config)
        # N and K are multiples of 8, as the forms for aligned matrices ask.
        yield Run(spec.name, Case(block_m + 5, block_n + 8, 3 * step + 8, dtype=dtype, c_dtype=dtype), config)


def run_case(run: Run, a: Matrix, b: Matrix, c: Matrix, arch: Arch = DEFAULT_ARCH) -> str:
    """Carry a run out, into ``c``; returns the form that ran, in words.

    Raises
    ------
    Hazard : if the kernel did what it must not; ``c`` is then as it was.
    """
    spec, case = get_spec(run.kernel), run.case
    if run.config is not None:
        launch_form(spec, run.config, a, b, c, alpha=case.alpha, beta=case.beta, arch=arch)
        return describe_config(run.config)
    report = multiply_emulated(a, b, c, alpha=case.alpha, beta=case.beta, kernel=run.kernel, arch=arch)
    forms = [config for config in spec.configs if spec.entry(config) == report.kernel]
    if len(forms) == 1:
        return describe_config(forms[0])
    return f"{case.dtype}{' split' if depth_of_split(run, arch) else ''}"


def launch_form(
    spec: KernelSpec,
    config: Config,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    arch: Arch = DEFAULT_ARCH,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """One compiled form on packed matrices in emulated memory: C = alpha · A · B + beta · C.

    Parameters
    ----------
    spec, config : the form; it must take the shape.
    a, b, c : matrices of positive dimensions; C is written only if there was no hazard.
    alpha, beta : scale factors; with beta = 0 the emulated C is uninitialised, so that reading it is a hazard.
    arch : for which the form is compiled, and which is emulated.
    progress : called with the blocks done and the blocks in all.
    """
    (m, k), n = a.shape, b.shape[1]
    dtype, c_dtype = a.dtype.name, c.dtype.name
    problem = Problem.packed(m, n, k if alpha != 0 else 0, dtype=dtype, alpha=alpha, beta=beta, c_dtype=c_dtype)
    machine = Machine(arch_name(arch))
    addresses = [machine.alloc(matrix.nbytes) for matrix in (a, b, c)]
    for address, matrix in zip(addresses, (a, b, c) if beta != 0 else (a, b), strict=False):
        machine.write(address, np.ascontiguousarray(matrix))
    report = run_form(machine, problem, spec, config, Addresses(*addresses), arch, progress)
    c[...] = machine.read(addresses[2], c.dtype, m * n).reshape(m, n)
    return report


def emulated_forms(
    kernels: Sequence[str], shapes: Sequence[Shape], arch: Arch, dtype: str | None = None
) -> list[tuple[str, Config, Shape]]:
    """Every form of the named kernels that takes a shape packed, shape by shape.

    ``dtype`` None, or one that a kernel doesn't take, is the kernel's first.
    """
    forms = []
    for shape in shapes:
        for name in kernels:
            spec = get_spec(name)
            if not runs_emulated(spec, arch):
                continue
            problem = Problem.packed(shape.m, shape.n, shape.k, dtype=dtype if dtype in spec.dtypes else spec.dtypes[0])
            forms += [(name, config, shape) for config in fitting_forms(spec, problem)]
    return forms


def bench_emulated(
    forms: Sequence[tuple[str, Config, Shape]],
    *,
    arch: Arch = DEFAULT_ARCH,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda _: None,
    on_block: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Run forms on random matrices, validate the products, and count; nothing is timed.

    Parameters
    ----------
    forms : from :func:`emulated_forms`.
    arch : for which they are compiled, and which is emulated.
    seed : of the matrices.
    on_step : told what is being run.
    on_block : called once for each block that is done.

    Returns
    -------
    One row a form, with ``counters`` and no time; ``error`` says what went wrong.
    """
    rows = []
    for name, config, shape in forms:
        on_step(f"{name} {describe_config(config)} at {shape}")
        rows.append(_counted(name, config, shape, arch, seed, on_block))
    return rows


def _counted(name: str, config: Config, shape: Shape, arch: Arch, seed: int, on_block: Callable[[], None]) -> Row:
    dtype = str(dict(config).get("dtype", get_spec(name).dtypes[0]))
    case = Case(shape.m, shape.n, shape.k, dtype=dtype)
    a, b, c = case.make(seed)
    c[...] = np.nan
    seen = 0

    def progress(done: int, _total: int) -> None:
        nonlocal seen
        for _ in range(done - seen):
            on_block()
        seen = done

    error, ratio, counters = "", None, None
    try:
        report = launch_form(get_spec(name), config, a, b, c, arch=arch, progress=progress)
        verdict = check(c, expected_product(case, a, b, c, arch, depth_of_split(Run(name, case, config), arch)))
        counters, ratio = report.counters.as_dict(), verdict.error_over_bound
        if not verdict.ok:
            error = f"wrong result: {verdict.message}"
    except Exception as failure:  # of this form; the others are still to run
        error = f"{type(failure).__name__}: {failure}"
    return Row(
        "emulator",
        name,
        describe_config(config),
        dtype,
        "nn",
        *(shape.m, shape.n, shape.k),
        error_over_bound=ratio,
        validated="all" if ratio is not None else "",
        device=f"emulator {arch_name(arch)}",
        counters=counters,
        error=error,
    )
