"""C = alpha · A · B + beta · C with C, and A or B or both, in host memory: layouts, kernel, blocks, and the run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_gemm.choose import for_blocks, in_one_run, suits_blocks
from numba_gemm.device.context import Context, current_context
from numba_gemm.errors import CudaError, KernelConstraintError
from numba_gemm.execute import Prepared, prepare, prepare_form
from numba_gemm.host.blocks import GRAIN, Blocking, Shape, choose_blocks, is_taken_whole
from numba_gemm.host.engine import BlockForm, Engine, free_memory, kept_memory
from numba_gemm.host.engines import engine, lane
from numba_gemm.host.lane import MEDIUM_BYTES, SMALL_BYTES
from numba_gemm.host.matrix import Matrix
from numba_gemm.host.operands import Array, Call, Operand, Stack, Stacks, describe, hosted
from numba_gemm.host.pinned import is_page_locked
from numba_gemm.host.pipeline import Executors, Pipeline, Progress
from numba_gemm.host.steps import Home, Multiply, Slot, product_steps
from numba_gemm.problem import ALIGNMENT, Problem

#: Bytes of device memory that products with NumPy arrays may take, where ``memory_limit`` doesn't say.
LIMIT_VARIABLE = "NUMBA_GEMM_MEMORY_LIMIT"
#: Of the memory that is free, if neither says.
FREE_SHARE = 0.8
#: Blocks have forms of their own if such a form takes no more than so many times the best one's time for the whole.
FREE_FORM_COST = 1.25
_UNLIMITED = 1 << 62


def multiply_host(
    a: Array | Matrix,
    b: Array | Matrix,
    c: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    kernel: str | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> None:
    """C = alpha · A · B + beta · C on NumPy arrays, through the GPU; returns when C is there.

    Copies in both directions and multiplications overlap, block by block, and a product that GPU memory can't hold
    streams through it.

    Parameters
    ----------
    a, b : (…, m, k) and (…, k, n) NumPy arrays of any strides, broadcast to one batch shape; or
        :class:`~numba_gemm.host.matrix.Matrix`, which is used where it is.
    c : (…, m, n) NumPy array of any strides, of the dtype of A and B or float32; m, n ≥ 1. Page-locked arrays
        (:func:`~numba_gemm.host.pinned.pinned_empty`) are copied without staging.
    alpha, beta : scale factors; beta = 0 means that C isn't read.
    kernel : name of a kernel, or None to choose by rule.
    memory_limit : bytes of GPU memory for operands and result (workspace of a split-K kernel comes on top); None for
        the environment variable ``NUMBA_GEMM_MEMORY_LIMIT``, else 0.8 of what is free. Products of up to 48 MiB are
        taken whole where neither says otherwise.
    progress : called in this thread as ``progress(done, total)``, in multiply-adds. What it raises ends the product:
        ``c`` may be partly written.

    Raises
    ------
    ValueError : if ``memory_limit`` is too small for even the smallest blocks.
    KernelConstraintError : if the named kernel can't take the product.
    CudaError : if the GPU has too little memory, or another error of the driver.

    Notes
    -----
    The same call with the same ``memory_limit`` gives the same bits: blocks follow from shapes, layouts and the limit
    alone, and page-locked arrays are cut as others are. The kernel is chosen for the whole product. Past 48 MiB, where
    forms of it that add the terms of an element in one run are nearly as fast as its best one, each block takes one of
    those; they all give the same bits, so that neither cutting nor the limit changes any. Else all blocks take the form
    that was chosen for the whole product, and one that divides K among blocks of threads according to the number of
    tiles can divide it otherwise in a smaller block. K itself is cut only where blocks of 64 rows and columns with all
    of K don't fit the limit; sums are then carried from block to block in FP32, in a fixed order.
    """
    if c.size == 0:
        return
    if a.shape[-1] == 0 or alpha == 0:
        _scale(c, beta)
        return
    context = current_context()
    for operand in (a, b):
        if isinstance(operand, Matrix):
            operand.check_context(context)
    if memory_limit is None and _multiply_staged_whole(a, b, c, alpha, beta, kernel, context):
        if progress is not None:
            total = c.size * a.shape[-1]
            progress(total, total)
        return
    stacks, call = describe(_usable(a), _usable(b), c, alpha, beta)
    total = len(stacks.c) * call.batch * call.m * call.n * call.k
    matrices = [operand for operand in (a, b) if isinstance(operand, Matrix)]
    form, call, blocking = plan_blocks(call, kernel, context, memory_limit)
    with engine(context) as (own, executors):
        for matrix in matrices:
            for stream in own.compute:
                matrix.order_before(stream)
        run_blocks(own, executors, call, blocking, stacks, form, progress, total)


def plan_blocks(
    call: Call, kernel: str | None, context: Context, memory_limit: int | None
) -> tuple[BlockForm, Call, Blocking]:
    """The kernel, the product with the layouts that the kernel takes, and the blocks."""
    form, fitted = _form_of_blocks(call, kernel, context)
    limit = _memory_limit(memory_limit, context, fitted.shape)
    blocking = choose_blocks(fitted.shape, limit, GRAIN)
    if blocking.block_k < call.k and call.c_dtype != np.float32:
        # Sums go from one block of k to the next, and must not be rounded to 16 bits between them.
        form, fitted = _form_of_blocks(replace(call, c_dtype=np.dtype(np.float32)), kernel, context)
        blocking = choose_blocks(fitted.shape, limit, GRAIN)
    return form, fitted, blocking


@functools.lru_cache(maxsize=1024)
def _form_of_blocks(call: Call, kernel: str | None, context: Context) -> tuple[BlockForm, Call]:
    """What multiplies the blocks of a product, and the product with the layouts that it takes."""
    whole, fitted = prepare_call(call, kernel, context)
    device = context.device
    found = in_one_run(whole.spec, fitted.problem(), device.compute_capability, device.sm_count)
    # One launch of a small product has the bits of its best form, so its blocks have that form too.
    free = found is not None and found[1] <= FREE_FORM_COST and not is_taken_whole(fitted.shape, GRAIN)
    return BlockForm(whole, free), fitted


def run_blocks(
    own: Engine,
    executors: Executors,
    call: Call,
    blocking: Blocking,
    stacks: Stacks,
    form: Any,
    progress: Progress | None = None,
    total: int = 0,
) -> None:
    """Run a blocked product on an engine."""
    shape = call.shape
    sizes = dict(zip("abc", blocking.slot_bytes(shape), strict=True))
    slots: dict[Slot, int] = {}
    offset = 0
    for matrix, slot_count in zip("abc", blocking.slots, strict=True):
        for number in range(slot_count if sizes[matrix] else 0):
            slots[Slot(matrix, number)] = offset
            offset += sizes[matrix]
    arrays = {
        name: [_first(stack, operand) for stack in own_stacks if stack.array is not None]
        for name, own_stacks, operand in (("a", stacks.a, call.a), ("b", stacks.b, call.b), ("c", stacks.c, None))
    }
    identities: list[tuple[Hashable, Hashable]] = [
        (x.pointer, y.pointer) for x, y in zip(stacks.a, stacks.b, strict=True)
    ]
    base = own.allocate(offset)
    try:

        def launch(step: Multiply, address: Any, stream: Any) -> None:
            problem, a, b, c = _block(call, step, address, stacks)
            own.multiply(problem, form, a, b, c, stream)

        Pipeline(
            own,
            executors,
            slots={slot: base + at for slot, at in slots.items()},
            arrays=arrays,
            dtypes={"a": call.dtype, "b": call.dtype, "c": call.c_dtype},
            launch=launch,
            progress=progress,
            total=total,
        ).run(product_steps(shape, blocking, identities))
    except BaseException:
        with contextlib.suppress(CudaError):  # of a context with an error, which is on its way already
            own.free(base)
        raise
    own.free(base)


def _first(stack: Stack, operand: Operand | None) -> npt.NDArray[Any]:
    """The host stack, or its one matrix where all products share it."""
    assert stack.array is not None
    return stack.array[:1] if operand is not None and stack.shared else stack.array


def _block(call: Call, step: Multiply, address: Any, stacks: Stacks) -> tuple[Problem, int, int, int]:
    """One multiplication as a problem, and where its matrices lie."""
    product, batch, rows, columns = step.part
    depth, itemsize = step.depth, call.dtype.itemsize

    def place(home: Home | None, operand: Operand, stack: Stack, row: int, column: int) -> tuple[int, int, int]:
        if home is not None:
            first = batch[0] if operand.apart else home.part.batch[0]
            pitch, apart = home.frame.pitch, home.frame.elements
            return address(home) + home.element(first, row, column) * itemsize, pitch, apart if operand.apart else 0
        offset = sum(at * stride for at, stride in zip((batch[0], row, column), stack.strides, strict=True))
        return stack.pointer + offset, operand.pitch, operand.apart

    a, lda, a_apart = place(step.a, call.a, stacks.a[product], rows[0], depth[0])
    b, ldb, b_apart = place(step.b, call.b, stacks.b[product], depth[0], columns[0])
    c = address(step.c) + step.c.element(batch[0], rows[0], columns[0]) * call.c_dtype.itemsize
    count = batch[1] - batch[0]
    problem = Problem(
        rows[1] - rows[0],
        columns[1] - columns[0],
        depth[1] - depth[0],
        call.dtype.name,
        lda,
        ldb,
        step.c.frame.pitch,
        a % ALIGNMENT,
        b % ALIGNMENT,
        c % ALIGNMENT,
        call.alpha,
        1.0 if step.accumulate else call.beta,
        call.c_dtype.name,
        "column" if call.a.column_major else "row",
        "column" if call.b.column_major else "row",
        count,
        a_apart if count > 1 else 0,
        b_apart if count > 1 else 0,
        step.c.frame.elements if count > 1 else 0,
    )
    return problem, a, b, c


# --- layouts and kernel


@functools.lru_cache(maxsize=1024)
def prepare_call(call: Call, kernel: str | None, context: Context) -> tuple[Prepared, Call]:
    """The kernel for a product, and the product with the layouts in which that kernel takes it.

    Host arrays go to the device as they lie, also column by column; where the kernel wants rows, they are transposed
    while they are copied to staging memory.

    Raises
    ------
    KernelConstraintError : if no layout serves, or an operand on the device would have to be transposed.
    """
    choices = [call]
    for a_too, b_too in ((False, True), (True, False), (True, True)):
        a, b = call.a, call.b
        if a_too:
            if not a.column_major or a.on_device:
                continue
            a = hosted(call.m, call.k, call.dtype.itemsize, False, a.apart != 0)
        if b_too:
            if not b.column_major or b.on_device:
                continue
            b = hosted(call.k, call.n, call.dtype.itemsize, False, b.apart != 0)
        choices.append(replace(call, a=a, b=b))
    failure: KernelConstraintError | None = None
    for choice in choices:
        try:
            return _prepare_for_blocks(choice.problem(), kernel, context), choice
        except KernelConstraintError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _prepare_for_blocks(problem: Problem, kernel: str | None, context: Context) -> Prepared:
    """The kernel for a product, in a form that its blocks can have as well."""
    prepared = prepare(problem, kernel, context)
    if suits_blocks(prepared.config):
        return prepared
    config = for_blocks(problem, context.device.compute_capability, context.device.sm_count)
    return prepare_form(problem, prepared.spec, config, context)


def _usable(operand: Array | Matrix) -> Array | Matrix:
    """The operand, or a copy on the host of a matrix on the device whose rows and columns both have gaps."""
    return operand.numpy() if isinstance(operand, Matrix) and not _is_usable(operand) else operand


def _is_usable(matrix: Matrix) -> bool:
    """Whether a kernel can read the matrix as it lies, by rows or by columns."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.strides[-2:]
    return matrix.itemsize in (row_stride, column_stride) or rows == 1 or columns == 1


