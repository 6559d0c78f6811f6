"""Each intrinsic in a small Numba kernel: what it does on the emulator, what it refuses, and where it assembles."""

from __future__ import annotations

import re

import numpy as np
import pytest

from numba_gemm import emulator, intrinsics
from numba_gemm.compile.assembler import assemble
from numba_gemm.compile.numba_source import cuda, types
from numba_gemm.emulator.hazards import Misaligned, OutOfBounds, UnwaitedAsyncCopy
from numba_gemm.errors import CompileError

float32 = types.float32
POINTER = types.CPointer(float32)
WORDS = types.CPointer(types.uint32)
THREADS = 32


def ptx_of(kernel, *signature, cc=(8, 0)):
    return cuda.compile_ptx(kernel, types.void(*signature), cc=cc)[0]


def run(kernel, *arguments, signature=(POINTER, POINTER, types.int64), cc=(8, 0)):
    return emulator.launch(ptx_of(kernel, *signature, cc=cc), 1, THREADS, list(arguments), arch=f"sm_{cc[0]}{cc[1]}")


def numbers(count):
    return np.arange(1, count + 1, dtype=np.float32)


# --- global memory


def loader(name, words):
    load = getattr(intrinsics, name)
    if words == 1:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            target[i] = load(source, first + i)
    elif words == 2:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            x, y = load(source, first + 2 * i)
            target[2 * i], target[2 * i + 1] = x, y
    else:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            x, y, z, w = load(source, first + 4 * i)
            target[4 * i], target[4 * i + 1], target[4 * i + 2], target[4 * i + 3] = x, y, z, w

    return kernel


LOADS = [
    ("load_global", 1, "ld.global.nc.f32"),
    ("load_global_v2", 2, "ld.global.nc.v2.f32"),
    ("load_global_v4", 4, "ld.global.nc.v4.f32"),
    ("load_global_stream", 1, "ld.global.nc.L1::no_allocate.L2::128B.f32"),
    ("load_global_stream_v2", 2, "ld.global.nc.L1::no_allocate.L2::128B.v2.f32"),
    ("load_global_stream_v4", 4, "ld.global.nc.L1::no_allocate.L2::128B.v4.f32"),
    ("load_global_stream256_v4", 4, "ld.global.nc.L1::no_allocate.L2::256B.v4.f32"),
    ("load_global_first_v4", 4, "ld.global.nc.L1::evict_first.v4.f32"),
    ("load_global_keep_v4", 4, "ld.global.nc.L1::evict_last.v4.f32"),
]


@pytest.mark.parametrize(("name", "words", "instruction"), LOADS)
def test_global_loads(name, words, instruction):
    kernel = loader(name, words)
    source, target = numbers(THREADS * words + 8), np.zeros(THREADS * words, np.float32)
    assert instruction in ptx_of(kernel, POINTER, POINTER, types.int64)
    run(kernel, source, target, np.int64(4))
    np.testing.assert_array_equal(target, source[4 : 4 + target.size])


@pytest.mark.parametrize(("name", "words", "instruction"), [load for load in LOADS if load[1] > 1])
def test_a_misaligned_global_load_is_a_hazard(name, words, instruction):
    with pytest.raises(Misaligned):
        run(loader(name, words), numbers(THREADS * words + 8), np.zeros(THREADS * words, np.float32), np.int64(1))


def test_a_global_load_past_the_end_is_a_hazard():
    with pytest.raises(OutOfBounds):
        run(loader("load_global_v4", 4), numbers(4 * THREADS), np.zeros(4 * THREADS, np.float32), np.int64(4))


def storer(name, words):
    store = getattr(intrinsics, name)
    if words == 1:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            store(target, first + i, source[i])
    elif words == 2:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            store(target, first + 2 * i, source[2 * i], source[2 * i + 1])
    else:

        def kernel(source, target, first):
            i = types.int64(cuda.threadIdx.x)
            j = 4 * i
            store(target, first + j, source[j], source[j + 1], source[j + 2], source[j + 3])

    return kernel


