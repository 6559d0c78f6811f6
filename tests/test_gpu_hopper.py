"""w1 and w2 on a Hopper GPU: right everywhere, the emulator's bits, no stale tensor map, no hang."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.benchmark.correctness import References, cases_for, check_case, device_view
from numba_gemm.cases import Case
from numba_gemm.problem import Problem
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu

NAMES = ("w1", "w2")
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HOPPER = (9, 0)

REFERENCES = References(seed=0)  # both kernels share a case's


@pytest.fixture(autouse=True)
def _needs_hopper():
    from numba_gemm.device.context import current_context

    found = current_context().device
    if found.compute_capability != HOPPER:
        pytest.skip(f"wgmma is of compute capability 9.0, and {found.name} has {found.compute_capability}")


def draw(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def product(a, b, name, *, c_dtype=None, c=None, **scales):
    """The product of device copies of two arrays that lie as they do, and what it should be."""
    kind = a.dtype if c_dtype is None else np.dtype(c_dtype)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    c = np.full(shape, np.nan, kind) if c is None else c
    out, base = device_view(c)
    if scales:
        ng.gemm(device_view(a)[0], device_view(b)[0], out, scales["alpha"], scales["beta"], kernel=name)
    else:
        ng.matmul(device_view(a)[0], device_view(b)[0], out=out, kernel=name)
    expected = reference(a, b, c if scales.get("beta") else None, c_dtype=kind.name, tensor_core=HOPPER, **scales)
    return base.copy_to_host().view(kind).reshape(shape), expected


def right(a, b, name, **options):
    verdict = check(*product(a, b, name, **options))
    assert verdict, verdict.message


# --- every case of the generator, and the shapes that have traps


@pytest.mark.parametrize("place", ["numpy", "device"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_all_cases(name, dtype, place):
    cases = [case for case in cases_for(name, quick=False) if case.dtype == dtype]
    outcomes = [check_case(name, case, place, REFERENCES) for case in cases]
    assert [f"{outcome.case}: {outcome.message}" for outcome in outcomes if outcome.message] == []


SHAPES = [
    *[(m, n, k) for m in (1, 63, 65, 128, 300) for n in (1, 8, 127, 260) for k in (1, 8, 63, 65, 192, 321)],
    *[(1000, 1001, 1002), (1024, 1024, 1024), (2048, 256, 4096), (130, 4100, 72), (4096, 130, 72)],
    *[(1, 8192, 4096), (16, 4097, 2049), (64, 64, 32768), (128, 128, 16384), (255, 257, 8191)],
]


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_layouts(name, layouts):
    for at, (m, n, k) in enumerate(SHAPES):
        dtype = ("float16", "bfloat16")[at % 2]
        a = draw((m, k), dtype, 1) if layouts[0] == "n" else draw((k, m), dtype, 1).T
        b = draw((k, n), dtype, 2) if layouts[1] == "n" else draw((n, k), dtype, 2).T
        got, expected = product(a, b, name, c_dtype="float32" if at % 3 == 0 else None)
        verdict = check(got, expected)
        assert verdict, f"{(m, n, k)} {layouts} {dtype}: {verdict.message}"


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_shared_factors(name):
    a, b = draw((5, 130, 72), "float16", 3), draw((5, 72, 136), "float16", 4)
    odd_a, odd_b = draw((5, 65, 67), "bfloat16", 5), draw((5, 67, 33), "bfloat16", 6)
    for left, right_ in ((a, b), (odd_a, odd_b)):
        right(left, right_, name)
        right(left[::-1], right_, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_that_all_products_share(name):
    """Its map's batch stride is 0."""
    from numba import cuda

    a, b = draw((72, 64), "float16", 7), draw((6, 64, 80), "float16", 8)
    out = cuda.device_array((6, 72, 80), np.float16)
    ng.matmul(cuda.to_device(a), cuda.to_device(b), out=out, kernel=name)
    verdict = check(out.copy_to_host(), reference(np.broadcast_to(a, (6, 72, 64)), b, tensor_core=HOPPER))
    assert verdict, verdict.message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(256, 384, 128), (131, 257, 99), (8, 1024, 512), (64, 64, 16384)], ids=str)
def test_alpha_and_beta(name, shape):
    m, n, k = shape
    a, b = draw((m, k), "bfloat16", 9), draw((k, n), "bfloat16", 10)
    right(a, b, name, c=draw((m, n), "bfloat16", 11), alpha=-0.5, beta=2.0)
    right(a, b, name, c=np.full((m, n), np.nan, TYPES["bfloat16"]), alpha=1.5, beta=0.0)


