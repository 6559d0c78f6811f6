"""Tables of measured choices: for a GPU, which kernel in which form was fastest at a shape.

:func:`numba_gemm.choose.choose` looks here before it asks the cost model. A table ships with the library for GPUs that
it was measured on; ``numba-gemm tune`` makes one for the user's GPU in the user's configuration directory, whose
entries go before. A table is believed only for the GPU, the version of the library and the kernels that it was made
with, the user's also only for the driver (by the CUDA version that it supports); other ones count as absent.

``NUMBA_GEMM_TUNED_DIR`` moves the user's tables; set to the empty string it turns all tables off.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from numba_gemm._version import __version__
from numba_gemm.problem import ALIGNMENT, ITEMSIZE, Problem
from numba_gemm.spec import Config

_log = logging.getLogger("numba_gemm")

SCHEMA = 1
#: Tables that ship with the library.
SHIPPED_FOLDER = Path(__file__).resolve().parent / "tuned_tables"
_SOURCES = ("fp32", "tensorcore", "intrinsics")
#: The end of a line that a docstring may follow.
_OPENS_BLOCK = re.compile(r":\s*(#.*)?$")


class Choice(NamedTuple):
    """The fastest of the forms that were timed for a shape, its time in µs, and how many there were."""

    kernel: str
    config: Config
    us: float
    tried: int


@dataclass
class Table:
    """Choices by shape, and what they were measured with.

    Attributes
    ----------
    gpu : the driver's name of it.
    driver : the CUDA version that its driver supports, ``"13.0"``.
    version, kernels : of the library, and its :func:`kernels_digest`.
    choices : by :func:`key_of`.
    """

    gpu: str
    driver: str
    version: str = __version__
    kernels: str = ""
    choices: dict[str, Choice] = field(default_factory=dict)

    def fits(self, gpu: str, driver: str | None) -> bool:
        """Whether this table can be believed on a GPU; ``driver`` None leaves the driver out of it."""
        return (
            self.gpu == gpu
            and self.version == __version__
            and self.kernels == kernels_digest()
            and driver in (None, self.driver)
        )

    def save(self, path: Path) -> None:
        """Write the table whole under another name and move it into place."""
        content = {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "driver": self.driver,
            "version": self.version,
            "kernels": self.kernels,
            "choices": {
                key: {"kernel": c.kernel, "config": dict(c.config), "us": round(c.us, 3), "tried": c.tried}
                for key, c in sorted(self.choices.items())
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def read_table(path: Path) -> Table | None:
    """The table in a file; None, with a line in the log, if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']} is not {SCHEMA}")
        choices = {
            str(key): Choice(
                str(value["kernel"]), tuple(sorted(value["config"].items())), float(value["us"]), int(value["tried"])
            )
            for key, value in content["choices"].items()
        }
        return Table(content["gpu"], content["driver"], content["version"], content["kernels"], choices)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the table of tuned kernels %s can't be read and is left aside: %s", path, error)
        return None


def key_of(problem: Problem) -> str:
    """What of a problem a choice depends on, as text: types, layouts, alignment, batch and sizes."""
    width = ALIGNMENT // ITEMSIZE[problem.dtype]
    aligned = "".join("-" if problem.misaligned(matrix, width) else matrix for matrix in "ABC")
    layouts = "".join("n" if layout == "row" else "t" for layout in (problem.a_layout, problem.b_layout))
    beta = "" if problem.beta == 0 else " beta"
    batch = f" ×{problem.batch}" if problem.batch > 1 else ""
    return f"{problem.dtype}→{problem.c_dtype} {layouts} {aligned} {problem.m}×{problem.n}×{problem.k}{batch}{beta}"


def table_name(gpu: str) -> str:
    """The name of a GPU's file: ``"NVIDIA H200"`` → ``"nvidia-h200.json"``."""
    return "-".join(gpu.lower().split()).replace("/", "-") + ".json"


def user_folder() -> Path | None:
    """Where the user's tables are; None if tables are turned off."""
    chosen = os.environ.get("NUMBA_GEMM_TUNED_DIR")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    import platformdirs

    return Path(platformdirs.user_config_dir("numba_gemm", appauthor=False)) / "tuned"


