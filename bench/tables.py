"""Write the tables of README.md and docs/*.md from the recorded runs in bench/results.

A table stands between two lines, and everything between them is replaced::

    <!-- table: nvidia-h200/ladder -->
    <!-- end table -->

The name is the record's path under bench/results, without ``.json``; the folder can be left out while only one has a
record of that name. A second word, for instance ``cpu/resources sm_90``, keeps one architecture of a resource report.
The name ``suites`` (or ``FOLDER/suites``) stands for the records of all suites in a folder: what the library's own
choice reaches, as a multiple of the peer's speed. ``designs float32`` is what bench/designs.py shows in a type.
``--check`` writes nothing and exits with status 1 if a table isn't what its record says.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

from designs import designs  # noqa: E402

from numba_gemm.benchmark.record import CEILING, CEILING_NORMAL, HALF_AGAINST_SINGLE, READING, read_record  # noqa: E402
from numba_gemm.benchmark.report import (  # noqa: E402
    LOOP_COLUMNS,
    counter_cells,
    geometric_mean,
    kilobytes,
    loop_cells,
    microseconds,
    peer_title,
    short_config,
)
from numba_gemm.benchmark.suites import SUITES  # noqa: E402

_TABLE = re.compile(
    r"^<!-- table: (?P<name>\S+)(?: (?P<arch>\S+))? -->\n"
    r"(?P<body>.*?)(?P<end>^<!-- end table -->$|(?=^<!-- table: )|\Z)",
    re.M | re.S,
)

#: The table of all suites.
SUMMARY = "suites"
#: The table of designs that were tried, and the order of its shapes.
DESIGNS = "designs"
ALL_SHAPES = [shape for shapes in SUITES.values() for shape in shapes]
#: The suite of rows that say where the time goes; bench/stalls.py makes them.
STALLS = "stalls"
#: Stall reasons that are shown of each launch.
STALLS_SHOWN = 3

Record = dict[str, Any]
Cells = Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout (default: this one)")
    args = parser.parse_args(argv)
    stale = []
    try:
        for path in documents(args.root):
            old = path.read_text(encoding="utf-8")
            new = regenerate(old, args.root / "bench" / "results", path.name)
            if new != old:
                stale.append(str(path.relative_to(args.root)))
                if not args.check:
                    path.write_text(new, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"tables.py: {error}", file=sys.stderr)
        return 1
    if args.check and stale:
        print(f"stale tables in {', '.join(stale)}; run: python bench/tables.py", file=sys.stderr)
        return 1
    print(f"written: {', '.join(stale)}" if stale else "the tables are what the recorded runs say")
    return 0


def documents(root: Path) -> list[Path]:
    """The files whose tables are generated."""
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("**/*.md"))) if path.is_file()]


def regenerate(text: str, results: Path, document: str) -> str:
    """A document with its tables made anew.

    Raises
    ------
    ValueError : for a table without an end, or one whose record isn't there or can't be shown.
    """

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if not found["end"]:
            raise ValueError(f"{document}: table {name} has no <!-- end table --> line")
        if name.rpartition("/")[2] == SUMMARY:
            shown, source = suites_summary(results, name)
            return f"<!-- table: {name} -->\n\n{shown}\n\n{source}\n\n{found['end']}"
        if name == DESIGNS:
            header, lines, source = designs(results.parents[1], found["arch"] or "", [*map(str, ALL_SHAPES)])
            marker = f"<!-- table: {name} {found['arch']} -->"
            return f"{marker}\n\n{markdown(header, lines, left=len(header))}\n\n{source}\n\n{found['end']}"
        path = find_record(results, name, document)
        record = read_record(path)
        source = path.relative_to(results.parents[1]).as_posix()
        marker = " ".join(filter(None, (name, found["arch"])))
        shown = render(record, found["arch"])
        return f"<!-- table: {marker} -->\n\n{shown}\n\n{caption(record, source)}\n\n{found['end']}"

    return _TABLE.sub(table, text)


def suites_summary(results: Path, name: str) -> tuple[str, str]:
    """One line a suite, one column a type: the geometric mean of the library's speed over the peer's, and the least.

    Raises
    ------
    ValueError : if no folder, or more than one, has a record of a suite.
    """
    folder = name.rpartition("/")[0]
    folders = sorted({path.parent for path in results.glob("*/square*.json") if folder in ("", path.parent.name)})
    if len(folders) != 1:
        raise ValueError(f"table {name}: {len(folders)} folders have records of suites; write FOLDER/{SUMMARY}")
    records = {
        (suite, half): read_record(path)
        for suite in SUITES
        for half in ("", "16")
        if (path := folders[0] / f"{suite}{half}.json").is_file()
    }
    dtypes = ("float32", "bfloat16", "float16")
    lines = []
    for suite in dict.fromkeys(suite for suite, _ in records):
        line = [suite]
        for dtype in dtypes:
            rows = records.get((suite, "" if dtype == "float32" else "16"), {}).get("rows", ())
            ratios = [r["ratio"] for r in rows if r["kernel"] == "auto" and r["dtype"] == dtype and r["ratio"]]
            mean = geometric_mean(ratios)
            missing = len(SUITES[suite]) - len(ratios)
            part = f", {len(ratios)} of {len(SUITES[suite])} shapes" if missing else ""
            line.append(f"{mean:.2f}× ({min(ratios):.2f}×{part})" if mean else "–")
        lines.append(line)
    dates = sorted({record["environment"]["date"] for record in records.values()})
    first = next(iter(records.values()))["environment"]
    parts = [first["gpu"], f"driver {first['driver']}", first["versions"].get("peer", ""), " and ".join(dates)]
    source = folders[0].relative_to(results.parents[1]).as_posix()
    text = markdown(["suite", *dtypes], lines)
    return text, f"*{'; '.join(filter(None, parts))}; `{source}/`, one file a suite*"


def find_record(results: Path, name: str, document: str) -> Path:
    """The file of a table's record."""
    found = [results / f"{name}.json"] if "/" in name else sorted(results.glob(f"*/{name}.json"))
    if not found or not found[0].is_file():
        raise ValueError(f"{document}: table {name} has no recorded run; python bench/bench.py makes one")
    if len(found) > 1:
        several = ", ".join(path.parent.name for path in found)
        raise ValueError(f"{document}: table {name} could be of {several}; write FOLDER/{name}")
    return found[0]


