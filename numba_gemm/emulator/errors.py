"""Errors that say why a PTX text can't be run, as opposed to hazards that a run found."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of everything that the emulator raises."""


class PtxError(EmulatorError):
    """A fault in a PTX text.

    Attributes: `line`, the 1-based line number, and `text`, that line's text.
    """

    def __init__(self, message: str, line: int, text: str) -> None:
        super().__init__(f"line {line}: {message}\n    {text.strip()}")
        self.line = line
        self.text = text.strip()


class PtxSyntaxError(PtxError):
    """The text isn't PTX as the parser knows it."""


class UnsupportedInstruction(PtxError):  # noqa: N818 (says what, as hazards do)
    """An instruction, or one of its modifiers, that the emulator doesn't implement."""


class LaunchError(EmulatorError, ValueError):
    """A launch whose kernel name, grid, block, parameters or shared size can't be."""