def check_folder(folder: Path) -> None:
    """Make the folder of the user's tables if it isn't there, and see that it can be written, before a run.

    Raises
    ------
    ValueError : if not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"the table of measured choices can't be kept in {folder} ({error.strerror}); "
            "set NUMBA_GEMM_TUNED_DIR to a folder that can be written"
        ) from None


@functools.cache
def kernels_digest() -> str:
    """A hash of the code of the kernels and of how their forms are described; see :func:`digest_of`."""
    return digest_of(Path(__file__).resolve().parent)


def digest_of(package: Path) -> str:
    """A hash of what decides the kernels of a copy of this package: their files without what :func:`code_of` drops.

    The cost models (files with "choose" in their name) don't count: they decide where a table is silent.
    """
    ptx = package / "ptx" if (package / "ptx").is_dir() else package.parent / "ptx"
    files = [file for name in _SOURCES for file in (package / name).rglob("*.py")]
    files += [file for file in ptx.iterdir() if file.suffix in (".ptx", ".j2")]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: (file.parent.name, file.name)):
        if "choose" not in file.name:
            text = file.read_text(encoding="utf-8")
            code = code_of(text) if file.suffix == ".py" else ptx_code_of(text)
            digest.update(f"{file.parent.name}/{file.name}\0{code}\0".encode())
    return digest.hexdigest()[:16]


def code_of(text: str) -> str:
    """Python source without docstrings, comment lines, blank lines and trailing blanks.

    Line by line, so that it doesn't depend on the Python that reads it. Other triple-quoted strings stay as they are.
    """
    kept: list[str] = []
    inside = ""  # "docstring" or "string", from a line that opens one to that which closes it
    for line in text.split("\n"):
        bare = line.strip()
        if inside:
            closes = line.count('"""') % 2 == 1
            if inside == "string" or (closes and not bare.endswith('"""')):
                kept.append(line)
            inside = "" if closes else inside
            continue
        if not bare or bare[0] == "#":
            continue
        if '"""' in bare:
            alone = bare.startswith(('"""', 'r"""')) and (not kept or _OPENS_BLOCK.search(kept[-1]))
            if bare.count('"""') % 2 == 1:
                inside = "docstring" if alone else "string"
            if alone and (inside or bare.endswith('"""')):
                continue
            kept.append(line if inside else line.rstrip())
            continue
        kept.append(line.rstrip())
    return "\n".join(kept)


def ptx_code_of(text: str) -> str:
    """PTX, or a template of it, without comment lines, blank lines and trailing blanks.

    What begins with ``//@`` is code of the form for another type, and a line with a template's tag does something.
    """
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not _is_comment(line.lstrip()))


def _is_comment(line: str) -> bool:
    return line.startswith("##") or (line.startswith("//") and not line.startswith("//@") and "<%" not in line)


def find_choice(problem: Problem, gpu: str, driver: str) -> Choice | None:
    """The measured choice for a problem on a GPU, or None.

    What was measured in one 16-bit type counts in the other as well: tensor cores and copies take as long.
    """
    choices = _choices(gpu, driver)
    if not choices:
        return None
    found = choices.get(key_of(problem))
    if found is None and problem.dtype in _TWINS:
        other = choices.get(key_of(replace(problem, dtype=_twin(problem.dtype), c_dtype=_twin(problem.c_dtype))))
        if other is not None:
            config = tuple((key, _twin(value) if key in ("dtype", "c_dtype") else value) for key, value in other.config)
            found = other._replace(config=config)
    return found


_TWINS = {"float16": "bfloat16", "bfloat16": "float16"}


def _twin(dtype: int | str) -> Any:
    return _TWINS.get(str(dtype), dtype)


@functools.cache
def _choices(gpu: str, driver: str) -> dict[str, Choice]:
    folder = user_folder()
    if folder is None:
        return {}
    found: dict[str, Choice] = {}
    for path, of_driver in ((SHIPPED_FOLDER / table_name(gpu), None), (folder / table_name(gpu), driver)):
        table = read_table(path)
        if table is not None and table.fits(gpu, of_driver):
            found |= table.choices
        elif table is not None:
            _log.info("%s was made with another GPU, driver or version and is left aside", path)
    return found


def forget() -> None:
    """Read the tables anew at the next choice."""
    _choices.cache_clear()
