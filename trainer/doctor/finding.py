"""Finding: one line of a diagnosis, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
COLOURS = {OK: "32", WARNING: "33", ERROR: "31"}
"""ANSI codes; rich may be one of the things that are missing."""
INDENT = " " * 25


@dataclass(kw_only=True)
class Finding:
    """What was found out about one thing."""

    name: str
    status: str
    """``ok``, ``warning`` (it works, but worse than it could) or ``error`` (a run would fail)."""
    said: str
    mend: str | None = None
    """What to do about it; every warning and error has one."""

    def lines(self, *, colour: bool) -> str:
        """One line, and the mend on the next."""
        status = f"{self.status:<8}"
        if colour:
            status = f"\033[{COLOURS[self.status]}m{status}\033[0m"
        text = f"{status} {self.name:<15} {self.said}"
        return text if self.mend is None else f"{text}\n{INDENT}-> {self.mend}"


def ok(name: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(name=name, status=OK, said=said)


def warning(name: str, said: str, mend: str) -> Finding:
    """It works, but worse than it could."""
    return Finding(name=name, status=WARNING, said=said, mend=mend)


def error(name: str, said: str, mend: str) -> Finding:
    """A run would fail."""
    return Finding(name=name, status=ERROR, said=said, mend=mend)
