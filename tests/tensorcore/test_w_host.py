"""The host half of w1 and w2: which tensor maps a launch takes, what is copied first, how maps are made and kept.

No GPU is needed: maps are made by a driver that writes down what it is asked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.arrange import arrange, pack, pointer_slots, request_for, takes_tensor_maps
from numba_gemm.arrays import as_operand
from numba_gemm.choose import choose
from numba_gemm.compile import compiler
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem, check_inputs, check_output, padded_stride, shares_lines
from numba_gemm.spec import Addresses, TensorMap
from numba_gemm.tensorcore.tma import stores, unreadable
from numba_gemm.tensorcore.w_specs import W1, W2, w_config, w_parameters

HOPPER = (9, 0)
AT = Addresses(1 << 40, 2 << 40, 3 << 40, 4 << 40)


def packed(rows, columns, depth, **changes):
    return replace(Problem.packed(rows, columns, depth, dtype="bfloat16"), **changes)


def planned(problem, kernel=W2, sm_count=132):
    return kernel.plan(problem, kernel.select(problem, sm_count, HOPPER))


def main_values(problem, kernel=W2):
    plan = planned(problem, kernel)
    return plan.launches[plan.main].values(AT)


# --- what TMA can read and store


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"a_offset": 8}, "A starts 8 bytes past a multiple of 16"),
        ({"lda": 65}, "the row stride of A, 65 elements, is not a multiple of 8"),
        ({"lda": -64}, "the row stride of A, -64 elements, is not one of 64 to"),
        ({"lda": 0}, "the row stride of A, 0 elements, is not one of 64 to"),
        ({"lda": 72}, None),
        ({"lda": 65, "m": 1}, None),  # one row: its stride is never used
        ({"lda": 1 << 39}, "is not one of 64 to 2"),
        ({"batch": 3, "batch_stride_a": 64 * 64 + 4}, "the batch stride of A, 4100 elements, is not a multiple of 8"),
        ({"batch": 3, "batch_stride_a": -4096}, "the batch stride of A, -4096 elements, is not one of 0 to"),
        ({"batch": 3, "batch_stride_a": 0}, None),  # all products share it
        ({"batch": 1, "batch_stride_a": 3}, None),
        ({"k": 63, "lda": 64}, None),  # the maps state the depth, and TMA fills with zeros past it
        ({"a_layout": "column", "lda": 64}, None),
        ({"a_layout": "column", "lda": 60}, "the column stride of A, 60 elements"),
    ],
    ids=str,
)
def test_what_tma_can_read(changes, reason):
    found = unreadable(packed(64, 64, 64, **changes), "A")
    assert found is None if reason is None else reason in found


def test_what_tma_can_read_of_b():
    """B's depth is its rows: one row is enough where K is 1."""
    assert unreadable(packed(64, 65, 64), "B") == "the row stride of B, 65 elements, is not a multiple of 8"
    assert unreadable(packed(64, 65, 1), "B") is None
    assert unreadable(packed(64, 65, 64, b_layout="column", ldb=64), "B") is None
    assert unreadable(packed(64, 64, 64, b_offset=2), "B") == "B starts 2 bytes past a multiple of 16"


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        ({}, True),
        ({"n": 65, "ldc": 65}, False),
        ({"n": 65, "ldc": 72}, False),  # it would write seven elements past each row
        ({"n": 56, "ldc": 72}, True),
        ({"c_offset": 4}, False),
        ({"ldc": -64}, False),
        ({"m": 1, "n": 65, "ldc": 65}, False),
        ({"m": 1, "n": 72, "ldc": 3}, True),
        ({"batch": 2, "batch_stride_c": 4100}, False),
        ({"batch": 2, "batch_stride_c": 4104}, True),
        ({"c_dtype": "float32", "ldc": 68}, True),
    ],
    ids=str,
)
def test_what_tma_can_store(changes, possible):
    assert stores(packed(64, 64, 64, **changes)) is possible


# --- tensor maps and the other parameters of a launch


