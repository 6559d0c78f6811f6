"""``cp.async``: global → shared memory without a detour through registers, and its groups (sm_80).

Each copy names a 32-bit shared address (from ``shared_address``) and an element of a pointer or an array::

    stage = shared_address(tiles, 0)
    cp_async_16(stage, A, index)                       # four floats; both addresses multiples of 16 bytes
    cp_async_16_zfill(stage, A, index, valid_bytes)    # the first bytes from memory, zeros after them
    cp_async_4_if(stage, A, index, column < N)         # from memory where true, else zeros
    cp_async_commit()                                  # the copies since the last commit are one group
    cp_async_wait(1)                                   # this thread's groups but the newest one have landed
    cuda.syncthreads()                                 # … and now everyone's have

What a copy doesn't read it doesn't touch: with 0 valid bytes, or a false predicate, the global address may lie
outside the matrix. ``cp_async_16`` bypasses L1 (``.cg``), the ``_ca`` forms and the smaller sizes go through it.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba.core.errors import TypingError

from numba_gemm.compile.numba_source import intrinsic, ir, types
from numba_gemm.intrinsics.emit import INT32, VOID, check_global, emit, global_address


def _copy(name: str, size: int, cache: str, summary: str) -> Any:
    def copy(typingctx: Any, target: Any, pointer: Any, index: Any) -> Any:
        check_global(name, pointer, floats=False)
        signature = types.void(types.uint32, pointer, types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = global_address(context, builder, signature.args[1], args[1], args[2])
            emit(builder, f"cp.async.{cache} [$0], [$1], {size};", VOID, "r,l", [args[0], address])
            return context.get_dummy_value()

        return signature, codegen

    copy.__name__ = copy.__qualname__ = name
    copy.__doc__ = f"{summary} ``{name}(shared_address, pointer, index)``."
    return intrinsic(copy)


def _copy_zero_fill(name: str, size: int, cache: str, summary: str, *, predicate: bool) -> Any:
    def copy(typingctx: Any, target: Any, pointer: Any, index: Any, valid: Any) -> Any:
        check_global(name, pointer, floats=False)
        signature = types.void(types.uint32, pointer, types.int64, types.boolean if predicate else types.uint32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = global_address(context, builder, signature.args[1], args[1], args[2])
            valid = args[3]
            if predicate:
                if valid.type != ir.IntType(1):
                    valid = builder.trunc(valid, ir.IntType(1))
                valid = builder.select(valid, ir.Constant(INT32, size), ir.Constant(INT32, 0))
            text = f"cp.async.{cache} [$0], [$1], {size}, $2;"
            emit(builder, text, VOID, "r,l,r", [args[0], address, valid])
            return context.get_dummy_value()

        return signature, codegen

    what = "predicate" if predicate else "valid_bytes"
    copy.__name__ = copy.__qualname__ = name
    copy.__doc__ = f"{summary} ``{name}(shared_address, pointer, index, {what})``."
    return intrinsic(copy)


_CA, _CG = "ca.shared.global", "cg.shared.global"
_FILL = "bytes, of which the first ``valid_bytes`` come from memory; the rest are zeros."
_IF = "bytes from memory where the predicate is true, else zeros."

cp_async_4 = _copy("cp_async_4", 4, _CA, "4 bytes.")
cp_async_8 = _copy("cp_async_8", 8, _CA, "8 bytes.")
cp_async_16 = _copy("cp_async_16", 16, _CG, "16 bytes past L1.")
cp_async_16_ca = _copy("cp_async_16_ca", 16, _CA, "16 bytes through L1.")
cp_async_4_zfill = _copy_zero_fill("cp_async_4_zfill", 4, _CA, f"4 {_FILL}", predicate=False)
cp_async_8_zfill = _copy_zero_fill("cp_async_8_zfill", 8, _CA, f"8 {_FILL}", predicate=False)
cp_async_16_zfill = _copy_zero_fill("cp_async_16_zfill", 16, _CG, f"16 {_FILL}", predicate=False)
cp_async_16_ca_zfill = _copy_zero_fill("cp_async_16_ca_zfill", 16, _CA, f"Through L1, 16 {_FILL}", predicate=False)
cp_async_16_l2_128_zfill = _copy_zero_fill(
    "cp_async_16_l2_128_zfill", 16, f"{_CG}.L2::128B", f"With 128 bytes fetched into L2, 16 {_FILL}", predicate=False
)
cp_async_16_l2_256_zfill = _copy_zero_fill(
    "cp_async_16_l2_256_zfill", 16, f"{_CG}.L2::256B", f"With 256 bytes fetched into L2, 16 {_FILL}", predicate=False
)
cp_async_4_if = _copy_zero_fill("cp_async_4_if", 4, _CA, f"4 {_IF}", predicate=True)
cp_async_8_if = _copy_zero_fill("cp_async_8_if", 8, _CA, f"8 {_IF}", predicate=True)
cp_async_16_if = _copy_zero_fill("cp_async_16_if", 16, _CG, f"16 {_IF}", predicate=True)


@intrinsic
def cp_async_commit(typingctx: Any) -> Any:
    """Make one group of this thread's copies since its last commit (an empty group counts too)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(builder, "cp.async.commit_group;", VOID, "", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cp_async_wait(typingctx: Any, pending: Any) -> Any:
    """Wait until at most ``pending`` of this thread's groups, a literal, are still under way: ``cp_async_wait(1)``.

    Other threads' copies are seen after a barrier that follows their own wait.
    """
    if not isinstance(pending, types.IntegerLiteral):
        raise TypingError("cp_async_wait: the number of groups must be a literal or a constant of the module")
    groups = pending.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(builder, f"cp.async.wait_group {groups};", VOID, "", [])
        return context.get_dummy_value()

    return types.void(pending), codegen


@intrinsic
def cp_async_wait_all(typingctx: Any) -> Any:
    """Wait for all of this thread's copies, committed or not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(builder, "cp.async.wait_all;", VOID, "", [])
        return context.get_dummy_value()

    return types.void(), codegen


__all__ = [
    "cp_async_4",
    "cp_async_4_if",
    "cp_async_4_zfill",
    "cp_async_8",
    "cp_async_8_if",
    "cp_async_8_zfill",
    "cp_async_16",
    "cp_async_16_ca",
    "cp_async_16_ca_zfill",
    "cp_async_16_if",
    "cp_async_16_l2_128_zfill",
    "cp_async_16_l2_256_zfill",
    "cp_async_16_zfill",
    "cp_async_commit",
    "cp_async_wait",
    "cp_async_wait_all",
]
