"""Matrix multiplication for NVIDIA GPUs, from NumPy.

>>> import numpy as np, numba_gemm as ng
>>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
>>> ng.matmul(a, b, device="cpu").shape
(2, 4)
"""

from numba_gemm._version import __version__
from numba_gemm.api import gemm, kernels, matmul
from numba_gemm.errors import (
    CompileError,
    CudaError,
    KernelConstraintError,
    NoDeviceError,
    NumbaGemmError,
)

__all__ = [
    "CompileError",
    "CudaError",
    "KernelConstraintError",
    "NoDeviceError",
    "NumbaGemmError",
    "__version__",
    "gemm",
    "kernels",
    "matmul",
]
