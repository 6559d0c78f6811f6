"""Run the tensor-core ladder on the products of ``tests/halves_inputs.py`` and record the GPU's results, bit for bit.

Run by hand, on a machine with an H200, from the repository's root::

    python tests/gpu/record_tensorcore.py

Each output is compared with the emulator's at once; differences are listed, and make the exit status 1, as does a
byte that was written outside the output. The record and the options are described in ``recording.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from halves_inputs import ARCH, SEED, SM_COUNT, bits_of, canonical, cases, digest, emulate, plan  # noqa: E402
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
    words=lambda spec, config: describe_config(config),
    arch=ARCH,
    sm_count=SM_COUNT,
    emulate=emulate,
    bits_of=bits_of,
    canonical=canonical,
    digest=digest,
)


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", RECORDING))
