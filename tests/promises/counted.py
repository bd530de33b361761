"""Modules, data, optimizers, schedulers, metrics, loggers and callbacks that write down every call that they get."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy
import torch
import torchmetrics
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.promises.training import WIDTH, Block, Net

Call = tuple[Any, ...]
_WRITTEN: list[list[Call]] = []
"""By notebook: outside of every object that a training holds, so that nobody could put it back."""


class Calls:
    """A notebook."""

    def __init__(self) -> None:
        self.number = len(_WRITTEN)
        _WRITTEN.append([])

    def append(self, call: Call) -> None:
        _WRITTEN[self.number].append(call)

    def all(self) -> list[Call]:
        return _WRITTEN[self.number]


LOADERS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
TRANSFERS = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
NOT_HOOKS = LOADERS | TRANSFERS | {"configure_sharded_model"}
"""Of a module: what its data module has, and what Lightning no longer takes."""
MORE_OF_A_MODULE = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
    *("configure_callbacks", "log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer"),
    *("state_dict", "load_state_dict", "lr_scheduler_step"),
)


def public_methods(*kinds: type) -> list[str]:
    """Names of what these classes define."""
    return [name for kind in kinds for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"]


def written_down(base: type, prefix: str, names: Sequence[str], calls: Calls) -> type:
    """A class whose methods of those names are written into ``calls`` with their batch's index, and do as before."""

    def method(name: str) -> Callable[..., Any]:
        own = getattr(base, name)
        signature = inspect.signature(own)

        @functools.wraps(own)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            bound = signature.bind(self, *given, **named).arguments
            calls.append((f"{prefix}.{name}", bound.get("batch_idx"), bound.get("name")))
            return own(self, *given, **named)

        return call

    return type(base.__name__, (base,), {name: method(name) for name in dict.fromkeys(names) if hasattr(base, name)})


class Metric(torchmetrics.Metric):
    """A mean, whose every call is written down."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.calls = calls

    def update(self, value: Tensor) -> None:
        self.calls.append(("metric.update", None))
        self.total += value.detach()

    def compute(self) -> Tensor:
        self.calls.append(("metric.compute", None))
        return self.total

    def reset(self) -> None:
        if hasattr(self, "calls"):
            self.calls.append(("metric.reset", None))
        super().reset()


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """Counts its steps from the outside."""

    def __init__(self, optimizer: Any, calls: Calls) -> None:
        self.calls = calls
        super().__init__(optimizer, lambda step: 0.99**step)

    def step(self, epoch: Any = None) -> None:
        self.calls.append(("scheduler.step", None))
        super().step(epoch)


def watched(optimizer: torch.optim.Optimizer, name: str, calls: Calls) -> torch.optim.Optimizer:
    """The same optimizer; its steps and its ``zero_grad`` are written down, with the gradients as they are then."""

    def norm() -> float:
        found = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        return float(f"{sum(float(one.double().square().sum()) for one in found):.3e}")

    own = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        calls.append((f"{name}.zero_grad", None))
        own(set_to_none)

    optimizer.register_step_pre_hook(lambda *_: calls.append((f"{name}.step begins", norm())))
    optimizer.register_step_post_hook(lambda *_: calls.append((f"{name}.step ends", norm())))
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


class WritingSGD(torch.optim.SGD):
    """An optimizer of one's own, which counts for itself."""

    calls: Calls

    def step(self, closure: Any = None) -> Any:
        self.calls.append(("own step", closure is not None))
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append(("own zero_grad", None))
        super().zero_grad(set_to_none)


