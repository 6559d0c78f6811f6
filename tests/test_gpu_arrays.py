"""Arrays of all packages on a GPU: seen without a copy, results of the same package, on its stream, without waiting."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from gpu_packages import DTYPES, is_done, keep_busy, numpy_type, package

import numba_gemm as ng
from numba_gemm.arrays import (
    as_operand,
    as_stream,
    current_stream,
    empty_like_operand,
    hold_operands,
    probe_for,
    wrap_result,
)
from numba_gemm.device import lifetime
from numba_gemm.device.context import current_context, synchronize
from numba_gemm.device.driver import check, driver
from numba_gemm.device.memory import DeviceBuffer, copy_to_device
from numba_gemm.device.pointer import PointerInfo, check_device_operands, pointer_info
from numba_gemm.device.stream import Stream

pytestmark = pytest.mark.gpu

WRITABLE = ("numba", "cupy", "torch")
ALL = (*WRITABLE, "jax")


def factors(dtype, m=70, k=50, n=90):
    """Small integers: their product is exact in every dtype and order of summation (below 256 for bfloat16)."""
    rng = np.random.default_rng(5)
    a = rng.integers(-1, 2, (m, k)).astype(numpy_type(dtype))
    b = rng.integers(-1, 2, (k, n)).astype(numpy_type(dtype))
    return a, b, (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


def typed(name, dtype):
    if name == "cupy" and dtype == "bfloat16":
        cupy = pytest.importorskip("cupy")
        try:
            cupy.empty(1, ml_dtypes.bfloat16)
        except (TypeError, ValueError) as error:
            pytest.skip(f"this CuPy has no bfloat16: {error}")
    return package(name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_an_array_is_seen_where_it_lies(name, dtype):
    packages = typed(name, dtype)
    array = packages.array(factors(dtype)[0])
    operand = as_operand("a", array)
    assert (operand.kind, operand.device, operand.dtype) == (name, 0, dtype)
    assert (operand.shape, operand.strides) == ((70, 50), (50, 1))
    assert operand.pointer == packages.pointer(array)
    assert operand.readonly is (name == "jax")
    assert pointer_info(operand.pointer).kind == "device"
    check_device_operands([operand], current_context(), current_stream(operand))


@pytest.mark.parametrize("name", WRITABLE)
def test_a_probe_sees_what_an_operand_sees(name):
    packages = package(name)
    for stream in (None, packages.new_stream()):
        with packages.current(stream if stream is not None else as_default(packages)):
            array = packages.array(factors("float32")[0])
            pointer, shape, _, dtype, handle = probe_for(array)(array)
            operand = as_operand("a", array)
            assert (pointer, tuple(shape), handle) == (operand.pointer, operand.shape, operand.stream or 0)
            assert str(dtype).endswith("float32")


def as_default(packages):
    if type(packages).__name__ == "Cupy":
        return packages.cupy.cuda.Stream.null
    return packages.torch.cuda.default_stream() if type(packages).__name__ == "Torch" else 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITABLE)
def test_a_new_array_is_of_the_package(name, dtype):
    packages = typed(name, dtype)
    operand = as_operand("a", packages.array(factors(dtype)[0]))
    other = Stream()
    for stream in (None, 0, int(other)):
        for shape in ((3, 4, 5), (7,), (0, 3)):
            result = empty_like_operand(operand, shape, stream)
            assert type(result) is type(operand.array)
            seen = as_operand("out", result)
            assert (seen.shape, seen.dtype, seen.device or 0) == (shape, dtype, 0)
            assert as_operand("out", empty_like_operand(operand, shape, stream, "float32")).dtype == "float32"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITABLE)
def test_out_is_written_in_place(name, dtype):
    packages = typed(name, dtype)
    a, b, expected = factors(dtype)
    out = packages.array(np.full(expected.shape, 7, expected.dtype))
    pointer = packages.pointer(out)
    assert ng.matmul(packages.array(a), packages.array(b), out=out) is out
    assert packages.pointer(out) == pointer
    synchronize()
    assert np.array_equal(packages.back(out), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_a_result_is_of_the_same_package(name, dtype):
    packages = typed(name, dtype)
    a, b, expected = factors(dtype)
    a_array = packages.array(a)
    result = ng.matmul(a_array, packages.array(b))
    assert type(result) is type(a_array)
    assert as_operand("a", result).dtype == dtype
    assert np.array_equal(packages.back(result), expected)


@pytest.mark.parametrize("name", WRITABLE)
def test_a_product_is_ordered_on_the_stream_and_waits_for_nothing(name):
    """The factor is written only after a tenth of a second of other work; the call must return before, and be right."""
    packages = package(name)
    a, b, expected = factors("float32")
    stream = packages.new_stream()
    handle = as_stream(stream)
    written = packages.array(a)
    with packages.current(stream):
        late, b_array = packages.array(np.zeros_like(a)), packages.array(b)
        out = packages.empty(expected.shape, "float32")
        ng.matmul(late, b_array, out=out)  # compiled before it counts
        synchronize()
        keep_busy(handle)
        packages.copy_into(late, written)
        ng.matmul(late, b_array, out=out)
        result = ng.matmul(late, b_array)
        assert not is_done(handle)
        check(driver().cuStreamSynchronize(handle), "cuStreamSynchronize")
        assert np.array_equal(packages.back(out), expected)
        assert np.array_equal(packages.back(result), expected)


@pytest.mark.parametrize("name", WRITABLE)
def test_a_stream_of_any_package_is_taken(name):
    packages = package(name)
    a, b, expected = factors("float32")
    a_array, b_array = packages.array(a), packages.array(b)
    out = packages.array(np.zeros_like(expected))
    synchronize()
    for other in WRITABLE:
        stream = package(other).new_stream()
        handle = as_stream(stream)
        ng.matmul(a_array, b_array, out=out, stream=stream)  # compiled before it counts
        synchronize()
        keep_busy(handle)
        assert ng.matmul(a_array, b_array, out=out, stream=stream) is out
        assert not is_done(handle)
        check(driver().cuStreamSynchronize(handle), "cuStreamSynchronize")
        assert np.array_equal(packages.back(out), expected)


def test_streams_of_cuda_core():
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    assert as_stream(stream) == int(stream.handle)
    assert as_stream(driver().CUstream(int(stream.handle))) == int(stream.handle)


@pytest.mark.parametrize("other", ["cupy", "torch"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_packages_mixed(name, other):
    """The result is of the first factor's package."""
    first, second = package(name), package(other)
    a, b, expected = factors("float32")
    a_array = first.array(a)
    result = ng.matmul(a_array, second.array(b))
    assert type(result) is type(a_array)
    synchronize()
    assert np.array_equal(first.back(result), expected)


