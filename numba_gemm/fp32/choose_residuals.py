"""What the cost models of FP32 kernels get wrong on an H200, learnt from times: a factor for each form's cycles.

The models of v8 (``v8_choose.py``), skinny (``choose_fp32.py``), thin (``thin_choose.py``) and outer
(``outer_choose.py``) have each effect that we know once, as a number that can be read. Single forms are 8 to 10% off
(standard deviation), and not at random: how near a number of tiles is to the next round, how many blocks read the same
lines of a narrow factor at once, or which stores share the L2 matters to one form and not to another. Formulas for the
largest of these in v8's model, with some 70 more numbers, brought the picks that are within 5% of the fastest from 95.2
to 97.5% of random shapes; regression trees over the plain model, judged by shapes that they hadn't seen, to 99.0%. So
the formulas were left out, and the trees are here.

A tree asks eight yes-or-no questions, the same ones on all its branches, so that the answers are the eight bits of the
number of its leaf. The leaves of all trees add up to log(measured / model). thin's forms have trees of their own, and
outer's: one set for all kernels spends its questions on what tells them apart. ``bench/fit_residuals.py`` makes the
file of trees from records of ``bench/chooser.py`` and says how good they are on shapes that they haven't seen.

They hold for what was timed, one product of row-major factors with dimensions up to 8192 on a GPU like that one;
elsewhere the models stand alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numba_gemm.problem import Problem

#: Compute capability and SMs of the GPU whose times these are.
ARCH, SM_COUNT = (9, 0), 132
#: The dimensions that were drawn; of vectors outer's trees alone know.
SMALLEST, LARGEST = {"m": 2, "n": 2, "k": 1}, 8192
#: Candidates beyond so many times the cheapest keep the cycles of the model: no correction would bring them to the top.
NEAR = 2.0
TREES = Path(__file__).with_name("residuals_h200.npz")
#: The sets of trees: for forms that have tiles of C in shared memory's steps (v8's and skinny's), thin's and outer's.
KINDS = ("tiles", "thin", "outer")
#: What the file has of each kind.
FIELDS = ("features", "borders", "asked", "leaves", "scales", "bias")
#: What the trees may ask about a candidate, in the order of the columns; lb is the binary logarithm.
FEATURES = (
    "kernel and form",
    "lb M",
    "lb N",
    "lb K",
    "A copied by 16 bytes",
    "B copied by 16 bytes",
    "C stored by 16 bytes",
    "factors copied first (1: A, 2: B)",
    "lb tiles",
    "tiles whose k is shared",
    "blocks that share it",
    "tiles / SMs, the fraction",
    "whole tiles of an SM",
    "M / BM, the fraction",
    "N / BN, the fraction",
    "lb cycles",
    "blocks / shared tiles",
    "lb stages of a block",
    "lb bytes",
    "blocks / SMs, the fraction",
    "blocks of an SM",
    "N beyond whole sectors of a row",
    "K beyond whole lines of a row",
    "stages beyond whole shares",
    "stages that the shares have too many",
    "thin, outer: blocks / room of the GPU",
    "thin: outputs of a block; outer: rows of a thread",
    "thin: lanes side by side; outer: columns of a thread",
    "thin, outer: warps",
    "thin: warps that share k; outer: loads ahead",
    "thin, outer: steps of a pass",
    "thin, outer: the last pass, the fraction",
)
#: Words of a sector and of a line of memory.
SECTOR, LINE = 8, 32


class Candidate(NamedTuple):
    """A form of a kernel for a product, as far as the trees ask.

    ``problem`` is what the kernel does of the product, less a row or column that another one does.
    ``kind`` is one of :data:`KINDS`, and ``form`` numbers its forms. ``wide`` says of A, B and C whether they are
    copied or stored 16 bytes at a time (for skinny and thin: of B, whether their wide factor is). ``copied`` names the
    factors copied first. ``special`` has the last columns of a form of thin or outer.
    """

    problem: Problem
    form: int
    block_m: int
    block_n: int
    wide: tuple[bool, bool, bool]
    copied: str
    tiles: int
    stages: int
    split_tiles: int
    split_blocks: int
    cycles: float
    special: tuple[float, ...] = (0.0,) * 7
    kind: str = "tiles"


class Trees(NamedTuple):
    """A question is whether a feature is beyond a border; trees share them.

    ``features`` and ``borders`` of all questions, (questions,); ``asked``, the numbers of those that each tree asks,
    (trees, up to 8); ``leaves`` (trees, 2 ** asked); ``bias``, which is added to their sum.
    """

    features: Any
    borders: Any
    asked: Any
    leaves: Any
    bias: float

    def predict(self, rows: Any) -> Any:
        """log(measured / model) for rows of features, (candidates, features)."""
        answers = (rows.T[self.features] > self.borders[:, np.newaxis]).view(np.uint8)
        leaf = np.zeros((len(self.asked), len(rows)), np.uint8)
        for bit, numbers in enumerate(self.asked.T):
            leaf |= np.take(answers, numbers, axis=0) << np.uint8(bit)
        trees = np.arange(len(self.asked))[:, np.newaxis]
        return self.leaves[trees, leaf].sum(axis=0, dtype=np.float64) + self.bias


def known(problem: Problem, sm_count: int, arch: tuple[int, int], *, vectors: bool = False) -> bool:
    """Whether the trees hold for a product on a GPU; for one with a vector if ``vectors`` says so."""
    drawn = all((1 if vectors else least) <= getattr(problem, name) <= LARGEST for name, least in SMALLEST.items())
    return drawn and problem.is_row_major and problem.batch == 1 and (sm_count, arch) == (SM_COUNT, ARCH)


def corrected(candidates: Sequence[Candidate]) -> list[float]:
    """The cycles of candidates of one kernel, those near the cheapest times what the trees know of them."""
    cycles = [one.cycles for one in candidates]
    most = NEAR * min(cycles)
    near = [index for index, one in enumerate(cycles) if one <= most]
    rows = np.array([features(candidates[index]) for index in near], np.float32)
    for index, factor in zip(near, np.exp(load_trees(candidates[0].kind).predict(rows)), strict=True):
        cycles[index] *= float(factor)
    return cycles


def features(one: Candidate) -> tuple[float, ...]:
    """A candidate's row, see :data:`FEATURES`."""
    m, n, k = one.problem.m, one.problem.n, one.problem.k
    shared = one.split_tiles * one.stages
    share = -(-shared // one.split_blocks) if one.split_blocks else one.stages
    numbers = (m, n, k, one.tiles, one.cycles, share, one.problem.bytes_moved)
    lb_m, lb_n, lb_k, lb_tiles, lb_cycles, lb_share, lb_bytes = np.log2(np.maximum(numbers, 1.0)).tolist()
    blocks = one.tiles - one.split_tiles + one.split_blocks
    return (
        one.form, lb_m, lb_n, lb_k, *map(float, one.wide), ("a" in one.copied) + 2 * ("b" in one.copied),
        lb_tiles, one.split_tiles, one.split_blocks,
        one.tiles / SM_COUNT % 1, -(-(one.tiles - one.split_tiles) // SM_COUNT),
        m / one.block_m % 1 if one.block_m else 0.0, n / one.block_n % 1 if one.block_n else 0.0,
        lb_cycles, one.split_blocks / max(one.split_tiles, 1), lb_share, lb_bytes,
        blocks / SM_COUNT % 1, -(-blocks // SM_COUNT), n % SECTOR, k % LINE,
        one.stages % max(share, 1), share * one.split_blocks - shared if one.split_blocks else 0, *one.special,
    )  # fmt: skip


@functools.cache
def load_trees(kind: str) -> Trees:
    """The trees of a kind, from the file that is shipped: leaves are 8-bit integers times a scale of their tree."""
    with np.load(TREES) as found:
        features, borders, asked, leaves, scales, bias = (found[f"{kind}_{field}"] for field in FIELDS)
        return Trees(features, borders, asked, leaves * scales[:, np.newaxis], float(bias))
