"""The five ``torch.compile`` options that every module strategy shares, checked once.

Torch is imported only inside methods, so that the command line can read these options without it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from strategies.base import Strategy
from strategies.toolchain import missing_toolchain

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(kw_only=True, slots=True)
class CompileOptions(Strategy):
    """Base of the strategies that hand modules to ``torch.compile``; see its documentation for each option."""

    mode: str = "default"
    """Inductor preset, one of ``MODES``."""
    backend: str = "inductor"
    """Any backend that ``torch.compiler.list_backends(())`` names."""
    fullgraph: bool = True
    """Stop with the reason at a graph break instead of splitting the graph."""
    dynamic: bool | None = None
    """Shapes: true = symbolic from the start, false = one graph a shape, null = static first, symbolic on change."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor options by their dotted name, added to the preset of ``mode``."""

    def __post_init__(self) -> None:
        """Check what can be checked without torch."""
        if self.mode not in MODES:
            raise ValueError(f"compile.{self.name}.mode={self.mode!r} is not one of {MODES}")
        if self.backend != "inductor" and (self.options or self.mode != "default"):
            raise ValueError(
                f"compile.{self.name}.backend={self.backend!r} takes neither mode nor options: "
                "they belong to 'inductor'"
            )

    def check(self) -> None:
        """Check backend and options against this torch. Raises ValueError with near matches."""
        import torch

        known = torch.compiler.list_backends(())
        if self.backend not in known:
            raise ValueError(f"compile.{self.name}.backend={self.backend!r} is not one of {tuple(sorted(known))}")
        if self.needs_inductor and not torch.cuda.is_available() and (missing := missing_toolchain()):
            raise ValueError(f"compile.{self.name}: {missing}")
        if self.options:
            from torch._inductor import config as inductor_config

            names = list(inductor_config.get_config_copy())
            for option in self.options:
                if option not in names:
                    near = difflib.get_close_matches(option, names, n=3)
                    hint = f"; near: {', '.join(near)}" if near else ""
                    raise ValueError(f"compile.{self.name}.options: Inductor has no option {option!r}{hint}")

    @property
    def needs_inductor(self) -> bool:
        """Whether the backend is Inductor."""
        return self.backend == "inductor"

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether the preset or an option asks Inductor for CUDA graphs."""
        return self.mode in CUDA_GRAPH_MODES or bool(self.options.get("triton.cudagraphs"))

    def compile_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``, a fresh copy at each call (torch pops keys from ``options``)."""
        arguments: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        if self.backend == "inductor":
            # torch refuses mode and options together, so the preset is spelt out as the options it stands for.
            from torch._inductor import list_mode_options

            preset = {} if self.mode == "default" else list_mode_options()[self.mode]
            arguments["options"] = {**preset, **self.options}
        return arguments
