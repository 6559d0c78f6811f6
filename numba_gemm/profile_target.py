"""The program that ncu watches: launches each job once. ``python -m numba_gemm.profile_target v7:256x256x64 …``

A job is a string of :class:`numba_gemm.profile.Job`. The inputs are copied from the host, so the jobs' kernels are the
only ones that run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from numba_gemm.compile import compile_kernel
from numba_gemm.device.context import Context, current_context
from numba_gemm.device.memory import DeviceBuffer, copy_to_device
from numba_gemm.device.module import load
from numba_gemm.device.stream import synchronize_stream
from numba_gemm.execute import Prepared
from numba_gemm.profile import Job


def launch(job: Job, context: Context) -> None:
    """Launch a job's kernel once and wait for it."""
    spec, config = job.resolve(context.device.compute_capability)
    prepared = Prepared(
        spec=spec,
        config=config,
        function=load(compile_kernel(spec, config, context.device.compute_capability), context),
        problem=job.problem(),
        grid=(spec.grid(job.m, job.n), 1, 1),
        block=(spec.threads, 1, 1),
    )
    with (
        DeviceBuffer(4 * job.m * job.k, 0) as a,
        DeviceBuffer(4 * job.k * job.n, 0) as b,
        DeviceBuffer(4 * job.m * job.n, 0) as c,
    ):
        copy_to_device(a.pointer, np.ones((job.m, job.k), np.float32), 0)
        copy_to_device(b.pointer, np.ones((job.k, job.n), np.float32), 0)
        prepared.launch(a.pointer, b.pointer, c.pointer, 0)
        synchronize_stream(0, after=f"profiled {job}")


def main(arguments: Sequence[str]) -> int:
    """Launch the jobs in order."""
    jobs = [Job.parse(text) for text in arguments]
    context = current_context()
    for job in jobs:
        launch(job, context)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
