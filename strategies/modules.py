"""``compile=whole`` and ``regional``: modules compiled in one graph each, or block by repeated block; ``auto``, which
chooses among them while the run trains, and ``background``, which compiles them in a second process meanwhile; and
beside them ``dynamic``, symbolic shapes for ragged lengths, and ``checkpointing``, blocks that compute their
activations again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

from strategies.base import Program, Stage, Strategy
from strategies.options import ModuleOptions

HOW = ("mark", "always", "automatic")
CANDIDATES = ("regional", "whole", "cuda_graph")
"""Strategies that a choice may be made among; eager always is one, and cuda_graph joins any other."""
MIN_CORES = 4
"""Below this many, the helper process takes from the training what it gives it later."""
TOGETHER = (
    *("background", "regional", "whole", "modular", "cuda_graph", "cached"),
    *("buckets", "dynamic", "checkpointing", "optimizer"),
)
"""Strategies whose regions the helper can compile, or which do not change them."""


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
        from strategies.regions import called_for, compile_regions

        module, paths = program.module, program.whole
        if not paths:
            paths = tuple(path for path, child in module.named_children() if any(True for _ in child.parameters()))
            if not paths:
                raise ValueError("compile.whole: the module has no child with parameters to compile")
            program.notes.append(
                f"whole: the module declares no forward-and-loss part; compiled its children {', '.join(paths)}, "
                "the loss outside them stays eager"
            )
        for path in called_for(module, paths):
            compile_regions(program, self, [path], small=False)


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
        from strategies.regions import compile_regions, containers_for, expand_blocks, require_submodules

        parts = list(self.parts) if self.parts is not None else list(program.parts)
        require_submodules(program.module, "compile.regional.parts", parts)
        blocks = expand_blocks(program.module, containers_for(program, self.name, self.blocks))
        if not blocks and not parts:
            raise ValueError(
                "compile.regional: no repeated blocks found in this module; name them with "
                "compile.regional.blocks=[path,...] or use compile=whole"
            )
        if not blocks:
            program.notes.append(f"regional: no repeated blocks here; compiled {', '.join(parts)} alone")
        if not parts:
            program.notes.append(
                "regional: no part beside the blocks is compiled; if head and loss are a submodule, name it in "
                "compile.regional.parts"
            )
        compile_regions(program, self, list(dict.fromkeys([*blocks, *parts])), small=True)


@dataclass(kw_only=True, slots=True)
class Dynamic(Strategy):
    """Leave batches as they are and let the compiled code take any length; ``buckets`` is the alternative.

    Batches keep examples and order. Each one is only padded up to a ``multiple``, because attention kernels guard on
    alignment: without it, aligned lengths and others need a graph each, or none can be compiled for all.
    """

    name: ClassVar[str] = "dynamic"
    stage: ClassVar[Stage] = Stage.SHAPES

    how: str = "mark"
    """``mark`` (the ragged dimensions symbolic from the start), ``always`` (every dimension: torch's ``dynamic=True``)
    or ``automatic`` (static at first, symbolic where a size changes: torch's ``dynamic=None``)."""
    multiple: int = 8
    """Every batch is padded up to a multiple of this many positions, or to where a table of the module may end; 1
    leaves lengths as they are."""

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ValueError(f"compile.dynamic.how={self.how!r} is not one of {HOW}")
        if self.multiple < 1:
            raise ValueError(f"compile.dynamic.multiple={self.multiple} must be at least 1")

    def apply(self, program: Program) -> None:
        from strategies.padding import Marks, Padding, require_ragged, table_sizes

        require_ragged(program.ragged, self.name)
        tables = table_sizes(program.module)
        program.padding = Padding(name=self.name, ragged=program.ragged, multiple=self.multiple, tables=tables)
        program.report[self.name] = {"how": self.how, "multiple": self.multiple}
        if self.how == "always":
            program.padding.dynamic = True
        elif self.how == "mark":
            marks = Marks(program.ragged)
            program.padding.observe = marks.observe
            program.padding.around_region = marks.around


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

    every: int = 1
    """Each n-th block of a container computes again, beginning with its first; the others keep their activations."""
    blocks: list[str] | None = None
    """Paths of blocks or of containers of blocks; null = what the task declares, else found in the module tree."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"compile.checkpointing.every={self.every} must be at least 1")

    def apply(self, program: Program) -> None:
        from strategies.regions import containers_for, expand_blocks, recompute

        containers = containers_for(program, self.name, self.blocks)
        found = [expand_blocks(program.module, [container]) for container in containers]
        chosen = [path for blocks in found for path in blocks[:: self.every]]
        if not chosen:
            raise ValueError(
                "compile.checkpointing: no repeated blocks found in this module; name submodules with "
                "compile.checkpointing.blocks=[path,...]"
            )
        program.kept[self.name] = {path: program.module.get_submodule(path) for path in chosen}
        for path, block in program.kept[self.name].items():
            recompute(path, block)
        program.report[self.name] = {"blocks": sum(map(len, found)), "computed_again": len(chosen), "paths": chosen}

    def begin(self, program: Program) -> None:
        """Another training of a program whose blocks were given back."""
        from strategies.regions import recompute

        for path, block in program.kept[self.name].items():
            recompute(path, block)

    def end(self, program: Program) -> None:
        from strategies.regions import recomputes

        for block in program.kept.get(self.name, {}).values():
            if recomputes(block):
                del block.forward


@dataclass(kw_only=True, slots=True)
class Auto(Strategy):
    """Choose how modules are compiled, and whether steps are captured, while the run trains.

    Eager first, timed on the training's own steps. A candidate is tried only where the steps to come could pay for it.
    A helper process compiles it meanwhile, as for ``background``, where the machine has the cores. It takes over
    between two steps, is compared with eager as any strategy is, is timed on real steps, and stays if it is faster;
    else what was best before trains on. The decision, with its table, is in the record, and is remembered: a second
    run of the same program begins with what was best. ``trainer.auto`` does the work; other strategies
    (``buckets``, ``cached``, ``optimizer``) go with it as they are.
    """

    name: ClassVar[str] = "auto"
    stage: ClassVar[Stage] = Stage.MODULE
    headlines: ClassVar[tuple[str, ...]] = (
        *("chosen", "reason", "planned_steps", "decided_at_step", "setup_seconds", "gained_seconds", "remembered"),
    )
    chooser: ClassVar[str | None] = "trainer.auto.chooser:Chooser"

    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    """Strategies to choose among, of ``regional``, ``whole`` and ``cuda_graph``."""
    planned_steps: int | None = None
    """Optimizer steps that the choice is made for; null = those that this run has before it. Set it where this run
    is the first of several that go on from each other."""
    background: bool | None = None
    """Whether a helper process compiles what is tried while the training continues, as ``background`` does; null = on
    machines of four cores or more, false = the training stands still for each compile."""
    remember: bool = True
    """Whether what an earlier run of the same program, batch, machine and torch measured is used, and this one kept: in
    ``crucible/auto`` of the user's cache directory."""

    @property
    def compiles(self) -> bool:
        """Not by itself: what it tries is compared with eager when it takes over."""
        return False

    @property
    def helper(self) -> Background | None:
        """None on a machine of few cores, too."""
        options = Background(force=bool(self.background))
        modules = [name for name in self.candidates if name != "cuda_graph"]
        return options.helper if modules and self.background is not False else None

    def __post_init__(self) -> None:
        for name in self.candidates:
            if name not in CANDIDATES:
                raise ValueError(f"compile.auto.candidates: {name!r} is not one of {CANDIDATES}")
        if self.planned_steps is not None and self.planned_steps < 1:
            raise ValueError(f"compile.auto.planned_steps={self.planned_steps} must be at least 1")


@dataclass(kw_only=True, slots=True)
class Background(Strategy):
    """Begin in eager, compile in a helper process, and switch region by region between steps.

    The helper builds the same regions with empty weights, runs forward and backward of each on inputs of the same
    shapes, and so fills torch's own caches on disk. The training then traces each region, finds its code in the cache
    and compares it with eager on the inputs of a real step before it is used. A helper that fails costs a warning: the
    run continues in eager. ``trainer.background`` does the work.
    """

    name: ClassVar[str] = "background"
    stage: ClassVar[Stage] = Stage.BACKGROUND
    headlines: ClassVar[tuple[str, ...]] = (
        *("switched", "regions", "helper_seconds", "helper_failed", "eager_step_seconds_median"),
        *("longest_eager_step_seconds", "longest_switching_step_seconds"),
    )
    takeover: ClassVar[str | None] = "trainer.background.takeover:Takeover"

    at_step: int | None = None
    """First optimizer step that runs compiled code, 3 or later in a run; the run waits there for the helper. Repeats
    the switches of an earlier run, also where a run is resumed. null = as soon as each region is compiled."""
    max_device_gib: float = 8.0
    """Device memory that the helper may use, GiB, beside CUDA's own context."""
    max_host_gib: float = 16.0
    """Host memory of the helper above which it ends itself, GiB, without its compile workers."""
    timeout_seconds: float = 1800.0
    """Time after which the helper is ended."""
    force: bool = False
    """Whether a helper is started on fewer than four cores as well, where it slows the training down."""

    def __post_init__(self) -> None:
        if self.at_step is not None and self.at_step < 1:
            raise ValueError(f"compile.background.at_step={self.at_step} must be at least 1")
        for option in ("max_device_gib", "max_host_gib", "timeout_seconds"):
            if not getattr(self, option) > 0:
                raise ValueError(f"compile.background.{option}={getattr(self, option)} must be above 0")

    @property
    def left_out(self) -> str | None:
        """Why no helper is started on this machine, so that everything compiles in the foreground."""
        cores = usable_cores()
        if self.force or cores >= MIN_CORES:
            return None
        return (
            f"left out, {cores} cores are too few for a helper beside the training; compiled in the foreground. "
            f"compile.{self.name}.force=true starts it all the same"
        )

    @property
    def helper(self) -> Background | None:
        """None on a machine of few cores."""
        return self if self.left_out is None else None

    def apply(self, program: Program) -> None:
        """Raise ValueError where there is nothing that can be compiled in the background."""
        for other in program.strategies:
            if other.name not in TOGETHER:
                raise ValueError(
                    f"compile: {self.name!r} does not go with {other.name!r}: what that one prepares is not known to "
                    "the helper process; leave one of them out"
                )
        if not program.regions:
            raise ValueError(f"compile.{self.name}: nothing to compile; add regional or whole")
        if self.left_out is not None:
            program.notes.append(f"{self.name}: {self.left_out}")
        elif program.sharded:
            program.notes.append(
                f"{self.name}: left out, the helper has no other process to gather parameters from that are sharded; "
                "compiled in the foreground"
            )


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
