"""Configs from the words that records have for them."""

from __future__ import annotations

from numba_gemm.spec import Config, make_config


def described(form: str) -> Config:
    """The config that ``numba_gemm.spec.describe_config`` put into words."""
    pairs = (item.split("=") for item in form.split())
    return make_config(**{key: int(value) if value.isdigit() else value for key, value in pairs})
