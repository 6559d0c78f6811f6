"""What the driver knows of an address, and checks of device arrays by it, with errors that name the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numba_gemm.arrays.operand import Operand
from numba_gemm.device.context import Context
from numba_gemm.device.driver import check, describe, driver

Memory = Literal["device", "managed", "pinned", "unregistered"]

_MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE = 1, 2  # CUmemorytype
_DEFAULT_STREAMS = (0, 1, 2)  # legacy, legacy, per thread: each context has its own


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """What the driver knows of an address.

    Attributes
    ----------
    kind : ``"device"``, ``"managed"`` (host and GPU share it), ``"pinned"`` (page-locked host memory, which GPUs can
        read too), or ``"unregistered"`` (plain host memory, or memory that was freed).
    device : ordinal of the GPU, None if unregistered.
    context : identity of the context that allocated it, None where no one context did, as with stream-ordered pools.
    """

    kind: Memory
    device: int | None
    context: int | None


_UNREGISTERED = PointerInfo("unregistered", None, None)


def pointer_info(address: int) -> PointerInfo:
    """Ask the driver about an address, of host or device memory.

    Raises
    ------
    NoDeviceError : if there is no GPU. CudaError : if the driver fails.
    """
    cu = driver()
    names = cu.CUpointer_attribute
    wanted = [
        names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        names.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        names.CU_POINTER_ATTRIBUTE_CONTEXT,
    ]
    # Asked for all at once, an address that the driver doesn't know gives zeros and no error.
    memory_type, managed, ordinal, context = check(
        cu.cuPointerGetAttributes(len(wanted), wanted, address), "cuPointerGetAttributes"
    )
    kind: Memory
    if managed:
        kind = "managed"
    elif int(memory_type) == _MEMORY_TYPE_HOST:
        kind = "pinned"
    elif int(memory_type) == _MEMORY_TYPE_DEVICE:
        kind = "device"
    else:
        return _UNREGISTERED
    identity = int(check(cu.cuCtxGetId(context), "cuCtxGetId")) if int(context) else None
    return PointerInfo(kind, int(ordinal), identity)


def check_device_operands(operands: Sequence[Operand], context: Context, stream: int) -> None:
    """Check that device arrays can be used together in a context and on a stream.

    Raises
    ------
    ValueError : for memory that was freed, for arrays on different GPUs, or on another GPU than the current
        context's, for memory or a stream of another context.
    TypeError : for plain host memory in an array that says it is a GPU's.
    """
    here = context.device.ordinal
    first: Operand | None = None
    first_device = 0
    for operand in operands:
        if not operand.on_device or 0 in operand.shape:
            continue
        info = pointer_info(operand.pointer)
        if info.kind == "unregistered":
            raise _unknown(operand)
        if info.kind != "device":  # any GPU reaches it
            continue
        assert info.device is not None
        if first is None:
            first, first_device = operand, info.device
        elif info.device != first_device:
            raise ValueError(
                f"{first.name} is on GPU {first_device} and {operand.name} on GPU {info.device}; copy one to the "
                f"other's GPU: {_copy_to(operand, first_device)}"
            )
        if info.device != here:
            raise ValueError(
                f"{operand.name} is on GPU {info.device} and the current context is GPU {here}'s; call with GPU "
                f"{info.device} current ({_make_current(operand, info.device)}), or copy it: "
                f"{_copy_to(operand, here)}"
            )
        if info.context is not None and info.context != context.identity:
            raise ValueError(
                f"{operand.name} was allocated in another CUDA context of GPU {here} than the one that is current in "
                "this thread; make that context current (cuCtxSetCurrent), or copy the array"
            )
    check_stream(stream, context)


def check_stream(stream: int, context: Context) -> None:
    """Check that a stream belongs to a context.

    Raises
    ------
    ValueError : if it is another context's, or none that the driver knows.
    """
    if stream in _DEFAULT_STREAMS:
        return
    cu = driver()
    code, *handles = cu.cuStreamGetCtx(stream)
    if int(code) != 0:
        raise ValueError(
            f"stream {stream:#x} can't be used ({describe(code)}); pass a stream that hasn't been destroyed"
        )
    identity = int(check(cu.cuCtxGetId(handles[0]), "cuCtxGetId"))
    if identity != context.identity:
        raise ValueError(
            f"stream {stream:#x} belongs to another CUDA context than the one that is current in this thread, GPU "
            f"{context.device.ordinal}'s; pass a stream of that GPU, or make the stream's context current"
        )


def _unknown(operand: Operand) -> Exception:
    where = f"{operand.name}, {operand.place}, has address {operand.pointer:#x}"
    if _is_host_memory(operand.pointer):
        return TypeError(
            f"{where}, which is plain host memory; pass it as a NumPy array, or copy it to the GPU: "
            f"numba.cuda.to_device({operand.name})"
        )
    return ValueError(
        f"{where}, which the CUDA driver doesn't know: the memory was freed, or belongs to another process; keep the "
        "array that owns it alive until the product is done"
    )


def _is_host_memory(address: int) -> bool:
    """Whether the process can read and write an address, as Linux tells; False where it can't be told."""
    try:
        regions = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for region in regions:
        span, access = region.split(maxsplit=2)[:2]
        low, _, high = span.partition("-")
        if int(low, 16) <= address < int(high, 16):
            return access.startswith("r")
    return False


def _copy_to(operand: Operand, device: int) -> str:
    name = operand.name
    copies: dict[str, Any] = {
        "torch": f"{name}.to('cuda:{device}')",
        "cupy": f"with cupy.cuda.Device({device}): {name} = {name}.copy()",
        "jax": f"jax.device_put({name}, jax.devices('cuda')[{device}])",
    }
    return str(
        copies.get(operand.kind, f"with numba.cuda.gpus[{device}]: {name} = numba.cuda.to_device({operand.to_host})")
    )


def _make_current(operand: Operand, device: int) -> str:
    currents = {"torch": f"torch.cuda.device({device})", "cupy": f"cupy.cuda.Device({device})"}
    return f"with {currents.get(operand.kind, f'numba.cuda.gpus[{device}]')}:"
