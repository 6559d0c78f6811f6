"""Record with Nsight Compute where the time of the library's own choice goes: busy units and the warps' stall reasons.

    python bench/stalls.py --output bench/results/nvidia-h200/stalls.json

One ncu process watches one program that carries out each product once; the record has a row for each launch of each
product: what ncu's sections say of it (`FAMILIES`), and beside that

================ ==================================================================================================
``us``           time of the launch in µs, with cold caches and nothing beside it
``issue_active`` share of the cycles in which a scheduler issues an instruction
``dram``, ``l2`` percentage of the peak throughput of device memory and of the L2
``pipes``        pipe of the SM to the percentage of its peak, the busiest first
``stalls``       reason to the cycles that a warp waits for it between two instructions, the longest first
================ ==================================================================================================

Each pass of ncu starts with flushed caches, and clocks are left alone. If ncu fails on all products together, those
without a result have a process each; what fails then is a row with its error, and the exit status is 1. What ncu
printed stays beside the record (``stalls.log``) if anything failed or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from rich.markup import escape  # noqa: E402
from stalls_target import Product  # noqa: E402
from tables import STALLS, stalls_cells  # noqa: E402

from numba_gemm import ncu  # noqa: E402
from numba_gemm.benchmark.record import SCHEMA, environment, slug  # noqa: E402
from numba_gemm.benchmark.report import plain_table  # noqa: E402
from numba_gemm.device.context import device_properties  # noqa: E402
from numba_gemm.report import render  # noqa: E402

#: DTYPE:MxNxK for the library's own choice, or DTYPE:MxNxK:KERNEL.
PRODUCTS = (
    *("float32:2048x2048x2048", "float32:4096x4096x4096", "float32:4095x4097x4099", "float32:4096x4095x4096"),
    *("float32:1x28672x8192", "float32:32x28672x8192", "float32:64x28672x8192", "float32:128x8192x28672"),
    *("float32:128x128x65536", "float32:256x512x32768"),
    *("bfloat16:1024x1024x1024", "bfloat16:4096x4096x4096", "bfloat16:1000x1001x1002", "bfloat16:4095x4097x4099"),
    *("bfloat16:1x28672x8192", "bfloat16:16x28672x8192", "bfloat16:128x128x65536", "bfloat16:256x512x32768"),
    *("bfloat16:2048x28672x8192", "bfloat16:4096x4096x4096:t4"),
)

SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy")
OPTIONS = ("--clock-control", "none", "--cache-control", "all", "--print-units", "base", "--csv", "--page", "raw")

#: Columns of ncu's raw page that are kept.
FAMILIES = re.compile(
    r"gpu__time_duration\.\w+"
    r"|\w+__cycles_(?:active|elapsed)\.(?:avg|max|sum)(?:\.per_second)?"
    r"|\w+\.avg\.pct_of_peak_sustained_(?:active|elapsed)"
    r"|sm(?:sp)?__\w+\.avg\.per_cycle_(?:active|elapsed)"
    r"|sm(?:sp)?__inst_(?:executed|issued)\.sum"
    r"|smsp__average_warp\w+\.ratio"
    r"|sm(?:sp)?__maximum_warps\w+"
    r"|launch__(?:block_size|grid_size|occupancy_limit|registers_per|shared_mem_per|waves_per)\w*"
)
_DURATION = "gpu__time_duration.sum"
_MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_MICROSECONDS |= {"s": 1e6, "second": 1e6}
_ISSUE = (
    ("smsp__issue_active.avg.per_cycle_active", 1.0),
    ("smsp__issue_active.avg.pct_of_peak_sustained_active", 0.01),
    ("sm__inst_issued.avg.pct_of_peak_sustained_active", 0.01),
)
_DRAM = tuple(f"{unit}_throughput.avg.pct_of_peak_sustained_elapsed" for unit in ("gpu__dram", "dram_"))
_L2 = ("lts__throughput.avg.pct_of_peak_sustained_elapsed",)
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_PIPE = re.compile(
    r"sm__(?:inst_executed_pipe_(?P<executed>\w+?)|pipe_(?P<active>\w+?)_cycles_active)(?:_realtime)?"
    r"\.avg\.pct_of_peak_sustained_(?P<base>active|elapsed)"
)
#: What those names hold that doesn't count here: of the stalls the cycle of the issue itself, and the same stalls
#: counted where nothing was issued; of the pipes what several of them share.
_NO_STALL, _NO_PIPE = re.compile(r"selected|\w+_not_issued"), "shared"
_DERIVED = ("us", "issue_active", "dram", "l2", "pipes", "stalls")

#: The program that ncu watches.
TARGET = ROOT / "bench" / "stalls_target.py"
#: Seconds for what ncu has measured to be printed, after the program that it watches was ended.
GRACE = 30
#: Share of the time for all products that one of them has.
ONE_SHARE = 0.25

Row = dict[str, Any]
Launched = tuple[str, dict[str, float | None]]


class StallsError(Exception):
    """ncu measured nothing, or something else than the program launched."""


# --- ncu


def measure(products: Sequence[Product], timeout: float, log: list[str]) -> dict[Product, list[Row]]:
    """The rows of the products that one ncu process measured; of a product that can't be prepared, one of its error.

    Parameters
    ----------
    timeout : seconds, after which the program is ended and ncu prints what it has.
    log : what ncu printed is appended.

    Raises
    ------
    StallsError : if ncu measured nothing, or something else than was launched.
    """
    program = ncu.find_ncu()
    if program is None:
        raise SystemExit(ncu.HOW_TO_GET_NCU)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "launches.jsonl"
        sections = [word for section in known_sections(program) for word in ("--section", section)]
        command = [program, *OPTIONS, *sections, sys.executable, str(TARGET), str(said), *map(str, products)]
        status, output, errors = run(command, Path(folder), timeout, said)
        lines = read_lines(said)
    log.append(f"$ {' '.join(command)}\nexit {status}\n{errors}\n{output}\n" + "".join(f"{line}\n" for line in lines))
    if not any("done" in line for line in lines):
        failed = errors_of(lines)
        if len(failed) == len(products) and not any(line.get("fatal") for line in lines):
            return {product: [error_row(product, failed[str(product)])] for product in products}
        raise StallsError(reason(status, output + errors, lines))
    try:
        launches = ncu.parse_csv(output)
    except ValueError as error:
        raise StallsError(reason(status, output + errors, lines)) from error
    return collect(products, lines, launches, time_scale(output))


@functools.cache
def known_sections(program: str) -> tuple[str, ...]:
    """Those of `SECTIONS` that this ncu has; all if it doesn't list any of them."""
    try:
        done = subprocess.run(
            [program, "--list-sections"], capture_output=True, text=True, check=False, timeout=60, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return SECTIONS
    known = tuple(section for section in SECTIONS if re.search(rf"^\s*{section}\s", done.stdout, re.M))
    return known or SECTIONS


def run(command: Sequence[str], folder: Path, timeout: float, said: Path) -> tuple[int | None, str, str]:
    """Exit status of ncu (None: it ran out of time), its output and its errors.

    When the time is over, the watched program is ended first, so that ncu prints what it measured.
    """
    outputs = [folder / "output", folder / "errors"]
    with outputs[0].open("wb") as output, outputs[1].open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=output, stderr=errors, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
            pid = next((line["pid"] for line in read_lines(said) if "pid" in line), None)
            if pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the program, too
                process.wait()
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in outputs]
    return status, texts[0], texts[1]


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C"}  # C: numbers have commas in threes


