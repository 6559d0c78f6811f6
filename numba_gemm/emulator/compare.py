"""Comparison and selection (PTX ISA 9.7.6, 9.7.7)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .float_ops import FLOATS, Kind, with_flush
from .module import WIDTHS, Instruction, Pair, Sink
from .program import Decoder, Run, elementwise, op, simple
from .registers import KEYS

_ORDERED: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMPARE = set(_ORDERED) | set(_UNSIGNED) | {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(ins: Instruction, kind: str) -> Callable[..., np.ndarray]:
    """The function (a, b) → bool of a `set`/`setp` at a source type."""
    name = next(m for m in ins.mods if m in _COMPARE)
    name = _UNSIGNED.get(name, name)
    if kind not in FLOATS:
        return _ORDERED[name]
    floating = Kind(kind)
    widen = floating.widen if floating.base == "bf16" else (lambda x: x)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = widen(a), widen(b)
        if name == "num":
            return ~(np.isnan(a) | np.isnan(b))
        if name == "nan":
            return np.isnan(a) | np.isnan(b)
        if name in _ORDERED:
            result = _ORDERED[name](a, b)
            # an unordered pair is not unequal to `ne`, whatever the host's comparison says
            return result & ~(np.isnan(a) | np.isnan(b)) if name == "ne" else result
        return _ORDERED[name[:2]](a, b) | np.isnan(a) | np.isnan(b)

    return with_flush(floating, ins, compute)


@op("setp")
def setp(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    compute = comparison(ins, kind)
    combine = next((_COMBINE[m] for m in ins.mods if m in _COMBINE), None)
    target = ins.operands[0]
    key = KEYS[kind]
    sources = [(key, d.src(ins, o, kind)) for o in ins.operands[1:3]]
    if not isinstance(target, Pair) and combine is None and kind not in ("f16x2", "bf16x2"):
        return elementwise(("pred", d.dst(ins, target, "pred")), sources, compute, out=kind not in FLOATS)
    first = target.first if isinstance(target, Pair) else target
    second = target.second if isinstance(target, Pair) else Sink()
    p, q = d.dst(ins, first, "pred"), d.dst(ins, second, "pred")
    other, flip = d.predicate(ins, ins.operands[3]) if combine else (-1, False)
    packed = kind in ("f16x2", "bf16x2")

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        result = compute(*(b.rows[k][r][sel] for k, r in sources))
        both = (result[:, 0], result[:, 1]) if packed else (result, ~result)
        predicates = b.rows["pred"]
        if combine is not None:
            extra = predicates[other][sel] ^ flip
            both = (combine(both[0], extra), combine(both[1], extra))
        predicates[p][sel] = both[0]
        predicates[q][sel] = both[1]

    return run


@op("set")
def set_(d: Decoder, ins: Instruction) -> Run:
    kind, result = ins.mods[-1], ins.mods[-2]
    compute = comparison(ins, kind)
    combine = next((_COMBINE[m] for m in ins.mods if m in _COMBINE), None)
    bits = WIDTHS[result]
    if result in ("f16x2", "bf16x2"):
        true: Any = np.uint16(0x3C00 if result == "f16x2" else 0x3F80)
        key = "u16x2"
    elif result in FLOATS:
        true = {"f32": np.uint32(0x3F800000), "f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}[result]
        key = f"u{bits}"
    else:
        packed = kind in ("f16x2", "bf16x2")
        true = np.uint16(0xFFFF) if packed or bits == 16 else np.uint32(0xFFFFFFFF)
        key = "u16x2" if packed else f"u{bits}"
    sources = [(KEYS[kind], d.src(ins, o, kind)) for o in ins.operands[1:3]]
    target = d.dst(ins, ins.operands[0], result)
    flip = False
    if combine is not None:
        row, flip = d.predicate(ins, ins.operands[3])
        sources.append(("pred", row))

    def full(*args: np.ndarray) -> np.ndarray:
        hit = compute(args[0], args[1])
        if combine is not None:
            extra = args[2] ^ flip
            hit = combine(hit, extra if hit.ndim == 1 else extra[:, None])
        return np.where(hit, true, true.dtype.type(0))

    return elementwise((key, target), sources, full)


@op("selp")
def selp(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    target = d.dst(ins, ins.operands[0], kind)
    key = f"u{WIDTHS[kind]}"
    a, b = (d.src(ins, o, kind) for o in ins.operands[1:3])
    p, negated = d.predicate(ins, ins.operands[3])
    if negated:
        a, b = b, a
    return elementwise((key, target), [("pred", p), (key, a), (key, b)], np.where)


@op("slct")
def slct(d: Decoder, ins: Instruction) -> Run:
    kind, chooser = ins.mods[-2], ins.mods[-1]
    if chooser == "f32":
        ftz = "ftz" in ins.mods
        return simple(
            d, ins, [kind, kind, kind, "f32"],
            lambda a, b, c: np.where((c >= 0) | (ftz & (np.abs(c) < np.finfo(np.float32).tiny)), a, b),
        )  # fmt: skip
    return simple(d, ins, [kind, kind, kind, "s32"], lambda a, b, c: np.where(c >= 0, a, b))
