"""``numba-gemm bench``: the ladder, validated, then timed beside cuBLAS; without a GPU, what can be said there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_gemm.benchmark.suites import CPU_SIZES, LADDER_SIZES, SUITES, Shape, cube, parse_shape

if TYPE_CHECKING:
    from rich.console import Console

    from numba_gemm.benchmark.record import Record, Row

_DESCRIPTION = """\
Validate kernels, then time them interleaved with cuBLAS on random data that is rotated past the L2 cache.

With a GPU, for each shape: time, TFLOP/s, % of cuBLAS's speed in the same run, % of the roof (the lesser of the FP32
peak and arithmetic intensity × the memory bandwidth measured in this run), registers, and the largest error as a share
of what rounding allows. Every element of products up to 2048³ is checked; of larger ones 64 random rows and 64 random
columns in full, and that every element was written.

Without a GPU: the CPU baseline against NumPy's BLAS, on one core and on all, and a report on every GPU kernel, compiled
for sm_80, sm_90 and sm_120: registers, spills, shared memory, occupancy, and the instructions of the main loop.
"""

_EXAMPLES = """\
examples:
  numba-gemm bench
  numba-gemm bench v6 v7 --sizes 2048 4096x4095x4096 --rounds 15
  numba-gemm bench --suite skinny --json skinny.json
  numba-gemm bench cpu --sizes 512
