"""Launches that overlap on a GPU: the same bits again and again, on one stream, on two at once, and in a graph."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm import execute
from numba_gemm.benchmark.correctness import device_view
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu

HOPPER = (9, 0)
REPEATS = 200
#: Shapes whose products take two to three launches: copies of both factors or of one, parts of K, both.
HALVES = [(1000, 1001, 1001), (257, 130, 1001), (1024, 1024, 1001), (128, 128, 65536), (129, 131, 32767)]
SINGLES = [(1000, 1001, 1002), (4095, 129, 1031), (256, 512, 32768), (130, 131, 32767)]
CASES = [(*shape, "bfloat16", "w2") for shape in HALVES] + [(*shape, "float32", "v8") for shape in SINGLES]


@pytest.fixture(autouse=True)
def _needs_hopper():
    from numba_gemm.device.context import current_context

    found = current_context().device
    if found.compute_capability != HOPPER:
        pytest.skip(f"w2 is of compute capability 9.0, and {found.name} has {found.compute_capability}")


def words(array):
    return array.view(f"u{array.itemsize}")


class Product:
    """Matrices of a case on the GPU, and what their product should be."""

    def __init__(self, case, seed=0):
        m, n, k, dtype, self.kernel = case
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        rng = np.random.default_rng([seed, m, n, k])
        a, b = (rng.standard_normal(shape).astype(kind) for shape in ((m, k), (k, n)))
        self.kind, self.shape = kind, (m, n)
        self.expected = reference(a, b, c_dtype=kind.name, tensor_core=HOPPER if kind.itemsize == 2 else None)
        self.a, self.b = device_view(a)[0], device_view(b)[0]

    def out(self):
        """A new C, full of NaN, and its memory."""
        return device_view(np.full(self.shape, np.nan, self.kind))

    def run(self, out, stream=None):
        ng.matmul(self.a, self.b, out=out, kernel=self.kernel, stream=stream)

    def bits(self, memory):
        """What was computed, checked, as whole numbers."""
        found = memory.copy_to_host().view(self.kind).reshape(self.shape)
        verdict = check(found, self.expected)
        assert verdict, verdict.message
        return words(found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_again_and_again(case, monkeypatch):
    product = Product(case)
    outs = [product.out() for _ in range(8)]
    for repeat in range(REPEATS):  # the copies and parts of one product follow on the sums of the last
        product.run(outs[repeat % len(outs)][0])
    found = [product.bits(memory) for _, memory in outs]
    for bits in found[1:]:
        np.testing.assert_array_equal(bits, found[0])

    monkeypatch.setattr(execute, "OVERLAP_SINCE", (99, 0))
    execute.prepare_request.cache_clear()
    try:
        apart, memory = product.out()
        product.run(apart)
        np.testing.assert_array_equal(product.bits(memory), found[0], "without overlap")
    finally:
        monkeypatch.undo()
        execute.prepare_request.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chain_in_which_each_product_reads_the_last(case):
    """What a product overwrites is what the one before it read or wrote: only the order keeps them apart."""
    first, second = Product(case), Product(case, seed=1)
    out, memory = first.out()
    for _ in range(REPEATS):
        second.run(out)
        first.run(out)
    first.bits(memory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_streams_at_once(case):
    from numba_gemm.device.stream import Stream

    products = [Product(case), Product(case, seed=1)]
    streams, outs = [Stream(), Stream()], [product.out() for product in products]
    _synchronize()
    for _ in range(REPEATS // 2):
        for product, stream, (out, _) in zip(products, streams, outs, strict=True):
            product.run(out, stream)
    for stream in streams:
        stream.synchronize()
    for product, (_, memory) in zip(products, outs, strict=True):
        product.bits(memory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_a_graph(case):
    from numba_gemm.device.stream import Stream, capture

    product = Product(case)
    (first, first_memory), (second, second_memory) = product.out(), product.out()
    product.run(first)  # compiled and loaded before it is captured
    stream, graphs = Stream(), []
    _synchronize()
    with capture(int(stream), graphs):
        product.run(second, stream)
        product.run(first, stream)
    stream.synchronize()
    for _ in range(REPEATS):
        graphs[0].replay(int(stream))
    stream.synchronize()
    np.testing.assert_array_equal(product.bits(second_memory), product.bits(first_memory))


def _synchronize():
    from numba import cuda

    cuda.synchronize()
