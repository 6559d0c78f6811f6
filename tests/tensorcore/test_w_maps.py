"""Tensor maps from the driver, kept by all that they depend on, and the launches that take them. Needs no GPU."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest

from numba_gemm.device import tensor_map
from numba_gemm.errors import CudaError, KernelConstraintError
from numba_gemm.problem import Problem
from numba_gemm.spec import TensorMap
from numba_gemm.tensorcore.w_specs import W2

HOPPER = (9, 0)


def packed(rows, columns, depth, **changes):
    return replace(Problem.packed(rows, columns, depth, dtype="bfloat16"), **changes)


def planned(problem):
    return W2.plan(problem, W2.select(problem, 132, HOPPER))


# --- maps from the driver


class FakeDriver:
    """Writes down what ``cuTensorMapEncodeTiled`` is asked, and answers with the number of the call."""

    def __init__(self):
        self.calls = []
        self.code = 0

    def function(self, name, *types):
        assert name == "cuTensorMapEncodeTiled"
        assert len(types) == 12

        def encode(at, element, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill):
            assert at % 64 == 0
            self.calls.append(
                {
                    "element": element,
                    "address": address,
                    "dims": tuple((ctypes.c_uint64 * rank).from_address(dims)),
                    "strides": tuple((ctypes.c_uint64 * (rank - 1)).from_address(strides)),
                    "box": tuple((ctypes.c_uint32 * rank).from_address(box)),
                    "steps": tuple((ctypes.c_uint32 * rank).from_address(steps)),
                    "options": (interleave, swizzle, promotion, fill),
                }
            )
            ctypes.memset(at, len(self.calls) % 251 + 1, 128)
            return self.code

        return encode


@pytest.fixture
def fake(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(tensor_map, "driver_function", driver.function)
    tensor_map.encode.cache_clear()
    yield driver
    tensor_map.encode.cache_clear()


ELEMENTS = {"f16": "FLOAT16", "f32": "FLOAT32", "bf16": "BFLOAT16"}
MAP = TensorMap(4096, "bf16", (64, 32, 2), (128, 4096), (64, 16, 1))


def test_the_driver_is_asked_for_what_the_map_says(fake):
    assert tensor_map.encode(MAP) == bytes([2]) * 128
    assert fake.calls == [
        {
            "element": 9,
            "address": 4096,
            "dims": (64, 32, 2),
            "strides": (128, 4096),
            "box": (64, 16, 1),
            "steps": (1, 1, 1),
            "options": (0, 3, 3, 0),
        }
    ]
    plain = MAP._replace(element="f32", swizzle="none", l2_promotion="none")
    tensor_map.encode(plain)
    assert fake.calls[1]["element"] == 7
    assert fake.calls[1]["options"] == (0, 0, 0, 0)


def test_the_numbers_are_those_of_the_driver():
    cu = pytest.importorskip("cuda.bindings.driver")
    numbers = {
        **{f"DATA_TYPE_{name}": tensor_map._ELEMENTS[key] for key, name in ELEMENTS.items()},
        **{f"SWIZZLE_{key.upper()}": number for key, number in tensor_map._SWIZZLES.items()},
        **{f"L2_PROMOTION_{key}": n for key, n in tensor_map._PROMOTIONS.items() if key == "none"},
        **{f"L2_PROMOTION_L2_{key}": n for key, n in tensor_map._PROMOTIONS.items() if key != "none"},
    }
    kinds = {"DATA": cu.CUtensorMapDataType, "SWIZZLE": cu.CUtensorMapSwizzle, "L2": cu.CUtensorMapL2promotion}
    assert len(numbers) == 11
    for name, number in numbers.items():
        kind = kinds[name.partition("_")[0]]
        assert int(getattr(kind, f"CU_TENSOR_MAP_{name}".replace("_none", "_NONE"))) == number, name
    assert int(cu.CUresult.CUDA_ERROR_INVALID_VALUE) == tensor_map._INVALID_VALUE


def test_a_map_is_made_once_and_anew_for_whatever_differs(fake):
    first = tensor_map.encode(MAP)
    assert tensor_map.encode(TensorMap(*MAP)) is first
    assert len(fake.calls) == 1
    others = [
        MAP._replace(address=8192),
        MAP._replace(element="f16"),
        MAP._replace(dims=(64, 31, 2)),
        MAP._replace(strides=(256, 4096)),
        MAP._replace(strides=(128, 8192)),
        MAP._replace(box=(64, 8, 1)),
        MAP._replace(swizzle="64B"),
        MAP._replace(l2_promotion="128B"),
    ]
    assert len({tensor_map.encode(other) for other in others} | {first}) == 9
    assert len(fake.calls) == 9


def test_the_maps_that_are_kept_are_bounded(fake):
    for at in range(tensor_map.MAPS_LIMIT + 10):
        tensor_map.encode(MAP._replace(address=16 * at))
    assert tensor_map.encode.cache_info().currsize == tensor_map.MAPS_LIMIT
    before = len(fake.calls)
    tensor_map.encode(MAP._replace(address=0))
    assert len(fake.calls) == before + 1, "the oldest was forgotten, so it is made again"


def test_a_map_that_the_driver_refuses_is_named_and_not_kept(fake):
    fake.code = 1
    with pytest.raises(KernelConstraintError, match=r"TMA can't address this matrix.*dims=\(64, 32, 2\).*'t4'"):
        tensor_map.encode(MAP)
    fake.code = 3
    with pytest.raises(CudaError, match="error 3"):
        tensor_map.encode(MAP)
    fake.code = 0
    tensor_map.encode(MAP)
    assert len(fake.calls) == 3


def test_threads_get_the_map_they_asked_for(fake):
    maps = [MAP._replace(address=16 * at) for at in range(200)]
    found = [None] * 8

    def work(index):
        found[index] = [tensor_map.encode(one) for one in maps]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_call = {call["address"]: None for call in fake.calls}
    assert sorted(by_call) == [16 * at for at in range(200)]
    assert all(len(row) == 200 and all(len(data) == 128 for data in row) for row in found)


def test_packed_parameters_are_kept_by_address(fake):
    """A repeated call makes no map; one at another address, or of another product, has its own."""
    from numba_gemm import execute

    execute._packed.cache_clear()
    launches = [planned(packed(m, 256, 256)).launches[0] for m in (256, 512)]
    first, second = (execute._MappedLaunch(launch) for launch in launches)
    data = execute._packed(first, 4096, 8192, 16384)
    made = len(fake.calls)
    assert execute._packed(first, 4096, 8192, 16384) is data
    assert len(fake.calls) == made
    for other in (
        execute._packed(second, 4096, 8192, 16384),
        execute._packed(first, 4112, 8192, 16384),
        execute._packed(first, 4096, 8208, 16384),
        execute._packed(first, 4096, 8192, 16400),
    ):
        assert other != data
    assert len(fake.calls) > made
    execute._packed.cache_clear()


# --- what is launched, with a driver that writes it down


@pytest.fixture
def prepared(fake, monkeypatch):
    """Prepares a product of w2 and keeps what it launches: ``(spec or None, parameters, stream)``."""
    from types import SimpleNamespace

    from numba_gemm import execute

    launched = []

    def packed_launch(function, grid, block, size, *, dynamic_shared_bytes, overlaps):
        assert (block[1:], dynamic_shared_bytes > 48 * 1024) == ((1, 1), True)
        return lambda parameters, stream: launched.append(("w2", parameters, stream))

    def launch(function, grid, block, parameters, values, *, dynamic_shared_bytes, stream, overlaps):
        launched.append((function, parameters.pack(*values), stream))

    monkeypatch.setattr(execute, "compile_kernel", lambda spec, config, arch: spec.name)
    monkeypatch.setattr(execute, "load", lambda compiled, context, dynamic_shared_bytes: compiled)
    monkeypatch.setattr(execute, "prepare_packed_launch", packed_launch)
    monkeypatch.setattr(execute, "launch", launch)
    monkeypatch.setattr(execute, "memory_pool", lambda context: None)
    context = SimpleNamespace(device=SimpleNamespace(compute_capability=HOPPER, sm_count=132))

    def prepare(problem):
        execute._packed.cache_clear()
        return execute.prepare_form(problem, W2, W2.select(problem, 132, HOPPER), context)

    yield prepare, launched
    execute._packed.cache_clear()


def test_a_product_of_one_launch_is_packed_once(fake, prepared):
    prepare, launched = prepared
    one = prepare(packed(512, 512, 512))
    assert one.direct is not None, "calls go to the launch itself"
    one.launch(4096, 8192, 16384, 7)
    one.direct(4096, 8192, 16384, 8)
    made = len(fake.calls)
    assert [call["address"] for call in fake.calls][:2] == [4096, 8192]
    (_, first, _), (_, second, stream) = launched
    assert first is second
    assert stream == 8
    one.direct(4096, 8192, 32768, 8)
    assert launched[2][1] != first
    assert len(fake.calls) >= made


def test_copies_product_and_reduction_are_launched_in_order(fake, prepared):
    prepare, launched = prepared
    one = prepare(packed(64, 64, 65535, ldb=64))
    assert one.direct is None
    assert one.main == 1
    for _ in range(2):
        one.launch(4096, 8192, 16384, 7, workspace=1 << 20)
    assert [name for name, _, _ in launched] == ["repack", "w2", "splitk_reduce"] * 2
    assert launched[1][1] is launched[4][1], "no map is made twice"
    assert [call["address"] for call in fake.calls] == [1 << 20, 8192]
    one.launch(4096, 8192, 16384, 7, workspace=1 << 21)
    assert fake.calls[-1]["address"] == 1 << 21, "a workspace that lies elsewhere has its own map"


@pytest.mark.parametrize("gap", [0, 48])
def test_packed_parameters_lie_where_the_driver_reads_them(monkeypatch, gap):
    """Behind a gap, if the first of them, a tensor map, isn't the first in the bank of constants."""
    from numba_gemm.device import launch as module
    from numba_gemm.device.module import Function

    seen = []

    def call(config, handle, kernel_params, extra):
        kind, at, size_kind, size_at, end = (ctypes.c_void_p * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(size_at).value
        numbers = tuple((ctypes.c_uint32 * 7).from_address(config))
        stream = ctypes.c_uint64.from_address(config + 32).value
        attributes = bytes((ctypes.c_char * 16).from_address(config + 40))
        seen.append((numbers, stream, handle, ctypes.string_at(at, size), (kind, size_kind, end), attributes))
        return 0

    monkeypatch.setattr(module, "_launch_function", lambda: call)
    monkeypatch.setattr(module, "first_parameter", lambda function: gap)
    function = Function(handle=99, name="w2", registers=1, local_bytes=0, static_shared_bytes=0)
    parameters = bytes(range(256)) + bytes(184)
    launch = module.prepare_packed_launch(function, (132, 1, 1), (384, 1, 1), 440, dynamic_shared_bytes=200_000)
    launch(parameters, 5)
    assert seen == [((132, 1, 1, 384, 1, 1, 200_000), 5, 99, bytes(gap) + parameters, (1, 2, None), bytes(16))]
