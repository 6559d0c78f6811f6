"""Shared memory: 4-, 8- and 16-byte accesses, by array and flat index or by 32-bit address.

The loads keep their place among barriers and copies (they must not be read before the barrier that makes their data
ready). An address that is a variable plus a constant costs no instruction: the constant goes into the LDS.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import intrinsic, types
from numba_gemm.intrinsics.emit import check_shared, emit_load, emit_store, load_type, shared_window_address

_UINT32 = types.uint32
_FLOAT = types.float32


def _load(name: str, words: int, instruction: str) -> Any:
    def load(typingctx: Any, array: Any, index: Any) -> Any:
        check_shared(name, array)
        signature = load_type(words)(array, _UINT32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = shared_window_address(context, builder, signature.args[0], *args)
            return emit_load(context, builder, "ld.shared", words, address, ordered=True)

        return signature, codegen

    load.__name__ = load.__qualname__ = name
    load.__doc__ = f"{words} consecutive float32 of a shared array, from a flat index, in one {instruction}."
    return intrinsic(load)


def _load_at(name: str, words: int, instruction: str) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        signature = load_type(words)(_UINT32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_load(context, builder, "ld.shared", words, args[0], ordered=True)

        return signature, codegen

    load.__name__ = load.__qualname__ = name
    load.__doc__ = f"{words} consecutive float32 from a 32-bit shared address, in one {instruction}."
    return intrinsic(load)


load_shared_v2 = _load("load_shared_v2", 2, "LDS.64")
load_shared_v4 = _load("load_shared_v4", 4, "LDS.128")
load_shared_at = _load_at("load_shared_at", 1, "LDS")
load_shared_v2_at = _load_at("load_shared_v2_at", 2, "LDS.64")
load_shared_v4_at = _load_at("load_shared_v4_at", 4, "LDS.128")


def _store_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address = shared_window_address(context, builder, signature.args[0], args[0], args[1])
    return emit_store(context, builder, "st.shared", address, args[2:])


def _store_at_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return emit_store(context, builder, "st.shared", args[0], args[1:])


@intrinsic
def store_shared_v2(typingctx: Any, array: Any, index: Any, x: Any, y: Any) -> Any:
    """Two consecutive float32 to a shared array (flat index) in one STS.64."""
    check_shared("store_shared_v2", array)
    return types.void(array, _UINT32, *[_FLOAT] * 2), _store_codegen


@intrinsic
def store_shared_v4(typingctx: Any, array: Any, index: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 to a shared array (flat index) in one STS.128."""
    check_shared("store_shared_v4", array)
    return types.void(array, _UINT32, *[_FLOAT] * 4), _store_codegen


@intrinsic
def store_shared_at(typingctx: Any, address: Any, x: Any) -> Any:
    """One float32 to a 32-bit shared address."""
    return types.void(_UINT32, _FLOAT), _store_at_codegen


@intrinsic
def store_shared_v2_at(typingctx: Any, address: Any, x: Any, y: Any) -> Any:
    """Two consecutive float32 to a 32-bit shared address in one STS.64."""
    return types.void(_UINT32, *[_FLOAT] * 2), _store_at_codegen


@intrinsic
def store_shared_v4_at(typingctx: Any, address: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    """Four consecutive float32 to a 32-bit shared address in one STS.128."""
    return types.void(_UINT32, *[_FLOAT] * 4), _store_at_codegen


__all__ = [
    "load_shared_at",
    "load_shared_v2",
    "load_shared_v2_at",
    "load_shared_v4",
    "load_shared_v4_at",
    "store_shared_at",
    "store_shared_v2",
    "store_shared_v2_at",
    "store_shared_v4",
    "store_shared_v4_at",
]
