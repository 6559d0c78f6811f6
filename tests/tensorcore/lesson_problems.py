"""Problems for the 16-bit kernels, launches of t1 to t3 on the emulator, and what their answers should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_gemm import emulator
from numba_gemm.emulator.tensorcore import rule
from numba_gemm.tensorcore.bound import tensorcore_bound
from numba_gemm.tensorcore.source import load_ptx, specialise

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
#: Kernel: edge of the block tile of C, threads.
GEOMETRY = {"t1": (16, 32), "t2": (128, 256), "t3": (128, 256)}
C_IS_FLOAT32, A_ALIGNED, B_ALIGNED = 1, 2, 4


@dataclass(frozen=True)
class Problem:
    """C = alpha · A @ B + beta · C.

    ``inputs``: "random", "integer" (no rounding anywhere in FP32) or "onehot" (each row of A picks a row of B).
    ``layout``: "packed", "padded" (rows 8 elements further apart, so as aligned as packed ones), "odd" (3 further) or
    "sliced" (the base is one row and one element into a larger array).
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    output: str = "float32"
    inputs: str = "random"
    layout: str = "packed"
    alpha: float = 1.0
    beta: float = 0.0

    def __str__(self) -> str:
        scale = "" if (self.alpha, self.beta) == (1.0, 0.0) else f"-{self.alpha:g}-{self.beta:g}"
        return f"{self.m}x{self.n}x{self.k}-{self.dtype}-{self.output}-{self.inputs}-{self.layout}{scale}"

    def make(self) -> tuple[Any, Any, Any]:
        """A, B, and C. Where beta is 0 C holds NaN, which must not get into the result."""
        rng = np.random.default_rng([self.m, self.n, self.k])
        a, b = rng.standard_normal((self.m, self.k)), rng.standard_normal((self.k, self.n))
        c = rng.standard_normal((self.m, self.n))
        if self.inputs != "random":
            a, b, c = (rng.integers(-4, 5, x.shape).astype(np.float64) for x in (a, b, c))
        if self.inputs == "onehot":
            a[...] = 0
            a[np.arange(self.m), rng.integers(0, self.k, self.m)] = 1
        if self.beta == 0:
            c[...] = np.nan
        kind = TYPES[self.dtype]
        return self._lay_out(a, kind), self._lay_out(b, kind), self._lay_out(c, TYPES[self.output])

    def _lay_out(self, values: Any, dtype: Any) -> Any:
        rows, columns = values.shape
        if self.layout == "sliced":
            around = np.full((rows + 2, columns + 5), np.nan, dtype)
            view = around[1 : rows + 1, 1 : columns + 1]
        else:
            pad = {"packed": 0, "padded": 8, "odd": 3}[self.layout]
            view = np.full((rows, columns + pad), np.nan, dtype)[:, :columns]
        view[...] = values.astype(dtype)
        return view


def row_pitch(matrix: Any) -> int:
    """Leading dimension in elements."""
    return int(matrix.strides[0]) // int(matrix.itemsize)


def is_aligned(matrix: Any, layout: str) -> bool:
    """What the host's flag says: 16-byte rows, in whole groups of 8. The emulator puts bases at 256-byte boundaries."""
    return layout != "sliced" and row_pitch(matrix) % 8 == 0 and matrix.shape[1] % 8 == 0


def flags_of(a: Any, b: Any, c: Any, layout: str) -> int:
    return (
        C_IS_FLOAT32 * (c.dtype == np.float32) + A_ALIGNED * is_aligned(a, layout) + B_ALIGNED * is_aligned(b, layout)
    )


def run(
    kernel: str,
    problem: Problem,
    matrices: tuple[Any, Any, Any],
    *,
    arch: str = "sm_90",
    flags: int | None = None,
    blocks: Any = None,
) -> Any:
    """Launch a kernel on the emulator; C is changed in place. Returns the emulator's report."""
    a, b, c = matrices
    tile, threads = GEOMETRY[kernel]
    grid = -(-problem.m // tile) * -(-problem.n // tile)
    chosen = flags_of(a, b, c, problem.layout) if flags is None else flags
    # The emulator takes 16-bit patterns; a view keeps strides and base.
    words = [x if x.dtype == np.float32 else x.view(np.uint16) for x in (a, b, c)]
    sizes = [np.uint32(x) for x in (problem.m, problem.n, problem.k)]
    pitches = [np.int64(row_pitch(x)) for x in (a, b, c)]
    scales = [np.float32(problem.alpha), np.float32(problem.beta)]
    text = specialise(load_ptx(kernel), problem.dtype)
    args = [*words, *sizes, *pitches, *scales, np.uint32(chosen)]
    return emulator.launch(text, grid, threads, args, kernel=kernel, arch=arch, blocks=blocks)


def reference(problem: Problem, matrices: tuple[Any, Any, Any]) -> Any:
    """The answer in float64, from C as it was before the launch."""
    a, b, c = (x.astype(np.float64) for x in matrices)
    value = np.float64(np.float32(problem.alpha)) * (a @ b)
    return value if problem.beta == 0 else value + np.float64(np.float32(problem.beta)) * c


def bound(problem: Problem, matrices: tuple[Any, Any, Any], arch: str) -> Any:
    a, b, c = matrices
    how = rule({"float16": "f16", "bfloat16": "bf16"}[problem.dtype], "f32", 16, arch)
    return tensorcore_bound(
        a,
        b,
        k_per_sum=how.group,
        fraction_bits=how.fraction_bits,
        output_dtype=problem.output,
        c=c,
        alpha=problem.alpha,
        beta=problem.beta,
    )
