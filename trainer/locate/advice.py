"""Advice: the command line that leaves out what is at fault and compiles the rest. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from strategies import Modular, Stage, Strategy
from strategies.compose import ordered
from strategies.modular import Part
from trainer.locate.tree import holds
from trainer.locate.trial import OPTIMIZER, Site

PLAIN = re.compile(r"[\w./:+*?@%-]+")
"""Text that Hydra reads without quotes."""


def modular_overrides(
    overrides: Sequence[str],
    strategies: Iterable[Strategy],
    site: Site,
    rest: Sequence[str],
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
    changed: list[Strategy] = []
    for each in strategies:
        if isinstance(each, Modular):
            parts = {name: dataclasses.replace(part, **changes) for name, part in each.parts.items()}
            changed.append(Modular(parts=parts))
        else:
            changed.append(dataclasses.replace(each, **changes) if each.stage is Stage.MODULE else each)
    return with_strategies(overrides, changed)


def command_line(overrides: Sequence[str], *, config_dir: str | None = None) -> str:
    """The trainer's command line, quoted for a shell."""
    folder = [] if config_dir is None else ["--config-dir", config_dir]
    return shlex.join(["python", "-m", "trainer", *folder, *overrides])


def with_strategies(overrides: Sequence[str], strategies: Iterable[Strategy]) -> list[str]:
    """The trainer's overrides with these strategies in the place of those that they name."""
    chosen = ordered(strategies)
    names = [each.name for each in chosen]
    given = [each for each in overrides if not re.match(r"[+~]*compile[=.]", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    for each in chosen:
        for option in dataclasses.fields(each):
            value = getattr(each, option.name)
            if value == _default(option):
                continue
            sign = "+" if isinstance(value, Mapping) else ""  # a mapping of anything: its keys are new
            if isinstance(each, Modular):
                value = {name: {"how": part.how, **_set(part)} for name, part in value.items()}
            given.append(f"{sign}compile.{each.name}.{option.name}={written(value)}")
    return given


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
        return "'" + value.replace("'", "\\'") + "'"
    return str(value)


def _set(part: Part) -> dict[str, Any]:
    names = (option.name for option in dataclasses.fields(part) if option.name != "how")
    return {name: getattr(part, name) for name in names if getattr(part, name) != getattr(_NEUTRAL, name)}


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


_NEUTRAL = Part()
