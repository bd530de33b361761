"""``compile=auto`` in real trainings: what it tries trains as in eager, what it keeps runs, and the record says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import CudaGraph, Program, Regional, Whole
from strategies.cached.cache_session import fingerprint_of
from strategies.cuda_graph.step_graphs import StepGraphs
from strategies.modules import Auto
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import RecordingEngine
from tests.trainer.runs import train
from tests.trainer.simulated import steps_take
from trainer.auto import chooser
from trainer.auto.past_runs import program_facts
from trainer.callback import Compile

LONG = 10**9
"""Steps enough for any compile to be worth a trial."""
STEPS = {"max_steps": 60, "max_epochs": -1}
"""Of a training in which all are tried."""


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a training without strategies; a shorter one has the first of them."""
    return fit(Blocks(), tmp_path_factory.mktemp("eager"), [], **STEPS)


def auto(**options: Any) -> Compile:
    return Compile([Auto(**{"planned_steps": LONG, "remember": False, **options})])


def tried(compile_: Any) -> list[str]:
    """What took over, in that order."""
    table = compile_.record.report["auto"]["table"]
    return [name for name, row in table.items() if row["switched_at_step"] is not None]


def test_the_faster_candidate_takes_over_and_what_loses_steps_back(
    eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, eager=1.0, regional=0.7, whole=0.9)
    compile_ = auto()
    assert fit(Blocks(), tmp_path, [compile_], **STEPS) == pytest.approx(eager, rel=1e-4)
    record, table = compile_.record, compile_.record.report["auto"]["table"]
    assert (record.status, record.report["auto"]["chosen"]) == ("finished", "regional"), record.notes
    assert tried(compile_)[0] == "eager"
    assert set(tried(compile_)) == {"eager", "regional", "whole"}
    assert table["whole"]["stepped_back_at_step"] is not None or table["whole"]["switched_at_step"] == 0
    assert table["regional"]["step_seconds"] == pytest.approx(0.7)
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional"]
    assert (record.regions, record.regions_compiled) == (3, 3)
    assert record.report["parity"]["verdict"] == "passed", "what was tried, left and taken again was checked at first"
    assert record.report["auto"]["summary"].startswith("auto: regional from step ")
    assert any(note.startswith("auto tried ") and "stays" in note for note in record.notes)
    fixed = []
    for strategy in (Regional(backend="eager"), Whole(backend="eager")):
        torch._dynamo.reset()
        fit(Blocks(), tmp_path, [one := Compile([strategy])])
        fixed.append(one.record.graphs or 0)
    assert 0 < (record.graphs or 0) <= sum(fixed), "what was compiled once is not compiled again when it comes back"


def test_eager_that_wins_is_left_as_it_was(eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, eager=0.5, regional=1.0, whole=1.0)
    compile_ = auto()
    assert fit(Blocks(), tmp_path, [compile_], **STEPS) == pytest.approx(eager, rel=1e-4)
    record = compile_.record
    assert record.report["auto"]["chosen"] == "eager"
    assert set(tried(compile_)) == {"eager", "regional", "whole"}
    assert compile_.program.regions == []
    assert (record.chosen_strategies, record.regions) == ([], 0)


def test_it_switches_between_optimizer_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"accumulate_grad_batches": 2, "max_steps": 20, "max_epochs": -1}
    steps_take(monkeypatch, eager=1.0, regional=0.5)
    compile_ = auto(candidates=["regional"])
    losses = fit(Blocks(), tmp_path, [compile_], **options)
    assert compile_.record.report["auto"]["chosen"] == "regional"
    assert losses == pytest.approx(fit(Blocks(), tmp_path, [], **options), rel=1e-4)


