"""A benchmark's run on a GPU: what is validated, timed, compared and recorded; the GPU is replaced in most tests."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.benchmark import ceiling, correctness, record, runner
from numba_gemm.benchmark.inputs import Checker, Pool
from numba_gemm.benchmark.report import comparison_table, failures, shape_table
from numba_gemm.benchmark.suites import Shape
from numba_gemm.catalog import kernels_for
from numba_gemm.compile import compile_kernel
from numba_gemm.compile.assembler import find_tool
from numba_gemm.compile.sass import disassemble
from numba_gemm.errors import CudaError
from numba_gemm.problem import Problem
from numba_gemm.report import render
from numba_gemm.timing import Timing

# --- a run on a GPU, with the GPU replaced


class FakeInputs:
    """Host matrices in place of device memory; the three "addresses" of a set are its number and a letter."""

    def __init__(self, task, sets, pool, stack):
        shape = task.shape
        self.pointers = [((number, "a"), (number, "b"), (number, "c")) for number in range(sets)]
        self.a, self.b = pool.factors(shape, 0, task.dtype)
        self.c = np.empty((shape.m, shape.n), self.a.dtype)
        FakeInputs.current = self

    def multiply(self):
        self.c[...] = self.a.astype(np.float32) @ self.b.astype(np.float32)

    def poison(self):
        self.c[...] = np.nan

    def output(self):
        return self.c.copy()


class FakePeer:
    name, version = "cublas", "cuBLAS 0"
    fails_on = ()

    def gemm(self, a, b, c, m, n, k, stream):
        if "launch" in self.fails_on:
            raise CudaError("no such kernel")
        FakeInputs.current.multiply()


class FakeCeiling:
    registers, flops = 99, 4e9

    def __init__(self, kernel=record.CEILING):
        self.kernel, self.measured = kernel, "mma.sync…" + ("" if kernel == record.CEILING else ", normal numbers")

    def work(self, number, stream):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """Replaces what needs a GPU; returns the calls and the switches of the fakes."""
    state = SimpleNamespace(wrong=set(), broken=set(), untimed=set(), timed=[])
    device = SimpleNamespace(
        **{"name": "NVIDIA H200", "arch": "sm_90", "sm_count": 132, "driver_version": (13, 0)},
        l2_bytes=1000,
        compute_capability=(9, 0),
    )
    monkeypatch.setattr("numba_gemm.device.context.current_context", lambda: SimpleNamespace(device=device))
    monkeypatch.setattr("numba_gemm.device.context.synchronize", lambda: None)
    stream = type("Stream", (), {"__int__": lambda self: 1, "synchronize": lambda self: None})
    monkeypatch.setattr("numba_gemm.device.stream.Stream", stream)
    monkeypatch.setattr(runner, "DeviceInputs", FakeInputs)

    def prepare(problem, kernel, context):
        if kernel in state.broken:
            raise CudaError(f"{kernel} can't be loaded")

        def launch(a, b, c, stream, *, workspace):
            inputs = FakeInputs.current
            inputs.multiply()
            if kernel in state.wrong:
                inputs.c[1, 1] += 1

        return SimpleNamespace(
            spec=SimpleNamespace(name=kernel or "v7"),
            config=(("vector_width", 4),),
            function=SimpleNamespace(registers=99),
            launch=launch,
            kernel=kernel,
            workspace_bytes=0,
            k_per_split=0,
        )

    def time_interleaved(works, *, sets, rounds):
        state.timed.append(len(works))
        if len(works) in state.untimed:
            raise CudaError("capture failed")
        return [Timing(10.0 * (i + 1), 9.0, 50.0, 1 / (i + 1), rounds) for i in range(len(works))]

    monkeypatch.setattr("numba_gemm.execute.prepare", prepare)
    monkeypatch.setattr(runner, "time_interleaved", time_interleaved)
    return state


CEILINGS = (record.CEILING, record.CEILING_NORMAL)


def bench(kernels, peer=None, dtype="float32", ceilings=(), shape=(30, 40, 50)):
    task = runner.Task("test", Shape(*shape), dtype, tuple(kernels))
    roof, pool = runner.Roof(60.0, 4000.0), Pool(length=1009)
    return runner.bench_task(task, roof=roof, pool=pool, peer=peer, ceilings=ceilings)


def test_kernels_are_timed_beside_the_peer(gpu):
    rows = bench(["v6", "auto"], FakePeer())
    assert [row.kernel for row in rows] == ["v6", "auto"]
    assert [row.ratio for row in rows] == [1 / 2, 1 / 3]
    assert rows[1].config == "v7 vector_width=4"
    assert rows[0].peer_us == 10.0
    assert rows[0].us == 20.0
    assert rows[0].tflops == pytest.approx(2 * 30 * 40 * 50 / 20e-6 / 1e12)
    assert rows[0].registers == 99
    assert gpu.timed == [3]


@pytest.mark.parametrize(("shape", "matrix"), [((1, 256, 300), "b"), ((256, 1, 300), "a")], ids=["row", "column"])
def test_beside_a_product_with_a_vector_its_matrix_is_read(gpu, monkeypatch, shape, matrix):
    read = []

    class Reader:
        def __init__(self, context, nbytes):
            self.bytes = nbytes // ceiling.CHUNK_BYTES * ceiling.CHUNK_BYTES

        def read(self, pointer, stream):
            read.append(pointer)

    def time_interleaved(works, *, sets, rounds):
        works[-1](0, 1)
        return [Timing(10.0 * (i + 1), 9.0, 50.0, 1.0, rounds) for i in range(len(works))]

    monkeypatch.setattr(ceiling, "ReadBandwidth", Reader)
    monkeypatch.setattr(runner, "time_interleaved", time_interleaved)
    rows = bench(["v6"], FakePeer(), shape=shape)
    assert read == [(0, matrix)]
    reading = rows[-1]
    assert (reading.kernel, reading.us, reading.ratio, reading.tflops) == (record.READING, 30.0, None, None)
    assert reading.gbs == pytest.approx(4 * ceiling.CHUNK_BYTES / 30e-6 / 1e9)  # of 4.69 chunks the whole ones
    assert "reading the matrix" in render(shape_table("a vector", rows), 200)


def test_a_matrix_that_is_no_vector_or_too_small_is_not_read(gpu):
    for shape in ((30, 40, 50), (1, 64, 64)):
        assert [row.kernel for row in bench(["v6"], FakePeer(), shape=shape)] == ["v6"]


def test_a_wrong_kernel_is_not_timed(gpu):
    gpu.wrong = {"v6"}
    wrong, right = bench(["v6", "v7"], FakePeer())
    assert wrong.us is None
    assert "element (1, 1)" in wrong.error
    assert wrong.error_over_bound > 1
    assert right.us is not None
    assert gpu.timed == [2]


def test_a_kernel_that_cannot_be_loaded_leaves_the_others_alone(gpu):
    gpu.broken = {"v6"}
    broken, right = bench(["v6", "v7"])
    assert broken.error == "CudaError: v6 can't be loaded"
    assert right.us is not None
    assert right.ratio is None


def test_a_peer_that_fails_is_a_row_with_an_error(gpu):
    peer = FakePeer()
    peer.fails_on = ("launch",)
    kernel, failed = bench(["v7"], peer)
    assert kernel.us is not None
    assert kernel.peer is None
    assert failed.kernel == "cublas"
    assert "no such kernel" in failed.error


def test_a_peer_that_cannot_be_timed_is_left_out(gpu):
    gpu.untimed = {3}
    *kernels, failed = bench(["v6", "v7"], FakePeer())
    assert all(row.us is not None for row in kernels)
    assert failed.kernel == "cublas"
    assert gpu.timed == [3, 2]


def test_kernels_that_cannot_be_timed_together_are_timed_alone(gpu):
    gpu.untimed = {2}
    rows = bench(["v6", "v7"])
    assert [row.us for row in rows] == [10.0, 10.0]
    assert gpu.timed == [2, 1, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits_the_ceilings_are_interleaved_and_the_first_is_the_roof(gpu, dtype):
    t2, t4, top, normal = bench(["t2", "t4"], FakePeer(), dtype, [FakeCeiling(kernel) for kernel in CEILINGS])
    assert gpu.timed == [5]
    assert (t2.dtype, t2.error, top.kernel, top.config) == (dtype, "", record.CEILING, "mma.sync…")
    assert t2.error_over_bound < 1
    assert top.us == 40.0
    assert top.tflops == top.ceiling_tflops == t2.ceiling_tflops == t4.ceiling_tflops == pytest.approx(100.0)
    assert (normal.kernel, normal.config) == (record.CEILING_NORMAL, "mma.sync…, normal numbers")
    assert (normal.us, normal.tflops, normal.ceiling_tflops) == (50.0, pytest.approx(80.0), top.tflops)
    for row in (top, normal):
        assert (row.peer, row.ratio, row.roof_tflops) == (None, None, None)
    problem = Problem.packed(30, 40, 50, dtype=dtype)
    assert t4.roof_tflops == runner.Roof(100.0, 4000.0).tflops(problem) < 100
    text = render(shape_table("a shape", [t2, t4, top, normal]), 200)
    assert "% of ceiling" in text
    shown = [line.split() for line in text.splitlines() if line.startswith("ceiling, mma.sync…")]
    assert [line[-3:-1] for line in shown] == [["100.00", "100.0"], ["80.00", "80.0"]]


def test_without_a_ceiling_there_is_no_roof_in_16_bits(gpu):
    (row,) = bench(["t4"], dtype="float16")
    assert (row.error, row.roof_tflops, row.ceiling_tflops) == ("", None, None)


def test_a_wrong_product_in_16_bits_is_not_timed(gpu):
    gpu.wrong = {"t1"}
    wrong, right = bench(["t1", "t2"], dtype="bfloat16")
    assert "element (1, 1)" in wrong.error
    assert right.us is not None


def test_the_peer_in_16_bits_is_compared_with_the_peer_in_fp32(gpu):
    options = {"pool": Pool(length=1009), "rounds": 3}
    row = runner.compare_precisions(Shape(30, 40, 50), "float16", FakePeer(), FakePeer(), **options)
    assert (row.suite, row.kernel, row.dtype, row.peer) == (
        *(record.HALF_AGAINST_SINGLE, "cublas", "float16", "cublas float32"),
    )
    assert (row.peer_us, row.us, row.ratio) == (10.0, 20.0, 0.5)
    text = render(comparison_table([row]), 200)
    assert "cuBLAS in float16 against cuBLAS in float32" in text
    assert "0.50" in text
    broken = FakePeer()
    broken.fails_on = ("launch",)
    failed = runner.compare_precisions(Shape(30, 40, 50), "float16", FakePeer(), broken, **options)
    assert "float32: CudaError" in failed.error
    assert "failed" in render(comparison_table([failed]), 200)


def test_a_peer_may_add_rounded_partial_sums_and_a_kernel_may_not():
    a, b = Pool(length=10007).factors(Shape(20, 30, 4096), 0, "float16")
    checker = Checker(a, b, tensor_core=(9, 0))
    parts = [a[:, s].astype(np.float32) @ b[s].astype(np.float32) for s in (slice(0, 2048), slice(2048, None))]
    c = parts[0].astype(np.float16) + parts[1].astype(np.float16)
    assert checker.check((parts[0] + parts[1]).astype(np.float16)).ok
    assert checker.check(c, reduced=True).ok
    assert not checker.check(c[::-1], reduced=True).ok


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_command_line_runs_both_ladders_and_compares_the_peer_with_itself(
    gpu, monkeypatch, tmp_path, capsys, dtype
):
    from numba_gemm.benchmark import selection
    from numba_gemm.cli import main

    monkeypatch.setattr("numba_gemm.device.driver.is_available", lambda: True)
    monkeypatch.setattr(runner, "measure_roof", lambda context: runner.Roof(60.0, 4000.0))
    monkeypatch.setattr(runner, "Pool", lambda: Pool(length=1009))
    tops = tuple(FakeCeiling(kernel) for kernel in CEILINGS)
    monkeypatch.setattr(runner, "find_ceilings", lambda _, dtype: () if dtype == "float32" else tops)
    monkeypatch.setattr(selection, "find_peer", lambda choice, dtype: (FakePeer(), ""))
    monkeypatch.setattr("numba_gemm.benchmark.forms.report_forms", lambda forms, **_: compiled.extend(forms))
    compiled, path = [], tmp_path / "run.json"
    options = ["--dtype", dtype] if dtype else []
    assert main(["bench", "--sizes", "30x40x50", "64", "--json", str(path), *options]) == 0
    text = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    half = dtype or "float16"
    ladders = {half: [*kernels_for(half), *CEILINGS]} if dtype else {"float32": kernels_for("float32")}
    ladders.setdefault(half, [*kernels_for(half), *CEILINGS])
    expected = [(one, name) for one, names in ladders.items() for _ in range(2) for name in names]
    assert [(row["dtype"], row["kernel"]) for row in rows[:-2]] == expected
    assert [row["suite"] for row in rows[-2:]] == [record.HALF_AGAINST_SINGLE] * 2
    assert f"sizes 30×40×50 {half}" in text
    assert f"cuBLAS in {half} against cuBLAS in float32, interleaved" in text
    assert f"Speed over cuBLAS's in {half}, geometric mean of the shapes: t1 0.50" in text
    assert {name for name, _, _ in compiled} == {name for names in ladders.values() for name in names} - {*CEILINGS}


def test_memory_that_does_not_suffice_is_an_error_of_every_kernel(gpu, monkeypatch):
    def refuse(*_):
        raise CudaError("out of memory")

    monkeypatch.setattr(runner, "DeviceInputs", refuse)
    assert [row.error for row in bench(["v6", "v7"])] == ["CudaError: out of memory"] * 2


def test_the_roof_is_the_lesser_of_arithmetic_and_memory():
    roof = runner.Roof(peak_tflops=60.0, dram_gbs=4000.0)
    assert roof.tflops(Problem.packed(4096, 4096, 4096)) == 60.0
    skinny = Problem.packed(1, 4096, 4096)
    assert roof.tflops(skinny) == pytest.approx(skinny.flops / skinny.bytes_moved * 4.0)


# --- tables for people


def test_a_table_shows_times_shares_and_failures(gpu):
    gpu.wrong = {"v6"}
    rows = bench(["v6", "v7"], FakePeer())
    text = render(shape_table("a shape", rows), 200)
    assert "% of cuBLAS" in text
    assert "failed" in text
    assert "50.0" in text
    assert failures(rows) == [f"v6 (vector_width=4) at 30×40×50: {rows[0].error}"]


# --- the ceiling


@pytest.mark.parametrize("arch", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("config", ceiling.SPEC.configs, ids=str)
def test_the_ceiling_is_tensor_core_instructions_on_registers(config, arch):
    dtype = str(dict(config)["dtype"])
    kernel = compile_kernel(ceiling.SPEC, config, arch)
    assert not kernel.resources.uses_local_memory
    assert ceiling.instruction(dtype) in kernel.ptx
    if find_tool("nvdisasm") or find_tool("cuobjdump"):
        loop = disassemble(kernel.cubin).main_loop_mix()
        mmas = loop["HMMA.16816"]
        assert mmas > 0
        assert mmas % ceiling.TILES == 0
        assert sum(loop.values()) < 1.5 * mmas
        assert not any(name.startswith(("LD", "ST")) for name in loop)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_ceiling_on_given_numbers_reads_each_once_and_multiplies_them(dtype):
    words = np.random.default_rng(0).standard_normal(2 * ceiling.FRAGMENTS * 32 * ceiling.WARPS)
    fragments, cycles = words.astype(numpy_dtype(dtype)), np.zeros(1, np.uint64)
    arguments = [cycles, np.uint32(1), fragments]
    report = emulator.launch(ceiling.ceiling_ptx(dtype, "given"), 1, 32 * ceiling.WARPS, arguments)
    assert report.counters.global_load_sectors == fragments.nbytes // 32
    assert report.counters.mma_instructions == ceiling.TILES * ceiling.WARPS


# --- on a GPU


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_validated_timed_and_recorded():
    from numba_gemm.benchmark.selection import find_peers

    shape = Shape(255, 257, 259)
    kernels = {"float32": ("auto", "v1", "v7"), "float16": ("auto", "t1", "t4"), "bfloat16": ("t2", "t3")}
    tasks = [runner.Task("odd", shape, dtype, names) for dtype, names in kernels.items()]
    tasks.append(runner.Task("odd", Shape(64, 64, 8192), "float16", ("t4",)))  # splits K
    peers, _ = find_peers("auto", list(kernels))
    run = runner.bench_gpu(tasks, peers=peers, rounds=2)
    assert run.environment["gpu"]
    assert run.environment["dram_gbs"] > 10
    own = [row for row in run.rows if row.suite == "odd"]
    expected = [*kernels["float32"], *kernels["float16"], *CEILINGS, *kernels["bfloat16"], *CEILINGS]
    assert [row.kernel for row in own] == [*expected, "t4", *CEILINGS]
    assert "splits=" in own[-3].config
    for row in run.rows:
        assert row.error == ""
        assert row.us > 0
        assert row.error_over_bound is None or row.error_over_bound < 1
        if row.kernel in CEILINGS:
            assert row.tflops > 1
    if peers:
        compared = [row for row in run.rows if row.suite == record.HALF_AGAINST_SINGLE]
        assert len(compared) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["v1", "v7", "t2", "t4"])
def test_check_on_a_gpu_covers_numpy_and_device_arrays(kernel):
    outcomes = correctness.check_kernels([kernel], {kernel: correctness.PLACES}, quick=True, seed=3)
    assert {outcome.place for outcome in outcomes} == {"numpy", "device"}
    assert [outcome for outcome in outcomes if outcome.message] == []
