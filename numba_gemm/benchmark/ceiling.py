"""The ceiling of tensor-core kernels: how fast a GPU executes ``mma.sync`` when all operands are in registers.

Each warp issues :data:`TILES` independent instructions again and again. There is no memory to wait for, so what is
measured is the tensor pipe, at the clock and the power that the GPU allows at that moment; it is timed interleaved
with the kernels that are compared with it.
"""

from __future__ import annotations

import struct

import numpy as np

from numba_gemm.compile import compile_kernel
from numba_gemm.device.context import Context, synchronize
from numba_gemm.device.launch import launch
from numba_gemm.device.memory import DeviceBuffer, copy_to_host
from numba_gemm.device.module import load
from numba_gemm.spec import KernelSpec, make_config

#: Independent instructions of a warp in each turn of the loop, turns, warps of a block, blocks of an SM.
TILES, TURNS, WARPS, BLOCKS_PER_SM = 16, 256, 8, 2

#: Floating-point operations of one instruction.
FLOPS = 2 * 16 * 8 * 16

_SHORT = {"float16": "f16", "bfloat16": "bf16"}
_ABI = struct.Struct("<QI")  # the cycles of each block; turns


def instruction(dtype: str) -> str:
    """The instruction that is measured."""
    short = _SHORT[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"


def ceiling_ptx(dtype: str) -> str:
    """A loop of independent ``mma.sync`` on registers, which stores the SM clock cycles that it took.

    Parameters
    ----------
    dtype : ``"float16"`` or ``"bfloat16"``.
    """
    tiles = range(TILES)
    accumulators = [", ".join(f"%acc{4 * i + j}" for j in range(4)) for i in tiles]
    zero = "\n".join(f"    mov.f32 %acc{i}, 0f00000000;" for i in range(4 * TILES))
    # Four A and four B fragments, of values near 1 that differ by lane: zeros would take less power.
    ones = 0x3F803F80 if dtype == "bfloat16" else 0x3C003C00
    fill = "\n".join(f"    mad.lo.u32 %frag{i}, %lane, {0x00070003 + 0x50002 * i}, {ones};" for i in range(24))
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
.visible .entry ceiling(.param .u64 out, .param .u32 turns)
.maxntid {32 * WARPS}, 1, 1
{{
    .reg .f32 %acc<{4 * TILES}>;
    .reg .b32 %frag<24>, %lane, %turns, %block;
    .reg .b64 %out, %begin, %end;
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
    configs=tuple(make_config(dtype=dtype) for dtype in _SHORT),
    abi="ceiling",
    helpers=(),
    entry_name="ceiling",
)


class Ceiling:
    """The ceiling kernel on a GPU, ready to be timed as one contender among others.

    Attributes
    ----------
    instruction : what is measured.
    flops : floating-point operations of one :meth:`work`.
    registers : of a thread.
    """

    def __init__(self, context: Context, dtype: str) -> None:
        kernel = compile_kernel(SPEC, make_config(dtype=dtype), context.device.compute_capability)
        self._function = load(kernel, context)
        self._blocks = BLOCKS_PER_SM * context.device.sm_count
        self._cycles = DeviceBuffer(8 * self._blocks, 0)
        synchronize()  # the memory is there before another stream uses it
        self.instruction = instruction(dtype)
        self.flops = float(self._blocks * WARPS * TURNS * TILES * FLOPS)
        self.registers = self._function.registers

    def work(self, _: int, stream: int) -> None:
        """Launch once; the set of inputs makes no difference."""
        values = (self._cycles.pointer, TURNS)
        launch(self._function, (self._blocks, 1, 1), (32 * WARPS, 1, 1), _ABI, values, stream=stream)

    def cycles(self) -> float:
        """SM clock cycles of the latest launch: of its slowest block, since the two on an SM don't end together."""
        cycles = np.empty((1, self._blocks), np.uint64)
        synchronize()
        copy_to_host(cycles, self._cycles.pointer, 0)
        synchronize()
        return float(cycles.max())
