"""Global memory: vector loads by the read-only path, vector stores, cache hints, prefetches."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, types
from numba_gemm.intrinsics.emit import (
    VOID,
    check_global,
    emit,
    emit_load,
    emit_store,
    global_address,
    load_type,
)


def _load(name: str, opcode: str, words: int, summary: str) -> Any:
    def load(typingctx: Any, pointer: Any, index: Any) -> Any:
        check_global(name, pointer)
        signature = load_type(words)(pointer, types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = global_address(context, builder, signature.args[0], *args)
            return emit_load(context, builder, opcode, words, address, ordered=False)

        return signature, codegen

    load.__name__ = load.__qualname__ = name
    load.__doc__ = f"{summary} ``{name}(pointer, index)``; the index is a multiple of {words} from an aligned pointer."
    return intrinsic(load)


_READ_ONLY = "ld.global.nc"
_STREAM = "ld.global.nc.L1::no_allocate.L2::128B"
_STREAM_256 = "ld.global.nc.L1::no_allocate.L2::256B"

load_global = _load("load_global", _READ_ONLY, 1, "One float32 by the read-only path.")
load_global_v2 = _load("load_global_v2", _READ_ONLY, 2, "Two float32 in one 8-byte read-only load.")
load_global_v4 = _load("load_global_v4", _READ_ONLY, 4, "Four float32 in one 16-byte read-only load.")
load_global_stream = _load("load_global_stream", _STREAM, 1, "One float32 that is read once: not kept in L1.")
load_global_stream_v2 = _load("load_global_stream_v2", _STREAM, 2, "Two float32 that are read once: not kept in L1.")
load_global_stream_v4 = _load("load_global_stream_v4", _STREAM, 4, "Four float32 that are read once: not kept in L1.")
load_global_stream256_v4 = _load(
    "load_global_stream256_v4", _STREAM_256, 4, "The same, and 256 bytes are fetched into L2 at once (sm_80)."
)
load_global_first_v4 = _load(
    "load_global_first_v4", "ld.global.nc.L1::evict_first", 4, "Four float32 that leave L1 before others."
)
load_global_keep_v4 = _load(
    "load_global_keep_v4", "ld.global.nc.L1::evict_last", 4, "Four float32 that stay in L1 after others have left."
)


def _store_address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return global_address(context, builder, signature.args[0], args[0], args[1])


@intrinsic
def store_global_v2(typingctx: Any, pointer: Any, index: Any, x: Any, y: Any) -> Any:
    """Two consecutive float32 to global memory in one 8-byte store."""
    check_global("store_global_v2", pointer)
    signature = types.void(pointer, types.int64, *[types.float32] * 2)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _store_address(context, builder, signature, args)
        return emit_store(context, builder, "st.global", address, args[2:])

    return signature, codegen


@intrinsic
def store_global_v4(typingctx: Any, pointer: Any, index: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 to global memory in one 16-byte store."""
    check_global("store_global_v4", pointer)
    signature = types.void(pointer, types.int64, *[types.float32] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _store_address(context, builder, signature, args)
        return emit_store(context, builder, "st.global", address, args[2:])

    return signature, codegen


@intrinsic
def store_global_stream(typingctx: Any, pointer: Any, index: Any, x: Any) -> Any:
    """One float32 that nobody reads soon (``st.global.cs``: first to leave the caches)."""
    check_global("store_global_stream", pointer)
    signature = types.void(pointer, types.int64, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _store_address(context, builder, signature, args)
        return emit_store(context, builder, "st.global.cs", address, args[2:])

    return signature, codegen


@intrinsic
def store_global_stream_v2(typingctx: Any, pointer: Any, index: Any, x: Any, y: Any) -> Any:
    """Two consecutive float32 that nobody reads soon, in one 8-byte store."""
    check_global("store_global_stream_v2", pointer)
    signature = types.void(pointer, types.int64, *[types.float32] * 2)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _store_address(context, builder, signature, args)
        return emit_store(context, builder, "st.global.cs", address, args[2:])

    return signature, codegen


@intrinsic
def store_global_stream_v4(typingctx: Any, pointer: Any, index: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 that nobody reads soon, in one 16-byte store."""
    check_global("store_global_stream_v4", pointer)
    signature = types.void(pointer, types.int64, *[types.float32] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _store_address(context, builder, signature, args)
        return emit_store(context, builder, "st.global.cs", address, args[2:])

    return signature, codegen


def _prefetch(name: str, level: str) -> Any:
    def prefetch(typingctx: Any, pointer: Any, index: Any) -> Any:
        check_global(name, pointer, floats=False)
        signature = types.void(pointer, types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = global_address(context, builder, signature.args[0], *args)
            emit(builder, f"prefetch.global.{level} [$0];", VOID, "l", [address])
            return context.get_dummy_value()

        return signature, codegen

    prefetch.__name__ = prefetch.__qualname__ = name
    prefetch.__doc__ = f"A hint: the line of ``pointer[index]`` will be read soon; bring it to {level}."
    return intrinsic(prefetch)


prefetch_l1 = _prefetch("prefetch_l1", "L1")
prefetch_l2 = _prefetch("prefetch_l2", "L2")

__all__ = [
    "load_global",
    "load_global_first_v4",
    "load_global_keep_v4",
    "load_global_stream",
    "load_global_stream256_v4",
    "load_global_stream_v2",
    "load_global_stream_v4",
    "load_global_v2",
    "load_global_v4",
    "prefetch_l1",
    "prefetch_l2",
    "store_global_stream",
    "store_global_stream_v2",
    "store_global_stream_v4",
    "store_global_v2",
    "store_global_v4",
]
