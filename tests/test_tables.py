"""The generated tables: made from records, stale ones found, missing records refused."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from numba_gemm.benchmark.record import Record, Row

_SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "tables.py"

pytestmark = pytest.mark.skipif(not _SCRIPT.is_file(), reason="bench/ isn't beside the tests (an installed package)")

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "versions": {"numba": "0.68", "numba-cuda": "0.30", "peer": "cuBLAS 13.1.0"},
    "commit": "abc",
    "date": "2026-11-29",
    "host": "a CPU, 16 cores",
}
ROW = Row("ladder", "v6", "vector_width=4", "float32", "nn", 1024, 1024, 1024)
TIMED = replace(
    ROW,
    us=100.0,
    us_min=99.0,
    us_max=101.0,
    tflops=21.5,
    gbs=126.0,
    peer="cublas",
    peer_us=60.0,
    ratio=0.6,
    registers=117,
)


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("tables", _SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path):
    """A checkout with one recorded ladder and a README that shows it."""
    Record(ENVIRONMENT, [TIMED]).write(tmp_path / "bench/results/nvidia-h200/ladder.json")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Title\n\n<!-- table: ladder -->\n<!-- end table -->\n\nthe end\n")
    return tmp_path


def run(tables, root, *arguments):
    return tables.main(["--root", str(root), *arguments])


def test_a_table_is_written_and_then_up_to_date(tables, root, capsys):
    assert run(tables, root, "--check") == 1
    assert "README.md" in capsys.readouterr().err
    assert run(tables, root) == 0
    assert run(tables, root, "--check") == 0
    text = (root / "README.md").read_text()
    assert "| v6 | 21.5 (60%) | 117 |" in text
    assert "| cuBLAS | 35.8 | – |" in text
    for part in (
        "NVIDIA H200",
        "driver 580.1",
        "cuBLAS 13.1.0",
        "2026-11-29",
        "`bench/results/nvidia-h200/ladder.json`",
    ):
        assert part in text
    assert text.startswith("# Title\n")
    assert text.endswith("the end\n")


def test_a_new_record_makes_the_table_stale(tables, root):
    run(tables, root)
    Record(ENVIRONMENT, [replace(TIMED, tflops=22.5)]).write(root / "bench/results/nvidia-h200/ladder.json")
    assert run(tables, root, "--check") == 1


def test_a_table_can_be_of_one_architecture(tables, root, capsys):
    report = {"kernel": "v1", "config": "", "registers": 28, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
    report |= {"occupancy": 1.0, "loop": {"FFMA": 4, "HMMA.16816": 2}, "error": ""}
    resources = [report | {"arch": arch} for arch in ("sm_80", "sm_90")]
    Record(ENVIRONMENT, resources=resources).write(root / "bench/results/cpu/resources.json")
    readme = root / "README.md"
    readme.write_text("<!-- table: cpu/resources sm_90 -->\n<!-- end table -->\n")
    assert run(tables, root) == 0
    text = readme.read_text()
    assert "| v1 | sm_90 | 28 | 0 | 0 | 100% | 4 | 2 | 0 | 0 | 0 | 0 | – |" in text
    assert "sm_80" not in text
    assert run(tables, root, "--check") == 0
    readme.write_text("<!-- table: cpu/resources sm_75 -->\n<!-- end table -->\n")
    assert run(tables, root) == 1
    assert "no resources for sm_75" in capsys.readouterr().err


def test_an_edit_by_hand_makes_the_table_stale(tables, root):
    run(tables, root)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("21.5", "99.9"))
    assert run(tables, root, "--check") == 1
    assert "99.9" in readme.read_text(), "--check writes nothing"
    run(tables, root)
    assert "99.9" not in readme.read_text()


def test_documents_below_docs_are_checked_too(tables, root):
    run(tables, root)
    (root / "docs/results.md").write_text("<!-- table: nvidia-h200/ladder -->\n<!-- end table -->\n")
    assert run(tables, root, "--check") == 1


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("<!-- table: square -->\n<!-- end table -->\n", "table square has no recorded run"),
        ("<!-- table: nvidia-a100/ladder -->\n<!-- end table -->\n", "has no recorded run"),
        ("<!-- table: ladder -->\ntext without an end\n", "no <!-- end table --> line"),
        (
            "<!-- table: ladder -->\n<!-- table: ladder -->\n<!-- end table -->\n",
            "no <!-- end table --> line",
        ),
    ],
)
def test_a_marker_that_cannot_be_filled_is_an_error(tables, root, capsys, marker, words):
    (root / "README.md").write_text(marker)
    assert run(tables, root) == 1
    assert words in capsys.readouterr().err
    assert (root / "README.md").read_text() == marker


def test_a_bare_name_must_be_of_one_folder(tables, root, capsys):
    Record(ENVIRONMENT, [TIMED]).write(root / "bench/results/other/ladder.json")
    assert run(tables, root) == 1
    assert "nvidia-h200, other" in capsys.readouterr().err


def test_a_ladder_in_16_bits_has_its_ceiling_and_the_peer_in_fp32(tables, root):
    half = replace(TIMED, suite="ladder16", kernel="t4", dtype="float16", ceiling_tflops=40.0)
    top = replace(half, kernel="ceiling", config="mma.sync", tflops=40.0, peer=None, peer_us=None, ratio=None)
    failed = replace(ROW, suite="ladder16", kernel="t1", dtype="float16", error="CompileError: no")
    compared = replace(TIMED, suite="half_against_single", kernel="cublas", dtype="float16", peer="cublas float32")
    normal = replace(top, kernel="ceiling_normal", tflops=38.5)
    both = [replace(row, dtype="bfloat16") for row in (half, top, normal)]
    rows = [failed, half, top, *both, replace(compared, ratio=9.7)]
    Record(ENVIRONMENT, rows).write(root / "bench/results/nvidia-h200/ladder16.json")
    (root / "README.md").write_text("<!-- table: ladder16 -->\n<!-- end table -->\n")
    assert run(tables, root) == 0
    assert run(tables, root, "--check") == 0
    text = (root / "README.md").read_text()
    assert "| kernel | 1024³, TFLOP/s (% of cuBLAS, ceiling) | registers |" in text
    assert "| t1 | failed | – |" in text
    assert "| t4 | 21.5 (60%, 54%) | 117 |" in text
    assert "| cuBLAS | 35.8 (89% of ceiling) | – |" in text
    assert "| ceiling: `mma.sync` | 40.0 | – |" in text[: text.index("bfloat16:")]
    assert "| ceiling: `mma.sync`, operands near 1 | 40.0 | – |\n| ceiling: `mma.sync`, normal numbers | 38.5 |" in text
    assert text.count("| t4 | 21.5 (60%, 54%) | 117 |") == 2
    assert "| 1024³ | float16 | 21.5 | 35.8 | 9.7× |" in text
    assert text.index("float16:") < text.index("bfloat16:") < text.index("cuBLAS in 16 bits against FP32:")


def test_all_suites_in_one_table(tables, root):
    """The library's own choice alone, by suite and type: geometric mean, least ratio, and what is missing."""
    auto = replace(TIMED, suite="square", kernel="auto")
    folder = root / "bench/results/nvidia-h200"
    square = [replace(auto, ratio=ratio) for ratio in (1.0, 1.21, 1.1, 1.1)]
    Record(ENVIRONMENT, [*square, replace(TIMED, ratio=9.0)]).write(folder / "square.json")
    Record(ENVIRONMENT, [replace(auto, suite="odd", dtype="bfloat16", ratio=4.0)]).write(folder / "odd16.json")
    (root / "README.md").write_text("<!-- table: suites -->\n<!-- end table -->\n")
    assert run(tables, root) == 0
    text = (root / "README.md").read_text()
    assert "| square | 1.10× (1.00×) | – | – |\n" in text
    assert "| odd | – | 4.00× (4.00×, 1 of 6 shapes) | – |\n" in text
    assert "`bench/results/nvidia-h200/`, one file a suite" in text
    assert run(tables, root, "--check") == 0
    Record(ENVIRONMENT, [auto]).write(root / "bench/results/nvidia-h100/square.json")
    assert run(tables, root) == 1, "two folders: one must be named"


