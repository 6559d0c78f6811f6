"""Shared fixtures. Tests marked `gpu` are skipped without a GPU, those marked `slow` unless `--slow` is given."""

from __future__ import annotations

import os

import pytest

from numba_gemm.device.driver import driver
from numba_gemm.errors import NoDeviceError

# JAX would take three quarters of the GPU's memory at its first array, from the tests beside it too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _why_no_gpu() -> str | None:
    try:
        driver()
    except NoDeviceError as error:
        return str(error).partition(" (")[0].partition(". ")[0]
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that compile for minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="compiles for minutes; run with --slow"))
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def kernel_cache(tmp_path, monkeypatch):
    """An empty kernel cache of the test's own, on disk and in memory."""
    from numba_gemm.compile import compiler

    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "_kernels", {})
    return tmp_path / "kernels"
