"""Background: training begins in eager, compiled regions take over later, and a helper that fails costs nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from strategies import Auto, Background, Buckets, Checkpointing, Dynamic, Modular, Optimizer, Regional, Whole
from strategies.base import Program, Stage, Strategy
from strategies.regions import compile_in_place, recomputes, recomputing
from tests.processes import Pair
from tests.trainer.guarded import as_it_is, backend, scaled
from tests.trainer.lightning_modules import Blocks, StopsWhen, fit
from tests.trainer.ragged_modules import RAGGED, TextData
from tests.trainer.ragged_modules import fit as fit_texts
from trainer import background as engine
from trainer.background.calls import main_script
from trainer.background.takeover import SHAPES
from trainer.background.trial import Trial
from trainer.background.wire import Call, call_of, dumps, set_torch_state, torch_state
from trainer.callback import Compile
from trainer.guards import audits

REGIONS = ["layers.0", "layers.1", "layers.2"]
ANSWERS = f"""
import sys
for _ in sys.stdin:
    for path in {REGIONS!r}:
        for number in range(4):
            print('noise of a library')
            print('{{"ready": "%s", "number": %d, "seconds": 1.0}}' % (path, number), flush=True)
    print('{{"done": true}}', flush=True)
"""
OPTIMIZER = ANSWERS.replace("'layers.2'", "'layers.2', '<optimizer 0>'")


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a script in the place of the helper."""
    return functools.partial(put_helper, monkeypatch)


def put_helper(monkeypatch: pytest.MonkeyPatch, script: str | None) -> list[subprocess.Popen[bytes]]:
    """Start ``script`` where the helper would start, or the helper itself; returns what will have been started."""
    popen, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        if "trainer.background.helper" not in command:
            return popen(command, **options)
        started.append(popen(command if script is None else [sys.executable, "-c", script], **options))
        return started[-1]

    monkeypatch.setattr(engine.subprocess, "Popen", start)
    return started


