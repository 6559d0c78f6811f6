"""Run the FP32 ladder on the products of ``tests/fp32_inputs.py`` and record what the GPU gives, bit for bit.

Run by hand, on a machine with an H200, from the repository's root::

    python tests/gpu/record_fp32.py

Matrices lie in GPU memory as they do in the emulator's: the same row strides, the same place within 16 bytes, so that
both choose the same form of a kernel. Outputs are poisoned before each launch. Each is compared with
``numba_gemm.emulate.multiply_emulated`` at once; differences are listed, and make the exit status 1. The record holds,
for each kernel and case, the form that ran and the SHA-256 of the output. NaNs are hashed as the GPU made them as long
as the emulator's have the same bits everywhere, else with one pattern for all; the record's ``nan`` says which.
``--dry-run`` needs no GPU: the emulator stands in for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fp32_inputs import SEED, bits_of, canonical, cases, digest, draw  # noqa: E402

from numba_gemm.benchmark.record import environment  # noqa: E402
from numba_gemm.cases import Case, Matrix  # noqa: E402
from numba_gemm.catalog import LADDER, kernels_for  # noqa: E402
from numba_gemm.emulate import multiply_emulated  # noqa: E402
from numba_gemm.problem import ALIGNMENT, Problem  # noqa: E402

SHOWN = 3  # differing elements of a case that are printed


class Gpu:
    """Products by the library's kernels on device 0."""

    def __init__(self) -> None:
        from numba_gemm.device.context import current_context

        self.context = current_context()
        self.device = self.context.device
        if self.device.compute_capability != (9, 0):
            raise SystemExit(f"this record is of compute capability 9.0; here is {self.device.name}")
        self.name = self.device.name

    def multiply(self, kernel: str, case: Case, a: Matrix, b: Matrix, c: Matrix) -> str:
        """C = alpha · A · B + beta · C in place; returns the entry that ran."""
        from numba_gemm.device.stream import synchronize_stream
        from numba_gemm.execute import prepare

        placed = [Placed(a), Placed(b), Placed(c, poison=case.beta == 0)]
        try:
            problem = Problem(
                case.m,
                case.n,
                case.k if case.alpha != 0 else 0,
                "float32",
                *(matrix.leading for matrix in placed),
                *(matrix.pointer % ALIGNMENT for matrix in placed),
                case.alpha,
                case.beta,
            )
            prepared = prepare(problem, kernel, self.context)
            prepared.launch(*(matrix.pointer for matrix in placed), 0)
            synchronize_stream(0, after=f"{kernel} on {case}")
            placed[2].read_into(c)
            return prepared.spec.entry(prepared.config)
        finally:
            for matrix in placed:
                matrix.free()


