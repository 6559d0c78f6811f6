"""Plans and repeated calls on a GPU: threads, streams, graphs, nothing waited for, nothing leaked."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import numba_gemm as ng
from numba_gemm.validate import check, reference

pytestmark = pytest.mark.gpu

cuda = pytest.importorskip("numba.cuda")
F32 = np.float32


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


def on_gpu(*arrays):
    return [cuda.to_device(array) for array in arrays]


def right(result, a, b, **scales):
    verdict = check(result, reference(a, b, **scales))
    assert verdict, verdict.message


def test_a_plan_serves_other_arrays_of_its_form():
    a, b = draw(65, 33), draw(33, 70, seed=1)
    device_a, device_b = on_gpu(a, b)
    out = cuda.device_array((65, 70), F32)
    p = ng.plan(device_a, device_b, out)
    for seed in range(3):
        x, y = draw(65, 33, seed=seed), draw(33, 70, seed=seed + 9)
        assert p(*on_gpu(x, y), out=out) is out
        right(out.copy_to_host(), x, y)
    assert p.kernel in ng.plan(device_a, device_b).explain()
    right(p(device_a, device_b).copy_to_host(), a, b)


def test_a_plan_follows_the_alignment_of_each_call():
    """16-byte accesses at an address that isn't a multiple of 16 would fault."""
    memory = cuda.device_array(64 * 64 * 3 + 64, F32)
    a, b = draw(64, 64), draw(64, 64, seed=1)
    p = None
    for shift in (0, 1, 2, 3, 0):
        views = [memory[i * 4096 + 16 * i + shift :][:4096].reshape(64, 64) for i in range(3)]
        for view, values in zip(views, (a, b, np.full_like(a, np.nan)), strict=True):
            view.copy_to_device(values)
        p = p or ng.plan(*views)
        p(*views)
        right(views[2].copy_to_host(), a, b)


def test_what_differs_from_the_plan_is_named_and_out_untouched():
    a, b = on_gpu(draw(8, 4), draw(4, 6))
    p = ng.plan(a, b)
    out = cuda.to_device(np.full((8, 6), 7, F32))
    for wrong, name in (((on_gpu(draw(9, 4))[0], b), "a"), ((a, on_gpu(draw(4, 7))[0]), "b"), ((a, b[:, ::-1]), "b")):
        with pytest.raises(ValueError, match=rf"this plan is for {name} with shape"):
            p(*wrong, out=out)
    assert (out.copy_to_host() == 7).all()


