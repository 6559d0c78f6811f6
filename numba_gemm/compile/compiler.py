"""A kernel of the library, compiled: from memory, from the disk cache, or from its source."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import threading
from pathlib import Path

from numba_gemm.compile import cache
from numba_gemm.compile.assembler import assemble
from numba_gemm.compile.cuda_source import cuda_to_ptx
from numba_gemm.compile.cuda_source import toolchain as cuda_toolchain
from numba_gemm.compile.kernel import CompiledKernel, Resources
from numba_gemm.compile.resources import read_resources
from numba_gemm.errors import CompileError
from numba_gemm.spec import Config, KernelSpec
from numba_gemm.tensorcore.source import load_ptx

__all__ = ["CompiledKernel", "Resources", "arch_name", "compile_kernel", "kernel_ptx"]

#: Modules whose source decides what PTX comes out, whatever the kernel.
_COMPILER_SOURCES = ("numba_gemm.compile.numba_source", "numba_gemm.compile.unroll")
_PACKAGE = Path(__file__).resolve().parents[1]
_TOOLS = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-bindings",
    "cuda-toolkit",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)

_kernels: dict[str, CompiledKernel] = {}
_lock = threading.Lock()


def arch_name(arch: tuple[int, int]) -> str:
    """``(9, 0)`` → ``"sm_90"``."""
    return f"sm_{arch[0]}{arch[1]}"


def assembly_target(ptx: str, arch: tuple[int, int]) -> str:
    """What PTX is assembled for: the architecture, or its own instructions where the text says so (``sm_90a``)."""
    name = arch_name(arch)
    return f"{name}a" if re.search(rf"^\s*\.target\s+{name}a\b", ptx, flags=re.M) else name


def compile_kernel(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> CompiledKernel:
    """One form of a kernel for one compute capability, from memory, the disk cache, or the compiler.

    Raises
    ------
    CompileError : if Numba or the assembler refuses it, or none is installed.
    """
    digest = _digest(spec, config, arch)
    kernel = _kernels.get(digest)
    if kernel is not None:
        return kernel
    with _lock:  # Numba compiles one kernel at a time
        kernel = _kernels.get(digest) or cache.load(digest)
        if kernel is None:
            with cache.claimed(digest):
                kernel = cache.load(digest)  # another process may have been faster
                if kernel is None:
                    kernel = _compile(spec, config, arch, digest)
                    cache.store(kernel)
        _kernels[digest] = kernel
    return kernel


def is_cached(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> bool:
    """Whether a form needn't be compiled any more."""
    digest = _digest(spec, config, arch)
    return digest in _kernels or cache.holds(digest)


def kernel_ptx(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> str:
    """The PTX of one form of a kernel, before assembly."""
    try:
        source = spec.build(**dict(config))
    except ImportError as error:  # Numba, or the part of it that compiles for GPUs
        raise CompileError(f"kernel {spec.name} can't be compiled: {error}; pip install 'numba-gemm[cu13]'") from error
    if spec.source == "ptx":
        return str(source)
    if spec.source == "cuda":
        return cuda_to_ptx(source.path, arch, defines=dict(source.defines), name=spec.entry(config))
    from numba_gemm.compile.numba_source import numba_to_ptx

    return numba_to_ptx(
        source,
        spec.abi,
        arch,
        threads=spec.geometry(config).threads,
        min_blocks_per_sm=spec.blocks_per_sm(config, arch),
        name=spec.entry(config),
    )


def _compile(spec: KernelSpec, config: Config, arch: tuple[int, int], digest: str) -> CompiledKernel:
    ptx = kernel_ptx(spec, config, arch)
    target = assembly_target(ptx, arch)
    cubin, log, assembler = assemble(ptx, target)
    entry = spec.entry(config)
    return CompiledKernel(
        entry=entry,
        arch=target,
        ptx=ptx,
        cubin=cubin,
        digest=digest,
        assembler=assembler,
        log=log,
        resources=read_resources(log, cubin, entry, arch),
    )


@functools.lru_cache(maxsize=1024)
def _digest(spec: KernelSpec, config: Config, arch: tuple[int, int]) -> str:
    """What the compiled kernel depends on, as one hash: sources, options, architecture, tools."""
    parts = [
        spec.name,
        repr(config),
        spec.entry(config),
        arch_name(arch),
        f"{spec.abi} threads={spec.geometry(config).threads} min_blocks={spec.blocks_per_sm(config, arch)}",
        _toolchain(),
        os.environ.get("NUMBA_GEMM_ASSEMBLER", ""),
    ]
    modules = (spec.build.__module__, *spec.helpers)
    parts += [_source(module) for module in (*modules, *(_COMPILER_SOURCES if spec.source == "numba" else ()))]
    if spec.source == "cuda":
        source = spec.build(**dict(config))
        parts += [source.text(), repr(source.defines), cuda_toolchain()]
    else:
        parts += [load_ptx(file) for file in spec.files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _source(module: str) -> str:
    """The source text of a module of this package, or of all in a package of it.

    Found by its path: ``find_spec`` would import the packages that it lies in, and those of intrinsics import Numba.
    """
    _, *names = module.split(".")
    place = _PACKAGE.joinpath(*names)
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return "\0".join(file.read_text(encoding="utf-8") for file in files)


@functools.cache
def _toolchain() -> str:
    """The versions of everything that turns source into a cubin."""
    versions = [f"CUDA_HOME={os.environ.get('CUDA_HOME', '')}"]
    for name in _TOOLS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)
