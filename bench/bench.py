"""Record benchmark runs: ``python bench/bench.py NAME …`` writes ``bench/results/<gpu>/NAME.json`` for each name.

    ladder                                    v1 … v7 at 1024, 2048 and 4096 cubed, beside cuBLAS
    ladder16                                  t1 … w2 likewise in float16 and bfloat16, beside the mma.sync ceilings too
    square small odd skinny deepk llm         the suites: the library's own choice, v7 and v8
    square16 small16 odd16 skinny16 …         the suites in float16 and bfloat16: the library's own choice, t4 and w2
    host_overhead                             host time of one call, and time of the first call in a process
    host_transfers                            products of NumPy arrays through the GPU, beside CuPy's
    cpu                                       the CPU baseline beside NumPy's BLAS; needs no GPU
    resources                                 registers, occupancy and instruction mix of every kernel; needs no GPU
    emulator                                  every kernel at one shape on the emulator, with its counters; needs no GPU

Several names run one after the other, each in a process of its own, so that a fault in one leaves the others alone.
A kernel or peer that fails is a row with its error, and the exit status is then 1. A run on a GPU that is cut leaves
the shapes that it finished in NAME.partial.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

from numba_gemm.benchmark.cpu import bench_cpu  # noqa: E402
from numba_gemm.benchmark.emulated import bench_emulated, emulated_forms  # noqa: E402
from numba_gemm.benchmark.forms import REPORT_ARCHS, report_forms, shown_forms  # noqa: E402
from numba_gemm.benchmark.record import HALF_AGAINST_SINGLE, Record, Row, environment, slug  # noqa: E402
from numba_gemm.benchmark.report import (  # noqa: E402
    comparison_table,
    counters_table,
    cpu_table,
    failures,
    forms_table,
    shape_table,
)
from numba_gemm.benchmark.runner import Task, bench_gpu  # noqa: E402
from numba_gemm.benchmark.selection import find_peers, kernels_by_dtype, needed_forms, suite_kernels  # noqa: E402
from numba_gemm.benchmark.suites import CPU_SIZES, EMULATED_SHAPE, LADDER_SIZES, SUITES, cube  # noqa: E402
from numba_gemm.catalog import LADDER, kernels_for  # noqa: E402
from numba_gemm.device.context import current_context  # noqa: E402
from numba_gemm.emulate import DEFAULT_ARCH  # noqa: E402
from numba_gemm.errors import NumbaGemmError  # noqa: E402
from numba_gemm.report import render  # noqa: E402

HALF = "16"
GPU_NAMES = ("ladder", *SUITES)
OTHER_NAMES = ("host_overhead", "host_transfers", "cpu", "resources", "emulator")
NAMES = (*GPU_NAMES, *(f"{name}{HALF}" for name in GPU_NAMES), *OTHER_NAMES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help="what to record, see above")
    parser.add_argument("--kernels", nargs="+", metavar="K", help="other kernels than the usual ones")
    parser.add_argument("--dtype", nargs="+", help="of a name with 16: only these (default: float16 bfloat16)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each kernel (default: 9)")
    parser.add_argument("--peer", default="auto", help="as for numba-gemm bench (default: auto)")
    parser.add_argument("--results", default=ROOT / "bench" / "results", type=Path, help="folder to write to")
    parser.add_argument("--commit", help="of the source, where there is no git to ask")
    args = parser.parse_args()
    if len(args.names) > 1:
        return run_each(args.names)
    (name,) = args.names
    start = time.perf_counter()
    try:
        record = make_record(name, args)
        partial(name, args, record).unlink(missing_ok=True)
    except NumbaGemmError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    folder = slug(record.environment["gpu"] or "cpu")
    path = args.results / folder / f"{name}.json"
    record.write(path)
    failed = failures(record.rows) + [f"{r['kernel']}: {r['error']}" for r in record.resources if r["error"]]
    for line in failed:
        print(f"failed: {line}")
    print(f"{name}: {len(record.rows) + len(record.resources)} rows in {path}, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def partial(name: str, args: argparse.Namespace, record: Record) -> Path:
    """Where a run that isn't over keeps what it has, in case it is cut."""
    folder: Path = args.results / slug(record.environment["gpu"] or "cpu")
    return folder / f"{name}.partial.json"


def run_each(names: list[str]) -> int:
    """This script once for each name; the exit status is the worst of theirs."""
    others = [argument for argument in sys.argv[1:] if argument not in names]
    worst = 0
    for name in names:
        print(f"== {name}", flush=True)
        worst = max(worst, abs(subprocess.run([sys.executable, __file__, name, *others], check=False).returncode))
    return worst


def make_record(name: str, args: argparse.Namespace) -> Record:
    if name == "cpu":
        rows = bench_cpu([cube(size) for size in CPU_SIZES], rounds=args.rounds)
        print(render(cpu_table(rows), 200))
        return Record(environment(commit=args.commit), rows)
    if name == "resources":
        reports = report_forms(shown_forms(args.kernels or list(LADDER), REPORT_ARCHS))
        print(render(forms_table(reports), 200))
        resources = [report.to_dict() for report in reports]
        return Record(environment(commit=args.commit), resources=resources)
    if name == "emulator":
        rows = bench_emulated(emulated_forms(args.kernels or list(LADDER), [EMULATED_SHAPE], DEFAULT_ARCH))
        print(render(counters_table(rows), 200))
        return Record(environment(commit=args.commit), rows)
    if name in ("host_overhead", "host_transfers"):
        module = importlib.import_module(name)
        record: Record = module.record(rounds=20, commit=args.commit)
        return record
    return on_gpu(name, args)


def on_gpu(name: str, args: argparse.Namespace) -> Record:
    device = current_context().device
    suite = name.removesuffix(HALF)
    dtypes = args.dtype or (["float16", "bfloat16"] if name.endswith(HALF) else ["float32"])
    shapes = [cube(size) for size in LADDER_SIZES] if suite == "ladder" else list(SUITES[suite])
    tasks = []
    for dtype in dtypes:
        arch = device.compute_capability
        usual = kernels_for(dtype, arch) if suite == "ladder" else suite_kernels(dtype, arch)
        kernels = kernels_by_dtype(args.kernels, dtype)[dtype] if args.kernels else usual
        tasks += [Task(name, shape, dtype, tuple(kernels)) for shape in shapes]
    for report in report_forms(needed_forms(tasks, device), sass=False):
        if report.error:
            print(f"{report.kernel} {report.config}: {report.error}")
    peers, why_not = find_peers(args.peer, dtypes)
    print(next((peer.version for peer in peers.values()), why_not), flush=True)

    def show(task: Task, rows: list[Row]) -> None:
        print(render(shape_table(str(task), rows), 200), flush=True)

    def keep(record: Record) -> None:
        record.write(partial(name, args, record))

    record = bench_gpu(
        tasks,
        peers=peers,
        rounds=args.rounds,
        commit=args.commit,
        on_task=show,
        on_record=keep,
        compare=suite == "ladder",
    )
    for dtype in dtypes:
        compared = [row for row in record.rows if row.suite == HALF_AGAINST_SINGLE and row.dtype == dtype]
        if compared:
            print(render(comparison_table(compared), 200))
    return record


if __name__ == "__main__":
    raise SystemExit(main())
