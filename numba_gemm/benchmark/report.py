"""Tables of measurements for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table

from numba_gemm.benchmark.forms import FormReport, fmas, tensor_mmas
from numba_gemm.benchmark.record import CEILING, CEILING_NORMAL, READING, Row

#: Machine instructions of the main loop that tables show; LDS is of up to 8 bytes.
LOOP_COLUMNS = ("FFMA", "HMMA", "LDS", "LDS.128", "LDSM", "LDGSTS", "HMMA/LDSM")


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
    """Every kernel on one shape: time, rates, share of the peer, of the ceiling and of the roof, registers, error."""
    peer = next((row.peer for row in rows if row.peer), None)
    ceiling = next((row.ceiling_tflops for row in rows if row.ceiling_tflops), None)
    columns = ["kernel", "time", "±%", "TFLOP/s"]
    columns += [f"% of {peer_title(peer)}"] if peer else []
    columns += ["% of ceiling"] if ceiling else []
    columns += ["GB/s", "% roof", "regs", "err/bound"]
    table = plain_table(columns, ("kernel",), title)

    def add(name: str, row: Row, us: float, rate: float, share: float | None, *rest: str) -> None:
        cells = [name, microseconds(us), *rest[:1], decimal(rate, 2)]
        cells += [percent(share)] if peer else []
        cells += [percent(rate / ceiling)] if ceiling else []
        on_roof = rate / row.roof_tflops if row.roof_tflops else None
        gbs = row.gbs * (row.us or 0) / us if row.gbs else None
        table.add_row(*cells, decimal(gbs, 0), percent(on_roof), *rest[1:])

    for row in rows:
        name = f"{row.kernel} {short_config(row.config)}".strip()
        if row.kernel == READING and not row.error:
            continue
        if row.error or row.us is None or row.tflops is None:
            table.add_row(name, "[red]failed[/]", *[""] * (len(columns) - 2))
        elif row.kernel not in (CEILING, CEILING_NORMAL):
            texts = (spread(row), str(row.registers or "–"), ratio(row.error_over_bound))
            add(name, row, row.us, row.tflops, row.ratio, *texts)
    timed = next((row for row in rows if row.peer_us), None)
    if timed is not None and timed.peer_us:
        table.add_section()
        rate = 2 * timed.m * timed.n * timed.k / timed.peer_us * 1e-6
        add(peer_title(peer), timed, timed.peer_us, rate, 1.0, "", "", "")
    for own in [row for row in rows if row.kernel in (CEILING, CEILING_NORMAL) and row.tflops]:
        if timed is None and own.kernel == CEILING:
            table.add_section()
        share = percent(own.tflops / ceiling) if own.tflops and ceiling else ""
        table.add_row(
            *(f"ceiling, {own.config}", "", spread(own), decimal(own.tflops, 2), *([""] if peer else [])),
            *([share] if ceiling else []),
            *("", "", str(own.registers or "–"), ""),
        )
    for own in [row for row in rows if row.kernel == READING and row.us]:
        blanks = [""] * (bool(peer) + bool(ceiling))
        cells = ("reading the matrix", microseconds(own.us), spread(own), "", *blanks, decimal(own.gbs, 0), "", "–", "")
        table.add_row(*cells)
    return table


def comparison_table(rows: Sequence[Row]) -> Table:
    """cuBLAS in 16 bits against cuBLAS in FP32 on the same shapes, interleaved."""
    columns = ("size", "FP32", "TFLOP/s", "16 bits", "TFLOP/s", "times as fast")
    dtype = rows[0].dtype
    title = f"{peer_title(rows[0].kernel)} in {dtype} against {peer_title(rows[0].kernel)} in float32, interleaved"
    table = plain_table((*columns[:3], dtype, *columns[4:]), ("size",), title)
    for row in rows:
        size = f"{row.m}³" if row.m == row.n == row.k else f"{row.m}×{row.n}×{row.k}"
        if row.error or row.us is None or row.peer_us is None:
            table.add_row(size, "[red]failed[/]", *[""] * 4)
            continue
        flops = 2 * row.m * row.n * row.k
        table.add_row(
            *(size, microseconds(row.peer_us), decimal(flops / row.peer_us * 1e-6, 2)),
            *(microseconds(row.us), decimal(row.tflops, 2), decimal(row.ratio, 2)),
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
    """Compiled forms: registers, spills, shared memory, occupancy, and the main loop's arithmetic and shared loads."""
    columns = ("kernel", "arch", "regs", "spills", "shared", "occup.", "limit", *LOOP_COLUMNS)
    table = plain_table(columns, ("kernel", "limit"), title)
    several_archs = len({report.arch for report in reports}) > 1
    last = ""
    for report in reports:
        if several_archs and last and report.kernel != last:
            table.add_section()
        last = report.kernel
        name = f"{report.kernel} {short_config(report.config)}".strip()
        if report.error:
            table.add_row(name, report.arch, "[red]failed[/]", *[""] * (len(columns) - 3))
            continue
        assert report.occupancy is not None
        table.add_row(
            *(name, report.arch, str(report.registers), kilobytes(local_bytes(report))),
            *(
                kilobytes(report.shared_bytes or 0),
                f"{report.occupancy:.0%}",
                report.limited_by.removesuffix(" memory"),
            ),
            *loop_cells(report.loop),
        )
    return table


