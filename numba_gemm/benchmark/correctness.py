"""Correctness of a kernel on the case generator's problems: NumPy arrays, device arrays that lie just so, the emulator.

Outputs are filled with NaN before each run, and the memory round a view of a larger array has to be as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from numba_gemm.cases import Case, accepted_cases, large_cases, small_cases, typed
from numba_gemm.catalog import CPU_BASELINE, get_spec
from numba_gemm.choose import choose
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, describe_config
from numba_gemm.validate import Reference, Verdict, check, reference

if TYPE_CHECKING:
    from numba_gemm.benchmark.emulated import Run

Arch = tuple[int, int]

#: Where the operands are: ``"numpy"`` arrays on the host, or Numba ``"device"`` arrays.
PLACES = ("numpy", "device")

#: The place of a run on the emulator, which takes NumPy arrays.
EMULATOR = "emulator"

_CPU_TILE, _CPU_STEP = 64, 4


@dataclass(frozen=True)
class Outcome:
    """One kernel on one case.

    ``message`` is what went wrong, empty if nothing did; ``form`` is the compiled form that ran on the emulator.
    """

    kernel: str
    case: Case
    place: str
    error_over_bound: float
    message: str
    form: str = ""


def cases_for(kernel: str, *, quick: bool) -> Iterator[Case]:
    """The cases of one kernel: those that fit its tile, and, unless ``quick``, those of many tiles.

    Of a kernel with several element types each case in each of them.
    """
    refuses = None
    if kernel == CPU_BASELINE:
        tile, step = _CPU_TILE, _CPU_STEP
        dtypes: tuple[str, ...] = ("float32",)
    else:
        spec = get_spec(kernel)
        refuses = spec.refuses
        tile, step, dtypes = max(spec.block_tile[:2]), spec.block_tile[2], spec.dtypes
    for dtype in dtypes:
        for case in (*small_cases(tile, step), *(() if quick else large_cases())):
            yield from accepted_cases(typed(case, dtype), refuses)


class References:
    """References of cases, kept, since several kernels share them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._known: dict[tuple[Case, Arch | None, int], Reference] = {}

    def __call__(
        self, case: Case, a: Any, b: Any, c: Any, tensor_core: Arch | None = None, k_per_split: int = 0
    ) -> Reference:
        """The reference of ``case``, whose operands are ``a``, ``b`` and ``c``, by the arithmetic that is named."""
        key = (case, tensor_core, k_per_split)
        if key not in self._known:
            self._known[key] = reference(
                a,
                b,
                c,
                alpha=case.alpha,
                beta=case.beta,
                c_dtype=c.dtype.name,
                tensor_core=tensor_core,
                k_per_split=k_per_split,
            )
        return self._known[key]


def arithmetic(kernel: str, case: Case) -> tuple[Arch | None, int]:
    """What the bound of a kernel's result on the GPU depends on: whose tensor cores add, and the depth of a split."""
    if case.dtype == "float32" or kernel == CPU_BASELINE:
        return None, 0
    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare

    context = current_context()
    arch = context.device.compute_capability
    if case.alpha == 0:
        return arch, 0
    problem = Problem.packed(case.m, case.n, case.k, dtype=case.dtype, c_dtype=case.c_dtype)
    return arch, prepare(problem, kernel, context).k_per_split


def forms_on_gpu(kernel: str, *, quick: bool, device: Any) -> list[tuple[str, Config, Arch]]:
    """The forms that the cases of a kernel with a form for each problem need on a GPU, to be compiled ahead."""
    spec = get_spec(kernel)
    if spec.select is None:
        return []
    forms = []
    for case in cases_for(kernel, quick=quick):
        if case.alpha == 0:  # for the call it has no K; its form is compiled when it runs, if no other case has it
            continue
        packed = Problem.packed(case.m, case.n, case.k, dtype=case.dtype, c_dtype=case.c_dtype)
        problems = [packed]
        if case.layout == "transposed":
            problems.append(replace(packed, lda=case.m, ldb=case.k, a_layout="column", b_layout="column"))
        elif case.layout in ("padded", "sliced"):  # no row starts on a boundary of 16 bytes
            problems.append(replace(packed, lda=case.k + 5, ldb=case.n + 5, ldc=case.n + 5))
        for problem in problems:
            config = choose(problem, kernel, arch=device.compute_capability, sm_count=device.sm_count)[1]
            plan = spec.plan(problem, config)
            forms.append((kernel, plan.launches[plan.main].config, device.compute_capability))
    return list(dict.fromkeys(forms))


