"""Measured choices: what is measured, what is kept, when a table is believed, and that it decides."""

from __future__ import annotations

import io
import json
import re
import shutil
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest

from numba_gemm import tuned
from numba_gemm._version import __version__
from numba_gemm.catalog import LADDER, SPECIAL, find_spec
from numba_gemm.choose import choose
from numba_gemm.errors import NumbaGemmError
from numba_gemm.problem import ITEMSIZE, Problem
from numba_gemm.spec import make_config
from numba_gemm.tune import Measured, candidates, tune, tune_problem
from numba_gemm.tuned import (
    Choice,
    Table,
    check_folder,
    code_of,
    digest_of,
    find_choice,
    kernels_digest,
    key_of,
    read_table,
    table_name,
    user_folder,
)

PACKAGE = Path(tuned.__file__).resolve().parent
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


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float32"])
def test_what_was_measured_in_one_16_bit_type_serves_the_other(folder, c_dtype):
    problem = Problem.packed(512, 384, 256, dtype="bfloat16", c_dtype=c_dtype)
    twin = Problem.packed(512, 384, 256, dtype="float16", c_dtype=c_dtype.replace("bfloat16", "float16"))
    spec, config = candidates(problem, arch=ARCH, sm_count=SMS)[-1]
    table = Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(problem): Choice(spec.name, config, 1.0, 2)})
    table.save(folder / table_name(GPU))
    tuned.forget()
    found = find_choice(twin, GPU, DRIVER)
    assert found.kernel == spec.name
    assert {**dict(found.config), "dtype": "bfloat16", "c_dtype": c_dtype} == dict(config)
    assert (dict(found.config)["dtype"], dict(found.config)["c_dtype"]) == (twin.dtype, twin.c_dtype)
    assert spec.unmet(twin, found.config) is None
    assert find_choice(Problem.packed(512, 384, 256), GPU, DRIVER) is None


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


# --- the digest of the kernels


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of what the digest is made of."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("fp32", "tensorcore", "intrinsics"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / name, root / "numba_gemm" / name, ignore=leave)
    inside = PACKAGE / "ptx"
    shutil.copytree(inside if inside.is_dir() else PACKAGE.parent / "ptx", root / "ptx")
    return root / "numba_gemm"


