"""Snapshot: everything a step may change comes back, into the storage that it came from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import Blocks, fit
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop


@dataclasses.dataclass
class Tally:
    steps: int
    losses: list[Tensor]


class Spoils(L.Callback):
    """Takes a snapshot in the middle of a training, spoils everything, restores it and looks."""

    def __init__(self) -> None:
        self.done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 3:
            return
        module, optimizer = pl_module, trainer.optimizers[0]
        module.tally, module.recent = Tally(1, [torch.ones(2)]), deque([1, 2], maxlen=2)
        module.table, module.names = numpy.arange(3.0), {"a"}
        module.counted, optimizer.count = Counter(a=2, b=1), 1
        optimizer.inner = torch.optim.SGD(module.parameters(), lr=0.5)
        module.generator = torch.Generator().manual_seed(3)
        module.zero_grad()
        module.stem.weight.grad = torch.full_like(module.stem.weight, 2.0)
        gradient, losses = module.stem.weight.grad, module.tally.losses[0]
        pointers = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
        values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        inner = {key: dict(state) for key, state in optimizer.state.items()}
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        rates = [group["lr"] for group in optimizer.param_groups]
        batch_before = batch[0].clone()
        draws = self.draws(module)

        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        states = torch.get_rng_state(), random.getstate()
        snapshot = Snapshot(LightningLoop(trainer), batch)
        for _ in range(2):  # it can be restored any number of times
            self.draws(module)
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    tensor.add_(1)
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
                    state["new"] = 1
                batch[0].zero_()
                module.tally.losses[0].zero_()
            module.register_buffer("late", torch.ones(1))
            module.added = nn.Linear(1, 1)
            module.stem.register_forward_hook(lambda *_: None)
            module.counted.update(["a"])
            optimizer.count = 7
            optimizer.inner.param_groups[0]["lr"] = 99.0
            module.layers[0].norm.running_mean = torch.zeros(8)
            module.stem.weight.grad = None
            module.head.weight.grad = torch.ones_like(module.head.weight)
            module.tally.steps, module.tally.losses = 7, []
            module.recent.extend([8, 9])
            module.table[:], module.names = -1, {"b"}
            module.calls, module.extra = -1, "new"
            module.seen.clear()
            module.eval()
            optimizer.param_groups[0]["lr"] = 99.0
            optimizer.state.pop(module.head.weight)
            batch.append("more")
            snapshot.restore()

            assert torch.equal(torch.get_rng_state(), states[0])
            assert random.getstate() == states[1]
            assert list(module.state_dict()) == list(values)
            for name, tensor in module.state_dict().items():
                assert torch.equal(tensor, values[name]), name
                assert tensor.data_ptr() == pointers[name], name
            assert module.stem.weight.grad is gradient
            assert torch.equal(gradient, torch.full_like(gradient, 2.0))
            assert module.head.weight.grad is None
            for key, state in optimizer.state.items():
                assert state.keys() == inner[key].keys()
                assert all(state[name] is inner[key][name] for name in state)
            for moment, state in zip(moments, optimizer.state.values(), strict=True):
                assert torch.equal(moment, state["exp_avg"])
            assert [group["lr"] for group in optimizer.param_groups] == rates
            assert (module.counted, optimizer.count) == ({"a": 2, "b": 1}, 1)
            assert optimizer.inner.param_groups[0]["lr"] == 0.5
            assert not hasattr(module, "added")
            assert not module.stem._forward_hooks
            assert (module.tally.steps, module.tally.losses[0]) == (1, losses)
            assert torch.equal(losses, torch.ones(2))
            assert list(module.recent) == [1, 2]
            assert (list(module.table), module.names) == ([0.0, 1.0, 2.0], {"a"})
            assert (module.calls, len(module.seen)) == (3, 3)
            assert not hasattr(module, "extra")
            assert all(part.training for part in module.modules())
            assert torch.equal(batch[0], batch_before)
            assert len(batch) == 2
        module.generator.manual_seed(3)
        assert draws == self.draws(module)
        module.zero_grad()
        self.done = True

    @staticmethod
    def draws(module: Any) -> float:
        torch.rand(3), random.random(), numpy.random.rand()
        return float(torch.rand((), generator=module.generator))


def test_everything_comes_back_where_it_was(tmp_path: Path) -> None:
    spoils = Spoils()
    fit(Traceable(), tmp_path, [spoils])
    assert spoils.done


@pytest.mark.parametrize("stepped", [False, True])
def test_optimizer_state_that_was_not_there_is_gone_again(stepped: bool, tmp_path: Path) -> None:
    class Steps(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == int(stepped):
                optimizer = trainer.optimizers[0]
                states = len(optimizer.state)
                snapshot = Snapshot(LightningLoop(trainer), batch)
                for parameter in pl_module.parameters():
                    parameter.grad = torch.ones_like(parameter)
                type(optimizer).step(optimizer)
                assert len(optimizer.state) > 0
                snapshot.restore()
                assert len(optimizer.state) == states
                assert all(parameter.grad is None for parameter in pl_module.parameters()) or stepped

    fit(Traceable(), tmp_path, [Steps()], max_steps=2)


def test_no_tensor_is_printed_to_name_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors are the keys of an optimizer's state: to print 419 of them took 4.5 s on a GPU.
    printed: list[str] = []

    def printing(tensor: Tensor, spec: str) -> str:
        printed.append(spec)
        return "a tensor"

    class Takes(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.optimizers[0].state
            with monkeypatch.context() as patched:
                patched.setattr(Tensor, "__format__", printing)
                Snapshot(LightningLoop(trainer), None)

    fit(Traceable(), tmp_path, [Takes()], max_steps=2)
    assert not printed


def test_of_a_forward_all_but_the_state_of_optimizers_comes_back(tmp_path: Path) -> None:
    class Forward(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step != 1:
                return
            weight, mean = pl_module.stem.weight, pl_module.layers[0].norm.running_mean
            gradient, rate = weight.grad, trainer.optimizers[0].param_groups[0]["lr"]
            head, memory = pl_module.head.weight.detach().clone(), pl_module.head.weight.data_ptr()
            before, statistics, drawn = weight.detach().clone(), mean.clone(), torch.get_rng_state()
            snapshot = Snapshot(LightningLoop(trainer), batch, of_forward=True)
            kept = {id(tensor) for tensor, _ in snapshot._tensors.values()}
            assert not kept & {id(state["exp_avg"]) for state in trainer.optimizers[0].state.values()}
            with torch.no_grad():
                pl_module.training_step(batch, batch_idx)
                weight.add_(1)  # as a teacher's weights, which the step itself moves
                pl_module.head.weight.data = pl_module.head.weight * 2
                trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
                trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            weight.grad = torch.ones_like(weight)
            batch[0].zero_()
            pl_module.eval()
            assert not torch.equal(mean, statistics)
            snapshot.restore()
            assert torch.equal(mean, statistics)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert (pl_module.calls, pl_module.training) == (1, True)
            assert batch[0].any()
            assert torch.equal(weight, before)
            assert torch.equal(pl_module.head.weight, head)
            assert pl_module.head.weight.data_ptr() == memory
            assert weight.grad is gradient
            assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [rate]
            self.done = True

    forward = Forward()
    fit(Traceable(), tmp_path, [forward], max_steps=2)
    assert forward.done


GLOBAL = numpy.random.default_rng(3)


class Slotted:
    """An object of the user's own, without a dictionary."""

    __slots__ = ("count", "generator", "other")

    def __init__(self) -> None:
        self.generator, self.count, self.other = numpy.random.RandomState(3), 0, self

    def draw(self) -> float:
        self.count += 1
        return self.count + float(self.generator.rand())