def train(folder: Path, *strategies: Any, steps: int = 30, **options: Any) -> tuple[Compile, list[float]]:
    torch._dynamo.reset()
    callback = Compile(strategies, verbose=False, save=False, warmup_steps=1, **options)
    losses = fit(Blocks(), folder, [callback], max_steps=steps, max_epochs=-1)
    return callback, losses


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a training without strategies; a shorter one has the first of them."""
    return train(tmp_path_factory.mktemp("eager"))[1]


def regional(**options: Any) -> Regional:
    return Regional(**{"backend": "aot_eager", "blocks": ["layers"], "parts": [], **options})


def facts(callback: Compile) -> dict[str, Any]:
    found: dict[str, Any] = callback.record.report["background"]
    return found


def test_regions_take_over_one_a_step_and_the_losses_are_eagers(
    eager: list[float], tmp_path: Path, helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(ANSWERS)
    monkeypatch.setattr("trainer.guards.slowdown.STEADY_STEPS", 2)
    monkeypatch.setattr("trainer.guards.slowdown.SHARE", math.inf)
    callback, losses = train(tmp_path, regional(), Background(force=True, at_step=5))
    assert facts(callback)["switched_at_step"] == {"layers.0": 5, "layers.1": 6, "layers.2": 7}
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)
    assert losses[:3] == eager[:3], "the first steps are eager's own"
    switches = [event.step for event in callback.record.events if event.kind == "switch"]
    assert switches == [5, 6, 7]
    assert callback.record.report["slowdown"]["on_later_batches"], "eager is timed beside what took over"
    assert callback.record.ended_in_eager is False
    assert callback.record.audits is not None
    assert callback.record.audits.verdict == "clean"


@pytest.mark.parametrize("fits", [True, False])
def test_an_audit_after_eager_runs_it_as_it_trained_where_that_fits(
    fits: bool, tmp_path: Path, helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(ANSWERS)
    asked: list[bool] = []

    def seen(*arguments: Any, gradients: bool, own: Any = audits.eager_forward) -> Any:
        asked.append(gradients)
        if gradients and not fits:
            raise torch.OutOfMemoryError
        return own(*arguments, gradients=gradients)

    monkeypatch.setattr(audits, "eager_forward", seen)
    callback, _ = train(tmp_path, regional(), Background(force=True, at_step=2), steps=8)
    assert asked == [True] * len(asked) if fits else asked == [True] + [False] * (len(asked) - 1)
    assert callback.record.audits is not None
    assert callback.record.audits.verdict == "clean"
    assert callback.record.audits.not_compared == {}


def test_the_smallest_region_takes_over_first(tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)
    blocks = Blocks()
    blocks.layers[0].more = nn.Sequential(nn.Identity(), nn.Identity())
    callback = Compile([regional(), Background(force=True, at_step=5)], verbose=False, save=False, warmup_steps=1)
    fit(blocks, tmp_path, [callback], max_steps=12, max_epochs=-1)
    assert facts(callback)["switched_at_step"] == {"layers.1": 5, "layers.2": 6, "layers.0": 7}


def test_no_garbage_is_collected_in_a_step_that_tries_a_region(
    tmp_path: Path, helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(ANSWERS)
    own, trying, collected = Trial.__call__, [False], []

    def call(trial: Trial, *args: Any, **kwargs: Any) -> Any:
        trying[0] = True
        results = own(trial, *args, **kwargs)
        trying[0] = gc.isenabled()  # later, where it is due, too
        return results

    def collects(phase: str, info: dict[str, int]) -> None:
        collected.extend([info["generation"]] * trying[0])

    monkeypatch.setattr(Trial, "__call__", call)
    gc.callbacks.append(collects)
    try:
        train(tmp_path, regional(), Background(force=True, at_step=2), steps=8)
    finally:
        gc.callbacks.remove(collects)
    assert collected == []
    assert gc.isenabled()


class BetweenSteps(L.Callback):
    """Knows whether Python collects garbage after each step, where a training may validate."""

    def __init__(self) -> None:
        self.collects: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.collects.append(gc.isenabled())


def test_garbage_is_collected_between_steps_that_try_regions(tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)
    callback, between = Compile([regional(), Background(force=True, at_step=2)]), BetweenSteps()
    fit(Blocks(), tmp_path, [callback, between], max_steps=8, max_epochs=-1)
    assert facts(callback)["switched"] is not None
    assert between.collects == [True] * 8


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; sys.stdin.readline(); sys.exit(3)", "ended with code 3"),
        ("", "helper"),  # gone before it is asked
        ("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)", "ended with code -9"),
        ("import sys; sys.stdin.readline(); sys.exit('no memory')", "no memory"),
        ("import time; time.sleep(600)", "took longer than"),
        ("print('[1]'); print('{', flush=True); input(); raise MemoryError", "MemoryError"),
    ],
)
def test_a_helper_that_fails_leaves_the_run_in_eager(
    script: str, reason: str, eager: list[float], tmp_path: Path, helper: Any
) -> None:
    started = helper(script)
    with pytest.warns(UserWarning, match="the run continues in eager") as warned:
        callback, losses = train(
            tmp_path, regional(), Background(force=True, at_step=2, timeout_seconds=3.0 if "sleep" in script else 60.0)
        )
    assert losses == eager
    assert reason in callback.record.eager_parts["layers.0"]
    assert callback.record.ended_in_eager
    assert sum("continues in eager" in str(one.message) for one in warned) == 1
    started[0].wait(timeout=60)  # nothing of it is left, also where it does not listen


@pytest.mark.parametrize(
    ("strategies", "ends"),
    [
        ([Background(force=True)], ValueError),  # refused: nothing to compile
        ([Auto(background=True, planned_steps=1, remember=False)], None),  # nothing pays
        ([Auto(background=True, remember=False)], ZeroDivisionError),
        ([Auto(background=True, remember=False)], KeyboardInterrupt),
        ([regional(), Background(force=True)], ZeroDivisionError),
    ],
    ids=["refused", "not needed", "error before it is asked", "Ctrl-C", "error"],
)
def test_a_helper_that_started_early_ends_however_the_run_does(
    strategies: list[Any], ends: type[BaseException] | None, tmp_path: Path, helper: Any
) -> None:
    class Fails(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if ends is not None:
                raise ends
            return super().training_step(batch, batch_idx)

    started = helper("input()")  # the line that asks, or the empty one
    with contextlib.nullcontext() if ends is None else pytest.raises((ends, SystemExit)):
        fit(Fails(), tmp_path, [Compile(strategies, verbose=False, save=False)], max_steps=40, max_epochs=-1)
    assert len(started) == 1
    assert started[0].wait(200) is not None


def test_a_helper_is_taken_where_it_lives_and_read_what_holds_now(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started, options = helper("input()"), Background(force=True)
    with engine.early([regional(), options]):
        engine.start_early(options)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
        engine.take(options).end()
        assert len(started) == 1
        started[0].wait(200)

        def dies() -> None:
            started[-1].kill()
            started[-1].wait(200)

        for change in (functools.partial(monkeypatch.setenv, "TORCHINDUCTOR_MAX_AUTOTUNE", "1"), dies):
            engine.start_early(options)
            change()
            engine.take(options).end()
            assert [one.wait(200) is not None for one in started[-2:]] == [True, True], "the first was of no use"
        assert len(started) == 5
        engine.start_early(options)
    assert started[-1].wait(200) is not None, "nobody has taken it"
    count = len(started)
    for none in ([regional()], [Auto(background=False)], [Auto(background=True, candidates=["cuda_graph"])]):
        with engine.early(none):
            assert len(started) == count


def test_a_full_disk_leaves_the_run_in_eager(
    eager: list[float], tmp_path: Path, helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(ANSWERS)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.Helper, "send", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        callback, losses = train(tmp_path, regional(), Background(force=True, at_step=2), steps=4)
    assert callback.record.ended_in_eager
    assert losses == eager[:4]


def test_what_the_helper_cannot_compile_stays_eager_alone(tmp_path: Path, helper: Any) -> None:
    refusal = """print('{"refused": "layers.1", "reason": "odd"}')"""
    helper(ANSWERS.replace("'layers.1', ", "").replace("sys.stdin:", f"sys.stdin:\n    {refusal}"))
    with pytest.warns(UserWarning, match="odd"):
        callback, _ = train(tmp_path, regional(), Background(force=True, at_step=2), steps=8)
    assert callback.record.eager_parts == {"layers.1": "odd"}
    assert list(facts(callback)["switched_at_step"]) == ["layers.0", "layers.2"]


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_code_that_computes_something_else_is_not_used(
    wrong: str, eager: list[float], tmp_path: Path, helper: Any
) -> None:
    helper(ANSWERS)
    changes = {"forward": as_it_is, "backward": as_it_is} | {wrong: scaled(1.01)}
    with backend(f"wrong_{wrong}", **changes) as name, pytest.warns(UserWarning, match="else than eager"):
        callback, losses = train(tmp_path, regional(backend=name), Background(force=True, at_step=2))
    assert facts(callback)["switched_at_step"] == {}
    assert losses == eager


def test_code_that_fails_is_not_used(eager: list[float], tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)

    def fails(_: Any) -> Any:
        raise RuntimeError("out of registers")

    with backend("fails_in_background", as_it_is, fails) as name, pytest.warns(UserWarning, match="out of registers"):
        callback, losses = train(tmp_path, regional(backend=name), Background(force=True, at_step=2))
    assert losses == eager
    assert callback.record.ended_in_eager


def test_a_trial_leaves_no_trace() -> None:
    def block() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    module, eager, x_BD = block(), block(), torch.randn(6, 8, requires_grad=True)
    program = Program(module=nn.ModuleDict({"block": module}), outlined=True)
    region = compile_in_place(program, "block", {"backend": "aot_eager", "fullgraph": True})
    trial = Trial(program=program, region=region, parity="on")
    module._compiled_call_impl = trial
    with torch.no_grad():
        module(x_BD), eager(x_BD)
    assert not trial.over, "what does not train is no trial"
    torch.manual_seed(1)
    expected = eager(x_BD)
    torch.manual_seed(1)
    torch.testing.assert_close(module(x_BD), expected, rtol=0, atol=0)
    assert trial.passed
    assert trial.vague, "of dropout a compiler draws other numbers"
    for one, other in zip(module.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert x_BD.grad is None
    assert all(one.grad is None for one in module.parameters())


class Borrows(nn.Module):
    """Uses a layer that is registered elsewhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self._layer[0](x_BD).relu()


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_weights_of_other_modules_are_part_of_a_trial(factor: float) -> None:
    """Also because torch holds on to the first call until its backward is compiled."""

    def accumulator() -> Any:
        return layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    layer = nn.Linear(8, 8)
    module = nn.ModuleDict({"layer": layer, "block": Borrows(layer)})
    program = Program(module=module, outlined=True)
    with backend(f"borrowed_{factor}", as_it_is, scaled(factor)) as name:
        region = compile_in_place(program, "block", {"backend": name, "fullgraph": True})
        trial = Trial(program=program, region=region, parity="on")
        region.module._compiled_call_impl = trial
        output = region.module(torch.randn(6, 8))
    accumulator().metadata["of"] = "this step"
    assert trial.passed is (factor == 1.0)
    del output
    gc.collect()
    assert not accumulator().metadata, "the step's graph is gone"


