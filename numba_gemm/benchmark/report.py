"""Tables of measurements for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from numba_gemm.benchmark.forms import FormReport, fmas
from numba_gemm.benchmark.record import Row


def plain_table(columns: Sequence[str], left: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table with a rule under its header; columns not in ``left`` are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in left)
    return table


def shape_table(title: str, rows: Sequence[Row]) -> Table:
    """Every kernel on one shape: time, rates, share of the peer and of the roof, registers, error."""
    peer = next((row.peer for row in rows if row.peer), None)
    columns = ["kernel", "time", "±%", "TFLOP/s", "GB/s", "% roof", "regs", "err/bound"]
    if peer:
        columns.insert(4, f"% of {peer_title(peer)}")
    table = plain_table(columns, ("kernel",), title)
    for row in rows:
        name = f"{row.kernel} {short_config(row.config)}".strip()
        if row.error or row.us is None:
            table.add_row(name, "[red]failed[/]", *[""] * (len(columns) - 2))
            continue
        cells = [name, microseconds(row.us), spread(row), decimal(row.tflops, 2)]
        if peer:
            cells.append(percent(row.ratio))
        roof = row.tflops / row.roof_tflops if row.tflops and row.roof_tflops else None
        cells += [decimal(row.gbs, 0), percent(roof), str(row.registers or "–"), ratio(row.error_over_bound)]
        table.add_row(*cells)
    peer_row = next((row for row in rows if row.peer_us), None)
    if peer_row is not None and peer_row.peer_us:
        flops = 2 * peer_row.m * peer_row.n * peer_row.k
        rate = flops / peer_row.peer_us * 1e-6
        roof = rate / peer_row.roof_tflops if peer_row.roof_tflops else None
        gbs = (peer_row.gbs or 0) * (peer_row.us or 0) / peer_row.peer_us
        table.add_section()
        table.add_row(
            *(peer_title(peer), microseconds(peer_row.peer_us), "", decimal(rate, 2), "100.0"),
            *(decimal(gbs, 0), percent(roof), "", ""),
        )
    return table


def failures(rows: Iterable[Row]) -> list[str]:
    """One line for each row that failed."""
    return [
        f"{row.kernel}{f' ({row.config})' if row.config else ''} at {row.m}×{row.n}×{row.k}: {row.error}"
        for row in rows
        if row.error
    ]


def cpu_table(rows: Sequence[Row]) -> Table:
    """The CPU baseline against NumPy's BLAS."""
    table = plain_table(
        ("size", "cores", "cpu", "GFLOP/s", "numpy", "GFLOP/s", "% of numpy", "err/bound"),
        title="CPU baseline against NumPy's BLAS",
    )
    for row in rows:
        size = f"{row.m}³" if row.m == row.n == row.k else f"{row.m}×{row.n}×{row.k}"
        if row.error or row.us is None or row.peer_us is None:
            table.add_row(size, str(row.threads), "[red]failed[/]", *[""] * 5)
            continue
        flops = 2 * row.m * row.n * row.k
        table.add_row(
            *(size, str(row.threads), microseconds(row.us), decimal(flops / row.us * 1e-3, 1)),
            *(microseconds(row.peer_us), decimal(flops / row.peer_us * 1e-3, 1)),
            *(percent(row.ratio), ratio(row.error_over_bound)),
        )
    return table


def forms_table(reports: Sequence[FormReport], title: str | None = None) -> Table:
    """Compiled forms: registers, spills, shared memory, occupancy, and the main loop's FMAs and shared loads."""
    columns = ("kernel", "arch", "regs", "spills", "shared", "occup.", "limit", "FFMA", "LDS", "LDS.128")
    table = plain_table(columns, ("kernel", "limit"), title)
    several_archs = len({report.arch for report in reports}) > 1
    last = ""
    for report in reports:
        if several_archs and last and report.kernel != last:
            table.add_section()
        last = report.kernel
        name = f"{report.kernel} {short_config(report.config)}".strip()
        if report.error:
            table.add_row(name, report.arch, "[red]failed[/]", *[""] * 7)
            continue
        assert report.occupancy is not None
        loop = report.loop
        counts = [str(fmas(loop)), str(loop.get("LDS", 0) + loop.get("LDS.64", 0)), str(loop.get("LDS.128", 0))]
        table.add_row(
            *(name, report.arch, str(report.registers), kilobytes(local_bytes(report))),
            *(
                kilobytes(report.shared_bytes or 0),
                f"{report.occupancy:.0%}",
                report.limited_by.removesuffix(" memory"),
            ),
            *(counts if loop else ["–"] * 3),
        )
    return table


def peer_title(peer: str | None) -> str:
    """A peer's name as it is spelled."""
    return {"cublas": "cuBLAS", "numpy": "NumPy"}.get(peer or "", peer or "")


def short_config(config: str) -> str:
    """A config for a narrow column: ``"vector_width=4"`` is ``"vec4"``, of width 1 ``"scalar"``."""
    return re.sub(r"vector_width=(\d+)", lambda found: "scalar" if found[1] == "1" else f"vec{found[1]}", config)


def local_bytes(report: FormReport) -> int:
    """Bytes of local memory: spills and stack."""
    return (report.spill_bytes or 0) + (report.stack_bytes or 0)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive numbers, None of none."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def microseconds(us: float | None) -> str:
    """A time in the unit that suits it."""
    if us is None:
        return "–"
    for limit, scale, unit, digits in ((1e3, 1.0, "µs", 1), (1e6, 1e3, "ms", 2), (math.inf, 1e6, "s", 2)):
        if us < limit:
            return f"{us / scale:.{digits}f} {unit}"
    return "–"


def spread(row: Row) -> str:
    """Half of greatest less least time, as a percentage of the median."""
    if not row.us or row.us_min is None or row.us_max is None:
        return "–"
    return f"{50 * (row.us_max - row.us_min) / row.us:.1f}"


def decimal(value: float | None, digits: int) -> str:
    """A number, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share as a percentage without its sign."""
    return "–" if share is None else f"{100 * share:.1f}"


def ratio(value: float | None) -> str:
    """An error as a share of its bound."""
    return "–" if value is None else f"{value:.2g}"


def kilobytes(count: int) -> str:
    """Bytes, in KB where that is whole."""
    return f"{count // 1024} KB" if count and count % 1024 == 0 else str(count)
