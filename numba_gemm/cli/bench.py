"""``numba-gemm bench``: the ladder, validated, then timed beside cuBLAS; without a GPU, what can be said there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numba_gemm.benchmark.suites import (
    CPU_SIZES,
    EMULATED_SHAPE,
    LADDER_SIZES,
    LARGEST_EMULATED,
    SUITES,
    Shape,
    cube,
    parse_shape,
)

if TYPE_CHECKING:
    from rich.console import Console

    from numba_gemm.benchmark.record import Record, Row
    from numba_gemm.benchmark.runner import Task

#: Element type → kernels.
Plan = dict[str, list[str]]

_DESCRIPTION = """\
Validate kernels, then time them interleaved with cuBLAS on random data that is rotated past the L2 cache.

With a GPU, for each shape: time, TFLOP/s, % of cuBLAS's speed in the same run, % of the roof (the lesser of the peak
and arithmetic intensity × the memory bandwidth measured in this run), registers, and the largest error as a share of
what rounding allows. Every element of products up to 2048³ is checked; of larger ones 64 random rows and 64 random
columns in full, and that every element was written.

The peak is that of the FP32 lanes by arithmetic; in 16 bits it is the ceiling: mma.sync instructions on registers,
on operands near 1, timed interleaved with the kernels. The same on normal numbers, which take more power, is timed too.
cuBLAS multiplies in the kernels' type, with FP32 sums; after the tables cuBLAS in 16 bits is compared with cuBLAS in
FP32, interleaved.

Without a GPU: the CPU baseline against NumPy's BLAS, on one core and on all, and a report on every GPU kernel, compiled
for sm_80, sm_90 and sm_120: registers, spills, shared memory, occupancy, and the instructions of the main loop. Then
each runs on the emulator at a small shape and is validated: FMAs, shared-memory wavefronts and bank conflicts, sectors
of global memory, barriers. The emulator counts and times nothing.
"""

_EXAMPLES = """\
examples:
  numba-gemm bench
  numba-gemm bench v6 v7 --sizes 2048 4096x4095x4096 --rounds 15
  numba-gemm bench --suite skinny --json skinny.json
  numba-gemm bench --dtype bfloat16
  numba-gemm bench t4 --dtype bfloat16 --suite deepk
  numba-gemm bench cpu --sizes 512
  numba-gemm bench v5 v6 --device emulator --emulate 128 128 256
