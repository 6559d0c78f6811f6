"""The fragment map against tables written out by hand from the PTX ISA's formulas, and against ldmatrix."""

from __future__ import annotations

import numpy as np
import pytest

from numba_gemm import fragments
from numba_gemm.fragments import fragment, holder, ldmatrix_rows, pack, stmatrix_rows, supported, unpack

# (shape, operand, element, lane): the (row, column) of a0, a1, ..., evaluated by hand from PTX ISA 8.7,
# 9.7.14.5.x.
LANES = {
    # 9.7.14.5.8, f16: groupID 0, thread 0; groupID 1, thread 1; groupID 7, thread 3
    ("m16n8k16", "A", "f16", 0): [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)],
    ("m16n8k16", "A", "f16", 5): [(1, 2), (1, 3), (9, 2), (9, 3), (1, 10), (1, 11), (9, 10), (9, 11)],
    ("m16n8k16", "A", "bf16", 31): [(7, 6), (7, 7), (15, 6), (15, 7), (7, 14), (7, 15), (15, 14), (15, 15)],
    ("m16n8k16", "B", "f16", 0): [(0, 0), (1, 0), (8, 0), (9, 0)],
    ("m16n8k16", "B", "bf16", 5): [(2, 1), (3, 1), (10, 1), (11, 1)],
    ("m16n8k16", "B", "f16", 31): [(6, 7), (7, 7), (14, 7), (15, 7)],
    ("m16n8k16", "C", "f32", 5): [(1, 2), (1, 3), (9, 2), (9, 3)],
    ("m16n8k16", "D", "f16", 31): [(7, 6), (7, 7), (15, 6), (15, 7)],
    # 9.7.14.5.8, f64: rows alternate, columns step by 4 every second element
    ("m16n8k16", "A", "f64", 6): [(1, 2), (9, 2), (1, 6), (9, 6), (1, 10), (9, 10), (1, 14), (9, 14)],
    ("m16n8k16", "B", "f64", 6): [(2, 1), (6, 1), (10, 1), (14, 1)],
    ("m16n8k16", "C", "f64", 6): [(1, 4), (1, 5), (9, 4), (9, 5)],
    # 9.7.14.5.7
    ("m16n8k8", "A", "f16", 14): [(3, 4), (3, 5), (11, 4), (11, 5)],
    ("m16n8k8", "B", "f16", 14): [(4, 3), (5, 3)],
    ("m16n8k8", "A", "tf32", 14): [(3, 2), (11, 2), (3, 6), (11, 6)],
    ("m16n8k8", "B", "tf32", 14): [(2, 3), (6, 3)],
    ("m16n8k8", "A", "f64", 14): [(3, 2), (11, 2), (3, 6), (11, 6)],
    ("m16n8k8", "B", "f64", 14): [(2, 3), (6, 3)],
    ("m16n8k8", "C", "f32", 14): [(3, 4), (3, 5), (11, 4), (11, 5)],
    # 9.7.14.5.6
    ("m16n8k4", "A", "tf32", 23): [(5, 3), (13, 3)],
    ("m16n8k4", "B", "tf32", 23): [(3, 5)],
    ("m16n8k4", "C", "f32", 23): [(5, 6), (5, 7), (13, 6), (13, 7)],
    ("m16n8k4", "A", "f64", 23): [(5, 3), (13, 3)],
    # 9.7.14.5.2
    ("m8n8k4", "A", "f64", 30): [(7, 2)],
    ("m8n8k4", "B", "f64", 30): [(2, 7)],
    ("m8n8k4", "C", "f64", 30): [(7, 4), (7, 5)],
    # 9.7.14.5.3
    ("m8n8k16", "A", "s8", 9): [(2, 4), (2, 5), (2, 6), (2, 7)],
    ("m8n8k16", "B", "u8", 9): [(4, 2), (5, 2), (6, 2), (7, 2)],
    ("m8n8k16", "C", "s32", 9): [(2, 2), (2, 3)],
    # 9.7.14.5.9
    ("m16n8k16", "A", "s8", 9): [(2, 4), (2, 5), (2, 6), (2, 7), (10, 4), (10, 5), (10, 6), (10, 7)],
    ("m16n8k16", "B", "e4m3", 9): [(4, 2), (5, 2), (6, 2), (7, 2)],
    ("m16n8k16", "C", "s32", 9): [(2, 2), (2, 3), (10, 2), (10, 3)],
    # 9.7.14.5.10
    ("m16n8k32", "A", "u8", 9): [
        *[(2, 4), (2, 5), (2, 6), (2, 7), (10, 4), (10, 5), (10, 6), (10, 7)],
        *[(2, 20), (2, 21), (2, 22), (2, 23), (10, 20), (10, 21), (10, 22), (10, 23)],
    ],
    ("m16n8k32", "B", "e5m2", 9): [(4, 2), (5, 2), (6, 2), (7, 2), (20, 2), (21, 2), (22, 2), (23, 2)],
    ("m16n8k32", "C", "f16", 9): [(2, 2), (2, 3), (10, 2), (10, 3)],
    # 9.7.14.5.1: lane 6 is in the low group of the second product, lane 22 in its high group
    ("m8n8k4", "A", "f16", 6): [(2, 0), (2, 1), (2, 2), (2, 3)],
    ("m8n8k4", "A", "f16", 22): [(6, 0), (6, 1), (6, 2), (6, 3)],
    ("m8n8k4", "B", "f16", 22): [(0, 6), (1, 6), (2, 6), (3, 6)],
    ("m8n8k4", "C", "f16", 22): [(6, 0), (6, 1), (6, 2), (6, 3), (6, 4), (6, 5), (6, 6), (6, 7)],
    ("m8n8k4", "C", "f32", 7): [(1, 2), (1, 3), (3, 2), (3, 3), (1, 6), (1, 7), (3, 6), (3, 7)],
    ("m8n8k4", "D", "f32", 18): [(4, 2), (4, 3), (6, 2), (6, 3), (4, 6), (4, 7), (6, 6), (6, 7)],
}

