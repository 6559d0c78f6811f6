"""Integer and bit instructions against Python integers."""

from __future__ import annotations

import harness
import numpy as np
import pytest

RNG = np.random.default_rng(7)
DTYPES = {
    "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip


def samples(kind: str, count: int = 192) -> np.ndarray:
    """Random values of all magnitudes, and the edges."""
    info = np.iinfo(DTYPES[kind])
    edges = [info.min, info.max, 0, 1, info.min + 1, info.max - 1, *([-1, -2] if info.min < 0 else [2, 3])]
    bits = RNG.integers(0, info.bits, count - len(edges))
    values = [
        int(x) >> (64 - int(s) - 1)
        for x, s in zip(RNG.integers(0, 2**63, bits.size, dtype=np.uint64), bits, strict=True)
    ]
    if info.min < 0:
        values = [v if flip else -v for v, flip in zip(values, RNG.random(bits.size) < 0.5, strict=True)]
    values = [min(max(v, info.min), info.max) for v in values]
    array = np.array([int(e) for e in edges] + values, dtype=object)
    RNG.shuffle(array)
    return np.array([int(v) for v in array], DTYPES[kind])


def wrap(value: int, kind: str) -> int:
    bits = np.iinfo(DTYPES[kind]).bits
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def check(code, kinds, reference, inputs=None, declare=""):
    """Run `code` with operands of kinds[1:] and compare each result with reference(ints)."""
    inputs = inputs or [samples(k) for k in kinds[1:]]
    (found,) = harness.run_op(code, inputs, [DTYPES[kinds[0]]], declare=declare)
    for i in range(inputs[0].size):
        args = [int(x[i]) for x in inputs]
        expected = wrap(reference(*args), kinds[0])
        assert int(found[i]) == expected, f"{code} of {args}: {int(found[i])}, expected {expected}"


def truncated_division(a, b):
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def truncated_remainder(a, b):
    return -1 if b == 0 else a - truncated_division(a, b) * b


ALL = ["u16", "s16", "u32", "s32", "u64", "s64"]
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "div": truncated_division,
    "rem": truncated_remainder,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, kind):
    check(f"{name}.{kind} %d, %a, %b;", [kind] * 3, BINARY[name])


