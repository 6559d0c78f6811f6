"""``numba-gemm fragments``: which lane and register of a warp hold which element of a tensor-core instruction."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Draw the operands A, B and C of an mma.sync instruction. Each cell is one element and shows the lane that holds it; the
elements of the chosen lane show their names (a0, a1, …) in the order of the PTX ISA, which packs neighbours into one
32-bit register, the first in its low bits. The same map drives the emulator and the tests.
"""

_EXAMPLES = """\
examples:
  numba-gemm fragments m16n8k16
  numba-gemm fragments m16n8k16 --lane 5
  numba-gemm fragments m16n8k8 --element tf32
  numba-gemm fragments --list
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    parser = subparsers.add_parser(
        "fragments",
        help="which lane and register hold which element of an MMA",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "shape", nargs="?", metavar="SHAPE", help="of the instruction, for instance m16n8k16 (--list shows all)"
    )
    parser.add_argument("--lane", type=int, default=0, metavar="L", help="lane to mark, 0 … 31 (default: 0)")
    parser.add_argument(
        "--element", metavar="TYPE", help="element type of A and B (default: the first that the shape has)"
    )
    parser.add_argument("--accumulator", metavar="TYPE", help="of C and D (default: the widest)")
    parser.add_argument("--list", action="store_true", help="list shapes, types and the architecture that brought them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.cli.console import make_console
    from numba_gemm.fragments import draw, supported

    console = make_console()
    if args.list:
        console.print(_table())
        return 0
    if args.shape is None:
        raise ValueError("which shape? For instance: numba-gemm fragments m16n8k16 (--list shows all)")
    shape = args.shape.lstrip(".")
    elements = [row.element for row in supported() if row.shape == shape]
    if not elements:
        shapes = dict.fromkeys(row.shape for row in supported())
        raise ValueError(f"there is no shape {args.shape!r}; the shapes are {', '.join(shapes)}")
    element = args.element or elements[0]
    if element not in elements:
        raise ValueError(f"{shape} has no elements of type {element!r}; it has {', '.join(elements)}")
    console.print(draw(shape, args.lane, element, args.accumulator), highlight=False)
    return 0


def _table() -> Any:
    from rich.table import Table

    from numba_gemm.fragments import supported

    table = Table(box=None, header_style="bold")
    for column in ("shape", "A and B", "C and D", "from"):
        table.add_column(column)
    for row in supported():
        table.add_row(row.shape, row.element, ", ".join(row.accumulators), row.arch)
    return table
