"""Which forms of the FP32 ladder tests compile for which architecture: for sm_90 all; for others those of both plain
layouts, and the rest with ``--slow``, as Numba takes seconds for each.
"""

from __future__ import annotations

import pytest

from numba_gemm.catalog import LADDER

#: Layouts of A and B, and whether with 16-byte accesses, that are compiled for every architecture.
EVERYWHERE = (("row", "row", 4), ("row", "row", 1), ("column", "column", 4))


def form(name, config, arch, *, id=None):
    """The parameters (name, config, arch) of a test, marked slow if that form is left out for this architecture."""
    values = dict(config)
    kind = values.get("a_layout", "row"), values.get("b_layout", "row"), values.get("vector_width", 4)
    label = id or f"{LADDER[name].entry(config)}-sm_{arch[0]}{arch[1]}"
    return pytest.param(
        name, config, arch, id=label, marks=() if arch == (9, 0) or kind in EVERYWHERE else pytest.mark.slow
    )


def forms(names, archs):
    """All forms of some kernels for some architectures, as :func:`form`."""
    return [form(name, config, arch) for name in names for config in LADDER[name].configs for arch in archs]