@pytest.mark.parametrize("kind", ALL)
def test_multiply_high_wide_and_add(kind):
    bits = np.iinfo(DTYPES[kind]).bits
    check(f"mul.hi.{kind} %d, %a, %b;", [kind] * 3, lambda a, b: a * b >> bits)
    check(f"mad.lo.{kind} %d, %a, %b, %c;", [kind] * 4, lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind} %d, %a, %b, %c;", [kind] * 4, lambda a, b, c: (a * b >> bits) + c)
    check(f"sad.{kind} %d, %a, %b, %c;", [kind] * 4, lambda a, b, c: c + abs(a - b))
    if bits < 64:
        wide = kind[0] + str(2 * bits)
        check(f"mul.wide.{kind} %d, %a, %b;", [wide, kind, kind], lambda a, b: a * b)
        check(f"mad.wide.{kind} %d, %a, %b, %c;", [wide, kind, kind, wide], lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs(kind):
    check(f"abs.{kind} %d, %a;", [kind] * 2, abs)
    check(f"neg.{kind} %d, %a;", [kind] * 2, lambda a: -a)


def test_saturating_addition():
    low, high = -(2**31), 2**31 - 1
    check("add.sat.s32 %d, %a, %b;", ["s32"] * 3, lambda a, b: min(max(a + b, low), high))
    check("sub.sat.s32 %d, %a, %b;", ["s32"] * 3, lambda a, b: min(max(a - b, low), high))


def test_24_bit_multiplication():
    def low(x):
        return (x & 0xFFFFFF) - (1 << 24 if x & 0x800000 else 0)

    check("mul24.lo.s32 %d, %a, %b;", ["s32"] * 3, lambda a, b: low(a) * low(b))
    check("mad24.lo.u32 %d, %a, %b, %c;", ["u32"] * 4, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c)
    check("mul24.hi.u32 %d, %a, %b;", ["u32"] * 3, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16)


@pytest.mark.parametrize("op", ["add", "sub"])
def test_carry_chain(op):
    """64-bit arithmetic by 32-bit halves."""
    code = f"""
    .reg .b32 %a0, %a1, %b0, %b1;
    mov.b64 {{%a0, %a1}}, %a; mov.b64 {{%b0, %b1}}, %b;
    {op}.cc.u32 %a0, %a0, %b0; {op}c.u32 %a1, %a1, %b1;
    mov.b64 %d, {{%a0, %a1}};
    """
    check(code, ["u64"] * 3, BINARY[op])


def test_multiply_add_carry_chain():
    code = """
    .reg .b32 %lo, %hi; .reg .b32 %c0, %c1;
    mov.b64 {%c0, %c1}, %c;
    mad.lo.cc.u32 %lo, %a, %b, %c0; madc.hi.u32 %hi, %a, %b, %c1;
    mov.b64 %d, {%lo, %hi};
    """
    check(code, ["u64", "u32", "u32", "u64"], lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(kind):
    check(f"and.{kind} %d, %a, %b;", [kind] * 3, lambda a, b: a & b)
    check(f"or.{kind} %d, %a, %b;", [kind] * 3, lambda a, b: a | b)
    check(f"xor.{kind} %d, %a, %b;", [kind] * 3, lambda a, b: a ^ b)
    check(f"not.{kind} %d, %a;", [kind] * 2, lambda a: ~a)
    check(f"cnot.{kind} %d, %a;", [kind] * 2, lambda a: int(a == 0))


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"])
def test_shifts(kind):
    bits = np.iinfo(DTYPES[kind]).bits
    amounts = RNG.integers(0, bits + 9, 192).astype(np.uint32)
    amounts[:4] = [0, bits - 1, bits, 2**32 - 1]
    inputs = [samples(kind), amounts]
    if kind[0] == "b":
        check(f"shl.{kind} %d, %a, %b;", [kind, kind, "u32"], lambda a, n: a << min(n, bits), inputs)
    check(f"shr.{kind} %d, %a, %b;", [kind, kind, "u32"], lambda a, n: a >> min(n, bits), inputs)
    check(f"shr.{kind} %d, %a, 3;", [kind, kind], lambda a: a >> 3)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(mode):
    amounts = RNG.integers(0, 70, 192).astype(np.uint32)
    inputs = [samples("b32"), samples("b32"), amounts]

    def count(n):
        return n & 31 if mode == "wrap" else min(n, 32)

    check(
        f"shf.l.{mode}.b32 %d, %a, %b, %c;",
        ["b32", "b32", "b32", "u32"],
        lambda a, b, n: ((b << 32 | a) << count(n)) >> 32,
        inputs,
    )
    check(
        f"shf.r.{mode}.b32 %d, %a, %b, %c;",
        ["b32", "b32", "b32", "u32"],
        lambda a, b, n: (b << 32 | a) >> count(n),
        inputs,
    )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    bits = np.iinfo(DTYPES[kind]).bits

    def reference(a, position, length):
        # PTX ISA 9.7.1.24, bit by bit
        position, length = position & 255, length & 255
        raw = a & ((1 << bits) - 1)
        sign = 0 if kind[0] == "u" or length == 0 else raw >> min(position + length - 1, bits - 1) & 1
        return sum(
            (raw >> (position + i) & 1 if i < length and position + i < bits else sign) << i for i in range(bits)
        )

    inputs = [samples(kind), RNG.integers(0, 80, 192).astype(np.uint32), RNG.integers(0, 80, 192).astype(np.uint32)]
    inputs[2][:5] = [0, 255, 256, 64, 32]
    check(f"bfe.{kind} %d, %a, %b, %c;", [kind, kind, "u32", "u32"], reference, inputs)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_field_insert(kind):
    bits = np.iinfo(DTYPES[kind]).bits

    def reference(a, b, position, length):
        position, length = position & 255, length & 255
        for i in range(length):
            if position + i < bits:
                b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
        return b

    inputs = [
        samples(kind),
        samples(kind),
        RNG.integers(0, 80, 192).astype(np.uint32),
        RNG.integers(0, 80, 192).astype(np.uint32),
    ]
    inputs[3][:5] = [0, 255, 254, 64, 32]
    check(f"bfi.{kind} %d, %a, %b, %c, %f;", [kind, kind, kind, "u32", "u32"], reference, inputs)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_searches(kind):
    bits = np.iinfo(DTYPES[kind]).bits

    def position(a):
        return (~a if a < 0 else a).bit_length() - 1

    def amount(a):
        return -1 if position(a) < 0 else bits - 1 - position(a)

    check(f"bfind.{kind} %d, %a;", ["u32", kind], position)
    check(f"bfind.shiftamt.{kind} %d, %a;", ["u32", kind], amount)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_counts(kind):
    bits = np.iinfo(DTYPES[kind]).bits
    check(f"clz.{kind} %d, %a;", ["u32", kind], lambda a: bits - a.bit_length())
    check(f"popc.{kind} %d, %a;", ["u32", kind], lambda a: bin(a).count("1"))
    check(f"brev.{kind} %d, %a;", [kind, kind], lambda a: int(f"{a:0{bits}b}"[::-1], 2))


def octets(a, b):
    return list((b << 32 | a).to_bytes(8, "little"))


def test_permute():
    def reference(a, b, c):
        data, result = octets(a, b), 0
        for i in range(4):
            selector = c >> 4 * i & 15
            byte = data[selector & 7]
            if selector & 8:
                byte = 255 if byte & 128 else 0
            result |= byte << 8 * i
        return result

    check("prmt.b32 %d, %a, %b, %c;", ["b32"] * 4, reference)
    modes = {
        "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
        "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
        "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
        "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
        "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
        "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
    }
    for mode, table in modes.items():
        check(
            f"prmt.b32.{mode} %d, %a, %b, %c;", ["b32"] * 4,
            lambda a, b, c, table=table: sum(octets(a, b)[table[c & 3][i]] << 8 * i for i in range(4)),
        )  # fmt: skip


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0xFF, 0x1B])
def test_lop3(table):
    def reference(a, b, c):
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    check(f"lop3.b32 %d, %a, %b, %c, {table};", ["b32"] * 4, reference)


