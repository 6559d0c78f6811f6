"""The current CUDA context and the properties of its GPU.

The library works in whatever context is current in the calling thread, as Numba, CuPy and torch all use the
device's primary context; where none is current it makes the primary context of device 0 current.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba_gemm.device.driver import check, driver


@dataclass(frozen=True)
class Device:
    """A GPU's properties, as its driver reports them.

    ``clock_khz`` is the highest SM clock, ``memory_clock_khz`` the memory's; sizes are in bytes.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    clock_khz: int
    memory_clock_khz: int
    l2_bytes: int
    shared_bytes_per_block: int
    total_memory: int
    driver_version: tuple[int, int]

    @property
    def arch(self) -> str:
        """For instance ``"sm_90"``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    @property
    def fp32_lanes(self) -> int:
        """FP32 multiply-add lanes of the whole GPU (64 an SM on 7.5 and 8.0, 128 on the others)."""
        return self.sm_count * (64 if self.compute_capability in {(7, 5), (8, 0)} else 128)

    @property
    def peak_fp32_tflops(self) -> float:
        """SMs × lanes × 2 × clock, in TFLOP/s: what arithmetic allows, not what power does."""
        return self.fp32_lanes * 2 * self.clock_khz * 1e3 / 1e12


@dataclass(frozen=True)
class Context:
    """A CUDA context: its handle, an identity that is never reused, and its device."""

    handle: Any
    identity: int
    device: Device


_contexts: dict[int, Context] = {}


def current_context() -> Context:
    """The context current in this thread; makes device 0's primary context current if there is none.

    Raises
    ------
    NoDeviceError : if there is no GPU.
    """
    cu = driver()
    handle = check(cu.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(handle) == 0:
        handle = check(cu.cuDevicePrimaryCtxRetain(_device_handle(0)), "cuDevicePrimaryCtxRetain")
        check(cu.cuCtxSetCurrent(handle), "cuCtxSetCurrent")
    # A context that was destroyed and made anew can have the old handle, but never the old identity.
    identity = int(check(cu.cuCtxGetId(handle), "cuCtxGetId"))
    context = _contexts.get(identity)
    if context is None:
        ordinal = int(check(cu.cuCtxGetDevice(), "cuCtxGetDevice"))
        context = _contexts[identity] = Context(handle, identity, device_properties(ordinal))
    return context


def _device_handle(ordinal: int) -> Any:
    return check(driver().cuDeviceGet(ordinal), "cuDeviceGet")


@functools.cache
def device_properties(ordinal: int = 0) -> Device:
    """The properties of GPU number ``ordinal``, without making a context on it."""
    cu = driver()
    handle = _device_handle(ordinal)
    attributes = cu.CUdevice_attribute

    def attribute(name: str) -> int:
        key = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cu.cuDeviceGetAttribute(key, handle), f"cuDeviceGetAttribute({name})"))

    version = int(check(cu.cuDriverGetVersion(), "cuDriverGetVersion"))
    name = check(cu.cuDeviceGetName(128, handle), "cuDeviceGetName")
    return Device(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        clock_khz=attribute("CLOCK_RATE"),
        memory_clock_khz=attribute("MEMORY_CLOCK_RATE"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        shared_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        total_memory=int(check(cu.cuDeviceTotalMem(handle), "cuDeviceTotalMem")),
        driver_version=(version // 1000, version % 1000 // 10),
    )


def device_count() -> int:
    """GPUs that the driver sees."""
    return int(check(driver().cuDeviceGetCount(), "cuDeviceGetCount"))


def synchronize() -> None:
    """Wait until everything in the current context is done."""
    current_context()
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize")
