"""``numba-gemm check``: is every kernel right on this machine?"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba_gemm.benchmark.correctness import Outcome

_DESCRIPTION = """\
Run kernels on problems of every kind and compare the results with a float64 reference, elementwise, by a bound that
follows from FP32 arithmetic. Tiny, odd, prime, skinny and flat shapes; sizes of one tile, one more and one less;
packed, padded, sliced, transposed, stepped and reversed matrices; random, integer-valued and one-hot inputs; alpha and
beta. NumPy arrays and Numba device arrays both. Outputs are filled with NaN before each run.

Without a GPU the CPU baseline is checked, and the kernels that weren't run are named. Exit status 1 if a check failed,
2 if there was nothing that could be checked.
"""

_EXAMPLES = """\
examples:
  numba-gemm check
  numba-gemm check v6 v7 --quick
  numba-gemm check --device cpu --seed 7
"""

#: Failing cases printed for each kernel; the rest are counted.
_SHOWN = 10


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.catalog import kernel_names

    parser = subparsers.add_parser(
        "check",
        help="compare every kernel's results with a reference",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "kernels", nargs="*", metavar="KERNEL", help=f"{', '.join(kernel_names())} (default: all of them)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        help="cuda checks the GPU kernels and insists on a GPU, cpu checks the CPU baseline, auto checks what this "
        "machine can run (default: auto)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small problems only (default: large ones, up to 1024³, as well)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.benchmark.correctness import PLACES, cases_for, check_kernels
    from numba_gemm.catalog import CPU_BASELINE
    from numba_gemm.cli.console import make_console, progress_bar
    from numba_gemm.cli.names import check_kernels as check_names
    from numba_gemm.cli.names import gpu_kernels
    from numba_gemm.device.driver import driver, is_available

    names = check_names(args.kernels)
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}; it must be 0 or more")
    console = make_console()
    on_gpu = gpu_kernels(names)
    if args.device == "cuda":
        driver()  # raises NoDeviceError with what was looked for
        names, left_out = on_gpu, []
    elif args.device == "cpu" or not is_available():
        names, left_out = [name for name in names if name == CPU_BASELINE], on_gpu
    else:
        left_out = []
    if not names:
        raise ValueError(f"nothing was checked: {', '.join(left_out or ['cpu'])} can't run {_where(args.device)}")
    if on_gpu and not left_out:
        _compile_ahead(on_gpu)

    start = time.perf_counter()
    places: dict[str, tuple[str, ...]] = {name: ("numpy",) if name == CPU_BASELINE else PLACES for name in names}
    total = sum(len(places[name]) * sum(1 for _ in cases_for(name, quick=args.quick)) for name in names)
    outcomes: list[Outcome] = []
    with progress_bar(total, "check") as bar:

        def done(outcome: Outcome) -> None:
            bar.step(f"check {outcome.kernel} {outcome.place} {outcome.case}")
            bar.advance()
            if outcome.message:
                _print_failure(console, outcome, outcomes)
            outcomes.append(outcome)

        check_kernels(names, places, quick=args.quick, seed=args.seed, on_case=done)
    console.print(_table(names, outcomes))
    failed = sum(bool(outcome.message) for outcome in outcomes)
    verdict = f"{failed} of {len(outcomes)} checks failed" if failed else f"All {len(outcomes)} checks passed"
    console.print(f"\n{verdict}, in {time.perf_counter() - start:.1f} s.")
    if left_out:
        why = "--device cpu was given" if args.device == "cpu" else "no NVIDIA GPU was found"
        console.print(f"Not run, since {why}: {', '.join(left_out)}.")
    return 1 if failed else 0


def _where(device: str) -> str:
    """The end of a sentence that says why kernels can't run."""
    if device == "auto":
        return "on this machine, which has no NVIDIA GPU that works"
    return f"with --device {device}"


def _compile_ahead(names: list[str]) -> None:
    """Compile on all cores at once what the checks will need."""
    from numba_gemm.benchmark.forms import all_forms, report_forms
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.device.context import device_properties

    forms = all_forms(names, [device_properties().compute_capability])
    with progress_bar(len(forms), "compile") as bar:
        report_forms(forms, sass=False, on_done=lambda _: bar.advance())


def _print_failure(console: Any, outcome: Outcome, before: list[Outcome]) -> None:
    earlier = sum(bool(other.message) and other.kernel == outcome.kernel for other in before)
    if earlier < _SHOWN:
        console.print(
            f"failed: {outcome.kernel}, {outcome.place} arrays, {outcome.case}: {outcome.message}", markup=False
        )
    elif earlier == _SHOWN:
        console.print(f"failed: {outcome.kernel}: and more", markup=False)


def _table(names: list[str], outcomes: list[Outcome]) -> Any:
    from numba_gemm.benchmark.report import plain_table

    table = plain_table(("kernel", "arrays", "checks", "failed", "largest error/bound"), ("kernel", "arrays"))
    for name in names:
        for place in dict.fromkeys(outcome.place for outcome in outcomes if outcome.kernel == name):
            own = [o for o in outcomes if o.kernel == name and o.place == place]
            table.add_row(
                name,
                place,
                str(len(own)),
                str(sum(bool(o.message) for o in own)),
                f"{max(o.error_over_bound for o in own):.3f}",
            )
    return table
