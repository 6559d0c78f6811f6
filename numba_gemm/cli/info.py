"""``numba-gemm info``: what was found on this machine, and how to get what wasn't."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
from typing import Any

_DESCRIPTION = """\
Show the driver and its GPUs, the versions of everything that compiles kernels, the assemblers in the order in which
they are tried, the disassembler, the cache of compiled kernels, and the packages that bring cuBLAS to compare with. For
each thing missing, the command that brings it.
"""

_EXAMPLES = """\
examples:
  numba-gemm info
  numba-gemm info --json
  numba-gemm info --clear-cache
"""

_PACKAGES = (
    *("numpy", "numba", "numba-cuda", "llvmlite", "cuda-python", "cuda-bindings", "cuda-core", "cuda-pathfinder"),
    *("cuda-toolkit", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc"),
    *("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"),
)

_TOOLKIT = "pip install 'numba-gemm[cu13]'"
_NEEDED = {
    "numba": "pip install numba-gemm",
    "numba-cuda": "pip install numba-gemm",
    "cuda-bindings": "pip install cuda-python",
    "nvidia-nvvm": _TOOLKIT,
}


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="what this machine has, and how to get what it lacks",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--clear-cache", action="store_true", help="delete the compiled kernels, and only that")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from numba_gemm.cli.console import make_console, print_json
    from numba_gemm.compile import cache

    if args.clear_cache:
        count = cache.clear()
        place = cache.cache_directory()
        print(f"Deleted {count} compiled kernels from {place}." if place else "The cache is turned off.")
        return 0
    facts = collect()
    if args.json:
        print_json(facts)
    else:
        _print(make_console(), facts)
    return 0


def collect() -> dict[str, Any]:
    """Everything that is shown, as plain data; ``missing`` lists (what, what for, command) of what isn't there."""
    from numba_gemm import __version__
    from numba_gemm.benchmark.peers import REMEDY, importable_peers
    from numba_gemm.benchmark.record import cpu_name, package_versions
    from numba_gemm.compile.assembler import find_tool
    from numba_gemm.processes import usable_cores

    missing: list[dict[str, str]] = []

    def lacks(what: str, why: str, command: str) -> None:
        missing.append({"what": what, "for": why, "command": command})

    driver, gpus, reason = _gpus()
    if reason:
        lacks(
            f"a GPU ({reason})",
            "running the GPU kernels",
            "on a machine with an NVIDIA GPU of compute capability 7.5 or later, install its driver",
        )
    versions = package_versions(_PACKAGES)
    for package, command in _NEEDED.items():
        if package not in versions and not (package == "nvidia-nvvm" and find_tool("nvcc")):
            lacks(package, "compiling kernels", command)
    assemblers = _assemblers(bool(gpus))
    if not any(state == "found" for state in assemblers.values()):
        lacks("a PTX assembler", "compiling kernels", _TOOLKIT)
    disassembler = find_tool("nvdisasm") or find_tool("cuobjdump")
    if disassembler is None:
        lacks(
            "a disassembler",
            "counting machine instructions",
            "pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump",
        )
    peers = importable_peers()
    if not any(peers.values()):
        lacks("cuBLAS", "comparing on a GPU in bench", REMEDY.partition(" brings")[0])
    return {
        "version": __version__,
        "python": platform.python_version(),
        "cpu": {"name": cpu_name(), "cores": usable_cores()},
        "driver": driver,
        "gpus": gpus,
        "packages": versions,
        "assemblers": assemblers,
        "disassembler": disassembler,
        "cache": _cache(),
        "peers": peers,
        "missing": missing,
    }


