"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5), and the opcodes that it shares with integers."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import int_ops
from .module import Instruction
from .program import Decoder, Run, op, simple
from .rounding import (
    F16_NAN,
    FORMATS,
    bf16_bits,
    canonical32,
    directed64,
    directed_sum64,
    fma32,
    fma64,
    from_bf16,
    negative_zero,
    quieted,
    quotient_odd,
    round_to,
    sum_odd,
    to_odd,
    two_product,
)

FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2"}
MODES = ("rn", "rz", "rm", "rp")
Compute = Callable[..., np.ndarray]


def mode_of(ins: Instruction) -> str:
    return next((m for m in ins.mods if m in MODES), "rn")


def flush32(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 to zeros of the same sign."""
    bits = x.view(np.uint32)
    small = (bits & np.uint32(0x7F800000)) == 0
    return np.where(small, bits & np.uint32(0x80000000), bits).view(np.float32)


def flush16(x: np.ndarray, exponent: int) -> np.ndarray:
    """Subnormal 16-bit patterns (float16: exponent mask 0x7c00; bfloat16: 0x7f80) to signed zeros."""
    return np.where((x & np.uint16(exponent)) == 0, x & np.uint16(0x8000), x)


def saturate(x: np.ndarray) -> np.ndarray:
    """To [0, 1]; NaN to +0."""
    one, zero = x.dtype.type(1), x.dtype.type(0)
    return np.where(x > zero, np.minimum(x, one), zero)


class Kind:
    """How a floating type is widened to what NumPy computes with, and how results come back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.base = name.removesuffix("x2")

    def widen(self, x: np.ndarray) -> np.ndarray:
        """To float64, exactly."""
        if self.base == "bf16":
            return from_bf16(x).astype(np.float64)
        return x.astype(np.float64)

    def pack(self, x: np.ndarray) -> np.ndarray:
        """float64 values that the type can hold, to the type; NaN canonical."""
        if self.base == "f64":
            return x
        if self.base == "f32":
            return canonical32(x.astype(np.float32))
        if self.base == "f16":
            return np.where(np.isnan(x), F16_NAN, x.astype(np.float16).view(np.uint16)).view(np.float16)
        return bf16_bits(x.astype(np.float32))

    def flush(self, x: np.ndarray) -> np.ndarray:
        if self.base == "f32":
            return flush32(x)
        if self.base == "f16":
            return flush16(np.ascontiguousarray(x).view(np.uint16), 0x7C00).view(np.float16)
        return x

    def finish(self, x: np.ndarray, mode: str, ins: Instruction) -> np.ndarray:
        """Round an exact (or odd-rounded) float64, then apply what the modifiers ask for."""
        r = x if self.base == "f64" else round_to(x, FORMATS[self.base], mode)
        if "sat" in ins.mods:
            r = saturate(r)
        if "relu" in ins.mods:
            r = np.where(r < 0, 0.0, r)
        packed = self.pack(r)
        return self.flush(packed) if "ftz" in ins.mods else packed


def with_flush(kind: Kind, ins: Instruction, compute: Compute) -> Compute:
    """Flush subnormal inputs first if the instruction is `.ftz`."""
    if "ftz" not in ins.mods:
        return compute
    return lambda *args: compute(*[kind.flush(a) for a in args])


def sum_compute(kind: Kind, ins: Instruction, subtract: bool) -> Compute:
    mode = mode_of(ins)
    plain = mode == "rn" and not {"ftz", "sat"} & set(ins.mods)
    if plain and kind.base == "f32":
        function = np.subtract if subtract else np.add
        return lambda a, b: canonical32(function(a, b))
    if kind.base == "f64":

        def sum64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            # of two NaN the second is returned, its sign untouched by a subtraction
            r = directed_sum64(a, -b if subtract else b, mode)
            return np.where(np.isnan(b), quieted(b), r)

        return sum64

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = kind.widen(a), kind.widen(b)
        y = -y if subtract else y
        s = sum_odd(x, y)
        if mode == "rm":
            s = negative_zero(s, x, y)
        return kind.finish(s, mode, ins)

    return with_flush(kind, ins, compute)


def product_compute(kind: Kind, ins: Instruction) -> Compute:
    mode = mode_of(ins)
    if mode == "rn" and not {"ftz", "sat"} & set(ins.mods) and kind.base == "f32":
        return lambda a, b: canonical32(np.multiply(a, b))
    if kind.base == "f64":

        def product64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            # a zero of the product's own sign leaves it alone
            r = a * b if mode == "rn" else fma64(a, b, np.copysign(0.0, a) * np.copysign(1.0, b), mode)
            return np.where(np.isnan(b), quieted(b), r)

        return product64
    return with_flush(kind, ins, lambda a, b: kind.finish(kind.widen(a) * kind.widen(b), mode, ins))


def fma_compute(kind: Kind, ins: Instruction) -> Compute:
    mode = mode_of(ins)
    plain = mode == "rn" and not {"ftz", "sat", "relu"} & set(ins.mods)
    if kind.base == "f32" and plain:
        return fma32
    if kind.base == "f64":
        return lambda a, b, c: fma64(a, b, c, mode)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        p, z = kind.widen(a) * kind.widen(b), kind.widen(c)
        s = sum_odd(p, z)
        return kind.finish(negative_zero(s, p, z) if mode == "rm" else s, mode, ins)

    return with_flush(kind, ins, compute)


def quotient_compute(kind: Kind, ins: Instruction) -> Compute:
    """div: `.rn` and the directed modes exactly; `.approx` and `.full` as `.rn`."""
    mode = mode_of(ins)
    if kind.base == "f64":
        if mode == "rn":
            return np.divide

        def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            q = a / b
            p, e = two_product(q, b)
            rest = np.nan_to_num((a - p) - e)
            return directed64(q, np.where(b < 0, -rest, rest), mode)

        return directed
    return with_flush(kind, ins, lambda a, b: kind.finish(quotient_odd(kind.widen(a), kind.widen(b)), mode, ins))


def shared_opcode(integer: Callable[[Decoder, Instruction, str], Run], floating: Any) -> Any:
    """The builder of an opcode that exists for integers and floats."""

    def build(d: Decoder, ins: Instruction) -> Run:
        name = ins.mods[-1]
        if name in FLOATS:
            return floating(d, ins, Kind(name))
        return integer(d, ins, name)

    return build


op("add")(shared_opcode(int_ops.add_sub, lambda d, i, k: simple(d, i, [k.name] * 3, sum_compute(k, i, False))))
op("sub")(shared_opcode(int_ops.add_sub, lambda d, i, k: simple(d, i, [k.name] * 3, sum_compute(k, i, True))))
op("addc", "subc")(lambda d, i: int_ops.add_sub(d, i, i.mods[-1]))
op("mul")(shared_opcode(int_ops.mul, lambda d, i, k: simple(d, i, [k.name] * 3, product_compute(k, i))))
op("mad")(shared_opcode(int_ops.mad, lambda d, i, k: simple(d, i, [k.name] * 4, fma_compute(k, i))))
op("madc")(lambda d, i: int_ops.mad(d, i, i.mods[-1]))
op("fma")(lambda d, i: simple(d, i, [i.mods[-1]] * 4, fma_compute(Kind(i.mods[-1]), i)))
op("div")(shared_opcode(int_ops.div_rem, lambda d, i, k: simple(d, i, [k.name] * 3, quotient_compute(k, i))))

_SIGNS = {"f16": 0x8000, "bf16": 0x8000, "f32": 1 << 31, "f64": 1 << 63}


def sign_bit(kind: Kind) -> Any:
    unsigned = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}[kind.base]
    return unsigned(_SIGNS[kind.base])


