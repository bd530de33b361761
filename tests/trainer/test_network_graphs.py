"""Modules that a step calls, captured one by one while the step stays Python: losses and weights are eager's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from strategies import CudaGraph, Regional, Strategy
from strategies.cuda_graph.network import DOUBLE_BACKWARD
from strategies.region_check import leaves_of
from tests.strategies.modules import Block
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.recording import RecordedNetwork, RecordedStepOrNetwork, RecordingEngine
from trainer.callback import Compile

STEPS = 16


class Drops(nn.Module):
    """Draws random numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)  # a bias would have no gradient but noise
        self.two = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.two(nn.functional.dropout(self.norm(self.one(x_BD)), 0.2, self.training))


class Plain(L.LightningModule):
    """A step that no graph could hold as a whole: it keeps its losses and reads how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Drops(), nn.Tanh(), nn.Linear(8, 1))
        self.kept: list[Tensor] = []

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x_BD), target_B1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch) * (1 + 0.01 * self.global_step)
        self.kept.append(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class KeepsItsGraph(Plain):
    """The loss is kept with all that leads to it, for some steps."""

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        loss = super().loss(x_BD, target_B1)
        self.kept[:] = self.kept[-2:]
        self.kept.append(loss)
        return loss


class CallsItTwice(Plain):
    """A siamese network: two calls wait for one backward."""

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        return (self.net(x_BD) - self.net(x_BD.flip(0)) - target_B1).square().mean()


class BackwardTwice(Plain):
    """Two backwards of one forward."""

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        loss = super().loss(x_BD, target_B1)
        (weight,) = torch.autograd.grad(loss, self.net[2].bias, retain_graph=True)
        return loss + 0 * weight.sum()


class Penalizes(Plain):
    """A gradient penalty from the seventh step on."""

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        if self.global_step < 6:
            return super().loss(x_BD, target_B1)
        x_BD = x_BD.clone().requires_grad_()
        out_B1 = self.net(x_BD)
        (slope_BD,) = torch.autograd.grad(out_B1.sum(), x_BD, create_graph=True)
        return nn.functional.mse_loss(out_B1, target_B1) + slope_BD.square().mean()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = Drops(), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, *, x_BD: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden_BD = self.body(x_BD)
        return {"one": self.one(hidden_BD) * scale, "two": self.two(hidden_BD), "rows": x_BD.shape[0], "x": x_BD}


class UsesOneOutput(Plain):
    """Weights of the output that is not used get no gradient, so that weight decay leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Heads()

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        found = self.net(x_BD=x_BD, scale=2.0)
        assert found["x"] is x_BD
        return nn.functional.mse_loss(found["one"], target_B1) / found["rows"]


class UsesTheOtherLater(UsesOneOutput):
    """An output gets its first gradient once there is a graph."""

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        found = self.net(x_BD=x_BD)
        return nn.functional.mse_loss(found["one" if self.global_step < 8 else "two"], target_B1)


class InParts(Plain):
    """An encoder and a decoder; what is between them needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Drops(), nn.Sequential(Drops(), nn.Linear(8, 1))

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.decoder(self.encoder(x_BD).relu()), target_B1)


class ReadsANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Drops(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BD = self.body(x_BD)
        return self.head(hidden_BD * (2.0 if hidden_BD.sum().item() > 0 else 1.0))


class ChildrenInItsPlace(Plain):
    """What reads a number on the host is no graph; the modules in it are."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = ReadsANumber()


class Scaled(torch.autograd.Function):
    """Its backward reads a global."""

    factor: ClassVar[float] = 1.0

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor) -> Tensor:
        return x_BD * 1.0

    @staticmethod
    def backward(ctx: Any, gradient_BD: Tensor) -> Tensor:
        return gradient_BD * Scaled.factor


class ScalesItsGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Drops(), nn.Linear(8, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.head(Scaled.apply(self.body(x_BD)))  # type: ignore[no-untyped-call]


class ReadsAGlobalInItsBackward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = ScalesItsGradient()

    def loss(self, x_BD: Tensor, target_B1: Tensor) -> Tensor:
        Scaled.factor = 1.0 if self.global_step < 8 else 0.5
        return super().loss(x_BD, target_B1)


class Frozen(Plain):
    """A layer is frozen on the way, and another replaced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            self.net[0].one.requires_grad_(False)
        if batch_idx == 9:
            self.net[2].weight.data = self.net[2].weight.data.clone()


class Gan(Plain):
    """Manual optimization, two optimizers; the critic sees two batches before its backward."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = nn.Sequential(Drops(), nn.Linear(8, 8)), nn.Sequential(Drops(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, two = self.optimizers()
        x_BD, _ = batch
        loss = self.critic(self.net(x_BD)).mean()
        one.zero_grad()
        self.manual_backward(loss)
        one.step()
        judged = self.critic(x_BD).square().mean() - self.critic(self.net(x_BD).detach()).mean()
        two.zero_grad()
        self.manual_backward(judged)
        two.step()
        return (loss + judged).detach()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=0.01) for one in (self.net, self.critic)]


def trained(
    kind: type[Plain], *strategies: Strategy, steps: int = STEPS, validated_on: Any = None, **options: Any
) -> tuple[list[float], Plain, Compile]:
    """Losses of each batch, the module, and what captured it."""
    L.seed_everything(0, verbose=False)
    seen: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    Scaled.factor = 1.0
    compile_ = Compile(strategies, save=False, verbose=False)
    module = kind()
    data = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)
    quiet_trainer(callbacks=[Losses(), compile_], max_steps=steps, logger=False, **options).fit(
        module, data, validated_on
    )
    return seen, module, compile_


CASES: dict[str, tuple[type[Plain], list[str], str | None]] = {
    "kept losses and global_step": (Plain, ["net"], None),
    "a loss that keeps its graph": (KeepsItsGraph, ["net"], None),
    "two calls before a backward": (CallsItTwice, ["net"], None),
    "two backwards of a forward": (BackwardTwice, ["net"], None),
    "a gradient of a gradient": (Penalizes, [], DOUBLE_BACKWARD),
    "an output that is not used": (UsesOneOutput, ["net"], None),
    "an output that is used later": (UsesTheOtherLater, ["net"], None),
    "an encoder and a decoder": (InParts, ["decoder", "encoder"], None),
    "a number read on the host": (ChildrenInItsPlace, ["net.body", "net.head"], "ReadsANumber"),
    "a global that a backward reads": (ReadsAGlobalInItsBackward, ["net"], None),
    "a layer that is frozen": (Frozen, ["net"], None),
    "a GAN": (Gan, ["critic", "net"], None),
}


