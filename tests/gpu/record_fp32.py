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

RECORDING = Recording(
    path=ROOT / "tests" / "data" / "h200_fp32.json",
    seed=SEED,
    named="entry",
    kernels=KERNELS,
    cases=cases,
    plan=plan,
    words=entry_of,
    arch=ARCH,
    sm_count=SM_COUNT,
    emulate=emulate,
    bits_of=bits_of,
    canonical=lambda matrix: canonical(bits_of(matrix)),
    digest=digest,
)


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", RECORDING))