@pytest.mark.parametrize("kind", ["lambda", "sparse"])
def test_a_region_that_cannot_be_sent_stays_eager(kind: str, tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)

    class Odd(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].extra = (lambda: 1) if kind == "lambda" else torch.eye(2).to_sparse()

    callback = Compile([regional(), Background(force=True, at_step=2)], verbose=False, save=False)
    with pytest.warns(UserWarning, match="cannot be described"):
        fit(Odd(), tmp_path, [callback], max_steps=8, max_epochs=-1)
    assert list(facts(callback)["switched_at_step"]) == ["layers.0", "layers.2"]


def test_tensors_are_sent_without_their_values() -> None:
    import pickle

    big = torch.zeros(1 << 20)
    view = big[3:1027].view(32, 32).t()
    sent = dumps((view, torch.arange(5), nn.Linear(4, 2)))
    assert len(sent) < 4000
    there, table, linear = pickle.loads(sent)
    assert (there.shape, there.stride(), there.storage_offset()) == (view.shape, view.stride(), 3)
    assert there.untyped_storage().nbytes() == big.untyped_storage().nbytes()
    assert table.tolist() == [0, 1, 2, 3, 4]
    assert isinstance(linear.weight, nn.Parameter)


def test_few_cores_compile_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.modules.usable_cores", lambda: 3)
    callback, _ = train(tmp_path, regional(), Background(), steps=2)
    assert any("3 cores are too few" in note for note in callback.record.notes)
    assert callback.record.regions_compiled == 3


