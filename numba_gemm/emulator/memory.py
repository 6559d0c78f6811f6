"""Device memory: sparse, 64-bit, with bounds and an initialised-map for every allocation."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import bisect
import mmap
import sys

import numpy as np

from .errors import EmulatorError
from .hazards import Misaligned, OutOfBounds, UninitialisedRead

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
WINDOW_MASK = 0x7F << 56
FIRST_ADDRESS = 0x7_0000_0000
_EAGER = 1 << 24
_NORESERVE = 0x4000


def lazy_bytes(nbytes: int) -> np.ndarray:
    """Zeroed bytes of which only the pages that are touched cost memory."""
    if nbytes < _EAGER:
        return np.zeros(nbytes, np.uint8)
    if sys.platform.startswith("linux"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return np.zeros(nbytes, np.uint8)


class Allocation:
    """One allocation: `base` address, `size` in bytes, its data and, unless all is initialised, its map."""

    def __init__(self, base: int, size: int, initialised: bool) -> None:
        self.base = base
        self.size = size
        padded = -(-size // 16) * 16
        self.data = lazy_bytes(padded)
        self.known: np.ndarray | None = None if initialised else lazy_bytes(padded)
        self.views: dict[tuple[type, int], np.ndarray] = {}

    def view(self, width: int, words: int) -> np.ndarray:
        """The data as [·, words] unsigned integers of `width` bytes (one-dimensional for one word)."""
        key = (_UINT[width], words)
        found = self.views.get(key)
        if found is None:
            found = self.data.view(_UINT[width])
            if words > 1:
                found = found.reshape(-1, words)
            self.views[key] = found
        return found


_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
UINT = _UINT


class DeviceMemory:
    """The global memory of one machine."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.allocations: list[Allocation] = []
        self.cursor = FIRST_ADDRESS

    def alloc(self, nbytes: int, *, align: int = 256, initialised: bool = False, at: int | None = None) -> int:
        """Reserve `nbytes`; returns the address. `at` chooses it (a multiple of 16)."""
        if nbytes < 0 or align & (align - 1):
            raise EmulatorError(f"can't allocate {nbytes} bytes aligned to {align}")
        align = max(align, 16)
        if at is None:
            base = -(-self.cursor // align) * align
            # a gap between allocations, so that a small overrun hits none of them
            self.cursor = base + nbytes + 4096
        else:
            base = at
            if base % 16 or base <= 0 or base + nbytes > SHARED_WINDOW:
                raise EmulatorError(f"an allocation can't lie at {at:#x}")
            self.cursor = max(self.cursor, base + nbytes + 4096)
        place = bisect.bisect_right(self.bases, base)
        before = self.allocations[place - 1] if place else None
        after = self.allocations[place] if place < len(self.allocations) else None
        if (before and before.base + max(before.size, 1) > base) or (after and after.base < base + nbytes):
            raise EmulatorError(f"an allocation at {base:#x} overlaps another")
        self.bases.insert(place, base)
        self.allocations.insert(place, Allocation(base, nbytes, initialised))
        return base

    def free(self, address: int) -> None:
        place = bisect.bisect_left(self.bases, address)
        if place == len(self.bases) or self.bases[place] != address:
            raise EmulatorError(f"{address:#x} is not the address of an allocation")
        del self.bases[place], self.allocations[place]

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds `address`, or None."""
        place = bisect.bisect_right(self.bases, address) - 1
        if place >= 0:
            found = self.allocations[place]
            if address < found.base + found.size:
                return found
        return None

    def span(self, address: int, nbytes: int) -> tuple[Allocation, int]:
        found = self.find(address) if nbytes else None
        if found is None or address + nbytes > found.base + found.size:
            raise EmulatorError(f"[{address:#x}, {address + nbytes:#x}) is not inside one allocation")
        return found, address - found.base

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array's bytes to `address` and mark them initialised."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not data.size:
            return
        found, offset = self.span(address, data.size)
        found.data[offset : offset + data.size] = data
        if found.known is not None:
            found.known[offset : offset + data.size] = 1

    def read(self, address: int, dtype: np.dtype | type | str, count: int) -> np.ndarray:
        """A copy of `count` elements of `dtype` that lie at `address`."""
        dtype = np.dtype(dtype)
        if not count:
            return np.empty(0, dtype)
        found, offset = self.span(address, dtype.itemsize * count)
        return found.data[offset : offset + dtype.itemsize * count].copy().view(dtype)

    def strided(
        self, address: int, dtype: np.dtype | type | str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Views of an array that lies in one allocation, its first element at `address`, and of its map of bytes.

        `strides` are in bytes and of any sign. The map, of one more axis than the array, is None where all of the
        allocation counts as initialised.
        """
        dtype = np.dtype(dtype)
        reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + dtype.itemsize
        found, offset = self.span(address + low, high - low)
        data = np.ndarray(shape, dtype, found.data, offset - low, strides)
        if found.known is None:
            return data, None
        return data, np.ndarray((*shape, dtype.itemsize), np.uint8, found.known, offset - low, (*strides, 1))

    # --- access by the lanes of an instruction

    def pieces(self, batch, addresses: np.ndarray, size: int):  # type: ignore[no-untyped-def]
        """Split lanes by allocation: yields (allocation, offsets, positions or None for all lanes).

        `addresses` is uint64, one per active lane. Raises `Misaligned` and `OutOfBounds`.
        """
        if size > 1:
            wrong = addresses & np.uint64(size - 1)
            if wrong.any():
                batch.fail(Misaligned, f"{size}-byte access", int(np.flatnonzero(wrong)[0]), "global", addresses)
        found = self.find(int(addresses[0]))
        if found is not None:
            offsets = addresses - np.uint64(found.base)
            if found.size >= size and offsets.max() <= np.uint64(found.size - size):
                return [(found, offsets.view(np.int64), None)]
        parts: list[tuple[Allocation, np.ndarray, np.ndarray]] = []
        left = np.ones(addresses.size, np.bool_)
        while True:
            rest = np.flatnonzero(left)
            if not rest.size:
                return parts
            first = int(addresses[rest[0]])
            found = self.find(first)
            if found is None or first + size > found.base + found.size:
                near = self.nearest(first)
                batch.fail(OutOfBounds, f"{size}-byte access {near}", int(rest[0]), "global", addresses)
            assert found is not None
            offsets = addresses[rest] - np.uint64(found.base)
            inside = offsets <= np.uint64(found.size - size)
            lanes = rest[inside]
            parts.append((found, offsets[inside].view(np.int64), lanes))
            left[lanes] = False

    def nearest(self, address: int) -> str:
        place = bisect.bisect_right(self.bases, address) - 1
        if place < 0:
            return "below every allocation"
        found = self.allocations[place]
        return (
            f"{address - found.base - found.size} bytes past the end of the allocation of {found.size} bytes "
            f"at {found.base:#x}"
        )

    def load(self, batch, addresses: np.ndarray, width: int, words: int) -> np.ndarray:  # type: ignore[no-untyped-def]
        """Gather `words` words of `width` bytes per lane: [lanes] or [lanes, words] unsigned integers."""
        size = width * words
        shift = size.bit_length() - 1
        parts = self.pieces(batch, addresses, size)
        result = None
        for found, offsets, lanes in parts:
            if found.known is not None:
                self.check_known(batch, found, offsets, lanes, size, addresses)
            data = found.view(width, words)[offsets >> shift]
            if lanes is None:
                return data
            if result is None:
                result = np.zeros((addresses.size, *data.shape[1:]), data.dtype)
            result[lanes] = data
        assert result is not None
        return result

    def check_known(self, batch, found, offsets, lanes, size, addresses) -> None:  # type: ignore[no-untyped-def]
        known = found.known.view(_UINT[min(size, 8)])
        full = int.from_bytes(b"\1" * min(size, 8), "little")
        if size == 16:
            ok = (known.reshape(-1, 2)[offsets >> 4] == full).all(axis=1)
        else:
            ok = known[offsets >> (size.bit_length() - 1)] == full
        if not ok.all():
            where = int(np.flatnonzero(~ok)[0])
            where = where if lanes is None else int(lanes[where])
            batch.fail(UninitialisedRead, "read of memory that nothing has written", where, "global", addresses)

    def store(self, batch, addresses: np.ndarray, values: np.ndarray, width: int, words: int) -> None:  # type: ignore[no-untyped-def]
        """Scatter `values` ([lanes] or [lanes, words] unsigned integers of `width` bytes)."""
        size = width * words
        shift = size.bit_length() - 1
        for found, offsets, lanes in self.pieces(batch, addresses, size):
            where = offsets >> shift
            found.view(width, words)[where] = values if lanes is None else values[lanes]
            if found.known is not None:
                if size == 16:
                    found.known.view(np.uint64).reshape(-1, 2)[where] = 0x0101010101010101
                else:
                    found.known.view(_UINT[size])[where] = int.from_bytes(b"\1" * size, "little")
