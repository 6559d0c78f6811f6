"""Record, on a machine with a GPU, that every kernel is right on every case and clean under compute-sanitizer.

    python bench/sanitizer.py --output bench/results/nvidia-h200/checks.json

Runs ``numba-gemm check`` on every kernel of the ladder, those for special shapes and the stand-ins in CUDA C++, once on
all cases as it is, and on the small ones under memcheck, racecheck and synccheck. The forms of kernels whose bits are
recorded (``tests/gpu``), large tiles among them that no small case takes, run under the three tools as well, and are
compared with their records. The record has a row for each kernel and kind of array or set of forms, and the sanitizer's
summaries for each tool.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from numba_gemm.benchmark.record import SCHEMA, environment  # noqa: E402
from numba_gemm.catalog import LADDER, SPECIAL  # noqa: E402
from numba_gemm.device.context import device_properties  # noqa: E402
from numba_gemm.fallback import FALLBACKS  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
#: What runs the recorded forms, and compares their bits with the record's.
FORMS = ("tests/gpu/record_fp32.py", "tests/gpu/record_tensorcore.py")
_ROW = re.compile(
    r"^(?P<kernel>\S.*?)\s+GPU\s+(?P<arrays>numpy|device)\s+(?P<checks>\d+)\s+(?P<failed>\d+)\s+(?P<worst>\S+)", re.M
)
_FORMS_ROW = re.compile(r"^(?P<kernel>\w+): (?P<checks>\d+) cases in (?P<forms>\d+) forms, (?P<failed>\d+) wrong", re.M)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def parse(suite: str, output: str) -> list[dict[str, Any]]:
    """The rows of the table that ``numba-gemm check`` prints."""
    return [
        {
            "suite": suite,
            "kernel": row["kernel"],
            "arrays": row["arrays"],
            "checks": int(row["checks"]),
            "failed": int(row["failed"]),
            "error_over_bound": float(row["worst"]),
        }
        for row in _ROW.finditer(output)
    ]


def parse_forms(suite: str, output: str) -> list[dict[str, Any]]:
    """The lines that the recorders print when they compare with their records."""
    return [
        {
            "suite": suite,
            "kernel": row["kernel"],
            "forms": int(row["forms"]),
            "checks": int(row["checks"]),
            "failed": int(row["failed"]),
        }
        for row in _FORMS_ROW.finditer(output)
    ]


def run(command: list[str]) -> tuple[int, str]:
    """Exit status and all output of a command, which is also shown."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(f"{' '.join(command[-8:])}: exit {done.returncode}\n{output[-1500:]}", flush=True)
    return done.returncode, output


def main() -> int:
    """Run everything and write the record; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", default="", help="of the checkout, where git can't tell")
    options = parser.parse_args()
    kernels = [*LADDER, *SPECIAL, *FALLBACKS]
    check = [sys.executable, "-m", "numba_gemm", "check", *kernels, "--device", "cuda"]

    status, output = run(check)
    rows = parse("check", output)
    failed = status != 0 or not rows
    sanitizer = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), "")
    summaries: dict[str, str] = {}
    for tool in TOOLS if sanitizer else ():
        watched = [sanitizer, "--tool", tool, "--error-exitcode", "7"]
        for name, command in {
            tool: [*check, "--quick"],
            **{f"{tool} {Path(path).stem}": [sys.executable, path, "--check"] for path in FORMS},
        }.items():
            status, output = run([*watched, *command])
            rows += parse(name, output) + parse_forms(name, output)
            found = _SUMMARY.search(output)
            summaries[name] = found.group(1) if found else f"no summary; exit status {status}"
            failed |= status != 0
    record = {
        "schema": SCHEMA,
        "environment": environment(device_properties(), commit=options.commit or None),
        "sanitizer": summaries,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(rows)} rows, {sum(row['failed'] for row in rows)} failures, {summaries}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
