"""The verdict of a single run: was it faster than eager, how long was the wait, when does that pay, what to try next.

Eager and the run take real steps by turns (``trainer.guards.timing``). Those pairs are judged as a sweep's pairs of
runs are, and the wait is made up for by the same arithmetic (``statistics``). For whoever has trained once and
compared nothing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from trainer.advice import as_typed, program, strategies_in_python
from trainer.report import statistics
from trainer.report.statistics import FASTER, NOT_SHOWN, SLOWER, Cost, Sample
from trainer.telemetry.record import PEER, RunRecord, RunVerdict
from trainer.wording import number

EAGER, NOT_COMPARED = "eager", "not compared"
MANY_RECOMPILES = 3
"""Recompiles of a training with batches of several shapes from which on buckets are worth a try."""
IDLE_SHARE, FULL_UTILIZATION = 0.2, 0.4
"""A GPU that is idle for more of a step, or whose matrix units do less than that, may wait for the host's launches."""
WIDEST = 10
"""An interval whose ends are further apart, of two or three pairs, is not worth its figures."""
SHORT = "takes 5% of a run at most, and this one was too short"


def run_verdict(record: RunRecord) -> RunVerdict:
    verdict = RunVerdict(
        outcome=EAGER, steps=sum(one or 0 for one in (record.steady_steps, record.warmup_steps, record.left_out_steps))
    )
    if record.strategies and not record.ended_in_eager and not _chose_eager(record):
        _compare(record, verdict)
    if (step := _next(record, verdict)) is not None:
        verdict.next_command, verdict.next_reason = step
    return verdict


def _chose_eager(record: RunRecord) -> bool:
    return "auto" in record.report and not record.chosen_strategies


def _compare(record: RunRecord, verdict: RunVerdict) -> None:
    timed = _timed(record)
    sides = (_samples(timed, side) for side in ("compiled_seconds", "eager_seconds"))
    found = statistics.ratio(*sides, alike=len(timed) == 1)
    if found is None:
        verdict.outcome, verdict.reason = NOT_COMPARED, _why_not(record)
        return
    eager = [seconds for batch in timed for seconds in batch["eager_seconds"]]
    verdict.outcome, verdict.pairs, verdict.batches = found.verdict, len(eager), len(timed)
    verdict.ratio, verdict.ratio_low, verdict.ratio_high = found.value, found.low, found.high
    verdict.eager_step_seconds = sum(eager) / len(eager)
    verdict.step_seconds = verdict.eager_step_seconds / found.value
    if record.warmup_seconds is None:
        return
    count = record.warmup_steps or 0
    cost = Cost(
        step_seconds=verdict.step_seconds,
        warmup_seconds=record.warmup_seconds,
        warmup_steps=count,
        compile_seconds=record.compile_seconds or 0.0,
        preparation_seconds=record.preparation_seconds or 0.0,
    )
    # Eager's own warm-up is not known here, and taken for nothing: the wait is at most this.
    warm = count * verdict.eager_step_seconds
    eager_cost = Cost(step_seconds=verdict.eager_step_seconds, warmup_seconds=warm, warmup_steps=count)
    verdict.wait_seconds = statistics.overhead_seconds(cost, eager_cost)
    if found.verdict == FASTER and not record.report["slowdown"].get("micro_batches"):
        verdict.break_even_steps = statistics.break_even_steps(cost, eager_cost)
        verdict.paid = (verdict.steps or 0) >= verdict.break_even_steps


def _timed(record: RunRecord) -> list[dict[str, Any]]:
    """Seconds of steps of eager and of the run by turns, of each window; where steps are replayed, replays alone."""
    facts = record.report.get("slowdown", {})
    found = [one for one in (facts.get("before_the_first_step"), *facts.get("on_later_batches", ())) if one]
    replayed = [one for one in found if one.get("replayed")]
    if replayed or record.report.get("cuda_graph", {}).get("graphs"):
        found = replayed
    return [one for one in found if all(one["eager_seconds"])]


