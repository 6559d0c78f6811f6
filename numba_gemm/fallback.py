"""The kernels in CUDA C++ that stand in where the first choice can't run.

=========================  ========================================  =============================================
``v1-nvcc`` … ``v7-nvcc``  twins of the FP32 ladder, the same bits   where numba-cuda is missing or fails to compile
``t1-nvcc`` … ``t3-nvcc``  the three lesson kernels in WMMA          on GPUs before sm_80
=========================  ========================================  =============================================

Each can be asked for by name too, on any GPU that it runs on. Nothing here imports Numba or CUDA.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from numba_gemm.compile.cuda_source import CUDA_FOLDER, CudaSource, supported_archs
from numba_gemm.errors import CompileError, KernelConstraintError
from numba_gemm.fp32 import (
    repack,
    v1_naive,
    v2_coalesced,
    v3_tiled,
    v4_column,
    v5_block,
    v6_vector,
    v7_warptile,
)
from numba_gemm.spec import KernelSpec
from numba_gemm.tensorcore.specs import T1, T2, T3

_log = logging.getLogger("numba_gemm")

#: The oldest GPUs with tensor cores; CUDA 12 is the last toolkit that compiles for them.
OLDEST_ARCH = (7, 0)
#: The oldest GPUs that CUDA 13 compiles for.
OLDEST_ARCH_CUDA_13 = (7, 5)
#: The oldest GPUs that the kernels in PTX run on, and bfloat16 with them.
FIRST_PTX_ARCH = (8, 0)


def _build(file: str) -> Callable[..., CudaSource]:
    def build(**parameters: int | str) -> CudaSource:
        macros = dict(parameters)
        if macros.pop("dtype", None) == "bfloat16":
            macros["BFLOAT16"] = 1
        for matrix in "ab":
            if macros.pop(f"{matrix}_layout", "row") == "column":
                macros[f"{matrix}_column_major"] = 1
        defines = tuple((key.upper(), str(value)) for key, value in macros.items())
        return CudaSource(CUDA_FOLDER / f"{file}.cu", defines)

    return build


def _twin(spec: KernelSpec, file: str, headers: tuple[str, ...], *, min_blocks_per_sm: int | None = None) -> KernelSpec:
    """The spec of a kernel's twin: the same geometry and forms, another source."""
    return replace(
        spec,
        name=f"{spec.name}-nvcc",
        title=f"{spec.title} (C++)",
        build=_build(file),
        source="cuda",
        min_arch=OLDEST_ARCH,
        min_blocks_per_sm=min_blocks_per_sm or spec.min_blocks_per_sm,
        helpers=("numba_gemm.compile.cuda_source",),
        files=(f"{file}.cu", *headers),
        entry_name=None,
    )


_FP32 = ("sgemm.cuh",)
_WMMA = ("wmma_gemm.cuh",)
_WMMA_TILES = ("wmma_gemm.cuh", "wmma_tiles.cuh")

_SPECS = (
    _twin(v1_naive.SPEC, "v1_naive", _FP32),
    _twin(v2_coalesced.SPEC, "v2_coalesced", _FP32),
    _twin(v3_tiled.SPEC, "v3_tiled", _FP32),
    _twin(v4_column.SPEC, "v4_column", _FP32, min_blocks_per_sm=2),
    _twin(v5_block.SPEC, "v5_block", _FP32, min_blocks_per_sm=2),
    _twin(v6_vector.SPEC, "v6_vector", _FP32, min_blocks_per_sm=2),
    _twin(v7_warptile.SPEC, "v7_warptile", _FP32),
    replace(
        _twin(T1, "t1_direct", _WMMA),
        idea="WMMA: a warp per 16×16 tile, fragments straight from global memory",
        thread_tile=(16, 16),
    ),
    replace(
        _twin(T2, "t2_shared", _WMMA_TILES, min_blocks_per_sm=2),
        idea="WMMA: padded shared tiles, fragments reused from registers",
        thread_tile=(16, 16),
    ),
    replace(
        _twin(T3, "t3_async", _WMMA_TILES, min_blocks_per_sm=2),
        idea="WMMA: the next tile is in flight, in registers",
        thread_tile=(16, 16),
    ),
)

