"""``numba-gemm profile``: what a kernel does to shared memory, global memory and the FMA units, counted."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from numba_gemm.profile import Profile
    from numba_gemm.profile_job import Job

_DESCRIPTION = """\
Launch a kernel once and count: shared-memory requests, wavefronts and bank conflicts, global-memory requests and
sectors, FMAs and tensor-core MMAs, and how many for each value and each wavefront read from shared memory. On a GPU
Nsight Compute counts; without one the emulator does, by running the kernel's PTX. Counts of index arithmetic differ
between the two: the emulator sees PTX instructions, ncu machine instructions.

requests     memory instructions, by warps
wavefronts   passes over the 32 banks of shared memory; one a request is the best for 4-byte accesses, 2 to 4 for
             16-byte ones
conflicts    passes beyond those that the same accesses need without bank conflicts
sectors      pieces of 32 bytes of global memory; 4 a request is the best for 4-byte accesses, 16 for 16-byte ones
"""

_EXAMPLES = """\
examples:
  numba-gemm profile v3
  numba-gemm profile v7 --shape 256 256 64 --device both
  numba-gemm profile v6 --config vector_width=1
  numba-gemm profile t2 --config dtype=bfloat16
  numba-gemm profile all --shape 130 134 37 --json ladder.json
"""

ALL = "all"
_SHAPE = (256, 256, 64)
_LARGEST_EMULATED = 2**28  # multiply-adds; about a minute

#: (title, counter) of each line of the comparison, in sections.
_LINES: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("shared load requests", "shared_load_requests"),
        ("shared load wavefronts", "shared_load_wavefronts"),
        ("shared load bank conflicts", "shared_load_conflicts"),
        ("shared store requests", "shared_store_requests"),
        ("shared store wavefronts", "shared_store_wavefronts"),
        ("shared store bank conflicts", "shared_store_conflicts"),
    ),
    (
        ("global load requests", "global_load_requests"),
        ("global load sectors", "global_load_sectors"),
        ("global store requests", "global_store_requests"),
        ("global store sectors", "global_store_sectors"),
    ),
    (
        ("FMAs by threads", "ffma_threads"),
        ("tensor-core MMAs by warps", "mma_instructions"),
        ("FP32 multiplications by threads", "fmul_threads"),
        ("values loaded from shared memory", "shared_load_values"),
        ("barriers by warps", "barriers"),
        ("instructions by warps", "instructions"),
        ("instructions by threads", "thread_instructions"),
    ),
)

_MMA_PER_WAVEFRONT = ("mma_instructions", "shared_load_wavefronts")

_NO_BARRIER_COUNT = "ncu has no count of barriers; its number is that of every instruction of the pipe that runs them."


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.catalog import LADDER
    from numba_gemm.cli.names import BESIDE_THE_LADDER

    parser = subparsers.add_parser(
        "profile",
        help="shared-memory wavefronts, conflicts, sectors and FMAs of a kernel",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "kernel",
        metavar="KERNEL",
        help=f"{', '.join(LADDER)}; {BESIDE_THE_LADDER}; or all, which gives one row for each kernel of the ladder",
    )
    parser.add_argument(
        "--shape",
        nargs=3,
        type=int,
        default=list(_SHAPE),
        metavar=("M", "N", "K"),
        help=f"of the product (default: {' '.join(map(str, _SHAPE))})",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cuda", "emulator", "both"),
        help="cuda counts with ncu on the GPU, emulator on the CPU, both compares them, auto takes the GPU where there "
        "are one and ncu (default: auto)",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="compiled form, for instance vector_width=1 (default: the best that the shape allows)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts to a file as well (default: none)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.catalog import CPU_BASELINE, LADDER, get_spec
    from numba_gemm.cli.console import make_console
    from numba_gemm.cli.names import check_json_path, default_arch, parse_config
    from numba_gemm.profile import EMULATOR
    from numba_gemm.profile_job import Job

    if args.kernel == CPU_BASELINE:
        raise ValueError("kernel cpu runs on the CPU and has no GPU code; profile one of " + ", ".join(LADDER))
    if args.kernel == ALL and args.config:
        raise ValueError("--config takes one kernel, not all")
    if args.json:
        check_json_path(args.json)
    arch = default_arch()
    whole = [name for name, spec in LADDER.items() if spec.max_arch is None or spec.runs_on(arch)]
    names = whole if args.kernel == ALL else [args.kernel]
    config = parse_config(get_spec(args.kernel), args.config) if args.config else None
    m, n, k = args.shape
    jobs = [Job(name, m, n, k, config) for name in names]
    for job in jobs:
        job.resolve(default_arch())
    console = make_console()
    on_gpu, emulated, note = _sources(args.device)
    if emulated and m * n * k > _LARGEST_EMULATED:
        raise ValueError(
            f"{m}×{n}×{k} takes the emulator minutes; the counts grow with the shape, so take a smaller one"
        )
    profiles: list[Profile] = []
    if on_gpu:
        from numba_gemm.profile import profile_on_gpu

        profiles += profile_on_gpu(jobs)
    if emulated:
        profiles += _emulate(jobs, default_arch())
    if len(jobs) > 1:
        for source in dict.fromkeys(profile.source for profile in profiles):
            for table in ladder_tables([profile for profile in profiles if profile.source == source]):
                console.print(table)
                console.print()
    elif len(profiles) == 2:
        gpu, here = sorted(profiles, key=lambda profile: profile.source == EMULATOR)
        _print_comparison(console, here, gpu)
    else:
        _print_one(console, profiles[0])
    if on_gpu:
        console.print(_NO_BARRIER_COUNT, markup=False)
    if note:
        console.print(note, markup=False)
    if args.json:
        _write(args.json, profiles)
    return 0


def _sources(device: str) -> tuple[bool, bool, str]:
    """Whether ncu counts, whether the emulator does, and what to say about the choice."""
    from numba_gemm import ncu
    from numba_gemm.device.driver import driver, is_available

    if device == "emulator":
        return False, True, ""
    if device in ("cuda", "both"):
        driver()  # raises NoDeviceError with what was looked for
        if ncu.find_ncu() is None:
            raise ncu.ProfilerError(ncu.HOW_TO_GET_NCU)
        return True, device == "both", ""
    if not is_available():
        return False, True, "Counted by the emulator, since no NVIDIA GPU was found."
    if ncu.find_ncu() is None:
        return False, True, f"Counted by the emulator: {ncu.HOW_TO_GET_NCU}."
    return True, False, ""


def _emulate(jobs: Sequence[Job], arch: tuple[int, int]) -> list[Profile]:
    from numba_gemm.cli.console import progress_bar
    from numba_gemm.profile import profile_emulated

    resolved = [(job, *job.resolve(arch)) for job in jobs]
    total = sum(math.prod(spec.plan(job.problem(), config).launches[0].grid) for job, spec, config in resolved)
    profiles = []
    with progress_bar(total, "emulate") as bar:
        for job in jobs:
            seen = 0

            def advance(done: int, _total: int) -> None:
                nonlocal seen
                while seen < done:
                    bar.advance()
                    seen += 1

            bar.step(f"emulate {job.kernel}")
            profiles.append(profile_emulated(job, arch, progress=advance))
    return profiles


def form_name(job: Job) -> str:
    """``"v6 vec4"``."""
    from numba_gemm.benchmark.report import short_config
    from numba_gemm.spec import describe_config

    return f"{job.kernel} {short_config(describe_config(job.config or ()))}".strip()


def count(value: float | None) -> str:
    """A count with its digits in threes, or a dash."""
    return "–" if value is None else f"{value:,.0f}"


def quotient(value: float | None) -> str:
    """A quotient to three digits, or a dash."""
    return "–" if value is None else f"{value:.3g}"


def difference(ours: float | None, theirs: float | None) -> str:
    """How far the first is from the second, as a percentage of the second."""
    if ours is None or theirs is None:
        return "–"
    if ours == theirs:
        return "equal"
    return f"{100 * (ours - theirs) / theirs:+.2f} %" if theirs else "–"


def _title(profile: Profile) -> str:
    from numba_gemm.catalog import get_spec

    job, spec = profile.job, get_spec(profile.job.kernel)
    launch = spec.plan(job.problem(), job.config or spec.configs[0]).launches[0]
    blocks, threads = math.prod(launch.grid), launch.geometry.threads
    return (
        f"{form_name(job)} at {job.m}×{job.n}×{job.k}: {blocks} block{'s' if blocks > 1 else ''} of {threads} threads"
    )


def _who(profile: Profile) -> str:
    from numba_gemm.profile import EMULATOR

    return f"the emulator, {profile.device}" if profile.source == EMULATOR else f"ncu on {profile.device}"


def _print_one(console: Console, profile: Profile) -> None:
    console.print(f"[bold]{_title(profile)}[/], by {_who(profile)}\n", highlight=False)
    for table in tables(profile):
        console.print(table)
        console.print()


def tables(profile: Profile) -> list[Table]:
    """The tables of one kernel: shared memory, global memory, work, instructions by class."""
    from numba_gemm.benchmark.report import percent, plain_table
    from numba_gemm.profile import EMULATOR

    values, derived = profile.values, profile.derived()
    left = ("shared memory", "global memory")
    shared = plain_table((left[0], "requests", "wavefronts", "per request", "bank conflicts"), left)
    memory = plain_table((left[1], "requests", "sectors", "per request"), left)
    for verb in ("load", "store"):
        shared.add_row(
            f"{verb}s",
            *(count(values[f"shared_{verb}_{what}"]) for what in ("requests", "wavefronts")),
            quotient(derived[f"shared_{verb}_wavefronts_per_request"]),
            count(values[f"shared_{verb}_conflicts"]),
        )
        memory.add_row(
            f"{verb}s",
            *(count(values[f"global_{verb}_{what}"]) for what in ("requests", "sectors")),
            quotient(derived[f"global_{verb}_sectors_per_request"]),
        )
    work = plain_table(("work", "count"), ("work",))
    if values.get("mma_instructions"):
        work.add_row("tensor-core MMAs by warps", count(values["mma_instructions"]))
        work.add_row("MMAs for each shared load wavefront", quotient(profile.ratio(*_MMA_PER_WAVEFRONT)))
    if values.get("ffma_threads") or not values.get("mma_instructions"):
        work.add_row("FMAs by threads", count(values["ffma_threads"]))
        work.add_row("FMAs for each value loaded from shared memory", quotient(derived["fma_per_shared_load_value"]))
        work.add_row("FMAs for each shared load wavefront", quotient(derived["fma_per_shared_load_wavefront"]))
    work.add_row("barriers by warps", count(values["barriers"]))
    work.add_row("instructions by warps", count(values["instructions"]))
    classes = plain_table(
        ("PTX instructions" if profile.source == EMULATOR else "machine instructions by pipe", "by warps", "%"),
        ("PTX instructions", "machine instructions by pipe"),
    )
    total = values["instructions"] or sum(profile.classes.values())
    for name, number in sorted(profile.classes.items(), key=lambda item: -item[1]):
        classes.add_row(name, count(number), percent(number / total if total else None))
    return [shared, memory, work, classes]


def ladder_tables(profiles: Sequence[Profile]) -> list[Table]:
    """One row for each kernel on the same shape: a table of shared memory, one of global memory and work."""
    from numba_gemm.benchmark.report import plain_table

    job = profiles[0].job
    title = f"The ladder at {job.m}×{job.n}×{job.k}, by {_who(profiles[0])}"
    columns = ("shared ld", "wavefronts", "/ld", "conflicts", "shared st", "wavefronts", "/st", "conflicts")
    shared = plain_table(("kernel", *columns), ("kernel",), title)
    traffic = ("global ld", "sectors", "/ld", "global st", "sectors", "/st")
    work = ("FMA", "/value", "MMA", "/wavefront", "barriers", "instr.")
    memory = plain_table(("kernel", *traffic, *work), ("kernel",))
    for profile in profiles:
        values, derived = profile.values, profile.derived()
        cells = [form_name(profile.job)]
        for verb in ("load", "store"):
            cells += [count(values[f"shared_{verb}_{what}"]) for what in ("requests", "wavefronts")]
            cells += [quotient(derived[f"shared_{verb}_wavefronts_per_request"])]
            cells += [count(values[f"shared_{verb}_conflicts"])]
        shared.add_row(*cells)
        cells = [form_name(profile.job)]
        for verb in ("load", "store"):
            cells += [count(values[f"global_{verb}_{what}"]) for what in ("requests", "sectors")]
            cells += [quotient(derived[f"global_{verb}_sectors_per_request"])]
        mma = values.get("mma_instructions")
        cells += [count(values["ffma_threads"]), quotient(derived["fma_per_shared_load_value"]), count(mma)]
        cells += [quotient(profile.ratio(*_MMA_PER_WAVEFRONT) if mma else derived["fma_per_shared_load_wavefront"])]
        cells += [count(values["barriers"]), count(values["instructions"])]
        memory.add_row(*cells)
    return [shared, memory]


def comparison_table(emulated: Profile, measured: Profile) -> Table:
    """Every count of the emulator beside ncu's."""
    from numba_gemm.benchmark.report import plain_table

    table = plain_table(("count", "emulator", "ncu", "difference"), ("count",))
    for lines in _LINES:
        for title, name in lines:
            ours, theirs = emulated.values.get(name), measured.values.get(name)
            table.add_row(title, count(ours), count(theirs), difference(ours, theirs))
        table.add_section()
    ours_by_name, theirs_by_name = emulated.derived(), measured.derived()
    for name, ours in ours_by_name.items():
        theirs = theirs_by_name[name]
        table.add_row(
            name.replace("fma", "FMA").replace("_", " "), quotient(ours), quotient(theirs), difference(ours, theirs)
        )
    return table


def _print_comparison(console: Console, emulated: Profile, measured: Profile) -> None:
    console.print(f"[bold]{_title(emulated)}[/], by {_who(emulated)}, and {_who(measured)}\n", highlight=False)
    console.print(comparison_table(emulated, measured))
    console.print()


def _write(path: str, profiles: Sequence[Profile]) -> None:
    from numba_gemm.benchmark.record import SCHEMA, environment
    from numba_gemm.profile import NCU

    device = None
    if any(profile.source == NCU for profile in profiles):
        from numba_gemm.device.context import device_properties

        device = device_properties()
    record = {
        "schema": SCHEMA,
        "environment": environment(device),
        "profiles": [profile.to_dict() for profile in profiles],
    }
    Path(path).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
