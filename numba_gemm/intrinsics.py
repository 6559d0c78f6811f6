"""Inline PTX for Numba CUDA kernels: 16-byte access to global and shared memory.

Numba never emits a 16-byte global load by itself, and a 16-byte shared access only where it can prove the
alignment. These intrinsics state it. They are ordinary functions inside a ``@cuda.jit`` kernel:

=====================================  =====================================================================
``load_global_v4(pointer, index)``     four floats from ``pointer[index … index+3]`` (``ld.global.nc.v4.f32``)
``store_global_v4(pointer, index, …)`` four floats to ``pointer[index … index+3]`` (``st.global.v4.f32``)
``load_shared_v4(array, index)``       four floats from a shared array, flat index (``ld.shared.v4.f32``)
``store_shared_v4(array, index, …)``   four floats to a shared array, flat index (``st.shared.v4.f32``)
=====================================  =====================================================================

``index`` counts elements, and the address it names must be a multiple of 16 bytes; a misaligned one faults on
the GPU. ``load_global_v4`` reads through the read-only path: the kernel must not write what it loads.
Shared arrays are declared with ``alignment=16`` and indexed flat, whatever their shape.

Importing this module imports Numba; kernels import it when they are compiled, not before.
"""

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, ir, types

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_FLOAT4 = ir.LiteralStructType([_FLOAT] * 4)
_UINT32_TYPE = types.uint32
_FLOAT_TYPE = types.float32


def _float4_tuple(context: Any, builder: Any, result: Any) -> Any:
    """The four results of an assembly call as a Numba tuple of four float32."""
    values = [builder.extract_value(result, i) for i in range(4)]
    return context.make_tuple(builder, types.UniTuple(_FLOAT_TYPE, 4), values)


def _shared_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The 32-bit shared-window address of element ``index`` (flat) of a shared array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    window = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
    base = builder.ptrtoint(window, _INT32)
    offset = builder.mul(index, ir.Constant(_INT32, 4))
    return builder.add(base, offset)


@intrinsic
def load_global_v4(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Four consecutive float32 from global memory in one 16-byte read-only load."""
    signature = types.UniTuple(_FLOAT_TYPE, 4)(pointer, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(args[0], [args[1]])
        function_type = ir.FunctionType(_FLOAT4, [address.type])
        assembly = ir.InlineAsm(function_type, "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l")
        return _float4_tuple(context, builder, builder.call(assembly, [address]))

    return signature, codegen


@intrinsic
def store_global_v4(typingctx: Any, pointer: Any, index: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 to global memory in one 16-byte store."""
    signature = types.void(pointer, types.int64, *[_FLOAT_TYPE] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(args[0], [args[1]])
        function_type = ir.FunctionType(ir.VoidType(), [address.type] + [_FLOAT] * 4)
        assembly = ir.InlineAsm(
            function_type, "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f,~{memory}", side_effect=True
        )
        builder.call(assembly, [address, *args[2:]])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load_shared_v4(typingctx: Any, array: Any, index: Any) -> Any:
    """Four consecutive float32 of a shared array (flat index) in one LDS.128."""
    signature = types.UniTuple(_FLOAT_TYPE, 4)(array, _UINT32_TYPE)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _shared_address(context, builder, signature.args[0], args[0], args[1])
        function_type = ir.FunctionType(_FLOAT4, [_INT32])
        # side_effect with ~{memory}: the load must not move across the barrier that makes its data ready.
        assembly = ir.InlineAsm(
            function_type,
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,r,~{memory}",
            side_effect=True,
        )
        return _float4_tuple(context, builder, builder.call(assembly, [address]))

    return signature, codegen


@intrinsic
def store_shared_v4(typingctx: Any, array: Any, index: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 to a shared array (flat index) in one STS.128."""
    signature = types.void(array, _UINT32_TYPE, *[_FLOAT_TYPE] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _shared_address(context, builder, signature.args[0], args[0], args[1])
        function_type = ir.FunctionType(ir.VoidType(), [_INT32] + [_FLOAT] * 4)
        assembly = ir.InlineAsm(
            function_type, "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f,~{memory}", side_effect=True
        )
        builder.call(assembly, [address, *args[2:]])
        return context.get_dummy_value()

    return signature, codegen


__all__ = ["load_global_v4", "load_shared_v4", "store_global_v4", "store_shared_v4"]
