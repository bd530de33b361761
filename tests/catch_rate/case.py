"""What a case is: a small training that a known fault of ``torch.compile`` changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from crucible import Regional, Strategy, Whole
from torch import Tensor, nn

from tests.promises.training import WIDTH

DYNAMO, AOT, INDUCTOR = "Dynamo", "AOTAutograd", "Inductor"
PARTS = (DYNAMO, AOT, INDUCTOR)
CHANGES = ("loss", "gradient", "buffer", "evaluation", "random numbers", "other state")
"""What a fault may change: what follows from the first wrong thing is not counted again."""
COUNTED = ("loss", "gradient", "buffer")
"""What the aim is about."""


class Block(nn.Module):
    """A residual block; a case overrides ``mix``, and what else of the training the fault needs."""

    holds: ClassVar[dict[str, Callable[[], Any]]] = {}
    """Attributes by name, with what makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, make in self.holds.items():
            setattr(self, name, make())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = args
        return x + self.mix(torch.tanh(self.linear(x)))

    def mix(self, h: Tensor) -> Tensor:
        """What the fault is in. h: rows, width."""
        return h

    def called(self, x: Tensor) -> Tensor:
        """How the network calls it."""
        return self(x)

    def prepare(self) -> None:
        """Called before the training: what of the class another training has left is put back."""

    @classmethod
    def earlier(cls, begins: bool) -> None:
        """Called around a training that goes before, in the place of an earlier process: see ``Case.after_another``."""

    def before_step(self, step: int) -> None:
        """Called before the step of that number, which begins at 1."""

    def later(self) -> None:
        """Called before the step that is the first to be wrong."""

    def loss(self, module: Any, batch: Any) -> Tensor:
        """The training's, asked of the first block."""
        return (module.net(batch) - 1).square().mean()

    def observed(self) -> list[float]:
        """Beside losses, weights, buffers and metrics: what has to be eager's after the training."""
        return []


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and the fault that changes it."""

    name: str
    block: type[Block]
    changes: str
    """The first thing that is wrong, one of ``CHANGES``."""
    part: str
    """Of the compiler, one of ``PARTS``."""
    issues: tuple[int, ...]
    """Of PyTorch on GitHub."""
    reported: str
    """The versions that have the fault, as its issue says."""
    backend: str = "aot_eager"
    whole: bool = False
    """Whether the network is compiled as one, not block by block."""
    begins: int = 1
    """The step that is the first to be wrong."""
    steps: int = 8
    validates: bool = False
    precision: str = "32-true"
    after_another: bool = False
    """Whether each training comes after another one of the same kind, whose compile caches it finds."""
    own_numbers: bool = False
    """Whether compiled code may draw other random numbers than eager: then ``observed`` alone is compared."""
    planted: Callable[[], str] | None = None
    """Makes a backend with the fault in it, where no version that runs here has it."""

    def strategies(self, backend: str) -> list[Strategy]:
        return [Whole(backend=backend) if self.whole else Regional(backend=backend)]


CASES: dict[str, Case] = {}


def case(name: str, changes: str, part: str, *issues: int, reported: str, **more: Any) -> Callable[[Any], Any]:
    """Enter a block into the table, or a function as one's ``mix``."""
    assert name not in CASES, name
    assert changes in CHANGES, name
    assert part in PARTS, name
    assert issues, name

    def enter(made: Any) -> Any:
        block = made if isinstance(made, type) else type(made.__name__, (Block,), {"mix": staticmethod(made)})
        CASES[name] = Case(name=name, block=block, changes=changes, part=part, issues=issues, reported=reported, **more)
        return made

    return enter
