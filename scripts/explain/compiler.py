"""What the compiler does while steps are explained, and the values behind each failed guard.

Everything under ``torch._dynamo`` and ``torch._inductor`` is private to torch. ``trainer.telemetry.compiler`` counts
for the record of a run; this module reads more, at a price that no run should pay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch._dynamo.utils as dynamo_utils

from scripts.explain.explanation import Break, Graphs, Recompile
from trainer.telemetry import source
from trainer.telemetry.compiler import METRICS_KEPT
from trainer.telemetry.recompiles import FIXES, TENSOR_KINDS, change_of, guard_of, value_now
from trainer.telemetry.source import Line

OPTIMIZERS = ("optimizer", "optim")
"""Names of files and folders whose code is part of the optimizer step."""
LOGGERS = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension")
PAGE = re.compile(r"https?://\S+/gb/(?P<identifier>gb\d{4})\.html")
"""Torch's page about a kind of graph break."""
WITHOUT_WORDS = {
    "generic_jump": (
        "Data-dependent branching",
        "Which branch the code takes depends on the value of a tensor, known only when it runs.",
        "torch.where(condition, a, b) where both sides are cheap, torch.cond for one of two functions, or decide "
        "before the compiled module and hand in a Python value",
    ),
    "step_unsupported": (
        "Call of code that breaks",
        "A function that is called here holds a graph break of its own, so that the graph around the call ends too.",
        "goes away with the break in the function that is called here",
    ),
}
"""Kind, explanation and fix of the breaks for which torch has one word and no explanation."""
NO_HINT = "torch has no hint; torch.compiler.disable on the smallest function around the line keeps the rest in graphs"
ABOUT_TENSORS = {*TENSOR_KINDS.values(), "dtype", "rank", "device", "gradient mode"}
MODES = ("gradient mode", "training flag", "requires gradient", "dispatch")
SIZES = ("shape", "strides", "rank", "size relation")
DIFFER = (*SIZES, "requires gradient")
"""Kinds by which copies of one class differ that share their code: widths, and the first one's input."""
EXPECTED = {"validating": MODES, "warming": (*MODES, *SIZES)}
"""Kinds of recompiles that every run has: graphs for validation, and the shapes that a strategy compiles beforehand."""


class CompilerRecorder:
    """Reads torch's metrics of each compilation between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.phase = "warming"
        """``warming`` (before the first step), ``training`` or ``validating``, set by the owner."""
        self.graphs: dict[str, Graphs] = {}
        """By kind of region."""
        self.breaks: list[Break] = []
        self.recompiles: list[Recompile] = []
        self.failures: list[str] = []
        self.left_out_of_cuda_graphs: list[str] = []
        """Why, for each graph."""
        self._regions: dict[str, str] = {}
        self._locations: dict[str, Line] = {}
        self._metrics = self._breaks = 0

    def start(self) -> None:
        dynamo_utils.set_compilation_metrics_limit(METRICS_KEPT)
        self._metrics = len(dynamo_utils.get_compilation_metrics())
        self._breaks = len(dynamo_utils.graph_break_reasons)
        dynamo_utils.register_hook_for_recompile_user_context(_value_behind_the_guard)

    def stop(self) -> None:
        hooks = dynamo_utils.get_hook_for_recompile_user_context() or []
        if _value_behind_the_guard in hooks:
            hooks.remove(_value_behind_the_guard)

    def read(self, region: str | None = None, *, first_call: bool = False) -> None:
        """Take in what is new, compiled on behalf of ``region``, of which one copy was called for the first time."""
        metrics = dynamo_utils.get_compilation_metrics()
        for metric in metrics[self._metrics :]:
            self._read_metric(metric, region, first_call=first_call)
        self._metrics = len(metrics)
        reasons = dynamo_utils.graph_break_reasons
        self._breaks = min(self._breaks, len(reasons))  # torch._dynamo.reset() empties the list
        for reason in reasons[self._breaks :]:
            stack = [source.line(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]
            self.breaks.append(read_break(reason.reason, stack, region=region, phase=self.phase))
        self._breaks = len(reasons)

    def _read_metric(self, metric: Any, region: str | None, *, first_call: bool) -> None:
        identifier = str(metric.compile_id)
        frame = identifier.split("/")[0]
        if metric.co_filename:
            self._locations[frame] = source.line(metric.co_filename, metric.co_firstlineno or 0, metric.co_name)
        where = self._locations.get(frame)
        backward = metric.is_forward is False
        if region is None and backward:
            region = self._regions.get(identifier)  # a backward is compiled when no region runs
        region = region or _place(where)
        self._regions.setdefault(identifier, region)
        if metric.cudagraph_skip_reason:
            self.left_out_of_cuda_graphs.append(" ".join(metric.cudagraph_skip_reason.split()))
        if metric.fail_type:
            line = " ".join(str(metric.fail_reason or "no reason given").split("\n")[0].split())
            at = f" ({metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno})"
            where_text = at if metric.fail_user_frame_filename else f" ({where})" if where else ""
            self.failures.append(f"{metric.fail_type}: {line}{where_text}")
        elif metric.recompile_reason and metric.has_guarded_code:
            self.recompiles.append(
                read_recompile(
                    metric.recompile_reason,
                    after=_value_of(metric),
                    function=where,
                    region=region,
                    phase=self.phase,
                    first_call=first_call,
                    resumed=bool(source.RESUMED.match(metric.co_name or "")),
                )
            )
        if backward or (metric.has_guarded_code and metric.graph_op_count):
            graphs = self.graphs_of(region)
            if self.phase == "validating":
                graphs.validation += 1
                return
            graphs.operations += metric.graph_op_count or 0
            graphs.backward += backward
            graphs.forward += not backward

    def graphs_of(self, region: str) -> Graphs:
        """The graphs of one kind of region, to be added to."""
        return self.graphs.setdefault(region, Graphs(region=region))


def read_break(text: str, stack: Sequence[Line], *, region: str | None, phase: str) -> Break:
    """The break that torch describes as ``text`` at the end of ``stack``, outermost line first."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    head = lines[0] if lines else "no reason given"
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    explained = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    page = PAGE.search(text)
    kind, reason, fix = WITHOUT_WORDS.get(head.split()[0], (head, head, NO_HINT))
    fix = " ".join(hint for hint in hints if "report an issue" not in hint.lower()) or fix
    where, called_from, inside = source.of_interest(stack)
    return Break(
        kind=kind,
        identifier=page["identifier"].upper() if page else None,
        reason=explained[0] if explained else reason,
        fix=fix + (f" {page[0]}" if page else ""),
        where=where,
        called_from=called_from,
        inside=inside,
        region=region,
        phase=phase,
    )


