"""The kernels by name, in ladder order. Adding one takes its file and one line here."""

from __future__ import annotations

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
from numba_gemm.fp32.skinny_specs import SKINNY
from numba_gemm.spec import KernelSpec
from numba_gemm.tensorcore.specs import T1, T2, T3, T4

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
        T1,
        T2,
        T3,
        T4,
    )
}

#: Kernels that no recorded run on a GPU has confirmed in their present form: a name takes them, and the tuner, which
#: validates before it times; no rule chooses them. `v8` is the ladder's next rung, the others are for one vector and
#: for one narrow side.
CANDIDATES: dict[str, KernelSpec] = {spec.name: spec for spec in (v8_pipelined.SPEC, GEMV, SKINNY)}

#: The baseline on the CPU, which is no GPU kernel but stands at the foot of the ladder.
CPU_BASELINE = "cpu"


def kernel_names() -> list[str]:
    """The names of the ladder, foot first. ``kernel=`` also takes those in ``CANDIDATES`` and ``FALLBACKS``."""
    return [CPU_BASELINE, *LADDER]


def get_spec(name: str) -> KernelSpec:
    """The GPU kernel called ``name``.

    Raises
    ------
    ValueError : if there is none; the message lists the names there are.
    """
    spec = LADDER.get(name) or CANDIDATES.get(name) or FALLBACKS.get(name)
    if spec is None:
        raise ValueError(
            f"there is no kernel {name!r}; the kernels are {', '.join(kernel_names())}, the candidates "
            f"{', '.join(CANDIDATES)}, and in CUDA C++ {', '.join(FALLBACKS)}"
        )
    return spec


def kernels_for(dtype: str) -> list[str]:
    """The GPU kernels that take this element type, in ladder order."""
    return [name for name, spec in LADDER.items() if dtype in spec.dtypes]


def tuned_kernels(dtype: str) -> list[KernelSpec]:
    """The kernels that the tuner times for an element type: the ladder's best, and the candidates."""
    best = (LADDER[name] for name in ("v6", "v7", "t4"))
    return [spec for spec in (*best, *CANDIDATES.values()) if dtype in spec.dtypes]