def test_a_product_waits_for_the_streams_of_all_its_arrays():
    """A factor on torch's default stream, which orders nothing by itself, and an output on a stream of CuPy's."""
    torch, cupy = package("torch"), package("cupy")
    a, b, expected = factors("float32")
    written, late, b_array = torch.array(a), torch.array(np.zeros_like(a)), torch.array(b)
    with cupy.new_stream() as stream:
        out = cupy.empty(expected.shape, "float32")
        ng.matmul(late, b_array, out=out)
        synchronize()
        keep_busy(0)
        torch.copy_into(late, written)
        ng.matmul(late, b_array, out=out)
        assert not is_done(stream.ptr)
        stream.synchronize()
        assert np.array_equal(cupy.back(out), expected)


def test_a_jax_factor_with_one_on_a_stream_of_cupys():
    jax, cupy = package("jax"), package("cupy")
    a, b, expected = factors("float32")
    a_array, written = jax.array(a), cupy.array(b)
    with cupy.new_stream() as stream:
        late = cupy.array(np.zeros_like(b))
        ng.matmul(a_array, late)
        synchronize()
        keep_busy(stream.ptr)
        cupy.copy_into(late, written)
        assert np.array_equal(np.asarray(ng.matmul(a_array, late) + 1), expected + 1)


class DLPackOnly:
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class InterfaceOnly:
    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


@pytest.mark.parametrize("wrap", [DLPackOnly, InterfaceOnly])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_arrays_known_by_a_protocol_alone(name, wrap):
    packages = package(name)
    a, b, expected = factors("float32")
    a_array, b_array, out = packages.array(a), packages.array(b), packages.empty(expected.shape, "float32")
    assert as_operand("a", wrap(a_array)).pointer == packages.pointer(a_array)
    wrapped = wrap(out)
    assert ng.matmul(wrap(a_array), wrap(b_array), out=wrapped) is wrapped
    synchronize()
    assert np.array_equal(packages.back(out), expected)
    result = ng.matmul(wrap(a_array), wrap(b_array))
    synchronize()
    assert np.array_equal(result.copy_to_host(), expected)


