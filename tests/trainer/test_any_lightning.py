"""Any Lightning module, in a script of one's own: eager's losses, and the record and verdict of our command line."""

from __future__ import annotations

import copy
import csv
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from strategies import Checkpointing, Regional, Strategy, Whole
from tests.strategies import backends
from tests.strategies.modules import Block
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, Losses, fit, quiet_trainer
from trainer.callback import Compile
from trainer.report.runs import find
from trainer.run_start import RECORDS_VARIABLE
from trainer.telemetry import meter, telemetry
from trainer.telemetry.record import RunRecord


@pytest.mark.parametrize(
    ("strategy", "regions"),
    [
        (Regional(backend="aot_eager"), 3),
        (Regional(backend="aot_eager", parts=["head"]), 4),
        (Whole(backend="aot_eager"), 5),
    ],
    ids=["regional", "with a part", "whole"],
)
def test_a_strange_module_trains_compiled_with_the_same_losses(
    strategy: Strategy, regions: int, tmp_path: Path
) -> None:
    settings = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "optimize_ddp")}
    eager = fit(Blocks(), tmp_path, [])
    module, compile_ = Blocks(), Compile([strategy], warmup_steps=1)
    keys = list(module.state_dict())
    losses = fit(module, tmp_path, [compile_])
    assert losses == pytest.approx(eager, rel=FLOOR)
    assert list(module.state_dict()) == keys
    record = compile_.record
    assert record.regions == regions
    assert record.graphs
    assert record.steps == 6
    assert record.final_loss == pytest.approx(sum(losses[-2:]) / 2)
    assert record.final_metrics["train_loss"] == pytest.approx(losses[-1])
    assert record.notes, "the module declared nothing, which the user is told"
    assert {name: getattr(torch._dynamo.config, name) for name in settings} == settings


def test_a_traceback_of_the_users_step_is_lightnings_own(tmp_path: Path) -> None:
    class Fails(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise RuntimeError("the user's")
            return super().training_step(batch, batch_idx)

    frames: list[list[str]] = []
    for callbacks in ([], [Compile([Regional(backend="aot_eager")])]):
        with pytest.raises(RuntimeError, match="the user's") as error:
            fit(Fails(), tmp_path, callbacks)
        frames.append([frame.name for frame in traceback.extract_tb(error.tb)])
    assert frames[1] == frames[0]


def test_a_loss_may_be_a_row_of_one_number(tmp_path: Path) -> None:
    class Row(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx).reshape(1, 1)

    eager = fit(Row(), tmp_path, [])
    for strategies in ([], [Regional(backend="aot_eager")]):
        compile_ = Compile(strategies, warmup_steps=1)
        assert fit(Row(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
        assert compile_.record.final_loss == pytest.approx(sum(eager[-2:]) / 2)


def test_batches_are_counted_by_the_function_that_is_given(tmp_path: Path) -> None:
    compile_ = Compile(warmup_steps=1, count=lambda batch: (len(batch[0]), None, None, None))
    fit(Blocks(), tmp_path, [compile_])
    record = compile_.record
    assert record.samples_per_second == pytest.approx(4 * (record.steady_steps_per_second or 0))
    assert record.tokens_per_second is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole": ["nope"]}, "whole: 'nope' matches no submodule"),
        ({"whole": "layers"}, r"whole='layers' is a text, not a list: write \['layers'\]"),
        ({"blocks": "layers"}, r"blocks='layers' is a text, not a list"),
        ({"parts": [torch.nn.Linear]}, r"parts=\[<class .*>\] is not a list of names, such as \['net.layers'\]"),
        ({"ragged": ["0"]}, r"ragged=\['0'\]: each is \(name, dimension, padding, extra\)"),
        ({"ragged": [("0",)]}, r"ragged=\[\('0',\)\]: each is"),
        ({"ragged": [("0", "1")]}, r"ragged=\[\('0', '1'\)\]: each is"),
        ({"count": 3}, "count=3 is not a function of a batch"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"count": lambda batch: 3}, "count returned 3: it has to return a tuple of four"),
    ],
)
def test_what_the_module_cannot_be_told_is_said(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Blocks(), tmp_path, [Compile([Whole(backend="eager")], **options)])


