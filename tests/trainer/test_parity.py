"""The parity gate: a compiled step that is not eager's stops the run, and eager's own noise does not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from strategies import Program, Regional, Stage, Strategy, Whole
from tests.trainer import guarded
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.console import summary
from trainer.guards.compare import Comparison, ParityError, perturb, rounding_unit


def refused(backend: str, tmp_path: Path, parity: str = "on", module: Blocks | None = None) -> tuple[str, Any]:
    compile_ = Compile([Regional(backend=backend)], parity=parity)
    with pytest.raises(ParityError) as caught:
        fit(module or Blocks(), tmp_path, [compile_])
    assert compile_.record.steps == 0, "nothing was trained"
    facts = compile_.record.report["parity"]
    assert facts["verdict"] == "failed"
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value), facts


def test_a_wrong_forward_is_told_by_the_loss(tmp_path: Path) -> None:
    with guarded.backend("tests_wrong_forward", guarded.scaled(1.01), guarded.as_it_is) as backend:
        message, facts = refused(backend, tmp_path)
    assert message.startswith("parity=on: the compiled step is not eager's: loss ")
    assert facts["loss"]["difference"] > facts["loss"]["tolerance"]
    assert f"{facts['loss']['difference']:.2e}" in message
    assert f"{facts['loss']['tolerance']:.2e}" in message


def test_a_wrong_backward_is_told_by_norm_and_tensor(tmp_path: Path) -> None:
    with guarded.backend("tests_wrong_backward", guarded.as_it_is, guarded.scaled(1.01)) as backend:
        message, facts = refused(backend, tmp_path)
    assert "loss" not in message
    assert "gradient norm" in message
    worst = facts["gradients"]["worst"]
    assert worst.startswith(("layers.", "stem."))
    assert f"gradient of {worst!r}" in message
    # The gradient of three blocks in a row is 1.01 times itself after the first, 1.0301 times after the last.
    assert facts["gradients"]["difference"] == pytest.approx(1.01**3 - 1, rel=0.2)
    assert facts["gradients"]["beyond"] > 5
    assert facts["loss"]["difference"] <= facts["loss"]["tolerance"]
    assert facts["weights"]["beyond"] == 0, "optimizers are judged by the gradients of eager"


def test_weights_frozen_at_the_first_call_are_told_by_the_step_that_shows_them_not_by_its_buffers(
    tmp_path: Path,
) -> None:
    first: dict[int, Tensor] = {}

    def frozen(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            held = [first.setdefault(one.data_ptr(), one.detach().clone()) for one in inputs if one.shape == (8, 8)]
            return graph(*[held.pop(0) if one.shape == (8, 8) else one for one in inputs])

        return make_boxed_func(run)

    backward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    torch._dynamo.register_backend(aot_autograd(fw_compiler=frozen, bw_compiler=backward), "tests_frozen")
    message, facts = refused("tests_frozen", tmp_path, module=guarded.Traceable(dropout=0.0))
    assert "in step 2 of 3, loss" in message
    assert "buffer 'layers." in message
    assert facts["compared_step"] == 2


def test_off_goes_on_in_spite_of_it(tmp_path: Path) -> None:
    with guarded.backend("tests_wrong_backward", guarded.as_it_is, guarded.scaled(1.01)) as backend:
        compile_ = Compile([Regional(backend=backend)], parity="off")
        fit(Blocks(), tmp_path, [compile_])
    assert compile_.record.steps == 6
    assert "parity" not in compile_.record.report


@dataclass(kw_only=True, slots=True)
class HalfHeads(Strategy):
    """An optimizer strategy with a bug: it halves the step of one tensor."""

    name: ClassVar[str] = "half_heads"
    stage: ClassVar[Stage] = Stage.OPTIMIZER

    def begin(self, program: Program) -> None:
        from strategies.optimizer.step import replace_step

        head = program.module.get_submodule("head").weight

        def update(optimizer: Any) -> None:
            before = head.detach().clone()
            type(optimizer).step(optimizer)
            head.lerp_(before, 0.5)

        replace_step(program.optimizers[0], update)


def test_a_wrong_optimizer_step_is_told_by_the_weights_alone(tmp_path: Path) -> None:
    compile_ = Compile([HalfHeads()])
    with pytest.raises(ParityError, match=r"update of 'head\.weight' [45]\.\d+e-01 of eager's away from it"):
        fit(Blocks(), tmp_path, [compile_])
    facts = compile_.record.report["parity"]
    assert facts["weights"]["beyond"] == 1
    assert facts["loss"]["difference"] == facts["gradient_norm"]["difference"] == 0


def other_draws(run: Callable[[], Any]) -> Any:
    """As Inductor: random numbers that are not eager's."""
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return run()


