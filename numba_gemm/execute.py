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
from numba_gemm.errors import CompileError
from numba_gemm.fallback import REPACK, fallback_for
from numba_gemm.fp32 import repack
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Addresses, Config, KernelLaunch, KernelSpec
from numba_gemm.tensorcore.specs import T4


@dataclass(frozen=True)
class _Step:
    """One launch of a prepared product."""

    launch: KernelLaunch
    function: Function
    block: tuple[int, int, int]
    shared_bytes: int


@dataclass(frozen=True)
class Prepared:
    """A product whose kernels are chosen, compiled and loaded, and whose launches are worked out.

    ``function`` is the kernel's own; a product with split-K launches a second one after it.
    """

    spec: KernelSpec
    config: Config
    problem: Problem
    steps: tuple[_Step, ...]
    workspace_bytes: int
    k_per_split: int

    @property
    def function(self) -> Function:
        """The loaded kernel."""
        return self.steps[0].function

    def launch(self, a: int, b: int, c: int, stream: int, *, workspace: int = 0) -> None:
        """Launch on matrices at the addresses ``a``, ``b``, ``c``, aligned as the problem says.

        ``workspace`` is the address of ``workspace_bytes`` of memory; 0 allocates them for this launch, if needed.
        """
        if workspace or not self.workspace_bytes:
            self._launch(Addresses(a, b, c, workspace), stream)
            return
        with DeviceBuffer(self.workspace_bytes, stream) as buffer:
            self._launch(Addresses(a, b, c, buffer.pointer), stream)

    def _launch(self, at: Addresses, stream: int) -> None:
        for step in self.steps:
            launch(
                step.function,
                step.launch.grid,
                step.block,
                step.launch.parameters,
                step.launch.values(at),
                dynamic_shared_bytes=step.shared_bytes,
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
    try:
        return prepare_form(problem, spec, config, context)
    except CompileError as error:
        twin = _twin(spec, context, error)
        return prepare_form(problem, twin, config, context)


def _twin(spec: KernelSpec, context: Context, error: CompileError) -> KernelSpec:
    """The kernel in CUDA C++ that does what a Numba kernel would that can't be compiled here; else the error."""
    if spec.source != "numba":
        raise error
    reason = str(error).splitlines()[0]
    if spec.name == repack.SPECS[4].name:
        return REPACK[int(dict(spec.configs[0])["bits"]) // 8]
    twin = fallback_for(spec.name, context.device.compute_capability, reason)
    if twin is None:
        raise error
    return twin


def prepare_form(problem: Problem, spec: KernelSpec, config: Config, context: Context) -> Prepared:
    """Compile and load one form of a kernel for a problem that it can take."""
    plan = spec.plan(problem, config)
    steps = []
    for one in plan.launches:
        geometry = one.geometry
        compiled = compile_kernel(one.spec, one.config, context.device.compute_capability)
        function = load(compiled, context, dynamic_shared_bytes=geometry.shared_bytes)
        steps.append(_Step(one, function, (geometry.threads, 1, 1), geometry.shared_bytes))
    return Prepared(spec, config, problem, tuple(steps), plan.workspace_bytes, plan.k_per_split)


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
        columns_too = _takes_columns(a, kernel, context)
        a_pointer, lda, a_layout = _strided(a, context, stream, workspaces, columns_too)
        b_pointer, ldb, b_layout = _strided(b, context, stream, workspaces, columns_too)
        (m, k), n = a.shape, b.shape[1]
        in_place = _has_packed_rows(c)
        if in_place:
            c_pointer, ldc = c.pointer, c.strides[0]
        else:
            target = workspaces.enter_context(DeviceBuffer(m * n * c.itemsize, stream))
            c_pointer, ldc = target.pointer, n
            if beta != 0:
                _repack(context, stream, c.itemsize, c.pointer, c.strides, c_pointer, (ldc, 1), c.shape)
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
            c.dtype,
            a_layout,
            b_layout,
        )
        prepared = prepare(problem, kernel, context)
        prepared.launch(a_pointer, b_pointer, c_pointer, stream)
        if in_place and a_pointer == a.pointer and b_pointer == b.pointer:
            if len(_repeated) >= _REPEATED_LIMIT:
                _repeated.clear()
            key = _call_key(a.array, b.array, c.array, (a_pointer, b_pointer, c_pointer), options)
            _repeated[key] = _RepeatedCall(prepared, context, (a, b, c))
        if not in_place:
            _repack(context, stream, c.itemsize, c_pointer, (ldc, 1), c.pointer, c.strides, c.shape)


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
    problem = Problem.packed(
        m, n, k if alpha != 0 else 0, dtype=a.dtype.name, alpha=alpha, beta=beta, c_dtype=c.dtype.name
    )
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


def _takes_columns(a: Operand, kernel: str | None, context: Context) -> bool:
    """Whether the kernel that will be launched, t4, multiplies column-major factors as they lie."""
    return a.dtype != "float32" and kernel in (None, "t4") and context.device.compute_capability >= T4.min_arch


def _strided(
    operand: Operand, context: Context, stream: int, workspaces: ExitStack, columns_too: bool
) -> tuple[int, int, str]:
    """Address, stride and layout of a factor: the operand's own, or those of a repacked copy."""
    if _has_packed_rows(operand) or 0 in operand.shape:
        return operand.pointer, operand.strides[0], "row"
    if columns_too and (operand.strides[0] == 1 or operand.shape[0] <= 1):
        return operand.pointer, operand.strides[1], "column"
    rows, columns = operand.shape
    itemsize = operand.itemsize
    buffer = workspaces.enter_context(DeviceBuffer(rows * columns * itemsize, stream))
    _repack(context, stream, itemsize, operand.pointer, operand.strides, buffer.pointer, (columns, 1), operand.shape)
    return buffer.pointer, columns, "row"


def _repack(
    context: Context,
    stream: int,
    itemsize: int,
    source: int,
    source_strides: tuple[int, ...],
    target: int,
    target_strides: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    rows, columns = shape
    transposed = abs(source_strides[0]) < abs(source_strides[1])
    spec = repack.SPECS[itemsize]
    arch = context.device.compute_capability
    try:
        compiled = compile_kernel(spec, spec.configs[transposed], arch)
    except CompileError as error:
        compiled = compile_kernel(_twin(spec, context, error), spec.configs[transposed], arch)
    launch(
        load(compiled, context),
        (spec.grid(rows, columns), 1, 1),
        (spec.threads, 1, 1),
        PARAMETERS[spec.abi],
        (source, target, rows, columns, *source_strides, *target_strides),
        stream=stream,
    )