class Placed:
    """A matrix in GPU memory as ``emulate`` places it: its row stride and its offset within 16 bytes are kept."""

    def __init__(self, array: Matrix, *, poison: bool = False) -> None:
        from numba_gemm.device.driver import check, driver
        from numba_gemm.device.memory import DeviceBuffer, rows_are_contiguous

        if not rows_are_contiguous(array):
            array = np.ascontiguousarray(array)
        rows, columns = array.shape
        stride = array.strides[0] if rows > 1 else columns * 4
        offset = array.__array_interface__["data"][0] % ALIGNMENT
        # Rows lie apart by NaNs, so a read past a row shows in the result.
        self.image = np.full((offset + (rows - 1) * stride + columns * 4) // 4, np.nan, np.float32)
        self.view = np.lib.stride_tricks.as_strided(self.image[offset // 4 :], array.shape, (stride, 4))
        if not poison:
            self.view[...] = array
        self.leading = stride // 4
        self.buffer = DeviceBuffer(self.image.nbytes, 0)
        self.pointer = self.buffer.pointer + offset
        check(driver().cuMemcpyHtoD(self.buffer.pointer, self.image.ctypes.data, self.image.nbytes), "cuMemcpyHtoD")

    def read_into(self, array: Matrix) -> None:
        from numba_gemm.device.driver import check, driver

        check(driver().cuMemcpyDtoH(self.image.ctypes.data, self.buffer.pointer, self.image.nbytes), "cuMemcpyDtoH")
        array[...] = self.view

    def free(self) -> None:
        self.buffer.free()


class StandIn:
    """No GPU: the emulator."""

    name = "dry run, no GPU"
    device = None

    def multiply(self, kernel: str, case: Case, a: Matrix, b: Matrix, c: Matrix) -> str:
        return emulate(kernel, case, a, b, c)


def emulate(kernel: str, case: Case, a: Matrix, b: Matrix, c: Matrix) -> str:
    """The same product by the emulator; returns the entry that ran."""
    return multiply_emulated(a, b, c, alpha=case.alpha, beta=case.beta, kernel=kernel).kernel


def record_case(device: Gpu | StandIn, kernel: str, case: Case) -> dict[str, Any]:
    """Run one case on both; print differing elements."""
    a, b, theirs = draw(case)
    entry = device.multiply(kernel, case, a, b, theirs)
    mine = draw(case)[2]
    emulated_entry = emulate(kernel, case, a, b, mine)
    ours, want = bits_of(mine), bits_of(theirs)
    different = np.argwhere(canonical(ours) != canonical(want))
    for row, column in different[:SHOWN]:
        print(f"      ({row}, {column}): GPU {want[row, column]:#010x}, emulator {ours[row, column]:#010x}")
    if entry != emulated_entry:
        print(f"      the GPU ran {entry}, the emulator {emulated_entry}")
    return {
        "case": str(case),
        "entry": entry,
        "same_entry": entry == emulated_entry,
        "differ": len(different),
        "nan_bits_differ": int(np.count_nonzero(ours != want)) - len(different),
        "raw": digest(want),
        "canonical": digest(canonical(want)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: tests/data/h200_fp32.json, or a scratch file if dry")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator stands in for it")
    # v8's form, and with it the order of its sums, depends on the number of SMs.
    kernels = [name for name in kernels_for("float32") if LADDER[name].select is None]
    parser.add_argument("--kernel", action="append", choices=kernels, help="only this kernel (may be repeated)")
    options = parser.parse_args()

    device: Gpu | StandIn = StandIn() if options.dry_run else Gpu()
    print(device.name)
    rows: dict[str, list[dict[str, Any]]] = {}
    failed: list[str] = []
    for kernel in options.kernel or kernels:
        start = time.perf_counter()
        rows[kernel] = []
        for case in cases(kernel):
            try:
                rows[kernel].append(record_case(device, kernel, case))
            except Exception as error:  # the other cases are still worth recording
                failed.append(f"{kernel} {case}: {type(error).__name__}: {error}")
                print(f"  FAILED {failed[-1]}", flush=True)
        print(
            f"{kernel}: {len(rows[kernel])} cases, forms {', '.join(sorted({row['entry'] for row in rows[kernel]}))}, "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
    wrong = [(kernel, row) for kernel, own in rows.items() for row in own if row["differ"] or not row["same_entry"]]
    if wrong:
        print("differences between GPU and emulator:")
        for kernel, row in wrong:
            print(f"  {kernel:4} {row['case']:50} {row['entry']:20} {row['differ']:7} elements")
    nan_differ = sum(row["nan_bits_differ"] for own in rows.values() for row in own)
    total = sum(map(len, rows.values()))
    print(f"{total} products, {len(wrong)} differ, {nan_differ} NaNs of other bits, {len(failed)} failed")

    hashed = "canonical" if nan_differ else "raw"
    record = {
        "environment": environment(device.device),
        "seed": SEED,
        "nan": hashed,
        "sha256": {
            kernel: {row["case"]: {"entry": row["entry"], "sha256": row[hashed]} for row in own}
            for kernel, own in rows.items()
        },
        "mismatches": [{"kernel": kernel} | row for kernel, row in wrong],
    }
    scratch = Path(tempfile.gettempdir()) / "dry_fp32.json"
    output = options.output or (scratch if options.dry_run else ROOT / "tests" / "data" / "h200_fp32.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
