"""With two processes: both draw the same weights and resume their own random states, and what one of them finds in the
preflight, or in its cache, both act on; also where the module optimizes itself."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch

import tasks.module
from strategies import STRATEGIES, Optimizer, Regional, Stage, Strategy, regions
from strategies.modules import Auto
from tasks.captioning.task import CaptionerSize, Captioning, Shapes
from tests.processes import Pair, on_ranks
from tests.strategies import backends
from tests.strategies.modules import Block
from tests.trainer import guarded
from tests.trainer.lightning_modules import Blocks, fit, quiet_trainer
from tests.trainer.manual_modules import Accumulates, Adversaries
from tests.trainer.runs import train
from trainer.auto import chooser
from trainer.callback import Compile
from trainer.telemetry.compiler import CompilerMonitor

pytestmark = pytest.mark.xdist_group("two_processes")

Facts = dict[str, dict[str, Any]]
LIMITED = {"limit": (1, 0), "late limit": (0, 1)}
"""One process has a graph for each block, or one for each step."""
SECOND = {"rollback": backends.BROKEN_BACKWARD, "wrong": "tests_wrong_on_one"}
"""The backend of the second process, where it is another one."""
MANUAL = {"two optimizers": (Adversaries, 6), "accumulation": (Accumulates, 1)}
"""Modules that optimize by themselves, and their steps."""


class Numbered(Block):
    def __init__(self, number: int, counts: int) -> None:
        super().__init__()
        self.number, self.counts = number, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += self.counts
        return super().forward(x) * (1.0 if self.number < 100 else 2.0)


class Warm(Strategy):
    """As compile=cached with a bundle, on one process: what an earlier run found, and that all graphs were there."""

    name, stage = "cached", Stage.CACHE
    found: Any

    def apply(self, program: Any) -> None:
        program.findings.update(Warm.found)
        figures = CompilerMonitor.figures
        CompilerMonitor.figures = (  # type: ignore[method-assign]
            lambda watch: dataclasses.replace(figures(watch), cache="warm")
        )


def trained(module: Any, folder: Path, strategies: list[Any], ddp: str = "ddp", **options: Any) -> dict[str, Any]:
    """What this process has to say about one training."""
    torch._dynamo.reset()
    compile_ = Compile(strategies, **{"on_compile_error": "eager", **options})
    error = None
    try:
        fit(module, folder, [compile_], devices=2, strategy=ddp, max_epochs=-1 if ddp == "ddp" else 1)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    assert compile_.program is not None
    return {
        "error": error,
        "steps": compile_.record.steps,
        "report": compile_.record.report,
        "ended_in_eager": compile_.record.ended_in_eager,
        "compiled": len(compile_.program.regions),
        "weights": [float(parameter.detach().double().sum()) for parameter in module.parameters()],
        "findings": compile_.program.findings,
    }


def trainings(folder: Path) -> Facts:
    rank = int(os.environ["RANK"])
    backends.register()
    with guarded.backend(SECOND["wrong"], guarded.as_it_is, guarded.scaled(1.5)):
        pass
    chooser.STRATEGIES = {**STRATEGIES, "regional": lambda: Regional(backend="eager")}  # type: ignore[dict-item]
    chooser.SETTLE_STEPS, chooser.TIMED_STEPS, chooser.MAX_TIMED_STEPS = 1, 1, 1
    # Each process has a clock of its own, and the first one decides.
    chooser.Chooser._measured = (  # type: ignore[method-assign]
        lambda self, arm, *_: (1.0 if (arm.module == "eager") == (rank == 0) else 0.5, {})
    )
    facts: Facts = {}
    for name, (kind, _) in MANUAL.items():
        for mode in ("off", "right", "rollback", "wrong") if name == "two optimizers" else ("off", "right"):
            strategies = [Regional(backend=SECOND.get(mode, "eager") if rank else "eager")]
            parity = {"parity": "off" if mode == "off" else "on"}
            facts[f"{name}, {mode}"] = trained(kind(), folder, strategies, "ddp_find_unused_parameters_true", **parity)
    for mode in ("eager", "right", "warm", "optimizer", "auto", "rollback", "wrong", *LIMITED):
        module = Blocks()
        if mode in LIMITED:
            regions.RECOMPILE_LIMIT = 2
            each, counts = LIMITED[mode] if rank else (0, 0)
            module.layers = torch.nn.ModuleList(Numbered(each * number, counts) for number in range(3))
        strategies: list[Any] = [Regional(backend=SECOND.get(mode, "eager") if rank else "eager")]
        if mode == "eager":
            strategies = []
        if mode == "optimizer":
            strategies.append(Optimizer(backend=backends.BROKEN_FORWARD if rank else "eager"))
        if mode == "auto":
            strategies = [Auto(candidates=["regional"], planned_steps=10**9, remember=False)]
        if mode == "warm" and rank:
            strategies.append(Warm())
        facts[mode] = trained(module, folder, strategies, parity="off" if mode == "late limit" else "on")
        if mode == "right":
            Warm.found = facts[mode]["findings"]
    for fact in facts.values():
        del fact["findings"]
    return facts


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of two processes has to say about the same trainings."""
    return on_ranks(trainings, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("mode", ["right", "warm", "optimizer", "auto", "rollback"])
def test_both_go_on_alike_with_eagers_weights(mode: str, processes: list[Facts]) -> None:
    eager = processes[0]["eager"]["weights"]
    for facts in processes:
        fact = facts[mode]
        assert (fact["error"], fact["steps"]) == (None, 6)
        assert fact["compiled"] == (0 if mode == "rollback" else 3)
        assert fact["weights"] == pytest.approx(eager, rel=1e-5, abs=1e-6)
        assert fact["report"]["parity"]["verdict"] == ("skipped" if mode == "rollback" else "passed")
        assert "compared" not in fact["report"]["parity"]  # here, and not by an earlier run
        assert ("rollback" in fact["report"]) == (mode in ("rollback", "optimizer"))


@pytest.mark.parametrize(("mode", "eager"), [("limit", [True, True]), ("late limit", [False, True])])
def test_the_limit_of_graphs_on_one_ends_neither(mode: str, eager: list[bool], processes: list[Facts]) -> None:
    for facts in processes:
        assert (facts[mode]["error"], facts[mode]["steps"]) == (None, 6)
        assert facts[mode]["weights"] == pytest.approx(processes[0]["eager"]["weights"], rel=1e-5, abs=1e-6)
    assert [facts[mode]["ended_in_eager"] for facts in processes] == eager, "before the first step both agree"


@pytest.mark.parametrize("mode", ["wrong", "two optimizers, wrong"])
def test_both_stop_when_one_computes_something_else(mode: str, processes: list[Facts]) -> None:
    for facts in processes:
        assert facts[mode]["error"].startswith("ParityError: parity=on")
        assert facts[mode]["steps"] == 0


@pytest.mark.parametrize("name", MANUAL)
def test_the_comparison_of_a_module_that_optimizes_itself_leaves_nothing_behind(
    name: str, processes: list[Facts]
) -> None:
    for facts in processes:
        fact = facts[f"{name}, right"]
        assert (fact["error"], fact["steps"]) == (None, MANUAL[name][1])
        assert fact["report"]["parity"]["verdict"] == "passed"
        assert fact["report"]["slowdown"]["before_the_first_step"]["eager_seconds"]
        assert fact["weights"] == processes[0][f"{name}, off"]["weights"], "to the last bit, and on both alike"


def test_a_module_that_optimizes_itself_goes_on_eager_on_both_where_one_fails(processes: list[Facts]) -> None:
    for facts in processes:
        fact = facts["two optimizers, rollback"]
        assert (fact["error"], fact["steps"], fact["compiled"]) == (None, 6, 0)
        assert fact["report"]["rollback"]["rolled_back"]
        assert fact["weights"] == pytest.approx(processes[0]["two optimizers, off"]["weights"], rel=1e-5, abs=1e-6)


def drawn(folder: Path) -> dict[str, Any]:
    """Sums of the weights when a process has drawn them, before the first one's are everyone's, and at the end."""
    L.seed_everything(0, verbose=False)
    size = CaptionerSize(
        image_size=32, encoder_layers=1, encoder_width=16, decoder_layers=1, decoder_width=16, vocabulary_size=300
    )
    task = Captioning(size=size, data=Shapes(batch_size=2, train_images=8, val_images=2, num_workers=0))
    tasks.module.LARGE = 1  # weights are drawn on the device
    module: Any = task.build_module(max_steps=2)
    torch.rand(1 + int(os.environ["RANK"]))  # what a process draws of its own between building and training
    sums, draw = [], module.configure_model

    def total() -> None:
        sums.append(sum(float(parameter.detach().double().abs().sum()) for parameter in module.parameters()))

    def configure_model() -> None:
        draw()
        total()

    module.configure_model = configure_model
    trainer = quiet_trainer(devices=2, strategy="ddp", max_steps=2, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(module, datamodule=task.build_data(seed=0))
    total()
    return {"sums": sums, "steps": trainer.global_step}


def test_both_draw_the_same_weights_on_their_devices(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(drawn, tmp_path)
    assert one == other
    assert one["steps"] == 2
    assert one["sums"][0] != one["sums"][1]


def resumed(folder: Path) -> Facts:
    rank, seen, stopping = int(os.environ["RANK"]), list[list[float]](), False

    def on_fit_start(module: Any) -> None:
        for draw in (random.seed, numpy.random.seed, torch.manual_seed):
            draw(rank)

    def on_train_batch_start(module: Any, batch: Any, batch_idx: int) -> None:
        if stopping and rank == 1 and module.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append([random.random(), numpy.random.rand()])

    def on_train_batch_end(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen[-1].append(float(outputs["loss"]))

    for hook in (on_fit_start, on_train_batch_start, on_train_batch_end):
        setattr(tasks.module.ScoredModule, hook.__name__, hook)
    facts = {}
    for name, resume in (("whole", ()), ("first", ()), ("second", (f"resume={folder / 'first'}",))):
        stopping = name == "first"
        record = train(folder / name, "trainer.devices=2", "trainer.max_steps=5", "task.size.dropout=0.3", *resume)
        facts[name] = {"status": record.status, "signal": record.signal, "seen": seen.copy()}
        seen.clear()
    return facts


def test_each_process_resumes_its_own_random_numbers_and_stops_with_the_other(pair: Pair, tmp_path: Path) -> None:
    processes = pair(resumed, tmp_path)
    for facts in processes:
        assert (facts["first"]["status"], facts["first"]["signal"]) == ("interrupted", signal.SIGINT)
        assert facts["second"]["status"] == "finished"
        assert len(facts["first"]["seen"]) == 4, "the step after the one that was asked"
        assert facts["first"]["seen"] + facts["second"]["seen"] == facts["whole"]["seen"]
    one, other = (facts["whole"]["seen"] for facts in processes)
    assert not {number for step in one for number in step} & {number for step in other for number in step}
    alone = train(tmp_path / "alone", "trainer.max_steps=5", f"resume={tmp_path / 'first'}")
    assert (alone.status, alone.steps) == ("finished", 5)
