"""Kernels compiled side by side: what lands in the cache, what is left out, what goes wrong quietly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numba_gemm.catalog import LADDER
from numba_gemm.compile.ahead import compile_ahead
from numba_gemm.compile.compiler import is_cached
from numba_gemm.problem import Problem
from numba_gemm.tune import LONG_FORMS, candidates, forms_to_compile

ARCH = (9, 0)
FORMS = [(LADDER[name], LADDER[name].configs[0]) for name in ("v1", "v2", "v3", "v4")]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    from numba_gemm.compile import compiler

    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    return tmp_path


def test_every_form_is_compiled_once_and_found_again(empty_cache):
    assert compile_ahead([*FORMS, FORMS[0]], ARCH, workers=2) == 4
    assert len(list(empty_cache.glob("*.kernel"))) == 4
    assert all(is_cached(*form, ARCH) for form in FORMS)
    assert not is_cached(*FORMS[0], (8, 0))
    assert compile_ahead(FORMS, ARCH) == 0


def refused(**config):
    raise ImportError("no compiler for this one")


def test_a_form_that_does_not_compile_is_left_to_whoever_needs_it(empty_cache):
    broken = (replace(LADDER["v1"], name="broken", build=refused), ())
    assert compile_ahead([broken, FORMS[0]], ARCH) == 2
    assert is_cached(*FORMS[0], ARCH)
    assert not is_cached(*broken, ARCH)


def test_without_a_cache_nothing_is_done(monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "")
    assert compile_ahead(FORMS, ARCH) == 0


def test_what_tuning_launches_is_what_is_compiled_before():
    problems = [Problem.packed(1000, 1001, 1002), Problem.packed(1, 512, 512), Problem.packed(4096, 4096, 8192)]
    forms = set(forms_to_compile(problems, arch=ARCH, sm_count=132))
    assert {spec.name for spec, _ in forms} >= {"v8", "split_k_sum", "repack", "gemv", "v6"}
    for problem in problems:
        for spec, config in candidates(problem, arch=ARCH, sm_count=132):
            assert {(one.spec, one.config) for one in spec.plan(problem, config).launches} <= forms
    assert len(candidates(Problem.packed(16384, 16384, 16384), arch=ARCH, sm_count=132)) <= LONG_FORMS
