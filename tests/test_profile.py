"""Profiles: the emulator's numbers against counts made by hand, and ncu's output as ncu prints it."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections import Counter

import pytest

from numba_gemm import ncu
from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.cli import main
from numba_gemm.cli.profile import comparison_table, difference
from numba_gemm.compile import compile_kernel
from numba_gemm.compile.assembler import find_tool
from numba_gemm.compile.sass import disassemble
from numba_gemm.device.driver import is_available
from numba_gemm.emulator.counters import NCU_METRICS, Counters
from numba_gemm.errors import KernelConstraintError
from numba_gemm.profile import Profile, profile_emulated, shared_load_values
from numba_gemm.profile_job import Job
from numba_gemm.report import render

needs_no_gpu = pytest.mark.skipif(is_available(), reason="is about a machine without a GPU, and here is one")
needs_disassembler = pytest.mark.skipif(
    not (find_tool("nvdisasm") or find_tool("cuobjdump")), reason="no disassembler is installed"
)
SM_90 = (9, 0)


def passes(words):
    """Wavefronts of one 4-byte access by a warp: the most distinct words that any bank has to give."""
    banks = [set() for _ in range(32)]
    for word in words:
        banks[word % 32].add(word)
    return max(map(len, banks))


def sectors(addresses):
    return len({address // 32 for address in addresses})


# --- by hand


def test_v3_on_one_tile():
    """32 warps, one output a thread, one tile of k: each count from the kernel's geometry."""
    v = profile_emulated(Job("v3", 32, 32, 32), SM_90).values
    warps = 32
    lanes = range(32)
    assert v["ffma_threads"] == 32**3
    assert v["fmul_threads"] == 32 * 32  # alpha
    # Each warp is a row of the tile: it stores its row of A and of B (rows padded to 33 words) …
    assert v["shared_store_requests"] == 2 * warps
    assert v["shared_store_wavefronts"] == sum(
        passes([32 * row + lane for lane in lanes]) + passes([33 * row + lane for lane in lanes]) for row in lanes
    )
    # … and for each k reads one word of A, the same for all lanes, and a row of B.
    assert v["shared_load_requests"] == 2 * 32 * warps
    assert v["shared_load_wavefronts"] == sum(
        passes([32 * row + k for _ in lanes]) + passes([33 * k + lane for lane in lanes])
        for row in lanes
        for k in lanes
    )
    assert v["shared_load_conflicts"] == v["shared_store_conflicts"] == 0
    assert v["global_load_requests"] == 2 * warps
    assert v["global_load_sectors"] == 2 * warps * 4  # a row of 32 floats is 128 bytes
    assert (v["global_store_requests"], v["global_store_sectors"]) == (warps, 4 * warps)
    assert v["barriers"] == 2 * warps
    assert v["shared_load_values"] == 2 * 32 * 1024


