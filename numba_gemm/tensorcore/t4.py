"""t4 pipelined: the host half of ``ptx/t4.ptx.j2``, the fastest kernel without ``wgmma``.

The kernel is a template: tile shapes, stages, layouts and types are fixed when its text is rendered. A
:class:`T4Parameters` names one form of it; it checks its own constraints, says how it is launched and renders the
PTX. The schedule of a k-block, that is in which order fragments are loaded, tensor-core instructions issued and
copies started, is decided here; the template spells it out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore.source import Element, Layout, OutputElement
from numba_gemm.tensorcore.t4_operand import PANEL, Copy, Operand
from numba_gemm.tensorcore.templates import render_template

#: Dimensions up to here keep every index of the kernel below 2³¹.
MAX_DIMENSION = 2**31 - 4096
#: Registers for addresses and counters beside accumulators and fragments.
ADDRESS_REGISTERS = 28
#: Shared memory that a block can have, by compute capability; 8.6, 8.9 and 12.x have the least.
SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
SMALLEST_SHARED_LIMIT = 99 * 1024

#: The first compute capability that has TMA.
TMA_SINCE = (9, 0)


class Event(NamedTuple):
    """One entry of the schedule: an ``mma`` (m, n), an ``ldmatrix`` (operand, tile) or a ``copy``.

    With TMA there are no copies: warps ``release`` a stage, and ``ask`` whether the next one is full.
    """

    kind: Literal["mma", "ldmatrix", "copy", "ask", "release"]
    m: int = 0
    n: int = 0
    operand: str = ""
    copy: Copy | None = None


@dataclass(frozen=True)
class T4Parameters:
    """One form of the kernel: ``C = alpha·A@B + beta·C``, or with ``split_k`` one part of k into a workspace.

    Attributes
    ----------
    dtype, c_dtype : elements of A and B, and of C (with ``split_k``, of the C that ``splitk_reduce`` writes).
    block_m, block_n, block_k : the tile of C of one block, and the depth of one stage.
    warp_m, warp_n : the part of it that one warp computes.
    stages : stages of the ring in shared memory.
    group_m : rows of tiles that are walked together, column by column, so that neighbours share L2.
    a_layout, b_layout : ``"row"``: M×K or K×N with contiguous rows; ``"column"``: contiguous columns.
    aligned_a, aligned_b : pointer and rows (columns) on 16 bytes; otherwise elements are loaded one by one.
    split_k : write FP32 partial sums of ``k_per_split`` of K to the workspace.
    blocks : launch at most this many blocks (of each split), which then take tiles in turn, so that the first copies
        of one tile run while another is computed and stored; 0: a block for each tile. See :meth:`resident_blocks`.
    copies : ``"async"``: every thread copies its pieces by ``cp.async``, on any GPU since 8.0. ``"tma"``: one thread
        has whole tiles copied by the tensor memory accelerator, on GPUs since 9.0, for factors that are both aligned.

    Raises
    ------
    KernelConstraintError : names the constraint that does not hold.
    """

    dtype: Element = "f16"
    c_dtype: OutputElement = "f16"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warp_m: int = 64
    warp_n: int = 64
    stages: int = 4
    group_m: int = 8
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    aligned_a: bool = True
    aligned_b: bool = True
    split_k: bool = False
    blocks: int = 0
    copies: Literal["async", "tma"] = "async"

    def __post_init__(self) -> None:
        for holds, constraint in self._constraints():
            if not holds:
                raise KernelConstraintError(f"t4: {constraint}; this form is {self.label}")

    def _constraints(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in ("f16", "bf16"), f"dtype {self.dtype!r} is neither 'f16' nor 'bf16'"
        yield self.c_dtype in (self.dtype, "f32"), f"c_dtype {self.c_dtype!r} is neither {self.dtype!r} nor 'f32'"
        for name in ("a_layout", "b_layout"):
            yield getattr(self, name) in ("row", "column"), f"{name} is neither 'row' nor 'column'"
        yield self.block_k in (32, 64), f"block_k = {self.block_k} is neither 32 nor 64"
        yield 2 <= self.stages <= 8, f"stages = {self.stages} is not in 2 … 8"
        yield self.blocks >= 0, f"blocks = {self.blocks} is negative"
        yield self.group_m >= 1, f"group_m = {self.group_m} is below 1"
        for side in ("m", "n"):
            block, warp = getattr(self, f"block_{side}"), getattr(self, f"warp_{side}")
            yield block >= PANEL and block % PANEL == 0, f"block_{side} = {block} is not a multiple of {PANEL}"
            yield warp >= 16 and warp % 16 == 0, f"warp_{side} = {warp} is not a multiple of 16"
            yield block % warp == 0, f"block_{side} = {block} is not a multiple of warp_{side} = {warp}"
        yield self.warp_n % 32 == 0, f"warp_n = {self.warp_n} is not a multiple of 32"
        yield self.warps in (2, 4, 8), f"{self.warps} warps are not 2, 4 or 8"
        for operand in self.operands:
            rows = operand.rows_per_copy
            depth = operand.extent if operand.k_contiguous else self.block_k
            whole = depth % rows == 0 and rows % 8 == 0
            yield whole or self.tma, f"{self.threads} threads don't divide a stage of {operand.matrix} evenly"
        yield self.copies in ("async", "tma"), f"copies = {self.copies!r} is neither 'async' nor 'tma'"
        aligned = self.aligned_a and self.aligned_b
        yield not self.tma or max(self.block_m, self.block_n) <= 256, "TMA copies boxes of at most 256 rows"
        yield aligned or not self.tma, "TMA needs A and B on 16 bytes: use copies = 'async'"
        need = self.accumulators + self.fragment_registers + ADDRESS_REGISTERS
        yield (
            need <= 255,
            f"{self.warp_m}x{self.warp_n} warp tiles need {need} registers a thread, and there are 255",
        )
        strips = self.warps * 16 * self.epilogue_columns * 4
        room = strips if self.tma else self.stage_bytes
        yield strips <= room, f"the epilogue's {strips} bytes exceed a stage of {self.stage_bytes}"
        largest = max(SHARED_LIMIT.values())
        yield (
            self.dynamic_shared_bytes <= largest,
            f"{self.dynamic_shared_bytes} bytes of shared memory exceed the {largest} that any GPU has",
        )

    # --- geometry

    @property
    def label(self) -> str:
        """For instance ``"128x256x32 64x64 s4 f16 row/row"``."""
        flags = "" if self.aligned_a and self.aligned_b else f" aligned {self.aligned_a:d}{self.aligned_b:d}"
        flags += " split-k" if self.split_k else ""
        flags += f" {self.blocks} blocks" if self.blocks else ""
        flags += " tma" if self.tma else ""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} {self.warp_m}x{self.warp_n} s{self.stages} g{self.group_m} "
            f"{self.dtype}->{self.c_dtype} {self.a_layout}/{self.b_layout}{flags}"
        )

    @property
    def warps_m(self) -> int:
        return self.block_m // self.warp_m

    @property
    def warps_n(self) -> int:
        return self.block_n // self.warp_n

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def tma(self) -> bool:
        return self.copies == "tma"

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return 32 * self.warps

    @property
    def tiles_m(self) -> int:
        """16-row MMA tiles in a warp tile."""
        return self.warp_m // 16

    @property
    def tiles_n(self) -> int:
        """8-column MMA tiles in a warp tile."""
        return self.warp_n // 8

    @property
    def steps(self) -> int:
        """16-steps of k in a stage."""
        return self.block_k // 16

    @property
    def accumulators(self) -> int:
        """FP32 accumulators of a thread."""
        return self.tiles_m * self.tiles_n * 4

    @property
    def fragment_registers(self) -> int:
        """Registers of the fragments, both buffers."""
        return 2 * (4 * self.tiles_m + 2 * self.tiles_n)

    @property
    def registers(self) -> int:
        """Registers that a thread needs, by estimate. Beyond 255 the main loop would spill some to memory.

        It has a pointer for each copy of an operand whose k is contiguous.
        """
        pointers = 0
        if self.aligned_a and self.aligned_b and not self.tma:
            pointers = sum(2 * len(operand.copies) for operand in self.operands if operand.k_contiguous)
        return self.accumulators + self.fragment_registers + pointers + ADDRESS_REGISTERS

    @property
    def operands(self) -> tuple[Operand, Operand]:
        a_k, b_k = self.a_layout == "row", self.b_layout == "column"
        a_bytes = self.block_m * self.block_k * 2
        shared = (self.block_k, self.threads)
        return (
            Operand("a", a_k, self.aligned_a, self.block_m, self.warp_m, *shared, 0),
            Operand("b", b_k, self.aligned_b, self.block_n, self.warp_n, *shared, a_bytes),
        )

    @property
    def shared_write_address(self) -> bool:
        """Whether a thread's pieces of A and B lie at the same place in their tiles: one address then serves both."""
        a, b = self.operands
        return self.block_k == 64 or a.k_contiguous == b.k_contiguous

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * 2

    @property
    def output(self) -> OutputElement:
        """What the kernel stores: C's elements, or FP32 partial sums."""
        return "f32" if self.split_k else self.c_dtype

    @property
    def epilogue_columns(self) -> int:
        """Columns of the 16-row strips in which a warp's accumulators pass through shared memory.

        The strips lie in the last stage of the ring, or behind it where TMA fills the ring for the next tile meanwhile.
        """
        if self.tma:
            room = max(SHARED_LIMIT.values()) - self.stages * self.stage_bytes - 16 * self.stages
        else:
            room = self.stage_bytes
        return 64 if self.warp_n % 64 == 0 and self.warps * 16 * 64 * 4 <= room else 32

    @property
    def epilogue_strips(self) -> int:
        """Strips of FP32 for each warp: two take turns if the stage has room, else one."""
        return 2 if not self.tma and self.warps * 2 * 16 * self.epilogue_columns * 4 <= self.stage_bytes else 1

    @property
    def strips_offset(self) -> int:
        """Where in shared memory the strips begin."""
        return (self.stages if self.tma else self.stages - 1) * self.stage_bytes

    @property
    def barriers_offset(self) -> int:
        """Where in shared memory the mbarriers begin: a full and then an empty one for each stage."""
        return self.strips_offset + self.warps * self.epilogue_strips * 16 * self.epilogue_columns * 4

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, whose last stage the epilogue uses too unless TMA fills it."""
        return self.barriers_offset + 16 * self.stages if self.tma else self.stages * self.stage_bytes

    @property
    def map_a_box(self) -> tuple[int, int, int]:
        """Elements of A that one TMA copy brings, innermost dimension first; the map's last dimension is the batch."""
        return self.operands[0].box

    @property
    def map_b_box(self) -> tuple[int, int, int]:
        return self.operands[1].box

    @property
    def map_a_swizzle(self) -> str:
        """How the 16-byte pieces of a box lie in shared memory."""
        return self.operands[0].swizzle

    @property
    def map_b_swizzle(self) -> str:
        return self.operands[1].swizzle

    def fits(self, compute_capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability has the shared memory, and what copies the tiles."""
        if self.tma and compute_capability < TMA_SINCE:
            return False
        return self.dynamic_shared_bytes <= SHARED_LIMIT.get(compute_capability, SMALLEST_SHARED_LIMIT)

    def blocks_per_sm(self, compute_capability: tuple[int, int]) -> int:
        """Blocks that an SM holds at a time, by shared memory (1 KB of it is the system's) and by registers."""
        limit = SHARED_LIMIT.get(compute_capability, SMALLEST_SHARED_LIMIT)
        registers = -(-(self.accumulators + self.fragment_registers + 60) // 8) * 8
        return max(1, min((limit + 1024) // (self.dynamic_shared_bytes + 1024), 65536 // (self.threads * registers)))

    def resident_blocks(self, sm_count: int, compute_capability: tuple[int, int], splits: int = 1) -> int:
        """What ``blocks`` should be: as many as the GPU holds at a time."""
        return max(1, sm_count * self.blocks_per_sm(compute_capability) // splits)

    def grid(self, m: int, n: int, splits: int = 1) -> tuple[int, int, int]:
        """Blocks: for the tiles of C in x, for the splits of K in y.

        Raises
        ------
        KernelConstraintError : for dimensions whose indices don't fit.
        """
        if not (1 <= m <= MAX_DIMENSION and 1 <= n <= MAX_DIMENSION):
            raise KernelConstraintError(f"t4: M = {m} and N = {n} must lie in 1 … {MAX_DIMENSION}")
        if not 1 <= splits <= 65535 or (splits > 1 and not self.split_k):
            raise KernelConstraintError(f"t4: {splits} splits; this form takes {'65535' if self.split_k else 'one'}")
        tiles = self.tiles(m, n)
        if tiles + self.blocks >= 2**31:
            raise KernelConstraintError(f"t4: {m}x{n} has {tiles} tiles, and a grid has at most {2**31 - 1} blocks")
        return min(tiles, self.blocks or tiles), splits, 1

    def tiles(self, m: int, n: int) -> int:
        """Tiles of C."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def k_per_split(self, k: int, splits: int) -> int:
        """Depth of one split: whole k-blocks, the same for all but the last.

        Raises
        ------
        KernelConstraintError : for a K whose indices don't fit.
        """
        check_depth(k)
        per_split = -(-k // splits)
        return -(-per_split // self.block_k) * self.block_k

    # --- schedule

    @property
    def fill_step(self) -> int:
        """The 16-step after which the first warp has the next k-block copied; of four, the third is the fastest."""
        return self.steps - 2

    def copy_plan(self) -> list[list[Copy]]:
        """The copies of one k-block by the 16-step during which they start.

        The stage is free from the barrier in the last step on, so the last step has the first share, and steps 0,
        1, … of the next k-block have the others.
        """
        copies = [copy for operand in self.operands for copy in operand.copies if not self.tma]
        share = -(-len(copies) // self.steps)
        parts = [copies[i * share : (i + 1) * share] for i in range(self.steps)]
        return parts[1:] + parts[:1]

    def schedule(self, step: int) -> list[Event]:
        """What one 16-step issues, in order: MMAs column by column, back and forth, with loads and copies between them.

        The loads of the next step's fragments are spread over the first half. The copies come behind them: before each
        copy that follows a load the assembler puts three empty instructions.
        """
        mmas = [
            Event("mma", m if n % 2 == 0 else self.tiles_m - 1 - m, n)
            for n in range(self.tiles_n)
            for m in range(self.tiles_m)
        ]
        loads = [Event("ldmatrix", m=i, operand="a") for i in range(self.tiles_m)]
        loads[1:1] = [Event("ldmatrix", n=i, operand="b") for i in range(self.tiles_n // 2)]
        copies = [Event("copy", operand=copy.operand, copy=copy) for copy in self.copy_plan()[step]]
        count = len(mmas)
        before: list[list[Event]] = [[] for _ in mmas]
        for i, load in enumerate(loads):
            before[count * i // (2 * len(loads))].append(load)
        for i, start in enumerate(copies):
            before[min(count - 1, int(count * (0.55 + 0.4 * i / max(1, len(copies) - 1))))].append(start)
        if self.tma:
            # Both behind the loads, which the assembler doesn't move across them.
            if step == self.steps - 1:
                before[count // 2].append(Event("release"))
            elif step == self.steps - 2:
                before[count // 2].append(Event("ask"))
        return [event for i, mma in enumerate(mmas) for event in (*before[i], mma)]

    def render(self) -> str:
        """The PTX text of this form."""
        return render(self)


@functools.lru_cache(maxsize=64)
def render(parameters: T4Parameters) -> str:
    """The PTX text of one form of t4; its entry is ``t4``."""
    a, b = parameters.operands  # the number of blocks doesn't appear in the text
    file = "t4_tma.ptx.j2" if parameters.tma else "t4.ptx.j2"
    return render_template(file, p=parameters, a=a, b=b, plan=parameters.copy_plan())


def check_depth(k: int) -> None:
    """Raise KernelConstraintError if K is so deep that indices along it don't fit."""
    if not 0 <= k <= MAX_DIMENSION:
        raise KernelConstraintError(f"t4: K = {k} must lie in 0 … {MAX_DIMENSION}")
