"""The ceilings of kernels: how fast a GPU executes ``mma.sync`` on registers, and how fast it reads its memory.

:class:`Ceiling` is that of tensor-core kernels. Each warp issues :data:`TILES` independent instructions again and
again. There is no memory to wait for, so what is measured is the tensor pipe, at the clock and the power that the GPU
allows at that moment; it is timed interleaved with the kernels that are compared with it. Where the power is what
limits them the operands count: numbers near 1 flip few bits, and the H200 multiplies them 3% faster than normal
numbers, which are what the products multiply. There is a ceiling for each.

:class:`ReadBandwidth` is that of kernels that are bound by memory: every 16 bytes of a buffer are loaded once, added up
and forgotten.
"""

from __future__ import annotations

import struct

import numpy as np

from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.benchmark.record import CEILING, CEILING_NORMAL
from numba_gemm.compile import compile_kernel
from numba_gemm.device.context import Context, synchronize
from numba_gemm.device.launch import launch
from numba_gemm.device.memory import DeviceBuffer, copy_to_device, copy_to_host
from numba_gemm.device.module import load
from numba_gemm.spec import KernelSpec, make_config

#: Independent instructions of a warp in each turn of the loop, turns, warps of a block, blocks of an SM.
TILES, TURNS, WARPS, BLOCKS_PER_SM = 16, 256, 8, 2

#: Floating-point operations of one instruction.
FLOPS = 2 * 16 * 8 * 16

#: Registers of a thread with four A and four B fragments.
FRAGMENTS = 24

_SHORT = {"float16": "f16", "bfloat16": "bf16"}
_ABI = struct.Struct("<QI4xQ")  # the cycles of each block; turns; fragments, if they are read