def counters_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """What the emulator counted: FMAs, tensor-core instructions, wavefronts and bank conflicts, sectors, barriers."""
    columns = ("kernel", "FMAs", "MMAs", "ld wavefr.", "st wavefr.", "FMA/ld", "conflicts", "ld sectors", "st sectors")
    table = plain_table((*columns, "barriers", "err/bound"), ("kernel",), title)
    for row in rows:
        name = f"{row.kernel} {short_config(row.config)}".strip()
        if row.error or row.counters is None:
            table.add_row(name, "[red]failed[/]", *[""] * 9)
            continue
        table.add_row(name, *counter_cells(row.counters), ratio(row.error_over_bound))
    return table


def counter_cells(counters: Mapping[str, int]) -> list[str]:
    """The counts of :func:`counters_table`; FMAs by threads for each wavefront of shared loads, a dash without any."""
    fma, loads = counters["ffma_threads"], counters["shared_load_wavefronts"]
    conflicts = counters["shared_load_conflicts"] + counters["shared_store_conflicts"]
    numbers = (conflicts, counters["global_load_sectors"], counters["global_store_sectors"], counters["barriers"])
    mma = counters["mma_instructions"] + counters.get("wgmma_instructions", 0)
    return [
        *(f"{fma:,}", f"{mma:,}", f"{loads:,}", f"{counters['shared_store_wavefronts']:,}"),
        f"{fma / loads:.3g}" if fma and loads else "–",
        *(f"{number:,}" for number in numbers),
    ]


def peer_title(peer: str | None) -> str:
    """A peer's name as it is spelled."""
    return {"cublas": "cuBLAS", "numpy": "NumPy"}.get(peer or "", peer or "")


def short_config(config: str) -> str:
    """A config for a narrow column: ``"vector_width=4"`` is ``"vec4"``, of width 1 ``"scalar"``.

    Of a pipelined kernel, block tile, stages and the parts of K: ``"128×256×64/3"``, ``"64×64×64/4 split 33"``; of a
    form whose tiles TMA copies ``"128×256×64/4 tma"``. A type is its own name, and so is a kernel that stands first.
    """
    values = dict(part.split("=") for part in config.split() if "=" in part)
    if "block_m" in values:
        words = [part for part in config.split() if "=" not in part]
        words += [f"{values['block_m']}×{values['block_n']}×{values['block_k']}/{values.get('stages', '1')}"]
        words += ["tma"] if values.get("copies") == "tma" else []
        return " ".join([*words, f"split {values['splits']}"] if "splits" in values else words)
    config = re.sub(r"\bdtype=", "", config)
    return re.sub(r"vector_width=(\d+)", lambda found: "scalar" if found[1] == "1" else f"vec{found[1]}", config)


def loop_cells(loop: Mapping[str, int]) -> list[str]:
    """The counts of :data:`LOOP_COLUMNS` in a main loop; dashes if it wasn't counted."""
    if not loop:
        return ["–"] * len(LOOP_COLUMNS)
    mma, matrix_loads = tensor_mmas(dict(loop)), loop.get("LDSM", 0)
    narrow = loop.get("LDS", 0) + loop.get("LDS.64", 0)
    counts = (fmas(dict(loop)), mma, narrow, loop.get("LDS.128", 0), matrix_loads, loop.get("LDGSTS", 0))
    return [*map(str, counts), f"{mma / matrix_loads:.3g}" if mma and matrix_loads else "–"]


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
