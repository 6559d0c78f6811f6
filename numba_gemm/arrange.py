"""From three stacks in memory to the launches that multiply them: what is read in place, what is repacked first.

The same arrangement is carried out on a GPU (``execute.py``) and on the emulator (``emulate.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.arrays import Operand
from numba_gemm.choose import Tuned, choose
from numba_gemm.errors import KernelConstraintError
from numba_gemm.fp32 import repack
from numba_gemm.problem import ALIGNMENT, ITEMSIZE, Problem, padded_stride
from numba_gemm.spec import Addresses, Config, KernelLaunch, KernelSpec, TensorMap, first_alone
from numba_gemm.stack import (
    Batches,
    ProductShape,
    Shape,
    Stack,
    launch_axis,
    offsets,
    result_stack,
    simplified,
    stack_of,
)

#: alpha, beta, kernel: with the arrays, all that the choice of launches depends on.
Scales = tuple[float, float, str | None]

#: Parts of a workspace begin at multiples of this many bytes.
_WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True)
class Request:
    """Everything that an arrangement depends on; hashable.

    Attributes
    ----------
    extents : of the axes that the products are stacked along.
    a, b, c : M×K, K×N and M×N matrices along those axes.
    a_offset, b_offset, c_offset : their addresses modulo 16.
    dtype, c_dtype : elements of A and B, and of C.
    alpha, beta : scale factors; with alpha = 0 neither A nor B is read.
    kernel : a name, or None to choose.
    """

    extents: Shape
    a: Stack
    b: Stack
    c: Stack
    a_offset: int
    b_offset: int
    c_offset: int
    dtype: str
    c_dtype: str
    alpha: float = 1.0
    beta: float = 0.0
    kernel: str | None = None


def request_for(a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales) -> Request:
    """The request that a checked product of operands makes."""
    alpha, beta, kernel = scales
    return Request(
        shape.batch,
        stack_of(a.shape, a.strides, shape.batch),
        stack_of(b.shape, b.strides, shape.batch, column=True),
        result_stack(shape, c.strides, a_is_vector=len(a.shape) == 1, b_is_vector=len(b.shape) == 1),
        a.pointer % ALIGNMENT,
        b.pointer % ALIGNMENT,
        c.pointer % ALIGNMENT,
        a.dtype,
        c.dtype,
        alpha,
        beta,
        kernel,
    )


@dataclass(frozen=True)
class Arrangement:
    """The launches of a request, in order on one stream, and the workspace that they share.

    ``problem``, ``spec`` and ``config`` are those of the kernel that multiplies, ``main`` the index of its first
    launch; ``notes`` say in words what else is done and why.
    """

    problem: Problem
    spec: KernelSpec
    config: Config
    launches: tuple[KernelLaunch, ...]
    main: int
    workspace_bytes: int
    k_per_split: int
    notes: tuple[str, ...]

    @property
    def launch_count(self) -> int:
        """Launches in all."""
        return len(self.launches)


def arrange(request: Request, arch: tuple[int, int], sm_count: int, tuned: Tuned | None = None) -> Arrangement:
    """The launches that carry a request out on a GPU of this compute capability with so many SMs.

    ``tuned`` looks a problem up among measured choices.

    Raises
    ------
    KernelConstraintError, CompileError, ValueError : as :func:`numba_gemm.choose.choose` does.
    """
    try:
        return _Arranger(request, arch, sm_count, tuned, columns_too=True).result()
    except KernelConstraintError as error:
        try:
            return _Arranger(request, arch, sm_count, tuned, columns_too=False).result()
        except KernelConstraintError:
            raise error from None


class _Arranger:
    def __init__(
        self,
        request: Request,
        arch: tuple[int, int],
        sm_count: int,
        tuned: Tuned | None,
        *,
        columns_too: bool,
    ) -> None:
        self.request = request
        self.arch, self.sm_count, self.tuned = arch, sm_count, tuned
        self.columns_too = columns_too
        self.workspace_bytes = 0
        self.notes: list[str] = []

    def result(self) -> Arrangement:
        batches = simplified(Batches(self.request.extents, self.request.a, self.request.b, self.request.c))
        offset = {"a": self.request.a_offset, "b": self.request.b_offset, "c": self.request.c_offset}
        matrices = {
            name: _Matrix(name, getattr(batches, name), getattr(Addresses, name), offset[name]) for name in "abc"
        }
        a, b, c = matrices["a"], matrices["b"], matrices["c"]
        if self.columns_too and c.stack.layout(columns_too=False) is None and c.stack.layout() is not None:
            # C is column-major: its transpose, Bᵀ·Aᵀ, is row-major.
            a, b, c = b.transposed(), a.transposed(), c.transposed()
            self.notes.append("out is column-major: its transpose is computed, from the transposes of b and a")

        before: list[KernelLaunch] = []
        after: list[KernelLaunch] = []
        extents = batches.extents
        reads_factors = self.request.alpha != 0 and a.stack.columns > 0
        if reads_factors:
            a = self._readable(a, extents, before)
            b = self._readable(b, extents, before)
        if c.stack.layout(columns_too=False) is None:
            c = self._writable(c, extents, before, after)

        axis = launch_axis(batches)
        problem = self._problem(a, b, c, extents, axis, reads_factors)
        spec, config = choose(problem, self.request.kernel, arch=self.arch, sm_count=self.sm_count, tuned=self.tuned)
        reason = spec.unmet(problem, config)
        if reason is not None:
            raise KernelConstraintError(f"kernel {spec.name} can't take this product ({reason})")
        plan = spec.plan(problem, config)
        workspace = self._reserve(plan.workspace_bytes)
        products = [
            _moved(launch, a, b, c, elements, workspace)
            for elements in self._outer_offsets(a, b, c, extents, axis)
            for launch in plan.launches
        ]
        return Arrangement(
            problem,
            spec,
            config,
            first_alone((*before, *products, *after)),
            len(before) + plan.main,
            self.workspace_bytes,
            plan.k_per_split,
            (*self.notes, *plan.notes),
        )

    def _reserve(self, nbytes: int) -> int:
        """Room in the workspace: its offset."""
        begin = -(-self.workspace_bytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        if nbytes:
            self.workspace_bytes = begin + nbytes
        return begin

    def _readable(self, matrix: _Matrix, extents: Shape, before: list[KernelLaunch]) -> _Matrix:
        """The factor itself if a kernel can read it as it lies, else a packed copy, made by launches in ``before``."""
        if matrix.stack.layout(columns_too=self.columns_too) is not None:
            return matrix
        copy = self._packed_copy(matrix, extents, self.request.dtype)
        before += _copies(matrix, copy, extents, self.request.dtype)
        self.notes.append(f"{matrix.name} is repacked first: {_why(matrix.stack)}")
        return copy

    def _writable(
        self, matrix: _Matrix, extents: Shape, before: list[KernelLaunch], after: list[KernelLaunch]
    ) -> _Matrix:
        """A packed matrix to compute C in, copied to its place afterwards, and filled from it before if it is read."""
        copy = self._packed_copy(matrix, extents, self.request.c_dtype)
        if self.request.beta != 0:
            before += _copies(matrix, copy, extents, self.request.c_dtype)
        after += _copies(copy, matrix, extents, self.request.c_dtype)
        self.notes.append(f"the result is computed packed and copied to its place: {_why(matrix.stack)}")
        return copy

    def _packed_copy(self, matrix: _Matrix, extents: Shape, dtype: str) -> _Matrix:
        itemsize = ITEMSIZE[dtype]
        # Tensor-core kernels copy 16 bytes at a time, and TMA whole lines: none of a row of 16-bit elements is shared.
        row_stride = padded_stride(matrix.stack.columns) if itemsize == 2 else None
        stack, elements = matrix.stack.packed(extents, row_stride)
        begin = self._reserve(elements * itemsize)
        return _Matrix(matrix.name, stack, Addresses.workspace, 0, begin)

    def _problem(
        self, a: _Matrix, b: _Matrix, c: _Matrix, extents: Shape, axis: int | None, reads_factors: bool
    ) -> Problem:
        request = self.request
        a_layout, lda = a.stack.layout(columns_too=self.columns_too) or ("row", a.stack.row_stride)
        b_layout, ldb = b.stack.layout(columns_too=self.columns_too) or ("row", b.stack.row_stride)
        c_layout = c.stack.layout(columns_too=False)
        assert c_layout is not None  # _writable saw to it
        itemsize, c_itemsize = ITEMSIZE[request.dtype], ITEMSIZE[request.c_dtype]

        def stride(matrix: _Matrix) -> int:
            return 0 if axis is None else matrix.stack.batch_strides[axis]

        return Problem(
            a.stack.rows,
            b.stack.columns,
            a.stack.columns if reads_factors else 0,
            request.dtype,
            lda,
            ldb,
            c_layout[1],
            a.worst_offset(extents, axis, itemsize),
            b.worst_offset(extents, axis, itemsize),
            c.worst_offset(extents, axis, c_itemsize),
            request.alpha,
            request.beta,
            request.c_dtype,
            a_layout,
            b_layout,
            1 if axis is None else extents[axis],
            stride(a),
            stride(b),
            stride(c),
        )

    def _outer_offsets(
        self, a: _Matrix, b: _Matrix, c: _Matrix, extents: Shape, axis: int | None
    ) -> Iterable[tuple[int, int, int]]:
        """Offsets in bytes of the products (batches) that are launched one after another."""
        itemsize, c_itemsize = ITEMSIZE[self.request.dtype], ITEMSIZE[self.request.c_dtype]
        columns = [
            [elements * size for elements in offsets(_without(extents, axis), _without(x.stack.batch_strides, axis))]
            for x, size in ((a, itemsize), (b, itemsize), (c, c_itemsize))
        ]
        return zip(*columns, strict=True)


@dataclass(frozen=True)
class _Matrix:
    """A stack, which address it lies at, and how many bytes behind it."""

    name: str
    stack: Stack
    base: Any  # a member descriptor of Addresses
    offset: int  # of the address modulo 16
    begin: int = 0

    def transposed(self) -> _Matrix:
        return replace(self, stack=self.stack.transposed)

    def address(self, at: Addresses) -> int:
        base: int = self.base.__get__(at)
        return base + self.begin

    def worst_offset(self, extents: Shape, axis: int | None, itemsize: int) -> int:
        """The address modulo 16, or that of another matrix of the stack if this one's is 0."""
        if self.offset:
            return self.offset
        strides = [
            stride * itemsize % ALIGNMENT
            for stride, extent in zip(_without(self.stack.batch_strides, axis), _without(extents, axis), strict=True)
            if extent > 1
        ]
        return next((offset for offset in strides if offset), 0)