STORES = [
    ("store_global_v2", 2, "st.global.v2.f32"),
    ("store_global_v4", 4, "st.global.v4.f32"),
    ("store_global_stream", 1, "st.global.cs.f32"),
    ("store_global_stream_v2", 2, "st.global.cs.v2.f32"),
    ("store_global_stream_v4", 4, "st.global.cs.v4.f32"),
]


@pytest.mark.parametrize(("name", "words", "instruction"), STORES)
def test_global_stores(name, words, instruction):
    kernel = storer(name, words)
    source, target = numbers(THREADS * words), np.zeros(THREADS * words + 4, np.float32)
    assert instruction in ptx_of(kernel, POINTER, POINTER, types.int64)
    run(kernel, source, target, np.int64(4))
    np.testing.assert_array_equal(target, [0, 0, 0, 0, *source])


@pytest.mark.parametrize(("name", "words", "instruction"), [store for store in STORES if store[1] > 1])
def test_a_misaligned_global_store_is_a_hazard(name, words, instruction):
    with pytest.raises(Misaligned):
        run(storer(name, words), numbers(THREADS * words), np.zeros(THREADS * words + 8, np.float32), np.int64(1))


@pytest.mark.parametrize(("name", "level"), [("prefetch_l1", "L1"), ("prefetch_l2", "L2")])
def test_prefetches_change_nothing(name, level):
    prefetch = getattr(intrinsics, name)

    def kernel(source, target, first):
        i = types.int64(cuda.threadIdx.x)
        prefetch(source, first + i)
        target[i] = source[i]

    source, target = numbers(THREADS), np.zeros(THREADS, np.float32)
    assert f"prefetch.global.{level}" in ptx_of(kernel, POINTER, POINTER, types.int64)
    run(kernel, source, target, np.int64(0))
    np.testing.assert_array_equal(target, source)


def test_arrays_do_where_pointers_do():
    load, store = intrinsics.load_global_v4, intrinsics.store_global_v4

    def kernel(source, target):
        i = 4 * types.int64(cuda.threadIdx.x)
        x, y, z, w = load(source, i)
        store(target, i, w, z, y, x)

    array = types.Array(float32, 2, "C")
    # an array parameter is: meminfo, parent, items, itemsize, data, two extents, two strides
    null, size = np.uint64(0), np.int64(4 * THREADS)

    def parts(x):
        return [null, null, size, np.int64(4), x, np.int64(THREADS), np.int64(4), np.int64(16), np.int64(4)]

    source, target = numbers(4 * THREADS), np.zeros(4 * THREADS, np.float32)
    emulator.launch(ptx_of(kernel, array, array), 1, THREADS, [*parts(source), *parts(target)])
    np.testing.assert_array_equal(target.reshape(-1, 4), source.reshape(-1, 4)[:, ::-1])


def test_offset_pointer_goes_both_ways():
    offset = intrinsics.offset_pointer

    def kernel(source, target, first):
        i = types.int64(cuda.threadIdx.x)
        end = offset(source, first)
        target[i] = offset(end, -i)[0]

    source, target = numbers(THREADS), np.zeros(THREADS, np.float32)
    run(kernel, source, target, np.int64(THREADS - 1))
    np.testing.assert_array_equal(target, source[::-1])


# --- shared memory


