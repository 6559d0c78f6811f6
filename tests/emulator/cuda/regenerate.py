"""Compile the CUDA C++ sources in this folder to the PTX fixtures beside them: `python regenerate.py`.

Debugging sections and the compiling machine's paths are dropped; the instructions stay as nvcc wrote them. (Without
those sections an assembler refuses the `-G` texts; the emulator does not look at them.)
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("gemm_simt", "gemm_tensor")
MODES = {"O3": ["-O3"], "G": ["-G"]}
#: For sm_90a, and optimised only: unoptimised code touches the registers of a wgmma before it has been waited for.
HOPPER = "hopper_cluster"


def compile_source(name: str, mode: str, arch: str = "sm_80", nvcc: str = "nvcc") -> str:
    """The PTX of one source at one optimisation mode, without paths and debugging sections."""
    command = [nvcc, "-ptx", f"-arch={arch}", *MODES[mode], f"{name}.cu", "-o", "-"]
    text = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"^\s*\.section\s+\S+\s*\{.*?^\s*\}\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r'(\.file\s+\d+\s+)"(?:[^"]*/)?([^"/]*)"', r'\1"\2"', text)
    text = re.sub(r"^//.*\n", "", text, flags=re.MULTILINE)
    # names of internal functions carry hashes
    return re.sub(r"(_INTERNAL_|_cu_)[0-9a-f]{8}(?=_|\d)", r"\g<1>00000000", text)


if __name__ == "__main__":
    for source in SOURCES:
        for mode in MODES:
            (FOLDER / f"{source}.{mode}.ptx").write_text(compile_source(source, mode))
    (FOLDER / f"{HOPPER}.O3.ptx").write_text(compile_source(HOPPER, "O3", "sm_90a"))
