"""A checked product, carried out on the GPU: choose → compile → launch, and the copies round it."""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.abi import PARAMETERS
from numba_gemm.arrays import Operand
from numba_gemm.choose import choose
from numba_gemm.compile import compile_kernel
from numba_gemm.device.context import Context, current_context
from numba_gemm.device.launch import launch
from numba_gemm.device.memory import DeviceBuffer, copy_to_device, copy_to_host, rows_are_contiguous
from numba_gemm.device.module import Function, load
from numba_gemm.device.stream import Event, Stream, synchronize_stream, wait_event
from numba_gemm.fp32 import repack
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Config, KernelSpec


@dataclass(frozen=True)
class Prepared:
    """A kernel that is loaded and whose launch is worked out for one problem."""

    spec: KernelSpec
    config: Config
    function: Function
    problem: Problem
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    def launch(self, a: int, b: int, c: int, stream: int) -> None:
        """Launch on matrices at the addresses ``a``, ``b``, ``c``, aligned as the problem says."""
        p = self.problem
        launch(
            self.function,
            self.grid,
            self.block,
            PARAMETERS[self.spec.abi],
            (a, b, c, p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alpha, p.beta),
            stream=stream,
        )


@functools.lru_cache(maxsize=1024)
def prepare(problem: Problem, kernel: str | None, context: Context) -> Prepared:
    """Choose, compile and load the kernel for a problem with m, n ≥ 1.

    Raises
    ------
    KernelConstraintError, CompileError, CudaError, ValueError : as their steps do.
    """
    device = context.device
    spec, config = choose(problem, kernel, arch=device.compute_capability, sm_count=device.sm_count)
    compiled = compile_kernel(spec, config, device.compute_capability)
    return Prepared(
        spec=spec,
        config=config,
        function=load(compiled, context),
        problem=problem,
        grid=(spec.grid(problem.m, problem.n), 1, 1),
        block=(spec.threads, 1, 1),
    )


def multiply_device(
    a: Operand,
    b: Operand,
    c: Operand,
    *,
    alpha: float,
    beta: float,
    kernel: str | None,
    options: tuple[Any, ...],
) -> None:
    """C = alpha · A · B + beta · C on device arrays, asynchronously on their stream; m, n ≥ 1.

    ``options`` are the caller's, by which :func:`repeat_call` will know the same call again.
    """
    context = current_context()
    stream = _common_stream(a, b, c)
    with ExitStack() as workspaces:
        a_pointer, lda = _packed_rows(a, context, stream, workspaces)
        b_pointer, ldb = _packed_rows(b, context, stream, workspaces)
        (m, k), n = a.shape, b.shape[1]
        in_place = _has_packed_rows(c)
        if in_place:
            c_pointer, ldc = c.pointer, c.strides[0]
        else:
            target = workspaces.enter_context(DeviceBuffer(m * n * c.itemsize, stream))
            c_pointer, ldc = target.pointer, n
            if beta != 0:
                _repack(context, stream, c.pointer, c.strides, c_pointer, (ldc, 1), c.shape)
        problem = Problem(
            m,
            n,
            k if alpha != 0 else 0,
            a.dtype,
            lda,
            ldb,
            ldc,
            a_pointer % ALIGNMENT,
            b_pointer % ALIGNMENT,
            c_pointer % ALIGNMENT,
            alpha,
            beta,
        )
        prepared = prepare(problem, kernel, context)
        prepared.launch(a_pointer, b_pointer, c_pointer, stream)
        if in_place and a_pointer == a.pointer and b_pointer == b.pointer:
            if len(_repeated) >= _REPEATED_LIMIT:
                _repeated.clear()
            key = _call_key(a.array, b.array, c.array, (a_pointer, b_pointer, c_pointer), options)
            _repeated[key] = _RepeatedCall(prepared, context, (a, b, c))
        if not in_place:
            _repack(context, stream, c_pointer, (ldc, 1), c.pointer, c.strides, c.shape)


class _RepeatedCall:
    """A product of device arrays that was checked and launched before, ready to be launched on other addresses."""

    __slots__ = ("context", "extents", "prepared")

    def __init__(self, prepared: Prepared, context: Context, operands: tuple[Operand, Operand, Operand]) -> None:
        self.prepared = prepared
        self.context = context.identity
        # First and past-the-last byte of A, B and C, relative to their pointers.
        self.extents = [tuple(end - operand.pointer for end in operand.byte_range()) for operand in operands]


_repeated: dict[tuple[Any, ...], _RepeatedCall] = {}
_REPEATED_LIMIT = 4096