def shared_round_trip(words, by_address):
    """Writes ``words`` floats a thread, reads those of the thread 31 - tid back."""
    suffix = "_at" if by_address else ""
    width = "" if words == 1 else f"_v{words}"
    store = getattr(intrinsics, f"store_shared{width}{suffix}")
    load = getattr(intrinsics, f"load_shared{width}{suffix}")
    address = intrinsics.shared_address
    uint32 = types.uint32

    if words == 1:

        def kernel(source, target, skew):
            tile = cuda.shared.array(160, float32, alignment=16)
            i = uint32(cuda.threadIdx.x)
            at = address(tile, uint32(skew))
            store(uint32(at + uint32(4) * i), source[i])
            cuda.syncthreads()
            target[i] = load(uint32(at + uint32(4) * (uint32(31) - i)))
    elif words == 2 and by_address:

        def kernel(source, target, skew):
            tile = cuda.shared.array(160, float32, alignment=16)
            i = uint32(cuda.threadIdx.x)
            at = address(tile, uint32(skew))
            store(uint32(at + uint32(8) * i), source[2 * i], source[2 * i + 1])
            cuda.syncthreads()
            x, y = load(uint32(at + uint32(8) * (uint32(31) - i)))
            target[2 * i], target[2 * i + 1] = x, y
    elif words == 2:

        def kernel(source, target, skew):
            tile = cuda.shared.array(160, float32, alignment=16)
            i = uint32(cuda.threadIdx.x)
            store(tile, uint32(uint32(skew) + uint32(2) * i), source[2 * i], source[2 * i + 1])
            cuda.syncthreads()
            x, y = load(tile, uint32(uint32(skew) + uint32(2) * (uint32(31) - i)))
            target[2 * i], target[2 * i + 1] = x, y
    elif by_address:

        def kernel(source, target, skew):
            tile = cuda.shared.array(160, float32, alignment=16)
            i = uint32(cuda.threadIdx.x)
            at = address(tile, uint32(skew))
            j = 4 * i
            store(uint32(at + uint32(16) * i), source[j], source[j + 1], source[j + 2], source[j + 3])
            cuda.syncthreads()
            x, y, z, w = load(uint32(at + uint32(16) * (uint32(31) - i)))
            target[j], target[j + 1], target[j + 2], target[j + 3] = x, y, z, w
    else:

        def kernel(source, target, skew):
            tile = cuda.shared.array(160, float32, alignment=16)
            i = uint32(cuda.threadIdx.x)
            j = 4 * i
            store(tile, uint32(uint32(skew) + j), source[j], source[j + 1], source[j + 2], source[j + 3])
            cuda.syncthreads()
            x, y, z, w = load(tile, uint32(uint32(skew) + uint32(4) * (uint32(31) - i)))
            target[j], target[j + 1], target[j + 2], target[j + 3] = x, y, z, w

    return kernel


SHARED = [(1, True), (2, True), (2, False), (4, True), (4, False)]


@pytest.mark.parametrize(("words", "by_address"), SHARED)
def test_shared_accesses(words, by_address):
    source, target = numbers(THREADS * words), np.zeros(THREADS * words, np.float32)
    report = run(shared_round_trip(words, by_address), source, target, np.int64(4))
    np.testing.assert_array_equal(target.reshape(-1, words), source.reshape(-1, words)[::-1])
    assert report.counters.shared_load_wavefronts == words  # 128 bytes a pass, so it was one wide access


@pytest.mark.parametrize(("words", "by_address"), [case for case in SHARED if case[0] > 1])
def test_a_misaligned_shared_access_is_a_hazard(words, by_address):
    source, target = numbers(THREADS * words), np.zeros(THREADS * words, np.float32)
    with pytest.raises(Misaligned):
        run(shared_round_trip(words, by_address), source, target, np.int64(1))


# --- cp.async


