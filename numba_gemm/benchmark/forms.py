"""The resource report of compiled kernels: every form for several architectures, with no GPU, on all cores."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

from numba_gemm.catalog import LADDER, get_spec
from numba_gemm.compile import CompiledKernel, arch_name, compile_kernel
from numba_gemm.compile.occupancy import Occupancy, occupancy, sm_limits
from numba_gemm.compile.sass import SassReport, disassemble
from numba_gemm.errors import CompileError
from numba_gemm.processes import ignore_interrupt, usable_cores
from numba_gemm.spec import Config, Geometry, KernelSpec, describe_config

Arch = tuple[int, int]

#: Architectures that are compiled for where there is no GPU to ask: A100, H100/H200, and consumer Blackwell.
REPORT_ARCHS: tuple[Arch, ...] = ((8, 0), (9, 0), (12, 0))

#: Forms that a report of several kernels shows of one with a form for each problem; ``inspect KERNEL`` shows all.
SHOWN_OF_MANY = 3


@dataclass(frozen=True)
class FormReport:
    """What one compiled form of a kernel takes on one architecture.

    ``loop`` and ``whole`` count machine instructions by class in the main loop and in the whole kernel; empty if no
    disassembler is installed, and ``note`` then says so. ``error`` is why it didn't compile, empty if it did.
    """

    kernel: str
    config: str
    arch: str
    threads: int = 0
    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    limited_by: str = ""
    assembler: str = ""
    loop: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def all_forms(kernels: Sequence[str], archs: Sequence[Arch]) -> list[tuple[str, Config, Arch]]:
    """Every compiled form of the named kernels on every architecture, in ladder order."""
    return [
        (name, config, arch)
        for name in kernels
        for config in get_spec(name).configs
        for arch in archs
        if get_spec(name).runs_on(arch)
    ]


def typed_forms(name: str, arch: Arch, dtype: str | None = None) -> list[Config]:
    """The compiled forms of a kernel for one element type whose shared memory an architecture has.

    ``dtype`` None, or one that the kernel doesn't take, is its first; machine code differs in the type's name alone.
    """
    spec = get_spec(name)
    wanted = dtype if dtype in spec.dtypes else spec.dtypes[0]
    limits = sm_limits(arch)
    room = limits.shared_bytes - limits.reserved_shared_bytes
    return [
        config
        for config in spec.configs
        if dict(config).get("dtype", wanted) == wanted and spec.geometry(config).shared_bytes <= room
    ]


def shown_forms(
    kernels: Sequence[str], archs: Sequence[Arch], dtype: str | None = None
) -> list[tuple[str, Config, Arch]]:
    """The forms that a report of several kernels shows, in ladder order.

    One element type of each kernel, for row-major matrices; and of a kernel that has a form for each problem the
    largest, the middle and the smallest tile.
    """
    shown = []
    for name in kernels:
        spec = get_spec(name)
        for arch in archs:
            forms = typed_forms(name, arch, dtype) if spec.runs_on(arch) else []
            forms = [config for config in forms if "column" not in dict(config).values()]
            if spec.select is not None and len(forms) > SHOWN_OF_MANY:
                forms = [forms[0], forms[len(forms) // 2], forms[-1]]
            shown += [(name, config, arch) for config in forms]
    return shown


def form_occupancy(spec: KernelSpec, kernel: CompiledKernel, arch: Arch, config: Config = ()) -> Occupancy:
    """How many blocks of a compiled form fit on one SM."""
    geometry = spec.geometry(config) if config else Geometry(spec.block_tile, spec.threads)
    return occupancy(
        arch,
        threads=geometry.threads,
        registers=kernel.resources.registers,
        shared_bytes=kernel.resources.shared_bytes + geometry.shared_bytes,
    )


def report_form(name: str, config: Config, arch: Arch, *, sass: bool = True) -> FormReport:
    """Compile (or take from the cache) one form and report what it takes; a failure is reported, not raised."""
    spec = get_spec(name)
    described = describe_config(config)
    try:
        kernel = compile_kernel(spec, config, arch)
    except Exception as error:  # a report of many kernels shows a failing one as a row
        return FormReport(name, described, arch_name(arch), error=_first_line(error))
    resources = kernel.resources
    fits = form_occupancy(spec, kernel, arch, config)
    geometry = spec.geometry(config)
    machine_code: SassReport | None = None
    note = ""
    if sass:
        try:
            machine_code = disassemble(kernel.cubin)
        except CompileError as error:
            note = _first_line(error)
    return FormReport(
        kernel=name,
        config=described,
        arch=kernel.arch,
        threads=geometry.threads,
        registers=resources.registers,
        spill_bytes=resources.spill_store_bytes + resources.spill_load_bytes,
        stack_bytes=resources.stack_bytes,
        shared_bytes=resources.shared_bytes + geometry.shared_bytes,
        blocks_per_sm=fits.blocks,
        occupancy=fits.fraction,
        limited_by=fits.limited_by,
        assembler=kernel.assembler,
        loop=dict(machine_code.main_loop_mix()) if machine_code else {},
        whole=dict(machine_code.mix()) if machine_code else {},
        note=note,
    )


def report_forms(
    forms: Sequence[tuple[str, Config, Arch]],
    *,
    workers: int | None = None,
    sass: bool = True,
    on_done: Callable[[FormReport], None] = lambda _: None,
) -> list[FormReport]:
    """Reports of many forms, compiled by several processes, since Numba compiles one kernel at a time in each.

    Parameters
    ----------
    forms : from :func:`all_forms`.
    workers : processes; None takes one a core, 1 compiles in this process.
    sass : whether to disassemble and count instructions.
    on_done : called with each report as it arrives, in any order.

    Returns
    -------
    One report a form, in the order of ``forms``.
    """
    workers = min(workers or usable_cores(), len(forms))
    if workers <= 1:
        reports = []
        for form in forms:
            reports.append(report_form(*form, sass=sass))
            on_done(reports[-1])
        return reports
    found: dict[int, FormReport] = {}
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=ignore_interrupt
    )
    try:
        # The largest kernels first, so that no core is left with a long one at the end.
        ladder = list(LADDER)
        order = sorted(
            range(len(forms)), key=lambda at: ladder.index(forms[at][0]) if forms[at][0] in LADDER else -1, reverse=True
        )
        futures = {executor.submit(report_form, *forms[index], sass=sass): index for index in order}
        for future in as_completed(futures):
            index = futures[future]
            try:
                found[index] = future.result()
            except Exception as error:  # the process died
                name, config, arch = forms[index]
                found[index] = FormReport(name, describe_config(config), arch_name(arch), error=_first_line(error))
            on_done(found[index])
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            with contextlib.suppress(OSError):
                child.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
    return [found[index] for index in range(len(forms))]


def fmas(mix: dict[str, int]) -> int:
    """Scalar FP32 multiply-adds in an instruction mix (a packed FFMA2 counts twice)."""
    return mix.get("FFMA", 0) + 2 * mix.get("FFMA2", 0)


def tensor_mmas(mix: dict[str, int]) -> int:
    """Tensor-core multiply-adds of matrices in an instruction mix."""
    return sum(count for name, count in mix.items() if name.startswith(("HMMA", "HGMMA")))


def shared_loads(mix: dict[str, int]) -> int:
    """Shared-memory load instructions in an instruction mix, of any width."""
    return sum(count for name, count in mix.items() if name.partition(".")[0] in ("LDS", "LDSM"))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
