"""Which form of w2 a product gets, and in how many parts its K is split: by a cost model of the busiest SM.

A form is a tile, the warpgroups that compute it and how they take turns (:data:`TILES`), a cluster, and an orientation:
C itself, or its transpose, whose narrow side wgmma likes better. A tile's k-blocks take as long as the slowest of the
tensor cores, shared memory's ports and the copies from L2; what comes before the first and after the last of them is
added for each tile. The constants were fitted to the times of every candidate of 28 products on an H200, BF16,
row-major, which ``tests/data/h200_w2_forms.json`` has.

L2 answers in lines of 128 bytes, which is also a row of a TMA box. A factor whose rows begin amid lines makes it read
two for each, so the model weighs another choice: to copy such a factor into rows of whole lines first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore import splitk_reduce
from numba_gemm.tensorcore.source import Layout, OutputElement
from numba_gemm.tensorcore.w2 import MAX_DIMENSION, SHARED_LIMIT, W2Parameters


class Product(NamedTuple):
    """What a choice depends on: dimensions, types, layouts, and whether TMA can store C.

    ``a_amid`` and ``b_amid`` are the elements of a factor, over the whole batch, whose rows begin amid lines of L2; 0
    for one whose rows don't.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    c_dtype: str
    a_layout: str
    b_layout: str
    tma_store: bool
    a_amid: int = 0
    b_amid: int = 0

    @property
    def swapped(self) -> Product:
        """Cᵀ = Bᵀ·Aᵀ."""
        flip = {"row": "column", "column": "row"}
        turned = self._replace(a_layout=flip[self.b_layout], b_layout=flip[self.a_layout])
        return turned._replace(m=self.n, n=self.m, a_amid=self.b_amid, b_amid=self.a_amid)


class Choice(NamedTuple):
    """A form as it is launched: for Cᵀ if ``swapped``, by at most ``blocks`` blocks.

    ``copied`` names the factors ("A", "B" or "AB") that are copied into rows of whole lines first although TMA could
    read them as they lie.
    """

    parameters: W2Parameters
    splits: int
    blocks: int
    swapped: bool
    copied: str = ""


class Tile(NamedTuple):
    """A tile and what it costs.

    ``rate`` is how much longer its k-blocks take than the slowest unit needs, and ``along_m``, ``along_n`` how much
    longer again in a cluster of two along M or N; ``tile_cycles`` are the SM cycles of a tile's start and end, which
    ping-pong consumers pay once, as each hides the other's.
    """

    block_m: int
    block_n: int
    consumers: int
    schedule: str
    rate: float
    tile_cycles: int
    along_m: float = 1.15
    along_n: float = 1.15


#: Tiles, the large ones first.
TILES = (
    Tile(128, 256, 2, "cooperative", 1.271, 6000, 1.110, 1.116),
    Tile(256, 128, 2, "cooperative", 1.405, 2970, 1.084, 0.950),
    Tile(128, 192, 2, "cooperative", 1.268, 6000, 0.950, 1.092),
    Tile(192, 128, 3, "cooperative", 1.355, 4650, 1.072, 1.031),
    Tile(128, 192, 2, "pingpong", 1.415, 6000, 1.099, 1.068),
    Tile(128, 128, 2, "pingpong", 1.313, 2150, 1.135, 1.146),
    Tile(128, 128, 2, "cooperative", 1.417, 1450, 1.062, 1.065),
    Tile(64, 256, 2, "pingpong", 1.174, 3980, 1.292, 1.267),
    Tile(256, 64, 2, "cooperative", 1.121, 3620, 1.409, 1.155),
    Tile(64, 128, 1, "cooperative", 1.293, 1890, 1.379, 1.152),
    Tile(128, 64, 2, "cooperative", 1.345, 870, 1.233, 1.095),
    Tile(256, 32, 2, "cooperative", 1.105, 1790, 1.565, 1.190),
    Tile(64, 128, 2, "cooperative", 1.096, 1710, 1.384, 1.330),
    Tile(64, 128, 2, "pingpong", 1.000, 6000, 1.684, 1.367),
    Tile(64, 64, 1, "cooperative", 1.258, 940, 1.379, 1.433),
    Tile(128, 32, 2, "cooperative", 1.493, 1490, 1.183, 1.110),
    Tile(256, 16, 2, "cooperative", 1.780, 3140, 1.197, 1.151),
    Tile(64, 64, 2, "pingpong", 1.485, 1850, 1.185, 1.185),
    Tile(64, 32, 1, "cooperative", 1.229, 2270, 1.240, 1.439),
    Tile(128, 16, 2, "cooperative", 1.514, 1710, 0.950, 1.081),
    Tile(256, 8, 2, "cooperative", 1.199, 6000, 1.151, 1.205),
    Tile(64, 16, 1, "cooperative", 1.436, 2020, 0.950, 1.324),
    Tile(128, 8, 2, "cooperative", 1.745, 1680, 1.144, 1.014),
    Tile(64, 8, 1, "cooperative", 1.073, 2590, 1.145, 1.346),
)
#: Clusters, along M and N. Sharing halves one operand's copies; the tiles of a cluster come and go together.
CLUSTERS = ((1, 1), (2, 1), (1, 2))
#: Rows of tiles that are walked together, first choice first.
GROUPS = (8, 4, 16)

