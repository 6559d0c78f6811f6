"""The hand-written PTX files: where they are, what types are called there, and how one text serves FP16 and BF16."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from numba_gemm.errors import NumbaGemmError

#: Elements of A and B, and of C, by the names that PTX has for them; which dimension of a matrix is contiguous.
Element = Literal["f16", "bf16"]
OutputElement = Literal["f16", "bf16", "f32"]
Layout = Literal["row", "column"]

HALF_DTYPES = ("float16", "bfloat16")
#: The library's name of a type → that of PTX, and back.
SHORT_NAMES: dict[str, OutputElement] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
LONG_NAMES: dict[str, str] = {short: long for long, short in SHORT_NAMES.items()}

#: In an installed package the files lie inside it, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "ptx", _PACKAGE.parent / "ptx")

#: Instructions whose BF16 form has the same operands.
_RENAMED = {
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "cvt.rn.f16.f32": "cvt.rn.bf16.f32",
}
_F16_LINE = re.compile(r"[ \t]*//@f16[ \t]*$")
_BF16_LINE = "//@bf16 "
#: An instruction with an FP16 operand, which may not be left in a BF16 text.
_F16_OPERAND = re.compile(r"^[^/]*\.f16(?:x2)?\b")


def ptx_path(name: str) -> Path:
    """The file of a kernel: ``"t2"`` is ``t2.ptx``; a name with a suffix (``"t4.ptx.j2"``) is taken as it is.

    Raises
    ------
    NumbaGemmError : if there is no such file, with the folders that were searched.
    """
    file = name if "." in name else f"{name}.ptx"
    for folder in _FOLDERS:
        if (folder / file).is_file():
            return folder / file
    searched = " and ".join(str(folder) for folder in _FOLDERS)
    raise NumbaGemmError(f"{file} is in neither {searched}; reinstall numba-gemm, or run from a whole checkout")


@cache
def load_ptx(name: str) -> str:
    """The text of a kernel's PTX file, as it was written (for FP16). See :func:`ptx_path` for ``name``."""
    return ptx_path(name).read_text(encoding="utf-8")


def specialise(text: str, dtype: str) -> str:
    """The text of a kernel for matrices of a 16-bit type.

    Most of such a text doesn't depend on the type. Of the rest, two instructions have a BF16 form with the same
    operands, and are renamed: ``mma.sync…f32.f16.f16.f32`` and ``cvt.rn.f16.f32``. What else differs stands in the
    text twice: a line that ends in ``//@f16`` is of the FP16 form only, and a line that begins with ``//@bf16 `` is a
    comment there and code in the BF16 form. So the file itself is valid PTX for FP16. Lines keep their numbers.

    Parameters
    ----------
    text : PTX written for FP16.
    dtype : ``"float16"`` or ``"bfloat16"``.

    Raises
    ------
    ValueError : for another dtype, or if an FP16 instruction would be left in the BF16 form.

    >>> specialise("cvt.rn.f16.f32 %half, %value;", "bfloat16")
    'cvt.rn.bf16.f32 %half, %value;'
    """
    if dtype == "float16":
        return text
    if dtype != "bfloat16":
        raise ValueError(f"dtype {dtype!r}: the tensor-core kernels take 'float16' and 'bfloat16'")
    return "\n".join(_bf16_line(number, line) for number, line in enumerate(text.split("\n"), 1))


def _bf16_line(number: int, line: str) -> str:
    """One line of the BF16 form."""
    if line.startswith(_BF16_LINE):
        return "    " + line.removeprefix(_BF16_LINE)
    if _F16_LINE.search(line):
        return "//" + line
    for old, new in _RENAMED.items():
        line = line.replace(old, new)
    if _F16_OPERAND.match(line):
        raise ValueError(f"line {number} is of FP16 and has no BF16 form: {line.strip()}")
    return line
