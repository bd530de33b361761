"""``compile=whole``: one graph for the module's forward and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage
from strategies.options import ModuleOptions


@dataclass(kw_only=True, slots=True)
class Whole(ModuleOptions):
    """Compile everything that the task declares as its forward and loss, one graph for each declared module.

    The most speed that one compile gives, for the longest wait. A module that declares nothing has each of its
    children that own parameters compiled; its loss then stays eager, and a note says so.
    """

    name: ClassVar[str] = "whole"
    stage: ClassVar[Stage] = Stage.MODULE

    fullgraph: bool = False
    """Stop with the reason at a graph break instead of splitting the graph."""

    def apply(self, program: Program) -> None:
        from strategies.regions import compile_in_place, expand_blocks, never_called

        program.eager_embeddings &= self.embedding_gradient == "eager"
        paths = program.whole
        if not paths:
            paths = tuple(
                path for path, child in program.module.named_children() if any(True for _ in child.parameters())
            )
            program.notes.append(
                f"whole: the module declares no forward-and-loss part; compiled its children {', '.join(paths)}, "
                "the loss outside them stays eager"
            )
        if not paths:
            raise ValueError("compile.whole: the module has no child with parameters to compile")
        for path in paths:
            held = expand_blocks(program.module, [path]) if never_called(program.module.get_submodule(path)) else [path]
            for each in held:
                compile_in_place(program, each, self.compile_arguments(), strict=self.on_recompile_limit == "fail")
