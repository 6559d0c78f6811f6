"""``numba-gemm check``: is every kernel right on this machine?"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from numba_gemm.catalog import CPU_BASELINE

if TYPE_CHECKING:
    from numba_gemm.benchmark.correctness import Outcome

_DESCRIPTION = """\
Run kernels on problems of every kind and compare the results with a float64 reference, elementwise, by a bound that
follows from the arithmetic: FP32's, or that of the GPU's tensor cores. Tiny, odd, prime, skinny and flat shapes; sizes
of one tile, one more and one less; packed, padded, sliced, transposed, stepped and reversed matrices; random,
integer-valued and one-hot inputs; alpha and beta; every element type of the kernel. NumPy arrays and Numba device
arrays both. Outputs are filled with NaN before each run.

On the emulator every compiled form of each kernel runs its PTX on small problems of its tile, and a hazard, for
instance a race in shared memory, is a failure. Of t4, which has a form for each problem, a few of the listed forms run
by force as well, unless --quick is given. Without a GPU the CPU baseline is checked, and the GPU kernels on the
emulator. Exit status 1 if a check failed, 2 if there was nothing that could be checked.
"""

_EXAMPLES = """\
examples:
  numba-gemm check
  numba-gemm check v6 v7 --quick
  numba-gemm check --device emulator --arch sm_80
  numba-gemm check --device cpu --seed 7
"""

#: Failing cases printed for each kernel; the rest are counted.
_SHOWN = 10


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.catalog import kernel_names
    from numba_gemm.cli.names import BESIDE_THE_LADDER

    parser = subparsers.add_parser(
        "check",
        help="compare every kernel's results with a reference",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "kernels",
        nargs="*",
        metavar="KERNEL",
        help=f"{', '.join(kernel_names())} (default: all of these); {BESIDE_THE_LADDER}",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cuda", "cpu", "emulator"),
        help="cuda checks the GPU kernels and insists on a GPU, cpu checks the CPU baseline, emulator checks the GPU "
        "kernels on the CPU, auto checks the baseline, and the GPU kernels on the GPU, or on the emulator where there "
        "is none (default: auto)",
    )
    parser.add_argument("--arch", metavar="ARCH", help="architecture to emulate, for instance sm_80 (default: sm_90)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small problems only, as always on the emulator, and there none of t4's forms by force (default: large "
        "ones, up to 1024³, as well)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.benchmark.correctness import check_kernels, count_runs
    from numba_gemm.cli.console import make_console, progress_bar
    from numba_gemm.cli.names import check_kernels as check_names
    from numba_gemm.cli.names import parse_arch
    from numba_gemm.device.driver import driver, is_available
    from numba_gemm.emulate import DEFAULT_ARCH

    names = check_names(args.kernels)
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}; it must be 0 or more")
    arch = parse_arch(args.arch) if args.arch else DEFAULT_ARCH
    if args.device == "cuda":
        driver()  # raises NoDeviceError with what was looked for
    on_gpu = args.device == "cuda" or (args.device == "auto" and is_available())
    if args.arch and (on_gpu or args.device == "cpu"):
        raise ValueError("--arch is of the emulator; add --device emulator")
    places, left_out = _places(names, args.device, on_gpu, arch)
    if not places:
        raise ValueError(
            f"nothing was checked: {_reasons(left_out)}; leave --device and --arch out, or name other kernels"
        )
    console = make_console()
    _compile_ahead(places, arch, quick=args.quick)

    start = time.perf_counter()
    total = sum(count_runs(name, place, quick=args.quick) for name in places for place in places[name])
    outcomes: list[Outcome] = []
    with progress_bar(total, "check") as bar:

        def done(outcome: Outcome) -> None:
            bar.step(f"check {outcome.kernel} {outcome.place} {outcome.case}")
            bar.advance()
            if outcome.message:
                _print_failure(console, outcome, outcomes)
            outcomes.append(outcome)

        check_kernels(list(places), places, quick=args.quick, seed=args.seed, arch=arch, on_case=done)
    console.print(_table(places, outcomes, arch))
    failed = sum(bool(outcome.message) for outcome in outcomes)
    verdict = f"{failed} of {len(outcomes)} checks failed" if failed else f"All {len(outcomes)} checks passed"
    console.print(f"\n{verdict}, in {time.perf_counter() - start:.1f} s.")
    if args.device == "auto" and not on_gpu and len(places) > (CPU_BASELINE in places):
        console.print("No NVIDIA GPU was found, so the GPU kernels ran on the emulator, on small problems.")
    if left_out:
        console.print(f"Not run: {_reasons(left_out)}.")
    return 1 if failed else 0


def _places(
    names: list[str], device: str, on_gpu: bool, arch: tuple[int, int]
) -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]]]:
    """Where each kernel is checked; and reason → the kernels that can't be checked for it."""
    from numba_gemm.benchmark.correctness import EMULATOR, PLACES
    from numba_gemm.benchmark.emulated import runs_emulated
    from numba_gemm.catalog import get_spec
    from numba_gemm.compile import arch_name
    from numba_gemm.device.context import device_properties

    places: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, list[str]] = {}
    for name in names:
        if name == CPU_BASELINE:
            if device in ("auto", "cpu"):
                places[name] = ("numpy",)
            elif len(names) == 1:
                left_out.setdefault(f"no GPU kernel, and --device {device} was given", []).append(name)
        elif on_gpu:
            spec = get_spec(name)
            if spec.max_arch is None or spec.runs_on(device_properties().compute_capability):
                places[name] = PLACES
            else:
                left_out.setdefault("has instructions that this GPU lacks", []).append(name)
        elif device == "cpu":
            left_out.setdefault("--device cpu was given", []).append(name)
        elif runs_emulated(get_spec(name), arch):
            places[name] = (EMULATOR,)
        else:
            early = arch < get_spec(name).min_arch
            reason = "needs a later architecture than" if early else "has instructions of an earlier one than"
            left_out.setdefault(f"{reason} {arch_name(arch)}", []).append(name)
    return places, left_out


