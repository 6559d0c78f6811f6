"""Tensor maps: what describes a tiled tensor in global memory to `cp.async.bulk.tensor` (PTX ISA 5.5).

A GPU's 128 bytes are opaque, and made by `cuTensorMapEncodeTiled`; here they carry a magic and the number under which
the machine keeps the `TensorMap`. What the driver's call refuses is refused here.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .errors import EmulatorError, LaunchError

MAP_BYTES = 128
_MAGIC = b"tensormp"
_SIZES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
_NUMPY = {
    "uint8": "u8", "int8": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32", "uint64": "u64",
    "int64": "s64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
}  # fmt: skip
SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
"""Bytes of a row within which a swizzle exchanges 16-byte chunks."""
_NANS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map; the arguments of `cuTensorMapEncodeTiled`, innermost dimension first.

    Attributes
    ----------
    address : of the first element, a multiple of 16.
    dtype : "f16", "bf16", "f32", "u8", … or a NumPy type's name.
    dims : elements in each of 1 to 5 dimensions.
    strides : bytes from one element to the next in all dimensions but the first; multiples of 16, below 2⁴⁰.
    box : elements of the box that one instruction moves, 1 to 256 in each dimension; a row of it is a multiple of 16
        bytes long.
    element_strides : steps between the elements moved, 1 to 8 in each dimension (the first one's is ignored).
    interleave : "none"; the others are not modelled.
    swizzle : "none", "32B", "64B" or "128B": a row of the box must be as long (the driver takes shorter ones as well,
        whose layout is not modelled).
    l2_promotion : "none", "64B", "128B" or "256B"; without effect here.
    oob_fill : what elements outside of `dims` are loaded as: "zero" or "nan".

    Raises `LaunchError` for what the driver would refuse.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: str = "none"
    oob_fill: str = "zero"

    def __post_init__(self) -> None:
        def tidy(name: str, values: Sequence[int]) -> tuple[int, ...]:
            found = tuple(int(v) for v in values)
            object.__setattr__(self, name, found)
            return found

        object.__setattr__(self, "address", int(self.address))
        name = self.dtype if isinstance(self.dtype, str) else np.dtype(self.dtype).name
        object.__setattr__(self, "dtype", _NUMPY.get(name, name))
        dims, box = tidy("dims", self.dims), tidy("box", self.box)
        strides = tidy("strides", self.strides)
        rank = len(dims)
        steps = tidy("element_strides", self.element_strides or (1,) * rank)
        problems = [
            (self.dtype not in _SIZES, f"element type {name!r}: choose one of {', '.join(_SIZES)}"),
            (not 1 <= rank <= 5, f"{rank} dimensions: a tensor map has 1 to 5"),
            (
                len(box) != rank or len(steps) != rank or len(strides) != max(rank - 1, 0),
                f"{rank} dimensions take {rank} box extents and element strides and {rank - 1} strides",
            ),
            (self.address % 16 != 0 or self.address <= 0, f"address {self.address:#x} is no multiple of 16"),
            (any(not 1 <= n <= 1 << 32 for n in dims), f"dimensions {dims}: each must lie in 1 to 2**32"),
            (
                any(s % 16 or not 0 <= s < 1 << 40 for s in strides),
                f"strides {strides}: each must be a multiple of 16 bytes below 2**40; pad the rows",
            ),
            (any(not 1 <= n <= 256 for n in box), f"box {box}: each extent must lie in 1 to 256"),
            (any(not 1 <= n <= 8 for n in steps), f"element strides {steps}: each must lie in 1 to 8"),
            (self.interleave != "none", f"interleave {self.interleave!r} is not modelled: use 'none'"),
            (self.swizzle not in SPANS, f"swizzle {self.swizzle!r}: choose one of {', '.join(SPANS)}"),
            (self.l2_promotion not in ("none", "64B", "128B", "256B"), f"L2 promotion {self.l2_promotion!r}"),
            (
                self.oob_fill != "zero" and not (self.oob_fill == "nan" and self.dtype in _NANS),
                f"fill {self.oob_fill!r} of {self.dtype}: choose 'zero', or 'nan' of a floating-point type",
            ),
        ]
        for wrong, message in problems:
            if wrong:
                raise LaunchError(f"tensor map: {message}")
        row = box[0] * self.itemsize
        span = SPANS[self.swizzle]
        if row % 16:
            raise LaunchError(f"tensor map: a row of the box has {row} bytes, which must be a multiple of 16")
        if span and row > span:
            raise LaunchError(f"tensor map: a row of the box has {row} bytes; swizzle {self.swizzle} takes {span}")
        if span and row < span:
            raise LaunchError(
                f"tensor map: a row of the box has {row} bytes; rows shorter than the swizzle's {span} are not modelled"
            )

    @property
    def itemsize(self) -> int:
        return _SIZES[self.dtype]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements of the box in shared memory, innermost first."""
        steps = (1, *self.element_strides[1:])
        return tuple(-(-n // s) for n, s in zip(self.box, steps, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the box in shared memory, elements outside of the tensor included."""
        return math.prod(self.extent) * self.itemsize

    @property
    def alignment(self) -> int:
        """Of the box in shared memory: 128 bytes, or the period of the swizzle."""
        return max(128, 8 * SPANS[self.swizzle])

    def window(
        self, memory: Any, corner: Sequence[int], *, stored: bool = False
    ) -> tuple[tuple[slice, ...], np.ndarray | None, Any]:
        """What of the box at `corner` (innermost first) lies inside the tensor.

        A box that is `stored` also reaches what follows a row up to its next multiple of 16 bytes, since a GPU stores
        whole chunks of so many (seen on an H200). Returns the place within the box (slices, outermost first), a view of
        the elements in global memory (None where there are none) and of their map of initialised bytes. Raises
        `EmulatorError` where they aren't in one allocation.
        """
        slices, shape, strides = [], [], []
        address = self.address
        pitches = (self.itemsize, *self.strides)
        steps = (1, *self.element_strides[1:])
        chunk = 16 // self.itemsize if stored else 1
        dims = (-(-self.dims[0] // chunk) * chunk, *self.dims[1:])
        for at, count, size, pitch, step in zip(corner, self.extent, dims, pitches, steps, strict=True):
            low = max(0, -(at // step))  # the first element at or past 0
            high = min(count, -(-(size - at) // step))
            if low >= high:
                return (), None, None
            slices.append(slice(low, high))
            shape.append(high - low)
            strides.append(pitch * step)
            address += (at + low * step) * pitch
        dtype = np.dtype(f"u{self.itemsize}")
        data, known = memory.strided(address, dtype, tuple(shape[::-1]), tuple(strides[::-1]))
        return tuple(slices[::-1]), data, known

    def empty_box(self) -> np.ndarray:
        """The box, outermost first, filled with what lies outside of the tensor."""
        fill = _NANS[self.dtype] if self.oob_fill == "nan" else 0
        return np.full(self.extent[::-1], fill, f"u{self.itemsize}")


@cache
def swizzled(chunks: int, span: int) -> np.ndarray:
    """Where the 16-byte chunks of a box go that starts at a period of the swizzle: the ISA's XOR of address bits 7 and
    up into bits 4 and up."""
    chunk = np.arange(chunks)
    return chunk ^ (chunk >> 3 & span // 16 - 1) if span else chunk


def encode(number: int) -> bytes:
    """The opaque bytes of the machine's map of that number."""
    return (_MAGIC + number.to_bytes(8, "little")).ljust(MAP_BYTES, b"\0")


def decode(data: bytes) -> int:
    """The number in opaque bytes. Raises `EmulatorError` for bytes that are no tensor map."""
    if data[:8] != _MAGIC or any(data[16:]):
        raise EmulatorError("these bytes are no tensor map of this machine")
    return int.from_bytes(data[8:16], "little")
