"""ldmatrix, stmatrix, mma and wmma (PTX ISA 9.7.14).

The arithmetic is `tensorcore.mma`, the register layouts of `mma` are `fragments.fragment`; this module moves
elements between registers and matrices.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from ..fragments import fragment
from . import tensorcore
from .banks import matrix_wavefronts
from .hazards import DivergentBarrier, Misaligned
from .memory import SHARED_WINDOW, WINDOW_MASK
from .memory_ops import address_of, load, remembered, space_of, store
from .module import WIDTHS, Instruction
from .program import Decoder, Run, op

_TYPES = ("f16", "bf16", "tf32", "f64", "s8", "u8", "e4m3", "e5m2", "f32", "s32")
_RAW = {
    "f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "f32": np.uint32, "f64": np.uint64,
    "s8": np.int8, "u8": np.uint8, "e4m3": np.uint8, "e5m2": np.uint8, "s32": np.int32,
}  # fmt: skip


def whole_warps(b: Any) -> np.ndarray:
    """Wait for the warps' lanes and order their accesses; returns the active lanes as [warps, 32]."""
    b.converge()
    index = b.indices()
    if index.size % 32:
        b.fail(DivergentBarrier, "a warp-wide matrix instruction executed by part of a warp", 0)
    b.ordered_warps()
    return index.reshape(-1, 32)


