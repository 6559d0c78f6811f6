"""What the rest of the library knows of the Hopper kernels w1 and w2: their tensor maps, launches and forms.

TMA reads a matrix in place if its address and the strides of its rows (columns, where it is column-major) and of its
batch are multiples of 16 bytes. A factor that isn't so, which is every other matrix with an odd dimension, is copied
into rows of whole 128-byte lines by one pass at memory speed first, and so is one that TMA can read but whose rows
begin amid lines, where that pays; the other factor isn't touched, and neither is the depth of the product: the maps
state the true K, and TMA fills what lies past it with zeros. C takes no copy: where TMA can't store it, the kernel
stores element by element.

A product with few rows is computed transposed, Cᵀ = Bᵀ·Aᵀ, since the short side of a wgmma tile is its N: the factors
exchange places, their layouts flip, and the kernel stores its tile transposed (``c_layout="column"``). Such a form says
``swapped`` in its config, whose other parameters are those of the kernel as it is launched.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32 import repack
from numba_gemm.problem import ITEMSIZE, Problem, padded_stride, shares_lines
from numba_gemm.spec import (
    MAX_GRID_Z,
    Addresses,
    Config,
    Geometry,
    KernelLaunch,
    KernelSpec,
    LaunchPlan,
    TensorMap,
    make_config,
)
from numba_gemm.tensorcore import splitk_reduce, tma, w_choose
from numba_gemm.tensorcore.source import HALF_DTYPES, LONG_NAMES, SHORT_NAMES
from numba_gemm.tensorcore.w1 import W1Parameters
from numba_gemm.tensorcore.w2 import MAX_DIMENSION, W2Parameters

HOPPER = (9, 0)
#: What a launch decides, not the text of the kernel.
_OF_LAUNCH = ("splits", "blocks", "swapped", "copied")
_PARAMETERS: dict[str, type[W1Parameters | W2Parameters]] = {"w1": W1Parameters, "w2": W2Parameters}

Parameters = W1Parameters | W2Parameters


# --- configs


def w_config(
    parameters: Parameters, *, splits: int = 1, blocks: int = 0, swapped: bool = False, copied: str = ""
) -> Config:
    """The config of a form.

    Parameters
    ----------
    parameters : of the kernel as it is launched.
    splits : parts of K, in the config if the form splits it.
    blocks : of a persistent kernel, at most; 0 for one that isn't.
    swapped : whether it computes Cᵀ = Bᵀ·Aᵀ.
    copied : factors ("A", "B" or "AB") that are copied first although TMA could read them.
    """
    values = {key: int(value) if isinstance(value, bool) else value for key, value in asdict(parameters).items()}
    for key in ("dtype", "c_dtype"):
        values[key] = LONG_NAMES[str(values[key])]
    extra: dict[str, int | str] = {
        "splits": splits if parameters.split_k else 0,
        "blocks": blocks,
        "swapped": int(swapped),
        "copied": copied,
    }
    return make_config(**values, **{key: value for key, value in extra.items() if value})


def w_parameters(kernel: str, config: Config) -> Parameters:
    """The parameters that a config of w1 or w2 names."""
    kind = _PARAMETERS[kernel]
    values: dict[str, Any] = {}
    given = dict(config)
    for field in fields(kind):
        if field.name not in given:
            continue
        value: Any = given[field.name]
        if field.name in ("dtype", "c_dtype"):
            value = SHORT_NAMES[value]
        values[field.name] = bool(value) if field.type in ("bool", bool) else value
    return kind(**values)


def _text_config(config: Config) -> Config:
    return tuple(item for item in config if item[0] not in _OF_LAUNCH)


def _geometry(kernel: str, config: Config) -> Geometry:
    p = w_parameters(kernel, config)
    tile = (p.block_m, p.block_n, p.block_k)
    if dict(config).get("swapped"):  # the tile of C, not that of its transpose
        tile = (p.block_n, p.block_m, p.block_k)
    return Geometry(tile, p.threads, p.dynamic_shared_bytes)


# --- operands


@dataclass(frozen=True)
class _Factor:
    """Where a factor that TMA can read lies: at one of a launch's addresses, ``begin`` bytes further on."""

    base: Any  # a member descriptor of Addresses
    begin: int = 0

    def address(self, at: Addresses) -> int:
        found: int = self.base.__get__(at)
        return found + self.begin


