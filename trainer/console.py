"""What a person sees while a run goes on: a live line that also says when it is compiling, and a summary at the end.

The view polls the telemetry from a thread of its own twice a second, so that the training loop never draws anything.
"""

from __future__ import annotations

import functools
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strategies import STRATEGIES
from trainer.advice import as_typed
from trainer.report.run_verdict import command, verdict_lines
from trainer.run_files import DIRECTORY, LAST
from trainer.telemetry.profile import profile_line
from trainer.telemetry.record import FILE_NAME, AuditDifference, RankFigures, RunRecord, communication_of
from trainer.telemetry.source_lines import place_lines
from trainer.telemetry.telemetry import Telemetry
from trainer.wording import counted, headlines, number, shorten

ERROR_LOG = "error.log"
"""Where a run that failed leaves its traceback."""
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
"""Between two lines where nothing live can be drawn (a file, a CI log)."""
SHOWN_BY_OTHERS = frozenset({"starting", "training", "validating", "saving", "profiling", "finishing"})
"""Phases that the progress bar of a script's own framework shows."""


class ProgressView:
    """Live bar on a terminal, a line every ten seconds elsewhere, nothing for ``none``.

    Args:
        console: Where to draw.
        style: ``auto`` (live on a terminal, else plain), ``live``, ``plain`` or ``none``.
        total: Optimizer steps, or timed batches, at which the run ends. None: another progress bar shows the training,
            and lines are printed for checks and compiling alone.
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
        self._left = SecondsLeft()
        self._over = threading.Event()
        show = self._plain if self._style == "plain" else self._live
        self._thread = threading.Thread(target=show, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._style != "none":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                over = self._over.wait(REFRESH_SECONDS)
                live.update(self._picture(self._telemetry()), refresh=True)
                if over:
                    return

    def _picture(self, telemetry: Telemetry) -> Group:
        """What goes on in a line, and below it a bar as wide as the terminal."""
        self._left.look(telemetry, self._total)
        doing, figures = activity(telemetry, self._left.compiling), self._figures(telemetry)
        line = Text(f"{doing}: {figures}" if figures else doing, no_wrap=True, overflow="ellipsis")
        line.stylize("bold", 0, len(doing))
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(total=self._total, completed=telemetry.steps_done), self._done(telemetry))
        return Group(line, bar)

    def _done(self, telemetry: Telemetry) -> str:
        return f"step {telemetry.steps_done}/{self._total}"

    def _figures(self, telemetry: Telemetry) -> str:
        if telemetry.compiler.compiling is not None:  # whose own words fill the line
            return ""
        return " · ".join(part for part in (figures_line(telemetry), seconds_left(self._left.training)) if part)

    def _plain(self) -> None:
        began = time.monotonic()
        since, about = began - PLAIN_SECONDS, ""
        while not self._over.wait(REFRESH_SECONDS):
            telemetry = self._telemetry()
            self._left.look(telemetry, self._total)
            phase, now = telemetry.phase.partition(" ")[0], time.monotonic()
            if self._total is None and phase in SHOWN_BY_OTHERS and telemetry.compiler.compiling is None:
                continue
            # What is over within two seconds (an audit, a small validation) is worth no line.
            if now - since >= (PLAIN_SECONDS if phase == about else 4 * REFRESH_SECONDS):
                since, about = now, phase
                doing = activity(telemetry, self._left.compiling)
                line = f"compile: {doing}"
                if self._total is not None:
                    figures = [f"{self._done(telemetry)} after {now - began:,.0f} s", self._figures(telemetry)]
                    line = f"{doing}: {' · '.join(filter(None, figures))}"
                self._print_line(line)
                sys.stdout.flush()  # a progress bar's print leaves a log file without its lines until the end


class SecondsLeft:
    """How long compiling, and the training, will go on, as far as there is telling. What is shown runs with the clock
    and follows a new estimate within some ten seconds. It jumps where it was off by half."""

    def __init__(self) -> None:
        self.compiling: float | None = None
        self.training: float | None = None
        self._at = 0.0
        self._clock = 0.0
        """Seconds of all looks at the training, without those of compiling."""
        self._looks: deque[tuple[float, int]] = deque()
        """The clock and the steps done, of the last minute and the last steps: a pace. Once the last few seconds are
        much faster, those before were a start, and count no more; a validation makes them slower, and counts."""

    def look(self, telemetry: Telemetry, total: int | None) -> None:
        """Bring both up to date; asked often."""
        at, done, compiling = time.monotonic(), telemetry.steps_done, telemetry.compiler.compiling
        passed, self._at = at - self._at, at
        if compiling is not None:  # else it stays for the next graph
            self.compiling = _followed(self.compiling, compiling.seconds_left, passed)
        if telemetry.phase == "starting":
            return
        if compiling is None and self._looks:
            self._clock += passed
        looks = self._looks
        looks.append((self._clock, done))
        while len(looks) > 1 and _lasts(looks[1], looks[-1], PACE_SECONDS, PACE_STEPS):
            looks.popleft()
        left = None
        few = next((one for one in reversed(looks) if _lasts(one, looks[-1], FEW_SECONDS, FEW_STEPS)), None)
        if few is not None:
            if _pace(few, looks[-1]) * WRONG < _pace(looks[0], looks[-1]):
                while looks[0] != few:
                    looks.popleft()
            if total is not None and done < total:
                left = (total - done) * _pace(looks[0], looks[-1])
        wrong = left is None or self.training is None or not left < WRONG * self.training < WRONG**2 * left
        self.training = left if wrong else _followed(self.training, left, passed)


PACE_SECONDS, PACE_STEPS = 60.0, 20
"""Of a pace: the longer of the two."""
FEW_SECONDS, FEW_STEPS = 3.0, 3
"""From which on a pace is worth an estimate."""
FOLLOW_SECONDS = 10.0
WRONG = 1.5
"""A pace or an estimate that is wrong by this factor is given up."""


def _lasts(first: tuple[float, int], last: tuple[float, int], seconds: float, steps: int) -> bool:
    """Whether that much lies between two looks."""
    return last[0] - first[0] > seconds and last[1] - first[1] >= steps


def _pace(first: tuple[float, int], last: tuple[float, int]) -> float:
    """Seconds a step."""
    return (last[0] - first[0]) / (last[1] - first[1])


def _followed(shown: float | None, estimate: float | None, passed: float) -> float | None:
    """What to show of an ``estimate`` so many seconds after ``shown`` was."""
    if shown is None or estimate is None:
        return estimate
    shown = max(shown - passed, 0.0)
    return shown + (estimate - shown) * min(passed / FOLLOW_SECONDS, 1.0)


def seconds_left(left: float | None) -> str:
    """``some 40 s left``; nothing where nobody knows."""
    if left is None:
        return ""
    if left < 7.5:
        return "a few seconds left"
    coarse = 5 if left < 30 else 10
    rounded = round(left / coarse) * coarse
    return f"some {rounded} s left" if rounded < 120 else f"some {round(left / 60)} min left"


def activity(telemetry: Telemetry, left: float | None = None) -> str:
    """What the run is doing: a phase of the loop, or compiling, and for how long still, or so far."""
    compiling, phase = telemetry.compiler.compiling, telemetry.phase
    if compiling is None:
        return "building data and model" if phase == "starting" else phase
    whose = "validation's graph" if phase == "validating" else "graph"
    line = f"compiling {whose} {compiling.number}"
    if compiling.expected is not None and compiling.number <= compiling.expected:
        line += f" of about {compiling.expected}"
    if left is not None:
        return f"{line}, {seconds_left(left)}"
    return line + (f" ({compiling.seconds_so_far:.0f} s so far)" if compiling.seconds_so_far >= 1 else "")


def figures_line(telemetry: Telemetry) -> str:
    """Speed and loss, as far as they are known."""
    speed, loss = telemetry.meter.steps_per_second, telemetry.meter.last_loss
    parts = [] if speed is None else [f"{speed:.2f} steps/s"]
    return " · ".join(parts if loss is None else [*parts, f"loss {loss:.3f}"])


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """The rows of a summary, names in a column of their own."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a reason may hold what rich would take for markup
    console.print(table)


