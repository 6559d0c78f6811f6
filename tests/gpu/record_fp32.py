"""Run the FP32 kernels on the products of ``tests/fp32_inputs.py`` and record what the GPU gives, bit for bit.

Run by hand, on a machine with an H200, from the repository's root::

    python tests/gpu/record_fp32.py

GPU and emulator run the same form of a kernel on matrices that lie alike in memory: the same strides, the same place
within 16 bytes, NaNs round every element. Outputs are poisoned before each launch, and each is compared with the
emulator's at once; differences are listed, and make the exit status 1, as does an element that was written outside the
output. The record and the options are described in ``recording.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fp32_inputs import (  # noqa: E402
    ARCH,
    KERNELS,
    SEED,
    SM_COUNT,
    bits_of,
    canonical,
    cases,
    digest,
    emulate,
    entry_of,
    plan,
)
from recording import Recording, main  # noqa: E402

from numba_gemm.cases import Case, Matrix  # noqa: E402

RECORDING = Recording(
    path=ROOT / "tests" / "data" / "h200_fp32.json",
    seed=SEED,
    named="entry",
    kernels=KERNELS,
    cases=cases,
    plan=plan,
    arch=ARCH,
    emulate=emulate,
    bits_of=bits_of,
    canonical=lambda matrix: canonical(bits_of(matrix)),
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

    def multiply(self, kernel: str, case: Case, form: str = "") -> tuple[Matrix, str]:
        """C, and the form that ran: the one that is described, or the one that is chosen."""
        from numba_gemm.device.driver import check, driver
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import synchronize_stream
        from numba_gemm.execute import prepare_form

        problem, spec, config, images = plan(kernel, case, form)
        buffers = [DeviceBuffer(image.flat.nbytes, 0) for image in images]
        try:
            for buffer, image in zip(buffers, images, strict=True):
                host = image.flat.ctypes.data
                check(driver().cuMemcpyHtoD(buffer.pointer, host, image.flat.nbytes), "cuMemcpyHtoD")
            prepared = prepare_form(problem, spec, config, self.context)
            starts = [buffer.pointer + 4 * image.offset for buffer, image in zip(buffers, images, strict=True)]
            prepared.launch(*starts, 0)
            synchronize_stream(0, after=f"{kernel} on {case}")
            after = np.empty_like(images[2].flat)
            check(driver().cuMemcpyDtoH(after.ctypes.data, buffers[2].pointer, after.nbytes), "cuMemcpyDtoH")
            return images[2].result(after), entry_of(spec, config)
        finally:
            for buffer in buffers:
                buffer.free()


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", RECORDING, Gpu))
