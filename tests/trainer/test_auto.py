"""``compile=auto`` in real trainings: what it tries trains as in eager, what it keeps runs, and the record says why."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from strategies import STRATEGIES, CudaGraph, Program, Regional, Whole
from strategies.cached.session import fingerprint_of
from strategies.cuda_graph.capture import StepGraphs
from strategies.modules import Auto
from tests.processes import Pair
from tests.trainer.lightning_modules import Blocks, StopsWhen, fit
from tests.trainer.recording import RecordingEngine
from tests.trainer.runs import train
from tests.trainer.test_auto_ahead import POINTS, Device
from tests.trainer.test_background import BetweenSteps, put_helper
from trainer import auto as ahead
from trainer.auto import candidates, chooser, program_facts
from trainer.background.calls import Background
from trainer.background.wire import Request
from trainer.callback import Compile
from trainer.guards.preflight import Preflight

LONG = 10**9
"""Steps enough for any compile to be worth a trial."""
TRIED: dict[str, Any] = {"max_steps": 24}
"""Of a training in which all are tried: three steps of each are enough here."""


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    kinds = {
        "regional": functools.partial(Regional, backend=backend),
        "whole": functools.partial(Whole, backend=backend),
    }
    monkeypatch.setattr(chooser, "STRATEGIES", {**STRATEGIES, **kinds})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Candidates compile for ``eager``, and their steps take the seconds that are given for them."""
    compile_with(monkeypatch, "eager")
    for name, steps in {"SETTLE_STEPS": 1, "TIMED_STEPS": 2, "MAX_TIMED_STEPS": 2, "MAX_STEPS": 8}.items():
        monkeypatch.setattr(chooser, name, steps)

    def seconds(**by_name: float) -> None:
        def measured(self: Any, arm: Any, median: float, by_shape: dict[Any, float]) -> Any:
            return by_name[arm.name], dict.fromkeys(by_shape, by_name[arm.name])

        monkeypatch.setattr(chooser.Chooser, "_measured", measured)

    return seconds


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a training without strategies; a shorter one has the first of them."""
    return fit(Blocks(), tmp_path_factory.mktemp("eager"), [], max_steps=40, max_epochs=-1)


def auto(**options: Any) -> Compile:
    return Compile([Auto(**{"planned_steps": LONG, "remember": False, "background": False, **options})])


def tried(compile_: Compile) -> list[str]:
    """What took over, in that order."""
    table = compile_.record.report["auto"]["table"]
    return [name for name, row in table.items() if row["switched_at_step"] is not None]


class Switching(L.Callback):
    """Applies a module strategy at the beginning of one step, and takes it off at that of another."""

    def __init__(self, **spans: tuple[int, int]) -> None:
        self.spans = spans

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        program = Program(module=pl_module, strategies=())
        for name, (first, end) in self.spans.items():
            if trainer.global_step == first:
                STRATEGIES[name](backend="eager").apply(program)  # type: ignore[call-arg]
            elif trainer.global_step == end:
                for module in pl_module.modules():
                    module._compiled_call_impl = None


def test_the_faster_candidate_takes_over_and_what_loses_steps_back(tmp_path: Path, clock: Callable[..., None]) -> None:
    """Losses are those of the same strategies switched at the same steps by hand."""
    clock(eager=1.0, regional=0.9, whole=0.95)
    compile_ = auto()
    losses = fit(Blocks(), tmp_path, [compile_], **TRIED)
    record, table = compile_.record, compile_.record.report["auto"]["table"]
    assert (record.status, record.report["auto"]["chosen"]) == ("finished", "regional")
    assert tried(compile_) == ["eager", "regional", "whole"]
    spans = {name: (table[name]["switched_at_step"], table[name]["stepped_back_at_step"]) for name in table}
    # The second and the fourth step of each are audited, and not timed.
    assert spans == {"eager": (0, None), "regional": (3, None), "whole": (8, 13)}
    torch._dynamo.reset()
    by_hand = Switching(regional=(3, 8), whole=(8, 13))
    again = Switching(regional=(13, -1))
    assert losses == fit(Blocks(), tmp_path, [by_hand, again], **TRIED)
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional"]
    assert (record.regions, record.regions_compiled) == (3, 3)
    assert record.report["parity"]["verdict"] == "passed"
    assert record.audits is not None
    assert record.audits.verdict == "clean"
    assert table["regional"]["step_seconds_before"] == 1.0
    assert table["regional"]["setup_seconds"] > 0
    saved = 0.1 * (24 - 3)
    assert table["regional"]["gained_seconds"] == pytest.approx(saved - table["regional"]["setup_seconds"])
    assert record.report["auto"]["decided_at_step"] == 13
    assert any(note.startswith("auto: regional from step 4 on") for note in record.notes)
    assert any(note.startswith("auto tried ") and "stays" in note for note in record.notes)
    assert record.steady_steps == 24 - 13 - 5, "of what was chosen alone, after a warm-up of its own"
    fixed = []
    for strategy in (Regional(backend="eager"), Whole(backend="eager")):
        torch._dynamo.reset()
        fit(Blocks(), tmp_path, [one := Compile([strategy])])
        fixed.append(one.record.graphs or 0)
    assert record.graphs is not None
    assert record.graphs <= sum(fixed), "what was compiled once is not compiled again when it comes back"


def test_eager_that_wins_is_left_as_it_was(eager: list[float], tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=0.5, regional=1.0, whole=1.0)
    module, compile_ = Blocks(), auto()
    losses = fit(module, tmp_path, [compile_], **TRIED)
    record = compile_.record
    assert record.report["auto"]["chosen"] == "eager"
    assert tried(compile_) == ["eager", "regional", "whole"]
    assert record.report["auto"]["gained_seconds"] < 0
    assert compile_.program is not None
    assert compile_.program.regions == []
    assert losses == pytest.approx(eager[:24], rel=1e-4)
    assert (record.chosen_strategies, record.regions) == ([], 0)


def test_it_switches_between_optimizer_steps_only(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    options = {"accumulate_grad_batches": 2, "max_steps": 10}
    compile_ = auto(candidates=["regional"])
    losses = fit(Blocks(), tmp_path, [compile_], **options)
    assert compile_.record.report["auto"]["table"]["regional"]["switched_at_step"] == 3
    assert losses == pytest.approx(fit(Blocks(), tmp_path, [], **options), rel=1e-4)


class Recorded(CudaGraph):
    """``cuda_graph`` with an engine that works on a CPU."""

    __slots__ = ()

    def check(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        program.step = StepGraphs(RecordingEngine(program.module))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch, clock: Callable[..., None]) -> Callable[..., None]:
    monkeypatch.setattr(chooser, "STRATEGIES", {**vars(chooser)["STRATEGIES"], "cuda_graph": Recorded})
    monkeypatch.setattr(chooser.Chooser, "_may_capture", lambda self: True)
    return clock


def test_steps_are_captured_on_trial_and_regions_join_what_was_captured(
    eager: list[float], tmp_path: Path, capturing: Callable[..., None]
) -> None:
    seconds = {"eager": 1.0, "cuda_graph": 0.8, "regional+cuda_graph": 0.5, "whole+cuda_graph": 0.6}
    capturing(**seconds)
    compile_ = auto(candidates=["regional", "cuda_graph"])
    losses = fit(Blocks(), tmp_path, [compile_], max_steps=40)
    record = compile_.record
    assert tried(compile_) == ["eager", "cuda_graph", "regional+cuda_graph"]
    assert record.report["auto"]["chosen"] == "regional+cuda_graph"
    assert [strategy["name"] for strategy in record.chosen_strategies] == ["regional", "cuda_graph"]
    assert record.report["cuda_graph"]["replayed_steps"] > 10
    assert losses == pytest.approx(eager, rel=1e-4)


def test_a_capture_that_gains_nothing_gives_the_steps_back(
    eager: list[float], tmp_path: Path, capturing: Callable[..., None]
) -> None:
    capturing(eager=1.0, cuda_graph=0.99)
    compile_ = auto(candidates=["cuda_graph"])
    losses = fit(Blocks(), tmp_path, [compile_], **TRIED)
    assert (tried(compile_), compile_.record.report["auto"]["chosen"]) == (["eager", "cuda_graph"], "eager")
    assert compile_.program is not None
    assert compile_.program.step is None
    assert losses == pytest.approx(eager[:24], rel=1e-4)


def test_steps_that_cannot_be_captured_are_out_with_the_reason(tmp_path: Path, capturing: Callable[..., None]) -> None:
    class Reads(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else loss * 2

    capturing(eager=1.0, cuda_graph=0.5)
    compile_ = auto(candidates=["cuda_graph"])
    fit(Reads(), tmp_path, [compile_], **TRIED)
    decision = compile_.record.report["auto"]
    assert decision["chosen"] == "eager"
    assert decision["table"]["cuda_graph"]["failed"]
    assert any("cuda_graph is out: " in note for note in compile_.record.notes)
    assert not compile_.record.eager_parts


def test_a_candidate_that_does_not_compile_is_out_and_the_run_goes_on(
    eager: list[float], tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("planted")

    clock(eager=1.0)
    compile_with(monkeypatch, _registered(broken))
    compile_ = auto()
    losses = fit(Blocks(), tmp_path, [compile_], **TRIED)
    record = compile_.record
    assert (record.status, record.report["auto"]["chosen"]) == ("finished", "eager")
    table = record.report["auto"]["table"]
    assert "planted" in table["regional"]["failed"]
    assert "planted" in table["whole"]["failed"]
    assert (record.chosen_strategies, record.eager_parts) == ([], {})
    assert losses == eager[:24]


def _registered(backend: Callable[..., Any]) -> str:
    from torch._dynamo import register_backend

    if "broken_for_auto" not in torch._dynamo.list_backends(exclude_tags=None):
        register_backend(backend, name="broken_for_auto")
    return "broken_for_auto"


def test_a_candidate_that_needs_too_much_memory_is_out(
    eager: list[float], tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    clock(eager=1.0)
    monkeypatch.setattr(Preflight, "_run", too_large)
    compile_ = auto(candidates=["regional"])
    losses = fit(Blocks(), tmp_path, [compile_], **TRIED)
    assert "planted" in compile_.record.report["auto"]["table"]["regional"]["failed"]
    assert losses == eager[:24]


def test_a_second_run_begins_with_what_was_best(
    eager: list[float], tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clock(eager=0.0001, regional=0.00005, whole=0.00008)  # six of them are less than any set-up
    first, second = auto(remember=True), auto(remember=True)
    fit(Blocks(), tmp_path, [first], **TRIED)
    losses = fit(Blocks(), tmp_path, [second], **TRIED)
    assert first.record.report["auto"]["remembered"] is None
    assert second.record.report["auto"]["remembered"]
    table = second.record.report["auto"]["table"]
    assert (table["regional"]["switched_at_step"], table["whole"]["switched_at_step"]) == (0, None)
    assert table["regional"]["steps_timed"] == 2
    assert second.record.report["auto"]["chosen"] == "regional"
    assert second.record.regions_compiled == second.record.regions == 3
    assert losses == pytest.approx(eager[:24], rel=1e-4)
    short = auto(remember=True, planned_steps=6)
    fit(Blocks(), tmp_path, [short])
    assert short.record.report["auto"]["chosen"] == "eager", "six steps do not pay for the same compile"
    other = auto(remember=True)
    fit(Blocks(), tmp_path, [other], max_steps=4, precision="bf16-mixed")
    assert other.record.report["auto"]["remembered"] is None, "another precision is another program"


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


def test_a_short_run_stays_eager_and_compiles_nothing(tmp_path: Path) -> None:
    record = train(tmp_path, strategy="auto")
    assert (record.status, record.label, record.report["auto"]["chosen"]) == ("finished", "auto", "eager")
    assert (record.graphs, record.compile_seconds) == (0, None)
    assert record.preparation_seconds is None
    assert record.preflight_seconds is None, "not a step apart from the training"
    assert record.final_loss == train(tmp_path / "eager", strategy="eager").final_loss


def test_it_goes_with_buckets_and_with_validation(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    many = (f"compile.auto.planned_steps={LONG}", "compile.auto.candidates=[regional]")
    record = train(tmp_path, *many, "trainer.max_steps=16", "trainer.val_every_n_steps=8", strategy="[auto,buckets]")
    assert (record.status, record.reason, record.label) == ("finished", None, "buckets+auto")
    assert record.report["auto"]["chosen"] == "regional"
    assert "val/loss" in record.final_metrics
    assert record.report["warming"]["shapes"], "warmed when it took over"


class ByHand(Blocks):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_where_no_step_can_be_timed_it_says_so_and_trains_eager(tmp_path: Path) -> None:
    callback = Compile([Auto(remember=False)])
    fit(ByHand(), tmp_path, [callback])
    assert "manual optimization" in callback.record.report["auto"]["reason"]
    assert any("auto: eager; no candidate could be" in note for note in callback.record.notes)


@pytest.mark.parametrize("other", [Whole(), Regional()], ids=["whole", "regional"])
def test_it_chooses_alone_how_modules_are_compiled(other: Any) -> None:
    with pytest.raises(ValueError, match=r"'auto' and '.*' both act on the module stage"):
        Compile([Auto(), other])


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="'regionel' is not one of "):
        Auto(candidates=["regionel"])
    with pytest.raises(ValueError, match="planned_steps=0 must be at least 1"):
        Auto(planned_steps=0)


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


def test_another_fit_goes_on_with_what_was_chosen(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    module, compile_ = Blocks(), auto()
    fit(module, tmp_path, [compile_], **TRIED)
    plain = Blocks()
    fit(plain, tmp_path, [], **TRIED)
    losses = fit(module, tmp_path, [compile_])
    assert [strategy.name for strategy in compile_.strategies] == ["regional"]
    assert losses == pytest.approx(fit(plain, tmp_path, []), rel=1e-4)


def test_a_run_that_ends_in_the_middle_of_a_trial_keeps_what_was_best(
    tmp_path: Path, clock: Callable[..., None]
) -> None:
    clock(eager=1.0, regional=0.5, whole=0.8)
    module, compile_ = Blocks(), auto()
    fit(module, tmp_path, [compile_], max_steps=5)
    choice = compile_.record.report["auto"]
    assert (choice["chosen"], choice["decided_at_step"]) == ("eager", None)
    assert choice["table"]["regional"]["switched_at_step"] == 3
    assert compile_.program is not None
    assert compile_.program.regions == []
    assert any("the run ended before the choice" in note for note in compile_.record.notes)


NO_PAY, SAID = 1_000, "the device never waited for the host in "


def chosen(
    device: Device,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capturing: Callable[..., None],
    planned: int,
) -> Any:
    monkeypatch.setattr(ahead, "mark", device.mark)
    monkeypatch.setattr("trainer.auto.chooser.AHEAD_STEPS", 2)
    capturing(eager=0.01, cuda_graph=0.005)
    compile_ = auto(candidates=["cuda_graph"], planned_steps=planned)
    losses = fit(Blocks(), folder, [compile_], max_steps=40)
    assert losses == pytest.approx(fit(Blocks(), folder, [], max_steps=40), rel=1e-4)
    return compile_


def test_a_busy_device_is_captured_only_where_gaps_between_kernels_could_pay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capturing: Callable[..., None],
) -> None:
    compile_ = chosen(Device(), tmp_path, monkeypatch, capturing, NO_PAY)
    assert tried(compile_) == ["eager"]
    assert compile_.record.report["auto"]["table"]["eager"]["never_waited_steps"] == 2
    assert any(note.startswith("auto: eager") and f"{SAID}2 steps" in note for note in compile_.record.notes)
    compile_ = chosen(Device(), tmp_path, monkeypatch, capturing, 100 * NO_PAY)
    assert tried(compile_) == ["eager", "cuda_graph"]
    table = next(note for note in compile_.record.notes if note.startswith("auto tried"))
    assert f"{SAID}2 steps" in table.splitlines()[1]
    assert "  from  set-up s  " in table.splitlines()[0], "no empty columns"
    assert compile_.record.report["auto"]["table"]["cuda_graph"]["never_waited_steps"] is None, "replays were not asked"


@pytest.mark.parametrize("device", [Device(*[True] * 1_000), Device(*[False] * POINTS, True)], ids=["idle", "mixed"])
def test_a_device_that_may_have_waited_is_captured_as_before(
    device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capturing: Callable[..., None],
) -> None:
    compile_ = chosen(device, tmp_path, monkeypatch, capturing, NO_PAY)
    assert tried(compile_) == ["eager", "cuda_graph"]
    assert not any(SAID in note for note in compile_.record.notes)


# ---- candidates that a helper process compiles -----------------------------------------------------------------------

ANSWERS = """
import json, sys
sys.stdin.readline()
for path in ["", "stem", "head", "layers.0", "layers.1", "layers.2"]:
    print(json.dumps({"ready": path, "seconds": 1.0}), flush=True)
