"""The generated tables: made from records, stale ones found, missing records refused."""

from __future__ import annotations

import importlib.util
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


def test_every_kind_of_record_has_a_table(tables):
    failed = replace(ROW, kernel="v7", error="CompileError: no")
    suite = tables.suite_view([vars(replace(row, suite="odd", n=1001)) for row in (TIMED, failed)])
    assert "| 1024×1001×1024 | 60.0 µs | 100.0 µs (0.60×) | failed |" in suite
    assert "| geometric mean |  | 0.60× | – |" in suite
    ladder = tables.ladder_view([vars(TIMED), vars(failed)])
    assert "| v7 | failed | – |" in ladder
    cpu = tables.cpu_view([vars(replace(TIMED, suite="cpu", kernel="cpu", peer="numpy", threads=1))])
    assert "| 1024³ | 1 | 21475 | 35791 | 60 |" in cpu
    host = tables.host_view([vars(replace(TIMED, kernel="torch.matmul(a, b, out=c)")), vars(failed)])
    assert "| `torch.matmul(a, b, out=c)` | 100.0 µs |" in host
    assert "not measured" in host
