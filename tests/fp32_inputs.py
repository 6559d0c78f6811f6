"""The products on which the FP32 kernels of a GPU and of the emulator are compared bit for bit.

Every input comes from the raw 64-bit output of NumPy's PCG64, whose stream is fixed, by integer operations alone, so
that the hash of a GPU's output can be checked long after, under any NumPy version. Shapes, layouts and scale factors
are those of :mod:`numba_gemm.cases`; what fills the matrices is drawn here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from numba_gemm.cases import Case, Matrix, lay_out, small_cases
from numba_gemm.catalog import LADDER

SEED = 20

#: Exponents that a kind of input draws from, and how often (of 256) an element is something else: see `_fill`.
EXPONENTS = {
    "random": np.array([1, 0, 0, 0, -1, -1, -1, -1, -2, -2, -3, -3, -4, -5, -6, -8]),
    "wide": np.arange(-60, 60),
    "subnormal": np.array([-60, -64, -68, -70, -72, -73, -74, -75, -76, -80, -126, -127, -127, -127, -127, -127]),
    "huge": np.arange(56, 66),
    "special": np.array([1, 0, 0, -1, -1, -2, -3, -5, 60, 127, -127]),
}

#: What an element of "special" may be instead: infinities, NaNs of several payloads, zeros, the extreme numbers.
SPECIALS = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0x7F800001, 0, 0x80000000, 0x7F7FFFFF, 0x00000001],
    np.uint32,
)


def cases(kernel: str) -> Iterator[Case]:
    """The products for one rung of the ladder: its small ones, then some of several tiles and of awkward values."""
    block_m, block_n, step = LADDER[kernel].block_tile
    yield from small_cases(max(block_m, block_n), step)
    yield Case(192, 160, 96)
    yield Case(131, 197, 75)
    yield Case(260, 132, 40, layout="sliced")
    yield Case(132, 136, 44, layout="padded", alpha=0.75, beta=-1.25)
    yield Case(136, 132, 52, alpha=-1.5, beta=0.375)
    yield Case(200, 72, 1)
    yield Case(68, 140, 64, inputs="wide")
    yield Case(33, 47, 129, inputs="wide", alpha=3.0, beta=0.1)
    for inputs in ("subnormal", "special", "huge"):
        yield Case(68, 72, 36, inputs=inputs)
        yield Case(35, 39, 21, inputs=inputs, alpha=0.625, beta=2.5)


def draw(case: Case) -> tuple[Matrix, Matrix, Matrix]:
    """A, B and C of a case, laid out in memory as it says."""
    a = _fill(case, 0, (case.m, case.k))
    b = _fill(case, 1, (case.k, case.n))
    c = _fill(case, 2, (case.m, case.n))
    return lay_out(a, case.layout), lay_out(b, case.layout), lay_out(c, case.layout)


def _fill(case: Case, which: int, shape: tuple[int, int]) -> Matrix:
    rows, columns = shape
    source = np.random.PCG64([SEED, case.m, case.n, case.k, which])
    words: NDArray[np.uint64] = source.random_raw(rows * columns).reshape(shape)
    inputs = case.inputs
    if inputs == ("onehot_a", "onehot_b", "")[which]:
        matrix = np.zeros(shape, np.float32)
        if which == 0:
            matrix[np.arange(rows), (words[:, 0] >> np.uint64(33)) % np.uint64(columns)] = 1
        else:
            matrix[(words[0] >> np.uint64(33)) % np.uint64(rows), np.arange(columns)] = 1
        return matrix
    if inputs not in EXPONENTS:
        return ((words >> np.uint64(33)) % np.uint64(17)).astype(np.float32) - np.float32(8)
    exponents = EXPONENTS[inputs]
    chosen = exponents[((words >> np.uint64(40)) % np.uint64(exponents.size)).astype(np.int64)]
    sign = (words >> np.uint64(63)) << np.uint64(31)
    bits = sign | ((chosen + 127).astype(np.uint64) << np.uint64(23)) | (words & np.uint64(0x7FFFFF))
    drawn = bits.astype(np.uint32)
    if inputs == "special":  # few, so that a row and a column meet none, one or two of them
        odd = (words >> np.uint64(24)) & np.uint64(0xFF) < np.uint64(3)
        drawn = np.where(odd, SPECIALS[((words >> np.uint64(48)) % np.uint64(SPECIALS.size)).astype(np.int64)], drawn)
    return drawn.view(np.float32)


def bits_of(matrix: Matrix) -> NDArray[np.uint32]:
    """A matrix's elements as they are in memory, row by row."""
    return np.ascontiguousarray(matrix).view(np.uint32)


def canonical(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The same with one bit pattern for every NaN."""
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFFFFF), bits)


def digest(bits: NDArray[np.uint32]) -> str:
    """SHA-256 of the elements in little-endian order."""
    return hashlib.sha256(bits.astype("<u4").tobytes()).hexdigest()
