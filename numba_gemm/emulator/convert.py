"""Moves and conversions between types, formats and address spaces (PTX ISA 9.7.9)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .float_ops import flush32, saturate
from .memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_MASK
from .module import WIDTHS, Instruction, Operand, Reg, Special, Vec
from .program import Decoder, Run, elementwise, op, simple
from .rounding import E4M3, E5M2, F16_NAN, FORMATS, bf16_bits, canonical32, directed64, from_bf16, round_to, two_sum
from .rounding import to_odd as odd

INTEGERS = {f"{s}{w}" for s in "us" for w in (8, 16, 32, 64)}
_INT_ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


def _fp8_table(form: Any, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Values of the 256 patterns of an 8-bit format, as float32."""
    pattern = np.arange(256)
    exponent = (pattern >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = pattern & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(float), 1 - bias - mantissa_bits),
        np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias),
    )
    if form is E5M2:
        value[(exponent == 31) & (mantissa == 0)] = np.inf
        value[(exponent == 31) & (mantissa != 0)] = np.nan
    else:
        value[(pattern & 0x7F) == 0x7F] = np.nan
    return np.where(pattern & 0x80, -value, value).astype(np.float32)


FP8 = {"e4m3": _fp8_table(E4M3, 4, 3), "e5m2": _fp8_table(E5M2, 5, 2)}


def to_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """float64 to 8-bit patterns, nearest even, `.satfinite`: too large becomes the largest, NaN becomes 0x7f."""
    form = FORMATS[name]
    magnitude = np.minimum(round_to(np.minimum(np.abs(x), form.largest), form, "rn"), form.largest)
    positive = FP8[name][:0x7F]
    positive = positive[np.isfinite(positive)].astype(np.float64)
    pattern = np.searchsorted(positive, np.nan_to_num(magnitude)).astype(np.uint8)
    pattern = np.where(np.signbit(x), pattern | np.uint8(0x80), pattern)
    return np.where(np.isnan(x), np.uint8(0x7F), pattern)


def source_row(d: Decoder, ins: Instruction, operand: Operand, kind: str) -> tuple[str, int]:
    """(key, row) of a source register of any width that is read as `kind` (narrow or wide, unsigned)."""
    if isinstance(operand, Reg):
        return f"u{operand.reg.bits}", d.row_of(operand.reg)
    bits = max(16, WIDTHS[kind])
    return f"u{bits}", d.src(ins, operand, kind)


