"""With two processes: both draw the same weights and resume their own random states, and what one of them finds in a
check, both act on."""

from __future__ import annotations

import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch.distributed.tensor import DTensor

import tasks.lightning_module
from strategies import Optimizer, Regional, regions
from strategies.modules import Auto
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Shapes
from tests.processes import Pair, on_ranks
from tests.strategies import backends
from tests.strategies.backends import Fault
from tests.strategies.modules import Block
from tests.trainer.lightning_modules import Blocks, fit, quiet_trainer
from tests.trainer.runs import train
from tests.trainer.simulated import steps_take
from trainer.callback import Compile
from trainer.loops.fsdp2 import FSDP2

pytestmark = pytest.mark.xdist_group("two_processes")

Facts = dict[str, dict[str, Any]]
STEPS = 12
LAYERS = ["layers.0", "layers.1", "layers.2"]
LIMITED = {"limit": (1, 0), "late limit": (0, 1)}
"""The second process has a graph for each block, or one for each step."""


class FaultFrom(L.Callback):
    """On the second process, results of a backward are wrong from step ``first`` on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        wrong = trainer.global_rank == 1 and trainer.global_step + 1 >= self._first
        Fault.backward = 1.01 if wrong else 1.0


class StopsWhenChosen(L.Callback):
    """Ends a training once the chooser of ``compile_`` has decided in all processes, however long that takes."""

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        session = self._compile.session
        chosen = session is not None and session.hooks.chooser is not None and session.hooks.chooser.decided
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(chosen, all=True)


class Numbered(Block):
    def __init__(self, number: int, counts: int) -> None:
        super().__init__()
        self.number, self.counts = number, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += self.counts
        return super().forward(x) * (1.0 if self.number < 100 else 2.0)


def trained(
    module: Any, folder: Path, strategies: list[Any], *, fault: int = 10**9, ddp: Any = "ddp", **options: Any
) -> dict[str, Any]:
    """What this process has to say about one training."""
    torch._dynamo.reset()
    compile_ = Compile(strategies, verbose=False, save=False, **options)
    choosing = any(one.name == "auto" for one in strategies)
    error = None
    length = {"max_steps": 600 if choosing else STEPS, "max_epochs": -1}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callbacks = [FaultFrom(fault), compile_, *([StopsWhenChosen(compile_)] if choosing else [])]
            fit(module, folder, callbacks, devices=2, strategy=ddp, **length)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        Fault.clear()
    record, program = compile_.record, compile_.program
    assert program is not None
    weights = [] if error else [one.detach() for one in module.parameters()]
    return {
        "error": error,
        "steps": record.steps,
        "parity": record.report.get("parity", {}).get("verdict"),
        "audits": record.audits and (record.audits.verdict, record.audits.last_clean_step),
        "eager": record.eager_parts,
        "compiled": record.regions_compiled,
        "auto": record.report.get("auto"),
        "weights": [float((one.full_tensor() if isinstance(one, DTensor) else one).double().sum()) for one in weights],
    }


def trainings(folder: Path) -> Facts:
    second = os.environ["RANK"] == "1"
    backends.register()
    limit = regions.RECOMPILE_LIMIT
    broken = backends.BROKEN_BACKWARD if second else "aot_eager"

    def of(backend: str = backends.FAULTY, *others: Any, **options: Any) -> dict[str, Any]:
        return trained(Blocks(), folder, [Regional(backend=backend), *others], **options)

    facts: Facts = {
        "eager": trained(Blocks(), folder, []),
        "off": of(parity="off"),
        "right": of(backends.FAULTY, Optimizer(backend="aot_eager")),
        "broken": of(broken),
        "wrong": of(fault=1),
        "wrong later": of(fault=5),
        "optimizer": of("aot_eager", Optimizer(backend=backends.BROKEN_FORWARD if second else "aot_eager")),
    }
    for name, (each, counts) in LIMITED.items():
        regions.RECOMPILE_LIMIT = 2
        module = Blocks()
        numbers = [each * number if second else 0 for number in range(3)]
        module.layers = torch.nn.ModuleList(Numbered(number, counts if second else 0) for number in numbers)
        facts[name] = trained(module, folder, [Regional(backend="eager")])
        regions.RECOMPILE_LIMIT = limit
    return facts


def sharded(folder: Path) -> Facts:
    """Of backends that fail on both processes, or on the second one alone."""
    backends.register()
    second = os.environ["RANK"] == "1"
    facts = {"eager": trained(Blocks(), folder, [], ddp=FSDP2())}
    for name in (backends.BROKEN_FORWARD, backends.BROKEN_BACKWARD):
        for fails, on in ((True, "both"), (second, "one")):
            backend = name if fails else "aot_eager"
            facts[f"{name} on {on}"] = trained(Blocks(), folder, [Regional(backend=backend)], ddp=FSDP2())
    return facts


def choices(folder: Path) -> Facts:
    """Each process has a clock of its own, by which another arm is the fastest."""
    second = os.environ["RANK"] == "1"
    backends.register()
    facts: Facts = {}
    for name, backend in (("right", "aot_eager"), ("broken", backends.BROKEN_BACKWARD if second else "aot_eager")):
        with pytest.MonkeyPatch.context() as monkeypatch:
            steps_take(monkeypatch, backend, eager=0.5 if second else 1.0, regional=1.0 if second else 0.5)
            auto = Auto(candidates=["regional"], planned_steps=10**9, remember=False)
            facts[name] = trained(Blocks(), folder, [auto])
    return facts


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of two processes has to say about the same trainings."""
    return on_ranks(trainings, tmp_path_factory.mktemp("processes"))