@pytest.mark.parametrize(
    "others",
    [
        [Regional(backend="aot_eager", blocks=["layers"], parts=[]), Checkpointing(blocks=["layers"])],
        [Regional(backend="aot_eager", blocks=["layers"], parts=[]), Dynamic()],
        [Whole(backend="aot_eager")],
        [Modular(parts={"layers": {"how": "regional", "backend": "aot_eager"}})],
    ],
    ids=["checkpointing", "dynamic", "whole", "modular"],
)
def test_losses_are_eagers_beside_other_strategies(
    others: list[Any], eager: list[float], tmp_path: Path, helper: Any
) -> None:
    helper(ANSWERS.replace("'layers.2'", "'layers.2', 'stem', 'head'"))
    ragged = [("0", 1)] if isinstance(others[-1], Dynamic) else []
    callback, losses = train(tmp_path, *others, Background(force=True, at_step=3), ragged=ragged)
    assert set(facts(callback)["switched_at_step"]) >= set(REGIONS)
    assert callback.record.eager_parts == {}
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)


def test_the_optimizers_step_takes_over_after_the_regions(eager: list[float], tmp_path: Path, helper: Any) -> None:
    helper(OPTIMIZER)
    callback, losses = train(
        tmp_path, regional(), Optimizer(backend="eager"), Background(force=True, at_step=3), parity="strict"
    )
    assert callback.record.report["optimizer"]["form"] == "functional"
    assert callback.record.eager_parts == {}
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)
    assert callback.record.audits is not None
    assert callback.record.audits.verdict == "clean"