def caption(record: Record, source: str) -> str:
    """Where, with what and when a run was made, and its file."""
    where = record["environment"]
    versions = where["versions"]
    parts = [where["gpu"] or where["host"]]
    if where["driver"]:
        parts.append(f"driver {where['driver']} (CUDA {where['cuda']})")
    if versions.get("peer"):
        parts.append(versions["peer"])
    shown = ("numba-gemm", "numba", "numba-cuda", "numpy")
    parts += [f"{package} {versions[package]}" for package in shown if package in versions]
    if where.get("dram_gbs"):
        parts.append(f"roof {where['peak_fp32_tflops']:.1f} TFLOP/s and {where['dram_gbs']:.0f} GB/s")
    if where.get("ncu"):
        parts.append(f"Nsight Compute {where['ncu'].removeprefix('Version ').partition(' ')[0]}")
    parts += [where["date"], f"`{source}`", *filter(None, [where.get("note")])]
    return f"*{'; '.join(parts)}*"


def render(record: Record, arch: str | None = None) -> str:
    """A record's table, in the form that suits what was measured; of a resource report, for one architecture."""
    if record["rows"]:
        rows = record["rows"]
        if rows[0]["suite"] == STALLS:
            return stalls_view(rows)
        if rows[0].get("dtype") in ("float16", "bfloat16") and not rows[0].get("counters"):
            return half_view(rows)
        return _VIEWS.get(rows[0]["suite"], suite_view)(rows)
    if record.get("resources"):
        # sm_90a is sm_90 with instructions of its own.
        reports = [one for one in record["resources"] if arch in (None, one["arch"], one["arch"].removesuffix("a"))]
        if not reports:
            raise ValueError(f"the record has no resources for {arch}")
        return resources_view(reports)
    raise ValueError("the record has no rows")