def _call_key(a: Any, b: Any, c: Any, pointers: tuple[int, int, int], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Everything that the checks and the choice of kernel depend on, except where exactly the matrices lie."""
    a_pointer, b_pointer, c_pointer = pointers
    return (
        a.shape, a.strides, a.dtype, a_pointer % ALIGNMENT,
        b.shape, b.strides, b.dtype, b_pointer % ALIGNMENT,
        c.shape, c.strides, c.dtype, c_pointer % ALIGNMENT,
        options,
    )  # fmt: skip


def repeat_call(a: Any, b: Any, c: Any, options: tuple[Any, ...]) -> bool:
    """Launch a product of Numba device arrays at once if one like it was checked and launched before.

    Returns False, and has done nothing, if there was none, or if what may differ between two such calls (context,
    streams, memory shared between C and an input) asks for the full checks.
    """
    try:
        pointers = (
            a.device_ctypes_pointer.value,
            b.device_ctypes_pointer.value,
            c.device_ctypes_pointer.value,
        )
        call = _repeated.get(_call_key(a, b, c, pointers, options))
        if call is None or a.stream or b.stream or c.stream:
            return False
    except (
        AttributeError,
        TypeError,
    ):  # not arrays, or an option that can't be looked up: the checks will tell
        return False
    if current_context().identity != call.context:
        return False
    (a_low, a_high), (b_low, b_high), (c_low, c_high) = call.extents
    a_pointer, b_pointer, c_pointer = pointers
    c_low += c_pointer
    c_high += c_pointer
    if (c_low < a_pointer + a_high and a_pointer + a_low < c_high) or (
        c_low < b_pointer + b_high and b_pointer + b_low < c_high
    ):
        return False
    call.prepared.launch(a_pointer, b_pointer, c_pointer, 0)
    return True


def multiply_host(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    c: npt.NDArray[Any],
    *,
    alpha: float,
    beta: float,
    kernel: str | None,
) -> None:
    """C = alpha · A · B + beta · C on NumPy arrays, through the GPU; returns when C is there; m, n ≥ 1."""
    context = current_context()
    stream = int(_host_stream(context))
    (m, k), n = a.shape, b.shape[1]
    problem = Problem.packed(m, n, k if alpha != 0 else 0, dtype=a.dtype.name, alpha=alpha, beta=beta)
    prepared = prepare(problem, kernel, context)
    with ExitStack() as buffers:

        def upload(array: npt.NDArray[Any], *, fill: bool = True) -> DeviceBuffer:
            buffer = buffers.enter_context(DeviceBuffer(array.size * array.itemsize, stream))
            if fill and array.size:
                source = array if rows_are_contiguous(array) else np.ascontiguousarray(array)
                copy_to_device(buffer.pointer, source, stream)
            return buffer

        a_buffer, b_buffer = upload(a), upload(b)
        c_buffer = upload(c, fill=beta != 0)
        prepared.launch(a_buffer.pointer, b_buffer.pointer, c_buffer.pointer, stream)
        direct = rows_are_contiguous(c)
        target = c if direct else np.empty(c.shape, c.dtype)
        copy_to_host(target, c_buffer.pointer, stream)
        synchronize_stream(stream, after=f"kernel {prepared.function.name} on {m}×{n}×{k}")
        if not direct:
            c[...] = target


_thread_state = threading.local()


def _host_stream(context: Context) -> Stream:
    """This thread's own stream for products of NumPy arrays, so that threads don't wait for one another."""
    streams: dict[int, Stream] = _thread_state.__dict__.setdefault("streams", {})
    if context.identity not in streams:
        streams[context.identity] = Stream()
    return streams[context.identity]


def _common_stream(*operands: Operand) -> int:
    """The stream to launch on: the output's, after the work on the inputs' streams.

    Streams 0 (not named) and 1 are the legacy default stream, which orders itself after every blocking stream.
    """
    stream = operands[-1].stream or 0
    if not stream:
        stream = next((operand.stream for operand in operands if operand.stream), 0)
    for other in {operand.stream for operand in operands if operand.stream} - {stream}:
        event = Event()
        event.record(other)
        wait_event(stream, event)
    return stream


def _has_packed_rows(operand: Operand) -> bool:
    """Whether the elements of each row are neighbours (a single column has no neighbours to part)."""
    return operand.strides[1] == 1 or operand.shape[1] <= 1


def _packed_rows(operand: Operand, context: Context, stream: int, workspaces: ExitStack) -> tuple[int, int]:
    """Address and row stride of a matrix whose rows are contiguous: the operand's own, or a repacked copy's."""
    if _has_packed_rows(operand) or 0 in operand.shape:
        return operand.pointer, operand.strides[0]
    rows, columns = operand.shape
    buffer = workspaces.enter_context(DeviceBuffer(rows * columns * operand.itemsize, stream))
    _repack(context, stream, operand.pointer, operand.strides, buffer.pointer, (columns, 1), operand.shape)
    return buffer.pointer, columns


def _repack(
    context: Context,
    stream: int,
    source: int,
    source_strides: tuple[int, ...],
    target: int,
    target_strides: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    rows, columns = shape
    transposed = abs(source_strides[0]) < abs(source_strides[1])
    spec = repack.SPEC
    compiled = compile_kernel(spec, (("transposed", int(transposed)),), context.device.compute_capability)
    launch(
        load(compiled, context),
        (spec.grid(rows, columns), 1, 1),
        (spec.threads, 1, 1),
        PARAMETERS[spec.abi],
        (source, target, rows, columns, *source_strides, *target_strides),
        stream=stream,
    )
