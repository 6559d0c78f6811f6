"""Benchmarks on a GPU: for each shape, every kernel is validated and only then timed, interleaved with the peer.

A kernel or peer that fails becomes a row with its error; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_gemm.benchmark.inputs import Checker, Matrix, Pool
from numba_gemm.benchmark.peers import Peer
from numba_gemm.benchmark.record import Record, Row, environment
from numba_gemm.benchmark.suites import Shape
from numba_gemm.problem import Problem
from numba_gemm.spec import describe_config
from numba_gemm.timing import Timing, Work, set_count, time_interleaved
from numba_gemm.validate import POISON_BYTE

#: The kernel name that stands for the library's own choice.
AUTO = "auto"

_COPY_BYTES = 2**30  # of the copy that measures the memory's bandwidth

#: Called as a run goes on, with a few words on what is being done.
Step = Callable[[str], None]


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

    def __init__(self, shape: Shape, sets: int, pool: Pool, stack: ExitStack) -> None:
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import DeviceBuffer, copy_to_device

        self.shape = shape
        self.pointers: list[tuple[int, int, int]] = []
        for number in range(sets):
            a, b = pool.factors(shape, number)
            if number == 0:
                self.a, self.b = a, b
            buffers = [
                stack.enter_context(DeviceBuffer(4 * count, 0))
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

        fill_bytes(self.pointers[0][2], POISON_BYTE, 4 * self.shape.m * self.shape.n)
        synchronize()

    def output(self) -> Matrix:
        """The first set's C, once the GPU is done."""
        from numba_gemm.device.context import synchronize
        from numba_gemm.device.memory import copy_to_host

        synchronize()
        c = np.empty((self.shape.m, self.shape.n), np.float32)
        copy_to_host(c, self.pointers[0][2], 0)
        synchronize()
        return c


def bench_shape(
    shape: Shape,
    kernels: Sequence[str],
    *,
    suite: str,
    roof: Roof,
    pool: Pool,
    peer: Peer | None = None,
    rounds: int = 7,
    on_step: Step = lambda _: None,
) -> list[Row]:
    """Validate and time kernels on one shape.

    Parameters
    ----------
    shape : the product.
    kernels : names; :data:`AUTO` is the library's own choice.
    suite : goes into the rows.
    roof : from :func:`measure_roof`.
    pool : where inputs come from.
    peer : what to interleave with, or None.
    rounds : measurements of each contender.
    on_step : told what is being done.

    Returns
    -------
    One row a kernel, in order; failed ones have ``error`` set and no time.
    """
    from numba_gemm.device.context import current_context, synchronize

    problem = Problem.packed(shape.m, shape.n, shape.k)
    blank = Row(suite, "", "", problem.dtype, "nn", shape.m, shape.n, shape.k, roof_tflops=roof.tflops(problem))
    context = current_context()
    try:
        with ExitStack() as stack:
            on_step(f"{shape} inputs")
            sets = set_count(problem.bytes_moved, context.device.l2_bytes)
            inputs = DeviceInputs(shape, sets, pool, stack)
            on_step(f"{shape} reference")
            checker = Checker(inputs.a, inputs.b)
            rows, works = [], []
            for name in kernels:
                on_step(f"{shape} {name}: validate")
                row, work = _validated(replace(blank, kernel=name), problem, inputs, checker, context)
                rows.append(row)
                works.append(work)
            peer_work: Work | None = None
            if peer is not None:
                on_step(f"{shape} {peer.name}: validate")
                peer_work, peer_error = _validated_peer(peer, problem, inputs, checker)
                if peer_error:
                    rows.append(replace(blank, kernel=peer.name, error=peer_error))
                    works.append(None)
            on_step(f"{shape} time")
            rows = _timed(rows, works, peer, peer_work, problem, sets, rounds)
            synchronize()
            return rows
    except Exception as error:  # memory that doesn't suffice, or a fault that took the context with it
        return [replace(blank, kernel=name, error=_words(error)) for name in kernels]


def _validated(
    row: Row, problem: Problem, inputs: DeviceInputs, checker: Checker, context: Any
) -> tuple[Row, Work | None]:
    from numba_gemm.device.stream import Stream
    from numba_gemm.execute import prepare

    try:
        prepared = prepare(problem, None if row.kernel == AUTO else row.kernel, context)
        config = describe_config(prepared.config)
        if row.kernel == AUTO:
            config = f"{prepared.spec.name} {config}".strip()
        row = replace(row, config=config, registers=prepared.function.registers)
        inputs.poison()
        stream = Stream()
        prepared.launch(*inputs.pointers[0], int(stream))
        stream.synchronize()
        validation = checker.check(inputs.output())
    except Exception as error:  # of this kernel; the others are still to run
        return replace(row, error=_words(error)), None
    row = replace(row, error_over_bound=validation.error_over_bound, validated=validation.extent)
    if not validation.ok:
        return replace(row, error=f"wrong result: {validation.message}"), None

    def work(number: int, stream: int) -> None:
        prepared.launch(*inputs.pointers[number], stream)

    return row, work


def _validated_peer(peer: Peer, problem: Problem, inputs: DeviceInputs, checker: Checker) -> tuple[Work | None, str]:
    from numba_gemm.device.stream import Stream

    def work(number: int, stream: int) -> None:
        peer.gemm(*inputs.pointers[number], problem.m, problem.n, problem.k, stream)

    try:
        inputs.poison()
        stream = Stream()
        work(0, int(stream))
        stream.synchronize()
        validation = checker.check(inputs.output())
    except Exception as error:
        return None, _words(error)
    return (work, "") if validation.ok else (None, f"wrong result: {validation.message}")


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
    work: Sequence[tuple[str, Shape]],
    kernels: Sequence[str],
    *,
    peer: Peer | None,
    rounds: int = 7,
    commit: str | None = None,
    on_step: Step = lambda _: None,
    on_start: Callable[[Any, Roof], None] = lambda *_: None,
    on_shape: Callable[[str, Shape, list[Row]], None] = lambda *_: None,
) -> Record:
    """A whole run on the current GPU.

    Parameters
    ----------
    work : (suite, shape) pairs, in order.
    kernels : names, :data:`AUTO` among them or not.
    peer, rounds, on_step : as for :func:`bench_shape`.
    commit : of the source, for the record; None asks git.
    on_start : called with the device and its roof before the first shape.
    on_shape : called with suite, shape and rows after each shape.
    """
    from numba_gemm.device.context import current_context

    context = current_context()
    on_step("memory bandwidth")
    roof = measure_roof(context)
    on_start(context.device, roof)
    record = Record(
        environment(
            context.device,
            peer=peer.version if peer is not None else "",
            commit=commit,
            peak_fp32_tflops=roof.peak_tflops,
            dram_gbs=roof.dram_gbs,
        )
    )
    on_step("random inputs")
    pool = Pool()
    for suite, shape in work:
        rows = bench_shape(shape, kernels, suite=suite, roof=roof, pool=pool, peer=peer, rounds=rounds, on_step=on_step)
        record.rows += rows
        on_shape(suite, shape, rows)
    return record