# (shape, element, accumulator): 32-bit (f64: 64-bit) registers of A, B and C that the ISA's operand lists
# have.
REGISTERS = {
    ("m8n8k4", "f16", "f16"): (2, 2, 4),
    ("m8n8k4", "f16", "f32"): (2, 2, 8),
    ("m16n8k8", "f16", "f32"): (2, 1, 4),
    ("m16n8k8", "f16", "f16"): (2, 1, 2),
    ("m16n8k16", "f16", "f32"): (4, 2, 4),
    ("m16n8k16", "f16", "f16"): (4, 2, 2),
    ("m16n8k16", "bf16", "f32"): (4, 2, 4),
    ("m16n8k4", "tf32", "f32"): (2, 1, 4),
    ("m16n8k8", "tf32", "f32"): (4, 2, 4),
    ("m8n8k4", "f64", "f64"): (1, 1, 2),
    ("m16n8k4", "f64", "f64"): (2, 1, 4),
    ("m16n8k8", "f64", "f64"): (4, 2, 4),
    ("m16n8k16", "f64", "f64"): (8, 4, 4),
    ("m8n8k16", "s8", "s32"): (1, 1, 2),
    ("m16n8k16", "u8", "s32"): (2, 1, 4),
    ("m16n8k32", "s8", "s32"): (4, 2, 4),
    ("m16n8k16", "e4m3", "f32"): (2, 1, 4),
    ("m16n8k32", "e5m2", "f16"): (4, 2, 2),
}

EVERY = [
    (row.shape, operand, element)
    for row in supported()
    for operand, elements in (
        ("A", (row.element,)),
        ("B", (row.element,)),
        ("C", row.accumulators),
        ("D", row.accumulators),
    )
    for element in elements
]


@pytest.mark.parametrize(("key", "want"), LANES.items(), ids=lambda x: "-".join(map(str, x)) if len(x) == 4 else "")
def test_a_lane_holds_what_the_isa_says(key, want):
    shape, operand, element, lane = key
    held = fragment(shape, operand, element)
    assert list(zip(held.row[lane].tolist(), held.col[lane].tolist(), strict=True)) == want


@pytest.mark.parametrize(("key", "want"), REGISTERS.items(), ids=lambda x: "-".join(map(str, x)))
def test_register_counts(key, want):
    shape, element, accumulator = key
    held = fragment(shape, "A", element), fragment(shape, "B", element), fragment(shape, "C", accumulator)
    assert tuple(f.registers for f in held) == want


