"""Which forms of the FP32 ladder tests compile for which architecture, as Numba takes seconds for each.

For sm_90 all; for others the plain ones, and the rest with ``--slow``.
"""

from __future__ import annotations

import pytest

from numba_gemm.catalog import LADDER


def form(name, config, arch, *, id=None):
    """The parameters (name, config, arch) of a test, marked slow if that form is left out for this architecture."""
    plain = "column" not in dict(config).values() and dict(config).get("vector_width", 4) == 4
    label = id or f"{LADDER[name].entry(config)}-sm_{arch[0]}{arch[1]}"
    return pytest.param(name, config, arch, id=label, marks=() if arch == (9, 0) or plain else pytest.mark.slow)


def forms(names, archs):
    """All forms of some kernels for some architectures, as :func:`form`."""
    return [form(name, config, arch) for name in names for config in LADDER[name].configs for arch in archs]
