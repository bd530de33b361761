"""Where every task's initial weights are drawn: now, or on the device before training, the same for every strategy."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from scripts.peers.work import placed
from strategies import Regional
from strategies.cached.cache_session import model_digest
from tasks import TASKS, Task
from tasks import lightning_module as modules
from tasks.base import TrainedTask
from tasks.captioning.task import Captioning
from tasks.lightning_module import is_on_meta, on_meta, start
from tests.tasks.conftest import fit, small
from trainer.callback import Compile

NAMES = [
    *("captioning", "forces", "image_classification with buffers", "language_modelling"),
    *("language_modelling with llama", "masked_lm", "micro convnet"),
]
assert {name.partition(" ")[0] for name in NAMES} == {
    name for name, task in TASKS.items() if issubclass(task, TrainedTask)
}
EVERY_TASK = pytest.mark.parametrize("name", NAMES)


def build(task: Task, seed: int = 3) -> L.LightningModule:
    torch.manual_seed(seed)
    return task.build_module(max_steps=4)


@EVERY_TASK
def test_those_drawn_on_the_device_are_what_the_same_build_draws_there_under_the_seed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "LARGE", 1)
    task = small(name)
    module = build(task)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state()), "nothing drawn yet"
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    torch.rand(7)  # whatever is drawn between building and training
    _, trained = fit(task, module=module, steps=3)
    reference = build(small(name, "task.initialise=host"))
    assert list(trained.first) == list(reference.state_dict())
    for path, value in reference.state_dict().items():
        assert torch.equal(trained.first[path], value), path
    buffers = dict(module.named_buffers())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *buffers.values()))
    assert set(buffers) == set(dict(reference.named_buffers()))
    shapes = [(parameter.shape, parameter.stride()) for parameter in module.parameters()]
    assert shapes == [(parameter.shape, parameter.stride()) for parameter in reference.parameters()], "ties and formats"
    assert model_digest(module) == model_digest(reference) == model_digest(build(task)), "one key for compiled code"
    assert trained.losses == fit(task, module=reference, steps=3)[1].losses


@EVERY_TASK
def test_by_default_they_wait_for_the_device_where_there_is_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert not is_on_meta(build(small(name, "task.initialise=host")))
        module = build(small(name))
    assert is_on_meta(module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reference = build(small(name))
    weights = [parameter.clone() for parameter in placed(module, torch.device("cpu")).parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, reference.parameters(), strict=True))
    placed(module, torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(weights, module.parameters(), strict=True)), "drawn once"


def test_a_network_compiled_before_its_weights_are_there_learns_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "LARGE", 1)
    task, losses = small("captioning"), []
    declared = task.declare()
    for strategies in ([], [Regional(backend="eager")]):
        torch._dynamo.reset()
        compile_ = Compile(strategies, whole=declared.whole, blocks=declared.blocks, parts=declared.parts, save=False)
        losses.append(fit(task, compile_, module=build(task), steps=3)[1].losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert compile_.record.regions_compiled == compile_.record.regions
    torch._dynamo.reset()


def test_a_refusal_before_the_weights_are_there_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            raise ValueError("compile.buckets: no")

    monkeypatch.setattr(modules, "LARGE", 1)
    task = small("micro")
    with pytest.raises(ValueError, match=r"^compile\.buckets: no$"):
        fit(task, Refusing(), module=build(task), steps=3)


class Computes(nn.Linear):
    """Reads its values as it is made."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.largest = self.weight.max().item()


def test_a_network_that_needs_memory_is_drawn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    net = start(lambda: nn.Sequential(Computes()), "auto")
    assert not is_on_meta(net)


def test_what_is_wrong_with_an_option_is_said_as_ever() -> None:
    with pytest.raises(ValueError, match=r"^task\.initialise='device' is not one of"):
        Captioning(initialise="device")

    def broken() -> nn.Module:
        raise ValueError("task.model='resnet5' is no network")

    for initialise in ("auto", "host"):
        with pytest.raises(ValueError, match=r"^task\.model='resnet5' is no network$"):
            start(broken, initialise)


def test_building_without_memory_draws_nothing_even_where_a_constructor_insists() -> None:
    before = torch.get_rng_state()
    on_meta(lambda: nn.Linear(int(torch.randint(1, 9, (), device="cpu")), 2))
    assert torch.equal(torch.get_rng_state(), before)
