"""The calls of a NumPy programmer: :func:`matmul`, :func:`gemm`, :func:`plan`, :func:`kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from numba_gemm.arrays import Operand, as_operand, as_stream, empty_like_operand, probe_for, wrap_result
from numba_gemm.backends import HostOptions, choose_backend, host_options
from numba_gemm.catalog import CPU_BASELINE, LADDER, KernelInfo
from numba_gemm.problem import ITEMSIZE, check_inputs, check_output, check_scale, placed_by

if TYPE_CHECKING:
    from numba_gemm.plans import Plan

Device = Literal["auto", "cuda", "cpu", "emulator"]


def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    kernel: str | None = None,
    device: Device = "auto",
    stream: Any = None,
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The matrix product ``a @ b`` with np.matmul's semantics, accumulated in FP32.

    Parameters
    ----------
    a : (M, K) array of float32, float16 or bfloat16 (``ml_dtypes.bfloat16`` in NumPy), of any strides and alignment;
        (..., M, K) for a stack of matrices, (K,) for a row vector. A NumPy array, or a GPU array of Numba, CuPy, torch,
        JAX, or of any package with ``__cuda_array_interface__`` or DLPack. float32 products are IEEE FP32; 16-bit ones
        are the tensor cores'.
    b : (K, N) array, (..., K, N) for a stack, (K,) for a column vector, of the same dtype and in the same memory as
        ``a``. The axes of the stacks are broadcast against each other.
    out : array to write the product to, of the product's shape and of the inputs' dtype or float32, of any strides; may
        not overlap ``a`` or ``b``. Untouched if this call raises before it has launched anything.
    kernel : a name from :func:`kernels`, for instance ``"v7"``; None chooses by the shape.
    device : ``"auto"`` multiplies device arrays where they are, and NumPy arrays on the GPU, or, on a machine without
        one, with NumPy's own BLAS after one :class:`RuntimeWarning`. ``"cuda"`` insists on the GPU, ``"cpu"`` on the
        CPU. ``"emulator"`` runs the GPU kernel's PTX on the CPU, thread by thread, with every hazard an error: for
        small NumPy arrays.
    stream : for device arrays: the stream to run on, as a handle, an object with ``__cuda_stream__``, or a stream of
        Numba, CuPy or torch. The caller then sees to its order with the work on the arrays. None takes the arrays' own
        stream: for CuPy and torch their current one.
    memory_limit : for NumPy arrays on a GPU: bytes of its memory that operands and result may take; a product that
        needs more streams through it. None for the environment variable ``NUMBA_GEMM_MEMORY_LIMIT``, else most of what
        is free. Elsewhere it means nothing.
    progress : for NumPy arrays on a GPU: called as ``progress(done, total)``, in multiply-adds, while the product is
        computed block by block; what it raises ends the product, with ``out`` partly written. Elsewhere not called.

    Returns
    -------
    ``out``, or a new array of the kind of ``a``, without the axis of a vector; of two vectors in host memory a scalar.
    With device arrays the call returns before the product is done.

    Raises
    ------
    TypeError : for something that isn't an array, another dtype, mixed dtypes, or host memory mixed
        with device memory.
    ValueError : for shapes that don't match, an unknown kernel or device, an ``out`` that is read-only, of
        another shape, or overlaps an input, arrays on another GPU than the current one, or a ``memory_limit`` that is
        too small for any block.
    NoDeviceError : if a GPU is asked for and there is none.
    KernelConstraintError : if the named kernel can't take this product.

    Examples
    --------
    >>> import numpy as np, numba_gemm as ng
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    >>> ng.matmul(a, b, device="cpu")[0]
    array([3., 3., 3., 3.], dtype=float32)
    """
    if isinstance(out, tuple):  # as NumPy's ufuncs take it
        if len(out) != 1:
            raise ValueError(f"matmul: an out tuple must have exactly one entry, not {len(out)}; pass the array alone")
        (out,) = out
    return _product(a, b, out, "out", 1.0, 0.0, kernel, device, stream, host_options(memory_limit, progress))