def copier(name, words, *, argument=None, wait="all"):
    """Copies ``words`` floats a thread to shared memory and writes them to the target."""
    copy = getattr(intrinsics, name)
    address, commit = intrinsics.shared_address, intrinsics.cp_async_commit
    cp_async_wait, wait_all = intrinsics.cp_async_wait, intrinsics.cp_async_wait_all
    uint32, size = types.uint32, THREADS * words

    def finish(copy_one):
        if wait == "all":

            def kernel(source, target, first):
                tile = cuda.shared.array(size, float32, alignment=16)
                copy_one(tile, source, first)
                wait_all()
                i = cuda.threadIdx.x
                for j in range(words):
                    target[words * i + j] = tile[words * i + j]
        elif wait == "none":

            def kernel(source, target, first):
                tile = cuda.shared.array(size, float32, alignment=16)
                copy_one(tile, source, first)
                commit()
                i = cuda.threadIdx.x
                for j in range(words):
                    target[words * i + j] = tile[words * i + j]
        elif wait == "group":

            def kernel(source, target, first):
                tile = cuda.shared.array(size, float32, alignment=16)
                copy_one(tile, source, first)
                commit()
                commit()  # an empty group: the copy's is no longer the newest
                cp_async_wait(1)
                i = cuda.threadIdx.x
                for j in range(words):
                    target[words * i + j] = tile[words * i + j]
        else:  # one group too few

            def kernel(source, target, first):
                tile = cuda.shared.array(size, float32, alignment=16)
                copy_one(tile, source, first)
                commit()
                cp_async_wait(1)
                i = cuda.threadIdx.x
                for j in range(words):
                    target[words * i + j] = tile[words * i + j]

        return kernel

    device = cuda.jit(device=True, inline="always")
    if argument is None:

        @device
        def copy_one(tile, source, first):
            i = uint32(cuda.threadIdx.x)
            copy(address(tile, uint32(uint32(words) * i)), source, first + types.int64(words * i))
    elif argument == "bytes":

        @device
        def copy_one(tile, source, first):
            i = uint32(cuda.threadIdx.x)
            valid = uint32(4) * (i % uint32(words + 1))
            copy(address(tile, uint32(uint32(words) * i)), source, first + types.int64(words * i), valid)
    else:

        @device
        def copy_one(tile, source, first):
            i = uint32(cuda.threadIdx.x)
            copy(address(tile, uint32(uint32(words) * i)), source, first + types.int64(words * i), i < uint32(20))

    return finish(copy_one)


PLAIN = [
    ("cp_async_4", 1, "cp.async.ca.shared.global [%r#], [%rd#], 4;"),
    ("cp_async_8", 2, "cp.async.ca.shared.global [%r#], [%rd#], 8;"),
    ("cp_async_16", 4, "cp.async.cg.shared.global [%r#], [%rd#], 16;"),
    ("cp_async_16_ca", 4, "cp.async.ca.shared.global [%r#], [%rd#], 16;"),
]
FILLED = [
    ("cp_async_4_zfill", 1),
    ("cp_async_8_zfill", 2),
    ("cp_async_16_zfill", 4),
    ("cp_async_16_ca_zfill", 4),
    ("cp_async_16_l2_128_zfill", 4),
    ("cp_async_16_l2_256_zfill", 4),
]
GUARDED = [("cp_async_4_if", 1), ("cp_async_8_if", 2), ("cp_async_16_if", 4)]


@pytest.mark.parametrize(("name", "words", "instruction"), PLAIN)
@pytest.mark.parametrize("wait", ["all", "group"])
def test_asynchronous_copies(name, words, instruction, wait):
    kernel = copier(name, words, wait=wait)
    assert instruction in re.sub(r"%(rd?)\d+", r"%\1#", ptx_of(kernel, POINTER, POINTER, types.int64))
    source, target = numbers(THREADS * words + 4), np.zeros(THREADS * words, np.float32)
    report = run(kernel, source, target, np.int64(4))
    np.testing.assert_array_equal(target, source[4:])
    assert report.counters.async_copies == 1


@pytest.mark.parametrize(("name", "words"), FILLED)
def test_copies_fill_up_with_zeros(name, words):
    source, target = numbers(THREADS * words), np.full(THREADS * words, np.nan, np.float32)
    run(copier(name, words, argument="bytes"), source, target, np.int64(0))
    valid = np.arange(THREADS) % (words + 1)
    expected = np.where(np.arange(words) < valid[:, None], source.reshape(-1, words), 0)
    np.testing.assert_array_equal(target.reshape(-1, words), expected)


@pytest.mark.parametrize(("name", "words"), GUARDED)
def test_guarded_copies_touch_no_memory_where_the_predicate_is_false(name, words):
    source, target = numbers(20 * words), np.full(THREADS * words, np.nan, np.float32)  # 20 threads' worth
    run(copier(name, words, argument="predicate"), source, target, np.int64(0))
    np.testing.assert_array_equal(target, np.pad(source, (0, 12 * words)))


