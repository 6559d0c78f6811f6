"""Problem: one frozen description of a product, and every check of a call's arguments.

After a Problem is built nothing checks shapes, dtypes or strides again.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from numba_gemm.arrays import HOST, MATRIX, Operand, overlap, overlaps_itself
from numba_gemm.stack import MAX_DIMENSION, ProductShape, broadcast, product_shape

#: Element types of A and B, and their bytes.
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
ALIGNMENT = 16  # bytes of the widest access

#: Elements of 16 bits in 16 bytes, and in a line of L2, of which TMA reads as many as a row of its box touches.
_WIDTH, _LINE = ALIGNMENT // 2, 64


def padded_stride(elements: int) -> int:
    """The stride of copied rows of so many 16-bit elements: none shares more lines of L2 than it has to.

    A multiple of 128 bytes, or the power of two from 16 bytes on that holds a shorter row: twice as long at most.
    """
    if elements > _LINE // 2:
        return -(-elements // _LINE) * _LINE
    return max(_WIDTH, 1 << (elements - 1).bit_length()) if elements else 0


def shares_lines(inner: int, stride: int) -> bool:
    """Whether boxes of rows of ``inner`` 16-bit elements, as far apart as a stride says, begin amid lines of L2."""
    return bool(stride % _LINE) and not (inner <= stride < _LINE and _LINE % stride == 0)


@dataclass(frozen=True)
class Problem:
    """C[m, n] = alpha · A[m, k] · B[k, n] + beta · C, once or for each matrix of a batch.

    Attributes
    ----------
    m, n, k : dimensions.
    dtype : element type of A and B.
    lda, ldb, ldc : strides in elements, of rows, or of columns where the layout is ``"column"``; in the other
        direction elements are neighbours.
    a_offset, b_offset, c_offset : addresses of the matrices modulo 16 bytes.
    alpha, beta : scale factors; beta = 0 means that C isn't read.
    c_dtype : element type of C, that of A and B or float32; empty for that of A and B.
    a_layout, b_layout : ``"row"`` or ``"column"``.
    batch : products of this shape.
    batch_stride_a, batch_stride_b, batch_stride_c : elements from a matrix of the batch to the next; 0 where all use
        the same one (never for C).
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    lda: int = 0
    ldb: int = 0
    ldc: int = 0
    a_offset: int = 0
    b_offset: int = 0
    c_offset: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    c_dtype: str = ""
    a_layout: str = "row"
    b_layout: str = "row"
    batch: int = 1
    batch_stride_a: int = 0
    batch_stride_b: int = 0
    batch_stride_c: int = 0

    def __post_init__(self) -> None:
        if not self.c_dtype:
            object.__setattr__(self, "c_dtype", self.dtype)

    @classmethod
    def packed(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str = "float32",
        alpha: float = 1.0,
        beta: float = 0.0,
        c_dtype: str = "",
    ) -> Problem:
        """A product of row-major matrices without gaps between rows, at 16-byte-aligned addresses."""
        return cls(m, n, k, dtype, lda=k, ldb=n, ldc=n, alpha=alpha, beta=beta, c_dtype=c_dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiply and an add for each of batch·m·n·k terms."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that must cross device memory: each input read once, C written once."""
        c_passes = 2 if self.beta != 0 else 1
        a_matrices = self.batch if self.batch_stride_a else 1
        b_matrices = self.batch if self.batch_stride_b else 1
        inputs = ITEMSIZE[self.dtype] * (a_matrices * self.m * self.k + b_matrices * self.k * self.n)
        return inputs + ITEMSIZE[self.c_dtype] * c_passes * self.batch * self.m * self.n

    @property
    def is_row_major(self) -> bool:
        """Whether the rows of both factors are contiguous."""
        return self.a_layout == self.b_layout == "row"

    def misaligned(self, matrix: str, width: int) -> str | None:
        """What keeps accesses of ``width`` elements of A, B or C from being aligned, in words, or None."""
        if matrix == "A":
            offset, stride, layout = self.a_offset, self.lda, self.a_layout
            extent, name = (self.k, "K") if layout == "row" else (self.m, "M")
        elif matrix == "B":
            offset, stride, layout = self.b_offset, self.ldb, self.b_layout
            extent, name = (self.n, "N") if layout == "row" else (self.k, "K")
        else:
            offset, stride, layout, extent, name = self.c_offset, self.ldc, "row", self.n, "N"
        if extent % width:
            return f"{name} = {extent} is not a multiple of {width}"
        if offset:
            return f"{matrix} starts {offset} bytes past a multiple of {ALIGNMENT}"
        if stride % width:
            return f"the {layout} stride of {matrix}, {stride} elements, is not a multiple of {width}"
        apart = {"A": self.batch_stride_a, "B": self.batch_stride_b, "C": self.batch_stride_c}[matrix]
        if apart % width:
            return f"the batch stride of {matrix}, {apart} elements, is not a multiple of {width}"
        return None

    def unaligned_for(self, width: int) -> str | None:
        """What keeps accesses of ``width`` elements from being aligned in any of the matrices, or None."""
        return next((reason for matrix in "ABC" if (reason := self.misaligned(matrix, width))), None)

    @property
    def flags(self) -> int:
        """The flags of the ``gemm_16`` parameter list: C is float32; A, B are aligned for 16-byte copies."""
        width = ALIGNMENT // ITEMSIZE[self.dtype]
        aligned = [self.misaligned(matrix, width) is None for matrix in "AB"]
        return (self.c_dtype == "float32") | aligned[0] << 1 | aligned[1] << 2


def check_inputs(a: Operand, b: Operand) -> ProductShape:
    """Check two factors against each other and return the shape of their product.

    Raises
    ------
    TypeError : for a dtype that no kernel takes, mixed dtypes, or one operand on the host and one on a GPU.
    ValueError : for a 0-d array, inner dimensions or stacks that don't match, or a dimension past 2³¹ − 1.
    """
    for operand in (a, b):
        _check_dtype(operand)
        if not operand.shape:
            raise ValueError(
                f"matmul: operand {operand.name} has 0 dimensions and needs 1 at least (gufunc signature "
                f"(n?,k),(k,m?)->(n?,m?)); multiply by a scalar with np.multiply, or reshape it: "
                f"{operand.name}.reshape(1, 1)"
            )
        if max(operand.shape[-2:]) > MAX_DIMENSION:
            raise ValueError(
                f"matmul: {operand.name} has shape {operand.shape}; a dimension can be {MAX_DIMENSION} at most, "
                "so split the product into blocks"
            )
    if {a.kind, b.kind} != {HOST, MATRIX}:
        check_same_place(a, b)
    if a.dtype != b.dtype:
        raise TypeError(f"matmul: a is {a.dtype} and b is {b.dtype}; convert one: b.astype(a.dtype)")
    return product_shape(a.shape, b.shape)


def check_output(out: Operand, a: Operand, b: Operand, shape: ProductShape) -> ProductShape:
    """Check the array that the product of ``a`` and ``b`` is to be written to.

    As NumPy does, broadcasts the factors to a longer stack that ``out`` may be.

    Returns
    -------
    ``shape``, with the stack of ``out``.

    Raises
    ------
    TypeError : for another dtype than the inputs' or float32, or memory in another place.
    ValueError : for another shape than the product's, for a read-only array, one that shares memory with an input, or
        one whose own elements overlap.
    """
    name = out.name
    check_same_place(out, placed_by(a, b))
    if out.dtype not in (a.dtype, "float32"):
        also = "" if a.dtype == "float32" else " or float32"
        raise TypeError(f"matmul: {name} is {out.dtype} and the product is {a.dtype}; pass {name} as {a.dtype}{also}")
    stack = _stack_of_output(out.shape, shape)
    if stack is None:
        raise ValueError(
            f"matmul: {name} has shape {out.shape}; the product has shape {shape.result}, so pass {name} of that shape"
        )
    if out.readonly:
        raise ValueError(f"matmul: {name} is read-only; pass an array that can be written")
    if overlaps_itself(out):
        raise ValueError(
            f"matmul: elements of {name} share memory with one another (a broadcast view?); pass {name}.copy()"
        )
    for operand in (a, b):
        if overlap(out, operand):
            raise ValueError(
                f"matmul: {name} shares memory with {operand.name}, which is read while {name} is written; "
                f"pass another array as {name}, or {operand.name}.copy()"
            )
    return shape._replace(batch=stack, result=out.shape)


def _stack_of_output(out: tuple[int, ...], shape: ProductShape) -> tuple[int, ...] | None:
    """The axes of ``out`` that products are stacked along, or None if it can't hold the product."""
    own = len(shape.result) - len(shape.batch)  # axes of one product, without those that vectors take away
    split = len(out) - own
    if split < len(shape.batch) or out[split:] != shape.result[len(shape.batch) :]:
        return None
    return out[:split] if broadcast(shape.batch, out[:split]) == out[:split] else None


def check_scale(name: str, value: Any) -> float:
    """A scale factor as a float.

    Raises
    ------
    TypeError : if it isn't a real number.
    ValueError : if float32 can't hold it.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"gemm: {name} is {value!r}, of type {type(value).__name__}; it must be a real number, "
            f"for instance float({name})"
        )
    try:
        number = float(value)
    except OverflowError:  # an int past the range of float64 too
        raise ValueError(f"gemm: {name} is past the range of float32") from None
    if abs(number) > 3.4028234663852886e38 and abs(number) != float("inf"):
        raise ValueError(f"gemm: {name} = {number} is past the range of float32")
    return number


def _check_dtype(operand: Operand) -> None:
    if operand.dtype not in ITEMSIZE:
        raise TypeError(
            f"matmul: {operand.name} is {operand.dtype}; the kernels take {', '.join(ITEMSIZE)}, so convert it: "
            f"{operand.name}.astype(np.float32)"
        )


def placed_by(a: Operand, b: Operand) -> Operand:
    """The factor that says where a product is computed and its result lies.

    That is ``a``, except that of a ``Matrix`` and an array in host memory it is the latter: such a product is one of
    host arrays of which an operand has been uploaded before.
    """
    return b if a.kind == MATRIX and b.kind == HOST else a


def check_same_place(x: Operand, y: Operand) -> None:
    """Raise TypeError if one operand is in host memory and the other on a GPU."""
    if x.on_device != y.on_device:
        host, device = (y, x) if x.on_device else (x, y)
        raise TypeError(
            f"matmul: {host.name} is {host.place} and {device.name} is {device.place}; move one of them: "
            f"{host.to_device(device)}, or {device.to_host}"
        )
