"""What ``crucible.compare`` says while it works: lines on a terminal, one line that changes in a notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console

from trainer.report import tables
from trainer.report.comparison import WorkloadComparison


class ProgressOutput(Protocol):
    """Where the words of a comparison go."""

    def note(self, text: str) -> None:
        """Something to know that stays."""
        ...

    def done(self, text: str) -> None:
        """What has just ended, and how."""
        ...

    def doing(self, text: str) -> contextlib.AbstractContextManager[Any]:
        """What goes on inside."""
        ...

    def answer(self, found: WorkloadComparison) -> None:
        """The comparison is over."""
        ...


def progress_output(*, quiet: bool) -> ProgressOutput:
    """For a notebook where a kernel runs this code, unless nothing is to be said."""
    shell = kernel_shell()
    return TerminalOutput(quiet=quiet) if quiet or shell is None else NotebookOutput()


def kernel_shell() -> Any:
    """IPython's shell where a kernel runs it (Jupyter, VS Code, Colab); None in a script and in a terminal."""
    ipython = sys.modules.get("IPython")  # imported long ago, where this is one
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


class TerminalOutput:
    """Lines, a spinner between them, at the end the table."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    done = note

    def doing(self, text: str) -> contextlib.AbstractContextManager[Any]:
        return self._console.status(text)

    def answer(self, found: WorkloadComparison) -> None:
        tables.show([found], self._console)


class NotebookOutput:
    """One output of the cell, whose last line changes; notes stay above it. The table is what the answer shows itself.

    Rich would add an output for each line, and a warning for each spinner where ipywidgets is missing.
    """

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._done = ""
        self._handle: Any = None

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._show("")

    def done(self, text: str) -> None:
        self._done = text
        self._show(text)

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[None]:
        self._show(f"{text} ... ({self._done})" if self._done else f"{text} ...")
        yield

    def answer(self, found: WorkloadComparison) -> None:
        self._show(f"verdict: {found.verdict}")

    def _show(self, line: str) -> None:
        bundle = {"text/plain": "\n".join([*self._notes, *([line] if line else [])])}
        if self._handle is None:
            display = sys.modules["IPython"].display.display
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
