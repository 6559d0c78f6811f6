"""Where the elements of a `wgmma` operand lie in shared memory: matrix descriptors (PTX ISA 9.7.15.5.1).

A descriptor has the start address, two byte offsets and a swizzle; the instruction says whether K or the other
dimension (M of A, N of B) is contiguous. In units of 16 bytes (a chunk), with w = 2, 4, 8 chunks for a swizzle of 32,
64 and 128 bytes:

| contiguous | swizzle | chunk c of row r, or of column k |
|---|---|---|
| K | some | (r % 8) · w + (r / 8) · SBO + c |
| K | none | (r % 8) + (r / 8) · SBO + c · LBO |
| M or N | some | (c % w) + (c / w) · LBO + (k % 8) · w + (k / 8) · SBO |
| M or N | none | c · SBO + (k % 8) + (k / 8) · LBO |

The swizzle then exchanges address bits: bits 7 and up, counted from the base offset, are XORed into bits 4 and up.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
"""Descriptor code (bits 62 and 63) to bytes."""


class Descriptor(NamedTuple):
    """The fields of a descriptor; address and offsets in bytes."""

    address: int
    leading: int
    stride: int
    base: int
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        return cls(
            (bits & 0x3FFF) << 4,
            (bits >> 16 & 0x3FFF) << 4,
            (bits >> 32 & 0x3FFF) << 4,
            bits >> 49 & 7,
            SWIZZLES[bits >> 62 & 3],
        )


@cache
def chunk_offsets(rows: int, k_chunks: int, k_major: bool, leading: int, stride: int, swizzle: int) -> np.ndarray:
    """Bytes from the start to each 16-byte chunk of an operand, before the swizzle.

    [rows, k_chunks] where K is contiguous; [rows / 8, k], with k = `k_chunks`, where the other dimension is.
    """
    width = max(swizzle, 16)
    if k_major:
        row, chunk = np.arange(rows)[:, None], np.arange(k_chunks)
        if not swizzle:
            return row % 8 * 16 + row // 8 * stride + chunk * leading
        return row % 8 * width + row // 8 * stride + chunk * 16
    chunk, k = np.arange(rows // 8)[:, None], np.arange(k_chunks)
    if not swizzle:
        return chunk * stride + k % 8 * 16 + k // 8 * leading
    across = width // 16
    return chunk % across * 16 + chunk // across * leading + k % 8 * width + k // 8 * stride


def chunk_addresses(descriptor: Descriptor, rows: int, k_chunks: int, k_major: bool) -> np.ndarray:
    """Addresses in shared memory of an operand's chunks, as `chunk_offsets` orders them."""
    address, leading, stride, base, swizzle = descriptor
    found: np.ndarray = address + chunk_offsets(rows, k_chunks, k_major, leading, stride, swizzle)
    if swizzle:
        found = found ^ (((found >> 7) - base & swizzle // 16 - 1) << 4)
    return found
