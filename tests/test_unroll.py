"""Unrolling in the source: the same function, with its loop written out."""

from __future__ import annotations

import dis

import pytest

from numba_gemm.compile.unroll import expand_unrolled, unroll

WIDTH = 3


def loops(function):
    return sum(instruction.opname == "FOR_ITER" for instruction in dis.get_instructions(function))


def make(scale, depth):
    def weighted(values):
        total = 0
        for i in unroll(depth):
            for j in unroll(i, WIDTH):
                total += scale * values[i] * (j + 1)
            for _ in range(2):
                total += 1
        return total

    return weighted


def test_the_result_is_the_same_and_the_loops_are_gone():
    function = make(2, 3)
    expanded = expand_unrolled(function)
    assert expanded([1, 2, 3]) == function([1, 2, 3])
    assert loops(function) == 3
    assert loops(expanded) == 3  # one plain loop in each of three copies


@pytest.mark.parametrize("scale", [1, 10])
def test_closures_keep_their_values(scale):
    # i = 0 weighs 1 + 2 + 3, i = 1 weighs 2 + 3, and the plain loop adds 2 each time.
    assert expand_unrolled(make(scale, 2))([1, 1]) == scale * (6 + 5) + 4


def test_a_function_without_marks_is_itself():
    def plain(x):
        return x + 1

    assert expand_unrolled(plain) is plain


def test_line_numbers_stay():
    function = make(1, 1)
    assert expand_unrolled(function).__code__.co_firstlineno == function.__code__.co_firstlineno


def break_out():
    for i in unroll(3):
        if i:
            break


def assign_target():
    for i in unroll(3):
        i = 2  # noqa: PLW2901, F841


def unknown_bound(n):
    for _ in unroll(n):
        pass


def with_else():
    for _ in unroll(2):
        pass
    else:  # noqa: PLW0120
        pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (break_out, "can't have break or continue"),
        (assign_target, "assigns to 'i'"),
        (unknown_bound, "known when the kernel is built"),
        (with_else, "no else"),
    ],
)
def test_what_cannot_be_unrolled_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        expand_unrolled(function)


def test_a_break_of_an_inner_loop_is_fine():
    def first_above(values, limit):
        found = 0
        for i in unroll(2):
            for value in values:
                if value > limit + i:
                    found += value
                    break
        return found

    assert expand_unrolled(first_above)([1, 5, 9], 4) == first_above([1, 5, 9], 4) == 14