def test_v5_on_one_tile_conflicts():
    """256 threads of 8×8 outputs: lanes read B 8 words apart, and the two rows of A in a warp share a bank."""
    profile = profile_emulated(Job("v5", 128, 128, 8), SM_90)
    v = profile.values
    expected = 0
    for warp in range(8):
        threads = range(32 * warp, 32 * warp + 32)
        for k in range(8):
            for i in range(8):
                expected += passes([(t // 16 * 8 + i) * 8 + k for t in threads])  # As[row, k], rows of 8 words
                expected += passes([k * 128 + t % 16 * 8 + i for t in threads])  # Bs[k, column]
    requests = 8 * 8 * 16
    assert v["shared_load_requests"] == requests
    assert v["shared_load_wavefronts"] == expected == 3 * requests
    assert v["shared_load_conflicts"] == expected - requests
    assert v["ffma_threads"] == 128 * 128 * 8
    assert profile.derived()["fma_per_shared_load_value"] == 4
    assert profile.derived()["shared_load_wavefronts_per_request"] == 3
    # Each thread writes its 8×8 outputs one by one: lanes 8 floats apart, so a sector each.
    assert (v["global_store_requests"], v["global_store_sectors"]) == (8 * 64, 8 * 64 * 32)


def test_v3_at_an_odd_shape():
    """33×35×5: ragged tiles; rows of C start anywhere in a sector; lanes outside the matrix touch nothing."""
    m, n, k = 33, 35, 5
    v = profile_emulated(Job("v3", m, n, k), SM_90).values
    loads, load_sectors, store_sectors = 0, 0, 0
    for row0 in (0, 32):
        for column0 in (0, 32):
            columns = range(column0, min(column0 + 32, n))
            for row in range(row0, row0 + 32):  # a warp
                if row < m:
                    loads += 1
                    load_sectors += sectors(4 * (row * k + j) for j in range(k))
                    store_sectors += sectors(4 * (row * n + j) for j in columns)
                if row - row0 < k:
                    loads += 1
                    load_sectors += sectors(4 * ((row - row0) * n + j) for j in columns)
    assert (v["global_load_requests"], v["global_load_sectors"]) == (loads, load_sectors)
    assert (v["global_store_requests"], v["global_store_sectors"]) == (2 * m, store_sectors)
    assert v["ffma_threads"] == 4 * 32**3  # zeros beyond the edges are multiplied, too


def test_a_config_can_be_asked_for_where_the_shape_allows_it():
    wide, scalar = (profile_emulated(Job("v6", 16, 16, 8, (("vector_width", w),)), SM_90) for w in (4, 1))
    assert profile_emulated(Job("v6", 16, 16, 8), SM_90).job.config == (("vector_width", 4),)
    assert scalar.values["global_store_requests"] == 4 * wide.values["global_store_requests"]
    with pytest.raises(KernelConstraintError, match="K = 7 is not a multiple of 4"):
        profile_emulated(Job("v6", 16, 16, 7, (("vector_width", 4),)), SM_90)
    with pytest.raises(ValueError, match="has no form"):
        Job("v6", 8, 8, 8, (("vector_width", 2),)).resolve(SM_90)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("ld.shared.f32 %f1, [%r1];", 1),
        ("@%p1 ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r1+16];", 4),
        ("ld.volatile.shared::cta.v2.b64 {%d1, %d2}, [%r1];", 4),
        ("ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];", 0),
        ("st.shared.f32 [%r1], %f1;", 0),
        ("mov.u32 %shared, %tid.x;", 0),
    ],
)
def test_values_that_a_load_brings(line, values):
    assert shared_load_values("first\n" + line, {2: 3}) == 3 * 32 * values


@pytest.mark.parametrize("text", ["v3:1x2x3", "v6:64x8x4:vector_width=1", "v3:5x6x7:"])
def test_a_job_reads_its_own_string(text):
    assert str(Job.parse(text)) == text


@pytest.mark.parametrize("text", ["v3", "v3:1x2", "v3:1x2x3:width"])
def test_a_job_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="another form"):
        Job.parse(text)


@needs_disassembler
@pytest.mark.parametrize("name", [name for name in kernels_for("float32") if LADDER[name].select is None])
def test_the_machine_code_has_the_memory_accesses_and_fmas_of_the_ptx(name):
    """What makes the emulator's counts comparable with ncu's: ptxas neither joins, splits nor drops any of them."""
    for config in LADDER[name].configs:
        kernel = compile_kernel(LADDER[name], config, SM_90)
        in_ptx, in_sass = Counter(), Counter()
        for access, width in re.findall(r"\b((?:ld|st)\.(?:shared|global)|fma)[\w.]*?(\.v[24])?\.f32\b", kernel.ptx):
            in_ptx[access, {"": 4, ".v2": 8, ".v4": 16}[width]] += 1
        names = {"LDS": "ld.shared", "STS": "st.shared", "LDG": "ld.global", "STG": "st.global", "FFMA": "fma"}
        for instruction in disassemble(kernel.cubin).instructions:
            access, *more = instruction.opcode.split(".")
            if access in names:
                in_sass[names[access], 16 if "128" in more else 8 if "64" in more else 4] += 1
        assert in_sass == in_ptx, config


# --- ncu

