"""Compiled kernels on disk, under the user's cache directory.

An entry is one file, written whole under another name and then moved into place, so that processes which compile the
same kernel at once can't see half of one another's work; where files can be locked, only the first one compiles it.
Each entry carries a hash of its content and is believed only if that fits: one that is cut short, altered, or of
another format counts as absent and is written anew.

`NUMBA_GEMM_CACHE_DIR` moves the cache; set to the empty string it turns it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from numba_gemm.compile.kernel import CompiledKernel, Resources

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("numba_gemm")
_MAGIC = b"numba_gemm kernel 1\n"


def cache_directory() -> Path | None:
    """The folder that holds the entries, or None if caching is off."""
    chosen = os.environ.get("NUMBA_GEMM_CACHE_DIR")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    import platformdirs

    return Path(platformdirs.user_cache_dir("numba_gemm", appauthor=False)) / "kernels"


def load(digest: str) -> CompiledKernel | None:
    """The entry with this digest if there is a sound one."""
    path = _path(digest)
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    kernel = _decode(data)
    if kernel is None or kernel.digest != digest:
        _log.warning("cached kernel %s is damaged and will be compiled anew", path)
        with contextlib.suppress(OSError):
            path.unlink()  # or the next look, once others have had their turn to write it, would warn again
        return None
    return kernel


def holds(digest: str) -> bool:
    """Whether there is an entry with this digest, sound or not."""
    path = _path(digest)
    return path is not None and path.exists()


@contextlib.contextmanager
def claimed(digest: str) -> Iterator[None]:
    """Make other processes wait for an entry that this one is about to write.

    Where files can't be locked nobody waits, and each process compiles the kernel for itself.
    """
    path = _path(digest)
    lock = None
    try:
        if path is not None and fcntl is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_suffix(".lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a folder that can't be written, or a file system without locks
        pass
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(lock.name)  # those who wait for it hold it open
            lock.close()


def store(kernel: CompiledKernel) -> None:
    """Keep a compiled kernel. A folder that can't be written is logged, not raised."""
    path = _path(kernel.digest)
    if path is None:
        return
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(_encode(kernel))
        os.replace(temporary, path)
    except OSError as error:
        _log.warning(
            "could not keep compiled kernel %s in %s (%s); set NUMBA_GEMM_CACHE_DIR to a folder that can be written, "
            "or to the empty string to keep none",
            kernel.entry,
            path.parent,
            error.strerror,
        )
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def clear() -> int:
    """Delete every entry; returns how many there were."""
    directory = cache_directory()
    count = 0
    if directory is not None and directory.is_dir():
        for path in directory.glob("*.kernel"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                count += 1
    return count


def _path(digest: str) -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / f"{digest}.kernel"


def _encode(kernel: CompiledKernel) -> bytes:
    ptx = kernel.ptx.encode()
    header = json.dumps(
        {
            "entry": kernel.entry,
            "arch": kernel.arch,
            "digest": kernel.digest,
            "assembler": kernel.assembler,
            "log": kernel.log,
            "resources": asdict(kernel.resources),
            "ptx_bytes": len(ptx),
            "cubin_bytes": len(kernel.cubin),
        }
    ).encode()
    body = len(header).to_bytes(8, "little") + header + ptx + kernel.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> CompiledKernel | None:
    start = len(_MAGIC) + 32
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    header_end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:header_end])
    ptx_end = header_end + header["ptx_bytes"]
    return CompiledKernel(
        entry=header["entry"],
        arch=header["arch"],
        ptx=body[header_end:ptx_end].decode(),
        cubin=body[ptx_end:],
        digest=header["digest"],
        assembler=header["assembler"],
        log=header["log"],
        resources=Resources(**header["resources"]),
    )
