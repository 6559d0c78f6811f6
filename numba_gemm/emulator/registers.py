"""The register file of a batch of threads: one array row per virtual register and distinct constant."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

_DTYPES: dict[str, tuple[int, Any, int]] = {
    # key: storage class in bits, dtype of the view, elements per register
    "pred": (1, np.bool_, 1),
    "u16": (16, np.uint16, 1), "s16": (16, np.int16, 1), "f16": (16, np.float16, 1),
    "u32": (32, np.uint32, 1), "s32": (32, np.int32, 1), "f32": (32, np.float32, 1),
    "u64": (64, np.uint64, 1), "s64": (64, np.int64, 1), "f64": (64, np.float64, 1),
    "u8x4": (32, np.uint8, 4), "s8x4": (32, np.int8, 4),
    "u16x2": (32, np.uint16, 2), "s16x2": (32, np.int16, 2), "f16x2": (32, np.float16, 2),
    "f32x2": (64, np.float32, 2), "u32x2": (64, np.uint32, 2), "u16x4": (64, np.uint16, 4),
}  # fmt: skip

KEYS = {
    "pred": "pred",
    "b8": "u16", "u8": "u16", "s8": "s16",
    "b16": "u16", "u16": "u16", "s16": "s16", "f16": "f16", "bf16": "u16",
    "b32": "u32", "u32": "u32", "s32": "s32", "f32": "f32", "tf32": "u32",
    "f16x2": "f16x2", "bf16x2": "u16x2", "u16x2": "u16x2", "s16x2": "s16x2",
    "b64": "u64", "u64": "u64", "s64": "s64", "f64": "f64", "f32x2": "f32x2",
}  # fmt: skip
"""PTX type to the view that an instruction of that type takes of a register."""

STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class RegisterFile(dict):  # type: ignore[type-arg]
    """Maps a view key ("u32", "f16x2", …) to the list of all registers of that storage class, so viewed.

    The lists are made when first asked for. Rows are contiguous arrays with one element (or, for a packed
    view, one row of elements) per thread.
    """

    def __init__(self, threads: int, counts: dict[int, int]) -> None:
        super().__init__()
        self.threads = threads
        self.arrays: dict[int, Any] = {
            bits: np.empty((count, threads), STORAGE[bits]) for bits, count in counts.items()
        }
        for bits, array in self.arrays.items():
            # an unwritten register holds a pattern that no kernel would take for a sensible value
            array.view(np.uint8)[...] = 0 if bits == 1 else 0xC3

    def __missing__(self, key: str) -> list[np.ndarray]:
        bits, dtype, elements = _DTYPES[key]
        array = self.arrays[bits]
        rows = [row.view(dtype) for row in array]
        if elements > 1:
            rows = [row.reshape(self.threads, elements) for row in rows]
        self[key] = rows
        return rows
