"""Shared fixtures. GPU tests carry the mark `gpu` and are skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from numba_gemm.device.driver import driver
from numba_gemm.errors import NoDeviceError


def _why_no_gpu() -> str | None:
    try:
        driver()
    except NoDeviceError as error:
        return str(error).partition(" (")[0].partition(". ")[0]
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def kernel_cache(tmp_path, monkeypatch):
    """An empty kernel cache of the test's own, on disk and in memory."""
    from numba_gemm import compile as compile_package

    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_package, "_kernels", {})
    return tmp_path / "kernels"