def narrow(raw: np.ndarray, kind: str) -> np.ndarray:
    """An unsigned register image to an integer of type `kind`: truncated or as it is."""
    bits = WIDTHS[kind]
    return raw.astype(f"u{bits // 8}", copy=False).view(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")


def load_float(raw: np.ndarray, kind: str) -> np.ndarray:
    """A register image to float64, exactly."""
    if kind == "bf16":
        return from_bf16(raw.astype(np.uint16, copy=False)).astype(np.float64)
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
    return raw.astype(f"u{WIDTHS[kind] // 8}", copy=False).view(dtype).astype(np.float64)


def store_float(x: np.ndarray, kind: str) -> np.ndarray:
    """float64 that the type holds, to its pattern; NaN canonical but for f64."""
    if kind == "f64":
        return x.view(np.uint64)
    if kind == "f32":
        return canonical32(x.astype(np.float32)).view(np.uint32)
    if kind == "f16":
        return np.where(np.isnan(x), F16_NAN, x.astype(np.float16).view(np.uint16))
    return bf16_bits(x.astype(np.float32))


def int_to_float(x: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """Integers to patterns of a float type, in one rounding."""
    if mode == "rn" and kind in ("f32", "f64"):
        return x.astype(kind.replace("f32", "f4").replace("f64", "f8")).view(f"u{WIDTHS[kind] // 8}")
    if x.dtype.itemsize < 8:
        s, e = x.astype(np.float64), np.zeros(x.shape)
    else:
        s, e = two_sum((x >> 32).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64))
    if kind == "f64":
        return directed64(s, e, mode).view(np.uint64)
    return store_float(round_to(odd(s, e), FORMATS[kind], mode), kind)


def float_to_int(x: np.ndarray, kind: str, source: str, mode: str) -> np.ndarray:
    """float64 to an integer type: rounded, clamped to its range; NaN as the ISA says."""
    bits = WIDTHS[kind]
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    info = np.iinfo(dtype)
    r = _INT_ROUND[mode](x)
    nan = np.isnan(x)
    low, high = r <= float(info.min), r >= float(info.max)
    result = np.where(nan | low | high, 0.0, r).astype(dtype)
    result = np.where(low, dtype.type(info.min), np.where(high, dtype.type(info.max), result))
    if nan.any():
        wide = source == "f64" or bits == 64
        value = np.array(1 << (bits - 1), f"u{bits // 8}").view(dtype) if wide else dtype.type(0)
        result = np.where(nan, value, result)
    return result


def nan_payload(raw: np.ndarray, pattern: np.ndarray, source: str, target: str, ftz: bool) -> np.ndarray:
    """NaN as an H200 converts it where the result isn't the canonical one: made quiet, its payload kept."""
    nan = np.isnan(load_float(raw, source))
    if not nan.any():
        return pattern
    if (source, target) == ("bf16", "f32"):
        kept = raw.astype(np.uint32) << np.uint32(16)  # a plain shift
    elif target == "f64":
        if ftz and source == "f32":
            raw = np.full_like(raw, 0x7FFFFFFF)
        wide = load_float(raw, source).view(np.uint64)
        kept = wide | np.uint64(1 << 51)
    elif source == "f64":
        image = raw.view(np.uint64)
        top = WIDTHS[target] - 1
        mantissa = FORMATS[target].precision - 1
        sign = image >> np.uint64(63) << np.uint64(top)
        ones = np.uint64((1 << top) - (1 << (mantissa - 1)))
        kept = (sign | ones | ((image & np.uint64((1 << 51) - 1)) >> np.uint64(52 - mantissa))).astype(pattern.dtype)
    else:
        return pattern
    return np.where(nan, kept, pattern)


def convert(ins: Instruction, target: str, source: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function of a scalar `cvt`, from register image to pattern (unsigned, or signed for signed targets)."""
    mods = set(ins.mods)
    int_mode = next((m for m in ins.mods if m in _INT_ROUND), None)
    mode = next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp", "rna")), "rn")
    sat, ftz = "sat" in mods, "ftz" in mods
    if source in INTEGERS and target in INTEGERS:
        if not sat:
            bits = WIDTHS[target]
            dtype = f"{'i' if target[0] == 's' else 'u'}{bits // 8}"
            return lambda raw: narrow(raw, source).astype(dtype)
        info = np.iinfo(f"{'i' if target[0] == 's' else 'u'}{WIDTHS[target] // 8}")

        def clamp(raw: np.ndarray) -> np.ndarray:
            x = narrow(raw, source)
            low = max(int(np.iinfo(x.dtype).min), info.min)
            high = min(int(np.iinfo(x.dtype).max), info.max)
            return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(info.dtype)

        return clamp
    if source in INTEGERS:

        def from_int(raw: np.ndarray) -> np.ndarray:
            pattern = int_to_float(narrow(raw, source), target, mode)
            return store_float(saturate(load_float(pattern, target)), target) if sat else pattern

        return from_int

    def flush(raw: np.ndarray) -> np.ndarray:
        return flush32(raw.view(np.float32)).view(np.uint32) if ftz and source == "f32" else raw

    if target in INTEGERS:
        return lambda raw: float_to_int(load_float(flush(raw), source), target, source, int_mode or "rzi")
    if target == "tf32":

        def to_tf32(raw: np.ndarray) -> np.ndarray:
            if mode == "rna":
                rounded = raw + np.uint32(0x1000)
            elif mode == "rn":
                rounded = raw + np.uint32(0xFFF) + ((raw >> np.uint32(13)) & np.uint32(1))
            else:
                rounded = raw
            finite = (raw & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F800000)
            result = np.where(finite, rounded, raw) & np.uint32(0xFFFFE000)
            return result

        return to_tf32

    def to_float(raw: np.ndarray) -> np.ndarray:
        x = load_float(flush(raw), source)
        if int_mode:
            x = np.copysign(_INT_ROUND[int_mode](x), x)
        if target != "f64":
            x = round_to(x, FORMATS[target], mode)
        if sat:
            x = saturate(x)
        if "relu" in mods:
            x = np.where(x < 0, 0.0, x)
        if "satfinite" in mods and target != "f64":
            limit = FORMATS[target].largest
            x = np.clip(x, -limit, limit)
        pattern = store_float(x, target)
        if (source in ("f64", "bf16") and not sat) or target == "f64":
            pattern = nan_payload(raw, pattern, source, target, ftz)
        return flush32(pattern.view(np.float32)).view(np.uint32) if ftz and target == "f32" else pattern

    return to_float


@op("cvt")
def cvt(d: Decoder, ins: Instruction) -> Run:
    if ins.mods[0] == "pack":
        return cvt_pack(d, ins)
    types = [m for m in ins.mods if m in WIDTHS or m.endswith(("x2", "tf32"))]
    target, source = types[-2], types[-1]
    operands = ins.operands
    if target in ("e4m3x2", "e5m2x2"):
        return cvt_to_fp8(d, ins, target[:4], source)
    if source in ("e4m3x2", "e5m2x2"):
        table = FP8[source[:4]].astype(np.float16)
        row = d.src(ins, operands[1], "b16")
        relu = "relu" in ins.mods

        def expand(raw: np.ndarray) -> np.ndarray:
            pair = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, 2)
            x = table[pair]
            if relu:
                x = np.where(x < 0, np.float16(0), x)
            return np.where(np.isnan(x), F16_NAN, x.view(np.uint16))

        return elementwise(("u16x2", d.dst(ins, operands[0], "b32")), [("u16", row)], expand)
    if target in ("f16x2", "bf16x2") and source == "f32":
        one = convert(ins, target[:-2], source)
        rows = [("u32", d.src(ins, o, "f32")) for o in operands[1:3]]
        return elementwise(
            ("u16x2", d.dst(ins, operands[0], "b32")), rows, lambda a, b: np.stack([one(b), one(a)], axis=-1)
        )
    if target.endswith("x2") or source.endswith("x2"):
        raise d.unsupported(ins)
    function = convert(ins, target, source)
    register = operands[0]
    if not isinstance(register, Reg):
        raise d.syntax(ins, "the destination is not a register")
    sign = "s" if target in INTEGERS and target[0] == "s" else "u"
    destination = (f"{sign}{register.reg.bits}", d.row_of(register.reg))
    return elementwise(destination, [source_row(d, ins, operands[1], source)], function)


def cvt_to_fp8(d: Decoder, ins: Instruction, name: str, source: str) -> Run:
    relu = "relu" in ins.mods
    destination = ("u16", d.dst(ins, ins.operands[0], "b16"))

    def encode(x: np.ndarray) -> np.ndarray:
        x = np.where(x < 0, 0.0, x) if relu else x
        return np.ascontiguousarray(to_fp8(x, name)).view(np.uint16).reshape(-1)

    if source == "f32":
        rows = [("f32", d.src(ins, o, "f32")) for o in ins.operands[1:3]]
        return elementwise(destination, rows, lambda a, b: encode(np.stack([b, a], axis=-1).astype(np.float64)))
    key = "f16x2" if source == "f16x2" else "u16x2"
    row = d.src(ins, ins.operands[1], "b32")
    if key == "u16x2":
        return elementwise(destination, [(key, row)], lambda a: encode(from_bf16(a).astype(np.float64)))
    return elementwise(destination, [(key, row)], lambda a: encode(a.astype(np.float64)))


def cvt_pack(d: Decoder, ins: Instruction) -> Run:
    """cvt.pack.sat: two integers clamped and packed, for 8 bits above the low half of c."""
    narrow_type = ins.mods[2]
    info = np.iinfo(f"{'i' if narrow_type[0] == 's' else 'u'}{WIDTHS[narrow_type] // 8}")
    source = ins.mods[3]
    bits = WIDTHS[narrow_type]
    mask = np.uint32((1 << bits) - 1)

    def compute(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        first, second = (np.clip(x.astype(np.int64), info.min, info.max).astype(np.uint32) & mask for x in (a, b))
        packed = first << np.uint32(bits) | second
        return c[0] << np.uint32(2 * bits) | packed if c else packed

    return simple(d, ins, ["b32", source, source, *(["b32"] if len(ins.operands) == 4 else [])], compute)


# --- mov

_DYNAMIC = {"%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}


def _clock(name: str, steps: int) -> int:
    if "globaltimer" in name:
        value = time.time_ns()
        return {"%globaltimer": value, "%globaltimer_lo": value & 0xFFFFFFFF, "%globaltimer_hi": value >> 32}[name]
    return {"%clock": steps & 0xFFFFFFFF, "%clock64": steps, "%clock_hi": steps >> 32}[name]


@op("mov")
def mov(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    target, source = ins.operands
    bits = WIDTHS[kind]
    if isinstance(target, Vec):
        return unpack(d, ins, bits)
    if isinstance(source, Vec):
        return pack(d, ins, bits)
    if isinstance(source, Special) and source.name in _DYNAMIC:
        key, row, name = f"u{bits}", d.dst(ins, target, kind), source.name

        def read_clock(b: Any) -> None:
            sel = slice(None) if b.sel is None else b.sel
            b.clock += 4
            b.rows[key][row][sel] = _clock(name, b.clock)

        return read_clock
    key = "pred" if kind == "pred" else f"u{bits}"
    row, other = d.dst(ins, target, kind), d.src(ins, source, kind)

    def run(b: Any) -> None:
        rows, sel = b.rows[key], b.sel
        if sel is None:
            rows[row][...] = rows[other]
        else:
            rows[row][sel] = rows[other][sel]

    return run


def pack(d: Decoder, ins: Instruction, bits: int) -> Run:
    items = d.vector(ins.operands[1])
    part = bits // len(items)
    row = d.dst(ins, ins.operands[0], f"b{bits}")
    if part == 8:
        sources = [source_row(d, ins, o, "b8") for o in items]
    else:
        sources = [(f"u{part}", d.src(ins, o, f"b{part}")) for o in items]
    dtype = np.dtype(f"u{bits // 8}").type

    def compute(*values: np.ndarray) -> np.ndarray:
        result = values[0].astype(dtype) & dtype((1 << part) - 1)
        for place, value in enumerate(values[1:], 1):
            result |= (value.astype(dtype) & dtype((1 << part) - 1)) << dtype(place * part)
        return result

    return elementwise((f"u{bits}", row), sources, compute)


def unpack(d: Decoder, ins: Instruction, bits: int) -> Run:
    items = d.vector(ins.operands[0])
    part = bits // len(items)
    source = d.src(ins, ins.operands[1], f"b{bits}")
    width = max(part, 16)
    targets = [d.dst(ins, o, f"b{width}") for o in items]

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        value = b.rows[f"u{bits}"][source][sel]
        # the source may be one of the destinations
        pieces = [(value >> value.dtype.type(i * part)).astype(f"u{part // 8}") for i in range(len(items))]
        for row, piece in zip(targets, pieces, strict=True):
            b.rows[f"u{width}"][row][sel] = piece

    return run


# --- address spaces

_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": LOCAL_WINDOW, "global": 0, "const": 0}


def _space(ins: Instruction) -> str:
    return next(m.split("::")[0] for m in ins.mods if m.split("::")[0] in _WINDOWS)


@op("cvta")
def cvta(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    window = _WINDOWS[_space(ins)]
    if WIDTHS[kind] != 64:
        raise d.unsupported(ins, "32-bit addresses")
    if not window:
        return simple(d, ins, [kind] * 2, lambda a: a)
    if "to" in ins.mods:
        return simple(d, ins, [kind] * 2, lambda a: a & np.uint64(~WINDOW_MASK & 0xFFFFFFFFFFFFFFFF))
    return simple(d, ins, [kind] * 2, lambda a: a | np.uint64(window))


@op("isspacep")
def isspacep(d: Decoder, ins: Instruction) -> Run:
    window = np.uint64(_WINDOWS[_space(ins)])
    mask = np.uint64(WINDOW_MASK)
    return simple(d, ins, ["pred", "u64"], lambda a: (a & mask) == window)
