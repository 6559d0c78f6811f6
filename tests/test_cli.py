"""The command line as a user meets it: help, exit statuses, messages, and output that a script can read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from numba_gemm.benchmark.forms import typed_forms
from numba_gemm.catalog import kernels_for
from numba_gemm.cli import COMMANDS, build_parser, main
from numba_gemm.cli.names import parse_arch, parse_config
from numba_gemm.compile.assembler import find_tool
from numba_gemm.device.driver import is_available

needs_no_gpu = pytest.mark.skipif(is_available(), reason="is about a machine without a GPU, and here is one")
needs_disassembler = pytest.mark.skipif(
    not (find_tool("nvdisasm") or find_tool("cuobjdump")), reason="no disassembler is installed"
)


def run(*arguments, **more):
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "numba_gemm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **more)


# --- help


def test_help_names_every_command_and_gives_examples():
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", done.stdout, re.M)
    assert "examples:" in done.stdout
    assert "exit status" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_its_options(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    parser = build_parser()._subparsers._group_actions[0].choices[command]
    for action in parser._actions:
        assert action.help, f"{action.dest} has no help"
        if action.option_strings and action.nargs != 0 and not action.required:
            assert "(default" in action.help, f"{action.dest} doesn't say its default"


def test_help_imports_neither_numba_nor_the_driver():
    code = (
        "import sys\n"
        "from numba_gemm.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numba', 'llvmlite', 'cuda', 'torch', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("numba-gemm ")


# --- wrong calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "v99"], "there is no kernel 'v99'; the kernels are cpu, v1"),
        (["bench", "--sizes", "3x4"], "neither a number"),
        (["bench", "--sizes", "2147483648"], "past 2147483647"),
        (["bench", "cpu", "--sizes", "4096", "--device", "cpu"], "nothing was measured; give smaller --sizes"),
        (["bench", "--rounds", "0"], "--rounds is 0"),
        (["bench", "v6", "t4", "--dtype", "float16"], "kernel v6 takes float32, not float16"),
        (["bench", "t1", "--dtype", "float32"], "kernel t1 takes float16 and bfloat16, not float32"),
        (["bench", "cpu", "--dtype", "bfloat16"], "kernel cpu is measured in float32"),
        (["inspect", "t2", "--config", "dtype=float32"], "its forms are: dtype=float16 | dtype=bfloat16"),
        (["check", "nope"], "there is no kernel 'nope'"),
        (["check", "--seed", "-1"], "--seed is -1"),
        (["check", "v1", "--device", "cpu"], "nothing was checked: v1 (--device cpu was given); leave --device"),
        (["check", "cpu", "--device", "emulator"], "nothing was checked: cpu (no GPU kernel"),
        (["check", "v1", "--device", "emulator", "--arch", "hopper"], "another form than sm_90"),
        (["check", "cpu", "--device", "cpu", "--arch", "sm_80"], "--arch is of the emulator"),
        (["bench", "cpu", "--device", "emulator"], "nothing to emulate: cpu has no GPU code"),
        (["bench", "v1", "--device", "emulator", "--emulate", "4", "0", "4"], "every dimension must be 1 or more"),
        (["bench", "v1", "--device", "emulator", "--sizes", "4096"], "takes the emulator minutes"),
        (["bench", "v1", "--device", "emulator", "--sizes", "8", "--emulate", "8", "8", "8"], "give one"),
        (["inspect", "auto"], "there is no kernel 'auto'"),
        (["inspect", "cpu"], "inspect one of v1"),
        (["inspect", "v1", "--arch", "hopper"], "another form than sm_90; write sm_90, 90 or 9.0"),
        (["inspect", "v1", "--arch", "sm_30"], "outside the range"),
        (["inspect", "v6", "--config", "vector_width=3"], "its forms are: vector_width=4 | vector_width=1"),
        (["inspect", "v6", "--config", "fast"], "name=number"),
        (["inspect", "v1", "--config", "vector_width=1"], "it has one form, so leave --config out"),
        (["inspect", "t4", "--config", "block_m=63"], "forms, which numba-gemm inspect t4 lists, combine block_"),
        (["inspect", "all", "--ptx"], "take one kernel"),
        (["bench", "cpu", "--sizes", "8", "--rounds", "1", "--json", "/nowhere/at/all.json"], "no folder /nowhere"),
        (["bench", "cpu", "--sizes", "8", "--rounds", "1", "--json", "/"], "--json / is a folder; name a file in it"),
    ],
)
def test_a_wrong_call_ends_with_one_line_and_status_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("numba-gemm: ")
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["bench", "--suite", "huge"], ["bench", "--no-validate"]])
def test_argparse_errors_have_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_debug_shows_the_traceback():
    quiet, loud = run("inspect", "v99"), run("inspect", "v99", "--debug")
    assert quiet.returncode == 2
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr


@needs_no_gpu
@pytest.mark.parametrize(
    "arguments", [["bench", "--device", "cuda"], ["check", "--device", "cuda"], ["tune"], ["tune", "--show"]], ids=str
)
def test_insisting_on_a_gpu_without_one_says_what_was_looked_for(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "no NVIDIA driver" in error
    assert "machine with an NVIDIA GPU" in error
    assert ("leave --device out" in error) is ("--device" in arguments)
    assert "device='" not in error  # which is Python's way to say it


def test_ctrl_c_ends_with_status_130_and_no_traceback(tmp_path):
    environment = os.environ | {"NUMBA_GEMM_CACHE_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "numba_gemm", "bench", "v5", "v6", "v7", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        process.stdout.readline()  # it is under way
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors


def test_a_reader_that_goes_away_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m numba_gemm inspect v1 --ptx | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


# --- inspect


def test_inspect_reports_as_json(capsys):
    assert main(["inspect", "v6", "--arch", "9.0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernel"] == "v6"
    assert report["config"] == "vector_width=4"
    assert report["arch"] == "sm_90"
    assert report["spill_bytes"] == report["stack_bytes"] == 0
    assert report["registers"] <= 128
    assert report["shared_bytes"] == 8192


@needs_disassembler
def test_inspect_shows_the_main_loop_beside_the_whole_kernel(capsys):
    assert main(["inspect", "v6", "--arch", "sm_90"]) == 0
    text = capsys.readouterr().out
    assert "main loop" in text
    assert "FMAs per LDS.128: 16 (32 LDS.128 for 512 FFMA)." in text
    assert "--config vector_width=1" in text
    assert max(map(len, text.splitlines())) < 200


@needs_disassembler
def test_inspect_of_a_tensor_core_kernel_counts_mmas_for_each_matrix_load(capsys):
    assert main(["inspect", "t3", "--arch", "sm_80", "--config", "dtype=bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "HMMA per LDSM: 2.67 (12 LDSM for 32 HMMA)." in text
    assert "LDGSTS" in text
    assert "Other forms of this kernel:\n  --config dtype=float16\n" in text


@needs_disassembler
def test_inspect_t4_shows_every_form_that_the_architecture_has_room_for(capsys):
    assert main(["inspect", "t4", "--arch", "sm_120"]) == 0
    text = capsys.readouterr().out
    forms = typed_forms("t4", (12, 0))
    assert "Its forms for packed matrices on sm_120" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("t4 ") and "sm_120 " in line]
    shown = [row for row in rows if row[2] == "sm_120"]
    assert len(shown) == len(forms)
    for row in shown:
        assert row[6] != "0%"
        assert float(row[-1]) >= 2  # HMMA for each LDSM


def test_inspect_takes_a_part_of_a_config(capsys):
    from numba_gemm.catalog import get_spec

    config = dict(parse_config(get_spec("t4"), ["block_m=64", "block_n=64", "dtype=bfloat16"]))
    assert (config["block_m"], config["block_n"], config["dtype"]) == (64, 64, "bfloat16")
    assert main(["inspect", "t4", "--ptx", "--config", "block_m=64", "block_n=64", "dtype=bfloat16"]) == 0
    assert ".bf16.bf16.f32" in capsys.readouterr().out


def test_inspect_prints_ptx(capsys):
    assert main(["inspect", "v1", "--ptx"]) == 0
    assert ".entry v1" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["sm_90", "90", "9.0", "compute_90", "sm_90a"])
def test_architectures_are_parsed(text):
    assert parse_arch(text) == (9, 0)
    assert parse_arch("sm_120") == (12, 0)


def test_no_config_is_the_fastest():
    from numba_gemm.catalog import get_spec

    assert parse_config(get_spec("v6"), []) == (("vector_width", 4),)
    assert parse_config(get_spec("v6"), ["vector_width=1"]) == (("vector_width", 1),)


# --- check and bench


@needs_no_gpu
def test_check_without_a_gpu_runs_the_kernels_on_the_emulator(capsys):
    assert main(["check", "cpu", "v3", "v6", "--quick"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    for row in (["cpu", "CPU", "numpy"], ["v3", "emulator", "sm_90", "numpy"], ["v6", "vec4", "emulator", "sm_90"]):
        assert any(found[: len(row)] == row for found in rows), row
    assert "checks passed" in text
    assert "No NVIDIA GPU was found, so the GPU kernels ran on the emulator" in text


def test_check_on_the_emulator_leaves_the_baseline_out_and_takes_an_architecture(capsys):
    assert main(["check", "cpu", "v1", "t1", "--device", "emulator", "--arch", "sm_80"]) == 0
    text = capsys.readouterr().out
    rows = [line.split()[:4] for line in text.splitlines()]
    assert ["v1", "emulator", "sm_80", "numpy"] in rows
    assert ["t1", "float16", "emulator", "sm_80"] in rows
    assert ["t1", "bfloat16", "emulator", "sm_80"] in rows
    assert "CPU" not in text
    assert "All 72 checks passed" in text


def test_check_names_kernels_that_an_architecture_is_too_old_for(capsys):
    assert main(["check", "v1", "t1", "--device", "emulator", "--arch", "sm_75"]) == 0
    assert "Not run: t1 (needs a later architecture than sm_75)." in capsys.readouterr().out


def test_check_fails_on_a_wrong_kernel(monkeypatch, capsys):
    from numba_gemm.fp32 import cpu

    right = cpu.blocked_matmul
    monkeypatch.setattr(cpu, "blocked_matmul", lambda a, b: right(a, b) * 1.001)
    assert main(["check", "--device", "cpu", "--quick"]) == 1
    text = capsys.readouterr().out
    assert "failed: cpu, numpy arrays, 2×3×1 random packed:" in text
    assert "out of bounds" in text
    assert "checks failed" in text


def test_bench_without_a_gpu(tmp_path, capfd):
    path = tmp_path / "run.json"
    arguments = ["bench", "cpu", "v1", "--device", "cpu", "--sizes", "32", "--rounds", "2", "--json", str(path)]
    assert main([*arguments, "--emulate", "32", "32", "8"]) == 0
    text, errors = capfd.readouterr()
    assert "CPU baseline against NumPy's BLAS" in text
    for arch in ("sm_80", "sm_90", "sm_120"):
        assert arch in text
    assert "GPU kernels at 32×32×8 on the emulator sm_90" in text
    assert "On a machine with an NVIDIA GPU" in text
    assert errors == "", "no progress bar where nobody watches"
    assert "\x1b" not in text
    record = json.loads(path.read_text())
    assert record["schema"] == 1
    timed = [row for row in record["rows"] if row["us"] is not None]
    (emulated,) = [row for row in record["rows"] if row["us"] is None]
    assert {row["kernel"] for row in timed} == {"cpu"}
    assert not any("counters" in row or "device" in row for row in timed)
    assert (emulated["kernel"], emulated["suite"], emulated["device"]) == ("v1", "emulator", "emulator sm_90")
    assert emulated["counters"]["ffma_threads"] == 32 * 32 * 8
    assert emulated["error_over_bound"] < 1
    assert emulated["tflops"] is None
    assert {report["arch"] for report in record["resources"]} == {"sm_80", "sm_90", "sm_120"}


def test_bench_in_16_bits_without_a_gpu(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["bench", "--dtype", "bfloat16", "--device", "emulator", "--emulate", "40", "48", "32"]
    assert main([*arguments, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "CPU baseline" not in text
    rows = json.loads(path.read_text())["rows"]
    assert [row["kernel"] for row in rows] == kernels_for("bfloat16")
    for row in rows:
        assert (row["dtype"], row["error"]) == ("bfloat16", "")
        assert row["counters"]["mma_instructions"] + row["counters"]["wgmma_instructions"] > 0
        assert row["error_over_bound"] < 1


def test_bench_on_the_emulator_alone(tmp_path, capsys):
    path = tmp_path / "run.json"
    sizes = ["40", "33x64x17"]
    assert main(["bench", "v1", "v6", "--device", "emulator", "--sizes", *sizes, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "GPU kernels at 40³ on the emulator" in text
    assert "GPU kernels at 33×64×17 on the emulator" in text
    assert "CPU baseline" not in text
    found = [(row["m"], row["kernel"], row["config"]) for row in json.loads(path.read_text())["rows"]]
    assert found == [
        (40, "v1", ""),
        (40, "v6", "vector_width=4"),
        (40, "v6", "vector_width=1"),
        (33, "v1", ""),
        (33, "v6", "vector_width=1"),
    ]


def test_a_kernel_that_fails_on_the_emulator_fails_the_bench(monkeypatch, capsys):
    from numba_gemm.emulator.machine import Machine

    read = Machine.read
    monkeypatch.setattr(Machine, "read", lambda self, address, dtype, count: read(self, address, dtype, count) * 2)
    assert main(["bench", "v1", "--device", "emulator", "--emulate", "8", "8", "8"]) == 1
    assert "failed: v1 at 8×8×8: wrong result" in capsys.readouterr().out


def test_bench_says_what_is_too_large_for_the_cpu(capsys):
    assert main(["bench", "cpu", "--device", "cpu", "--sizes", "8", "4096", "1x8192x8192", "--rounds", "1"]) == 0
    assert "Left out on the CPU, where they take minutes: 4096³." in capsys.readouterr().out


def test_a_wrong_baseline_fails_the_bench(monkeypatch, capsys):
    from numba_gemm.fp32 import cpu

    right = cpu.blocked_matmul
    monkeypatch.setattr(cpu, "blocked_matmul", lambda a, b: right(a, b) * 1.001)
    assert main(["bench", "cpu", "--device", "cpu", "--sizes", "16", "--rounds", "1"]) == 1
    assert "failed: cpu at 16×16×16: wrong result" in capsys.readouterr().out


# --- info


def test_info_names_what_is_missing_and_how_to_get_it(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["assemblers"]) == ["nvjitlink", "ptxas", "driver"]
    assert facts["packages"]["numpy"]
    assert set(facts["peers"]) == {"nvmath", "cupy", "torch"}
    assert all(item["what"] and item["command"] for item in facts["missing"])
    if not is_available():
        assert any("a GPU" in item["what"] for item in facts["missing"])
    assert main(["info"]) == 0
    assert "kernel cache" in capsys.readouterr().out


def test_the_cache_is_counted_and_cleared(kernel_cache, capsys):
    assert main(["inspect", "v1", "--json"]) == 0
    capsys.readouterr()
    main(["info", "--json"])
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["directory"] == str(kernel_cache)
    assert cache["entries"] == 1
    assert cache["bytes"] > 1000
    assert main(["info", "--clear-cache"]) == 0
    assert "Deleted 1 compiled kernels" in capsys.readouterr().out
    assert list(kernel_cache.glob("*.kernel")) == []
