"""Which form of t4 a product gets, and in how many parts its K is split: by a cost model fitted to measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from numba_gemm.tensorcore import splitk_reduce
from numba_gemm.tensorcore.t4 import TMA_SINCE, T4Parameters, check_depth


class Form(NamedTuple):
    """A tile shape that is shipped, and what it costs.

    ``cycles`` are those of an SM for each ``mma`` of one of its four tensor cores (6.03 is the least), with one block
    on the SM, with two, and so on; ``tile_cycles`` the start and the end of a tile; ``first_cycles`` what more of them
    the first tile takes, where those of other tiles run beside the arithmetic.
    """

    shape: dict[str, Any]
    cycles: tuple[float, ...]
    tile_cycles: int
    first_cycles: int = 0


_NAMES = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "stages", "group_m")


def _forms() -> tuple[Form, ...]:
    rows = (
        ((128, 256, 64, 64, 64, 4, 8), (6.45,), 4740),
        ((256, 128, 64, 64, 64, 4, 8), (6.49,), 5310),
        ((128, 256, 64, 64, 64, 3, 8), (6.50,), 4740),
        ((128, 128, 64, 64, 64, 3, 8), (7.92, 7.02), 2710),
        ((128, 128, 32, 64, 64, 4, 8), (8.56, 7.13), 1980),
        ((64, 256, 64, 64, 64, 4, 8), (7.02,), 3460),
        ((128, 64, 64, 64, 32, 4, 8), (9.45, 8.89), 2330),
        ((64, 128, 64, 32, 64, 4, 8), (9.62, 8.93), 1920),
        ((64, 64, 64, 32, 32, 4, 8), (16.5, 12.2, 12.05), 1080),
        ((64, 64, 64, 32, 32, 6, 8), (13.9, 12.0), 1960),
    )
    return tuple(Form(dict(zip(_NAMES, row, strict=True)), cycles, tile) for row, cycles, tile in rows)


def _tma_forms() -> tuple[Form, ...]:
    # The second wasn't measured as it is now, and before that was level with the first, to which it gives way.
    rows = (((128, 256, 64, 64, 64, 4, 8), 1200), ((256, 128, 64, 64, 64, 4, 8), 1201))
    return tuple(
        Form({**dict(zip(_NAMES, row, strict=True)), "copies": "tma"}, (6.39,), tile, 3600) for row, tile in rows
    )


#: Tile shapes in the order of their speed on large products. The costs were fitted to times on an H200, BF16,
#: row-major, which ``tests/data/h200_t4_forms.json`` has: from 256 to 4096 cubed, deep and flat products.
RATED_FORMS = _forms()
#: Those whose tiles TMA copies. Their costs are those of 4096 cubed (6.76 cycles an ``mma``, all included), where the
#: H200 takes 6.96 for the first of the others; a single tile of an SM is taken to cost what it does there. Smaller
#: tiles by TMA stay far behind: at 4096 cubed 128×128 comes to 447 TFLOP/s, and 64×256 to 398, where this comes to 491.
RATED_TMA_FORMS = _tma_forms()
#: The same, as keyword arguments of :class:`T4Parameters`.
FORMS = tuple(form.shape for form in RATED_FORMS)
TMA_FORMS = tuple(form.shape for form in RATED_TMA_FORMS)

#: Of the cost model, in SM clock cycles: a launch, and the reduction behind split-K.
LAUNCH_CYCLES, REDUCE_CYCLES = 3000, 3000
#: Bytes of the inputs, and of the partial sums, that each SM moves in a cycle when all do.
INPUT_BYTES_PER_CYCLE, PARTIAL_BYTES_PER_CYCLE = 19, 12
#: Elements of an operand that isn't aligned that a warp copies in a cycle, and the warps of an SM beyond which it is no
#: faster.
ELEMENTS_PER_CYCLE, COPYING_WARPS = 0.48, 8
#: The cycles in which a thread of the reduction adds four splits.
REDUCE_ROUND_CYCLES = 700
#: A split is no shallower than this.
SHALLOWEST_SPLIT = 128
#: Numbers of splits that are looked at, besides those that give each SM one to four tiles.
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def choose_form(
    m: int,
    n: int,
    k: int,
    sm_count: int,
    *,
    compute_capability: tuple[int, int] | None = None,
    batch: int = 1,
    by_tma: bool = False,
    **parameters: Any,
) -> tuple[T4Parameters, int]:
    """The form for a product on a GPU, and the number of splits of K, by a cost model.

    The busiest SM decides: it computes ``ceil(tiles · splits / sm_count)`` tiles, as many at a time as it holds blocks,
    in the cycles that were measured for that; reading the inputs once is a floor under it. K is split if that shortens
    the whole although the partial sums are written, read and added.

    Parameters
    ----------
    compute_capability : of the GPU. Not known: only forms whose shared memory any GPU has, and a block for each tile.
    batch : products of this shape that are carried out together; their tiles count like those of one.
    by_tma : whether TMA can read both factors as they lie; see :func:`numba_gemm.tensorcore.tma.reads_both`.
    parameters : fields of :class:`T4Parameters` other than the shape: types, layouts, alignment for ``cp.async``.

    Raises
    ------
    KernelConstraintError : for dimensions that no form takes.
    """
    check_depth(k)
    best: tuple[float, T4Parameters, int] | None = None
    capability = compute_capability or (0, 0)
    for rated in _rated(by_tma and capability >= TMA_SINCE, **parameters):
        values: dict[str, Any] = {**parameters, **rated.shape}
        if "copies" in rated.shape:
            values |= {"aligned_a": True, "aligned_b": True}
        form = T4Parameters(**values)
        if not form.fits(capability) or form.registers > 255:
            continue
        together = min(len(rated.cycles), form.blocks_per_sm(capability))
        for splits in _split_counts(form, m, n, k, batch, sm_count):
            cost = _cost(form, rated, together, (m, n, k), batch, splits, sm_count)
            if best is None or cost < best[0]:
                best = cost, form, splits
    assert best is not None  # the smallest form fits everywhere
    _, form, splits = best
    form = replace(form, split_k=splits > 1)
    if compute_capability is None:
        return form, splits
    return replace(form, blocks=form.resident_blocks(sm_count, compute_capability, splits * batch)), splits


def _rated(by_tma: bool, aligned_a: bool = True, aligned_b: bool = True, **_: Any) -> tuple[Form, ...]:
    """The forms that are compared: by TMA those that have run on a GPU so, on factors that ``cp.async`` reads too.

    TMA could read more, rows of whole 16 bytes where K or N isn't a multiple of 8. There, and for smaller tiles, the
    form is right on the emulator.
    """
    return RATED_TMA_FORMS + RATED_FORMS if by_tma and aligned_a and aligned_b else RATED_FORMS


def _split_counts(form: T4Parameters, m: int, n: int, k: int, batch: int, sm_count: int) -> set[int]:
    """Numbers of splits worth a look, none of which leaves a split empty."""
    tiles = form.tiles(m, n) * batch
    wanted = {*SPLITS, *(turn * sm_count // tiles for turn in (1, 2, 3, 4))}
    most = min(4 * sm_count // tiles, k // SHALLOWEST_SPLIT)
    return {1, *(-(-k // form.k_per_split(k, splits)) for splits in wanted if 1 < splits <= most)}


def _cost(
    form: T4Parameters,
    rated: Form,
    together: int,
    shape: tuple[int, int, int],
    batch: int,
    splits: int,
    sm_count: int,
) -> float:
    """Estimated SM clock cycles. ``together``: blocks that an SM holds at a time."""
    m, n, k = shape
    per_sm = -(-form.tiles(m, n) * splits * batch // sm_count)
    together = min(together, per_sm)
    blocks_k = -(-(form.k_per_split(k, splits) if splits > 1 else k) // form.block_k)
    mma = form.block_m * form.block_n * form.block_k / (16 * 8 * 16) / 4
    elements = form.block_k * (form.block_m * (not form.aligned_a) + form.block_n * (not form.aligned_b))

    def cycles(tiles: int, blocks: int) -> float:
        if not tiles:
            return 0.0
        copies = elements / (ELEMENTS_PER_CYCLE * min(COPYING_WARPS, blocks * form.threads // 32))
        return tiles * blocks_k * (mma * rated.cycles[blocks - 1] + copies)

    rest = per_sm % together
    busy = cycles(per_sm - rest, together) + cycles(rest, rest) - (-per_sm // together) * rated.tile_cycles
    busy += rated.first_cycles
    inputs = 2 * batch * (m + n) * k / (sm_count * INPUT_BYTES_PER_CYCLE)
    cost = LAUNCH_CYCLES + (busy**4 + inputs**4) ** 0.25
    if splits > 1:
        partial = splitk_reduce.workspace_bytes(m, n, splits) * batch
        cost += REDUCE_CYCLES + partial / (sm_count * PARTIAL_BYTES_PER_CYCLE)
        cost += (splits - 1) // (4 * splitk_reduce.SLICES) * REDUCE_ROUND_CYCLES
    return float(cost)
