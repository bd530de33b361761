"""No training ends that plain Lightning finishes, and each one's losses, weights and buffers are plain Lightning's."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from crucible import Checkpointing, Compile, Optimizer, Regional, Strategy, Whole
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from tests.promises.cases import CASES, OTHER_PLACES, STEP_PLACES, TOOLS, DropoutBlock, WithATool, shuffled
from tests.promises.training import ROWS, WIDTH, Block, Module, Net, Outcome, assert_as_eager, loader, train, vectors
from tests.strategies import backends
from tests.sweep import MARK
from trainer.guards.checks import CALLED_BESIDE, CHECKED_BEFORE, COPIES_CALLED, UNDER_A_MODE

STRATEGIES: dict[str, Callable[[], list[Strategy]]] = {
    "regional": lambda: [Regional(backend="aot_eager")],
    "whole": lambda: [Whole(backend="aot_eager")],
}


def trained(make: Any, strategies: list[Strategy] | None, **options: Any) -> Outcome:
    """``train`` with the options of a case, whose callbacks are made anew and whose batches are copied."""
    given = {name: option() if callable(option) else option for name, option in options.items() if name != "then"}
    if isinstance(options.get("data"), list):
        given["data"] = copy.deepcopy(options["data"])
    return train(make, strategies, then=options.get("then"), **given)


def as_eager(
    make: Any, under: list[Strategy], *, close: float = 1e-4, eager: Outcome | None = None, **options: Any
) -> Outcome:
    """Train under strategies, and as plain Lightning unless that ``eager`` training is given; the first, which is held
    against the second."""
    eager, seen = trained(make, None, **options) if eager is None else eager, trained(make, under, **options)
    assert_as_eager(eager, seen, close)
    observed = getattr(eager.module, "observed", None)
    assert getattr(seen.module, "observed", None) == observed
    return seen


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@functools.lru_cache(maxsize=1)
def plain(name: str) -> Outcome:
    """Plain Lightning's training of a case, which those under strategies follow."""
    options = {option: value for option, value in CASES[name].options.items() if option != "close"}
    return trained(CASES[name].make, None, **options)


def trainings() -> Iterator[Any]:
    """Strategy and case, those of a case behind each other."""
    for place, (name, case) in enumerate(CASES.items()):
        if case.repeats:
            yield pytest.param("regional", name, marks=pytest.mark.slow if place % 2 else [])
        yield pytest.param("whole", name, marks=[pytest.mark.slow, *([MARK] if case.repeats and place % 4 else [])])


@pytest.mark.parametrize(("strategy", "name"), list(trainings()))
def test_a_training(strategy: str, name: str) -> None:
    as_eager(CASES[name].make, STRATEGIES[strategy](), eager=plain(name), **CASES[name].options)


@functools.lru_cache(maxsize=1)
def plain_with(tool: str, places: tuple[str, ...]) -> Outcome:
    """Plain Lightning's training that uses ``tool`` at ``places``."""
    return trained(lambda: WithATool(tool, places), None, **WITH_A_TOOL)


WITH_A_TOOL: dict[str, Any] = {"max_epochs": 2, "validation": vectors(1, seed=4)}


PLACES_OF: dict[str, list[tuple[str, ...]]] = {
    # It looks at the attributes of modules, and within a step there is one more.
    "jit.script": [("batch end", "epoch end")],
    # Plain Lightning's validation is without gradients.
    "backward": [STEP_PLACES, tuple(place for place in OTHER_PLACES if place != "validation")],
    # Blocks go eager with its first use, so that a later one would show nothing.
    "hvp": [(place,) for place in (*STEP_PLACES, *OTHER_PLACES)],
}
"""Of tools that cannot be used at all places of one training."""


def tools() -> Iterator[Any]:
    """Strategy, tool and places, those of one plain training behind each other."""
    for number, tool in enumerate(TOOLS):
        for places in PLACES_OF.get(tool, [STEP_PLACES, OTHER_PLACES]):
            yield pytest.param("regional", tool, places, marks=pytest.mark.slow if number % 3 else [])
            yield pytest.param("whole", tool, places, marks=[pytest.mark.slow, *([MARK] if number % 3 else [])])


@pytest.mark.parametrize(("strategy", "tool", "places"), list(tools()))
def test_a_tool_beside_a_training(strategy: str, tool: str, places: tuple[str, ...]) -> None:
    eager = plain_with(tool, places)
    seen = as_eager(lambda: WithATool(tool, places), STRATEGIES[strategy](), eager=eager, **WITH_A_TOOL)
    assert seen.module.uses == eager.module.uses >= len(places)


# ---- compilers that fail --------------------------------------------------------------------------------------------


def refusing(graph: GraphModule, inputs: Any) -> Any:
    raise RuntimeError("this compiler compiles no forward\nand says so in two lines")


