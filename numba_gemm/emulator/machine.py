"""A machine that PTX runs on: device memory and launches."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from . import (
    async_copy,
    atomics,
    clusters,
    compare,
    control,
    convert,
    dependence,
    fences,
    float_ops,
    matrix_ops,
    mbarrier,
    memory_ops,
    register_pool,
    warp_ops,
    wgmma,
)
from .batch import Batch
from .counters import Counters, opcode_class
from .errors import LaunchError
from .memory import DeviceMemory
from .module import Variable
from .program import Program, compile_program
from .proxies import ProxiedSharedMemory
from .report import Report
from .shared import SharedMemory
from .tensor_map import TensorMap, encode

INSTRUCTION_SETS = (
    async_copy, atomics, clusters, compare, control, convert, dependence, fences, float_ops, matrix_ops, mbarrier,
    memory_ops, register_pool, warp_ops, wgmma,
)  # fmt: skip
"""The modules that register the instructions; importing them is what fills the table of opcodes."""

MEMORY_BUDGET = 512 << 20
LANES = 4096
MAX_SHARED = 227 << 10
MAX_CLUSTER = 16
Dimensions = int | Sequence[int]


def three(value: Dimensions, what: str) -> tuple[int, int, int]:
    """A grid or block as (x, y, z)."""
    found = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    found = tuple(int(v) for v in found)
    if not 1 <= len(found) <= 3 or any(v < 1 for v in found):
        raise LaunchError(f"{what} must be 1 to 3 positive integers, not {value!r}")
    return (*found, *(1,) * (3 - len(found)))  # type: ignore[return-value]


class Machine:
    """One emulated GPU of architecture `arch` ("sm_90"): memory that outlives launches.

    `lanes` is how many threads run side by side, about; `limit` how many jumps a batch may make (a guard against
    kernels that never end).
    """

    def __init__(self, arch: str = "sm_90", *, lanes: int = LANES, limit: int = 1 << 26) -> None:
        if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
            raise LaunchError(f"arch is {arch!r}; it must be an architecture's name, for instance 'sm_90'")
        self.arch = arch
        self.lanes = lanes
        self.limit = limit
        self.memory = DeviceMemory()
        self.symbols: dict[int, tuple[Variable, int]] = {}
        self.tensor_maps: list[TensorMap] = []

    def alloc(self, nbytes: int, *, align: int = 256, initialised: bool = False, at: int | None = None) -> int:
        """Reserve `nbytes` of device memory and return the address.

        Only pages that are touched cost memory. Reading bytes that were never written is a hazard unless
        `initialised`, which makes them zero. `at` places the allocation (a multiple of 16).
        """
        return self.memory.alloc(nbytes, align=align, initialised=initialised, at=at)

    def free(self, address: int) -> None:
        """Give an allocation back; touching it afterwards is out of bounds."""
        self.memory.free(address)

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array's bytes to `address`."""
        self.memory.write(address, np.asarray(array))

    def read(self, address: int, dtype: Any, count: int) -> np.ndarray:
        """`count` elements of `dtype` from `address`, as a new array."""
        return self.memory.read(address, dtype, count)

    def place(self, array: np.ndarray, *, written: bool = True) -> int:
        """Memory for an array with the strides and the alignment that it has; the address of its first element.

        Its elements are copied and count as initialised (unless `written` is False); the bytes between them don't, so
        that a kernel that reads beside a view is caught.
        """
        if not array.size:
            return 0
        reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + array.itemsize
        offset = (array.__array_interface__["data"][0] + low) % 16
        address: int = self.memory.alloc(offset + high - low) + offset - low
        if written:
            data, known = self.memory.strided(address, array.dtype, array.shape, array.strides)
            data[...] = array
            if known is not None:
                known[...] = 1
        return address

    def fetch(self, address: int, into: np.ndarray) -> None:
        """Copy an array that :meth:`place` made room for back, element by element."""
        if into.size:
            into[...] = self.memory.strided(address, into.dtype, into.shape, into.strides)[0]

    def tensor_map(
        self,
        address: int,
        dtype: Any,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        **options: Any,
    ) -> bytes:
        """A tensor map as a kernel takes it: 128 opaque bytes, for a parameter `.align 64 .b8 map[128]`.

        The arguments are those of `TensorMap`, innermost dimension first; so are the `options` (`swizzle="128B"`, …)
        and the `LaunchError` for what `cuTensorMapEncodeTiled` would refuse. The bytes may also be written to global
        memory, at a multiple of 64.
        """
        self.tensor_maps.append(TensorMap(address, dtype, tuple(dims), tuple(strides), tuple(box), **options))
        return encode(len(self.tensor_maps) - 1)

    def launch(
        self,
        program: Program | str,
        grid: Dimensions,
        block: Dimensions,
        params: bytes | Sequence[Any],
        *,
        kernel: str | None = None,
        shared_bytes: int = 0,
        blocks: Iterable[Any] | None = None,
        cluster: Dimensions | None = None,
        overlaps: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Run a kernel.

        program: a PTX text, or what `compile_program` made of one. params: the packed parameter bytes, or a list of
        NumPy scalars, one per parameter (addresses as `np.uint64`). shared_bytes: dynamic shared memory. blocks: the
        blocks to run, as linear indices or (x, y, z), with the rest of their clusters; None runs all. cluster: blocks
        in a cluster, where the kernel has no `.reqnctapercluster`. overlaps: whether the launch may start before the
        one before it is over, so that the kernel has to wait by `griddepcontrol.wait`. progress(done, total) is called
        after each batch of blocks.
        """
        if isinstance(program, str):
            program = compile_program(program, kernel)
        state = LaunchState(self, program, three(grid, "grid"), three(block, "block"), params, shared_bytes, cluster)
        state.overlaps = overlaps
        chosen = state.choose(blocks)
        step = state.blocks_per_batch()
        with np.errstate(all="ignore"):
            for start in range(0, chosen.size, step):
                Batch(state, program, chosen[start : start + step]).run()
                if progress is not None:
                    progress(min(start + step, chosen.size), chosen.size)
        return state.report(chosen.size)


class LaunchState:
    """What all batches of one launch share."""

    def __init__(
        self,
        machine: Machine,
        program: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes | Sequence[Any],
        dynamic_shared: int,
        cluster: Dimensions | None = None,
    ) -> None:
        self.machine = machine
        self.program = program
        self.arch = machine.arch
        self.limit = machine.limit
        self.overlaps = False
        self.grid, self.block = grid, block
        self.threads = math.prod(block)
        self.dynamic_shared = dynamic_shared
        self.shared_bytes = program.shared_bytes + dynamic_shared
        self.counts: Counter[str] = Counter()
        self.executed = np.zeros((2, len(program.code)), np.int64)
        directives = program.kernel.directives
        if self.threads > 1024 or block[2] > 64:
            raise LaunchError(f"a block of {block} has more threads than a block can have: 1024, and 64 along z")
        if ".maxntid" in directives and self.threads > math.prod(directives[".maxntid"]):
            raise LaunchError(f"a block of {block} exceeds the kernel's .maxntid {directives['.maxntid']}")
        if ".reqntid" in directives and block != three(directives[".reqntid"], ".reqntid"):
            raise LaunchError(f"a block of {block} is not the kernel's .reqntid {directives['.reqntid']}")
        if grid[0] >= 1 << 31 or grid[1] > 65535 or grid[2] > 65535:
            raise LaunchError(f"a grid of {grid} is larger than a grid can be")
        if self.shared_bytes > MAX_SHARED:
            raise LaunchError(f"{self.shared_bytes} bytes of shared memory; a block can have {MAX_SHARED}")
        self.cluster = self.cluster_shape(cluster)
        self.proxied = program.asynchronous or self.cluster != (1, 1, 1)
        self.params = self.pack(params)

    def cluster_shape(self, given: Dimensions | None) -> tuple[int, int, int]:
        directives = self.program.kernel.directives
        required = directives.get(".reqnctapercluster")
        if given is None and required is None:
            return 1, 1, 1
        shape = three(given if given is not None else required or 1, "cluster")
        if required and shape != three(required, ".reqnctapercluster"):
            raise LaunchError(f"a cluster of {shape} is not the kernel's .reqnctapercluster {required}")
        if any(n % c for n, c in zip(self.grid, shape, strict=True)):
            raise LaunchError(f"a grid of {self.grid} is no whole number of clusters of {shape}")
        if math.prod(shape) > MAX_CLUSTER:
            raise LaunchError(f"a cluster of {shape} has more than {MAX_CLUSTER} blocks")
        return shape

    def pack(self, params: bytes | Sequence[Any]) -> bytes:
        expected = self.program.kernel.params
        if isinstance(params, (bytes, bytearray)):
            if len(params) < self.program.param_bytes:
                raise LaunchError(f"the kernel takes {self.program.param_bytes} bytes of parameters, not {len(params)}")
            return bytes(params)
        if len(params) != len(expected):
            raise LaunchError(f"the kernel takes {len(expected)} parameters, not {len(params)}")
        packed = bytearray(self.program.param_bytes)
        for variable, value in zip(expected, params, strict=True):
            data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
            if len(data) != variable.size:
                raise LaunchError(
                    f"parameter {variable.name} has {variable.size} bytes, {type(value).__name__} has {len(data)}"
                )
            packed[variable.offset : variable.offset + variable.size] = data
        return bytes(packed)

    def choose(self, blocks: Iterable[Any] | None) -> np.ndarray:
        total = math.prod(self.grid)
        if blocks is None:
            return self.by_cluster(np.arange(total, dtype=np.int64))
        found = []
        for block in blocks:
            if isinstance(block, (int, np.integer)):
                linear = int(block)
            else:
                x, y, z = [*block, 0, 0][:3]
                if not (0 <= x < self.grid[0] and 0 <= y < self.grid[1] and 0 <= z < self.grid[2]):
                    raise LaunchError(f"block {block!r} is not in the grid {self.grid}")
                linear = int(x) + self.grid[0] * (int(y) + self.grid[1] * int(z))
            if not 0 <= linear < total:
                raise LaunchError(f"block {block!r} is not in the grid {self.grid}")
            found.append(linear)
        return self.by_cluster(np.array(found, np.int64))

    def by_cluster(self, blocks: np.ndarray) -> np.ndarray:
        """The blocks of all the clusters of these, cluster by cluster in order of rank."""
        x, y, z = self.cluster
        if x * y * z == 1 or not blocks.size:
            return blocks
        (gx, gy, _), across, down = self.grid, self.grid[0] // x, self.grid[1] // y
        names = blocks % gx // x + across * (blocks // gx % gy // y + down * (blocks // (gx * gy) // z))
        _, first = np.unique(names, return_index=True)
        name = names[np.sort(first)][:, None]
        rank = np.arange(x * y * z)
        plane = name // (across * down) * z + rank // (x * y)
        row = name // across % down * y + rank // x % y
        found: np.ndarray = name % across * x + rank % x + gx * (row + gy * plane)
        return found.reshape(-1)

    def blocks_per_batch(self) -> int:
        """As many blocks as fill the lanes, within the memory budget."""
        program = self.program
        warps = -(-self.threads // 32)
        registers = sum(max(bits, 8) // 8 * count for bits, count in program.counts.items())
        per_thread = registers + program.local_bytes + 256
        size = 1
        if self.proxied:
            size = math.prod(self.cluster)
            shared = ProxiedSharedMemory.proxied_bytes(self.shared_bytes, warps, program.cell, size)
        else:
            shared = SharedMemory.bytes_per_block(self.shared_bytes, warps, program.cell)
        per_block = per_thread * warps * 32 + shared
        return max(1, min(self.machine.lanes // (warps * 32), MEMORY_BUDGET // per_block) // size) * size

    def symbol_address(self, variable: Variable) -> int:
        """Where a module-scope .global or .const variable lies; it is placed and initialised at its first use."""
        found = self.machine.symbols.get(id(variable))
        if found is not None:
            return found[1]
        memory = self.machine.memory
        address = memory.alloc(max(variable.size, 1), align=max(variable.align, 16), initialised=True)
        self.machine.symbols[id(variable)] = (variable, address)
        if variable.initial:
            data = bytearray(variable.initial)
            by_name = {v.name: v for v in self.program.module.variables}
            for offset, name, extra in variable.pointers:
                if name in by_name:
                    data[offset : offset + 8] = (self.symbol_address(by_name[name]) + extra).to_bytes(8, "little")
            memory.write(address, np.frombuffer(bytes(data), np.uint8))
        return address

    def collect(self, batch: Batch) -> None:
        """Add a finished batch's counts of executed instructions."""
        threads = np.zeros(len(self.program.code), np.int64)
        for (start, stop), (warps, lanes) in batch.segments.items():
            self.executed[0, start:stop] += warps
            threads[start:stop] += lanes
        for pc, count in batch.predicated.items():
            threads[pc] = count
        self.executed[1] += threads

    def report(self, blocks: int) -> Report:
        classes: Counter[str] = Counter()
        counts = self.counts
        lines: Counter[int] = Counter()
        for pc in np.flatnonzero(self.executed[0]):
            ins = self.program.instructions[pc]
            warps, threads = int(self.executed[0, pc]), int(self.executed[1, pc])
            name = opcode_class(ins.op, ins.mods)
            classes[name] += warps
            lines[ins.line] += warps
            counts["instructions"] += warps
            counts["thread_instructions"] += threads
            packed = ins.mods[-1:] == ("f32x2",)
            if name in ("fma.f32", "mad.f32") or (packed and ins.op == "fma"):
                counts["ffma_threads"] += threads << packed
            elif name in ("add.f32", "sub.f32"):
                counts["fadd_threads"] += threads
            elif name == "mul.f32":
                counts["fmul_threads"] += threads
        return Report(
            kernel=self.program.kernel.name,
            arch=self.arch,
            grid=self.grid,
            block=self.block,
            blocks_run=blocks,
            shared_bytes=self.shared_bytes,
            counters=Counters(
                **{k: int(v) for k, v in counts.items()}, instructions_by_class=dict(sorted(classes.items()))
            ),
            executed_by_line=dict(sorted(lines.items())),
        )


def kernel_names(text: str) -> list[str]:
    """The names of the kernels in a PTX text."""
    from .parser import parse

    return [f.name for f in parse(text).functions.values() if f.entry and f.body is not None]
