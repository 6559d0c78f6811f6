"""Launches that overlap: a kernel waits for the one before it, and lets the one behind it start (sm_90).

A launch that is allowed to (``KernelLaunch.overlaps``; in CUDA, programmatic stream serialization) may start while the
kernel before it on its stream still runs. Both calls stand in all threads of a kernel, or in one of each block::

    griddepcontrol_wait()                 # the kernel before is over, and what it wrote is seen
    griddepcontrol_launch_dependents()    # the kernel behind may start once all blocks of this one have come here

Before its wait a kernel may neither touch what the one before writes nor write what that one reads. Loads by the
read-only path (``load_global`` and its kin) promise that nobody writes while the kernel runs, and the compiler may move
them to before the wait: what an overlapped kernel wrote is read by ordinary loads, or by ``cp_async``.

Both do nothing in a kernel that was launched in the ordinary way, and make no instruction before sm_90.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from numba_gemm.compile.numba_source import compiled_for, intrinsic, types
from numba_gemm.intrinsics.emit import VOID, emit

#: The first compute capability that has the instructions.
_SINCE = (9, 0)


def _control(name: str, summary: str) -> Any:
    def control(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if compiled_for() >= _SINCE:
                emit(builder, f"griddepcontrol.{name};", VOID, "", [])
            return context.get_dummy_value()

        return types.void(), codegen

    control.__name__ = control.__qualname__ = f"griddepcontrol_{name}"
    control.__doc__ = summary
    return intrinsic(control)


griddepcontrol_wait = _control(
    "wait", "Wait until the kernel before is over and its writes are seen; nothing before sm_90."
)
griddepcontrol_launch_dependents = _control(
    "launch_dependents",
    "Let the kernel behind start once all blocks have come here or ended; nothing before sm_90.",
)

__all__ = ["griddepcontrol_launch_dependents", "griddepcontrol_wait"]
