"""The validator itself: what it must let pass, and what it must not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_gemm.cases import INPUTS, LAYOUTS, Case, large_cases, lay_out, small_cases
from numba_gemm.validate import check, gamma_fp32, reference

RNG = np.random.default_rng(7)


def product(m=9, n=7, k=50):
    a = RNG.standard_normal((m, k), dtype=np.float32)
    b = RNG.standard_normal((k, n), dtype=np.float32)
    return a, b, reference(a, b)


def test_a_right_product_passes_with_room():
    a, b, expected = product()
    verdict = check(a @ b, expected)
    assert verdict
    assert 0 < verdict.error_over_bound < 0.5


def test_nan_never_passes():
    a, b, expected = product()
    result = a @ b
    result[3, 4] = np.nan
    verdict = check(result, expected)
    assert not verdict
    assert verdict.worst == (3, 4)
    assert verdict.error_over_bound == np.inf


def test_an_untouched_poisoned_output_fails():
    *_, expected = product()
    poisoned = np.frombuffer(b"\xff" * (9 * 7 * 4), np.float32).reshape(9, 7)
    assert not check(poisoned, expected)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, 0.0, 1e30])
def test_one_wrong_element_fails_and_is_named(wrong):
    a, b, expected = product()
    result = a @ b
    result[8, 0] = wrong
    verdict = check(result, expected)
    assert not verdict
    assert verdict.worst == (8, 0)
    assert "(8, 0)" in verdict.message


def test_a_missing_term_fails():
    """A kernel that drops the last k is wrong by one term, far above the rounding."""
    a, b, expected = product()
    assert not check(a[:, :-1] @ b[:-1], expected)


def test_tf32_rounding_fails():
    """Ten mantissa bits are not FP32; a kernel that takes that liberty must be found out."""
    a, b, expected = product(k=8)
    truncated = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert not check(truncated @ b, expected)


def test_a_wrong_shape_fails():
    a, b, expected = product()
    assert not check((a @ b).T, expected)


def test_exact_asks_for_equality():
    a, b, _ = Case(8, 8, 8, inputs="integer").make()
    expected = reference(a, b)
    result = a @ b
    assert check(result, expected, exact=True)
    result[0, 0] = np.nextafter(result[0, 0], np.float32(np.inf))
    assert not check(result, expected, exact=True)


def test_overflow_to_infinity_is_judged_as_wrong_where_the_answer_is_finite():
    a = np.full((1, 2), 1e30, np.float32)
    b = np.array([[1e30], [-1e30]], np.float32)
    assert not check(np.array([[np.inf]], np.float32), reference(a, b))


def test_zero_sized_products_pass():
    a, b = np.empty((0, 4), np.float32), np.empty((4, 3), np.float32)
    assert check(a @ b, reference(a, b))


def test_beta_needs_c():
    a, b, _ = product()
    with pytest.raises(ValueError, match="c is needed"):
        reference(a, b, beta=1.0)


def chain(a_row, b_column):
    """An FP32 FMA chain in exact arithmetic, rounded to nearest even after each step."""
    total = np.float32(0)
    for x, y in zip(a_row, b_column, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(total))
        total = round_to_float32(exact)
    return total


def round_to_float32(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even."""
    guess = np.float32(float(exact))
    neighbours = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    distances = [abs(Fraction(float(value)) - exact) for value in neighbours]
    best = min(distances)
    ties = [value for value, distance in zip(neighbours, distances, strict=True) if distance == best]
    return next((value for value in ties if not value.view(np.uint32) & 1), ties[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=40))
def test_the_bound_holds_for_a_chain_of_fmas(pairs):
    """The bound is a theorem; here it is tried on chains computed in rational arithmetic."""
    a = np.array([[x for x, _ in pairs]], np.float32)
    b = np.array([[y] for _, y in pairs], np.float32)
    assert check(np.array([[chain(a[0], b[:, 0])]], np.float32), reference(a, b))


def test_gamma_grows_with_the_terms():
    assert gamma_fp32(1) == pytest.approx(2.0**-24, rel=1e-6)
    assert gamma_fp32(4096) == pytest.approx(4096 * 2.0**-24, rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    matrix = RNG.standard_normal((5, 8), dtype=np.float32)
    assert np.array_equal(lay_out(matrix, layout), matrix)


def test_layouts_lie_as_they_say():
    matrix = RNG.standard_normal((6, 8), dtype=np.float32)
    strides = {layout: tuple(s // 4 for s in lay_out(matrix, layout).strides) for layout in LAYOUTS}
    assert strides == {
        "packed": (8, 1),
        "padded": (13, 1),
        "sliced": (11, 1),
        "transposed": (1, 6),
        "stepped": (16, 2),
        "reversed": (-8, -1),
    }
    base = lay_out(matrix, "sliced")
    assert base.__array_interface__["data"][0] - base.base.__array_interface__["data"][0] == 4 * (11 + 1)


def test_cases_are_reproducible_and_fresh():
    first, again, other = Case(4, 5, 6).make(1), Case(4, 5, 6).make(1), Case(4, 5, 6).make(2)
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_onehot_inputs_pick_one_element():
    a, _, _ = Case(6, 7, 8, inputs="onehot_a").make()
    assert (a.sum(1) == 1).all()
    assert np.count_nonzero(a) == 6
    _, b, _ = Case(6, 7, 8, inputs="onehot_b").make()
    assert (b.sum(0) == 1).all()
    assert np.count_nonzero(b) == 7


def test_the_generator_covers_what_it_promises():
    for cases in (list(small_cases(128, 8)), list(large_cases())):
        assert {case.inputs for case in cases} == set(INPUTS)
        assert {case.layout for case in cases} == set(LAYOUTS)
        assert any(case.m == 1 for case in cases)
        assert any(case.n == 1 for case in cases)
        assert any(case.k == 1 for case in cases)
        assert any(case.beta != 0 for case in cases)
        assert any(case.n % 4 for case in cases)
        assert any(case.k % 4 for case in cases)
