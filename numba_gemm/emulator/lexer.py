"""PTX text to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    (?P<newline>\n)
  | (?P<space>[ \t\r\f]+)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>[.%$_a-zA-Z][\w$%.]*(?:::[\w$%.]+)*)
  | (?P<punct>[{}()\[\],;:@!|<>=+\-*/~&^?])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """The tokens of a PTX text, comments dropped, closed by one of kind "end"."""
    tokens: list[Token] = []
    append = tokens.append
    line = 1
    position = 0
    match = _TOKEN.match
    end = len(text)
    while position < end:
        found = match(text, position)
        if found is None:
            bad = text[position]
            if bad == "\0":  # compilers hand over C strings
                break
            source = text.split("\n")[line - 1]
            raise PtxSyntaxError(f"unexpected character {bad!r}", line, source)
        kind = found.lastgroup
        position = found.end()
        if kind == "newline":
            line += 1
        elif kind == "space":
            pass
        elif kind == "comment":
            line += found.group().count("\n")
        else:
            append(Token(kind, found.group(), line))  # type: ignore[arg-type]
    append(Token("end", "", line))
    return tokens
