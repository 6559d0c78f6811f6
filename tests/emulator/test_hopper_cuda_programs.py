"""PTX that nvcc wrote for Hopper: libcu++'s barriers and copies, and a warp-specialised product in clusters of two."""

from __future__ import annotations

import re

import harness
import numpy as np
import pytest
from hopper_harness import assembly_log, check_assembly

from numba_gemm import emulator
from numba_gemm.validate import check, reference

TEXT = harness.fixture("hopper_cluster.O3")
SHARED = 3 * 2 * 128 * 128 + 4 * 64 * 128 + 6 * 8


def multiply(text, m, n, k, blocks):
    """(C, its verdict) of A · Bᵀ by `gemm_cluster`, with A M x K and B N x K."""
    rng = np.random.default_rng(m + n + k)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    c = np.zeros((m, n), np.float16)
    machine = emulator.Machine("sm_90a")
    at_a, at_b, at_c = machine.place(a), machine.place(b), machine.place(c, written=False)
    maps = [
        machine.tensor_map(at_a, "f16", (k, m), (2 * k,), (64, 128), swizzle="128B"),
        machine.tensor_map(at_b, "f16", (k, n), (2 * k,), (64, 64), swizzle="128B"),
        machine.tensor_map(at_c, "f16", (n, m), (2 * n,), (64, 64), swizzle="128B"),
    ]
    tiles_m = -(-m // 256) * 2
    tiles = tiles_m * -(-n // 128)
    numbers = [np.int32(-(-k // 64)), np.int32(tiles_m), np.int32(tiles)]
    machine.launch(text, blocks or tiles, 384, [*maps, *numbers], kernel="gemm_cluster", shared_bytes=SHARED)
    machine.fetch(at_c, c)
    return check(c, reference(a, b.T, tensor_core=(9, 0)))


def test_the_assembler_takes_the_fixture():
    if assembly_log(TEXT) is None:
        pytest.skip("ptxas is not installed")
    check_assembly(TEXT)


def test_a_bulk_copy_in_and_out_by_libcuxx():
    data = np.arange(1024, dtype=np.int32)
    report = emulator.launch(TEXT, 4, 64, [data], kernel="bulk_round_trip")
    np.testing.assert_array_equal(data.reshape(4, 256), np.arange(1024).reshape(4, 256) + np.arange(256))
    assert (report.counters.bulk_loads, report.counters.bulk_stores) == (4, 4)


@pytest.mark.parametrize(
    ("m", "n", "k", "blocks"),
    [
        (256, 128, 64, 0),  # one k-tile, one cluster
        (200, 264, 328, 2),  # tails; an odd number of k-tiles, twice the stages; one cluster for all tiles
        (520, 136, 136, 4),
    ],
)
def test_a_cluster_s_product(m, n, k, blocks):
    verdict = multiply(TEXT, m, n, k, blocks)
    assert verdict, verdict.message


FAULTS = {
    "no cluster barrier at the end": (
        r"barrier\.cluster\.arrive\.release;\s*barrier\.cluster\.wait\.acquire;", "", emulator.EarlyExit,
    ),
    "no cluster barrier at the start": (
        r"barrier\.cluster\.arrive\.release\.aligned;\s*barrier\.cluster\.wait\.acquire\.aligned;", "bar.sync 0;",
        emulator.MbarrierMisuse,
    ),
    "stages are given back to the own block only": (
        r"mapa\.shared::cluster\.u32 there, (%r\d+), %r\d+;", r"mapa.shared::cluster.u32 there, \1, %cluster_ctarank;",
        emulator.UnwaitedAsyncCopy,
    ),
    "the copy reaches the own block only": (r"\.multicast::cluster( \[.*\]), %rs\d+;", r"\1;", emulator.Deadlock),
    "no proxy fence between stmatrix and the store": (
        r"fence\.proxy\.async\.shared::cta;\n(?=\s*// end inline asm\n\s*// begin inline asm\n\s*bar\.sync)", "",
        emulator.MissingProxyFence,
    ),
    "no wait for the products": (r"wgmma\.wait_group\.sync\.aligned 0;", "", emulator.UnfinishedAsyncRead),
    "the producer keeps its registers": (r"setmaxnreg\.dec\.sync\.aligned\.u32 40;", "", emulator.Deadlock),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_in_the_cluster(fault):
    pattern, new, kind = FAULTS[fault]
    text, count = re.subn(pattern, new, TEXT)
    assert count, pattern
    with pytest.raises(kind):
        multiply(text, 256, 128, 512, 2)
