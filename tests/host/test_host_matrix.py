"""What of Matrix, page-locked memory and transfers needs no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_engine import LazyEngine, Threads

from numba_gemm import no_gpu as no_gpu_warning
from numba_gemm.catalog import LADDER
from numba_gemm.choose import choose
from numba_gemm.device import driver as driver_module
from numba_gemm.errors import NoDeviceError
from numba_gemm.host import Matrix, device_put, multiply, pinned_empty, put
from numba_gemm.host import matrix as matrix_module
from numba_gemm.host.blocks import Shape, choose_blocks
from numba_gemm.host.operands import describe
from numba_gemm.host.transfer import Transfer, copy_by_threads, copy_elements
from numba_gemm.problem import Problem


class Buffer:
    """Host memory that stands for a device buffer."""

    def __init__(self, array):
        self.array = array
        self.pointer = array.ctypes.data


class Memory:
    def __init__(self, array):
        self.buffer = Buffer(array)

    def free(self):
        self.buffer = None


def matrix_of(array):
    return Matrix(Memory(array), 0, array.shape, array.strides, array.dtype, 1)


def seen(matrix):
    """The matrix's elements, read through its pointer and strides."""
    interface = matrix.__cuda_array_interface__
    if 0 in matrix.shape:
        return np.empty(matrix.shape, matrix.dtype)
    address = type("Address", (), {"__array_interface__": {**interface, "strides": matrix.strides}})()
    return np.asarray(address).view(matrix.dtype)


ARRAY = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(1, 3), slice(None, None, -1), (..., 2), (1, 2, 3), (slice(0, 0), 1), (None, 1), np.int64(2), ...],
    ids=str,
)
def test_views_are_numpys(index):
    view = matrix_of(ARRAY)[index]
    np.testing.assert_array_equal(seen(view), ARRAY[index])
    assert view.shape == ARRAY[index].shape


@pytest.mark.parametrize("index", [[0, 1], np.array([0]), True, "x", (0, [1])], ids=str)
def test_an_index_that_would_copy_is_refused(index):
    with pytest.raises(TypeError, match="integers, slices"):
        matrix_of(ARRAY)[index]


def test_transposed_and_broadcast_views():
    matrix = matrix_of(ARRAY)
    np.testing.assert_array_equal(seen(matrix.T), ARRAY.T)
    np.testing.assert_array_equal(seen(matrix.swapaxes(-1, -2)), ARRAY.swapaxes(-1, -2))
    np.testing.assert_array_equal(seen(matrix[:1].broadcast_to((7, 5, 6))), np.broadcast_to(ARRAY[:1], (7, 5, 6)))
    np.testing.assert_array_equal(seen(matrix[1:].T[2:, ::2]), ARRAY[1:].T[2:, ::2])
    with pytest.raises(ValueError, match="broadcast"):
        matrix.broadcast_to((3, 3, 3))


def test_what_it_says_of_itself():
    matrix = matrix_of(ARRAY)
    assert (matrix.ndim, matrix.size, matrix.itemsize, matrix.nbytes, len(matrix)) == (3, 120, 4, 480, 4)
    assert matrix.__numba_gemm_matrix__
    interface = matrix.__cuda_array_interface__
    assert (interface["version"], interface["typestr"], interface["strides"]) == (3, "<f4", None)
    assert matrix.T.__cuda_array_interface__["strides"] == ARRAY.T.strides
    assert repr(matrix) == "Matrix(shape=(4, 5, 6), dtype=float32)"
    with pytest.raises(ValueError, match="always a copy"):
        np.array(matrix, copy=False)


def test_use_after_free_says_so_for_every_view():
    matrix = matrix_of(ARRAY)
    with matrix, matrix.T as view:
        assert view.pointer
    assert matrix.freed
    assert view.freed
    for use in (lambda: matrix.pointer, lambda: view.__cuda_array_interface__, matrix.numpy, lambda: np.asarray(view)):
        with pytest.raises(ValueError, match="freed; put the array on the GPU again with device_put"):
            use()
    assert "freed" in repr(matrix)


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise NoDeviceError("no NVIDIA driver")

    for module in ("numba_gemm.device.context", "numba_gemm.device.driver"):
        monkeypatch.setattr(f"{module}.driver", missing)
    monkeypatch.setattr(no_gpu_warning, "_warned", False)
    assert not driver_module.is_available()


def test_a_stream_lives_until_the_memory_has_been_given_back_on_it(monkeypatch):
    """A driver's call on a stream that its package has destroyed ends the process."""
    alive, freed = [], []

    class Stream:
        ptr = 77

        def __init__(self):
            alive.append(self.ptr)

        def __del__(self):
            alive.clear()

    class Buffer:
        def __init__(self, nbytes, stream):
            self.pointer, self.stream = 4096, stream

        def free(self):
            freed.append((self.stream, list(alive)))

    monkeypatch.setattr(matrix_module, "DeviceBuffer", Buffer)
    monkeypatch.setattr(matrix_module, "current_context", lambda: None)
    matrix = Matrix.empty((3, 4), stream=Stream())
    result = matrix.empty_like((3, 3), np.float32, matrix.stream)
    other = matrix.empty_like((3, 3), np.float32, 0)
    assert (result.stream, other.stream) == (77, matrix_module.LEGACY_STREAM)
    del matrix
    assert freed == [(77, [77])]
    del result
    assert freed[1:] == [(77, [77])]
    assert not alive