#: The fallbacks by name, in ladder order.
FALLBACKS: dict[str, KernelSpec] = {spec.name: spec for spec in _SPECS}

#: Kernels without a twin of their own → the rung whose twin stands in.
STAND_INS = {"v8": "v7", "gemv": "v7", "skinny": "v7", "thin": "v7", "outer": "v7"}

#: Bytes of an element → the twin of the kernel that repacks it (``fp32.repack.SPECS``).
#: It has the forms that fill no rows up (``fp32.repack.one_by_one``).
REPACK: dict[int, KernelSpec] = {
    size: replace(_twin(spec, "repack", ()), configs=tuple(one for one in spec.configs if not dict(one).get("filled")))
    for size, spec in repack.SPECS.items()
}


def fallback_for(name: str, arch: tuple[int, int], reason: str, *, dtype: str | None = None) -> KernelSpec | None:
    """The kernel in CUDA C++ that stands in for another, or None if there is none.

    For ``v1`` … ``v7`` and ``repack`` (of float32) that is the twin, for other FP32 kernels that of ``v7``; the caller
    asks when Numba can't compile. For ``t1`` … ``t3`` on a GPU before sm_80 it is the WMMA kernel of the same step, for
    ``t4`` there the last of them, ``t3-nvcc``. The choice is logged, once for each kernel and reason, as a warning of
    the logger ``numba_gemm``.

    Parameters
    ----------
    name : the kernel that can't be used.
    arch : compute capability of the GPU.
    reason : why it can't, in a few words, for the log.
    dtype : the problem's, where the kernel takes several.

    Raises
    ------
    KernelConstraintError : if the GPU is too old for every kernel, or for the dtype; says what is needed.
    CompileError : if it is too old for the installed CUDA toolkit, or no CUDA C++ compiler is installed.
    """
    if name.startswith("t"):
        if arch >= FIRST_PTX_ARCH:
            return None
        spec = FALLBACKS.get("t3-nvcc" if name == "t4" else f"{name}-nvcc")
    else:
        spec = REPACK[4] if name == "repack" else FALLBACKS.get(f"{STAND_INS.get(name, name)}-nvcc")
    if spec is None:
        return None
    check_arch(spec, arch, dtype=dtype)
    oldest = min(supported_archs())
    if arch < oldest:
        raise CompileError(_too_old(arch, f"the installed CUDA toolkit begins at {_dotted(oldest)}"))
    _announce(name, spec.name, reason)
    return spec


def check_arch(spec: KernelSpec, arch: tuple[int, int], *, dtype: str | None = None) -> None:
    """Raise a :class:`KernelConstraintError` if a fallback can't run on a GPU, or not with this dtype."""
    if arch < spec.min_arch:
        raise KernelConstraintError(_too_old(arch, f"{spec.name} needs {_dotted(spec.min_arch)}"))
    if dtype == "bfloat16" and arch < FIRST_PTX_ARCH:
        raise KernelConstraintError(
            f"bfloat16 needs compute capability {_dotted(FIRST_PTX_ARCH)} or later and this GPU has {_dotted(arch)}; "
            "convert the matrices to float16 or float32"
        )


def _too_old(arch: tuple[int, int], why: str) -> str:
    return (
        f"this GPU has compute capability {_dotted(arch)} and {why}; needed is a GPU of "
        f"{_dotted(OLDEST_ARCH_CUDA_13)} or later, or one of {_dotted(OLDEST_ARCH)} or 7.2 with a CUDA 12.x toolkit "
        "(pip install 'cuda-toolkit[nvcc]==12.9.*'). device='cpu' runs without one"
    )


@functools.cache
def _announce(name: str, fallback: str, reason: str) -> None:
    """One line in the log for each kernel and reason."""
    _log.warning("kernel %s is used in place of %s: %s", fallback, name, reason)


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"
