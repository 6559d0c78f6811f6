"""State spaces, vectors, atomics, device memory past 4 GiB, and which blocks run."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("space", ["global", "shared", "local", "generic-shared", "generic-local", "generic-global"])
@pytest.mark.parametrize(
    ("kind", "vector"),
    [("b8", 1), ("b16", 1), ("b32", 1), ("b64", 1), ("b8", 4), ("b16", 4), ("b32", 2), ("f32", 4), ("b64", 2)],
)
def test_store_and_load_back(space, kind, vector):
    """Every thread writes its own element of a buffer in a space, and reads it back."""
    bits = int(kind[1:])
    size = bits // 8 * vector
    register = f".b{max(16, bits)}" if kind != "f32" else ".f32"
    prefix = f".v{vector}" if vector > 1 else ""
    names = [f"%x{i}" for i in range(vector)]
    operand = "{" + ", ".join(names) + "}" if vector > 1 else names[0]
    where = space.removeprefix("generic-")
    generic = space != where
    slot = {"local": "mov.u64 %s, buffer;", "shared": f"mov.u64 %s, buffer; mad.wide.u32 %s, %t, {size}, %s;"}.get(
        where, f"ld.param.u64 %s, [scratch]; mad.wide.u32 %s, %t, {size}, %s;"
    )
    declare = "" if where == "global" else f".{where} .align 16 .b8 buffer[{size * (64 if where == 'shared' else 1)}];"
    convert = f"cvta.{where}.u64 %s, %s;" if generic else ""
    suffix = "" if generic else f".{where}"
    body = f"""
    {declare}
    .reg .b32 %t; .reg .b64 %s, %a, %o; .reg {register} {", ".join(names)};
    mov.u32 %t, %tid.x; {slot} {convert}
    ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, {size}, %a;
    ld.param.u64 %o, [o]; mad.wide.u32 %o, %t, {size}, %o;
    ld.global{prefix}.{kind} {operand}, [%a];
    st{suffix}{prefix}.{kind} [%s], {operand};
    ld{suffix}{prefix}.{kind} {operand}, [%s];
    st.global.cs{prefix}.{kind} [%o], {operand};
    """
    a = RNG.integers(0, 256, 64 * size, dtype=np.uint8)
    o, scratch = np.zeros_like(a), np.zeros_like(a)
    emulator.launch(
        harness.kernel_text(body, ".param .u64 a, .param .u64 o, .param .u64 scratch"), 1, 64, [a, o, scratch]
    )
    np.testing.assert_array_equal(o, a)


def test_narrow_loads_extend_by_their_type():
    body = """
    .reg .b32 %x, %y; .reg .b64 %a, %o;
    ld.param.u64 %a, [a]; ld.param.u64 %o, [o];
    ld.global.s8 %x, [%a]; ld.global.u8 %y, [%a]; st.global.v2.u32 [%o], {%x, %y};
    ld.global.nc.L1::no_allocate.L2::128B.s16 %x, [%a]; ld.global.ca.u16 %y, [%a]; st.global.v2.u32 [%o+8], {%x, %y};
    """
    o = np.zeros(4, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 a, .param .u64 o"), 1, 1, [np.array([0x80FE], np.uint16), o])
    assert o.tolist() == [0xFFFFFFFE, 0xFE, 0xFFFF80FE, 0x80FE]


def test_constants_and_initialised_globals():
    before = """
    .const .align 4 .f32 table[4] = {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
    .global .align 8 .b8 text[8] = {1, 2, 3, 0xff};
    .global .align 8 .u64 pointer = generic(text);
    .global .align 4 .b32 counter;
    """
    body = """
    .reg .f32 %f; .reg .b32 %x; .reg .b64 %o, %p;
    ld.param.u64 %o, [o];
    ld.const.f32 %f, [table+8]; st.global.f32 [%o], %f;
    ld.global.u64 %p, [pointer]; ld.u32 %x, [%p]; st.global.u32 [%o+4], %x;
    atom.global.add.u32 %x, [counter], 3; ld.global.u32 %x, [counter]; st.global.u32 [%o+8], %x;
    """
    o = np.zeros(3, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 o", before=before), 1, 1, [o])
    assert o.tolist() == [0x40400000, 0xFF030201, 3]


ATOMICS = {
    "add.u32": lambda old, x: (old + x) % 2**32,
    "min.s32": None,
    "max.u32": max,
    "and.b32": lambda old, x: old & x,
    "or.b32": lambda old, x: old | x,
    "xor.b32": lambda old, x: old ^ x,
    "exch.b32": lambda old, x: x,
    "inc.u32": lambda old, x: 0 if old >= x else old + 1,
    "dec.u32": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_in_the_order_of_lanes(name):
    """128 threads on 5 words; each gets the old value, one after the other."""
    body = f"""
    .reg .b32 %t, %x, %i; .reg .b64 %a, %v, %o;
    mov.u32 %t, %tid.x; ld.param.u64 %v, [v]; mad.wide.u32 %v, %t, 4, %v; ld.global.u32 %x, [%v];
    rem.u32 %i, %t, 5; ld.param.u64 %a, [a]; mad.wide.u32 %a, %i, 4, %a;
    atom.global.relaxed.gpu.{name} %x, [%a], %x;
    ld.param.u64 %o, [o]; mad.wide.u32 %o, %t, 4, %o; st.global.u32 [%o], %x;
    """
    a, v = RNG.integers(0, 60, 5, dtype=np.uint32), RNG.integers(0, 60, 128, dtype=np.uint32)
    expected, olds = a.tolist(), []
    function = ATOMICS[name] or min
    for t in range(128):
        olds.append(expected[t % 5])
        expected[t % 5] = function(expected[t % 5], int(v[t]))
    o = np.zeros(128, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 a, .param .u64 v, .param .u64 o"), 1, 128, [a, v, o])
    assert a.tolist() == expected
    assert o.tolist() == olds


def test_compare_and_swap_and_float_additions():
    body = """
    .reg .b32 %t, %x; .reg .f32 %f; .reg .f64 %g; .reg .b64 %a;
    ld.param.u64 %a, [a]; mov.u32 %t, %tid.x;
    atom.global.cas.b32 %x, [%a], %t, 99;
    cvt.rn.f32.u32 %f, %t; red.global.add.f32 [%a+4], %f;
    cvt.rn.f64.u32 %g, %t; red.global.add.f64 [%a+8], %g;
    """
    a = np.zeros(4, np.uint32)
    a[0] = 7
    emulator.launch(harness.kernel_text(body, ".param .u64 a"), 1, 32, [a])
    assert a[0] == 99
    assert a[1:2].view(np.float32)[0] == 496
    assert a[2:].view(np.float64)[0] == 496


FAR = """
    .reg .b32 %t, %x; .reg .b64 %i, %b, %a;
    mov.u32 %t, %tid.x; cvt.u64.u32 %i, %ctaid.x; {index}
    shl.b64 %i, %i, 2; ld.param.u64 %a, [a]; add.u64 %a, %a, %i;
    ld.global.u32 %x, [%a]; add.u32 %x, %x, 1; st.global.u32 [%a], %x;
"""


def test_one_far_block_of_a_huge_grid():
    """An allocation of 32 GiB costs what is touched; a 32-bit index overflow shows."""
    right = FAR.format(index="cvt.u64.u32 %b, %t; mad.lo.u64 %i, %i, 1024, %b;").replace(
        "cvt.u64.u32 %i, %ctaid.x", "mov.u32 %x, %ctaid.x; cvt.u64.u32 %i, %x"
    )
    wrong = FAR.format(index="shl.b32 %x, %x, 10; add.u32 %x, %x, %t; cvt.u64.u32 %i, %x;").replace(
        "cvt.u64.u32 %i, %ctaid.x", "mov.u32 %x, %ctaid.x"
    )
    machine = emulator.Machine()
    address = machine.alloc(1 << 35)
    far = (1 << 33) // 1024 - 1
    machine.write(address + far * 4096, np.arange(1024, dtype=np.uint32))
    report = machine.launch(
        harness.kernel_text(right, ".param .u64 a"), 1 << 23, 1024, [np.uint64(address)], blocks=[far]
    )
    np.testing.assert_array_equal(machine.read(address + far * 4096, np.uint32, 1024), np.arange(1024) + 1)
    assert report.blocks_run == 1
    with pytest.raises(emulator.UninitialisedRead):
        machine.launch(harness.kernel_text(wrong, ".param .u64 a"), 1 << 23, 1024, [np.uint64(address)], blocks=[far])


def test_placing_and_freeing():
    machine = emulator.Machine()
    address = machine.alloc(256, at=1 << 40)
    assert address == 1 << 40
    machine.write(address, np.arange(64, dtype=np.float32))
    assert machine.read(address + 8, np.float32, 2).tolist() == [2.0, 3.0]
    with pytest.raises(emulator.EmulatorError, match="overlaps"):
        machine.alloc(16, at=(1 << 40) + 128)
    other = machine.alloc(100, align=512)
    assert other % 512 == 0
    machine.free(address)
    with pytest.raises(emulator.EmulatorError):
        machine.read(address, np.float32, 1)
    text = harness.kernel_text(".reg .b64 %a; ld.param.u64 %a, [a]; st.global.u32 [%a], 1;", ".param .u64 a")
    with pytest.raises(emulator.OutOfBounds):
        machine.launch(text, 1, 1, [np.uint64(address)])


def test_blocks_can_be_chosen_by_coordinates():
    body = """
    .reg .b32 %x, %y; .reg .b64 %a; mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mad.lo.u32 %x, %y, 4, %x;
    ld.param.u64 %a, [a]; mad.wide.u32 %a, %x, 4, %a; st.global.u32 [%a], 1;
    """
    a = np.zeros((3, 4), np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 a"), (4, 3), 32, [a], blocks=[(1, 2), 0])
    assert np.argwhere(a).tolist() == [[0, 0], [2, 1]]
    with pytest.raises(emulator.LaunchError):
        emulator.launch(harness.kernel_text(body, ".param .u64 a"), (4, 3), 32, [a], blocks=[12])


def test_arguments_that_are_views_keep_their_strides():
    body = """
    .reg .b32 %t, %x; .reg .b64 %a; mov.u32 %t, %tid.x; ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, 8, %a;
    ld.global.u32 %x, [%a]; add.u32 %x, %x, 100; st.global.u32 [%a], %x;
    """
    base = np.arange(20, dtype=np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 a"), 1, 5, [base[1:11:2]])
    expected = np.arange(20)
    expected[1:11:2] += 100
    np.testing.assert_array_equal(base, expected)


def test_array_given_twice_has_one_address():
    body = """
    .reg .b32 %x; .reg .b64 %a, %b; ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; st.global.u32 [%a], 5;
    ld.global.u32 %x, [%b]; st.global.u32 [%b+4], %x;
    """
    a = np.zeros(2, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 a, .param .u64 b"), 1, 1, [a, a])
    assert a.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.zeros(1)], "2 parameters"),
        ([np.zeros(1), np.int64(3)], "4 bytes"),
        ([np.zeros(1), 3], "NumPy scalars.*pass it as one"),
    ],
)
def test_wrong_arguments(args, message):
    text = harness.kernel_text("ret;", ".param .u64 a, .param .u32 n")
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.launch(text, 1, 1, args)


@pytest.mark.parametrize("arch", ["hopper", "90", "sm_9", ""])
def test_an_architecture_that_is_none_is_refused(arch):
    with pytest.raises(emulator.LaunchError, match="for instance 'sm_90'"):
        emulator.launch(harness.kernel_text("ret;"), 1, 32, [], arch=arch)


def test_wrong_launch_dimensions():
    text = harness.kernel_text("ret;").replace(".entry k()", ".entry k() .maxntid 64, 1, 1")
    emulator.launch(text, 1, 64, [])
    for grid, block in ((1, 65), (0, 32), ((1, 1, 1, 1), 32), (1, (32, 33))):
        with pytest.raises(emulator.LaunchError):
            emulator.launch(text, grid, block, [])
    with pytest.raises(emulator.LaunchError, match="shared"):
        emulator.launch(text, 1, 32, [], shared_bytes=300_000)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_async_copy_fills_with_zeros(size):
    body = f"""
    .shared .align 16 .b8 s[1024];
    .reg .b32 %t, %slot, %n, %x; .reg .b64 %a, %o, %v; .reg .pred %p;
    mov.u32 %t, %tid.x; mul.lo.u32 %slot, %t, {size};
    ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, {size}, %a;
    ld.param.u64 %v, [n]; mad.wide.u32 %v, %t, 4, %v; ld.global.u32 %n, [%v];
    cp.async.ca.shared::cta.global.L2::128B [%slot], [%a], {size}, %n;
    cp.async.wait_all; bar.sync 0;
    ld.param.u64 %o, [o]; mad.wide.u32 %o, %t, {size}, %o;
    """ + "".join(f"ld.shared.u32 %x, [%slot+{i}]; st.global.u32 [%o+{i}], %x;" for i in range(0, size, 4))
    a = RNG.integers(1, 256, 32 * size, dtype=np.uint8)
    n = RNG.integers(0, size + 1, 32).astype(np.uint32)
    o = np.zeros_like(a)
    emulator.launch(harness.kernel_text(body, ".param .u64 a, .param .u64 n, .param .u64 o"), 1, 32, [a, n, o])
    keep = np.arange(size) < n[:, None]
    np.testing.assert_array_equal(o.reshape(32, size), np.where(keep, a.reshape(32, size), 0))


def test_async_copy_that_ignores_its_source_reads_nothing():
    body = """
    .shared .align 16 .b8 s[512];
    .reg .b32 %t, %slot, %x; .reg .b64 %a, %o; .reg .pred %p;
    mov.u32 %t, %tid.x; shl.b32 %slot, %t, 4; setp.ge.u32 %p, %t, 4;
    ld.param.u64 %a, [a]; mad.wide.u32 %a, %t, 16, %a;
    cp.async.cg.shared.global [%slot], [%a], 16, %p;
    cp.async.wait_all; bar.sync 0;
    ld.shared.u32 %x, [%slot+12]; ld.param.u64 %o, [o]; mad.wide.u32 %o, %t, 4, %o; st.global.u32 [%o], %x;
    """
    a, o = np.arange(1, 17, dtype=np.uint32), np.full(32, 9, np.uint32)  # rows past 4 would be out of bounds
    emulator.launch(harness.kernel_text(body, ".param .u64 a, .param .u64 o"), 1, 32, [a, o])
    assert o.tolist() == [4, 8, 12, 16] + [0] * 28
