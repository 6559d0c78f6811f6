"""What a pipeline needs of a GPU: streams, events, copies, launches; and the CUDA driver's form of it.

The pipeline's logic is the same on any engine, so that it can be tested on a machine without a GPU, on an engine whose
streams do their work as late, as early or in as odd an order as their events allow.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from numba_gemm.choose import in_one_run
from numba_gemm.device.context import Context
from numba_gemm.device.driver import check, driver
from numba_gemm.device.launch import quick_driver_function
from numba_gemm.device.memory import memory_pool
from numba_gemm.device.stream import Stream
from numba_gemm.errors import CudaError
from numba_gemm.execute import Prepared, prepare, prepare_form
from numba_gemm.host.pinned import is_page_locked, page_locked
from numba_gemm.host.threads import copier_count
from numba_gemm.problem import Problem

#: Bytes of a staging buffer. Python takes the interpreter's lock for some µs a copy, so copies shouldn't be small.
CHUNK_BYTES = 4 << 20
_COMPUTE_STREAMS = 3  # a strip that doesn't fill the GPU leaves room for the next


_P, _S, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
#: CUDA_MEMCPY2D: for source and target x, y, kind of memory, addresses on host and device, array, pitch; then the size.
_COPY_2D = struct.Struct("<QQI4x4Q QQI4x4Q QQ")


def _done(code: int, what: str) -> None:
    if code != 0:
        check((driver().CUresult(code),), what)


class Engine(Protocol):
    """Streams, events, copies and launches of one pipeline at a time.

    Streams and events are opaque. Work on a stream is done in order; streams wait for one another only through events.
    """

    up: Any
    down: Any
    compute: tuple[Any, ...]

    @property
    def staging_in(self) -> list[npt.NDArray[np.uint8]]:
        """Page-locked buffers of one size, to fill."""

    @property
    def staging_out(self) -> list[npt.NDArray[np.uint8]]:
        """Page-locked buffers of one size, to empty."""

    def bind(self) -> None:
        """Make the engine usable in the calling thread."""

    def allocate(self, nbytes: int) -> int:
        """Device memory that all streams may use from now on."""

    def free(self, pointer: int) -> None:
        """Give memory back; nothing uses it any more."""

    def record(self, stream: Any) -> Any:
        """An event that marks the work given to ``stream`` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on ``stream`` wait for an event."""

    def synchronize(self, event: Any) -> None:
        """Wait for an event in the calling thread."""

    def is_done(self, event: Any) -> bool:
        """Whether an event's work is done."""

    def synchronize_all(self) -> None:
        """Wait for all work on all streams."""

    def is_page_locked(self, address: int, nbytes: int) -> bool:
        """Whether host memory can be copied from and to without staging."""

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        lines: int,
        stream: Any,
        *,
        to_device: bool,
    ) -> None:
        """Copy ``lines`` runs of ``width`` bytes, their starts ``pitch`` bytes apart, asynchronously."""

    def multiply(self, problem: Problem, form: Any, a: int, b: int, c: int, stream: Any) -> None:
        """Launch a block of a product by the kernel that ``form`` says."""


class CudaEngine:
    """An :class:`Engine` of the CUDA driver, in one context."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._own = [Stream() for _ in range(2 + _COMPUTE_STREAMS)]
        self.up, self.down, *compute = (int(stream) for stream in self._own)
        self.compute = tuple(compute)
        self._events: list[int] = []  # at rest

    @functools.cached_property
    def staging_in(self) -> list[npt.NDArray[np.uint8]]:
        """Buffers to fill: one for each thread and some on their way."""
        return _buffers(copier_count() + 4)

    @functools.cached_property
    def staging_out(self) -> list[npt.NDArray[np.uint8]]:
        """Buffers to empty."""
        return _buffers(copier_count() + 4)

    def bind(self) -> None:
        _done(quick_driver_function("cuCtxSetCurrent", _P)(int(self.context.handle)), "cuCtxSetCurrent")

    def allocate(self, nbytes: int) -> int:
        pointer = allocate_device(self.context, nbytes, self.up)
        event = self.record(self.up)
        for stream in (self.down, *self.compute):
            self.wait(stream, event)
        return pointer

    def free(self, pointer: int) -> None:
        check(driver().cuMemFreeAsync(pointer, self.up), "cuMemFreeAsync")

    def record(self, stream: int) -> Any:
        event = _Event(self._events)
        _done(quick_driver_function("cuEventRecord", _P, _P)(event.handle, stream), "cuEventRecord")
        return event

    def wait(self, stream: int, event: Any) -> None:
        _done(quick_driver_function("cuStreamWaitEvent", _P, _P, _U)(stream, event.handle, 0), "cuStreamWaitEvent")

    def synchronize(self, event: Any) -> None:
        if not self.is_done(event):
            check(driver().cuEventSynchronize(event.handle), "waiting for a copy or a kernel of a product")

    def is_done(self, event: Any) -> bool:
        return quick_driver_function("cuEventQuery", _P)(event.handle) == 0

    def synchronize_all(self) -> None:
        for stream in self._own:
            stream.synchronize()

    def is_page_locked(self, address: int, nbytes: int) -> bool:
        return is_page_locked(address, nbytes)

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        lines: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        copy_lines(target, target_pitch, source, source_pitch, width, lines, stream, to_device=to_device)

    def multiply(self, problem: Problem, form: BlockForm, a: int, b: int, c: int, stream: int) -> None:
        form_for(problem, form, self.context).launch(a, b, c, stream)


class _Event:
    """An event without a time, used again once nobody holds it; a thread that waits for it sleeps.

    A stream that was told to wait for it waits for what it marked then, whatever it marks later.
    """

    __slots__ = ("_at_rest", "handle")

    def __init__(self, at_rest: list[int]) -> None:
        self._at_rest = at_rest
        try:
            self.handle = at_rest.pop()
        except IndexError:
            cu = driver()
            flags = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING) | int(cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
            self.handle = int(check(cu.cuEventCreate(flags), "cuEventCreate"))

    def __del__(self) -> None:
        self._at_rest.append(self.handle)


def quick_wait(stream: int, other: int, event: list[int]) -> None:
    """Let a stream wait for another's work so far; ``event`` holds the event to do it with, once there is one."""
    if not event:
        event.append(_Event([]).handle)
    _done(quick_driver_function("cuEventRecord", _P, _P)(event[0], other), "cuEventRecord")
    _done(quick_driver_function("cuStreamWaitEvent", _P, _P, _U)(stream, event[0], 0), "cuStreamWaitEvent")


