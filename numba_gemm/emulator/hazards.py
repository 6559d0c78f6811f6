"""What a run can find wrong: each hazard is an exception that names instruction, thread and address."""

from __future__ import annotations

from .errors import EmulatorError


class Hazard(EmulatorError):  # noqa: N818 (hazards are named for what happened)
    """A fault that a kernel committed while it ran.

    Attributes
    ----------
    line, text : the PTX line number (1-based) and its text.
    block, thread : (x, y, z) indices of the offending thread, or None where no single one is to blame.
    space, address : state space and address within it (absolute for global memory), or None.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int = 0,
        text: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        space: str | None = None,
        address: int | None = None,
    ) -> None:
        parts = [message]
        if space is not None and address is not None:
            parts.append(f"at {space} address {address:#x}")
        if block is not None:
            parts.append(f"by block {block}, thread {thread}")
        super().__init__(f"{' '.join(parts)}, line {line}: {text.strip()}")
        self.line = line
        self.text = text.strip()
        self.block = block
        self.thread = thread
        self.space = space
        self.address = address


class OutOfBounds(Hazard):
    """An access outside every allocation, or outside the block's shared memory or the thread's local memory."""


class Misaligned(Hazard):
    """An address that isn't a multiple of the size of its access."""


class UninitialisedRead(Hazard):
    """A read of shared or global bytes that nothing has written."""


class UnwaitedAsyncCopy(Hazard):
    """A touch of shared bytes that a `cp.async` still writes, or has written without a barrier since the wait."""


class SharedMemoryRace(Hazard):
    """Two threads touched the same shared bytes, one of them writing, and nothing ordered the two."""


class MissingProxyFence(Hazard):
    """The asynchronous proxy touched shared bytes that ordinary accesses wrote, with no `fence.proxy.async` between."""


class UnfinishedAsyncRead(Hazard):
    """A write to shared bytes that a bulk store or a `wgmma` still reads."""


class MbarrierMisuse(Hazard):
    """An operation on an mbarrier that its state, its counts or the lack of an initialisation forbid."""


class RegistersInFlight(Hazard):
    """A touch of registers that a `wgmma` still uses: it was not waited for."""


class MissingWgmmaFence(Hazard):
    """A `wgmma` on registers that other instructions touched, with no `wgmma.fence` between."""


class EarlyExit(Hazard):
    """Threads exited while their shared memory, or their bulk copies, were still in use."""


class UnwaitedDependency(Hazard):
    """A launch that overlaps the one before it didn't wait for that one before it touched global memory, or ended."""


class InvalidOperand(Hazard):
    """An operand's value that the instruction does not allow: a size, a descriptor, a tensor map."""


class DivergentBarrier(Hazard):
    """Lanes of one warp that had to execute a barrier or `.sync` instruction together did not."""


class Deadlock(Hazard):
    """Every thread that is left waits for something that can't happen any more."""


class Trap(Hazard):
    """The kernel executed `trap`, `brkpt`, or an assertion of its own."""


class StepLimit(Hazard):
    """The launch ran longer than its limit of instructions allows."""