#: Of the cost model, in SM clock cycles: a launch until the first copy has come, what a cluster adds to it, and the
#: reduction behind split-K.
LAUNCH_CYCLES, CLUSTER_CYCLES, REDUCE_CYCLES = 3360, 2000, 6660
#: Multiply-adds of the tensor cores of an SM in a cycle, for 16-bit elements.
FMA_PER_CYCLE = 4096 // 2
#: Bytes in a cycle: shared memory of an SM to its tensor cores; L2 to an SM; of the inputs from device memory, and of
#: the partial sums both ways, to each SM when all of them read.
SHARED_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE = 100, 62.8
INPUT_BYTES_PER_CYCLE, PARTIAL_BYTES_PER_CYCLE = 21, 4
#: Bytes of the rows and columns that the tiles of one wave read, from which on L2 doesn't hold all of them any more,
#: and how much slower its copies get with each doubling.
WAVE_BYTES, WAVE_FACTOR = 47_100_000, 0.093
#: What a form loses that stores transposed, and how much longer the ends of a tile take that is stored by elements.
SWAPPED_CYCLES, ELEMENTS_FACTOR = 100, 2.00
#: How often a row of a box counts that touches two lines of L2: of a factor whose N or M is contiguous, whose K is.
AMID_FACTORS = (2.20, 1.93)
#: Copying a factor first: the launch, and the bytes read and written that are each SM's share of a cycle.
COPY_CYCLES, COPY_BYTES_PER_CYCLE = 2500, 36
#: The cycles in which a thread of the reduction adds four splits.
REDUCE_ROUND_CYCLES = 700
#: A split has this many k-blocks at least.
SHALLOWEST_SPLIT = 4
#: Numbers of splits that are looked at, besides those that give each SM one to four tiles.
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
#: Below this many rows the transposed product is looked at too; as long as M is the shorter side.
SWAP_ROWS = 256
FEWEST_STAGES, MOST_STAGES = 3, 16
BLOCK_K, BARRIER_BYTES = 64, 8


def choose_form(product: Product, sm_count: int) -> Choice:
    """The form for a product on a GPU with so many SMs, and the number of splits of its K.

    Raises
    ------
    KernelConstraintError : for dimensions that no form takes.
    """
    best: tuple[float, Choice] | None = None
    copies = _copies(product)
    for plain in _choices(product, sm_count):
        for copied in copies:
            choice = plain._replace(copied=copied) if copied else plain
            cost = estimate(product, choice, sm_count)
            if best is None or cost < best[0]:
                best = cost, choice
    if best is None:
        raise KernelConstraintError(
            f"w2: no form takes a product of {product.m}×{product.n}×{product.k}; its dimensions must lie in "
            f"1 … {MAX_DIMENSION}: split it into blocks"
        )
    return best[1]


def candidates(product: Product, sm_count: int, most: int = 40) -> list[Choice]:
    """The forms that are worth timing for a product: the best by estimate, with other groups for the first of them."""
    copies = _copies(product)
    every = (plain._replace(copied=copied) for plain in _choices(product, sm_count) for copied in copies)
    rated = sorted(
        ((estimate(product, choice, sm_count), at, choice) for at, choice in enumerate(every)),
        key=lambda one: one[:2],
    )
    found: list[Choice] = []
    per_shape: dict[tuple[Any, ...], int] = {}
    limit = 2.5 * rated[0][0] if rated else 0.0
    for cost, _, choice in rated:
        p = choice.parameters
        shape = (p.block_m, p.block_n, p.schedule, p.cluster_m, p.cluster_n, choice.swapped, choice.copied)
        if cost > limit or per_shape.get(shape, 0) >= (2 if p.split_k else 1):
            continue
        per_shape[shape] = per_shape.get(shape, 0) + 1
        found.append(choice)
    found = found[: most - 3 * len(GROUPS[1:])]
    for choice in found[:3]:
        if choice.parameters.work_units(*_sides(product, choice), product.batch, choice.splits) > sm_count:
            found += [choice._replace(parameters=replace(choice.parameters, group=group)) for group in GROUPS[1:]]
    return list(dict.fromkeys(found))[:most]


