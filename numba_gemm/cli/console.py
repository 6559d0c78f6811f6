"""What the subcommands print with: tables on stdout, progress on stderr, and only where someone watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: Width where stdout is no terminal: tables are as wide as their content, and nothing is cut off.
UNLIMITED_WIDTH = 10_000


def make_console() -> Console:
    """The console for results."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(file=sys.stdout, width=UNLIMITED_WIDTH, color_system=None, highlight=False)


def print_json(value: Any) -> None:
    """A value as indented JSON on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


class Bar:
    """One progress bar; its methods do nothing where there is no terminal."""

    def __init__(self, progress: Progress | None, total: int, text: str) -> None:
        self._progress = progress
        self._task = progress.add_task(text, total=total) if progress is not None else None

    def step(self, text: str) -> None:
        """Say what is being done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=escape(text))

    def advance(self) -> None:
        """One piece of work is done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)


@contextmanager
def progress_bar(total: int, text: str) -> Iterator[Bar]:
    """A progress bar on stderr that is gone afterwards, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Bar(None, total, text)
        return
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, total, text)
