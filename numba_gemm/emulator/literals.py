"""Token stream and literals: the part of parsing that knows nothing of declarations."""

# mypy: disable-error-code="no-any-return"
# (struct.unpack returns Any.)

from __future__ import annotations

import struct
from collections.abc import Callable

from .errors import PtxSyntaxError
from .lexer import Token, tokenize
from .module import WIDTHS, Imm

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "|": int.__or__,
    "&": int.__and__,
}


class TokenStream:
    """The tokens of a text, with a place in them."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens = tokenize(text)
        self.at = 0

    def error(self, message: str, token: Token | None = None) -> PtxSyntaxError:
        token = token or self.tokens[self.at]
        return PtxSyntaxError(message, token.line, self.lines[token.line - 1])

    def peek(self) -> str:
        return self.tokens[self.at].text

    def next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.error("the text ends in the middle of a statement")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.peek()!r}")

    def skip_line(self) -> None:
        line = self.tokens[self.at].line
        while self.tokens[self.at].line == line and self.tokens[self.at].kind != "end":
            self.at += 1

    def skip_braces(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            text = self.next().text
            depth += (text == "{") - (text == "}")

    def integer(self) -> int:
        value = self.constant()
        if not isinstance(value.value, int):
            raise self.error("expected an integer")
        return value.value

    # --- constants

    def constant(self) -> Imm:
        if self.accept("-"):
            value = self.constant()
            if value.kind in ("f32", "f64"):
                flip = 1 << (31 if value.kind == "f32" else 63)
                return Imm(int(value.value) ^ flip, value.kind)
            return Imm(-value.value, value.kind)
        if self.accept("~"):
            value = self.constant()
            return Imm(~int(value.value), "int")
        if self.accept("("):
            value = self.constant()
            while not self.accept(")"):
                operator = self.next().text
                right = self.constant()
                if operator not in _OPERATORS:
                    raise self.error(f"operator {operator!r} in a constant expression is not supported")
                value = Imm(_OPERATORS[operator](int(value.value), int(right.value)), "int")
            return value
        token = self.next()
        if token.kind != "number":
            raise self.error(f"expected a constant, found {token.text!r}", token)
        text = token.text
        head = text[:2].lower()
        if head == "0f":
            return Imm(int(text[2:], 16), "f32")
        if head == "0d":
            return Imm(int(text[2:], 16), "f64")
        text = text.rstrip("U")
        if head == "0x":
            return Imm(int(text, 16), "int")
        if head == "0b":
            return Imm(int(text, 2), "int")
        if "." in text or "e" in text or "E" in text:
            return Imm(float(text), "float")
        if len(text) > 1 and text[0] == "0":
            return Imm(int(text, 8), "int")
        return Imm(int(text), "int")


def immediate_bits(value: Imm, type_name: str) -> int:
    """The bit pattern of an immediate used at `type_name` (PTX ISA 4.5: constants convert at their use)."""
    bits = WIDTHS[type_name]
    if type_name in ("f64", "f32", "f16", "bf16") and value.kind != "int":
        if value.kind == "f32":
            number = struct.unpack("<f", struct.pack("<I", int(value.value)))[0]
        elif value.kind == "f64":
            number = struct.unpack("<d", struct.pack("<Q", int(value.value)))[0]
        else:
            number = float(value.value)
        if type_name == "f64":
            return struct.unpack("<Q", struct.pack("<d", number))[0]
        if type_name == "f32":
            return int(value.value) if value.kind == "f32" else struct.unpack("<I", struct.pack("<f", number))[0]
        if type_name == "f16":
            return struct.unpack("<H", struct.pack("<e", number))[0]
        return struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    if value.kind == "float":
        return struct.unpack("<Q", struct.pack("<d", float(value.value)))[0] & ((1 << bits) - 1)
    return int(value.value) & ((1 << bits) - 1)


def encode_immediate(value: Imm, type_name: str) -> bytes:
    """An immediate as the little-endian bytes of one element of a variable of that type."""
    return immediate_bits(value, type_name).to_bytes(WIDTHS[type_name] // 8, "little")
