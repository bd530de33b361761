"""``compile=modular``: different settings for different parts of a module, by declared name or by path.

For models of unlike parts: an encoder of fixed shapes beside a decoder of ragged ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from strategies.base import Program, Stage, Strategy, WrongOption, require_types, wrong
from strategies.compile_options import ModuleRequest, suggestion

HOW = ("whole", "regional", "off")
KEY = "compile.modular.parts"


@dataclass(kw_only=True, slots=True)
class Part(ModuleRequest):
    """How one part, or every part that a wildcard matches, is compiled."""

    how: str = "whole"
    """``whole`` = one graph for the submodule's forward; ``regional`` = its repeated blocks, which share one graph,
    and the declared parts in it; ``off`` = eager: takes its submodules out of a regional part around it."""


@dataclass(kw_only=True, slots=True)
class Modular(Strategy):
    """Compile each part in its own way: one encoder whole and autotuned, a decoder regional and dynamic, the loss not.

    What no part names stays eager; a note lists what the task declares of it.
    """

    name: ClassVar[str] = "modular"
    stage: ClassVar[Stage] = Stage.MODULE

    parts: dict[str, Any] = field(default_factory=dict)
    """A ``Part``, or a mapping with its fields, for each part. A key is the path of a submodule (``net.decoder``), a
    name within the paths that the task declares (``decoder``), or a path with wildcards, each within one name
    (``net.*.blocks.0``)."""

    def __post_init__(self) -> None:
        require_types(self)
        # Not dict[str, Part]: OmegaConf then refuses +compile.modular.parts.encoder.how=whole for a new part.
        parts = {name: _part(f"{KEY}.{name}", given) for name, given in self.parts.items()}
        for name, part in parts.items():
            if part.how not in HOW:
                raise wrong(f"{KEY}.{name}", "how", part.how, f"is not one of {HOW}")
            part.check_values(f"{KEY}.{name}")
        self.parts = dict(parts)

    def check(self) -> None:
        if not self._compiled():
            raise ValueError(
                f"{KEY} names nothing to compile: add for instance +{KEY}.encoder.how=whole with a name that the task "
                "declares or a module path"
            )
        for name, part in self._compiled().items():
            part.check_machine(f"{KEY}.{name}")

    @property
    def needs_inductor(self) -> bool:
        return any(part.needs_inductor for part in self._compiled().values())

    @property
    def uses_cuda_graphs(self) -> bool:
        return any(part.uses_cuda_graphs for part in self._compiled().values())

    def apply(self, program: Program) -> None:
        """Raise ValueError for a key that matches nothing or several declared names, and for parts of which one holds
        the other, before anything is compiled."""
        from strategies.region import is_ancestor
        from strategies.regions import compile_regions

        targets = {name: _resolve(program, name) for name in self.parts}
        off = {path: name for name, paths in targets.items() if self.parts[name].how == "off" for path in paths}
        owners = self._owners(program, targets, off)
        planned: dict[str, list[str]] = {}
        for name, part in self._compiled().items():
            planned[name] = [path for path, owner in owners.items() if owner == name]
            compile_regions(program, part, planned[name], small=part.how == "regional")
        covered, declared = [*owners, *off], (*program.blocks, *program.parts)
        left = [
            path for path in declared if not any(is_ancestor(one, path) or is_ancestor(path, one) for one in covered)
        ]
        if left:
            program.notes.append(
                f"modular: no part names these declared submodules, so they stay eager: {', '.join(left)}"
            )
        program.report[self.name] = dict(planned)

    def _owners(self, program: Program, targets: Mapping[str, list[str]], off: Mapping[str, str]) -> dict[str, str]:
        """The part that each compiled submodule belongs to."""
        from strategies.region import is_ancestor
        from strategies.regions import callable_paths

        owners: dict[str, str] = {}
        for name, part in self._compiled().items():
            found = targets[name]
            regions = callable_paths(program.module, found) if part.how == "whole" else _blocks(program, found, name)
            kept = [path for path in regions if not any(is_ancestor(outer, path) for outer in off)]
            if not kept:
                because = {
                    repr(owner): None for outer, owner in off.items() for path in regions if is_ancestor(outer, path)
                }
                by = f", all is off because of {', '.join(because)}" if because else ""
                raise ValueError(f"{KEY}: {name!r} holds no module to compile{by}")
            for path in kept:
                if owners.setdefault(path, name) != name:
                    raise ValueError(f"{KEY}: {owners[path]!r} and {name!r} both mean {path}; give it to one of them")
        # A compiled submodule takes in all that it calls: settings of a part inside it would do nothing.
        for inner, owner in (*owners.items(), *off.items()):
            for outer, around in owners.items():
                if inner.startswith(f"{outer}."):
                    raise ValueError(
                        f"{KEY}: {owner!r} ({inner}) lies inside {around!r} ({outer}), which is compiled with all that "
                        f"it calls; drop one of them, or make {around!r} regional"
                    )
        return owners

    def _compiled(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if part.how != "off"}


def _part(key: str, given: Any) -> Part:
    """A part from its fields, each checked for name and type. Raises ValueError with near matches."""
    if isinstance(given, Part):
        return given
    if not isinstance(given, Mapping):
        path = key.removeprefix(f"{KEY}.")
        raise WrongOption(
            f"Modular(parts={{{path!r}: {given!r}}}) is not a Part: write Part(how={given!r})",
            f"{key}={given!r} is not a mapping of options: write {key}.how={given}",
        )
    kinds = get_type_hints(Part)
    known = [option.name for option in dataclasses.fields(Part)]
    # YAML reads a bare off as false.
    given = {option: "off" if option == "how" and value is False else value for option, value in given.items()}
    for option, value in given.items():
        if option not in known:
            path = f"{key.removeprefix(f'{KEY}.')}.{option}"
            nested = f"; for the path {path} write '+{KEY}={{{path}:{{...}}}}'"
            hint = nested if isinstance(value, Mapping) else suggestion(str(option), known)
            raise ValueError(f"{key}.{option} is not an option{hint}")
        kind = kinds[option]
        allowed = (dict,) if get_origin(kind) is dict else get_args(kind) or (kind,)
        if type(value) not in allowed:  # a bool is an int to Python, but not to a person
            expected = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
            raise wrong(key, option, value, f"is not {expected}")
    return Part(**given)


def _resolve(program: Program, key: str) -> list[str]:
    """Paths of the submodules that ``key`` means: a path, a name in the declared paths, or a path with wildcards."""
    paths = [path for path, _ in program.module.named_modules() if path]
    wildcards = any(sign in key for sign in "*?[")
    found = [key] if key in paths else [path for path in paths if wildcards and _matches(path, key)]
    named = _declared(program)
    found = found or named.get(key, [])
    if len(found) > 1 and not wildcards:
        raise ValueError(
            f"{KEY}.{key}: the task declares several submodules of this name: {', '.join(found)}; write one of these "
            "paths"
        )
    if found:
        return found
    names = [name for name, meant in named.items() if len(meant) == 1]
    # A name deep inside a path counts as near too: people write "attention", not "net.encoder.blocks.0.attention".
    within = [path for path in paths if key in path.split(".")][:3]
    raise ValueError(
        f"{KEY}.{key}: matches no submodule"
        + (suggestion(key, [*names, *paths]) or (f"; near: {', '.join(within)}" if within else ""))
        + (f"; the task declares: {', '.join(names)}" if names else "; the module declares no names, write paths")
    )


def _declared(program: Program) -> dict[str, list[str]]:
    """Names within the paths that the task declares, outermost first, and the submodules that each one means."""
    found: dict[str, list[str]] = {}
    for path in (*program.whole, *program.blocks, *program.parts):
        components = path.split(".")
        for index, name in enumerate(components):
            meant = ".".join(components[: index + 1])
            if not name.isdigit() and name not in components[:index] and meant not in found.setdefault(name, []):
                found[name].append(meant)
    return found


def _matches(path: str, pattern: str) -> bool:
    components, wanted = path.split("."), pattern.split(".")
    return len(components) == len(wanted) and all(map(fnmatchcase, components, wanted))


def _blocks(program: Program, paths: Iterable[str], name: str) -> list[str]:
    """Blocks and declared parts at or below ``paths``; blocks are found where the task declares none there."""
    from strategies.region import is_ancestor
    from strategies.regions import containers_for, expand_blocks

    regions: list[str] = []
    for path in paths:
        blocks = expand_blocks(program.module, containers_for(program, f"modular: {name}", within=path))
        if not blocks:
            raise ValueError(
                f"{KEY}.{name}: {path} holds no repeated blocks to compile regionally; set {KEY}.{name}.how=whole"
            )
        beside = [part for part in program.parts if is_ancestor(path, part)]
        regions += [*blocks, *(part for part in beside if not any(is_ancestor(block, part) for block in blocks))]
    return regions
