"""w1: the host half of ``ptx/w1.ptx.j2``, the first kernel for Hopper: TMA, ``wgmma`` and a ring of mbarriers.

The kernel is a template: tile shape, stages, layouts and types are fixed when its text is rendered. A
:class:`W1Parameters` names one form of it; it checks its own constraints, says how it is launched and which boxes its
tensor maps bring, and renders the PTX.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore.source import Element, Layout, OutputElement
from numba_gemm.tensorcore.templates import render_template

#: Elements of a row of a box: 128 bytes, the span of the widest swizzle.
PANEL = 64
#: Bytes after which the 128-byte swizzle repeats; tiles and stages start at multiples of it.
SWIZZLE_PERIOD = 1024
#: Shared memory that a block can have on a GPU of compute capability 9.0, and what the system takes of an SM's for
#: each block.
SHARED_LIMIT, SHARED_RESERVED = 227 * 1024, 1024
#: Registers of an SM, and those that a thread needs beside its accumulators.
SM_REGISTERS, ADDRESS_REGISTERS = 65536, 40
#: Dimensions up to here keep every index of the kernel, and every coordinate of a box, below 2³¹.
MAX_DIMENSION = 2**31 - 4096
#: Products of one launch, the limit of ctaid.z.
MAX_BATCH = 65535


@dataclass(frozen=True)
class W1Parameters:
    """One form of the kernel ``C = alpha·A@B + beta·C``, with FP32 sums and C row-major.

    Attributes
    ----------
    dtype, c_dtype : elements of A and B, and of C.
    a_layout, b_layout : ``"row"``: M×K or K×N with contiguous rows; ``"column"``: contiguous columns.
    block_m, block_n, block_k : the tile of C of one block, and the depth of one stage. ``block_m`` is 64 rows for each
        consumer warpgroup; ``block_n`` a multiple of 8, or of 64 where B is row-major, since a box of that has 64
        columns.
    stages : stages of the ring in shared memory.
    group : rows of tiles that are walked together, column by column, so that neighbours share L2.

    Raises
    ------
    KernelConstraintError : names the constraint that does not hold.

    Examples
    --------
    >>> form = W1Parameters(dtype="bf16", c_dtype="f32", a_layout="column")
    >>> form.threads, form.map_a_box, form.map_b_box
    (288, (64, 64, 1), (64, 64, 1))
    >>> "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in form.render()
    True
    """

    dtype: Element = "f16"
    c_dtype: OutputElement = "f16"
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    block_m: int = 128
    block_n: int = 128
    block_k: int = PANEL
    stages: int = 4
    group: int = 8

    #: What the forms of w2 can choose.
    c_layout: ClassVar[Layout] = "row"
    cluster_m: ClassVar[int] = 1
    cluster_n: ClassVar[int] = 1
    store: ClassVar[str] = "elements"
    split_k: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise KernelConstraintError for the first constraint that does not hold."""
        for holds, constraint in self._constraints():
            if not holds:
                raise KernelConstraintError(f"w1: {constraint}; this form is {self.label}")

    def _constraints(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in ("f16", "bf16"), f"dtype {self.dtype!r} is neither 'f16' nor 'bf16'"
        yield self.c_dtype in (self.dtype, "f32"), f"c_dtype {self.c_dtype!r} is neither {self.dtype!r} nor 'f32'"
        for name in ("a_layout", "b_layout"):
            yield getattr(self, name) in ("row", "column"), f"{name} is neither 'row' nor 'column'"
        rows = self.block_m in (64, 128, 192, 256)
        yield rows, f"block_m = {self.block_m} is not 64, 128, 192 or 256, that is 64 rows for each of 1 to 4 consumers"
        multiple = PANEL if self.b_layout == "row" else 8
        columns = 64 <= self.block_n <= 256 and self.block_n % multiple == 0
        yield columns, f"block_n = {self.block_n} is not a multiple of {multiple} in 64 … 256 (B {self.b_layout}-major)"
        yield self.block_k == PANEL, f"block_k = {self.block_k} is not {PANEL}, the 128 bytes of the swizzle"
        yield 2 <= self.stages <= 16, f"stages = {self.stages} is not in 2 … 16"
        yield self.group >= 1, f"group = {self.group} is below 1"
        most = SM_REGISTERS // self.threads // 8 * 8
        fits = self.registers <= min(most, 255)
        yield fits, f"{self.registers} registers a thread exceed the {most} that {self.threads} threads can have"
        yield (
            self.dynamic_shared_bytes <= SHARED_LIMIT,
            f"{self.dynamic_shared_bytes} bytes of shared memory exceed a block's {SHARED_LIMIT}; take fewer stages",
        )

    # --- geometry

    @property
    def label(self) -> str:
        """For instance ``"128x128x64 s4 g8 f16->f16 row/row"``."""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} s{self.stages} g{self.group} "
            f"{self.dtype}->{self.c_dtype} {self.a_layout}/{self.b_layout}"
        )

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, each with 64 rows of the tile."""
        return self.block_m // 64

    @property
    def threads(self) -> int:
        """Threads in a block: the consumers' and the producer warp."""
        return 128 * self.consumers + 32

    @property
    def accumulators(self) -> int:
        """FP32 accumulators of a consumer thread: 64 rows of ``block_n`` columns on 128 threads."""
        return self.block_n // 2

    @property
    def registers(self) -> int:
        """Registers that a thread needs, by estimate."""
        return self.accumulators + ADDRESS_REGISTERS

    @property
    def a_bytes(self) -> int:
        """Bytes of a stage's tile of A."""
        return 2 * self.block_m * self.block_k

    @property
    def b_bytes(self) -> int:
        """Bytes of a stage's tile of B."""
        return 2 * self.block_n * self.block_k

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage, a multiple of the swizzle's period."""
        return self.a_bytes + self.b_bytes

    @property
    def barriers_offset(self) -> int:
        """Where the full barriers lie in shared memory; the empty ones follow them."""
        return self.stages * self.stage_bytes

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring and two barriers of 8 bytes to each stage."""
        return self.barriers_offset + 16 * self.stages

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM holds at a time, by shared memory and by registers; the assembler is told so."""
        by_memory = (SHARED_LIMIT + SHARED_RESERVED) // (self.dynamic_shared_bytes + SHARED_RESERVED)
        return max(1, min(by_memory, SM_REGISTERS // (self.threads * self.registers)))

    # --- tensor maps: dims and boxes are (inner, outer, batch), the inner dimension is the contiguous one

    @property
    def a_transposed(self) -> bool:
        """Whether M is A's contiguous dimension, ``wgmma``'s imm-trans-a."""
        return self.a_layout == "column"

    @property
    def b_transposed(self) -> bool:
        """Whether N is B's contiguous dimension, ``wgmma``'s imm-trans-b."""
        return self.b_layout == "row"

    @property
    def map_a_box(self) -> tuple[int, int, int]:
        """Elements of a box of A: (K, M, batch), or (M, K, batch) for a column-major A."""
        return (PANEL, self.block_k if self.a_transposed else self.block_m, 1)

    @property
    def map_b_box(self) -> tuple[int, int, int]:
        """Elements of a box of B: (K, N, batch), or (N, K, batch) for a row-major B."""
        return (PANEL, self.block_k if self.b_transposed else self.block_n, 1)

    @property
    def map_c_box(self) -> None:
        """None: C has no tensor map, its 128 bytes are zeros."""

    @property
    def map_c_swizzle(self) -> str:
        """``"none"``."""
        return "none"

    @property
    def a_boxes(self) -> int:
        """Copies that bring a tile of A."""
        return self.block_m // PANEL if self.a_transposed else 1

    @property
    def b_boxes(self) -> int:
        """Copies that bring a tile of B."""
        return self.block_n // PANEL if self.b_transposed else 1

    # --- wgmma descriptors, in bytes (PTX ISA, "Matrix Descriptor Format" of wgmma)

    @property
    def a_leading(self) -> int:
        """Leading dimension offset of A: not used, as a warpgroup's 64 rows are one box or 128-byte rows."""
        return 16

    @property
    def b_leading(self) -> int:
        """Leading dimension offset of B: from box to box where N is contiguous, else not used."""
        return 2 * PANEL * self.block_k if self.b_transposed else 16

    @property
    def a_step(self) -> int:
        """From one 16 of k of A to the next: 16 rows of 128 bytes where M is contiguous, else within a row."""
        return 16 * 2 * PANEL if self.a_transposed else 16 * 2

    @property
    def b_step(self) -> int:
        """The same of B."""
        return 16 * 2 * PANEL if self.b_transposed else 16 * 2

    @property
    def descriptor_high(self) -> int:
        """Upper half of both descriptors: stride offset of 8 rows in 16 bytes, swizzle code 1 (128 bytes) at bit 62."""
        return 1 << 30 | SWIZZLE_PERIOD // 16

    # --- what the template names by type or layout

    @property
    def a_inner(self) -> str:
        """A's contiguous dimension."""
        return "m" if self.a_transposed else "k"

    @property
    def b_inner(self) -> str:
        """B's contiguous dimension."""
        return "n" if self.b_transposed else "k"

    @property
    def c_bytes(self) -> int:
        """Bytes of an element of C."""
        return 4 if self.c_dtype == "f32" else 2

    @property
    def c_shift(self) -> int:
        """Its logarithm to base 2."""
        return self.c_bytes // 2

    # --- launch

    def tiles(self, m: int, n: int) -> int:
        """Tiles of C."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def work_units(self, m: int, n: int, batch: int = 1, splits: int = 1) -> int:
        """Tiles of all products. ``splits`` is 1, as this kernel doesn't split K."""
        return self.tiles(m, n) * batch * splits

    def grid(self, m: int, n: int, batch: int = 1) -> tuple[int, int, int]:
        """Blocks: one for each tile of C in x, one for each product in z.

        Raises
        ------
        KernelConstraintError : for dimensions whose indices don't fit.
        """
        if not (1 <= m <= MAX_DIMENSION and 1 <= n <= MAX_DIMENSION):
            raise KernelConstraintError(f"w1: M = {m} and N = {n} must lie in 1 … {MAX_DIMENSION}")
        if not 1 <= batch <= MAX_BATCH:
            raise KernelConstraintError(f"w1: {batch} products; one launch takes 1 … {MAX_BATCH}, so take several")
        tiles = self.tiles(m, n)
        if tiles >= 2**31:
            raise KernelConstraintError(f"w1: {m}x{n} has {tiles} tiles, and a grid has at most {2**31 - 1} blocks")
        return tiles, 1, batch

    def render(self) -> str:
        """The PTX text of this form; its entry is ``w1``."""
        return render(self)


@functools.lru_cache(maxsize=64)
def render(parameters: W1Parameters) -> str:
    """The PTX text of one form of w1."""
    return render_template("w1.ptx.j2", p=parameters)
