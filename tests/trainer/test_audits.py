"""Audits: a step that stops being eager's is found while it trains, and one that does not is left as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from strategies import Optimizer, Program, Regional, Strategy
from strategies.base import Stage
from strategies.optimizer_step import install
from strategies.step_graphs import StepGraphs
from tests.strategies.test_optimizer import OPTIMIZERS
from tests.trainer import guarded
from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import RecordingEngine
from tests.trainer.runs import curve, train
from tests.trainer.two_processes import said_by_two
from trainer.callback import Compile
from trainer.parity.audits import Audits
from trainer.parity.comparison import ParityError
from trainer.telemetry.record import RunRecord

FAULT: dict[str, Any] = {"on": False, "buffers": ()}
LONG = {"max_steps": 17, "max_epochs": -1}


class FaultFrom(L.Callback):
    """Something breaks from optimizer step ``step`` on."""

    def __init__(self, step: int) -> None:
        self._step = step
        FAULT.update(on=False, buffers=())

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        FAULT["on"] = trainer.global_step + 1 >= self._step


def late(change: guarded.Change) -> guarded.Change:
    return lambda run: change(run) if FAULT["on"] else run()


def late_backend(name: str, forward: guarded.Change, backward: guarded.Change = guarded.as_it_is) -> str:
    with guarded.backend(f"tests_late_{name}", late(forward), backward) as made:
        return made


def spoils_buffers(graph: Any, _: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        results = graph(*inputs)
        for buffer in FAULT["buffers"] if FAULT["on"] else ():
            buffer.data.mul_(1.1)  # which autograd does not see
        return results

    return run


class LateHalf(Strategy):
    """An optimizer strategy that from the fault on leaves half of one update out."""

    name: ClassVar[str] = "late_half"
    stage: ClassVar[Stage] = Stage.OPTIMIZER

    def begin(self, program: Program) -> None:
        install(program.optimizers[0], _LateHalf(program), after_first=lambda: None)


class _LateHalf:
    form = "eager"
    max_norm = None

    def __init__(self, program: Program) -> None:
        self.optimizer = program.optimizers[0]
        self._half = program.module.get_submodule("head").bias

    def __call__(self) -> None:
        before = self._half.detach().clone()
        type(self.optimizer).step(self.optimizer)
        if FAULT["on"]:
            self._half.lerp_(before, 0.5)

    def release(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}


class Captured(Strategy):
    """``cuda_graph`` with an engine that works on a CPU, whose replays do nothing any more from the fault on."""

    name: ClassVar[str] = "captured"
    stage: ClassVar[Stage] = Stage.STEP

    def begin(self, program: Program) -> None:
        program.step = StepGraphs(_Engine(program.module), eager_steps=1, max_graphs=8)

    def end(self, program: Program) -> None:
        if program.step is not None:
            program.report[self.name] = program.step.facts()
            program.step = None


class _Engine(RecordingEngine):
    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, results = super().capture(call)
        return (lambda: None if FAULT["on"] else replay()), results


def audited(module: L.LightningModule, folder: Path, strategies: list[Any], *callbacks: Any, **options: Any) -> Any:
    """Losses, record and what ended the run, if anything did."""
    arguments = {name: options.pop(name) for name in ("parity", "on_difference") if name in options}
    compile_ = Compile(strategies, **arguments)
    error = None
    losses: list[float] = []
    try:
        losses = fit(module, folder, [*callbacks, compile_], **{**LONG, **options})
    except ParityError as caught:
        error = caught
    return losses, compile_.record, error


def regional(name: str = "aot_eager") -> list[Any]:
    return [Regional(backend=name)]


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_a_forward_that_goes_wrong_at_step_3_ends_the_run_at_the_next_audit(tmp_path: Path) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    backend = late_backend("forward", guarded.scaled(1.01))
    losses, record, error = audited(
        Blocks(), tmp_path, regional(backend), FaultFrom(3), saved, enable_checkpointing=True
    )
    assert str(error).startswith("parity=on: step 4 is not eager's: loss ")
    assert "the audit of step 2 was clean" in str(error)
    assert f"Last good checkpoint: {tmp_path}/kept/step=2.ckpt (step 2)" in str(error)
    assert len(str(error).splitlines()) == 1
    assert sorted(path.stem for path in (tmp_path / "kept").iterdir()) == ["step=1", "step=2", "step=3"]
    audits = record.audits
    assert (audits.verdict, audits.steps, audits.last_clean_step) == ("failed", [1, 2, 4], 2)
    assert audits.worst["loss"].step == 4
    assert audits.worst["loss"].difference > audits.worst["loss"].tolerance
    assert record.steps == 3, "the wrong step is not counted"


def test_without_a_checkpoint_the_message_says_so(tmp_path: Path) -> None:
    *_, error = audited(Blocks(), tmp_path, regional(late_backend("forward", guarded.scaled(1.01))), FaultFrom(3))
    assert "Last good checkpoint: none yet." in str(error)


def test_half_of_an_update_is_found_without_a_word_on_the_loss(tmp_path: Path) -> None:
    _, record, error = audited(Blocks(), tmp_path, [LateHalf()], FaultFrom(3))
    assert "step 4 is not eager's: update of 'head.bias' 5.00e-01 of eager's away from it" in str(error)
    assert record.audits.worst["loss"].difference == 0


def test_spoilt_running_statistics_are_found(tmp_path: Path) -> None:
    if "tests_spoils_buffers" not in torch.compiler.list_backends(()):
        torch._dynamo.register_backend(spoils_buffers, name="tests_spoils_buffers")
    module, fault = Traceable(), FaultFrom(3)
    FAULT["buffers"] = [module.layers[1].norm.running_var]
    _, record, error = audited(module, tmp_path, regional("tests_spoils_buffers"), fault)
    assert "step 4 is not eager's: buffer 'layers.1.norm.running_var' " in str(error)
    assert record.audits.worst["loss"].difference == 0


def test_a_captured_step_that_is_stale_is_found(tmp_path: Path) -> None:
    _, record, error = audited(Blocks(), tmp_path, [Captured()], FaultFrom(5))
    assert str(error).startswith("parity=on: step 8 is not eager's: loss ")
    assert record.audits.steps == [1, 2, 4, 8]
    assert "captured" in record.report
    assert record.report["captured"]["replayed_steps"] > 3


def test_weights_that_a_captured_step_no_longer_moves_are_found_where_gradients_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Audits] = []
    begin = Audits.__init__

    def keeping(self: Audits, *arguments: Any, **named: Any) -> None:
        named["gradients"] = lambda: [torch.ones_like(parameter) for parameter in self.sample]
        begin(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(Audits, "__init__", keeping)
    *_, error = audited(Blocks(), tmp_path, [Captured()])
    assert made[0].sample
    assert "update of" in str(error), "ones are not the gradients"


@pytest.mark.parametrize(("captures", "begins", "at"), [(False, 3, 4), (True, 5, 8)])
def test_on_difference_eager_goes_on_with_eagers_losses(captures: bool, begins: int, at: int, tmp_path: Path) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    strategies = [Captured()] if captures else regional(late_backend("forward", guarded.scaled(1.01)))
    module, options = Blocks(), {"on_difference": "eager", "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="on_difference=eager: the run continues in eager"):
        losses, record, error = audited(module, tmp_path, strategies, FaultFrom(begins), saved, **options)
    assert error is None
    assert (record.audits.verdict, record.audits.steps[-1]) == ("went eager", at)
    assert [event.step for event in record.events if event.kind == "fallback"] == [at]
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert len(losses) == LONG["max_steps"]
    assert losses[at:] == pytest.approx(plain(tmp_path / "kept" / f"step={at}.ckpt", at), rel=1e-6)


def plain(checkpoint: Path, at: int) -> list[float]:
    """Losses of a loop without Lightning that continues from ``checkpoint``, on the batches of ``fit``."""
    module, losses = Blocks(), []
    L.seed_everything(0, verbose=False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    rows, targets = torch.randn(24, 8).split(4), torch.randn(24, 1).split(4)
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    optimizer = module.configure_optimizers()
    module.log = lambda *_: None  # type: ignore[method-assign, assignment]
    for step in range(at, LONG["max_steps"]):
        loss = module.training_step((rows[step % 6], targets[step % 6]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_difference_that_is_gone_when_the_step_is_repeated_ends_nothing(tmp_path: Path) -> None:
    def once(run: Callable[[], Any]) -> Any:
        FAULT["on"] = False  # the next call of the same step is right
        return guarded.scaled(1.01)(run)

    _, record, error = audited(Blocks(), tmp_path, regional(late_backend("once", once)), FaultFrom(3))
    assert error is None
    assert record.audits.verdict == "clean"
    assert record.audits.unrepeated_steps == [4, 8]


# ---- what is left as it is -------------------------------------------------------------------------------------------


class Odd(Traceable):
    """Changes weights in its training step, steps a schedule by hand, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, head in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.data = mine.data * 0.9 + head.data * 0.1
            self.teacher.bias.data.mul_(0.99)
        self.log("drawn", torch.rand((), generator=self.generator), on_step=True, on_epoch=True)
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return super().training_step(batch, batch_idx) + 0.1 * self.teacher(batch[0]).square().mean()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.1},
    {"precision": "bf16-mixed"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_training_with_audits_is_to_the_last_bit_the_one_without(options: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for parity in ("off", "on"):
        module, logger = Odd(), CSVLogger(tmp_path, name=parity)
        strategies = [*regional(), Optimizer(backend="aot_eager")]
        losses, record, _ = audited(module, tmp_path, strategies, parity=parity, logger=logger, **options)
        logged = [
            line for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines() if "seconds" not in line
        ]
        states = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        ends.append((losses, states, module, logged, torch.get_rng_state()))
    (without, plain, one, logged, drawn), (with_, same, other, again, drawn_too) = ends
    assert record.audits.steps[:4] == [1, 2, 4, 8]
    assert with_ == without
    assert all(torch.equal(tensor, same[name]) for name, tensor in plain.items())
    assert torch.equal(drawn, drawn_too)
    assert (one.calls, one.seen, one.facts) == (other.calls, other.seen, other.facts)
    assert _of_the_module(logged) == _of_the_module(again)
    torch.testing.assert_close(other.optimizers().state_dict(), one.optimizers().state_dict(), rtol=0, atol=0)


def _of_the_module(lines: list[str]) -> list[tuple[str, ...]]:
    names = lines[0].split(",")
    wanted = [names.index(name) for name in ("drawn_step", "train_loss") if name in names]
    rows = [tuple(line.split(",")[place] for place in wanted) for line in lines[1:]]
    return [row for row in rows if any(row)]


@pytest.mark.parametrize("options", [*OPTIONS[:3], {"precision": "bf16-true"}], ids=str)
def test_audits_of_captured_steps_leave_no_trace_and_find_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    FaultFrom(1000)
    ends = []
    for parity in ("off", "on"):
        module = Blocks()
        losses, record, error = audited(module, tmp_path, [Captured()], parity=parity, **options)
        assert error is None
        ends.append((losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(tensor, ends[1][1][name]) for name, tensor in ends[0][1].items())
    assert record.audits.verdict == "clean"
    assert record.report["captured"]["replayed_steps"] > 10


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": lambda given: torch.optim.NAdam(given, weight_decay=0.1),
    "Rprop": torch.optim.Rprop,
    "ASGD": lambda given: torch.optim.ASGD(given, t0=2),
    "Adafactor": torch.optim.Adafactor,
}
EVERY_OPTIMIZER = {**OPTIMIZERS, **OTHERS}


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_no_optimizer_raises_a_false_alarm(name: str, tmp_path: Path) -> None:
    class Uses(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.layers = self.layers[:0]

        def configure_optimizers(self) -> Any:
            optimizer = EVERY_OPTIMIZER[name](self.parameters())
            if name in OTHERS:  # as they are written, a changing rate compiles some of them anew each time
                return optimizer
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    every: tuple[dict[str, Any], ...] = ({"gradient_clip_val": 0.1}, {"precision": "bf16-true"})
    for options in every[: 1 if name in OTHERS else 2]:
        torch._dynamo.reset()
        _, record, error = audited(Uses(), tmp_path, [Optimizer(backend="eager")], **options)
        assert error is None
        assert record.audits.verdict == "clean"
        assert "update" in record.audits.worst, record.audits.not_compared


def test_other_random_numbers_than_eagers_are_not_taken_for_an_error(tmp_path: Path) -> None:
    def other_draws(run: Callable[[], Any]) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            return run()

    with guarded.backend("tests_audited_draws", other_draws, guarded.as_it_is) as backend:
        _, record, error = audited(Traceable(), tmp_path, regional(backend))
    assert error is None
    assert record.audits.not_compared["loss"].startswith("compiled code draws other random numbers")
    assert record.audits.worst["update"].share <= 1, "the optimizer is audited still"


def test_a_loss_scaler_that_leaves_steps_out_raises_no_alarm(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _, record, error = audited(Blocks(), tmp_path, [Optimizer(backend="aot_eager")], plugins=[plugin])
    assert error is None
    assert record.audits.verdict == "clean"
    assert scaler.get_scale() < 2.0**120, "steps were left out"


def test_one_look_at_a_gradient_penalty_takes_gradients(tmp_path: Path) -> None:
    class Penalty(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x_BD = batch[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.head(x_BD).sum(), x_BD, create_graph=True)
            return super().training_step(batch, batch_idx) + slope.square().mean()

    _, record, error = audited(Penalty(), tmp_path, regional())
    assert error is None
    assert record.audits.worst["loss"].share <= 1
    assert not record.audits.not_compared


# ---- what it costs, and what is said ---------------------------------------------------------------------------------


def test_audits_cost_their_share_of_a_run_and_no_more(tmp_path: Path) -> None:
    from trainer.parity import audits as module

    made: list[Audits] = []
    taken: list[float] = []

    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            return cls.now

    begin, look = Audits.__init__, module.EagerForward.look

    def keeping(self: Audits, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        made.append(self)

    def slow(self: Any, arguments: Any) -> Any:
        Clock.now += 0.5
        taken.append(Clock.now)
        return look(self, arguments)

    class Steps(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            Clock.now += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", Clock)
        patch.setattr(Audits, "__init__", keeping)
        patch.setattr(module.EagerForward, "look", slow)
        _, record, error = audited(Blocks(), tmp_path, regional("eager"), Steps(), max_steps=1500)
    assert error is None
    assert record.audits.steps[:5] == [1, 2, 4, 8, 16]
    assert 10 <= len(taken) <= 15, "half a second each, of 1500 seconds"
    assert record.audits.seconds == pytest.approx(0.5 * len(taken))
    assert record.audits.steps[-1] > 1000, "and they last until the end"


def test_audited_seconds_are_no_part_of_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trainer.clock import CLOCK, stop_time
    from trainer.parity.forward import EagerForward

    look = EagerForward.look

    def slow(self: Any, arguments: Any) -> Any:
        CLOCK.sleep(100.0)
        return look(self, arguments)

    monkeypatch.setattr(EagerForward, "look", slow)
    stop_time(monkeypatch)
    _, record, _ = audited(Blocks(), tmp_path, regional("eager"))
    assert record.audits.steps[:4] == [1, 2, 4, 8]
    assert record.first_step_seconds < 50
    assert record.warmup_seconds < 50
    assert record.steady_step_seconds_mean < 50
    assert record.pause_seconds >= 400


def test_eager_and_parity_off_have_none(tmp_path: Path) -> None:
    for strategies, options in (([], {}), (regional("eager"), {"parity": "off"})):
        _, record, _ = audited(Blocks(), tmp_path, strategies, **options)
        assert record.audits is None


def test_what_is_not_audited_says_why(tmp_path: Path) -> None:
    from tests.trainer.manual_modules import Accumulates

    _, record, _ = audited(Accumulates(), tmp_path, regional("eager"))
    assert (record.audits.verdict, record.audits.reason) == ("not audited", "the module optimizes by hand")

    class Custom(torch.optim.SGD):
        pass

    class Uses(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Custom(self.parameters(), lr=0.05)

    _, record, _ = audited(Uses(), tmp_path, regional("eager"))
    assert "Custom is not an optimizer of torch.optim" in record.audits.not_compared["update"]
    assert record.audits.verdict == "clean"

    class Squares(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.05)

    _, record, error = audited(Squares(), tmp_path, regional("eager"))
    assert error is None
    assert record.audits.not_compared["update"].startswith("LBFGS")


def test_record_summary_and_tensorboard_tell_of_them(tmp_path: Path) -> None:
    from trainer.rows import summary

    record = train(tmp_path, strategy="regional")
    assert record.audits is not None
    assert (record.audits.verdict, record.audits.steps) == ("clean", [1, 2, 4])
    loaded = RunRecord.load(tmp_path)
    assert loaded.audits == record.audits
    assert summary(loaded)["audits"].startswith("clean: 3, of steps 1 to 4; update ")
    points = curve(tmp_path, "audit/worst_of_tolerance")
    assert list(points) == [1, 2, 4]
    assert all(0 <= value <= 1 for value in points.values())
    assert curve(tmp_path, "audit/seconds")[4] == pytest.approx(record.audits.seconds, abs=1e-3)
    assert math.isfinite(record.audits.seconds)


TWO = """
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from strategies import Optimizer, Regional
from tests.trainer import guarded
from tests.trainer.guarded import Traceable
from tests.trainer.test_audits import FAULT, FaultFrom, late_backend
from trainer.callback import Compile

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
wrong = late_backend("two", guarded.scaled(1.01))
facts = {}
for name, given in (
    ("off", {"parity": "off"}), ("clean", {}), ("wrong", {}), ("eager", {"on_difference": "eager"}),
):
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module = Traceable()
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    backend = wrong if rank and name in ("wrong", "eager") else "aot_eager"
    compile_ = Compile([Regional(backend=backend), Optimizer(backend="eager")], **given)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=9, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[FaultFrom(3), compile_], default_root_dir=folder,
    )
    error = None
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    audits = compile_.record.audits
    facts[name] = {
        "error": error, "steps": trainer.global_step, "audited": audits and audits.steps,
        "verdict": audits and audits.verdict, "left out": audits and audits.not_compared,
        "compiled": sum(part._compiled_call_impl is not None for part in module.modules()),
        "weights": [float(tensor.double().sum()) for tensor in module.state_dict().values()],
    }
(folder / f"{rank}.json").write_text(json.dumps(facts))
os._exit(0)  # a group in which a step was broken off is not taken down in order
"""


def test_two_processes_audit_the_same_steps_and_end_or_go_on_together(tmp_path: Path) -> None:
    first, second = said_by_two(TWO, tmp_path)
    for facts in (first, second):
        assert facts["clean"]["error"] is None
        assert facts["clean"]["audited"] == [1, 2, 4, 8]
        assert facts["clean"]["weights"] == facts["off"]["weights"], "no trace"
        assert (facts["wrong"]["audited"], facts["wrong"]["verdict"]) == ([1, 2, 4], "failed")
        assert facts["wrong"]["error"].startswith("ParityError: parity=on: step 4 is not eager's: ")
        assert (facts["eager"]["error"], facts["eager"]["verdict"]) == (None, "went eager")
        assert (facts["eager"]["steps"], facts["eager"]["compiled"]) == (9, 0)
    assert "another process found it so" in first["wrong"]["error"]
    assert "loss " in second["wrong"]["error"]
    assert [facts["eager"]["audited"] for facts in (first, second)] == [[1, 2, 4]] * 2
