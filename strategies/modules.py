"""``compile=whole`` and ``regional``: modules compiled in one graph each, or block by repeated block; ``auto``, which
chooses among them while the run trains; and beside them ``dynamic``, symbolic shapes for ragged lengths, and
``checkpointing``, blocks that compute their activations again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from strategies.base import Found, Program, Stage, Strategy, require_types, wrong
from strategies.compile_options import ModuleOptions


class NothingRepeats(ValueError):
    """A module without repeated blocks."""


CANDIDATES = ("regional", "whole", "cuda_graph")
"""Strategies that a choice may be made among; eager always is one, and cuda_graph joins any other."""


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
        from strategies.regions import callable_paths, compile_children, compile_regions, require_submodules

        require_submodules(program.module, "whole", program.whole)
        compile_regions(program, self, callable_paths(program.module, program.whole), small=False)
        if not program.whole and (children := compile_children(program, self)):
            program.notes.append(
                f"whole: the module declares no forward-and-loss part; compiled its children {', '.join(children)}, "
                "the loss outside them stays eager"
            )


@dataclass(kw_only=True, slots=True)
class Regional(ModuleOptions):
    """Compile repeated blocks in place so that copies share one compiled graph, and separable parts beside them.

    Far shorter compiles than ``whole`` at nearly its speed, as long as the head with the loss is one of the parts.
    Where nothing repeats and nothing is named, the module's children are compiled as by ``whole``; where what was found
    is never called, the outermost modules that the second step calls in its place. The idea of sharing is the
    "regional compilation" recipe of the PyTorch tutorials.
    """

    name: ClassVar[str] = "regional"
    stage: ClassVar[Stage] = Stage.MODULE

    blocks: list[str] | None = None
    """Paths of blocks or of containers of blocks; null = what the task declares, else found in the module tree."""
    parts: list[str] | None = None
    """Paths of other submodules to compile, each a region of its own; null = what the task declares."""

    def paths(self, program: Program) -> tuple[list[str], list[str]]:
        """Of blocks and of parts. Raises ValueError where there is neither, ``NothingRepeats`` if none was named."""
        from strategies.regions import containers_for, expand_blocks, require_submodules

        parts = list(self.parts) if self.parts is not None else list(program.parts)
        require_submodules(program.module, "compile.regional.parts", parts)
        blocks = expand_blocks(program.module, containers_for(program, self.name, self.blocks))
        if not blocks and not parts:
            kind = NothingRepeats if self.blocks is None and self.parts is None else ValueError
            raise kind(
                "compile.regional: no repeated blocks found in this module; name them with "
                "compile.regional.blocks=[path,...] or use compile=whole"
            )
        return blocks, parts

    def apply(self, program: Program) -> None:
        from strategies.regions import compile_children, compile_regions

        try:
            blocks, parts = self.paths(program)
        except NothingRepeats:
            if children := compile_children(program, self):
                program.notes.append(
                    f"regional: no repeated blocks found in this module; compiled its children {', '.join(children)}, "
                    "each as a whole"
                )
            return
        taken = compile_regions(program, self, list(dict.fromkeys([*blocks, *parts])), small=True)
        if taken and not blocks:
            program.notes.append(f"regional: no repeated blocks here; compiled {', '.join(taken)} alone")
        if taken and not parts:
            program.notes.append(
                "regional: no part beside the blocks is compiled; if head and loss are a submodule, name it in "
                "compile.regional.parts"
            )
        if self.blocks is None and not program.blocks:
            found = tuple(path for path in blocks if path in taken)
            program.found = Found(self.name, found, partial(compile_regions, program, self, small=True))


@dataclass(kw_only=True, slots=True)
class Dynamic(Strategy):
    """Leave batches as they are and let the compiled code take any length; ``buckets`` is the alternative.

    ``torch.compile``'s ``dynamic=True`` for all that is compiled, unless its own ``dynamic`` says other. Batches keep
    examples and order. Each one is only padded up to a ``multiple``, because attention kernels guard on alignment:
    without it, aligned lengths and others need a graph each, or none can be compiled for all.
    """

    name: ClassVar[str] = "dynamic"
    stage: ClassVar[Stage] = Stage.SHAPES

    multiple: int = 8
    """Every batch is padded up to a multiple of this many positions, or to where a table of the module may end; 1
    leaves lengths as they are."""

    def __post_init__(self) -> None:
        require_types(self)
        if self.multiple < 1:
            raise wrong("compile.dynamic", "multiple", self.multiple, "must be at least 1")

    def apply(self, program: Program) -> None:
        from strategies.base import Padding
        from strategies.padding import require_ragged, table_sizes

        require_ragged(program.ragged, self.name)
        tables = table_sizes(program.module)
        program.padding = Padding(
            name=self.name, ragged=program.ragged, multiple=self.multiple, tables=tables, dynamic=True
        )
        program.report[self.name] = {"multiple": self.multiple}


@dataclass(kw_only=True, slots=True)
class Checkpointing(Strategy):
    """Trade time for memory: a block keeps its input alone, and runs forward once more when its backward comes.

    Acts before anything is compiled, so that the compiler sees which part of its graph is to be computed again, and
    before anything is sharded (the order of torchtitan: checkpointing, compile, FSDP). Losses are eager's: random
    numbers are repeated. Without gradients (validation) nothing is done differently.
    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    name: ClassVar[str] = "checkpointing"
    stage: ClassVar[Stage] = Stage.ACTIVATIONS
    exclusive: ClassVar[bool] = False

    every: int = 1
    """Each n-th block of a container computes again, beginning with its first; the others keep their activations."""
    blocks: list[str] | None = None
    """Paths of blocks or of containers of blocks; null = what the task declares, else found in the module tree."""

    def __post_init__(self) -> None:
        require_types(self)
        if self.every < 1:
            raise wrong("compile.checkpointing", "every", self.every, "must be at least 1")

    def apply(self, program: Program) -> None:
        from strategies.regions import Recomputed, containers_for, expand_blocks

        containers = containers_for(program, self.name, self.blocks)
        found = [expand_blocks(program.module, [container]) for container in containers]
        chosen = [path for blocks in found for path in blocks[:: self.every]]
        if not chosen:
            raise ValueError(
                "compile.checkpointing: no repeated blocks found in this module; name submodules with "
                "compile.checkpointing.blocks=[path,...]"
            )
        blocks = {program.module.get_submodule(path): path for path in chosen}  # once, where there are several paths
        program.recomputed = [Recomputed(path, block) for block, path in blocks.items()]
        program.report[self.name] = {"blocks": sum(map(len, found)), "computed_again": len(chosen), "paths": chosen}