def test_a_wrong_step_of_the_optimizer_is_not_used(tmp_path: Path, helper: Any) -> None:
    helper(OPTIMIZER)

    with backend("wrong_update", scaled(1.01), as_it_is) as name:
        callback, _ = train(tmp_path, regional(), Optimizer(backend=name), Background(force=True, at_step=3))
    assert "another than torch's own" in callback.record.eager_parts["optimizer"]
    assert set(facts(callback)["switched_at_step"]) == set(REGIONS)


def test_an_optimizer_without_a_formula_stays_eager(tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)

    class Other(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.RMSprop(self.parameters())

    strategies = [regional(), Optimizer(backend="eager"), Background(force=True, at_step=3)]
    callback = Compile(strategies, verbose=False, save=False)
    fit(Other(), tmp_path, [callback], max_steps=12, max_epochs=-1)
    assert "RMSprop: only what is computed by formulas" in callback.record.eager_parts["optimizer"]
    assert set(facts(callback)["switched_at_step"]) == set(REGIONS)


def test_buckets_take_over_shape_by_shape(helper: Any) -> None:
    helper(ANSWERS)
    losses = []
    for others in ([], [Background(force=True, at_step=3)]):
        torch._dynamo.reset()
        callback = Compile([regional(), Buckets(count=2), *others], ragged=RAGGED, verbose=False, save=False)
        module = fit_texts(TextData(), [callback], max_steps=60, max_epochs=-1)
        losses.append([loss for *_, loss in module.trained])
    torch.testing.assert_close(losses[0][-60:], losses[1][-60:], rtol=1e-4, atol=1e-5)
    shapes = facts(callback)["shapes"]
    assert len(shapes) >= 2
    assert all(row["regions"] == 2 for row in shapes.values()), shapes
    assert callback.record.eager_parts == {}


@pytest.mark.parametrize(("others", "warned"), [([], True), ([Dynamic()], False)], ids=["alone", "dynamic"])
def test_batches_of_several_shapes_are_warned_of_where_the_helper_knows_one(
    others: list[Any], warned: bool, helper: Any
) -> None:
    helper(ANSWERS)
    torch._dynamo.reset()
    callback = Compile(
        [regional(), *others, Background(force=True, at_step=4)], ragged=RAGGED, verbose=False, save=False
    )
    fit_texts(TextData(), [callback], max_steps=8, max_epochs=-1)
    assert callback.record.notes.count(SHAPES) == warned


def test_what_an_earlier_run_compiled_needs_no_helper(eager: list[float], tmp_path: Path, helper: Any) -> None:
    @dataclass(kw_only=True, slots=True)
    class Warm(Strategy):
        name: ClassVar[str] = "cached"
        stage: ClassVar[Stage] = Stage.CACHE

        def apply(self, program: Program) -> None:
            program.report["cached"] = {"state": "warm"}

    helper("raise SystemExit('started')")
    callback, losses = train(
        tmp_path, Warm(), regional(), Optimizer(backend="eager"), Background(force=True, at_step=3)
    )
    assert facts(callback)["helper_failed"] is None
    assert set(facts(callback)["switched_at_step"]) == set(REGIONS)
    assert callback.record.eager_parts == {}
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)


def test_blocks_that_compute_again_do_so_in_the_helper() -> None:
    import pickle

    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    block[0].forward = recomputing(block[0])
    there = pickle.loads(dumps(block))
    assert recomputes(there[0])
    assert not recomputes(there[1])
    assert there(torch.ones(1, 4)).shape == (1, 4)


def test_what_it_cannot_go_with_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to compile"):
        train(tmp_path, Background(force=True))
    with pytest.raises(ValueError, match=r"compile.background.max_host_gib=0 must be above 0"):
        Background(max_host_gib=0)


def test_a_script_without_a_guard_is_never_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trains')\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises(ValueError, match="has no `if __name__"):
        main_script()
    script.write_text("if __name__ == '__main__':\n    print('trains')\n")
    assert main_script() == str(script)


