"""What one compiled form of v8 is made for, the constraints that hold between its parameters, and its geometry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from numba_gemm.errors import KernelConstraintError
from numba_gemm.spec import Config, make_config

Layout = Literal["row", "column"]
Mode = Literal["direct", "transposed", "staged"]

#: Floats of a 16-byte access.
VECTOR = 4
WARP = 32
#: Neighbours along k that lanes copy together from an operand whose k is contiguous: a 32-byte sector.
K_LANES = 8
#: Words after each row of a tile that is transposed on its way. A warp writes 8 rows × 4 columns of it word by word, or
#: two rows four apart × 16 columns: 4·row + column are 32 banks either way.
PAD = 4
#: Shared memory that a block can have, by compute capability; the others have the least.
SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
SMALLEST_SHARED_LIMIT = 99 * 1024
#: Registers for addresses and counters beside accumulators, fragments and what is staged.
ADDRESS_REGISTERS = 20


class Copies(NamedTuple):
    """How a block copies its tile of one operand, ``extent`` rows of A (columns of B) by BK of k, into shared memory.

    In shared memory BK rows of ``extent`` words lie ``row_words`` apart. Where they lie so in global memory too, copies
    are ``"direct"``. Where k is contiguous there, they are ``"transposed"`` word by word, or ``"staged"``: loaded into
    registers, 16 bytes at a time, and stored as words.

    A thread takes ``steps_e`` · ``steps_k`` copies of ``width`` words; :meth:`place_of_thread` says where it begins.
    ``e_step`` and ``k_step`` elements lead from there to its next one.
    """

    mode: Mode
    extent: int
    width: int
    lanes: int
    steps_e: int
    steps_k: int
    e_step: int
    k_step: int
    row_words: int

    def place_of_thread(self, thread: int) -> tuple[int, int]:
        """(e, k) of the thread's first copy; the kernel has the same arithmetic."""
        if self.mode == "direct":
            return thread % self.lanes * self.width, thread // self.lanes
        return thread // self.lanes, thread % self.lanes * self.width

    @property
    def staged_words(self) -> int:
        """Registers that a thread stages its copies of one stage in."""
        return self.steps_e * self.steps_k * self.width if self.mode == "staged" else 0


