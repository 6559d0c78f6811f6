"""`wgmma`: layouts, types and arithmetic against their definitions, and what its asynchrony forbids."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_harness import execute, program

from numba_gemm import emulator
from numba_gemm.emulator import tensorcore

RAW = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "s8": np.int8, "u8": np.uint8}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1}
CODE = {0: 0, 128: 1, 64: 2, 32: 3}
B_AT = 16384


def operand(values, at, swizzle, major, size):
    """(image: {byte address: bytes}, descriptor) of an operand [rows, k] whose canonical layout starts at `at`.

    Written from the ISA's picture of the layouts: 8 x 8 tiles of 16-byte chunks, or parts of them, one after another.
    """
    rows, k = values.shape
    per = 16 // size
    image = {}
    width = swizzle // 16 or 1  # chunks in a row of a tile
    if major == "k":
        leading, stride = (128, 256) if not swizzle else (16, 8 * swizzle)
        for row in range(rows):
            for chunk in range(k // per):
                if swizzle:
                    address = at + row // 8 * stride + row % 8 * swizzle + chunk * 16
                else:
                    address = at + row // 8 * stride + row % 8 * 16 + chunk * leading
                image[address] = values[row, chunk * per : (chunk + 1) * per]
    else:
        across = -(-rows // (per * width))
        if swizzle:
            leading, stride = 16 * width * 8 * (k // 8), 16 * width * 8
        else:
            leading, stride = 128 * (rows // 8), 128
        del across
        for column in range(k):
            for chunk in range(rows // per):
                if swizzle:
                    address = at + chunk // width * leading + column // 8 * stride
                    address += column % 8 * swizzle + chunk % width * 16
                else:
                    address = at + chunk * stride + column // 8 * leading + column % 8 * 16
                image[address] = values[chunk * per : (chunk + 1) * per, column]
    if swizzle:
        image = {a ^ ((a >> 7) % width << 4): data for a, data in image.items()}
    bits = at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | CODE[swizzle] << 62
    return image, bits


def shared_image(*images):
    octets = np.zeros(32768, np.uint8)
    for image in images:
        for address, data in image.items():
            octets[address : address + 16] = np.ascontiguousarray(data).view(np.uint8)
    return octets


def kernel(n, d_type, a_type, b_type, *, scale="1", tail=", 1, 1, 0, 0", registers=None, before="", **pieces):
    """All threads copy the image to shared memory, then the warpgroup multiplies onto registers read from `c`."""
    k = 32 // SIZE[a_type]
    count = n // 4 if d_type == "f16" else n // 2
    acc = ", ".join(f"%acc{i}" for i in range(count))
    left = registers or "%desc_a"
    loads = "".join(f"ld.global.b32 %acc{i}, [%c+{4 * i}];\n" for i in range(count))
    stores = "".join(f"st.global.b32 [%d+{4 * i}], %acc{i};\n" for i in range(count))
    parts = {
        "proxy_fence": "fence.proxy.async.shared::cta;", "barrier": "bar.sync 0;",
        "fence": "wgmma.fence.sync.aligned;", "commit": "wgmma.commit_group.sync.aligned;",
        "wait": "wgmma.wait_group.sync.aligned 0;", "after": "",
    }  # fmt: skip
    parts.update(pieces)
    body = f"""
    .reg .b32 %acc<{count}>; .reg .b32 %a<4>; .reg .b64 %image, %c, %d, %off, %desc_a, %desc_b, %fragments;
    .reg .b32 %i, %at, %x; .reg .pred %more, %p;
    ld.param.u64 %image, [image]; ld.param.u64 %c, [c]; ld.param.u64 %d, [d]; ld.param.u64 %fragments, [fragments];
    ld.param.u64 %desc_a, [desc_a]; ld.param.u64 %desc_b, [desc_b];
    mul.lo.u32 %i, %t, 4;
COPY:
    cvt.u64.u32 %off, %i; add.u64 %off, %image, %off;
    ld.global.u32 %x, [%off];
    add.u32 %at, %smem, %i;
    st.shared.u32 [%at], %x;
    add.u32 %i, %i, 512; setp.lt.u32 %more, %i, 32768;
    @%more bra COPY;
    mul.wide.u32 %off, %t, {4 * count}; add.u64 %c, %c, %off; add.u64 %d, %d, %off;
    mul.wide.u32 %off, %t, 16; add.u64 %fragments, %fragments, %off;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%fragments];
    {loads}
    {parts["proxy_fence"]}
    {parts["barrier"]}
    {before}
    {parts["fence"]}
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type} {{{acc}}}, {left}, %desc_b, {scale}{tail};
    {parts["commit"]}
    {parts["wait"]}
    {parts["after"]}
    {stores}