def test_a_second_training_is_taken_over_too(tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)
    callback = Compile([regional(), Background(force=True, at_step=3)], verbose=False, save=False, warmup_steps=1)
    for _ in range(2):
        fit(Blocks(), tmp_path, [callback], max_steps=6)
        assert facts(callback)["switched_at_step"] == {"layers.0": 3, "layers.1": 4, "layers.2": 5}


class Checkpointed(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x_BD = self.stem(batch[0])
        for layer in self.layers:
            x_BD = checkpoint(layer, x_BD, use_reentrant=False)
        return nn.functional.mse_loss(self.head(x_BD), batch[1])


def test_a_region_within_a_checkpoint_of_the_users_is_taken_over(tmp_path: Path, helper: Any) -> None:
    helper(ANSWERS)
    eager = fit(Checkpointed(), tmp_path, [], max_steps=8)
    callback = Compile([regional(), Background(force=True, at_step=3)], verbose=False, save=False, warmup_steps=1)
    assert fit(Checkpointed(), tmp_path, [callback], max_steps=8) == pytest.approx(eager, rel=1e-5)
    assert facts(callback)["switched_at_step"] == {"layers.0": 3, "layers.1": 4, "layers.2": 5}


@pytest.mark.slow
def test_the_training_finds_what_the_helper_compiled_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: Any
) -> None:
    """With Inductor and a helper of its own: every graph of the training comes from the cache."""
    started = helper(None)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    engine.start_early(Background(force=True))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # once the helper has begun
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    callback, _ = train(tmp_path, regional(backend="inductor"), Background(force=True, at_step=2), steps=12)
    assert facts(callback)["helper_failed"] is None
    assert set(facts(callback)["switched_at_step"]) == set(REGIONS)
    assert callback.record.cache_misses == 0
    assert callback.record.cache_hits
    assert callback.record.cache is None, "it began with empty caches: no warm start"
    assert len(started) == 1, "that which had begun"
    assert started[0].wait(200) is not None


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
def test_the_helpers_precision_is_the_trainings_own(precision: str) -> None:
    """It is part of the caches' keys, where "none" and "ieee" are two although both mean float32."""
    matmul = torch.backends.cuda.matmul
    try:
        matmul.fp32_precision = "none"
        if precision != "none":
            torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
        state = torch_state()
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "none"
        set_torch_state(state)
        assert matmul.fp32_precision == precision
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "none"


def test_a_call_is_recorded_with_its_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = call_of("", nn.Linear(2, 2), {}, (torch.ones(1, 2),), {})
    assert isinstance(call, Call)
    assert call.autocast["cpu"] == (True, torch.bfloat16)
    assert b"__main__" not in call.pickled, "it needs no script to be run again"


class Slow(Blocks):
    """Steps that give the helper's answers time to come."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def on_a_rank(folder: Path, scripts: list[str]) -> tuple[dict[str, int], list[str], float]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_helper(monkeypatch, scripts[int(os.environ["RANK"])])
        callback = Compile([regional(), Background(force=True)], verbose=False, save=False)
        options = {"devices": 2, "strategy": "ddp", "max_steps": 3000, "max_epochs": -1}
        through = StopsWhen(lambda: bool(callback._takeover and callback._takeover.over))
        losses = fit(Slow(), folder, [callback, through], **options)
    return facts(callback)["switched_at_step"], sorted(callback.record.eager_parts), losses[-1]


@pytest.mark.xdist_group("two_processes")
def test_processes_switch_at_the_same_steps(pair: Pair, tmp_path: Path) -> None:
    late = ANSWERS.replace("sys.stdin:", "sys.stdin:\n    import time; time.sleep(1)")
    (first, *_), (second, *_) = pair(on_a_rank, tmp_path, [ANSWERS, late])
    assert set(first) == set(REGIONS)
    assert first == second


@pytest.mark.xdist_group("two_processes")
def test_a_region_that_stays_eager_on_one_process_stays_so_on_both(pair: Pair, tmp_path: Path) -> None:
    (first, *left), (second, *also_left) = pair(on_a_rank, tmp_path, [ANSWERS, "input(); raise MemoryError"])
    assert first == second == {}
    assert left[0] == also_left[0] == REGIONS
