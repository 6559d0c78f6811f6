"""Benchmarks on a GPU: for each shape, every kernel is validated and only then timed, interleaved with the peer.

In 16 bits two more contenders are interleaved: the ceilings, tensor-core instructions on registers alone, on numbers
near 1 and on normal numbers. With products of a vector one more is: reading the matrix, and nothing else. A kernel or
peer that fails becomes a row with its error; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.benchmark.inputs import Checker, Matrix, Pool
from numba_gemm.benchmark.peers import Peer
from numba_gemm.benchmark.record import CEILING, CEILING_NORMAL, HALF_AGAINST_SINGLE, READING, Record, Row, environment
from numba_gemm.benchmark.suites import Shape
from numba_gemm.problem import ITEMSIZE, Problem
from numba_gemm.spec import describe_config
from numba_gemm.timing import Timing, Work, set_count, time_interleaved
from numba_gemm.validate import POISON_BYTE

if TYPE_CHECKING:
    from numba_gemm.benchmark.ceiling import Ceiling

#: The kernel name that stands for the library's own choice.
AUTO = "auto"

_COPY_BYTES = 2**30  # of the copy that measures the memory's bandwidth

#: Called as a run goes on, with a few words on what is being done.
Step = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """Kernels to run on one shape in one element type; ``suite`` goes into the rows."""

    suite: str
    shape: Shape
    dtype: str
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.suite} {self.shape}{'' if self.dtype == 'float32' else f' {self.dtype}'}"

    @property
    def problem(self) -> Problem:
        """The product, of packed row-major matrices, C in the type of A and B."""
        return Problem.packed(self.shape.m, self.shape.n, self.shape.k, dtype=self.dtype)


@dataclass(frozen=True)
class Roof:
    """What bounds a kernel from above: arithmetic in TFLOP/s, and the memory's measured bandwidth in GB/s."""

    peak_tflops: float
    dram_gbs: float

    def tflops(self, problem: Problem) -> float:
        """The lesser of the arithmetic peak and intensity × bandwidth."""
        return min(self.peak_tflops, problem.flops / max(problem.bytes_moved, 1) * self.dram_gbs * 1e-3)


