"""Where a product can be computed: np.matmul itself, the CPU, the emulator, a GPU from NumPy's or from its own memory.

Each place takes NumPy views, so that one test serves all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import Array, Poisoned

import numba_gemm as ng

#: Of the emulated GPU, whose tensor cores the bounds are of.
EMULATED_ARCH = (9, 0)


@dataclass(frozen=True)
class Place:
    """A device of a call and a kernel, or "numpy"; "device arrays" is the GPU on arrays in its own memory."""

    device: str
    kernel: str | None = None

    def __str__(self) -> str:
        return f"{self.device}-{self.kernel}" if self.kernel else self.device

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a call."""
        return {"kernel": self.kernel, "device": "cuda" if self.device == "device arrays" else self.device}

    def tensor_core(self, dtype: str) -> tuple[int, int] | None:
        """The compute capability by whose tensor cores a product is bounded; None where it is FP32 arithmetic."""
        if dtype == "float32" or self.device in ("numpy", "cpu"):
            return None
        if self.device == "emulator":
            return EMULATED_ARCH
        from numba_gemm.device.context import current_context

        return current_context().device.compute_capability

    def matmul(self, a: Array, b: Array, out: Poisoned | None = None) -> Any:
        """The product on the host; with ``out``, its view, which has been written and nothing around it."""
        if self.device == "device arrays":
            return self._on_device_arrays(ng.matmul, a, b, out)
        target = None if out is None else out.view
        result = np.matmul(a, b, target) if self.device == "numpy" else ng.matmul(a, b, target, **self.options)
        if out is not None:
            assert result is target
            assert out.kept_to_itself
        return result

    def gemm(self, a: Array, b: Array, c: Poisoned, alpha: float = 1.0, beta: float = 0.0, **flags: bool) -> Array:
        """``c.view``, updated, and nothing around it."""
        if self.device == "device arrays":
            return self._on_device_arrays(ng.gemm, a, b, c, alpha, beta, **flags)
        assert ng.gemm(a, b, c.view, alpha, beta, **flags, **self.options) is c.view
        assert c.kept_to_itself
        return c.view

    def _on_device_arrays(
        self, call: Any, a: Array, b: Array, c: Poisoned | None, *scales: float, **flags: bool
    ) -> Array:
        options = {**flags, "kernel": self.kernel}
        on_device = [_to_device(x) for x in (a, b)]
        if c is None:
            result = call(*on_device, **options)
            assert "numba" in type(result).__module__
            return result.copy_to_host()
        if 0 in c.view.shape:
            target = _to_device(c.view)
            assert call(*on_device, target, *scales, **options) is target
            return c.view
        from numba_gemm.benchmark.correctness import device_view

        target, memory = device_view(c.view)
        assert call(*on_device, target, *scales, **options) is target
        c.base[...] = memory.copy_to_host().view(c.base.dtype).reshape(c.base.shape)
        assert c.kept_to_itself
        return c.view


def _to_device(view: Array) -> Any:
    """A Numba device array that lies in a copy of the view's base as the view does there."""
    from numba import cuda

    from numba_gemm.benchmark.correctness import device_view

    if view.size == 0:  # Numba can't allocate nothing
        return cuda.device_array((1,), view.dtype)[:0].reshape(view.shape)
    return device_view(view)[0]


def on(*places: Place) -> pytest.MarkDecorator:
    """Run a test in each of these places; those on a GPU carry the mark."""
    return pytest.mark.parametrize("place", list(_marked(places)), ids=str)


def _marked(places: Iterable[Place]) -> Iterable[Any]:
    for place in places:
        marks = [pytest.mark.gpu] if place.device in ("cuda", "device arrays") else []
        yield pytest.param(place, marks=marks, id=str(place))


NUMPY = Place("numpy")
CPU = (Place("cpu"), Place("cpu", "cpu"))
#: Few tests run on all three: v6 and v7 take ten times as long there as the small tiles of the choice by rule.
EMULATOR = tuple(Place("emulator", kernel) for kernel in (None, "v6", "v7"))
GPU = tuple(Place(device, kernel) for device in ("cuda", "device arrays") for kernel in (None, "v7"))
EMULATOR_BY_RULE = (Place("emulator"),)
GPU_BY_RULE = tuple(place for place in GPU if place.kernel is None)
EMULATOR_16 = (Place("emulator", "t4"),)
GPU_16 = tuple(Place(device, kernel) for device in ("cuda", "device arrays") for kernel in (None, "t4"))
