"""Workloads: what tells one piece of work from another in a record's configuration, and short names for them.

A workload is a task, what is done with it, and every setting that a step depends on. How long is trained, how often it
is logged or validated, and where the data lies may differ between the runs of one workload: ``loose_settings``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.telemetry.record import RunRecord

SECTIONS = ("task", "run", "trainer")
"""Parts of the configuration that make up the workload; beside them there are strategies, guards and the seed."""
LOOSE = frozenset(
    {
        "trainer.max_steps",
        "trainer.val_every_n_steps",
        "trainer.val_batches",
        "trainer.checkpoint_every_n_steps",
        "trainer.log_every_n_steps",
        "trainer.warmup_steps",
        "trainer.measure_peak",
        "run.batches",
        "run.repeats",
        "run.warmup_batches",
    }
)
"""Settings that a steady step does not depend on."""
SILENT = frozenset({"trainer.progress", "seed", "resume", "repeat"})
"""Settings of which nothing need be said: the display, and what the runs of one arm differ in by design."""
PLACES = frozenset({"root", "path", "val_path", "image_root"})
"""Last words of settings that say where data lies."""


def workload_of(record: RunRecord) -> tuple[str, ...]:
    """What all runs of a record's workload share, to be compared and used as a key."""
    fixed = sorted(f"{name}={value}" for name, value in _settings(record) if _is_fixed(name))
    return (record.task.partition(" ")[0], record.run, *fixed)  # "micro ragged" was "micro" in older records


def loose_settings(record: RunRecord) -> dict[str, str]:
    """Settings in which runs of one workload may differ, though a reader wants to know."""
    return {name: value for name, value in _settings(record) if not _is_fixed(name) and name not in SILENT}


def workload_names(records: Sequence[RunRecord]) -> list[str]:
    """A short name for each of ``records``, one of each workload: the task, and few settings that tell them apart."""
    names = []
    for record in records:
        fellows = [other for other in records if (other.task, other.run) == (record.task, record.run)]
        settings = {name: value for name, value in _settings(record) if _is_fixed(name)}
        told = [name for name in _telling([dict(_settings(other)) for other in fellows]) if name in settings]
        words = [f"{_short(name, told)}={settings[name]}" for name in told]
        kind = record.task if record.run == "train" else f"{record.task} {record.run}"
        name = f"{kind} ({', '.join(words)})" if words else kind
        while name in names:  # a setting that another workload has and this one lacks
            name += "'"
        names.append(name)
    return names


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values as text of nested mappings, empty mappings left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    return flat({name: value for name, value in record.config.items() if name != "compile"})


def _is_fixed(name: str) -> bool:
    section, _, _ = name.partition(".")
    return section in SECTIONS and name not in LOOSE | SILENT and name.rpartition(".")[2] not in PLACES


def _telling(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Few names that together have other values in each of ``settings``."""
    candidates = sorted(
        {name for each in settings for name in each if _is_fixed(name)}, key=lambda name: (name.count("."), name)
    )
    chosen: list[str] = []

    def classes(names: Sequence[str]) -> int:
        return len({tuple(each.get(name) for name in names) for each in settings})

    while classes(chosen) < len(settings):
        best = max(candidates, key=lambda name: classes([*chosen, name]))  # the first of the best
        if classes([*chosen, best]) == classes(chosen):
            break
        chosen.append(best)
    return chosen


def _short(name: str, among: Sequence[str]) -> str:
    last = name.rpartition(".")[2]
    return name if sum(other.rpartition(".")[2] == last for other in among) > 1 else last
