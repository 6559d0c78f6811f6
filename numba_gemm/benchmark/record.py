"""A recorded run: one JSON object with the environment and one row for each thing measured.

Tables and plots are made from such objects and nothing else.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numba_gemm._version import __version__
from numba_gemm.processes import usable_cores

SCHEMA = 1

#: Fields of a row that only rows of the emulator, or of tensor-core kernels, have.
_OPTIONAL = ("device", "counters", "ceiling_tflops")

#: The kernel of a row that times nothing but tensor-core instructions on registers, on numbers near 1; its config names
#: the instruction. The same on normal numbers, at which a GPU at its power limit is slower.
CEILING = "ceiling"
CEILING_NORMAL = "ceiling_normal"

#: The kernel of a row that times nothing but reading the matrix of its product with a vector; it has ``gbs`` alone.
READING = "reading"

#: The suite of rows that compare the peer in 16 bits with the peer in FP32.
HALF_AGAINST_SINGLE = "half_against_single"

_PACKAGES = (
    "numba",
    "numba-cuda",
    "numpy",
    "cuda-bindings",
    "cuda-core",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "llvmlite",
)


@dataclass(frozen=True)
class Row:
    """One kernel on one shape.

    Attributes
    ----------
    suite : what the shape belongs to, ``"ladder"`` or the name of a suite.
    kernel, config : the kernel's name and its compiled form in words. Kernel ``"auto"`` is the library's own choice,
        and ``config`` then begins with the kernel that was chosen.
    dtype, layout, m, n, k, batch : the problem.
    us, us_min, us_max : median, least and greatest time in µs; None if it failed.
    tflops, gbs : arithmetic, and bytes that have to cross memory, by the median time.
    roof_tflops : the lesser of the arithmetic peak and intensity × measured memory bandwidth. In 16 bits the peak is
        the ceiling.
    ceiling_tflops : of tensor-core instructions on registers, on numbers near 1, interleaved with this row's kernel.
    peer, peer_us, ratio : what it was interleaved with, its median time, and the median of peer time / own time.
    error_over_bound : largest error as a share of what the arithmetic allows; above 1 is wrong.
    validated : ``"all"`` elements, or which ones.
    registers : of a thread.
    threads : CPU threads, for work on the CPU.
    device : where it ran if that isn't the environment's GPU or CPU: ``"emulator sm_90"``. Nothing is timed there.
    counters : what the emulator counted, by the names of :class:`~numba_gemm.emulator.counters.Counters`.
    error : what went wrong, empty if nothing did.
    """

    suite: str
    kernel: str
    config: str
    dtype: str
    layout: str
    m: int
    n: int
    k: int
    batch: int = 1
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    roof_tflops: float | None = None
    ceiling_tflops: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    ratio: float | None = None
    error_over_bound: float | None = None
    validated: str = ""
    registers: int | None = None
    threads: int | None = None
    device: str | None = None
    counters: dict[str, int] | None = None
    error: str = ""


@dataclass
class Record:
    """A run: its environment, its rows, and resource reports of compiled kernels if it made any."""

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        rows = [
            {key: value for key, value in asdict(row).items() if value is not None or key not in _OPTIONAL}
            for row in self.rows
        ]
        record = {"schema": SCHEMA, "environment": self.environment, "rows": rows}
        return record | ({"resources": self.resources} if self.resources else {})

    def write(self, path: str | Path) -> None:
        """Write the object to a file, whole or not at all, making its folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        text = json.dumps(_without_nonfinite(self.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)


def read_record(path: str | Path) -> dict[str, Any]:
    """A recorded run.

    Raises
    ------
    ValueError : if the file isn't one that this version can read.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a recorded run of schema {SCHEMA}")
    for key, kind in (("environment", dict), ("rows", list)):
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{path} has no {key}")
    return record


def _without_nonfinite(value: Any) -> Any:
    """The same tree with infinities and NaNs, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def environment(device: Any = None, *, peer: str = "", commit: str | None = None, **more: Any) -> dict[str, Any]:
    """Where a run takes place.

    Parameters
    ----------
    device : the GPU's :class:`~numba_gemm.device.context.Device`, or None on the CPU.
    peer : version of what was compared with.
    commit : of the source; None asks git.
    more : further entries, for instance the measured bandwidth.
    """
    versions = {"numba-gemm": __version__, "python": platform.python_version()}
    versions |= package_versions(_PACKAGES)
    if peer:
        versions["peer"] = peer
    return {
        "gpu": device.name if device is not None else None,
        "compute_capability": ".".join(map(str, device.compute_capability)) if device is not None else None,
        "driver": driver_release() if device is not None else None,
        "cuda": ".".join(map(str, device.driver_version)) if device is not None else None,
        "versions": versions,
        "commit": commit if commit is not None else source_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "host": f"{cpu_name()}, {usable_cores()} cores, {platform.system()} {platform.machine()}",
        **more,
    }


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Distribution → version, of those that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """The processor's name, not the machine's."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1).strip() if found else (platform.processor() or platform.machine())


def driver_release() -> str:
    """The NVIDIA driver's release, for instance ``"580.159.04"``, or ``"unknown"``."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def source_commit() -> str:
    """``git describe`` of the package's checkout, ``"unknown"`` outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def slug(name: str) -> str:
    """A name as a folder: ``"NVIDIA H200"`` → ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