@pytest.mark.parametrize("kernel", [W1, W2], ids=lambda spec: spec.name)
@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
def test_maps_name_the_contiguous_dimension_first(kernel, a_layout, b_layout):
    m, n, k, lda, ldb = 520, 776, 328, 1024, 2048
    problem = packed(m, n, k, a_layout=a_layout, b_layout=b_layout, lda=lda, ldb=ldb)
    plan = planned(problem, kernel)
    assert (len(plan.launches), plan.workspace_bytes, plan.main) == (1, 0, 0)
    map_a, map_b, map_c, c, ldc, _, *numbers, alpha, beta = plan.launches[0].values(AT)
    assert (map_a.address, map_a.element) == (AT.a, "bf16")
    assert map_a.dims == ((k, m, 1) if a_layout == "row" else (m, k, 1))
    assert map_a.strides[0] == 2 * lda
    assert (map_b.address, map_b.element) == (AT.b, "bf16")
    assert map_b.dims == ((k, n, 1) if b_layout == "column" else (n, k, 1))
    assert map_b.strides[0] == 2 * ldb
    form = w_parameters(kernel.name, plan.launches[0].config)
    assert (map_a.box, map_b.box) == (form.map_a_box, form.map_b_box)
    assert map_a.swizzle == map_b.swizzle == "128B"
    assert (c, ldc, alpha, beta) == (AT.c, n, 1.0, 0.0)
    assert numbers == [m, n, k, 1, 1, -(-k // 64)]
    if form.store == "tma":
        assert (map_c.dims, map_c.strides[0], map_c.box) == ((n, m, 1), 2 * n, form.map_c_box)
    else:
        assert map_c == b""


def test_all_strides_are_such_that_tma_takes_them():
    """Also those of a single row, or a single matrix, which nothing is multiplied by."""
    for problem in (
        packed(1, 8, 13),
        packed(3, 1, 1),
        packed(1, 1, 1),
        packed(64, 64, 64, batch=2, batch_stride_c=4096),
    ):
        for value in main_values(problem):
            if isinstance(value, TensorMap):
                assert all(stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in value.strides), problem
                assert min(value.dims) >= 1


def test_a_few_rows_are_multiplied_as_columns():
    """8×28672×8192: the transposed product, of B's columns by A's rows, stored where C's rows lie."""
    problem = packed(8, 28672, 8192)
    config = W2.select(problem, 132, HOPPER)
    assert dict(config)["swapped"] == 1
    form = w_parameters("w2", config)
    assert (form.a_layout, form.b_layout, form.c_layout) == ("column", "column", "column")
    assert form.block_n <= 16
    plan = W2.plan(problem, config)
    map_a, map_b, map_c, c, ldc, _, m, n, k, *_ = plan.launches[plan.main].values(AT)
    assert (map_a.address, map_a.dims) == (AT.b, (28672, 8192, 1))
    assert (map_b.address, map_b.dims) == (AT.a, (8192, 8, 1))
    assert (m, n, k) == (28672, 8, 8192)
    if not form.split_k:
        assert (c, ldc) == (AT.c, 28672)
    if form.store == "tma":
        assert map_c.dims == (28672, 8, 1)
    assert W2.geometry(config).block_tile[:2] == (form.block_n, form.block_m), "the tile of C"


# --- copies of what TMA can't read


def test_only_the_operand_that_needs_it_is_copied():
    problem = packed(256, 256, 201, ldb=256)  # rows of A are 201 elements apart, those of B 256
    plan = planned(problem)
    assert [one.spec.name for one in plan.launches][:2] == ["repack", "w2"]
    assert plan.main == 1
    (note,) = plan.notes
    assert note.startswith("A is copied into rows of whole 128-byte lines first: the row stride of A, 201 elements")
    padded = 256  # rows of whole 128-byte lines
    source, target, rows, columns, *strides = plan.launches[0].values(AT)
    assert (source, target, rows, columns) == (AT.a, AT.workspace, 256, 201)
    assert strides[:4] == [201, 1, padded, 1]
    map_a, map_b, *_ = plan.launches[1].values(AT)
    assert (map_a.address, map_a.dims, map_a.strides[0]) == (AT.workspace, (201, 256, 1), 2 * padded)
    assert map_b.address == AT.b
    assert plan.workspace_bytes >= 2 * 256 * padded


@pytest.mark.parametrize(
    ("elements", "stride"), [(0, 0), (1, 8), (8, 8), (9, 16), (31, 32), (33, 64), (64, 64), (65, 128), (4097, 4160)]
)
def test_copied_rows_share_no_line_needlessly(elements, stride):
    assert padded_stride(elements) == stride
    if elements:
        assert not shares_lines(elements, stride)


@pytest.mark.parametrize(("inner", "stride"), [(4097, 4104), (64, 72), (24, 24), (33, 40)])
def test_rows_that_begin_amid_lines(inner, stride):
    assert shares_lines(inner, stride)


def test_a_view_that_is_copied_anyway_is_copied_once():
    """Every second column: the copy's rows are as TMA wants them, so no second one follows."""
    a, b, c = np.zeros((40, 402), np.float16)[:, ::2], np.zeros((201, 48), np.float16), np.zeros((40, 48), np.float16)
    operands = [as_operand(name, array) for name, array in (("a", a), ("b", b), ("c", c))]
    shape = check_output(operands[2], *operands[:2], check_inputs(*operands[:2]))
    arrangement = arrange(request_for(*operands, shape, (1.0, 0.0, "w2")), HOPPER, 132)
    assert [one.spec.name for one in arrangement.launches] == ["repack", "w2"]
    assert arrangement.problem.lda == 256


def test_both_operands_of_a_batch_are_copied_side_by_side():
    problem = packed(65, 67, 131, batch=3, batch_stride_a=65 * 131, batch_stride_b=131 * 67, batch_stride_c=65 * 67)
    plan = planned(problem)
    a, b = 2 * 3 * 65 * 192, 2 * 3 * 131 * 128
    begin = -(-a // 256) * 256
    map_a, map_b, map_c, *_ = plan.launches[plan.main].values(AT)
    left, right = (map_b, map_a) if map_a.dims[0] == 67 and map_a.address != AT.workspace + begin else (map_a, map_b)
    assert {left.address, right.address} == {AT.workspace, AT.workspace + begin}
    assert plan.workspace_bytes >= begin + b
    assert all(value.dims[2] == 3 for value in (map_a, map_b))
    assert map_c == b"", "67 columns: C is stored by elements"


def test_an_operand_that_a_batch_shares_is_copied_once():
    problem = packed(64, 64, 63, batch=5, batch_stride_a=0, batch_stride_b=63 * 64, batch_stride_c=4096)
    plan = planned(problem, W1)
    assert [one.spec.name for one in plan.launches] == ["repack", "w1"]
    assert plan.workspace_bytes == 2 * 64 * 64
    assert plan.launches[1].values(AT)[0].strides[1] == 0


def test_more_products_than_a_reduction_has_z_take_several_launches():
    problem = packed(8, 8, 64, batch=70000, batch_stride_a=512, batch_stride_b=512, batch_stride_c=64)
    for kernel in (W1, W2):
        first, second = planned(problem, kernel).launches
        assert (first.values(AT)[0].dims[2], second.values(AT)[0].dims[2]) == (65535, 4465)
        moved = {value.address - base for value, base in zip(second.values(AT)[:2], (AT.a, AT.b), strict=True)}
        assert moved <= {2 * 65535 * 512, 2 * 65535 * 512 + AT.b - AT.a, 2 * 65535 * 512 + AT.a - AT.b}
        assert second.values(AT)[3] == AT.c + 2 * 65535 * 64


def test_partial_sums_follow_the_copies_in_the_workspace():
    problem = packed(64, 64, 65535, ldb=64)
    plan = planned(problem)
    copy, main, reduction = plan.launches
    values = main.values(AT)
    splits, per_split = values[-4], values[-3]
    assert (copy.spec.name, reduction.spec.name) == ("repack", "splitk_reduce")
    assert splits > 1
    assert (splits - 1) * per_split < 1024 <= splits * per_split
    assert plan.k_per_split == 64 * per_split
    begin = 2 * 64 * 65536
    assert values[3] == reduction.values(AT)[0] == AT.workspace + begin
    assert plan.workspace_bytes == begin + splits * 64 * 64 * 4
    assert reduction.values(AT)[1:5] == (AT.c, 64, 64, 64)


# --- parameters as bytes


def test_packing_puts_each_map_in_its_128_bytes():
    launch = planned(packed(512, 512, 512)).launches[0]
    made = []

    def encode(tensor):
        made.append(tensor)
        return bytes([len(made)]) * 128

    data = pack(launch, AT, encode)
    assert len(data) == launch.parameters.size == 440
    assert data[:256] == bytes([1]) * 128 + bytes([2]) * 128
    assert made[:2] == list(launch.values(AT)[:2])
    assert takes_tensor_maps(launch)
    assert pointer_slots(launch) is None


def test_a_kernel_without_maps_is_packed_as_before():
    problem = packed(64, 64, 64)
    spec, config = choose(problem, "t4", arch=HOPPER)
    (launch,) = spec.plan(problem, config).launches
    assert not takes_tensor_maps(launch)
    assert pointer_slots(launch) == (("a", 0), ("b", 0), ("c", 0))


# --- who takes what


def test_a_product_that_reads_no_factor_is_refused():
    c = np.ones((8, 8), np.float16)
    a, b = np.ones((8, 0), np.float16), np.ones((0, 8), np.float16)
    for kernel in ("w1", "w2"):
        with pytest.raises(KernelConstraintError, match=r"reads neither factor.*'t4'"):
            ng.matmul(a, b, out=c, kernel=kernel, device="emulator")
        with pytest.raises(KernelConstraintError, match=r"reads neither factor.*'t4'"):
            ng.gemm(np.ones((8, 8), np.float16), c.copy(), c, 0.0, 1.0, kernel=kernel, device="emulator")
    assert (c == 1).all()


@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_only_hopper_has_wgmma(arch):
    for kernel in ("w1", "w2"):
        with pytest.raises(KernelConstraintError, match=rf"{kernel} needs compute capability 9\.0 and .* kernel 't4'"):
            choose(packed(64, 64, 64), kernel, arch=arch)
    assert choose(packed(64, 64, 64), "w2", arch=HOPPER)[0] is W2


def test_w2_is_the_choice_where_there_is_wgmma():
    problem = packed(512, 512, 512)
    for arch, name in ((HOPPER, "w2"), ((8, 0), "t4"), ((8, 9), "t4"), ((10, 0), "t4"), ((12, 0), "t4")):
        assert choose(problem, arch=arch)[0].name == name
    assert choose(replace(problem, k=0), arch=HOPPER)[0].name == "t4", "which only scales C"


@pytest.mark.parametrize(
    ("shape", "batch", "name"),
    [
        ((64, 64, 64), 1000, "t4"),
        ((8, 64, 128), 1000, "t4"),
        ((1024, 64, 64), 100, "t4"),
        ((64, 64, 64), 100, "w2"),  # not one product an SM
        ((64, 64, 512), 512, "w2"),
        ((128, 128, 64), 1000, "w2"),
        ((1024, 64, 64), 1, "w2"),
    ],
    ids=str,
)
def test_a_batch_of_many_small_products_is_t4_s(shape, batch, name):
    m, n, k = shape
    strides = {"batch_stride_a": m * k, "batch_stride_b": k * n, "batch_stride_c": m * n}
    assert choose(packed(m, n, k, batch=batch, **strides), arch=HOPPER, sm_count=132)[0].name == name


def test_single_precision_is_refused():
    with pytest.raises(KernelConstraintError, match="dtype float32 is not one of float16, bfloat16"):
        choose(Problem.packed(64, 64, 64), "w2", arch=HOPPER)


def test_hopper_kernels_are_assembled_for_its_own_instructions():
    ptx = w_parameters("w1", W1.configs[0]).render()
    assert compiler.assembly_target(ptx, HOPPER) == "sm_90a"
    assert compiler.assembly_target(ptx, (10, 0)) == "sm_100"
    assert compiler.assembly_target(".version 8.0\n.target sm_80\n", HOPPER) == "sm_90"


@pytest.mark.parametrize("kernel", ["w1", "w2"])
def test_a_config_says_all_of_a_form(kernel):
    spec = {"w1": W1, "w2": W2}[kernel]
    for config in spec.configs:
        assert w_config(w_parameters(kernel, config)) == config
    problem = packed(64, 64, 65536)
    config = spec.select(problem, 132, HOPPER)
    text = spec.plan(problem, config).launches[0].config
    assert not {"splits", "blocks", "swapped"} & dict(text).keys(), "they don't change the text"
