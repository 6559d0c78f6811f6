"""Which kernel, in which form, is fastest at a shape on this GPU: measured, and kept in a table (``tuned.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba_gemm.benchmark.suites import Shape
from numba_gemm.catalog import tuned_kernels
from numba_gemm.errors import NumbaGemmError
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, KernelSpec
from numba_gemm.tuned import Choice, Table, key_of

#: Rounds of the first look at all forms, of the second at the best of them, and how many those are.
FIRST_ROUNDS, SECOND_ROUNDS, FINALISTS = 3, 9, 4

Candidate = tuple[KernelSpec, Config]


@dataclass(frozen=True)
class Measured:
    """A form and its time in µs, or why it has none."""

    kernel: str
    config: Config
    us: float | None
    error: str = ""


#: Validates and times forms of kernels on a problem, interleaved: ``(problem, candidates, rounds)``.
Measure = Callable[[Problem, Sequence[Candidate], int], list[Measured]]


def candidates(problem: Problem, *, arch: tuple[int, int], sm_count: int) -> list[Candidate]:
    """The forms that are worth timing for a problem: those that each kernel names, or the one that it would choose."""
    found: list[Candidate] = []
    for spec in tuned_kernels(problem.dtype):
        if arch < spec.min_arch:
            continue
        if spec.candidates is not None and (spec.refuses is None or spec.refuses(problem) is None):
            forms: Iterable[Config] = spec.candidates(problem, sm_count, arch)
        elif spec.select is not None:
            forms = [spec.select(problem, sm_count, arch)] if spec.refuses is None or not spec.refuses(problem) else []
        else:
            forms = [config for config in spec.configs if spec.unmet(problem, config) is None][:1]
        found += [(spec, config) for config in forms if spec.unmet(problem, config) is None]
    return found


def tune_problem(problem: Problem, measure: Measure, *, arch: tuple[int, int], sm_count: int) -> Choice:
    """Time all forms shortly, the best of them again, and take the fastest.

    Raises
    ------
    NumbaGemmError : if not one form gave a right result.
    """
    forms = candidates(problem, arch=arch, sm_count=sm_count)
    first = measure(problem, forms, FIRST_ROUNDS)
    right = sorted((result.us, index) for index, result in enumerate(first) if result.us is not None)
    if not right:
        reasons = "; ".join(sorted({f"{result.kernel}: {result.error}" for result in first})) or "no kernel takes it"
        raise NumbaGemmError(f"no form of a kernel gave a right result for {key_of(problem)} ({reasons})")
    finalists = [forms[index] for _, index in right[:FINALISTS]]
    second = [result for result in measure(problem, finalists, SECOND_ROUNDS) if result.us is not None]
    best = min(second or [first[right[0][1]]], key=lambda result: result.us or 0.0)
    assert best.us is not None
    return Choice(best.kernel, best.config, best.us, len(forms))


def tune(
    problems: Sequence[Problem],
    table: Table,
    path: Path,
    measure: Measure,
    *,
    arch: tuple[int, int],
    sm_count: int,
    again: bool = False,
    on_problem: Callable[[Problem, Choice | None], None] = lambda problem, choice: None,
) -> list[str]:
    """Fill a table, problem by problem; it is written after each, so that a run that is cut short can be resumed.

    Parameters
    ----------
    problems : what to tune for; those in the table already are left out unless ``again``.
    table, path : the table and its file.
    measure : how forms are timed.
    on_problem : told of each problem, before with None and after with the choice.

    Returns
    -------
    What went wrong, a line for each problem without a right result.
    """
    failures = []
    for problem in problems:
        key = key_of(problem)
        if key in table.choices and not again:
            on_problem(problem, table.choices[key])
            continue
        on_problem(problem, None)
        try:
            table.choices[key] = tune_problem(problem, measure, arch=arch, sm_count=sm_count)
        except NumbaGemmError as error:
            failures.append(str(error))
            continue
        table.save(path)
        on_problem(problem, table.choices[key])
    return failures


class GpuMeasure:
    """Validates and times forms on the current GPU, on random data that is rotated past the L2 cache."""

    def __init__(self) -> None:
        from numba_gemm.benchmark.inputs import Pool

        self._pool = Pool()

    def __call__(self, problem: Problem, forms: Sequence[Candidate], rounds: int) -> list[Measured]:
        """Times of packed row-major matrices of the problem's shape and type."""
        from contextlib import ExitStack

        from numba_gemm.benchmark.inputs import Checker
        from numba_gemm.benchmark.runner import DeviceInputs, Task
        from numba_gemm.device.context import current_context, synchronize
        from numba_gemm.timing import set_count, time_interleaved

        context = current_context()
        shape = Shape(problem.m, problem.n, problem.k)
        results: list[Measured] = []
        works: list[Any] = []
        with ExitStack() as stack:
            sets = set_count(problem.bytes_moved, context.device.l2_bytes)
            inputs = DeviceInputs(Task("tune", shape, problem.dtype, ()), sets, self._pool, stack)
            tensor_core = context.device.compute_capability if problem.dtype != "float32" else None
            checker = Checker(inputs.a, inputs.b, tensor_core=tensor_core)
            for spec, config in forms:
                result, work = self._validated(problem, spec, config, inputs, checker, stack, context)
                results.append(result)
                works.append(work)
            timed = [index for index, work in enumerate(works) if work is not None]
            timings = time_interleaved([works[index] for index in timed], sets=sets, rounds=rounds) if timed else []
            synchronize()
        for index, timing in zip(timed, timings, strict=True):
            results[index] = Measured(results[index].kernel, results[index].config, timing.us)
        return results

    @staticmethod
    def _validated(
        problem: Problem, spec: KernelSpec, config: Config, inputs: Any, checker: Any, stack: Any, context: Any
    ) -> tuple[Measured, Any]:
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import Stream
        from numba_gemm.execute import prepare_form

        try:
            prepared = prepare_form(problem, spec, config, context)
            workspace = 0
            if prepared.workspace_bytes:
                workspace = stack.enter_context(DeviceBuffer(prepared.workspace_bytes, 0)).pointer
            inputs.poison()
            stream = Stream()
            a, b, c = inputs.pointers[0]
            prepared.launch(a, b, c, int(stream), workspace=workspace)
            stream.synchronize()
            validation = checker.check(inputs.output(), k_per_split=prepared.k_per_split)
        except NumbaGemmError as error:
            return Measured(spec.name, config, None, str(error).splitlines()[0]), None
        if not validation.ok:
            return Measured(spec.name, config, None, f"wrong result: {validation.message}"), None

        def work(number: int, stream: int) -> None:
            a, b, c = inputs.pointers[number]
            prepared.launch(a, b, c, stream, workspace=workspace)

        return Measured(spec.name, config, None), work
