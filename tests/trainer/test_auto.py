"""``compile=auto`` in real trainings: what it tries leaves no trace, what it chooses runs, and the record says why."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from strategies import STRATEGIES, CudaGraph, Program, Regional, Whole
from strategies.auto import Auto
from strategies.cached.session import fingerprint_of
from strategies.loop import Loop
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.runs import curve, last_checkpoint, relative_differences, train
from trainer.auto import chooser, estimates, trial
from trainer.auto import trial as candidates
from trainer.auto.remembered import program_facts
from trainer.auto.trial import Work
from trainer.callback import Compile

MANY = "compile.auto.planned_steps=1000000000"
"""Steps enough for any compile to be worth a trial."""


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    kinds = {name: functools.partial(STRATEGIES[name], backend=backend) for name in ("regional", "whole")}
    monkeypatch.setattr(candidates, "STRATEGIES", {**STRATEGIES, **kinds})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Candidates compile for ``aot_eager``, and a step takes the seconds that are given for them."""
    compile_with(monkeypatch, "aot_eager")

    def seconds(**by_name: float) -> None:
        timed = trial.Trials._time

        def time(self: trial.Trials, module: Any, *arguments: Any) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(trial, "step_seconds", lambda *_, **__: by_name[module.name])
                timed(self, module, *arguments)

        monkeypatch.setattr(trial.Trials, "_time", time)

    return seconds


def test_the_faster_candidate_is_compiled_once_and_trains_with_eagers_losses(
    tmp_path: Path, clock: Callable[..., None], baseline: Callable[..., Any]
) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    record = train(tmp_path, MANY, strategy="auto")
    eager = baseline("captioning")
    assert (record.status, record.label) == ("finished", "auto")
    assert record.report["auto"]["chosen"] == "regional"
    assert record.report["auto"]["tried"] == ["eager", "regional"], "whole can only be expected to give 2% more"
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional"]
    assert record.regions
    assert record.regions_compiled == record.regions
    assert record.report["parity"]["verdict"] == "passed"
    assert record.report["slowdown"]["before_the_first_step"]["eager_step_seconds"] == 1.0, "not timed again"
    assert max(relative_differences(curve(tmp_path), eager.losses)) <= eager.tolerance
    assert list(last_checkpoint(tmp_path)["state_dict"]) == eager.state_dict_keys
    assert any(note.startswith("auto: regional, about ") for note in record.notes)