def _memory_limit(given: int | None, context: Context, shape: Shape) -> int:
    """The limit of a call; with none, what our pool keeps if the product fits there, else a share of what is free."""
    if given is not None:
        return int(given)
    text = os.environ.get(LIMIT_VARIABLE)
    if text:
        if not text.strip().isdecimal() or int(text) == 0:
            raise ValueError(f"{LIMIT_VARIABLE} is {text!r}; it must be a number of bytes, for instance {2**30}")
        return int(text)
    kept = kept_memory(context)
    if choose_blocks(shape, _UNLIMITED, GRAIN).device_bytes(shape) <= kept:
        return kept
    return int((kept + free_memory()) * FREE_SHARE)


def _scale(c: Array, beta: float) -> None:
    """C = beta · C, in float32; zeros for beta = 0, whatever C holds."""
    if beta == 0:
        c[...] = 0
    elif beta != 1:
        with np.errstate(over="ignore"):
            c[...] = (np.float32(beta) * c.astype(np.float32)).astype(c.dtype)


def _multiply_staged_whole(
    a: Array | Matrix, b: Array | Matrix, c: Array, alpha: float, beta: float, kernel: str | None, context: Context
) -> bool:
    """Carry the product out if it fits a staging buffer, and its arrays aren't page-locked and worth a direct copy."""
    nbytes = _host_bytes(a, b, c)
    if nbytes > MEDIUM_BYTES or os.environ.get(LIMIT_VARIABLE):
        return False
    lane_bytes = SMALL_BYTES if nbytes <= SMALL_BYTES else MEDIUM_BYTES
    if lane_bytes == MEDIUM_BYTES and all(_is_page_locked(operand) for operand in (a, b, c)):
        return False
    key = (
        a.shape, a.strides, a.dtype, _alignment(a),
        b.shape, b.strides, b.dtype, _alignment(b),
        c.shape, c.strides, c.dtype, alpha, beta, kernel,
    )  # fmt: skip
    with lane(context, lane_bytes) as own:
        ready = own.find(key)
        if ready is None:
            if any(isinstance(operand, Matrix) and not _is_usable(operand) for operand in (a, b)):
                return False
            stacks, call = describe(a, b, c, alpha, beta)
            if len(stacks.c) > 1:
                return False
            form, call = prepare_call(call, kernel, context)
            ready = own.make(key, a, b, c, stacks, call, form)
        own.multiply(ready, a, b, c)
    return True


def _alignment(operand: Array | Matrix) -> int | None:
    return operand.pointer % ALIGNMENT if isinstance(operand, Matrix) else None


def _host_bytes(*operands: Array | Matrix) -> int:
    """Bytes of operands on the host, repeated matrices of a broadcast batch once."""
    total = 0
    for operand in operands:
        if isinstance(operand, Matrix):
            continue
        nbytes = operand.nbytes
        for extent, stride in zip(operand.shape[:-2], operand.strides[:-2], strict=True):
            if stride == 0:
                nbytes //= extent
        total += nbytes
    return total


def _is_page_locked(operand: Array | Matrix) -> bool:
    return isinstance(operand, Matrix) or is_page_locked(operand.__array_interface__["data"][0], 1)