def changed(package, file, old, new):
    """The digest of the package with one text in a file replaced by another."""
    path = package / file
    before = path.read_bytes()
    text = before.decode()
    assert old in text
    try:
        path.write_bytes(text.replace(old, new, 1).encode())
        return digest_of(package)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tensorcore/t4.py", '"""t4 pipelined:', '"""The fourth kernel:'),  # a module's docstring of many lines
        ("tensorcore/t4.py", '"""Threads in a block."""', '"""Threads of one block."""'),
        ("tensorcore/t4.py", '    """One form of the kernel', '    """A form\n\n    # code?\n    of the kernel'),
        ("tensorcore/t4.py", "    # --- geometry\n\n", "    # --- sizes\n    # of a form\n"),
        ("tensorcore/t4.py", "\n\n\n@dataclass", "\n\n@dataclass"),
        ("tensorcore/t4.py", "import functools\n", "import functools   \n"),
        ("tensorcore/t4.py", "import functools\n", "import functools\r\n"),
        ("tensorcore/t4_choose.py", "LAUNCH_CYCLES", "COSTS_OF_LAUNCHES"),
        ("fp32/choose_fp32.py", "def choose_kernel", "def choose_the_kernel"),
        ("../ptx/t1.ptx", "// ", "// Once more: "),
        ("../ptx/w1.ptx.j2", "## The boxes", "## Boxes"),
        ("../ptx/w2.ptx.j2", "\n\n", "\n   \n\n"),
    ],
)
def test_what_does_not_change_a_kernel_leaves_the_digest(package, file, old, new):
    assert digest_of(package) == kernels_digest()
    assert changed(package, file, old, new) == kernels_digest()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tensorcore/t4.py", "stages: int = 4", "stages: int = 3"),
        (
            "tensorcore/t4.py",
            '        """Threads in a block."""\n',
            '        """Threads in a block."""\n        1 + 1\n',
        ),
        ("tensorcore/t4.py", '"""Threads in a block."""\n        return 32', '"""Threads."""\n        return 64'),
        ("tensorcore/t4.py", "        return 32 * self.warps", "    return 32 * self.warps"),
        ("intrinsics/emit.py", "import", "import sys, "),
        ("fp32/v1_naive.py", "def sgemm_naive", "def sgemm_simple"),
        ("../ptx/t1.ptx", "//@bf16 ", "//@bf16  "),
        ("../ptx/t1.ptx", "mma.sync", "mma.sink"),
        ("../ptx/w2.ptx.j2", "%% ", "%% set more = 1\n%% "),
    ],
)
def test_an_edit_of_code_changes_the_digest(package, file, old, new):
    assert changed(package, file, old, new) != kernels_digest()


def test_a_new_kernel_file_and_a_renamed_one_change_the_digest(package):
    path = package.parent / "ptx" / "t1.ptx"
    path.rename(path.with_name("t0.ptx"))
    try:
        assert digest_of(package) != kernels_digest()
    finally:
        path.with_name("t0.ptx").rename(path)
    (package / "fp32" / "v0.py").write_text("")
    try:
        assert digest_of(package) != kernels_digest()
    finally:
        (package / "fp32" / "v0.py").unlink()


STRINGS = [
    ("x = 1  # one\n\n\ny = 2   \n", "x = 1  # one\ny = 2"),
    ('"""Module."""\nx = 1\n', "x = 1"),
    ('# licence\nr"""Module\n\nof lines.\n"""\nx = 1\n', "x = 1"),
    ('def f():\n    """Doc\n    x = 1\n    """\n    return 1', "def f():\n    return 1"),
    ('def f():  # why\n    """Doc."""\n    return 1', "def f():  # why\n    return 1"),
    ('x = """\n# kept\n\n  "kept" \n"""\ndef f():\n    """\n    Doc.\n    """\n    y', None),
    ('f(\n    """\n    # kept\n    """\n)\nx = 1', 'f(\n    """\n    # kept\n    """\n)\nx = 1'),
    ('def f():\n    """Doc."""; x = 1', 'def f():\n    """Doc."""; x = 1'),
]


@pytest.mark.parametrize(("text", "code"), STRINGS)
def test_code_is_what_is_left_without_docstrings_comments_and_blanks(text, code):
    expected = code if code is not None else 'x = """\n# kept\n\n  "kept" \n"""\ndef f():\n    y'
    assert code_of(text) == expected


def tokens(text):
    """The tokens of Python source but for comments, line ends and docstrings."""
    ends = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
    found, begins = [], True  # whether a statement begins here
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in ends:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))):
            found.append(token.string)
        begins = False
    return found