def _without(values: Shape, axis: int | None) -> Shape:
    return values if axis is None else values[:axis] + values[axis + 1 :]


def _moved(
    launch: KernelLaunch, a: _Matrix, b: _Matrix, c: _Matrix, elements: tuple[int, int, int], workspace: int
) -> KernelLaunch:
    """A launch of a plan on matrices that lie where these do, so many bytes further on."""
    inner: Callable[[Addresses], tuple[Any, ...]] = launch.values
    a_bytes, b_bytes, c_bytes = elements

    def values(at: Addresses) -> tuple[Any, ...]:
        return inner(
            Addresses(
                a.address(at) + a_bytes, b.address(at) + b_bytes, c.address(at) + c_bytes, at.workspace + workspace
            )
        )

    return replace(launch, values=values)


def _copies(source: _Matrix, target: _Matrix, extents: Shape, dtype: str) -> list[KernelLaunch]:
    """Launches that copy one stack of matrices to another of the same shape; repeated matrices are copied once."""
    axes = [
        axis
        for axis in zip(extents, source.stack.batch_strides, target.stack.batch_strides, strict=True)
        if axis[1] and axis[2]
    ]
    made = repack.copies(
        ITEMSIZE[dtype],
        (*(extent for extent, _, _ in axes), source.stack.rows, source.stack.columns),
        source.offset,  # for an address: only its alignment matters until the launch
        (*(stride for _, stride, _ in axes), source.stack.row_stride, source.stack.column_stride),
        target.offset,
        (*(stride for _, _, stride in axes), target.stack.row_stride, target.stack.column_stride),
    )
    launches = []
    for copy in made:
        from_bytes, to_bytes, *rest = copy.values

        def values(
            at: Addresses,
            from_bytes: int = from_bytes - source.offset,
            to_bytes: int = to_bytes - target.offset,
            rest: tuple[int, ...] = tuple(rest),
        ) -> tuple[Any, ...]:
            return (source.address(at) + from_bytes, target.address(at) + to_bytes, *rest)

        parameters = PARAMETERS[copy.spec.abi]
        launches.append(KernelLaunch(copy.spec, copy.config, copy.grid, parameters, values, overlaps=True))
    return launches