@pytest.mark.parametrize(("shape", "operand", "element"), EVERY, ids=lambda x: x)
def test_each_element_is_held_once(shape, operand, element):
    """Once in the warp; in f16 m8n8k4, once in each of the four products that the warp computes."""
    held = fragment(shape, operand, element)
    rows, cols = held.extent
    times = np.zeros((rows, cols), int)
    np.add.at(times, (held.row, held.col), 1)
    copies = 4 if shape == "m8n8k4" and element in ("f16", "f32") else 1
    assert (times == copies).all()
    if copies == 4:
        for product in range(4):
            lanes = [*range(4 * product, 4 * product + 4), *range(16 + 4 * product, 20 + 4 * product)]
            seen = {(int(r), int(c)) for r, c in zip(held.row[lanes].ravel(), held.col[lanes].ravel(), strict=True)}
            assert len(seen) == rows * cols


def test_supported_names_the_lowest_architecture():
    lowest = {(row.shape, row.element): row.arch for row in supported()}
    assert lowest["m8n8k4", "f16"] == "sm_70"
    assert lowest["m16n8k8", "f16"] == lowest["m8n8k16", "u8"] == "sm_75"
    assert lowest["m16n8k16", "bf16"] == lowest["m16n8k4", "tf32"] == lowest["m8n8k4", "f64"] == "sm_80"
    assert lowest["m16n8k32", "e4m3"] == "sm_89"
    assert lowest["m16n8k16", "f64"] == "sm_90"
    assert len(lowest) == len(supported()) == 21


@pytest.mark.parametrize(("shape", "operand", "element"), EVERY[::3], ids=lambda x: x)
def test_holder_inverts_the_map(shape, operand, element):
    held = fragment(shape, operand, element)
    for i in range(held.extent[0]):
        for j in range(held.extent[1]):
            at = holder(shape, operand, element, i, j)
            assert (held.row[at.lane, at.element], held.col[at.lane, at.element]) == (i, j)
            assert at.register * held.per_register + at.position == at.element
    with pytest.raises(ValueError, match="outside"):
        holder(shape, operand, element, held.extent[0], 0)


def test_column_major_operands_of_the_volta_shape():
    """9.7.14.5.1, lane 22: A by columns has rows i + 4 of column 2; B by rows has columns i + 4 of row 2."""
    a = fragment("m8n8k4", "A", "f16", layout="col")
    assert (a.row[22].tolist(), a.col[22].tolist()) == ([4, 5, 6, 7], [2, 2, 2, 2])
    b = fragment("m8n8k4", "B", "f16", layout="row")
    assert (b.row[22].tolist(), b.col[22].tolist()) == ([2, 2, 2, 2], [4, 5, 6, 7])
    with pytest.raises(ValueError, match="by rows"):
        fragment("m16n8k16", "A", "f16", layout="col")


def test_pack_puts_the_first_element_in_the_low_bits():
    matrix = np.arange(256, dtype=np.uint16).reshape(16, 16)
    registers = pack(fragment("m16n8k16", "A", "f16"), matrix)
    assert registers.shape == (32, 4)
    assert registers.dtype == np.uint32
    # lane 5: a0 = (1, 2) = 18, a1 = (1, 3) = 19; a6 = (9, 10) = 154, a7 = 155
    assert registers[5, 0] == 18 | 19 << 16
    assert registers[5, 3] == 154 | 155 << 16
    byte = np.arange(256, dtype=np.uint8).reshape(32, 8)
    # lane 9 of m16n8k32's B: rows 4 to 7 of column 2
    assert pack(fragment("m16n8k32", "B", "s8"), byte)[9, 0] == 34 | 42 << 8 | 50 << 16 | 58 << 24


@pytest.mark.parametrize(("shape", "operand", "element"), EVERY, ids=lambda x: x)
def test_unpack_inverts_pack(shape, operand, element):
    held = fragment(shape, operand, element)
    width = (8 if element == "f64" else 4) // held.per_register
    matrix = np.random.default_rng(1).integers(0, 256, (3, *held.extent, width), np.uint8).view(f"u{width}")[..., 0]
    registers = pack(held, matrix)
    assert registers.shape == (3, 32, held.registers)
    if shape == "m8n8k4" and element != "f64":
        with pytest.raises(ValueError, match="four"):
            unpack(held, registers)
    else:
        np.testing.assert_array_equal(unpack(held, registers), matrix)


