"""Pointers and shared-memory addresses as values."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, types
from numba_gemm.intrinsics.emit import check_shared, shared_window_address


@intrinsic
def offset_pointer(typingctx: Any, pointer: Any, elements: Any) -> Any:
    """The pointer ``elements`` elements further, or back (64-bit, signed); where the next matrix of a batch begins."""
    signature = pointer(pointer, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return signature, codegen


@intrinsic
def shared_address(typingctx: Any, array: Any, index: Any) -> Any:
    """The 32-bit address in the shared window of element ``index`` (flat, uint32) of a shared array.

    Offsets from it are bytes: the next float lies 4 further. What ``cp_async_*`` and ``load_shared_*_at`` take.
    """
    check_shared("shared_address", array, floats=False)
    signature = types.uint32(array, types.uint32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return shared_window_address(context, builder, signature.args[0], args[0], args[1])

    return signature, codegen


__all__ = ["offset_pointer", "shared_address"]
