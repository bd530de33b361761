"""What a person sees while a run goes on: a live line that also says when it is compiling, and a summary at the end.

The view polls the telemetry from a thread of its own twice a second, so that the training loop never draws anything.
"""

from __future__ import annotations

import functools
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trainer.checkpoints import DIRECTORY, LAST
from trainer.report.run_verdict import command, verdict_lines
from trainer.telemetry.files import headlines, number
from trainer.telemetry.profile import profile_line
from trainer.telemetry.record import FILE_NAME, RankFigures, RunRecord, communication_of
from trainer.telemetry.telemetry import Telemetry

ERROR_LOG = "error.log"
"""Where a run that failed leaves its traceback."""
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
"""Between two lines where nothing live can be drawn (a file, a CI log)."""
SHOWN_BY_OTHERS = frozenset({"starting", "training", "validating", "saving", "auditing", "profiling", "finishing"})
"""Phases that the progress bar of a script's own framework shows."""


class ProgressView:
    """Live bar on a terminal, a line every ten seconds elsewhere, nothing for ``none``.

    Args:
        console: Where to draw.
        style: ``auto`` (live on a terminal, else plain), ``live``, ``plain`` or ``none``.
        total: Optimizer steps, or timed batches, at which the run ends. None: another progress bar shows the training,
            and lines are printed for the preflight and compiling alone.
        telemetry: Gives the run's telemetry at the moment of asking.
        print_line: Prints a line, without harm to that bar; ``console`` does when None.
    """

    def __init__(
        self,
        console: Console,
        *,
        style: str,
        total: int | None,
        telemetry: Callable[[], Telemetry],
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        self._console = console
        self._style = ("live" if console.is_terminal else "plain") if style == "auto" else style
        self._total = total
        self._telemetry = telemetry
        self._print_line = print_line or functools.partial(console.print, highlight=False, soft_wrap=True)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._style != "none":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        if self._style == "plain":
            self._plain()
            return
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._console, auto_refresh=False, transient=True) as progress:
            bar = progress.add_task("starting", total=self._total, figures="")
            while True:
                over = self._over.wait(REFRESH_SECONDS)
                telemetry = self._telemetry()
                progress.update(
                    bar,
                    completed=telemetry.steps_done,
                    description=activity(telemetry),
                    figures=" · ".join(figures_line(telemetry)),
                )
                progress.refresh()
                if over:
                    return

    def _plain(self) -> None:
        said_at, said = time.monotonic() - PLAIN_SECONDS, ""
        while not self._over.wait(REFRESH_SECONDS):
            telemetry = self._telemetry()
            phase, now = telemetry.phase.partition(" ")[0], time.monotonic()
            if self._total is None and phase in SHOWN_BY_OTHERS and telemetry.compiler.compiling_seconds is None:
                continue
            # What is over within two seconds (an audit, a small validation) is worth no line.
            if now - said_at >= (PLAIN_SECONDS if phase == said else 4 * REFRESH_SECONDS):
                said_at, said = now, phase
                line = f"compile: {activity(telemetry)}"
                if self._total is not None:
                    done = f"{telemetry.units[0]} {telemetry.steps_done}/{self._total}"
                    line = f"{activity(telemetry)}: {done} {' · '.join(figures_line(telemetry))}".rstrip()
                self._print_line(line)


def activity(telemetry: Telemetry) -> str:
    """What the run is doing: a phase of the loop, or compiling, and for how long so far."""
    compiler, phase = telemetry.compiler, telemetry.phase
    if compiler.compiling_seconds is None:
        return "building data and model" if phase == "starting" else phase
    whose = "validation's graph" if phase == "validating" else "graph"
    so_far = compiler.compile_seconds + compiler.compiling_seconds
    return f"compiling {whose} {compiler.compilations}" + (f" ({so_far:.0f} s so far)" if so_far >= 1 else "")


