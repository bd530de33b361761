"""Doctor: checks a machine before anything is trained on it. Needs nothing installed; torch is asked in processes.

A ``Finding`` is one line of its diagnosis; ``call`` runs what may hang or crash.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
COLOURS = {OK: "32", WARNING: "33", ERROR: "31"}
"""ANSI codes; rich may be one of the things that are missing."""
INDENT = " " * 25


@dataclass(kw_only=True)
class Finding:
    name: str
    status: str
    """``ok``, ``warning`` (it works, but worse than it could) or ``error`` (a run would fail)."""
    message: str
    fix: str | None = None
    """What to do about it; every warning and error has one."""

    def lines(self, *, colour: bool) -> str:
        """One line, and the fix on the next."""
        status = f"{self.status:<8}"
        if colour:
            status = f"\033[{COLOURS[self.status]}m{status}\033[0m"
        text = f"{status} {self.name:<15} {self.message}"
        return text if self.fix is None else f"{text}\n{INDENT}-> {self.fix}"


def ok(name: str, message: str) -> Finding:
    return Finding(name=name, status=OK, message=message)


def warning(name: str, message: str, fix: str) -> Finding:
    return Finding(name=name, status=WARNING, message=message, fix=fix)


def error(name: str, message: str, fix: str) -> Finding:
    return Finding(name=name, status=ERROR, message=message, fix=fix)


@dataclass(kw_only=True)
class Outcome:
    exit_code: int | None
    """None when it took too long; negative when a signal killed it."""
    output: str
    errors: str

    @property
    def failed(self) -> str | None:
        """Why it did not end well, in a line, or None when it did."""
        if self.exit_code == 0:
            return None
        if self.exit_code is None:
            return "it took too long and was stopped"
        if self.exit_code < 0:
            return f"it was killed by {signal.Signals(-self.exit_code).name}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with exit code {self.exit_code}"


def call(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run ``command`` to its end or for ``seconds``; what it has started ends with it, at a Ctrl-C too."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as failure:
        return Outcome(exit_code=127, output="", errors=f"{command[0]}: {failure.strerror}")
    try:
        output, errors = child.communicate(timeout=seconds)
        return Outcome(exit_code=child.returncode, output=output, errors=errors)
    except subprocess.TimeoutExpired:
        _end(child)
        output, errors = child.communicate()
        return Outcome(exit_code=None, output=output, errors=errors)
    except BaseException:
        _end(child)
        child.wait()
        raise


def _end(child: subprocess.Popen[str]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
