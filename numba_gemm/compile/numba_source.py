"""Numba CUDA Python → PTX. Everything that touches Numba's internals is in this one module.

Numba only compiles here. The PTX it returns is assembled, loaded and launched like any other kernel's.
Compiling needs no GPU, only the NVVM library of a CUDA toolkit (``pip install "numba-gemm[cu13]"``).
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_gemm.compile.unroll import expand_unrolled
from numba_gemm.errors import CompileError

# `pip install --target` skips the .pth file by which numba-cuda takes the place of Numba's old CUDA target.
with contextlib.suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 reads the name that NumPy 2.5 removed
    np.row_stack = np.vstack  # type: ignore[attr-defined]

try:
    from llvmlite import ir
    from numba import cuda
    from numba.core import types as _types
    from numba.cuda.core import targetconfig as _target_config
    from numba.cuda.extending import intrinsic
except ImportError as error:  # pragma: no cover - depends on the installation
    raise CompileError(
        f"numba-cuda could not be imported ({error}); install it with: pip install 'numba-gemm[cu13]'"
    ) from error

types: Any = _types

FLOAT_POINTER = types.CPointer(types.float32)

#: The parameters of every FP32 GEMM kernel: A, B, C, M, N, K, lda, ldb, ldc, alpha, beta.
GEMM_SIGNATURE = types.void(
    FLOAT_POINTER,
    FLOAT_POINTER,
    FLOAT_POINTER,
    *[types.uint32] * 3,
    *[types.int64] * 3,
    *[types.float32] * 2,
)

#: The same, and the strides between the matrices of a batch.
GEMM_BATCHED_SIGNATURE = types.void(*GEMM_SIGNATURE.args, *[types.int64] * 3)


def _repack_signature(element: Any) -> Any:
    """Source, target; rows, columns; row and column stride of each, batch stride of each."""
    pointer = types.CPointer(element)
    return types.void(pointer, pointer, *[types.uint32] * 2, *[types.int64] * 6)


def _repack_pair_signature(element: Any) -> Any:
    """Those parameters of two copies; blocks of the first; matrices in each batch."""
    return types.void(*_repack_signature(element).args * 2, *[types.uint32] * 3)


#: W, x, y; J outputs, K, depth of one part of K; ldw, stride of x, of y; alpha, beta; batch strides of W, x, y; stride
#: from one part's y to the next.
GEMV_SIGNATURE = types.void(*GEMM_BATCHED_SIGNATURE.args, types.int64)

#: Partial sums, y; J, number of parts; stride of y; alpha, beta; batch stride of y.
GEMV_SUM_SIGNATURE = types.void(
    FLOAT_POINTER, FLOAT_POINTER, *[types.uint32] * 2, types.int64, *[types.float32] * 2, types.int64
)

#: W, X, C, workspace; J, I, K; ldw, strides of X along I and K, of C along I and J; alpha, beta; batch strides.
SKINNY_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 4, *[types.uint32] * 3, *[types.int64] * 5, *[types.float32] * 2, *[types.int64] * 3
)

#: Workspace, C; J, I, K, blocks of the product's launch; strides of C along I and J; alpha, beta; batch stride of C.
SKINNY_FIXUP_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 2, *[types.uint32] * 4, *[types.int64] * 2, *[types.float32] * 2, types.int64
)

#: W, X, C; J, I, K, depth of one part of K; ldw, strides of X along I and K, of C along I and J; alpha, beta; batch
#: strides of W, X, C; stride from one part's C to the next.
THIN_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 3, *[types.uint32] * 4, *[types.int64] * 5, *[types.float32] * 2, *[types.int64] * 4
)

#: Partial sums, C; J, I, number of parts; strides of C along I and J; alpha, beta; batch stride of C.
THIN_SUM_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 2, *[types.uint32] * 3, *[types.int64] * 2, *[types.float32] * 2, types.int64
)

#: A, B, C; M, N, K; strides of A along M and K, ldb, ldc; alpha, beta; batch strides of A, B, C.
OUTER_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 3, *[types.uint32] * 3, *[types.int64] * 4, *[types.float32] * 2, *[types.int64] * 3
)

#: As GEMM_BATCHED_SIGNATURE; workspace; tiles whose k is shared, blocks that share it, stages of each such block.
GEMM_SPLIT_SIGNATURE = types.void(*GEMM_BATCHED_SIGNATURE.args, FLOAT_POINTER, *[types.uint32] * 3)

#: Workspace, C; M, N; ldc; alpha, beta; batch stride of C; shared tiles, blocks, stages of a block, stages in K.
SPLIT_K_SUM_SIGNATURE = types.void(
    *[FLOAT_POINTER] * 2, *[types.uint32] * 2, types.int64, *[types.float32] * 2, types.int64, *[types.uint32] * 4
)

#: Numba's view of the parameter lists in ``numba_gemm.abi``.
SIGNATURES = {
    "gemm_f32_split": GEMM_SPLIT_SIGNATURE,
    "split_k_sum": SPLIT_K_SUM_SIGNATURE,
    "gemm_f32": GEMM_SIGNATURE,
    "gemm_f32_batched": GEMM_BATCHED_SIGNATURE,
    "gemv": GEMV_SIGNATURE,
    "gemv_sum": GEMV_SUM_SIGNATURE,
    "skinny": SKINNY_SIGNATURE,
    "skinny_fixup": SKINNY_FIXUP_SIGNATURE,
    "thin": THIN_SIGNATURE,
    "thin_sum": THIN_SUM_SIGNATURE,
    "outer": OUTER_SIGNATURE,
    "repack_16": _repack_signature(types.uint16),
    "repack_32": _repack_signature(types.uint32),
    "repack_pair_16": _repack_pair_signature(types.uint16),
    "repack_pair_32": _repack_pair_signature(types.uint32),
}


def numba_to_ptx(
    function: Callable[..., None],
    abi: str,
    arch: tuple[int, int],
    *,
    threads: int,
    min_blocks_per_sm: int = 1,
    name: str,
) -> str:
    """Compile a plain Python kernel function to PTX.

    Parameters
    ----------
    function : the kernel's Python function, not decorated.
    abi : key of :data:`SIGNATURES`.
    arch : compute capability ``(major, minor)``.
    threads, min_blocks_per_sm : launch bounds, from which ptxas takes its register limit.
    name : the entry's name in the PTX, in place of Numba's mangled one.

    Returns
    -------
    PTX text with one entry called ``name``.
    """
    try:
        ptx, _ = cuda.compile_ptx(
            expand_unrolled(function), SIGNATURES[abi], cc=arch, launch_bounds=(threads, min_blocks_per_sm)
        )
    except Exception as error:
        raise CompileError(f"Numba could not compile kernel {name!r} for sm_{arch[0]}{arch[1]}: {error}") from error
    return _rename_entry(ptx, name)


def _rename_entry(ptx: str, name: str) -> str:
    found = re.search(r"\.entry\s+([\w$]+)", ptx)
    if found is None:
        raise CompileError(f"Numba's PTX for kernel {name!r} has no entry")
    mangled = found.group(1)
    # Numba's environment global carries the mangled name with another prefix; it is unused on the GPU.
    environment = re.search(r"^\.common \.global .*?NumbaEnv[^;]*;\n", ptx, re.M)
    if environment is not None:
        ptx = ptx.replace(environment.group(0), "")
    return ptx.replace(mangled, name)


def compiled_for() -> tuple[int, int]:
    """The compute capability that is being compiled for, while an intrinsic emits its code."""
    flags = _target_config.ConfigStack().top()
    return tuple(flags.compute_capability[:2])  # type: ignore[return-value]


def device_function(function: Callable[..., Any]) -> Any:
    """A helper that is inlined into the kernels that call it, without asking for a GPU."""
    return cuda.jit(device=True, inline="always")(function)


__all__ = [
    "FLOAT_POINTER",
    "GEMM_SIGNATURE",
    "SIGNATURES",
    "compiled_for",
    "cuda",
    "device_function",
    "intrinsic",
    "ir",
    "numba_to_ptx",
    "types",
]
