"""`cp.async.bulk.tensor` and its tensor maps: boxes, swizzles, edges, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hopper_harness import BARRIER, WAIT, execute, program

from numba_gemm import emulator

LOAD = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"


def tensor_kernel(rank, nbytes, *, back=False, words=0):
    """Load the box at the given coordinates; then copy it out as it lies in shared memory, or store it by `to`."""
    corner = ", ".join(f"%c{i}" for i in range(rank))
    moved = ", ".join(f"%d{i}" for i in range(rank))
    barrier = -(-nbytes // 1024) * 1024
    coordinates = "".join(
        f".reg .b32 %c{i}, %d{i}; ld.param.u32 %c{i}, [c{i}]; ld.param.u32 %d{i}, [d{i}];\n" for i in range(rank)
    )
    body = (
        BARRIER
        + coordinates
        + """
    mov.b64 %map, map; cvta.param.u64 %map, %map;
    mov.b64 %to, to; cvta.param.u64 %to, %to;
    @%first prefetch.tensormap [%map];
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+{barrier}], {nbytes};
    @%first {load} [%smem], [%map, {{{corner}}}], [%smem+{barrier}];
"""
        + WAIT
    )
    if back:
        body += """
    @%first {store} [%to, {{{moved}}}], [%smem];
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""
    else:
        body += """
    ld.param.u64 %out, [out];
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], {nbytes};
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""
    body = body.format(
        barrier=barrier, nbytes=nbytes, corner=corner, moved=moved, load=LOAD.format(rank=rank),
        store=STORE.format(rank=rank), init_fence="fence.mbarrier_init.release.cluster;",
    )  # fmt: skip
    params = [".param .align 64 .b8 map[128]", ".param .align 64 .b8 to[128]", ".param .u64 out"]
    params += [f".param .u32 {p}{i}" for p in "cd" for i in range(rank)]
    return program(body, ", ".join(params), shared=barrier + 16)


def load_box(array, corner, box, **options):
    """What a load of a box of a C-contiguous array puts into shared memory; `corner` and `box` innermost first."""
    machine = emulator.Machine("sm_90a")
    strides = array.strides[:-1][::-1]
    address = machine.place(array)
    blob = machine.tensor_map(address, array.dtype, array.shape[::-1], strides, box, **options)
    nbytes = machine.tensor_maps[-1].nbytes
    out = machine.alloc(nbytes)
    numbers = [np.int32(c) for c in (*corner, *corner)]
    text = tensor_kernel(array.ndim, nbytes)
    report = execute(text, [blob, blob, np.uint64(out), *numbers], machine=machine)
    assert (report.counters.tensor_loads, report.counters.tensor_load_bytes) == (1, nbytes)
    return machine.read(out, array.dtype, nbytes // array.itemsize)


def expected_box(array, corner, box, steps=None, fill=0):
    """The same by its definition, element by element."""
    steps = steps or (1,) * array.ndim
    extent = [-(-n // s) for n, s in zip(box, steps, strict=True)]
    result = []
    for place in itertools.product(*(range(n) for n in extent[::-1])):
        where = [c + p * s for c, p, s in zip(corner[::-1], place, steps[::-1], strict=True)]
        inside = all(0 <= w < n for w, n in zip(where, array.shape, strict=True))
        result.append(array[tuple(where)] if inside else fill)
    return np.array(result, array.dtype)


@pytest.mark.parametrize(
    ("shape", "corner", "box"),
    [
        ((64,), (8,), (16,)),
        ((64,), (56,), (16,)),
        ((64,), (-8,), (16,)),
        ((20, 32), (0, 0), (32, 20)),
        ((20, 32), (24, 14), (16, 8)),
        ((20, 32), (-4, -3), (16, 8)),
        ((20, 32), (40, 3), (16, 8)),
        ((6, 5, 8), (4, 1, 2), (8, 3, 5)),
        ((3, 4, 5, 8), (0, -1, 3, 1), (8, 4, 3, 2)),
        ((2, 3, 2, 5, 8), (-2, 2, 1, -1, 1), (8, 4, 2, 3, 2)),
    ],
)
def test_boxes_of_every_rank(shape, corner, box):
    array = np.arange(1, np.prod(shape) + 1, dtype=np.uint32).reshape(shape)
    np.testing.assert_array_equal(load_box(array, corner, box), expected_box(array, corner, box))


@pytest.mark.parametrize("steps", [(1, 2), (1, 3)])
def test_element_strides(steps):
    array = np.arange(1, 20 * 32 + 1, dtype=np.float32).reshape(20, 32)
    for corner in [(4, 1), (0, -3), (28, 15)]:
        found = load_box(array, corner, (8, 12), element_strides=steps)
        np.testing.assert_array_equal(found, expected_box(array, corner, (8, 12), steps))


def test_outside_of_the_tensor_may_be_nan():
    array = np.ones((4, 8), np.float32)
    found = load_box(array, (4, 2), (8, 4), oob_fill="nan")
    np.testing.assert_array_equal(found, expected_box(array, (4, 2), (8, 4), fill=np.nan))


@pytest.mark.parametrize(("swizzle", "span"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_swizzles(swizzle, span):
    """Chunk c of row r of a span lies at c XOR (the row's place among the 128-byte lines, modulo the span's chunks)."""
    array = np.arange(1, 24 * 64 + 1, dtype=np.uint16).reshape(24, 64)
    found = load_box(array, (0, 3), (span // 2, 16), swizzle=swizzle).reshape(-1, 8)
    plain = expected_box(array, (0, 3), (span // 2, 16)).reshape(-1, 8)
    chunks = span // 16
    for row in range(16):
        for chunk in range(chunks):
            line = row * span // 128
            np.testing.assert_array_equal(found[row * chunks + (chunk ^ line % chunks)], plain[row * chunks + chunk])


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_a_store_is_the_inverse_of_a_load_and_is_clipped(swizzle):
    rng = np.random.default_rng(1)
    array = rng.integers(1, 1000, (24, 64)).astype(np.uint16)
    span = {"none": 64, "32B": 32, "64B": 64, "128B": 128}[swizzle]
    box = (span // 2, 16)
    machine = emulator.Machine("sm_90a")
    out = np.zeros((20, 56), np.uint16)
    source, target = machine.place(array), machine.place(out)
    blob = machine.tensor_map(source, "uint16", (64, 24), (128,), box, swizzle=swizzle)
    to = machine.tensor_map(target, "uint16", (56, 20), (112,), box, swizzle=swizzle)
    corner, moved = (8, -2), (40, 10)
    text = tensor_kernel(2, box[0] * box[1] * 2, back=True)
    report = execute(text, [blob, to, np.uint64(0), *map(np.int32, (*corner, *moved))], machine=machine)
    machine.fetch(target, out)
    expected = np.zeros((20, 56), np.uint16)
    full = expected_box(array, corner, box).reshape(16, -1)
    clipped = expected[moved[1] :, moved[0] : moved[0] + box[0]]
    clipped[...] = full[: clipped.shape[0], : clipped.shape[1]]
    np.testing.assert_array_equal(out, expected)
    assert report.counters.tensor_stores == 1
    assert report.counters.tensor_store_bytes == box[0] * box[1] * 2


#: One warp writes 128 bytes, 1 … 64 as 16-bit numbers, to shared memory and stores them as one row of a map.
ROW_STORE = program(
    """
    .reg .b64 %to; .reg .b32 %x, %at, %zero;
    mad.lo.u32 %x, %t, 131074, 131073;
    shl.b32 %at, %t, 2;
    add.u32 %at, %at, %smem;
    st.shared.b32 [%at], %x;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %to, to; cvta.param.u64 %to, %to;
    mov.u32 %zero, 0;
    @%first cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%to, {%zero, %zero}], [%smem];
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
""",
    ".param .align 64 .b8 to[128]",
)


def stored_row(columns):
    """What the kernel leaves of a row of 80 zeros through a map of so many columns: whole chunks of 16 bytes."""
    row = np.zeros(80, np.uint16)
    written = -(-columns // 8) * 8
    row[:written] = np.arange(1, written + 1)
    return row


@pytest.mark.parametrize("columns", [1, 7, 8, 19, 35, 63, 64])
def test_a_store_writes_whole_chunks_of_16_bytes(columns):
    """A GPU does, as the next test shows, so what follows a row may be overwritten up to there."""
    machine = emulator.Machine("sm_90a")
    row = np.zeros(80, np.uint16)
    address = machine.place(row)
    execute(ROW_STORE, [machine.tensor_map(address, "f16", (columns, 1), (160,), (64, 1))], machine=machine)
    machine.fetch(address, row)
    np.testing.assert_array_equal(row, stored_row(columns))


def test_a_store_past_its_allocation():
    machine = emulator.Machine("sm_90a")
    blob = machine.tensor_map(machine.alloc(38), "f16", (19, 1), (48,), (64, 1))
    with pytest.raises(emulator.OutOfBounds, match="tensor map's elements"):
        execute(ROW_STORE, [blob], machine=machine)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 7, 8, 19, 35, 63, 64])
def test_a_gpu_stores_whole_chunks_of_16_bytes(columns):
    from numba import cuda

    from numba_gemm.device.context import current_context
    from numba_gemm.device.driver import check, driver
    from numba_gemm.device.launch import prepare_packed_launch
    from numba_gemm.device.module import Function
    from numba_gemm.device.tensor_map import encode
    from numba_gemm.spec import TensorMap

    if current_context().device.compute_capability != (9, 0):
        pytest.skip("the text is for sm_90a")
    module = check(driver().cuModuleLoadData(ROW_STORE.encode() + b"\0"), "loading")
    function = Function(check(driver().cuModuleGetFunction(module, b"k"), "finding"), "k", 0, 0, 0)
    row = cuda.to_device(np.zeros(80, np.uint16))
    to = TensorMap(row.device_ctypes_pointer.value, "f16", (columns, 1), (160,), (64, 1), swizzle="none")
    prepare_packed_launch(function, (1, 1, 1), (32, 1, 1), 128)(encode(to), 0)
    np.testing.assert_array_equal(row.copy_to_host(), stored_row(columns))


def simple_load(*, blob=None, change=("", ""), machine=None, swizzle="none"):
    machine = machine or emulator.Machine("sm_90a")
    array = np.arange(64 * 16, dtype=np.float16).reshape(16, 64)
    address = machine.place(array)
    good = machine.tensor_map(address, "f16", (64, 16), (128,), (64, 16), swizzle=swizzle)
    out = machine.alloc(2048)
    text = tensor_kernel(2, 2048).replace(*change)
    numbers = [np.int32(0)] * 4
    return execute(text, [blob or good, good, np.uint64(out), *numbers], machine=machine)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"blob": bytes(128)}, emulator.InvalidOperand),
        ({"blob": emulator.Machine().tensor_map(4096, "f16", (8,), (), (8,))[:8] + b"\x09" * 120},
         emulator.InvalidOperand),
        ({"change": ("[%smem], [%map", "[%smem+16], [%map")}, emulator.Misaligned),
        ({"change": ("[%smem], [%map", "[%smem+128], [%map"), "swizzle": "128B"}, emulator.Misaligned),
        ({"change": ("[%smem], [%map", "[%smem+1024], [%map")}, emulator.OutOfBounds),
        ({"change": ("2d.shared", "3d.shared")}, emulator.PtxSyntaxError),
        ({"change": (".param .align 64 .b8 map[128],", ".param .u64 pad, .param .align 8 .b8 map[128],")},
         emulator.LaunchError),
    ],
)  # fmt: skip
def test_tensor_load_operands(options, kind, monkeypatch):
    import hopper_harness

    if kind is not emulator.Misaligned:
        # the assembler refuses some of these as well
        monkeypatch.setattr(hopper_harness, "check_assembly", lambda text: None)
    with pytest.raises(kind):
        simple_load(**options)


def test_the_rank_of_the_map_and_of_the_instruction_agree():
    machine = emulator.Machine("sm_90a")
    address = machine.place(np.zeros(64, np.float16))
    flat = machine.tensor_map(address, "f16", (64,), (), (64,))
    with pytest.raises(emulator.InvalidOperand, match="2 coordinates for a tensor map of 1"):
        simple_load(machine=machine, blob=flat)


def test_a_map_must_lie_at_a_multiple_of_64():
    text = tensor_kernel(2, 2048).replace(
        ".param .align 64 .b8 map[128], .param .align 64 .b8 to[128]",
        ".param .u64 pad, .param .b64 map[16], .param .align 64 .b8 to[128]",
    )
    machine = emulator.Machine("sm_90a")
    address = machine.place(np.zeros((16, 64), np.float16))
    blob = machine.tensor_map(address, "f16", (64, 16), (128,), (64, 16))
    with pytest.raises(emulator.Misaligned, match="multiple of 64"):
        execute(text, [np.uint64(0), blob, blob, np.uint64(0), *[np.int32(0)] * 4], machine=machine)


def test_a_map_in_global_memory():
    text = tensor_kernel(2, 2048)
    text = text.replace("mov.b64 %map, map; cvta.param.u64 %map, %map;", "ld.param.u64 %map, [where];")
    text = text.replace(".param .u64 out", ".param .u64 where, .param .u64 out")
    machine = emulator.Machine("sm_90a")
    array = np.arange(64 * 16, dtype=np.float16).reshape(16, 64)
    blob = machine.tensor_map(machine.place(array), "f16", (64, 16), (128,), (64, 16))
    where, out = machine.alloc(128), machine.alloc(2048)
    machine.write(where, np.frombuffer(blob, np.uint8))
    execute(text, [blob, blob, np.uint64(where), np.uint64(out), *[np.int32(0)] * 4], machine=machine)
    np.testing.assert_array_equal(machine.read(out, np.float16, 1024), array.reshape(-1))


def test_elements_that_nothing_wrote():
    machine = emulator.Machine("sm_90a")
    array = np.zeros((16, 64), np.float16)
    address = machine.place(array[:, :60])  # the rows' last four elements stay unwritten
    blob = machine.tensor_map(address, "f16", (64, 16), (128,), (64, 16))
    with pytest.raises((emulator.UninitialisedRead, emulator.OutOfBounds)):
        simple_load(machine=machine, blob=blob)
    right = machine.tensor_map(address, "f16", (60, 16), (128,), (64, 16))
    simple_load(machine=machine, blob=right)


def test_a_map_past_its_allocation():
    machine = emulator.Machine("sm_90a")
    address = machine.alloc(15 * 128, initialised=True)
    blob = machine.tensor_map(address, "f16", (64, 16), (128,), (64, 16))
    with pytest.raises(emulator.OutOfBounds, match="tensor map's elements"):
        simple_load(machine=machine, blob=blob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 4104}, "multiple of 16"),
        ({"dtype": "f8"}, "element type"),
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (8,) * 6}, "1 to 5"),
        ({"dims": (0, 64)}, "dimensions"),
        ({"strides": (120,)}, "multiple of 16 bytes below 2"),
        ({"strides": (1 << 40,)}, "multiple of 16 bytes below 2"),
        ({"strides": ()}, "2 dimensions take"),
        ({"box": (512, 8)}, "1 to 256"),
        ({"box": (64, 0)}, "1 to 256"),
        ({"box": (12, 8)}, "must be a multiple of 16"),
        ({"element_strides": (1, 9)}, "element strides"),
        ({"interleave": "16B"}, "interleave"),
        ({"swizzle": "256B"}, "swizzle"),
        ({"swizzle": "64B"}, "swizzle 64B takes 64"),
        ({"swizzle": "128B", "box": (32, 8)}, "not modelled"),
        ({"l2_promotion": "512B"}, "L2 promotion"),
        ({"oob_fill": "one"}, "fill"),
        ({"oob_fill": "nan", "dtype": "u16"}, "fill"),
    ],
)  # fmt: skip
def test_what_the_driver_would_refuse(change, message):
    good = {"address": 4096, "dtype": "f16", "dims": (64, 64), "strides": (128,), "box": (64, 8)}
    emulator.TensorMap(**good)
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.TensorMap(**{**good, **change})