def _why(stack: Stack) -> str:
    return (
        f"the elements of its rows are {stack.column_stride} apart and those of its columns {stack.row_stride}, "
        "where neighbours are needed"
    )


def pack(launch: KernelLaunch, at: Addresses, encode: Callable[[TensorMap], bytes] | None = None) -> bytes:
    """The parameter bytes of a launch; ``encode`` makes the bytes of a tensor map on the GPU, or the emulator."""
    values = launch.values(at)
    if encode is None:
        return launch.parameters.pack(*values)
    return launch.parameters.pack(*(encode(value) if isinstance(value, TensorMap) else value for value in values))


def takes_tensor_maps(launch: KernelLaunch) -> bool:
    """Whether there are tensor maps among a launch's parameters."""
    return any(isinstance(value, TensorMap) for value in launch.values(Addresses(0, 0, 0, 0)))


def pointer_slots(launch: KernelLaunch) -> tuple[tuple[str, int], ...] | None:
    """Where the first three parameters come from, each ``("a" | "b" | "c", bytes behind it)``, if the rest is constant.

    None for a launch whose parameters depend on addresses in another way.
    """
    if takes_tensor_maps(launch):
        return None
    marks = Addresses(1 << 44, 2 << 44, 4 << 44, 8 << 44)
    zero, marked = pack(launch, Addresses(0, 0, 0, 0)), pack(launch, marks)
    if zero[24:] != marked[24:]:
        return None
    slots = []
    for begin in (0, 8, 16):
        (offset,), (value,) = struct.unpack_from("<q", zero, begin), struct.unpack_from("<q", marked, begin)
        name = {1 << 44: "a", 2 << 44: "b", 4 << 44: "c"}.get(value - offset)
        if name is None:
            return None
        slots.append((name, offset))
    return tuple(slots)