def _gpus() -> tuple[dict[str, str] | None, list[dict[str, Any]], str]:
    """The driver, its GPUs, and, if there are none, why."""
    from numba_gemm.benchmark.record import driver_release
    from numba_gemm.device.context import device_count, device_properties
    from numba_gemm.errors import NumbaGemmError

    try:
        devices = [device_properties(ordinal) for ordinal in range(device_count())]
    except NumbaGemmError as error:
        return None, [], re.split(r" could not be loaded| \(|\. ", str(error))[0]
    gpus = [
        {
            "name": device.name,
            "compute_capability": ".".join(map(str, device.compute_capability)),
            "sms": device.sm_count,
            "clock_mhz": device.clock_khz // 1000,
            "memory_clock_mhz": device.memory_clock_khz // 1000,
            "l2_mb": round(device.l2_bytes / 2**20, 1),
            "memory_gb": round(device.total_memory / 2**30, 1),
            "peak_fp32_tflops": round(device.peak_fp32_tflops, 1),
        }
        for device in devices
    ]
    cuda = ".".join(map(str, devices[0].driver_version)) if devices else ""
    return {"release": driver_release(), "cuda": cuda}, gpus, ""


def _assemblers(gpu: bool) -> dict[str, str]:
    """Assembler → ``"found"``, or why not, in the order in which they are tried."""
    from numba_gemm.compile.assembler import ASSEMBLERS, find_tool

    states = {}
    for name in ASSEMBLERS:
        if name == "nvjitlink":
            states[name] = _nvjitlink_state()
        elif name == "ptxas":
            states[name] = "found" if find_tool("ptxas") else "not on PATH"
        else:
            states[name] = "found" if gpu else "needs a GPU's driver"
    return states


def _nvjitlink_state() -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvJitLink")
    except Exception as error:
        return f"not found ({type(error).__name__})"
    return "found" if importlib.util.find_spec("cuda.core") else "cuda-core is missing"


def _cache() -> dict[str, Any]:
    from numba_gemm.compile.cache import cache_directory

    directory = cache_directory()
    if directory is None:
        return {"directory": None, "entries": 0, "bytes": 0}
    sizes = [path.stat().st_size for path in directory.glob("*.kernel")] if directory.is_dir() else []
    return {"directory": str(directory), "entries": len(sizes), "bytes": sum(sizes)}


def _print(console: Any, facts: dict[str, Any]) -> None:
    def section(title: str, pairs: list[tuple[str, str]]) -> None:
        console.print(f"[bold]{title}[/]")
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            console.print(f"  {name:<{width}}  {value}", markup=False)

    driver, cpu, cache = facts["driver"], facts["cpu"], facts["cache"]
    release = f"{driver['release']}, CUDA {driver['cuda']}" if driver else "none"
    section(
        "machine",
        [
            ("numba-gemm", facts["version"]),
            ("python", facts["python"]),
            ("cpu", f"{cpu['name']}, {cpu['cores']} cores"),
            ("driver", release),
            *(
                (
                    f"gpu {number}",
                    f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['sms']} SMs at up to "
                    f"{gpu['clock_mhz']} MHz, {gpu['memory_gb']} GB at {gpu['memory_clock_mhz']} MHz, "
                    f"{gpu['l2_mb']} MB L2, {gpu['peak_fp32_tflops']} TFLOP/s FP32",
                )
                for number, gpu in enumerate(facts["gpus"])
            ),
        ],
    )
    section("packages", list(facts["packages"].items()))
    section(
        "tools",
        [
            *((f"assembler {name}", state) for name, state in facts["assemblers"].items()),
            ("disassembler", facts["disassembler"] or "not found"),
            (
                "kernel cache",
                f"{cache['directory']}, {cache['entries']} kernels, {cache['bytes'] / 1024:.0f} KB"
                if cache["directory"]
                else "off (NUMBA_GEMM_CACHE_DIR is empty)",
            ),
            *((f"peer {name}", "found" if there else "not installed") for name, there in facts["peers"].items()),
        ],
    )
    if not facts["missing"]:
        console.print("Nothing is missing.")
        return
    console.print("[bold]missing[/]")
    for item in facts["missing"]:
        console.print(f"  {item['what']}, for {item['for']}: {item['command']}", markup=False)
