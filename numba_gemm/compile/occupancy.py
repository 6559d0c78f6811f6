"""How many blocks of a kernel fit on one SM, by the rules of the CUDA occupancy calculator.

Source: CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SmLimits:
    """What one SM offers: warps, blocks, shared bytes for all blocks, and bytes the system takes from each block."""

    warps: int
    blocks: int
    shared_bytes: int
    reserved_shared_bytes: int


REGISTERS_PER_SM = 65536
_REGISTER_UNIT = 256  # registers are handed to a warp in units of 256
_LIMITS = {
    (7, 5): SmLimits(32, 16, 64 * 1024, 0),
    (8, 0): SmLimits(64, 32, 164 * 1024, 1024),
    (8, 6): SmLimits(48, 16, 100 * 1024, 1024),
    (8, 9): SmLimits(48, 24, 100 * 1024, 1024),
    (9, 0): SmLimits(64, 32, 228 * 1024, 1024),
    (10, 0): SmLimits(64, 32, 228 * 1024, 1024),
    (12, 0): SmLimits(48, 32, 100 * 1024, 1024),
}


def sm_limits(arch: tuple[int, int]) -> SmLimits:
    """The limits of a compute capability; an unlisted one takes those of the nearest listed one below it."""
    return _LIMITS[max((known for known in _LIMITS if known <= arch), default=min(_LIMITS))]


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of one SM, the share of its warp slots, and what stops a further block."""

    blocks: int
    warps: int
    fraction: float
    limited_by: str


def occupancy(arch: tuple[int, int], *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a block of ``threads`` threads with ``registers`` each and ``shared_bytes`` a block."""
    limits = sm_limits(arch)
    warps = -(-threads // 32)
    registers_per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    shared = shared_bytes + limits.reserved_shared_bytes
    fits = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": REGISTERS_PER_SM // registers_per_warp // warps,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
    }
    limited_by = min(fits, key=lambda name: fits[name])
    blocks = fits[limited_by]
    return Occupancy(blocks, blocks * warps, blocks * warps / limits.warps, limited_by)
