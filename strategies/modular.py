"""``compile=modular``: different settings for different parts of a module, by declared name or by path."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from strategies.base import Program, Stage, Strategy
from strategies.options import ModuleRequest, near

HOW = ("whole", "regional", "off")


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
        # Not dict[str, Part]: OmegaConf then refuses +compile.modular.parts.encoder.how=whole for a new part.
        parts = {name: _part(f"compile.modular.parts.{name}", given) for name, given in self.parts.items()}
        for name, part in parts.items():
            key = f"compile.modular.parts.{name}"
            if part.how not in HOW:
                raise ValueError(f"{key}.how={part.how!r} is not one of {HOW}")
            part.check_values(key)
        self.parts = dict(parts)

    def check(self) -> None:
        if not self._compiled():
            raise ValueError(
                "compile.modular.parts names nothing to compile: add for instance "
                "+compile.modular.parts.encoder.how=whole with a name that the task declares or a module path"
            )
        for name, part in self._compiled().items():
            part.check_machine(f"compile.modular.parts.{name}")

    @property
    def needs_inductor(self) -> bool:
        return any(part.compiles_with_inductor for part in self._compiled().values())

    @property
    def uses_cuda_graphs(self) -> bool:
        return any(part.asks_for_cuda_graphs for part in self._compiled().values())

    def apply(self, program: Program) -> None:
        from strategies.regions import compile_in_place, fixed_sizes

        planned, left_eager = plan(program, {name: part.how for name, part in self.parts.items()})
        compiled = self._compiled()
        paths = {name: [path for path, owner in planned.items() if owner == name] for name in compiled}
        fixed = {name for name, part in compiled.items() if fixed_sizes(program, paths[name], part.dynamic)}
        for path, name in planned.items():
            arguments = compiled[name].compile_arguments()
            arguments = {**arguments, "dynamic": False} if name in fixed else arguments
            compile_in_place(program, path, arguments, strict=compiled[name].on_recompile_limit == "fail")
        if any(part.how == "regional" for part in compiled.values()):
            # DDPOptimizer would split every region again at its bucket boundaries; regions are already small.
            program.settings["optimize_ddp"] = False
        program.eager_embeddings &= all(part.embedding_gradient == "eager" for part in compiled.values())
        if left_eager:
            left = ", ".join(left_eager)
            program.notes.append(f"modular: no part names these declared submodules, so they stay eager: {left}")
        program.report[self.name] = dict(paths)

    def _compiled(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if part.how != "off"}


def _part(key: str, given: Any) -> Part:
    """A part from its fields, each checked for name and type. Raises ValueError with near matches."""
    if isinstance(given, Part):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}={given!r} is not a mapping of options: write {key}.how={given}")
    kinds = get_type_hints(Part)
    known = [option.name for option in dataclasses.fields(Part)]
    # YAML reads a bare off as false.
    given = {option: "off" if option == "how" and value is False else value for option, value in given.items()}
    for option, value in given.items():
        if option not in known:
            path = f"{key.removeprefix('compile.modular.parts.')}.{option}"
            hint = f"; for the path {path} write '+compile.modular.parts={{{path}:{{...}}}}'"
            raise ValueError(
                f"{key}.{option} is not an option" + (hint if isinstance(value, Mapping) else near(str(option), known))
            )
        allowed = get_args(kinds[option]) if get_origin(kinds[option]) is not dict else (dict,)
        allowed = allowed or (kinds[option],)
        # A bool is an int to Python, but not to a person; a whole number is a fraction to both.
        if type(value) not in allowed and not (float in allowed and type(value) is int):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{key}.{option}={value!r} is not {expected}")
    return Part(**given)


def plan(program: Program, parts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The part by the path of each submodule that is to be compiled, and declared paths that no part covers.

    ``parts`` say how, by key. Raises ValueError for a key that matches nothing or several declared names, and for parts
    of which one holds the other.
    """
    targets = {name: resolve(program, name) for name in parts}
    off = {path: name for name, paths in targets.items() if parts[name] == "off" for path in paths}
    planned: dict[str, str] = {}
    for name, how in parts.items():
        if how == "off":
            continue
        regions = targets[name]
        if how == "regional":
            regions = [region for path in regions for region in _regions_within(program, path, name)]
        else:
            _require_called(program, regions, name)
        spared = {path: owner for path in regions for outer, owner in off.items() if _holds(outer, path)}
        if len(spared) == len(regions):
            owners = ", ".join(map(repr, dict.fromkeys(spared.values())))
            raise ValueError(f"compile.modular.parts: all of {name!r} is off because of {owners}; drop one of them")
        for path in regions:
            if path in spared:
                continue
            if planned.get(path, name) != name:
                raise ValueError(
                    f"compile.modular.parts: {planned[path]!r} and {name!r} both mean {path}; give it to one of them"
                )
            planned[path] = name
    _refuse_nesting(planned, off)
    declared = (*program.blocks, *program.parts)
    covered = [*planned, *off]
    return planned, [p for p in declared if not any(_holds(outer, p) or _holds(p, outer) for outer in covered)]