def check_case(kernel: str, case: Case, place: str, references: References) -> Outcome:
    """Run one kernel on one case; what goes wrong is told, not raised."""
    a, b, c = case.make(references.seed)
    try:
        expected = references(case, a, b, c, *arithmetic(kernel, case))
        if place == "device":
            result, surroundings = _on_device(kernel, case, a, b, c)
        else:
            device = "cpu" if kernel == CPU_BASELINE else "cuda"
            result, surroundings = _multiply(kernel, case, a, b, c, device)
    except Exception as error:  # any failure is a finding about this case
        return Outcome(kernel, case, place, float("inf"), f"{type(error).__name__}: {error}")
    verdict: Verdict = check(result, expected, exact=case.exact)
    message = verdict.message
    if verdict.ok and not surroundings:
        message = "elements outside the output were written"
    return Outcome(kernel, case, place, verdict.error_over_bound, message)


def check_emulated(run: Run, seed: int, arch: tuple[int, int]) -> Outcome:
    """One run on the emulator; a hazard is what went wrong, and is told in its words."""
    from numba_gemm.benchmark.emulated import depth_of_split, expected_product, run_case

    case = run.case
    a, b, c = case.make(seed)
    expected = expected_product(case, a, b, c, arch, depth_of_split(run, arch))
    if case.beta == 0:
        c[...] = np.nan
    before = base_of(c).copy()
    form = "" if run.config is None else describe_config(run.config)
    try:
        form = run_case(run, a, b, c, arch)
    except Exception as error:  # any failure is a finding about this case
        return Outcome(run.kernel, case, EMULATOR, float("inf"), f"{type(error).__name__}: {error}", form)
    verdict = check(c, expected, exact=case.exact)
    message = verdict.message
    if verdict.ok and not untouched_outside(c, base_of(c), before):
        message = "elements outside the output were written"
    return Outcome(run.kernel, case, EMULATOR, verdict.error_over_bound, message, form)


def count_runs(kernel: str, place: str, *, quick: bool) -> int:
    """How many outcomes :func:`check_kernels` has for a kernel in a place."""
    if place == EMULATOR:
        from numba_gemm.benchmark.emulated import emulated_runs

        return sum(1 for _ in emulated_runs(kernel, quick=quick))
    return sum(1 for _ in cases_for(kernel, quick=quick))


