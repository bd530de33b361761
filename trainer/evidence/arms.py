"""Arms: what tells one way of executing a task from another, and short names: ``whole (mode=reduce-overhead)``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from strategies import STRATEGIES
from trainer.evidence.workloads import flat
from trainer.telemetry.record import RunRecord

PLACES = frozenset({"url", "key_file"})
"""Parameters that say where something lies, not how the task executes; ``storage_options`` are left out likewise."""

PEER = "peer"
"""Name, in the place of a strategy's, of another project's way to train that was measured beside ours."""


def peer_of(record: RunRecord) -> str | None:
    """Which peer a record is of; None for a run of ours."""
    return next((str(strategy["arm"]) for strategy in record.strategies if strategy["name"] == PEER), None)


def arm_of(record: RunRecord) -> tuple[str, ...]:
    """What all runs of a record's arm share, to be compared and used as a key."""
    return (record.label, *sorted(f"{name}={value}" for name, value in _parameters(record).items()))


def arm_names(records: Sequence[RunRecord]) -> list[str]:
    """A short name for each of ``records``, one of each arm: the label, and parameters that are not defaults or differ
    between arms of that label."""
    names: list[str] = []
    for record in records:
        fellows = [_parameters(other) for other in records if other.label == record.label]
        parameters, defaults = _parameters(record), _defaults(record)
        told = [
            name
            for name, value in parameters.items()
            if _is_set(name, value, defaults) or len({fellow.get(name) for fellow in fellows}) > 1
        ]
        alone = len(record.strategies) == 1
        words = [f"{name.partition('.')[2] if alone else name}={parameters[name]}" for name in told]
        name = f"{record.label} ({', '.join(words)})" if words else record.label
        while name in names:  # a parameter that the others have and this one lacks
            name += "'"
        names.append(name)
    return names


def set_parameters(record: RunRecord) -> dict[str, str]:
    """Parameters of a record's strategies that are not their defaults, by dotted name; all of a plug-in's."""
    defaults = _defaults(record)
    return {name: value for name, value in _parameters(record).items() if defaults.get(name) != value}


def _is_set(name: str, value: str, defaults: dict[str, str]) -> bool:
    """Whether a parameter of a known strategy is no default. Keys of a mapping that is empty by default count
    (``regional.options.max_autotune``), what such keys hold does not (``modular.parts.encoder.mode``): too long."""
    if name in defaults:
        return defaults[name] != value
    return name.partition(".")[0] in STRATEGIES and name.count(".") == 2


def _parameters(record: RunRecord) -> dict[str, str]:
    """Those of a known strategy that an older record lacks are its defaults."""
    given = dict(
        pair
        for strategy in record.strategies
        for pair in _told(str(strategy["name"]), {name: value for name, value in strategy.items() if name != "name"})
    )
    return _defaults(record) | given


def _defaults(record: RunRecord) -> dict[str, str]:
    """Defaults of those strategies that are known here: a plug-in's are not."""
    defaults: dict[str, str] = {}
    for strategy in record.strategies:
        kind = STRATEGIES.get(str(strategy["name"]))
        if kind is not None:
            values: dict[str, Any] = {}
            for field in dataclasses.fields(kind):
                if field.default_factory is not dataclasses.MISSING:
                    values[field.name] = field.default_factory()
                elif field.default is not dataclasses.MISSING:
                    values[field.name] = field.default
            defaults.update(_told(kind.name, json.loads(json.dumps(values, default=str))))
    return defaults


def _told(strategy: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kept = {name: value for name, value in values.items() if name not in PLACES and name != "storage_options"}
    yield from flat(kept, f"{strategy}.")