def resolve(program: Program, key: str) -> list[str]:
    """Paths of the submodules that ``key`` means: a path, a name in the declared paths, or a path with wildcards."""
    paths = [path for path, _ in program.module.named_modules() if path]
    if key in paths:
        return [key]
    if any(sign in key for sign in "*?["):
        matched = [path for path in paths if _matches(path, key)]
        if matched:
            return matched
    elif named := _named(program, key):
        if len(named) > 1:
            raise ValueError(
                f"compile.modular.parts.{key}: the task declares several submodules of this name: "
                f"{', '.join(named)}; write one of these paths"
            )
        return named
    names = declared_names(program)
    # A name deep inside a path counts as near too: people write "attention", not "net.encoder.blocks.0.attention".
    near = (
        difflib.get_close_matches(key, [*names, *paths], n=3) or [path for path in paths if key in path.split(".")][:3]
    )
    raise ValueError(
        f"compile.modular.parts.{key}: matches no submodule"
        + (f"; near: {', '.join(near)}" if near else "")
        + (f"; the task declares: {', '.join(names)}" if names else "; the module declares no names, write paths")
    )


def declared_names(program: Program) -> list[str]:
    """Names within the paths that the task declares and that mean one submodule each, outermost first."""
    paths = (*program.whole, *program.blocks, *program.parts)
    names = dict.fromkeys(name for path in paths for name in path.split(".") if not name.isdigit())
    return [name for name in names if len(_named(program, name)) == 1]


def _named(program: Program, name: str) -> list[str]:
    """Declared paths cut after their component ``name``."""
    found: dict[str, None] = {}
    for path in (*program.whole, *program.blocks, *program.parts):
        components = path.split(".")
        if name in components:
            found[".".join(components[: components.index(name) + 1])] = None
    return list(found)


def _matches(path: str, pattern: str) -> bool:
    components, wanted = path.split("."), pattern.split(".")
    return len(components) == len(wanted) and all(map(fnmatchcase, components, wanted))


def _regions_within(program: Program, path: str, name: str) -> list[str]:
    """Blocks and declared parts at or below ``path``; repeated blocks are found where the task declares none there."""
    from strategies.regions import expand_blocks, find_containers

    module = program.module
    containers = [block for block in program.blocks if _holds(path, block)]
    if not containers:
        containers = [f"{path}.{found.path}".rstrip(".") for found in find_containers(module.get_submodule(path))]
        if containers:
            program.notes.append(f"modular: {name}: found repeated blocks in {', '.join(containers)}")
    if not containers:
        raise ValueError(
            f"compile.modular.parts.{name}: {path} holds no repeated blocks to compile regionally; "
            f"set compile.modular.parts.{name}.how=whole"
        )
    blocks = expand_blocks(module, containers)
    beside = [part for part in program.parts if _holds(path, part) and not any(_holds(block, part) for block in blocks)]
    return [*blocks, *beside]


def _require_called(program: Program, paths: Iterable[str], name: str) -> None:
    """A list of modules is never called itself, so that compiling it would do nothing."""
    from strategies.regions import never_called

    for path in paths:
        submodule = program.module.get_submodule(path)
        if never_called(submodule):
            raise ValueError(
                f"compile.modular.parts.{name}: {path} is a {type(submodule).__name__}, which is never called itself; "
                f"write {path}.* or set compile.modular.parts.{name}.how=regional"
            )


def _refuse_nesting(regions: Mapping[str, str], off: Mapping[str, str]) -> None:
    """A compiled submodule takes in all that it calls: settings of a part inside it would do nothing."""
    for inner, owner in (*regions.items(), *off.items()):
        for outer in _parents(inner):
            if outer in regions:
                raise ValueError(
                    f"compile.modular.parts: {owner!r} ({inner}) lies inside {regions[outer]!r} ({outer}), which is "
                    f"compiled with all that it calls; drop one of them, or make {regions[outer]!r} regional"
                )


def _parents(path: str) -> Iterable[str]:
    components = path.split(".")
    return [".".join(components[:length]) for length in range(1, len(components))]


def _holds(outer: str, path: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")
