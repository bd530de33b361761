"""The preflight: passes before the first step that leave no trace, in the model, the logs or the order of the data."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from strategies import Optimizer, Regional
from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import Blocks, fit, quiet_trainer
from tests.trainer.runs import train
from trainer.callback import Compile
from trainer.config import compose
from trainer.guards.preflight import keep_findings


def state(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "max_steps": 3}, {"gradient_clip_val": 0.1}])
def test_a_training_with_preflight_is_to_the_last_bit_the_one_without(options: dict[str, Any], tmp_path: Path) -> None:
    plain, checked = Traceable(), Traceable()
    without = fit(plain, tmp_path, [Compile([Regional(backend="aot_eager")], parity="off")], **options)
    compile_ = Compile([Regional(backend="aot_eager")], parity="strict", on_compile_error="eager")
    losses = fit(checked, tmp_path, [compile_], **options)
    assert losses == without
    assert compile_.record.report["parity"]["verdict"] == "passed"
    assert compile_.record.preflight_seconds
    ends = state(plain)
    for name, tensor in state(checked).items():
        assert torch.equal(tensor, ends[name]), name
    assert (checked.calls, checked.seen) == (plain.calls, plain.seen)
    assert checked.facts == plain.facts
    torch.testing.assert_close(checked.optimizers().state_dict(), plain.optimizers().state_dict(), rtol=0, atol=0)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_the_statistics_of_torchscript_are_put_back(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.BatchNorm1d(8)), tmp_path / "norm.pt")

    def trained(*callbacks: L.Callback) -> dict[str, Tensor]:
        module = Blocks()
        module.layers.append(torch.jit.load(tmp_path / "norm.pt"))
        fit(module, tmp_path, list(callbacks))
        return state(module)

    eager = trained()
    compile_ = Compile([Regional(backend="aot_eager", blocks=["layers"])])
    torch.testing.assert_close(trained(compile_), eager)
    assert compile_.record.report["parity"]["verdict"] == "passed"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_compiled_optimizer_begins_where_it_would_have_without_preflight(resumed: bool, tmp_path: Path) -> None:
    def run(name: str, parity: str) -> tuple[list[float], dict[str, Tensor], Compile]:
        torch._dynamo.reset()
        strategies = [*([Regional(backend="eager")] if resumed else []), Optimizer(backend="eager")]
        compile_ = Compile(strategies, parity=parity, on_compile_error="eager" if parity != "off" else "fail")
        module = Traceable()
        if resumed:
            L.seed_everything(0, verbose=False)
            optimizer = module.configure_optimizers()["optimizer"]
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            kept = optimizer.state_dict()
            module.zero_grad()

            def on_fit_start() -> None:
                module.trainer.optimizers[0].load_state_dict(kept)

            module.on_fit_start = on_fit_start  # type: ignore[method-assign]
        losses = fit(module, tmp_path / name, [compile_], gradient_clip_val=0.5)
        return losses, state(module), compile_

    plain, checked = run("plain", "off"), run("checked", "strict")
    assert checked[0] == plain[0]
    for name, tensor in checked[1].items():
        assert torch.equal(tensor, plain[1][name]), name
    assert checked[2].record.report["parity"]["verdict"] == "passed"
    assert checked[2].record.report["optimizer"]["form"] == plain[2].record.report["optimizer"]["form"]


def test_a_resumed_training_goes_on_from_its_optimizer_state(tmp_path: Path) -> None:
    def resumed(parity: str) -> list[float]:
        folder = tmp_path / parity
        fit(Traceable(), folder, [], enable_checkpointing=False, max_steps=3)
        module = Traceable()
        L.seed_everything(0, verbose=False)
        trainer = quiet_trainer(max_steps=3, default_root_dir=folder)
        data = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4
        )
        trainer.fit(module, data)
        trainer.save_checkpoint(folder / "three.ckpt")
        callback = Compile([Regional(backend="aot_eager")], parity=parity)
        further = quiet_trainer(max_steps=6, default_root_dir=folder, callbacks=[callback])
        again = Traceable()
        further.fit(again, data, ckpt_path=folder / "three.ckpt")
        assert further.global_step == 6
        return again.seen

    assert resumed("strict") == resumed("off")


class Counts(L.Callback):
    """Counts the hooks that a step calls."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self._count("on_before_zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self._count("on_before_backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._count("on_before_optimizer_step")


def test_callbacks_and_loggers_see_the_training_only(tmp_path: Path) -> None:
    counts, logger = Counts(), CSVLogger(tmp_path)
    callbacks = [Compile([Regional(backend="aot_eager")]), counts]
    fit(Blocks(), tmp_path, callbacks, logger=logger)
    assert set(counts.calls.values()) == {6}
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    logged = [row.split(",")[header.index("train_loss")] for row in rows[1:]]
    assert len([value for value in logged if value]) == 3, "every second step"


def test_another_thread_sees_callbacks_and_loggers_as_ever(tmp_path: Path) -> None:
    seen: list[tuple[list[L.Callback], str | None]] = []

    class Read(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            thread = threading.Thread(target=self.read)  # as Rich's, which draws Lightning's progress bar
            thread.start()
            thread.join()
            return super().training_step(batch, batch_idx)

        def read(self) -> None:
            trainer = self.trainer
            assert trainer.logger is not None
            seen.append(([*trainer.callbacks], trainer.logger.log_dir))  # type: ignore[attr-defined]

    logger = CSVLogger(tmp_path)
    callbacks = [Compile([Regional(backend="aot_eager")]), Counts()]
    fit(Read(), tmp_path, callbacks, logger=logger)
    assert len(seen) > 6, "preflight and training"
    for found, where in seen:
        assert found[-2:] == callbacks
        assert where == logger.log_dir


def test_lightnings_counters_know_nothing_of_it(tmp_path: Path) -> None:
    class Progress(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.state = trainer.fit_loop.state_dict()

    seen = []
    for parity in ("off", "on"):
        progress = Progress()
        fit(Blocks(), tmp_path, [Compile([Regional(backend="aot_eager")], parity=parity), progress])
        seen.append(progress.state)
    assert seen[0] == seen[1]


def test_eager_has_no_preflight(tmp_path: Path) -> None:
    compile_ = Compile(parity="strict", on_compile_error="eager", on_slower="eager")
    fit(Blocks(), tmp_path, [compile_])
    assert compile_.record.preflight_seconds is None
    assert compile_.record.report == {}


def test_no_preflight_when_nothing_is_asked_for(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="aot_eager")], parity="off")
    fit(Blocks(), tmp_path, [compile_])
    assert compile_.record.preflight_seconds is None


class Hesitant(Blocks):
    """Optimizes by hand, and not yet on its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.completed:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()


def test_what_can_have_no_preflight_is_noted_and_trained(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="aot_eager")])
    fit(Hesitant(), tmp_path, [compile_])
    assert compile_.record.steps == 6
    assert compile_.record.report["parity"]["verdict"] == "skipped"
    assert any("took no manual_backward and no optimizer step" in note for note in compile_.record.notes)


def test_on_slower_says_so_too_where_no_step_can_be_timed(tmp_path: Path) -> None:
    class Own(Hesitant):
        """Its optimizer is nobody else's."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return Blocks.training_step(self, batch, batch_idx).detach()

        def configure_optimizers(self) -> Any:
            return None

    compile_ = Compile([Regional(backend="eager")], parity="off", on_slower="eager")
    fit(Own(), tmp_path, [compile_], max_steps=-1, max_epochs=1)
    assert any(note.startswith("no preflight, ") for note in compile_.record.notes)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ([], "parity", "on"),
        (["parity=on"], "parity", "on"),
        (["parity=off"], "parity", "off"),
        (["parity=strict"], "parity", "strict"),
        (["on_compile_error=eager"], "on_compile_error", "eager"),
        (["on_slower=eager"], "on_slower", "eager"),
    ],
)
def test_the_command_line_gives_words_not_booleans(given: list[str], name: str, value: str) -> None:
    assert getattr(compose(given), name) == value