def listed_forms(element: str) -> list[W2Parameters]:
    """Each tile in its fastest form for large packed row-major matrices of an element type."""
    product = Product(1 << 13, 1 << 13, 1 << 13, 1, element, element, "row", "row", True)
    return [form for tile in TILES for form in _forms(product, tile, False, CLUSTERS[:2], GROUPS[:1])]


def _copies(product: Product) -> tuple[str, ...]:
    """Which factors may be copied although TMA could read them."""
    a, b = "A" if product.a_amid else "", "B" if product.b_amid else ""
    return tuple(dict.fromkeys(("", a, b, a + b)))


def _sides(product: Product, choice: Choice) -> tuple[int, int]:
    return (product.n, product.m) if choice.swapped else (product.m, product.n)


def _choices(product: Product, sm_count: int, *, groups: tuple[int, ...] = GROUPS[:1]) -> Iterator[Choice]:
    """Every form and number of splits that is looked at."""
    orientations = [False, True] if product.m < min(SWAP_ROWS, product.n) else [False]
    for swapped in orientations:
        own = product.swapped if swapped else product
        for tile in TILES:
            for form in _forms(own, tile, swapped, CLUSTERS, groups):
                resident = sm_count // form.cluster * form.cluster
                if resident == 0:
                    continue
                for splits in _split_counts(form, own, resident):
                    split = _split_form(form) if splits > 1 else form
                    # The parts of a transposed product have to lie as those of any other, for the reduction.
                    if split is not None and (splits == 1 or split.transposed == swapped):
                        yield Choice(split, splits, resident, swapped)


@functools.lru_cache(maxsize=4096)
def _split_form(form: W2Parameters) -> W2Parameters | None:
    return _form(**{**_fields(form), "split_k": True, "store": "elements"})


def _fields(form: W2Parameters) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__dataclass_fields__}


