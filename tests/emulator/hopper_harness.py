"""What the tests of Hopper's instructions share: small programs, each held against the assembler where there is one."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from numba_gemm import emulator
from numba_gemm.compile.assembler import find_tool

#: Pieces of a program that waits for a bulk copy: an mbarrier of one arrival at {barrier}, and the wait for phase 0.
BARRIER = """
    .reg .pred %done; .reg .b64 %in, %out, %map, %to; .reg .b32 %x, %at;
    @%first mbarrier.init.shared::cta.b64 [%smem+{barrier}], 1;
    {init_fence}
    bar.sync 0;
"""
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem+{barrier}], 0;
    @!%done bra WAIT;
"""


def program(body: str, params: str = "", *, shared: int = 1024, directives: str = "", align: int = 1024) -> str:
    """A kernel `k` for sm_90a with `shared` bytes at %smem, the thread's index in %t and its warp's in %w."""
    return f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k({params})
{directives}
{{
    .shared .align {align} .b8 smem[{shared}];
    .reg .b32 %smem, %t, %w, %lane; .reg .pred %first;
    mov.u32 %smem, smem;
    mov.u32 %t, %tid.x;
    shr.u32 %w, %t, 5;
    and.b32 %lane, %t, 31;
    setp.eq.u32 %first, %t, 0;
{body}
    ret;
}}
"""


@functools.cache
def assembly_log(text: str) -> str | None:
    """What the assembler says of a text: None where there is no assembler."""
    tool = find_tool("ptxas")
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        done = subprocess.run(
            [tool, "-arch=sm_90a", "-o", Path(folder, "kernel.cubin"), source],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        log = done.stdout + done.stderr
    return re.sub(r"^.*(info|Compile time).*\n?", "", log, flags=re.M).strip()


def check_assembly(text: str) -> None:
    """The assembler, where there is one, takes the text without a word."""
    log = assembly_log(text)
    assert not log, log


def execute(
    text: str,
    params: list[Any] | None = None,
    *,
    grid: Any = 1,
    block: int = 32,
    machine: emulator.Machine | None = None,
    cluster: Any = None,
    shared_bytes: int = 0,
) -> Any:
    """Launch a text that the assembler takes; NumPy arrays among the parameters are written back."""
    check_assembly(text)
    machine = machine or emulator.Machine("sm_90a")
    placed = []
    given = []
    for param in params or []:
        if isinstance(param, np.ndarray):
            address = machine.place(param)
            placed.append((address, param))
            given.append(np.uint64(address))
        else:
            given.append(param)
    report = machine.launch(text, grid, block, given, cluster=cluster, shared_bytes=shared_bytes)
    for address, array in placed:
        machine.fetch(address, array)
    return report
