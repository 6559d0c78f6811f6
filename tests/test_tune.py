"""Measured choices: what is measured, what is kept, when a table is believed, and that it decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numba_gemm import tuned
from numba_gemm.catalog import LADDER, SPECIAL
from numba_gemm.choose import choose
from numba_gemm.errors import NumbaGemmError
from numba_gemm.problem import Problem
from numba_gemm.spec import make_config
from numba_gemm.tune import Measured, candidates, tune, tune_problem
from numba_gemm.tuned import Choice, Table, find_choice, kernels_digest, key_of, read_table, table_name

GPU, DRIVER, ARCH, SMS = "NVIDIA H200", "13.0", (9, 0), 132
SQUARE, ODD = Problem.packed(512, 512, 512), Problem.packed(511, 513, 515)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", tmp_path / "shipped")
    tuned.forget()
    yield tmp_path
    tuned.forget()


class FakeMeasure:
    """Made-up times: the fastest form is the one that ``best`` picks; kernels in ``wrong`` give wrong results."""

    def __init__(self, best, wrong=()):
        self.best, self.wrong, self.calls = best, wrong, []

    def __call__(self, problem, forms, rounds):
        self.calls.append((key_of(problem), len(forms), rounds))
        return [
            Measured(spec.name, config, None, "wrong result: element 0")
            if spec.name in self.wrong
            else Measured(spec.name, config, 1.0 if self.best(spec, config) else 2.0 + index)
            for index, (spec, config) in enumerate(forms)
        ]


def test_every_kernel_that_could_be_chosen_is_a_candidate():
    names = {spec.name for spec, _ in candidates(SQUARE, arch=ARCH, sm_count=SMS)}
    assert {"v6", "v7", "v8"} <= names
    assert "gemv" not in names  # neither M nor N is 1
    assert "gemv" in {spec.name for spec, _ in candidates(Problem.packed(1, 512, 512), arch=ARCH, sm_count=SMS)}
    halves = candidates(Problem.packed(512, 512, 512, dtype="float16"), arch=ARCH, sm_count=SMS)
    assert {spec.name for spec, _ in halves} == {"t4", "w1", "w2"}
    for problem in (SQUARE, ODD):
        for spec, config in candidates(problem, arch=ARCH, sm_count=SMS):
            assert spec.unmet(problem, config) is None


def test_the_fastest_right_form_is_taken():
    measure = FakeMeasure(lambda spec, config: spec.name == "v6")
    choice = tune_problem(SQUARE, measure, arch=ARCH, sm_count=SMS)
    assert (choice.kernel, choice.us) == ("v6", 1.0)
    assert measure.calls[0][1] == choice.tried == len(candidates(SQUARE, arch=ARCH, sm_count=SMS))
    measure = FakeMeasure(lambda spec, config: spec.name == "v6", wrong=("v6",))
    assert tune_problem(SQUARE, measure, arch=ARCH, sm_count=SMS).kernel != "v6"


def test_no_right_form_is_an_error_that_says_why(folder):
    measure = FakeMeasure(lambda spec, config: True, wrong=(*LADDER, *SPECIAL))
    with pytest.raises(NumbaGemmError, match="v7: wrong result"):
        tune_problem(SQUARE, measure, arch=ARCH, sm_count=SMS)
    table, path = Table(GPU, DRIVER, kernels=kernels_digest()), folder / table_name(GPU)
    failures = tune([SQUARE], table, path, measure, arch=ARCH, sm_count=SMS)
    assert len(failures) == 1
    assert not path.exists()


def test_an_interrupted_run_goes_on_where_it_stopped(folder):
    path = folder / table_name(GPU)

    def stop_at_the_second(problem, choice):
        if problem is ODD and choice is None:
            raise KeyboardInterrupt

    measure = FakeMeasure(lambda spec, config: spec.name == "v7")
    table = Table(GPU, DRIVER, kernels=kernels_digest())
    with pytest.raises(KeyboardInterrupt):
        tune([SQUARE, ODD], table, path, measure, arch=ARCH, sm_count=SMS, on_problem=stop_at_the_second)
    resumed = read_table(path)
    assert list(resumed.choices) == [key_of(SQUARE)]
    measure.calls.clear()
    assert tune([SQUARE, ODD], resumed, path, measure, arch=ARCH, sm_count=SMS) == []
    assert {key for key, _, _ in measure.calls} == {key_of(ODD)}
    assert set(read_table(path).choices) == {key_of(SQUARE), key_of(ODD)}
    measure.calls.clear()
    tune([SQUARE], resumed, path, measure, arch=ARCH, sm_count=SMS, again=True)
    assert measure.calls


CHOICE = Choice("v6", make_config(vector_width=4), 12.5, 7)


def test_a_table_decides_and_the_model_where_it_is_silent(folder):
    table = Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(SQUARE): CHOICE})
    table.save(folder / table_name(GPU))

    def look_up(problem):
        return find_choice(problem, GPU, DRIVER)

    assert look_up(SQUARE) == CHOICE
    assert choose(SQUARE, arch=ARCH, sm_count=SMS, tuned=look_up) == (LADDER["v6"], CHOICE.config)
    assert choose(ODD, arch=ARCH, sm_count=SMS, tuned=look_up) == choose(ODD, arch=ARCH, sm_count=SMS)
    named = choose(SQUARE, "v7", arch=ARCH, sm_count=SMS, tuned=look_up)
    assert named[0].name == "v7"  # a name goes before a table


def test_a_choice_that_can_not_be_carried_out_is_passed_over():
    misaligned = Problem(512, 512, 512, lda=512, ldb=512, ldc=512, a_offset=4)
    for choice in (CHOICE, Choice("v99", (), 1.0, 1)):
        found = choose(misaligned, arch=ARCH, sm_count=SMS, tuned=lambda _, choice=choice: choice)
        assert found == choose(misaligned, arch=ARCH, sm_count=SMS)


@pytest.mark.parametrize(
    ("change", "believed"),
    [
        ({}, True),
        ({"gpu": "NVIDIA H100"}, False),
        ({"driver": "12.8"}, False),
        ({"version": "0.0.1"}, False),
        ({"kernels": "0123456789abcdef"}, False),
    ],
    ids=str,
)
def test_a_table_is_believed_only_where_it_was_made(folder, change, believed):
    path = folder / table_name(GPU)
    Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(SQUARE): CHOICE}).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert (find_choice(SQUARE, GPU, DRIVER) is not None) == believed


def test_a_shipped_table_serves_any_driver_and_the_users_goes_before_it(folder):
    other = Choice("v7", make_config(vector_width=4), 9.0, 7)
    shipped = {key_of(SQUARE): CHOICE, key_of(ODD): CHOICE}
    Table(GPU, "12.4", kernels=kernels_digest(), choices=shipped).save(folder / "shipped" / table_name(GPU))
    Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(SQUARE): other}).save(folder / table_name(GPU))
    assert find_choice(SQUARE, GPU, DRIVER) == other
    assert find_choice(ODD, GPU, DRIVER) == CHOICE


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "gpu": "x"}'])
def test_a_damaged_table_counts_as_absent(folder, content, caplog):
    (folder / table_name(GPU)).write_text(content)
    assert find_choice(SQUARE, GPU, DRIVER) is None
    assert "can't be read" in caplog.text


def test_tables_can_be_turned_off(folder, monkeypatch):
    Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(SQUARE): CHOICE}).save(folder / table_name(GPU))
    monkeypatch.setenv("NUMBA_GEMM_TUNED_DIR", "")
    tuned.forget()
    assert find_choice(SQUARE, GPU, DRIVER) is None


@pytest.mark.parametrize(
    "other",
    [
        Problem.packed(512, 512, 513),
        Problem.packed(512, 512, 512, dtype="float16"),
        Problem.packed(512, 512, 512, beta=1.0),
        Problem(512, 512, 512, lda=512, ldb=512, ldc=512, b_offset=8),
        Problem(512, 512, 512, lda=512, ldb=512, ldc=512, a_layout="column"),
        Problem(512, 512, 512, lda=512, ldb=512, ldc=512, batch=2, batch_stride_c=512 * 512),
    ],
    ids=key_of,
)
def test_what_a_choice_depends_on_has_a_key_of_its_own(other):
    assert key_of(other) != key_of(SQUARE)


def test_tables_that_ship_are_readable_and_of_kernels_that_there_are():
    """Whether one still counts is for ``Table.fits``: it does for the sources that it was made with."""
    import numba_gemm

    folder = Path(numba_gemm.__file__).parent / "tuned_tables"
    assert folder == tuned.SHIPPED_FOLDER
    assert (folder / "README.md").is_file()  # the folder is part of the package, with a table in it or without
    for path in folder.glob("*.json"):
        table = read_table(path)
        assert table is not None
        assert path.name == table_name(table.gpu)
        for key, choice in table.choices.items():
            assert choice.kernel in {*LADDER, *SPECIAL}, key
            assert choice.us > 0
