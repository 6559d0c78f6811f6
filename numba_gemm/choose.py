"""Which kernel, in which form: the caller's by name, else by rule."""

from __future__ import annotations

from collections.abc import Callable

from numba_gemm.catalog import CANDIDATES, LADDER, get_spec
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fallback import FALLBACKS, check_arch, fallback_for
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, KernelSpec, describe_config
from numba_gemm.tuned import Choice

#: The measured choice for a problem, or None.
Tuned = Callable[[Problem], Choice | None]

#: SMs assumed where no GPU says: the number of an RTX 3060, the smallest card of its generation in wide use.
DEFAULT_SM_COUNT = 28


def choose(
    problem: Problem,
    kernel: str | None = None,
    *,
    arch: tuple[int, int],
    sm_count: int = DEFAULT_SM_COUNT,
    tuned: Tuned | None = None,
) -> tuple[KernelSpec, Config]:
    """The kernel and its form for a problem.

    Parameters
    ----------
    problem : what to compute.
    kernel : a name from :func:`numba_gemm.kernels`, or None to choose by rule.
    arch : compute capability of the GPU.
    sm_count : its SMs, which a grid should fill.
    tuned : looks a problem up among measured choices, which go before the model; None for the model alone.

    Raises
    ------
    ValueError : for a name that doesn't exist.
    KernelConstraintError : if the named kernel, or every kernel, can't take the problem.
    CompileError : if the GPU needs a kernel in CUDA C++ and no compiler for it is installed.
    """
    if kernel is None and tuned is not None:
        measured = _measured(problem, tuned(problem), arch)
        if measured is not None:
            return measured
    spec = get_spec(kernel) if kernel is not None else _by_rule(problem, sm_count)
    if spec.name in FALLBACKS:
        check_arch(spec, arch, dtype=problem.dtype)
    elif arch < spec.min_arch and problem.dtype in spec.dtypes and kernel != "t4":
        spec = fallback_for(spec.name, arch, "it needs cp.async and m16n8k16 (sm_80)", dtype=problem.dtype) or spec
    if arch < spec.min_arch:
        raise KernelConstraintError(
            f"kernel {spec.name} needs compute capability {_dotted(spec.min_arch)} or later and this GPU has "
            f"{_dotted(arch)}; use {_remedy(spec, arch)}"
        )
    if spec.select is not None and problem.dtype in spec.dtypes:
        return spec, spec.select(problem, sm_count, arch)
    reasons = []
    for config in spec.configs:
        reason = spec.unmet(problem, config)
        if reason is None:
            return spec, config
        reasons.append(f"{describe_config(config) or spec.name}: {reason}")
    if problem.dtype not in spec.dtypes:
        reasons = [f"dtype {problem.dtype} is not one of {', '.join(spec.dtypes)}"]
    others = [
        other.name
        for other in LADDER.values()
        if arch >= other.min_arch and any(other.unmet(problem, config) is None for config in other.configs)
    ]
    remedy = f"kernel {others[-1]!r} can" if others else "no kernel can, so split the product into blocks"
    raise KernelConstraintError(f"kernel {spec.name} can't take this product ({'; '.join(reasons)}); {remedy}")


def _measured(problem: Problem, choice: Choice | None, arch: tuple[int, int]) -> tuple[KernelSpec, Config] | None:
    """A choice from a table, if there is one and it can be carried out."""
    if choice is None:
        return None
    spec = LADDER.get(choice.kernel) or CANDIDATES.get(choice.kernel)
    if spec is None or arch < spec.min_arch or spec.unmet(problem, choice.config) is not None:
        return None
    return spec, choice.config


def _by_rule(problem: Problem, sm_count: int) -> KernelSpec:
    """The warp-tiled kernel where its tiles fill the GPU; below that, smaller tiles or more threads a tile.

    The limits are where the rungs' times cross on an H200: at 1024³ (64 tiles of 128×128 for 132 SMs) v6 leads, at
    512³ (16 tiles) v3 does, whose 32×32 tiles reach every SM. It reads rows only, and making them costs more than it
    brings.
    """
    if problem.dtype != "float32":
        return LADDER["t4"]
    tiles = LADDER["v7"].grid(problem.m, problem.n) * problem.batch
    if tiles >= sm_count:
        return LADDER["v7"]
    return LADDER["v6"] if 6 * tiles >= sm_count or not problem.is_row_major else LADDER["v3"]


def _remedy(spec: KernelSpec, arch: tuple[int, int]) -> str:
    stand_in = "t3-nvcc" if spec.name == "t4" else f"{spec.name}-nvcc"
    if stand_in in FALLBACKS and arch >= FALLBACKS[stand_in].min_arch:
        return f"kernel {stand_in!r}"
    return "device='cpu'"


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"
