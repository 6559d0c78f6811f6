"""What the emulator's tests share: small kernels made from an instruction, and launches of whole products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from numba_gemm import emulator

CUDA = Path(__file__).parent / "cuda"
_LOAD = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_WIDTH = {2: "b16", 4: "b32", 8: "b64"}


def header(arch: str = "sm_90") -> str:
    return f".version 8.4\n.target {arch}\n.address_size 64\n"


def kernel_text(body: str, params: str = "", name: str = "k", before: str = "", arch: str = "sm_90") -> str:
    """A module of one kernel."""
    return f"{header(arch)}{before}\n.visible .entry {name}({params})\n{{\n{body}\n}}\n"


def run_op(
    code: str, inputs: list[np.ndarray], outputs: list[Any], *, declare: str = "", block: int = 0
) -> list[np.ndarray]:
    """Execute `code` in one thread per element.

    Registers %a, %b, %c, … hold the inputs, %d, %e the outputs (%p is a spare predicate). Returns one array per
    output dtype. Predicate outputs are tested by storing `selp` of them: ask for np.bool_ and write %d as predicate.
    """
    count = inputs[0].size if inputs else 32
    threads = block or min(256, count)
    names_in = "abcfgh"[: len(inputs)]
    names_out = "de"[: len(outputs)]
    lines = [
        ".reg .b64 %addr, %off, %n64; .reg .b32 %i, %n, %t1, %t2; .reg .pred %p, %q, %out, %done;",
        declare,
        "mov.u32 %i, %ctaid.x; mov.u32 %t1, %ntid.x; mov.u32 %t2, %tid.x; mad.lo.u32 %i, %i, %t1, %t2;",
        "ld.param.u32 %n, [count]; setp.ge.u32 %done, %i, %n; @%done ret;",
    ]
    for name, array in zip(names_in, inputs, strict=True):
        size = array.dtype.itemsize
        lines += [
            f".reg .{_WIDTH.get(size, 'b16')} %{name};",
            f"ld.param.u64 %addr, [in_{name}]; mul.wide.u32 %off, %i, {size}; add.u64 %addr, %addr, %off;",
            f"ld.global.{_LOAD[size]} %{name}, [%addr];",
        ]
    results = []
    for name, dtype in zip(names_out, outputs, strict=True):
        predicate = np.dtype(dtype) == np.bool_
        size = 4 if predicate else np.dtype(dtype).itemsize
        lines.append(f".reg .{'pred' if predicate else _WIDTH[size]} %{name};")
        results.append(np.zeros(count, np.uint32 if predicate else dtype))
    lines.append(code)
    for name, result, dtype in zip(names_out, results, outputs, strict=True):
        size = result.dtype.itemsize
        lines.append(f"ld.param.u64 %addr, [out_{name}]; mul.wide.u32 %off, %i, {size}; add.u64 %addr, %addr, %off;")
        if np.dtype(dtype) == np.bool_:
            lines.append(f"selp.u32 %t1, 1, 0, %{name}; st.global.u32 [%addr], %t1;")
        else:
            lines.append(f"st.global.{_LOAD[size]} [%addr], %{name};")
    params = [f".param .u64 in_{n}" for n in names_in] + [f".param .u64 out_{n}" for n in names_out]
    text = kernel_text("\n".join([*lines, "ret;"]), ", ".join([*params, ".param .u32 count"]))
    emulator.launch(text, -(-count // threads), threads, [*inputs, *results, np.uint32(count)])
    return [r.astype(np.bool_) if np.dtype(d) == np.bool_ else r for r, d in zip(results, outputs, strict=True)]


def fixture(name: str) -> str:
    return (CUDA / f"{name}.ptx").read_text()


def error_bound(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Largest error of a float32 chain of k multiply-adds: k · 2⁻²⁴ relative to |A|·|B|, with a step of slack."""
    return (k + 2) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)) + 1e-37
