"""The resource report of a cubin: the assembler's log, and the cubin's own section table."""

from __future__ import annotations

import re
import struct

from numba_gemm.compile.kernel import Resources
from numba_gemm.compile.occupancy import sm_limits
from numba_gemm.errors import CompileError


def read_resources(log: str, cubin: bytes, entry: str, arch: tuple[int, int]) -> Resources:
    """Resources from what ``ptxas -v`` (or nvJitLink, or the driver) printed about the one kernel of a cubin.

    Shared memory is the size of the cubin's ``.nv.shared.<entry>`` section, since not every tool prints it, less the
    part of it that the system takes from each block from compute capability 9.0 on.

    Raises
    ------
    CompileError : if the log has no register count.
    """
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise CompileError(f"the assembler's log has no register count for kernel {entry}", log=log)

    reserved = sm_limits(arch).reserved_shared_bytes if arch >= (9, 0) else 0

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=int(registers.group(1)),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=max(0, elf_section_sizes(cubin).get(f".nv.shared.{entry}", 0) - reserved),
        barriers=number(r"used (\d+) barriers"),
    )


def elf_section_sizes(elf: bytes) -> dict[str, int]:
    """Section name → size in bytes of a 64-bit little-endian ELF file, which a cubin is.

    Source: System V ABI, chapter 4 (ELF header and section header table).
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise CompileError("the assembler's output is not a 64-bit ELF file")
    (table_offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)

    def header(index: int) -> tuple[int, int, int]:
        start = table_offset + index * entry_size
        (name,) = struct.unpack_from("<I", elf, start)
        offset, size = struct.unpack_from("<QQ", elf, start + 0x18)
        return name, offset, size

    _, names_start, _ = header(names_index)
    sizes = {}
    for index in range(count):
        name, _, size = header(index)
        begin = names_start + name
        sizes[elf[begin : elf.index(b"\0", begin)].decode()] = size
    return sizes
