"""What ``torch.compile`` is asked for: the options that every module strategy shares, checked once.

Torch is imported only inside methods, so that the command line can read these options without it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strategies.base import Strategy
from strategies.toolchain import missing_for_inductor, switched_off

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ON_RECOMPILE_LIMIT = ("eager", "fail")
EMBEDDING_GRADIENTS = ("eager", "inductor")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(kw_only=True, slots=True)
class CompilerRequest:
    """Arguments for ``torch.compile``; see its documentation for mode, backend, fullgraph and dynamic."""

    mode: str = "default"
    """Inductor preset, one of ``MODES``."""
    backend: str = "inductor"
    """Any backend that ``torch.compiler.list_backends(())`` names."""
    fullgraph: bool = True
    """Stop with the reason at a graph break instead of splitting the graph."""
    dynamic: bool | None = None
    """Shapes: true = symbolic from the start, false = one graph a shape, null = static first, symbolic on change."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor options by their dotted name, added to the preset of ``mode``: ``{combo_kernels: true}``."""

    def check_values(self, key: str) -> None:
        """Check what can be checked without torch; ``key`` is what is typed before ``.mode``. Raises ValueError."""
        if self.mode not in MODES:
            raise ValueError(f"{key}.mode={self.mode!r} is not one of {MODES}")
        if self.backend != "inductor" and (self.options or self.mode != "default"):
            raise ValueError(
                f"{key}.backend={self.backend!r} takes neither mode nor options: they belong to 'inductor'"
            )

    def check_machine(self, key: str) -> None:
        """Check backend and options against this torch. Raises ValueError with near matches."""
        import torch

        if off := switched_off():
            raise ValueError(f"{key}: {off}")
        known = torch.compiler.list_backends(())
        if self.backend not in known:
            raise ValueError(
                f"{key}.backend={self.backend!r} is not one of {tuple(sorted(known))}{near(self.backend, known)}"
            )
        if not self.compiles_with_inductor:
            return
        if missing := missing_for_inductor():
            raise ValueError(f"{key}: {missing}")
        if options := self.options:
            from torch._inductor import config as inductor_config

            names = list(inductor_config.get_config_copy())
            for option in options:
                if option not in names:
                    raise ValueError(f"{key}.options: Inductor has no option {option!r}{near(option, names)}")
            try:
                torch.compile(lambda: None, options=options)  # reads the options, compiles nothing yet
            except RuntimeError as error:  # a value of the wrong type
                raise ValueError(f"{key}.options: {str(error).splitlines()[0]}") from error

    @property
    def compiles_with_inductor(self) -> bool:
        return self.backend == "inductor"

    @property
    def asks_for_cuda_graphs(self) -> bool:
        """Whether the preset or an option asks Inductor for CUDA graphs; an option wins over the preset."""
        return bool(self.options.get("triton.cudagraphs", self.mode in CUDA_GRAPH_MODES))

    def compile_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``, a fresh copy at each call (torch pops keys from ``options``)."""
        arguments: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        if self.compiles_with_inductor:
            # torch refuses mode and options together, so the preset is spelt out as the options it stands for.
            from torch._inductor import list_mode_options

            preset = {} if self.mode == "default" else list_mode_options()[self.mode]
            arguments["options"] = {**preset, **self.options}
        return arguments


@dataclass(kw_only=True, slots=True)
class ModuleRequest(CompilerRequest):
    """Arguments for modules, which have a forward and a backward."""

    embedding_gradient: str = "eager"
    """Who computes the gradient of an embedding. ``eager`` = eager's kernel, which adds in a fixed order, so that runs
    of one program repeat; ``inductor`` = Inductor's, which adds with atomics in any order. One part that asks for
    ``inductor`` decides for the whole run."""
    on_recompile_limit: str = "eager"
    """When one piece of code has been compiled 64 times: ``eager`` = its kind of region runs eager from then on, with a
    warning that names the guard that failed; ``fail`` = the run ends."""

    def check_values(self, key: str) -> None:
        CompilerRequest.check_values(self, key)
        if self.on_recompile_limit not in ON_RECOMPILE_LIMIT:
            raise ValueError(f"{key}.on_recompile_limit={self.on_recompile_limit!r} is not one of {ON_RECOMPILE_LIMIT}")
        if self.embedding_gradient not in EMBEDDING_GRADIENTS:
            raise ValueError(
                f"{key}.embedding_gradient={self.embedding_gradient!r} is not one of {EMBEDDING_GRADIENTS}"
            )


@dataclass(kw_only=True, slots=True)
class CompileOptions(CompilerRequest, Strategy):
    """Base of the strategies that hand something to ``torch.compile`` with one set of options."""

    def __post_init__(self) -> None:
        self.check_values(f"compile.{self.name}")

    def check(self) -> None:
        self.check_machine(f"compile.{self.name}")

    @property
    def needs_inductor(self) -> bool:
        return self.compiles_with_inductor

    @property
    def uses_cuda_graphs(self) -> bool:
        return self.asks_for_cuda_graphs


@dataclass(kw_only=True, slots=True)
class ModuleOptions(ModuleRequest, CompileOptions):
    """Base of the strategies that hand modules to ``torch.compile`` with one set of options."""


def near(given: str, known: list[str]) -> str:
    """What an error about ``given`` ends with: the names in ``known`` that resemble it."""
    matches = difflib.get_close_matches(given, known, n=3)
    return f"; near: {', '.join(matches)}" if matches else ""


def file_of_backend(name: str) -> Path | None:
    """The file that defines the backend called ``name``; None for those that come with torch.

    Raises ValueError where the file is not known.
    """
    import torch
    from torch._dynamo.backends.registry import lookup_backend

    found: Any = lookup_backend(name)
    while isinstance(found, functools.partial):
        found = found.func
    function = found if inspect.isroutine(found) else type(found)
    # The backend itself, and what torch's aot_autograd helper was given to build it from.
    parts = [part for part in getattr(found, "kwargs", {}).values() if inspect.isroutine(part)]
    modules = [inspect.getmodule(wanted) for wanted in (function, *parts)]
    files = [Path(file) for module in modules if (file := getattr(module, "__file__", None)) is not None]
    ours = [file for file in files if not file.is_relative_to(Path(torch.__file__).parent)]
    if not ours and modules[0] is None:
        raise ValueError(f"where backend {name!r} is defined is not known")
    return ours[0] if ours else None
