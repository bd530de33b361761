"""FSDP2 by one word: two processes that shard a module train it as one process with the whole batch does."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

from tests.processes import Pair
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.loops.fsdp2 import ELEMENTWISE, FSDP2, clip_by_norm, step_on_shards

pytestmark = pytest.mark.xdist_group("two_processes")

ROWS, STEPS, VOCABULARY = 8, 16, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return x + added


class Model(L.LightningModule):
    """Blocks between an embedding and a head of the same weight, a buffer, and a block that is not trained."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(width))
        self.losses: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids, wanted = batch
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), wanted.flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=1e-2)


def train(module: L.LightningModule, ranks: int, strategies: list[Any] | None = None, **options: Any) -> L.Trainer:
    micro_batches = options.get("accumulate_grad_batches", 1)
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS * micro_batches * STEPS, 6), generator=draws)
    ids = ids[int(os.environ.get("RANK", "0")) :: ranks]  # so that both ranks' rows of a step are those of one process
    data = DataLoader(TensorDataset(ids, (ids * 3 + 1) % VOCABULARY), batch_size=ROWS // ranks)
    options = {"enable_checkpointing": False, "gradient_clip_val": 0.5, "max_steps": STEPS, **options}
    trainer = quiet_trainer(
        devices=ranks,
        strategy=options.pop("strategy", FSDP2() if ranks > 1 else "auto"),
        callbacks=[] if strategies is None else [Compile(strategies, save=False, verbose=False)],
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, data, data if options.get("limit_val_batches") else None)
    return trainer


def losses_of(module: Model, ranks: int, micro_batches: int = 1) -> list[float]:
    losses = torch.stack(module.losses)
    if ranks > 1:
        torch.distributed.all_reduce(losses)
    return (losses / ranks).view(-1, micro_batches).sum(1).tolist()


class ShardsItself(Model):
    def configure_model(self) -> None:
        if torch.distributed.is_initialized() and not isinstance(self.head, FSDPModule):
            for layer in self.layers:
                fully_shard(layer)
            fully_shard(self, reshard_after_forward=False)
            register_fsdp_forward_method(self, "training_step")


class Twice(Model):
    """Takes each example's loss twice: a block runs again before any backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


def variants(ranks: int) -> dict[str, list[float]]:
    def losses(kind: type[Model] = Model, *, fits: int = 1, **options: Any) -> list[float]:
        L.seed_everything(0, verbose=False)
        module = kind()
        for _ in range(fits):
            train(module, ranks, max_steps=10, **options)
        return losses_of(module, ranks)

    def sharded(**options: Any) -> Any:
        return FSDP2(**options) if ranks > 1 else "auto"

    kept = sharded(reshard_after_forward=False)
    throughout = sharded(reshard_after_forward=False, reshard_after_backward=False)
    return {
        "bf16-mixed": losses(precision="bf16-mixed", gradient_clip_val=None),
        "bf16-true": losses(precision="bf16-true"),
        "parameters stay gathered": losses(strategy=kept),
        "parameters stay gathered for a step": losses(strategy=throughout, accumulate_grad_batches=2),
        "each micro-batch reduces": losses(strategy=sharded(reduce_each_micro_batch=True), accumulate_grad_batches=2),
        "shards itself": losses(ShardsItself),
        "runs blocks twice": losses(Twice),
        "a second fit": losses(fits=2),
    }


def test_precisions_options_and_habits(pair: Pair) -> None:
    reference = variants(1)
    first, second = pair(variants, 2)
    assert first == second
    for name, expected in reference.items():
        tolerance = 0.03 if name.startswith("bf16") else 1e-4
        assert first[name] == pytest.approx(expected, rel=tolerance), name


def gathers(**options: bool) -> int:
    """Of all units, in a step of two micro-batches."""
    L.seed_everything(0, verbose=False)
    module, counted = Model(), list[None]()
    gather = _fsdp_param_group.foreach_all_gather

    def count(*arguments: Any, **named: Any) -> Any:
        counted.append(None)
        return gather(*arguments, **named)

    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", count):
        train(module, 2, strategy=FSDP2(**options), accumulate_grad_batches=2, max_steps=1)
    return len(counted)


def each_gathers() -> list[int]:
    kept = {"reshard_after_forward": False}
    return [gathers(), gathers(**kept), gathers(**kept, reshard_after_backward=False)]


def test_weights_that_stay_gathered_are_gathered_less_often(pair: Pair) -> None:
    (each, forward_only, least), other = pair(each_gathers)
    assert other == [each, forward_only, least]
    assert each > forward_only > least


class Untidy(Model):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (
            super().training_step(batch, batch_idx)
            + nn.functional.linear(torch.ones(1, 16), self.get_parameter("layers.1.inner.weight")).sum()
        )


class DropsLayers(Model):
    """Each process leaves out a layer of its own: as many gathers of the same size, of other weights."""

    def forward(self, ids: Tensor) -> Tensor:
        left_out = self.layers.pop(1 + self.global_rank)
        try:
            return super().forward(ids)
        finally:
            self.layers.insert(1 + self.global_rank, left_out)


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6 * 16))


class Scalar(Model):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


class Homemade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))


class Unknown(Model):
    def __init__(self) -> None:
        super().__init__()
        self.own = Homemade()


def refusals() -> list[str]:
    said = []
    for kind in (Untidy, Scalar, DropsLayers):
        with pytest.raises(ValueError, match="FSDP2") as caught:
            train(kind(), 2)
        said.append(str(caught.value))
    with pytest.raises(ValueError, match="SyncBatchNorm"):  # it is in place, and torch has none on a CPU
        train(Normed(), 2, sync_batchnorm=True)
    with torch.device("meta"):
        module = Unknown()
    with pytest.raises(ValueError, match="FSDP2") as caught:
        train(module, 2)
    return [*said, str(caught.value)]


def test_what_cannot_be_sharded_is_said_in_one_line(pair: Pair) -> None:
    (outside, scalar, dropped, unknown), (_, _, dropped_there, _) = pair(refusals)
    assert "outside the forward" in outside
    assert "layers.1" in outside
    assert "temperature" in scalar
    assert dropped.endswith("Last called here: layers.0, layers.2, the rest")
    assert dropped_there.endswith("Last called here: layers.0, layers.1, the rest")
    assert "buffers: Unknown, own." in unknown


def whole_weight(module: nn.Module, path: str) -> Tensor:
    weight = module.get_parameter(path)
    assert isinstance(weight, DTensor)
    return weight.full_tensor()


def without_memory() -> tuple[float, float, bool, list[float]]:
    trainer_made = FSDP2()
    with torch.device("meta"):
        module = Model(width=64)
    module.scale = torch.ones(64)
    train(module, 2, strategy=trainer_made, max_steps=3)
    weight = whole_weight(module, "layers.1.inner.weight")
    norm = whole_weight(module, "layers.0.norm.weight")
    return (
        float(weight.std()),
        float((norm - 1).abs().max()),
        module.head.weight is module.embedding.weight,
        losses_of(module, 2),
    )


def test_weights_are_drawn_shard_by_shard_on_the_device(pair: Pair) -> None:
    (spread, norm, tied, losses), other = pair(without_memory)
    assert spread == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.1)  # of nn.Linear: uniform within 1 / sqrt(64)
    assert norm == 0  # not trained, so as drawn
    assert tied
    assert (spread, norm, tied, losses) == other


@pytest.mark.parametrize("by_hand", [False, True])
def test_only_what_autocast_would_cast_is_gathered_in_bfloat16(by_hand: bool) -> None:
    unit = nn.Sequential(nn.LayerNorm(4), nn.MultiheadAttention(4, 1), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    if by_hand:
        unit.scale = nn.Parameter(torch.ones(4))
    strategy: Any = SimpleNamespace(
        precision_plugin=SimpleNamespace(precision="bf16-mixed"), root_device=torch.device("cuda")
    )
    assert FSDP2._policy(strategy, unit, is_root=False).param_dtype == (None if by_hand else torch.bfloat16)
    assert FSDP2._policy(strategy, unit, is_root=True).param_dtype is None


OPTIONS: list[dict[str, Any]] = [{"maximize": True}, {"foreach": True}]
MORE: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True, "foreach": True}],
    torch.optim.Adam: [{"amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    torch.optim.AdamW: [{"fused": True, "amsgrad": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
}


class DTensors(TorchDispatchMode):
    """Counts operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, DTensor) for one in tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))


