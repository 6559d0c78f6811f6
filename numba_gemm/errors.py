"""The exceptions of numba_gemm. Each message says what failed and what to do about it."""

from __future__ import annotations


class NumbaGemmError(Exception):
    """Base of the library's own exceptions."""


class NoDeviceError(NumbaGemmError, RuntimeError):
    """A GPU was asked for and none can be used; the message says what was looked for.

    Attributes
    ----------
    reason : that alone, without the remedy.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class KernelConstraintError(NumbaGemmError, ValueError):
    """A named kernel can't take this problem; the message names the constraint and a kernel that can."""


class CompileError(NumbaGemmError, RuntimeError):
    """A kernel could not be compiled or assembled; carries the tool's log and the PTX.

    Attributes
    ----------
    log : the assembler's or compiler's output, empty when there is none.
    ptx_path : where the PTX that failed was written, or None.
    """

    def __init__(self, message: str, *, log: str = "", ptx_path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.ptx_path = ptx_path


class CudaError(NumbaGemmError, RuntimeError):
    """The CUDA driver reported an error; the message names the call, the kernel and its launch."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code
