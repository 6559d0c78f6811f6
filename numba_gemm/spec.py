"""KernelSpec: what the rest of the library needs to know about a kernel beside its device code.

A kernel file holds the device code; the spec beside it says which problems it takes, how its source is made and how
it is launched. Nothing here imports Numba or CUDA.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numba_gemm.abi import PARAMETERS
from numba_gemm.problem import ITEMSIZE, Problem

#: Parameters of one compiled form of a kernel, for instance ``{"vector_width": 4}``; hashable.
Config = tuple[tuple[str, int | str], ...]

#: Blocks that the x dimension of a grid can have.
MAX_GRID = 2**31 - 1
#: The same of the z dimension, which counts the products of a batch.
MAX_GRID_Z = 65535
#: The first compute capability whose launches can overlap (programmatic dependent launch).
OVERLAP_SINCE = (9, 0)


def make_config(**parameters: int | str) -> Config:
    """A :data:`Config` from keyword arguments, in a fixed order."""
    return tuple(sorted(parameters.items()))


def layout_forms() -> tuple[Config, ...]:
    """The forms of a kernel that multiplies row-major and column-major factors, by 16 and by 4 bytes an access.

    A layout is a parameter only where it is ``"column"``.
    """
    return tuple(
        make_config(
            **{key: layout for key, layout in (("a_layout", a), ("b_layout", b)) if layout != "row"}, vector_width=width
        )
        for a in ("row", "column")
        for b in ("row", "column")
        for width in (4, 1)
    )


class Geometry(NamedTuple):
    """What a form of a kernel is launched with: (BM, BN, BK), threads a block, bytes of dynamic shared memory."""

    block_tile: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0


class Addresses(NamedTuple):
    """Where the matrices of a launch lie, and the workspace (0 if there is none)."""

    a: int
    b: int
    c: int
    workspace: int = 0


class TensorMap(NamedTuple):
    """A tensor in global memory as TMA copies see it; a kernel's parameter of 128 bytes (``.align 64``).

    Attributes
    ----------
    address : of the first element, a multiple of 16.
    element : ``"f16"``, ``"bf16"`` or ``"f32"``.
    dims : elements in each dimension, innermost first.
    strides : bytes from one element to the next in all dimensions but the first, multiples of 16.
    box : elements in each dimension that one copy moves.
    swizzle : ``"none"``, ``"32B"``, ``"64B"`` or ``"128B"``: how 16-byte pieces of the box lie in shared memory.
    l2_promotion : ``"none"``, ``"64B"``, ``"128B"`` or ``"256B"``: how much the L2 fetches at a time.

    What lies outside of the tensor is loaded as zero and not stored.
    """

    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    l2_promotion: str = "256B"


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of one form of a kernel.

    ``values`` gives the kernel's parameters, in the order of ``parameters``, once the addresses are known; one of 128
    bytes may be a :class:`TensorMap`.

    ``overlaps`` says that the kernel waits by itself (``griddepcontrol.wait``, in every block) for the launch before it
    before it touches what that one writes, or writes what that one reads: then a GPU of compute capability 9.0 or later
    may start its blocks as room becomes free, and they are there when the other one ends. Waiting for the launch before
    is enough in a chain, since that one is over only after it has waited itself. Behind the last launch everything
    is as after any other: the next operation of the stream finds it finished.
    """

    spec: KernelSpec
    config: Config
    grid: tuple[int, int, int]
    parameters: struct.Struct
    values: Callable[[Addresses], tuple[Any, ...]]
    overlaps: bool = False

    @property
    def geometry(self) -> Geometry:
        """Threads and shared memory of the launch."""
        return self.spec.geometry(self.config)


