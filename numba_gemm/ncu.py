"""Nsight Compute: where it is, how it is run on this library's kernels, and what its CSV says.

How metrics map to the emulator's counters (:data:`METRICS`; the names are those of ncu 2023 and later, sm_75 on):

==========================  ==========================================================================================
`shared_*_requests`         ``smsp__inst_executed_op_shared_{ld,st}``: LDS and STS instructions by warps
`shared_*_wavefronts`       ``l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{ld,st}``: passes over the banks, counted in
                            hardware, with those lost to arbitration against other traffic on the data pipe
`shared_*_conflicts`        ``l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{ld,st}``: likewise; a kernel without
                            conflicts shows some from arbitration
`global_*_requests`         ``l1tex__t_requests_pipe_lsu_mem_global_op_{ld,st}``: what reaches the tag stage, so a warp
                            of which every lane is predicated off doesn't count, as in the emulator
`global_*_sectors`          ``l1tex__t_sectors_pipe_lsu_mem_global_op_{ld,st}``: 32-byte sectors looked up, hit or miss
`ffma_threads` and kin      ``smsp__sass_thread_inst_executed_op_{ffma,fadd,fmul}_pred_on``: by threads whose predicate
                            holds; from instrumented code, so exact
`instructions`              ``smsp__inst_executed``: machine instructions, not PTX
`barriers`                  ``smsp__inst_executed_pipe_adu``: no metric counts barriers; the ADU pipe runs them and some
                            other instructions, so this is an upper bound
==========================  ==========================================================================================

A metric that an ncu or a GPU doesn't have makes ncu refuse the whole list; it is then left out, and its value is None.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from numba_gemm.emulator.counters import NCU_METRICS
from numba_gemm.errors import NumbaGemmError

if TYPE_CHECKING:
    from numba_gemm.profile_job import Job

#: Counter name to ncu metric.
METRICS: dict[str, str] = dict(NCU_METRICS)

#: Pipe of the SM, in words, to the metric that counts its instructions by warps.
PIPES: dict[str, str] = {
    "FMA (fma)": "smsp__inst_executed_pipe_fma.sum",
    "integer and logic (alu)": "smsp__inst_executed_pipe_alu.sum",
    "loads and stores (lsu)": "smsp__inst_executed_pipe_lsu.sum",
    "uniform (uniform)": "smsp__inst_executed_pipe_uniform.sum",
    "control (cbu)": "smsp__inst_executed_pipe_cbu.sum",
    "barriers, addresses (adu)": "smsp__inst_executed_pipe_adu.sum",
    "special functions (xu)": "smsp__inst_executed_pipe_xu.sum",
    "half precision (fp16)": "smsp__inst_executed_pipe_fp16.sum",
}

HOW_TO_GET_NCU = (
    "ncu, the command line of Nsight Compute, was found neither on PATH nor under /opt/nvidia or /usr/local/cuda; it "
    "comes with the CUDA toolkit (apt: cuda-nsight-compute-13-0) or from https://developer.nvidia.com/nsight-compute"
)

_PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_COMMON_COLUMNS = {
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size"),
    *("Device", "CC"),
}
_TIMEOUT = 540
_UNKNOWN = re.compile(r"Failed to find metric\s+(?:regex:\^)?([\w\\.]+)")


class ProfilerError(NumbaGemmError, RuntimeError):
    """ncu is missing or failed; the message says what to do."""


@functools.cache
def find_ncu() -> str | None:
    """The path of ncu: from PATH, else the newest installed in the usual places, else None."""
    found = shutil.which("ncu")
    if found:
        return found
    for pattern in _PLACES:
        paths = [path for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
        if paths:
            return str(max(paths, key=_version_key))
    return None


def _version_key(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def measure(jobs: Sequence[Job], metrics: Sequence[str], *, log: Path | None = None) -> list[dict[str, float | None]]:
    """Launch each job once under ncu and return the metrics of each launch, in the order of the jobs.

    Parameters
    ----------
    jobs : with their configs filled in.
    metrics : ncu's names; one that it doesn't know is None in the result.
    log : file for all that ncu and the program print, before it is made sense of.

    Raises
    ------
    ProfilerError : if ncu is missing, fails, or sees other kernels than the jobs'.
    """
    program = find_ncu()
    if program is None:
        raise ProfilerError(HOW_TO_GET_NCU)
    target = [sys.executable, "-m", "numba_gemm.profile_target", *map(str, jobs)]
    asked = list(dict.fromkeys(metrics))
    while True:
        done = _run([program, *options(jobs, asked), *target])
        if log is not None:
            log.write_text(done.stdout + done.stderr, encoding="utf-8")
        unknown = {name.replace("\\", "") for name in _UNKNOWN.findall(done.stdout + done.stderr)}
        left = [metric for metric in asked if not any(_names(name, metric) for name in unknown)]
        if len(left) == len(asked):
            break
        if not left:
            raise ProfilerError(f"ncu knows none of the metrics: {', '.join(asked)}")
        asked = left
    try:
        launches = parse_csv(done.stdout)
    except ValueError as error:
        raise ProfilerError(f"{_cause(done)}\n{_tail(done)}") from error
    _check_launches(launches, jobs, done)
    return [{metric: values.get(metric) for metric in metrics} for _, values in launches]


def options(jobs: Sequence[Job], metrics: Sequence[str]) -> list[str]:
    """ncu's options: these kernels only, by their PTX entries, with clocks left alone, as CSV in base units."""
    return [
        *("--clock-control", "none", "--print-units", "base", "--csv", "--page", "raw"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(entries(jobs))})$"),
        *("--launch-count", str(len(jobs)), "--metrics", ",".join(metrics)),
    ]