def _forms(
    product: Product, tile: Tile, swapped: bool, clusters: tuple[tuple[int, int], ...], groups: tuple[int, ...]
) -> Iterator[W2Parameters]:
    """The forms of a tile that suit a product, as it is launched; no larger than it, but for the smallest."""
    m, n = product.m, product.n
    if (tile.block_m > 64 and m <= tile.block_m // 2) or (tile.block_n > 8 and n <= tile.block_n // 2):
        return
    store = "tma" if product.tma_store and product.c_dtype != "f32" else "elements"
    for cluster_m, cluster_n in clusters:
        if (cluster_m > 1 and m <= tile.block_m) or (cluster_n > 1 and n <= tile.block_n):
            continue
        for group in groups:
            form = fitting_form(
                product.dtype,  # type: ignore[arg-type]
                product.c_dtype,  # type: ignore[arg-type]
                product.a_layout,  # type: ignore[arg-type]
                product.b_layout,  # type: ignore[arg-type]
                "column" if swapped else "row",
                tile,
                cluster_m,
                cluster_n,
                group,
                store,
            )
            if form is not None:
                yield form


@functools.lru_cache(maxsize=4096)
def fitting_form(
    dtype: str,
    c_dtype: OutputElement,
    a_layout: Layout,
    b_layout: Layout,
    c_layout: Layout,
    tile: Tile,
    cluster_m: int = 1,
    cluster_n: int = 1,
    group: int = GROUPS[0],
    store: str = "tma",
) -> W2Parameters | None:
    """A tile's form with as many stages as there is shared memory for; None if there is no such form."""
    shape = {"block_m": tile.block_m, "block_n": tile.block_n, "consumers": tile.consumers, "schedule": tile.schedule}
    layouts = {"a_layout": a_layout, "b_layout": b_layout, "c_layout": c_layout}
    cluster = {"cluster_m": cluster_m, "cluster_n": cluster_n, "group": group}
    return _form(dtype=dtype, c_dtype=c_dtype, store=store, **shape, **layouts, **cluster)


def _form(**values: Any) -> W2Parameters | None:
    """The form with as many stages as fit; None if there is none with :data:`FEWEST_STAGES`."""
    try:
        form = W2Parameters(**{**values, "stages": FEWEST_STAGES})
    except KernelConstraintError:
        return None
    a_stage = form.stage_bytes + 2 * BARRIER_BYTES
    more = (SHARED_LIMIT - form.dynamic_shared_bytes) // a_stage
    return replace(form, stages=min(MOST_STAGES, FEWEST_STAGES + more))


def _split_counts(form: W2Parameters, product: Product, resident: int) -> set[int]:
    """Numbers of splits worth a look, none of which leaves a split empty."""
    depth = -(-product.k // BLOCK_K)
    units = form.work_units(product.m, product.n, product.batch)
    wanted = {*SPLITS, *(turn * resident // units for turn in (1, 2, 3, 4))}
    most = min(4 * resident // units, depth // SHALLOWEST_SPLIT)
    return {1, *(-(-depth // -(-depth // splits)) for splits in wanted if 1 < splits <= most)}


@functools.cache
def _tile_of(block_m: int, block_n: int, consumers: int, schedule: str) -> Tile:
    return next(tile for tile in TILES if tile[:4] == (block_m, block_n, consumers, schedule))


def block_cycles(form: W2Parameters, a_lines: float = 1.0, b_lines: float = 1.0, crowding: float = 1.0) -> float:
    """SM cycles of a k-block of a tile: of the slowest of tensor cores, shared memory and copies.

    Rows past the matrix count like others: their zeros are written to shared memory as well. ``a_lines`` and
    ``b_lines`` are how often a row of 128 bytes counts, ``crowding`` how much slower copies are than
    from an L2 that holds all that is read.
    """
    tensor = form.block_m * form.block_n * BLOCK_K / FMA_PER_CYCLE
    # Each wgmma reads 64 rows of A and its N columns of B.
    wgmmas = form.block_m // 64 * (form.block_n // form.warpgroup_n)
    shared = wgmmas * (64 + form.warpgroup_n) * 2 * BLOCK_K / SHARED_BYTES_PER_CYCLE
    rows = form.block_m / form.cluster_n * a_lines + form.block_n / form.cluster_m * b_lines
    return max(tensor, shared, 2 * BLOCK_K * rows / L2_BYTES_PER_CYCLE * crowding)


def _crowding(own: Product, choice: Choice) -> float:
    form = choice.parameters
    tiles_m, tiles_n = -(-own.m // form.block_m), -(-own.n // form.block_n)
    down = min(form.group, tiles_m)
    across = min(tiles_n, max(1, math.ceil(choice.blocks / choice.splits / down)))
    wave = 2 * own.k * (down * form.block_m + across * form.block_n)
    return 1 + WAVE_FACTOR * math.log2(max(1.0, wave / WAVE_BYTES))


def estimate(product: Product, choice: Choice, sm_count: int) -> float:
    """Estimated SM clock cycles of a product by a form."""
    form, splits = choice.parameters, choice.splits
    tile = _tile_of(form.block_m, form.block_n, form.consumers, form.schedule)
    own = product.swapped if choice.swapped else product
    amid = {"A": product.a_amid, "B": product.b_amid}
    left, right = "BA" if choice.swapped else "AB"
    along_k = {left: form.a_layout == "row", right: form.b_layout == "column"}
    a_lines, b_lines = (
        AMID_FACTORS[along_k[name]] if amid[name] and name not in choice.copied else 1.0 for name in (left, right)
    )
    per_cta = -(-form.work_units(own.m, own.n, own.batch, splits) // choice.blocks)
    depth = form.k_blocks_per_split(own.k, splits)
    factor = tile.rate * (tile.along_m if form.cluster_m > 1 else 1.0) * (tile.along_n if form.cluster_n > 1 else 1.0)
    ends: float = tile.tile_cycles * (per_cta if form.schedule == "cooperative" else 1)
    if form.store == "elements" and not form.split_k:
        ends *= ELEMENTS_FACTOR
    busy = per_cta * depth * block_cycles(form, a_lines, b_lines, _crowding(own, choice)) * factor + ends
    whole = 2 * own.batch * (own.m + own.n) * own.k
    inputs = whole / (sm_count * INPUT_BYTES_PER_CYCLE)
    cost = LAUNCH_CYCLES + (busy**4 + inputs**4) ** 0.25
    cost += (SWAPPED_CYCLES if choice.swapped else 0) + (CLUSTER_CYCLES if form.cluster > 1 else 0)
    if choice.copied:
        moved = sum(amid[name] for name in choice.copied)
        cost += COPY_CYCLES + 4 * moved / (sm_count * COPY_BYTES_PER_CYCLE)
    if splits > 1:
        partial = splitk_reduce.workspace_bytes(product.m, product.n, splits) * product.batch
        cost += REDUCE_CYCLES + partial / (sm_count * PARTIAL_BYTES_PER_CYCLE)
        cost += (splits - 1) // (4 * splitk_reduce.SLICES) * REDUCE_ROUND_CYCLES
    return float(cost)
