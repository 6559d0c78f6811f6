"""PTX on the CPU: run a kernel's PTX text from NumPy, with hazards as errors and the hardware's counters.

>>> from numba_gemm import emulator
>>> report = emulator.launch(ptx_text, grid=(2, 2), block=256, args=[a, b, c, np.int32(n)])  # doctest: +SKIP
>>> report.counters.shared_load_wavefronts  # doctest: +SKIP
"""

from __future__ import annotations

from .counters import NCU_METRICS, Counters
from .errors import EmulatorError, LaunchError, PtxError, PtxSyntaxError, UnsupportedInstruction
from .hazards import (
    Deadlock,
    DivergentBarrier,
    EarlyExit,
    Hazard,
    InvalidOperand,
    MbarrierMisuse,
    Misaligned,
    MissingProxyFence,
    MissingWgmmaFence,
    OutOfBounds,
    RegistersInFlight,
    SharedMemoryRace,
    StepLimit,
    Trap,
    UnfinishedAsyncRead,
    UninitialisedRead,
    UnwaitedAsyncCopy,
    UnwaitedDependency,
)
from .launching import launch
from .machine import Machine, kernel_names
from .program import Program, compile_program
from .report import Report
from .tensor_map import TensorMap

__all__ = [
    "NCU_METRICS",
    "Counters",
    "Deadlock",
    "DivergentBarrier",
    "EarlyExit",
    "EmulatorError",
    "Hazard",
    "InvalidOperand",
    "LaunchError",
    "Machine",
    "MbarrierMisuse",
    "Misaligned",
    "MissingProxyFence",
    "MissingWgmmaFence",
    "OutOfBounds",
    "Program",
    "PtxError",
    "PtxSyntaxError",
    "RegistersInFlight",
    "Report",
    "SharedMemoryRace",
    "StepLimit",
    "TensorMap",
    "Trap",
    "UnfinishedAsyncRead",
    "UninitialisedRead",
    "UnsupportedInstruction",
    "UnwaitedAsyncCopy",
    "UnwaitedDependency",
    "compile_program",
    "kernel_names",
    "launch",
]
