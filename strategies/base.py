"""Strategy, Stage and Program: how a strategy is declared and what it changes.

A strategy is one keyword-only, slotted dataclass whose fields are its configuration (``compile.<name>.<field>=``).
Importing this module must stay cheap (no torch): the command line imports every strategy to know its configuration.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn


class Stage(enum.IntEnum):
    """When a strategy acts. Strategies run in this order whatever their order on the command line."""

    CACHE = 0
    SHAPES = 1
    MODULE = 2
    OPTIMIZER = 3
    STEP = 4


@dataclass(slots=True, kw_only=True)
class Region:
    """One submodule that was handed to the compiler."""

    path: str
    """Path of the submodule, as in ``module.get_submodule(path)``."""
    kind: str
    """Class name of the submodule; regions of one kind share their compiled code."""
    frame: tuple[str, int]
    """File and first line of the code that the compiler is expected to compile."""


@dataclass(slots=True, kw_only=True)
class Program:
    """What will execute each step; strategies change it in place."""

    module: nn.Module
    """The user's module, never wrapped or replaced."""
    whole: tuple[str, ...] = ()
    """Declared submodules whose forward calls together are forward and loss."""
    blocks: tuple[str, ...] = ()
    """Declared containers of repeated blocks."""
    parts: tuple[str, ...] = ()
    """Declared submodules worth a region of their own."""
    regions: list[Region] = field(default_factory=list)
    """Filled by strategies: what was handed to the compiler."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Filled by strategies: ``torch._dynamo.config`` values needed while the run lasts, restored after it."""
    notes: list[str] = field(default_factory=list)
    """Filled by strategies: lines the user should read (an option without effect, an undeclared loss)."""


@dataclass(kw_only=True, slots=True)
class Strategy:
    """Base of every strategy: one change to how a task executes, at one declared stage."""

    name: ClassVar[str]
    """Key under ``compile`` in the configuration."""
    stage: ClassVar[Stage]
    """When the strategy acts."""
    exclusive: ClassVar[bool] = True
    """Whether another strategy of the same stage is a conflict."""

    def check(self) -> None:
        """Look at this machine and this torch before any work starts. Raises ValueError with the mend."""

    @property
    def needs_inductor(self) -> bool:
        """Whether Inductor will be asked to compile, so that it can be got ready while data and model are built."""
        return False

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether what it compiles is replayed from CUDA graphs, which keep their outputs in memory of their own."""
        return False

    def apply(self, program: Program) -> None:
        """Change ``program`` in place. Raises ValueError for options that do not fit this program."""
        raise NotImplementedError
