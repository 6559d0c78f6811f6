"""bench/stalls.py without a GPU: what it makes of ncu's CSV, and that no failure takes the other products along."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm import ncu
from numba_gemm.choose import choose
from numba_gemm.device.context import Device
from numba_gemm.errors import CompileError, CudaError

_BENCH = Path(__file__).resolve().parents[1] / "bench"

pytestmark = pytest.mark.skipif(not _BENCH.is_dir(), reason="bench/ isn't beside the tests (an installed package)")

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 1980000, 2619000, 50 << 20, 232448, 141 << 30, (13, 0))
COMMON = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size")
COMMON = (*COMMON, "Grid Size", "Device", "CC")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ACTIVE = "avg.pct_of_peak_sustained_active"
ELAPSED = "avg.pct_of_peak_sustained_elapsed"

#: Columns of a raw page, their units and the values of a first launch, as ncu prints them.
COLUMNS = {
    "gpc__cycles_elapsed.max": ("cycle", "1,234,567"),
    "gpu__time_duration.sum": ("ns", "1,043,520"),
    f"gpu__compute_memory_throughput.{ELAPSED}": ("%", "51.25"),
    f"gpu__dram_throughput.{ELAPSED}": ("%", "12.5"),
    f"lts__throughput.{ELAPSED}": ("%", "31"),
    f"l1tex__throughput.{ACTIVE}": ("%", "88.75"),
    f"sm__throughput.{ELAPSED}": ("%", "93.1"),
    "launch__grid_size": ("", "1,188"),
    "launch__block_size": ("", "256"),
    "launch__registers_per_thread": ("register/thread", "128"),
    "launch__func_cache_config": ("", "CachePreferNone"),
    "launch__thread_count": ("thread", "304,128"),
    f"sm__inst_executed_pipe_fma.{ACTIVE}": ("%", "90.5"),
    f"sm__inst_executed_pipe_fmaheavy.{ACTIVE}": ("%", "n/a"),
    f"sm__inst_executed_pipe_tensor_op_hmma.{ACTIVE}": ("%", "2"),
    f"sm__pipe_tensor_op_hmma_cycles_active.{ACTIVE}": ("%", "91.5"),
    f"sm__pipe_shared_cycles_active.{ACTIVE}": ("%", "91.5"),
    f"sm__pipe_alu_cycles_active.{ELAPSED}": ("%", "99"),
    "sm__inst_executed.avg.per_cycle_active": ("inst/cycle", "3.2"),
    f"sm__warps_active.{ACTIVE}": ("%", "24.9"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "25"),
    "smsp__issue_active.avg.per_cycle_active": ("inst/cycle", "0.8"),
    "smsp__average_warp_latency_per_inst_issued.ratio": ("cycle", "4.95"),
    "smsp__pcsamp_interval": ("", "5"),
    STALL.format("selected"): ("inst", "1"),
    STALL.format("wait"): ("inst", "0.5"),
    STALL.format("long_scoreboard"): ("inst", "2"),
    STALL.format("not_selected"): ("inst", "1.25"),
    STALL.format("barrier"): ("inst", "0.25"),
    STALL.format("gmma"): ("inst", "nan"),
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, _BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stalls(monkeypatch):
    """The script as a module; sys.path is as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("stalls_target", "tables", "stalls"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tables", load("tables"))
    monkeypatch.setitem(sys.modules, "stalls_target", load("stalls_target"))
    module = load("stalls")
    monkeypatch.setitem(sys.modules, "stalls", module)
    monkeypatch.setattr(module, "device_properties", lambda: H200)
    return module


def raw_page(kernels, **units):
    """A raw page of launches of these kernels; the second lasts 1 ns longer than the first, and so on."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*COMMON, *COLUMNS])
    writer.writerow(
        [*[""] * len(COMMON), *(units.get(name.partition(".")[0], unit) for name, (unit, _) in COLUMNS.items())]
    )
    for number, kernel in enumerate(kernels):
        values = [value for _, value in COLUMNS.values()]
        values[1] = f"{1043520 + number:,}"
        where = (number, 711, "python3.12", "127.0.0.1", kernel, 1, 7, "(256, 1, 1)", "(1188, 1, 1)", 0, "9.0")
        writer.writerow([*where, *values])
    before = (
        '==PROF== Connected to process 711 (/usr/bin/python3.12)\n==PROF== Profiling "v8": 0%....100% - 21 passes\n'
    )
    return f"{before}==PROF== Disconnected from process 711\n{text.getvalue()}"


def launched(product, *names, main=0):
    """What the program says of a product before its launches."""
    launches = [{"name": n, "grid": [8, 1, 1], "block": 256, "main": i == main} for i, n in enumerate(names)]
    return {"product": product, "kernel": names[main], "config": "block_k=16", "launches": launches}


def done(product):
    return {"product": product, "done": True}


# --- rows of a page


def collected(stalls, page, *lines):
    products = [stalls.Product.parse(text) for text in dict.fromkeys(line["product"] for line in lines)]
    return stalls.collect(products, lines, ncu.parse_csv(page), stalls.time_scale(page))


def test_what_is_kept_of_a_launch(stalls):
    text = "float32:4096x4096x4096"
    rows = collected(stalls, raw_page(["repack", "v8"]), launched(text, "repack", "v8", main=1), done(text))
    ((first, second),) = rows.values()
    assert (first["launch"], first["main"], first["us"]) == ("repack", False, pytest.approx(1043.52))
    assert (second["launch"], second["main"], second["us"]) == ("v8", True, pytest.approx(1043.521))
    assert (second["dtype"], second["m"], second["kernel"], second["asked"]) == ("float32", 4096, "v8", "auto")
    assert (second["issue_active"], second["dram"], second["l2"]) == (0.8, 12.5, 31)
    assert list(second["stalls"].items()) == [
        ("long_scoreboard", 2),
        ("not_selected", 1.25),
        ("wait", 0.5),
        ("barrier", 0.25),
    ]
    assert list(second["pipes"].items()) == [("tensor_op_hmma", 91.5), ("fma", 90.5)]
    left_out = {"launch__func_cache_config", "launch__thread_count", "smsp__pcsamp_interval", STALL.format("gmma")}
    assert set(COLUMNS) - set(second["metrics"]) == left_out | {f"sm__inst_executed_pipe_fmaheavy.{ACTIVE}"}
    assert second["metrics"]["launch__grid_size"] == 1188
    assert not stalls.incomplete(second)
    json.dumps(second, allow_nan=False)


@pytest.mark.parametrize(("unit", "us"), [("nsecond", 1043.52), ("us", 1043520), ("second", 1043520e6), ("?", 1043.52)])
def test_the_duration_is_in_the_unit_of_its_column(stalls, unit, us):
    text = "float32:2x2x2"
    page = raw_page(["v8"], gpu__time_duration=unit)
    (((row,)),) = collected(stalls, page, launched(text, "v8"), done(text)).values()
    assert row["us"] == pytest.approx(us)


def test_units_in_the_header_are_no_part_of_a_name(stalls):
    launch = ("v8", {"gpu__time_duration.sum [ns]": 7000, f"lts__throughput.{ELAPSED} [%]": 4})
    row = stalls.launch_row(stalls.Product.parse("float32:2x2x2"), launched("float32:2x2x2", "v8"), 0, launch, 1e-3)
    assert (row["us"], row["l2"]) == (7, 4)
    assert stalls.incomplete(row) == ["issue_active", "dram", "pipes", "stalls"]


def test_other_names_for_the_same(stalls):
    metrics = {
        f"sm__inst_issued.{ACTIVE}": 60.0,
        f"dram__throughput.{ELAPSED}": 5.0,
        f"sm__inst_executed_pipe_alu_realtime.{ELAPSED}": 7.0,
        STALL.format("wait_not_issued"): 3.0,
    }
    row = stalls.launch_row(
        stalls.Product.parse("float32:2x2x2"), launched("float32:2x2x2", "v8"), 0, ("v8", metrics), 1e-3
    )
    assert (row["issue_active"], row["dram"], row["pipes"], row["stalls"]) == (0.6, 5.0, {"alu": 7.0}, {})


# --- which launch is whose


def test_launches_of_several_products(stalls):
    a, b, c = "float32:2x2x2", "bfloat16:2x2x2:t4", "bfloat16:9x9x9"
    lines = [launched(a, "v8", "split_k_sum"), done(a), {"product": c, "error": "no", "fatal": False}]
    rows = collected(
        stalls, raw_page(["v8", "void memset<4>(int)", "split_k_sum", "t4(x)"]), *lines, launched(b, "t4"), done(b)
    )
    assert [(str(p), [(r["launch"], r["error"]) for r in own]) for p, own in rows.items()] == [
        (c, [("", "no")]),
        (a, [("v8", ""), ("split_k_sum", "")]),
        (b, [("t4", "")]),
    ]
    assert rows[stalls.Product.parse(b)][0]["asked"] == "t4"
    assert rows[stalls.Product.parse(b)][0]["us"] == pytest.approx(1043.523)


def test_a_product_that_was_cut_off_has_no_rows(stalls):
    a, b = "float32:2x2x2", "float32:3x3x3"
    lines = (launched(a, "v8"), done(a), launched(b, "v8", "split_k_sum"))
    assert list(collected(stalls, raw_page(["v8", "v8"]), *lines)) == [stalls.Product.parse(a)]
    assert list(collected(stalls, raw_page(["v8"]), *lines)) == [stalls.Product.parse(a)]


@pytest.mark.parametrize("kernels", [["v8"], ["split_k_sum", "v8"], ["v8", "split_k_sum", "v8"], ["w2"]])
def test_other_launches_than_the_products_are_an_error_with_both_lists(stalls, kernels):
    text = "float32:2x2x2"
    with pytest.raises(stalls.StallsError) as error:
        collected(stalls, raw_page(kernels), launched(text, "v8", "split_k_sum"), done(text))
    seen = ", ".join(name for name in kernels if name != "w2") or "nothing"
    assert f"ncu measured {seen}; what was launched: v8, split_k_sum" in str(error.value)


# --- products, and the program that carries them out


@pytest.mark.parametrize("text", ["float32:1x2x3", "bfloat16:4096x4096x4096:t4", "float16:1x1x1:v2-nvcc"])
def test_a_product_reads_its_own_string(stalls, text):
    assert str(stalls.Product.parse(text)) == text


@pytest.mark.parametrize("text", ["float64:1x1x1", "float32:0x1x1", "float32:1x1", "4096", "float32:1x1x1:"])
def test_a_product_of_another_form_is_refused(stalls, text, capsys):
    with pytest.raises(SystemExit):
        stalls.main(["--shape", text])
    assert "has another form than DTYPE:MxNxK" in capsys.readouterr().err


def prepared_on_h200(problem, kernel, *_):
    """What `execute.prepare` returns, as far as it needs no GPU."""
    spec, config = choose(problem, kernel, arch=(9, 0), sm_count=132)
    plan = spec.plan(problem, config)
    steps = [SimpleNamespace(launch=one) for one in plan.launches]
    return SimpleNamespace(spec=spec, config=config, steps=steps, main=plan.main, workspace_bytes=plan.workspace_bytes)


class FakeGpu:
    """Memory at made-up addresses, and the order of what is done with it; ``faults`` are the shapes that fail."""

    def __init__(self, monkeypatch, refused=(), faults=()):
        self.events, self.faults, self.copies = [], faults, {}
        self.refused = refused
        monkeypatch.setattr("numba_gemm.device.context.current_context", lambda: None)
        monkeypatch.setattr("numba_gemm.device.memory.DeviceBuffer", self.buffer)
        monkeypatch.setattr("numba_gemm.device.memory.copy_to_device", self.copy)
        monkeypatch.setattr("numba_gemm.device.stream.synchronize_stream", lambda *_, **__: self.events.append("wait"))
        monkeypatch.setattr("numba_gemm.execute.prepare", self.prepare)

    def buffer(self, nbytes, stream):
        self.end = getattr(self, "end", 0) + 4096
        buffer = SimpleNamespace(nbytes=nbytes, pointer=self.end if nbytes else 0)
        self.end += nbytes
        return FakeBuffer(buffer)

    def copy(self, pointer, array, stream):
        self.copies[pointer] = array.copy()

    def prepare(self, problem, kernel, context):
        if problem.m in self.refused:
            raise CompileError("can't be compiled")
        prepared = prepared_on_h200(problem, kernel)

        def launch(a, b, c, stream, *, workspace):
            assert bool(workspace) == bool(prepared.workspace_bytes)
            self.events.append(problem.m)
            if problem.m in self.faults:
                raise CudaError("an illegal address")

        prepared.launch = launch
        return prepared


class FakeBuffer:
    def __init__(self, buffer):
        self.buffer = buffer

    def __enter__(self):
        return self.buffer

    def __exit__(self, *_):
        pass


def test_the_program_says_what_it_launches(stalls, monkeypatch, tmp_path):
    gpu = FakeGpu(monkeypatch, refused=[7])
    said = tmp_path / "said"
    texts = ["float32:4095x4097x4099", "float32:7x7x7", "bfloat16:100x300x200:t4"]
    stalls_target = sys.modules["stalls_target"]
    assert stalls_target.carry_out(said, [stalls.Product.parse(text) for text in texts]) == 0
    pid, first, first_done, refused, second, second_done = stalls.read_lines(said)
    assert pid == {"pid": os.getpid()}
    copy, main = first["launches"][:2]
    assert (copy["name"].startswith("repack"), main["name"]) == (True, "v8")
    assert [one["main"] for one in first["launches"]] == [one["name"] == "v8" for one in first["launches"]]
    assert first["kernel"] == "v8"
    assert main["block"] in (128, 256)
    assert refused == {"product": texts[1], "error": "CompileError: can't be compiled", "fatal": False}
    assert (second["product"], second["kernel"]) == (texts[2], "t4")
    assert "dtype=bfloat16" in second["config"]
    assert (first_done, second_done) == (done(texts[0]), done(texts[2]))
    assert gpu.events == ["wait", "wait", 4095, "wait", "wait", "wait", "wait", 100, "wait", "wait"]


def test_a_fault_ends_the_program(stalls, monkeypatch, tmp_path):
    FakeGpu(monkeypatch, faults=[64])
    said = tmp_path / "said"
    products = [stalls.Product.parse(text) for text in ("float32:64x64x64", "float32:65x65x65")]
    with pytest.raises(CudaError):
        sys.modules["stalls_target"].carry_out(said, products)
    _, first, error = stalls.read_lines(said)
    assert first["product"] == error["product"] == "float32:64x64x64"
    assert error["fatal"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_are_normal_numbers_from_end_to_end(stalls, monkeypatch, dtype):
    gpu = FakeGpu(monkeypatch)
    nbytes = 2 * 4194304 + 1000
    sys.modules["stalls_target"].fill(1 << 20, nbytes, dtype, 0)
    assert [(pointer - (1 << 20), block.shape) for pointer, block in gpu.copies.items()] == [
        (0, (1, 4194304)),
        (4194304, (1, 4194304)),
        (8388608, (1, 1000)),
    ]
    block = gpu.copies[1 << 20].reshape(-1)
    if dtype == "float32":
        numbers = block.view(np.float32)
    else:  # the upper half of a float32
        numbers = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert abs(numbers.mean()) < 0.01
    assert numbers.std() == pytest.approx(1, abs=0.01)


def test_the_usual_products_can_be_carried_out(stalls):
    products = [stalls.Product.parse(text) for text in stalls.PRODUCTS]
    assert len(set(products)) == len(products) == 20
    describe = sys.modules["stalls_target"].described
    for product in products:
        prepared = prepared_on_h200(product.problem(), product.kernel)
        launches = describe([step.launch for step in prepared.steps], prepared.main)
        assert any(one["main"] for one in launches)
        assert all(stalls.kernel_name(one["name"]) == one["name"] for one in launches)


# --- with a stand-in for ncu

# It says what the program would, and prints the page; ``several`` is what it does with more than one product.
FAKE = """\
#!{python}
import json, subprocess, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1) (public-release)")
    sys.exit()
