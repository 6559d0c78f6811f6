"""KernelSpec: what the rest of the library needs to know about a kernel beside its device code.

A kernel file holds the device code; the spec beside it says which problems it takes and how it is launched.
Nothing here imports Numba or CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba_gemm.problem import Problem

#: Tunable parameters of one compiled form of a kernel, for instance ``{"vector_width": 4}``; hashable.
Config = tuple[tuple[str, int], ...]


def make_config(**parameters: int) -> Config:
    """A :data:`Config` from keyword arguments, in a fixed order."""
    return tuple(sorted(parameters.items()))


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
    loads_per_fma : shared-memory values read for each FMA (None where shared memory isn't used).
    build : makes the device function for a config; imports Numba when called.
    source : the language of the device code, ``"numba"``.
    dtypes : NumPy dtype names of A and B that it takes.
    min_arch : lowest compute capability.
    min_blocks_per_sm : occupancy promised to ptxas, from which it takes its register limit.
    configs : the compiled forms, best first; the first whose needs a problem meets is launched.
    abi : the kernel's parameter list, a key of ``compile.numba_source.SIGNATURES``.
    helpers : module names whose source enters the cache key beside the kernel's own file.
    """

    name: str
    title: str
    idea: str
    block_tile: tuple[int, int, int]
    thread_tile: tuple[int, int]
    threads: int
    loads_per_fma: float | None
    build: Callable[..., Callable[..., None]] = field(repr=False)
    source: str = "numba"
    dtypes: tuple[str, ...] = ("float32",)
    min_arch: tuple[int, int] = (7, 5)
    min_blocks_per_sm: int = 1
    configs: tuple[Config, ...] = ((),)
    abi: str = "gemm_f32"
    helpers: tuple[str, ...] = ("numba_gemm.intrinsics", "numba_gemm.fp32.epilogue")

    def entry(self, config: Config) -> str:
        """The name of the PTX entry of one compiled form."""
        suffix = "".join(f"_{key}{value}" for key, value in config)
        return f"{self.name.replace('-', '_')}{suffix}"

    def grid(self, m: int, n: int) -> int:
        """Blocks in the one-dimensional grid: the tiles of C, row by row.

        One dimension, since the others end at 65535 blocks and a tall matrix has more tiles than that.
        """
        block_m, block_n, _ = self.block_tile
        return -(-m // block_m) * -(-n // block_n)

    def unmet(self, problem: Problem, config: Config) -> str | None:
        """The constraint of ``config`` that ``problem`` doesn't meet, in words, or None."""
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if self.grid(problem.m, problem.n) > MAX_GRID:
            return f"the grid needs more than {MAX_GRID} blocks"
        width = dict(config).get("vector_width", 1)
        return problem.unaligned_for(width) if width > 1 else None


#: Blocks that the x dimension of a grid can have.
MAX_GRID = 2**31 - 1


def describe_config(config: Config) -> str:
    """``"vector_width=4"``, or ``""`` for the empty config."""
    return " ".join(f"{key}={value}" for key, value in config)


def config_dict(config: Config) -> dict[str, Any]:
    """A config as a plain dictionary, for JSON and keyword arguments."""
    return dict(config)