class Counted(L.LightningModule):
    """Logs, draws random numbers of three generators, and writes down what it is called with."""

    def __init__(self, calls: Calls, *, dropout: float = 0.0, own_optimizer: bool = False) -> None:
        super().__init__()
        self.calls = calls
        self.net = Net([nn.Sequential(Block(), nn.Dropout(dropout)) if dropout else Block() for _ in range(2)])
        self.metric = Metric(calls)
        self.own_optimizer = own_optimizer

    def seen(self, what: str, batch: Any, batch_idx: int) -> None:
        mode = "train" if self.training else "eval", torch.is_grad_enabled()
        self.calls.append((what, batch_idx, round(float(batch.sum()), 4), *mode))
        drawn = float(torch.rand(())), random.random(), float(numpy.random.rand())
        self.calls.append(("random numbers", *(round(one, 6) for one in drawn)))

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen("training_step", batch, batch_idx)
        loss = self.loss(batch)
        self.metric.update(loss)
        self.log("loss", loss)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log_dict({"one": 1.0, "two": 2.0})
        return {"loss": loss, "more": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen("validation_step", batch, batch_idx)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        self.calls.append(("configure_optimizers", None))
        optimizer: Any
        if self.own_optimizer:
            WritingSGD.calls = self.calls
            optimizer = WritingSGD(self.parameters(), lr=0.05)
        else:
            optimizer = watched(torch.optim.AdamW(self.parameters(), lr=0.01), "optimizer", self.calls)
        return [optimizer], [{"scheduler": Schedule(optimizer, self.calls), "interval": "step"}]


class Game(Counted):
    """Two networks against each other, each with an optimizer and a schedule; the generator steps every second time."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.automatic_optimization = False
        self.generator, self.critic = Net([Block(), Block()]), Net([Block(), Block()])
        self.generator.head = nn.Linear(WIDTH, WIDTH)
        del self.net

    def loss(self, batch: Any) -> Tensor:
        return self.critic(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen("training_step", batch, batch_idx)
        generator, critic = self.optimizers()
        noise = torch.randn_like(batch)
        self.toggle_optimizer(critic)
        critic.zero_grad()
        loss = nn.functional.softplus(-self.critic(batch)).mean()
        loss = loss + nn.functional.softplus(self.critic(self.generator(noise).detach())).mean()
        self.manual_backward(loss)
        self.clip_gradients(critic, 1.0, "norm")
        critic.step()
        self.untoggle_optimizer(critic)
        self.log("critic", loss)
        if batch_idx % 2:
            self.toggle_optimizer(generator)
            generator.zero_grad()
            loss = nn.functional.softplus(-self.critic(self.generator(noise))).mean()
            self.manual_backward(loss)
            generator.step()
            self.untoggle_optimizer(generator)
            self.log("generator", loss)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        self.calls.append(("configure_optimizers", None))
        made = [
            watched(torch.optim.Adam(network.parameters(), lr=0.01), name, self.calls)
            for name, network in (("generator", self.generator), ("critic", self.critic))
        ]
        return made, [Schedule(one, self.calls) for one in made]


class ByHand(Counted):
    """Steps its one optimizer by hand, once for ``every`` batches, with a closure where ``closure``."""

    def __init__(self, calls: Calls, *, every: int = 1, closure: bool = False) -> None:
        super().__init__(calls)
        self.automatic_optimization = False
        self.every, self.closure = every, closure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen("training_step", batch, batch_idx)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            self.calls.append(("closure", batch_idx))
            loss = self.loss(batch) / self.every
            if self.closure:
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.log("loss", loss)
            return loss

        if self.closure:
            optimizer.step(closure=closure)
            return
        closure()
        if batch_idx % self.every == self.every - 1:
            optimizer.step()
            optimizer.zero_grad()


class Batches:
    """A loader of one's own: its ``__iter__`` and each ``__next__`` are written down."""

    def __init__(self, name: str, batches: Sequence[Any], calls: Calls) -> None:
        self.name, self.batches, self.calls, self.at = name, batches, calls, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.calls.append((f"{self.name}.__iter__", None))
        self.at = 0
        return self

    def __next__(self) -> Any:
        self.calls.append((f"{self.name}.__next__", self.at))
        if self.at >= len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]


class Rows(Dataset[Tensor]):
    """Examples whose reading is written down."""

    def __init__(self, count: int, calls: Calls) -> None:
        self.rows, self.calls = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3)), calls

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        self.calls.append(("dataset[]", index))
        return self.rows[index]


class Data(L.LightningDataModule):
    """Batches for training and validation; ``own``: loaders of one's own, else torch's, shuffled."""

    def __init__(self, calls: Calls, batches: int, *, own: bool = True) -> None:
        super().__init__()
        self.calls, self.batches, self.own = calls, batches, own

    def train_dataloader(self) -> Any:
        if self.own:
            return Batches("training loader", torch.randn(self.batches, 4, WIDTH), self.calls)
        return DataLoader(Rows(4 * self.batches, self.calls), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        if self.own:
            return Batches("validation loader", torch.randn(2, 4, WIDTH), self.calls)
        return DataLoader(Rows(8, self.calls), batch_size=4)


class WritingLogger(Logger):
    """Writes down what the module logged; what others add is left out."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    @property
    def name(self) -> str:
        return "writing"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *given: Any, **named: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        own = {"loss", "metric", "one", "two", "val_loss", "critic", "generator", "epoch"}
        if kept := {name: float(f"{value:.3e}") for name, value in metrics.items() if name in own}:
            self.calls.append(("logger", step, str(kept)))

    def finalize(self, status: str) -> None:
        self.calls.append(("logger.finalize", status))


def counted_module(kind: type[Counted], calls: Calls, **options: Any) -> Counted:
    """One of the modules above, with every hook of Lightning's written down."""
    names = [*public_methods(ModelHooks, DataHooks, CheckpointHooks), *MORE_OF_A_MODULE]
    return written_down(kind, "module", [name for name in names if name not in NOT_HOOKS], calls)(calls, **options)


def counted_data(calls: Calls, batches: int, **options: Any) -> Data:
    """The data module, with every hook of Lightning's written down."""
    names = [*public_methods(DataHooks), "state_dict", "load_state_dict"]
    names = [name for name in names if name not in {"test_dataloader", "predict_dataloader"}]
    return written_down(Data, "data module", names, calls)(calls, batches, **options)


def counted_callback(calls: Calls) -> L.Callback:
    """A callback, with every hook written down."""
    return written_down(L.Callback, "callback", public_methods(L.Callback), calls)()