def read_lines(said: Path) -> list[Row]:
    """What the program said; a line that it was ended in is left out."""
    if not said.is_file():
        return []
    lines = []
    for line in said.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def errors_of(lines: Iterable[Row]) -> dict[str, str]:
    """Product to what went wrong with it."""
    return {line["product"]: line["error"] for line in lines if "error" in line}


def reason(status: int | None, output: str, lines: Sequence[Row]) -> str:
    """Why ncu measured nothing, in one line."""
    if "ERR_NVGPUCTRPERM" in output:
        return "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root"
    printed = output.splitlines()
    found = [
        *errors_of(lines).values(),
        *(line for line in printed if re.match(r"[\w.]*(Error|Exception): ", line)),
        *(line.removeprefix("==ERROR==").strip() for line in printed if line.startswith("==ERROR==")),
    ]
    ended = "ncu ran out of time" if status is None else f"ncu measured nothing, exit status {status}"
    return f"{ended}{f': {found[0]}' if found else ''}"


def time_scale(output: str) -> float:
    """µs in a unit of the duration's column; base units are ns."""
    rows = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    for header, units in itertools.pairwise(rows):
        if header[0] == "ID" and _DURATION in header and not units[0]:
            return _MICROSECONDS.get(units[header.index(_DURATION)], 1e-3)
    return 1e-3