@pytest.mark.parametrize("given", ["parity=maybe", "on_compile_error=warn", "on_slower=fail", "on_difference=warn"])
def test_a_word_that_does_not_exist_is_refused(given: str, tmp_path: Path) -> None:
    name, value = given.split("=")
    with pytest.raises(ValueError, match=rf"{name}='{value}' is not one of"):
        compose([given])
    with pytest.raises(ValueError, match=rf"{name}='{value}' is not one of"):
        Compile([], **{name: value})


def test_a_run_of_the_command_line_is_compared_and_recorded(tmp_path: Path) -> None:
    record = train(tmp_path, "parity=strict", strategy="regional", backend="aot_eager")
    assert record.status == "finished"
    facts = record.report["parity"]
    assert (facts["mode"], facts["verdict"], facts["draws_random_numbers"]) == ("strict", "passed", False)
    assert facts["loss"]["difference"] <= facts["loss"]["tolerance"]
    assert facts["weights"]["tensors"] == facts["gradients"]["tensors"] > 10
    assert record.warmup_seconds is not None
    assert record.preflight_seconds is not None
    assert record.warmup_seconds >= record.preflight_seconds


@pytest.mark.parametrize("timed", [{"verdict": "skipped"}, {"before_the_first_step": {"eager_seconds": [1.0]}}])
def test_a_warm_start_is_left_findings_that_hold_a_timing(timed: dict[str, Any]) -> None:
    """For want of memory nothing was timed; a warm start that was left that would end with a KeyError."""
    program: Any = SimpleNamespace(report={"parity": {"verdict": "passed"}, "slowdown": timed}, findings={}, regions=[])
    keep_findings(program, "float32[4, 8]")
    assert [found["slowdown"] for found in program.findings.values()] == [timed] * ("verdict" not in timed)
