"""``compile=modular``: different settings for different parts of a module, by declared name or by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        """Turn mappings into parts and check what can be checked without torch."""
        # Not dict[str, Part]: OmegaConf then refuses +compile.modular.parts.encoder.how=whole for a new part.
        parts = {name: _part(f"compile.modular.parts.{name}", given) for name, given in self.parts.items()}
        for name, part in parts.items():
            key = f"compile.modular.parts.{name}"
            if part.how not in HOW:
                raise ValueError(f"{key}.how={part.how!r} is not one of {HOW}")
            part.check_values(key)
        self.parts = dict(parts)

    def check(self) -> None:
        """Check backends and options against this torch. Raises ValueError with near matches."""
        if not self._compiled():
            raise ValueError(
                "compile.modular.parts names nothing to compile: add for instance "
                "+compile.modular.parts.encoder.how=whole with a name that the task declares or a module path"
            )
        for name, part in self._compiled().items():
            part.check_machine(f"compile.modular.parts.{name}")

    @property
    def needs_inductor(self) -> bool:
        """Whether a part is compiled by Inductor."""
        return any(part.compiles_with_inductor for part in self._compiled().values())

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a part asks Inductor for CUDA graphs."""
        return any(part.asks_for_cuda_graphs for part in self._compiled().values())

    @property
    def recomputes(self) -> str | None:
        """The activation-memory budget of the first part that has one."""
        options = (part.budget_option(f"compile.modular.parts.{name}") for name, part in self._compiled().items())
        return next(filter(None, options), None)

    def apply(self, program: Program) -> None:
        """Compile in place. Raises ValueError for a name that matches nothing and for parts that overlap."""
        from strategies.blocks import fixed_sizes
        from strategies.inplace import compile_in_place
        from strategies.modular_parts import plan

        planned = plan(program, {name: part.how for name, part in self.parts.items()})
        compiled = self._compiled()
        fixed = {
            name
            for name, part in compiled.items()
            if fixed_sizes(program, [path for path, owner in planned.regions.items() if owner == name], part.dynamic)
        }
        for path, name in planned.regions.items():
            arguments = compiled[name].compile_arguments()
            arguments = {**arguments, "dynamic": False} if name in fixed else arguments
            compile_in_place(program, path, arguments, strict=compiled[name].on_recompile_limit == "fail")
        if any(part.how == "regional" for part in compiled.values()):
            # DDPOptimizer would split every region again at its bucket boundaries; regions are already small.
            program.settings["optimize_ddp"] = False
        if planned.left_eager:
            left = ", ".join(planned.left_eager)
            program.notes.append(f"modular: no part names these declared submodules, so they stay eager: {left}")
        program.report[self.name] = {
            name: [path for path, owner in planned.regions.items() if owner == name] for name in compiled
        }

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
