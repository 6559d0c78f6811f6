"""w2 warp-specialised: the host half of ``ptx/w2.ptx.j2``, the persistent Hopper kernel.

The kernel is a template: tile, stages, schedule, cluster, layouts and types are fixed when its text is rendered. A
:class:`W2Parameters` names one form of it, checks its constraints, says how it is launched and what its tensor maps
must look like, and renders the PTX.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore.source import Element, Layout, OutputElement
from numba_gemm.tensorcore.templates import render_template

#: Bytes of a row of a swizzled box, and of the period after which the swizzle repeats: what tiles are aligned to.
ROW, PERIOD = 128, 1024
#: Shared memory that a block can have on Hopper.
SHARED_LIMIT = 227 * 1024
#: Dimensions up to here keep every index of the kernel below 2³¹.
MAX_DIMENSION = 2**31 - 4096
#: What ``setmaxnreg`` gives the producer's and the consumers' threads, by the number of consumers. With one, a thread
#: has 255 registers from the start. The sum over all threads is that of the launch: 168 for 384, 128 for 512.
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
#: Accumulators that a consumer's thread can hold beside its addresses.
ACCUMULATOR_LIMIT = {1: 192, 2: 192, 3: 96}


class Operand(NamedTuple):
    """How one operand lies in a stage: where, and which copies bring it.

    Attributes
    ----------
    k_major : rows of 64 k-elements; otherwise panels of 64 rows or columns, each 64 deep in k.
    rows : rows (K-major) or multiples of 64 (panels) that the stage holds.
    sharers : CTAs of the cluster that read the same tile, each of which loads and multicasts its part.
    offset : bytes from the start of the stage.
    """

    name: str
    k_major: bool
    rows: int
    sharers: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes in a stage."""
        return self.rows * ROW

    @property
    def panels(self) -> int:
        """Panels of 64 rows or columns, where K isn't contiguous."""
        return self.rows // 64

    @property
    def shares_by_panel(self) -> bool:
        """Whether each CTA brings some of the panels; otherwise each brings a part of the depth of every panel."""
        return self.panels % self.sharers == 0

    @property
    def box(self) -> tuple[int, int, int]:
        """The box of the tensor map, contiguous dimension first."""
        if self.k_major:
            return 64, self.rows // self.sharers, 1
        return 64, 64 if self.shares_by_panel else 64 // self.sharers, 1

    @property
    def copies(self) -> int:
        """Copies that one CTA starts for a stage."""
        if self.k_major:
            return 1
        return self.panels // self.sharers if self.shares_by_panel else self.panels

    @property
    def leading_units(self) -> int:
        """The descriptor's leading offset, in 16 bytes: from panel to panel; not used where K is contiguous."""
        return 1 if self.k_major else 64 * ROW // 16

    @property
    def k_step_units(self) -> int:
        """From one 16-step of k to the next, in 16 bytes."""
        return 2 if self.k_major else 16 * ROW // 16