def compiled_whole() -> Any:
    return torch.compile(Blocks(), backend="eager")


def compiled_within() -> Any:
    module: Any = Blocks()
    module.head = torch.compile(module.head, backend="eager")
    return module


def compiled_in_place() -> Any:
    module = Blocks()
    module.head.compile(backend="eager")
    return module


def compiled_later() -> Any:
    class Compiles(Blocks):
        def on_fit_start(self) -> None:
            self.layers[0].compile(backend="eager")

    return Compiles()


@pytest.mark.parametrize(
    ("make", "theirs", "left"),
    [
        (compiled_whole, "Blocks", {f"layers.{number}": "the module" for number in range(3)}),
        (compiled_within, "head", {}),
        (compiled_in_place, "head", {}),
        (compiled_later, "", {"layers.0": "layers.0"}),
    ],
)
def test_what_is_compiled_already_is_left_to_that(make: Any, theirs: str, left: dict[str, str], tmp_path: Path) -> None:
    eager = fit(make(), tmp_path, [])
    for strategies in ([], [Regional(backend="aot_eager")]):
        compile_ = Compile(strategies)
        assert fit(make(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
        record = compile_.record
        assert not theirs or f"compiled by torch.compile already, in eager steps too: {theirs}" in record.notes
    assert record.eager_parts == {path: f"{own} is compiled by torch.compile already" for path, own in left.items()}
    assert (record.regions, record.regions_compiled) == (3 - len(left), 3 - len(left))
    assert record.ended_in_eager is (len(left) == 3)
    assert theirs or "layers.0 runs as written: layers.0 is compiled by torch.compile already" in record.notes


def demo(callbacks: list[L.Callback], module: L.LightningModule | None = None) -> list[float]:
    losses = Losses()
    L.seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_steps=4, limit_val_batches=2, callbacks=[losses, *callbacks])
    trainer.fit(BoringModel() if module is None else module)
    return losses.values


def test_where_nothing_repeats_regional_compiles_the_children_and_says_so() -> None:
    compile_ = Compile([Regional(backend="aot_eager")], save=False)
    assert demo([compile_]) == pytest.approx(demo([]), rel=FLOOR)
    assert (compile_.record.regions, compile_.record.regions_compiled) == (1, 1)
    notes = [note for note in compile_.record.notes if "no repeated blocks" in note]
    assert notes == ["regional: no repeated blocks found in this module; compiled its children layer, each as a whole"]


@pytest.mark.parametrize("strategy", [Regional, Whole])
def test_a_module_without_children_trains_eager_and_says_so(strategy: type[Strategy]) -> None:
    class Bare(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            del self.layer
            self.weight = torch.nn.Parameter(torch.ones(2, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    compile_ = Compile([strategy()], save=False)
    assert demo([compile_], Bare()) == demo([], Bare())
    assert compile_.record.eager_parts == {strategy.name: "the module has no child with parameters to compile"}


def test_another_logger_gets_the_figures_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Blocks(), tmp_path, [Compile([Regional(backend="aot_eager")], warmup_steps=1)], logger=logger)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "warmup/graphs", "warmup/first_step_seconds"} <= set(header)


def test_a_curve_of_the_modules_own_is_not_mixed_with_ours(tmp_path: Path) -> None:
    class Template(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=False, on_epoch=True)
            return loss

    def logged(*callbacks: L.Callback) -> list[str]:
        logger = CSVLogger(tmp_path)
        fit(Template(), tmp_path, list(callbacks), logger=logger)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            return [row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]]

    assert logged(Compile(warmup_steps=1)) == logged()


def regional(**options: Any) -> Compile:
    return Compile([Regional(backend="eager")], warmup_steps=1, **options)


class Validated(Blocks):
    """Logs a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def data(batch_size: int = 4) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=batch_size
    )


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return quiet_trainer(**{"callbacks": [*callbacks], "default_root_dir": folder, "max_steps": 4, **options})


def test_the_record_is_complete_and_saved_where_the_trainer_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_, logger = regional(), CSVLogger(tmp_path)
    assert compile_.record.status == "not started"
    L.seed_everything(7, verbose=False)
    trainer(tmp_path, compile_, logger=logger, max_steps=6).fit(Validated(), data(), data())
    record = RunRecord.load(Path(logger.log_dir))
    assert record.status == compile_.record.status == "finished"
    assert (record.task, record.label, record.seed, record.precision) == ("Validated", "regional", 7, "32-true")
    assert [strategy["name"] for strategy in record.strategies] == ["regional"]
    assert record.config["task"] == {"parameters": sum(one.numel() for one in Blocks().parameters()), "batch_size": 4}
    assert record.versions["torch"] == torch.__version__.partition("+")[0]
    assert record.device_type == "cpu"
    assert record.device
    assert record.started
    assert record.script
    assert record.total_seconds
    assert record.final_loss
    assert record.final_metrics["val_loss"]
    assert record.verdict is not None
    printed = capsys.readouterr().out
    assert "Validated · regional · finished" in printed
    assert "verdict: " in printed
    assert f"record: {logger.log_dir}/record.json" in printed


def test_a_command_that_has_started_the_script_says_where_the_records_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS_VARIABLE, str(tmp_path / "records"))
    for _ in range(2):
        fit(Blocks(), tmp_path / "own", [regional(save=False)], max_steps=2)
    assert [run.directory.name for run in find([tmp_path / "records"])] == ["records", "run-2"]
    assert list((tmp_path / "own").rglob("record.json")) == []


def test_each_fit_has_a_record_of_its_own(tmp_path: Path) -> None:
    compile_, module = regional(), Blocks()
    trainer(tmp_path, compile_).fit(module, data())
    first = compile_.record
    trainer(tmp_path, compile_, max_steps=3).fit(module, data())
    again = compile_.record
    other = trainer(tmp_path, compile_, max_steps=2, logger=CSVLogger(tmp_path, name="logs"))
    other.fit(Blocks(), data())
    assert [one.steps for one in (first, again, compile_.record)] == [4, 3, 2]
    saved = [RunRecord.load(tmp_path / "compile_runs" / f"run-{number}") for number in (1, 2)]
    assert [(one.steps, one.graphs, one.regions) for one in saved] == [(4, first.graphs, 3), (3, again.graphs, 3)]
    other.fit_loop.epoch_loop.max_steps = 4
    other.fit(Blocks(), data())
    assert RunRecord.load(Path(str(other.logger.log_dir))).steps == 2
    assert RunRecord.load(Path(str(other.logger.log_dir)) / "run-2").steps == 4


def test_evaluating_alone_leaves_no_record_and_does_not_touch_the_last_one(tmp_path: Path) -> None:
    compile_, module = regional(), Validated()
    once = trainer(tmp_path, compile_)
    once.validate(module, data(), verbose=False)
    assert compile_.record.status == "not started"
    assert not [*tmp_path.rglob("record.json")]
    once.fit(module, data())
    once.validate(module, data(), verbose=False)
    assert compile_.record.status == "finished"
    assert len([*tmp_path.rglob("record.json")]) == 1


def test_evaluating_alone_runs_eager_what_does_not_compile(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=backends.BROKEN_FORWARD)])
    with pytest.warns(UserWarning, match="Block runs eager: .*no forward"):
        trainer(tmp_path, compile_).validate(Validated(), data(), verbose=False)
    assert len(compile_.program.eager_parts) == 3


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (KeyError("tokens"), "failed", "KeyError: 'tokens'"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (SIGTERMException(), "interrupted", "SIGTERM"),
    ],
)
def test_a_fit_that_ends_early_is_recorded_so(error: BaseException, status: str, reason: str, tmp_path: Path) -> None:
    class Ends(Blocks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise error

    compile_ = regional()
    with pytest.raises((KeyError, SystemExit)):  # Lightning turns a Ctrl-C into an exit
        trainer(tmp_path, compile_).fit(Ends(), data())
    record = RunRecord.load(tmp_path / "compile_runs" / "run-1")
    assert (record.status, record.reason, record.steps) == (status, reason, 2)


def test_a_device_that_breaks_leaves_its_own_error_and_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[str] = []

    def breaks(owner: Any, name: str) -> None:
        works = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if broken:
                raise RuntimeError("CUDA error: as for every later call")
            return works(*arguments)

        monkeypatch.setattr(owner, name, call)

    class Breaks(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 13:
                broken.append("from here on")
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().training_step(batch, batch_idx)

    for name in ("now", "seconds"):
        breaks(meter.StepClock, name)
    breaks(meter, "_stacked")
    breaks(telemetry, "nan_to_none")  # whose metrics lie on the device
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer(tmp_path, compile_ := regional(), max_steps=20, log_every_n_steps=5).fit(Breaks(), data())
    record = compile_.record
    assert (record.status, record.reason) == ("failed", "RuntimeError: CUDA error: device-side assert triggered")
    counted = (record.steps, record.warmup_steps, record.left_out_steps, record.steady_steps)
    assert counted == (13, 1, 3, 6), "of ten steps read, three of which were audited"
    assert record.graphs
    assert len(record.losses) == 2


def test_a_fit_that_never_begins_leaves_no_record(tmp_path: Path) -> None:
    compile_ = regional(blocks=["layerz"])
    module = Blocks()
    for _ in range(2):
        with pytest.raises(ValueError, match="layerz"):
            trainer(tmp_path, compile_).fit(module, data())
    assert compile_.record.status == "failed"
    assert not [*tmp_path.rglob("record.json")]


class Late(Blocks):
    """Builds its network once Lightning asks for it."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def build(self, stage: str = "") -> None:
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Block() for _ in range(3))


