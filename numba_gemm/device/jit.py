"""The driver's own PTX assembler: the last resort, which needs a GPU but no toolkit."""

from __future__ import annotations

import ctypes

from numba_gemm.device.context import current_context
from numba_gemm.device.driver import describe, driver

_LOG_BYTES = 64 * 1024


def driver_link(ptx: str, arch: str) -> tuple[bytes | None, str, str]:
    """Assemble PTX with ``cuLink*`` for ``arch``.

    Returns
    -------
    The cubin (None if the PTX was refused), the information log and the error log.
    """
    current_context()
    cu = driver()
    option = cu.CUjit_option
    # cuda-python takes bytes for these two options, and the driver writes into them.
    info, errors = bytes(_LOG_BYTES), bytes(_LOG_BYTES)
    target = getattr(cu.CUjit_target, "CU_TARGET_COMPUTE_" + arch.removeprefix("sm_").upper())
    options = {
        option.CU_JIT_TARGET: target,
        option.CU_JIT_LOG_VERBOSE: 1,
        # An answer from the driver's own cache would come without the register count.
        option.CU_JIT_CACHE_MODE: cu.CUjit_cacheMode.CU_JIT_CACHE_OPTION_NONE,
        option.CU_JIT_INFO_LOG_BUFFER: info,
        option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: _LOG_BYTES,
        option.CU_JIT_ERROR_LOG_BUFFER: errors,
        option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: _LOG_BYTES,
    }
    text = ptx.encode() + b"\0"
    code, link = cu.cuLinkCreate(len(options), list(options), list(options.values()))
    if int(code) != 0:
        return None, "", describe(code)
    try:
        (code,) = cu.cuLinkAddData(link, cu.CUjitInputType.CU_JIT_INPUT_PTX, text, len(text), b"kernel.ptx", 0, [], [])
        if int(code) == 0:
            code, address, size = cu.cuLinkComplete(link)
        if int(code) != 0:
            return None, _text(info), f"{describe(code)}\n{_text(errors)}"
        return ctypes.string_at(address, size), _text(info), ""
    finally:
        cu.cuLinkDestroy(link)


def _text(buffer: bytes) -> str:
    return buffer.partition(b"\0")[0].decode(errors="replace").strip()