def test_dot_products():
    def parts(x, signed, width):
        data = [(x >> width * i) & ((1 << width) - 1) for i in range(32 // width)]
        return [v - (1 << width) if signed and v >> (width - 1) else v for v in data]

    def dot(a, b, c):
        return c + sum(x * y for x, y in zip(a, b, strict=True))

    for left, right in (("u32", "u32"), ("s32", "u32"), ("u32", "s32"), ("s32", "s32")):
        result = "s32" if "s32" in (left, right) else "u32"

        def reference(a, b, c, left=left, right=right):
            return dot(parts(a, left == "s32", 8), parts(b, right == "s32", 8), c)

        check(f"dp4a.{left}.{right} %d, %a, %b, %c;", [result, "b32", "b32", result], reference)
    for half, start in (("lo", 0), ("hi", 2)):

        def two(a, b, c, start=start):
            return dot(parts(a, True, 16), parts(b, False, 8)[start : start + 2], c)

        check(f"dp2a.{half}.s32.u32 %d, %a, %b, %c;", ["s32", "b32", "b32", "s32"], two)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s16"])
def test_comparison_and_selection(kind):
    a, b = samples(kind), samples(kind)
    b[::5] = a[::5]
    names = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
    for name, function in names.items():
        reference = getattr(np, function)
        (found,) = harness.run_op(f"setp.{name}.{kind} %d, %a, %b;", [a, b], [np.bool_])
        np.testing.assert_array_equal(found, reference(a, b))
        (found,) = harness.run_op(f"setp.{name}.{kind} %p, %a, %b; selp.{kind} %d, %a, %b, %p;", [a, b], [a.dtype])
        np.testing.assert_array_equal(found, np.where(reference(a, b), a, b))


def test_setp_combines_and_gives_the_complement():
    a, b, c = samples("u32"), samples("u32"), samples("u32")
    code = "setp.gt.u32 %p, %c, 1000; setp.lt.{op}.u32 %d|%e, %a, %b, {neg}%p;"
    for op, function in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items():
        for neg in ("", "!"):
            d, e = harness.run_op(code.format(op=op, neg=neg), [a, b, c], [np.bool_, np.bool_])
            extra = (c > 1000) ^ (neg == "!")
            np.testing.assert_array_equal(d, function(a < b, extra))
            np.testing.assert_array_equal(e, function(a >= b, extra))


def test_set_and_slct():
    a, b = samples("s32"), samples("s32")
    (found,) = harness.run_op("set.lt.u32.s32 %d, %a, %b;", [a, b], [np.uint32])
    np.testing.assert_array_equal(found, np.where(a < b, 0xFFFFFFFF, 0))
    (found,) = harness.run_op("set.lt.f32.s32 %d, %a, %b;", [a, b], [np.float32])
    np.testing.assert_array_equal(found, np.where(a < b, 1, 0))
    c = samples("s32")
    (found,) = harness.run_op("slct.b32.s32 %d, %a, %b, %c;", [a, b, c], [np.int32])
    np.testing.assert_array_equal(found, np.where(c >= 0, a, b))


def test_packing_and_unpacking():
    a = samples("u64")
    code = ".reg .b16 %h0, %h1, %h2, %h3; mov.b64 {%h0, %h1, %h2, %h3}, %a; mov.b64 %d, {%h3, %h2, %h1, %h0};"
    (found,) = harness.run_op(code, [a], [np.uint64])
    np.testing.assert_array_equal(
        found, np.ascontiguousarray(a.view(np.uint16).reshape(-1, 4)[:, ::-1]).view(np.uint64)[:, 0]
    )


INTEGERS = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]


def _can_clamp(target, source):
    """Whether `.sat` is allowed: some value of the source lies outside the target."""
    return not (target[0] == source[0] and int(target[1:]) >= int(source[1:])) and not (
        source[0] == "u" and target[0] == "s" and int(target[1:]) > int(source[1:])
    )


CONVERSIONS = [(t, s, sat) for t in INTEGERS for s in INTEGERS for sat in ("", ".sat") if not sat or _can_clamp(t, s)]


@pytest.mark.parametrize(("target", "source", "sat"), CONVERSIONS)
def test_integer_conversions(target, source, sat):
    raw = samples(f"b{max(16, int(source[1:]))}")
    result = np.dtype(f"u{max(16, int(target[1:])) // 8}")
    (found,) = harness.run_op(f"cvt{sat}.{target}.{source} %d, %a;", [raw], [result])
    info = np.iinfo(f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}")
    width = int(source[1:])
    for pattern, got in zip(raw.tolist(), found.tolist(), strict=True):
        value = signed(pattern, width) if source[0] == "s" else pattern & ((1 << width) - 1)
        if sat:
            value = min(max(value, info.min), info.max)
        else:
            value = signed(value, info.bits) if info.min < 0 else value & ((1 << info.bits) - 1)
        # narrow results fill the register with their sign or with zeros
        assert got == value & ((1 << result.itemsize * 8) - 1)


def signed(pattern: int, width: int) -> int:
    pattern &= (1 << width) - 1
    return pattern - (1 << width) if pattern >> (width - 1) else pattern
