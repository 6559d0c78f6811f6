"""A pointer to elements of another type as one to floats: how ``repack`` moves 16 bytes at once."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import FLOAT_POINTER, intrinsic, ir


@intrinsic
def float_pointer(typingctx: Any, pointer: Any) -> Any:
    """The same address as one of floats, for moving 16 bytes at once, whatever they mean; an index counts 4 bytes."""
    signature = FLOAT_POINTER(pointer)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType().as_pointer())

    return signature, codegen
