"""The calls of a NumPy programmer: :func:`matmul`, :func:`gemm`, :func:`kernels`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays import Operand, as_operand, empty_like_operand, is_numba_array
from numba_gemm.catalog import CPU_BASELINE, LADDER, get_spec
from numba_gemm.problem import ITEMSIZE, check_inputs, check_output, check_scale

Device = Literal["auto", "cuda", "cpu", "emulator"]
_DEVICES = ("auto", "cuda", "cpu", "emulator")

#: alpha, beta, kernel, device of a call.
Options = tuple[float, float, str | None, str]


def matmul(a: Any, b: Any, *, out: Any = None, kernel: str | None = None, device: Device = "auto") -> Any:
    """The matrix product ``a @ b``, accumulated in FP32.

    Parameters
    ----------
    a : (M, K) NumPy array or Numba device array of float32, float16 or bfloat16 (``ml_dtypes.bfloat16``), of any
        strides and alignment. float32 products are IEEE FP32; 16-bit ones are the tensor cores'.
    b : (K, N) array of the same dtype and in the same memory as ``a``.
    out : (M, N) array of their dtype, or of float32, to write the product to; may not overlap ``a`` or ``b``.
        Untouched if this call raises before it has launched anything.
    kernel : a name from :func:`kernels`, for instance ``"v7"``; None chooses by the shape.
    device : ``"auto"`` multiplies device arrays where they are, and NumPy arrays on the GPU, or, on a machine without
        one, with NumPy's own BLAS after one :class:`RuntimeWarning`. ``"cuda"`` insists on the GPU, ``"cpu"`` on the
        CPU. ``"emulator"`` runs the GPU kernel's PTX on the CPU, thread by thread, with every hazard an error: for
        small NumPy arrays.

    Returns
    -------
    ``out``, or a new array of the kind of ``a``. With device arrays the call returns before the product is done: it
    is ordered on their stream.

    Raises
    ------
    TypeError : for something that isn't an array, another dtype, mixed dtypes, or host memory mixed
        with device memory.
    ValueError : for shapes that don't match, an unknown kernel or device, or an ``out`` that is read-only, of
        another shape, or overlaps an input.
    NoDeviceError : if a GPU is asked for and there is none.
    KernelConstraintError : if the named kernel can't take this product.

    Examples
    --------
    >>> import numpy as np, numba_gemm as ng
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    >>> ng.matmul(a, b, device="cpu")[0]
    array([3., 3., 3., 3.], dtype=float32)
    """
    return _product(a, b, out, "out", 1.0, 0.0, kernel, device)


def gemm(
    a: Any,
    b: Any,
    c: Any,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    kernel: str | None = None,
    device: Device = "auto",
) -> Any:
    """The BLAS form: ``c = alpha · a @ b + beta · c``, in place.

    Parameters
    ----------
    a, b : (M, K) and (K, N) arrays, as for :func:`matmul`.
    c : (M, N) array of the same kind, of their dtype or float32; read only if ``beta`` isn't 0, then written.
    alpha, beta : real numbers, rounded to float32. With ``alpha`` = 0, or K = 0, ``a`` and ``b`` aren't read.
    kernel, device : as for :func:`matmul`.

    Returns
    -------
    ``c``.

    Raises
    ------
    As :func:`matmul`; TypeError also if ``alpha`` or ``beta`` is no real number, ValueError if it is past float32.

    Examples
    --------
    >>> import numpy as np, numba_gemm as ng
    >>> a, b, c = (np.ones((2, 2), np.float32) for _ in range(3))
    >>> ng.gemm(a, b, c, alpha=2.0, beta=1.0, device="cpu")
    array([[5., 5.],
           [5., 5.]], dtype=float32)
    """
    if c is None:
        raise TypeError("gemm: c is None; pass the array to update, or use matmul(a, b) for a new one")
    return _product(a, b, c, "c", check_scale("alpha", alpha), check_scale("beta", beta), kernel, device)


def _product(
    a: Any,
    b: Any,
    c: Any,
    c_name: str,
    alpha: float,
    beta: float,
    kernel: str | None,
    device: str,
) -> Any:
    options = (alpha, beta, kernel, device)
    if c is not None and is_numba_array(a):
        from numba_gemm.execute import repeat_call

        if repeat_call(a, b, c, options):
            return c
    a_operand, b_operand = as_operand("a", a), as_operand("b", b)
    m, n, _ = check_inputs(a_operand, b_operand)
    if c is not None:
        c_operand = as_operand(c_name, c)
        check_output(c_operand, a_operand, b_operand)
    backend = _backend(kernel, device, a_operand)

    if c is None:
        c = empty_like_operand(a_operand, (m, n), 0)
        c_operand = as_operand(c_name, c)
    if m == 0 or n == 0:
        return c
    backend(a_operand, b_operand, c_operand, options)
    return c


def _backend(kernel: str | None, device: str, a: Operand) -> Any:
    """The function that carries the product out; every check of ``kernel`` and ``device`` is here."""
    if device not in _DEVICES:
        raise ValueError(f"device is {device!r}; it must be one of {', '.join(map(repr, _DEVICES))}")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is {kernel!r}; pass its name, for instance 'v7'")
    if kernel is not None and kernel != CPU_BASELINE:
        get_spec(kernel)
    if a.on_device:
        if device in ("cpu", "emulator") or kernel == CPU_BASELINE:
            raise ValueError(
                f"{a.name} is {a.place}, which the CPU can't multiply; use device='auto' and a GPU kernel, or "
                f"{a.name}.copy_to_host()"
            )
        return _on_device_arrays
    if kernel == CPU_BASELINE:
        if device not in ("auto", "cpu"):
            raise ValueError(f"kernel 'cpu' doesn't run on device {device!r}; use device='cpu'")
        return _on_cpu
    if device == "cpu":
        if kernel is not None:
            raise ValueError(
                f"kernel {kernel!r} doesn't run on device 'cpu'; use device='cuda', or kernel='cpu', the CPU baseline"
            )
        return _on_cpu

    if device == "emulator":
        return _on_emulator

    from numba_gemm.device.driver import driver, is_available

    if device == "auto" and kernel is None and not is_available():
        _warn_no_gpu()
        return _on_cpu
    driver()  # raises NoDeviceError with what was looked for
    return _on_host_arrays


def _on_device_arrays(a: Operand, b: Operand, c: Operand, options: Options) -> None:
    from numba_gemm.execute import multiply_device

    alpha, beta, kernel, _ = options
    multiply_device(a, b, c, alpha=alpha, beta=beta, kernel=kernel, options=options)


def _on_host_arrays(a: Operand, b: Operand, c: Operand, options: Options) -> None:
    from numba_gemm.execute import multiply_host

    alpha, beta, kernel, _ = options
    multiply_host(a.array, b.array, c.array, alpha=alpha, beta=beta, kernel=kernel)


def _on_emulator(a: Operand, b: Operand, c: Operand, options: Options) -> None:
    from numba_gemm.emulate import multiply_emulated

    alpha, beta, kernel, _ = options
    multiply_emulated(a.array, b.array, c.array, alpha=alpha, beta=beta, kernel=kernel)


def _on_cpu(a: Operand, b: Operand, c: Operand, options: Options) -> None:
    alpha, beta, kernel, _ = options
    target: npt.NDArray[Any] = c.array
    a_array, b_array = a.array, b.array
    if alpha == 1 and beta == 0 and kernel is None and a.dtype == "float32" and a.shape[1]:
        np.matmul(a_array, b_array, out=target)
        return
    if a.dtype != "float32":  # as on the GPU: products and sums in FP32, rounded once to the type of C
        a_array, b_array = a_array.astype(np.float32), b_array.astype(np.float32)
    product: Any
    if alpha == 0 or a.shape[1] == 0:
        product = np.float32(0)
    elif kernel == CPU_BASELINE:
        from numba_gemm.fp32.cpu import blocked_matmul

        product = blocked_matmul(a_array, b_array)
    else:
        product = np.matmul(a_array, b_array)
    if alpha != 1:
        product = product * np.float32(alpha)
    if beta != 0:
        product = product + np.float32(beta) * target.astype(np.float32)
    with np.errstate(over="ignore"):  # past the range of float16 lies infinity
        target[...] = np.asarray(product).astype(target.dtype)


_warned_no_gpu = False


def _warn_no_gpu() -> None:
    global _warned_no_gpu  # noqa: PLW0603 - said once a process
    if not _warned_no_gpu:
        _warned_no_gpu = True
        warnings.warn(
            "numba_gemm found no NVIDIA GPU, so this product and later ones use NumPy's BLAS on the CPU. "
            "device='cpu' says so without a warning; device='cuda' raises instead; `numba-gemm info` tells what "
            "was looked for.",
            RuntimeWarning,
            stacklevel=5,
        )


@dataclass(frozen=True)
class KernelInfo:
    """One row of the ladder: a name for ``kernel=``, and what the kernel is."""

    name: str
    title: str
    idea: str
    block_tile: tuple[int, int, int] | None
    thread_tile: tuple[int, int] | None
    threads: int | None
    loads_per_fma: float | None
    dtypes: tuple[str, ...]
    min_arch: tuple[int, int] | None


class KernelTable(tuple[KernelInfo, ...]):
    """The kernels in ladder order; printed, a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from numba_gemm.report import kernel_table, render

        return render(kernel_table(self))


def kernels() -> KernelTable:
    """The ladder: every kernel that ``kernel=`` takes, foot first.

    Examples
    --------
    >>> import numba_gemm as ng
    >>> [kernel.name for kernel in ng.kernels()][:3]
    ['cpu', 'v1', 'v2']
    """
    baseline = KernelInfo(
        CPU_BASELINE,
        "baseline",
        "cache-blocked i-k-j loops on the CPU",
        None,
        None,
        None,
        None,
        tuple(ITEMSIZE),
        None,
    )
    return KernelTable(
        (
            baseline,
            *(
                KernelInfo(
                    spec.name,
                    spec.title,
                    spec.idea,
                    spec.block_tile,
                    spec.thread_tile,
                    spec.threads,
                    spec.loads_per_fma,
                    spec.dtypes,
                    spec.min_arch,
                )
                for spec in LADDER.values()
            ),
        )
    )
