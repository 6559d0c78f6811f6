"""Inline PTX of v8, second half: what becomes of a thread's sums once its part of k is done.

===============================================  =====================================================================
``clear(COUNT)``                                 accumulators of zero
``send_sums``, ``add_sums`` ``(COUNT, …)``       a thread's accumulators to shared memory, and from there
``store_partial(TILE)``                          a thread's accumulators to a workspace
``store_tile(TILE, WIDTH)``                      ``C = alpha · accumulator + beta · C``, inside C's edges
``add_partials(COUNT)``                          adds parts from a workspace to accumulators
===============================================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba_gemm.compile.numba_source import intrinsic, ir, types
from numba_gemm.fp32.v8_intrinsics import (
    FETCH,
    FLOAT,
    FLOAT4,
    FLOAT_TYPE,
    INT32,
    INT64_TYPE,
    UINT32_TYPE,
    LocalArray,
    ThreadTile,
    assembly,
    i32,
    i64,
    shared_load,
)

#: The order of four neighbouring accumulators in a 16-byte access to shared memory or a workspace. The access wants
#: them in four registers in a row; a fragment of B is in four in their own order. Swapped in pairs, accumulator j and
#: B's value j lie in different banks of the register file, which an FMA can read in one cycle.
SWAPPED = (1, 0, 3, 2)


def clear(count: int) -> Any:
    """An intrinsic ``(accumulator)``: zeros."""

    @intrinsic
    def zero(typingctx: Any, accumulator: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = LocalArray(context, builder, signature.args[0], args[0])
            for i in range(count):
                sums[i] = ir.Constant(FLOAT, 0.0)
            return context.get_dummy_value()

        return types.void(accumulator), codegen

    return zero


def send_sums(count: int, distance: int) -> Any:
    """An intrinsic ``(address, accumulator)``: to shared memory, four at a time, ``distance`` bytes apart."""

    @intrinsic
    def send(typingctx: Any, address: Any, accumulator: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = LocalArray(context, builder, signature.args[1], args[1])
            for g in range(count // 4):
                text = f"st.shared.v4.f32 [$0+{g * distance}], {{$1, $2, $3, $4}};"
                assembly(builder, text, "r,f,f,f,f", [args[0], *(sums[4 * g + i] for i in SWAPPED)])
            return context.get_dummy_value()

        return types.void(UINT32_TYPE, accumulator), codegen

    return send


def add_sums(count: int, distance: int) -> Any:
    """An intrinsic ``(address, accumulator)``: adds what :func:`send_sums` wrote."""

    @intrinsic
    def add(typingctx: Any, address: Any, accumulator: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = LocalArray(context, builder, signature.args[1], args[1])
            for g in range(count // 4):
                for i, value in zip(SWAPPED, shared_load(builder, args[0], g * distance), strict=True):
                    sums[4 * g + i] = builder.fadd(sums[4 * g + i], value)
            return context.get_dummy_value()

        return types.void(UINT32_TYPE, accumulator), codegen

    return add


def store_partial(tile: ThreadTile, row_length: int) -> Any:
    """An intrinsic ``(address, accumulator)``: to a workspace whose rows are ``row_length`` floats long.

    ``address`` (int64, a multiple of 16) is that of the thread's first element. Accesses are in the order
    :data:`SWAPPED`.
    """

    @intrinsic
    def store(typingctx: Any, address: Any, accumulator: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = LocalArray(context, builder, signature.args[1], args[1])
            for i, first, column in tile.accesses(4):
                text = f"st.global.v4.f32 [$0+{4 * (tile.rows[i] * row_length + column)}], {{$1, $2, $3, $4}};"
                assembly(builder, text, "l,f,f,f,f", [args[0], *(sums[first + c] for c in SWAPPED)])
            return context.get_dummy_value()

        return types.void(INT64_TYPE, accumulator), codegen

    return store


def add_partials(count: int) -> Any:
    """An intrinsic ``(address, distance, present, accumulator)``: adds up to ``count`` groups of four, in order.

    Group ``i`` lies ``i · distance`` bytes (int64) behind ``address`` in the order :data:`SWAPPED`; those from
    ``present`` (uint32) on aren't read. All are loaded before the first is added.
    """

    @intrinsic
    def add(typingctx: Any, address: Any, distance: Any, present: Any, accumulator: Any) -> Any:
        signature = types.void(INT64_TYPE, INT64_TYPE, UINT32_TYPE, accumulator)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, distance, present, array = args
            sums = LocalArray(context, builder, signature.args[3], array)
            text, constraints = FETCH[4]
            groups = []
            for i in range(count):
                on = builder.zext(builder.icmp_unsigned(">", present, i32(i)), INT32)
                place = builder.add(address, builder.mul(distance, i64(i)))
                zeros = [ir.Constant(FLOAT, 0.0)] * 4
                groups.append(assembly(builder, text, constraints, [place, on, *zeros], FLOAT4))
            for four in groups:
                for at, i in enumerate(SWAPPED):
                    sums[i] = builder.fadd(sums[i], builder.extract_value(four, at))
            return context.get_dummy_value()

        return signature, codegen

    return add


def store_tile(tile: ThreadTile, width: int) -> Any:
    """An intrinsic ``(address, row_bytes, rows, columns, alpha, beta, accumulator)``: C = alpha · sums + beta · C.

    ``address`` (int64) is that of the thread's first element, ``row_bytes`` (int64) leads from a row of C to the next,
    ``rows`` and ``columns`` (int64) say how many of C lie from there on: what is past them isn't touched. Accesses are
    of ``width`` floats. The product is rounded, then the FMA with beta; beta = 0 never reads C.
    """

    @intrinsic
    def store(
        typingctx: Any, address: Any, row_bytes: Any, rows: Any, columns: Any, alpha: Any, beta: Any, accumulator: Any
    ) -> Any:
        signature = types.void(*[INT64_TYPE] * 4, FLOAT_TYPE, FLOAT_TYPE, accumulator)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, row_bytes, rows, columns, alpha, beta, array = args
            sums = LocalArray(context, builder, signature.args[6], array)

            def store_all(finish: Callable[[Any, list[Any]], list[Any]]) -> None:
                for i, offset in enumerate(tile.rows):
                    row = builder.add(address, builder.mul(row_bytes, i64(offset)))
                    with builder.if_then(builder.icmp_signed(">", rows, i64(offset))):
                        for j in range(0, len(tile.columns), width):
                            first, column = i * len(tile.columns) + j, tile.columns[j]
                            with builder.if_then(builder.icmp_signed(">", columns, i64(column))):
                                place = builder.add(row, i64(4 * column))
                                values = finish(place, [builder.fmul(alpha, sums[first + x]) for x in range(width)])
                                if width == 4:
                                    text = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
                                    assembly(builder, text, "l,f,f,f,f", [place, *values])
                                else:
                                    assembly(builder, "st.global.f32 [$0], $1;", "l,f", [place, *values])

            def add_old(place: Any, scaled: list[Any]) -> list[Any]:
                if width == 4:
                    text = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
                    four = assembly(builder, text, "=f,=f,=f,=f,l", [place], FLOAT4)
                    old = [builder.extract_value(four, x) for x in range(4)]
                else:
                    old = [assembly(builder, "ld.global.f32 $0, [$1];", "=f,l", [place], FLOAT)]
                return [builder.fma(beta, was, value) for was, value in zip(old, scaled, strict=True)]

            with builder.if_else(builder.fcmp_unordered("!=", beta, ir.Constant(FLOAT, 0.0))) as (adds, overwrites):
                with adds:
                    store_all(add_old)
                with overwrites:
                    store_all(lambda _, scaled: scaled)
            return context.get_dummy_value()

        return signature, codegen

    return store


__all__ = [
    "SWAPPED",
    "add_partials",
    "add_sums",
    "clear",
    "send_sums",
    "store_partial",
    "store_tile",
]