def measure_roof(context: Any) -> Roof:
    """The roof of the current GPU; the bandwidth is that of a large copy, counting bytes read and bytes written."""
    from numba_gemm.device.context import synchronize
    from numba_gemm.device.driver import check, driver
    from numba_gemm.device.memory import DeviceBuffer, fill_bytes

    nbytes = min(_COPY_BYTES, context.device.total_memory // 16)
    with DeviceBuffer(nbytes, 0) as source, DeviceBuffer(nbytes, 0) as target:
        fill_bytes(source.pointer, 1, nbytes)
        synchronize()

        def copy(_: int, stream: int) -> None:
            check(driver().cuMemcpyDtoDAsync(target.pointer, source.pointer, nbytes, stream), "cuMemcpyDtoDAsync")

        (timing,) = time_interleaved([copy], sets=1, rounds=5)
        synchronize()
    return Roof(context.device.peak_fp32_tflops, 2 * nbytes / timing.us * 1e-3)


class DeviceInputs:
    """Several sets of A, B and C on the GPU, and the first set's A and B on the host."""

    def __init__(self, task: Task, sets: int, pool: Pool, stack: ExitStack) -> None:
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import DeviceBuffer, copy_to_device

        self.shape = shape = task.shape
        self.dtype = numpy_dtype(task.dtype)
        self.pointers: list[tuple[int, int, int]] = []
        for number in range(sets):
            a, b = pool.factors(shape, number, task.dtype)
            if number == 0:
                self.a, self.b = a, b
            buffers = [
                stack.enter_context(DeviceBuffer(self.dtype.itemsize * count, 0))
                for count in (shape.m * shape.k, shape.k * shape.n, shape.m * shape.n)
            ]
            copy_to_device(buffers[0].pointer, a, 0)
            copy_to_device(buffers[1].pointer, b, 0)
            synchronize()  # the host arrays of later sets are let go after this
            self.pointers.append((buffers[0].pointer, buffers[1].pointer, buffers[2].pointer))

    def poison(self) -> None:
        """Fill the first set's C with NaNs."""
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import fill_bytes

        fill_bytes(self.pointers[0][2], POISON_BYTE, self.dtype.itemsize * self.shape.m * self.shape.n)
        synchronize()

    def output(self) -> Matrix:
        """The first set's C, once the GPU is done."""
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import copy_to_host

        synchronize()
        c = np.empty((self.shape.m, self.shape.n), self.dtype)
        copy_to_host(c, self.pointers[0][2], 0)
        synchronize()
        return c


class _Bench:
    """One task's inputs on the GPU and the reference, for as long as ``stack`` is open."""

    def __init__(self, task: Task, sets: int, pool: Pool, stack: ExitStack, context: Any) -> None:
        self.problem = task.problem
        self.stack = stack
        self.context = context
        self.inputs = DeviceInputs(task, sets, pool, stack)
        arch = context.device.compute_capability if ITEMSIZE[task.dtype] == 2 else None
        self.checker = Checker(self.inputs.a, self.inputs.b, tensor_core=arch)

    def kernel(self, row: Row) -> tuple[Row, Work | None]:
        """The row of a kernel, validated, and what to time; None and the row's ``error`` if it failed."""
        from numba_gemm.device.stream import Stream
        from numba_gemm.execute import prepare

        inputs = self.inputs
        try:
            prepared = prepare(self.problem, None if row.kernel == AUTO else row.kernel, self.context)
            config = describe_config(prepared.config)
            if prepared.spec.name != row.kernel:
                config = f"{prepared.spec.name} {config}".strip()
            row = replace(row, config=config, registers=prepared.function.registers)
            workspace = self._workspace(prepared.workspace_bytes)
            inputs.poison()
            stream = Stream()
            prepared.launch(*inputs.pointers[0], int(stream), workspace=workspace)
            stream.synchronize()
            validation = self.checker.check(inputs.output(), k_per_split=prepared.k_per_split)
        except Exception as error:  # of this kernel; the others are still to run
            return replace(row, error=_words(error)), None
        row = replace(row, error_over_bound=validation.error_over_bound, validated=validation.extent)
        if not validation.ok:
            return replace(row, error=f"wrong result: {validation.message}"), None

        def work(number: int, stream: int) -> None:
            prepared.launch(*inputs.pointers[number], stream, workspace=workspace)

        return row, work

    def _workspace(self, nbytes: int) -> int:
        """Memory for split-K, allocated once, as the peer's is, so that no allocation is timed."""
        if not nbytes:
            return 0
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import DeviceBuffer

        buffer = self.stack.enter_context(DeviceBuffer(nbytes, 0))
        synchronize()
        return buffer.pointer

    def reading(self) -> tuple[int, Work] | None:
        """The bytes of the matrix of a product with a vector, in whole chunks, and what reads them; None of others."""
        from numba_gemm.benchmark.ceiling import CHUNK_BYTES, ReadBandwidth

        problem = self.problem
        matrix, elements = (1, problem.k * problem.n) if problem.m == 1 else (0, problem.m * problem.k)
        nbytes = elements * ITEMSIZE[problem.dtype]
        if 1 not in (problem.m, problem.n) or nbytes < CHUNK_BYTES:
            return None
        reader = ReadBandwidth(self.context, nbytes)

        def work(number: int, stream: int) -> None:
            reader.read(self.inputs.pointers[number][matrix], stream)

        return reader.bytes, work

    def peer(self, peer: Peer) -> tuple[Work | None, str]:
        """What to time of a peer, validated; or None, and what is wrong."""
        from numba_gemm.device.stream import Stream

        inputs, problem = self.inputs, self.problem

        def work(number: int, stream: int) -> None:
            peer.gemm(*inputs.pointers[number], problem.m, problem.n, problem.k, stream)

        try:
            inputs.poison()
            stream = Stream()
            work(0, int(stream))
            stream.synchronize()
            validation = self.checker.check(inputs.output(), reduced=True)
        except Exception as error:
            return None, _words(error)
        return (work, "") if validation.ok else (None, f"wrong result: {validation.message}")


def bench_task(
    task: Task,
    *,
    roof: Roof,
    pool: Pool,
    peer: Peer | None = None,
    ceilings: Sequence[Ceiling] = (),
    rounds: int = 7,
    on_step: Step = lambda _: None,
) -> list[Row]:
    """Validate and time kernels on one shape.

    Parameters
    ----------
    task : the product and the names of the kernels; :data:`AUTO` is the library's own choice.
    roof : from :func:`measure_roof`; in 16 bits its peak gives way to the ceiling.
    pool : where inputs come from.
    peer : what to interleave with, or None.
    ceilings : of the tensor cores, to interleave too; the one on numbers near 1 is what kernels are held against.
    rounds : measurements of each contender.
    on_step : told what is being done.

    Returns
    -------
    One row a kernel, in order, then one of the peer if it failed, then those of the ceilings and of reading the matrix
    if the product is one with a vector. Failed ones have ``error`` set and no time.
    """
    from numba_gemm.device.context import current_context, synchronize

    problem, name = task.problem, str(task)
    blank = Row(task.suite, "", "", problem.dtype, "nn", problem.m, problem.n, problem.k)
    if problem.dtype == "float32":
        blank = replace(blank, roof_tflops=roof.tflops(problem))
    context = current_context()
    try:
        with ExitStack() as stack:
            on_step(f"{name}: inputs")
            sets = set_count(problem.bytes_moved, context.device.l2_bytes)
            bench = _Bench(task, sets, pool, stack, context)
            rows: list[Row] = []
            works: list[Work | None] = []
            for kernel in task.kernels:
                on_step(f"{name} {kernel}: validate")
                row, work = bench.kernel(replace(blank, kernel=kernel))
                rows.append(row)
                works.append(work)
            peer_work: Work | None = None
            if peer is not None:
                on_step(f"{name} {peer.name}: validate")
                peer_work, peer_error = bench.peer(peer)
                if peer_error:
                    rows.append(replace(blank, kernel=peer.name, error=peer_error))
                    works.append(None)
            for top in ceilings:
                row = replace(blank, kernel=top.kernel, config=top.measured, registers=top.registers)
                rows.append(row)
                works.append(top.work)
            reading = bench.reading()
            if reading is not None:
                rows.append(replace(blank, kernel=READING))
                works.append(reading[1])
            on_step(f"{name}: time")
            rows = _timed(rows, works, peer, peer_work, problem, sets, rounds)
            synchronize()
            rows = _with_ceilings(rows, ceilings, problem, roof)
            return _with_reading(rows, reading[0]) if reading is not None else rows
    except Exception as error:  # memory that doesn't suffice, or a fault that took the context with it
        return [replace(blank, kernel=kernel, error=_words(error)) for kernel in task.kernels]


def _with_ceilings(rows: list[Row], ceilings: Sequence[Ceiling], problem: Problem, roof: Roof) -> list[Row]:
    """The rows with the ceilings that were measured among them, and the roof that follows from the one near 1."""
    rates = {
        top.kernel: top.flops / row.us * 1e-6 for top in ceilings for row in rows if row.kernel == top.kernel and row.us
    }
    rate = rates.get(CEILING)
    if not rates:
        return rows
    bound = None if rate is None else Roof(rate, roof.dram_gbs).tflops(problem)
    return [
        replace(row, tflops=rates.get(row.kernel), gbs=None, peer=None, peer_us=None, ratio=None, ceiling_tflops=rate)
        if row.kernel in (CEILING, CEILING_NORMAL)
        else replace(row, ceiling_tflops=rate, roof_tflops=bound)
        for row in rows
    ]


def _with_reading(rows: list[Row], nbytes: int) -> list[Row]:
    """The rows, of which that of reading is told how many bytes that is."""
    return [
        replace(row, tflops=None, gbs=nbytes / row.us * 1e-3, peer=None, peer_us=None, ratio=None)
        if row.kernel == READING and row.us
        else row
        for row in rows
    ]


def compare_precisions(
    shape: Shape,
    dtype: str,
    half: Peer,
    single: Peer,
    *,
    pool: Pool,
    rounds: int = 7,
    on_step: Step = lambda _: None,
) -> Row:
    """The peer in a 16-bit type against the peer in FP32 on one shape, both validated, then timed interleaved.

    Returns
    -------
    A row of the 16-bit product whose ``peer`` is the FP32 one: ``ratio`` is how many times as fast 16 bits are.
    """
    from numba_gemm.device.context import current_context, synchronize

    tasks = [Task(HALF_AGAINST_SINGLE, shape, kind, ()) for kind in ("float32", dtype)]
    row = Row(HALF_AGAINST_SINGLE, half.name, "", dtype, "nn", shape.m, shape.n, shape.k)
    context = current_context()
    on_step(f"{shape} {half.name} in {dtype} and in float32")
    try:
        with ExitStack() as stack:
            sets = set_count(tasks[1].problem.bytes_moved, context.device.l2_bytes)
            works = []
            for task, peer in zip(tasks, (single, half), strict=True):
                work, error = _Bench(task, sets, pool, stack, context).peer(peer)
                if work is None:
                    return replace(row, error=f"{task.dtype}: {error}")
                works.append(work)
            first, second = time_interleaved(works, sets=sets, rounds=rounds)
            synchronize()
    except Exception as error:  # memory that doesn't suffice
        return replace(row, error=_words(error))
    return with_timing(row, tasks[1].problem, second, f"{single.name} float32", first)


def _timed(
    rows: list[Row],
    works: list[Work | None],
    peer: Peer | None,
    peer_work: Work | None,
    problem: Problem,
    sets: int,
    rounds: int,
) -> list[Row]:
    ready = [(index, work) for index, work in enumerate(works) if work is not None]
    if not ready:
        return rows
    leading = [peer_work] if peer_work is not None else []
    try:
        timings = time_interleaved([*leading, *(work for _, work in ready)], sets=sets, rounds=rounds)
    except Exception as error:
        if leading:  # the peer may be what can't be captured or timed
            without = _timed(rows, works, None, None, problem, sets, rounds)
            assert peer is not None
            blank = replace(rows[0], kernel=peer.name, config="", registers=None, error_over_bound=None, validated="")
            return [*without, replace(blank, error=_words(error))]
        if len(ready) > 1:  # one of the kernels is; each on its own
            alone = list(rows)
            for index, work in ready:
                alone[index] = _timed([rows[index]], [work], None, None, problem, sets, rounds)[0]
            return alone
        ((index, _),) = ready
        return [replace(row, error=_words(error)) if at == index else row for at, row in enumerate(rows)]
    peer_timing = timings.pop(0) if leading else None
    done = list(rows)
    for (index, _), timing in zip(ready, timings, strict=True):
        name = peer.name if peer is not None else None
        done[index] = with_timing(rows[index], problem, timing, name, peer_timing)
    return done


def with_timing(row: Row, problem: Problem, timing: Timing, peer: str | None, peer_timing: Timing | None) -> Row:
    """A row with its times, rates, and ratio to the peer that it was interleaved with."""
    compared = peer_timing is not None
    return replace(
        row,
        us=timing.us,
        us_min=timing.us_min,
        us_max=timing.us_max,
        tflops=problem.flops / timing.us * 1e-6,
        gbs=problem.bytes_moved / timing.us * 1e-3,
        peer=peer if compared else None,
        peer_us=peer_timing.us if peer_timing is not None else None,
        ratio=timing.ratio if compared else None,
    )


def _words(error: BaseException) -> str:
    """The first line of an error, with its type."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:400]


def bench_gpu(
    tasks: Sequence[Task],
    *,
    peers: Mapping[str, Peer],
    rounds: int = 7,
    commit: str | None = None,
    on_step: Step = lambda _: None,
    on_start: Callable[[Any, Roof], None] = lambda *_: None,
    on_task: Callable[[Task, list[Row]], None] = lambda *_: None,
    on_record: Callable[[Record], None] = lambda _: None,
    compare: bool = True,
) -> Record:
    """A whole run on the current GPU.

    After the tasks, where there are peers in FP32 and in 16 bits, these are compared with each other on the shapes that
    were multiplied in 16 bits (rows of suite :data:`~numba_gemm.benchmark.record.HALF_AGAINST_SINGLE`).

    Parameters
    ----------
    tasks : what to run, in order.
    peers : element type → what to interleave with; without one there is no comparison.
    rounds, on_step : as for :func:`bench_task`.
    commit : of the source, for the record; None asks git.
    on_start : called with the device and its roof before the first task.
    on_task : called with each task and its rows.
    on_record : called after each task with the record so far.
    compare : whether the peers are compared with each other, which takes long for large products in FP32.
    """
    from numba_gemm.device.context import current_context

    context = current_context()
    on_step("memory bandwidth")
    roof = measure_roof(context)
    on_start(context.device, roof)
    version = next((peer.version for peer in peers.values()), "")
    record = Record(
        environment(
            context.device,
            peer=version,
            commit=commit,
            peak_fp32_tflops=roof.peak_tflops,
            dram_gbs=roof.dram_gbs,
        )
    )
    on_step("random inputs")
    pool = Pool()
    ceilings = {dtype: find_ceilings(context, dtype) for dtype in {task.dtype for task in tasks}}
    for task in tasks:
        rows = bench_task(
            task,
            roof=roof,
            pool=pool,
            peer=peers.get(task.dtype),
            ceilings=ceilings[task.dtype],
            rounds=rounds,
            on_step=on_step,
        )
        record.rows += rows
        on_task(task, rows)
        on_record(record)
    single = peers.get("float32") if compare else None
    for shape, dtype in dict.fromkeys((task.shape, task.dtype) for task in tasks if task.dtype != "float32"):
        half = peers.get(dtype)
        if half is not None and single is not None:
            record.rows.append(
                compare_precisions(shape, dtype, half, single, pool=pool, rounds=rounds, on_step=on_step)
            )
    return record


def find_ceilings(context: Any, dtype: str) -> tuple[Ceiling, ...]:
    """The ceilings of a 16-bit type; none in FP32, and on a GPU without the instruction."""
    if ITEMSIZE[dtype] != 2 or context.device.compute_capability < (8, 0):
        return ()
    from numba_gemm.benchmark.ceiling import Ceiling

    return tuple(Ceiling(context, dtype, kernel) for kernel in (CEILING, CEILING_NORMAL))