def markdown(header: Cells, lines: Sequence[Cells], left: int = 1) -> str:
    """A Markdown table; columns after the first ``left`` are numbers."""
    rule = ["---" if index < left else "---:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def ladder_view(rows: list[Record]) -> str:
    """One line a kernel, one pair of columns a size: TFLOP/s and share of the peer's speed."""
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    peer = next((row["peer"] for row in rows if row["peer"]), None)
    kernels = [k for k in dict.fromkeys(row["kernel"] for row in rows) if k != peer]
    by_key = {(row["kernel"], _shape(row)): row for row in rows}
    header = ["kernel", *(f"{s}, TFLOP/s{f' (% of {peer_title(peer)})' if peer else ''}" for s in shapes)]
    lines = []
    for kernel in kernels:
        own = [by_key.get((kernel, shape)) for shape in shapes]
        registers = next((str(row["registers"]) for row in own if row and row["registers"]), "–")
        lines.append([kernel, *map(_speed, own), registers])
    if peer:
        speeds = []
        for shape in shapes:
            timed = next((row for row in rows if _shape(row) == shape and row["peer_us"]), None)
            speeds.append(f"{_flops(timed) / timed['peer_us'] * 1e-6:.1f}" if timed else "–")
        lines.append([peer_title(peer), *speeds, "–"])
    return markdown([*header, "registers"], lines)


def half_view(rows: list[Record]) -> str:
    """A ladder or a suite in 16 bits: the table of each type, then of the peer in 16 bits against the peer in FP32."""
    own = [row for row in rows if row["suite"] != HALF_AGAINST_SINGLE]
    compared = [row for row in rows if row["suite"] == HALF_AGAINST_SINGLE]
    view = half_ladder_view if own[0]["suite"].startswith("ladder") else suite_view
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in own):
        typed = [row for row in own if row["dtype"] == dtype]
        parts.append(f"{dtype}:\n\n{view(typed)}")
    if compared:
        parts.append(f"{peer_title(compared[0]['kernel'])} in 16 bits against FP32:\n\n{comparison_view(compared)}")
    return "\n\n".join(parts)


def half_ladder_view(rows: list[Record]) -> str:
    """One line a kernel, one column a size: TFLOP/s, share of the peer's speed and of the ceiling on numbers near 1."""
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    peer = next((row["peer"] for row in rows if row["peer"]), None)
    by_key = {(row["kernel"], _shape(row)): row for row in rows}
    kernels = [k for k in dict.fromkeys(row["kernel"] for row in rows) if k not in (peer, *_CEILINGS)]
    shares = " (% of " + ", ".join([*([peer_title(peer)] if peer else []), "ceiling"]) + ")"
    lines = []
    for kernel in kernels:
        own = [by_key.get((kernel, shape)) for shape in shapes]
        registers = next((str(row["registers"]) for row in own if row and row["registers"]), "–")
        lines.append([kernel, *(_shares(row) for row in own), registers])
    if peer:
        speeds = []
        for shape in shapes:
            timed = next((row for row in rows if _shape(row) == shape and row["peer_us"]), None)
            rate = _flops(timed) / timed["peer_us"] * 1e-6 if timed else 0.0
            top = timed.get("ceiling_tflops") if timed else None
            speeds.append(f"{rate:.1f}{f' ({100 * rate / top:.0f}% of ceiling)' if top else ''}" if timed else "–")
        lines.append([peer_title(peer), *speeds, "–"])
    tops = {kernel: [by_key.get((kernel, shape)) for shape in shapes] for kernel in _CEILINGS}
    for kernel, words in _CEILINGS.items():
        if any(tops[kernel]):
            label = f"ceiling: `mma.sync`{words if any(tops[CEILING_NORMAL]) else ''}"
            lines.append([label, *(_speed(row) for row in tops[kernel]), "–"])
    return markdown(["kernel", *(f"{shape}, TFLOP/s{shares}" for shape in shapes), "registers"], lines)


def comparison_view(rows: list[Record]) -> str:
    """The peer in 16 bits against the peer in FP32, interleaved."""
    lines = []
    for row in rows:
        if row["us"] is None:
            lines.append([_shape(row), row["dtype"], "failed", "–", "–"])
            continue
        speeds = [f"{_flops(row) / row[key] * 1e-6:.1f}" for key in ("us", "peer_us")]
        lines.append([_shape(row), row["dtype"], *speeds, f"{row['ratio']:.1f}×"])
    return markdown(["M×N×K", "type", "16 bits, TFLOP/s", "FP32, TFLOP/s", "times as fast"], lines, left=2)


