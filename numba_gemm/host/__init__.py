"""Products of NumPy arrays through the GPU, and operands that stay on it."""

from numba_gemm.host.engines import release
from numba_gemm.host.matrix import Matrix, device_put
from numba_gemm.host.multiply import multiply_host
from numba_gemm.host.pinned import pinned_empty

__all__ = ["Matrix", "device_put", "multiply_host", "pinned_empty", "release"]
