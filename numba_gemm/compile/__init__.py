"""Source → PTX → cubin: Numba's front end, one assembler path, a disk cache and a resource report.

:func:`compile_kernel` is the door. It imports Numba only when a kernel isn't in the cache, and the door itself is
opened only when a kernel is wanted: importing the library imports nothing that compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba_gemm.compile.compiler import arch_name, compile_kernel, kernel_ptx
    from numba_gemm.compile.kernel import CompiledKernel, Resources

__all__ = ["CompiledKernel", "Resources", "arch_name", "compile_kernel", "kernel_ptx"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from numba_gemm.compile import compiler

    return getattr(compiler, name)
