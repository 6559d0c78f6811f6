"""Run the FP32 kernels on the products of ``tests/fp32_inputs.py`` and record what the GPU gives, bit for bit.

Run by hand, on a machine with an H200, from the repository's root::

    python tests/gpu/record_fp32.py

GPU and emulator run the same form of a kernel on matrices that lie alike in memory: the same strides, the same place
within 16 bytes, NaNs round every element. Outputs are poisoned before each launch, and each is compared with the
emulator's at once; differences are listed, and make the exit status 1, as does an element that was written outside the
output. The record holds, for each kernel and case, the form that ran and the SHA-256 of the output. NaNs are hashed as
the GPU made them as long as the emulator's have the same bits everywhere, else with one pattern for all; the record's
``nan`` says which. ``--dry-run`` needs no GPU: the emulator stands in for it.
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

from fp32_inputs import (  # noqa: E402
    ARCH,
    KERNELS,
    SEED,
    SM_COUNT,
    bits_of,
    canonical,
    cases,
    digest,
    emulate,
    entry_of,
    plan,
)

from numba_gemm.benchmark.forms import report_forms  # noqa: E402
from numba_gemm.benchmark.record import environment  # noqa: E402
from numba_gemm.cases import Case, Matrix  # noqa: E402

RECORD = ROOT / "tests" / "data" / "h200_fp32.json"
SHOWN = 3  # differing elements of a case that are printed


class Gpu:
    """Products by the library's kernels on device 0."""

    def __init__(self) -> None:
        from numba_gemm.device.context import current_context

        self.context = current_context()
        self.device = self.context.device
        self.name = self.device.name
        if (self.device.compute_capability, self.device.sm_count) != (ARCH, SM_COUNT):
            raise SystemExit(f"this record is of an H200; here is {self.name}")

    def multiply(self, kernel: str, case: Case) -> tuple[Matrix, str]:
        """C, and the form that ran."""
        from numba_gemm.device.driver import check, driver
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import synchronize_stream
        from numba_gemm.execute import prepare_form

        problem, spec, config, images = plan(kernel, case)
        buffers = [DeviceBuffer(image.flat.nbytes, 0) for image in images]
        try:
            for buffer, image in zip(buffers, images, strict=True):
                host = image.flat.ctypes.data
                check(driver().cuMemcpyHtoD(buffer.pointer, host, image.flat.nbytes), "cuMemcpyHtoD")
            prepared = prepare_form(problem, spec, config, self.context)
            starts = [buffer.pointer + 4 * image.offset for buffer, image in zip(buffers, images, strict=True)]
            prepared.launch(*starts, 0)
            synchronize_stream(0, after=f"{kernel} on {case}")
            after = np.empty_like(images[2].flat)
            check(driver().cuMemcpyDtoH(after.ctypes.data, buffers[2].pointer, after.nbytes), "cuMemcpyDtoH")
            return images[2].result(after), entry_of(spec, config)
        finally:
            for buffer in buffers:
                buffer.free()


class StandIn:
    """No GPU: the emulator."""

    name = "dry run, no GPU"
    device = None

    def multiply(self, kernel: str, case: Case) -> tuple[Matrix, str]:
        return emulate(kernel, case)


def record_case(device: Gpu | StandIn, kernel: str, case: Case) -> dict[str, Any]:
    """Run one case on both; print differing elements."""
    theirs, entry = device.multiply(kernel, case)
    mine, _ = emulate(kernel, case)
    ours, want = bits_of(mine), bits_of(theirs)
    different = np.argwhere(canonical(ours) != canonical(want))
    for row, column in different[:SHOWN]:
        print(f"      ({row}, {column}): GPU {want[row, column]:#010x}, emulator {ours[row, column]:#010x}")
    return {
        "case": str(case),
        "entry": entry,
        "differ": len(different),
        "nan_bits_differ": int(np.count_nonzero(ours != want)) - len(different),
        "raw": digest(want),
        "canonical": digest(canonical(want)),
    }


def compile_ahead(kernels: list[str]) -> None:
    """Assemble every form of a kernel that multiplies on all cores."""
    forms = {}
    for kernel in kernels:
        for case in cases(kernel):
            problem, spec, config, _ = plan(kernel, case)
            launches = spec.plan(problem, config)
            forms[(kernel, launches.launches[launches.main].config, ARCH)] = None
    for report in report_forms(list(forms), sass=False):
        if report.error:
            print(f"{report.kernel} {report.config}: {report.error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help=f"default: {RECORD.relative_to(ROOT)}, or a scratch file if dry")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator stands in for it")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this kernel (may be repeated)")
    options = parser.parse_args()

    device: Gpu | StandIn = StandIn() if options.dry_run else Gpu()
    print(device.name)
    begin = time.perf_counter()
    kernels = options.kernel or KERNELS
    if not options.dry_run:
        compile_ahead(kernels)
        print(f"assembled after {time.perf_counter() - begin:.1f} s", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    failed: list[str] = []
    for kernel in kernels:
        start = time.perf_counter()
        rows[kernel] = []
        for case in cases(kernel):
            try:
                rows[kernel].append(record_case(device, kernel, case))
            except Exception as error:  # the other cases are still worth recording
                failed.append(f"{kernel} {case}: {type(error).__name__}: {error}")
                print(f"  FAILED {failed[-1]}", flush=True)
        forms = len({row["entry"] for row in rows[kernel]})
        print(f"{kernel}: {len(rows[kernel])} cases, {forms} forms, {time.perf_counter() - start:.1f} s", flush=True)
    wrong = [(kernel, row) for kernel, own in rows.items() for row in own if row["differ"]]
    if wrong:
        print("differences between GPU and emulator:")
        for kernel, row in wrong:
            print(f"  {kernel:6} {row['case']:80} {row['differ']:7} elements")
    nan_differ = sum(row["nan_bits_differ"] for own in rows.values() for row in own)
    total = sum(map(len, rows.values()))
    print(
        f"{total} products, {len(wrong)} differ, {nan_differ} NaNs of other bits, {len(failed)} failed, "
        f"{time.perf_counter() - begin:.1f} s"
    )

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
    output = options.output or (scratch if options.dry_run else RECORD)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
