"""Records of ``chooser.py``: short ones to be read, a line a shape, and long ones to learn from, packed (``.gz``).

A packed record has each form's name once, and of a shape what can't be worked out from its times. Needs no GPU.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

#: What a row of a packed record has; ``pick`` and the forms of ``times`` are numbers of names in ``forms``.
COLUMNS = ["m", "n", "k", "cublas_us", "pick", "times: form, us, rounds"]


def write_record(path: Path, record: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a record with a line for each row; packed if its name ends in .gz."""
    lines: list[Any] = list(rows)
    if path.suffix == ".gz":
        names = sorted({name for row in rows for _, name, _, _ in row["times"]})
        number = {name: index for index, name in enumerate(names)}
        record = {**record, "columns": COLUMNS, "forms": names}
        lines = [
            [
                *(row[name] for name in ("m", "n", "k")),
                round(row["cublas_us"], 3),
                number.get(row.get("pick", "")),
                [[number[name], us, rounds] for _, name, us, rounds in row["times"]],
            ]
            for row in rows
        ]
    head = json.dumps(record, indent=1, ensure_ascii=False).removesuffix("\n}")
    body = ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    text = f'{head},\n "rows": [\n{body}\n]\n}}\n'.encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_record(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A record without its rows; and these: m, n, k, cublas_us, pick, and times as [kernel, form, µs, rounds]."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head = json.loads(text)
    rows = head.pop("rows")
    if "forms" in head:
        names = head.pop("forms")
        del head["columns"]
        rows = [
            {
                "m": m,
                "n": n,
                "k": k,
                "cublas_us": cublas_us,
                "pick": None if pick is None else names[pick],
                "times": [[names[form].split()[0], names[form], us, rounds] for form, us, rounds in times],
            }
            for m, n, k, cublas_us, pick, times in rows
        ]
    return head, rows