def collect(
    products: Sequence[Product], lines: Sequence[Row], launches: Sequence[Launched], scale: float
) -> dict[Product, list[Row]]:
    """The rows of each product that was carried out or couldn't be prepared; others are left out.

    Raises
    ------
    StallsError : as :func:`match` does.
    """
    by_text = {str(product): product for product in products}
    done = {line["product"] for line in lines if "done" in line}
    rows: dict[Product, list[Row]] = {
        by_text[line["product"]]: [error_row(by_text[line["product"]], line["error"])]
        for line in lines
        if "error" in line and not line["fatal"]
    }
    carried_out = [line for line in lines if "launches" in line and line["product"] in done]
    cut_off = [line for line in lines if "launches" in line and line["product"] not in done]
    own = iter(match(launches, carried_out, cut_off))
    for line in carried_out:
        product = by_text[line["product"]]
        rows[product] = [launch_row(product, line, index, next(own), scale) for index, _ in enumerate(line["launches"])]
    return rows


def match(launches: Sequence[Launched], carried_out: Sequence[Row], cut_off: Sequence[Row]) -> list[Launched]:
    """ncu's launches that are those of the products carried out, in order.

    Kernels of other names are passed over; the first launches of a product that was cut off may follow.

    Raises
    ------
    StallsError : if the names or their number differ; with both lists.
    """
    expected = [one["name"] for line in carried_out for one in line["launches"]]
    wanted = expected + [one["name"] for line in cut_off for one in line["launches"]]
    others = sorted({name for name, _ in launches if kernel_name(name) not in wanted})
    if others:
        print(f"ncu also saw {', '.join(others)}", flush=True)
    own = [launch for launch in launches if kernel_name(launch[0]) in wanted]
    seen = [kernel_name(name) for name, _ in own]
    if len(seen) < len(expected) or seen != wanted[: len(seen)]:
        raise StallsError(
            f"ncu measured {', '.join(seen) or 'nothing'}; what was launched: {', '.join(expected) or 'nothing'}"
        )
    return own[: len(expected)]


def kernel_name(name: str) -> str:
    """A kernel's name without what it takes."""
    return re.split(r"[(<]", name)[0].strip()


# --- rows


def launch_row(product: Product, line: Row, index: int, launch: Launched, scale: float) -> Row:
    """A launch's row: what it is, what ncu says of it, and what follows from that."""
    named = {name.partition(" [")[0]: value for name, value in launch[1].items()}
    metrics = {
        name: value
        for name, value in sorted(named.items())
        if value is not None and math.isfinite(value) and FAMILIES.fullmatch(name)
    }
    one = line["launches"][index]
    issue = next((metrics[name] * unit for name, unit in _ISSUE if name in metrics), None)
    duration = metrics.get(_DURATION)
    return {
        **_product_fields(product, line["kernel"], line["config"]),
        **{"launch": one["name"], "index": index, "main": one["main"], "grid": one["grid"], "block": one["block"]},
        "us": None if duration is None else duration * scale,
        "issue_active": issue,
        "dram": next((metrics[name] for name in _DRAM if name in metrics), None),
        "l2": next((metrics[name] for name in _L2 if name in metrics), None),
        "pipes": pipes(metrics),
        "stalls": stalls(metrics),
        "metrics": metrics,
        "error": "",
    }


def error_row(product: Product, error: str) -> Row:
    """The row of a product that failed."""
    fields = {"launch": "", "index": 0, "main": True, **dict.fromkeys(_DERIVED), "error": error}
    return _product_fields(product, product.kernel or "auto", "") | fields


def _product_fields(product: Product, kernel: str, config: str) -> Row:
    fields = {"suite": STALLS, "dtype": product.dtype, "m": product.m, "n": product.n, "k": product.k, "batch": 1}
    return fields | {"asked": product.kernel or "auto", "kernel": kernel, "config": config}


def stalls(metrics: dict[str, float]) -> dict[str, float]:
    """Reason to the cycles that a warp waits for it per issued instruction, the longest first."""
    found = {match[1]: value for name, value in metrics.items() if (match := _STALL.fullmatch(name))}
    return _sorted({name: value for name, value in found.items() if not _NO_STALL.fullmatch(name)})


