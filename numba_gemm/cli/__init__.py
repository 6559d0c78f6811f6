"""The command line, ``numba-gemm``: one module a subcommand.

A subcommand's module has ``add_parser(subparsers, common)``, which describes its options, and a function that runs it
and returns the exit status. Nothing but argparse, NumPy and the kernels' specs is imported until one runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from numba_gemm._version import __version__
from numba_gemm.errors import NoDeviceError, NumbaGemmError

#: The subcommands, in the order of the help; each is a module here.
COMMANDS = ("bench", "check", "inspect", "profile", "tune", "fragments", "info")

_EXAMPLES = """\
examples:
  numba-gemm bench                         the ladder, validated and timed; without a GPU: CPU baseline, resources
                                           of every GPU kernel, and its counters on the emulator
  numba-gemm bench v6 v7 --sizes 2048      two kernels at one size
  numba-gemm bench --suite odd --json odd.json
  numba-gemm check --quick                 is every kernel right on this machine?
  numba-gemm check --device emulator       the same of the GPU kernels' PTX, run on the CPU
  numba-gemm profile v6                    wavefronts, bank conflicts, sectors: by ncu, or by the emulator
  numba-gemm inspect v7 --arch sm_80       registers, occupancy and instruction mix, without a GPU
  numba-gemm tune --suite small            measure the fastest kernels on this GPU and remember them
  numba-gemm fragments m16n8k16 --lane 5   who holds what in a tensor-core instruction
  numba-gemm info                          what was found, and how to get what wasn't

exit status: 0 if all went well, 1 if a kernel failed, 2 if the call was wrong, 130 after Ctrl-C
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    parser = argparse.ArgumentParser(
        prog="numba-gemm",
        description="Matrix multiplication kernels for NVIDIA GPUs: measure, check and take apart.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"numba-gemm {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"numba_gemm.cli.{name}").add_parser(subparsers, common)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None takes ``sys.argv``) and return the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without "×" shows "?" and no traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nnumba-gemm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, for instance `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (NumbaGemmError, ValueError, OSError, ImportError) as error:
        if getattr(args, "debug", False):
            raise
        text = _without_gpu(error, args) if isinstance(error, NoDeviceError) else str(error)
        first, _, rest = text.strip().partition("\n")
        more = " (--debug shows the whole message)" if rest else ""
        print(f"numba-gemm: {first or type(error).__name__}{more}", file=sys.stderr)
        return 2


def _without_gpu(error: NoDeviceError, args: argparse.Namespace) -> str:
    """The error with the remedy of a command line: the message's own speaks of Python's arguments."""
    instead = "leave --device out to do what can be done without one, or take" if hasattr(args, "device") else "take"
    return (
        f"{error.reason}; {instead} a machine with an NVIDIA GPU of compute capability 7.5 or later and its driver "
        "(numba-gemm info shows what was found)"
    )
