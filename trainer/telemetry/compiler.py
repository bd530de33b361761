"""What the compiler did during a run, read from torch's own counters, metrics and callbacks (never from logs).

What is otherwise silent (graph breaks, recompiles) is reported in one line, once, while the run lasts.

Everything under ``torch._dynamo.utils`` and ``torch._dynamo.callback`` is private to torch; this is the only module of
the trainer that reads it, and the tests run it on the oldest and the newest torch that the project supports.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch._dynamo.callback as dynamo_callback
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo_utils
from torch import nn

from strategies.compile_errors import is_ours
from trainer.telemetry.record import CompilerFigures, Event
from trainer.telemetry.source_lines import Line, display_path, innermost, is_machinery, line_at, lines_of_stack
from trainer.wording import shorten

MAX_LINES = 20
MAX_REASON = 160
MAX_CODE = 80
KINDS = {"graph_break": "graph break", "recompile": "compiled again", "fallback": "not compiled"}
MAX_KEPT = 10_000
"""Characters of a reason in the record; what a C++ compiler says of one kernel may have 100,000."""
METRICS_KEPT = 100_000
"""Compilation metrics that torch keeps; its own default of 64 drops the first ones of a long run."""

_EVER: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()
"""Classes of regions under whose calls this process compiled code. What a module calls, its class shares with later
trainings, and no compiler says that it runs: this is asked for that alone."""
_MODULE_CALL = nn.Module._wrapped_call_impl.__code__


@dataclass(frozen=True, slots=True)
class Compiling:
    """The compilation under way, among those of its phase (see ``Event``) and program."""

    number: int
    """Which one it is, from 1."""
    expected: int | None
    """How many there will be, as far as that is known beforehand."""
    seconds: float
    """How long it has taken so far."""
    seconds_before: float
    """What those before it took."""

    @property
    def seconds_so_far(self) -> float:
        return self.seconds_before + self.seconds

    @property
    def seconds_left(self) -> float | None:
        """By the mean of those before it, or of all where this one takes longer; None where there is no telling."""
        if self.expected is None or not 1 < self.number <= self.expected:
            return None
        mean = self.seconds_before / (self.number - 1)
        pace = max(mean, self.seconds_so_far / self.number)
        return (self.expected - self.number) * pace + max(mean - self.seconds, 0.0)


class CompilerMonitor:
    """Counts what the compiler does between ``start`` and ``stop`` and tags each event with the step it fell in."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = "training"
        """Both set by the owner, and what events are tagged with: the optimizer step under way, and as in ``Event``."""
        self.compilations = 0
        """Outermost compilations begun so far; the owner compares it to tell whether a step compiled."""
        self.compile_seconds = 0.0
        """Wall seconds of the compilations that ended."""
        self.events: list[Event] = []
        self.unreported: list[Event] = []
        """Those of them that ``report`` has not seen; others report what they add to ``events``."""
        self._reported: set[tuple[str, str]] = set()
        self.lines_left = 0
        """Lines in which events may be reported while the run lasts."""
        self.reports_recompiles = True
        """Whether recompiles are reported here; False where a strategy's own lock reports them."""
        self._began: float | None = None
        self._expected: int | None = None
        self._begun: Counter[str] = Counter()
        self._took: dict[str, float] = {}
        self._seen_metrics = 0
        self._seen_breaks = 0
        self._counters: dict[str, Counter[str]] = {}
        self._under: dict[str, set[type[nn.Module]]] = {}
        self._compiled_under: set[type[nn.Module]] = set()
        """Classes of regions under whose calls code was compiled since ``start``, their own or what they call."""
        self._locations: dict[str, str] = {}
        self.of_the_user: dict[str, None] = {}
        """Where functions begin that were compiled since ``start`` under no region's call: by the user's own
        ``torch.compile``."""
        self.beyond_limit: dict[type[nn.Module], str] = {}
        """Classes of regions of which some code was compiled as often as torch may, with the guard that failed last."""

    def start(self) -> None:
        """Begin to watch; figures count from here."""
        dynamo_utils.set_compilation_metrics_limit(METRICS_KEPT)
        self._seen_metrics = len(dynamo_utils.get_compilation_metrics())
        self._seen_breaks = len(dynamo_utils.graph_break_reasons)
        self._counters = {group: Counter(dynamo_utils.counters[group]) for group in ("stats", "inductor")}
        dynamo_callback.on_compile_start(self._on_start)
        dynamo_callback.on_compile_end(self._on_end)

    def stop(self) -> None:
        self.collect()
        handler = dynamo_callback.callback_handler
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() clears them behind our back
            handler.start_callbacks.remove(self._on_start)
            handler.end_callbacks.remove(self._on_end)

    @property
    def compiling_seconds(self) -> float | None:
        """Seconds since the compilation under way began; None when nothing is being compiled. Any thread may ask."""
        began = self._began
        return None if began is None else time.perf_counter() - began

    def expect(self, graphs: int) -> None:
        """A program begins of which training makes so many ``graphs``, and validation about as many of its own."""
        self._expected = graphs or None
        self._begun, self._took = Counter(), {}

    @property
    def compiling(self) -> Compiling | None:
        """The compilation under way; None when nothing is being compiled. Any thread may ask."""
        seconds, phase = self.compiling_seconds, self.phase
        if seconds is None:
            return None
        return Compiling(max(self._begun[phase], 1), self._expected, seconds, self._took.get(phase, 0.0))

    def collect(self) -> None:
        """Read what is new since the last call and tag it with the current step."""
        new: list[Event] = []
        metrics = dynamo_utils.get_compilation_metrics()
        for metric in metrics[self._seen_metrics :]:
            new.extend(self._events_of(metric))
            if metric.has_guarded_code:
                frame = _frame(metric.compile_id)
                self._compiled_under |= self._under.get(frame, set())
                file = metric.co_filename
                if file and not (self._under.get(frame) or is_ours(file) or is_machinery(file)):
                    self.of_the_user[self._locations[frame]] = None
        _EVER.update(self._compiled_under)
        self._seen_metrics = len(metrics)
        breaks = dynamo_utils.graph_break_reasons
        self._seen_breaks = min(self._seen_breaks, len(breaks))  # torch._dynamo.reset() empties the list
        for reason in breaks[self._seen_breaks :]:
            stack = [Line(file=one.filename, number=one.lineno or 0, function=one.name) for one in reason.user_stack]
            new.append(self._event("graph_break", reason.reason, innermost(stack)))
        self._seen_breaks = len(breaks)
        self.events.extend(new)
        self.unreported.extend(new)

    def report(self, *, warm: bool) -> None:
        """Report each thing once, in a line on stderr, which a live display lets through and a file keeps; the record
        and TensorBoard have every case.

        Breaks and fallbacks are reported whenever they come, recompiles of a training that is ``warm``: before, they
        are how the compiler finds out which dimensions vary, and validation has graphs of its own.
        """
        self.collect()
        new, self.unreported = self.unreported, []
        for event in new:
            what = (event.kind, event.location or event.reason)
            if event.kind not in KINDS or what in self._reported or not self.lines_left:
                continue
            if event.kind == "recompile" and not (warm and self.reports_recompiles and event.phase == "training"):
                continue
            self._reported.add(what)
            self.lines_left -= 1
            more = "" if self.lines_left else " (more of the like is in the record and on TensorBoard's pages only)"
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                # Looked up at each call: a live display puts itself in the place of stderr while it lasts. One write.
                print(f"{line_about(event)}{more}\n", end="", file=sys.stderr, flush=True)

    def figures(self) -> CompilerFigures:
        """Everything since ``start``; what was never asked of torch is None."""
        stats, inductor = (dynamo_utils.counters[group] - before for group, before in self._counters.items())
        hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
        anew = misses + inductor["fxgraph_cache_bypass"]
        kinds = Counter(event.kind for event in self.events)
        return CompilerFigures(
            compile_seconds=self.compile_seconds if self.compilations else None,
            graphs=stats["unique_graphs"],
            graph_breaks=kinds["graph_break"],
            recompiles=kinds["recompile"],
            cudagraph_skips=inductor["cudagraph_skips"],
            cache_hits=hits if hits + misses else None,
            cache_misses=misses if hits + misses else None,
            cache="mixed" if hits and anew else "warm" if hits else "cold" if anew else None,
        )

    def compiled(self, module: nn.Module, *, held: bool = False, splits: bool = False) -> bool:
        """Whether something compiled runs when ``module``, or another of its class, is called: it was compiled since
        ``start``, or is ``held`` of earlier trainings. ``splits``: the compiler may have left its own frame out and
        compiled what that calls, for whichever training."""
        if dynamo_config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return False  # whatever an earlier fit of this process compiled is not used
        self.collect()
        return held or type(module) in (_EVER if splits else self._compiled_under)

    def _events_of(self, metric: Any) -> list[Event]:
        frame = _frame(metric.compile_id)
        if metric.co_filename:
            name = re.sub(r"_\d+$", "", metric.co_name or "")  # a region's, see ``strategies.region.Kind.code``
            self._locations[frame] = f"{metric.co_filename}:{metric.co_firstlineno} {name}"
        # A frame that ran out of recompiles is named by its number alone.
        where = self._locations.get(frame)
        if metric.fail_type:
            if metric.fail_user_frame_filename:
                where = f"{metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno}"
            reason = f"{metric.fail_type}: {metric.fail_reason or 'no reason given'}".strip()
            if metric.recompile_reason:
                reason += f"; the guard that failed last: {metric.recompile_reason.strip()}"
            if metric.fail_type == "FailOnRecompileLimitHit" or "recompile limit exceeded" in reason:
                self.beyond_limit |= dict.fromkeys(self._under.get(frame, ()), metric.recompile_reason or "")
            return [self._event("fallback", reason, where)]
        if metric.recompile_reason and metric.has_guarded_code:
            reads = innermost(lines_of_stack(metric.recompile_reason))
            return [self._event("recompile", metric.recompile_reason, reads or where)]
        return []

    def _event(self, kind: str, reason: str, location: str | None) -> Event:
        return Event(kind=kind, reason=reason.strip()[:MAX_KEPT], location=location, step=self.step, phase=self.phase)

    def _on_start(self, arguments: Any) -> None:
        self.compilations += 1
        self._begun[self.phase] += 1
        calls = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code is _MODULE_CALL)
        modules = [frame.f_locals["self"] for frame in calls]
        regions = {type(module) for module in modules if module._compiled_call_impl is not None}
        self._under.setdefault(_frame(arguments.compile_id), set()).update(regions)
        self._began = time.perf_counter()

    def _on_end(self, _: Any) -> None:
        seconds = self.compiling_seconds or 0.0
        self.compile_seconds += seconds
        self._took[self.phase] = self._took.get(self.phase, 0.0) + seconds
        self._began = None


def _frame(compile_id: Any) -> str:
    """The number of the piece of code: what comes first in ``3/0``."""
    return str(compile_id).split("/")[0]


def line_about(event: Event) -> str:
    when = f" in step {event.step}" if event.step is not None and event.phase == "training" else ""
    where = f" at {event.location}" if event.location else ""
    if (place := line_at(event.location)) is not None:
        where = f" at {display_path(place.file)}:{place.number} {place.function or ''}".rstrip()
        if place.code and event.kind != "recompile":  # whose line is the function's first
            where += f" `{shorten(place.code.split('  #')[0], MAX_CODE)}`"
    # The most telling of the compiler's words: the explanation below a title, else the first line.
    lines = [line.strip() for line in event.reason.splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines[1:2] if line.startswith("Explanation: ")]
    reason = (explained or lines or ["no reason given"])[0]
    return f"compile: {KINDS[event.kind]}{when}{where}: {shorten(reason, MAX_REASON)}"
