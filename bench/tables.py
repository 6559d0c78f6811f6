"""Write the tables of README.md and docs/*.md from the recorded runs in bench/results.

A table stands between two lines, and everything between them is replaced::

    <!-- table: nvidia-h200/ladder -->
    <!-- end table -->

The name is the record's path under bench/results, without ``.json``; the folder can be left out while only one has a
record of that name. ``--check`` writes nothing and exits with status 1
if a table isn't what its record says.
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

from numba_gemm.benchmark.record import read_record  # noqa: E402
from numba_gemm.benchmark.report import geometric_mean, kilobytes, microseconds, peer_title, short_config  # noqa: E402

_TABLE = re.compile(
    r"^<!-- table: (?P<name>\S+) -->\n(?P<body>.*?)(?P<end>^<!-- end table -->$|(?=^<!-- table: )|\Z)", re.M | re.S
)

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
        path = find_record(results, name, document)
        record = read_record(path)
        source = path.relative_to(results.parents[1]).as_posix()
        return f"<!-- table: {name} -->\n\n{render(record)}\n\n{caption(record, source)}\n\n{found['end']}"

    return _TABLE.sub(table, text)


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
    parts += [where["date"], f"`{source}`"]
    return f"*{'; '.join(parts)}*"


def render(record: Record) -> str:
    """A record's table, in the form that suits what was measured."""
    if record["rows"]:
        suite = record["rows"][0]["suite"]
        return _VIEWS.get(suite, suite_view)(record["rows"])
    if record.get("resources"):
        return resources_view(record["resources"])
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


def suite_view(rows: list[Record]) -> str:
    """One line a shape, one column a kernel: its speed, and as a multiple of the peer's; the geometric mean last."""
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    peer = next((row["peer"] for row in rows if row["peer"]), None)
    kernels = [k for k in dict.fromkeys(row["kernel"] for row in rows) if k != peer]
    lines = []
    for shape in shapes:
        here = {row["kernel"]: row for row in rows if _shape(row) == shape}
        peer_us = next((row["peer_us"] for row in here.values() if row["peer_us"]), None)
        line = [shape, microseconds(peer_us)] if peer else [shape]
        for kernel in kernels:
            row = here.get(kernel)
            line.append("failed" if row is None or row["us"] is None else microseconds(row["us"]) + _times(row))
        lines.append(line)
    if peer:
        means = [geometric_mean([r["ratio"] for r in rows if r["kernel"] == k and r["ratio"]]) for k in kernels]
        lines.append(["geometric mean", "", *(f"{mean:.2f}×" if mean else "–" for mean in means)])
    header = ["M×N×K", *([peer_title(peer)] if peer else []), *kernels]
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


def host_view(rows: list[Record]) -> str:
    """Host time of calls."""
    lines = []
    for row in rows:
        name = f"`{row['kernel']}`" if "(" in row["kernel"] else row["kernel"]
        lines.append([name, microseconds(row["us"]) if row["us"] is not None else "not measured"])
    return markdown(["call", "time on the host"], lines)


def resources_view(reports: list[Record]) -> str:
    """One line a compiled form and architecture."""
    lines = []
    for report in reports:
        name = f"{report['kernel']} {short_config(report['config'])}".strip()
        if report["error"]:
            lines.append([name, report["arch"], "failed", *["–"] * 6])
            continue
        loop = report["loop"]
        narrow = loop.get("LDS", 0) + loop.get("LDS.64", 0)
        ffma = loop.get("FFMA", 0) + 2 * loop.get("FFMA2", 0)
        counts = [ffma, narrow, loop.get("LDS.128", 0)]
        local = report["spill_bytes"] + report["stack_bytes"]
        lines.append(
            [
                *(name, report["arch"], str(report["registers"]), str(local), kilobytes(report["shared_bytes"])),
                f"{report['occupancy']:.0%}",
                *(str(count) if loop else "–" for count in counts),
            ]
        )
    header = ["kernel", "arch", "registers", "local bytes", "shared", "occupancy", "FFMA", "LDS", "LDS.128"]
    return markdown(header, lines, left=2)


_VIEWS: dict[str, Callable[[list[Record]], str]] = {
    "ladder": ladder_view,
    "cpu": cpu_view,
    "host_overhead": host_view,
    "first_call": host_view,
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


def _times(row: Record) -> str:
    return f" ({row['ratio']:.2f}×)" if row["ratio"] else ""


if __name__ == "__main__":
    raise SystemExit(main())
