"""Device memory, ordered on a stream, and copies between it and NumPy arrays."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy.typing as npt

from numba_gemm.device.context import Context
from numba_gemm.device.driver import check, driver

#: Freed memory that the library's own pool keeps, as a share of the GPU's: mapping memory anew takes 2 ms a GB.
KEPT_SHARE = 1 / 64

_pools: dict[int, Any] = {}


def memory_pool(context: Context) -> Any:
    """The library's own pool of device memory in a context, for workspaces and for products of host arrays.

    The driver's default pool gives freed memory back to the system whenever a program waits for the GPU.
    """
    pool = _pools.get(context.identity)
    if pool is None:
        cu = driver()
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = context.device.ordinal
        pool = check(cu.cuMemPoolCreate(properties), "cuMemPoolCreate")
        attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        kept = cu.cuuint64_t(int(context.device.total_memory * KEPT_SHARE))
        check(cu.cuMemPoolSetAttribute(pool, attribute, kept), "cuMemPoolSetAttribute")
        pool = _pools.setdefault(context.identity, pool)
    return pool


class DeviceBuffer:
    """``nbytes`` of device memory, in the order of a stream; freed on its stream by :meth:`free`.

    It comes from ``pool`` (:func:`memory_pool`), else from the driver's default one.

    Used as a context manager it is freed at the end, without waiting for the work that uses it: the pool hands the
    memory on only to work that comes later on the stream.
    """

    __slots__ = ("nbytes", "pointer", "stream")

    def __init__(self, nbytes: int, stream: int, pool: Any = None) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.pointer = 0
        if nbytes:
            cu = driver()
            if pool is None:
                result = cu.cuMemAllocAsync(nbytes, stream)
            else:
                result = cu.cuMemAllocFromPoolAsync(nbytes, pool, stream)
            self.pointer = int(check(result, f"allocating {nbytes} bytes on the GPU"))

    def free(self) -> None:
        """Give the memory back once the stream's work so far is done; a second call does nothing."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            check(driver().cuMemFreeAsync(pointer, self.stream), "cuMemFreeAsync")

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()


def _copy_2d(rows: int, row_bytes: int, *, to_device: bool) -> Any:
    cu = driver()
    copy = cu.CUDA_MEMCPY2D()
    host, device = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType, copy.dstMemoryType = (host, device) if to_device else (device, host)
    copy.WidthInBytes = row_bytes
    copy.Height = rows
    return copy


def copy_to_device(pointer: int, array: npt.NDArray[Any], stream: int) -> None:
    """Copy a 2-D array whose rows are contiguous (any row stride ≥ a row) to a packed matrix at ``pointer``."""
    rows, columns = array.shape
    row_bytes = columns * array.itemsize
    copy = _copy_2d(rows, row_bytes, to_device=True)
    copy.srcHost = array.__array_interface__["data"][0]
    copy.srcPitch = array.strides[0] if rows > 1 else row_bytes
    copy.dstDevice = pointer
    copy.dstPitch = row_bytes
    check(driver().cuMemcpy2DAsync(copy, stream), f"copying {rows}×{columns} {array.dtype} to the GPU")


def copy_to_host(array: npt.NDArray[Any], pointer: int, stream: int) -> None:
    """Copy a packed matrix at ``pointer`` into a 2-D array whose rows are contiguous."""
    rows, columns = array.shape
    row_bytes = columns * array.itemsize
    copy = _copy_2d(rows, row_bytes, to_device=False)
    copy.srcDevice = pointer
    copy.srcPitch = row_bytes
    copy.dstHost = array.__array_interface__["data"][0]
    copy.dstPitch = array.strides[0] if rows > 1 else row_bytes
    check(driver().cuMemcpy2DAsync(copy, stream), f"copying {rows}×{columns} {array.dtype} to the host")


def rows_are_contiguous(array: npt.NDArray[Any]) -> bool:
    """Whether :func:`copy_to_device` and :func:`copy_to_host` can copy this 2-D array as it lies."""
    rows, columns = array.shape
    row_bytes = columns * array.itemsize
    return (columns == 1 or array.strides[1] == array.itemsize) and (rows == 1 or array.strides[0] >= row_bytes)


def fill_bytes(pointer: int, value: int, nbytes: int, stream: int = 0) -> None:
    """Set every byte of device memory, for instance to poison an output before a run."""
    check(driver().cuMemsetD8Async(pointer, value, nbytes, stream), "cuMemsetD8Async")
