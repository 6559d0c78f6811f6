"""The program that ncu watches: launches each job once. ``python -m numba_gemm.profile_target v7:256x256x64 …``

A job is a string of :class:`numba_gemm.profile_job.Job`. The inputs are copied from the host, so the jobs' kernels are
the only ones that run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from numba_gemm.device.context import Context, current_context
from numba_gemm.device.memory import DeviceBuffer, copy_to_device
from numba_gemm.device.stream import synchronize_stream
from numba_gemm.execute import prepare_form
from numba_gemm.problem import ITEMSIZE
from numba_gemm.profile_job import Job


def launch(job: Job, context: Context) -> None:
    """Launch a job's kernel once and wait for it."""
    spec, config = job.resolve(context.device.compute_capability)
    problem = job.problem()
    prepared = prepare_form(problem, spec, config, context)
    itemsize = ITEMSIZE[problem.dtype]
    with (
        DeviceBuffer(itemsize * job.m * job.k, 0) as a,
        DeviceBuffer(itemsize * job.k * job.n, 0) as b,
        DeviceBuffer(itemsize * job.m * job.n, 0) as c,
    ):
        for buffer in (a, b):
            # A copy and not a memset, which would be one more kernel; the pattern is 1 in BF16 and 1.875 in FP16.
            copy_to_device(buffer.pointer, np.full((1, buffer.nbytes // 2), 0x3F80, np.uint16), 0)
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
