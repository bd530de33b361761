"""``compile=whole`` and ``compile=regional``: modules compiled in one graph each, or block by repeated block."""

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


@dataclass(kw_only=True, slots=True)
class Regional(ModuleOptions):
    """Compile repeated blocks in place so that copies share one compiled graph, and separable parts beside them.

    Far shorter compiles than ``whole`` at nearly its speed, as long as the head with the loss is one of the parts.
    The idea of sharing is the "regional compilation" recipe of the PyTorch tutorials.
    """

    name: ClassVar[str] = "regional"
    stage: ClassVar[Stage] = Stage.MODULE

    blocks: list[str] | None = None
    """Paths of blocks or of containers of blocks; null = what the task declares, else found in the module tree."""
    parts: list[str] | None = None
    """Paths of other submodules to compile, each a region of its own; null = what the task declares."""

    def apply(self, program: Program) -> None:
        from strategies.regions import compile_in_place, containers_for, expand_blocks, fixed_sizes, require_submodules

        containers = containers_for(program, self.name, self.blocks)
        parts = list(self.parts) if self.parts is not None else list(program.parts)
        require_submodules(program.module, "compile.regional.parts", parts)
        paths = expand_blocks(program.module, containers)
        if not paths and not parts:
            raise ValueError(
                "compile.regional: no repeated blocks found in this module; name them with "
                "compile.regional.blocks=[path,...] or use compile=whole"
            )
        if not paths:
            program.notes.append(f"regional: no repeated blocks here; compiled {', '.join(parts)} alone")
        if not parts:
            program.notes.append(
                "regional: no part beside the blocks is compiled; if head and loss are a submodule, name it in "
                "compile.regional.parts"
            )
        program.eager_embeddings &= self.embedding_gradient == "eager"
        kinds = fixed_sizes(program, paths, self.dynamic)
        if kinds:
            program.notes.append(
                f"regional: {', '.join(kinds)} of several sizes, each compiled for its own; "
                "compile.regional.dynamic=true makes sizes symbolic"
            )
        for path in [*paths, *(part for part in parts if part not in paths)]:
            arguments = self.compile_arguments()
            arguments = {**arguments, "dynamic": False} if kinds else arguments
            compile_in_place(program, path, arguments, strict=self.on_recompile_limit == "fail")
        # DDPOptimizer would split every region again at its bucket boundaries; regions are already small.
        program.settings["optimize_ddp"] = False
