"""Count with Nsight Compute what the FP32 ladder does, and record it beside what the emulator counts.

Run by hand, on a machine with an H200 and ncu, from the repository's root::

    python tests/gpu/record_counters.py

One ncu process watches one program that launches every form of every kernel on each shape of `SHAPES` that it takes.
ncu is asked for several candidates for each count, so that what a metric means can be decided later from the record
alone; metrics that it doesn't know are left out. The table tells, for each count and candidate, in how many launches it
equals the emulator's and how far it is from it at most. ``--dry-run`` needs neither GPU nor ncu: a CSV made of the
emulator's counts stands in for ncu's.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from numba_gemm import ncu  # noqa: E402
from numba_gemm.benchmark.record import environment  # noqa: E402
from numba_gemm.catalog import LADDER, kernels_for  # noqa: E402
from numba_gemm.profile import Job, Profile, profile_emulated  # noqa: E402

ARCH = (9, 0)
SHAPES = ((256, 256, 64), (128, 256, 40), (130, 134, 37))

#: Count of the emulator to the metrics that may be the same thing; the first is the one of `ncu.METRICS`.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "ffma_threads": ("smsp__sass_thread_inst_executed_op_ffma_pred_on",),
    "fmul_threads": ("smsp__sass_thread_inst_executed_op_fmul_pred_on",),
    "fadd_threads": ("smsp__sass_thread_inst_executed_op_fadd_pred_on",),
    "shared_load_requests": ("smsp__inst_executed_op_shared_ld", "smsp__sass_inst_executed_op_shared_ld"),
    "shared_store_requests": ("smsp__inst_executed_op_shared_st", "smsp__sass_inst_executed_op_shared_st"),
    "shared_load_wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld",
    ),
    "shared_store_wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st",
    ),
    "shared_load_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld",
        "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ld",
    ),
    "shared_store_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st",
        "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_st",
    ),
    "global_load_requests": (
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld",
        "smsp__inst_executed_op_global_ld",
        "smsp__sass_inst_executed_op_global_ld",
        "smsp__sass_l1tex_t_requests_pipe_lsu_mem_global_op_ld",
    ),
    "global_store_requests": (
        "l1tex__t_requests_pipe_lsu_mem_global_op_st",
        "smsp__inst_executed_op_global_st",
        "smsp__sass_inst_executed_op_global_st",
        "smsp__sass_l1tex_t_requests_pipe_lsu_mem_global_op_st",
    ),
    "global_load_sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld",
    ),
    "global_store_sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st",
    ),
    "local_load_requests": ("l1tex__t_requests_pipe_lsu_mem_local_op_ld",),
    "local_store_requests": ("l1tex__t_requests_pipe_lsu_mem_local_op_st",),
    "barriers": ("smsp__inst_executed_pipe_adu",),
    "instructions": ("smsp__inst_executed",),
    "thread_instructions": ("smsp__thread_inst_executed_pred_on",),
    "mma_instructions": ("sm__inst_executed_pipe_tensor",),
    "async_copies": ("smsp__inst_executed_op_ldgsts",),
}

#: Recorded as well, with no count of the emulator beside them.
OTHERS = (
    "smsp__sass_data_bytes_mem_shared_op_ld",
    "smsp__sass_data_bytes_mem_shared_op_st",
    "smsp__thread_inst_executed",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared",
    "l1tex__data_bank_reads",
    "l1tex__data_bank_writes",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_miss",
    "l1tex__t_output_wavefronts_pipe_lsu_mem_global_op_ld",
    "l1tex__data_pipe_lsu_wavefronts",
    "lts__t_sectors_srcunit_tex_op_read",
    "lts__t_sectors_srcunit_tex_op_write",
    "smsp__sass_thread_inst_executed_op_fp32_pred_on",
    "smsp__sass_thread_inst_executed_op_integer_pred_on",
    "smsp__inst_executed_pipe_fma",
    "smsp__inst_executed_pipe_alu",
    "smsp__inst_executed_pipe_lsu",
    "smsp__inst_executed_pipe_cbu",
    "smsp__inst_executed_pipe_uniform",
    "gpu__time_duration",
)
LAUNCH = ("launch__registers_per_thread", "launch__grid_size")

Launches = list[dict[str, float | None]]


def jobs() -> list[Job]:
    """Every form of every kernel on every shape that it takes."""
    return [
        Job(spec.name, m, n, k, config)
        for m, n, k in SHAPES
        for spec in map(LADDER.__getitem__, kernels_for("float32"))
        for config in spec.configs
        if spec.select is None  # v8 makes a form for each problem
        if spec.unmet(Job(spec.name, m, n, k).problem(), config) is None
    ]


def metrics() -> list[str]:
    """What to ask ncu for: the metrics above that it says it knows, those of `ncu.METRICS` in any case."""
    names = [*(name for candidates in CANDIDATES.values() for name in candidates), *OTHERS]
    known = ncu.known_metrics()
    print(f"ncu lists {len(known)} metrics")
    if len(known) < 100:
        known = set(names)
    if not any("__sass_" in name for name in known):  # they are counted by instrumented code, and may not be listed
        known |= {name for name in names if "__sass_" in name}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"not known to ncu here: {', '.join(unknown)}")
    known |= {metric.removesuffix(".sum") for metric in ncu.METRICS.values()}
    return [*(f"{name}.sum" for name in dict.fromkeys(names) if name in known), *LAUNCH]


def measure(todo: Sequence[Job], log: Path) -> tuple[Launches, str]:
    """ncu's metrics of each job, and ncu's version. If the long list fails, what matters most is still measured."""
    program = ncu.find_ncu()
    if program is None:
        raise SystemExit(ncu.HOW_TO_GET_NCU)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    asked = metrics()
    print(f"{program}: {len(todo)} launches, {len(asked)} metrics; what it prints goes to {log}", flush=True)
    try:
        launches = ncu.measure(todo, asked, log=log)
    except ncu.ProfilerError as error:
        print(f"{error}\nonce more, with the {len(ncu.METRICS)} metrics of the profile command", flush=True)
        launches = ncu.measure(todo, list(ncu.METRICS.values()), log=log.with_suffix(".second.txt"))
    return launches, version.splitlines()[-1]


def canned(todo: Sequence[Job], emulated: Sequence[Profile]) -> tuple[Launches, str]:
    """A CSV as ncu prints it, made of the emulator's counts, and read back."""
    names = [f"{candidates[0]}.sum" for candidates in CANDIDATES.values()]
    common = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Device", "CC")
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow([*common, *names])
    writer.writerow([*[""] * len(common), *["inst"] * len(names)])
    for number, (job, profile) in enumerate(zip(todo, emulated, strict=True)):
        entry = LADDER[job.kernel].entry(job.config or ())
        values = [f"{profile.values[name] or 0:,}" for name in CANDIDATES]
        writer.writerow([number, 1, "python", "host", entry, 1, 7, 0, "9.0", *values])
    launches = ncu.parse_csv("==PROF== Connected to process 1\n" + text.getvalue())
    print("ncu would be called with", *ncu.options(todo, names))
    return [values for _, values in launches], "dry run, no ncu"