@dataclass(frozen=True)
class V8Parameters:
    """One form of the kernel.

    Attributes
    ----------
    block_m, block_n, block_k : the tile of C of one block, and the depth of one stage.
    warp_m, warp_n : the part of it that one warp computes.
    thread_m, thread_n : the outputs of one thread, in groups of 4×4.
    k_slices : groups of warps that share the tile's k among them, each with accumulators for the whole tile.
    stages : stages of the ring in shared memory.
    parts : runs of steps of k over which the copies of a stage are spread.
    blocks_per_sm : blocks that an SM is to hold at a time, from which the assembler takes its register limit.
    group_m : rows of tiles that are walked together, column by column, so that neighbours share L2.
    a_layout, b_layout : ``"row"`` or ``"column"``.
    a_width, b_width, c_width : elements of one access to A, B and C in global memory: 4 (16 bytes) or 1.

    Raises
    ------
    KernelConstraintError : names the constraint that doesn't hold.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 16
    warp_m: int = 64
    warp_n: int = 64
    thread_m: int = 16
    thread_n: int = 8
    k_slices: int = 1
    stages: int = 2
    parts: int = 4
    blocks_per_sm: int = 2
    group_m: int = 8
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    a_width: int = VECTOR
    b_width: int = VECTOR
    c_width: int = VECTOR

    def __post_init__(self) -> None:
        for holds, constraint in self._constraints():
            if not holds:
                raise KernelConstraintError(f"v8: {constraint}; this form is {self.label}")

    def _constraints(self) -> Iterator[tuple[bool, str]]:
        for name in ("a_layout", "b_layout"):
            yield getattr(self, name) in ("row", "column"), f"{name} is neither 'row' nor 'column'"
        for name in ("a_width", "b_width", "c_width"):
            yield getattr(self, name) in (1, VECTOR), f"{name} = {getattr(self, name)} is neither 1 nor {VECTOR}"
        yield self.stages >= 2, f"stages = {self.stages} is below 2"
        yield self.group_m >= 1, f"group_m = {self.group_m} is below 1"
        yield self.blocks_per_sm >= 1, f"blocks_per_sm = {self.blocks_per_sm} is below 1"
        for side in ("m", "n"):
            block, warp, thread = (getattr(self, f"{part}_{side}") for part in ("block", "warp", "thread"))
            yield block > 0 and block % WARP == 0, f"block_{side} = {block} is not a multiple of {WARP}"
            yield warp > 0 and block % warp == 0, f"block_{side} = {block} is not a multiple of warp_{side} = {warp}"
            yield thread in (4, 8, 16), f"thread_{side} = {thread} is not 4, 8 or 16"
            lanes = warp // thread
            yield warp % thread == 0 and lanes in (2, 4, 8, 16), f"warp_{side} = {warp} is not 2, 4, 8 or 16 threads"
        yield (
            self.lanes_m * self.lanes_n == WARP,
            f"{self.warp_m}x{self.warp_n} warp tiles of {self.thread_m}x{self.thread_n} threads need "
            f"{self.lanes_m * self.lanes_n} lanes, and a warp has {WARP}",
        )
        yield self.k_slices in (1, 2, 4, 8), f"k_slices = {self.k_slices} is not 1, 2, 4 or 8"
        yield (
            self.block_k > 0 and self.block_k % K_LANES == 0 and self.block_k % (2 * self.k_slices) == 0,
            f"block_k = {self.block_k} is not a multiple of {K_LANES} and of 2 · k_slices",
        )
        steps = self.block_k // self.k_slices
        yield self.parts in (1, 2, 4) and steps % self.parts == 0, f"parts = {self.parts} don't divide {steps} steps"
        yield WARP <= self.threads <= 1024, f"{self.threads} threads are not in {WARP} … 1024"
        for name, copies in (("A", self.a_copies), ("B", self.b_copies)):
            whole = copies.steps_k * copies.k_step == self.block_k and copies.steps_e * copies.e_step == copies.extent
            each = copies.steps_e * copies.steps_k * copies.width
            yield (
                whole and each * self.threads == copies.extent * self.block_k,
                f"{self.threads} threads don't divide a stage of {name} evenly",
            )
            yield copies.mode != "staged" or self.parts > 1, f"{name} is staged in registers, and parts is 1"
        yield (
            self.registers <= min(255, 65536 // (self.threads * self.blocks_per_sm)),
            f"{self.thread_m}x{self.thread_n} outputs need {self.registers} registers a thread, too many for "
            f"{self.blocks_per_sm} blocks of {self.threads} threads",
        )
        largest = max(SHARED_LIMIT.values())
        yield (
            self.shared_bytes <= largest,
            f"{self.shared_bytes} bytes of shared memory exceed the {largest} that any GPU has",
        )

    @property
    def label(self) -> str:
        """For instance ``"128x128x16 64x64 16x8 s2 row/row 444"``."""
        slices = f" k{self.k_slices}" if self.k_slices > 1 else ""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} {self.warp_m}x{self.warp_n} {self.thread_m}x{self.thread_n}"
            f"{slices} s{self.stages} p{self.parts} b{self.blocks_per_sm} g{self.group_m} "
            f"{self.a_layout}/{self.b_layout} {self.a_width}{self.b_width}{self.c_width}"
        )

    @property
    def config(self) -> Config:
        """The parameters as a config of the library's kernels."""
        return make_config(**asdict(self))

    @classmethod
    def of(cls, config: Config) -> V8Parameters:
        """The parameters that a config names; what else is in it concerns only the launch."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {key: value for key, value in config if key in known}
        return cls(**values)

    # --- geometry

    @property
    def lanes_m(self) -> int:
        """Lanes of a warp along the rows."""
        return self.warp_m // self.thread_m

    @property
    def lanes_n(self) -> int:
        """Lanes of a warp along the columns."""
        return self.warp_n // self.thread_n

    @property
    def rows_of_thread(self) -> tuple[int, ...]:
        """Rows of a thread's outputs, from its first one: four neighbours, then those of the other lanes."""
        return tuple(i // VECTOR * VECTOR * self.lanes_m + i % VECTOR for i in range(self.thread_m))

    @property
    def columns_of_thread(self) -> tuple[int, ...]:
        """Columns of a thread's outputs, from its first one."""
        return tuple(j // VECTOR * VECTOR * self.lanes_n + j % VECTOR for j in range(self.thread_n))

    # --- outputs that pass through shared memory to be stored by rows, see v8_sums.store_rows

    @property
    def passing_row(self) -> int:
        """Words from a row of them to the next: eight lanes' accesses of 16 bytes then are to all banks."""
        return self.warp_n + 2 * VECTOR

    @property
    def passing_words(self) -> int:
        """Words of a warp's rows of them."""
        return self.lanes_m * self.passing_row

    @property
    def slice_threads(self) -> int:
        """Threads that together have accumulators for the whole tile."""
        return WARP * (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.slice_threads * self.k_slices

    @property
    def registers(self) -> int:
        """Registers that a thread needs at least: accumulators, two sets of fragments, staged words, addresses."""
        fragments = 2 * (self.thread_m + self.thread_n)
        staged = self.a_copies.staged_words + self.b_copies.staged_words
        return self.thread_m * self.thread_n + fragments + staged + ADDRESS_REGISTERS

    def _copies(self, extent: int, k_contiguous: bool, width: int) -> Copies:
        threads, depth = self.threads, self.block_k
        if not k_contiguous:
            lanes = max(1, min(extent // width, threads))
            steps_e, steps_k = extent // (lanes * width), max(1, depth * lanes // threads)
            return Copies("direct", extent, width, lanes, steps_e, steps_k, lanes * width, threads // lanes, extent)
        lanes = K_LANES // width
        mode: Mode = "staged" if width == VECTOR else "transposed"
        steps_e, steps_k = max(1, extent * lanes // threads), depth // K_LANES
        return Copies(mode, extent, width, lanes, steps_e, steps_k, threads // lanes, K_LANES, extent + PAD)

    @property
    def a_copies(self) -> Copies:
        return self._copies(self.block_m, self.a_layout == "row", self.a_width)

    @property
    def b_copies(self) -> Copies:
        return self._copies(self.block_n, self.b_layout == "column", self.b_width)

    @property
    def stage_words(self) -> int:
        """Words of one stage: A's tile, then B's."""
        return self.block_k * (self.a_copies.row_words + self.b_copies.row_words)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, in which the slices of k also add up their sums, and through
        which outputs pass."""
        exchange = self.k_slices // 2 * self.block_m * self.block_n
        passing = self.slice_threads // WARP * self.passing_words if self.c_width == 1 else 0
        return 4 * max(self.stages * self.stage_words, exchange, passing)

    def fits(self, arch: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability has the shared memory for a block."""
        return self.shared_bytes <= SHARED_LIMIT.get(arch, SMALLEST_SHARED_LIMIT)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of C."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def stages_in(self, k: int) -> int:
        """Stages that K takes, at least one."""
        return max(1, -(-k // self.block_k))
