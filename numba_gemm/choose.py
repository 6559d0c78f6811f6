"""Which kernel, in which form: the caller's by name, else by rule."""

from __future__ import annotations

from collections.abc import Callable

from numba_gemm.catalog import LADDER, find_spec, get_spec
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fallback import FALLBACKS, check_arch, fallback_for
from numba_gemm.fp32.choose_fp32 import choose_kernel
from numba_gemm.fp32.v8_choose import choose_in_one_run, choose_together
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, KernelSpec, describe_config
from numba_gemm.tuned import Choice

#: The measured choice for a problem, or None.
Tuned = Callable[[Problem], Choice | None]

#: A 16-bit batch of products no wider and no deeper than this is t4's once there are so many tiles for each SM.
CROWD_TILE, CROWD_DEPTH, CROWD_TILES_PER_SM = 64, 256, 4

#: With so few rows of A and a row-major B of so many elements, past any L2, memory decides; t4 reads it 5% faster.
STREAM_ROWS, STREAM_ELEMENTS = 64, 1 << 27
STREAM_WIDTH = 8  # elements of 16 bits in a copy

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
    spec = get_spec(kernel) if kernel is not None else _by_rule(problem, sm_count, arch)
    if spec.name in FALLBACKS:
        check_arch(spec, arch, dtype=problem.dtype)
    elif arch < spec.min_arch and problem.dtype in spec.dtypes and kernel != "t4":
        spec = fallback_for(spec.name, arch, "it needs cp.async and m16n8k16 (sm_80)", dtype=problem.dtype) or spec
    if not spec.runs_on(arch):
        later = "" if spec.max_arch == spec.min_arch else " or later"
        raise KernelConstraintError(
            f"kernel {spec.name} needs compute capability {_dotted(spec.min_arch)}{later} and this GPU has "
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
        if other.runs_on(arch) and any(other.unmet(problem, config) is None for config in other.configs)
    ]
    remedy = f"kernel {others[-1]!r} can" if others else "no kernel can, so split the product into blocks"
    raise KernelConstraintError(f"kernel {spec.name} can't take this product ({'; '.join(reasons)}); {remedy}")


def in_one_run(spec: KernelSpec, problem: Problem, arch: tuple[int, int], sm_count: int) -> tuple[Config, float] | None:
    """A kernel's best form of those that give an element of C the same bits whatever product it is a part of.

    Such forms add an element's terms in one run, in the order of k, so that a product may be cut by rows and columns,
    and each block take the form that suits it.

    Returns
    -------
    The form, and by the model its time as a multiple of the best form's of all; None if a kernel has no such choice.
    """
    found = choose_in_one_run(problem, sm_count, arch) if spec.name == "v8" else None
    return None if found is None else (found[0].config, found[1])


def suits_blocks(config: Config) -> bool:
    """Whether blocks of a product can have its form: one that leaves a row or column to gemv suits no other size."""
    parameters = dict(config)
    return not (parameters.get("row_apart") or parameters.get("column_apart"))


def for_blocks(problem: Problem, arch: tuple[int, int], sm_count: int) -> Config:
    """The best form of v8 that suits blocks of a product."""
    return choose_together(problem, sm_count, arch).config


def _measured(problem: Problem, choice: Choice | None, arch: tuple[int, int]) -> tuple[KernelSpec, Config] | None:
    """A choice from a table, if there is one and it can be carried out."""
    if choice is None:
        return None
    spec = find_spec(choice.kernel)
    if spec is None or not spec.runs_on(arch) or spec.unmet(problem, choice.config) is not None:
        return None
    return spec, choice.config


def _by_rule(problem: Problem, sm_count: int, arch: tuple[int, int]) -> KernelSpec:
    """The kernel by the models of what they cost; float32 has several, the 16-bit types one for each generation."""
    if problem.dtype == "float32":
        return get_spec(choose_kernel(problem, sm_count, arch))
    w2 = LADDER["w2"]  # where there is wgmma
    others_turn = _is_crowd(problem, sm_count) or _is_stream(problem)
    if w2.runs_on(arch) and w2.unmet(problem, ()) is None and not others_turn:
        return w2
    return LADDER["t4"]


def _is_stream(problem: Problem) -> bool:
    """Whether a product reads a large B once for a few rows.

    On an H200 at 28672×8192 and 1 to 64 rows t4's 64×256 tile takes 110 µs and w2's fastest 113 to 116
    (``tests/data/h200_tuned_forms.json``).
    """
    p = problem
    aligned = not (p.misaligned("A", STREAM_WIDTH) or p.misaligned("B", STREAM_WIDTH))
    few = p.batch == 1 and p.m <= STREAM_ROWS and p.n * p.k >= STREAM_ELEMENTS
    return few and p.a_layout == p.b_layout == "row" and aligned


def _is_crowd(problem: Problem, sm_count: int) -> bool:
    """Whether a batch is one of many small products, which start and end more than they multiply.

    An SM holds four blocks of t4 at a time, which hide that from one another, and one block of w2. By the models of
    both they are about level where both sides fill a tile, and t4 is up to three times as fast where they don't.
    """
    p = problem
    tiles = p.batch * -(-p.m // CROWD_TILE) * -(-p.n // CROWD_TILE)
    small = min(p.m, p.n) <= CROWD_TILE and p.k <= CROWD_DEPTH
    return p.batch > 1 and small and tiles >= CROWD_TILES_PER_SM * sm_count


def _remedy(spec: KernelSpec, arch: tuple[int, int]) -> str:
    if spec.max_arch is not None and arch >= LADDER["t4"].min_arch:
        return "kernel 't4'"
    stand_in = "t3-nvcc" if spec.name in ("t4", "w1", "w2") else f"{spec.name}-nvcc"
    if stand_in in FALLBACKS and arch >= FALLBACKS[stand_in].min_arch:
        return f"kernel {stand_in!r}"
    return "device='cpu'"


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"
