"""Options: which single change of the strategy's options, towards torch.compile's defaults, makes it go. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.locate.trial import Site

DEFAULTS: dict[str, Any] = {
    "mode": "default",
    "dynamic": None,
    "combo_kernels": None,
    "coordinate_descent": None,
    "activation_memory_budget": None,
}
"""Options that are tried at their default."""
OF_INDUCTOR: dict[str, Any] = {"mode": "default", "options": {}, "combo_kernels": None, "coordinate_descent": None}


@dataclass(slots=True, kw_only=True)
class Change:
    """One other value for an option."""

    said: str
    """As it is typed, or in words where it is taken away."""
    changes: dict[str, Any]
    """Values of the options, for a trial."""
    backend: bool = False
    """Whether it tells whose fault it is rather than how to go on: another compiler."""


def changes(site: Site, symptom: str, *, several_shapes: bool) -> Iterator[Change]:
    """The changes worth a try, each by itself.

    ``several_shapes``: it takes batches of several shapes, so that ``dynamic`` may matter.
    """
    requests = list(site.requests.values())
    if not requests:
        return
    prefix = "every part with " if site.strategy == "modular" else f"compile.{site.strategy}."
    set_anywhere = {name: value for request in requests for name, value in request.items()}
    for name, default in DEFAULTS.items():
        if name in set_anywhere:
            yield Change(said=f"{prefix}{name}={_typed(default)}", changes={name: default})
    for given in _different([request.get("options", {}) for request in requests]):
        for option in given:
            fewer = {name: value for name, value in given.items() if name != option}
            yield Change(said=f"without the option {option}", changes={"options": fewer})
    if several_shapes and "dynamic" not in set_anywhere:
        for value in (False, True):
            yield Change(said=f"{prefix}dynamic={_typed(value)}", changes={"dynamic": value})
    if symptom == "fails" and any(request.get("fullgraph", True) for request in requests):
        yield Change(said=f"{prefix}fullgraph=false", changes={"fullgraph": False})
    if symptom not in ("breaks", "recompiles", "slower"):
        used = {request.get("backend", "inductor") for request in requests}
        for backend in ("aot_eager", "eager"):
            if backend in used:
                break
            values = {"backend": backend, **OF_INDUCTOR}
            if backend == "eager":
                values["activation_memory_budget"] = None
            yield Change(said=f"{prefix}backend={backend}", changes=values, backend=True)


def _different(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are not empty, each once; of several, none could be put in place of the others."""
    kept: list[dict[str, Any]] = []
    for value in values:
        if value and value not in kept:
            kept.append(value)
    return kept if len(kept) == 1 else []


def _typed(value: Any) -> str:
    return "null" if value is None else str(value).lower()