def pipes(metrics: dict[str, float]) -> dict[str, float]:
    """Pipe to the percentage of its peak, by cycles or by instructions, whichever is more; the busiest first."""
    by_base: dict[str, dict[str, float]] = {"active": {}, "elapsed": {}}
    for name, value in metrics.items():
        found = _PIPE.fullmatch(name)
        if found:
            pipe, here = found["executed"] or found["active"], by_base[found["base"]]
            here[pipe] = max(value, here.get(pipe, 0.0))
    found_pipes = by_base["active"] or by_base["elapsed"]
    return _sorted({name: value for name, value in found_pipes.items() if name != _NO_PIPE})


def _sorted(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


# --- the record


def measure_all(
    products: Sequence[Product], timeout: float, log: list[str], keep: Callable[[Sequence[Row]], None]
) -> list[Row]:
    """Rows of all products: of one process for all, then of one for each that has none.

    ``keep`` is called with the rows that there are after each process.
    """
    results: dict[Product, list[Row]] = {}

    def rows() -> list[Row]:
        return [row for product in products for row in results.get(product, ())]

    try:
        results |= measure(products, timeout, log)
    except StallsError as error:
        print(f"all products in one process: {error}", flush=True)
    keep(rows())
    in_vain = 0
    for product in [product for product in products if product not in results]:
        if in_vain == 2 and not any(row["us"] for row in rows()):
            results[product] = [error_row(product, "not tried: nothing was measured of the two products before")]
            continue
        print(f"{product} in a process of its own", flush=True)
        try:
            results |= measure([product], timeout * ONE_SHARE, log)
        except StallsError as error:
            print(f"{product}: {error}", flush=True)
            results[product] = [error_row(product, str(error)[:500])]
        in_vain += 1
        keep(rows())
    return rows()


def incomplete(row: Row) -> list[str]:
    """What a launch's row lacks."""
    return [name for name in _DERIVED if row[name] is None or row[name] == {}]


def show(rows: Sequence[Row]) -> str:
    """The rows as a table for people."""
    header = ("product", "launch", "time", "issue %", "busiest pipe, %", "DRAM %", "L2 %", "longest stalls")
    table = plain_table(header, ("product", "launch", "longest stalls"))
    last = None
    for row in rows:
        product = f"{row['dtype']} {row['m']}×{row['n']}×{row['k']} {row['kernel']}"
        name = "" if product == last else product
        last = product
        if row["error"]:
            table.add_row(name, "failed", *[""] * 5, escape(row["error"]))
            continue
        launch = row["launch"] if len(row["launch"]) <= 36 else f"{row['launch'][:35]}…"
        table.add_row(name, launch, *stalls_cells(row))
    return render(table, width=200)


def write(path: Path, where: Row, rows: Sequence[Row]) -> None:
    """Write the record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    record = {"schema": SCHEMA, "environment": where, "rows": list(rows)}
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file, or folder of stalls.json (default: bench/results/GPU)")
    parser.add_argument("--commit", help="of the source, where there is no git to ask")
    parser.add_argument("--shape", nargs="+", action="extend", metavar="DTYPE:MxNxK[:KERNEL]", help="other products")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for all products together (default: 400)")
    options = parser.parse_args(argv)
    try:
        products = list(dict.fromkeys(Product.parse(text) for text in options.shape or PRODUCTS))
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    program = ncu.find_ncu()
    if program is None:
        raise SystemExit(ncu.HOW_TO_GET_NCU)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    device = device_properties()
    where = environment(device, commit=options.commit, ncu=version.splitlines()[-1])
    output = options.output or ROOT / "bench" / "results" / slug(device.name)
    if output.suffix != ".json":
        output /= "stalls.json"
    print(f"{version.splitlines()[-1]}: {len(products)} products, recorded in {output}", flush=True)
    log: list[str] = []
    printed = output.with_suffix(".log")

    def keep(rows: Sequence[Row]) -> None:
        write(output, where, rows)
        printed.write_text("\n".join(log), encoding="utf-8")

    rows = measure_all(products, options.timeout, log, keep)
    keep(rows)
    print(show(rows))
    failed = [row for row in rows if row["error"]]
    lacking = {name for row in rows if not row["error"] for name in incomplete(row)}
    if failed or lacking:
        missing = ", ".join(sorted(lacking)) or "nothing"
        print(f"{len(failed)} products failed; missing in other rows: {missing}; what ncu printed: {printed}")
    else:
        printed.unlink()
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB, {time.perf_counter() - start:.1f} s")
    return 1 if failed or lacking else 0


if __name__ == "__main__":
    raise SystemExit(main())