def test_a_record_of_a_cut_run_says_so(tables, root):
    Record({**ENVIRONMENT, "note": "the run was cut"}, [TIMED]).write(root / "bench/results/nvidia-h200/square.json")
    (root / "README.md").write_text("<!-- table: square -->\n<!-- end table -->\n")
    assert run(tables, root) == 0
    assert "`bench/results/nvidia-h200/square.json`; the run was cut*" in (root / "README.md").read_text()


def test_stalls_of_the_launches_that_multiply(tables, root):
    """One line a main launch, bfloat16 rows too; the record's path and the version of ncu below."""
    fields = {"suite": "stalls", "dtype": "float32", "m": 4096, "n": 4095, "k": 4096, "error": "", "main": True}
    config = "block_k=16 block_m=128 block_n=64 stages=3"
    row = fields | {"kernel": "v8", "config": config, "us": 2871.4, "issue_active": 0.846, "dram": 7.2, "l2": None}
    row |= {
        "pipes": {"fmaheavy": 88.1, "fma": 86.0},
        "stalls": {"not_selected": 3.0, "wait": 0.6, "gmma": 0.3, "x": 0.1},
    }
    gemv = row | {"dtype": "bfloat16", "n": 4096, "kernel": "gemv", "config": "form=across lanes=16", "us": 9.0}
    other = row | {"main": False, "us": 0.123}
    failed = fields | {
        "kernel": "auto",
        "config": "",
        "us": None,
        "pipes": None,
        "stalls": None,
        "error": "CudaError: no",
    }
    environment = ENVIRONMENT | {"ncu": "Version 2025.3.1.0 (build 1) (public-release)"}
    path = root / "bench/results/nvidia-h200/stalls.json"
    (root / "README.md").write_text("<!-- table: nvidia-h200/stalls -->\n<!-- end table -->\n")
    for first, *rest in ([row, other, gemv, failed], [gemv, failed, row]):
        path.write_text(json.dumps({"schema": 1, "environment": environment, "rows": [first, *rest]}))
        assert run(tables, root) == 0
        assert run(tables, root, "--check") == 0
        text = (root / "README.md").read_text()
        stalls = "not selected 75, wait 15, gmma 8"
        assert f"| float32 | 4096×4095×4096 | v8 128×64×16/3 | 2.87 ms | 85 | fmaheavy 88 | 7 | – | {stalls} |" in text
        assert f"| bfloat16 | 4096³ | gemv | 9.0 µs | 85 | fmaheavy 88 | 7 | – | {stalls} |" in text
        assert "| float32 | 4096×4095×4096 | auto | failed | – | – | – | – | – |" in text
        assert "0.1 µs" not in text
        assert "; Nsight Compute 2025.3.1.0; 2026-11-29; `bench/results/nvidia-h200/stalls.json`*" in text
        assert text.count("4096³") == 1


