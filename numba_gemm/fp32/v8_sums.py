"""Inline PTX of v8, second half: what becomes of a thread's sums once its part of k is done.

===============================================  =====================================================================
``clear(COUNT)``                                 accumulators of zero
``send_sums``, ``add_sums`` ``(COUNT, …)``       a thread's accumulators to shared memory, and from there
``store_partial(TILE)``                          a thread's accumulators to a workspace
``store_tile(TILE)``                             ``C = alpha · accumulator + beta · C``, inside C's edges, 16 bytes each
``store_rows(TILE)``                             the same 4 bytes at a time, row by row
``add_partials(COUNT)``                          adds parts from a workspace to accumulators
===============================================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba_gemm.compile.numba_source import compiled_for, intrinsic, ir, types
from numba_gemm.fp32.v8_intrinsics import (
    FETCH,
    FLOAT,
    FLOAT4,
    FLOAT_TYPE,
    INT32,
    INT64,
    INT64_TYPE,
    UINT32_TYPE,
    LocalArray,
    RowTile,
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


def store_tile(tile: ThreadTile) -> Any:
    """An intrinsic ``(address, row_bytes, rows, columns, alpha, beta, accumulator)``: C = alpha · sums + beta · C.

    ``address`` (int64) is that of the thread's first element, ``row_bytes`` (int64) leads from a row of C to the next,
    ``rows`` and ``columns`` (int64) say how many of C lie from there on: what is past them isn't touched. Accesses are
    of 16 bytes. The product is rounded, then the FMA with beta; beta = 0 never reads C.
    """

    @intrinsic
    def store(
        typingctx: Any, address: Any, row_bytes: Any, rows: Any, columns: Any, alpha: Any, beta: Any, accumulator: Any
    ) -> Any:
        signature = types.void(*[INT64_TYPE] * 4, FLOAT_TYPE, FLOAT_TYPE, accumulator)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, row_bytes, rows, columns, alpha, beta, array = args
            sums = LocalArray(context, builder, signature.args[6], array)

            def store_all(finish: Finish) -> None:
                for i, offset in enumerate(tile.rows):
                    row = builder.add(address, builder.mul(row_bytes, i64(offset)))
                    with builder.if_then(builder.icmp_signed(">", rows, i64(offset))):
                        for j in range(0, len(tile.columns), 4):
                            first, column = i * len(tile.columns) + j, tile.columns[j]
                            with builder.if_then(builder.icmp_signed(">", columns, i64(column))):
                                place = builder.add(row, i64(4 * column))
                                values = finish(place, [builder.fmul(alpha, sums[first + x]) for x in range(4)])
                                text = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
                                assembly(builder, text, "l,f,f,f,f", [place, *values])

            _with_and_without_beta(builder, beta, store_all)
            return context.get_dummy_value()

        return signature, codegen

    return store


def store_rows(tile: RowTile) -> Any:
    """An intrinsic ``(put, get, address, row_bytes, rows, columns, alpha, beta, accumulator)``: as :func:`store_tile`,
    4 bytes at a time, for a C whose rows begin anywhere.

    A thread has four neighbours of a row, so that the lanes of a store would be 16 bytes apart, each 32 bytes of C be
    written in four turns. Here a warp passes its outputs through shared memory, some rows of it at a time, and a
    store's 32 lanes are neighbours. ``put`` and ``get`` (uint32) are where this thread's first outputs go and where it
    reads from, in shared memory that is the warp's own; ``address``, ``rows`` and ``columns`` are those of the warp's
    first row in column ``lane``. All lanes of the warp take part.
    """

    @intrinsic
    def store(
        typingctx: Any, put: Any, get: Any, address: Any, row_bytes: Any, rows: Any, columns: Any, alpha: Any,
        beta: Any, accumulator: Any,
    ) -> Any:  # fmt: skip
        shared, numbers = [UINT32_TYPE] * 2, [INT64_TYPE] * 4
        signature = types.void(*shared, *numbers, FLOAT_TYPE, FLOAT_TYPE, accumulator)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            put, get, address, row_bytes, rows, columns, alpha, beta, array = args
            # Its multiples aren't to be kept in registers from before the main loop on.
            row_bytes = assembly(builder, "mov.b64 $0, $1;", "=l,l", [row_bytes], INT64)
            sums = LocalArray(context, builder, signature.args[8], array)

            wait = _warp_barrier(builder, tile.warps)

            def store_all(finish: Finish) -> None:
                for first, places in zip(range(0, tile.sums, tile.together), tile.places, strict=True):
                    wait()  # what was there has been read
                    for group, offset in enumerate(tile.put):
                        scaled = [builder.fmul(alpha, sums[first + 4 * group + c]) for c in SWAPPED]
                        text = f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
                        assembly(builder, text, "r,f,f,f,f", [put, *scaled])
                    wait()
                    texts = [f"ld.shared.f32 $0, [$1+{offset}];" for offset in tile.get]
                    values = [assembly(builder, text, "=f,r", [get], FLOAT) for text in texts]
                    for value, (row, column) in zip(values, places, strict=True):
                        inside = (
                            builder.icmp_signed(">", rows, i64(row)),
                            builder.icmp_signed(">", columns, i64(column)),
                        )
                        with builder.if_then(builder.and_(*inside)):
                            line = builder.add(address, builder.mul(row_bytes, i64(row)))
                            place = builder.add(line, i64(4 * column))
                            assembly(builder, "st.global.f32 [$0], $1;", "l,f", [place, *finish(place, [value])])

            _with_and_without_beta(builder, beta, store_all)
            return context.get_dummy_value()

        return signature, codegen

    return store


def _warp_barrier(builder: Any, warps: int) -> Callable[[], None]:
    """What makes a warp's writes to shared memory seen by its lanes.

    Before sm_90 the assembler makes a call of ``bar.warp.sync`` where it can't see that the whole warp arrives (one of
    the slices of k), and spills for it. A barrier of 32 threads does the same; a block has 15 beside its own.
    """
    if compiled_for() >= (9, 0) or warps > 15:
        return lambda: assembly(builder, "bar.warp.sync -1;", "", [])

    def wait() -> None:
        thread = assembly(builder, "mov.u32 $0, %tid.x;", "=r", [], INT32)
        own = builder.add(builder.lshr(thread, i32(5)), i32(1))
        assembly(builder, "bar.sync $0, 32;", "r", [own])

    return wait


#: From the place of an access and the scaled products what is to be stored there.
Finish = Callable[[Any, list[Any]], list[Any]]


def _with_and_without_beta(builder: Any, beta: Any, store_all: Callable[[Finish], None]) -> None:
    """``store_all`` twice: where ``beta`` isn't 0 its share of what C holds is added."""

    def add_old(place: Any, scaled: list[Any]) -> list[Any]:
        if len(scaled) == 4:
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


__all__ = [
    "SWAPPED",
    "add_partials",
    "add_sums",
    "clear",
    "send_sums",
    "store_partial",
    "store_rows",
    "store_tile",
]