def test_other_random_numbers_than_eagers_are_not_taken_for_an_error(tmp_path: Path) -> None:
    with guarded.backend("tests_other_draws", other_draws, guarded.as_it_is) as backend:
        compile_ = Compile([Regional(backend=backend)])
        fit(guarded.Traceable(), tmp_path, [compile_])
    facts = compile_.record.report["parity"]
    assert (facts["verdict"], facts["draws_random_numbers"], "draws" in facts) == ("passed", True, True)
    assert facts["loss"]["difference"] > 1e-4, "the draws do differ"


def test_steps_under_other_seeds_say_nothing_of_weights_without_a_gradient(tmp_path: Path) -> None:
    class Adapted(guarded.Traceable):
        """Half of its adapter begins at 0, so that the other half's gradient is zeros in eager, too."""

        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (batch[0] @ self.down @ self.up - 1).square().mean()

    with guarded.backend("tests_other_draws", other_draws, guarded.as_it_is) as backend:
        compile_ = Compile([Regional(backend=backend)])
        fit(Adapted(), tmp_path, [compile_])
    assert "draws" in compile_.record.report["parity"]
    assert not [note for note in compile_.record.notes if "no gradient" in note]


def test_a_gross_error_is_found_among_random_numbers_too(tmp_path: Path) -> None:
    def both(run: Callable[[], Any]) -> Any:
        return guarded.scaled(8.0)(lambda: other_draws(run))

    with guarded.backend("tests_gross_error", both, guarded.as_it_is) as backend:
        _, facts = refused(backend, tmp_path, module=guarded.Traceable())
    assert "draws" in facts


class Still(Blocks):
    """Its learning rate begins at 0, as a warm-up's does."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_gradients_are_compared_one_by_one_where_the_first_step_moves_nothing(tmp_path: Path) -> None:
    with guarded.backend("tests_wrong_backward", guarded.as_it_is, guarded.scaled(1.01)) as backend:
        message, facts = refused(backend, tmp_path, module=Still())
    assert "gradient of " in message
    assert facts["updated_tensors"] > 10, "its last update is taken with a rate that moves weights"


class Draws(Blocks):
    """Its loss depends on a generator of its own, kept in ``kept``."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(float(next(self.kept) if hasattr(self.kept, "__next__") else self.kept.random()))
        return super().training_step(batch, batch_idx) * (1 + self.drawn[-1])


def test_a_generator_of_the_modules_own_draws_in_training_what_it_would_without_a_comparison(tmp_path: Path) -> None:
    runs = []
    for parity in ("off", "on"):
        module, compile_ = Draws(numpy.random.default_rng(0)), Compile([Regional(backend="eager")], parity=parity)
        runs.append((fit(module, tmp_path, [compile_]), module.drawn))
    assert runs[0] == runs[1]
    facts = compile_.record.report["parity"]
    assert facts["verdict"] == "passed"
    assert facts["loss"]["tolerance"] < 1e-3


def test_what_can_be_used_up_and_not_put_back_is_left_alone_and_not_compared(tmp_path: Path) -> None:
    runs = []
    for parity in ("off", "on"):
        module = Draws(random.Random(0).random() for _ in range(6))
        compile_ = Compile([Regional(backend="eager")], parity=parity)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            runs.append((fit(module, tmp_path, [compile_]), module.drawn))
    assert runs[0] == runs[1]
    facts = compile_.record.report["parity"]
    assert facts["verdict"] == "not compared"
    assert "self.kept (generator)" in facts["reason"]
    assert any("was not compared with eager's" in str(warning.message) for warning in seen)
    assert "not compared: a step may use up self.kept (generator)" in summary(compile_.record)["parity with eager"]


def test_a_tolerance_that_says_nothing_is_no_passed_comparison(tmp_path: Path) -> None:
    clock = iter(range(1, 1000))  # of nobody's that could be put back

    class Restless(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + OUTSIDE() % 7)

    global OUTSIDE
    OUTSIDE = clock.__next__
    compile_ = Compile([Regional(backend="eager")])
    with pytest.warns(UserWarning, match="was not compared with eager's"):
        fit(Restless(), tmp_path, [compile_])
    facts = compile_.record.report["parity"]
    assert (facts["verdict"], compile_.record.steps) == ("not compared", 6)
    assert facts["loss"]["tolerance"] > 0.05


OUTSIDE: Callable[[], int]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_inductors_own_rounding_passes(precision: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional()], parity="strict")
    fit(Blocks(), tmp_path, [compile_], precision=precision, max_steps=1)
    assert compile_.record.report["parity"]["verdict"] == "passed"