def made(*, sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))  # one row: the second process has none
    if not sharded:
        return module
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module


def whole(tree: Any) -> Any:
    return tree_map(lambda one: one.full_tensor().clone() if isinstance(one, DTensor) else copy.copy(one), tree)


def steps(kind: type[Optimizer], options: dict[str, Any], *, sharded: bool) -> tuple[list[Tensor], Any, int]:
    """Weights and state dict after three steps, and operations on DTensors in the last."""
    module = made(sharded=sharded)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}]
    optimizer = kind(groups, **{"lr": 1e-2, **options})  # type: ignore[call-arg]
    if sharded:
        assert step_on_shards(optimizer)
    counted = DTensors()
    for step in range(3):
        module(torch.randn(3, 5)).square().mean().backward()
        if step == 2:
            with counted:
                optimizer.step()
        else:
            optimizer.step()
        assert all(isinstance(one, DTensor) == sharded for one in optimizer.state)
        optimizer.zero_grad()
    return [whole(one.detach()) for one in module.parameters()], whole(optimizer.state_dict()), counted.count


def each_optimizer() -> list[str]:
    torch.distributed.init_process_group("gloo")
    found = []
    for kind in sorted(ELEMENTWISE, key=lambda one: one.__name__):
        for options in [*OPTIONS, *MORE.get(kind, [])]:
            named = f"{kind.__name__} {options}"
            weights, state, count = steps(kind, options, sharded=True)
            assert count == 0, f"{named}: {count} operations on DTensors"
            expected, expected_state, _ = steps(kind, options, sharded=False)
            torch.testing.assert_close(weights, expected, msg=lambda it: f"{named}: {it}")  # noqa: B023
            torch.testing.assert_close(state["state"], expected_state["state"], msg=lambda it: f"{named}: {it}")  # noqa: B023
            found.append(named)
    return found