def read_recompile(
    text: str,
    *,
    after: str | None,
    function: Line | None,
    region: str | None,
    phase: str,
    first_call: bool = False,
    resumed: bool = False,
) -> Recompile:
    """The recompile that torch explains as ``text``.

    ``after`` is the value that the guard's expression has now (see ``value_now``), ``function`` the code that was
    compiled again, for a guard that names no line; ``resumed`` says that it is the rest of one behind a break,
    ``first_call`` that a region was called for the first time, which shares its code with others of its class.
    """
    where = source.of_interest(source.lines_of_stack(text))[0] or function
    if where is not None and source.is_machinery(where.file):
        where = None  # a module of torch's own: the region says which
    kind, what, change = change_of(text, after)
    return Recompile(
        kind=kind,
        what=what,
        guard=guard_of(text),
        changes=[change] if change else [],
        fix=FIXES[kind],
        where=where,
        region=region,
        phase=phase,
        expected=kind in EXPECTED.get(phase, ()) or (first_call and kind in DIFFER),
        resumed=resumed,
    )


def merged_breaks(breaks: Sequence[Break]) -> list[Break]:
    """One break for each line and kind, counted: a break in an inlined function is met again in the function itself."""
    kept: dict[tuple[object, ...], Break] = {}
    for each in breaks:
        where = each.where
        one = kept.setdefault((where.file, where.number, each.kind) if where else (each.region, each.kind), each)
        if one is not each:
            one.count += each.count
            one.called_from = one.called_from or each.called_from
    return list(kept.values())


def merged_recompiles(recompiles: Sequence[Recompile]) -> list[Recompile]:
    """One recompile for each line and thing that changed, counted, with each of its changes."""
    kept: dict[tuple[object, ...], Recompile] = {}
    causes: dict[tuple[object, ...], Recompile] = {}
    for each in recompiles:
        # What changes at the beginning of a function is met again in each of its pieces behind a break.
        cause = (each.kind, each.region, each.expected, *each.changes)
        if each.resumed and each.kind in ABOUT_TENSORS and cause in causes:
            causes[cause].count += each.count
            continue
        where = (each.where.file, each.where.number) if each.where else None
        one = kept.setdefault((where, each.kind, each.what, each.region, each.expected), each)
        if one is not each:
            one.count += each.count
            one.changes += [change for change in each.changes if change not in one.changes]
        causes.setdefault(cause, one)
    return list(kept.values())


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Silence torch's own reports of what is explained anyway; whoever sets TORCH_LOGS wants to read them."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _place(where: Line | None) -> str:
    """Name for what was compiled outside of all regions."""
    path = Path(where.file if where is not None else "")
    names = (path.stem.split("_")[0], *(parent.name for parent in path.parents))
    return "optimizer" if any(name in OPTIMIZERS for name in names) else "outside regions"


def _value_behind_the_guard() -> str:
    """Called by torch on its way into a recompile: what the guard that failed sees now, as JSON.

    Torch says what a guard expected, not what it found. Its own frame holds both the reason and the function's
    variables; what is returned comes back as ``recompile_user_contexts`` of the compilation's metrics (256 characters).
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and "recompile_reason" in frame.f_locals:
            reason, seen = frame.f_locals["recompile_reason"], frame.f_locals.get("frame")
            if reason and seen is not None:
                return json.dumps({"explain": value_now(reason, seen.f_locals, seen.f_globals)})
            break
        frame = frame.f_back  # type: ignore[assignment]
    return json.dumps({"explain": None})


def _value_of(metric: Any) -> str | None:
    for text in metric.recompile_user_contexts or ():
        try:
            context = json.loads(text)
        except ValueError:  # somebody else's, or cut off
            continue
        if isinstance(context, dict) and "explain" in context:
            value: str | None = context["explain"]
            return value
    return None