def test_products_with_a_vector_stand_beside_reading_their_matrix(tables):
    auto = replace(TIMED, kernel="auto", suite="skinny", m=1, gbs=3800.0)
    reading = replace(auto, kernel="reading", us=95.0, gbs=4000.0, peer=None, peer_us=None, ratio=None, tflops=None)
    other = replace(auto, m=8)
    suite = tables.suite_view([vars(row) for row in (auto, reading, other)])
    assert "| auto | reading the matrix (auto's share of its rate) |" in suite
    assert "| 1×1024×1024 | 60.0 µs | 100.0 µs (0.60×) | 95.0 µs, 4000 GB/s (95%) |" in suite
    assert "| 8×1024×1024 | 60.0 µs | 100.0 µs (0.60×) |  |" in suite


def test_ways_to_multiply_numpy_arrays(tables):
    way = replace(
        TIMED, suite="host_transfers", kernel="NumPy arrays", us=4000.0, peer="cupy", peer_us=14000.0, ratio=3.5
    )
    locked = replace(way, kernel="page-locked arrays", us=2000.0, ratio=7.0, config="1.45 of 1379 µs, 2.1 of 950 µs …")
    cupy = replace(way, kernel="cupy", us=14000.0, peer=None, peer_us=None, ratio=None)
    limited = replace(way, kernel="limited", m=2048, n=2048, k=2048, us=None, error="CudaError: no")
    text = tables.render({"rows": [vars(row) for row in (way, locked, cupy, limited)]})
    assert "| float32 | 1024³ | 2048³ |" in text
    assert "| NumPy arrays | 4.00 ms (3.5×) | – |" in text
    assert "| page-locked arrays | 2.00 ms (7.0×; 1.45 of its bound) | – |" in text
    assert "| CuPy, both copies and the product | 14.00 ms | – |" in text
    assert "| limited | – | failed |" in text


