"""CUDA C++ → PTX, by the first compiler that works: ``nvcc``, then NVRTC in process.

The sources are in ``numba_gemm/cuda_cpp``. Compiling needs no GPU. ``NUMBA_GEMM_CUDA_COMPILER=nvcc|nvrtc`` takes one
compiler by name.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numba_gemm.compile.assembler import find_tool
from numba_gemm.errors import CompileError, NumbaGemmError

_log = logging.getLogger("numba_gemm")

#: The folder of the CUDA C++ sources.
CUDA_FOLDER = Path(__file__).resolve().parents[1] / "cuda_cpp"

#: What brings nvcc, and with it every header.
INSTALL_NVCC = "pip install 'cuda-toolkit[nvcc]==13.0.*', or put the nvcc of a CUDA toolkit on PATH"

Arch = tuple[int, int]


@dataclass(frozen=True)
class CudaSource:
    """One form of a CUDA C++ kernel: a file and the macros that it is compiled with."""

    path: Path
    defines: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """The file with what it includes from its own folder, for a cache key."""
        return source_text(self.path)


def source_text(path: Path) -> str:
    """A source with the texts of the headers that it includes from its own folder, each once, in order of inclusion."""
    found: dict[Path, str] = {}

    def read(file: Path) -> None:
        if file not in found:
            found[file] = file.read_text(encoding="utf-8")
            for name in re.findall(r'^#include "(.+)"', found[file], re.M):
                read(file.parent / name)

    read(path)
    return "\n".join(found.values())


class CompilerMissingError(NumbaGemmError):
    """This compiler isn't installed, or can't run; the next one is tried."""


class _Compiler(NamedTuple):
    """``version`` and ``archs`` raise :class:`CompilerMissingError`; ``compile`` takes path, arch and options."""

    version: Callable[[], str]
    archs: Callable[[], tuple[Arch, ...]]
    compile: Callable[[Path, Arch, list[str]], str]


def cuda_to_ptx(source_path: Path, arch: Arch, *, defines: Mapping[str, str] | None = None, name: str) -> str:
    """Compile a CUDA C++ kernel to PTX.

    Parameters
    ----------
    source_path : a ``.cu`` file with one kernel, called by the macro ``KERNEL_NAME``.
    arch : compute capability ``(major, minor)``. For a GPU newer than the compiler, the PTX is of the newest that the
        compiler knows, and runs there.
    defines : macros and their values.
    name : the entry's name in the PTX.

    Returns
    -------
    PTX text with one entry called ``name``.

    Raises
    ------
    CompileError : with the compiler's message; with what to install, if there is no compiler or its headers are
        missing; or naming CUDA 12, if the architecture is older than all that the compiler can target.
    """
    compiler, target = _target(arch)
    options = [f"-arch=compute_{target[0]}{target[1]}", "-std=c++17", f"-DKERNEL_NAME={name}"]
    options += [f"-D{macro}={value}" for macro, value in (defines or {}).items()]
    try:
        return COMPILERS[compiler].compile(source_path, target, options)
    except CompilerMissingError as error:
        reason = str(error)
    # nvcc is there but can't run, for instance because it finds no host compiler.
    if compiler == "nvcc" and os.environ.get("NUMBA_GEMM_CUDA_COMPILER") is None:
        _log.info("nvcc can't be used, so NVRTC compiles %s: %s", source_path.name, reason)
        try:
            return COMPILERS["nvrtc"].compile(source_path, target, options)
        except CompilerMissingError as error:
            reason += f"; nvrtc: {error}"
    raise CompileError(f"kernel {name!r} could not be compiled from CUDA C++: {reason}. What has all: {INSTALL_NVCC}")


def supported_archs() -> tuple[Arch, ...]:
    """The compute capabilities that the installed CUDA C++ compiler can target, oldest first.

    Raises
    ------
    CompileError : if there is none, with what to install.
    """
    return COMPILERS[_find_compiler()].archs()


def toolchain() -> str:
    """Name and version of the CUDA C++ compiler, for a cache key and for reports; ``"none"`` if there is none."""
    try:
        return COMPILERS[_find_compiler()].version()
    except CompileError:
        return "none"


def _find_compiler() -> str:
    wanted = os.environ.get("NUMBA_GEMM_CUDA_COMPILER")
    if wanted is not None and wanted not in COMPILERS:
        raise CompileError(
            f"NUMBA_GEMM_CUDA_COMPILER={wanted!r} is not one of {', '.join(COMPILERS)}; unset it to try them in turn"
        )
    missing = []
    for name, compiler in COMPILERS.items():
        if wanted not in (None, name):
            continue
        try:
            compiler.version()
        except CompilerMissingError as error:
            missing.append(f"{name}: {error}")
        else:
            return name
    raise CompileError(f"no CUDA C++ compiler was found ({'; '.join(missing)}). Install one with: {INSTALL_NVCC}")


def _target(arch: Arch) -> tuple[str, Arch]:
    """The compiler, and the newest architecture that it knows up to ``arch``."""
    compiler = _find_compiler()
    archs = COMPILERS[compiler].archs()
    older = [known for known in archs if known <= arch]
    if not older:
        oldest = min(archs)
        raise CompileError(
            f"{COMPILERS[compiler].version()} can't compile for sm_{arch[0]}{arch[1]}: the oldest GPU that it knows is "
            f"sm_{oldest[0]}{oldest[1]}. CUDA 12.x is the last that does; install it with: "
            "pip install 'cuda-toolkit[nvcc]==12.9.*', or put its nvcc on PATH"
        )
    return compiler, max(older)


# --- nvcc


def _nvcc() -> str:
    program = find_tool("nvcc")
    if program is None:
        raise CompilerMissingError("nvcc is not on PATH")
    return program


@functools.cache
def _ask(program: str, option: str) -> str:
    try:
        done = subprocess.run([program, option], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilerMissingError(f"{program} doesn't run ({error})") from error
    if done.returncode != 0:
        raise CompilerMissingError(f"{program} {option} failed: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def _nvcc_version() -> str:
    found = re.search(r"release ([\d.]+), V([\d.]+)", _ask(_nvcc(), "--version"))
    return f"nvcc {found.group(2)}" if found else "nvcc of unknown version"


def _nvcc_archs() -> tuple[Arch, ...]:
    numbers = re.findall(r"compute_(\d+)\b", _ask(_nvcc(), "--list-gpu-arch"))
    return tuple(sorted(divmod(int(number), 10) for number in numbers))


def _nvcc_compile(path: Path, arch: Arch, options: list[str]) -> str:
    program = _nvcc()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "kernel.ptx")
        command = [program, "-ptx", *options, "-o", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return target.read_text(encoding="utf-8")
    log = (done.stdout + done.stderr).strip()
    if re.search(r"\.cuh?\(\d+\): .*error", log):
        raise CompileError(f"nvcc refused {path} for sm_{arch[0]}{arch[1]}:\n{log}", log=log)
    raise CompilerMissingError(f"nvcc failed: {log}")


# --- NVRTC


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings raises its own types when the library is missing
        raise CompilerMissingError(f"libnvrtc could not be loaded ({type(error).__name__})") from error
    return nvrtc


def _nvrtc_version() -> str:
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"NVRTC {major}.{minor}"


def _nvrtc_archs() -> tuple[Arch, ...]:
    nvrtc = _nvrtc()
    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return tuple(sorted(divmod(int(number), 10) for number in numbers))


def _nvrtc_compile(path: Path, arch: Arch, options: list[str]) -> str:
    nvrtc = _nvrtc()
    folders = [path.parent, *header_folders()]
    flags = [option.encode() for option in (*options, *(f"-I{folder}" for folder in folders))]
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            buffer = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, buffer)
            log = buffer.rstrip(b"\0").decode(errors="replace").strip()
            header = re.search(r'cannot open source file "(.+?)"', log)
            if header:
                raise CompilerMissingError(
                    f"NVRTC doesn't find {header.group(1)}, which comes with: "
                    "pip install 'cuda-toolkit[cudart,crt]==13.0.*'"
                )
            raise CompileError(f"NVRTC refused {path} for sm_{arch[0]}{arch[1]}:\n{log}", log=log)
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(size)
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def header_folders() -> list[Path]:
    """Where the toolkit's headers are, for NVRTC: the CUDA wheels if they have ``mma.h`` whole, else a toolkit's."""
    wheels: list[Path] = []
    try:
        import nvidia
    except ImportError:
        pass
    else:
        wheels = [folder for root in nvidia.__path__ for folder in sorted(Path(root).glob("*/include"))]

    def holds(file: str) -> bool:
        return any((folder / file).is_file() for folder in wheels)

    if holds("mma.h") and holds("crt/mma.h"):
        return wheels
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = find_tool("nvcc")
    if nvcc is not None:
        roots.insert(0, str(Path(nvcc).resolve().parents[1]))
    for root in roots:
        if root and (Path(root) / "include" / "crt" / "mma.h").is_file():
            return [Path(root) / "include"]
    return wheels


#: The compilers in the order in which they are tried.
COMPILERS: dict[str, _Compiler] = {
    "nvcc": _Compiler(_nvcc_version, _nvcc_archs, _nvcc_compile),
    "nvrtc": _Compiler(_nvrtc_version, _nvrtc_archs, _nvrtc_compile),
}