def sign_builder(d: Decoder, ins: Instruction, kind: Kind) -> Run:
    """abs and neg: the sign bit alone."""
    bit = sign_bit(kind)
    negate = ins.op == "neg"

    def compute(a: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(a).view(bit.dtype)
        r = (bits ^ bit if negate else bits & ~bit).view(a.dtype)
        if kind.base == "f32":
            return canonical32(r)
        if kind.base == "f64":
            return np.where(np.isnan(a), quieted(r) if not negate else quieted(a), r)
        return np.where(np.isnan(kind.widen(a)), F16_NAN, r.view(np.uint16)).view(a.dtype)

    return simple(d, ins, [kind.name] * 2, with_flush(kind, ins, compute))


def int_abs(d: Decoder, ins: Instruction, kind: str) -> Run:
    return simple(d, ins, [kind] * 2, np.abs if ins.op == "abs" else np.negative, out=True)


op("abs", "neg")(shared_opcode(int_abs, sign_builder))


def extreme_builder(d: Decoder, ins: Instruction, kind: Kind) -> Run:
    """min and max: NaN loses unless `.NaN`; -0 is less than +0."""
    largest = ins.op == "max"
    function = np.fmax if largest else np.fmin
    bit = sign_bit(kind)

    def compute(*args: np.ndarray) -> np.ndarray:
        wide = [kind.widen(a) for a in args]
        r = wide[0]
        for other in wide[1:]:
            chosen = function(r, other)
            signs = np.signbit(r) & np.signbit(other) if largest else np.signbit(r) | np.signbit(other)
            r = np.where((r == 0) & (other == 0), np.where(signs, -0.0, 0.0), chosen)
        if kind.base == "f64":
            r = np.where(np.isnan(wide[0]) & np.isnan(wide[-1]), quieted(wide[-1]), r)
        if "NaN" in ins.mods:
            r = np.where(np.any([np.isnan(w) for w in wide], axis=0), np.nan, r)
        return kind.finish(r, "rn", ins)

    def xorsign(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        raw = [np.ascontiguousarray(x).view(bit.dtype) for x in (a, b)]
        sign = (raw[0] ^ raw[1]) & bit
        r = compute(*[(x & ~bit).view(a.dtype) for x in raw])
        return ((np.ascontiguousarray(r).view(bit.dtype) & ~bit) | sign).view(a.dtype)

    chosen = xorsign if "xorsign" in ins.mods else compute
    return simple(d, ins, [kind.name] * len(ins.operands), with_flush(kind, ins, chosen))


op("min", "max")(shared_opcode(int_ops.min_max, extreme_builder))


@op("copysign")
def copysign(d: Decoder, ins: Instruction) -> Run:
    kind = Kind(ins.mods[-1])
    bit = sign_bit(kind)
    key = bit.dtype

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return ((a.view(key) & bit) | (b.view(key) & ~bit)).view(a.dtype)

    return simple(d, ins, [kind.name] * 3, compute)


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Decoder, Instruction], Run]:
    """An instruction of one operand, computed in float64 and rounded once."""

    def build(d: Decoder, ins: Instruction) -> Run:
        kind = Kind(ins.mods[-1])
        mode = mode_of(ins)
        compute = with_flush(kind, ins, lambda a: kind.finish(function(kind.widen(a)), mode, ins))
        return simple(d, ins, [kind.name] * 2, compute)

    return build


