"""Cubins loaded into a context: one function handle per context and kernel form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba_gemm.compile.kernel import CompiledKernel
from numba_gemm.device.context import Context
from numba_gemm.device.driver import check, driver

#: Dynamic shared memory that a kernel can have without asking.
DEFAULT_SHARED_LIMIT = 48 * 1024


@dataclass(frozen=True)
class Function:
    """A kernel loaded on one context.

    ``registers`` and ``local_bytes`` (per thread) and ``static_shared_bytes`` are what the driver reports.
    """

    handle: Any
    name: str
    registers: int
    local_bytes: int
    static_shared_bytes: int


_functions: dict[tuple[int, str, str], Function] = {}


def load(compiled: CompiledKernel, context: Context, *, dynamic_shared_bytes: int = 0) -> Function:
    """The loaded function of a compiled kernel, from the cache after the first time.

    ``dynamic_shared_bytes`` past 48 KB raises the function's limit through the driver.
    """
    key = (context.identity, compiled.entry, compiled.digest)
    function = _functions.get(key)
    if function is not None:
        return function
    cu = driver()
    module = check(cu.cuModuleLoadData(compiled.cubin), f"loading kernel {compiled.entry}")
    handle = check(cu.cuModuleGetFunction(module, compiled.entry.encode()), f"cuModuleGetFunction({compiled.entry})")

    def attribute(name: str) -> int:
        key = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(check(cu.cuFuncGetAttribute(key, handle), f"cuFuncGetAttribute({name})"))

    if dynamic_shared_bytes > DEFAULT_SHARED_LIMIT:
        check(
            cu.cuFuncSetAttribute(
                handle,
                cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic_shared_bytes,
            ),
            f"raising the shared memory limit of kernel {compiled.entry} to {dynamic_shared_bytes} bytes",
        )
    function = Function(
        handle=handle,
        name=compiled.entry,
        registers=attribute("NUM_REGS"),
        local_bytes=attribute("LOCAL_SIZE_BYTES"),
        static_shared_bytes=attribute("SHARED_SIZE_BYTES"),
    )
    _functions[key] = function
    return function