def test_what_loses_is_taken_off_again_and_what_was_compiled_before_it_goes_on(
    tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(estimates.FUSED, "cpu", 2.0)  # so that regions leave enough for whole to be worth a trial
    clock(eager=1.0, regional=0.9, whole=0.95)
    record = train(tmp_path, MANY, strategy="auto")
    assert record.report["auto"]["tried"] == ["eager", "regional", "whole"]
    assert record.report["auto"]["chosen"] == "regional"
    torch._dynamo.reset()
    graphs = train(tmp_path / "fixed", strategy="regional").graphs
    assert graphs is not None
    assert record.graphs == graphs + 1, "whole's one, and none of regional's anew"


@pytest.mark.parametrize(("steps", "timed"), [(2, []), (10**9, [True, False])])
def test_a_bound_on_captured_steps_is_made_exact_once_something_is_compiled(
    steps: int, timed: list[bool], tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host too slow for a GPU's queue, acted out on a CPU, where nothing can be captured."""
    compiled = []

    def captured_seconds(loop: Loop, *_: Any) -> float:
        compiled.append(any(part._compiled_call_impl for part in loop.module.modules()))
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(chooser.Chooser, "_capture", lambda *_: "maybe")
    monkeypatch.setattr(trial, "device_work", lambda *_: Work(seconds=0.4, exact=False))
    monkeypatch.setattr(trial, "captured_seconds", captured_seconds)
    clock(eager=0.5, regional=0.3, whole=0.4)
    callback = Compile([Auto(planned_steps=steps, remember=False)])
    fit(Blocks(), tmp_path, [callback])
    assert compiled == timed
    assert callback.record.report["auto"]["chosen"] == ("regional" if timed else "eager")
    said = any(
        "cuda_graph is out: not captured, RuntimeError: operation not permitted" in n for n in callback.program.notes
    )
    assert said == bool(timed)


def test_a_candidate_that_does_not_compile_is_out_and_the_run_goes_on(
    tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("planted")

    clock(eager=1.0)
    compile_with(monkeypatch, _registered(broken))
    record = train(tmp_path, MANY, strategy="auto")
    assert (record.status, record.report["auto"]["chosen"]) == ("finished", "eager")
    why = {row["strategies"]: row.get("why", "") for row in record.report["auto"]["table"]}
    assert "planted" in why["regional"]
    assert "planted" in why["whole"]
    assert record.chosen_strategies == []


def _registered(backend: Callable[..., Any]) -> str:
    from torch._dynamo import register_backend

    if "broken_for_auto" not in torch._dynamo.list_backends(exclude_tags=None):
        register_backend(backend, name="broken_for_auto")
    return "broken_for_auto"


def test_a_second_run_decides_at_once(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    remembering = ("compile.auto.remember=true", f"compile.auto.memory={tmp_path / 'memory'}")
    first = train(tmp_path / "1", MANY, *remembering, strategy="auto")
    second = train(tmp_path / "2", MANY, *remembering, strategy="auto")
    assert first.report["auto"]["remembered"] is None
    assert (second.report["auto"]["tried"], second.report["auto"]["probe_seconds"]) == ([], 0)
    assert second.report["auto"]["remembered"]
    assert second.report["auto"]["chosen"] == "regional"
    assert second.regions_compiled == second.regions
    other = train(tmp_path / "3", MANY, *remembering, "task.data.batch_size=3", strategy="auto")
    assert other.report["auto"]["remembered"] is None, "another batch is another program"
    longer = train(
        tmp_path / "4", MANY, *remembering, "task.learning_rate=0.002", "trainer.max_steps=3", strategy="auto"
    )
    assert longer.report["auto"]["remembered"], "another length or rate is the same program"


class Configured(Blocks):
    """A module of somebody else: what a step's time depends on is a plain attribute here and there."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.activation = changes.get("activation", torch.nn.functional.gelu)
        self.layers[0].heads = changes.get("heads", 4)
        self.layers[1].drop = torch.nn.Dropout(changes.get("dropout", 0.1))
        self.config = types.SimpleNamespace(
            inner={"window": changes.get("window", 16)}, max_steps=changes.get("steps", 9)
        )
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
        {"window": 32},
        {"kind": torch.optim.Adam},
        {"adam": {"foreach": True}},
        {"adam": {"amsgrad": True}},
    ]
    assert len({key(**each) for each in changes} | {same}) == len(changes) + 1


def test_a_short_run_stays_eager_and_compiles_nothing(tmp_path: Path) -> None:
    record = train(tmp_path, strategy="auto")
    assert record.report["auto"]["tried"] == ["eager"]
    assert (record.graphs, record.compile_seconds) == (0, None)
    assert record.preparation_seconds is None


IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pathlib import Path
from strategies.auto import Auto
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
callback = Compile([Auto(planned_steps=10, memory=sys.argv[1])])
fit(Blocks(), Path(sys.argv[1]), [callback])
costs = [row["cost_seconds"] for row in callback.record.report["auto"]["table"]]
print(callback.record.report["auto"]["tried"], costs, "torch._inductor.compile_fx" in sys.modules)
"""


def test_a_run_that_compiles_nothing_does_not_import_inductor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert told.startswith("['eager'] [0.0, ")
    assert told.endswith(" False")


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_inductor_is_imported_for_the_first_trial_that_needs_it_and_that_is_no_compile(
    tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(estimates.FUSED, "cpu", 2.0)  # so that whole is tried too
    clock(eager=1.0, regional=0.9, whole=0.95)
    prepared: list[str] = []

    class Preparation:
        def wait(self) -> None:
            prepared.append("now")

    monkeypatch.setattr(trial, "Preparation", Preparation)
    for module in (trial, chooser):
        monkeypatch.setattr(module, "is_prepared", lambda: bool(prepared))
    needs = property(lambda self: backend == "inductor")
    monkeypatch.setattr(candidates.Candidate, "needs_inductor", needs)
    record = train(tmp_path, MANY, strategy="auto")
    assert record.report["auto"]["tried"] == ["eager", "regional", "whole"]
    assert prepared == (["now"] if backend == "inductor" else [])
    assert record.preparation_seconds is None, "it is no part of the setup"
    costs = {row["strategies"]: row["cost_seconds"] for row in record.report["auto"]["table"]}
    assert costs["regional"] < estimates.IMPORT_SECONDS, "it is paid for"


def test_what_is_logged_after_the_choice_arrives(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    record = train(tmp_path, MANY, "trainer.val_every_n_steps=2", strategy="auto")
    assert (record.status, record.reason) == ("finished", None)
    assert "val/loss" in record.final_metrics


def test_it_goes_with_buckets_and_with_any_lightning_module(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    record = train(tmp_path / "buckets", MANY, strategy="[auto,buckets]")
    assert (record.status, record.label) == ("finished", "buckets+auto")
    assert record.report["auto"]["chosen"] == "regional"
    module, plain = Blocks(), Blocks()
    callback = Compile([Auto(planned_steps=10**9, remember=False)])
    losses = fit(module, tmp_path, [callback])
    assert callback.record.report["auto"]["chosen"] == "regional"
    assert losses == pytest.approx(fit(plain, tmp_path, []), rel=1e-4)


class ByHand(Blocks):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_where_no_step_can_be_timed_it_says_so_and_trains_eager(tmp_path: Path) -> None:
    callback = Compile([Auto(remember=False)])
    fit(ByHand(), tmp_path, [callback])
    assert "manual optimization" in callback.record.report["auto"]["reason"]
    assert any("auto: eager, because" in note for note in callback.record.notes)


@pytest.mark.parametrize("other", [Whole(), Regional()], ids=["whole", "regional"])
def test_it_chooses_alone_how_modules_are_compiled(other: Any) -> None:
    with pytest.raises(ValueError, match=r"'auto' and '.*' both act on the module stage"):
        Compile([Auto(), other])


def test_wrong_options_are_named_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"'regionel' is not one of (.|\n)*planned_steps=0 (.|\n)*margin=1\.5"):
        Auto(candidates=["regionel"], planned_steps=0, margin=1.5)


def test_an_eager_step_that_fails_is_the_users_error(tmp_path: Path) -> None:
    class Wrong(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(Wrong(), tmp_path, [Compile([Auto(remember=False)])])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_graphs_that_are_asked_for_beside_it_still_need_a_cuda_device() -> None:
    with pytest.raises(ValueError, match=r"compile\.cuda_graph: .* CUDA"):
        Compile([Auto(), CudaGraph()])


def test_every_module_of_a_trainer_is_left_as_it_was_when_eager_wins(
    tmp_path: Path, clock: Callable[..., None]
) -> None:
    clock(eager=0.5, regional=1.0, whole=1.0)
    module = Blocks()
    callback = Compile([Auto(planned_steps=10**9, remember=False)])
    fit(module, tmp_path, [callback])
    assert callback.record.report["auto"]["chosen"] == "eager"
    assert all(child._compiled_call_impl is None for child in module.modules())
    assert isinstance(module, L.LightningModule)


def test_another_fit_goes_on_with_what_was_chosen(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    module = Blocks()
    callback = Compile([Auto(planned_steps=10**9, remember=False)])
    fit(module, tmp_path, [callback])
    guards = callback._guards
    losses = fit(module, tmp_path, [callback])
    assert callback._guards is not guards, "of the new trainer"
    assert [strategy.name for strategy in callback.strategies] == ["regional"]
    plain = Blocks()
    fit(plain, tmp_path, [])
    assert losses == pytest.approx(fit(plain, tmp_path, []), rel=1e-4)
