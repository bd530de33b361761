"""``compile=checkpointing``: repeated blocks compute their activations again in the backward, and do not keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage, Strategy


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
    training_only: ClassVar[str | None] = "without a backward there are no activations to compute again"

    every: int = 1
    """Each n-th block of a container computes again, beginning with its first; the others keep their activations."""
    blocks: list[str] | None = None
    """Paths of blocks or of containers of blocks; null = what the task declares, else found in the module tree."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"compile.checkpointing.every={self.every} must be at least 1")

    @property
    def recomputes(self) -> str | None:
        return f"compile={self.name}"

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
        for path in chosen:
            try:
                recompute(program.module.get_submodule(path))
            except ValueError as error:
                raise ValueError(f"compile.checkpointing: {path}: {error}") from error
        program.report[self.name] = {"blocks": sum(map(len, found)), "computed_again": len(chosen), "paths": chosen}

    def begin(self, program: Program) -> None:
        """Another training of a program whose blocks were given back."""
        from strategies.regions import recompute, recomputes

        for path in program.report[self.name]["paths"]:
            block = program.module.get_submodule(path)
            if not recomputes(block):
                recompute(block)

    def end(self, program: Program) -> None:
        from strategies.regions import keep_activations

        for path in program.report.get(self.name, {}).get("paths", ()):
            keep_activations(program.module.get_submodule(path))