def _reasons(left_out: dict[str, list[str]]) -> str:
    """``"v1, v2 (--device cpu was given)"``."""
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left_out.items())


def _compile_ahead(places: dict[str, tuple[str, ...]], arch: tuple[int, int], *, quick: bool) -> None:
    """Compile on all cores at once what the checks will need."""
    from numba_gemm.benchmark.correctness import EMULATOR, forms_on_gpu
    from numba_gemm.benchmark.forms import all_forms, report_forms
    from numba_gemm.catalog import get_spec
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.cli.names import gpu_kernels
    from numba_gemm.device.context import device_properties

    names = gpu_kernels(list(places))
    if not names:
        return
    emulated = places[names[0]] == (EMULATOR,)
    fixed = [name for name in names if get_spec(name).select is None]  # the others make a form for each problem
    if emulated:
        forms = all_forms([name for name in fixed if get_spec(name).source != "ptx"], [arch])  # PTX is run as it is
    else:
        device = device_properties()
        forms = all_forms(fixed, [device.compute_capability])
        for name in names:
            if get_spec(name).runs_on(device.compute_capability):
                forms += forms_on_gpu(name, quick=quick, device=device)
    if not forms:
        return
    with progress_bar(len(forms), "compile") as bar:
        report_forms(forms, sass=False, on_done=lambda _: bar.advance())


def _print_failure(console: Any, outcome: Outcome, before: list[Outcome]) -> None:
    earlier = sum(bool(other.message) and other.kernel == outcome.kernel for other in before)
    if earlier < _SHOWN:
        where = f"{outcome.place} {outcome.form}".strip() if outcome.place == "emulator" else f"{outcome.place} arrays"
        console.print(f"failed: {outcome.kernel}, {where}, {outcome.case}: {outcome.message}", markup=False)
    elif earlier == _SHOWN:
        console.print(f"failed: {outcome.kernel}: and more", markup=False)


def _table(places: dict[str, tuple[str, ...]], outcomes: list[Outcome], arch: tuple[int, int]) -> Any:
    from numba_gemm.benchmark.correctness import EMULATOR
    from numba_gemm.benchmark.report import plain_table, short_config
    from numba_gemm.compile import arch_name

    columns = ("kernel", "ran on", "arrays", "checks", "failed", "largest error/bound")
    table = plain_table(columns, columns[:3])
    groups: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.kernel, outcome.place, outcome.form, outcome.case.dtype), []).append(outcome)
    for (name, place, form, dtype), own in groups.items():
        emulated = place == EMULATOR
        where = f"emulator {arch_name(arch)}" if emulated else "CPU" if name == CPU_BASELINE else "GPU"
        label = f"{name} {short_config(form)}".strip()
        if dtype != "float32" and dtype not in label:
            label += f" {dtype}"
        table.add_row(
            label,
            where,
            "numpy" if emulated else place,
            str(len(own)),
            str(sum(bool(o.message) for o in own)),
            f"{max(o.error_over_bound for o in own):.3f}",
        )
    return table
