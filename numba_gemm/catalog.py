"""The kernels by name, in ladder order. Adding one takes its file and one line here."""

from __future__ import annotations

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

LADDER: dict[str, KernelSpec] = {
    module.SPEC.name: module.SPEC
    for module in (
        v1_naive,
        v2_coalesced,
        v3_tiled,
        v4_column,
        v5_block,
        v6_vector,
        v7_warptile,
    )
}

#: The baseline on the CPU, which is no GPU kernel but stands at the foot of the ladder.
CPU_BASELINE = "cpu"


def kernel_names() -> list[str]:
    """Every name that ``kernel=`` takes, in ladder order."""
    return [CPU_BASELINE, *LADDER]


def get_spec(name: str) -> KernelSpec:
    """The GPU kernel called ``name``.

    Raises
    ------
    ValueError : if there is none; the message lists the names there are.
    """
    spec = LADDER.get(name)
    if spec is None:
        raise ValueError(f"there is no kernel {name!r}; the kernels are {', '.join(kernel_names())}")
    return spec