def test_an_empty_array_needs_no_copy(monkeypatch):
    monkeypatch.setattr(put, "_run", lambda *_, **__: pytest.fail("there is nothing to copy"))
    for shape in ((0, 3), (3, 0), (2, 0, 4)):
        array = np.empty(shape, np.float32)
        put.upload(array, matrix_of(array))


def test_without_a_gpu_page_locked_memory_is_ordinary_with_a_warning(no_gpu):
    with pytest.warns(RuntimeWarning, match="no NVIDIA GPU"):
        array = pinned_empty((3, 4), np.float16)
    assert (array.shape, array.dtype) == ((3, 4), np.float16)
    array[...] = 1


def test_without_a_gpu_device_put_says_what_is_missing(no_gpu):
    with pytest.raises(NoDeviceError):
        device_put(np.ones(3))


# --- copies of whole arrays


@pytest.fixture
def lazy_copies(monkeypatch):
    """Copies between arrays and matrices on a lazy engine."""
    engine = LazyEngine(buffer_bytes=64)

    @contextlib.contextmanager
    def lazy(context):
        with Threads() as executors:
            yield engine, executors

    monkeypatch.setattr(put, "engine", lazy)
    monkeypatch.setattr(put, "current_context", lambda: None)
    monkeypatch.setattr(Matrix, "check_context", lambda self, context: None)
    monkeypatch.setattr(Matrix, "order_before", lambda self, stream: None)
    monkeypatch.setattr(engine, "_check_device", lambda pointer: None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_matrices_of_any_strides_are_copied_both_ways(lazy_copies, dtype):
    array = ARRAY.astype(dtype)
    matrix = matrix_of(array.copy())
    for index in (..., 0, (slice(None), slice(None, None, 2)), (1, 2, 3), slice(None, None, -1), slice(0, 0)):
        np.testing.assert_array_equal(matrix[index].numpy(), array[index])
    np.testing.assert_array_equal(matrix.T.numpy(), array.T)
    np.testing.assert_array_equal(np.asarray(matrix[:1].broadcast_to((3, 5, 6))), array[[0, 0, 0]])

    for view, source in (
        (matrix, array[::-1].copy()),
        (matrix.T, array[::-1].T * 2),
        (matrix[1:3], array[2:0:-1]),
        (matrix.swapaxes(0, 1), np.ones((5, 4, 6), dtype)),
    ):
        assert view.copy_from(source) is view
        np.testing.assert_array_equal(view.numpy(), source)


def test_copy_from_refuses_what_does_not_fit(lazy_copies):
    matrix = matrix_of(ARRAY.copy())
    with pytest.raises(TypeError, match="float64 and the matrix float32"):
        matrix.copy_from(ARRAY.astype(np.float64))
    with pytest.raises(ValueError, match="shape"):
        matrix.copy_from(ARRAY[0])
    for gaps in (matrix[:, ::2], matrix[:1].broadcast_to((3, 5, 6)), matrix[::-1]):
        with pytest.raises(ValueError, match="gaps"):
            gaps.copy_from(np.ones(gaps.shape, np.float32))


# --- transfers


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 4),
    lines=st.integers(1, 9),
    width=st.integers(1, 40),
    pad=st.integers(0, 3),
    capacity=st.sampled_from([16, 64, 256, 1024]),
    threads=st.integers(1, 4),
)
def test_chunks_cover_a_transfer_once_and_fit(batch, lines, width, pad, capacity, threads):
    host = np.zeros((batch, lines, width), np.float32)
    pitch = (width + pad) * 4
    transfer = Transfer(host, 0, pitch, lines * pitch, host.dtype, pad == 0)
    for chunk in transfer.chunks(capacity, threads, host.nbytes):
        host[chunk.index] += 1
        assert host[chunk.index].shape == chunk.shape
        assert chunk.lines * chunk.staged_pitch <= max(capacity, 4)
        (product, line, place) = (part.start for part in chunk.index)
        assert chunk.device == product * lines * pitch + line * pitch + place * 4
    assert (host == 1).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 300, 200), (3, 130, 1), (1, 257, 129)], ids=str)
def test_arrays_that_run_the_other_way_are_copied_in_squares(shape):
    source = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for across in (source, np.ascontiguousarray(source.swapaxes(1, 2)).swapaxes(1, 2)):
        target = np.zeros(shape, np.float64)
        copy_elements(target, across)
        np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 1000), (2, 400_000), (1_000_000, 1), (1000, 1500)], ids=str)