def first_alone(launches: Sequence[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """The launches of a whole product: the first doesn't overlap what the stream held before, which isn't known."""
    return tuple(
        replace(one, overlaps=False) if index == 0 and one.overlaps else one for index, one in enumerate(launches)
    )


@dataclass(frozen=True)
class LaunchPlan:
    """The launches, in order on one stream, that carry out a product, and the bytes of workspace they share.

    ``k_per_split`` is the depth of one part where K is split, else 0; the error bound depends on it. ``main`` is the
    index of the first launch that multiplies; ``notes`` say in words what else is done and why.
    """

    launches: tuple[KernelLaunch, ...]
    workspace_bytes: int = 0
    k_per_split: int = 0
    main: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """One rung of the ladder.

    Attributes
    ----------
    name : how a user asks for it, for instance ``"v6"``.
    title, idea : its short name, and the one idea that it adds, for tables.
    block_tile : (BM, BN, BK): the part of C that one block computes, and the depth of one step of k.
    thread_tile : (rows, columns) of C that one thread computes.
    threads : threads in a block.
    loads_per_fma : shared-memory values read for each FMA (None where it isn't a number that says anything).
    build : makes a config's source when called with its parameters: the device function for ``source="numba"`` (and
        imports Numba for it), the PTX text for ``source="ptx"``, a ``CudaSource`` for ``source="cuda"``.
    source : the language of the device code: ``"numba"``, ``"ptx"`` or ``"cuda"``.
    dtypes : NumPy dtype names of A and B that it takes.
    min_arch : lowest compute capability.
    max_arch : highest compute capability, for kernels whose instructions later GPUs don't have; None: no limit.
    min_blocks_per_sm : occupancy promised to ptxas, from which it takes its register limit.
    configs : the compiled forms, best first; the first whose needs a problem meets is launched.
    abi : the kernel's parameter list, a key of ``numba_gemm.abi.PARAMETERS``.
    batched : whether one launch takes a whole batch (``ctaid.z`` is the batch index and the parameter list ends with
        the batch strides); other kernels are launched once for each product.
    helpers : module names whose source enters the cache key beside the kernel's own file.
    files : names of PTX or CUDA files whose text enters the cache key too.
    entry_name : the entry's name where every form has the same.
    geometry_of : what a form is launched with, where forms differ in it.
    occupancy_of : the occupancy promised for a form on a compute capability, where its parameter isn't it everywhere.
    select : a form for a problem, a number of SMs and a compute capability, where a list of forms wouldn't do.
    plan_of : the launches of a problem, where one with the usual parameters wouldn't do.
    candidates : the forms that are worth timing for a problem, for the same arguments as ``select``'s.
    refuses : why the kernel can't take a problem in any form, in words, or None; for kernels of special shapes.
    refuses_form : why one form of a kernel with ``select`` can't take a problem, in words, or None.
    """

    name: str
    title: str
    idea: str
    block_tile: tuple[int, int, int]
    thread_tile: tuple[int, int]
    threads: int
    loads_per_fma: float | None
    build: Callable[..., Any] = field(repr=False)
    source: str = "numba"
    dtypes: tuple[str, ...] = ("float32",)
    min_arch: tuple[int, int] = (7, 5)
    max_arch: tuple[int, int] | None = None
    min_blocks_per_sm: int = 1
    configs: tuple[Config, ...] = ((),)
    abi: str = "gemm_f32"
    batched: bool = False
    helpers: tuple[str, ...] = ("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue")
    files: tuple[str, ...] = ()
    entry_name: str | None = None
    geometry_of: Callable[[Config], Geometry] | None = field(default=None, repr=False)
    occupancy_of: Callable[[Config, tuple[int, int]], int] | None = field(default=None, repr=False)
    select: Callable[[Problem, int, tuple[int, int]], Config] | None = field(default=None, repr=False)
    plan_of: Callable[[KernelSpec, Problem, Config], LaunchPlan] | None = field(default=None, repr=False)
    candidates: Callable[[Problem, int, tuple[int, int]], list[Config]] | None = field(default=None, repr=False)
    refuses: Callable[[Problem], str | None] | None = field(default=None, repr=False)
    refuses_form: Callable[[Problem, Config], str | None] | None = field(default=None, repr=False)

    def runs_on(self, arch: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have the kernel's instructions."""
        return self.min_arch <= arch and (self.max_arch is None or arch <= self.max_arch)

    def entry(self, config: Config) -> str:
        """The name of the PTX entry of one compiled form."""
        if self.entry_name is not None:
            return self.entry_name
        suffix = "".join(f"_{key}{value}" for key, value in config)
        return f"{self.name.replace('-', '_')}{suffix}"

    def geometry(self, config: Config) -> Geometry:
        """Tile, threads and dynamic shared memory of one form."""
        if self.geometry_of is not None:
            return self.geometry_of(config)
        return Geometry(self.block_tile, self.threads)

    def blocks_per_sm(self, config: Config, arch: tuple[int, int]) -> int:
        """Occupancy promised to ptxas for one form on a GPU: its parameter ``blocks_per_sm`` if it has one."""
        if self.occupancy_of is not None:
            return self.occupancy_of(config, arch)
        return int(dict(config).get("blocks_per_sm", self.min_blocks_per_sm))

    def grid(self, m: int, n: int, config: Config = ()) -> int:
        """Blocks in the one-dimensional grid: the tiles of C, row by row.

        One dimension, since the others end at 65535 blocks and a tall matrix has more tiles than that.
        """
        block_m, block_n, _ = self.geometry(config).block_tile if config else self.block_tile
        return -(-m // block_m) * -(-n // block_n)

    def unmet(self, problem: Problem, config: Config) -> str | None:
        """The constraint of ``config`` that ``problem`` doesn't meet, in words, or None."""
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if self.refuses is not None and (reason := self.refuses(problem)) is not None:
            return reason
        parameters = dict(config)
        if parameters.get("dtype", problem.dtype) != problem.dtype:
            return f"dtype {problem.dtype} is not {parameters['dtype']}"
        if self.grid(problem.m, problem.n, config) > MAX_GRID:
            return f"the grid needs more than {MAX_GRID} blocks"
        if self.select is None:
            for name, layout in (("a", problem.a_layout), ("b", problem.b_layout)):
                if parameters.get(f"{name}_layout", "row") != layout:
                    return f"{name.upper()} is {layout}-major"
        if self.refuses_form is not None and (reason := self.refuses_form(problem, config)) is not None:
            return reason
        if self.select is not None:  # it looked at the alignment that its forms need
            return None
        width = parameters.get("vector_width", 1)
        return problem.unaligned_for(width) if isinstance(width, int) and width > 1 else None

    def plan(self, problem: Problem, config: Config) -> LaunchPlan:
        """The launches that carry out a problem with m, n ≥ 1."""
        if self.plan_of is not None:
            return self.plan_of(self, problem, config)
        return LaunchPlan(tile_launches(self, problem, config))


def tile_launches(spec: KernelSpec, problem: Problem, config: Config) -> tuple[KernelLaunch, ...]:
    """Launches over the tiles of C with the parameters that all GEMM kernels begin with.

    One for the whole batch if the kernel is ``batched`` (for each 65535 products, where a grid's z ends), else one for
    each product.
    """
    p = problem
    scalars: tuple[Any, ...] = (p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alpha, p.beta)
    if spec.abi == "gemm_16":
        scalars = (*scalars, problem.flags)
    if spec.batched:
        scalars = (*scalars, p.batch_stride_a, p.batch_stride_b, p.batch_stride_c)
    tiles = spec.grid(p.m, p.n, config)
    step = MAX_GRID_Z if spec.batched else 1

    def launch(first: int) -> KernelLaunch:
        def values(at: Addresses) -> tuple[Any, ...]:
            a, b, c = batch_addresses(problem, at, first)
            return (a, b, c, *scalars)

        return KernelLaunch(spec, config, (tiles, 1, min(step, p.batch - first)), PARAMETERS[spec.abi], values)

    return tuple(launch(first) for first in range(0, p.batch, step))


def batch_addresses(problem: Problem, at: Addresses, index: int) -> tuple[int, int, int]:
    """Where A, B and C of one product of a batch lie."""
    p = problem
    itemsize, c_itemsize = ITEMSIZE[p.dtype], ITEMSIZE[p.c_dtype]
    return (
        at.a + index * p.batch_stride_a * itemsize,
        at.b + index * p.batch_stride_b * itemsize,
        at.c + index * p.batch_stride_c * c_itemsize,
    )


def describe_config(config: Config) -> str:
    """``"vector_width=4"``, or ``""`` for the empty config."""
    return " ".join(f"{key}={value}" for key, value in config)
