"""How a form of a kernel becomes PTX text, where its file is a template (``ptx/*.ptx.j2``)."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

from numba_gemm.tensorcore.source import ptx_path


def render_template(file: str, /, **names: Any) -> str:
    """The PTX text of a template with these names filled in, without trailing blanks and runs of empty lines.

    Raises
    ------
    jinja2.UndefinedError : if the template needs a name that isn't among them.
    """
    text = _environment().get_template(file).render(**names)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))


@functools.cache
def _environment() -> Any:
    import jinja2

    # PTX writes registers as %name and vectors in braces, so blocks are <% %> or lines that start with %%.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ptx_path("t4.ptx.j2").parent),
        undefined=jinja2.StrictUndefined,
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        line_statement_prefix="%%",
        line_comment_prefix="##",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["xor"] = operator.xor
    environment.filters["lines"] = lambda text: str(text).rstrip("\n")
    return environment
