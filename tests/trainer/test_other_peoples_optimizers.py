"""Optimizers that are not torch's: they count in Python, step another one, or evaluate the loss twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Optimizer, Regional, Strategy
from tests.sweep import some
from tests.trainer.recording import Recorded
from tests.trainer.test_step_capture import Net, fit
from trainer.callback import Compile


class Counts(torch.optim.Optimizer):
    """Adam's corrections, by a count in each parameter's state and one in each group."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group)
        return loss

    def update(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter))
            state["step"] += 1
            state["mean"].lerp_(parameter.grad, 0.1)
            size = group["lr"] / (1 - 0.9 ** state["step"]) / group["steps"] ** 0.1
            parameter.sub_(state["mean"], alpha=size)


class CountsInState(Counts):
    def update(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


class Around(torch.optim.Optimizer):
    """Steps another optimizer, of which it shares the groups; its own state is somewhere else."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.inner.param_groups


class Lookahead(Around):
    """Every third step goes back half of the way; https://arxiv.org/abs/1907.08610."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.count, self.slow = 0, [one.detach().clone() for one in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    fast.copy_(slow.lerp_(fast, 0.5))
        return loss


class Sharpness(Around):
    """Takes the gradient where the loss is worse: two evaluations a step; https://arxiv.org/abs/2010.01412."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        moves = [(one, one.grad * 0.1) for one in self.param_groups[0]["params"]]
        for parameter, move in moves:
            parameter.add_(move)
        closure()
        for parameter, move in moves:
            parameter.sub_(move)
        self.inner.step()
        return loss


class Blocks(Net):
    """Trained by ``kind``."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


STRATEGIES: dict[str, list[Strategy]] = {
    "captured": [Recorded()],
    "regional": [Regional(backend="aot_eager", blocks=["net"])],
    "optimizer": [Optimizer(backend="aot_eager")],
}
REASONS = {
    Counts: "its step is not torch's own",
    CountsInState: "its step is not torch's own",
    Lookahead: "its step is not torch's own",
    torch.optim.Adagrad: "Adagrad counts its steps on the host",
    Sharpness: "evaluates the loss several times",
    torch.optim.LBFGS: "evaluates the loss several times",
}


@pytest.mark.parametrize(("kind", "name"), some([(kind, name) for kind in REASONS for name in STRATEGIES], every=2))
def test_losses_and_weights_are_eagers(kind: Any, name: str, tmp_path: Path) -> None:
    eager = fit(Blocks(kind), tmp_path, Compile(), max_steps=12)
    compile_ = Compile(STRATEGIES[name])
    compiled = fit(Blocks(kind), tmp_path, compile_, max_steps=12)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    for parameter, value in eager.state.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(compiled.state[parameter], value)  # type: ignore[attr-defined]
    if name == "captured":
        assert any(REASONS[kind] in line for line in compile_.record.report["recorded"]["refused"])
    assert compile_.record.audits is None or compile_.record.audits.verdict != "failed"


def test_a_step_that_evaluates_the_loss_again_after_a_graph_evaluates_it(tmp_path: Path) -> None:
    class Later(Sharpness):
        """Plain steps at first."""

        taken = 0

        def step(self, closure: Any = None) -> Any:
            self.taken += 1
            return super().step(closure) if self.taken > 6 else self.inner.step(closure)

    eager = fit(Blocks(Later), tmp_path, Compile(), max_steps=12)
    compile_ = Compile([Recorded()])
    captured = fit(Blocks(Later), tmp_path, compile_, max_steps=12)
    assert captured.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compile_.record.report["recorded"]["replayed_steps"] > 0
    assert "evaluates the loss several times" in compile_.record.report["recorded"]["refused"][-1]


def test_a_hook_of_the_optimizers_runs_in_each_step(tmp_path: Path) -> None:
    class Hooked(Net):
        called = 0

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()["optimizer"]
            optimizer.register_step_post_hook(self.count)
            return optimizer

        def count(self, *_: Any) -> None:
            self.called += 1

    module, compile_ = Hooked(), Compile([Recorded()])
    fit(module, tmp_path, compile_)
    assert module.called == 20
    assert "a hook on its step" in compile_.record.report["recorded"]["refused"][0]


@pytest.mark.parametrize("name", ["captured", "optimizer"])
@pytest.mark.parametrize("step", [3, 8])
def test_an_optimizer_that_replaces_the_first_one_is_the_one_that_steps(name: str, step: int, tmp_path: Path) -> None:
    class Restarts(Net):
        def loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == step:  # before a step that is audited, or is not
                self.trainer.strategy.setup_optimizers(self.trainer)

    eager = fit(Restarts(), tmp_path, Compile())
    compile_ = Compile(STRATEGIES[name])
    compiled = fit(Restarts(), tmp_path, compile_)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.rates == eager.rates
    if name == "captured":
        assert compile_.record.report["recorded"]["graphs"] >= 1


def test_the_state_of_a_single_parameter_can_be_reset(tmp_path: Path) -> None:
    class Resets(Net):
        """As those do that revive dead units: emptied, removed and replaced."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            state, bias = self.trainer.optimizers[0].state, self.net[4].bias
            if self.global_step == 6:
                state[bias] = {}
            elif self.global_step == 11:
                del state[bias]
            elif self.global_step == 16:
                state[bias]["exp_avg"] = torch.zeros_like(bias)

    eager = fit(Resets(), tmp_path, Compile())
    compile_ = Compile([Optimizer(backend="aot_eager")])
    compiled = fit(Resets(), tmp_path, compile_)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compile_.record.eager_parts == {}