class InSetup(Late):
    setup = Late.build


class InConfigureModel(Late):
    configure_model = Late.build


class Drops(Blocks):
    """Loses a block in the middle of the training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.layers = self.layers[:2]


class Adds(Blocks):
    """Grows in the middle of the training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3 and len(self.layers) == 3:
            self.layers.append(copy.deepcopy(self.layers[0]))


class Iterates(Blocks):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)

    def log(self, *given: Any, **named: Any) -> None:
        super().log(*given, **named, batch_size=4)


@pytest.mark.parametrize("kind", [InSetup, InConfigureModel, Drops, Adds, Iterates])
def test_modules_that_build_change_or_iterate_by_themselves_train_compiled(
    kind: type[Blocks], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    eager = fit(kind(), tmp_path, [], max_steps=12)
    compile_ = Compile([Checkpointing(), Regional(backend="eager")])
    assert fit(kind(), tmp_path, [compile_], max_steps=12) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.regions_compiled == 3
    assert any("layers.2: no longer in the module" in str(one.message) for one in recwarn) is (kind is Drops)
    assert [str(one.message)[:20] for one in recwarn].count("layers.3: was added ") == (kind is Adds)
    assert list(compile_.record.eager_parts) == ["layers.3"] * (kind is Adds)


def test_a_trial_of_the_trainer_saves_nothing(tmp_path: Path) -> None:
    compile_ = regional()
    trainer(tmp_path, compile_, fast_dev_run=True, logger=True).fit(Blocks(), data())  # a DummyLogger takes its place
    assert compile_.record.status == "finished"
    assert not [*tmp_path.rglob("record.json")]


def test_files_and_prints_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_ = regional(save=False, verbose=False)
    trainer(tmp_path, compile_).fit(Blocks(), data())
    assert compile_.record.status == "finished"
    assert compile_.record.verdict is not None
    assert not [*tmp_path.rglob("record.json")]
    assert RunRecord.load(compile_.record.save(str(tmp_path / "mine"))).steps == 4
    assert capsys.readouterr().out == ""


def test_a_trainer_takes_one_of_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one Compile callback"):
        trainer(tmp_path, regional(), Compile()).fit(Blocks(), data())