print(json.dumps({"done": True}), flush=True)
sys.stdin.read()
"""
"""A helper to which everything is in the caches."""
STEPS_MEANWHILE = 5


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of the helper, for whose answer the training waits after ``STEPS_MEANWHILE``: so it
    comes at the same step on every machine."""

    class Waited(Background):
        asked = 0

        def ready(self) -> set[str]:
            self.asked += 1
            found = set() if self.asked <= STEPS_MEANWHILE else super().ready()
            while self.asked > STEPS_MEANWHILE and not self.done:
                time.sleep(0.01)
                found = super().ready()
            return found

        def imported(self, *, wait: bool = False) -> bool:
            return super().imported(wait=True)

    monkeypatch.setattr(candidates, "Background", Waited)
    return functools.partial(put_helper, monkeypatch)


def ask(asked: list[Any], **facts: Any) -> Request:
    asked.append(Request(**facts))
    return asked[-1]


def beside(**options: Any) -> Compile:
    return auto(**{"background": True, **options})


def test_a_candidate_takes_over_once_a_helper_has_compiled_it(
    tmp_path: Path, clock: Callable[..., None], helper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are those of the same strategies switched at the same steps by hand."""
    helper(ANSWERS)
    asked: list[Any] = []
    monkeypatch.setattr("trainer.background.calls.Request", functools.partial(ask, asked))
    clock(eager=1.0, regional=0.9, whole=0.95)
    module, compile_ = Blocks(), beside()
    losses = fit(module, tmp_path, [compile_], max_steps=40)
    table, notes = compile_.record.report["auto"]["table"], compile_.record.notes
    assert tried(compile_) == ["eager", "regional", "whole"], notes
    assert compile_.record.report["auto"]["chosen"] == "regional"
    first, second = table["regional"]["switched_at_step"], table["whole"]["switched_at_step"]
    assert first == 3 + STEPS_MEANWHILE + 1 + 3, "eager trained on while the helper was at work, then a region a step"
    assert second > first + STEPS_MEANWHILE + 5
    assert table["regional"]["helper_seconds"] > 0
    assert [len(one.calls) for one in asked] == [3, 5]
    assert all(one.validates for one in asked), "it is compared in eval mode as well"
    assert compile_.record.audits is not None
    assert compile_.record.audits.verdict == "clean"
    torch._dynamo.reset()
    by_hand = Switching(regional=(first, second - 5), whole=(second, table["whole"]["stepped_back_at_step"]))
    again = Switching(regional=(table["whole"]["stepped_back_at_step"], -1))
    assert losses == fit(Blocks(), tmp_path, [by_hand, again], max_steps=40)


def test_garbage_is_collected_while_evaluations_are_still_compiled(
    tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waited for where the regions' trials could say nothing."""

    class Trains(Background):
        def ready(self) -> set[Any]:
            found = super().ready()
            while self._sent and not self.complete:
                time.sleep(0.01)
                found = super().ready()
            return found

        def imported(self, *, wait: bool = False) -> bool:
            return super().imported(wait=True)

    monkeypatch.setattr(candidates, "Background", Trains)
    monkeypatch.setattr("trainer.background.trial.SAYS_NOTHING", -1.0)
    put_helper(monkeypatch, ANSWERS.replace('print(json.dumps({"done": True}), flush=True)', ""))
    clock(eager=1.0)
    compile_, between = beside(candidates=["regional"]), BetweenSteps()
    fit(Blocks(), tmp_path, [compile_, between], max_steps=24, max_epochs=-1)
    assert "ended while a helper compiled regional" in compile_.record.notes[-2], compile_.record.notes
    assert between.collects == [True] * 24


def test_eager_is_captured_while_the_helper_compiles(
    eager: list[float], tmp_path: Path, capturing: Callable[..., None], helper: Callable[[str], None]
) -> None:
    helper(ANSWERS)
    capturing(**{"eager": 1.0, "cuda_graph": 0.8, "regional+cuda_graph": 0.5})
    compile_ = beside(candidates=["regional", "cuda_graph"])
    losses = fit(Blocks(), tmp_path, [compile_], max_steps=40)
    table = compile_.record.report["auto"]["table"]
    assert tried(compile_) == ["eager", "cuda_graph", "regional+cuda_graph"], compile_.record.notes
    assert table["cuda_graph"]["switched_at_step"] == 3, "at once"
    assert compile_.record.report["auto"]["chosen"] == "regional+cuda_graph"
    assert losses == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)", "ended with code -9"),
        ("""print('{"refused": "layers.0", "reason": "odd"}'); input(); raise MemoryError""", "MemoryError"),
        (ANSWERS.replace("flush=True)", "flush=True); sys.exit(4)"), "code 4"),
    ],
    ids=["killed", "out of memory", "after the first region"],
)
def test_a_helper_that_fails_leaves_auto_in_eager(
    script: str,
    reason: str,
    eager: list[float],
    tmp_path: Path,
    clock: Callable[..., None],
    helper: Callable[[str], None],
) -> None:
    helper(script)
    clock(eager=1.0)
    compile_ = beside(candidates=["regional"])
    losses = fit(Blocks(), tmp_path, [compile_], max_steps=20)
    choice = compile_.record.report["auto"]
    assert (choice["chosen"], tried(compile_), compile_.record.status) == ("eager", ["eager"], "finished")
    assert reason in choice["table"]["regional"]["failed"]
    assert sum("continues without regional" in note for note in compile_.record.notes) == 1
    assert losses == eager[:20]


