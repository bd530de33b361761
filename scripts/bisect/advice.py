"""Advice: commands that leave out what is at fault and compile the rest, and a reproducer. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scripts.bisect.report import OPTIMIZER, Report, Site
from scripts.bisect.search import holds
from scripts.bisect.worker import RemoteBench
from strategies import Modular, Stage, Strategy
from strategies.compose import ordered
from strategies.modular import Part
from trainer.config import compose
from trainer.settings import Config
from trainer.sweep.plan import quoted

PLAIN = re.compile(r"[\w./:+*?@%-]+")
"""Text that Hydra reads without quotes."""
REPRODUCER_SECONDS = 300.0


def suggest(report: Report, site: Site, config: Config, overrides: Sequence[str], *, config_dir: str | None) -> None:
    """Add commands to the report: with the option that makes it go away, with the rest compiled."""
    strategies = list(config.compile.values())
    suggested = [
        with_changes(overrides, strategies, option.changes)
        for option in report.options
        if not option.shows and option.reason is None and not option.backend
    ]
    if report.rest_is_clean is not False:
        suggested.append(modular_overrides(overrides, strategies, site, report.rest))
    if not suggested:
        report.notes.append("no setting was found that leaves it out and compiles the rest; compile=eager does without")
    for given in suggested:
        if config_dir is None:  # whose plugin.py need not bear to be run twice
            compose(given)  # what is suggested is a command that is understood
        report.suggestions.append(command_line(given, config_dir=config_dir))


def reproduce(report: Report, bench: RemoteBench, *, batch: int, folder: Path | None = None) -> None:
    """Write the reproducer of the first culprit, with its inputs from ``batch``, and run it."""
    if not report.culprits or report.culprits[0].path == OPTIMIZER:
        report.notes.append("no reproducer: it takes more than one submodule; run this command again")
        return
    culprit = report.culprits[0]
    folder = (folder or Path("outputs", "bisect", f"{report.task}-{culprit.path.replace('.', '-')}")).resolve()
    wanted = {"path": culprit.path, "batch": batch, "symptom": report.symptom, "reason": culprit.outcome.reason}
    try:
        file = bench.reproducer(folder=folder, **wanted)
    except ValueError as error:
        report.notes.append(f"no reproducer: {error}")
        return
    report.reproducer = str(file)
    try:
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = [sys.executable, file.name]
        done = subprocess.run(command, cwd=file.parent, timeout=REPRODUCER_SECONDS, check=False, **quiet)
        # Exit code 1, or the signal that the search has seen as well.
        report.reproducer_shows = done.returncode == 1 or (done.returncode < 0 and report.symptom == "fails")
    except subprocess.TimeoutExpired:
        report.reproducer_shows = report.symptom == "fails"


def modular_overrides(
    overrides: Sequence[str], strategies: Iterable[Strategy], site: Site, rest: Sequence[str]
) -> list[str]:
    """The trainer's overrides with ``modular`` for ``rest`` in the place of the strategy that compiled it before."""
    modules = [path for path in rest if path != OPTIMIZER]
    parts = {}
    for path in wildcards(modules, site.paths):
        example = next(one for one in modules if _matches(one, path))
        request = next(given for region, given in site.requests.items() if holds(region, example))
        parts[path] = Part(how="whole", **request)
    kept = [
        each
        for each in strategies
        if each.stage is not Stage.MODULE and (each.stage is not Stage.OPTIMIZER or OPTIMIZER in rest)
    ]
    return with_strategies(overrides, [*kept, *([Modular(parts=parts)] if parts else [])])


def with_changes(overrides: Sequence[str], strategies: Iterable[Strategy], changes: Mapping[str, Any]) -> list[str]:
    """The trainer's overrides with other options for what is handed to the compiler."""

    def changed(each: Strategy) -> Strategy:
        if isinstance(each, Modular):
            return Modular(parts={name: dataclasses.replace(part, **changes) for name, part in each.parts.items()})
        return dataclasses.replace(each, **changes) if each.stage is Stage.MODULE else each

    return with_strategies(overrides, map(changed, strategies))


def with_strategies(overrides: Sequence[str], strategies: Iterable[Strategy]) -> list[str]:
    """The trainer's overrides with these strategies in the place of those that they name."""
    chosen = ordered(strategies)
    names = [each.name for each in chosen]
    given = [each for each in overrides if not re.match(r"[+~]*compile[=.]", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    for each in chosen:
        for name, value in _changed_options(each).items():
            sign = "+" if isinstance(value, Mapping) else ""  # a mapping of anything: its keys are new
            if isinstance(each, Modular):
                value = {path: {"how": part.how, **_changed_options(part, skip="how")} for path, part in value.items()}
            given.append(f"{sign}compile.{each.name}.{name}={written(value)}")
    return given


def command_line(overrides: Sequence[str], *, config_dir: str | None = None) -> str:
    """The trainer's command line, quoted for a shell."""
    folder = [] if config_dir is None else ["--config-dir", config_dir]
    return shlex.join(["python", "-m", "trainer", *folder, *overrides])


def wildcards(paths: Sequence[str], every: Sequence[str]) -> list[str]:
    """``paths`` with ``*`` for the numbers of those that differ in nothing else, where no other path matches too."""
    alike: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        alike[".".join("*" if name.isdigit() else name for name in path.split("."))].append(path)
    result: list[str] = []
    for pattern, matching in alike.items():
        exact = len(matching) > 1 and {path for path in every if _matches(path, pattern)} == set(matching)
        result += [pattern] if exact else matching
    return result


def written(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return quoted(value)
    return str(value)


def _changed_options(options: Any, *, skip: str = "") -> dict[str, Any]:
    """The options that are not at their default."""
    values = {option.name: (getattr(options, option.name), option) for option in dataclasses.fields(options)}
    return {name: value for name, (value, option) in values.items() if name != skip and value != _default(option)}


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))
