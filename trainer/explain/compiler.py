"""What the compiler does while it is looked at, the values behind each failed guard, and what Inductor generated.

Everything under ``torch._dynamo`` and ``torch._inductor`` is private to torch. ``trainer.telemetry.compiler`` counts
for the record of a run; this module reads more, at a price that no run should pay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._dynamo.utils as dynamo_utils

from trainer.explain import source
from trainer.explain.breaks import read_break
from trainer.explain.explanation import Break, Kernels, Line, Recompile
from trainer.explain.generated import kernels_in
from trainer.explain.guards import read_recompile, value_now
from trainer.telemetry.compiler import METRICS_KEPT

OPTIMIZERS = ("optimizer", "optim")
"""Names of files and folders whose code is part of the optimizer step."""
TALKATIVE = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension")


@dataclass(slots=True, kw_only=True)
class Compiled:
    """One graph."""

    compile_id: str
    backward: bool
    operations: int
    region: str
    phase: str


@dataclass(slots=True, kw_only=True)
class Seen:
    """Everything that was compiled, in order."""

    graphs: list[Compiled] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cudagraph_reasons: list[str] = field(default_factory=list)


class CompilerLook:
    """Reads what torch tells of each compilation between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.phase = "warming"
        """``warming`` (before the first step), ``training`` or ``validating``, set by the owner."""
        self._regions: dict[str, str] = {}
        self._locations: dict[str, Line] = {}
        self._metrics = self._breaks = 0
        self._kernels: dict[str, int] = {}
        self._files: set[Path] = set()

    def start(self) -> None:
        """Begin; what was compiled before is not seen."""
        dynamo_utils.set_compilation_metrics_limit(METRICS_KEPT)
        self._metrics = len(dynamo_utils.get_compilation_metrics())
        self._breaks = len(dynamo_utils.graph_break_reasons)
        self._kernels = _inductor_counts()
        self._files = set(generated_files())
        dynamo_utils.register_hook_for_recompile_user_context(_value_behind_the_guard)

    def stop(self) -> None:
        """Stop; what was seen stays."""
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
            self.seen.breaks.append(read_break(reason.reason, stack, region=region, phase=self.phase))
        self._breaks = len(reasons)

    def kernels(self, *, cuda_graphs: bool) -> Kernels:
        """What Inductor made since ``start``."""
        counts = {name: value - self._kernels[name] for name, value in _inductor_counts().items()}
        files = [file for file in generated_files() if file not in self._files]
        return Kernels(
            generated=sum(kernels_in(file) for file in files),
            nodes_before_fusion=counts["nodes"],
            external_calls=counts["external"],
            cudagraph_skips=counts["skips"] if cuda_graphs else None,
            cudagraph_reasons=list(dict.fromkeys(self.seen.cudagraph_reasons)),
        )

    def _read_metric(self, metric: Any, region: str | None, *, first_call: bool) -> None:
        identifier = str(metric.compile_id)
        frame = identifier.split("/")[0]
        if metric.co_filename:
            self._locations[frame] = source.line(metric.co_filename, metric.co_firstlineno or 0, metric.co_name)
        where = self._locations.get(frame)
        if region is None and metric.is_forward is False:
            region = self._regions.get(identifier)  # a backward is compiled when no region runs
        region = region or _place(where)
        self._regions.setdefault(identifier, region)
        if metric.cudagraph_skip_reason:
            self.seen.cudagraph_reasons.append(" ".join(metric.cudagraph_skip_reason.split()))
        if metric.fail_type:
            line = " ".join(str(metric.fail_reason or "no reason given").split("\n")[0].split())
            at = f" ({metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno})"
            where_text = at if metric.fail_user_frame_filename else f" ({where})" if where else ""
            self.seen.failures.append(f"{metric.fail_type}: {line}{where_text}")
        elif metric.recompile_reason and metric.has_guarded_code:
            self.seen.recompiles.append(
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
        backward = metric.is_forward is False
        if backward or (metric.has_guarded_code and metric.graph_op_count):
            self.seen.graphs.append(
                Compiled(
                    compile_id=identifier,
                    backward=backward,
                    operations=metric.graph_op_count or 0,
                    region=region,
                    phase=self.phase,
                )
            )


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Torch's own words about what is told here anyway; whoever sets TORCH_LOGS wants to read them."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def generated_files() -> list[Path]:
    """Source files that Inductor has generated in this process, one for each graph and direction."""
    codecache = sys.modules.get("torch._inductor.codecache")
    modules = [] if codecache is None else codecache.PyCodeCache.modules
    files = (getattr(module, "__file__", None) for module in modules)
    return [Path(file) for file in dict.fromkeys(files) if file and Path(file).is_file()]


def _place(where: Line | None) -> str:
    """Name for what was compiled outside of all regions."""
    if where is None:
        return "outside regions"
    path = Path(where.file)
    names = (path.stem.split("_")[0], *(parent.name for parent in path.parents))
    return "optimizer" if any(name in OPTIMIZERS for name in names) else "outside regions"


def _inductor_counts() -> dict[str, int]:
    inductor = dynamo_utils.counters["inductor"]
    metrics = sys.modules.get("torch._inductor.metrics")  # not imported before Inductor compiles for the first time
    return {
        "nodes": getattr(metrics, "ir_nodes_pre_fusion", 0),
        "external": inductor["extern_calls"],
        "skips": inductor["cudagraph_skips"],
    }


def _value_behind_the_guard() -> str:
    """Called by torch on its way into a recompile: what the guard that failed sees now, as JSON.

    Torch says what a guard expected, not what it found. Its own frame holds both the reason and the function's
    variables; what is returned comes back as ``recompile_user_contexts`` of the compilation's metrics (256 characters).
    """
    for frame in _frames():
        if frame.f_code.co_name == "_compile" and "recompile_reason" in frame.f_locals:
            reason, seen = frame.f_locals["recompile_reason"], frame.f_locals.get("frame")
            if reason and seen is not None:
                return json.dumps({"explain": value_now(reason, seen.f_locals, seen.f_globals)})
            break
    return json.dumps({"explain": None})


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _value_of(metric: Any) -> str | None:
    for text in metric.recompile_user_contexts or ():
        try:
            said = json.loads(text)
        except ValueError:  # somebody else's, or cut off
            continue
        if isinstance(said, dict) and "explain" in said:
            value: str | None = said["explain"]
            return value
    return None