def entries(jobs: Sequence[Job]) -> list[str]:
    """The PTX entry of each job's kernel, once each."""
    from numba_gemm.catalog import get_spec

    return list(dict.fromkeys(get_spec(job.kernel).entry(job.config or ()) for job in jobs))


def known_metrics() -> set[str]:
    """The base names of the metrics that ncu knows for this machine's GPU; empty if it can't say."""
    program = find_ncu()
    if program is None:
        return set()
    done = _run([program, "--query-metrics"])
    return set(re.findall(r"^\s*([a-z]\w*__\w+)\b", done.stdout, re.M))


def parse_csv(text: str) -> list[tuple[str, dict[str, float | None]]]:
    """Kernel name and metrics of each launch in what ``ncu --csv`` prints, other output around it ignored.

    Reads both pages: "raw", one line a launch with a column for each metric and a line of units under the header, and
    "details", one line for each launch and metric.

    Raises
    ------
    ValueError : if the text holds no CSV header.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("ncu printed no CSV table")
    rows = csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    header = next(rows)
    name_column = header.index("Kernel Name")
    launches: dict[str, tuple[str, dict[str, float | None]]] = {}
    for row in rows:
        if len(row) != len(header) or not row[0].isdigit():  # the units
            continue
        _, values = launches.setdefault(row[0], (row[name_column], {}))
        if "Metric Name" in header:
            values[row[header.index("Metric Name")]] = _number(row[header.index("Metric Value")])
        else:
            cells = zip(header, row, strict=True)
            values.update({name: _number(cell) for name, cell in cells if name not in _COMMON_COLUMNS})
    return list(launches.values())


def _number(cell: str) -> float | None:
    """A value of the CSV: digits in groups, or something else where there is none."""
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def _names(unknown: str, metric: str) -> bool:
    """Whether ncu's complaint is about this metric; it may name it without its suffix."""
    return unknown.rstrip(".") in (metric, metric.partition(".")[0])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    package_root = str(Path(__file__).resolve().parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # C, so that numbers have commas in threes
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ProfilerError(f"ncu wasn't done after {_TIMEOUT} s; take a smaller shape") from error


def _check_launches(
    launches: Sequence[tuple[str, dict[str, float | None]]],
    jobs: Sequence[Job],
    done: subprocess.CompletedProcess[str],
) -> None:
    from numba_gemm.catalog import get_spec

    expected = [get_spec(job.kernel).entry(job.config or ()) for job in jobs]
    seen = [re.split(r"[(<]", name)[0].strip() for name, _ in launches]
    if seen != expected:
        raise ProfilerError(f"ncu measured {', '.join(seen) or 'nothing'}, not {', '.join(expected)}\n{_tail(done)}")


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Why ncu measured nothing, in one line."""
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "ncu may not read the GPU's counters: run as root, or have the driver module's option "
            "NVreg_RestrictProfilingToAdminUsers set to 0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    errors = [line for line in output.splitlines() if line.startswith("==ERROR==")]
    errors += [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception): ", line)]
    reason = errors[0].removeprefix("==ERROR==").strip() if errors else f"exit status {done.returncode}"
    return f"ncu measured nothing: {reason}"


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + "\n" + done.stderr).strip().splitlines()
    return "\n".join(lines[-20:])