def all_forms():
    """Forms of all tiles, clusters and splits, compiled by several processes."""
    from numba_gemm.benchmark.forms import report_forms
    from numba_gemm.tensorcore.w_specs import W2

    found = {}
    for shape in ((512, 768, 256), (300, 512, 192), (24, 2048, 512), (2048, 24, 512), (128, 128, 8192)):
        for c_dtype in ("", "float32"):
            problem = Problem.packed(*shape, dtype="bfloat16", c_dtype=c_dtype)
            for config in W2.candidates(problem, 132, HOPPER)[: 5 if c_dtype else 30]:
                found[shape, c_dtype, config] = problem
    plans = (W2.plan(problem, config) for (_, _, config), problem in found.items())
    report_forms([("w2", one, HOPPER) for one in dict.fromkeys(p.launches[p.main].config for p in plans)], sass=False)
    return found


def test_every_form_that_a_tuner_times():
    from numba import cuda

    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare_form
    from numba_gemm.tensorcore.w_specs import W2

    wrong = []
    for (shape, c_dtype, config), problem in all_forms().items():
        m, n, k = shape
        a, b = draw((m, k), "bfloat16", 12), draw((k, n), "bfloat16", 13)
        kind = np.dtype(c_dtype) if c_dtype else a.dtype
        device_a, device_b = (cuda.to_device(x.view(np.int16)) for x in (a, b))
        out = cuda.to_device(np.full(m * n * kind.itemsize, 0xFF, np.uint8))
        prepared = prepare_form(problem, W2, config, current_context())
        prepared.launch(*(x.device_ctypes_pointer.value for x in (device_a, device_b, out)), 0)
        cuda.synchronize()
        expected = reference(a, b, c_dtype=kind.name, tensor_core=HOPPER, k_per_split=prepared.k_per_split)
        verdict = check(out.copy_to_host().view(kind).reshape(m, n), expected)
        if not verdict:
            wrong.append(f"{shape} {dict(config)}: {verdict.message}")
    assert wrong == []


# --- bits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(70, 40, 200), (129, 137, 64), (5, 300, 77)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_emulator_has_the_same_bits(name, shape, dtype):
    """K isn't split here, so each element is one chain of sums of 16 products, whatever the tile."""
    m, n, k = shape
    a, b = draw((m, k), dtype, 14), draw((k, n), dtype, 15)
    outs = [np.full((m, n), np.nan, np.float32) for _ in range(2)]
    for out, device in zip(outs, ("cuda", "emulator"), strict=True):
        ng.matmul(a, b, out=out, kernel=name, device=device)
    assert np.array_equal(outs[0].view(np.uint32), outs[1].view(np.uint32))


def test_a_split_form_has_the_emulators_bits():
    from numba import cuda

    from numba_gemm.device.context import current_context
    from numba_gemm.emulate import run_form
    from numba_gemm.emulator.machine import Machine
    from numba_gemm.execute import prepare_form
    from numba_gemm.spec import Addresses
    from numba_gemm.tensorcore.w_specs import W2

    m, n, k = 64, 72, 1500
    problem = Problem.packed(m, n, k, dtype="float16", c_dtype="float32")
    problem = replace(problem, lda=1504)
    config = next(one for one in W2.candidates(problem, 132, HOPPER) if dict(one).get("splits", 1) > 1)
    a = np.zeros((m, 1504), np.float16)
    a[:, :k] = draw((m, k), "float16", 16)
    b = draw((k, n), "float16", 17)
    machine = Machine("sm_90")
    out = np.full((m, n), np.nan, np.float32)
    at = Addresses(machine.place(a), machine.place(b), machine.place(out, written=False))
    run_form(machine, problem, W2, config, at)
    machine.fetch(at.c, out)
    device = [cuda.to_device(x) for x in (a, b, np.full((m, n), np.nan, np.float32))]
    prepared = prepare_form(problem, W2, config, current_context())
    for _ in range(2):
        prepared.launch(*(x.device_ctypes_pointer.value for x in device), 0)
        cuda.synchronize()
        assert np.array_equal(device[2].copy_to_host().view(np.uint32), out.view(np.uint32))


# --- many calls


def test_a_hundred_thousand_launches_at_changing_shapes_and_pointers():
    """Each product is of whole numbers, so it is exact; a map of another call would show."""
    from numba import cuda

    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare

    rng = np.random.default_rng(18)
    values = rng.integers(-4, 5, 1 << 16).astype(np.float16)
    memory = cuda.to_device(values)
    start = memory.device_ctypes_pointer.value
    slots, slot = 64, 1 << 15  # results, and elements of one
    results = cuda.device_array(slots * slot, np.float32)
    out = results.device_ctypes_pointer.value
    sides = (1, 8, 24, 33, 64, 72, 130)
    context = current_context()
    shapes = [tuple(int(x) for x in rng.choice(sides, 3)) for _ in range(60)]
    products = [
        (shape, prepare(Problem.packed(*shape, dtype="float16", c_dtype="float32"), name, context))
        for shape in shapes
        for name in NAMES
    ]
    for _ in range(100):
        last = {}
        for number in range(1000):
            (m, n, k), prepared = products[int(rng.integers(len(products)))]
            a, b = (8 * int(x) for x in rng.integers(0, 4000, 2))  # elements: multiples of 16 bytes
            place = number % slots
            prepared.launch(start + 2 * a, start + 2 * b, out + 4 * place * slot, 0)
            last[place] = (m, n, k, a, b)
        found = results.copy_to_host().reshape(slots, slot)
        for place, (m, n, k, a, b) in last.items():
            left = values[a : a + m * k].reshape(m, k).astype(np.float32)
            expected = left @ values[b : b + k * n].reshape(k, n).astype(np.float32)
            assert np.array_equal(found[place, : m * n].reshape(m, n), expected), (m, n, k, a, b)