def test_each_optimizer_steps_as_on_whole_parameters(pair: Pair) -> None:
    first, second = pair(each_optimizer)
    assert first == second
    assert len(first) == len(OPTIONS) * len(ELEMENTWISE) + sum(map(len, MORE.values()))


class Own(torch.optim.Adam):
    """Someone's: it may do anything in its step."""


def test_others_keep_dtensors() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for kind in (Own, torch.optim.LBFGS, torch.optim.Adafactor):
        assert not step_on_shards(kind([weight]))


def clipped(largest: float) -> tuple[float, float, float]:
    """Norm, torch's norm, and how far gradients are from torch's."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    module, reference = made(), made()
    for one in (module, reference):
        torch.manual_seed(1)
        one(torch.randn(3, 5)).square().mean().backward()
    norm = clip_by_norm(module.parameters(), largest)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), largest)
    assert isinstance(expected, DTensor)
    apart = max(
        float((one.grad.full_tensor() - other.grad.full_tensor()).abs().max())  # type: ignore[union-attr]
        for one, other in zip(module.parameters(), reference.parameters(), strict=True)
    )
    return float(norm), float(expected.full_tensor()), apart


@pytest.mark.parametrize("largest", [0.01, 100.0])
def test_gradients_are_clipped_by_the_norm_over_all_processes(largest: float, pair: Pair) -> None:
    first, second = pair(clipped, largest)
    assert first == second
    norm, expected, apart = first
    assert norm == pytest.approx(expected, rel=1e-6)
    assert apart < 1e-8


def test_what_is_not_sharded_is_left_to_torch() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert clip_by_norm([weight], 0.1) is None
    assert weight.grad.tolist() == [1, 1]