def _samples(timed: Sequence[dict[str, Any]], side: str) -> list[Sample]:
    """Seconds relative to eager's of the same window: how windows differ from each other is no spread."""
    samples = []
    for place, batch in enumerate(timed):
        typical = math.exp(sum(map(math.log, batch["eager_seconds"])) / len(batch["eager_seconds"]))
        samples += [Sample(seconds / typical, (place, turn)) for turn, seconds in enumerate(batch[side])]
    return samples


def _why_not(record: RunRecord) -> str:
    skipped = record.report.get("slowdown", {}).get("reason") or record.report.get("parity", {}).get("reason")
    if skipped:
        return str(skipped)
    if record.config.get("parity") == "off":
        return "parity=off leaves out steps of eager"
    finished = record.status == "finished"
    if finished and record.report.get("slowdown", {}).get("short_of_time"):
        return f"timing eager beside it {SHORT}"
    return "no steps of eager were timed beside its own" if finished else "it ended before steps of eager were timed"


# ---- what to try next -------------------------------------------------------------------------------------------


def _next(record: RunRecord, verdict: RunVerdict) -> tuple[str, str] | None:
    """A command that can be pasted, and what it is for; None where nothing suggests itself."""
    names = [str(strategy["name"]) for strategy in record.strategies]
    # As the user named them: a composite gives its strategies values of its own.
    given = (re.fullmatch(r"compile=\[?([\w, ]+)\]?", part) for part in record.command)
    chosen = next((each[1].replace(" ", "").split(",") for each in given if each), names)
    same, outcome, breaks = _compile(chosen), verdict.outcome, record.graph_breaks or 0
    if not names:
        return command(record, "compile=auto"), "times eager and strategies on this model, and takes what pays"
    if record.status in ("failed", "interrupted") or _chose_eager(record) or PEER in names:
        return None
    of_lightning = record.script is None or record.entry == "Compile"
    if record.report.get("parity", {}).get("verdict") == "failed":
        if record.script is not None:  # what bisects takes a training of the command line
            return None
        return command(record, same, module="scripts.bisect"), "which submodule is not eager's"
    if (record.ended_in_eager or breaks) and of_lightning:
        why = "which parts run eager, and why" if record.ended_in_eager else f"where the {breaks} graph breaks are"
        return command(record, same, module="scripts.explain"), why
    if outcome == SLOWER:
        return command(record, "compile=eager"), "compiling makes this step slower"
    recompiles = sum(event.kind == "recompile" and event.phase == "training" for event in record.events)
    if recompiles >= MANY_RECOMPILES and record.padded_share and not {"buckets", "dynamic"} & set(names):
        why = f"{recompiles} recompiles: pads batches to a few lengths, a graph each"
        return command(record, _compile(["buckets", *chosen])), why
    if outcome == FASTER and verdict.paid is False and record.cache in ("cold", None) and "cached" not in names:
        return command(record, _compile(["cached", *chosen])), "the next start takes its graphs from a store"
    if "cuda_graph" not in names and _waits_for_host(record):
        return command(record, _compile([*chosen, "cuda_graph"])), "the GPU waits for the host: replays whole steps"
    if not of_lightning:  # what repeats it takes a LightningModule
        return None
    rounds = "rounds of whole runs" if record.script is None else "copies that take turns for minutes"
    why = f"compares with eager, by {rounds}" if outcome == NOT_COMPARED else f"measures again, by {rounds}"
    why = f"{rounds} may show one" if outcome == NOT_SHOWN else why
    return command(record, f"compile=eager,{same.removeprefix('compile=')}", "hydra.launcher.rounds=3", sweep=True), why


def _waits_for_host(record: RunRecord) -> bool:
    if record.device_type != "cuda" or record.world_size > 1 or "auto" in record.report:
        return False
    idle = record.report.get("profile", {}).get("idle_share")
    if idle is not None:
        return bool(idle > IDLE_SHARE)
    busy = record.model_flops_utilization_measured_peak or record.model_flops_utilization
    return busy is None or busy < FULL_UTILIZATION


def _compile(names: Sequence[str]) -> str:
    return f"compile={names[0]}" if len(names) == 1 else f"compile=[{','.join(names)}]"


