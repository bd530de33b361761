"""Processes in which the doctor does what may hang or crash: importing torch, asking a driver, compiling."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Outcome:
    """How a process ended."""

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