def test_bfloat16_that_only_dlpack_can_name():
    torch = package("torch")
    a, b, expected = factors("bfloat16")
    a_array, b_array = torch.array(a), torch.array(b)
    out = torch.empty(expected.shape, "bfloat16")
    ng.matmul(DLPackOnly(a_array), DLPackOnly(b_array), out=DLPackOnly(out))
    synchronize()
    assert np.array_equal(torch.back(out), expected)


def test_jax_orders_its_work_before_and_after():
    """A factor that JAX is still computing, and a result that JAX reads at once; nothing waits on the host."""
    jax = package("jax").jax
    size = 2048
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: (y @ x) / size, x))
    ones = jax.device_put(np.ones((size, size), np.float32), jax.devices("cuda")[0])
    slow(ones).block_until_ready()
    ng.matmul(ones, ones).block_until_ready()
    factor = slow(ones)
    result = ng.matmul(factor, factor)
    total = jax.numpy.sum(result, axis=1)
    assert isinstance(result, jax.Array)
    assert np.array_equal(np.asarray(total), np.full(size, float(size) * size, np.float32))


def test_jax_memory_is_not_reused_while_it_is_read():
    """The factors are dropped at once, and JAX is asked for memory of the same size to write other values to."""
    jax = package("jax").jax
    device = jax.devices("cuda")[0]
    shape = (2048, 2048)
    ones = jax.device_put(np.ones(shape, np.float32), device)
    ng.matmul(ones, ones).block_until_ready()
    for _ in range(10):
        keep_busy(0, 5)
        result = ng.matmul(ones * 2, ones * 3)
        rubbish = [jax.numpy.full(shape, 9.0, device=device) for _ in range(4)]
        assert float(jax.numpy.max(result)) == float(jax.numpy.min(result)) == 6.0 * 2048
        del rubbish


def test_a_jax_result_that_is_dropped_at_once_is_not_given_away():
    jax = package("jax").jax
    ones = jax.device_put(np.ones((512, 512), np.float32), jax.devices("cuda")[0])
    ng.matmul(ones, ones).block_until_ready()
    keep_busy(0, 50)
    ng.matmul(ones, ones)
    others = [jax.numpy.full((512, 512), 3.0, device=jax.devices("cuda")[0]) for _ in range(8)]
    synchronize()
    assert all(float(other.min()) == float(other.max()) == 3.0 for other in others)


@pytest.mark.parametrize("name", ["numba", "cupy"])
def test_managed_memory_is_a_gpus(name):
    a, b, expected = factors("float32")
    if name == "numba":
        cuda = package("numba").cuda
        arrays = [cuda.managed_array(x.shape, np.float32) for x in (a, b, expected)]
    else:
        cupy = package("cupy").cupy
        with cupy.cuda.using_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
            arrays = [cupy.empty(x.shape, np.float32) for x in (a, b, expected)]
    for array, host in zip(arrays, (a, b, np.zeros_like(expected)), strict=True):
        array[...] = host if name == "numba" else package("cupy").array(host)
    synchronize()
    operand = as_operand("a", arrays[0])
    assert (operand.kind, pointer_info(operand.pointer).kind) == (name, "managed")
    assert ng.matmul(arrays[0], arrays[1], out=arrays[2]) is arrays[2]
    synchronize()
    found = np.asarray(arrays[2]) if name == "numba" else package("cupy").back(arrays[2])
    assert np.array_equal(found, expected)
    if name == "numba":
        view = as_operand("a", arrays[0][1:, ::2])
        assert (view.kind, view.pointer, view.strides) == ("numba", operand.pointer + 200, (50, 2))


def test_pinned_memory_is_hosts_and_known_as_pinned():
    cuda = package("numba").cuda
    a, b, expected = factors("float32")
    pinned = cuda.pinned_array(a.shape, np.float32)
    pinned[...] = a
    operand = as_operand("a", pinned)
    assert (operand.kind, pointer_info(operand.pointer).kind) == ("numpy", "pinned")
    assert pointer_info(a.__array_interface__["data"][0]) == PointerInfo("unregistered", None, None)
    assert np.array_equal(ng.matmul(pinned, b, device="cuda"), expected)
    tensor = package("torch").torch.from_numpy(a).pin_memory()
    assert pointer_info(as_operand("a", tensor).pointer).kind == "pinned"
    result = ng.matmul(tensor, package("torch").torch.from_numpy(b), device="cuda")
    assert type(result) is type(tensor)
    assert np.array_equal(result.numpy(), expected)


