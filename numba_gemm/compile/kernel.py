"""What compiling yields: PTX, cubin and the assembler's resource report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a kernel takes, as the assembler reports it.

    Attributes
    ----------
    registers : 32-bit registers a thread.
    spill_store_bytes, spill_load_bytes, stack_bytes : local memory a thread; 0 in a good kernel.
    shared_bytes : static shared memory a block.
    barriers : named barriers used.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int

    @property
    def uses_local_memory(self) -> bool:
        """Whether anything lives in local memory: spills, or an array that registers couldn't hold."""
        return bool(self.spill_store_bytes or self.spill_load_bytes or self.stack_bytes)


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled form of a kernel for one architecture.

    ``digest`` identifies what it was made from (source, options, architecture, toolchain); ``assembler`` says which
    tool made the cubin; ``log`` is that tool's output.
    """

    entry: str
    arch: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    digest: str
    assembler: str
    log: str = field(repr=False)
    resources: Resources
