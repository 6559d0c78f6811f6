"""outer's tiles, and which products they take."""

from __future__ import annotations

from numba_gemm.fp32.outer import MAX_K, WARP
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, make_config

Tile = dict[str, int]


def _tile(*numbers: int) -> Tile:
    names = ("rows", "columns", "vector_width", "warps", "unroll_k", "ahead", "blocks_per_sm")
    return dict(zip(names, numbers, strict=True))


#: Tiles by B's layout and whether C, and a B whose rows are contiguous, can be accessed by 16 bytes.
TILES: dict[tuple[str, bool], tuple[Tile, ...]] = {
    ("row", False): (
        _tile(4, 1, 1, 4, 4, 2, 12),
        _tile(8, 1, 1, 2, 4, 2, 20),
        _tile(4, 4, 1, 2, 2, 2, 16),
        _tile(8, 4, 1, 4, 2, 1, 6),
        _tile(16, 2, 1, 2, 2, 2, 12),
        _tile(16, 2, 1, 2, 4, 2, 10),
    ),
    ("row", True): (
        _tile(4, 1, 1, 4, 4, 2, 12),
        _tile(4, 4, 4, 4, 2, 1, 8),
        _tile(4, 4, 4, 2, 4, 2, 12),
        _tile(8, 4, 4, 2, 2, 1, 12),
        _tile(8, 4, 4, 2, 4, 1, 12),
        _tile(16, 4, 4, 2, 4, 1, 8),
    ),
    ("column", False): (
        _tile(4, 1, 1, 4, 4, 1, 8),
        _tile(8, 2, 1, 4, 4, 1, 6),
        _tile(8, 4, 1, 4, 2, 1, 4),
    ),
    ("column", True): (
        _tile(4, 1, 1, 4, 4, 1, 8),
        _tile(4, 4, 4, 4, 4, 1, 6),
        _tile(8, 4, 4, 4, 4, 1, 4),
    ),
}


def by_16_bytes(problem: Problem) -> bool:
    """Whether C, and a B whose rows are contiguous, can be accessed by 16 bytes."""
    return not (problem.misaligned("C", 4) or (problem.b_layout == "row" and problem.misaligned("B", 4)))


def tiles_of(problem: Problem) -> tuple[Tile, ...]:
    """The tiles that take a product."""
    return TILES[problem.b_layout, by_16_bytes(problem)]


def blocks_of(problem: Problem, tile: Tile) -> int:
    """Blocks of one product."""
    return -(-problem.m // (tile["warps"] * tile["rows"])) * -(-problem.n // (WARP * tile["columns"]))


def refuses(problem: Problem) -> str | None:
    """Why outer can't take a product, in words, or None."""
    if problem.k > MAX_K:
        return f"K = {problem.k} is more than {MAX_K}"
    return None


def refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form can't take a product that it wasn't chosen for, in words, or None."""
    values = dict(config)
    if values["form"] != problem.b_layout:
        return f"B's {values['form']}s aren't contiguous"
    if values["vector_width"] == 1:
        return None
    return problem.misaligned("C", 4) or (problem.misaligned("B", 4) if problem.b_layout == "row" else None)


def config_of(problem: Problem, tile: Tile) -> Config:
    """The config of a product with a tile."""
    return make_config(**tile, form=problem.b_layout)


def shipped_configs() -> tuple[Config, ...]:
    """Every form that can be chosen."""
    every = (make_config(**tile, form=form) for (form, _), tiles in TILES.items() for tile in tiles)
    return tuple(dict.fromkeys(every))
