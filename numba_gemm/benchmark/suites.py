"""The shapes that are benchmarked: the ladder's sizes and the named suites."""

from __future__ import annotations

import re
from dataclasses import dataclass

from numba_gemm.stack import MAX_DIMENSION


@dataclass(frozen=True)
class Shape:
    """The dimensions of one product, (M, K) · (K, N)."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        if self.m == self.n == self.k:
            return f"{self.m}³"
        return f"{self.m}×{self.n}×{self.k}"

    @property
    def flops(self) -> int:
        """A multiply and an add for each of m·n·k terms."""
        return 2 * self.m * self.n * self.k


def cube(size: int) -> Shape:
    """A product of two square matrices."""
    return Shape(size, size, size)


#: The sizes of the ladder, on a GPU and on the CPU.
LADDER_SIZES = (1024, 2048, 4096)
CPU_SIZES = (256, 512, 1024)

#: Element types that kernels are timed in.
DTYPES = ("float32", "float16", "bfloat16")

#: What the emulator runs: whole tiles of every kernel; and the multiply-adds that it does in about a minute.
EMULATED_SHAPE = Shape(256, 256, 64)
LARGEST_EMULATED = 2**28

SUITES: dict[str, tuple[Shape, ...]] = {
    "square": tuple(cube(size) for size in (2048, 4096, 8192, 16384)),
    "small": tuple(cube(size) for size in (256, 512, 1024)),
    "odd": (
        Shape(1000, 1001, 1002),
        Shape(2047, 2049, 2051),
        Shape(4095, 4097, 4099),
        Shape(4096, 4096, 4097),
        Shape(4096, 4095, 4096),
        Shape(8191, 8193, 8195),
    ),
    "skinny": (
        *(Shape(m, 28672, 8192) for m in (1, 8, 16, 32, 64)),
        Shape(128, 8192, 28672),
        Shape(1, 4096, 4096),
    ),
    "deepk": (Shape(128, 128, 65536), Shape(64, 64, 262144), Shape(256, 512, 32768)),
    "llm": (
        Shape(256, 14336, 4096),
        Shape(2048, 28672, 8192),
        Shape(4096, 14336, 4096),
        Shape(8192, 8192, 28672),
    ),
}


def parse_shape(text: str) -> Shape:
    """``"1024"`` or ``"4096x4095x4096"`` (M×N×K) as a :class:`Shape`.

    Raises
    ------
    ValueError : for anything else, or a dimension below 1 or past 2³¹ − 1.
    """
    well_formed = re.fullmatch(r"\d+(?:[x×]\d+[x×]\d+)?", text.strip(), re.ASCII)
    sizes = [int(part) for part in re.split(r"[x×]", text.strip())] if well_formed else [0]
    if min(sizes) < 1:
        raise ValueError(
            f"size {text!r} is neither a number, for instance 1024, nor MxNxK, for instance 4096x4095x4096"
        )
    if max(sizes) > MAX_DIMENSION:
        raise ValueError(f"size {text!r} is past {MAX_DIMENSION}, the largest dimension that a kernel takes")
    return cube(sizes[0]) if len(sizes) == 1 else Shape(*sizes)