def suite_view(rows: list[Record]) -> str:
    """One line a shape, one column a kernel: its speed, and as a multiple of the peer's; the geometric mean last."""
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    peer = next((row["peer"] for row in rows if row["peer"]), None)
    kernels = [k for k in dict.fromkeys(row["kernel"] for row in rows) if k not in (peer, READING, *_CEILINGS)]
    reading = any(row["kernel"] == READING for row in rows)
    lines = []
    for shape in shapes:
        here = {row["kernel"]: row for row in rows if _shape(row) == shape}
        peer_us = next((row["peer_us"] for row in here.values() if row["peer_us"]), None)
        line = [shape, microseconds(peer_us)] if peer else [shape]
        for kernel in kernels:
            row = here.get(kernel)
            line.append("failed" if row is None or row["us"] is None else microseconds(row["us"]) + _times(row))
        if reading:
            line.append(_reading(here.get(READING), here.get(kernels[0])))
        lines.append(line)
    if peer:
        means = [geometric_mean([r["ratio"] for r in rows if r["kernel"] == k and r["ratio"]]) for k in kernels]
        shown = [f"{mean:.2f}×" if mean else "–" for mean in means]
        lines.append(["geometric mean", "", *shown, *([""] if reading else [])])
    header = ["M×N×K", *([peer_title(peer)] if peer else []), *kernels]
    header += [f"reading the matrix ({kernels[0]}'s share of its rate)"] if reading else []
    return markdown(header, lines)


def cpu_view(rows: list[Record]) -> str:
    """The CPU baseline beside NumPy's BLAS."""
    lines = []
    for row in rows:
        if row["us"] is None:
            lines.append([_shape(row), str(row["threads"]), "failed", "–", "–"])
            continue
        speeds = [f"{_flops(row) / row[key] * 1e-3:.0f}" for key in ("us", "peer_us")]
        lines.append([_shape(row), str(row["threads"]), *speeds, f"{100 * row['ratio']:.0f}"])
    return markdown(["M×N×K", "cores", "`cpu`, GFLOP/s", "NumPy, GFLOP/s", "% of NumPy"], lines)


def counters_view(rows: list[Record]) -> str:
    """One line a compiled form: what the emulator counted."""
    lines = []
    for row in rows:
        name = f"{row['kernel']} {short_config(row['config'])}".strip()
        counters = row.get("counters")
        lines.append([name, *(counter_cells(counters) if counters and not row["error"] else ["failed", *["–"] * 8])])
    header = [
        "FMAs",
        "MMAs",
        "shared load wavefronts",
        "shared store wavefronts",
        "FMAs per load wavefront",
        "bank conflicts",
    ]
    shape = _shape(rows[0])
    return markdown([f"at {shape}", *header, "global load sectors", "global store sectors", "barriers"], lines)


def speed_view(rows: list[Record]) -> str:
    """How long the emulator takes: the best of the rounds, and the median."""
    lines = []
    for row in rows:
        size = "" if row["m"] == row["n"] == row["k"] == 1 else f" at {_shape(row)}"
        rate = f"{row['m'] * row['n'] * row['k'] / row['us_min']:.1f}" if size else "–"
        lines.append([f"{row['kernel']}{size}", microseconds(row["us_min"]), microseconds(row["us"]), rate])
    return markdown(["one core", "best", "median", "million multiply-adds per second"], lines)


def host_view(rows: list[Record]) -> str:
    """Host time of calls."""
    lines = []
    for row in rows:
        name = f"`{row['kernel']}`" if "(" in row["kernel"] else row["kernel"]
        lines.append([name, microseconds(row["us"]) if row["us"] is not None else "not measured"])
    return markdown(["call", "time on the host"], lines)


def transfers_view(rows: list[Record]) -> str:
    """One line a way to multiply NumPy arrays, one column a size: its time, as a multiple of the peer's speed, and of
    page-locked arrays as a multiple of its bound."""
    shapes = [shape for shape in dict.fromkeys(_shape(row) for row in rows) if shape != "64³"]
    by_key = {(row["kernel"], _shape(row)): row for row in rows}
    lines = []
    for way in dict.fromkeys(row["kernel"] for row in rows):
        line = ["CuPy, both copies and the product" if way == "cupy" else way]
        for shape in shapes:
            row = by_key.get((way, shape))
            if row is None or row["us"] is None:
                line.append("–" if row is None else "failed")
                continue
            of_bound, _, bounded = row["config"].partition(" of ")
            bound = f"; {of_bound} of its bound" if bounded else ""
            line.append(microseconds(row["us"]) + (f" ({row['ratio']:.1f}×{bound})" if row["ratio"] else ""))
        lines.append(line)
    return markdown(["float32", *shapes], lines)