def test_memory_that_was_freed_is_told():
    context = current_context()
    pointer = int(check(driver().cuMemAlloc(1 << 22), "cuMemAlloc"))
    array = InterfaceOnly(type("Fixed", (), {"__cuda_array_interface__": described(pointer)})())
    operand = as_operand("a", array)
    assert pointer_info(pointer) == PointerInfo("device", 0, context.identity)
    check_device_operands([operand], context, 0)
    check(driver().cuMemFree(pointer), "cuMemFree")
    with pytest.raises(ValueError, match="was freed"):
        check_device_operands([operand], context, 0)
    with pytest.raises(ValueError, match="was freed"):
        ng.matmul(array, array)


def test_host_memory_in_a_gpus_interface_is_told():
    host = np.zeros((4, 4), np.float32)
    array = type("Lies", (), {"__cuda_array_interface__": described(host.__array_interface__["data"][0])})()
    with pytest.raises(TypeError, match="plain host memory; pass it as a NumPy array"):
        ng.matmul(array, array)


def described(pointer):
    return {"version": 3, "shape": (4, 4), "typestr": "<f4", "data": (pointer, False), "stream": None}


def test_memory_of_a_stream_ordered_pool():
    context = current_context()
    owner = Stream()
    stream = int(owner)
    with DeviceBuffer(64, stream) as buffer:
        copy_to_device(buffer.pointer, np.ones((4, 4), np.float32), stream)
        operand = as_operand("a", type("Pool", (), {"__cuda_array_interface__": described(buffer.pointer)})())
        info = pointer_info(buffer.pointer)
        assert (info.kind, info.device) == ("device", 0)
        check_device_operands([operand], context, stream)


def test_a_stream_and_memory_of_another_context_are_told():
    cu = driver()
    context = current_context()
    ours = package("numba").array(np.zeros((4, 4), np.float32))
    try:
        other = check(cu.cuCtxCreate(None, 0, 0), "cuCtxCreate")
    except TypeError:  # of CUDA 12
        other = check(cu.cuCtxCreate(0, 0), "cuCtxCreate")
    try:
        stream = int(check(cu.cuStreamCreate(0), "cuStreamCreate"))
        pointer = int(check(cu.cuMemAlloc(1 << 12), "cuMemAlloc"))
        check(cu.cuCtxSetCurrent(context.handle), "cuCtxSetCurrent")
        with pytest.raises(ValueError, match="belongs to another CUDA context"):
            check_device_operands([as_operand("a", ours)], context, stream)
        theirs = as_operand("b", type("Theirs", (), {"__cuda_array_interface__": described(pointer)})())
        with pytest.raises(ValueError, match="b was allocated in another CUDA context"):
            check_device_operands([theirs], context, 0)
    finally:
        check(cu.cuCtxDestroy(other), "cuCtxDestroy")
        check(cu.cuCtxSetCurrent(context.handle), "cuCtxSetCurrent")


def test_what_a_stream_uses_is_kept_until_it_is_done():
    torch = package("torch")
    owner = Stream()
    stream = int(owner)
    array = DLPackOnly(torch.array(np.zeros((4, 4), np.float32)))
    operand = as_operand("a", array, stream=stream)
    synchronize()
    lifetime.release_done()
    before = len(lifetime._kept)
    keep_busy(stream, 100)
    hold_operands([operand], stream)
    assert len(lifetime._kept) == before + 1
    lifetime.release_done()
    assert len(lifetime._kept) == before + 1
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize")
    lifetime.release_done()
    gc.collect()
    assert len(lifetime._kept) <= before


def test_a_jax_array_is_born_from_memory_that_was_written_elsewhere():
    """Without a product: JAX's memory, filled by a copy on another stream, then JAX's again, at the same address."""
    jax = package("jax")
    like = as_operand("a", jax.array(np.zeros((2, 2), np.float32)))
    owner = Stream()
    stream = int(owner)
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    pending = empty_like_operand(like, (3, 4), stream)
    operand = as_operand("out", pending)
    keep_busy(stream, 30)
    copy_to_device(operand.pointer, host, stream)
    result = wrap_result(pending, (like.array, like.array), stream)
    assert result.unsafe_buffer_pointer() == operand.pointer
    assert np.array_equal(np.asarray(result + 1), host + 1)
