"""Integer and bit instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

# mypy: disable-error-code="no-any-return"
# (NumPy's stubs make Any of most arithmetic on arrays.)

from __future__ import annotations

from typing import Any

import numpy as np

from .module import WIDTHS, Imm, Instruction, Pair
from .program import Decoder, Run, elementwise, op, simple
from .registers import KEYS

WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
NUMPY = {
    "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
_CC = "carry flag"


def carry_row(d: Decoder) -> int:
    """The row of each thread's carry flag CC.CF."""
    row = d.starts.get(_CC)
    if row is None:
        row = d.starts[_CC] = d.new_row(1)
    return row


def add_sub(d: Decoder, ins: Instruction, kind: str) -> Run:
    """Integer add, sub, addc, subc."""
    subtract = ins.op in ("sub", "subc")
    if "sat" in ins.mods:
        wide = np.int64
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        if subtract:
            return simple(d, ins, [kind] * 3, lambda a, b: np.clip(a.astype(wide) - b, low, high))
        return simple(d, ins, [kind] * 3, lambda a, b: np.clip(a.astype(wide) + b, low, high))
    takes = ins.op in ("addc", "subc")
    gives = "cc" in ins.mods
    if not takes and not gives:
        return simple(d, ins, [kind] * 3, np.subtract if subtract else np.add, out=True)
    flag = carry_row(d)
    bits = WIDTHS[kind]
    key = f"u{bits}"
    target = d.dst(ins, ins.operands[0], kind)
    left = d.src(ins, ins.operands[1], kind)
    right = d.src(ins, ins.operands[2], kind)

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        x, y = b.rows[key][left][sel], b.rows[key][right][sel]
        carry = b.rows["pred"][flag]
        if subtract:
            borrow = carry[sel].astype(x.dtype) if takes else x.dtype.type(0)
            result = x - y - borrow
            out = (x < y) | ((x == y) & (borrow != 0))
        else:
            extra = carry[sel].astype(x.dtype) if takes else x.dtype.type(0)
            partial = x + y
            result = partial + extra
            out = (partial < x) | (result < partial)
        b.rows[key][target][sel] = result
        if gives:
            carry[sel] = out

    return run


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of a 64 x 64 bit product, of uint64 or int64."""
    signed = a.dtype == np.int64
    x, y = a.view(np.uint64) if signed else a, b.view(np.uint64) if signed else b
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> shift, y & mask, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    other = x0 * y1 + (middle & mask)
    result = x1 * y1 + (middle >> shift) + (other >> shift)
    if signed:
        result = result - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
        return result.view(np.int64)
    return result


def product(kind: str, part: str):  # type: ignore[no-untyped-def]
    """A function (a, b) → the low, high or wide product."""
    if part == "lo":
        return np.multiply
    bits = WIDTHS[kind]
    if part == "wide":
        wide = NUMPY[WIDE[kind]]
        return lambda a, b: a.astype(wide) * b.astype(wide)
    if bits == 64:
        return high_product
    wide = NUMPY["s64" if kind[0] == "s" else "u64"]
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)


def mul(d: Decoder, ins: Instruction, kind: str) -> Run:
    part = next((m for m in ins.mods if m in ("lo", "hi", "wide")), "lo")
    result = WIDE[kind] if part == "wide" else kind
    return simple(d, ins, [result, kind, kind], product(kind, part), out=part == "lo")


def mad(d: Decoder, ins: Instruction, kind: str) -> Run:
    part = next((m for m in ins.mods if m in ("lo", "hi", "wide")), "lo")
    result = WIDE[kind] if part == "wide" else kind
    multiply = product(kind, part)
    if "cc" in ins.mods or ins.op == "madc":
        return mad_carry(d, ins, kind, multiply)
    if "sat" in ins.mods:
        info = np.iinfo(np.int32)
        return simple(
            d, ins, [result, kind, kind, result],
            lambda a, b, c: np.clip(multiply(a, b).astype(np.int64) + c, info.min, info.max),
        )  # fmt: skip
    return simple(d, ins, [result, kind, kind, result], lambda a, b, c: multiply(a, b) + c)


def mad_carry(d: Decoder, ins: Instruction, kind: str, multiply: Any) -> Run:
    """mad.cc and madc: the product's chosen half plus c plus the carry."""
    flag = carry_row(d)
    key, unsigned = KEYS[kind], f"u{WIDTHS[kind]}"
    rows = [d.dst(ins, ins.operands[0], kind)] + [d.src(ins, o, kind) for o in ins.operands[1:4]]
    takes, gives = ins.op == "madc", "cc" in ins.mods

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        x, y = b.rows[key][rows[1]][sel], b.rows[key][rows[2]][sel]
        c = b.rows[unsigned][rows[3]][sel]
        carry = b.rows["pred"][flag]
        half = multiply(x, y).view(c.dtype)
        partial = half + c
        result = partial + (carry[sel].astype(c.dtype) if takes else c.dtype.type(0))
        b.rows[unsigned][rows[0]][sel] = result
        if gives:
            carry[sel] = (partial < half) | (result < partial)

    return run