@pytest.mark.parametrize(("name", "words", "instruction"), [case for case in PLAIN if case[1] > 1])
def test_a_misaligned_copy_is_a_hazard(name, words, instruction):
    with pytest.raises(Misaligned):
        run(copier(name, words), numbers(THREADS * words + 4), np.zeros(THREADS * words, np.float32), np.int64(1))


@pytest.mark.parametrize("wait", ["none", "too few"])
def test_reading_a_copy_before_its_group_was_waited_for_is_a_hazard(wait):
    with pytest.raises(UnwaitedAsyncCopy):
        run(copier("cp_async_16", 4, wait=wait), numbers(132), np.zeros(128, np.float32), np.int64(4))


def test_the_number_of_groups_must_be_a_literal():
    wait = intrinsics.cp_async_wait

    def kernel(source, target, first):
        wait(first)

    with pytest.raises(Exception, match="must be a literal"):
        ptx_of(kernel, POINTER, POINTER, types.int64)


@pytest.mark.parametrize("pointer", [types.CPointer(types.float64), types.int64, types.Array(float32, 1, "A")])
def test_other_pointers_are_refused_in_words(pointer):
    load = intrinsics.load_global_v4

    def kernel(source, target):
        target[0] = load(source, 0)[0]

    with pytest.raises(Exception, match=r"load_global_v4: .*pass a"):
        ptx_of(kernel, pointer, POINTER)


# --- conversions


@pytest.mark.parametrize("name", ["float2_to_half2", "float2_to_bfloat2"])
def test_two_floats_are_rounded_to_nearest_even(name):
    convert = getattr(intrinsics, name)

    def kernel(source, target):
        i = cuda.threadIdx.x
        target[i] = convert(source[2 * i], source[2 * i + 1])

    halves = name == "float2_to_half2"
    rng = np.random.default_rng(5)
    source = rng.standard_normal(2 * THREADS).astype(np.float32)
    source[:4] = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8]  # ties of float16 and of bfloat16
    target = np.zeros(THREADS, np.uint32)
    emulator.launch(ptx_of(kernel, POINTER, WORDS), 1, THREADS, [source, target])
    if halves:
        expected = source.astype(np.float16).view(np.uint16)
    else:
        bits = source.view(np.uint32)
        expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(target.view(np.uint16), expected)


# --- architectures

NEEDS_SM_80 = [*[case[0] for case in PLAIN], *[case[0] for case in FILLED], *[case[0] for case in GUARDED]]


def kernels_with(name):
    """(kernel, signature) that uses the intrinsic of this name."""
    signature = (POINTER, POINTER, types.int64)
    for table, make in ((LOADS, loader), (STORES, storer)):
        for case in table:
            if case[0] == name:
                return make(name, case[1]), signature
    arguments = {**{c[0]: None for c in PLAIN}, **{c[0]: "bytes" for c in FILLED}, **{c[0]: "if" for c in GUARDED}}
    words = {c[0]: c[1] for c in (*PLAIN, *FILLED, *GUARDED)}
    if name in arguments:
        return copier(name, words[name], argument=arguments[name]), signature
    return shared_round_trip({"": 1, "_v2": 2, "_v4": 4}[name], True), signature


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", [*[c[0] for c in LOADS], *[c[0] for c in STORES], "", "_v2", "_v4", *NEEDS_SM_80])
def test_every_intrinsic_assembles_where_it_may(name, cc):
    kernel, signature = kernels_with(name)
    text = ptx_of(kernel, *signature, cc=cc)
    if cc < (8, 0) and (name in NEEDS_SM_80 or name == "load_global_stream256_v4"):
        with pytest.raises(CompileError):
            assemble(text, f"sm_{cc[0]}{cc[1]}")
        return
    cubin, _, _ = assemble(text, f"sm_{cc[0]}{cc[1]}")
    assert cubin.startswith(b"\x7fELF")


def test_everything_public_is_documented():
    for name in intrinsics.__all__:
        function = getattr(intrinsics, name)
        assert len(function._defn.__doc__) > 20, name