def stalls_view(rows: list[Record]) -> str:
    """One line a launch that multiplies: its time, how busy the units are, and what its warps wait for."""
    lines = []
    for row in rows:
        if row["main"]:
            config = short_config(row["config"]) if "block_m=" in row["config"] else ""
            cells = ["failed", *["–"] * 5] if row["error"] else stalls_cells(row)
            lines.append([row["dtype"], _shape(row), f"{row['kernel']} {config}".strip(), *cells])
    header = ["type", "M×N×K", "kernel", "time", "issue slots busy, %", "busiest pipe, %", "DRAM, %", "L2, %"]
    return markdown([*header, "longest stalls, % of all"], lines, left=3)


def stalls_cells(row: Record) -> list[str]:
    """A launch's time, busy issue slots, busiest pipe, DRAM and L2, all in %, and the longest stalls of its warps."""
    issue = None if row["issue_active"] is None else 100 * row["issue_active"]
    shares = ["–" if value is None else f"{value:.0f}" for value in (issue, row["dram"], row["l2"])]
    pipe = next((f"{name.replace('_', ' ')} {value:.0f}" for name, value in row["pipes"].items()), "–")
    whole = sum(row["stalls"].values()) or 1
    longest = list(row["stalls"].items())[:STALLS_SHOWN]
    stalls = ", ".join(f"{name.replace('_', ' ')} {100 * value / whole:.0f}" for name, value in longest)
    return [microseconds(row["us"]), shares[0], pipe, *shares[1:], stalls or "–"]


def resources_view(reports: list[Record]) -> str:
    """One line a compiled form and architecture."""
    lines = []
    for report in reports:
        name = f"{report['kernel']} {short_config(report['config'])}".strip()
        if report["error"]:
            lines.append([name, report["arch"], "failed", *["–"] * (3 + len(LOOP_COLUMNS))])
            continue
        local = report["spill_bytes"] + report["stack_bytes"]
        lines.append(
            [
                *(name, report["arch"], str(report["registers"]), str(local), kilobytes(report["shared_bytes"])),
                f"{report['occupancy']:.0%}",
                *loop_cells(report["loop"]),
            ]
        )
    header = ["kernel", "arch", "registers", "local bytes", "shared", "occupancy", *LOOP_COLUMNS]
    return markdown(header, lines, left=2)


#: Loops of tensor-core instructions, and what they multiply; records made before there were two have the first alone.
_CEILINGS = {CEILING: ", operands near 1", CEILING_NORMAL: ", normal numbers"}

_VIEWS: dict[str, Callable[[list[Record]], str]] = {
    "ladder": ladder_view,
    "cpu": cpu_view,
    "emulator": counters_view,
    "emulator_speed": speed_view,
    "host_overhead": host_view,
    "first_call": host_view,
    "host_transfers": transfers_view,
}


def _shape(row: Record) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    return f"{m}³" if m == n == k else f"{m}×{n}×{k}"


def _flops(row: Record) -> int:
    return 2 * int(row["m"]) * int(row["n"]) * int(row["k"]) * int(row["batch"])


def _speed(row: Record | None) -> str:
    if row is None or row["tflops"] is None:
        return "failed" if row is not None else "–"
    share = f" ({100 * row['ratio']:.0f}%)" if row["ratio"] else ""
    return f"{row['tflops']:.1f}{share}"


def _shares(row: Record | None) -> str:
    """TFLOP/s, and in brackets the shares of the peer's speed and of the ceiling."""
    if row is None or row["tflops"] is None:
        return "failed" if row is not None else "–"
    top = row.get("ceiling_tflops")
    shares = [row["ratio"], row["tflops"] / top if top else None]
    known = ", ".join(f"{100 * share:.0f}%" for share in shares if share)
    return f"{row['tflops']:.1f}{f' ({known})' if known else ''}"


def _reading(row: Record | None, own: Record | None) -> str:
    """The time and rate of reading the matrix of a product with a vector, and the product's rate as a share of it."""
    if row is None or not row["gbs"]:
        return ""
    share = f" ({100 * own['gbs'] / row['gbs']:.0f}%)" if own and own["gbs"] else ""
    return f"{microseconds(row['us'])}, {row['gbs']:.0f} GB/s{share}"


def _times(row: Record) -> str:
    return f" ({row['ratio']:.2f}×)" if row["ratio"] else ""


if __name__ == "__main__":
    raise SystemExit(main())