def print_end(console: Console, record: RunRecord, run_dir: Path | None, *, full: bool = False) -> None:
    """What a person wants to know first: the verdict or the error, and what to do next; then the figures that matter,
    or all where ``full``, and the line that opens TensorBoard in ``run_dir``, unless that is None."""

    def show(line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    show(f"{record.task} · {record.label} · {record.status}", "bold")
    for line in verdict_lines(record):
        show(line)
    if record.status == "failed":
        reason = record.reason or ""
        show(f"failed: {as_typed(reason, record.script)}", "red")
        for line in place_lines(record.failed_at):
            show(line)
    if run_dir is not None and record.status == "failed" and (run_dir / ERROR_LOG).is_file():
        show(f"traceback: {relative_path(run_dir / ERROR_LOG)}")
    if run_dir is not None and record.status != "finished" and (checkpoint := _last_checkpoint(record, run_dir)):
        where = checkpoint if record.script is not None else run_dir
        show(f"continue with: {command(record, f'resume={relative_path(where)}')}")
    rows, alarms = summary(record), _alarms(record)
    print_rows(console, rows if full else first_rows(rows) | alarms)
    most = len(record.notes) if full else max(MOST_NOTES - len(alarms), 0)
    notes = [note if full else shorten(note, LONGEST_NOTE) for note in record.notes[:most]]
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    left_out = len(record.notes) - len(notes)
    more = f" and {counted(left_out, 'more note')}" if left_out else ""
    if run_dir is None:
        return
    if record.script is not None:
        show(f"record: {relative_path(run_dir / FILE_NAME)} (all figures{more})")
    elif not full:
        show(f"all figures{more}: trainer.summary=full, or {relative_path(run_dir / FILE_NAME)}")
    if record.script is None or any(run_dir.glob("events.out.tfevents*")):
        show(f"tensorboard --logdir {shlex.quote(str(relative_path(run_dir)))}")


def _last_checkpoint(record: RunRecord, run_dir: Path) -> Path | None:
    """The checkpoint from which a run can go on; in a script, the newest that Lightning has left beside the record."""
    last = run_dir / DIRECTORY / LAST
    if record.script is None or last.exists():
        return last if last.is_file() else None
    return max(run_dir.glob(f"{DIRECTORY}/*.ckpt"), key=lambda one: one.stat().st_mtime, default=None)


FIRST_ROWS = (
    *("steady step", "profile", "graphs / breaks / recompiles", "parity with eager", "compile", "peak memory"),
    *("samples", "final loss", "optimizer steps"),
)
"""Rows of the summary by how much they matter."""
ROWS = 5
"""So many of them are shown unless more are asked for: what is printed at the end fits a screen of 24 lines."""
MOST_NOTES = 3
"""Alarms and notes together; all were printed when they came."""
LONGEST_NOTE = 150
"""Characters."""


def first_rows(rows: Mapping[str, str]) -> dict[str, str]:
    """Those of a summary's rows that matter most."""
    there = [name for name in FIRST_ROWS if name in rows and rows[name] != NOTHING]
    return {name: rows[name] for name in there[:ROWS]}


def _alarms(record: RunRecord) -> dict[str, str]:
    """Rows that say that something is not as it should be."""
    audits, waiting = record.audits, record.data_wait_share
    wrong = {
        "regions compiled": (record.regions_compiled or 0) < (record.regions or 0),
        "ran eager instead": True,
        "audits": audits is not None and audits.verdict in ("failed", "went eager"),
        "CUDA graphs skipped": True,
        "new shapes": True,
        "waiting for data": waiting is not None and waiting > MUCH_WAITING,
        "machine": True,
        "skipped items": True,
    }
    rows = summary(record)
    return {name: shorten(rows[name], LONGEST_NOTE) for name, is_wrong in wrong.items() if is_wrong and name in rows}


def announce(console: Console, record: RunRecord, run_dir: Path) -> None:
    """Print the heading of a run: what runs, how, on what and where it leaves its files."""
    console.print(
        f"[bold]{record.task}[/] · {record.label} · {record.device} · {record.precision} · {relative_path(run_dir)}",
        highlight=False,
        soft_wrap=True,
    )


def relative_path(path: Path) -> Path:
    """``path`` as a person would type it: relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


NOTHING = "nothing to compile"
OWN_ROWS = ("parity", "profile", "rollback", "slowdown")
"""Parts of the report that are shown in a row of their own wording, or in the verdict."""
MUCH_WAITING = 0.05
"""Share of the time spent waiting for data above which the summary says what to do; of steps of new shapes, too."""
MUCH_SKEW = 0.03
"""Share of a step that a rank waits for the slowest one above which the summary names that."""


def summary(record: RunRecord) -> dict[str, str]:
    """The summary's rows by name; a row of which no figure exists is left out."""
    chosen = f" (chose {record.report['auto']['chosen']})" if "auto" in record.report else ""
    took = {kind: getattr(record, f"steady_step_seconds_{kind}") for kind in ("mean", "median", "p95")}
    memory = {"device": record.peak_device_memory_gib, "process": record.peak_process_memory_gib}
    machine = None if record.machine is None else record.machine.busy
    share = record.model_flops_utilization_measured_peak
    found = {name: facts for name, facts in record.report.items() if name not in OWN_ROWS}
    everyone = f" of all {record.world_size} processes" if record.world_size > 1 else ""
    padding = "" if record.padded_share is None else f" (padding {record.padded_share:.1%})"
    rows = {
        "strategies": record.label + chosen,
        "device": _device(record),
        "optimizer steps": _with("{}", record.steps),
        **(_compiled(record) if record.strategies else {"compile": NOTHING}),
        "ran eager instead": _fallbacks(record),
        "parity with eager": _parity(record),
        "audits": _audits(record),
        **headlines(found, {name: kind.headlines for name, kind in STRATEGIES.items()}),
        "CUDA graphs skipped": str(record.cudagraph_skips or ""),
        "first step": _milliseconds(record.first_step_seconds),
        "warm-up": _with("{} s in {} steps", record.warmup_seconds, record.warmup_steps),
        # The mean is what rates and ratios are made of.
        "steady step": ", ".join(f"{kind} {_milliseconds(each)}" for kind, each in took.items() if each is not None),
        "new shapes": _new_shapes(record),
        "steps": _with("{} /s ({} steady ones)", record.steady_steps_per_second, record.steady_steps),
        "samples": _with(f"{{}} /s{everyone}", record.samples_per_second, decimals=1),
        "communication": communication_line(record.ranks),
        "useful tokens": _with(f"{{}} /s{padding}", record.useful_tokens_per_second, decimals=0),
        "utilization": "" if share is None else f"{share:.1%} of the peak measured when the run began",
        "waiting for data": _waiting(record),
        "peak memory": ", ".join(f"{where} {number(gib, 2)} GiB" for where, gib in memory.items() if gib is not None),
        "energy": _with("{} J/sample", record.joules_per_sample, decimals=3),
        "machine": f"busy while it was measured: {machine}; measure again on a quiet one" if machine else "",
        "profile": profile_line(record.report["profile"]) if "profile" in record.report else "",
        "final loss": _with("{}", record.final_loss, decimals=4),
        **{name: _with("{}", value, decimals=4) for name, value in sorted(record.final_metrics.items())},
        "skipped items": ", ".join(f"{count} {reason}" for reason, count in record.skipped_items.items() if count),
    }
    return {name: as_typed(value, record.script) for name, value in rows.items() if value}


def _with(form: str, *values: float | None, decimals: int = 2) -> str:
    """``form`` filled with numbers that belong together; nothing where one of them does not exist."""
    if any(value is None for value in values):
        return ""
    figures = (f"{value:,}" if isinstance(value, int) else number(value or 0.0, decimals) for value in values)
    return form.format(*figures)


def _milliseconds(seconds: float | None) -> str:
    return _with("{} ms", None if seconds is None else seconds * 1e3)


def _device(record: RunRecord) -> str:
    products = {"tf32": " (matrix products in TF32)", "fp32": " (no TF32 in matrix products)"}
    stated = products.get(record.matrix_precision or "", "") if record.device_type == "cuda" else ""
    return f"{record.device} · {record.precision}{stated}" if record.device else ""


def _compiled(record: RunRecord) -> dict[str, str]:
    cache = f" ({record.cache} start: {record.cache_hits} hits, {record.cache_misses} misses)" if record.cache else ""
    expected = record.expected_recompiles
    unexpected = None if record.recompiles is None else record.recompiles - expected
    return {
        "compile": _with("{} s", record.compile_seconds, decimals=1) + cache,
        "regions compiled": _with("{} of {}", record.regions_compiled, record.regions or None),
        "graphs / breaks / recompiles": _with("{} / {} / {}", record.graphs, record.graph_breaks, unexpected)
        + (f" (+{expected} expected)" if expected else ""),
    }


def _fallbacks(record: RunRecord) -> str:
    if record.ended_in_eager:
        return f"all of it: {next(iter(record.eager_parts.values())).splitlines()[0]}"
    ended = record.status == "failed" and not record.steps  # by what did not compile, perhaps
    fallbacks = [event for event in record.events if event.kind == "fallback" and not ended]
    several = f"{len(fallbacks)} times; first: " if len(fallbacks) > 1 else ""
    return several + fallbacks[0].reason.splitlines()[0] if fallbacks else ""


def _parity(record: RunRecord) -> str:
    facts = record.report.get("parity")
    if facts is None:
        return ""
    if facts["verdict"] in ("skipped", "not compared"):
        return f"not compared: {facts['reason']}"
    verdict = str(facts["verdict"])
    apart = {kind: AuditDifference(**one) for kind, one in facts.get("worst", {}).items()}
    if not apart:  # as in records of before 2026-11-27
        return verdict
    kind, worst = max(apart.items(), key=lambda item: item[1].share)
    means = ", means of several draws" if "seeds" in facts["how"] else ""
    return f"{verdict} ({counted(facts['checks'], 'check')}{means}; {_apart(kind, worst)})"


def _apart(kind: str, one: AuditDifference) -> str:
    what = f"{kind} {one.what}" if kind.endswith((" of", " to")) else kind
    return f"{what} {one.difference:.1e} apart, tolerance {one.tolerance:.1e}"


def _audits(record: RunRecord) -> str:
    audits = record.audits
    if audits is None or not audits.steps:
        return "" if audits is None else f"{audits.verdict}: {audits.reason}"
    worst = sorted(audits.worst.items(), key=lambda item: -item[1].share)
    seen = [_apart(kind, one) for kind, one in worst]
    seen += [f"{kind} not compared" for kind in audits.not_compared]
    steps = f"{len(audits.steps)}, of steps {audits.steps[0]} to {audits.steps[-1]}"
    return f"{audits.verdict}: {steps}; {'; '.join(seen)}"


def _new_shapes(record: RunRecord) -> str:
    """What batches of shapes that had not come before cost: libraries plan, and allocators ask for memory, for each."""
    beyond, steps, mean = record.new_shape_seconds, record.steps, record.steady_step_seconds_mean
    if not beyond or beyond <= MUCH_WAITING * (steps or 0) * (mean or 0.0):
        return ""
    line = f"{record.new_shape_steps} steps took {number(beyond, 1)} s beyond steady ones; padding to few shapes"
    if record.device_type == "cuda":  # https://github.com/modelscope/FunASR/issues/3704
        line += ", or TORCH_CUDNN_SDPA_DEPRIORITIZED=1 where cuDNN's attention plans for each,"
    return f"{line} may save that"


def _waiting(record: RunRecord) -> str:
    share = record.data_wait_share
    if share is None or share <= MUCH_WAITING:
        return "" if share is None else f"{share:.1%} of the time"
    who = "the GPU" if record.device_type == "cuda" else "the loop"
    data = record.config.get("task", {}).get("data") or {}
    advice = ": more task.data.num_workers?" if "num_workers" in data else ""
    return f"{who} waits for data {share:.0%} of the time{advice}"


def communication_line(ranks: Sequence[RankFigures]) -> str:
    """What no compute hides, and the rank that the others wait for, where that matters; empty where nobody knows."""
    found = communication_of(ranks)
    if found is None:
        return ""
    exposed, late = f"{found.exposed_share:.1%} of a step is not hidden by compute", found.skew_seconds
    if late <= MUCH_SKEW * found.step_seconds:
        return exposed
    where = f"rank {found.slowest.rank} ({found.slowest.host}, {found.slowest.device})"
    waits = f"another waits {number(late * 1e3)} ms of each step for it ({late / found.step_seconds:.0%})"
    return f"{exposed}; {where} is the slowest: {waits}"