def low24(a: np.ndarray) -> np.ndarray:
    """The low 24 bits, sign- or zero-extended to 64."""
    if a.dtype == np.int32:
        return (a.astype(np.int64) << 40) >> 40
    return (a & np.uint32(0xFFFFFF)).astype(np.int64)


@op("mul24", "mad24")
def mul24(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    shift = 16 if "hi" in ins.mods else 0
    dtype = NUMPY[kind]
    if ins.op == "mul24":
        return simple(d, ins, [kind] * 3, lambda a, b: ((low24(a) * low24(b)) >> shift).astype(dtype))
    return simple(d, ins, [kind] * 4, lambda a, b, c: ((low24(a) * low24(b)) >> shift).astype(dtype) + c)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division toward zero; by zero all ones, as the hardware's routine gives."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q = q + ((q * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(zero, ~a.dtype.type(0), q)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # by zero all ones as well: what an H200 gives, the ISA leaves it open
    return np.where(b == 0, ~a.dtype.type(0), a - quotient(a, b) * b)


def div_rem(d: Decoder, ins: Instruction, kind: str) -> Run:
    return simple(d, ins, [kind] * 3, quotient if ins.op == "div" else remainder)


@op("rem")
def rem(d: Decoder, ins: Instruction) -> Run:
    return div_rem(d, ins, ins.mods[-1])


@op("sad")
def sad(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    return simple(d, ins, [kind] * 4, lambda a, b, c: c + np.where(a < b, b - a, a - b))


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@op("and", "or", "xor")
def logic(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    if kind == "pred":
        target = d.dst(ins, ins.operands[0], "pred")
        (left, flip_left), (right, flip_right) = (d.predicate(ins, o) for o in ins.operands[1:3])
        function = _LOGIC[ins.op]
        return elementwise(
            ("pred", target), [("pred", left), ("pred", right)], lambda a, b: function(a ^ flip_left, b ^ flip_right)
        )
    return simple(d, ins, [kind] * 3, _LOGIC[ins.op], out=True)


@op("not")
def invert(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    return simple(d, ins, [kind] * 2, np.logical_not if kind == "pred" else np.bitwise_not, out=True)


@op("cnot")
def cnot(d: Decoder, ins: Instruction) -> Run:
    return simple(d, ins, [ins.mods[-1]] * 2, lambda a: a == 0)


@op("shl", "shr")
def shift(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    bits = WIDTHS[kind]
    dtype = NUMPY[kind]
    amount = ins.operands[2]
    function = np.left_shift if ins.op == "shl" else np.right_shift
    if isinstance(amount, Imm) and 0 <= int(amount.value) < bits:
        types = [(KEYS[kind], d.src(ins, ins.operands[1], kind)), (KEYS[kind], d.src(ins, amount, kind))]
        return elementwise((KEYS[kind], d.dst(ins, ins.operands[0], kind)), types, function, out=True)
    # amounts past the width shift everything out; the host's shift would take them modulo the width
    limit = np.uint32(bits - 1)
    if ins.op == "shr" and kind[0] == "s":
        return simple(d, ins, [kind, kind, "u32"], lambda a, n: a >> np.minimum(n, limit).astype(dtype))
    return simple(
        d, ins, [kind, kind, "u32"],
        lambda a, n: np.where(n > limit, dtype(0), function(a, np.minimum(n, limit).astype(dtype))),
    )  # fmt: skip


@op("shf")
def funnel(d: Decoder, ins: Instruction) -> Run:
    left = "l" in ins.mods
    wrap = "wrap" in ins.mods

    def compute(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        return (((both << n) >> np.uint64(32)) if left else (both >> n)).astype(np.uint32)

    return simple(d, ins, ["b32"] * 4, compute)


def ones(count: np.ndarray) -> np.ndarray:
    """uint64 with the low `count` (0 to 64) bits set."""
    count = count.astype(np.uint64)
    return np.where(count >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1))


@op("bfe")
def bit_field_extract(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    bits = WIDTHS[kind]
    signed = kind[0] == "s"

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        position, length = (b & np.uint32(255)).astype(np.int64), (c & np.uint32(255)).astype(np.int64)
        wide = a.view(f"u{bits // 8}").astype(np.uint64)
        shifted = np.where(position < bits, wide >> np.minimum(position, 63).astype(np.uint64), np.uint64(0))
        real = ones(np.minimum(length, np.maximum(bits - position, 0)))
        result = shifted & real
        if signed:
            top = np.minimum(position + length - 1, bits - 1)
            sign = (wide >> np.maximum(top, 0).astype(np.uint64) & np.uint64(1)).astype(np.bool_) & (length > 0)
            result = np.where(sign, result | ~real, result)
        return result.astype(f"u{bits // 8}").view(a.dtype)

    return simple(d, ins, [kind, kind, "u32", "u32"], compute)


@op("bfi")
def bit_field_insert(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    bits = WIDTHS[kind]

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, e: np.ndarray) -> np.ndarray:
        position, length = (c & np.uint32(255)).astype(np.int64), (e & np.uint32(255)).astype(np.int64)
        fits = position < bits
        where = np.minimum(position, 63).astype(np.uint64)
        mask = np.where(fits, ones(length) << where, np.uint64(0))
        moved = a.astype(np.uint64) << where
        return ((b.astype(np.uint64) & ~mask) | (moved & mask)).astype(a.dtype)

    return simple(d, ins, [kind, kind, kind, "u32", "u32"], compute)


def bit_count(a: np.ndarray) -> np.ndarray:
    """Set bits of each integer."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(a)
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1)
    return np.unpackbits(octets, axis=1).sum(axis=1)


def highest_bit(a: np.ndarray) -> np.ndarray:
    """Position of the highest set bit of unsigned integers, -1 for zero (int64)."""
    x = a.astype(np.uint64)
    for step in (1, 2, 4, 8, 16, 32):
        x = x | (x >> np.uint64(step))
    return bit_count(x).astype(np.int64) - 1


@op("bfind")
def bfind(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    bits = WIDTHS[kind]
    amount = "shiftamt" in ins.mods

    def compute(a: np.ndarray) -> np.ndarray:
        if kind[0] == "s":
            a = np.where(a < 0, ~a, a)
        found = highest_bit(a.view(f"u{bits // 8}"))
        if amount:
            found = np.where(found < 0, -1, bits - 1 - found)
        return found.astype(np.int32).view(np.uint32)

    return simple(d, ins, ["u32", kind], compute)


@op("clz")
def clz(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    return simple(d, ins, ["u32", kind], lambda a: WIDTHS[kind] - 1 - highest_bit(a))


@op("popc")
def popc(d: Decoder, ins: Instruction) -> Run:
    return simple(d, ins, ["u32", ins.mods[-1]], bit_count)


@op("brev")
def brev(d: Decoder, ins: Instruction) -> Run:
    kind = ins.mods[-1]
    size = WIDTHS[kind] // 8

    def compute(a: np.ndarray) -> np.ndarray:
        octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, size)
        bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
        return np.packbits(bits, axis=1, bitorder="little").view(f"u{size}").reshape(-1)

    return simple(d, ins, [kind, kind], compute)


def _selectors(mode: str, c: np.ndarray) -> np.ndarray:
    """[lanes, 4] byte selectors of `prmt` in a mode other than the default."""
    n = (c & np.uint32(3)).astype(np.int64)[:, None]
    i = np.arange(4)
    if mode == "f4e":
        return n + i
    if mode == "b4e":
        return (n - i) % 8
    if mode == "rc8":
        return n + 0 * i
    if mode == "ecl":
        return np.maximum(i, n)
    if mode == "ecr":
        return np.minimum(i, n)
    return (n & 1) * 2 + (i & 1)  # rc16


@op("prmt")
def prmt(d: Decoder, ins: Instruction) -> Run:
    mode = next((m for m in ins.mods if m != "b32"), "")

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        octets = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], axis=1)
        if mode:
            chosen = np.take_along_axis(octets, _selectors(mode, c), axis=1)
        else:
            selector = (c[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
            chosen = np.take_along_axis(octets, (selector & np.uint32(7)).astype(np.int64), axis=1)
            replicate = (selector & np.uint32(8)) != 0
            chosen = np.where(replicate, np.where(chosen & 0x80, np.uint8(255), np.uint8(0)), chosen)
        return np.ascontiguousarray(chosen).view(np.uint32).reshape(-1)

    return simple(d, ins, ["b32"] * 4, compute)


def lut3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


@op("lop3")
def lop3(d: Decoder, ins: Instruction) -> Run:
    target = ins.operands[0]
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise d.syntax(ins, "the table must be an immediate")
    value = int(table.value)
    sources = [("u32", d.src(ins, o, "b32")) for o in ins.operands[1:4]]
    if not isinstance(target, Pair):
        return elementwise(("u32", d.dst(ins, target, "b32")), sources, lambda a, b, c: lut3(a, b, c, value))
    combine = _LOGIC[ins.mods[0]]
    row, predicate = d.dst(ins, target.first, "b32"), d.dst(ins, target.second, "pred")
    other, flip = d.predicate(ins, ins.operands[5])

    def run(b: Any) -> None:
        sel = slice(None) if b.sel is None else b.sel
        x, y, z = (b.rows["u32"][r][sel] for _, r in sources)
        result = lut3(x, y, z, value)
        b.rows["pred"][predicate][sel] = combine(result != 0, b.rows["pred"][other][sel] ^ flip)
        b.rows["u32"][row][sel] = result

    return run


@op("dp4a", "dp2a")
def dot(d: Decoder, ins: Instruction) -> Run:
    left, right = [m for m in ins.mods if m in ("u32", "s32")]
    result = "s32" if "s32" in (left, right) else "u32"
    if ins.op == "dp4a":
        keys = [f"{left[0]}8x4", f"{right[0]}8x4"]
        start = slice(None)
    else:
        keys = [f"{left[0]}16x2", f"{right[0]}8x4"]
        start = slice(2, 4) if "hi" in ins.mods else slice(0, 2)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = (a.astype(np.int64) * b[:, start].astype(np.int64)).sum(axis=1) + c
        return total.astype(np.int64).astype(NUMPY[result])

    sources = [
        (keys[0], d.src(ins, ins.operands[1], "b32")),
        (keys[1], d.src(ins, ins.operands[2], "b32")),
        (KEYS[result], d.src(ins, ins.operands[3], result)),
    ]
    return elementwise((KEYS[result], d.dst(ins, ins.operands[0], result)), sources, compute)


def min_max(d: Decoder, ins: Instruction, kind: str) -> Run:
    function = np.minimum if ins.op == "min" else np.maximum
    if "relu" in ins.mods:
        return simple(d, ins, [kind] * 3, lambda a, b: np.maximum(function(a, b), a.dtype.type(0)))
    return simple(d, ins, [kind] * 3, function, out=True)