@dataclass(kw_only=True, slots=True)
class Auto(Strategy):
    """Choose how modules are compiled, and whether steps are captured, while the run trains.

    Eager first, timed on the training's own steps. Then what may save the most for each second of setting up: steps
    captured, ``regional``, ``whole``, one change at a time; ``second_order`` where one of these was found to be in the
    way of a gradient of the network within the loss. A candidate is tried only where the steps to come can pay
    for it. It takes over between two steps, its regions are checked as those of any strategy are, its real steps are
    timed, and it stays if it is faster; else what was best before trains on. The decision, with its table, is in the
    record, and is remembered: a second run of the same program begins with what was best. ``trainer.auto`` does the
    work; other strategies (``buckets``, ``cached``, ``optimizer``) go with it as they are.
    """

    name: ClassVar[str] = "auto"
    stage: ClassVar[Stage] = Stage.MODULE
    headlines: ClassVar[tuple[str, ...]] = (
        *("chosen", "planned_steps", "decided_at_step", "setup_seconds", "gained_seconds", "remembered"),
    )

    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    """Strategies to choose among, of ``regional``, ``whole`` and ``cuda_graph``. Of these, one that cannot take a
    gradient within the loss gives way to ``second_order``."""
    planned_steps: int | None = None
    """Optimizer steps that the choice is made for; null = those that this run has before it. Set it where this run
    is the first of several that go on from each other."""
    remember: bool = True
    """Whether what an earlier run of the same program, batch, machine and torch measured is used, and this one kept: in
    ``crucible/auto`` of the user's cache directory."""

    @property
    def compiles(self) -> bool:
        """Not by itself: what it tries does."""
        return False

    def __post_init__(self) -> None:
        require_types(self)
        for name in self.candidates:
            if name not in CANDIDATES:
                raise wrong("compile.auto", "candidates", self.candidates, f": {name!r} is not one of {CANDIDATES}")
        if self.planned_steps is not None and self.planned_steps < 1:
            raise wrong("compile.auto", "planned_steps", self.planned_steps, "must be at least 1")


@dataclass(kw_only=True, slots=True)
class Background(Strategy):
    """The name of a strategy that compiled in a second process: a warning, and the run goes on without it."""

    name: ClassVar[str] = "background"
    stage: ClassVar[Stage] = Stage.MODULE
    removed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        warnings.warn(
            "compile.background was removed: the run goes on without it. compile=auto begins in eager and compiles "
            "what the steps to come pay for, compile=[...,cached] starts warm",
            FutureWarning,
            stacklevel=3,
        )