def test_threads_copy_every_part(shape):
    source = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    target = np.zeros(shape, np.float32)
    copy_by_threads(target, source)
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((1, 300, 200), np.float32), (800, 300)),
        (np.zeros((1, 300, 205), np.float32)[:, :, 3:203], (820, 300)),
        (np.zeros((4, 30, 200), np.float32), (800, 120)),
        (np.zeros((1, 300, 400), np.float32)[:, :, ::2], None),
        (np.zeros((1, 300, 200), np.float32)[:, ::-1], None),
        (np.zeros((1, 300, 200), np.float16), None),
        (np.zeros((1, 300, 100), np.float32)[:, :, :20], None),
        (np.broadcast_to(np.zeros((1, 1, 200), np.float32), (1, 300, 200)), None),
    ],
    ids=["packed", "wide", "batch", "gaps", "backwards", "other dtype", "short lines", "one line"],
)
def test_what_can_be_copied_as_it_lies(array, expected):
    pitch = array.shape[2] * 4
    transfer = Transfer(array, 0, pitch, array.shape[1] * pitch, np.dtype(np.float32))
    found = transfer.direct()
    assert (found[1:] if found else None) == expected


def test_device_put_refuses_what_is_no_stream_before_it_looks_for_a_gpu():
    for stream in ("first", object()):
        with pytest.raises(TypeError, match=r"stream is .*; pass"):
            device_put(np.ones(3, np.float32), stream)


@pytest.mark.parametrize(("shape", "error"), [((2, -2), ValueError), ("ab", TypeError), (1.5, TypeError)], ids=repr)
def test_pinned_empty_refuses_what_is_no_shape(shape, error):
    with pytest.raises(error):
        pinned_empty(shape)


@pytest.mark.parametrize("text", ["1GB", "1e9", "-5", "0", "much"])
def test_a_memory_limit_of_the_environment_that_is_no_number_of_bytes(text, monkeypatch):
    shape = Shape(1, 100, 100, 100)
    monkeypatch.setenv("NUMBA_GEMM_MEMORY_LIMIT", text)
    with pytest.raises(ValueError, match=r"NUMBA_GEMM_MEMORY_LIMIT is .*number of bytes, for instance 1073741824"):
        multiply._memory_limit(None, None, shape)
    assert multiply._memory_limit(7, None, shape) == 7
    monkeypatch.setenv("NUMBA_GEMM_MEMORY_LIMIT", "4096")
    assert multiply._memory_limit(None, None, shape) == 4096


def test_memory_that_is_kept_is_not_asked_for_again(monkeypatch):
    """What is free is asked for only if the product doesn't fit in what the pool keeps."""
    shape = Shape(1, 100, 100, 100)
    needs = choose_blocks(shape, 1 << 40).device_bytes(shape)
    monkeypatch.delenv("NUMBA_GEMM_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr(multiply, "kept_memory", lambda context: needs)
    assert multiply._memory_limit(None, None, shape) == needs
    monkeypatch.setattr(multiply, "kept_memory", lambda context: needs - 1)
    monkeypatch.setattr(multiply, "free_memory", lambda: 1000)
    assert multiply._memory_limit(None, None, shape) == int((needs + 999) * 0.8)


@pytest.mark.parametrize(("size", "free"), [(1500, False), (2048, False), (3000, True)])
def test_blocks_of_large_products_alone_have_forms_of_their_own(monkeypatch, size, free):
    """A small one's single launch, staged or page-locked, has its best form, and so have its blocks under a limit."""
    a = np.empty((size, size), np.float32)
    _, call = describe(a, a, a, 1.0, 0.0)
    context = SimpleNamespace(device=SimpleNamespace(compute_capability=(9, 0), sm_count=132))
    monkeypatch.setattr(multiply, "prepare_call", lambda call, *_: (SimpleNamespace(spec=LADDER["v8"]), call))
    monkeypatch.setattr(multiply, "FREE_FORM_COST", 10.0)
    form, _ = multiply._form_of_blocks.__wrapped__(call, None, context)
    assert form.free == free


def test_no_form_of_a_host_product_has_a_row_or_column_apart(monkeypatch):
    """It would suit no block of another size, and blocks are to have the bits of the one launch."""
    device = SimpleNamespace(compute_capability=(9, 0), sm_count=132)
    problem = Problem.packed(4095, 4097, 4099)

    def prepared(problem, spec, config, context):
        return SimpleNamespace(spec=spec, config=config)

    spec, config = choose(problem, arch=(9, 0), sm_count=132)
    assert dict(config)["column_apart"]
    monkeypatch.setattr(multiply, "prepare", lambda *_: prepared(problem, spec, config, None))
    monkeypatch.setattr(multiply, "prepare_form", prepared)
    found = multiply._prepare_for_blocks(problem, None, SimpleNamespace(device=device))
    assert found.spec.name == "v8"
    assert "column_apart" not in dict(found.config)