def _root_odd(x: np.ndarray) -> np.ndarray:
    """A square root good for directed rounding to 24 bits or fewer."""
    q = np.sqrt(x)
    looks = (q.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0
    rest = np.where(looks & np.isfinite(q), x - q * q, 0.0)

    return to_odd(q, rest)


def _root(d: Decoder, ins: Instruction) -> Run:
    if ins.mods[-1] == "f64":
        if mode_of(ins) != "rn":
            raise d.unsupported(ins, "directed rounding in float64")
        return simple(d, ins, ["f64"] * 2, np.sqrt)
    return _unary(_root_odd)(d, ins)


def _reciprocal(d: Decoder, ins: Instruction) -> Run:
    if ins.mods[-1] == "f64":
        if mode_of(ins) != "rn":
            raise d.unsupported(ins, "directed rounding in float64")
        return simple(d, ins, ["f64"] * 2, np.reciprocal)
    return _unary(lambda x: quotient_odd(np.ones_like(x), x))(d, ins)


op("sqrt")(_root)
op("rcp")(_reciprocal)
op("rsqrt")(_unary(lambda x: np.where(x == 0, np.copysign(np.inf, x), 1.0 / np.sqrt(x))))
op("ex2")(_unary(np.exp2))
op("lg2")(_unary(np.log2))
op("sin")(_unary(np.sin))
op("cos")(_unary(np.cos))
op("tanh")(_unary(np.tanh))

_TESTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


@op("testp")
def testp(d: Decoder, ins: Instruction) -> Run:
    return simple(d, ins, ["pred", ins.mods[-1]], _TESTS[ins.mods[0]])
