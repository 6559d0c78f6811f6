"""The kernels by name, in ladder order. Adding one takes its file and one line here."""

from __future__ import annotations

from dataclasses import dataclass

from numba_gemm.fallback import FALLBACKS
from numba_gemm.fp32 import (
    v1_naive,
    v2_coalesced,
    v3_tiled,
    v4_column,
    v5_block,
    v6_vector,
    v7_warptile,
    v8_pipelined,
)
from numba_gemm.fp32.gemv_specs import GEMV
from numba_gemm.fp32.outer_specs import OUTER
from numba_gemm.fp32.skinny_specs import SKINNY
from numba_gemm.fp32.thin_specs import THIN
from numba_gemm.spec import KernelSpec
from numba_gemm.tensorcore.specs import T1, T2, T3, T4
from numba_gemm.tensorcore.w_specs import W1, W2

LADDER: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        v1_naive.SPEC,
        v2_coalesced.SPEC,
        v3_tiled.SPEC,
        v4_column.SPEC,
        v5_block.SPEC,
        v6_vector.SPEC,
        v7_warptile.SPEC,
        v8_pipelined.SPEC,
        T1,
        T2,
        T3,
        T4,
        W1,
        W2,
    )
}

#: Kernels for special shapes, which stand beside the ladder: one vector, a few, one narrow side, a short K.
SPECIAL: dict[str, KernelSpec] = {spec.name: spec for spec in (GEMV, SKINNY, THIN, OUTER)}

#: The baseline on the CPU, which is no GPU kernel but stands at the foot of the ladder.
CPU_BASELINE = "cpu"


@dataclass(frozen=True)
class KernelInfo:
    """One row of the ladder: a name for ``kernel=``, and what the kernel is."""

    name: str
    title: str
    idea: str
    block_tile: tuple[int, int, int] | None
    thread_tile: tuple[int, int] | None
    threads: int | None
    loads_per_fma: float | None
    dtypes: tuple[str, ...]
    min_arch: tuple[int, int] | None


def kernel_names() -> list[str]:
    """The names of the ladder, foot first. ``kernel=`` also takes the special kernels and the fallbacks."""
    return [CPU_BASELINE, *LADDER]


def get_spec(name: str) -> KernelSpec:
    """The GPU kernel called ``name``.

    Raises
    ------
    ValueError : if there is none; the message lists the names there are.
    """
    spec = find_spec(name) or FALLBACKS.get(name)
    if spec is None:
        raise ValueError(
            f"there is no kernel {name!r}; the kernels are {', '.join(kernel_names())}, for special shapes "
            f"{', '.join(SPECIAL)}, and in CUDA C++ {', '.join(FALLBACKS)}"
        )
    return spec


def find_spec(name: str) -> KernelSpec | None:
    """The kernel called ``name`` of the ladder or of the special ones; None if there is none."""
    return LADDER.get(name) or SPECIAL.get(name)


def kernels_for(dtype: str, arch: tuple[int, int] | None = None) -> list[str]:
    """The GPU kernels that take this element type, in ladder order; those that run on a compute capability, if given.

    Kernels for which a stand-in in CUDA C++ runs on an older GPU count as running there.
    """
    typed = [name for name, spec in LADDER.items() if dtype in spec.dtypes]
    return [name for name in typed if arch is None or LADDER[name].max_arch is None or LADDER[name].runs_on(arch)]


def tuned_kernels(dtype: str) -> list[KernelSpec]:
    """The kernels that the tuner times for an element type: the ladder's best, and the special ones."""
    best = (LADDER[name] for name in ("v6", "v7", "v8", "t4", "w1", "w2"))
    return [spec for spec in (*best, *SPECIAL.values()) if dtype in spec.dtypes]