def test_a_perturbation_is_one_rounding_and_draws_none_of_the_runs_random_numbers() -> None:
    layer = nn.Linear(64, 64)
    before, state = layer.weight.detach().clone(), torch.get_rng_state()
    perturb(layer.parameters(), 2.0**-9, seed=1)
    relative = ((layer.weight - before) / before).abs()
    assert torch.equal(torch.get_rng_state(), state)
    assert float(relative.min()) == pytest.approx(2.0**-9, rel=1e-3)
    assert float(relative.max()) == pytest.approx(2.0**-9, rel=1e-3)
    half = nn.Linear(64, 64).bfloat16()
    kept = half.weight.detach().clone()
    perturb(half.parameters(), 2.0**-9, seed=1)
    assert float((half.weight != kept).float().mean()) > 0.9, "not rounded away"


def test_the_unit_is_the_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    host, gpu = torch.device("cpu"), torch.device("cuda")
    linear, convolution = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(3, 4, 2))
    assert rounding_unit("32-true", host, convolution) == 2.0**-24
    assert rounding_unit("bf16-mixed", host, linear) == 2.0**-9
    assert rounding_unit("64-true", gpu, convolution) == 2.0**-53
    assert torch.get_float32_matmul_precision() == "highest"
    assert rounding_unit("32-true", gpu, linear) == 2.0**-24
    assert rounding_unit("32-true", gpu, convolution) == 2.0**-11, "cuDNN may, whatever matrix products do"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert rounding_unit("32-true", gpu, convolution) == 2.0**-24


def test_kinds_are_compared_in_the_order_in_which_they_were_kept_because_processes_add_up_norms_of_each() -> None:
    comparison, one = Comparison(6.0), {"a": torch.ones(2)}
    kinds = ["weights", "optimizer_state", "buffers", "outputs", "gradients"]
    for kind in kinds:
        comparison.keep(kind, one, sizes=torch.ones(1), least=1e-4)
    assert list(comparison.distances(dict.fromkeys(reversed(kinds), one))) == kinds


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_beyond_every_tolerance(number: float) -> None:
    comparison, one = Comparison(6.0), torch.ones(2)
    comparison.keep_step(torch.ones(1), {"a": one, "b": one}, unit=2.0**-24)
    comparison.keep("weights", {"a": one, "b": one}, sizes=torch.ones(2), least=1e-4)

    def complaints(loss: float, gradient: float, weight: float) -> list[str]:
        step = comparison.distances_of_step(torch.tensor([loss]), {"a": one, "b": gradient * one})
        return comparison.verdict(step | comparison.distances({"weights": {"a": one, "b": weight * one}}))[0]

    assert complaints(1.0, 1.0, 1.0) == []
    for wrong, words in (
        ((number, 1.0, 1.0), "loss"),
        ((1.0, number, 1.0), "gradient"),
        ((1.0, 1.0, number), "update"),
    ):
        found = complaints(*wrong)
        assert found
        assert all(line.startswith(words) for line in found)


@pytest.mark.parametrize("later", [False, True], ids=["never used", "used from the third step on"])
def test_weights_behind_an_unused_output_get_no_gradient_as_in_eager(later: bool, tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x_BD), self.unused(x_BD)

    class Pooled(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.both = nn.ModuleList(), Both()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            used_BD, unused_BD = self.both(self.stem(batch[0]))
            if later and batch_idx > 1:
                used_BD = used_BD + unused_BD
            return nn.functional.mse_loss(self.head(used_BD), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    eager, module = Pooled(), Pooled()
    losses = fit(eager, tmp_path, [])
    compile_ = Compile([Whole(backend="aot_eager")], whole=["both"])
    assert fit(module, tmp_path, [compile_]) == pytest.approx(losses, rel=1e-4)
    assert compile_.record.report["parity"]["verdict"] == "passed"
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    optimizers = [one.trainer.optimizers[0] for one in (module, eager)]
    assert len(optimizers[0].state) == len(optimizers[1].state) == (6 if not later else 8)
    assert compile_.program is not None
    assert compile_.program.findings == {}, "a warm start compares anew, by which its regions know such weights"


def test_an_output_that_is_used_later_trains_its_weights_though_their_first_gradients_are_zeros(tmp_path: Path) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x_BD: Tensor) -> list[Tensor]:
            return [head(x_BD) for head in self.heads]

    class Growing(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.three = nn.ModuleList(), Three()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first_BD, second_BD, _ = self.three(self.stem(batch[0]))
            if batch_idx > 1:
                first_BD = first_BD + (batch_idx - 2) * second_BD
            return nn.functional.mse_loss(self.head(first_BD), batch[1])

    eager, module = Growing(), Growing()
    losses = fit(eager, tmp_path, [])
    compile_ = Compile([Whole(backend="aot_eager")], whole=["three"])
    assert fit(module, tmp_path, [compile_]) == pytest.approx(losses, rel=1e-4)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