"""
    params = ", ".join(f".param .u64 {p}" for p in ("image", "c", "d", "fragments", "desc_a", "desc_b"))
    return program(body, params, shared=32768)


def accumulator_lanes(matrix, packed):
    """[128, registers] of a 64 x n matrix of raw bits: lane by lane, from the ISA's picture of fragment D."""
    n = matrix.shape[1]
    lanes = np.empty((128, n // 2), matrix.dtype)
    for lane in range(128):
        row, column = lane // 32 * 16 + lane % 32 // 4, lane % 4 * 2
        for i in range(n // 2):
            lanes[lane, i] = matrix[row + i // 2 % 2 * 8, i // 4 * 8 + column + i % 2]
    return np.ascontiguousarray(lanes).view(np.uint32) if packed else lanes.view(np.uint32)


def fragment_lanes(matrix):
    """[128, 4] registers of A (64 x k), from the ISA's picture of fragment A."""
    per = 4 // matrix.itemsize
    k = matrix.shape[1]
    lanes = np.empty((128, 4 * per), matrix.dtype)
    for lane in range(128):
        row, column = lane // 32 * 16 + lane % 32 // 4, lane % 4 * per
        for i in range(4 * per):
            register = i // per
            lanes[lane, i] = matrix[row + register % 2 * 8, register // 2 * (k // 2) + column + i % per]
    return np.ascontiguousarray(lanes).view(np.uint32)


def random_bits(rng, shape, element):
    if element in ("s8", "u8"):
        return rng.integers(np.iinfo(RAW[element]).min, np.iinfo(RAW[element]).max + 1, shape).astype(RAW[element])
    real = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    if element == "f16":
        return real.astype(np.float16).view(np.uint16)
    bits = real.view(np.uint32)
    return (bits >> np.uint32(16)).astype(np.uint16) if element == "bf16" else bits


def multiply(
    n=64, d_type="f32", a_type="f16", b_type=None, *, a_layout=(128, "k"), b_layout=(128, "k"), from_registers=False,
    offset=0, seed=0, **options,
):  # fmt: skip
    """Run one instruction; returns (D as the kernel gave it, D by `tensorcore.mma`), both in lanes."""
    b_type = b_type or a_type
    rng = np.random.default_rng(seed)
    k = 32 // SIZE[a_type]
    a, b = random_bits(rng, (64, k), a_type), random_bits(rng, (n, k), b_type)
    if d_type == "f32":
        c = rng.standard_normal((64, n)).astype(np.float32).view(np.uint32)
    elif d_type == "f16":
        c = rng.standard_normal((64, n)).astype(np.float16).view(np.uint16)
    else:
        c = rng.integers(-1000, 1000, (64, n)).astype(np.int32)
    a_image, desc_a = operand(a, offset, *a_layout, SIZE[a_type])
    b_image, desc_b = operand(b, B_AT, *b_layout, SIZE[b_type])
    if a_type in ("f16", "bf16"):
        trans = (a_layout[1] == "mn", b_layout[1] == "mn")
        signs = options.pop("signs", (1, 1))
        tail = ", ".join(["", *map(str, signs), *(str(int(x)) for x in (trans[1:] if from_registers else trans))])
    else:
        tail = ", 1, 1" if a_type == "tf32" else ""
        signs = (1, 1)
    registers = "{%a0, %a1, %a2, %a3}" if from_registers else None
    packed = d_type == "f16"
    scale = options.pop("scale", "1")
    text = kernel(n, d_type, a_type, b_type, tail=tail, registers=registers, scale=scale, **options)
    d = np.zeros((128, n // 4 if packed else n // 2), np.uint32)
    execute(
        text,
        [shared_image(a_image, b_image), accumulator_lanes(c, packed), d, fragment_lanes(a), np.uint64(desc_a),
         np.uint64(desc_b)],
        block=128,
    )  # fmt: skip
    top = {2: 0x8000, 4: 0x80000000, 1: 0}
    if signs[0] == -1:
        a = a ^ a.dtype.type(top[SIZE[a_type]])
    if signs[1] == -1:
        b = b ^ b.dtype.type(top[SIZE[b_type]])
    if scale in ("0", "%p"):
        c = np.zeros_like(c)
    expected = tensorcore.mma(a, b.T, c, a_type=a_type, b_type=b_type, acc_type=d_type, d_type=d_type, arch="sm_90")
    return d, accumulator_lanes(np.ascontiguousarray(expected), packed)


@pytest.mark.parametrize("b_major", ["k", "mn"])
@pytest.mark.parametrize("a_major", ["k", "mn"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_every_canonical_layout(swizzle, a_major, b_major):
    np.testing.assert_array_equal(*multiply(a_layout=(swizzle, a_major), b_layout=(swizzle, b_major)))


@pytest.mark.parametrize("n", [8, 24, 96, 136, 256])
def test_widths(n):
    np.testing.assert_array_equal(*multiply(n, b_layout=(32, "k"), seed=n))


@pytest.mark.parametrize(
    ("d_type", "a_type", "b_type"),
    [("f32", "bf16", "bf16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32"), ("s32", "s8", "s8"), ("s32", "u8", "s8")],
)
@pytest.mark.parametrize("from_registers", [False, True])
def test_types(d_type, a_type, b_type, from_registers):
    np.testing.assert_array_equal(*multiply(64, d_type, a_type, b_type, from_registers=from_registers))


def test_a_from_registers_and_b_transposed():
    np.testing.assert_array_equal(*multiply(from_registers=True, b_layout=(64, "mn")))


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_negated_operands(signs):
    np.testing.assert_array_equal(*multiply(signs=signs))


@pytest.mark.parametrize(("scale", "before"), [("0", ""), ("%p", "setp.eq.u32 %p, 1, 0;")])
def test_scale_d_of_zero_ignores_the_accumulator(scale, before):
    np.testing.assert_array_equal(*multiply(scale=scale, before=before))


def test_a_step_along_k_inside_a_swizzle():
    """The second 16 columns of a 128-byte row: the start moves by 32 bytes, the pattern stays where it is."""
    rng = np.random.default_rng(3)
    a, b = random_bits(rng, (64, 64), "f16"), random_bits(rng, (32, 64), "f16")
    images = [operand(a, 0, 128, "k", 2), operand(b, B_AT, 128, "k", 2)]
    text = kernel(32, "f32", "f16", "f16", scale="0")
    for step in range(4):
        d = np.zeros((128, 16), np.uint32)
        given = [shared_image(images[0][0], images[1][0]), d.copy(), d, np.zeros((128, 4), np.uint32)]
        execute(text, [*given, *(np.uint64(bits + 2 * step) for _, bits in images)], block=128)
        part = slice(16 * step, 16 * step + 16)
        expected = tensorcore.mma(
            a[:, part], b[:, part].T, np.zeros((64, 32), np.uint32), a_type="f16", b_type="f16", acc_type="f32",
            d_type="f32", arch="sm_90",
        )  # fmt: skip
        np.testing.assert_array_equal(d, accumulator_lanes(expected, False))


def test_a_base_offset_moves_the_pattern():
    """An operand that starts 128 bytes past a period, its pattern counted from there."""
    rng = np.random.default_rng(4)
    a, b = random_bits(rng, (64, 16), "f16"), random_bits(rng, (32, 16), "f16")
    shifted = {address + 128: data for address, data in operand(a, 0, 128, "k", 2)[0].items()}
    bits = operand(a, 0, 128, "k", 2)[1] + (128 >> 4) | 1 << 49
    b_image, b_bits = operand(b, B_AT, 128, "k", 2)
    d = np.zeros((128, 16), np.uint32)
    given = [shared_image(shifted, b_image), d.copy(), d, np.zeros((128, 4), np.uint32), np.uint64(bits)]
    execute(kernel(32, "f32", "f16", "f16", scale="0"), [*given, np.uint64(b_bits)], block=128)
    expected = tensorcore.mma(
        a, b.T, np.zeros((64, 32), np.uint32), a_type="f16", b_type="f16", acc_type="f32", d_type="f32", arch="sm_90"
    )
    np.testing.assert_array_equal(d, accumulator_lanes(expected, False))


# --- hazards


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"proxy_fence": ""}, emulator.MissingProxyFence),
        ({"barrier": ""}, emulator.SharedMemoryRace),
        ({"barrier": "bar.warp.sync -1;"}, emulator.SharedMemoryRace),
        ({"fence": ""}, emulator.MissingWgmmaFence),
        ({"fence": "wgmma.fence.sync.aligned; mov.b32 %acc3, 0;"}, emulator.MissingWgmmaFence),
        ({"fence": "wgmma.fence.sync.aligned; mov.b32 %x, %acc3;"}, emulator.MissingWgmmaFence),
        ({"wait": ""}, emulator.RegistersInFlight),
        ({"commit": ""}, emulator.RegistersInFlight),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, emulator.RegistersInFlight),
        ({"commit": "mov.b32 %acc0, 0; wgmma.commit_group.sync.aligned;"}, emulator.RegistersInFlight),
        ({"commit": "wgmma.commit_group.sync.aligned; st.shared.u32 [%smem], 1;"}, emulator.UnfinishedAsyncRead),
    ],
)
def test_hazards(options, kind):
    with pytest.raises(kind) as caught:
        multiply(**options)
    assert caught.value.thread is not None


def test_registers_of_a_may_be_read_but_not_written_before_the_wait():
    late = "wgmma.commit_group.sync.aligned; {}"
    np.testing.assert_array_equal(*multiply(from_registers=True, commit=late.format("mov.b32 %x, %a1;")))
    with pytest.raises(emulator.RegistersInFlight):
        multiply(from_registers=True, commit=late.format("mov.b32 %a1, %x;"))
    with pytest.raises(emulator.MissingWgmmaFence):
        multiply(from_registers=True, fence="wgmma.fence.sync.aligned; mov.b32 %a1, %x;")


def test_operands_may_be_overwritten_after_the_wait():
    np.testing.assert_array_equal(*multiply(after="bar.sync 0; st.shared.u32 [%at], 1;"))


def test_accumulators_that_stay_in_flight_need_no_fence():
    again = (
        "wgmma.commit_group.sync.aligned; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        + ", ".join(f"%acc{i}" for i in range(32))
        + "}, %desc_a, %desc_b, 1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"
    )
    multiply(commit=again)
    with pytest.raises(emulator.RegistersInFlight):
        multiply(commit=again, wait="wgmma.wait_group.sync.aligned 1;")


def test_another_shape_on_the_same_accumulators_needs_a_fence():
    narrow = (
        "{} wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {{"
        + ", ".join(f"%acc{i}" for i in range(16))
        + "}}, %desc_a, %desc_b, 1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"
    )
    multiply(commit=narrow.format("wgmma.fence.sync.aligned;"))
    with pytest.raises(emulator.MissingWgmmaFence, match="another shape of wgmma"):
        multiply(commit=narrow.format(""))


def test_an_accumulator_in_flight_is_no_operand():
    chained = (
        "wgmma.commit_group.sync.aligned; {} wgmma.fence.sync.aligned;"
        " wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
        " {{%other0, %other1, %other2, %other3}}, {{%acc0, %acc1, %acc2, %acc3}}, %desc_b, 0, 1, 1, 0;"
        " wgmma.commit_group.sync.aligned;"
    )
    declared = ".reg .b32 %other<4>;"
    multiply(before=declared, commit=chained.format("wgmma.wait_group.sync.aligned 0;"))
    with pytest.raises(emulator.RegistersInFlight, match="accumulates in"):
        multiply(before=declared, commit=chained.format(""))


def test_a_warpgroup_multiplies_together():
    alone = "wgmma.fence.sync.aligned; setp.lt.u32 %p, %t, 32; @%p "
    with pytest.raises(emulator.DivergentBarrier, match="never come"):
        multiply(
            fence="wgmma.fence.sync.aligned; setp.lt.u32 %p, %t, 32; @%p bra SKIP;", commit="SKIP: bar.sync 1;", wait=""
        )
    with pytest.raises(emulator.DivergentBarrier, match="missing or have exited"):
        multiply(fence=alone + "ret;")


def test_warps_of_a_warpgroup_may_come_one_after_the_other():
    """Warp w spins w times around a loop before the product; the four meet there."""
    spin = """
    add.u32 %x, %w, 1;
SPIN:
    sub.u32 %x, %x, 1; setp.gt.u32 %p, %x, 0;
    @%p bra SPIN;
"""
    np.testing.assert_array_equal(*multiply(before=spin))


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("add.u64 %desc_b, %desc_b, 2000;", emulator.OutOfBounds),
        ("cvt.u64.u32 %off, %w; add.u64 %desc_a, %desc_a, %off;", emulator.InvalidOperand),
    ],
)
def test_descriptors(before, kind):
    with pytest.raises(kind):
        multiply(before=before)


def test_scale_d_is_the_same_for_the_warpgroup():
    with pytest.raises(emulator.InvalidOperand, match="scale-d"):
        multiply(scale="%p", before="setp.eq.u32 %p, %lane, 0;")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("sm_90a", "sm_90", emulator.UnsupportedInstruction),
        ("m64n64k16", "m64n60k16", emulator.PtxSyntaxError),
        ("m64n64k16", "m64n64k8", emulator.PtxSyntaxError),
        ("m64n64k16", "m64n128k16", emulator.PtxSyntaxError),
        ("f32.f16.f16", "f32.e4m3.e4m3", emulator.UnsupportedInstruction),
        (", 1, 1, 0, 0;", ", 1, 1, 0;", emulator.PtxSyntaxError),
    ],
)
def test_what_cannot_be(old, new, kind):
    with pytest.raises(kind, match="wgmma"):
        emulator.compile_program(kernel(64, "f32", "f16", "f16").replace(old, new))


def test_products_are_counted_by_warps():
    text = kernel(64, "f32", "f16", "f16", scale="0")
    zeros = [np.zeros(32768, np.uint8), np.zeros((128, 32), np.uint32), np.zeros((128, 32), np.uint32)]
    given = [*zeros, np.zeros((128, 4), np.uint32), np.uint64(8 << 32), np.uint64(8 << 32)]
    assert execute(text, given, block=128).counters.wgmma_instructions == 4