def read_registers(b: Any, rows: list[tuple[str, int]], dtype: Any) -> np.ndarray:
    """Elements held in registers: [active warps, 32, elements], of `dtype`."""
    sel = slice(None) if b.sel is None else b.sel
    key = rows[0][0]
    count = b.n if b.sel is None else b.sel.size
    block = np.empty((count, len(rows)), np.uint32 if key == "u32" else np.uint64)
    for i, (k, r) in enumerate(rows):
        block[:, i] = b.rows[k][r][sel]
    return block.view(dtype).reshape(count // 32, 32, -1)


def write_registers(b: Any, rows: list[tuple[str, int]], elements: np.ndarray) -> None:
    sel = slice(None) if b.sel is None else b.sel
    key = rows[0][0]
    flat = np.ascontiguousarray(elements).reshape(-1, elements.shape[-1])
    block = flat.view(np.uint32 if key == "u32" else np.uint64)
    for i, (k, r) in enumerate(rows):
        b.rows[k][r][sel] = block[:, i]


def register_rows(d: Decoder, ins: Instruction, place: int, element: str, writing: bool) -> list[tuple[str, int]]:
    kind = "b64" if element == "f64" else "b32"
    get = d.dst if writing else d.src
    return [(f"u{WIDTHS[kind]}", get(ins, o, kind)) for o in d.vector(ins.operands[place])]


def multiply_fragments(
    b: Any, rows: list[list[tuple[str, int]]], places: list[tuple[Any, Any, Any]], types: list[str], saturate: bool
) -> None:
    """D = A · B + C on registers; `rows`, `places` (row and column maps, extent) and `types` are of D, A, B, C."""
    whole_warps(b)
    matrices = []
    for held, (row, col, extent), element in zip(rows[1:], places[1:], types[1:], strict=True):
        elements = read_registers(b, held, _RAW[element])
        matrix = np.empty((elements.shape[0], *extent), elements.dtype)
        matrix[:, row, col] = elements
        matrices.append(matrix)
    d_type, a_type, b_type, c_type = types
    result = tensorcore.mma(
        *matrices,
        a_type=a_type,
        b_type=b_type,
        acc_type=c_type,
        d_type=d_type,
        arch=b.launch.arch,
        saturate=saturate,
    )
    result = np.asarray(result).view(_RAW[d_type])
    row, col, _ = places[0]
    write_registers(b, rows[0], result[:, row, col])
    b.counts["mma_instructions"] += result.shape[0]


# --- mma


@op("mma")
def mma(d: Decoder, ins: Instruction) -> Run:
    shape = next(m for m in ins.mods if re.fullmatch(r"m\d+n\d+k\d+", m))
    types = [m for m in ins.mods if m in _TYPES]
    if len(types) != 4 or "sp" in ins.mods or {"and", "xor", "block_scale"} & set(ins.mods):
        raise d.unsupported(ins)
    d_type, a_type, b_type, c_type = types
    if shape == "m8n8k4" and a_type == "f16":
        raise d.unsupported(ins, "the quarter-warp form of sm_70")
    maps = [fragment(shape, *pair) for pair in (("D", d_type), ("A", a_type), ("B", b_type), ("C", c_type))]
    rows = [register_rows(d, ins, i, t, i == 0) for i, t in enumerate(types)]
    for held, layout in zip(rows, maps, strict=True):
        if len(held) != layout.registers:
            raise d.syntax(ins, f"operand {layout.operand} takes {layout.registers} registers, not {len(held)}")
    saturate = "satfinite" in ins.mods
    places = [(layout.row, layout.col, layout.extent) for layout in maps]

    def run(b: Any) -> None:
        multiply_fragments(b, rows, places, types, saturate)

    return run


# --- ldmatrix and stmatrix


def _matrix_shape(d: Decoder, ins: Instruction) -> int:
    if "m8n8" not in ins.mods or "b16" not in ins.mods:
        raise d.unsupported(ins)
    return int(next(m for m in ins.mods if m in ("x1", "x2", "x4"))[1:])


def _row_addresses(b: Any, place: tuple[str, int, int], index: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(lanes that name rows, their addresses in shared memory)."""
    address = address_of(b, *place).reshape(-1, 32)[:, : 8 * count].reshape(-1)
    window = address & np.int64(WINDOW_MASK)
    if (window == SHARED_WINDOW).all():
        address = address & ~np.int64(WINDOW_MASK)
    return np.ascontiguousarray(index[:, : 8 * count]).reshape(-1), address


def _count_matrix(b: Any, verb: str, address: np.ndarray) -> None:
    key = address - address[0]
    found = remembered(b, "matrix", key)
    if found is None:
        found = matrix_wavefronts(address.reshape(-1, 8))
        b.patterns[(b.pc, "matrix")] = (b.sel, key, found)
    passes, ideal = found
    b.counts[f"shared_{verb}_requests"] += b.active_warps()
    b.counts[f"shared_{verb}_wavefronts"] += passes
    b.counts[f"shared_{verb}_conflicts"] += passes - ideal


@op("ldmatrix")
def ldmatrix(d: Decoder, ins: Instruction) -> Run:
    count = _matrix_shape(d, ins)
    transposed = "trans" in ins.mods
    rows = register_rows(d, ins, 0, "b32", True)
    place = d.address(ins, ins.operands[1])
    if len(rows) != count:
        raise d.syntax(ins, f"expected {count} destination registers")

    def run(b: Any) -> None:
        index = whole_warps(b)
        saved = b.sel
        lanes, address = _row_addresses(b, place, index, count)
        shared = b.shared
        b.sel = lanes if lanes.size != b.n else saved
        flat = shared.place(b, address, 16, b.sel)
        shared.check_read(b, shared.cells(flat, 16), b.sel, address)
        b.sel = saved
        matrix = shared.view(2, 8)[flat >> 4].reshape(-1, count, 8, 8)
        if transposed:
            matrix = matrix.swapaxes(2, 3)
        # lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix
        write_registers(
            b, rows, np.ascontiguousarray(matrix.reshape(-1, count, 32, 2).swapaxes(1, 2)).reshape(-1, 32, count * 2)
        )
        _count_matrix(b, "load", address)

    return run


@op("stmatrix")
def stmatrix(d: Decoder, ins: Instruction) -> Run:
    count = _matrix_shape(d, ins)
    transposed = "trans" in ins.mods
    rows = register_rows(d, ins, 1, "b32", False)
    place = d.address(ins, ins.operands[0])

    def run(b: Any) -> None:
        index = whole_warps(b)
        saved = b.sel
        elements = read_registers(b, rows, np.uint16).reshape(-1, 32, count, 2).swapaxes(1, 2)
        matrix = elements.reshape(-1, count, 8, 8)
        if transposed:
            matrix = matrix.swapaxes(2, 3)
        lanes, address = _row_addresses(b, place, index, count)
        values = np.ascontiguousarray(matrix).reshape(-1, 8)
        shared = b.shared
        b.sel = lanes if lanes.size != b.n else saved
        flat = shared.place(b, address, 16, b.sel)
        shared.check_write(b, shared.cells(flat, 16), b.sel, address, values)
        b.sel = saved
        shared.view(2, 8)[flat >> 4] = values
        _count_matrix(b, "store", address)

    return run


@op("movmatrix")
def movmatrix(d: Decoder, ins: Instruction) -> Run:
    target, source = register_rows(d, ins, 0, "b32", True), register_rows(d, ins, 1, "b32", False)

    def run(b: Any) -> None:
        whole_warps(b)
        matrix = read_registers(b, source, np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        write_registers(b, target, np.ascontiguousarray(matrix).reshape(-1, 32, 2))

    return run


# --- wmma


@cache
def wmma_map(rows: int, cols: int, elements: int) -> tuple[np.ndarray, np.ndarray]:
    """(row [32, n], col [32, n]) of a fragment; the ISA leaves the layout open, only its size is given.

    Lanes hold consecutive elements of the row-major matrix; where there are more places than elements, the
    upper lanes hold copies.
    """
    flat = np.arange(32 * elements).reshape(32, elements) % (rows * cols)
    return flat // cols, flat % cols


def _wmma_extent(shape: str, operand: str) -> tuple[int, int]:
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    return {"a": (m, k), "b": (k, n)}.get(operand, (m, n))


def _elements(registers: int, element: str) -> int:
    return registers * {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}.get(element, 1)


@op("wmma")
def wmma(d: Decoder, ins: Instruction) -> Run:
    if ins.mods[0] == "mma":
        return wmma_mma(d, ins)
    reading = ins.mods[0] == "load"
    operand = ins.mods[1]
    shape = next(m for m in ins.mods if re.fullmatch(r"m\d+n\d+k\d+", m))
    layout = next(m for m in ins.mods if m in ("row", "col"))
    element = ins.mods[-1]
    if element not in _RAW:
        raise d.unsupported(ins)
    registers = register_rows(d, ins, 0 if reading else 1, element, reading)
    place = d.address(ins, ins.operands[1 if reading else 0])
    stride = d.src(ins, ins.operands[2], "u32") if len(ins.operands) > 2 else None
    extent = _wmma_extent(shape, operand)
    row, col = wmma_map(*extent, _elements(len(registers), element))
    space = space_of(ins)
    dtype = np.dtype(_RAW[element])
    width = dtype.itemsize
    default = extent[1] if layout == "row" else extent[0]

    def run(b: Any) -> None:
        whole_warps(b)
        sel = slice(None) if b.sel is None else b.sel
        base = address_of(b, *place).reshape(-1, 32)
        step = np.int64(default) if stride is None else b.rows["u32"][stride][sel].astype(np.int64).reshape(-1, 32)
        wrong = ((base | step * width) & 15) != 0
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            b.fail(
                Misaligned,
                "rows of a wmma matrix that don't start at multiples of 16 bytes",
                lane,
                space,
                base.reshape(-1),
            )
        values = None if reading else read_registers(b, registers, dtype)
        found = []
        for i in range(row.shape[1]):
            r, c = row[:, i], col[:, i]
            offset = r * step + c if layout == "row" else c * step + r
            address = (base + offset * width).reshape(-1)
            if reading:
                found.append(load(b, space, address, width, 1))
            else:
                assert values is not None
                store(b, space, address, values[:, :, i].reshape(-1).view(f"u{width}"), width, 1)
        if reading:
            write_registers(b, registers, np.stack(found, axis=-1).reshape(-1, 32, row.shape[1]))

    return run


def wmma_mma(d: Decoder, ins: Instruction) -> Run:
    shape = next(m for m in ins.mods if re.fullmatch(r"m\d+n\d+k\d+", m))
    types = [m for m in ins.mods if m in _TYPES]
    if len(types) == 2:  # f16 multiplicands are not named
        types = [types[0], "f16", "f16", types[1]]
    if len(types) != 4 or {"and", "xor"} & set(ins.mods):
        raise d.unsupported(ins)
    rows = [register_rows(d, ins, i, t, i == 0) for i, t in enumerate(types)]
    extents = [_wmma_extent(shape, o) for o in "dabc"]
    maps = [wmma_map(*e, _elements(len(r), t)) for e, r, t in zip(extents, rows, types, strict=True)]
    saturate = "satfinite" in ins.mods
    places = [(row, col, extent) for (row, col), extent in zip(maps, extents, strict=True)]

    def run(b: Any) -> None:
        multiply_fragments(b, rows, places, types, saturate)

    return run
