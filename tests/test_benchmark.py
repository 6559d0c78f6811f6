"""The machinery of `bench` and `check`: shapes, inputs, validation, peers, records, compiled forms."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm.benchmark import correctness, forms, peers, record
from numba_gemm.benchmark.cpu import bench_cpu, limited_to, time_calls
from numba_gemm.benchmark.inputs import POOL_LENGTH, SAMPLE, Checker, Pool
from numba_gemm.benchmark.report import microseconds, short_config
from numba_gemm.benchmark.selection import kernels_by_dtype
from numba_gemm.benchmark.suites import SUITES, Shape, cube, parse_shape
from numba_gemm.cases import LAYOUTS, Case
from numba_gemm.catalog import get_spec, kernels_for

# --- shapes


def test_shapes_are_parsed():
    assert parse_shape("1024") == cube(1024)
    assert parse_shape("4096x4095x1") == Shape(4096, 4095, 1) == parse_shape("4096×4095×1")
    assert [str(cube(8)), str(Shape(1, 2, 3))] == ["8³", "1×2×3"]


@pytest.mark.parametrize("text", ["", "0", "-3", "3x4", "3x4x0", "1x2x3x4", "a", "3x4x5 6", "1.5", "²"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="neither a number"):
        parse_shape(text)


def test_suites_have_the_shapes_that_the_goals_are_set_for():
    assert set(SUITES) == {"square", "small", "odd", "skinny", "deepk", "llm"}
    assert Shape(1000, 1001, 1002) in SUITES["odd"]
    assert Shape(64, 64, 262144) in SUITES["deepk"]
    assert len(SUITES["skinny"]) == 7


# --- inputs


def test_matrices_are_stretches_of_the_pool_wrapped_round():
    pool = Pool(length=7)
    flat = pool.matrix(4, 5, 5).reshape(-1)
    assert np.array_equal(flat, np.resize(np.roll(pool.values, -5), 20))


def test_sets_differ_and_are_the_same_each_time():
    pool = Pool(length=1009)
    first, again, other = (pool.factors(Shape(20, 30, 10), number) for number in (0, 0, 1))
    assert np.array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[1], other[1])


def test_the_pool_length_is_prime():
    divisors = np.arange(3, int(POOL_LENGTH**0.5) + 1, 2)
    assert POOL_LENGTH % 2
    assert not np.any(POOL_LENGTH % divisors == 0)


# --- validation


def product(m, n, k):
    a, b = Pool(length=10007).factors(Shape(m, n, k), 0)
    return a, b, a @ b


def test_a_small_product_is_checked_everywhere():
    a, b, c = product(70, 80, 90)
    checker = Checker(a, b)
    assert checker.extent == "all"
    assert 0 < checker.check(c).error_over_bound < 1
    c[69, 79] += 1
    verdict = checker.check(c)
    assert not verdict.ok
    assert "(69, 79)" in verdict.message


def test_a_large_product_is_checked_on_rows_and_columns():
    a, b, c = product(200, 300, 40)
    checker = Checker(a, b, full_check_terms=1000)
    assert checker.extent == f"{SAMPLE} rows, {SAMPLE} columns"
    assert checker.check(c).ok
    assert not checker.check(np.roll(c, 1, axis=0)).ok
    assert not checker.check(np.roll(c, 1, axis=1)).ok
    one_row = c.copy()
    one_row[checker.parts[0][0][5], 250] += 1
    assert not checker.check(one_row).ok


def test_an_element_left_unwritten_shows_wherever_it_is():
    a, b, c = product(200, 300, 40)
    checker = Checker(a, b, full_check_terms=1000)
    sampled = set(checker.parts[0][0])
    c[next(i for i in range(200) if i not in sampled), :] = np.nan
    verdict = checker.check(c)
    assert not verdict.ok
    assert verdict.error_over_bound == np.inf


def test_few_rows_are_checked_everywhere_however_long():
    a, b, _ = product(8, 300, 400)
    assert Checker(a, b, full_check_terms=1).extent == "all"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_is_found_again_in_a_copy_of_its_base(layout):
    _, _, c = Case(7, 9, 3, layout=layout).make()
    base = correctness.base_of(c)
    assert np.array_equal(correctness.view_like(c, base.copy()), c)
    after = base.copy()
    correctness.view_like(c, after)[...] = 5
    assert correctness.untouched_outside(c, after, base)
    if base.size > c.size:
        outside = np.ones(base.size, bool)
        marks = np.zeros(base.size, np.float32)
        correctness.view_like(c, marks)[...] = 1
        outside[marks == 1] = False
        after[np.flatnonzero(outside)[0]] = 0
        assert not correctness.untouched_outside(c, after, base)


def test_the_forms_that_a_check_on_a_gpu_needs_are_known_before():
    from types import SimpleNamespace

    device = SimpleNamespace(compute_capability=(9, 0), sm_count=132)
    found = correctness.forms_on_gpu("t4", quick=False, device=device)
    assert len(set(found)) == len(found)
    configs = [dict(config) for _, config, _ in found]
    assert {(c["a_layout"], c["b_layout"]) for c in configs} == {("row", "row"), ("column", "column")}
    for key in ("split_k", "aligned_a", "aligned_b"):
        assert {bool(c[key]) for c in configs} == {False, True}
    assert {c["c_dtype"] for c in configs} == {"float16", "bfloat16", "float32"}
    assert correctness.forms_on_gpu("t3", quick=False, device=device) == []


def test_check_reports_a_wrong_kernel(monkeypatch):
    import numba_gemm

    references = correctness.References(seed=1)
    good = correctness.check_case("cpu", Case(5, 6, 7), "numpy", references)
    assert good.message == ""
    monkeypatch.setattr(numba_gemm, "matmul", lambda a, b, out, **_: np.matmul(a, b, out=out)[...].__iadd__(1))
    bad = correctness.check_case("cpu", Case(5, 6, 7), "numpy", references)
    assert "out of bounds" in bad.message
    monkeypatch.setattr(numba_gemm, "matmul", lambda *_, **__: None)
    unwritten = correctness.check_case("cpu", Case(5, 6, 7), "numpy", references)
    assert unwritten.error_over_bound == np.inf


# --- peers


def test_peers_by_name():
    assert peers.find_peer("none") == (None, "")
    with pytest.raises(ValueError, match="there is no peer 'mkl'; the peers are auto, none"):
        peers.find_peer("mkl")


def test_auto_takes_the_first_peer_that_works(monkeypatch):
    def broken(dtype):
        raise ImportError("no such package")

    working = SimpleNamespace(name="cublas", version="cuBLAS 0")
    monkeypatch.setattr(peers, "_MAKERS", {"cublas": broken, "cupy": lambda dtype: working, "torch": broken})
    assert peers.find_peer("auto") == (working, "")
    with pytest.raises(peers.PeerError, match="torch: no such package"):
        peers.find_peer("torch")
    monkeypatch.setattr(peers, "_MAKERS", {"cublas": broken})
    found, why = peers.find_peer("auto")
    assert found is None
    assert "pip install" in why


def test_a_loaded_library_is_found_by_name():
    maps = (
        "7f00-7f01 r-xp 0 fe:00 1   /usr/lib/libcublasLt.so.13\n7f02-7f03 r-xp 0 fe:00 2   /opt/libcublas.so.13.1.0\n"
    )
    assert peers.loaded_library("libcublas.so", maps) == "/opt/libcublas.so.13.1.0"
    assert peers.loaded_library("libcudnn.so", maps) is None


# --- records


def test_a_record_is_read_back(tmp_path):
    row = record.Row("odd", "v7", "vector_width=1", "float32", "nn", 3, 4, 5, us=1.5, error_over_bound=float("inf"))
    path = tmp_path / "new" / "run.json"
    record.Record(record.environment(commit="abc"), [row]).write(path)
    read = record.read_record(path)
    assert set(read) == {"schema", "environment", "rows"}
    assert read["schema"] == 1
    assert {"gpu", "driver", "cuda", "versions", "commit", "date", "host"} <= set(read["environment"])
    assert read["environment"]["commit"] == "abc"
    expected = {
        *("suite", "kernel", "config", "dtype", "layout", "m", "n", "k", "batch", "us", "us_min", "us_max"),
        *("tflops", "gbs", "peer", "peer_us", "ratio", "error_over_bound", "registers"),
    }
    assert expected <= set(read["rows"][0])
    assert read["rows"][0]["error_over_bound"] is None, "JSON has no infinity"
    assert list(path.parent.iterdir()) == [path], "nothing but the record is left"


def test_the_host_is_described_without_its_name():
    import platform

    host = record.environment()["host"]
    assert platform.node() not in host
    assert "cores" in host


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "environment": {}}'])
def test_files_that_are_no_records_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        record.read_record(tmp_path / "x.json")


def test_slugs():
    assert record.slug("NVIDIA H200") == "nvidia-h200"
    assert record.slug("NVIDIA GeForce RTX 3060 Ti") == "nvidia-geforce-rtx-3060-ti"


# --- the CPU


def test_the_cpu_baseline_is_validated_and_timed():
    (row,) = bench_cpu([Shape(40, 50, 60)], rounds=2, threads=[1])
    assert row.validated == "all"
    assert row.error_over_bound < 1
    assert row.us_min <= row.us <= row.us_max
    assert row.peer == "numpy"
    assert row.threads == 1
    assert row.tflops == pytest.approx(2 * 40 * 50 * 60 / row.us * 1e-6)


def test_threads_are_limited_and_given_back():
    import numba
    from threadpoolctl import threadpool_info

    before = numba.get_num_threads()
    with limited_to(1) as used:
        assert used == numba.get_num_threads() == 1
        assert all(pool["num_threads"] == 1 for pool in threadpool_info() if pool["user_api"] == "blas")
    assert numba.get_num_threads() == before


def test_the_ratio_is_to_the_first_function():
    a = np.ones((64, 64), np.float32)

    def twice(a, b):
        for _ in range(40):
            a @ b
        return a

    once, often = time_calls([np.matmul, twice], a, a, rounds=3)
    assert once.ratio == pytest.approx(1)
    assert often.ratio < 0.5


# --- compiled forms


def test_forms_are_every_config_on_every_architecture():
    found = forms.all_forms(["v1", "v6"], [(8, 0), (9, 0)])
    assert [(name, arch) for name, _, arch in found].count(("v6", (9, 0))) == 8  # layouts of A and B, widths
    assert len(found) == 18
    assert forms.all_forms(["v1"], [(7, 0)]) == []


def test_a_report_shows_one_type_and_three_tiles_of_a_kernel_with_a_form_for_each_problem():
    shown = forms.shown_forms(["v6", "t1", "t4"], [(7, 5), (9, 0), (12, 0)], "bfloat16")
    assert [(name, arch) for name, _, arch in shown] == [
        *(("v6", arch) for arch in ((7, 5), (7, 5), (9, 0), (9, 0), (12, 0), (12, 0))),
        *(("t1", arch) for arch in ((9, 0), (12, 0))),
        *(("t4", arch) for arch in ((9, 0),) * 3 + ((12, 0),) * 3),
    ]
    assert {dict(config)["dtype"] for name, config, _ in shown if name != "v6"} == {"bfloat16"}
    for _, config, arch in shown[-6:]:
        assert get_spec("t4").geometry(config).shared_bytes <= (227 if arch == (9, 0) else 99) * 1024


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ([], {}, {"float32": kernels_for("float32"), "float16": kernels_for("float16")}),
        ([], {"dtype": "bfloat16"}, {"bfloat16": kernels_for("bfloat16")}),
        ([], {"suite": True}, {"float32": ["auto", "v7", "v8"]}),
        ([], {"suite": True, "dtype": "float16"}, {"float16": ["auto", "t4", "w2"]}),
        ([], {"suite": True, "dtype": "float16", "arch": (9, 0)}, {"float16": ["auto", "t4", "w2"]}),
        ([], {"suite": True, "dtype": "float16", "arch": (8, 0)}, {"float16": ["auto", "t3", "t4"]}),
        ([], {"dtype": "float16", "arch": (10, 0)}, {"float16": ["t1", "t2", "t3", "t4"]}),
        (["t4", "v7", "cpu", "t1"], {}, {"float16": ["t4", "t1"], "float32": ["v7"]}),
        (["t4", "t4"], {"dtype": "bfloat16"}, {"bfloat16": ["t4"]}),
        (["auto"], {}, {"float32": ["auto"]}),
        (["auto", "t4"], {}, {"float16": ["auto", "t4"]}),
        (["auto"], {"dtype": "float16"}, {"float16": ["auto"]}),
        (["cpu"], {}, {}),
    ],
    ids=str,
)
def test_kernels_run_in_the_type_that_is_asked_for_or_in_their_own(names, options, expected):
    assert kernels_by_dtype(names, **options) == expected


def test_a_form_that_does_not_compile_is_a_row_with_an_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("ptxas fatal\nmore")

    monkeypatch.setattr(forms, "compile_kernel", refuse)
    (report,) = forms.report_forms([("v1", (), (9, 0))])
    assert report.error == "ptxas fatal"
    assert report.registers is None


def test_loads_and_fmas_are_counted():
    assert forms.fmas({"FFMA": 3, "FFMA2": 2, "LDS": 9}) == 7
    assert forms.shared_loads({"LDS": 1, "LDS.128": 2, "LDSM": 4, "LDG": 8}) == 7


# --- tables for people


def test_units():
    assert [microseconds(us) for us in (0.5, 999.94, 1e4, 2.5e6, None)] == [
        "0.5 µs",
        "999.9 µs",
        "10.00 ms",
        "2.50 s",
        "–",
    ]
    assert [short_config(c) for c in ("vector_width=4", "vector_width=1", "")] == ["vec4", "scalar", ""]
    assert short_config("dtype=float16") == short_config("float16") == "float16"
    tile = "block_k=64 block_m=128 block_n=256 dtype=float16 stages=3"
    assert short_config(tile) == "128×256×64/3"
    assert short_config(f"copies=tma {tile}") == "128×256×64/3 tma"
    assert short_config(f"t4 {tile} splits=33") == "t4 128×256×64/3 split 33"


def test_a_row_is_plain_json():
    row = replace(record.Row("s", "v1", "", "float32", "nn", 1, 1, 1), us=1.0)
    assert json.loads(json.dumps(record.Record({}, [row]).to_dict()))["rows"][0]["us"] == 1.0
