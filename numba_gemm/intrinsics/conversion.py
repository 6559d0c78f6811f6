"""Two float32 rounded to nearest even into the two halves of a 32-bit register (sm_80)."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, types
from numba_gemm.intrinsics.emit import INT32, emit


def _pack(name: str, target: str, kind: str) -> Any:
    def pack(typingctx: Any, low: Any, high: Any) -> Any:
        signature = types.uint32(types.float32, types.float32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            low, high = args
            return emit(builder, f"cvt.rn.{target}.f32 $0, $1, $2;", INT32, "=r,f,f", [high, low], ordered=False)

        return signature, codegen

    pack.__name__ = pack.__qualname__ = name
    pack.__doc__ = f"``{name}(low, high)``: two {kind} as a uint32, ``low`` in bits 0 … 15, where memory has it first."
    return intrinsic(pack)


float2_to_half2 = _pack("float2_to_half2", "f16x2", "float16")
float2_to_bfloat2 = _pack("float2_to_bfloat2", "bf16x2", "bfloat16")

__all__ = ["float2_to_bfloat2", "float2_to_half2"]
