"""What was tried against one another: of each shape that was tuned, the fastest forms of different designs.

The times are those of ``numba-gemm tune`` in tests/data, of every form that it measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The record, from the checkout's root.
FORMS = Path("tests/data/h200_tuned_forms.json")
#: Designs that are shown of each shape.
SHOWN = 5

Record = dict[str, Any]
_SCHEDULES = {"pingpong": "ping-pong", "cooperative": "cooperative"}


def designs(root: Path, dtype: str, shapes: Sequence[str]) -> tuple[list[str], list[list[str]], str]:
    """Header, one line a shape in the order of ``shapes``, and where, when and how it was timed.

    Raises
    ------
    ValueError : if nothing was tuned in that type.
    """
    record = json.loads((root / FORMS).read_text(encoding="utf-8"))
    lines = []
    for product in sorted(record["products"], key=lambda one: _place(shapes, _shape(one))):
        if product["dtype"] == dtype:
            best: dict[str, float] = {}
            for label, us in product["forms"].items():
                name = design(label)
                best[name] = min(us, best.get(name, us))
            fastest = sorted(best.items(), key=lambda pair: pair[1])[:SHOWN]
            cells = [f"{name}: {time_of(us)}" for name, us in fastest]
            lines.append([_shape(product), *cells, *[""] * (SHOWN - len(cells))])
    if not lines:
        raise ValueError(f"{FORMS} has no product in {dtype}")
    header = ["M×N×K", "fastest", "2nd", "3rd", "4th", "5th"][: SHOWN + 1]
    source = f"*{record['gpu']}; {record['timing']}; {record['date']}; `{FORMS.as_posix()}`*"
    return header, lines, source


def design(label: str) -> str:
    """What sets a form apart, of its kernel and parameters as ``numba-gemm tune`` names them."""
    kernel, *words = label.split()
    values = dict(word.partition("=")[::2] for word in words)
    tile = f"{values.get('block_m', '')}×{values.get('block_n', '')}" if "block_m" in values else ""
    if kernel == "v8":
        parts = [f"v8 {tile}, {values['thread_m']}×{values['thread_n']}"]
        parts += ["K shared"] if values["split_blocks"] != "0" else []
        parts += [f"{values['copied'].upper()} copied"] if values["copied"] else []
        parts += [f"last {name} apart" for name in ("row", "column") if values.get(f"{name}_apart", "0") != "0"]
        return ", ".join(parts)
    if kernel == "skinny":
        return f"skinny {values['block_i']}×{values['block_j']}"
    if kernel == "thin":
        return f"thin, {values['narrow']} {values['form']}" + (", K in parts" if "parts" in values else "")
    if kernel == "outer":
        return f"outer, {values['rows']}×{values['columns']}"
    if kernel == "w2":
        parts = [f"w2 {tile} {_SCHEDULES[values['schedule']]}"]
        parts += ["in a cluster"] if "2" in (values["cluster_m"], values["cluster_n"]) else []
        parts += [f"K in {values['splits']}"] if values.get("splits", "1") != "1" else []
        parts += ["transposed"] if values.get("swapped") == "1" else []
        return ", ".join(parts)
    if kernel in ("w1", "t4"):
        splits = f", K in {values['splits']}" if values.get("splits", "1") not in ("", "0", "1") else ""
        return f"{kernel} {tile}{splits}"
    return kernel


def time_of(us: float) -> str:
    """A time in three or four digits."""
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _shape(product: Record) -> str:
    m, n, k = product["shape"]
    return f"{m}³" if m == n == k else f"{m}×{n}×{k}"


def _place(shapes: Sequence[str], shape: str) -> int:
    return shapes.index(shape) if shape in shapes else len(shapes)