def summary(emulated: Sequence[Profile], launches: Launches) -> list[str]:
    """One line for each count and candidate: launches in which they are equal, and the largest difference."""
    lines = [f"{'count':24} {'ncu metric':66} {'equal':>7} {'largest difference':>19}  in"]
    for name, candidates in CANDIDATES.items():
        for metric in candidates:
            pairs = [
                (profile.values[name] or 0, launch.get(f"{metric}.sum"), profile.job)
                for profile, launch in zip(emulated, launches, strict=True)
            ]
            found = [(ours, theirs, job) for ours, theirs, job in pairs if theirs is not None]
            if not found:
                lines.append(f"{name:24} {metric:66} {'–':>7}")
                continue
            equal = sum(ours == theirs for ours, theirs, _ in found)
            ours, theirs, job = max(found, key=lambda pair: abs(pair[0] - pair[1]) / max(pair[0], pair[1], 1))
            worst = f"{100 * (ours - theirs) / theirs:+.3f} %" if theirs else f"{ours:,} for 0"
            where = "" if ours == theirs else f"{job}: emulator {ours:,.0f}, ncu {theirs:,.0f}"
            lines.append(f"{name:24} {metric:66} {equal:3}/{len(found):<3} {worst:>19}  {where}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: tests/data/h200_counters.json, or a scratch file if dry")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator's counts stand in for ncu's")
    options = parser.parse_args()

    scratch = Path(tempfile.gettempdir()) / "dry_counters.json"
    output = options.output or (scratch if options.dry_run else ROOT / "tests" / "data" / "h200_counters.json")
    output.parent.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    todo = jobs()
    emulated = [profile_emulated(job, ARCH) for job in todo]
    print(f"{len(todo)} launches emulated, {time.perf_counter() - start:.1f} s", flush=True)
    device = None
    if options.dry_run:
        launches, version = canned(todo, emulated)
    else:
        from numba_gemm.device.context import device_properties
        from numba_gemm.device.driver import driver

        driver()
        device = device_properties()
        if device.compute_capability != ARCH:
            raise SystemExit(f"this record is of compute capability 9.0; here is {device.name}")
        launches, version = measure(todo, output.with_suffix(".log"))
    print("\n".join(summary(emulated, launches)))
    rows: list[dict[str, Any]] = [
        {"job": str(job), "metrics": {name: value for name, value in launch.items() if value is not None}}
        for job, launch in zip(todo, launches, strict=True)
    ]
    record = {"environment": environment(device), "ncu": version, "launches": rows}
    output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