def check_kernels(
    kernels: list[str],
    places: dict[str, tuple[str, ...]],
    *,
    quick: bool,
    seed: int,
    arch: tuple[int, int] = (9, 0),
    on_case: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Every case of every kernel in each of its places.

    Parameters
    ----------
    kernels : names.
    places : kernel → some of :data:`PLACES` and :data:`EMULATOR`.
    quick : leave the large cases out; the emulator never runs them, but forms that no small case would take.
    seed : of the inputs.
    arch : the architecture that is emulated.
    on_case : called with each outcome.
    """
    from numba_gemm.benchmark.emulated import emulated_runs

    references = References(seed)
    outcomes: list[Outcome] = []
    for kernel in kernels:
        for place in places[kernel]:
            found: Iterator[Outcome]
            if place == EMULATOR:
                found = (check_emulated(run, seed, arch) for run in emulated_runs(kernel, quick=quick))
            else:
                found = (check_case(kernel, case, place, references) for case in cases_for(kernel, quick=quick))
            for outcome in found:
                outcomes.append(outcome)
                on_case(outcome)
    return outcomes


def _multiply(kernel: str, case: Case, a: Any, b: Any, c: Any, device: Any) -> tuple[npt.NDArray[Any], bool]:
    """The product into ``c``, and whether the memory round ``c`` is as it was."""
    import numba_gemm

    if case.beta == 0:
        c[...] = np.nan
    before = base_of(c).copy()
    if (case.alpha, case.beta) == (1.0, 0.0):
        numba_gemm.matmul(a, b, out=c, kernel=kernel, device=device)
    else:
        numba_gemm.gemm(a, b, c, case.alpha, case.beta, kernel=kernel, device=device)
    return c, untouched_outside(c, base_of(c), before)


def _on_device(kernel: str, case: Case, a: Any, b: Any, c: Any) -> tuple[npt.NDArray[Any], bool]:
    import numba_gemm

    if case.beta == 0:
        c[...] = np.nan
    (a_view, _), (b_view, _), (c_view, c_base) = (device_view(matrix) for matrix in (a, b, c))
    before = base_of(c).copy()
    if (case.alpha, case.beta) == (1.0, 0.0):
        numba_gemm.matmul(a_view, b_view, out=c_view, kernel=kernel)
    else:
        numba_gemm.gemm(a_view, b_view, c_view, case.alpha, case.beta, kernel=kernel)
    after = c_base.copy_to_host().view(c.dtype)
    return view_like(c, after), untouched_outside(c, after, before)


class _View:
    """Part of device memory described by the CUDA array interface; keeps the memory alive."""

    def __init__(
        self, memory: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": f"<i{itemsize}",
            "shape": shape,
            "strides": strides,
            "data": (pointer, False),
        }


def device_view(matrix: npt.NDArray[Any]) -> tuple[Any, Any]:
    """A Numba device array that lies in a copy of the matrix's base array as the matrix lies in the base.

    Same offset, same strides: so the same alignment. Returns the view and the device copy of the base, flat, whose
    elements are integers of the same size: the array interface has no name for bfloat16, and Numba's arrays carry one.
    """
    from numba import cuda

    itemsize = matrix.itemsize
    base = cuda.to_device(base_of(matrix).view(f"i{itemsize}"))
    pointer = base.__cuda_array_interface__["data"][0] + itemsize * offset_in_base(matrix)
    view = cuda.as_cuda_array(_View(base, pointer, matrix.shape, matrix.strides, itemsize))
    return view.view(matrix.dtype), base


def base_of(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The whole array that a view is part of, flat."""
    base: npt.NDArray[Any] = matrix
    while isinstance(base.base, np.ndarray):
        base = base.base
    flat: npt.NDArray[Any] = base.ravel(order="K")  # as it lies in memory, whatever the order of its dimensions
    if base.size and not np.shares_memory(flat, base):
        raise ValueError("the view's base has gaps")
    return flat


def offset_in_base(matrix: npt.NDArray[Any]) -> int:
    """Elements from the start of the base to element [0, 0] of the view."""
    start = base_of(matrix).__array_interface__["data"][0]
    return int(matrix.__array_interface__["data"][0] - start) // matrix.itemsize


def view_like(matrix: npt.NDArray[Any], base: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The part of another flat base that corresponds to the view."""
    offset = matrix.itemsize * offset_in_base(matrix)
    view: npt.NDArray[Any] = np.ndarray(matrix.shape, matrix.dtype, base, offset, matrix.strides)
    return view


def untouched_outside(matrix: npt.NDArray[Any], after: npt.NDArray[Any], before: npt.NDArray[Any]) -> bool:
    """Whether two versions of a view's base have the same bits everywhere but in the view."""
    after = after.copy()
    view_like(matrix, after)[...] = view_like(matrix, before)
    bits = f"u{matrix.itemsize}"
    return bool(np.array_equal(after.view(bits), before.view(bits)))