class Sampler:
    """Draws numbers, one object deep in another."""

    def __init__(self) -> None:
        self.inner = {"python": random.Random(3), "slotted": [Slotted()]}

    def draw(self) -> float:
        return self.inner["python"].random() + self.inner["slotted"][0].draw()  # type: ignore[attr-defined, index]


class Draws(Blocks):
    """Draws from generators wherever a module may keep them."""

    def __init__(self) -> None:
        super().__init__()
        hidden = numpy.random.default_rng(4)
        self.array, self.sampler = numpy.random.default_rng(5), Sampler()
        self.closure: Callable[[], float] = lambda: float(hidden.random())
        self.partial = functools.partial(random.Random.random, random.Random(6))
        self.hidden = [torch.nn.BatchNorm1d(2)]

    def draw(self) -> list[float]:
        self.hidden[0](torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        return [
            self.array.random(), self.sampler.draw(), self.closure(), self.partial(), GLOBAL.random(),
            float(self.hidden[0].running_mean.sum()),  # type: ignore[union-attr]
        ]  # fmt: skip


def on_step(module: L.LightningModule, tmp_path: Path, look: Callable[[Snapshot, Any], None]) -> None:
    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            look(Snapshot(LightningLoop(trainer), batch), batch)

    fit(module, tmp_path, [Looks()], max_steps=1)


def test_whatever_draws_comes_back_wherever_it_is_kept(tmp_path: Path) -> None:
    module = Draws()
    for _ in range(2):
        module.draw()

    def look(snapshot: Snapshot, _: Any) -> None:
        assert snapshot.cannot_restore == []
        drawn = [module.draw() for _ in range(5)]
        for _ in range(2):
            snapshot.restore()
            assert [module.draw() for _ in range(5)] == drawn

    on_step(module, tmp_path, look)


@pytest.mark.parametrize("kept", ["generator", "loader", "count", "file"])
def test_what_cannot_be_put_back_is_named(kept: str, tmp_path: Path) -> None:
    module: Any = Blocks()
    if kept == "file":
        (tmp_path / "numbers").write_text("1\n2\n")
        streams: Any = (tmp_path / "numbers").open()
    else:
        loader, generator = torch.utils.data.DataLoader([1, 2]), (one for one in range(3))
        streams = {"loader": iter(loader), "generator": generator, "count": itertools.count()}[kept]

    def look(snapshot: Snapshot, _: Any) -> None:
        (said,) = snapshot.cannot_restore
        assert said.startswith("self.kept.stream (")

    with (tmp_path / "log").open("w") as log:  # one that is written
        module.kept = {"stream": streams, "log": log}
        on_step(module, tmp_path, look)
    if kept == "file":
        streams.close()
