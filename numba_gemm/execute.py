"""A checked product, carried out on the GPU: arrange → compile → launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numba_gemm.arrange import Arrangement, Request, arrange, pack, pointer_slots, takes_tensor_maps
from numba_gemm.choose import Tuned, choose
from numba_gemm.compile import compile_kernel
from numba_gemm.device.context import Context, Device
from numba_gemm.device.launch import PackedLaunch, PreparedLaunch, launch, prepare_launch, prepare_packed_launch
from numba_gemm.device.memory import DeviceBuffer, memory_pool
from numba_gemm.device.module import Function, load
from numba_gemm.device.repeat import repeated
from numba_gemm.device.tensor_map import encode
from numba_gemm.errors import CompileError
from numba_gemm.fallback import REPACK, fallback_for
from numba_gemm.fp32 import repack
from numba_gemm.problem import Problem
from numba_gemm.spec import OVERLAP_SINCE, Addresses, Config, KernelLaunch, KernelSpec, LaunchPlan, first_alone
from numba_gemm.tuned import find_choice

#: Products whose kernels stay loaded and launches worked out; the least recently used goes first.
PREPARED_LIMIT = 4096
#: Parameters with tensor maps that are kept packed, each for a launch and its addresses; likewise.
PACKED_LIMIT = 4096


class _MappedLaunch:
    """A launch that takes tensor maps; as itself, not by its value, a key of what is packed for it."""

    __slots__ = ("launch",)

    def __init__(self, launch: KernelLaunch) -> None:
        self.launch = launch


@functools.lru_cache(maxsize=PACKED_LIMIT)
def _packed(mapped: _MappedLaunch, a: int, b: int, c: int, workspace: int = 0) -> bytes:
    return pack(mapped.launch, Addresses(a, b, c, workspace), encode)


@dataclass(frozen=True)
class _Step:
    """One launch of a prepared product; ``mapped`` is what takes its place where its parameters hold tensor maps."""

    launch: KernelLaunch
    function: Function
    block: tuple[int, int, int]
    shared_bytes: int
    mapped: tuple[_MappedLaunch, PackedLaunch] | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class Prepared:
    """A product whose kernels are chosen, compiled and loaded, and whose launches are worked out.

    Attributes
    ----------
    spec, config, problem : of the kernel that multiplies.
    steps : the launches, in order on one stream; ``main`` is the index of that kernel's first.
    workspace_bytes : memory that they share.
    k_per_split : the depth of one part where K is split, else 0.
    notes : in words, what else is done and why.
    quick : where there is one launch and it needs no workspace, that launch; which of A, B and C (0, 1, 2) its three
        addresses are, and how many bytes further on.
    repeats : the same launch for products that are repeated, and the number of its graphs
        (:func:`numba_gemm.device.repeat.repeated`).
    pool : of device memory, for the workspace.
    """

    spec: KernelSpec
    config: Config
    problem: Problem
    steps: tuple[_Step, ...]
    workspace_bytes: int
    k_per_split: int
    main: int = 0
    notes: tuple[str, ...] = ()
    quick: tuple[PreparedLaunch, tuple[int, ...], tuple[int, ...]] | None = None
    repeats: tuple[PreparedLaunch, int] | None = None
    pool: Any = None

    @property
    def direct(self) -> PreparedLaunch | None:
        """The launch itself, where there is one and it takes the addresses of A, B and C as they are.

        For calls that are repeated: by a graph where the addresses are the same again and again.
        """
        if self.quick is None or self.quick[1:] != ((0, 1, 2), (0, 0, 0)):
            return None
        return self.repeats[0] if self.repeats is not None else self.quick[0]

    @property
    def launch_count(self) -> int:
        """Launches in all."""
        return len(self.steps)

    @property
    def function(self) -> Function:
        """The loaded kernel."""
        return self.steps[self.main].function

    def launch(self, a: int, b: int, c: int, stream: int, *, workspace: int = 0) -> None:
        """Launch on matrices at the addresses ``a``, ``b``, ``c``, aligned as they were said to be.

        ``workspace`` is the address of ``workspace_bytes`` of memory; 0 allocates them for this launch, if needed, in
        the stream's order, so that calls on several threads and streams, and in a graph, don't share one.
        """
        if self.quick is not None:
            prepared, order, offsets = self.quick
            addresses = (a, b, c)
            prepared(
                addresses[order[0]] + offsets[0],
                addresses[order[1]] + offsets[1],
                addresses[order[2]] + offsets[2],
                stream,
            )
        elif workspace or not self.workspace_bytes:
            self._launch(Addresses(a, b, c, workspace), stream)
        else:
            with DeviceBuffer(self.workspace_bytes, stream, self.pool) as buffer:
                self._launch(Addresses(a, b, c, buffer.pointer), stream)

    def _launch(self, at: Addresses, stream: int) -> None:
        for step in self.steps:
            if step.mapped is not None:
                one, launch_packed = step.mapped
                launch_packed(_packed(one, *at), stream)
                continue
            launch(
                step.function,
                step.launch.grid,
                step.block,
                step.launch.parameters,
                step.launch.values(at),
                dynamic_shared_bytes=step.shared_bytes,
                stream=stream,
                overlaps=step.overlaps,
            )


def tuned_for(device: Device) -> Tuned:
    """Looks a problem up in the tables of choices that were measured on a GPU."""
    driver = ".".join(map(str, device.driver_version))
    return lambda problem: find_choice(problem, device.name, driver)


@functools.lru_cache(maxsize=PREPARED_LIMIT)
def prepare_request(request: Request, context: Context) -> Prepared:
    """Arrange, compile and load what multiplies three stacks with an element in C at least.

    Raises
    ------
    KernelConstraintError, CompileError, CudaError, ValueError : as their steps do.
    """
    device = context.device
    arrangement = arrange(request, device.compute_capability, device.sm_count, tuned_for(device))
    try:
        return _bound(arrangement, context)
    except CompileError as error:
        if arrangement.spec.source != "numba":
            raise
        twin = _twin(arrangement.spec, context, error)
        return _bound(arrange(replace(request, kernel=twin.name), device.compute_capability, device.sm_count), context)


def _bound(arrangement: Arrangement, context: Context) -> Prepared:
    steps, main = _steps(arrangement.launches, arrangement.main, context)
    quick = _quick(steps, arrangement.workspace_bytes)
    return Prepared(
        arrangement.spec,
        arrangement.config,
        arrangement.problem,
        steps,
        arrangement.workspace_bytes,
        arrangement.k_per_split,
        main,
        arrangement.notes,
        quick,
        None if quick is None else repeated(quick[0]),
        _pool_for(arrangement.workspace_bytes, context),
    )


def _pool_for(workspace_bytes: int, context: Context) -> Any:
    return memory_pool(context) if workspace_bytes else None


def _quick(
    steps: tuple[_Step, ...], workspace_bytes: int
) -> tuple[PreparedLaunch, tuple[int, ...], tuple[int, ...]] | None:
    if len(steps) != 1 or workspace_bytes:
        return None
    (step,) = steps
    if step.mapped is not None:
        return _with_maps(*step.mapped), (0, 1, 2), (0, 0, 0)
    slots = pointer_slots(step.launch)
    if slots is None:
        return None
    prepared = prepare_launch(
        step.function,
        step.launch.grid,
        step.block,
        pack(step.launch, Addresses(0, 0, 0, 0)),
        dynamic_shared_bytes=step.shared_bytes,
    )
    return prepared, tuple("abc".index(name) for name, _ in slots), tuple(offset for _, offset in slots)


def _with_maps(one: _MappedLaunch, launch_packed: PackedLaunch) -> PreparedLaunch:
    """A launch on the addresses of A, B and C whose tensor maps are made once for each three of them."""
    parameters: Callable[[_MappedLaunch, int, int, int], bytes] = _packed

    def prepared(a: int, b: int, c: int, stream: int) -> None:
        launch_packed(parameters(one, a, b, c), stream)

    return prepared


def _step(one: KernelLaunch, context: Context) -> _Step:
    geometry = one.geometry
    compiled = compile_kernel(one.spec, one.config, context.device.compute_capability)
    function = load(compiled, context, dynamic_shared_bytes=geometry.shared_bytes)
    block = (geometry.threads, 1, 1)
    overlaps = one.overlaps and context.device.compute_capability >= OVERLAP_SINCE
    mapped = None
    if takes_tensor_maps(one):
        size, shared = one.parameters.size, geometry.shared_bytes
        packed_launch = prepare_packed_launch(
            function, one.grid, block, size, dynamic_shared_bytes=shared, overlaps=overlaps
        )
        mapped = _MappedLaunch(one), packed_launch
    return _Step(one, function, block, geometry.shared_bytes, mapped, overlaps)


def _steps(launches: tuple[KernelLaunch, ...], main: int, context: Context) -> tuple[tuple[_Step, ...], int]:
    """The launches, compiled and loaded, and where among them is the one that was the ``main``."""
    replaced = [_with_twin_of_repack(one, context) for one in launches]
    steps = tuple(_step(one, context) for group in replaced for one in group)
    return steps, sum(map(len, replaced[:main]))


def _with_twin_of_repack(one: KernelLaunch, context: Context) -> list[KernelLaunch]:
    """A launch of a repacking kernel as its twin in CUDA C++ where Numba can't compile it; others as they are."""
    if one.spec.name not in (repack.SPECS[4].name, repack.PAIRS[4].name):
        return [one]
    arch = context.device.compute_capability
    try:
        compile_kernel(one.spec, one.config, arch)
    except CompileError as error:
        return [
            replace(copy, spec=_twin(copy.spec, context, error), overlaps=False)  # the twin doesn't wait
            for copy in repack.one_by_one(one)
        ]
    return [one]


