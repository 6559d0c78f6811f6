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
)
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

#: The baseline on the CPU, which is no GPU kernel but stands at the foot of the ladder.
CPU_BASELINE = "cpu"


def kernel_names() -> list[str]:
    """The names of the ladder, foot first. ``kernel=`` also takes the names in ``fallback.FALLBACKS``."""
    return [CPU_BASELINE, *LADDER]


def get_spec(name: str) -> KernelSpec:
    """The GPU kernel called ``name``.

    Raises
    ------
    ValueError : if there is none; the message lists the names there are.
    """
    spec = LADDER.get(name) or FALLBACKS.get(name)
    if spec is None:
        raise ValueError(
            f"there is no kernel {name!r}; the kernels are {', '.join(kernel_names())}, and in CUDA C++ "
            f"{', '.join(FALLBACKS)}"
        )
    return spec


def kernels_for(dtype: str) -> list[str]:
    """The GPU kernels that take this element type, in ladder order."""
    return [name for name, spec in LADDER.items() if dtype in spec.dtypes]