def test_designs_against_one_another(tables, tmp_path):
    import designs

    forms = {
        "v8 block_m=64 block_n=64 thread_m=8 thread_n=8 split_blocks=0 copied=": 20.0,
        "v8 block_m=64 block_n=64 thread_m=8 thread_n=8 split_blocks=0 copied= stages=4": 19.0,
        "v8 block_m=64 block_n=64 thread_m=8 thread_n=8 split_blocks=9 copied=ab": 21.5,
        "skinny block_i=8 block_j=256 form=across": 22.0,
        "v6 vector_width=4": 2345.6,
    }
    half = {
        "w2 block_m=128 block_n=64 schedule=pingpong cluster_m=1 cluster_n=2 split_k=1 splits=8 swapped=1": 3.0,
        "t4 block_m=64 block_n=256 splits=4": 4.0,
        "w1 block_m=128 block_n=128": 5.0,
    }
    record = {"gpu": "A GPU", "timing": "medians", "date": "a day"}
    record["products"] = [
        {"dtype": "float32", "shape": [512, 512, 512], "forms": {"v7 vector_width=4": 1.0}},
        {"dtype": "float32", "shape": [1, 2, 3], "forms": forms},
        {"dtype": "bfloat16", "shape": [1, 2, 3], "forms": half},
    ]
    path = tmp_path / designs.FORMS
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    header, lines, source = designs.designs(tmp_path, "float32", ["1×2×3", "512³"])
    assert len(header) == len(lines[0]) == len(lines[1]) == 6
    assert lines[0][:5] == [
        "1×2×3",
        "v8 64×64, 8×8: 19.0",
        "v8 64×64, 8×8, K shared, AB copied: 21.5",
        "skinny 8×256: 22.0",
        "v6: 2346",
    ]
    assert lines[1][:2] == ["512³", "v7: 1.0"]
    assert source == "*A GPU; medians; a day; `tests/data/h200_tuned_forms.json`*"
    (line,) = designs.designs(tmp_path, "bfloat16", [])[1]
    assert line[1:4] == [
        "w2 128×64 ping-pong, in a cluster, K in 8, transposed: 3.0",
        "t4 64×256, K in 4: 4.0",
        "w1 128×128: 5.0",
    ]
    with pytest.raises(ValueError, match="no product in float16"):
        designs.designs(tmp_path, "float16", [])


def test_every_kind_of_record_has_a_table(tables):
    failed = replace(ROW, kernel="v7", error="CompileError: no")
    suite = tables.suite_view([vars(replace(row, suite="odd", n=1001)) for row in (TIMED, failed)])
    assert "| 1024×1001×1024 | 60.0 µs | 100.0 µs (0.60×) | failed |" in suite
    assert "| geometric mean |  | 0.60× | – |" in suite
    ladder = tables.ladder_view([vars(TIMED), vars(failed)])
    assert "| v7 | failed | – |" in ladder
    cpu = tables.cpu_view([vars(replace(TIMED, suite="cpu", kernel="cpu", peer="numpy", threads=1))])
    assert "| 1024³ | 1 | 21475 | 35791 | 60 |" in cpu
    counters = {"ffma_threads": 4096, "mma_instructions": 0, "shared_load_wavefronts": 32}
    counters |= dict.fromkeys(
        (
            "shared_store_wavefronts",
            "shared_load_conflicts",
            "shared_store_conflicts",
            "global_load_sectors",
            "global_store_sectors",
            "barriers",
        ),
        1000,
    )
    counted = replace(ROW, suite="emulator", device="emulator sm_90", counters=counters)
    emulated = tables.counters_view([vars(counted), vars(failed)])
    assert "| v6 vec4 | 4,096 | 0 | 32 | 1,000 | 128 | 2,000 | 1,000 | 1,000 | 1,000 |" in emulated
    assert "| v7 vec4 | failed | – |" in emulated
    speed = tables.speed_view([vars(replace(TIMED, kernel="v7")), vars(replace(TIMED, kernel="parse", m=1, n=1, k=1))])
    assert "| v7 at 1024³ | 99.0 µs | 100.0 µs | 10845877.0 |" in speed
    assert "| parse | 99.0 µs | 100.0 µs | – |" in speed
    host = tables.host_view([vars(replace(TIMED, kernel="torch.matmul(a, b, out=c)")), vars(failed)])
    assert "| `torch.matmul(a, b, out=c)` | 100.0 µs |" in host
    assert "not measured" in host
