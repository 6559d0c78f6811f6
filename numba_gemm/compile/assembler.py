"""PTX → cubin, by the first assembler that works: nvJitLink in process, `ptxas`, the driver's JIT.

`NUMBA_GEMM_ASSEMBLER=nvjitlink|ptxas|driver` takes one of them by name.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from numba_gemm.errors import CompileError, NumbaGemmError

_log = logging.getLogger("numba_gemm")


class AssemblerMissingError(NumbaGemmError):
    """This assembler isn't installed; the next one is tried."""


def assemble(ptx: str, arch: str) -> tuple[bytes, str, str]:
    """Assemble PTX for one architecture.

    Parameters
    ----------
    ptx : PTX text.
    arch : for instance ``"sm_90"``.

    Returns
    -------
    The cubin, the assembler's log (with register and spill counts), and the assembler's name.

    Raises
    ------
    CompileError : with the assembler's message and the PTX lines it names, or, when no assembler is installed,
        what to install.
    """
    wanted = os.environ.get("NUMBA_GEMM_ASSEMBLER")
    if wanted is not None and wanted not in ASSEMBLERS:
        raise CompileError(
            f"NUMBA_GEMM_ASSEMBLER={wanted!r} is not one of {', '.join(ASSEMBLERS)}; unset it to try them in turn"
        )
    missing = []
    for name, assembler in ASSEMBLERS.items():
        if wanted not in (None, name):
            continue
        try:
            cubin, log = assembler(ptx, arch)
        except AssemblerMissingError as error:
            missing.append(f"{name}: {error}")
            continue
        # The one line that differs from run to run would make two equal kernels differ.
        return cubin, re.sub(r"^.*Compile time = .*\n?", "", log, flags=re.M), name
    raise CompileError(
        "no PTX assembler was found (" + "; ".join(missing) + "). Install one with: pip install 'numba-gemm[cu13]'"
    )


def _nvjitlink(ptx: str, arch: str) -> tuple[bytes, str]:
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as error:  # cuda-bindings raises its own types when the library is missing
        raise AssemblerMissingError(f"libnvJitLink could not be loaded ({type(error).__name__})") from error

    def read(size: Callable[[int], int], fetch: Callable[[int, bytearray], None]) -> bytes:
        buffer = bytearray(size(link))
        if buffer:
            fetch(link, buffer)
        return bytes(buffer)

    # What nvJitLink has linked before it answers from a cache of its own, with an empty log.
    options = [f"-arch={arch}", "-verbose", "-no-cache"]
    link = nvjitlink.create(len(options), options)
    try:
        try:
            data = ptx.encode()
            nvjitlink.add_data(link, nvjitlink.InputType.PTX, data, len(data), "kernel.ptx")
            nvjitlink.complete(link)
        except nvjitlink.nvJitLinkError as error:
            log = read(nvjitlink.get_error_log_size, nvjitlink.get_error_log)
            raise _failure("nvJitLink", log.rstrip(b"\0").decode(errors="replace"), ptx, arch) from error
        cubin = read(nvjitlink.get_linked_cubin_size, nvjitlink.get_linked_cubin)
        log = read(nvjitlink.get_info_log_size, nvjitlink.get_info_log)
        return cubin, log.rstrip(b"\0").decode(errors="replace")
    finally:
        nvjitlink.destroy(link)


def _ptxas(ptx: str, arch: str) -> tuple[bytes, str]:
    program = find_tool("ptxas")
    if program is None:
        raise AssemblerMissingError("ptxas is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        done = subprocess.run(
            [program, "-v", f"-arch={arch}", "-o", target, source],
            capture_output=True,
            text=True,
            check=False,
        )
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise _failure("ptxas", log, ptx, arch)
        return target.read_bytes(), log


def _driver_jit(ptx: str, arch: str) -> tuple[bytes, str]:
    from numba_gemm.device.driver import is_available

    if not is_available():
        raise AssemblerMissingError("there is no GPU driver")
    from numba_gemm.device.jit import driver_link

    cubin, log, error = driver_link(ptx, arch)
    if cubin is None:
        raise _failure("the driver's JIT", error, ptx, arch)
    return cubin, log


#: The assemblers in the order in which they are tried.
ASSEMBLERS: dict[str, Callable[[str, str], tuple[bytes, str]]] = {
    "nvjitlink": _nvjitlink,
    "ptxas": _ptxas,
    "driver": _driver_jit,
}


def find_tool(name: str) -> str | None:
    """The path of a CUDA program: on PATH, else in the CUDA wheels of this environment, else None."""
    on_path = shutil.which(name)
    if on_path is not None:
        return on_path
    try:
        import nvidia
    except ImportError:
        return None
    for root in nvidia.__path__:
        for found in sorted(Path(root).glob(f"*/bin/{name}")):
            if os.access(found, os.X_OK):
                return str(found)
    return None


def _failure(tool: str, log: str, ptx: str, arch: str) -> CompileError:
    """A CompileError that shows the PTX round the lines that the log names, and where the whole text was written."""
    handle, path = tempfile.mkstemp(prefix="numba_gemm-", suffix=".ptx")
    with os.fdopen(handle, "w") as file:
        file.write(ptx)
    excerpt = ptx_excerpt(ptx, [int(line) for line in re.findall(r"line (\d+)", log)])
    return CompileError(
        f"{tool} refused the PTX for {arch}:\n{log.strip()}\n{excerpt}The whole PTX is in {path}",
        log=log,
        ptx_path=path,
    )


def ptx_excerpt(ptx: str, numbers: list[int], around: int = 2) -> str:
    """Up to three of the numbered lines, each with its neighbours, the line itself marked."""
    lines = ptx.splitlines()
    parts = []
    for number in sorted(set(numbers))[:3]:
        if not 1 <= number <= len(lines):
            continue
        for at in range(max(1, number - around), min(len(lines), number + around) + 1):
            parts.append(f"{'>' if at == number else ' '} {at:5d} | {lines[at - 1]}")
        parts.append("")
    return "\n".join(parts) + ("\n" if parts else "")