def load(matrices, num, trans):
    """``ldmatrix`` on 8x8 matrices ``[num, 8, 8]``: uint32 ``[32, num]``, by the map."""
    rows = ldmatrix_rows(num, trans)
    which = np.arange(num)[None, :, None]
    halves = matrices[which, rows.row, rows.col].astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << 16


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_lane_13(trans):
    """9.7.14.5.15: thread 13 holds elements 2 and 3 of row 3; with .trans, of row 3 of the transpose."""
    rows = ldmatrix_rows(2, trans)
    pairs = list(zip(rows.row[13, 1].tolist(), rows.col[13, 1].tolist(), strict=True))
    assert pairs == ([(2, 3), (3, 3)] if trans else [(3, 2), (3, 3)])
    assert rows.address_lane.tolist() == [list(range(8)), list(range(8, 16))]


def test_ldmatrix_x4_loads_the_a_fragment():
    """The four quarters of a 16x16 tile, in the order upper left, lower left, upper right, lower right."""
    tile = np.arange(256, dtype=np.uint16).reshape(16, 16)
    quarters = np.stack([tile[:8, :8], tile[8:, :8], tile[:8, 8:], tile[8:, 8:]])
    np.testing.assert_array_equal(load(quarters, 4, False), pack(fragment("m16n8k16", "A", "f16"), tile))


def test_ldmatrix_x2_trans_loads_the_b_fragment_of_a_row_major_tile():
    tile = np.arange(128, dtype=np.uint16).reshape(16, 8)
    halves = np.stack([tile[:8], tile[8:]])
    np.testing.assert_array_equal(load(halves, 2, True), pack(fragment("m16n8k16", "B", "bf16"), tile))
    by_columns = np.stack([tile[:8].T, tile[8:].T])
    np.testing.assert_array_equal(load(by_columns, 2, False), pack(fragment("m16n8k16", "B", "bf16"), tile))


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_stores_what_ldmatrix_loads(trans):
    tile = np.arange(128, dtype=np.uint16).reshape(2, 8, 8)
    registers = load(tile, 2, trans)
    rows = stmatrix_rows(2, trans)
    stored = np.zeros_like(tile)
    stored[np.arange(2)[None, :, None], rows.row, rows.col] = np.stack([registers & 0xFFFF, registers >> 16], axis=-1)
    np.testing.assert_array_equal(stored, tile)


@pytest.mark.parametrize("num", [0, 3, 8])
def test_ldmatrix_counts(num):
    with pytest.raises(ValueError, match="x1, x2 or x4"):
        ldmatrix_rows(num)


@pytest.mark.parametrize(
    ("shape", "operand", "element"),
    [
        ("m16n8k16", "A", "tf32"),
        ("m16n8k8", "A", "s8"),
        ("m16n8k16", "C", "bf16"),
        ("m16n8k64", "A", "s8"),
        ("16x8", "A", "f16"),
    ],
)
def test_unknown_operands_are_refused(shape, operand, element):
    with pytest.raises(ValueError, match=r"shape|operand"):
        fragment(shape, operand, element)


def test_the_maps_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        fragment("m16n8k16", "A", "f16").row[0, 0] = 1


def test_plain_drawing():
    lines = fragments.draw_text("m16n8k8", lane=5, element="f16").splitlines()
    assert lines[0] == "A f16 16x8: lane 5 holds 2 32-bit registers"
    assert lines[3].split() == ["1", "4", "4", "[a0]", "[a1]", "6", "6", "7", "7"]
    assert lines[11].split() == ["9", "4", "4", "[a2]", "[a3]", "6", "6", "7", "7"]
    b = lines.index("B f16 8x8: lane 5 holds 1 32-bit registers")
    assert lines[b + 4].split() == ["2", "1", "[b0]", "9", "13", "17", "21", "25", "29"]
    c = lines.index("C f32 16x8: lane 5 holds 4 32-bit registers")
    assert lines[c + 3].split()[3:5] == ["[c0]", "[c1]"]


def test_rich_drawing_has_the_same_cells():
    console = pytest.importorskip("rich.console")
    screen = console.Console(width=200, no_color=True)
    with screen.capture() as capture:
        screen.print(fragments.draw("m16n8k32", lane=9, element="s8"))
    plain = fragments.draw_text("m16n8k32", lane=9, element="s8").replace("[", "").replace("]", "")
    assert capture.get().split() == plain.split()


@pytest.mark.parametrize("lane", [-1, 32])
def test_a_warp_has_32_lanes(lane):
    with pytest.raises(ValueError, match="lanes 0 to 31"):
        fragments.draw("m16n8k16", lane=lane)