def _readable(
    problem: Problem, matrix: tma.Matrix, room: repack.Workspace, copied: str
) -> tuple[Problem, _Factor, list[KernelLaunch], list[str]]:
    """The problem with a factor that TMA can read, where that lies, and what is launched first, with the reason."""
    p = problem
    given = _Factor(Addresses.a if matrix == "A" else Addresses.b)
    reason = tma.unreadable(p, matrix)
    if reason is None:
        if matrix not in copied:
            return p, given, [], []
        reason = "its rows begin amid lines of 128 bytes, of which TMA reads two for one"
    inner, outer, stride, apart = tma.extents(p, matrix)
    matrices = p.batch if apart and p.batch > 1 else 1
    padded = padded_stride(inner)
    copy = _Factor(Addresses.workspace, room.reserve(2 * padded * outer * matrices))
    between = padded * outer if matrices > 1 else 0
    offset = p.a_offset if matrix == "A" else p.b_offset
    made = repack.copies(
        2,
        (matrices, outer, inner),
        offset,  # for an address: only its alignment matters until the launch
        (apart, stride, 1),
        0,
        (between, padded, 1),
        filled=True,
    )
    launches = [one.launch(lambda at: (given.address(at) - offset, copy.address(at))) for one in made]
    if matrix == "A":
        p = replace(p, a_offset=0, lda=padded, batch_stride_a=between)
    else:
        p = replace(p, b_offset=0, ldb=padded, batch_stride_b=between)
    return p, copy, launches, [f"{matrix} is copied into rows of whole 128-byte lines first: {reason}"]


# --- launches


