"""Matrix multiplication for NVIDIA GPUs, from NumPy.

>>> import numpy as np, numba_gemm as ng
>>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
>>> ng.matmul(a, b, device="cpu").shape
(2, 4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_gemm._version import __version__
from numba_gemm.api import gemm, kernels, matmul, plan
from numba_gemm.errors import (
    CompileError,
    CudaError,
    KernelConstraintError,
    NoDeviceError,
    NumbaGemmError,
)

if TYPE_CHECKING:
    from numba_gemm.host import Matrix, device_put, pinned_empty
    from numba_gemm.plans import Plan

__all__ = [
    "CompileError",
    "CudaError",
    "KernelConstraintError",
    "Matrix",
    "NoDeviceError",
    "NumbaGemmError",
    "Plan",
    "__version__",
    "device_put",
    "gemm",
    "kernels",
    "matmul",
    "pinned_empty",
    "plan",
]

#: Names whose modules are imported when they are first used, so that the import stays quick.
_LATER = {
    "Matrix": "numba_gemm.host",
    "Plan": "numba_gemm.plans",
    "device_put": "numba_gemm.host",
    "pinned_empty": "numba_gemm.host",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
