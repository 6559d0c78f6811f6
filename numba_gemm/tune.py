"""Which kernel, in which form, is fastest at a shape on this GPU: measured, and kept in a table (``tuned.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

#: A product of so many terms takes milliseconds and varies little: it is timed in fewer forms, the model's first, by
#: fewer rounds.
LONG_TERMS, LONG_FORMS, LONG_FINALISTS = 2**37, 6, 2

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
        if not spec.runs_on(arch) or (spec.refuses is not None and spec.refuses(problem) is not None):
            continue
        if spec.candidates is not None:
            forms: Iterable[Config] = spec.candidates(problem, sm_count, arch)
        elif spec.select is not None:
            forms = [spec.select(problem, sm_count, arch)]
        else:
            forms = [config for config in spec.configs if spec.unmet(problem, config) is None][:1]
        found += [(spec, config) for config in forms if spec.unmet(problem, config) is None]
    if _is_long(problem):
        modelled = [candidate for candidate in found if candidate[0].select is not None]
        found = (modelled or found)[:LONG_FORMS]
    return found


def _is_long(problem: Problem) -> bool:
    return problem.m * problem.n * problem.k * problem.batch > LONG_TERMS


def forms_to_compile(
    problems: Iterable[Problem], *, arch: tuple[int, int], sm_count: int
) -> Iterator[tuple[KernelSpec, Config]]:
    """Every kernel that the candidates for some problems launch, in the form that is compiled."""
    for problem in problems:
        for spec, config in candidates(problem, arch=arch, sm_count=sm_count):
            for launch in spec.plan(problem, config).launches:
                yield launch.spec, launch.config


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
    most, rounds = (LONG_FINALISTS, FIRST_ROUNDS) if _is_long(problem) else (FINALISTS, SECOND_ROUNDS)
    finalists = [forms[index] for _, index in right[:most]]
    second = [result for result in measure(problem, finalists, rounds) if result.us is not None]
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
    """Validates and times forms on the current GPU, on random data that is rotated past the L2 cache.

    The inputs of a problem, and the forms of it that were right, are kept until another one comes or :meth:`close`.
    """

    def __init__(self) -> None:
        from numba_gemm.benchmark.inputs import Pool

        self._pool = Pool()
        self._session: _Session | None = None

    def __call__(self, problem: Problem, forms: Sequence[Candidate], rounds: int) -> list[Measured]:
        """Times of packed row-major matrices of the problem's shape and type."""
        from numba_gemm.device.context import synchronize
        from numba_gemm.timing import time_interleaved

        if self._session is None or self._session.problem != problem:
            self.close()
            self._session = _Session(problem, self._pool)
        validated = [self._session.validated(*form) for form in forms]
        timed = [work for _, work in validated if work is not None]
        timings = iter(time_interleaved(timed, sets=self._session.sets, rounds=rounds) if timed else [])
        synchronize()
        return [
            found if work is None else Measured(found.kernel, found.config, next(timings).us)
            for found, work in validated
        ]

    def close(self) -> None:
        """Free the memory of the last problem."""
        if self._session is not None:
            self._session.stack.close()
        self._session = None


class _Session:
    """The inputs of one problem on the GPU, and its forms: why one can't be timed, or what to time."""

    def __init__(self, problem: Problem, pool: Any) -> None:
        from contextlib import ExitStack

        from numba_gemm.benchmark.inputs import Checker
        from numba_gemm.benchmark.runner import DeviceInputs, Task
        from numba_gemm.device.context import current_context
        from numba_gemm.timing import set_count

        self.problem = problem
        self._context = current_context()
        self.stack = ExitStack()
        self.sets = set_count(problem.bytes_moved, self._context.device.l2_bytes)
        task = Task("tune", Shape(problem.m, problem.n, problem.k), problem.dtype, ())
        try:
            self._inputs = DeviceInputs(task, self.sets, pool, self.stack)
        except BaseException:
            self.stack.close()
            raise
        tensor_core = self._context.device.compute_capability if problem.dtype != "float32" else None
        self._checker = Checker(self._inputs.a, self._inputs.b, tensor_core=tensor_core)
        self._known: dict[tuple[str, Config], tuple[Measured, Any]] = {}

    def validated(self, spec: KernelSpec, config: Config) -> tuple[Measured, Any]:
        """A form without a time: with the error and None, or with what launches it on a set of inputs."""
        key = spec.name, config
        if key not in self._known:
            self._known[key] = self._validate(spec, config)
        return self._known[key]

    def _validate(self, spec: KernelSpec, config: Config) -> tuple[Measured, Any]:
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import Stream
        from numba_gemm.execute import prepare_form

        inputs = self._inputs
        try:
            prepared = prepare_form(self.problem, spec, config, self._context)
            workspace = 0
            if prepared.workspace_bytes:
                workspace = self.stack.enter_context(DeviceBuffer(prepared.workspace_bytes, 0)).pointer
            inputs.poison()
            stream = Stream()
            a, b, c = inputs.pointers[0]
            prepared.launch(a, b, c, int(stream), workspace=workspace)
            stream.synchronize()
            validation = self._checker.check(inputs.output(), k_per_split=prepared.k_per_split)
        except NumbaGemmError as error:
            return Measured(spec.name, config, None, str(error).splitlines()[0]), None
        if not validation.ok:
            return Measured(spec.name, config, None, f"wrong result: {validation.message}"), None

        def work(number: int, stream: int) -> None:
            a, b, c = inputs.pointers[number]
            prepared.launch(a, b, c, stream, workspace=workspace)

        return Measured(spec.name, config, None), work
