"""The warning that a machine has no GPU, given once a process."""

from __future__ import annotations

import warnings

_warned = False


def warn_no_gpu(stacklevel: int) -> None:
    """Say once that products are computed on the CPU; ``stacklevel`` as for :func:`warnings.warn`, called here."""
    global _warned  # noqa: PLW0603 - said once a process
    if not _warned:
        _warned = True
        warnings.warn(
            "numba_gemm found no NVIDIA GPU, so products are computed by NumPy's BLAS on the CPU. "
            "device='cpu' says so without a warning; device='cuda' raises instead; `numba-gemm info` tells what "
            "was looked for.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
