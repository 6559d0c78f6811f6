"""Matrices that stay on the GPU between calls: :func:`device_put` and :class:`Matrix`."""

from __future__ import annotations

import math
import weakref
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.arrays.operand import packed_strides
from numba_gemm.arrays.streams import as_stream
from numba_gemm.device.context import Context, current_context
from numba_gemm.device.memory import DeviceBuffer
from numba_gemm.device.stream import Event, wait_event

#: The legacy default stream as the interfaces between packages write it.
LEGACY_STREAM = 1


class _Memory:
    """Device memory that one or more matrices are views of.

    It is given back on its stream, so it keeps the caller's object of that stream, if there is one, until then.
    """

    def __init__(self, nbytes: int, handle: int, stream: Any, context: Context) -> None:
        self.context = context
        self.stream = stream
        self.buffer: DeviceBuffer | None = DeviceBuffer(nbytes, handle)
        self._finalizer = weakref.finalize(self, _release, self.buffer, stream)
        self._finalizer.atexit = False

    def free(self) -> None:
        self.buffer = None
        self._finalizer()


def _release(buffer: DeviceBuffer, _stream: Any) -> None:
    try:
        buffer.free()
    except Exception:  # at the end of a process the context may be gone before the matrix
        buffer.pointer = 0


class Matrix:
    """An array in GPU memory, of any number of dimensions, as an operand of products.

    Made by :func:`device_put`. A product of two of them stays on the GPU; a product of one with a NumPy array is a
    NumPy array, and only the other operand is copied. CuPy, Numba and torch take it through
    ``__cuda_array_interface__`` without a copy (except bfloat16, for which that interface has no name: its type is
    given as two bytes, ``"<V2"``).

    Attributes
    ----------
    shape : dimensions.
    strides : bytes from element to element along each.
    dtype : NumPy dtype of the elements.
    stream : handle of the CUDA stream that its work is ordered on; 1 is the legacy default stream.
    """

    __numba_gemm_matrix__ = True
    __array_priority__ = 1000  # before a NumPy array in a @ b
    __array_ufunc__ = None  # numpy_array @ matrix comes to __rmatmul__

    __slots__ = ("__weakref__", "_memory", "_offset", "dtype", "shape", "stream", "strides")

    def __init__(
        self,
        memory: _Memory,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: int,
    ) -> None:
        self._memory = memory
        self._offset = offset
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.stream = stream

    @classmethod
    def empty(cls, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32, stream: Any = None) -> Matrix:
        """An uninitialised matrix in C order; ``stream`` as for :func:`device_put`.

        Raises
        ------
        NoDeviceError : if there is no GPU.
        CudaError : if it hasn't the memory.
        """
        wanted = np.dtype(dtype)
        if wanted.hasobject:
            raise TypeError(f"a Matrix can't hold {wanted} elements; pass an array of numbers")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        handle = _stream_handle(stream)
        context = current_context()
        memory = _Memory(math.prod(shape) * wanted.itemsize, handle, stream, context)
        return cls(memory, 0, shape, _packed(shape, wanted.itemsize), wanted, handle)

    def empty_like(self, shape: tuple[int, ...], dtype: npt.DTypeLike, stream: int) -> Matrix:
        """Another uninitialised matrix, for a result on ``stream``; it keeps that alive if this one does."""
        return Matrix.empty(shape, dtype, self._memory.stream if (stream or LEGACY_STREAM) == self.stream else stream)

    @property
    def pointer(self) -> int:
        """Device address of the first element; 0 if there are no elements.

        Raises
        ------
        ValueError : after :meth:`free`.
        """
        buffer = self._memory.buffer
        if buffer is None:
            raise ValueError("this Matrix has been freed; put the array on the GPU again with device_put")
        return buffer.pointer + self._offset if buffer.pointer else 0

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def freed(self) -> bool:
        """Whether :meth:`free` has been called on it or on a matrix that it shares memory with."""
        return self._memory.buffer is None

    @property
    def T(self) -> Matrix:  # noqa: N802 - NumPy's name
        """The same memory with the dimensions reversed."""
        return Matrix(self._memory, self._offset, self.shape[::-1], self.strides[::-1], self.dtype, self.stream)

    def swapaxes(self, first: int, second: int) -> Matrix:
        """The same memory with two dimensions exchanged."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape, strides = (tuple(own[axis] for axis in order) for own in (self.shape, self.strides))
        return Matrix(self._memory, self._offset, shape, strides, self.dtype, self.stream)

    def __getitem__(self, index: Any) -> Matrix:
        """A view by integers, slices, ``None`` and ``...``, as of a NumPy array.

        Raises
        ------
        TypeError : for an index that would need a copy.
        """
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            allowed = part is None or part is Ellipsis or isinstance(part, (int, slice, np.integer))
            if not allowed or isinstance(part, bool):
                raise TypeError(f"a Matrix is indexed by integers, slices, None and ..., not by {part!r}")
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)  # so that the result is a view also where every index is an integer
        # NumPy does the arithmetic, on addresses that it never reads.
        base = np.lib.stride_tricks.as_strided(np.empty(1, f"V{self.itemsize}"), self.shape, self.strides)
        view = base[parts]
        start = base.__array_interface__["data"][0]
        offset = self._offset + (view.__array_interface__["data"][0] - start if view.size else 0)
        return Matrix(self._memory, offset, view.shape, view.strides, self.dtype, self.stream)

    def broadcast_to(self, shape: tuple[int, ...]) -> Matrix:
        """A view of a larger shape by NumPy's rules, with strides of 0.

        Raises
        ------
        ValueError : if the shape isn't compatible.
        """
        base = np.lib.stride_tricks.as_strided(np.empty(1, f"V{self.itemsize}"), self.shape, self.strides)
        view = np.broadcast_to(base, shape)
        return Matrix(self._memory, self._offset, view.shape, view.strides, self.dtype, self.stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface by which CUDA packages share arrays."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": None if self.strides == _packed(self.shape, self.itemsize) else self.strides,
            "stream": self.stream,
        }

    def numpy(self) -> npt.NDArray[Any]:
        """A copy on the host, made after the work on the matrix's stream."""
        from numba_gemm.host.put import download

        return download(self)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a Matrix is in GPU memory: a NumPy array of it is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def copy_from(self, array: npt.ArrayLike) -> Matrix:
        """Overwrite the elements with those of a NumPy array of the same shape and dtype; returns ``self``.

        Raises
        ------
        TypeError, ValueError : for another dtype or shape, or a matrix that is a view with gaps.
        """
        from numba_gemm.host.put import upload

        source = np.asarray(array)
        if source.dtype != self.dtype:
            raise TypeError(f"copy_from: the array is {source.dtype} and the matrix {self.dtype}; use astype")
        if source.shape != self.shape:
            raise ValueError(f"copy_from: the array has shape {source.shape} and the matrix {self.shape}")
        upload(source, self)
        return self

    def free(self) -> None:
        """Give the memory back, after the work on the matrix's stream, for all views of it; a second call does nothing.

        Work that other packages put on other streams isn't waited for. Without a call the memory goes back with the
        last view.
        """
        self._memory.free()

    def __enter__(self) -> Matrix:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def __matmul__(self, other: Any) -> Any:
        from numba_gemm.api import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        from numba_gemm.api import matmul

        return matmul(other, self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a Matrix without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"Matrix(shape={self.shape}, dtype={self.dtype}{state})"

    def order_before(self, stream: int) -> None:
        """Make later work on ``stream`` wait for the work on the matrix's stream so far."""
        if stream != self.stream:
            event = Event()
            event.record(self.stream)
            wait_event(stream, event)

    def check_context(self, context: Context) -> None:
        """Raise ValueError if the matrix is in another GPU's memory than ``context``'s."""
        if self._memory.context.identity != context.identity:
            raise ValueError(
                f"this Matrix is on GPU {self._memory.context.device.ordinal}, and GPU {context.device.ordinal} is "
                "current now; make that one current again, or put the array on this one with device_put"
            )


def device_put(array: npt.ArrayLike, stream: Any = None) -> Matrix:
    """Copy an array to the GPU, to keep it there between calls.

    Parameters
    ----------
    array : a NumPy array of any shape, strides and numeric dtype, or what :func:`numpy.asarray` takes. The matrix is in
        C order, except that an array in Fortran order keeps it.
    stream : CUDA stream that the matrix's work is ordered on: a handle, or an object with one (``int(stream)``,
        ``.ptr``, ``.handle`` or ``.cuda_stream``); None for the legacy default stream, which other packages order
        their work by unless told otherwise. The copy itself is done when this returns.

    Returns
    -------
    A :class:`Matrix`.

    Raises
    ------
    TypeError : for an array of objects, or a ``stream`` that is none.
    NoDeviceError : if there is no GPU.
    CudaError : if it hasn't the memory.

    Examples
    --------
    >>> import numpy as np, numba_gemm as ng
    >>> weights = ng.device_put(np.ones((512, 512), np.float32))  # doctest: +SKIP
    >>> y = np.ones((4, 512), np.float32) @ weights  # doctest: +SKIP
    """
    from numba_gemm.host.put import upload

    source = np.asarray(array)
    if source.ndim > 1 and source.flags.f_contiguous and not source.flags.c_contiguous:
        matrix = Matrix.empty(source.shape[::-1], source.dtype, stream).T
    else:
        matrix = Matrix.empty(source.shape, source.dtype, stream)
    upload(source, matrix)
    return matrix


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array in C order, in bytes."""
    return tuple(stride * itemsize for stride in packed_strides(shape))


def _stream_handle(stream: Any) -> int:
    if stream is None:
        return LEGACY_STREAM
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0) or LEGACY_STREAM
    return (int(stream) if hasattr(type(stream), "__int__") else as_stream(stream)) or LEGACY_STREAM