"""

#: Products of more terms than this take minutes on a CPU.
_CPU_LIMIT = 2048**3


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.catalog import kernel_names

    parser = subparsers.add_parser(
        "bench",
        help="time the kernels beside cuBLAS, each validated first",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "kernels",
        nargs="*",
        metavar="KERNEL",
        help=f"{', '.join(kernel_names())}, or auto, which is the library's own choice "
        "(default: the whole ladder; for a suite auto, v6 and v7)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sizes",
        nargs="+",
        metavar="SIZE",
        help="sizes to multiply: N for N×N×N, or MxNxK "
        f"(default: {' '.join(map(str, LADDER_SIZES))}; without a GPU {' '.join(map(str, CPU_SIZES))})",
    )
    what.add_argument("--suite", choices=sorted(SUITES), help="a named set of shapes instead (default: none)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="measurements of each kernel (default: 7)")
    parser.add_argument("--json", metavar="FILE", help="also write the run to FILE (default: not written)")
    parser.add_argument(
        "--peer",
        default="auto",
        choices=("auto", "none", "nvmath", "cupy", "torch"),
        help="what to compare with: auto takes cuBLAS from wherever it is found, nvmath and cupy the one that the "
        "package brings, torch is torch.mm (default: auto)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        help="cuda insists on a GPU, cpu does what is done without one (default: auto)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.benchmark.runner import AUTO
    from numba_gemm.catalog import CPU_BASELINE, LADDER
    from numba_gemm.cli.console import make_console
    from numba_gemm.cli.names import check_kernels
    from numba_gemm.device.driver import driver, is_available

    names = check_kernels(args.kernels, also=(AUTO,))
    if not args.kernels and args.suite:
        names = [AUTO, "v6", "v7"]
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be 1 or more")
    if args.json and not Path(args.json).absolute().parent.is_dir():  # said now, not after the run
        raise ValueError(f"--json {args.json}: there is no folder {Path(args.json).absolute().parent}")
    shapes = [parse_shape(text) for text in args.sizes] if args.sizes else None
    suite = args.suite or ("ladder" if shapes is None else "sizes")
    if args.suite:
        shapes = list(SUITES[args.suite])
    if args.device == "cuda":
        driver()  # raises NoDeviceError with what was looked for
    console = make_console()
    on_gpu = args.device == "cuda" or (args.device == "auto" and is_available())
    gpu_names = [name for name in names if name in LADDER or name == AUTO]
    if on_gpu and gpu_names:
        work = [(suite, shape) for shape in shapes or map(cube, LADDER_SIZES)]
        record = _on_gpu(console, work, gpu_names, args.rounds, args.peer)
        if CPU_BASELINE in args.kernels:
            _on_cpu(console, record, shapes, args.rounds)
    else:
        record = _without_gpu(console, shapes, names, args.rounds, gpu_found=is_available())
    if args.json:
        record.write(args.json)
        console.print(f"The run is in {args.json}.")
    return _verdict(console, record)


def _on_gpu(
    console: Console, work: Sequence[tuple[str, Shape]], names: list[str], rounds: int, peer_choice: str
) -> Record:
    from numba_gemm.benchmark.forms import all_forms, report_forms
    from numba_gemm.benchmark.peers import find_peer
    from numba_gemm.benchmark.report import shape_table
    from numba_gemm.benchmark.runner import AUTO, Roof, bench_gpu
    from numba_gemm.catalog import LADDER
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.device.context import current_context

    device = current_context().device
    forms = all_forms(list(LADDER) if AUTO in names else names, [device.compute_capability])
    with progress_bar(len(forms), f"compile for {device.arch}") as bar:
        report_forms(forms, sass=False, on_done=lambda _: bar.advance())
    peer, why_not = find_peer(peer_choice)

    def started(device: Any, roof: Roof) -> None:
        console.print(
            f"{device.name}, {device.arch}, {device.sm_count} SMs: {roof.peak_tflops:.1f} TFLOP/s FP32 by "
            f"arithmetic, {roof.dram_gbs:.0f} GB/s measured. {peer.version if peer else why_not}"
        )

    with progress_bar(len(work), "bench") as bar:

        def finished(suite: str, shape: Shape, rows: list[Row]) -> None:
            console.print()
            console.print(shape_table(f"{suite} {shape}", rows))
            bar.advance()

        record = bench_gpu(work, names, peer=peer, rounds=rounds, on_step=bar.step, on_start=started, on_shape=finished)
    _summary(console, record.rows)
    return record


def _summary(console: Console, rows: Sequence[Row]) -> None:
    """Geometric means over the shapes of a run, where there are several."""
    from numba_gemm.benchmark.report import geometric_mean, peer_title

    if len({(row.m, row.n, row.k) for row in rows}) < 2:
        return
    parts = []
    for name in dict.fromkeys(row.kernel for row in rows):
        ratios = [row.ratio for row in rows if row.kernel == name and row.ratio]
        mean = geometric_mean(ratios)
        if mean is not None:
            parts.append(f"{name} {mean:.2f} (least {min(ratios):.2f})")
    if parts:
        peer = next(row.peer for row in rows if row.peer)
        console.print(f"\nSpeed over {peer_title(peer)}'s, geometric mean of the shapes: {', '.join(parts)}.")


def _on_cpu(console: Console, record: Record, shapes: list[Shape] | None, rounds: int) -> None:
    from numba_gemm.benchmark.cpu import bench_cpu
    from numba_gemm.benchmark.record import usable_cores
    from numba_gemm.benchmark.report import cpu_table
    from numba_gemm.cli.console import progress_bar

    wanted = shapes or [cube(size) for size in CPU_SIZES]
    suited = [shape for shape in wanted if shape.m * shape.n * shape.k <= _CPU_LIMIT]
    if len(suited) < len(wanted):
        left_out = ", ".join(str(shape) for shape in wanted if shape not in suited)
        console.print(f"Left out on the CPU, where they take minutes: {left_out}.")
    if not suited:
        return
    with progress_bar(len(suited) * min(2, usable_cores()), "CPU baseline") as bar:

        def stepped(text: str) -> None:
            bar.step(f"CPU baseline {text}")
            bar.advance()

        rows = bench_cpu(suited, rounds=rounds, on_step=stepped)
    console.print(cpu_table(rows))
    console.print()
    record.rows += rows


def _without_gpu(
    console: Console, shapes: list[Shape] | None, names: list[str], rounds: int, *, gpu_found: bool
) -> Record:
    from numba_gemm.benchmark.forms import REPORT_ARCHS, all_forms, report_forms
    from numba_gemm.benchmark.record import Record, cpu_name, environment, usable_cores
    from numba_gemm.benchmark.report import forms_table
    from numba_gemm.benchmark.runner import AUTO
    from numba_gemm.catalog import CPU_BASELINE, LADDER
    from numba_gemm.cli.console import progress_bar

    why = "The GPU is left alone" if gpu_found else "No NVIDIA GPU was found"
    console.print(f"{why}; this is what can be said without one, on {cpu_name()}, {usable_cores()} cores.\n")
    record = Record(environment())
    if CPU_BASELINE in names:
        _on_cpu(console, record, shapes, rounds)
    forms = all_forms(list(LADDER) if AUTO in names else [n for n in names if n in LADDER], REPORT_ARCHS)
    if forms:
        with progress_bar(len(forms), "compile the GPU kernels") as bar:
            reports = report_forms(forms, on_done=lambda _: bar.advance())
        console.print(forms_table(reports, "GPU kernels, compiled; FFMA and LDS are those of the main loop"))
        console.print()
        for note in dict.fromkeys(report.note for report in reports if report.note):
            console.print(f"Instructions weren't counted: {note}")
        record.resources = [report.to_dict() for report in reports]
        console.print(
            "On a machine with an NVIDIA GPU this command would also run each of these kernels: check its result, "
            "and time it beside cuBLAS in TFLOP/s and as a share of the GPU's roof."
        )
    return record


def _verdict(console: Console, record: Record) -> int:
    """Name what failed; 1 if anything did."""
    from rich.markup import escape

    from numba_gemm.benchmark.report import failures

    lines = failures(record.rows)
    lines += [f"{r['kernel']} {r['config']} {r['arch']}: {r['error']}" for r in record.resources if r["error"]]
    for line in lines:
        console.print(f"[red]failed:[/] {escape(line)}")
    return 1 if lines else 0