def instruction(dtype: str) -> str:
    """The instruction that is measured."""
    short = _SHORT[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"


def ceiling_ptx(dtype: str, operands: str = "near_one") -> str:
    """A loop of independent ``mma.sync`` on registers, which stores the SM clock cycles that it took.

    Parameters
    ----------
    dtype : ``"float16"`` or ``"bfloat16"``.
    operands : ``"near_one"``, or ``"given"``: before the loop each thread of a block reads its own from memory, words
        of two elements in the order [register][thread].
    """
    tiles = range(TILES)
    accumulators = [", ".join(f"%acc{4 * i + j}" for j in range(4)) for i in tiles]
    zero = "\n".join(f"    mov.f32 %acc{i}, 0f00000000;" for i in range(4 * TILES))
    if operands == "near_one":  # they differ by lane: zeros would take less power
        ones = 0x3F803F80 if dtype == "bfloat16" else 0x3C003C00
        steps = [f"%lane, {0x00070003 + 0x50002 * i}, {ones};" for i in range(FRAGMENTS)]
        fill = "\n".join(f"    mad.lo.u32 %frag{i}, {step}" for i, step in enumerate(steps))
    else:
        reads = "\n".join(f"    ld.global.b32 %frag{i}, [%at + {4 * 32 * WARPS * i}];" for i in range(FRAGMENTS))
        fill = f"""    ld.param.u64 %at, [fragments];
    mov.u32 %lane, %tid.x;
    mad.wide.u32 %at, %lane, 4, %at;
{reads}"""
    body = "\n".join(
        f"    {instruction(dtype)} {{ {accumulators[i]} }}, "
        f"{{ {', '.join(f'%frag{4 * (i // 4) + j}' for j in range(4))} }}, "
        f"{{ %frag{16 + 2 * (i % 4)}, %frag{17 + 2 * (i % 4)} }}, {{ {accumulators[i]} }};"
        for i in tiles
    )
    total = "\n".join(f"    add.f32 %acc0, %acc0, %acc{i};" for i in range(1, 4 * TILES))
    return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry ceiling(.param .u64 out, .param .u32 turns, .param .u64 fragments)
.maxntid {32 * WARPS}, 1, 1
{{
    .reg .f32 %acc<{4 * TILES}>;
    .reg .b32 %frag<{FRAGMENTS}>, %lane, %turns, %block;
    .reg .b64 %out, %at, %begin, %end;
    .reg .pred %p;
    ld.param.u64 %out, [out];
    ld.param.u32 %turns, [turns];
    mov.u32 %lane, %tid.x;
    and.b32 %lane, %lane, 15;
{fill}
{zero}
    bar.sync 0;
    mov.u64 %begin, %clock64;
TURN:
{body}
    sub.u32 %turns, %turns, 1;
    setp.ne.u32 %p, %turns, 0;
    @%p bra TURN;
    bar.sync 0;
    mov.u64 %end, %clock64;
    sub.u64 %end, %end, %begin;
{total}
    setp.eq.f32 %p, %acc0, 0f00000000;      // never; keeps the sums alive
    @%p mov.u64 %end, 0;
    mov.u32 %block, %ctaid.x;
    mad.wide.u32 %out, %block, 8, %out;
    st.global.u64 [%out], %end;
    ret;
}}
"""


SPEC = KernelSpec(
    name="ceiling",
    title="mma.sync on registers",
    idea="nothing but tensor-core instructions",
    block_tile=(16, 8, 16),
    thread_tile=(2, 2),
    threads=32 * WARPS,
    loads_per_fma=None,
    build=ceiling_ptx,
    source="ptx",
    dtypes=tuple(_SHORT),
    min_arch=(8, 0),
    configs=tuple(make_config(dtype=dtype, operands=kind) for kind in ("near_one", "given") for dtype in _SHORT),
    abi="ceiling",
    helpers=(),
    entry_name="ceiling",
)


class Ceiling:
    """The ceiling kernel on a GPU, ready to be timed as one contender among others.

    Parameters
    ----------
    dtype : ``"float16"`` or ``"bfloat16"``.
    kernel : :data:`~numba_gemm.benchmark.record.CEILING`, on numbers near 1, or
        :data:`~numba_gemm.benchmark.record.CEILING_NORMAL`, on normal numbers.

    Attributes
    ----------
    kernel : of its rows.
    measured : the instruction, and what it multiplies.
    flops : floating-point operations of one :meth:`work`.
    registers : of a thread.
    """

    def __init__(self, context: Context, dtype: str, kernel: str = CEILING) -> None:
        normal = kernel == CEILING_NORMAL
        config = make_config(dtype=dtype, operands="given" if normal else "near_one")
        self._function = load(compile_kernel(SPEC, config, context.device.compute_capability), context)
        self._blocks = BLOCKS_PER_SM * context.device.sm_count
        self._cycles = DeviceBuffer(8 * self._blocks, 0)
        count = 2 * FRAGMENTS * 32 * WARPS if normal else 8
        drawn = np.random.default_rng(0).standard_normal((1, count)).astype(numpy_dtype(dtype))
        self._fragments = DeviceBuffer(drawn.nbytes, 0)
        copy_to_device(self._fragments.pointer, drawn, 0)
        synchronize()  # the memory is there before another stream uses it
        self.kernel = kernel
        self.measured = f"{instruction(dtype)}, {'normal numbers' if normal else 'operands near 1'}"
        self.flops = float(self._blocks * WARPS * TURNS * TILES * FLOPS)
        self.registers = self._function.registers

    def work(self, _: int, stream: int) -> None:
        """Launch once; the set of inputs makes no difference."""
        values = (self._cycles.pointer, TURNS, self._fragments.pointer)
        launch(self._function, (self._blocks, 1, 1), (32 * WARPS, 1, 1), _ABI, values, stream=stream)

    def cycles(self) -> float:
        """SM clock cycles of the latest launch: of its slowest block, since the two on an SM don't end together."""
        cycles = np.empty((1, self._blocks), np.uint64)
        synchronize()
        copy_to_host(cycles, self._cycles.pointer, 0)
        synchronize()
        return float(cycles.max())


#: Of the reading kernel: threads a block, 16-byte loads in flight a thread, blocks an SM.
READERS, LOADS, READ_BLOCKS_PER_SM = 512, 8, 2

#: What a block reads at a time.
CHUNK_BYTES = 16 * READERS * LOADS

_READ_ABI = struct.Struct("<2QI")  # the buffer; where a sum that can't be goes; chunks


def read_ptx() -> str:
    """Coalesced 16-byte loads over a buffer, :data:`LOADS` in flight in each thread; blocks take chunks by turns."""
    loads = "\n".join(
        f"    ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {{ {', '.join(f'%v{4 * i + j}' for j in range(4))} }}, "
        f"[%at + {16 * READERS * i}];"
        for i in range(LOADS)
    )
    adds = "\n".join(f"    add.f32 %sum{i % 4}, %sum{i % 4}, %v{i};" for i in range(4 * LOADS))
    return f""".version 8.0
.target sm_75
.address_size 64
.visible .entry read_bandwidth(.param .u64 buffer, .param .u64 out, .param .u32 chunks)
.maxntid {READERS}, 1, 1
.minnctapersm {READ_BLOCKS_PER_SM}
{{
    .reg .f32 %v<{4 * LOADS}>, %sum<4>;
    .reg .b32 %thread, %chunk, %blocks, %chunks, %offset;
    .reg .b64 %at, %out, %stride;
    .reg .pred %p;
    ld.param.u64 %at, [buffer];
    ld.param.u64 %out, [out];
    ld.param.u32 %chunks, [chunks];
    mov.u32 %thread, %tid.x;
    mov.u32 %chunk, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.lo.u32 %offset, %thread, 16;
    mad.wide.u32 %at, %chunk, {CHUNK_BYTES}, %at;
    cvt.u64.u32 %stride, %offset;
    add.u64 %at, %at, %stride;
    mul.wide.u32 %stride, %blocks, {CHUNK_BYTES};
    mov.f32 %sum0, 0f00000000;
    mov.f32 %sum1, 0f00000000;
    mov.f32 %sum2, 0f00000000;
    mov.f32 %sum3, 0f00000000;
    setp.ge.u32 %p, %chunk, %chunks;
    @%p bra DONE;
CHUNK:
{loads}
{adds}
    add.u64 %at, %at, %stride;
    add.u32 %chunk, %chunk, %blocks;
    setp.lt.u32 %p, %chunk, %chunks;
    @%p bra CHUNK;
DONE:
    add.f32 %sum0, %sum0, %sum1;
    add.f32 %sum2, %sum2, %sum3;
    add.f32 %sum0, %sum0, %sum2;
    setp.eq.f32 %p, %sum0, 0f7F7FFFFF;      // never; keeps the loads alive
    @%p st.global.f32 [%out], %sum0;
    ret;
}}
"""


READ = KernelSpec(
    name="read_bandwidth",
    title="reading memory",
    idea="nothing but loads",
    block_tile=(1, CHUNK_BYTES // 4, 1),
    thread_tile=(1, 4 * LOADS),
    threads=READERS,
    loads_per_fma=None,
    build=read_ptx,
    source="ptx",
    abi="read_bandwidth",
    helpers=(),
    entry_name="read_bandwidth",
)


class ReadBandwidth:
    """The reading kernel on a GPU, ready to be timed as one contender among others.

    Attributes
    ----------
    bytes : read by one :meth:`read`: the whole chunks of a buffer.
    """

    def __init__(self, context: Context, buffer_bytes: int) -> None:
        self._function = load(compile_kernel(READ, (), context.device.compute_capability), context)
        self._chunks = buffer_bytes // CHUNK_BYTES
        if not self._chunks:
            raise ValueError(f"the buffer has {buffer_bytes} bytes; a chunk has {CHUNK_BYTES}")
        self._blocks = min(self._chunks, READ_BLOCKS_PER_SM * context.device.sm_count)
        self.bytes = self._chunks * CHUNK_BYTES
        self._out = DeviceBuffer(16, 0)
        synchronize()

    def read(self, pointer: int, stream: int) -> None:
        """Launch once on a buffer at this address."""
        values = (pointer, self._out.pointer, self._chunks)
        launch(self._function, (self._blocks, 1, 1), (READERS, 1, 1), _READ_ABI, values, stream=stream)
