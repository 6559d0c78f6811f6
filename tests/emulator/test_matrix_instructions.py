"""ldmatrix, stmatrix, mma and wmma: layouts as the ISA draws them, arithmetic on integers, where it is exact."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator

RNG = np.random.default_rng(17)
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def half_bits(x):
    return np.asarray(x).astype(np.float16).view(np.uint16)


def bf16_bits(x):
    return (np.asarray(x).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def pack(parts):
    """Little-endian packing of [.., n] narrow patterns to 32-bit registers."""
    return np.ascontiguousarray(parts).view(np.uint32)


def run_mma(instruction, a, b, c, registers, out_dtype):
    """a, b, c: [32, n] register images; registers: how many d has."""
    declare, load = [".reg .b32 %t; .reg .b64 %p;", "mov.u32 %t, %tid.x;"][0:1], ["mov.u32 %t, %tid.x;"]
    names = {}
    for name, array in (("a", a), ("b", b), ("c", c)):
        width = array.dtype.itemsize
        names[name] = [f"%{name}{i}" for i in range(array.shape[1])]
        declare.append(f".reg .b{8 * width} {', '.join(names[name])};")
        load.append(f"ld.param.u64 %p, [{name}]; mad.wide.u32 %p, %t, {width * array.shape[1]}, %p;")
        load += [f"ld.global.b{8 * width} {r}, [%p+{i * width}];" for i, r in enumerate(names[name])]
    width = 8 if out_dtype == np.float64 else 4
    names["d"] = [f"%d{i}" for i in range(registers)]
    declare.append(f".reg .b{8 * width} {', '.join(names['d'])};")
    operands = ", ".join("{" + ", ".join(names[x]) + "}" for x in "dabc")
    store = [f"ld.param.u64 %p, [d]; mad.wide.u32 %p, %t, {width * registers}, %p;"]
    store += [f"st.global.b{8 * width} [%p+{i * width}], {r};" for i, r in enumerate(names["d"])]
    text = harness.kernel_text("\n".join([*declare, *load, f"{instruction} {operands};", *store]),
                               ", ".join(f".param .u64 {x}" for x in "abcd"))  # fmt: skip
    d = np.zeros((32, registers * width // np.dtype(out_dtype).itemsize), out_dtype)
    emulator.launch(text, 1, 32, [np.ascontiguousarray(x) for x in (a, b, c)] + [d])
    return d


def integers(*shape):
    return RNG.integers(-6, 7, shape)


@pytest.mark.parametrize(("kind", "encode"), [("f16", half_bits), ("bf16", bf16_bits)])
def test_m16n8k16(kind, encode):
    a, b, c = integers(16, 16), integers(16, 8), integers(16, 8)
    rows = np.stack([G, G, G + 8, G + 8, G, G, G + 8, G + 8], 1)
    cols = np.stack([2 * T, 2 * T + 1, 2 * T, 2 * T + 1, 2 * T + 8, 2 * T + 9, 2 * T + 8, 2 * T + 9], 1)
    ks = np.stack([2 * T, 2 * T + 1, 2 * T + 8, 2 * T + 9], 1)
    ra, rb = pack(encode(a[rows, cols])), pack(encode(b[ks, G[:, None]]))
    cr, cc = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    d = run_mma(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", ra, rb, c[cr, cc].astype(np.float32), 4, np.float32
    )
    np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])
    if kind == "f16":
        d = run_mma(
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", ra, rb, pack(half_bits(c[cr, cc])), 2, np.float16
        )
        np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])


def test_m16n8k8_tf32():
    a, b, c = integers(16, 8), integers(8, 8), integers(16, 8)
    ra = a[np.stack([G, G + 8, G, G + 8], 1), np.stack([T, T, T + 4, T + 4], 1)].astype(np.float32)
    rb = b[np.stack([T, T + 4], 1), G[:, None]].astype(np.float32)
    cr, cc = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    d = run_mma(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
        ra.view(np.uint32),
        rb.view(np.uint32),
        c[cr, cc].astype(np.float32),
        4,
        np.float32,
    )
    np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])


def test_m8n8k4_f64():
    a, b, c = integers(8, 4), integers(4, 8), integers(8, 8)
    cr, cc = np.stack([G, G], 1), np.stack([2 * T, 2 * T + 1], 1)
    d = run_mma(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
        a[G, T][:, None].astype(np.float64),
        b[T, G][:, None].astype(np.float64),
        c[cr, cc].astype(np.float64),
        2,
        np.float64,
    )
    np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])


@pytest.mark.parametrize("kinds", [("s8", "s8"), ("u8", "s8")])
def test_m16n8k32_int8(kinds):
    a = RNG.integers(0 if kinds[0] == "u8" else -128, 256 if kinds[0] == "u8" else 128, (16, 32))
    b, c = RNG.integers(-128, 128, (32, 8)), RNG.integers(-1000, 1000, (16, 8))
    i = np.arange(16)
    rows = np.where(i // 4 % 2, G[:, None] + 8, G[:, None])
    cols = 4 * T[:, None] + i % 4 + i // 8 * 16
    j = np.arange(8)
    ks = 4 * T[:, None] + j % 4 + j // 4 * 16
    ra = pack(a[rows, cols].astype(np.uint8 if kinds[0] == "u8" else np.int8))
    rb = pack(b[ks, G[:, None]].astype(np.int8))
    cr, cc = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    d = run_mma(
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kinds[0]}.{kinds[1]}.s32",
        ra,
        rb,
        c[cr, cc].astype(np.int32),
        4,
        np.int32,
    )
    np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])


def test_m16n8k32_fp8():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a, b, c = integers(16, 32), integers(32, 8), integers(16, 8)
    i, j = np.arange(16), np.arange(8)
    rows, cols = np.where(i // 4 % 2, G[:, None] + 8, G[:, None]), 4 * T[:, None] + i % 4 + i // 8 * 16
    ks = 4 * T[:, None] + j % 4 + j // 4 * 16
    ra = pack(a[rows, cols].astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    rb = pack(b[ks, G[:, None]].astype(ml_dtypes.float8_e5m2).view(np.uint8))
    b = b.astype(ml_dtypes.float8_e5m2).astype(int)  # 5 bits of integer don't all fit two bits of mantissa
    cr, cc = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    d = run_mma(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", ra, rb, c[cr, cc].astype(np.float32), 4, np.float32
    )
    np.testing.assert_array_equal(d, (a @ b + c)[cr, cc])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count, transposed):
    """Load matrices from rows in scattered order, look at the registers, store them back elsewhere."""
    registers = ", ".join(f"%r{i}" for i in range(count))
    body = (
        f"""
    .shared .align 16 .b8 s[1024];
    .reg .b32 %t, %x, %row, %to, {registers}; .reg .b64 %a, %o;
    mov.u32 %t, %tid.x;
    ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, 16, %a;
    ld.param.u64 %o, [rows]; mad.wide.u32 %o, %t, 4, %o; ld.global.u32 %row, [%o];
    .reg .b32 %q0, %q1, %q2, %q3;
    ld.global.v4.u32 {{%q0, %q1, %q2, %q3}}, [%a];
    shl.b32 %x, %t, 4;
    st.shared.v4.u32 [%x], {{%q0, %q1, %q2, %q3}};
    bar.sync 0;
    shl.b32 %row, %row, 4;
    ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [%row];
    ld.param.u64 %o, [regs]; mad.wide.u32 %o, %t, {4 * count}, %o;
    """
        + "".join(f"st.global.u32 [%o+{4 * i}], %r{i};" for i in range(count))
        + f"""
    add.u32 %to, %row, 512;
    stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%to], {{{registers}}};
    bar.sync 0;
    setp_free:
    ld.param.u64 %o, [back]; mad.wide.u32 %o, %t, 16, %o;
    .reg .pred %p; setp.ge.u32 %p, %t, {8 * count}; @%p ret;
    ld.shared.v4.u32 {{%q0, %q1, %q2, %q3}}, [%to];
    st.global.v4.u32 [%o], {{%q0, %q1, %q2, %q3}};
    """
    )
    data = RNG.integers(0, 65536, (32, 8), dtype=np.uint16)
    rows = RNG.permutation(32).astype(np.uint32)
    regs, back = np.zeros((32, count, 2), np.uint16), np.zeros((32, 8), np.uint16)
    params = ".param .u64 a, .param .u64 rows, .param .u64 regs, .param .u64 back"
    emulator.launch(harness.kernel_text(body, params), 1, 32, [data, rows, regs, back])
    for m in range(count):
        matrix = data[rows[8 * m : 8 * m + 8]]
        for lane in range(32):
            r, c = lane // 4, lane % 4 * 2
            expected = matrix[r, c : c + 2] if not transposed else matrix[c : c + 2, r]
            np.testing.assert_array_equal(regs[lane, m], expected)
        np.testing.assert_array_equal(back[8 * m : 8 * m + 8], matrix, err_msg="stmatrix undoes ldmatrix")


WMMA = {
    # shape: m, n, k; element; accumulator; registers of a, b, c
    "f16": ("m16n16k16", 16, 16, 16, "f16", "f32", 8, 8, 8),
    "f16-narrow": ("m32n8k16", 32, 8, 16, "f16", "f32", 8, 8, 8),
    "bf16": ("m16n16k16", 16, 16, 16, "bf16", "f32", 4, 4, 8),
    "tf32": ("m16n16k8", 16, 16, 8, "tf32", "f32", 4, 4, 8),
    "s8": ("m16n16k16", 16, 16, 16, "s8", "s32", 2, 2, 8),
    "f64": ("m8n8k4", 8, 8, 4, "f64", "f64", 1, 1, 2),
}
_NUMPY = {
    "f16": half_bits,
    "bf16": bf16_bits,
    **{
        name: lambda x, dtype=dtype: x.astype(dtype)
        for name, dtype in {"tf32": "f4", "s8": "i1", "f64": "f8", "f32": "f4", "s32": "i4"}.items()
    },
}


@pytest.mark.parametrize("case", WMMA)
@pytest.mark.parametrize(("la", "lb"), [("row", "row"), ("row", "col"), ("col", "row")])
def test_wmma(case, la, lb):
    shape, m, n, k, element, acc, na, nb, nc = WMMA[case]
    width = ".b64" if element == "f64" else ".b32"
    lists = {}
    declare = [".reg .b64 %p;"]
    for name, count in (("a", na), ("b", nb), ("c", nc)):
        names = [f"%{name}{i}" for i in range(count)]
        declare.append(f".reg {width} {', '.join(names)};")
        lists[name] = "{" + ", ".join(names) + "}"
    types = f"{acc}.{element}.{element}.{acc}" if element != "f16" else f"{acc}.{acc}"
    # strides of whole 16-byte units, as the ISA asks
    unit = 16 // _NUMPY[element](np.zeros(1)).itemsize
    lda, ldb = (k if la == "row" else m) + unit, (n if lb == "row" else k) + 2 * unit
    body = "\n".join([
        *declare,
        f"ld.param.u64 %p, [a]; wmma.load.a.sync.aligned.{la}.{shape}.global.{element} {lists['a']}, [%p], {lda};",
        f"ld.param.u64 %p, [b]; wmma.load.b.sync.aligned.{lb}.{shape}.global.{element} {lists['b']}, [%p], {ldb};",
        f"ld.param.u64 %p, [c]; wmma.load.c.sync.aligned.row.{shape}.global.{acc} {lists['c']}, [%p], {n};",
        f"wmma.mma.sync.aligned.{la}.{lb}.{shape}.{types} {lists['c']}, {lists['a']}, {lists['b']}, {lists['c']};",
        f"ld.param.u64 %p, [c]; wmma.store.d.sync.aligned.row.{shape}.global.{acc} [%p], {lists['c']}, {n};",
    ])  # fmt: skip
    a, b, c = integers(m, k), integers(k, n), integers(m, n)
    sa = np.zeros((m, lda) if la == "row" else (k, lda), int)
    sb = np.zeros((k, ldb) if lb == "row" else (n, ldb), int)
    sa[:, : (k if la == "row" else m)] = a if la == "row" else a.T
    sb[:, : (n if lb == "row" else k)] = b if lb == "row" else b.T
    out = _NUMPY[acc](c)
    emulator.launch(
        harness.kernel_text(body, ".param .u64 a, .param .u64 b, .param .u64 c"),
        1,
        32,
        [_NUMPY[element](sa), _NUMPY[element](sb), out],
    )
    np.testing.assert_array_equal(out, a @ b + c)


def test_wrong_number_of_registers():
    body = """
    .reg .b32 %a<4>, %b<2>, %c<4>;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%c0,%c1,%c2,%c3}, {%a0,%a1,%a2}, {%b0,%b1}, {%c0,%c1,%c2,%c3};
    """
    with pytest.raises(emulator.PtxSyntaxError, match="operand A takes 4 registers"):
        emulator.launch(harness.kernel_text(body), 1, 32, [])
