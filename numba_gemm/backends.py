"""Where a product is carried out: the GPU, for device arrays or for NumPy arrays, the emulator, or NumPy's BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays import Operand
from numba_gemm.catalog import CPU_BASELINE, get_spec
from numba_gemm.no_gpu import warn_no_gpu
from numba_gemm.problem import placed_by
from numba_gemm.stack import ProductShape

if TYPE_CHECKING:
    from numba_gemm.arrange import Arrangement, Scales
    from numba_gemm.calls import Call
    from numba_gemm.execute import Prepared

DEVICES = ("auto", "cuda", "cpu", "emulator")


class Backend(Protocol):
    """Carries out a checked product whose result has an element at least."""

    def multiply(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
    ) -> Call | None:
        """C = alpha · A · B + beta · C; on device arrays a :class:`Call` that can be repeated."""

    def arrange(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales
    ) -> Arrangement | Prepared | None:
        """What :meth:`multiply` would launch, compiled where there is a GPU; None for NumPy's BLAS."""


class HostOptions(NamedTuple):
    """What only concerns products of host arrays on a GPU."""

    memory_limit: int | None = None
    progress: Callable[[int, int], None] | None = None


NO_OPTIONS = HostOptions()


def host_options(memory_limit: int | None, progress: Callable[[int, int], None] | None) -> HostOptions:
    """The options as one; a repeated call on device arrays, where a microsecond counts, makes none anew."""
    return NO_OPTIONS if memory_limit is None and progress is None else HostOptions(memory_limit, progress)


def choose_backend(
    kernel: str | None,
    device: str,
    a: Operand,
    b: Operand,
    *,
    host: HostOptions = NO_OPTIONS,
    stacklevel: int = 5,
) -> Backend:
    """Where to carry out a product; every check of ``kernel`` and ``device`` is here.

    ``stacklevel`` is that of the warning that there is no GPU, which belongs to the line of the caller's program.

    Raises
    ------
    ValueError, TypeError : for a kernel or device that doesn't exist, or can't take these arrays.
    NoDeviceError : if a GPU is needed and there is none.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; it must be one of {', '.join(map(repr, DEVICES))}")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is {kernel!r}; pass its name, for instance 'v7'")
    if kernel is not None and kernel != CPU_BASELINE:
        get_spec(kernel)
    _check_host_options(host)
    on_device = next((operand for operand in (a, b) if operand.on_device), None)
    if on_device is not None:
        if device in ("cpu", "emulator") or kernel == CPU_BASELINE:
            raise ValueError(
                f"{on_device.name} is {on_device.place}, which the CPU can't multiply; use device='auto' and a GPU "
                f"kernel, or copy it to the host first: {on_device.to_host}"
            )
        return DeviceBackend() if placed_by(a, b).on_device else HostBackend(host)
    if kernel == CPU_BASELINE:
        if device not in ("auto", "cpu"):
            raise ValueError(f"kernel 'cpu' doesn't run on device {device!r}; use device='cpu'")
        return CpuBackend()
    if device == "cpu":
        if kernel is not None:
            raise ValueError(
                f"kernel {kernel!r} doesn't run on device 'cpu'; use device='cuda', or kernel='cpu', the CPU baseline, "
                f"or device='emulator', which runs the kernel's PTX on the CPU"
            )
        return CpuBackend()
    if device == "emulator":
        return EmulatorBackend()

    from numba_gemm.device.driver import driver, is_available

    if device == "auto" and kernel is None and not is_available():
        warn_no_gpu(stacklevel)
        return CpuBackend()
    driver()  # raises NoDeviceError with what was looked for
    return HostBackend(host)


def _check_host_options(host: HostOptions) -> None:
    limit = host.memory_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, np.integer))):
        raise TypeError(f"memory_limit is {limit!r}; pass a number of bytes, for instance 2**30")
    if limit is not None and limit <= 0:
        raise ValueError(f"memory_limit is {limit}; pass a positive number of bytes, or None for most of what is free")
    if host.progress is not None and not callable(host.progress):
        raise TypeError(f"progress is {host.progress!r}; pass a function that takes (done, total)")


class DeviceBackend:
    """Device arrays, multiplied where they are."""

    def multiply(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
    ) -> Call | None:
        from numba_gemm.calls import multiply_device

        return multiply_device(a, b, c, shape, scales, stream)

    def arrange(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales
    ) -> Arrangement | Prepared | None:
        from numba_gemm.calls import prepare_device

        return prepare_device(a, b, c, shape, scales)


class HostBackend:
    """NumPy arrays, one of them perhaps uploaded before as a ``Matrix``, multiplied on the GPU."""

    def __init__(self, options: HostOptions) -> None:
        self._options = options

    def multiply(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
    ) -> Call | None:
        from numba_gemm.host import multiply_host

        alpha, beta, kernel = scales
        stacks = _as_stacks(a, b, c, shape)
        multiply_host(*stacks, alpha=alpha, beta=beta, kernel=kernel, **self._options._asdict())
        return None

    def arrange(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales
    ) -> Arrangement | Prepared | None:
        from numba_gemm.arrange import arrange, request_for
        from numba_gemm.device.context import current_context
        from numba_gemm.execute import tuned_for

        device = current_context().device
        request = request_for(a, b, c, shape, scales)
        return arrange(request, device.compute_capability, device.sm_count, tuned_for(device))


class EmulatorBackend:
    """NumPy arrays, multiplied by the kernels' PTX on the CPU."""

    def multiply(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
    ) -> Call | None:
        from numba_gemm.emulate import multiply_emulated

        alpha, beta, kernel = scales
        multiply_emulated(a.array, b.array, c.array, alpha=alpha, beta=beta, kernel=kernel)
        return None

    def arrange(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales
    ) -> Arrangement | Prepared | None:
        from numba_gemm.arrange import arrange, request_for
        from numba_gemm.choose import DEFAULT_SM_COUNT
        from numba_gemm.emulate import DEFAULT_ARCH

        return arrange(request_for(a, b, c, shape, scales), DEFAULT_ARCH, DEFAULT_SM_COUNT)


