"""Addresses and words, whatever they mean: how ``repack`` moves several elements at once."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, ir, types

_INT32, _INT64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
#: What keeps an access on its side of a wait for another kernel.
_MEMORY = "~{memory}"


def _emit(builder: Any, text: str, result: Any, constraints: str, operands: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(ir.InlineAsm(function_type, text, f"{constraints},{_MEMORY}", side_effect=True), operands)


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """Where a pointer points, as an int64."""
    signature = types.int64(pointer)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _INT64)

    return signature, codegen


def _load_if(name: str, text: str, constraints: str, summary: str) -> Any:
    def load(typingctx: Any, address: Any, on: Any) -> Any:
        signature = types.uint32(types.int64, types.uint32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            body = f"{{ .reg .pred %on; .reg .b16 %half; setp.ne.u32 %on, $2, 0; {text} }}"
            zero = [ir.Constant(_INT32, 0)] if constraints.endswith("0") else []
            return _emit(builder, body, _INT32, constraints, [*args, *zero])

        return signature, codegen

    load.__name__ = load.__qualname__ = name
    load.__doc__ = summary
    return intrinsic(load)


load_word_if = _load_if(
    "load_word_if",
    "@%on ld.global.b32 $0, [$1];",
    "=r,l,r,0",
    "``(address, on)``: four bytes where ``on`` isn't 0, else zeros and nothing is read.",
)
load_half_if = _load_if(
    "load_half_if",
    "mov.b16 %half, 0; @%on ld.global.b16 %half, [$1]; cvt.u32.u16 $0, %half;",
    "=r,l,r",
    "``(address, on)``: two bytes where ``on`` isn't 0, else zeros and nothing is read.",
)


def _four_words(name: str, summary: str, *, load: bool) -> Any:
    if load:

        def access(typingctx: Any, address: Any) -> Any:
            signature = types.UniTuple(types.uint32, 4)(types.int64)

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                text, result = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", ir.LiteralStructType([_INT32] * 4)
                loaded = _emit(builder, text, result, "=r,=r,=r,=r,l", list(args))
                words = [builder.extract_value(loaded, i) for i in range(4)]
                return context.make_tuple(builder, signature.return_type, words)

            return signature, codegen
    else:

        def access(typingctx: Any, address: Any, x: Any, y: Any, z: Any, w: Any) -> Any:  # type: ignore[misc]
            signature = types.void(types.int64, *[types.uint32] * 4)

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                _emit(builder, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", _VOID, "l,r,r,r,r", list(args))
                return context.get_dummy_value()

            return signature, codegen

    access.__name__ = access.__qualname__ = name
    access.__doc__ = summary
    return intrinsic(access)


load_words = _four_words("load_words", "``(address)``: 16 bytes as four words; a multiple of 16.", load=True)
store_words = _four_words("store_words", "``(address, x, y, z, w)``: 16 bytes; a multiple of 16.", load=False)
