"""``numba-gemm tune``: measure which kernel, in which form, is fastest on this GPU, and remember it."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from numba_gemm.benchmark.suites import DTYPES, SUITES, Shape, parse_shape

if TYPE_CHECKING:
    from numba_gemm.problem import Problem
    from numba_gemm.tuned import Choice

_DESCRIPTION = """\
Time every form of every kernel that could be chosen for the given shapes, each validated first, and write the fastest
to a table in the user's configuration directory. The library then takes these shapes' kernels from the table and all
others' from its cost model.

The table is written after each shape: a run that is interrupted goes on where it stopped. It counts for this GPU, this
driver and this version of the library; with another one it is started anew.
"""

_EXAMPLES = """\
examples:
  numba-gemm tune                                     the named suites, in float32
  numba-gemm tune --suite small --dtype float16
  numba-gemm tune --sizes 1000 64x4096x4096
  numba-gemm tune --show                              what is in the table
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="measure the fastest kernels on this GPU and remember them",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "--sizes", nargs="+", metavar="SIZE", help="shapes, for instance 1024 or 4096x4095x4096 (default: the suites)"
    )
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), help="named shapes (default: all suites)")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], help="element types (default: float32)"
    )
    parser.add_argument("--again", action="store_true", help="also measure shapes that are in the table")
    parser.add_argument("--show", action="store_true", help="print the table and measure nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune, or show the table."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from numba_gemm.compile.ahead import compile_ahead
    from numba_gemm.device.context import current_context
    from numba_gemm.problem import Problem
    from numba_gemm.tune import GpuMeasure, forms_to_compile, tune
    from numba_gemm.tuned import (
        Table,
        check_folder,
        forget,
        kernels_digest,
        key_of,
        read_table,
        table_name,
        user_folder,
    )

    shapes = _shapes(args)
    console = Console()
    device = current_context().device
    folder = user_folder()
    if folder is None:
        raise ValueError("NUMBA_GEMM_TUNED_DIR is empty, which turns the tables off; unset it, or set it to a folder")
    path = folder / table_name(device.name)
    driver = ".".join(map(str, device.driver_version))
    table = read_table(path)
    if table is None or not table.fits(device.name, driver):
        if table is not None:
            console.print(f"{path} is of another GPU, driver or version: starting anew")
        table = Table(device.name, driver, kernels=kernels_digest())
    if args.show:
        for key, choice in sorted(table.choices.items()):
            console.print(_line(key, choice), soft_wrap=True, highlight=False)
        console.print(f"{len(table.choices)} shapes in {path}")
        return 0

    check_folder(folder)
    problems = [Problem.packed(shape.m, shape.n, shape.k, dtype=dtype) for dtype in args.dtype for shape in shapes]
    arch, sm_count = device.compute_capability, device.sm_count
    left = [problem for problem in problems if args.again or key_of(problem) not in table.choices]
    with console.status(f"compiling the forms for {len(left)} shapes"):
        compile_ahead(forms_to_compile(left, arch=arch, sm_count=sm_count), arch)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.closing(GpuMeasure()) as measure, Progress(*columns, console=console) as progress:
        task = progress.add_task("tune", total=len(problems))

        def on_problem(problem: Problem, choice: Choice | None) -> None:
            name = f"{problem.dtype} {Shape(problem.m, problem.n, problem.k)}"
            progress.update(task, description=name)
            if choice is not None:
                progress.advance(task)
                progress.console.print(_line(name, choice), soft_wrap=True, highlight=False)

        failures = tune(
            problems,
            table,
            path,
            measure,
            arch=arch,
            sm_count=sm_count,
            again=args.again,
            on_problem=on_problem,
        )
    forget()
    for failure in failures:
        console.print(f"failed: {failure}", soft_wrap=True)
    console.print(f"{len(table.choices)} shapes in {path}")
    return 1 if failures else 0


def _shapes(args: argparse.Namespace) -> list[Shape]:
    if args.sizes:
        named = [shape for suite in args.suite or () for shape in SUITES[suite]]
        return [*named, *(parse_shape(text) for text in args.sizes)]
    return [shape for suite in args.suite or SUITES for shape in SUITES[suite]]


def _line(name: str, choice: Choice) -> str:
    from numba_gemm.spec import describe_config

    form = describe_config(choice.config)
    return f"{name}: {choice.us:.1f} µs, {choice.kernel}{f' ({form})' if form else ''}, best of {choice.tried}"