class RefusesFrom:
    """Takes so many graphs, then no more."""

    def __init__(self, graphs: int) -> None:
        self.left = graphs

    def __call__(self, graph: GraphModule, inputs: Any) -> Any:
        self.left -= 1
        return refusing(graph, inputs) if self.left < 0 else graph.forward


class BreaksFrom:
    """Compiled code that raises from a call on."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, graph: GraphModule, inputs: Any) -> Any:
        def call(*given: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("this compiled code fails")
            return graph.forward(*given)

        return call


@pytest.mark.parametrize("strategy", [Regional, Whole])
@pytest.mark.parametrize("graphs", [None, 1, 2], ids=["no backward", "one graph", "two graphs"])
def test_what_does_not_compile_runs_eager_and_is_named(graphs: int | None, strategy: Any) -> None:
    backends.register()
    name = backends.BROKEN_BACKWARD
    if graphs is not None:
        made = RefusesFrom(graphs)
        torch._dynamo.register_backend(made, name=(name := f"refusing_{id(made)}_{graphs}_{strategy.name}"))
    options = {"data": [torch.randn(rows, WIDTH) for rows in (8, 8, 8, 5, 5, 5, 8)], "validation": vectors(1)}
    seen = as_eager(Module, [strategy(backend=name)], **options)
    assert seen.record.eager_parts
    assert any("compiles no" in reason for reason in seen.record.eager_parts.values()), seen.record.eager_parts
    assert any("eager" in line for line in seen.warned)


@pytest.mark.parametrize("calls", [0, 1, 5, 9])
def test_compiled_code_that_raises(calls: int) -> None:
    made = BreaksFrom(calls)
    torch._dynamo.register_backend(made, name=(name := f"breaking_{calls}_{id(made)}"))
    as_eager(Module, [Regional(backend=name)], data=vectors(10))


@pytest.mark.slow
def test_an_order_that_is_drawn_as_it_is_compiled_does_not_train() -> None:
    class Shuffles(DropoutBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[shuffled(len(x))] if self.training else x)

    record = as_eager(lambda: Module(Net([Shuffles(), Shuffles()])), [Whole()]).record
    # Torch 2.11 breaks the graph at ``shuffle``, and compiles anew for each order.
    assert record.graph_breaks or "compiled code repeats the numbers" in record.eager_parts["net"]


@pytest.mark.parametrize("strategy", [Regional, Whole])
def test_ones_own_compiled_function_may_draw_from_numpy(strategy: Any) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def noisy(loss: Tensor) -> Tensor:
        return loss * (1 + torch.from_numpy(numpy.random.rand(1)).float().mean())

    class Noisy(Module):
        def __init__(self) -> None:
            super().__init__()
            torch._dynamo.reset()  # each training compiles it

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return noisy(super().training_step(batch, batch_idx))

    as_eager(Noisy, [strategy(backend="aot_eager")])


# ---- around a training ----------------------------------------------------------------------------------------------


def test_predict_and_test_after_a_fit() -> None:
    class Tests(Module):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch)

    def then(trainer: L.Trainer, module: Any) -> None:
        trainer.validate(module, loader(vectors(2, seed=5)), verbose=False)
        trainer.test(module, loader(vectors(2, rows=3, seed=5)), verbose=False)
        (found,) = trainer.predict(module, loader(vectors(1, rows=5, seed=6)))  # type: ignore[misc]
        module.observed = [round(float(one), 4) for one in found[:, 0]]
        module.observed += [round(float(one), 4) for one in module.net(vectors(1, seed=8)[0])[:, 0]]

    for strategy in STRATEGIES.values():
        as_eager(Tests, strategy(), then=then)


def test_jagged_batches_are_checked_and_compiled_once_for_all_lengths() -> None:
    given = CASES["JaggedBatch"]
    record = as_eager(given.make, [Regional(backend="aot_eager")], **given.options).record
    assert (record.graphs, record.eager_parts, record.report["parity"]["checks"]) == (1, {}, 1)


@pytest.mark.parametrize(("name", "why"), [("CalledInAThread", CALLED_BESIDE), ("ClonesItsBlocks", COPIES_CALLED)])
def test_blocks_that_are_not_called_in_a_step_are_named(name: str, why: str) -> None:
    record = as_eager(CASES[name].make, [Regional(backend="aot_eager")]).record
    assert set(record.eager_parts.values()) == {why}


def test_blocks_that_run_under_a_mode_alone_are_named() -> None:
    class Counts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with FlopCounterMode(display=False) as counter:
                loss = self.loss(batch)
            self.observed = [*getattr(self, "observed", []), counter.get_total_flops()]
            return loss

    record = as_eager(Counts, [Regional(backend="aot_eager")]).record
    assert record is not None
    assert set(record.eager_parts.values()) == {UNDER_A_MODE}


def test_a_block_whose_place_alone_changes_is_still_compiled() -> None:
    class DropsTheFirst(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                del self.net.blocks[0]

    seen = as_eager(DropsTheFirst, [Regional(backend="aot_eager")], max_epochs=3)
    assert [one for one in seen.warned if "no longer" in one] == ["net.blocks.0: no longer in the module"]


@pytest.mark.parametrize("rows", [4, ROWS])
def test_a_second_fit_says_of_the_same_shapes_that_they_were_checked_before(rows: int) -> None:
    def then(trainer: L.Trainer, module: Any) -> None:
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(vectors(6, rows=rows, seed=5)))

    for strategy in STRATEGIES.values():
        record = as_eager(Module, strategy(), then=then).record  # of the second one
        assert record.regions_compiled == record.regions
        assert record.report["parity"].get("reason") == (CHECKED_BEFORE if rows == ROWS else None)


def test_evaluation_alone() -> None:
    for stage in ("validate", "test", "predict"):
        module = Module()
        module.test_step = module.validation_step  # type: ignore[method-assign]
        module.predict_step = lambda batch, batch_idx, module=module: module.net(batch)  # type: ignore[method-assign]
        trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
            callbacks=[Compile([Regional(backend="aot_eager")], save=False, verbose=False)],
        )  # fmt: skip
        getattr(trainer, stage)(module, loader(vectors(2)))


class FailsAt(Module):
    """Raises an error of its own in a step."""

    step = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.step:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_error_of_the_users_own_is_theirs(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailsAt, "step", step)
    for strategies in (None, STRATEGIES["regional"]()):
        seen = train(FailsAt, strategies)
        assert (type(seen.ended), seen.steps) == (KeyError, step)
        module = seen.module
        before = copy.deepcopy(module.net)(vectors(1)[0])  # and the module is plain again
        assert torch.equal(module.net(vectors(1)[0]), before)
        assert all(one._compiled_call_impl is None for one in module.modules())


def test_a_fit_goes_on_after_an_error_that_the_user_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def then(trainer: L.Trainer, module: Any) -> None:
        monkeypatch.setattr(FailsAt, "step", -1)
        trainer.fit(module, loader(vectors(6)))

    def run(strategies: list[Strategy] | None) -> Outcome:
        monkeypatch.setattr(FailsAt, "step", 3)

        class Catches(L.Trainer):
            def fit(self, *given: Any, **named: Any) -> None:
                with contextlib.suppress(KeyError):
                    super().fit(*given, **named)

        monkeypatch.setattr(L, "Trainer", Catches)
        return train(FailsAt, strategies, then=then)

    eager = run(None)
    for strategy in STRATEGIES.values():
        monkeypatch.undo()
        assert_as_eager(eager, run(strategy()))


def test_outside_of_steps_the_module_is_plain() -> None:
    """In every hook between batches, and after the training."""
    found: list[bool] = []

    def look(self: Any, *_: Any) -> None:
        found.append(all(one._compiled_call_impl is None for one in self.modules()))

    hooks = ("fit_start", "train_start", "train_batch_end", "train_epoch_end", "validation_epoch_end", "fit_end")
    Looks = type("Looks", (Module,), {f"on_{name}": look for name in hooks})
    seen = train(Looks, STRATEGIES["regional"](), validation=vectors(1), max_epochs=2)
    assert seen.ended is None
    assert seen.record.regions_compiled, "something was compiled"
    assert found == [True] * len(found)
    assert len(found) > 12


def test_a_network_saved_whole_while_it_trains_is_loaded() -> None:
    class Saves(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.saved = io.BytesIO()
            torch.save(self.net, self.saved)

    for strategies in ([Checkpointing()], [Checkpointing(), Regional(backend="aot_eager")], STRATEGIES["whole"]()):
        seen = train(Saves, strategies)
        assert seen.ended is None, seen.end
        seen.module.saved.seek(0)
        loaded = torch.load(seen.module.saved, weights_only=False)
        assert torch.equal(loaded(vectors(1)[0]), seen.module.net(vectors(1)[0]))


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps, copy.copy])
@pytest.mark.parametrize("strategies", [list, STRATEGIES["regional"], lambda: [Optimizer()]])
def test_the_callback_can_be_copied(strategies: Any, how: Any) -> None:
    how(Compile(strategies()))


def test_the_callback_can_be_copied_after_a_training() -> None:
    compiling = Compile(STRATEGIES["regional"](), save=False, verbose=False)
    train(Module, None, callbacks=[compiling])
    copy.deepcopy(compiling)
    train(Module, None, callbacks=[copy.deepcopy(compiling)])


# ---- graphs ---------------------------------------------------------------------------------------------------------


def test_plain_blocks_are_compiled_and_few_times() -> None:
    seen = as_eager(lambda: Module(Net([Block() for _ in range(4)])), STRATEGIES["regional"](), data=vectors(12))
    record = seen.record
    assert record.regions_compiled == record.regions
    assert not record.eager_parts
    assert record.graphs <= 3, "one of a kind, and what lies beside the blocks"
    assert record.report["parity"]["verdict"] == "passed"