def _buffers(count: int) -> list[npt.NDArray[np.uint8]]:
    memory = page_locked(count * CHUNK_BYTES)
    return [memory[start : start + CHUNK_BYTES] for start in range(0, count * CHUNK_BYTES, CHUNK_BYTES)]


def copy_lines(
    target: int,
    target_pitch: int,
    source: int,
    source_pitch: int,
    width: int,
    lines: int,
    stream: int,
    *,
    to_device: bool,
) -> None:
    """Copy between page-locked host memory and the device, asynchronously; sizes in bytes."""
    if lines == 1 or target_pitch == source_pitch == width:
        name = "cuMemcpyHtoDAsync" if to_device else "cuMemcpyDtoHAsync"
        code = quick_driver_function(name, _P, _P, _S, _P)(target, source, width * lines, stream)
    else:
        host, device = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
        parameters = _COPY_2D.pack(
            *(0, 0, host if to_device else device, source if to_device else 0, 0 if to_device else source),
            *(0, source_pitch),
            *(0, 0, device if to_device else host, 0 if to_device else target, target if to_device else 0),
            *(0, target_pitch),
            *(width, lines),
        )
        code = quick_driver_function("cuMemcpy2DAsync", ctypes.c_char_p, _P)(parameters, stream)
    _done(code, "copying between the host and the GPU")


@dataclass(frozen=True, eq=False)
class BlockForm:
    """What multiplies the blocks of a product.

    Attributes
    ----------
    whole : the kernel in a form, prepared for the whole product.
    free : whether each block has the form that suits it best, of those that give the same bits in any block
        (:func:`~numba_gemm.choose.in_one_run`); else all have that of ``whole``.
    """

    whole: Prepared
    free: bool = False


@functools.lru_cache(maxsize=1024)
def form_for(problem: Problem, form: BlockForm, context: Context) -> Prepared:
    """The kernel prepared for a block."""
    whole, device = form.whole, context.device
    if form.free:
        found = in_one_run(whole.spec, problem, device.compute_capability, device.sm_count)
        assert found is not None
        return prepare_form(problem, whole.spec, found[0], context)
    if whole.spec.unmet(problem, whole.config) is None:
        return prepare_form(problem, whole.spec, whole.config, context)
    # The last block may be of another kind: fewer rows than there are columns, or a single one.
    taken = whole.spec.refuses is None or whole.spec.refuses(problem) is None
    return prepare(problem, whole.spec.name if taken else None, context)


def allocate_device(context: Context, nbytes: int, stream: int) -> int:
    """Device memory for work on ``stream``; freed by ``cuMemFreeAsync``.

    Raises
    ------
    CudaError : if there is not enough; the message names ``memory_limit``.
    """
    result = driver().cuMemAllocFromPoolAsync(nbytes, memory_pool(context), stream)
    if int(result[0]) == int(driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY):
        raise CudaError(
            f"the GPU has no {nbytes} bytes free for this product; pass a smaller memory_limit (in bytes), or set "
            "NUMBA_GEMM_MEMORY_LIMIT, so that it is taken in smaller blocks, or free GPU memory held elsewhere",
            code=int(result[0]),
        )
    return int(check(result, f"allocating {nbytes} bytes on the GPU"))


def kept_memory(context: Context) -> int:
    """Bytes of device memory that our pool keeps and nobody uses: an allocation that they suffice for takes no time."""
    cu = driver()
    pool, attribute = memory_pool(context), cu.CUmemPool_attribute
    reserved = check(cu.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), "pool")
    used = check(cu.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT), "pool")
    return int(reserved) - int(used)


def free_memory() -> int:
    """Bytes of device memory that nobody has; to ask takes longer than a small product."""
    return int(check(driver().cuMemGetInfo(), "cuMemGetInfo")[0])


def trim_memory(context: Context) -> None:
    """Give kept device memory back to the system."""
    check(driver().cuMemPoolTrimTo(memory_pool(context), 0), "cuMemPoolTrimTo")