@dataclass(frozen=True)
class W2Parameters:
    """One form of the kernel: ``C = alpha·A@B + beta·C``, or with ``split_k`` FP32 parts of it into a workspace.

    Attributes
    ----------
    dtype, c_dtype : elements of A and B, and of C (with ``split_k``, of the C that ``splitk_reduce`` writes).
    a_layout, b_layout, c_layout : ``"row"``: contiguous rows; ``"column"``: contiguous columns.
    block_m, block_n, block_k : the tile of C of one CTA (of one consumer, if they play ping-pong), and the depth of
        one stage, which is 64: 128 bytes, as wide as a swizzle.
    stages : stages of the ring in shared memory.
    consumers : warpgroups that multiply; one more loads.
    schedule : ``"cooperative"``: the consumers share a tile; ``"pingpong"``: each has its own.
    cluster_m, cluster_n : CTAs of a cluster, 1 or 2, at most one of them 2. CTAs along M share B's tile, along N A's.
    group : rows of tiles that are walked together, column by column, so that CTAs that run together share L2.
    store : ``"tma"``: C goes by tensor map; ``"elements"``: any address and leading dimension.
    split_k : write FP32 partial sums to the workspace.
    keep : ``"a"`` or ``"b"``: ask L2 to keep that operand's lines longest and to drop the other one's first; ``""``:
        treat both alike.

    Raises
    ------
    KernelConstraintError : names the constraint that does not hold.
    """

    dtype: Element = "f16"
    c_dtype: OutputElement = "f16"
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    c_layout: Layout = "row"
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    consumers: int = 2
    schedule: Literal["cooperative", "pingpong"] = "cooperative"
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 8
    store: Literal["tma", "elements"] = "tma"
    split_k: bool = False
    keep: Literal["", "a", "b"] = ""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise KernelConstraintError for what the kernel can't be; done when the object is made."""
        for holds, constraint in self._constraints():
            if not holds:
                raise KernelConstraintError(f"w2: {constraint}; this form is {self.label}")

    def _constraints(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in ("f16", "bf16"), f"dtype {self.dtype!r} is neither 'f16' nor 'bf16'"
        yield self.c_dtype in (self.dtype, "f32"), f"c_dtype {self.c_dtype!r} is neither {self.dtype!r} nor 'f32'"
        for name in ("a_layout", "b_layout", "c_layout"):
            yield getattr(self, name) in ("row", "column"), f"{name} is neither 'row' nor 'column'"
        yield self.block_k == 64, f"block_k = {self.block_k}; use 64, as wide as the swizzle"
        yield self.schedule in ("cooperative", "pingpong"), f"schedule {self.schedule!r}"
        yield self.store in ("tma", "elements"), f"store {self.store!r} is neither 'tma' nor 'elements'"
        yield self.consumers in REGISTERS, f"{self.consumers} consumers are not 1, 2 or 3"
        ping_pong = self.schedule == "pingpong"
        yield not ping_pong or self.consumers == 2, "ping-pong needs two consumers"
        yield self.block_m in (64, 128, 192, 256), f"block_m = {self.block_m} is not 64, 128, 192 or 256"
        widths = (8, 16, 32, 64, 128, 192, 256)
        yield self.block_n in widths, f"block_n = {self.block_n} is not one of {', '.join(map(str, widths))}"
        yield 2 <= self.stages <= 16, f"stages = {self.stages} is not in 2 … 16"
        yield self.keep in ("", "a", "b"), f"keep {self.keep!r} is neither 'a' nor 'b' nor ''"
        yield self.group >= 1, f"group = {self.group} is below 1"
        sizes = (self.cluster_m, self.cluster_n)
        yield sizes in ((1, 1), (2, 1), (1, 2)), f"clusters of {sizes[0]}x{sizes[1]} are not 1x1, 2x1 or 1x2"
        whole = self.warpgroup_m % 64 == 0 and self.warpgroup_n in widths
        yield whole, f"{self.consumers} consumers don't divide the tile into parts of 64 rows"
        cut = self.warpgroup_n < self.block_n and self.b_layout == "row" and self.warpgroup_n % 64
        yield not cut, "consumers side by side need 64 columns each of a row-major B: use fewer consumers"
        limit = ACCUMULATOR_LIMIT[self.consumers]
        yield self.accumulators <= limit, f"{self.accumulators} accumulators a thread exceed {limit}"
        for operand in self.operands:
            shares = not operand.k_major or operand.rows // operand.sharers % 8 == 0
            yield shares, f"a cluster's share of {operand.name.upper()}'s tile is no multiple of 8 rows"
        yield (
            self.store == "elements" or self.output != "f32",
            "FP32 (C, or the partial sums of split_k) is stored straight from the accumulators: use store='elements'",
        )
        yield (
            self.dynamic_shared_bytes <= SHARED_LIMIT,
            f"{self.dynamic_shared_bytes} bytes of shared memory exceed {SHARED_LIMIT}: use fewer stages",
        )

    # --- geometry

    @property
    def label(self) -> str:
        """For instance ``"128x256x64 s4 cooperative 2x1 g8 bf16->bf16 row/column/row tma"``."""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} s{self.stages} {self.schedule} of {self.consumers} "
            f"{self.cluster_m}x{self.cluster_n} g{self.group} {self.dtype}->{self.c_dtype} "
            f"{self.a_layout}/{self.b_layout}/{self.c_layout} {self.store}{' split-k' if self.split_k else ''}"
            f"{f' keeps {self.keep}' if self.keep else ''}"
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup that loads, and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def along_n(self) -> bool:
        """Whether cooperating consumers lie side by side, for want of rows."""
        return self.schedule == "cooperative" and self.block_m % (64 * self.consumers) != 0

    @property
    def warpgroup_m(self) -> int:
        """Rows of one consumer's part of the tile."""
        return self.block_m if self.schedule == "pingpong" or self.along_n else self.block_m // self.consumers

    @property
    def warpgroup_n(self) -> int:
        """Columns of one consumer's part of the tile: the N of its ``wgmma``."""
        return self.block_n // self.consumers if self.along_n else self.block_n

    @property
    def tiles_m(self) -> int:
        """``wgmma`` tiles of 64 rows of one consumer."""
        return self.warpgroup_m // 64

    @property
    def accumulators(self) -> int:
        """FP32 accumulators of a consumer's thread."""
        return self.warpgroup_m * self.warpgroup_n // 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers that ``setmaxnreg`` leaves a thread of the producer and gives one of a consumer; 0: as launched."""
        return REGISTERS[self.consumers]

    @property
    def operands(self) -> tuple[Operand, Operand]:
        b_k = self.b_layout == "column"
        b_rows = self.block_n if b_k else -(-self.block_n // 64) * 64
        return (
            Operand("a", self.a_layout == "row", self.block_m, self.cluster_n, 0),
            Operand("b", b_k, b_rows, self.cluster_m, self.block_m * ROW),
        )

    @property
    def output(self) -> OutputElement:
        """What the kernel stores: C's elements, or FP32 partial sums."""
        return "f32" if self.split_k else self.c_dtype

    @property
    def transposed(self) -> bool:
        """Whether what is stored, C or the partial sums, is contiguous along M."""
        return self.c_layout == "column"

    # --- shared memory

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: what its full barrier counts."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def panel(self) -> tuple[int, int]:
        """Rows and columns, as stored, of the panels in which a consumer's 16-bit C passes through shared memory."""
        if self.transposed:
            return min(64, self.warpgroup_n), 64
        return 64, min(64, self.warpgroup_n)

    @property
    def panels(self) -> int:
        """Panels of a consumer's part of a tile."""
        return self.tiles_m * max(1, self.warpgroup_n // 64)

    @property
    def panel_bytes(self) -> int:
        rows, columns = self.panel
        return -(-rows * columns * 2 // PERIOD) * PERIOD

    @property
    def buffers(self) -> int:
        """Panels that a consumer has room for: while one is stored the next is converted. None for FP32."""
        return 0 if self.output == "f32" else min(2, self.panels)

    @property
    def staging_offset(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def barriers_offset(self) -> int:
        return self.staging_offset + self.consumers * self.buffers * self.panel_bytes

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: padding to a period of the swizzle, ring, staging, two barriers a stage."""
        return PERIOD + self.barriers_offset + 16 * self.stages

    # --- tensor maps

    @property
    def map_a_box(self) -> tuple[int, int, int]:
        """Box of A's map, contiguous dimension first; a CTA's share, in a cluster along N."""
        return self.operands[0].box

    @property
    def map_b_box(self) -> tuple[int, int, int]:
        """Box of B's map, contiguous dimension first; a CTA's share, in a cluster along M."""
        return self.operands[1].box

    @property
    def map_c_box(self) -> tuple[int, int, int]:
        """Box of C's map, contiguous dimension first. Of use only with ``store="tma"``."""
        rows, columns = self.panel
        return columns, rows, 1

    @property
    def map_c_swizzle(self) -> str:
        """Swizzle of C's map: as wide as a row of the box (``"none"`` for 16 bytes)."""
        width = 2 * self.panel[1]
        return "none" if width == 16 else f"{width}B"

    # --- launch

    def tiles(self, m: int, n: int) -> int:
        """Tiles of C that clusters take, one for each CTA: a multiple of the cluster's size."""
        along_m = -(-m // (self.block_m * self.cluster_m))
        return along_m * -(-n // (self.block_n * self.cluster_n)) * self.cluster

    def work_units(self, m: int, n: int, batch: int = 1, splits: int = 1) -> int:
        """CTAs that would have one tile each: tiles times splits times products; a multiple of the cluster's size.

        Raises
        ------
        KernelConstraintError : for dimensions whose indices don't fit.
        """
        if not (1 <= m <= MAX_DIMENSION and 1 <= n <= MAX_DIMENSION):
            raise KernelConstraintError(f"w2: M = {m} and N = {n} must lie in 1 … {MAX_DIMENSION}")
        if splits < 1 or (splits > 1 and not self.split_k):
            raise KernelConstraintError(f"w2: {splits} splits; this form takes {'1 or more' if self.split_k else '1'}")
        units = self.tiles(m, n) * splits * batch
        if units >= 2**30:
            raise KernelConstraintError(f"w2: {units} units of work exceed {2**30 - 1}; split the batch")
        return units

    def blocks(self, units: int, resident: int) -> int:
        """CTAs to launch for so many units of work where ``resident`` CTAs run at a time."""
        return min(units, max(self.cluster, resident // self.cluster * self.cluster))

    def k_blocks_per_split(self, k: int, splits: int) -> int:
        """64-deep k-blocks of each split but the last."""
        k_blocks = -(-k // self.block_k)
        return -(-k_blocks // splits)

    def render(self) -> str:
        """The PTX text of this form; its entry is ``w2``."""
        return render(self)


@functools.lru_cache(maxsize=64)
def render(parameters: W2Parameters) -> str:
    """The PTX text of one form of w2; its entry is ``w2``."""
    a, b = parameters.operands
    return render_template("w2.ptx.j2", p=parameters, a=a, b=b)
