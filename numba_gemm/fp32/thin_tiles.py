"""thin's tiles, what they take, and how a product is cut into parts of K."""

from __future__ import annotations

from typing import Any

from numba_gemm.fp32.skinny_specs import roles
from numba_gemm.fp32.thin import WARP
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, make_config

#: The narrow side; a vector is gemv's.
MIN_NARROW, MAX_NARROW = 2, 16
#: Vectors that forms have room for.
NARROW = (4, 8, 16)

Tile = dict[str, int]


def _along(*numbers: int) -> Tile:
    names = ("rows", "lanes", "warps", "k_warps", "unroll_k", "depth", "blocks_per_sm")
    return dict(zip(names, numbers, strict=True))


def _across(*numbers: int) -> Tile:
    names = ("vector_width", "lanes", "warps", "unroll_k", "depth", "blocks_per_sm")
    return dict(zip(names, numbers, strict=True))


#: Tiles by the form, the width of W's loads and the vectors that there is room for.
TILES: dict[tuple[str, int, int], tuple[Tile, ...]] = {
    ("along", 1, 4): (
        _along(2, 8, 4, 1, 2, 64, 8),
        _along(2, 8, 4, 4, 1, 64, 8),
        _along(4, 8, 4, 4, 4, 128, 6),
        _along(4, 8, 8, 8, 4, 256, 3),
        _along(4, 32, 8, 8, 2, 512, 4),
        _along(2, 32, 8, 8, 4, 1024, 4),
        _along(4, 32, 4, 4, 4, 512, 6),
        _along(8, 32, 8, 1, 2, 512, 2),
        _along(2, 32, 8, 1, 1, 512, 4),
    ),
    ("along", 1, 8): (
        _along(4, 8, 4, 4, 1, 64, 6),
        _along(2, 8, 4, 4, 4, 128, 8),
        _along(4, 8, 4, 2, 4, 64, 4),
        _along(2, 32, 8, 8, 2, 512, 4),
        _along(4, 32, 8, 8, 2, 512, 3),
        _along(4, 32, 4, 2, 4, 256, 4),
        _along(4, 32, 4, 1, 4, 256, 4),
        _along(4, 32, 8, 1, 4, 256, 2),
    ),
    ("along", 1, 16): (
        _along(2, 8, 4, 4, 1, 64, 6),
        _along(4, 8, 4, 2, 2, 64, 4),
        _along(2, 32, 8, 8, 1, 256, 3),
        _along(2, 32, 8, 4, 2, 256, 3),
        _along(2, 32, 4, 2, 2, 128, 6),
        _along(4, 32, 4, 2, 4, 256, 4),
        _along(4, 32, 4, 1, 4, 128, 4),
        _along(4, 32, 8, 1, 4, 128, 2),
    ),
    ("across", 4, 4): (
        _across(4, 8, 4, 2, 64, 6),
        _across(4, 4, 8, 4, 512, 3),
        _across(4, 4, 8, 8, 512, 2),
        _across(4, 8, 8, 8, 512, 2),
        _across(4, 16, 8, 4, 512, 3),
    ),
    ("across", 4, 8): (
        _across(4, 8, 4, 2, 64, 4),
        _across(4, 4, 4, 4, 256, 4),
        _across(4, 4, 8, 8, 512, 2),
        _across(4, 8, 4, 4, 256, 4),
        _across(4, 8, 8, 8, 256, 2),
    ),
    ("across", 4, 16): (
        _across(4, 8, 4, 1, 64, 4),
        _across(4, 4, 4, 1, 128, 4),
        _across(4, 4, 4, 2, 128, 4),
        _across(4, 4, 4, 4, 128, 4),
        _across(4, 8, 4, 4, 128, 4),
    ),
    ("across", 1, 4): (
        _across(1, 32, 2, 8, 64, 12),
        _across(1, 32, 4, 4, 128, 6),
        _across(1, 32, 8, 4, 512, 3),
        _across(1, 16, 8, 8, 512, 3),
        _across(1, 8, 8, 4, 512, 3),
        _across(1, 8, 8, 2, 512, 3),
        _across(1, 4, 8, 2, 512, 3),
    ),
    ("across", 1, 8): (
        _across(1, 32, 2, 8, 64, 12),
        _across(1, 32, 4, 4, 128, 6),
        _across(1, 32, 8, 8, 256, 3),
        _across(1, 8, 8, 8, 256, 3),
        _across(1, 8, 4, 2, 256, 6),
        _across(1, 4, 8, 4, 256, 3),
    ),
    ("across", 1, 16): (
        _across(1, 32, 2, 8, 64, 8),
        _across(1, 32, 4, 8, 128, 6),
        _across(1, 32, 8, 8, 128, 3),
        _across(1, 16, 8, 8, 128, 3),
        _across(1, 16, 4, 8, 128, 6),
        _across(1, 8, 4, 2, 128, 6),
        _across(1, 4, 4, 8, 256, 6),
    ),
}


def narrow_of(problem: Problem) -> int:
    """Vectors that the kernel's form has room for."""
    return next(narrow for narrow in NARROW if roles(problem).narrow <= narrow)


def width_of(problem: Problem) -> int:
    """Words of the wide factor that a thread loads at a time."""
    role = roles(problem)
    return 1 if role.form == "along" or problem.misaligned(role.wide, 4) else 4


def tiles_of(problem: Problem) -> tuple[Tile, ...]:
    """The tiles that take a product."""
    return TILES[roles(problem).form, width_of(problem), narrow_of(problem)]


def refuses(problem: Problem) -> str | None:
    """Why thin can't take a product, in words, or None."""
    least = min(problem.m, problem.n)
    if least > MAX_NARROW:
        return f"neither M = {problem.m} nor N = {problem.n} is {MAX_NARROW} or less"
    if least < MIN_NARROW:
        return f"{'M' if problem.m < MIN_NARROW else 'N'} is 1; that is a product with a vector, which gemv takes"
    if problem.k >= 2**31:
        return f"K = {problem.k} is 2³¹ or more"
    return None


def refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form can't take a product that it wasn't chosen for, in words, or None."""
    role, values = roles(problem), dict(config)
    if values["form"] != role.form:
        return f"{role.wide}, the wide factor, isn't read {values['form']}"
    if role.narrow > int(values["narrow"]):
        return f"the narrow side, {role.narrow}, is more than {values['narrow']}"
    return problem.misaligned(role.wide, 4) if values.get("vector_width") == 4 else None


def k_per_part(problem: Problem, parts: int) -> int:
    """Depth of one part of K, the same for all but the last: whole lines of a matrix that lies along K."""
    return max(WARP, -(-problem.k // (parts * WARP)) * WARP)


def config_of(problem: Problem, tile: Tile, parts: int = 1) -> Config:
    """The config of a product with a tile, K in so many parts.

    ``parts`` is in the config beside what decides the code, as it is only the launch's.
    """
    return make_config(
        **_code(roles(problem).form, narrow_of(problem), tile), **({"parts": parts} if parts > 1 else {})
    )


def _code(form: str, narrow: int, tile: Tile) -> dict[str, Any]:
    return {**tile, "form": form, "narrow": narrow}


def shipped_configs() -> tuple[Config, ...]:
    """Every form that can be chosen, without the number of parts."""
    return tuple(
        make_config(**_code(form, narrow, tile)) for (form, _, narrow), tiles in TILES.items() for tile in tiles
    )