def gemm(
    a: Any,
    b: Any,
    c: Any,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    kernel: str | None = None,
    device: Device = "auto",
    stream: Any = None,
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The BLAS form: ``c = alpha · a @ b + beta · c``, in place.

    Parameters
    ----------
    a, b : (..., M, K) and (..., K, N) arrays, as for :func:`matmul`; stacks are broadcast against each other.
    c : (..., M, N) array of the same kind, of their dtype or float32; read only if ``beta`` isn't 0, then written.
    alpha, beta : real numbers, rounded to float32. With ``alpha`` = 0, or K = 0, ``a`` and ``b`` aren't read.
    transpose_a, transpose_b : multiply by the transposes of the matrices instead, as a view like ``a.T`` would: then
        ``a`` is (..., K, M), ``b`` (..., N, K). No copy is made.
    kernel, device, stream, memory_limit, progress : as for :func:`matmul`.

    Returns
    -------
    ``c``.

    Raises
    ------
    As :func:`matmul`; TypeError also if ``alpha`` or ``beta`` is no real number or ``transpose_a`` or ``transpose_b``
    neither True nor False, ValueError if a scale is past float32, or if a vector is to be transposed.

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
    alpha, beta = check_scale("alpha", alpha), check_scale("beta", beta)
    transposes = (_flag("transpose_a", transpose_a), _flag("transpose_b", transpose_b))
    host = host_options(memory_limit, progress)
    return _product(a, b, c, "c", alpha, beta, kernel, device, stream, host, transposes)


def plan(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    kernel: str | None = None,
    device: Device = "auto",
) -> Plan:
    """Check, choose and arrange a product once; the plan then carries it out without doing so again.

    Nothing is multiplied yet. ``p(a, b, out=c)`` takes arrays of the shapes, strides, dtypes and place of these; only
    what can differ is checked then.

    Parameters
    ----------
    a, b, out : arrays like those to come, as for :func:`matmul`; without ``out`` one without gaps is assumed.
    alpha, beta : as for :func:`gemm`; a ``beta`` other than 0 needs ``out``.
    kernel, device : as for :func:`matmul`.

    Returns
    -------
    A :class:`Plan`, with ``kernel``, ``config``, ``workspace_bytes`` and ``explain()``.

    Raises
    ------
    As :func:`gemm`.

    Examples
    --------
    >>> import numpy as np, numba_gemm as ng
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    >>> p = ng.plan(a, b, device="cpu")
    >>> p.kernel, p(a, b)[0, 0]
    ('numpy', np.float32(3.0))
    """
    from numba_gemm.plans import Plan

    alpha, beta = check_scale("alpha", alpha), check_scale("beta", beta)
    if out is None and beta != 0:
        raise TypeError("plan: beta isn't 0 and out is None; pass the array that is to be scaled")
    a_operand, b_operand = as_operand("a", a), as_operand("b", b)
    shape = check_inputs(a_operand, b_operand)
    backend = choose_backend(kernel, device, a_operand, b_operand, stacklevel=4)
    place = placed_by(a_operand, b_operand)
    given = out is not None
    c_operand = as_operand("out", out if given else empty_like_operand(place, shape.result))
    shape = check_output(c_operand, a_operand, b_operand, shape)
    scales = (alpha, beta, kernel)
    chosen = None if 0 in shape.result else backend.arrange(a_operand, b_operand, c_operand, shape, scales)

    def on_host(a: Operand, b: Operand, c: Operand) -> None:
        backend.multiply(a, b, c, shape, scales, None)

    return Plan(
        (a_operand, b_operand, c_operand),
        shape,
        scales,
        chosen=chosen,
        run_on_host=None if place.on_device else on_host,
    )


def _product(
    a: Any,
    b: Any,
    c: Any,
    c_name: str,
    alpha: float,
    beta: float,
    kernel: str | None,
    device: str,
    stream: Any,
    host: HostOptions,
    transposes: tuple[bool, bool] = (False, False),
) -> Any:
    handle = None if stream is None else as_stream(stream)
    key: tuple[Any, ...] = ()
    if c is not None and probe_for(c) is not None:
        repeat = _repeat_call or _load_repeat_call()
        found = repeat(a, b, c, (alpha, beta, kernel, device, transposes), handle)
        if found is None:
            return c
        key = found
    a_operand = _transposed(as_operand("a", a, stream=handle or 0), transposes[0])
    b_operand = _transposed(as_operand("b", b, stream=handle or 0), transposes[1])
    try:
        shape = check_inputs(a_operand, b_operand)
    except ValueError as error:
        if not any(transposes):
            raise
        raise ValueError(
            f"{error} (the shapes after transpose_a={transposes[0]}, transpose_b={transposes[1]})"
        ) from None
    if c is not None:
        c_operand = as_operand(c_name, c, stream=handle or 0)
        shape = check_output(c_operand, a_operand, b_operand, shape)
    backend = choose_backend(kernel, device, a_operand, b_operand, host=host)
    place = placed_by(a_operand, b_operand)
    if handle is not None and not place.on_device:
        raise TypeError(
            "matmul: stream is given, but a and b are in host memory: their product is done on return; leave stream out"
        )
    given = c is not None
    if not given:
        c = empty_like_operand(place, shape.result, handle)
        c_operand = as_operand(c_name, c)
    if 0 not in shape.result:
        call = backend.multiply(a_operand, b_operand, c_operand, shape, (alpha, beta, kernel), handle)
        if call is not None and key:
            from numba_gemm.calls import remember

            remember(key, call)
    if given:
        return c
    return wrap_result(c, (a, b), handle)


_repeat_call: Callable[..., tuple[Any, ...] | None] | None = None


def _load_repeat_call() -> Callable[..., tuple[Any, ...] | None]:
    """``calls.repeat_call``, imported with the first device array: an import statement costs time at each call."""
    global _repeat_call  # noqa: PLW0603 - found once a process
    from numba_gemm.calls import repeat_call

    _repeat_call = repeat_call
    return repeat_call


def _flag(name: str, value: Any) -> bool:
    """A transposition as a bool; a letter of BLAS, of which ``"N"`` would count as true, is refused."""
    if value is True or value is False:
        return value
    if isinstance(value, (int, np.integer, np.bool_)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"gemm: {name} is {value!r}; pass True or False")


def _transposed(operand: Operand, wanted: bool) -> Operand:
    if not wanted:
        return operand
    if len(operand.shape) < 2:
        raise ValueError(
            f"gemm: {operand.name} has shape {operand.shape} and can't be transposed; "
            f"leave transpose_{operand.name}=False"
        )
    return operand.transposed()


class KernelTable(tuple[KernelInfo, ...]):
    """The kernels in ladder order; printed, a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from numba_gemm.report import kernel_table, render

        return render(kernel_table(self))


def kernels() -> KernelTable:
    """The ladder, foot first. ``kernel=`` also takes ``gemv``, ``thin``, ``skinny``, ``outer`` and the CUDA C++ twins.

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