@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_weights_are_eagers_to_the_last_bit(name: str) -> None:
    kind, paths, refused = CASES[name]
    expected, twin, _ = trained(kind)
    seen, module, compile_ = trained(kind, RecordedNetwork())
    assert seen == expected
    for (path, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        if refused is DOUBLE_BACKWARD:  # whose parts are added in another order
            torch.testing.assert_close(one, other, msg=path)
        else:
            assert torch.equal(one, other), path
    facts = compile_.record.report["recorded"]
    replayed = sorted(one["path"] for one in facts["networks"] if one["replays"] and one["graphs"])
    assert replayed == paths, facts
    if refused is None:
        assert facts["without_a_graph"] == []
    else:
        assert any(refused in one for one in facts["without_a_graph"]), facts
    assert all(one._compiled_call_impl is None for one in module.modules())


@pytest.mark.parametrize("name", ["a loss that keeps its graph", "two calls before a backward", "a GAN"])
def test_a_capture_meets_no_node_of_an_earlier_forward(name: str) -> None:
    """On a GPU its backward would make the default stream wait for the capture, which CUDA refuses."""
    earlier = "of a forward outside"
    kind, paths, _ = CASES[name]

    def node(weight: Tensor) -> Any:
        return torch.autograd.graph.get_gradient_edge(weight).node

    class Engine(RecordingEngine):
        captures = held = 0

        def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
            replay, results = super().capture(call, pool)
            leaves = leaves_of([one for one in pytree.tree_leaves(results) if isinstance(one, Tensor)])
            Engine.captures += bool(leaves)
            assert not any(earlier in node(one).metadata for one in leaves)
            return replay, results

    class Marks(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            for path in paths:
                self.get_submodule(path).register_forward_hook(self.mark, always_call=True)

        def mark(self, module: nn.Module, args: Any, result: Tensor) -> None:
            if result.grad_fn is not None:
                for weight in module.parameters():
                    Engine.held += earlier in node(weight).metadata
                    node(weight).metadata[earlier] = True

    class Watched(RecordedNetwork):
        engine = Engine

    _, _, compile_ = trained(Marks, Watched())
    assert Engine.captures
    assert Engine.held, "no graph outlives the next forward: there is nothing to meet"
    assert sum(one["graphs"] for one in compile_.record.report["recorded"]["networks"]) >= len(paths)


class Validated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            self.log("val_loss", self.loss(*batch))


def test_validations_have_graphs_of_their_own() -> None:
    """In inference mode, whose tensors have no version."""
    data = DataLoader(TensorDataset(torch.randn(12, 8), torch.randn(12, 1)), batch_size=4)
    options: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 3}

    def run(*strategies: Strategy) -> tuple[list[float], Any]:
        seen, module, compile_ = trained(Validated, *strategies, validated_on=data, **options)
        return [*seen, float(module.trainer.callback_metrics["val_loss"])], compile_.record.report.get("recorded")

    expected, _ = run()
    seen, facts = run(RecordedNetwork())
    assert seen == expected
    assert facts["without_a_graph"] == []
    (net,) = facts["networks"]
    assert net["graphs"] == 2
    assert net["replays"] > STEPS


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_accumulate(micro_batches: int) -> None:
    expected, _, _ = trained(Plain, accumulate_grad_batches=micro_batches)
    seen, _, compile_ = trained(Plain, RecordedNetwork(), accumulate_grad_batches=micro_batches)
    assert seen == expected
    assert compile_.record.report["recorded"]["replayed_calls"] >= STEPS // 2


def test_a_step_that_cannot_be_captured_gives_way_to_its_network() -> None:
    expected, _, _ = trained(Plain)
    seen, _, compile_ = trained(Plain, RecordedStepOrNetwork())
    assert seen == expected
    facts = compile_.record.report["recorded"]
    assert facts["replayed_steps"] == 0
    assert [one["path"] for one in facts["networks"] if one["replays"]] == ["net"]
    assert any("net (Sequential) is replayed" in note for note in compile_.record.notes)
    assert compile_.record.eager_parts == {}


class Stack(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def test_what_is_compiled_is_captured_compiled() -> None:
    seen, _, compile_ = trained(Stack, Regional(backend="aot_eager"), RecordedNetwork())
    assert seen == pytest.approx(trained(Stack)[0], rel=1e-5)
    facts = compile_.record.report["recorded"]
    assert [one["path"] for one in facts["networks"] if one["replays"]] == ["net"]
    assert compile_.record.eager_parts == {}
    assert compile_.record.graphs is not None


def test_an_audit_finds_what_a_graph_does_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that goes wrong after it was trusted: the module runs without it, and the record says since when."""
    from strategies.cuda_graph import network

    real: Callable[..., Any] = network.Network.replayed

    def replayed(self: Any, *given: Any) -> Any:
        result = real(self, *given)
        return result * 1.01 if self.replays > 2 else result

    monkeypatch.setattr(network.Network, "replayed", replayed)
    _, _, compile_ = trained(Stack, Regional(backend="aot_eager"), RecordedNetwork(), steps=20)
    (refusal,) = compile_.record.report["recorded"]["without_a_graph"]
    assert "its replay differs from it" in refusal
    assert compile_.record.audits.verdict == "went eager"


def test_the_scope_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scope"):
        CudaGraph(scope="model")