def figures_line(telemetry: Telemetry) -> list[str]:
    """Speed and loss, as far as they are known."""
    parts = []
    if telemetry.steps_per_second is not None:
        parts.append(f"{telemetry.steps_per_second:.2f} {telemetry.units[1]}/s")
    if telemetry.last_loss is not None:
        parts.append(f"loss {telemetry.last_loss:.3f}")
    return parts


def print_summary(console: Console, record: RunRecord) -> None:
    """Print the summary as a table."""
    title = f"{record.task} · {record.label} · {record.status}"
    table = Table(title=title, show_header=False, title_justify="left", min_width=len(title))  # or it would be wrapped
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary(record).items():
        table.add_row(name, Text(value))  # a reason may hold what rich would take for markup
    console.print(table)


def print_end(console: Console, record: RunRecord, run_dir: Path | None) -> None:
    """Summary, verdict, reason, and the lines that open TensorBoard or go on in ``run_dir``, unless that is None."""

    def show(line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    print_summary(console, record)
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for line in verdict_lines(record):
        show(line)
    if record.status == "failed":
        show(f"failed: {record.reason}", "red")
    if run_dir is None:
        return
    if record.status == "failed" and (run_dir / ERROR_LOG).is_file():
        show(f"traceback: {shown(run_dir / ERROR_LOG)}")
    if record.status != "finished" and (run_dir / DIRECTORY / LAST).is_file():
        show(f"continue with: {command(record, f'resume={shown(run_dir)}')}")
    if record.script is not None:
        show(f"record: {shown(run_dir / FILE_NAME)}")
    if record.script is None or any(run_dir.glob("events.out.tfevents*")):
        show(f"tensorboard --logdir {shlex.quote(str(shown(run_dir)))}")


def announce(console: Console, record: RunRecord, run_dir: Path) -> None:
    """Print the heading of a run: what runs, how, on what and where it leaves its files."""
    console.print(
        f"[bold]{record.task}[/] · {record.label} · {record.device} · {record.precision} · {shown(run_dir)}",
        highlight=False,
        soft_wrap=True,
    )


def shown(path: Path) -> Path:
    """``path`` as a person would type it: relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


OWN_ROWS = ("parity", "profile", "slowdown")
"""Parts of the report that are shown in a row of their own wording, or in the verdict."""
MUCH_WAITING = 0.05
"""Share of the time spent waiting for data above which the summary says what to do."""

MIN_TERAFLOPS = 0.001
MUCH_SKEW = 0.03
"""Share of a step that a rank waits for the slowest one above which the summary names that."""


def summary(record: RunRecord) -> dict[str, str]:
    """The summary's rows by name; a row of which no figure exists is left out."""
    trains, mode = record.run != "inference", record.config.get("run", {})
    step, steps = ("step", "steps") if trains else ("batch", "batches")
    source = {"device": "batches kept on the device", "loader": "batches of the loader"}.get(mode.get("source"), "")
    spread = "" if record.repeat_spread is None else f", {record.repeat_spread:.1%} between fastest and slowest"
    chosen = f" (chose {record.report['auto']['chosen']})" if "auto" in record.report else ""
    took = {kind: getattr(record, f"steady_step_seconds_{kind}") for kind in ("mean", "median", "p95")}
    rows = {
        "strategies": record.label + chosen,
        "device": _device(record),
        "inference": f"{mode.get('step')}_step under {mode.get('grad_mode')}, {source}" if source else "",
        "optimizer steps": _number(record.steps, "", decimals=0) if trains else "",
        **_compiled(record),
        f"first {step}": _milliseconds(record.first_step_seconds),
        "warm-up": _within(f"{{}} in {{}} {steps}", _number(record.warmup_seconds, " s"), record.warmup_steps)
        + _within(", preflight {} of it", _number(record.preflight_seconds, " s")),
        # The mean is what rates and ratios are made of.
        f"steady {step}": ", ".join(f"{kind} {_milliseconds(each)}" for kind, each in took.items() if each is not None),
        steps: _within("{} ({} steady ones)", _number(record.steady_steps_per_second, " /s"), record.steady_steps),
        "timed runs": _within("{}", record.repeats) + spread,
        "samples": _number(record.samples_per_second, " /s", decimals=1)
        + _within(" of all {} processes", record.world_size if record.world_size > 1 and trains else None),
        "communication": communication_line(record.ranks),
        **_measured(record),
        "final loss": _number(record.final_loss, "", decimals=4),
        **{name: _number(value, "", decimals=4) for name, value in sorted(record.final_metrics.items())},
        "skipped items": ", ".join(f"{count} {reason}" for reason, count in record.skipped_items.items() if count),
    }
    return {name: value for name, value in rows.items() if value}


def _device(record: RunRecord) -> str:
    if not record.device:
        return ""
    products = {"tf32": " (matrix products in TF32)", "fp32": " (no TF32 in matrix products)"}
    stated = products.get(record.matrix_precision or "", "") if record.device_type == "cuda" else ""
    return f"{record.device} · {record.precision}{stated}"


def _compiled(record: RunRecord) -> dict[str, str]:
    eager = not record.strategies
    return {
        "compile": "nothing to compile"
        if eager
        else _number(record.compile_seconds, " s", decimals=1) + _cache(record),
        "regions compiled": "" if eager else _within("{} of {}", record.regions_compiled, record.regions),
        "graphs / breaks / recompiles": ""
        if eager
        else _within("{} / {} / {}", record.graphs, record.graph_breaks, _recompiles(record)),
        "ran eager instead": _fallbacks(record),
        "parity with eager": _parity(record),
        "audits": _audits(record),
        **headlines({name: facts for name, facts in record.report.items() if name not in OWN_ROWS}),
        "CUDA graphs skipped": str(record.cudagraph_skips) if record.cudagraph_skips else "",
    }


def _measured(record: RunRecord) -> dict[str, str]:
    return {
        "useful tokens": _number(record.useful_tokens_per_second, " /s", decimals=0)
        + ("" if record.padded_share is None else f" (padding {record.padded_share:.1%})"),
        "TFLOP/s": _teraflops(record),
        "waiting for data": _waiting(record),
        "peak memory": ", ".join(
            f"{where} {number(gib, 2)} GiB"
            for where, gib in (("device", record.peak_device_memory_gib), ("process", record.peak_process_memory_gib))
            if gib is not None
        ),
        "energy": _number(record.joules_per_sample, " J/sample", decimals=3),
        "machine": _machine(record),
        "profile": profile_line(record.report["profile"]) if "profile" in record.report else "",
    }


def _teraflops(record: RunRecord) -> str:
    """Nothing for a toy, whose rate has no digits in this unit."""
    rate = record.teraflops_per_second
    return "" if rate is None or rate < MIN_TERAFLOPS else number(rate) + _utilization(record)


def _utilization(record: RunRecord) -> str:
    shares = [
        f"{number(share * 100, 1)}% of the {name} {number(peak)}"
        for name, share, peak in (
            ("datasheet's", record.model_flops_utilization, record.peak_teraflops_datasheet),
            ("measured", record.model_flops_utilization_measured_peak, record.peak_teraflops_measured),
        )
        if share is not None and peak is not None
    ]
    return f" ({record.matrix_precision}: {', '.join(shares)})" if shares else ""


def _waiting(record: RunRecord) -> str:
    share = record.data_wait_share
    if share is None:
        return ""
    if share <= MUCH_WAITING:
        return f"{share:.1%} of the time"
    who = "the GPU" if record.device_type == "cuda" else "the loop"
    data = record.config.get("task", {}).get("data", {})
    advice = ": more task.data.num_workers?" if "num_workers" in data else ""
    return f"{who} waits for data {share:.0%} of the time{advice}"


def _machine(record: RunRecord) -> str:
    busy = None if record.machine is None else record.machine.busy
    return "" if busy is None else f"busy while it was measured: {busy}; measure again on a quiet one"


def _number(value: float | None, unit: str, *, decimals: int = 2) -> str:
    """``value`` with its unit; nothing where it does not exist."""
    return "" if value is None else number(value, decimals) + unit


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1e3, " ms")


