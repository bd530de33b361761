"""Telling: what is otherwise silent (graph breaks, recompiles, slow steps) in one line, once, while the run goes on.

On stderr, which a live display lets through and a file keeps; the record and TensorBoard have every case.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterable

from trainer.telemetry.events import Event, SlowStep
from trainer.telemetry.slow_steps import sentence
from trainer.telemetry.source import shown

MOST_LINES = 20
MOST_SHAPES = 3
SHORTEST_SECONDS = 0.1
"""A slow step that is shorter is in the record; nobody has to be told at once."""
LONGEST_REASON = 160
LONGEST_CODE = 80
RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
"""What Dynamo calls the rest of a function behind a graph break."""
KINDS = {"graph_break": "graph break", "recompile": "compiled again", "fallback": "runs eager"}


class Teller:
    """Says each thing once. ``aloud`` = on this process at all."""

    def __init__(self, *, aloud: bool = True) -> None:
        self._left = MOST_LINES if aloud else 0
        self._told: set[tuple[str, str]] = set()
        self._shapes = 0
        self.recompiles = True
        """Whether recompiles are told here; False where ``trainer.guards.preflight.Lock`` tells them."""

    def events(self, events: Iterable[Event], *, warm: bool) -> None:
        """Tell breaks and fallbacks whenever they come, recompiles of a training that is ``warm``: before, they are
        how the compiler finds out which dimensions vary, and validation has graphs of its own."""
        for event in events:
            if event.kind not in KINDS:
                continue
            if event.kind == "recompile" and not (self.recompiles and warm and event.phase == "training"):
                continue
            self._say(event.kind, event.location or event.reason, line_about(event))

    def slow(self, slow: SlowStep) -> None:
        """Tell a slow step: once for each cause, for a few shapes, and no recompile that was told already."""
        if slow.seconds < SHORTEST_SECONDS or (slow.cause == "recompile" and slow.detail):
            return
        what = slow.cause
        if slow.cause == "first_of_shape":
            self._shapes += 1
            if self._shapes > MOST_SHAPES:
                return
            what = slow.detail or ""
        self._say("slow", what, sentence(slow))

    def _say(self, kind: str, what: str, line: str) -> None:
        if (kind, what) in self._told or not self._left:
            return
        self._told.add((kind, what))
        self._left -= 1
        if not self._left:
            line += " (more of the like is in the record and on TensorBoard's pages only)"
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            # Looked up at each call: a live display puts itself in the place of stderr while it lasts.
            print(line, file=sys.stderr, flush=True)


def line_about(event: Event) -> str:
    """One line: what, in which step, where, the line of code, why."""
    when = f" in step {event.step}" if event.step is not None and event.phase == "training" else ""
    parts = [f"compile: {KINDS[event.kind]}{when}"]
    if event.location:
        parts.append(f" at {near(event.location)}")
        if event.kind != "recompile" and (code := code_at(event.location)):  # whose line is the function's first
            parts.append(f" `{code}`")
    return "".join(parts) + f": {cut(reason(event.reason), LONGEST_REASON)}"


def reason(text: str) -> str:
    """What says most of the compiler's words: the explanation below a title, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines[1:2] if line.startswith("Explanation: ")]
    return (explained or lines or ["no reason given"])[0]


def near(location: str) -> str:
    """``location`` from the site-packages or working directory on, its function by the name that it has in the code."""
    return shown(RESUMED.sub(r"\1", location))


def code_at(location: str) -> str | None:
    """The line of code that ``file:line function`` names, if it can be read."""
    found = re.match(r"(.+):(\d+)(?: |$)", location)
    line = linecache.getline(found[1], int(found[2])).strip() if found else ""
    return cut(line.split("  #")[0], LONGEST_CODE) or None


def cut(text: str, longest: int) -> str:
    """``text``, shortened."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