def test_memory_that_is_freed_and_used_for_another_matrix_has_its_own_map():
    from numba import cuda

    from numba_gemm.device.memory import DeviceBuffer

    pointers = set()
    for shape in ((64, 128, 32), (32, 64, 128), (128, 32, 64)) * 5:
        m, n, k = shape
        a, b = draw((m, k), "float16", m), draw((k, n), "float16", n)
        with DeviceBuffer(1 << 16, 0) as buffer:
            pointers.add(buffer.pointer)
        verdict = check(
            ng.matmul(cuda.to_device(a), cuda.to_device(b), kernel="w2").copy_to_host(),
            reference(a, b, tensor_core=HOPPER),
        )
        assert verdict, f"{shape}: {verdict.message}"
    assert pointers


@pytest.mark.parametrize("shape", [(256, 256, 256), (129, 65, 131), (64, 64, 16384)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_plans_and_graphs(name, shape):
    """One launch, one with copies before it, and one with a workspace and a reduction."""
    from numba import cuda

    from numba_gemm.device.stream import Stream, capture

    m, n, k = shape
    a, b = draw((m, k), "float16", 19), draw((k, n), "float16", 20)
    expected = reference(a, b, tensor_core=HOPPER)
    device_a, device_b, out = cuda.to_device(a), cuda.to_device(b), cuda.to_device(np.full((m, n), np.nan, np.float16))
    p = ng.plan(device_a, device_b, out, kernel=name)
    assert p.kernel == name
    for _ in range(3):
        p(device_a, device_b, out=out)
    assert check(out.copy_to_host(), expected)
    out.copy_to_device(np.full((m, n), np.nan, np.float16))
    stream, graphs = Stream(), []
    cuda.synchronize()
    with capture(int(stream), graphs):
        p(device_a, device_b, out=out, stream=stream)
    stream.synchronize()
    assert np.isnan(out.copy_to_host()).all(), "captured, not run"
    for _ in range(3):
        graphs[0].replay(int(stream))
    stream.synchronize()
    assert check(out.copy_to_host(), expected)


def test_threads_multiply_at_once():
    shapes = [(100 + 8 * i, 96 + i, 2048) for i in range(8)]
    inputs = [(draw((m, k), "float16", m), draw((k, n), "float16", n)) for m, n, k in shapes]
    expected = [reference(a, b, tensor_core=HOPPER) for a, b in inputs]
    verdicts = [None] * len(shapes)

    def work(i):
        verdicts[i] = all(
            check(ng.matmul(*inputs[i], kernel=NAMES[i % 2], device="cuda"), expected[i]) for _ in range(10)
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(verdicts)


def test_the_largest_shared_memory_is_granted():
    """227 KB a block, past the 48 KB that a kernel can have without asking."""
    from numba_gemm.device.context import current_context
    from numba_gemm.execute import prepare

    problem = Problem.packed(4096, 4096, 4096, dtype="bfloat16")
    prepared = prepare(problem, "w2", current_context())
    assert prepared.steps[prepared.main].shared_bytes > 128 * 1024
    assert prepared.function.local_bytes == 0, "no registers were spilled"


def test_a_repeated_call_costs_little_more_than_another_kernels():
    """Maps are found, not made: within 4 µs of t4's call, on a quiet host."""
    from numba import cuda

    device = [cuda.to_device(draw((64, 64), "float16", seed)) for seed in (21, 22)]
    out = cuda.device_array((64, 64), np.float16)
    cost = {}
    for name in ("t4", "w2"):
        p = ng.plan(*device, out, kernel=name)
        times = []
        for _ in range(10):
            cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                p(*device, out=out)
            times.append((time.perf_counter() - begin) / 100)
        cost[name] = min(times)
    assert cost["w2"] < cost["t4"] + 4e-6, cost


@pytest.mark.parametrize("kernel", NAMES)
def test_the_cases_of_a_tile_in_both_types(kernel):
    for dtype in TYPES:
        for case in (Case(256, 264, 136, dtype=dtype), Case(257, 263, 135, dtype=dtype, layout="sliced")):
            assert not check_case(kernel, case, "device", REFERENCES).message