def test_a_run_that_ends_while_a_helper_compiles_says_so_and_leaves_none(
    eager: list[float], tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_helper(monkeypatch, "import sys; sys.stdin.read()")
    clock(eager=1.0)
    module, compile_ = Blocks(), beside(candidates=["regional"])
    losses = fit(module, tmp_path, [compile_], max_steps=12)
    assert any("ended while a helper compiled regional" in note for note in compile_.record.notes)
    assert losses == eager[:12]
    assert compile_.program is not None
    assert compile_.program.regions == []


def test_a_helper_that_is_too_late_is_ended(
    tmp_path: Path, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = put_helper(monkeypatch, "import sys; sys.stdin.read()")
    clock(eager=1.0)
    compile_ = beside(candidates=["regional"], planned_steps=70)
    fit(Blocks(), tmp_path, [compile_], max_steps=60)
    assert any("continues without regional: too few steps are left" in note for note in compile_.record.notes)
    assert compile_.record.report["auto"]["decided_at_step"] == 70 - 17, "1.5 times 4 s are 0.35 of so many steps"
    assert [one.poll() is not None for one in started] == [True]


def test_what_no_helper_can_be_told_of_compiles_in_the_foreground(tmp_path: Path, clock: Callable[..., None]) -> None:
    class Odd(Blocks):
        def __init__(self) -> None:
            super().__init__()
            for layer in [self.stem, self.head, *self.layers]:
                layer.extra = lambda: 1  # type: ignore[assignment]

    clock(eager=1.0, regional=0.9)
    compile_ = beside(candidates=["regional"])
    fit(Odd(), tmp_path, [compile_], max_steps=10)
    assert compile_.record.report["auto"]["table"]["regional"]["switched_at_step"] == 3
    assert any("compiled in the foreground: it cannot be described" in note for note in compile_.record.notes)


def on_a_rank(folder: Path, scripts: list[str]) -> tuple[list[str], Any, float]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_helper(monkeypatch, scripts[int(os.environ["RANK"])])
        compile_with(monkeypatch, "eager")
        compile_ = beside(candidates=["regional"])
        decided = StopsWhen(lambda: bool(compile_._chooser and compile_._chooser.decided))
        options = {"devices": 2, "strategy": "ddp", "max_steps": 20_000, "max_epochs": -1}
        losses = fit(Blocks(), folder, [compile_, decided], **options)
    return tried(compile_), compile_.record.report["auto"]["table"]["regional"], losses[-1]


@pytest.mark.xdist_group("two_processes")
@pytest.mark.parametrize("fails", [False, True])
def test_processes_switch_at_the_same_step_or_not_at_all(fails: bool, pair: Pair, tmp_path: Path) -> None:
    second = "input(); raise MemoryError" if fails else ANSWERS.replace("json, sys", "json, sys, time; time.sleep(0.5)")
    (names, table, _), (also, other, _) = pair(on_a_rank, tmp_path, [ANSWERS, second])
    assert names == also == (["eager"] if fails else ["eager", "regional"])
    assert table["switched_at_step"] == other["switched_at_step"]
    assert (table["failed"] is not None, other["failed"] is not None) == (fails, fails)