class Recorded(CudaGraph):
    """``cuda_graph`` with an engine that works on a CPU."""

    __slots__ = ()

    def check(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        program.step = StepGraphs(RecordingEngine(program.module))


def test_steps_are_captured_on_trial_and_regions_join_what_was_captured(
    eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chooser.Chooser, "_may_capture", lambda self: True)
    steps_take(monkeypatch, eager=1.0, cuda_graph=0.8, regional__cuda_graph=0.5)
    monkeypatch.setattr(chooser, "STRATEGIES", {**vars(chooser)["STRATEGIES"], "cuda_graph": Recorded})
    compile_ = auto(candidates=["regional", "cuda_graph"])
    assert fit(Blocks(), tmp_path, [compile_], **STEPS) == pytest.approx(eager, rel=1e-4)
    record = compile_.record
    assert tried(compile_) == ["eager", "cuda_graph", "regional+cuda_graph"], record.notes
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional", "cuda_graph"]
    assert record.report["cuda_graph"]["replayed_steps"] > 10


def test_a_candidate_that_does_not_compile_is_out_and_the_run_goes_on(
    eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("planted")

    steps_take(monkeypatch, _registered(broken), eager=1.0, regional=1.0, whole=1.0)
    compile_ = auto()
    assert fit(Blocks(), tmp_path, [compile_], **STEPS) == eager
    record = compile_.record
    assert (record.status, record.report["auto"]["chosen"]) == ("finished", "eager")
    table = record.report["auto"]["table"]
    assert "planted" in table["regional"]["failed"]
    assert "planted" in table["whole"]["failed"]
    assert (record.chosen_strategies, record.eager_parts) == ([], {})


def _registered(backend: Callable[..., Any]) -> str:
    from torch._dynamo import register_backend

    if "broken_for_auto" not in torch._dynamo.list_backends(exclude_tags=None):
        register_backend(backend, name="broken_for_auto")
    return "broken_for_auto"


class Configured(Blocks):
    """A module of somebody else: what a step's time depends on is a plain attribute."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.activation = changes.get("activation", torch.nn.functional.gelu)
        self.layers[0].heads = changes.get("heads", 4)
        self.layers[1].drop = torch.nn.Dropout(changes.get("dropout", 0.1))
        self.max_steps = changes.get("steps", 9)
        self.adam = {"fused": False, "lr": changes.get("lr", 0.1), **changes.get("adam", {})}
        self.kind = changes.get("kind", torch.optim.AdamW)

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **self.adam)


def test_everything_that_a_step_depends_on_is_part_of_what_is_remembered() -> None:
    def key(**changes: Any) -> str:
        module = Configured(**changes)
        program = Program(module=module, strategies=())
        program.optimizers = (module.configure_optimizers(),)
        return fingerprint_of(program_facts(program))

    same = key()
    assert key() == same, "no address and nothing drawn is in it"
    assert key(steps=99, lr=0.3) == same
    changes: list[dict[str, Any]] = [
        {"activation": torch.nn.functional.relu},
        {"heads": 8},
        {"dropout": 0.0},
        {"kind": torch.optim.Adam},
        {"adam": {"foreach": True}},
        {"adam": {"amsgrad": True}},
    ]
    assert len({key(**each) for each in changes} | {same}) == len(changes) + 1


def test_a_second_run_of_the_same_program_begins_with_what_was_best(
    eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steps_take(monkeypatch, eager=1.0, regional=0.5, whole=0.8)
    for remembered in (False, True):
        compile_ = auto(remember=True)
        assert fit(Blocks(), tmp_path, [compile_], **STEPS) == pytest.approx(eager, rel=1e-4)
        choice = compile_.record.report["auto"]
        assert choice["chosen"] == "regional"
        assert (choice["remembered"] is not None) is remembered
        assert (choice["table"]["regional"]["switched_at_step"] == 0) is remembered
    compile_ = auto(remember=True)
    fit(Blocks(), tmp_path, [compile_], max_steps=4, precision="bf16-mixed")
    assert compile_.record.report["auto"]["remembered"] is None, "another precision is another program"


def test_it_goes_with_buckets_and_with_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, eager=1.0, regional=0.5)
    many = (f"compile.auto.planned_steps={LONG}", "compile.auto.candidates=[regional]", "task.data.pad_to=null")
    record = train(tmp_path, *many, "trainer.max_steps=60", "trainer.val_every_n_steps=8", strategy="[auto,buckets]")
    assert record.status == "finished"
    assert "regional" in [name for name, row in record.report["auto"]["table"].items() if row["steps_timed"]]
    assert [note for note in record.notes if "after all planned shapes" in note] == [], (
        "kinds are compiled one after the other"
    )


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="'regionel' is not one of "):
        Auto(candidates=["regionel"])
    with pytest.raises(ValueError, match=r"^Auto\(planned_steps=0\) must be at least 1$"):
        Auto(planned_steps=0)


def test_another_fit_goes_on_with_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, eager=1.0, regional=0.5, whole=0.8)
    compile_ = auto()
    module, plain = Blocks(), Blocks()
    fit(module, tmp_path, [compile_], **STEPS)
    fit(plain, tmp_path, [], **STEPS)
    losses = fit(module, tmp_path, [compile_])
    assert [strategy.name for strategy in compile_.strategies] == ["regional"]
    assert losses == pytest.approx(fit(plain, tmp_path, []), rel=1e-4)
    record = compile_.record
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional"], (
        "else its verdict would be eager"
    )
    assert record.report["auto"]["chosen"] == "regional"


def test_a_run_that_ends_in_the_middle_of_a_trial_leaves_what_was_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, eager=1.0, regional=0.5, whole=0.8)
    compile_ = auto()
    fit(Blocks(), tmp_path, [compile_], max_steps=7, max_epochs=-1)
    choice = compile_.record.report["auto"]
    assert (choice["chosen"], choice["decided_at_step"]) == ("eager", None)
    assert compile_.program.regions == []
    assert any("the run ended before the choice" in note for note in compile_.record.notes)