"""

#: Products of more terms than this take minutes on a CPU.
_CPU_LIMIT = 2048**3


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.benchmark.suites import DTYPES
    from numba_gemm.catalog import kernel_names
    from numba_gemm.cli.names import BESIDE_THE_LADDER

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
        help=f"{', '.join(kernel_names())}; {BESIDE_THE_LADDER}; or auto, which is the library's own choice "
        "(default: the FP32 ladder and then the tensor-core ladder in float16; for a suite auto and the two topmost "
        "rungs of one ladder)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="element type of A, B and C (default: what the kernels take, float16 where that is several)",
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
        choices=("auto", "cuda", "cpu", "emulator"),
        help="cuda insists on a GPU, cpu does what is done without one, emulator does the emulator's part of that, at "
        "--sizes if they are given (default: auto)",
    )
    parser.add_argument(
        "--emulate",
        nargs=3,
        type=int,
        metavar=("M", "N", "K"),
        help=f"shape for the emulator (default: {EMULATED_SHAPE.m} {EMULATED_SHAPE.n} {EMULATED_SHAPE.k})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.benchmark.record import Record, environment
    from numba_gemm.benchmark.runner import AUTO, Task
    from numba_gemm.benchmark.selection import kernels_by_dtype
    from numba_gemm.catalog import CPU_BASELINE
    from numba_gemm.cli.console import make_console
    from numba_gemm.cli.names import check_json_path, check_kernels
    from numba_gemm.device.driver import driver, is_available

    check_kernels(args.kernels, also=(AUTO,))
    plan = kernels_by_dtype(args.kernels, args.dtype, suite=bool(args.suite))
    with_baseline = CPU_BASELINE in args.kernels or (
        not args.kernels and not args.suite and args.dtype in (None, "float32")
    )
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be 1 or more")
    if args.json:
        check_json_path(args.json)
    shapes = [parse_shape(text) for text in args.sizes] if args.sizes else None
    suite = args.suite or ("ladder" if shapes is None else "sizes")
    if args.suite:
        shapes = list(SUITES[args.suite])
    if args.device == "cuda":
        driver()  # raises NoDeviceError with what was looked for
    emulated = _emulated_shapes(args, shapes)
    on_gpu = args.device == "cuda" or (args.device == "auto" and is_available())
    if args.emulate and on_gpu:
        raise ValueError("--emulate is of the emulator; add --device emulator")
    console = make_console()
    if on_gpu and plan:
        from numba_gemm.device.context import current_context

        arch = current_context().device.compute_capability
        plan = kernels_by_dtype(args.kernels, args.dtype, suite=bool(args.suite), arch=arch)
        tasks = [
            Task(suite, shape, dtype, tuple(kernels))
            for dtype, kernels in plan.items()
            for shape in shapes or map(cube, LADDER_SIZES)
        ]
        record = _on_gpu(console, tasks, args.rounds, args.peer)
        if CPU_BASELINE in args.kernels:
            _on_cpu(console, record, shapes, args.rounds)
    elif args.device == "emulator":
        if not plan:
            raise ValueError(f"nothing to emulate: {', '.join(args.kernels)} has no GPU code; leave --device out")
        record = Record(environment())
        _on_emulator(console, record, plan, emulated)
    else:
        record = _without_gpu(console, shapes, plan, args.rounds, gpu_found=is_available(), baseline=with_baseline)
        _on_emulator(console, record, plan, emulated)
        if plan:
            console.print(
                "On a machine with an NVIDIA GPU this command would also run each of these kernels there: check its "
                "result, and time it beside cuBLAS in TFLOP/s and as a share of the GPU's roof."
            )
    if not record.rows and not record.resources:
        raise ValueError("nothing was measured; give smaller --sizes, or a GPU kernel's name")
    if args.json:
        record.write(args.json)
        console.print(f"The run is in {args.json}.")
    return _verdict(console, record)


def _on_gpu(console: Console, tasks: Sequence[Task], rounds: int, peer_choice: str) -> Record:
    from numba_gemm.benchmark.forms import report_forms
    from numba_gemm.benchmark.record import HALF_AGAINST_SINGLE
    from numba_gemm.benchmark.report import comparison_table, shape_table
    from numba_gemm.benchmark.runner import Roof, bench_gpu
    from numba_gemm.benchmark.selection import find_peers, needed_forms
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.device.context import current_context

    device = current_context().device
    forms = needed_forms(tasks, device)
    with progress_bar(len(forms), f"compile for {device.arch}") as bar:
        report_forms(forms, sass=False, on_done=lambda _: bar.advance())
    dtypes = list(dict.fromkeys(task.dtype for task in tasks))
    peers, why_not = find_peers(peer_choice, dtypes)

    def started(device: Any, roof: Roof) -> None:
        version = next((peer.version for peer in peers.values()), why_not)
        console.print(
            f"{device.name}, {device.arch}, {device.sm_count} SMs: {roof.peak_tflops:.1f} TFLOP/s FP32 by "
            f"arithmetic, {roof.dram_gbs:.0f} GB/s measured. {version}"
        )

    with progress_bar(len(tasks), "bench") as bar:

        def finished(task: Task, rows: list[Row]) -> None:
            console.print()
            console.print(shape_table(str(task), rows))
            bar.advance()

        record = bench_gpu(tasks, peers=peers, rounds=rounds, on_step=bar.step, on_start=started, on_task=finished)
    _summary(console, record.rows)
    compared = [row for row in record.rows if row.suite == HALF_AGAINST_SINGLE]
    for dtype in dict.fromkeys(row.dtype for row in compared):
        console.print()
        console.print(comparison_table([row for row in compared if row.dtype == dtype]))
    return record


def _summary(console: Console, rows: Sequence[Row]) -> None:
    """Geometric means over the shapes of a run, where there are several."""
    from numba_gemm.benchmark.record import HALF_AGAINST_SINGLE
    from numba_gemm.benchmark.report import geometric_mean, peer_title

    own = [row for row in rows if row.suite != HALF_AGAINST_SINGLE]
    for dtype in dict.fromkeys(row.dtype for row in own):
        typed = [row for row in own if row.dtype == dtype]
        if len({(row.m, row.n, row.k) for row in typed}) < 2:
            continue
        parts = []
        for name in dict.fromkeys(row.kernel for row in typed):
            ratios = [row.ratio for row in typed if row.kernel == name and row.ratio]
            mean = geometric_mean(ratios)
            if mean is not None:
                parts.append(f"{name} {mean:.2f} (least {min(ratios):.2f})")
        if parts:
            peer = peer_title(next(row.peer for row in typed if row.peer))
            console.print(f"\nSpeed over {peer}'s in {dtype}, geometric mean of the shapes: {', '.join(parts)}.")


def _on_cpu(console: Console, record: Record, shapes: list[Shape] | None, rounds: int) -> None:
    from numba_gemm.benchmark.cpu import bench_cpu
    from numba_gemm.benchmark.report import cpu_table
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.processes import usable_cores

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
    console: Console,
    shapes: list[Shape] | None,
    plan: Plan,
    rounds: int,
    *,
    gpu_found: bool,
    baseline: bool,
) -> Record:
    from numba_gemm.benchmark.forms import REPORT_ARCHS, SHOWN_OF_MANY, report_forms, shown_forms
    from numba_gemm.benchmark.record import Record, cpu_name, environment
    from numba_gemm.benchmark.report import forms_table
    from numba_gemm.benchmark.selection import ladder_names
    from numba_gemm.catalog import get_spec
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.processes import usable_cores

    why = "The GPU is left alone" if gpu_found else "No NVIDIA GPU was found"
    console.print(f"{why}; this is what can be said without one, on {cpu_name()}, {usable_cores()} cores.\n")
    record = Record(environment())
    if baseline:
        _on_cpu(console, record, shapes, rounds)
    forms = [
        form for dtype, names in plan.items() for form in shown_forms(ladder_names(names, dtype), REPORT_ARCHS, dtype)
    ]
    if forms:
        with progress_bar(len(forms), "compile the GPU kernels") as bar:
            reports = report_forms(forms, on_done=lambda _: bar.advance())
        console.print(forms_table(reports, "GPU kernels, compiled; instructions are those of the main loop"))
        console.print()
        many = list(dict.fromkeys(name for name, _, _ in forms if get_spec(name).select is not None))
        if many:
            console.print(
                f"Of {', '.join(many)}, which have a form for each problem, {SHOWN_OF_MANY} at most are shown; "
                f"numba-gemm inspect {many[-1]} shows all.\n"
            )
        for note in dict.fromkeys(report.note for report in reports if report.note):
            console.print(f"Instructions weren't counted: {note}")
        record.resources = [report.to_dict() for report in reports]
    return record


def _emulated_shapes(args: argparse.Namespace, shapes: list[Shape] | None) -> list[Shape]:
    """What the emulator is to run: ``--emulate``, or the sizes given for it alone."""
    chosen = [Shape(*args.emulate)] if args.emulate else [EMULATED_SHAPE]
    if args.device == "emulator" and shapes is not None:
        if args.emulate:
            raise ValueError("--emulate and --sizes or --suite both say what to emulate; give one")
        chosen = shapes
    for shape in chosen:
        if min(shape.m, shape.n, shape.k) < 1:
            raise ValueError(f"--emulate {shape.m} {shape.n} {shape.k}: every dimension must be 1 or more")
        if shape.m * shape.n * shape.k > LARGEST_EMULATED:
            raise ValueError(
                f"{shape} takes the emulator minutes; its counts grow with the shape, so take a smaller one"
            )
    return chosen


def _on_emulator(console: Console, record: Record, plan: Plan, shapes: list[Shape]) -> None:
    """Run kernels on the emulator, and show what it counted."""
    from numba_gemm.benchmark.emulated import bench_emulated, emulated_forms
    from numba_gemm.benchmark.forms import report_forms
    from numba_gemm.benchmark.report import counters_table
    from numba_gemm.benchmark.selection import ladder_names
    from numba_gemm.catalog import get_spec
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.emulate import DEFAULT_ARCH

    forms = [
        form
        for shape in shapes
        for dtype, names in plan.items()
        for form in emulated_forms(ladder_names(names, dtype), [shape], DEFAULT_ARCH, dtype)
    ]
    if not forms:
        return
    if not record.resources:  # else they are compiled
        needed = [(name, config, DEFAULT_ARCH) for name, config in dict.fromkeys((n, c) for n, c, _ in forms)]
        needed = [form for form in needed if get_spec(form[0]).source != "ptx"]  # whose text needs no compiler
        with progress_bar(len(needed), "compile the GPU kernels") as bar:
            report_forms(needed, sass=False, on_done=lambda _: bar.advance())
    blocks = sum(get_spec(name).grid(shape.m, shape.n, config) for name, config, shape in forms)
    with progress_bar(blocks, "emulate") as bar:
        rows = bench_emulated(forms, on_step=lambda text: bar.step(f"emulate {text}"), on_block=bar.advance)
    for shape in dict.fromkeys(shapes):
        own = [row for row in rows if (row.m, row.n, row.k) == (shape.m, shape.n, shape.k)]
        if own:
            console.print(counters_table(own, f"GPU kernels at {shape} on the {own[0].device}, validated and counted"))
            console.print()
    record.rows += rows


def _verdict(console: Console, record: Record) -> int:
    """Name what failed; 1 if anything did."""
    from rich.markup import escape

    from numba_gemm.benchmark.report import failures

    lines = failures(record.rows)
    lines += [f"{r['kernel']} {r['config']} {r['arch']}: {r['error']}" for r in record.resources if r["error"]]
    for line in lines:
        console.print(f"[red]failed:[/] {escape(line)}")
    return 1 if lines else 0