def _within(form: str, *values: int | str | None) -> str:
    """``form`` filled with numbers that belong together; nothing where one of them does not exist."""
    if any(value is None or value == "" for value in values):
        return ""
    return form.format(*(f"{value:,}" if isinstance(value, int) else value for value in values))


def _recompiles(record: RunRecord) -> str:
    validating = sum(event.kind == "recompile" and event.phase == "validating" for event in record.events)
    return _number(record.recompiles, "", decimals=0) + (
        f" ({validating} of them validation's own graphs)" if validating else ""
    )


def _fallbacks(record: RunRecord) -> str:
    if record.ended_in_eager:
        return f"all of it: {next(iter(record.eager_parts.values())).splitlines()[0]}"
    fallbacks = [event for event in record.events if event.kind == "fallback"]
    return f"{len(fallbacks)} times; first: {fallbacks[0].reason.splitlines()[0]}" if fallbacks else ""


def _parity(record: RunRecord) -> str:
    facts = record.report.get("parity")
    if facts is None:
        return ""
    if facts["verdict"] in ("skipped", "not compared"):
        return f"not compared: {facts['reason']}"
    if "outputs" in facts:
        outputs = facts["outputs"]
        return f"{facts['verdict']} (outputs {_apart(outputs)})"
    if means := (facts.get("draws") or {}).get("loss"):  # what draws other random numbers than eager
        compiled, eager, limit = (number(means[name]) for name in ("compiled", "eager", "tolerance"))
        return f"{facts['verdict']} (mean loss of several draws {compiled}, eager {eager}, tolerance {limit})"
    seen = "loss" if "loss" in facts else "gradient_norm"  # a step by hand may show no loss
    before = f" in the run of {facts['compared']}" if "compared" in facts else ""
    return f"{facts['verdict']}{before} ({seen.replace('_', ' ')} {_apart(facts[seen])})"


