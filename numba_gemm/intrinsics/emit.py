"""What the intrinsics share: assembly text, operands and addresses in LLVM's terms."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.core.errors import TypingError

from numba_gemm.compile.numba_source import ir, types

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
VOID = ir.VoidType()


def emit(
    builder: Any, text: str, result: Any, constraints: str, operands: Sequence[Any], *, ordered: bool = True
) -> Any:
    """Emit one instruction.

    ``ordered`` keeps its place among barriers and other memory accesses; only loads of memory that nobody writes and
    pure arithmetic can do without.
    """
    if ordered:
        constraints += f"{',' if constraints else ''}~{{memory}}"
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(ir.InlineAsm(function_type, text, constraints, side_effect=ordered), operands)


def emit_load(context: Any, builder: Any, opcode: str, words: int, address: Any, *, ordered: bool) -> Any:
    """``words`` float32 from an address: one value, or a Numba tuple of them."""
    kind = "r" if address.type == INT32 else "l"
    names = [f"${i}" for i in range(words)]
    target = names[0] if words == 1 else f"{{{', '.join(names)}}}"
    vector = "" if words == 1 else f".v{words}"
    result = FLOAT if words == 1 else ir.LiteralStructType([FLOAT] * words)
    constraints = ",".join(["=f"] * words + [kind])
    loaded = emit(
        builder, f"{opcode}{vector}.f32 {target}, [${words}];", result, constraints, [address], ordered=ordered
    )
    if words == 1:
        return loaded
    values = [builder.extract_value(loaded, i) for i in range(words)]
    return context.make_tuple(builder, types.UniTuple(types.float32, words), values)


def emit_store(context: Any, builder: Any, opcode: str, address: Any, values: Sequence[Any]) -> Any:
    """float32 values to an address."""
    words = len(values)
    kind = "r" if address.type == INT32 else "l"
    names = [f"${i + 1}" for i in range(words)]
    source = names[0] if words == 1 else f"{{{', '.join(names)}}}"
    vector = "" if words == 1 else f".v{words}"
    text = f"{opcode}{vector}.f32 [$0], {source};"
    emit(builder, text, VOID, ",".join([kind, *["f"] * words]), [address, *values])
    return context.get_dummy_value()


def load_type(words: int) -> Any:
    """What a load of ``words`` floats returns."""
    return types.float32 if words == 1 else types.UniTuple(types.float32, words)


def check_global(name: str, pointer: Any, *, floats: bool = True) -> None:
    """Refuse, while a kernel is typed, what isn't a pointer or an array, or not of float32 where that is needed."""
    element = pointer.dtype if isinstance(pointer, types.CPointer | types.Array) else None
    if element is None or (floats and element != types.float32):
        wanted = "float32 " if floats else ""
        raise TypingError(f"{name}: {pointer} is not a pointer to {wanted}elements; pass a CPointer or a global array")
    if isinstance(pointer, types.Array) and pointer.layout != "C":
        raise TypingError(f"{name}: {pointer} is not contiguous in C order; pass a pointer, or a C-ordered array")


def check_shared(name: str, array: Any, *, floats: bool = True) -> None:
    """Refuse what isn't a shared array (as far as its type tells), or not of float32 where that is needed."""
    if not isinstance(array, types.Array) or (floats and array.dtype != types.float32):
        wanted = "float32 " if floats else ""
        raise TypingError(f"{name}: {array} is not a {wanted}array; pass what cuda.shared.array returned")


def global_address(context: Any, builder: Any, pointer_type: Any, pointer: Any, index: Any) -> Any:
    """The address of element ``index`` of a pointer or an array."""
    if isinstance(pointer_type, types.Array):
        pointer = context.make_array(pointer_type)(context, builder, value=pointer).data
    return builder.gep(pointer, [index])


def shared_window_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The 32-bit shared-window address of element ``index`` (flat) of a shared array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    window = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
    base = builder.ptrtoint(window, INT32)
    itemsize = array_type.dtype.bitwidth // 8
    return builder.add(base, builder.mul(index, ir.Constant(INT32, itemsize)))