@pytest.mark.parametrize(
    "path",
    [path for name in ("fp32", "tensorcore", "intrinsics") for path in sorted((PACKAGE / name).rglob("*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_no_code_of_a_kernel_is_left_out(path):
    text = path.read_text(encoding="utf-8")
    assert tokens(code_of(text)) == tokens(text)


# --- the tables that ship


KEY = re.compile(r"(\w+)→(\w+) ([nt])([nt]) ([A-])([B-])([C-]) (\d+)×(\d+)×(\d+)(?: ×(\d+))?( beta)?")


def problem_of(key):
    """A problem with this key: packed, and where a matrix is not aligned though its sizes would do, shifted."""
    dtype, c_dtype, a, b, *aligned, m, n, k, batch, beta = KEY.fullmatch(key).groups()
    m, n, k, batch = int(m), int(n), int(k), int(batch or 1)
    layouts = [{"n": "row", "t": "column"}[letter] for letter in (a, b)]
    strides = (k if a == "n" else m, n if b == "n" else k, n)
    apart = (m * k, k * n, m * n) if batch > 1 else (0, 0, 0)
    offsets = [0 if letter != "-" else ITEMSIZE[dtype] for letter in aligned]
    scale = (1.0, 1.0 if beta else 0.0)
    made = Problem(m, n, k, dtype, *strides, *offsets, *scale, c_dtype, *layouts, batch, *apart)
    packed = replace(made, a_offset=0, b_offset=0, c_offset=0)
    return packed if key_of(packed) == key else made


def faults(path):
    """What is wrong with a table, a line for each fault: it doesn't fit, or names what no kernel takes."""
    table = read_table(path)
    if table is None:
        return ["it can't be read"]
    found = [] if path.name == table_name(table.gpu) else [f"it is of {table.gpu}"]
    if table.version != __version__:
        found.append(f"version {table.version} is not {__version__}")
    if table.kernels != kernels_digest():
        found.append(f"it was made with kernels {table.kernels}, not {kernels_digest()}: run numba-gemm tune again")
    for key, choice in table.choices.items():
        problem, spec = problem_of(key), find_spec(choice.kernel)
        reason = "there is no such kernel" if spec is None else spec.unmet(problem, choice.config)
        if key_of(problem) != key:
            found.append(f"{key}: no problem has this key")
        if reason is not None:
            found.append(f"{key}: {choice.kernel}: {reason}")
        if not choice.us > 0:
            found.append(f"{key}: {choice.us} µs")
    return found


SHIPPED = sorted((PACKAGE / "tuned_tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_table_that_ships_fits_the_kernels(path):
    """A change of a kernel makes the tables void: where this fails, ``numba-gemm tune`` makes them anew."""
    assert faults(path) == []


def test_the_folder_of_tables_is_part_of_the_package():
    assert tuned.SHIPPED_FOLDER == PACKAGE / "tuned_tables"
    assert (tuned.SHIPPED_FOLDER / "README.md").is_file()


@pytest.mark.parametrize(
    ("change", "choice", "fault"),
    [
        ({}, CHOICE, None),
        ({"version": "0.0.1"}, CHOICE, "version 0.0.1"),
        ({"kernels": "0123456789abcdef"}, CHOICE, "made with kernels"),
        ({"gpu": "NVIDIA L4"}, CHOICE, "it is of NVIDIA L4"),
        ({}, CHOICE._replace(kernel="v99"), "no such kernel"),
        ({}, CHOICE._replace(us=0.0), "0.0 µs"),
        ({}, Choice("gemv", make_config(form="along"), 1.0, 1), "neither M"),
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_is_noticed(tmp_path, change, choice, fault):
    path = tmp_path / table_name(GPU)
    Table(GPU, DRIVER, kernels=kernels_digest(), choices={key_of(SQUARE): choice}).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = faults(path)
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


@pytest.mark.parametrize(
    "problem",
    [
        SQUARE,
        ODD,
        Problem.packed(512, 512, 512, dtype="bfloat16", c_dtype="float32", beta=1.0),
        Problem(512, 512, 512, lda=512, ldb=512, ldc=512, b_offset=8),
        Problem(64, 512, 32, "float16", lda=64, ldb=512, ldc=512, a_layout="column"),
        Problem(64, 32, 16, lda=16, ldb=32, ldc=32, batch=3, batch_stride_a=1024, batch_stride_c=64 * 32),
    ],
    ids=key_of,
)
def test_a_key_says_enough_to_make_a_problem_of_it(problem):
    assert key_of(problem_of(key_of(problem))) == key_of(problem)


def test_a_folder_that_cant_be_written_is_found_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "tables"):
        with pytest.raises(ValueError, match=r"can't be kept in .*; set NUMBA_GEMM_TUNED_DIR to a folder"):
            check_folder(folder)
    check_folder(tmp_path / "new" / "tables")
    assert list((tmp_path / "new" / "tables").iterdir()) == []


def test_a_home_in_the_folders_name_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_GEMM_TUNED_DIR", "~/tables")
    assert user_folder() == tmp_path / "tables"