def assert_finished(fact: dict[str, Any], weights: list[float]) -> None:
    assert (fact["error"], fact["steps"]) == (None, STEPS)
    assert fact["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)


def test_clean_checks_leave_both_with_eagers_weights(processes: list[Facts]) -> None:
    for facts in processes:
        for mode in ("off", "right"):
            assert_finished(facts[mode], processes[0]["eager"]["weights"])
            assert (facts[mode]["eager"], facts[mode]["compiled"]) == ({}, 3)
        assert (facts["right"]["parity"], facts["right"]["audits"]) == ("passed", ("clean", STEPS))


@pytest.mark.parametrize(("mode", "parity"), [("broken", None), ("wrong", "failed"), ("wrong later", "failed")])
def test_what_one_finds_runs_eager_on_both(mode: str, parity: str | None, processes: list[Facts]) -> None:
    for facts in processes:
        fact = facts[mode]
        # What is wrong later has trained until an audit found it, and on both alike.
        assert_finished(fact, processes[0]["eager" if mode != "wrong later" else mode]["weights"])
        assert list(fact["eager"]) == LAYERS
        assert parity is None or fact["parity"] == parity, "the first process writes the record"
    reasons = [facts[mode]["eager"]["layers.0"] for facts in processes]
    assert reasons[0] == f"on another process: {reasons[1]}"
    assert ("compiles no backward" if mode == "broken" else "not eager's") in reasons[1]


def test_the_record_of_the_first_process_says_what_an_audit_of_the_other_found(processes: list[Facts]) -> None:
    for facts in processes:
        assert facts["wrong later"]["audits"] == ("went eager", 4)


ENDS: dict[str, tuple[str, int]] = {
    "broken": ('CompileFailed: on_compile_error="fail": ', 1),
    "wrong": ('ParityError: on_difference="fail": ', 1),
    "wrong later": ('ParityError: on_difference="fail": ', 8),
}
"""By what one process finds, where an option says that it ends the run: the error of both, and the steps until then."""


def ended(folder: Path) -> Facts:
    backends.register()
    broken = "aot_eager" if os.environ["RANK"] == "0" else backends.BROKEN_BACKWARD
    options = {"on_compile_error": "fail", "on_difference": "fail"}
    return {
        mode: trained(Blocks(), folder, [Regional(backend=backend)], fault=fault, **options)
        for mode, backend, fault in (
            ("broken", broken, 10**9),
            ("wrong", backends.FAULTY, 1),
            ("wrong later", backends.FAULTY, 5),
        )
    }


def test_both_stop_where_an_option_says_so(pair: Pair, tmp_path: Path) -> None:
    for facts in pair(ended, tmp_path):
        for mode, (error, steps) in ENDS.items():
            assert facts[mode]["error"].startswith(error)
            assert facts[mode]["steps"] == steps


def test_an_optimizer_that_one_cannot_compile_runs_eager_on_both(processes: list[Facts]) -> None:
    """Else weights would drift apart by roundings: nothing averages them."""
    for facts in processes:
        assert_finished(facts["optimizer"], processes[0]["eager"]["weights"])
        assert list(facts["optimizer"]["eager"]) == ["optimizer"]
        assert "compiles no forward" in facts["optimizer"]["eager"]["optimizer"]


@pytest.mark.parametrize("mode", LIMITED)
def test_the_limit_of_graphs_on_one_ends_neither(mode: str, processes: list[Facts]) -> None:
    for facts in processes:
        assert_finished(facts[mode], processes[0]["eager"]["weights"])
        assert list(facts[mode]["eager"]) == LAYERS
        assert "recompile_limit" in facts[mode]["eager"]["layers.0"]


def test_sharded_blocks_that_do_not_compile_run_eager_on_both(pair: Pair, tmp_path: Path) -> None:
    processes = pair(sharded, tmp_path)
    for facts in processes:
        for case in facts.keys() - {"eager"}:
            assert_finished(facts[case], processes[0]["eager"]["weights"])
            assert list(facts[case]["eager"]) == LAYERS


def test_the_clock_of_the_first_one_chooses_for_both(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(choices, tmp_path)
    for name in ("right", "broken"):
        assert (one[name]["error"], other[name]["error"]) == (None, None)
        assert one[name]["steps"] == other[name]["steps"]
        assert one[name]["weights"] == other[name]["weights"]
        tables = [each[name]["auto"]["table"] for each in (one, other)]
        assert len({tuple((arm, row["switched_at_step"]) for arm, row in table.items()) for table in tables}) == 1
        assert {each[name]["auto"]["chosen"] for each in (one, other)} == {"regional" if name == "right" else "eager"}
    assert all(each["broken"]["auto"]["table"]["regional"]["failed"] for each in (one, other))


def drawn(folder: Path) -> dict[str, Any]:
    """Sums of the weights when a process has drawn them, before the first one's are everyone's, and at the end."""
    L.seed_everything(0, verbose=False)
    size = CaptionerSize(
        image_size=32, encoder_layers=1, encoder_width=16, decoder_layers=1, decoder_width=16, vocabulary_size=300
    )
    task = Captioning(size=size, data=Shapes(batch_size=2, train_images=8, val_images=2, num_workers=0))
    tasks.lightning_module.LARGE = 1  # weights are drawn on the device
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
        setattr(tasks.lightning_module.ScoredModule, hook.__name__, hook)
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
