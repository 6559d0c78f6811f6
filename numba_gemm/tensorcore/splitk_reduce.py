"""splitk_reduce: the host half of ``ptx/splitk_reduce.ptx.j2``, which adds up the parts of a product whose K is split.

t4 and w2 leave the parts in a workspace: FP32, for each product of a batch ``splits`` matrices of M rows, each row
padded to four elements.
"""

from __future__ import annotations

import functools
from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses, KernelLaunch, KernelSpec, batch_addresses, make_config
from numba_gemm.tensorcore.source import HALF_DTYPES, LONG_NAMES, SHORT_NAMES, OutputElement
from numba_gemm.tensorcore.templates import render_template

#: Threads of a block: slices of the splits times lanes with four columns each.
THREADS, SLICES = 256, 8
#: Groups of four columns from which on, with few splits, a thread for each fills the GPU.
MANY_GROUPS = 32768


def workspace_bytes(m: int, n: int, splits: int) -> int:
    """Bytes of the partial sums of one product."""
    return splits * m * (-(-n // 4) * 4) * 4


def slices_for(m: int, n: int, splits: int) -> int:
    """Slices of the splits that a block adds side by side: 1 or 8, which give the same bits.

    With 8 slices and at most 8 splits each slice would have one split, or none.
    """
    return 1 if splits <= SLICES and m * -(-n // 4) >= MANY_GROUPS else SLICES


def grid(m: int, n: int, slices: int = SLICES) -> tuple[int, int, int]:
    """Blocks: each adds up 32 groups of four columns, or 256 of them with one slice."""
    return -(-m * -(-n // 4) // (THREADS // slices)), 1, 1


@functools.lru_cache(maxsize=8)
def render(c_dtype: OutputElement, slices: int = SLICES, *, dependent: bool = False) -> str:
    """The PTX text for one type of C; see :func:`slices_for`.

    ``dependent``: for sm_90, where it may be launched while the kernel before it still runs, and waits for that one.
    """
    if c_dtype not in ("f16", "bf16", "f32"):
        raise KernelConstraintError(f"splitk_reduce: c_dtype {c_dtype!r} is not 'f16', 'bf16' or 'f32'")
    return render_template(
        "splitk_reduce.ptx.j2",
        c_dtype=c_dtype,
        lanes=THREADS // slices,
        slices=slices,
        threads=THREADS,
        dependent=dependent,
    )


def reduction(
    problem: Problem, first: int, count: int, splits: int, *, begin: int = 0, dependent: bool = False
) -> KernelLaunch:
    """The launch behind ``count`` products of a batch, from the product ``first`` on.

    Parameters
    ----------
    splits : parts of K.
    begin : bytes into the workspace at which the partial sums begin.
    dependent : whether it overlaps the kernel that makes them, which GPUs since 9.0 can.
    """
    p = problem
    slices = slices_for(p.m, p.n, splits)
    blocks, _, _ = grid(p.m, p.n, slices)

    def values(at: Addresses) -> tuple[Any, ...]:
        c = batch_addresses(p, at, first)[2]
        return (at.workspace + begin, c, p.m, p.n, p.ldc, p.alpha, p.beta, splits, p.batch_stride_c)

    config = make_config(dtype=p.c_dtype, slices=slices, **({"dependent": 1} if dependent else {}))
    return KernelLaunch(SPEC, config, (blocks, 1, count), PARAMETERS[SPEC.abi], values, overlaps=dependent)


def _build(dtype: str, slices: int, dependent: int = 0) -> str:
    return render(SHORT_NAMES[dtype], slices, dependent=bool(dependent))


SPEC = KernelSpec(
    name="splitk_reduce",
    title="reduce",
    idea="adds the partial products of split-K in a fixed order",
    block_tile=(1, 4 * THREADS // SLICES, 1),
    thread_tile=(1, 4),
    threads=THREADS,
    loads_per_fma=None,
    build=_build,
    source="ptx",
    dtypes=("float32", *HALF_DTYPES),
    min_arch=(8, 0),
    configs=tuple(make_config(dtype=dtype, slices=slices) for dtype in LONG_NAMES.values() for slices in (8, 1)),
    abi="splitk_reduce",
    helpers=("numba_gemm.tensorcore.templates", "numba_gemm.tensorcore.source"),
    files=("splitk_reduce.ptx.j2",),
    entry_name="splitk_reduce",
)