class CpuBackend:
    """NumPy arrays, multiplied by NumPy's BLAS or by the ladder's CPU baseline."""

    def multiply(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
    ) -> Call | None:
        alpha, beta, kernel = scales
        target: npt.NDArray[Any] = c.array
        if alpha == 1 and beta == 0 and kernel is None and a.dtype == c.dtype == "float32" and shape.k:
            np.matmul(a.array, b.array, out=target)
            return None
        product: Any
        if alpha == 0 or shape.k == 0:
            product = np.float32(0)
        else:  # as on the GPU: products and sums in FP32, rounded once to the type of C
            a_array, b_array = (x.array.astype(np.float32, copy=False) for x in (a, b))
            product = np.matmul(a_array, b_array) if kernel is None else _blocked(a_array, b_array, shape)
        if alpha != 1:
            product = product * np.float32(alpha)
        if beta != 0:
            product = product + np.float32(beta) * target.astype(np.float32)
        with np.errstate(over="ignore"):  # past the range of float16 lies infinity
            target[...] = np.asarray(product).astype(target.dtype)
        return None

    def arrange(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales
    ) -> Arrangement | Prepared | None:
        return None


def _blocked(a: npt.NDArray[Any], b: npt.NDArray[Any], shape: ProductShape) -> npt.NDArray[Any]:
    """The CPU baseline on each product of a stack."""
    from numba_gemm.fp32.cpu import blocked_matmul

    a = a[np.newaxis, :] if a.ndim == 1 else a
    b = b[:, np.newaxis] if b.ndim == 1 else b
    a = np.broadcast_to(a, (*shape.batch, *a.shape[-2:]))
    b = np.broadcast_to(b, (*shape.batch, *b.shape[-2:]))
    product = np.empty((*shape.batch, shape.m, shape.n), np.float32)
    for index in np.ndindex(*shape.batch):
        product[index] = blocked_matmul(a[index], b[index])
    return product.reshape(shape.result)


def _as_stacks(a: Operand, b: Operand, c: Operand, shape: ProductShape) -> tuple[Any, Any, Any]:
    """The arrays as views of two dimensions or more, broadcast to the axes that the products are stacked along."""
    a_array, b_array, c_array = a.array, b.array, c.array
    if b_array.ndim == 1:
        b_array = b_array[:, np.newaxis]
        c_array = c_array[..., np.newaxis]
    if a_array.ndim == 1:
        a_array = a_array[np.newaxis, :]
        c_array = np.expand_dims(c_array, -2)
    return _broadcast(a_array, shape.batch), _broadcast(b_array, shape.batch), c_array


def _broadcast(array: Any, batch: tuple[int, ...]) -> Any:
    """A NumPy array's or Matrix's view along these axes."""
    whole = (*batch, *array.shape[-2:])
    return np.broadcast_to(array, whole) if isinstance(array, np.ndarray) else array.broadcast_to(whole)