@functools.lru_cache(maxsize=PREPARED_LIMIT)
def prepare(problem: Problem, kernel: str | None, context: Context) -> Prepared:
    """Choose, compile and load the kernel for a problem with m, n ≥ 1.

    Raises
    ------
    KernelConstraintError, CompileError, CudaError, ValueError : as their steps do.
    """
    device = context.device
    spec, config = choose(
        problem, kernel, arch=device.compute_capability, sm_count=device.sm_count, tuned=tuned_for(device)
    )
    try:
        return prepare_form(problem, spec, config, context)
    except CompileError as error:
        twin = _twin(spec, context, error)
        twin, config = choose(problem, twin.name, arch=device.compute_capability, sm_count=device.sm_count)
        return prepare_form(problem, twin, config, context)


def _twin(spec: KernelSpec, context: Context, error: CompileError) -> KernelSpec:
    """The kernel in CUDA C++ that does what a Numba kernel would that can't be compiled here; else the error."""
    if spec.source != "numba":
        raise error
    reason = str(error).splitlines()[0]
    twin = fallback_for(spec.name, context.device.compute_capability, reason)
    if twin is None:
        raise error
    return REPACK[int(dict(spec.configs[0])["bits"]) // 8] if spec.name == repack.SPECS[4].name else twin


def prepare_form(problem: Problem, spec: KernelSpec, config: Config, context: Context) -> Prepared:
    """Compile and load one form of a kernel for a problem that it can take."""
    plan: LaunchPlan = spec.plan(problem, config)
    steps, main = _steps(first_alone(plan.launches), plan.main, context)
    return Prepared(
        spec,
        config,
        problem,
        steps,
        plan.workspace_bytes,
        plan.k_per_split,
        main,
        plan.notes,
        quick=_quick(steps, plan.workspace_bytes),
        pool=_pool_for(plan.workspace_bytes, context),
    )
