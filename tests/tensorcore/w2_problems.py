"""Products by w2 on the emulator: operands in every layout, tensor maps as its parameters ask for them, the launch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from numba_gemm import emulator
from numba_gemm.tensorcore import splitk_reduce
from numba_gemm.tensorcore.w2 import W2Parameters
from numba_gemm.validate import Reference, reference

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}


def stored(
    shape: tuple[int, int, int], layout: str, dtype: np.dtype[Any], multiple: int, offset: int = 0
) -> np.ndarray:
    """An array [batch, rows, columns] whose contiguous lines are a multiple of so many elements long.

    `offset` elements lie before it in its first line.
    """
    batch, rows, columns = shape
    outer, inner = (rows, columns) if layout == "row" else (columns, rows)
    pitch = -(-(inner + offset) // multiple) * multiple
    view = np.zeros((batch, outer, pitch), dtype)[:, :, offset : offset + inner]
    return view if layout == "row" else view.swapaxes(1, 2)


def factors(p: W2Parameters, m: int, n: int, k: int, batch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal factors [batch, M, K] and [batch, K, N] in the form's layouts, lines on 16 bytes."""
    rng = np.random.default_rng(seed)
    made = []
    for shape, layout in (((batch, m, k), p.a_layout), ((batch, k, n), p.b_layout)):
        view = stored(shape, layout, DTYPES[p.dtype], 8)
        view[...] = rng.standard_normal(shape).astype(np.float32)
        made.append(view)
    return made[0], made[1]


def operand_map(machine: emulator.Machine, at: int, array: np.ndarray, layout: str, name: str, box: Any) -> bytes:
    batch, rows, columns = array.shape
    dims, stride = ((columns, rows), 1) if layout == "row" else ((rows, columns), 2)
    strides = (array.strides[stride], max(16, array.strides[0] if batch > 1 else 16))
    return machine.tensor_map(at, name, (*dims, batch), strides, box, swizzle="128B")


def run(
    p: W2Parameters,
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    splits: int = 1,
    blocks: int = 0,
    alpha: float = 1.0,
    beta: float = 0.0,
    offset: int = 0,
    line: int = 0,
    text: str = "",
    seed: int = 0,
    exact: bool = False,
) -> tuple[np.ndarray, Reference, Any]:
    """One launch; returns C [batch, M, N], or the sum of the splits, what it should be, and the report.

    C's lines begin at multiples of `line` elements (8 by TMA, else 1), `offset` elements past them. `exact` takes small
    integers, whose sums have no rounding.
    """
    machine = emulator.Machine("sm_90a")
    a, b = factors(p, m, n, k, batch, seed)
    if exact:
        for view in (a, b):
            view[...] = np.round(view.astype(np.float32) * 1.5).clip(-3, 3)
    element = DTYPES[p.output]
    if p.split_k:
        lines, length = (m, n) if p.c_layout == "row" else (n, m)
        c = np.zeros((batch * splits, lines, -(-length // 4) * 4), np.float32)
    else:
        c = stored((batch, m, n), p.c_layout, element, line or (8 if p.store == "tma" else 1), offset)
        if beta:
            c[...] = np.random.default_rng(seed + 1).standard_normal(c.shape).astype(np.float32)
    old = c.astype(np.float64)
    at_a, at_b = machine.place(a), machine.place(b)
    whole = c if p.split_k else c.base  # what lies between the lines must stay as it is
    assert whole is not None
    at_c = at_whole = machine.place(whole, written=bool(beta))
    at_c += c.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    maps = [
        operand_map(machine, at_a, a, p.a_layout, p.dtype, p.map_a_box),
        operand_map(machine, at_b, b, p.b_layout, p.dtype, p.map_b_box),
        bytes(128),
    ]
    axis = 1 if p.c_layout == "row" or p.split_k else 2  # along which C's lines follow one another
    if p.store == "tma":
        dims = (n, m) if p.c_layout == "row" else (m, n)
        strides = (c.strides[axis], c.strides[0] if batch > 1 else 16)
        maps[2] = machine.tensor_map(at_c, p.output, (*dims, batch), strides, p.map_c_box, swizzle=p.map_c_swizzle)
    per_split = p.k_blocks_per_split(k, splits)
    params = [
        *maps, np.uint64(at_c), np.int64(c.strides[axis] // c.itemsize), np.int64(c.strides[0] // c.itemsize),
        *map(np.uint32, (m, n, k, batch, splits, per_split)), np.float32(alpha), np.float32(beta),
    ]  # fmt: skip
    grid = p.blocks(p.work_units(m, n, batch, splits), blocks or 1 << 20)
    report = machine.launch(text or p.render(), grid, p.threads, params, shared_bytes=p.dynamic_shared_bytes)
    machine.fetch(at_whole, whole)
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "tensor_core": (9, 0)}
    found = [
        reference(a[i], b[i], old[i] if beta else None, c_dtype="" if p.dtype == p.output else "float32", **options)
        for i in range(batch)
    ]
    expected = Reference(np.stack([one.value for one in found]), np.stack([one.bound for one in found]))
    if not p.split_k:
        kept, c = c, c.copy()
        kept[...] = 0
        assert not whole.any(), "something beside C was written"
    if p.split_k:
        assert c.nbytes == splitk_reduce.workspace_bytes(lines, length, splits) * batch
        assert not c[:, :, length:].any()
        c = c.reshape(batch, splits, lines, -1).sum(1, dtype=np.float32)[:, :, :length]
        c = c if p.c_layout == "row" else c.swapaxes(1, 2)
    return c, expected, report