def command(record: RunRecord, *changes: str, module: str = "trainer", sweep: bool = False) -> str:
    """The command of the run with other choices, as a person would paste it; for a script of one's own, what to do."""
    if record.script is not None:
        if module == "scripts.explain" or sweep:
            return "crucible.compare(module, data)" if sweep else "crucible.explain_module(module, loader, strategies)"
        name, _, value = changes[0].partition("=")
        if name == "resume":
            return f"trainer.fit(..., ckpt_path={json.dumps(value)})"
        names = value.strip("[]").split(",")
        called = strategies_in_python(names, record.strategies, record.entry)
        return f"the script with {called if name == 'compile' else changes[0]}"
    changed = {change.partition("=")[0] for change in changes} | {"resume", "repeat"}
    given = [part for part in record.command if part.lstrip("+").partition("=")[0] not in changed]
    given = [part for part in given if not part.lstrip("+").startswith("hydra.")]
    options = [part for part in given if part.lstrip("+").startswith("compile.")]
    if sweep or "compile=eager" in changes:  # which knows none of them
        given = [part for part in given if part not in options]
    if options and sweep:
        arm = " ".join([changes[0].removeprefix("compile=eager,"), *options]).replace('"', '\\"')
        changes = (f'hydra.launcher.arms=[eager,"{arm}"]', *changes[1:])
    return shlex.join([*program(module), *(["-m"] if sweep else []), *given, *changes])


# ---- in words ---------------------------------------------------------------------------------------------------


def verdict_lines(record: RunRecord) -> list[str]:
    """The verdict in lines for the end of a run; none for one that failed."""
    verdict = record.verdict or run_verdict(record)
    if record.status == "failed":
        return []
    judged = _judgement(record, verdict)
    lines = [f"verdict: {as_typed(judged, record.script)}"]
    if verdict.ratio is not None and verdict.wait_seconds is not None:
        wait = f"wait: {number(verdict.wait_seconds, 1)} s for compiling and warm-up"
        if verdict.outcome == SLOWER:
            wait += ", which never pays"
        elif verdict.break_even_steps is not None and verdict.steps is not None:
            enough = "long enough" if verdict.paid else "too short"
            wait += f", pays after {statistics.rounded(verdict.break_even_steps)} steps"
            wait += f"; this run of {verdict.steps:,} was {enough}"
        lines.append(wait)
    if verdict.next_command is not None:
        lines.append(f"next: {verdict.next_command}  # {verdict.next_reason}")
    return lines


def _judgement(record: RunRecord, verdict: RunVerdict) -> str:
    if verdict.outcome == EAGER:
        mean = record.steady_step_seconds_mean
        took = "" if mean is None else f", {milliseconds(mean)} a steady step"
        if _chose_eager(record):
            return f"{record.label} chose eager{took}"
        what = f"{record.label} ended in eager" if record.strategies else "eager"
        return f"{what}{took}; nothing compiled to compare it with"
    if verdict.eager_step_seconds is None or verdict.step_seconds is None or verdict.ratio is None:
        return f"{record.label} was not compared with eager: {verdict.reason}"
    figures = (
        f"{record.label} {milliseconds(verdict.step_seconds)}, eager {milliseconds(verdict.eager_step_seconds)} "
        f"a step, by turns: {verdict.ratio:.2f}x"
    )
    low, high = verdict.ratio_low, verdict.ratio_high
    if low is not None and high is not None and high < WIDEST * low:
        figures += f", {low:.2f} to {high:.2f}"
    figures += f" in {verdict.pairs} pair{'' if verdict.pairs == 1 else 's'}"
    if verdict.batches > 1:
        figures += f" of {verdict.batches} windows"
    if verdict.outcome == NOT_SHOWN and record.report.get("slowdown", {}).get("short_of_time"):
        figures += f"; timing more {SHORT}"
    if record.machine is not None and record.machine.busy:
        figures += "; the machine was busy"
    result = {FASTER: "faster than eager", SLOWER: "slower than eager"}.get(verdict.outcome, "no difference shown")
    return f"{result} ({figures})"


def milliseconds(seconds: float) -> str:
    """A step's time as every table and line says it."""
    return f"{number(seconds * 1e3)} ms"
