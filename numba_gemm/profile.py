"""What a kernel does to memory and to the FMA units, counted: by Nsight Compute on a GPU, by the emulator without one.

Both fill the same :class:`Profile`, whose values carry the names of :class:`numba_gemm.emulator.counters.Counters`.
The emulator counts PTX instructions; ncu counts the machine instructions that ptxas made of them. For the FP32 kernels
these are the same loads, stores, FMAs and barriers one for one; index arithmetic and control flow are not, so
`instructions` and its classes differ by design.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numba_gemm.problem import ITEMSIZE
from numba_gemm.profile_job import Job
from numba_gemm.spec import Addresses, describe_config

EMULATOR = "emulator"
NCU = "ncu"

#: Lanes of a warp.
WARP = 32

_LOAD_SHARED = re.compile(r"\bld\.(?=[\w.:]*\bshared\b)[\w.:]*?(?:v(\d)\.)?[bfsu](\d+)\b")


@dataclass(frozen=True)
class Profile:
    """The counts of one launch.

    Attributes
    ----------
    job : what was launched; its config is the form that ran.
    source : "emulator" or "ncu".
    device : "sm_90" or the GPU's name.
    values : counter name to total over the launch; None where the source has no such count. Beside the fields of
        `Counters` there is `shared_load_values`, 4-byte values that threads read from shared memory.
    classes : instructions by warps: of each PTX opcode class (emulator), or of each pipe (ncu).
    """

    job: Job
    source: str
    device: str
    values: dict[str, float | None]
    classes: dict[str, float] = field(default_factory=dict)

    def ratio(self, above: str, below: str) -> float | None:
        """One count over another; None if either is missing or the divisor is 0."""
        top, bottom = self.values.get(above), self.values.get(below)
        return top / bottom if top is not None and bottom else None

    def derived(self) -> dict[str, float | None]:
        """The quotients that the tables show."""
        return {
            "shared_load_wavefronts_per_request": self.ratio("shared_load_wavefronts", "shared_load_requests"),
            "shared_store_wavefronts_per_request": self.ratio("shared_store_wavefronts", "shared_store_requests"),
            "global_load_sectors_per_request": self.ratio("global_load_sectors", "global_load_requests"),
            "global_store_sectors_per_request": self.ratio("global_store_sectors", "global_store_requests"),
            "fma_per_shared_load_value": self.ratio("ffma_threads", "shared_load_values"),
            "fma_per_shared_load_wavefront": self.ratio("ffma_threads", "shared_load_wavefronts"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        job = self.job
        return {
            "kernel": job.kernel,
            "config": describe_config(job.config or ()),
            "m": job.m,
            "n": job.n,
            "k": job.k,
            "source": self.source,
            "device": self.device,
            "values": self.values,
            "derived": self.derived(),
            "classes": self.classes,
        }


def profile_emulated(job: Job, arch: tuple[int, int], *, progress: Callable[[int, int], None] | None = None) -> Profile:
    """Run a job's PTX on the emulator and count.

    Parameters
    ----------
    job : what to launch.
    arch : the architecture for which it is compiled and emulated.
    progress : called with the blocks done and the blocks in all.
    """
    from numba_gemm.compile import compile_kernel
    from numba_gemm.emulate import run_form
    from numba_gemm.emulator.machine import Machine

    spec, config = job.resolve(arch)
    problem = job.problem()
    plan = spec.plan(problem, config)
    compiled = compile_kernel(spec, plan.launches[plan.main].config, arch)
    machine = Machine(compiled.arch)
    itemsize = ITEMSIZE[problem.dtype]
    # No count depends on the values, since the kernels don't branch on them; zeros are as good as any.
    addresses = Addresses(
        *(machine.alloc(itemsize * count, initialised=True) for count in (job.m * job.k, job.k * job.n, job.m * job.n))
    )
    report = run_form(machine, problem, spec, config, addresses, arch, progress)
    values: dict[str, float | None] = dict(report.counters.as_dict())
    values["shared_load_values"] = shared_load_values(compiled.ptx, report.executed_by_line)
    ran = Job(job.kernel, job.m, job.n, job.k, config)
    classes = {name: float(count) for name, count in report.counters.instructions_by_class.items()}
    return Profile(ran, EMULATOR, compiled.arch, values, classes)


def shared_load_values(ptx: str, executed_by_line: dict[int, int]) -> int:
    """4-byte values that threads read from shared memory, taking each warp that runs a load as whole."""
    total = 0
    lines = ptx.splitlines()
    for number, warps in executed_by_line.items():
        found = _LOAD_SHARED.search(lines[number - 1])
        if found:
            total += warps * WARP * int(found[1] or 1) * int(found[2]) // 32
    return total


def profile_on_gpu(jobs: Sequence[Job]) -> list[Profile]:
    """Profile jobs with Nsight Compute, all in one run of it.

    Raises
    ------
    NoDeviceError, ProfilerError : if there is no GPU or no ncu, or if ncu fails.
    """
    from numba_gemm import ncu
    from numba_gemm.device.context import device_properties
    from numba_gemm.device.driver import driver

    driver()  # raises NoDeviceError with what was looked for
    device = device_properties()
    resolved = [Job(job.kernel, job.m, job.n, job.k, job.resolve(device.compute_capability)[1]) for job in jobs]
    metrics = [*ncu.METRICS.values(), *ncu.PIPES.values()]
    launches = ncu.measure(resolved, metrics)
    profiles = []
    for job, launch in zip(resolved, launches, strict=True):
        values: dict[str, float | None] = {name: launch.get(metric) for name, metric in ncu.METRICS.items()}
        values["shared_load_values"] = None  # ncu's bytes count a broadcast word once, not once for each thread
        pipes = {name: launch.get(metric) for name, metric in ncu.PIPES.items()}
        classes = {name: count for name, count in pipes.items() if count}
        profiles.append(Profile(job, NCU, device.name, values, classes))
    return profiles
