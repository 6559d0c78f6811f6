"""``numba-gemm inspect``: what a compiled kernel takes and what its machine code consists of. Needs no GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from numba_gemm.benchmark.forms import FormReport
    from numba_gemm.spec import Config, KernelSpec

_DESCRIPTION = """\
Compile a kernel for an architecture and show registers, spills, stack, shared memory, occupancy and what limits it,
and its machine instructions by class: of the whole kernel, and of its main loop. Of a kernel with a form for each
problem every listed form follows in a table, unless --config names one. No GPU is needed.
"""

_EXAMPLES = """\
examples:
  numba-gemm inspect v7
  numba-gemm inspect v6 --arch sm_80 --config vector_width=1
  numba-gemm inspect v3 --sass | less
  numba-gemm inspect t4 --config block_m=64 block_n=64 dtype=bfloat16
  numba-gemm inspect all --arch sm_120
"""

ALL = "all"


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    from numba_gemm.catalog import LADDER
    from numba_gemm.cli.names import BESIDE_THE_LADDER

    parser = subparsers.add_parser(
        "inspect",
        help="registers, occupancy and instruction mix of a kernel",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "kernel",
        metavar="KERNEL",
        help=f"{', '.join(LADDER)}; {BESIDE_THE_LADDER}; or all, which gives one row for each compiled form of the "
        "ladder",
    )
    parser.add_argument(
        "--arch", metavar="SM", help="architecture, for instance sm_90 (default: this machine's GPU's, else sm_90)"
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="compiled form, for instance vector_width=1 (default: the fastest)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--ptx", action="store_true", help="print the PTX instead")
    output.add_argument("--sass", action="store_true", help="print the machine code instead")
    output.add_argument("--json", action="store_true", help="print the report as JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.benchmark.forms import report_form, report_forms, typed_forms
    from numba_gemm.catalog import CPU_BASELINE, LADDER, get_spec
    from numba_gemm.cli.console import make_console, print_json, progress_bar
    from numba_gemm.cli.names import default_arch, parse_arch, parse_config
    from numba_gemm.errors import CompileError

    arch = parse_arch(args.arch) if args.arch else default_arch()
    if args.kernel == ALL:
        if args.ptx or args.sass or args.config:
            raise ValueError("--ptx, --sass and --config take one kernel, not all")
        names = [name for name, spec in LADDER.items() if spec.runs_on(arch)]
        forms = [(name, config, arch) for name in names for config in typed_forms(name, arch)]
        with progress_bar(len(forms), "compile") as bar:
            reports = report_forms(forms, on_done=lambda _: bar.advance())
        if args.json:
            print_json([report.to_dict() for report in reports])
        else:
            _print_all(make_console(), reports)
        return 1 if any(report.error for report in reports) else 0
    if args.kernel == CPU_BASELINE:
        raise ValueError("kernel cpu runs on the CPU and has no GPU code; inspect one of " + ", ".join(LADDER))
    spec = get_spec(args.kernel)
    if not spec.runs_on(arch):
        later = "" if spec.max_arch == spec.min_arch else " or later"
        raise ValueError(f"kernel {spec.name} needs sm_{spec.min_arch[0]}{spec.min_arch[1]}{later}")
    if spec.select is not None and not args.config:
        config = typed_forms(spec.name, arch)[0]  # the largest that the architecture has room for
    else:
        config = parse_config(spec, args.config)
    if args.ptx or args.sass:
        from numba_gemm.compile import compile_kernel
        from numba_gemm.compile.sass import disassemble

        kernel = compile_kernel(spec, config, arch)
        print(kernel.ptx if args.ptx else disassemble(kernel.cubin).text)
        return 0
    report = report_form(spec.name, config, arch)
    if report.error:
        raise CompileError(report.error)
    if args.json:
        print_json(report.to_dict())
        return 0
    console = make_console()
    _print_one(console, spec, config, report)
    if spec.select is not None and not args.config:
        others = [(spec.name, other, arch) for other in typed_forms(spec.name, arch)]
        with progress_bar(len(others), "compile") as bar:
            some = " ".join(f"{key}=…" for key, _ in config[:4])
            _print_forms(console, report_forms(others, on_done=lambda _: bar.advance()), some)
    return 0


def _print_all(console: Console, reports: list[FormReport]) -> None:
    from numba_gemm.benchmark.report import forms_table

    arch = reports[0].arch
    console.print(forms_table(reports, f"Every kernel on {arch}; instructions are those of the main loop"))
    for note in dict.fromkeys(report.error or report.note for report in reports if report.error or report.note):
        console.print(note, markup=False)


def _print_forms(console: Console, reports: list[FormReport], some: str) -> None:
    """Every form of one kernel, and how each is asked for: by ``some`` of their parameters."""
    from numba_gemm.benchmark.report import forms_table

    console.print()
    console.print(forms_table(reports, f"Its forms for packed matrices on {reports[0].arch}"))
    console.print(f"\nOne of them alone: --config {some} …", markup=False)


def _print_one(console: Console, spec: KernelSpec, config: Config, report: FormReport) -> None:
    from numba_gemm.benchmark.report import kilobytes, plain_table
    from numba_gemm.cli.names import form_options

    form = dict(config)
    shown = f" ({report.config})" if report.config else ""
    console.print(f"[bold]{spec.name} {spec.title}[/]{shown} on {report.arch}: {spec.idea}\n", highlight=False)
    assert report.occupancy is not None
    assert report.blocks_per_sm is not None
    warps = report.blocks_per_sm * -(-report.threads // 32)
    facts = (
        ("block tile", "×".join(map(str, spec.geometry(config).block_tile))),
        ("warp tile", f"{form['warp_m']}×{form['warp_n']}")
        if "warp_m" in form
        else ("thread tile", "×".join(map(str, spec.thread_tile))),
        ("threads a block", str(report.threads)),
        ("registers a thread", str(report.registers)),
        ("spills", f"{report.spill_bytes} bytes"),
        ("stack", f"{report.stack_bytes} bytes"),
        ("shared memory a block", kilobytes(report.shared_bytes or 0) + ("" if report.shared_bytes else " bytes")),
        (
            "occupancy",
            f"{report.occupancy:.0%}: {report.blocks_per_sm} blocks, {warps} warps an SM; limited by "
            f"{report.limited_by}",
        ),
        ("assembled by", report.assembler),
    )
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        console.print(f"  {name:<{width}}  {value}", markup=False)
    console.print()
    if report.note:
        console.print(f"Instructions weren't counted: {report.note}", markup=False)
        return
    table = plain_table(("instruction", "main loop", "whole kernel"), ("instruction",))
    for name in sorted(report.whole, key=lambda name: (name == "other", -report.whole[name])):
        table.add_row(name, str(report.loop.get(name, 0) or "–"), str(report.whole[name]))
    table.add_section()
    table.add_row("all", str(sum(report.loop.values()) or "–"), str(sum(report.whole.values())))
    console.print(table)
    console.print()
    for line in loop_facts(report):
        console.print(line, markup=False)
    others = [other for other in spec.configs if other != config]
    if others and spec.select is None:
        console.print("Other forms of this kernel:")
        for other in others:
            console.print(f"  --config {form_options(spec, other)}", markup=False)


def loop_facts(report: FormReport) -> list[str]:
    """What the main loop's mix says, in words."""
    from numba_gemm.benchmark.forms import fmas, shared_loads, tensor_mmas

    loop = report.loop
    total, mma, matrix_loads = sum(loop.values()), tensor_mmas(loop), loop.get("LDSM", 0)
    work, what = (mma, "HMMA") if mma else (fmas(loop), "FMAs")
    if not total or not work:
        return ["The kernel has no loop that multiplies."]
    lines = [f"Main loop: {work / total:.0%} of its {total} instructions multiply."]
    wide, loads = loop.get("LDS.128", 0), shared_loads(loop)
    if mma and matrix_loads:
        lines.append(f"HMMA per LDSM: {mma / matrix_loads:.3g} ({matrix_loads} LDSM for {mma} HMMA).")
    elif wide:
        lines.append(f"FMAs per LDS.128: {work / wide:.3g} ({wide} LDS.128 for {work} FFMA).")
    if not mma and loads and loads != wide:
        lines.append(f"FMAs per shared load of any width: {work / loads:.3g}.")
    if loop.get("LDGSTS"):
        lines.append(f"HMMA per asynchronous 16-byte copy (LDGSTS): {work / loop['LDGSTS']:.3g}.")
    global_loads = sum(count for name, count in loop.items() if name.startswith(("LDG", "LD.")) and name != "LDGSTS")
    if global_loads:
        lines.append(f"{what} per global load: {work / global_loads:.3g}.")
    if report.spill_bytes or report.stack_bytes or loop.get("LDL") or loop.get("STL"):
        lines.append("Something lives in local memory: look for spills, or an array with a variable index.")
    return lines