def test_threads_and_streams_share_a_plan():
    """Also where the product borrows a workspace, which split-K does here."""
    shape = (64, 64, 16384)
    a, b = draw(shape[0], shape[2]), draw(shape[2], shape[1], seed=1)
    expected = reference(a, b)
    device_a, device_b = on_gpu(a, b)
    p = ng.plan(device_a, device_b)
    failures = []

    def work():
        stream = cuda.stream()
        outs = [cuda.device_array((64, 64), F32, stream=stream) for _ in range(8)]
        for _ in range(10):
            for out in outs:
                p(device_a, device_b, out=out, stream=stream)
        stream.synchronize()
        failures.extend(verdict.message for out in outs if not (verdict := check(out.copy_to_host(), expected)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("k", [64, 16384], ids=["one launch", "with a workspace"])
def test_plans_can_be_captured_into_a_graph(k):
    from numba_gemm.device.stream import Graph, Stream, capture

    a, b = draw(64, k), draw(k, 64, seed=1)
    device_a, device_b = on_gpu(a, b)
    out = cuda.to_device(np.full((64, 64), np.nan, F32))
    p = ng.plan(device_a, device_b, out)
    p(device_a, device_b, out=out)
    cuda.synchronize()
    out.copy_to_device(np.full((64, 64), np.nan, F32))
    stream, graphs = Stream(), []
    with capture(int(stream), graphs):
        p(device_a, device_b, out=out, stream=stream)
        ng.matmul(device_a, device_b, out=out, stream=stream)
    stream.synchronize()
    assert np.isnan(out.copy_to_host()).all()  # captured, not run
    graph: Graph = graphs[0]
    for _ in range(3):
        graph.replay(int(stream))
    stream.synchronize()
    right(out.copy_to_host(), a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_repeated_calls_multiply_what_lies_there_now(dtype, own_stream):
    """From some call on a graph takes the launch's place; it holds addresses, not values."""
    from numba_gemm.device import repeat

    stream = cuda.stream() if own_stream else 0
    a, b = draw(96, 64).astype(dtype), draw(64, 80, seed=1).astype(dtype)
    device_a, device_b = (cuda.to_device(x, stream=stream) for x in (a, b))
    out = cuda.device_array((96, 80), dtype, stream=stream)
    p = ng.plan(device_a, device_b, out)
    graphs = len(repeat._graphs)
    for call in (lambda: ng.matmul(device_a, device_b, out=out), lambda: p(device_a, device_b, out=out)):
        for seed in range(3):
            for _ in range(repeat.REPEATS):
                call()
            a = draw(96, 64, seed=seed).astype(dtype)
            device_a.copy_to_device(a, stream=stream)
            out.copy_to_device(np.full((96, 80), np.nan, dtype), stream=stream)
            call()
            tensor_core = (9, 0) if dtype == "float16" else None
            verdict = check(out.copy_to_host(stream=stream), reference(a, b, tensor_core=tensor_core))
            assert verdict, verdict.message
    assert len(repeat._graphs) > graphs


def test_a_repeated_call_can_still_be_captured():
    from numba_gemm.device import repeat
    from numba_gemm.device.stream import Graph, Stream, capture

    a, b = draw(64, 32), draw(32, 48, seed=1)
    device_a, device_b = on_gpu(a, b)
    out = cuda.to_device(np.full((64, 48), np.nan, F32))
    stream, graphs = Stream(), []
    for _ in range(2 * repeat.REPEATS):
        ng.matmul(device_a, device_b, out=out, stream=stream)
    stream.synchronize()
    out.copy_to_device(np.full((64, 48), np.nan, F32))
    with capture(int(stream), graphs):
        ng.matmul(device_a, device_b, out=out, stream=stream)
    stream.synchronize()
    assert np.isnan(out.copy_to_host()).all()  # captured, not run
    graph: Graph = graphs[0]
    graph.replay(int(stream))
    stream.synchronize()
    right(out.copy_to_host(), a, b)


def test_a_graph_is_made_while_another_thread_captures():
    """In the strictest mode, in which what other threads do can spoil a capture."""
    from numba_gemm.device import repeat
    from numba_gemm.device.driver import check as check_driver
    from numba_gemm.device.driver import driver
    from numba_gemm.device.stream import Stream

    cu, stream, other = driver(), Stream(), cuda.stream()
    a, b = draw(64, 32), draw(32, 40, seed=1)
    device_a, device_b, out = (cuda.to_device(x, stream=other) for x in (a, b, np.zeros((64, 40), F32)))
    p = ng.plan(device_a, device_b, out)
    known, begin, graphs = threading.Event(), threading.Event(), len(repeat._graphs)

    def work():
        p(device_a, device_b, out=out)  # the context is current in this thread from here on
        known.set()
        begin.wait(20)
        for _ in range(repeat.REPEATS + 1):
            p(device_a, device_b, out=out)

    thread = threading.Thread(target=work)
    thread.start()
    assert known.wait(20)
    strict = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    check_driver(cu.cuStreamBeginCapture(int(stream), strict), "cuStreamBeginCapture")
    begin.set()
    thread.join()
    captured = check_driver(cu.cuStreamEndCapture(int(stream)), "cuStreamEndCapture")
    check_driver(cu.cuGraphDestroy(captured), "cuGraphDestroy")
    other.synchronize()
    assert len(repeat._graphs) == graphs + 1
    right(out.copy_to_host(), a, b)


def test_a_repeated_plan_is_refused_in_another_context():
    """Also where a graph takes the launch's place."""
    from numba_gemm.device import repeat
    from numba_gemm.device.context import current_context
    from numba_gemm.device.driver import check as check_driver
    from numba_gemm.device.driver import driver

    cu, context = driver(), current_context()
    a, b = draw(64, 32), draw(32, 40, seed=1)
    device_a, device_b = on_gpu(a, b)
    out = cuda.device_array((64, 40), F32)
    p = ng.plan(device_a, device_b, out)
    for _ in range(2 * repeat.REPEATS):
        p(device_a, device_b, out=out)
    out.copy_to_device(np.full((64, 40), np.nan, F32))
    try:
        other = check_driver(cu.cuCtxCreate(None, 0, 0), "cuCtxCreate")
    except TypeError:  # of CUDA 12
        other = check_driver(cu.cuCtxCreate(0, 0), "cuCtxCreate")
    try:
        with pytest.raises(ValueError, match="another CUDA context"):
            p(device_a, device_b, out=out)
    finally:
        check_driver(cu.cuCtxDestroy(other), "cuCtxDestroy")
        check_driver(cu.cuCtxSetCurrent(context.handle), "cuCtxSetCurrent")
    assert np.isnan(out.copy_to_host()).all()
    p(device_a, device_b, out=out)
    right(out.copy_to_host(), a, b)


def sleep_on(stream, seconds):
    """Keep a stream busy."""

    @cuda.jit
    def spin(ticks):
        for _ in range(ticks):
            cuda.nanosleep(1_000_000)

    spin[1, 1, stream](1)  # compiled before it is needed
    stream.synchronize()
    spin[1, 1, stream](int(seconds * 1000))


@pytest.mark.parametrize("form", ["plan", "matmul", "matmul without out", "repacked"])
def test_calls_return_while_the_stream_is_still_busy(form):
    stream = cuda.stream()
    a, b = draw(128, 64), draw(64, 96, seed=1)
    device_a, device_b = (cuda.to_device(x, stream=stream) for x in (a, b))
    out = cuda.device_array((128, 96), F32, stream=stream)
    wide = cuda.to_device(np.repeat(b, 2, axis=1), stream=stream)[:, ::2]
    p = ng.plan(device_a, device_b, out)
    calls = {
        "plan": lambda: p(device_a, device_b, out=out),
        "matmul": lambda: ng.matmul(device_a, device_b, out=out),
        "matmul without out": lambda: ng.matmul(device_a, device_b, stream=stream),
        "repacked": lambda: ng.matmul(device_a, wide, out=out),
    }
    for _ in range(20):  # by a graph, where there is one launch
        calls[form]()
    stream.synchronize()
    marker = cuda.event(timing=False)
    sleep_on(stream, 0.5)
    marker.record(stream)
    start = time.perf_counter()
    result = calls[form]()
    took = time.perf_counter() - start
    assert not marker.query(), "the spinning kernel was to be still running"
    assert took < 0.25
    stream.synchronize()
    right(result.copy_to_host(), a, b)


def test_device_memory_is_given_back():
    """After 10⁴ calls with new results, workspaces and repacking no more arrays live than after the first ones, and of
    the library's own pool no more is in use than before and no more is kept. What the GPU has free depends on other
    processes too, and what the pool holds before on what other tests keep.
    """
    from numba_gemm.device.context import current_context
    from numba_gemm.device.driver import check as check_driver
    from numba_gemm.device.driver import driver
    from numba_gemm.device.memory import memory_pool

    attribute = driver().CUmemPool_attribute
    a, b = draw(128, 512), draw(512, 64, seed=1)
    deep_a, deep_b = on_gpu(draw(64, 16384), draw(16384, 64, seed=1))
    device_a, device_b = on_gpu(a, b)
    stepped = on_gpu(np.repeat(b, 2, axis=1))[0][:, ::2]

    def in_pool(name):
        return int(check_driver(driver().cuMemPoolGetAttribute(memory_pool(current_context()), name), "pool"))

    def some(calls):
        for _ in range(calls):
            ng.matmul(device_a, device_b)
            ng.matmul(device_a, stepped)
            ng.matmul(deep_a, deep_b)
        cuda.synchronize()
        cuda.current_context().deallocations.clear()
        assert in_pool(attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT) <= used_before
        arrays = len(cuda.current_context().memory_manager.allocations)
        return arrays, in_pool(attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    cuda.synchronize()
    used_before = in_pool(attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    arrays, reserved = some(200)
    assert reserved > 0
    arrays_later, reserved_later = some(3500)
    assert arrays_later <= arrays
    assert reserved_later <= reserved


def test_repeated_calls_leave_few_graphs():
    """On ever other addresses: each has its graph until there are too many, and they take no more than some memory."""
    from numba_gemm.device import repeat

    (a,) = on_gpu(draw(64, 64))
    many = cuda.device_array((2 * repeat.GRAPHS_LIMIT, 64, 64), F32)
    for place in range(len(many)):
        out = many[place]
        for _ in range(repeat.REPEATS + 2):
            ng.matmul(a, a, out=out)
    assert len(repeat._graphs) <= repeat.GRAPHS_LIMIT
    expected = reference(draw(64, 64), draw(64, 64))
    assert all(check(many[place].copy_to_host(), expected) for place in (0, repeat.GRAPHS_LIMIT, len(many) - 1))


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "launches"),
    [
        ((7, 33, 20), (7, 20, 19), 1),
        ((7, 33, 20), (20, 19), 1),
        ((33, 20), (7, 20, 19), 1),
        ((2, 1, 5, 6), (3, 6, 4), 2),
    ],
    ids=str,
)
def test_stacks_take_few_launches(a_shape, b_shape, launches):
    from numba_gemm.arrays import as_operand
    from numba_gemm.calls import prepare_device
    from numba_gemm.problem import check_inputs

    a, b = draw(*a_shape), draw(*b_shape, seed=1)
    device_a, device_b = on_gpu(a, b)
    result = ng.matmul(device_a, device_b)
    right(result.copy_to_host(), a, b)
    operands = [as_operand(*named) for named in (("a", device_a), ("b", device_b), ("out", result))]
    prepared = prepare_device(*operands, check_inputs(*operands[:2]), (1.0, 0.0, "v7"))
    assert prepared.launch_count == launches


def test_an_output_that_the_next_call_reads_is_ready():
    """Ordered on the arrays' stream without waiting: a chain of products."""
    a = np.linalg.qr(draw(64, 64))[0].astype(F32)
    device_a = cuda.to_device(a)
    x = device_a
    for _ in range(50):
        x = ng.matmul(device_a, x)
    expected = np.linalg.matrix_power(a.astype(np.float64), 51)
    assert np.abs(x.copy_to_host() - expected).max() < 1e-4


def test_a_stream_that_is_none_is_refused():
    a, b = on_gpu(draw(4, 4), draw(4, 4))
    with pytest.raises(TypeError, match="stream"):
        ng.matmul(a, b, stream="first")


# --- operands that stay on the GPU, and products that GPU memory can't hold


def test_a_matrix_on_the_gpu_with_numpy_arrays():
    a, b = draw(33, 65), draw(65, 40, seed=1)
    with ng.device_put(b) as weights:
        result = ng.matmul(a, weights)
        assert isinstance(result, np.ndarray)
        right(result, a, b)
        right(a @ weights, a, b)
        right(ng.matmul(a[0], weights), a[0], b)
        out = np.full((3, 33, 40), np.nan, F32)
        assert ng.matmul(np.broadcast_to(a, (3, 33, 65)), weights, out=out) is out
        for one in out:
            right(one, a, b)
        c = draw(33, 40, seed=2)
        expected = reference(a, b, c, alpha=2.0, beta=-1.0)
        assert check(ng.gemm(a, weights.T, c, 2.0, -1.0, transpose_b=True), expected)


def test_two_matrices_give_a_matrix_on_their_stream():
    a, b = draw(33, 65), draw(65, 40, seed=1)
    with ng.device_put(a) as on_gpu, ng.device_put(b) as weights:
        result = on_gpu @ weights
        assert isinstance(result, ng.Matrix)
        right(np.asarray(result), a, b)
        with pytest.raises(TypeError, match=r"out is a NumPy array"):
            ng.matmul(on_gpu, weights, out=np.empty((33, 40), F32))
        with pytest.raises(ValueError, match="CPU can't multiply"):
            ng.matmul(a, weights, device="cpu")


def test_a_product_larger_than_its_memory_limit():
    a, b = draw(700, 900), draw(900, 800, seed=1)
    seen = []
    out = ng.matmul(a, b, memory_limit=2 << 20, progress=lambda done, total: seen.append((done, total)))
    right(out, a, b)
    assert len(seen) > 1
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
