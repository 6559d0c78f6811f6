"""Tables for people, made with rich: the same ones for the command line and for ``repr``."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from numba_gemm.catalog import KernelInfo


def render(renderable: RenderableType, width: int = 110) -> str:
    """A rich renderable as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(renderable)
    return buffer.getvalue().rstrip()


def kernel_table(kernels: Iterable[KernelInfo]) -> Table:
    """The ladder: name, idea, tiles, threads, loads per FMA."""
    table = Table(title=None)
    for column in ("kernel", "idea", "block tile", "threads", "thread tile", "loads/FMA"):
        table.add_column(column, justify="left" if column in ("kernel", "idea") else "right")
    for kernel in kernels:
        table.add_row(
            f"{kernel.name} {kernel.title}",
            kernel.idea,
            "×".join(map(str, kernel.block_tile)) if kernel.block_tile else "–",
            str(kernel.threads or "–"),
            "×".join(map(str, kernel.thread_tile)) if kernel.thread_tile else "–",
            f"{kernel.loads_per_fma:g}" if kernel.loads_per_fma else "–",
        )
    return table
