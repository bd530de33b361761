"""What the tests of the guards share: a module with everything that a pass could leave a trace in, and odd backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

from tests.trainer.clock import CLOCK
from tests.trainer.lightning_modules import Blocks


class Noisy(nn.Module):
    """A block with dropout and running statistics."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.dropout(self.norm(self.linear(x_BD)))


class Traceable(Blocks):
    """Dropout, running statistics, Adam, a schedule, a counter, a list and a metric of its own."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy(dropout) for _ in range(3))
        self.calls = 0
        self.seen: list[float] = []
        self.facts: dict[str, Any] = {"total": torch.zeros(()), "largest": None}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.seen.append(float(loss.detach()))
        self.facts["total"] += loss.detach()
        self.facts["largest"] = max(self.seen)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step",
        }}  # fmt: skip


Change = Callable[[Any], Any]


def _changed(graph: GraphModule, change: Change) -> Callable[..., Any]:
    return make_boxed_func(lambda *inputs: change(lambda: graph.forward(*inputs)))


@contextlib.contextmanager
def backend(name: str, forward: Change, backward: Change) -> Iterator[str]:
    """A backend that runs graphs as they are, each call of them through ``forward`` or ``backward``."""
    made = aot_autograd(
        fw_compiler=lambda graph, _: _changed(graph, forward), bw_compiler=lambda graph, _: _changed(graph, backward)
    )
    if name not in torch.compiler.list_backends(()):
        torch._dynamo.register_backend(made, name=name)
    yield name


def as_it_is(run: Callable[[], Any]) -> Any:
    return run()


def scaled(factor: float) -> Change:
    """Floating results come out larger by ``factor``."""

    def change(run: Callable[[], Any]) -> Any:
        return [
            result * factor if isinstance(result, Tensor) and result.is_floating_point() else result for result in run()
        ]

    return change


def slowed(seconds: float) -> Change:
    """Takes ``seconds`` longer, by ``CLOCK``."""

    def change(run: Callable[[], Any]) -> Any:
        CLOCK.sleep(seconds)
        return run()

    return change