def _apart(facts: dict[str, float | None]) -> str:
    apart, tolerance = (  # JSON has no word for infinity
        "infinitely far" if facts[name] is None else f"{facts[name]:.1e}" for name in ("difference", "tolerance")
    )
    return f"{apart} apart, tolerance {tolerance}"


def _audits(record: RunRecord) -> str:
    audits = record.audits
    if audits is None:
        return ""
    if not audits.steps:
        return f"{audits.verdict}: {audits.reason}"
    worst = [
        f"{kind} {one.difference:.1e} apart, tolerance {one.tolerance:.1e}"
        for kind, one in sorted(audits.worst.items(), key=lambda item: item[1].share)
    ]
    left_out = [f"{kind} not compared" for kind in audits.not_compared]
    seen = "; ".join([*worst[::-1], *left_out])
    return f"{audits.verdict}: {len(audits.steps)}, of steps {audits.steps[0]} to {audits.steps[-1]}; {seen}"


def _cache(record: RunRecord) -> str:
    return f" ({record.cache} start: {record.cache_hits} hits, {record.cache_misses} misses)" if record.cache else ""


def communication_line(ranks: Sequence[RankFigures]) -> str:
    """What no compute hides, and the rank that the others wait for, where that matters; empty where nobody knows."""
    found = communication_of(ranks)
    if found is None or found.exposed_share is None or found.step_seconds is None:
        return ""
    shown, late = (
        f"{found.exposed_share:.1%} of a step is not hidden by compute",
        found.skew_seconds / found.step_seconds,
    )
    if late <= MUCH_SKEW:
        return shown
    slowest, wait = found.slowest, number(found.skew_seconds * 1e3)
    where = f"rank {slowest.rank} ({slowest.host}, {slowest.device})"
    return f"{shown}; {where} is the slowest: another waits {wait} ms of each step for it ({late:.0%})"
