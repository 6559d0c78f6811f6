"""Run the tensor-core ladder on the products of ``tests/halves_inputs.py`` and record the GPU's results, bit for bit.

Run by hand, on a machine with an H200, from the repository's root::

    python tests/gpu/record_tensorcore.py

Each output is compared with the emulator's at once; differences are listed, and make the exit status 1, as does a
byte that was written outside the output. The record and the options are described in ``recording.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from halves_inputs import ARCH, SEED, SM_COUNT, HalfCase, bits_of, canonical, cases, digest, emulate, plan  # noqa: E402
from recording import Recording, main  # noqa: E402

from numba_gemm.catalog import kernels_for  # noqa: E402
from numba_gemm.spec import describe_config  # noqa: E402

RECORDING = Recording(
    path=ROOT / "tests" / "data" / "h200_tensorcore.json",
    seed=SEED,
    named="form",
    kernels=kernels_for("float16"),
    cases=cases,
    plan=plan,
    arch=ARCH,
    emulate=emulate,
    bits_of=bits_of,
    canonical=canonical,
    digest=digest,
)


class Gpu:
    """Products by the library's kernels on device 0."""

    def __init__(self) -> None:
        from numba_gemm.device.context import current_context

        self.context = current_context()
        self.device = self.context.device
        self.name = self.device.name
        if (self.device.compute_capability, self.device.sm_count) != (ARCH, SM_COUNT):
            raise SystemExit(f"this record is of an H200; here is {self.name}")

    def multiply(self, kernel: str, case: HalfCase, form: str = "") -> tuple[np.ndarray, str]:
        """C, and the form that ran: the one that is described, or the one that is chosen."""
        from numba_gemm.device.driver import check, driver
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import synchronize_stream
        from numba_gemm.execute import prepare_form

        problem, spec, config, images = plan(kernel, case, form)
        buffers = [DeviceBuffer(image.flat.nbytes, 0) for image in images]
        try:
            for buffer, image in zip(buffers, images, strict=True):
                host = image.flat.__array_interface__["data"][0]
                check(driver().cuMemcpyHtoD(buffer.pointer, host, image.flat.nbytes), "cuMemcpyHtoD")
            prepared = prepare_form(problem, spec, config, self.context)
            starts = [
                buffer.pointer + image.offset * image.flat.itemsize
                for buffer, image in zip(buffers, images, strict=True)
            ]
            prepared.launch(*starts, 0)
            synchronize_stream(0, after=f"{kernel} on {case}")
            target, before = images[2], images[2].flat.copy()
            host = target.flat.__array_interface__["data"][0]
            check(driver().cuMemcpyDtoH(host, buffers[2].pointer, target.flat.nbytes), "cuMemcpyDtoH")
            result = target.view.copy()
            target.view[...] = 0
            outside = bits_of(target.flat) != bits_of(before)
            inside = np.zeros_like(before)
            np.lib.stride_tricks.as_strided(inside[target.offset :], target.view.shape, target.view.strides)[...] = 1
            if (outside & (inside == 0)).any():
                raise RuntimeError("elements outside the output were written")
            return result, describe_config(config)
        finally:
            for buffer in buffers:
                buffer.free()


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", RECORDING, Gpu))
