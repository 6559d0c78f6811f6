"""What the recorders of this folder share: run products on a GPU and on the emulator, compare bits, keep their hashes.

A record holds, for each kernel and case, the form that ran and the SHA-256 of the output. NaNs are hashed as the GPU
made them as long as the emulator's have the same bits everywhere, else with one pattern for all; ``nan`` says which.

``--dry-run`` needs no GPU: the emulator stands in for it. ``--check`` runs the recorded forms again and compares their
bits with the record's, without the emulator; so each of them can be watched by compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from numba_gemm.benchmark.forms import report_forms
from numba_gemm.benchmark.record import environment

Bits = NDArray[Any]
SHOWN = 3  # differing elements of a case that are printed


class Side(Protocol):
    """What multiplies: a GPU, or what stands in for it."""

    name: str
    device: Any

    def multiply(self, kernel: str, case: Any, form: str = "") -> tuple[NDArray[Any], str]:
        """C of a case, and the form that ran: the one that is described, or the one that is chosen."""


@dataclass(frozen=True)
class Recording:
    """What a record is of.

    Attributes
    ----------
    path : of the record.
    seed : of the inputs, kept in the record.
    named : what the record calls a form.
    kernels : in order.
    cases : of a kernel, each with a string of its own.
    plan : problem, spec, config and :class:`images.Image` of A, B and C of a case, in the form that is described, if
        one is.
    words : of a form.
    arch, sm_count : of the GPU.
    emulate : C of a case by the emulator, and its form; of the form that is described, if one is.
    bits_of, canonical : elements as they are in memory, and the same with one bit pattern for every NaN.
    digest : SHA-256 of bits.
    """

    path: Path
    seed: int
    named: str
    kernels: list[str]
    cases: Callable[[str], Iterable[Any]]
    plan: Callable[..., tuple[Any, ...]]
    words: Callable[[Any, Any], str]
    arch: tuple[int, int]
    sm_count: int
    emulate: Callable[..., tuple[NDArray[Any], str]]
    bits_of: Callable[[NDArray[Any]], Bits]
    canonical: Callable[[NDArray[Any]], Bits]
    digest: Callable[[Bits], str]

    def compare(self, side: Side, kernel: str, case: Any) -> dict[str, Any]:
        """Run one case on both; print differing elements."""
        theirs, form = side.multiply(kernel, case)
        mine, _ = self.emulate(kernel, case)
        ours, want = self.bits_of(mine), self.bits_of(theirs)
        different = np.argwhere(self.canonical(mine) != self.canonical(theirs))
        for row, column in different[:SHOWN]:
            print(f"      ({row}, {column}): GPU {want[row, column]:#x}, emulator {ours[row, column]:#x}")
        return {
            "case": str(case),
            self.named: form,
            "differ": len(different),
            "nan_bits_differ": int(np.count_nonzero(ours != want)) - len(different),
            "raw": self.digest(want),
            "canonical": self.digest(self.canonical(theirs)),
        }

    def assemble(self, kernels: list[str]) -> None:
        """Compile and assemble every form of the kernels that multiply, on all cores."""
        forms = {}
        for kernel in kernels:
            for case in self.cases(kernel):
                problem, spec, config, *_ = self.plan(kernel, case)
                launches = spec.plan(problem, config)
                forms[(kernel, launches.launches[launches.main].config, self.arch)] = None
        for report in report_forms(list(forms), sass=False):
            if report.error:
                print(f"{report.kernel} {report.config}: {report.error}")

    def check(self, side: Side, kernels: list[str]) -> int:
        """Run what the record has again; exit status 1 if any output has other bits, or a case isn't in it."""
        record = json.loads(self.path.read_text(encoding="utf-8"))
        change = self.canonical if record["nan"] == "canonical" else self.bits_of
        failed = 0
        for kernel in kernels:
            recorded = record["sha256"].get(kernel, {})
            wrong = []
            for case in self.cases(kernel):
                try:
                    known = recorded[str(case)]
                    result, form = side.multiply(kernel, case, known[self.named])
                    right = form == known[self.named] and self.digest(change(result)) == known["sha256"]
                except Exception as error:  # the other cases are still worth checking
                    print(f"  {kernel} {case}: {type(error).__name__}: {error}", flush=True)
                    right = False
                if not right:
                    wrong.append(str(case))
            forms = len({row[self.named] for row in recorded.values()})
            print(
                f"{kernel}: {len(recorded)} cases in {forms} forms, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True
            )
            failed += len(wrong)
        return 1 if failed else 0

    def record(self, side: Side, kernels: list[str], output: Path) -> int:
        """Run every case on both sides and write the record; exit status 1 if any differ or fail."""
        begin = time.perf_counter()
        rows: dict[str, list[dict[str, Any]]] = {}
        failed: list[str] = []
        for kernel in kernels:
            start = time.perf_counter()
            rows[kernel] = []
            for case in self.cases(kernel):
                try:
                    rows[kernel].append(self.compare(side, kernel, case))
                except Exception as error:  # the other cases are still worth recording
                    failed.append(f"{kernel} {case}: {type(error).__name__}: {error}")
                    print(f"  FAILED {failed[-1]}", flush=True)
            forms = len({row[self.named] for row in rows[kernel]})
            print(
                f"{kernel}: {len(rows[kernel])} cases, {forms} forms, {time.perf_counter() - start:.1f} s", flush=True
            )
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
        content = {
            "environment": environment(side.device),
            "seed": self.seed,
            "nan": hashed,
            "sha256": {
                kernel: {row["case"]: {self.named: row[self.named], "sha256": row[hashed]} for row in own}
                for kernel, own in rows.items()
            },
            "mismatches": [{"kernel": kernel} | row for kernel, row in wrong],
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{output}: {output.stat().st_size / 1024:.0f} KB")
        return 1 if wrong or failed else 0


class Gpu:
    """Products by the library's kernels on device 0, which must be of the record's kind."""

    def __init__(self, recording: Recording) -> None:
        from numba_gemm.device.context import current_context

        self.recording = recording
        self.context = current_context()
        self.device = self.context.device
        self.name = self.device.name
        if (self.device.compute_capability, self.device.sm_count) != (recording.arch, recording.sm_count):
            raise SystemExit(f"this record is of an H200; here is {self.name}")

    def multiply(self, kernel: str, case: Any, form: str = "") -> tuple[NDArray[Any], str]:
        from numba_gemm.device.driver import check, driver
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import synchronize_stream
        from numba_gemm.execute import prepare_form

        def address(array: NDArray[Any]) -> int:
            return int(array.__array_interface__["data"][0])

        problem, spec, config, images = self.recording.plan(kernel, case, form)
        buffers = [DeviceBuffer(image.flat.nbytes, 0) for image in images]
        try:
            for buffer, image in zip(buffers, images, strict=True):
                check(driver().cuMemcpyHtoD(buffer.pointer, address(image.flat), image.flat.nbytes), "cuMemcpyHtoD")
            prepared = prepare_form(problem, spec, config, self.context)
            both = zip(buffers, images, strict=True)
            prepared.launch(*(buffer.pointer + image.offset * image.flat.itemsize for buffer, image in both), 0)
            synchronize_stream(0, after=f"{kernel} on {case}")
            after = np.empty_like(images[2].flat)
            check(driver().cuMemcpyDtoH(address(after), buffers[2].pointer, after.nbytes), "cuMemcpyDtoH")
            return images[2].result(after), self.recording.words(spec, config)
        finally:
            for buffer in buffers:
                buffer.free()


@dataclass(frozen=True)
class StandIn:
    """No GPU: the emulator."""

    emulate: Callable[..., tuple[NDArray[Any], str]]
    name: str = "dry run, no GPU"
    device: Any = None

    def multiply(self, kernel: str, case: Any, form: str = "") -> tuple[NDArray[Any], str]:
        return self.emulate(kernel, case, form)


def main(description: str, recording: Recording) -> int:
    """The command line of a recorder."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help=f"default: tests/data/{recording.path.name}, or a scratch file if dry"
    )
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator stands in for it")
    parser.add_argument("--check", action="store_true", help="compare with the record, write nothing")
    parser.add_argument("--kernel", action="append", choices=recording.kernels, help="only this one (may be repeated)")
    options = parser.parse_args()
    side: Side = StandIn(recording.emulate) if options.dry_run else Gpu(recording)
    print(side.name)
    kernels = options.kernel or recording.kernels
    if options.kernel and not (options.check or options.output or options.dry_run):
        parser.error("--kernel leaves the others out of the record: name another file with --output")
    if not options.dry_run:
        begin = time.perf_counter()
        recording.assemble(kernels)
        print(f"assembled after {time.perf_counter() - begin:.1f} s", flush=True)
    if options.check:
        return recording.check(side, kernels)
    scratch = Path(tempfile.gettempdir()) / f"dry_{recording.path.name}"
    return recording.record(side, kernels, options.output or (scratch if options.dry_run else recording.path))