if "--list-sections" in arguments:
    print({sections!r})
    sys.exit()
at = next(i for i, word in enumerate(arguments) if word.endswith("stalls_target.py"))
file, products = arguments[at + 1], arguments[at + 2 :]
with open({calls!r}, "a") as calls:
    calls.write(" ".join(arguments[:at]) + " | " + " ".join(products) + "\\n")
answers = json.loads(open({answers!r}).read())
answer = answers["all" if len(products) > 1 else products[0]]
said = open(file, "w")
for line in answer["lines"]:
    said.write(json.dumps(line) + "\\n")
if answer.get("hangs"):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    said.write(json.dumps({{"pid": child.pid}}) + "\\n")
    said.flush()
    child.wait()
said.close()
print(answer["page"])
print(answer.get("errors", ""), file=sys.stderr)
sys.exit(answer.get("status", 0))
"""


@pytest.fixture
def fake_ncu(stalls, tmp_path, monkeypatch):
    """Runs the script with answers for all products together and for each; returns the record and ncu's calls."""

    def run(answers, *arguments, sections="", expected=0):
        paths = {name: tmp_path / name for name in ("ncu", "calls", "answers")}
        paths["answers"].write_text(json.dumps(answers))
        paths["ncu"].write_text(
            FAKE.format(
                python=sys.executable,
                sections=sections,
                **{name: str(paths[name]) for name in ("calls", "answers")},
            )
        )
        paths["ncu"].chmod(paths["ncu"].stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(ncu, "find_ncu", lambda: str(paths["ncu"]))
        output = tmp_path / "results"
        assert stalls.main(["--output", str(output), "--commit", "abc", *arguments]) == expected
        record = json.loads((output / "stalls.json").read_text())
        assert (output / "stalls.log").is_file() == bool(expected)
        return record, paths["calls"].read_text().splitlines()

    return run


A, B, C = "float32:2048x2048x2048", "bfloat16:1000x1001x1002", "bfloat16:64x64x64:t4"
GOOD = {
    A: {"lines": [launched(A, "v8"), done(A)], "page": raw_page(["v8"])},
    B: {"lines": [launched(B, "repack_pair", "w2", main=1), done(B)], "page": raw_page(["repack_pair", "w2"])},
    C: {"lines": [launched(C, "t4"), done(C)], "page": raw_page(["t4"])},
}
ALL = {
    "lines": [line for one in GOOD.values() for line in one["lines"]],
    "page": raw_page(["v8", "repack_pair", "w2", "t4"]),
}


def errors_of(record):
    return [(row["kernel"], row["launch"], row["error"]) for row in record["rows"]]


def test_one_process_for_all(fake_ncu, capsys):
    record, calls = fake_ncu({"all": ALL}, "--shape", A, B, "--shape", C)
    (call,) = calls
    options, _, products = call.partition(" | ")
    assert products.split() == [A, B, C]
    assert "--clock-control none --cache-control all --print-units base --csv --page raw" in options
    assert options.count("--section ") == 6
    assert errors_of(record) == [("v8", "v8", ""), ("w2", "repack_pair", ""), ("w2", "w2", ""), ("t4", "t4", "")]
    where = record["environment"]
    assert (record["schema"], where["commit"], where["gpu"]) == (1, "abc", "NVIDIA H200")
    assert where["ncu"] == "Version 2025.3.1.0 (build 1) (public-release)"
    shown = capsys.readouterr().out
    assert "bfloat16 1000×1001×1002 w2" in shown
    line = next(line for line in shown.splitlines() if line.startswith("float32 2048×2048×2048 v8"))
    rest = "v8 v8 1.04 ms 80 tensor op hmma 92 12 31 long scoreboard 50, not selected 31, wait 12"
    assert line.split() == ["float32", "2048×2048×2048", *rest.split()]


def test_sections_that_an_ncu_lacks_are_left_out(fake_ncu):
    listed = "Identifier     Name\nSpeedOfLight   GPU Speed Of Light\nWarpStateStats Warp State Statistics\n"
    _, (call,) = fake_ncu({"all": ALL}, "--shape", A, B, C, sections=listed)
    assert "--section SpeedOfLight --section WarpStateStats " in call
    assert call.count("--section") == 2


def test_a_process_each_where_all_together_fail(fake_ncu):
    bad = {"lines": [], "page": "", "errors": "==ERROR== LibraryNotLoaded", "status": 1}
    refused = {"lines": [{"product": B, "error": "CompileError: no", "fatal": False}], "page": ""}
    record, calls = fake_ncu({**GOOD, "all": bad, B: refused}, "--shape", A, B, C, expected=1)
    assert [call.partition(" | ")[2] for call in calls] == [f"{A} {B} {C}", A, B, C]
    assert errors_of(record) == [("v8", "v8", ""), ("auto", "", "CompileError: no"), ("t4", "t4", "")]
    assert record["rows"][1]["us"] is None


def test_a_fault_costs_its_product_alone(fake_ncu):
    fault = [launched(B, "w2"), {"product": B, "error": "CudaError: illegal address", "fatal": True}]
    cut = {"lines": [*GOOD[A]["lines"], *fault], "page": raw_page(["v8", "w2"]), "status": 1}
    alone = {"lines": fault, "page": raw_page(["w2"]), "status": 1}
    record, calls = fake_ncu({**GOOD, "all": cut, B: alone}, "--shape", A, B, C, expected=1)
    assert [call.partition(" | ")[2] for call in calls] == [f"{A} {B} {C}", B, C]
    failed = ("auto", "", "ncu measured nothing, exit status 1: CudaError: illegal address")
    assert errors_of(record) == [("v8", "v8", ""), failed, ("t4", "t4", "")]


def test_launches_that_match_nothing_are_measured_again(fake_ncu):
    record, calls = fake_ncu({**GOOD, "all": ALL | {"page": raw_page(["v8", "w2"])}}, "--shape", A, B, C)
    assert len(calls) == 4
    assert len(record["rows"]) == 4


def test_where_ncu_measures_nothing_two_products_are_tried(fake_ncu, tmp_path):
    bad = {"lines": [launched(A, "v8"), done(A)], "page": "==ERROR== ERR_NVGPUCTRPERM - no permission"}
    record, calls = fake_ncu({"all": bad, A: bad, B: bad}, "--shape", A, B, C, expected=1)
    assert len(calls) == 3
    assert [row["error"][:30] for row in record["rows"]] == ["ncu may not read the GPU's cou"] * 2 + [
        "not tried: nothing was measure"
    ]
    assert "ERR_NVGPUCTRPERM" in (tmp_path / "results" / "stalls.log").read_text()


def test_columns_that_are_missing_are_noticed(fake_ncu, capsys):
    page = raw_page(["v8"]).replace("lts__throughput", "l2__throughput")
    record, _ = fake_ncu({A: GOOD[A] | {"page": page}}, "--shape", A, expected=1)
    assert record["rows"][0]["l2"] is None
    assert "0 products failed; missing in other rows: l2; what ncu printed: " in capsys.readouterr().out


def test_what_was_measured_before_the_time_was_over_is_kept(stalls, fake_ncu, monkeypatch):
    monkeypatch.setattr(stalls, "ONE_SHARE", 20)
    late = {"lines": [*GOOD[A]["lines"], launched(B, "w2")], "page": raw_page(["v8"]), "hangs": True}
    record, calls = fake_ncu({**GOOD, "all": late}, "--shape", A, B, "--timeout", "3")
    assert [call.partition(" | ")[2] for call in calls] == [f"{A} {B}", B]
    assert errors_of(record) == [("v8", "v8", ""), ("w2", "repack_pair", ""), ("w2", "w2", "")]


def test_without_ncu_a_sentence_says_how_to_get_it(stalls, monkeypatch):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(SystemExit, match="comes with the CUDA toolkit"):
        stalls.main([])