def _plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    p, form, values = problem, w_parameters(spec.name, config), dict(config)
    splits, blocks, swapped = (
        int(values.get(key, default)) for key, default in zip(_OF_LAUNCH, (1, 0, 0), strict=False)
    )
    copied = str(values.get("copied", ""))
    room = repack.Workspace()
    p, a, before, notes = _readable(p, "A", room, copied)
    p, b, copies_of_b, notes_on_b = _readable(p, "B", room, copied)
    before = repack.in_one([*before, *copies_of_b])
    depth = -(-p.k // form.block_k)
    per_split = -(-depth // splits)
    partial = 0
    if form.split_k:
        partial = room.reserve(splitk_reduce.workspace_bytes(p.m, p.n, splits) * min(MAX_GRID_Z, p.batch))
    product = _Product(spec, p, form, _text_config(config), a, b, splits, per_split, blocks, bool(swapped), partial)
    launches = [
        one
        for first in range(0, p.batch, MAX_GRID_Z)
        for one in product.launches(first, min(MAX_GRID_Z, p.batch - first))
    ]
    depth_of_part = per_split * form.block_k if form.split_k else 0
    notes += notes_on_b
    return LaunchPlan((*before, *launches), room.size, depth_of_part, len(before), tuple(notes))


#: Multiplications in a launch of w2 up to which it overlaps the copies before it. That saves 1 µs of 12 at
#: 1000x1001x1002 on an H200; at 4095x4097x4099, where w2's CTAs wait for SMs that the copies still want, it lost 16 of
#: 235 µs.
OVERLAP_LIMIT = 2**34


@dataclass(frozen=True)
class _Product:
    """A product whose factors TMA can read, by one form of a kernel; ``partial`` is where partial sums begin."""

    spec: KernelSpec
    problem: Problem
    form: Parameters
    config: Config
    a: _Factor
    b: _Factor
    splits: int
    per_split: int
    blocks: int
    swapped: bool
    partial: int

    def launches(self, first: int, count: int) -> list[KernelLaunch]:
        """Those of ``count`` products of the batch: the kernel, and if K is split the reduction."""
        values = functools.partial(self._values, first, count)
        p = self.problem
        # w1 doesn't wait by itself.
        overlaps = isinstance(self.form, W2Parameters) and p.m * p.n * p.k * count <= OVERLAP_LIMIT
        main = KernelLaunch(self.spec, self.config, self._grid(count), PARAMETERS["wgmma"], values, overlaps)
        if not self.form.split_k:
            return [main]
        return [main, splitk_reduce.reduction(p, first, count, self.splits, begin=self.partial, dependent=True)]

    def _grid(self, count: int) -> tuple[int, int, int]:
        p = self.problem
        m, n = (p.n, p.m) if self.swapped else (p.m, p.n)
        if isinstance(self.form, W1Parameters):
            return self.form.grid(m, n, count)
        units = self.form.work_units(m, n, count, self.splits)
        return self.form.blocks(units, self.blocks or units), 1, 1

    def _values(self, first: int, count: int, at: Addresses) -> tuple[Any, ...]:
        p, form = self.problem, self.form
        m, n = (p.n, p.m) if self.swapped else (p.m, p.n)
        maps = (
            self._map("A", at, form.map_b_box if self.swapped else form.map_a_box, first, count),
            self._map("B", at, form.map_a_box if self.swapped else form.map_b_box, first, count),
        )
        c = at.c + ITEMSIZE[p.c_dtype] * first * p.batch_stride_c
        map_c: TensorMap | bytes = b""
        if form.split_k:
            c = at.workspace + self.partial
        elif form.store == "tma":
            assert form.map_c_box is not None  # as the form stores by TMA
            map_c = tma.output_map(p, c, form.c_dtype, form.map_c_box, form.map_c_swizzle, count)
        return (
            *(reversed(maps) if self.swapped else maps),
            map_c,
            c,
            p.ldc,
            p.batch_stride_c,
            m,
            n,
            p.k,
            count,
            self.splits,
            self.per_split,
            p.alpha,
            p.beta,
        )

    def _map(self, matrix: tma.Matrix, at: Addresses, box: tuple[int, ...], first: int, count: int) -> TensorMap:
        p = self.problem
        factor, apart = (self.a, p.batch_stride_a) if matrix == "A" else (self.b, p.batch_stride_b)
        address = factor.address(at) + 2 * first * apart
        return tma.factor_map(p, matrix, address, self.form.dtype, box, "128B", count)


# --- specs


def _refuses(problem: Problem) -> str | None:
    p = problem
    if p.k < 1 or p.alpha == 0:
        return "the product reads neither factor (K = 0 or alpha = 0); kernel 't4' only scales C"
    if max(p.m, p.n, p.k) > MAX_DIMENSION:
        return f"a dimension is past {MAX_DIMENSION}; split the product into blocks"
    return None


def _w1_select(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    p = problem
    types = {"dtype": SHORT_NAMES[p.dtype], "c_dtype": SHORT_NAMES[p.c_dtype]}
    return w_config(W1Parameters(**types, a_layout=p.a_layout, b_layout=p.b_layout))  # type: ignore[arg-type]


def _w2_product(problem: Problem) -> w_choose.Product:
    p = problem
    return w_choose.Product(
        p.m,
        p.n,
        p.k,
        p.batch,
        SHORT_NAMES[p.dtype],
        SHORT_NAMES[p.c_dtype],
        p.a_layout,
        p.b_layout,
        tma.stores(p),
        _amid_lines(p, "A"),
        _amid_lines(p, "B"),
    )


def _amid_lines(problem: Problem, matrix: tma.Matrix) -> int:
    """The elements of a factor that TMA can read, but whose rows begin amid lines of L2; else 0."""
    if tma.unreadable(problem, matrix) is not None:
        return 0  # it is copied into whole lines
    inner, outer, stride, apart = tma.extents(problem, matrix)
    matrices = problem.batch if apart else 1
    amid = (outer > 1 and shares_lines(inner, stride)) or (matrices > 1 and shares_lines(inner, apart))
    return inner * outer * matrices if amid else 0


def _w2_config(choice: w_choose.Choice) -> Config:
    return w_config(
        choice.parameters, splits=choice.splits, blocks=choice.blocks, swapped=choice.swapped, copied=choice.copied
    )


def _w2_select(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    return _w2_config(w_choose.choose_form(_w2_product(problem), sm_count))


def _w2_candidates(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Config]:
    return [_w2_config(choice) for choice in w_choose.candidates(_w2_product(problem), sm_count)]


def _w1_forms() -> tuple[Config, ...]:
    """Its form of each element type, for packed row-major matrices."""
    return tuple(
        w_config(W1Parameters(dtype=element, c_dtype=element))  # type: ignore[arg-type]
        for element in ("f16", "bf16")
    )


def _w2_forms() -> tuple[Config, ...]:
    """The forms of the tile shapes that are shipped, for packed row-major matrices."""
    return tuple(w_config(parameters) for element in ("f16", "bf16") for parameters in w_choose.listed_forms(element))


def _hopper_kernel(
    name: str, title: str, idea: str, thread_tile: tuple[int, int], configs: tuple[Config, ...], **more: Any
) -> KernelSpec:
    """The spec of w1 or w2; ``more`` are its files and what chooses its form."""

    def build(**values: int | str) -> str:
        return w_parameters(name, make_config(**values)).render()

    def geometry(config: Config) -> Geometry:
        return _geometry(name, config)

    first = geometry(configs[0])
    return KernelSpec(
        name=name,
        title=title,
        idea=idea,
        block_tile=first.block_tile,
        thread_tile=thread_tile,
        threads=first.threads,
        loads_per_fma=None,
        build=build,
        source="ptx",
        dtypes=HALF_DTYPES,
        min_arch=HOPPER,
        max_arch=HOPPER,
        configs=configs,
        abi="wgmma",
        batched=True,
        helpers=tuple(f"numba_gemm.tensorcore.{module}" for module in (name, "templates", "source")),
        entry_name=name,
        geometry_of=geometry,
        plan_of=_plan,
        refuses=_refuses,
        **more,
    )


W1 = _hopper_kernel(
    "w1",
    "tma",
    "one thread copies whole tiles (TMA), a warpgroup multiplies from shared memory (wgmma)",
    (2, 64),
    _w1_forms(),
    files=("w1.ptx.j2",),
    select=_w1_select,
)

W2 = _hopper_kernel(
    "w2",
    "persistent",
    "blocks stay and take tiles in turn, clusters share copies, storing a tile overlaps the next",
    (2, 128),
    _w2_forms(),
    files=("w2.ptx.j2", "w2_macros.ptx.j2", "w2_epilogue.ptx.j2"),
    select=_w2_select,
    candidates=_w2_candidates,
)
