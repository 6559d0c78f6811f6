"""Many kernels compiled side by side, in processes, before they are needed: Numba compiles one at a time in each."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, wait

from numba_gemm.compile.cache import cache_directory
from numba_gemm.compile.compiler import compile_kernel, is_cached
from numba_gemm.errors import CompileError
from numba_gemm.processes import ignore_interrupt, usable_cores
from numba_gemm.spec import Config, KernelSpec

#: With fewer kernels to compile, starting processes takes longer than compiling them here.
FEWEST = 3


def compile_ahead(
    forms: Iterable[tuple[KernelSpec, Config]], arch: tuple[int, int], *, workers: int | None = None
) -> int:
    """Fill the disk cache with forms of kernels; returns how many were not there.

    One that doesn't compile is passed over: who needs it is told why. Without a disk cache nothing is done.

    Parameters
    ----------
    forms : kernels, each with the parameters of one compiled form; the same form may come again.
    arch : compute capability to compile for.
    workers : processes; None: one for each core that this process may use.
    """
    if cache_directory() is None:
        return 0
    missing = [form for form in dict.fromkeys(forms) if not is_cached(*form, arch)]
    workers = min(workers or usable_cores(), len(missing))
    if len(missing) < FEWEST or workers < 2:
        for spec, config in missing:
            _compile(spec, config, arch)
        return len(missing)
    # Not by fork: this process may have a CUDA context.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=ignore_interrupt) as pool:
        wait([pool.submit(_compile, spec, config, arch) for spec, config in missing])
    return len(missing)


def _compile(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> None:
    with contextlib.suppress(CompileError):
        compile_kernel(spec, config, arch)