RAW = """\
==PROF== Connected to process 711 (/usr/bin/python3.12)
==PROF== Profiling "v3": 0%....50%....100% - 9 passes
a line of the program's own
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","launch__registers_per_thread","smsp__inst_executed.sum","x__odd.sum"
"","","","","","","","","","","","sector","register/thread","inst",""
"0","711","python3.12","127.0.0.1","v3","1","7","(1024, 1, 1)","(4, 1, 1)","0","9.0","1,024","34","1,234,567","n/a"
"1","711","python3.12","127.0.0.1","v6_vector_width4","1","7","(256, 1, 1)","(1, 1, 1)","0","9.0","12.50","117","8",""
==PROF== Disconnected from process 711
"""

DETAILS = """\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","p","h","v3","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","a__b.sum","inst","1,024"
"0","1","p","h","v3","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","c__d.sum","inst","7"
"1","1","p","h","v4","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","a__b.sum","inst","5"
"""


def test_the_raw_page():
    (name, first), (other, second) = ncu.parse_csv(RAW)
    assert (name, other) == ("v3", "v6_vector_width4")
    assert first == {
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 1024,
        "launch__registers_per_thread": 34,
        "smsp__inst_executed.sum": 1234567,
        "x__odd.sum": None,
    }
    assert second["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 12.5


def test_the_details_page():
    assert ncu.parse_csv(DETAILS) == [("v3", {"a__b.sum": 1024, "c__d.sum": 7}), ("v4", {"a__b.sum": 5})]


def test_output_without_a_table():
    with pytest.raises(ValueError, match="no CSV table"):
        ncu.parse_csv("==ERROR== something\n")


def test_every_counter_has_a_metric():
    assert set(ncu.METRICS) == set(NCU_METRICS)
    assert set(NCU_METRICS) <= set(Counters().as_dict())


# A stand-in for ncu: refuses the metrics in REFUSED as ncu does, else counts 100, 101, … for each job.
FAKE = """\
#!{python}
import csv, re, sys
arguments = sys.argv[1:]
if "--query-metrics" in arguments:
    print("Device H200 (GH100)")
    print("smsp__inst_executed          Counter  inst  # of warp instructions executed")
    sys.exit()
metrics = arguments[arguments.index("--metrics") + 1].split(",")
refused = [metric for metric in metrics if metric in {refused!r}]
print("==PROF== Connected to process 1")
for metric in refused:
    print("==ERROR== Failed to find metric regex:^" + metric.replace(".", chr(92) + ".") + "$")
if {message!r}:
    print({message!r})
if refused or {message!r}:
    sys.exit(1)
jobs = arguments[arguments.index("numba_gemm.profile_target") + 1 :]
writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL)
writer.writerow(["ID", "Kernel Name", *metrics])
writer.writerow(["", "", *["inst"] * len(metrics)])
for number, job in enumerate(jobs):
    name, shape, *config = job.split(":")
    entry = name + "".join("_" + part.replace("=", "") for part in ",".join(config).split(",") if part)
    writer.writerow([number, entry, *(format(1000 * number + 100 + i, ",") for i in range(len(metrics)))])
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    def install(refused=(), message=""):
        program = tmp_path / "ncu"
        program.write_text(FAKE.format(python=sys.executable, refused=list(refused), message=message))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(ncu, "find_ncu", lambda: str(program))

    return install


JOBS = [Job("v3", 8, 8, 8, ()), Job("v6", 8, 8, 8, (("vector_width", 4),))]


def test_launches_come_in_the_order_of_the_jobs(fake_ncu):
    fake_ncu()
    assert ncu.measure(JOBS, ["a__x.sum", "b__y.sum"]) == [
        {"a__x.sum": 100, "b__y.sum": 101},
        {"a__x.sum": 1100, "b__y.sum": 1101},
    ]
    assert ncu.known_metrics() == {"smsp__inst_executed"}


def test_metrics_that_ncu_refuses_are_left_out(fake_ncu, tmp_path):
    fake_ncu(refused=["a__x.sum"])
    log = tmp_path / "log"
    assert ncu.measure(JOBS[:1], ["a__x.sum", "b__y.sum"], log=log) == [{"a__x.sum": None, "b__y.sum": 100}]
    assert "Kernel Name" in log.read_text()
    fake_ncu(refused=["a__x.sum", "b__y.sum"])
    with pytest.raises(ncu.ProfilerError, match="knows none of the metrics"):
        ncu.measure(JOBS[:1], ["a__x.sum", "b__y.sum"])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "run as root"),
        ("==ERROR== LibraryNotLoaded", "ncu measured nothing: LibraryNotLoaded"),
        ("numba_gemm.errors.NoDeviceError: no GPU", "ncu measured nothing: numba_gemm.errors.NoDeviceError: no GPU"),
        ("killed", "ncu measured nothing: exit status 1"),
        ("MemoryError: none left", "ncu measured nothing: MemoryError: none left"),
    ],
)
def test_why_ncu_failed(fake_ncu, message, words):
    fake_ncu(message=message)
    with pytest.raises(ncu.ProfilerError) as error:
        ncu.measure(JOBS, ["a__x.sum"])
    assert words in str(error.value).partition("\n")[0]


def test_other_kernels_than_the_jobs_are_noticed(fake_ncu):
    fake_ncu()
    with pytest.raises(ncu.ProfilerError, match="ncu measured v6, not v6_vector_width4"):
        ncu._check_launches([("v6(float *)", {})], JOBS[1:], ncu._run([sys.executable, "-c", ""]))


def test_without_ncu_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(ncu.ProfilerError, match="comes with the CUDA toolkit"):
        ncu.measure(JOBS, ["a__x.sum"])


# --- the command


def test_one_kernel(capsys, tmp_path):
    path = tmp_path / "v3.json"
    command = ["profile", "v3", "--shape", "32", "32", "32", "--device", "emulator", "--json", str(path)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "v3 at 32×32×32: 1 block of 1024 threads" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["loads", "2,048", "2,048", "1", "0"] in rows  # shared memory
    assert ["loads", "64", "256", "4"] in rows  # global memory
    assert "loaded from shared memory" in next(line for line in text.splitlines() if line.endswith("  0.5"))
    assert "ld.shared" in [row[0] for row in rows if row]
    (profile,) = json.loads(path.read_text())["profiles"]
    assert profile["kernel"] == "v3"
    assert profile["source"] == "emulator"
    assert profile["values"]["shared_load_wavefronts"] == 2048


def test_the_ladder_is_one_row_a_kernel(capsys):
    assert main(["profile", "all", "--shape", "33", "34", "5", "--device", "emulator"]) == 0
    text = capsys.readouterr().out
    for name in ("v1", "v3", "v6 scalar", "v7 scalar"):
        assert text.count(f"\n{name} ") == 2
    assert max(map(len, text.splitlines())) < 120


def test_the_comparison_shows_differences_in_percent():
    job = Job("v3", 32, 32, 32, ())
    ours = Profile(job, "emulator", "sm_90", {"shared_load_wavefronts": 2000, "ffma_threads": 5, "barriers": 1})
    theirs = Profile(job, "ncu", "H200", {"shared_load_wavefronts": 2010, "ffma_threads": 5, "barriers": None})
    lines = {line[:30].strip(): line[30:].split() for line in render(comparison_table(ours, theirs)).splitlines()}
    assert lines["shared load wavefronts"] == ["2,000", "2,010", "-0.50", "%"]
    assert lines["FMAs by threads"] == ["5", "5", "equal"]
    assert lines["barriers by warps"] == ["1", "–", "–"]
    assert difference(3, 0) == "–"


@needs_no_gpu
def test_without_a_gpu_the_emulator_counts_and_says_so(capsys):
    assert main(["profile", "v1", "--shape", "3", "4", "5"]) == 0
    assert "Counted by the emulator, since no NVIDIA GPU was found." in capsys.readouterr().out
    assert main(["profile", "v1", "--device", "both"]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["v99"], "there is no kernel 'v99'"),
        (["cpu"], "profile one of v1"),
        (["all", "--config", "vector_width=1"], "takes one kernel"),
        (["v6", "--config", "vector_width=3"], "its forms are"),
        (["v6", "--shape", "8", "8", "7", "--config", "vector_width=4"], "leave --config out"),
        (["v1", "--shape", "0", "8", "8"], "must be 1 or more"),
        (["v7", "--shape", "4096", "4096", "4096", "--device", "emulator"], "takes the emulator minutes"),
        (["v1", "--json", "/nowhere/at/all.json"], "no folder /nowhere"),
    ],
)
def test_a_wrong_call_ends_with_one_line_and_status_2(arguments, words, capsys):
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
