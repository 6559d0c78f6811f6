"""Correctness of a kernel on the case generator's problems: NumPy arrays, and device arrays that lie just so.

Outputs are filled with NaN before each run, and the memory round a view of a larger array has to be as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.cases import Case, large_cases, small_cases
from numba_gemm.catalog import CPU_BASELINE, get_spec
from numba_gemm.validate import Reference, Verdict, check, reference

#: Where the operands are: ``"numpy"`` arrays on the host, or Numba ``"device"`` arrays.
PLACES = ("numpy", "device")

_CPU_TILE, _CPU_STEP = 64, 4


@dataclass(frozen=True)
class Outcome:
    """One kernel on one case; ``message`` is what went wrong, empty if nothing did."""

    kernel: str
    case: Case
    place: str
    error_over_bound: float
    message: str


def cases_for(kernel: str, *, quick: bool) -> Iterator[Case]:
    """The cases of one kernel: those that fit its tile, and, unless ``quick``, those of many tiles."""
    if kernel == CPU_BASELINE:
        tile, step = _CPU_TILE, _CPU_STEP
    else:
        block_m, block_n, step = get_spec(kernel).block_tile
        tile = max(block_m, block_n)
    yield from small_cases(tile, step)
    if not quick:
        yield from large_cases()


class References:
    """References of cases, kept, since several kernels share them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._known: dict[Case, Reference] = {}

    def __call__(self, case: Case, a: Any, b: Any, c: Any) -> Reference:
        """The reference of ``case``, whose operands are ``a``, ``b`` and ``c``."""
        if case not in self._known:
            self._known[case] = reference(a, b, c, alpha=case.alpha, beta=case.beta)
        return self._known[case]


def check_case(kernel: str, case: Case, place: str, references: References) -> Outcome:
    """Run one kernel on one case; what goes wrong is told, not raised."""
    a, b, c = case.make(references.seed)
    expected = references(case, a, b, c)
    try:
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


def check_kernels(
    kernels: list[str],
    places: dict[str, tuple[str, ...]],
    *,
    quick: bool,
    seed: int,
    on_case: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Every case of every kernel in each of its places.

    Parameters
    ----------
    kernels : names.
    places : kernel → a subset of :data:`PLACES`.
    quick : leave the large cases out.
    seed : of the inputs.
    on_case : called with each outcome.
    """
    references = References(seed)
    outcomes = []
    for kernel in kernels:
        for place in places[kernel]:
            for case in cases_for(kernel, quick=quick):
                outcomes.append(check_case(kernel, case, place, references))
                on_case(outcomes[-1])
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
    after = c_base.copy_to_host()
    return view_like(c, after), untouched_outside(c, after, before)


class _View:
    """Part of device memory described by the CUDA array interface; keeps the memory alive."""

    def __init__(self, memory: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<f4",
            "shape": shape,
            "strides": strides,
            "data": (pointer, False),
        }


def device_view(matrix: npt.NDArray[Any]) -> tuple[Any, Any]:
    """A Numba device array that lies in a copy of the matrix's base array as the matrix lies in the base.

    Same offset, same strides: so the same alignment. Returns the view and the device copy of the base, flat.
    """
    from numba import cuda

    base = cuda.to_device(base_of(matrix))
    pointer = base.__cuda_array_interface__["data"][0] + 4 * offset_in_base(matrix)
    return cuda.as_cuda_array(_View(base, pointer, matrix.shape, matrix.strides)), base


def base_of(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The whole array that a view is part of, flat."""
    base: npt.NDArray[Any] = matrix
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not base.flags.c_contiguous:
        raise ValueError("the view's base has gaps")
    flat: npt.NDArray[Any] = base.reshape(-1)
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
    return bool(np.array_equal(after.view(np.uint32), before.view(np.uint32)))
