"""`numba-gemm fragments`: the drawing is the ISA's table."""

from __future__ import annotations

import re

import pytest

from numba_gemm.cli import main


def test_lane_5_of_m16n8k16(capsys):
    """Lane 5 has group 1 and thread 1: rows 1 and 9 of A, columns 2, 3, 10, 11; column 1 of B."""
    assert main(["fragments", "m16n8k16", "--lane", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row_1 = next(line for line in lines if "a0" in line)
    assert re.findall(r"a\d", row_1) == ["a0", "a1", "a4", "a5"]
    assert re.findall(r"b\d", " ".join(lines)) == ["b0", "b1", "b2", "b3"]
    assert re.findall(r"c\d", " ".join(lines)) == ["c0", "c1", "c2", "c3"]


def test_list(capsys):
    assert main(["fragments", "--list"]) == 0
    assert re.search(r"m16n8k16\s+bf16\s+f32\s+sm_80", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which shape"),
        (["m99n1k1"], "no shape 'm99n1k1'; the shapes are .*m16n8k16"),
        (["m16n8k16", "--element", "f17"], "no elements of type 'f17'; it has f16, bf16"),
        (["m16n8k16", "--accumulator", "f64"], "m16n8k16 with f16 adds in f32 or f16, not in 'f64'"),
        (["m16n8k16", "--element", "bf16", "--accumulator", "f16"], "with bf16 adds in f32, not"),
        (["m16n8k16", "--lane", "32"], "lane"),
    ],
)
def test_wrong_arguments_end_with_a_sentence(arguments, message, capsys):
    assert main(["fragments", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)
    assert "Traceback" not in captured.err
