"""What every strategy promises on every task: eager's losses and names, and a record that leaves nothing out; and that
a second training with the same ``Compile`` is what the first one was.

Strategies and tasks are taken from their registries, so that a new one is covered the day it is added. A handful of
combinations, one with a composite among them, promise the same. Each pair is trained once, by one test, which checks
every promise and reports all that are broken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from strategies import STRATEGIES, Program, Stage, Strategy
from tasks import TASKS
from tests.processes import python
from tests.sweep import MARK
from tests.trainer.conftest import FLOOR, Baseline
from tests.trainer.lightning_modules import Losses, quiet_trainer
from tests.trainer.runs import (
    ALONE,
    MODULE_STRATEGIES,
    STEPS,
    curve,
    last_checkpoint,
    order_of,
    overrides,
    refusal,
    relative_differences,
    train,
)
from trainer.callback import Compile
from trainer.config import compose
from trainer.telemetry.record import RunRecord

ALWAYS = (
    "started",
    "device",
    "device_type",
    "precision",
    "import_seconds",
    "first_step_seconds",
    "warmup_seconds",
    "warmup_steps",
    "steps",
    "steady_steps",
    "pause_seconds",
    "peak_process_memory_gib",
    "final_loss",
    "total_seconds",
)
"""Figures that every finished run has."""
COMBINATIONS = {
    "[optimizer,modular,dynamic]": "dynamic+modular+optimizer",
    "[whole,cached,buckets]": "cached+buckets+whole",
    "[cached,buckets,optimizer,regional]": "cached+buckets+regional+optimizer",
    "[checkpointing,regional]": "checkpointing+regional",
    "full_stack": "cached+buckets+regional+optimizer+cuda_graph",
}
"""Label by combination; without a CUDA device, cuda_graph leaves itself out."""
NOT_ON_A_CPU = ("peak_device_memory_gib", "model_flops_utilization", "joules_per_sample")
OF_THE_COMPILER = (
    "compile_seconds",
    "cache",
    "cache_hits",
    "cache_misses",
    "regions",
    "regions_compiled",
    "graphs",
    "graph_breaks",
    "recompiles",
    "cudagraph_skips",
)


def marks(task: str, arm: str, *, refused: bool) -> list[pytest.MarkDecorator]:
    """Every arm trains the smallest task, and the others one each."""
    if refused or (task == "micro" and arm in STRATEGIES):
        return []
    return (
        [pytest.mark.slow] if task == "micro" or arm == ALONE.get(task, ("regional",))[-1] else [pytest.mark.slow, MARK]
    )


def every_pair(*, refused: bool = False) -> pytest.MarkDecorator:
    """Every pair of task and arm that fit each other, or, ``refused``, that do not; all but one task's are slow.

    How strategies combine does not depend on the task: of the lists, the smallest (ragged) one is enough. What is in
    ``full_stack``, auto, which stays eager for so few steps, and checkpointing, which takes the blocks of ``regional``,
    are trained by themselves on it alone. The list of what is in ``full_stack`` is composed, not trained again.
    """
    elsewhere = {"auto", "cuda_graph", "checkpointing", *COMBINATIONS["full_stack"].split("+")}
    lists = sorted(COMBINATIONS.keys() - {"[cached,buckets,optimizer,regional]"})
    arms = ["eager", *sorted(name for name, kind in STRATEGIES.items() if not kind.removed), *lists]
    return pytest.mark.parametrize(
        ("task", "arm"),
        [
            pytest.param(task, arm, marks=marks(task, arm, refused=refused))
            for task in sorted(TASKS)
            for arm in arms
            if bool(refusal(task, arm)) is refused
            and arm in ALONE.get(task, arms)
            and (task == "micro" or not (arm.startswith("[") or (arm in elsewhere and not refused)))
        ],
    )


@every_pair()
def test_a_pair_keeps_every_promise(
    task: str,
    arm: str,
    tmp_path: Path,
    baseline: Callable[..., Baseline],
    subtests: pytest.Subtests,
) -> None:
    # Strategies alone validate after the third step, without gradients, so that everything compiled is compiled again.
    changes = ("trainer.val_every_n_steps=3",) if arm in STRATEGIES else ()
    # What ahead-of-time compilation does to a task is seen in one graph of it, and to a strategy on the smallest task;
    # lists and composites are made of those.
    backend = "aot_eager" if arm == "whole" or (task == "micro" and arm in STRATEGIES) else "eager"
    record = train(tmp_path, *changes, task=task, strategy=arm, backend=backend)
    promises = [
        partial(state_dict_keys_are_eagers, tmp_path, baseline(task)),
        partial(the_record_is_complete, record, task, arm),
        partial(a_figure_that_does_not_exist_is_none, record, arm),
        partial(the_record_is_read_back_as_it_was_written, tmp_path, record),
        partial(every_strategy_did_something_or_says_that_it_did_not, record),
    ]
    if (task, arm) == ("micro", "eager"):
        promises.append(partial(a_report_reads_it_without_torch, tmp_path))
    if arm in STRATEGIES:
        promises.append(partial(events_say_why_and_where, record, arm))
        if not STRATEGIES[arm].reorders_data:  # those that do: full_stack
            promises.append(partial(losses_are_eagers_at_every_step, tmp_path, record, baseline(task)))
    if arm in MODULE_STRATEGIES:
        promises.append(partial(every_region_is_compiled_without_a_break, record))
    if arm in COMBINATIONS:
        eager = baseline(task, order=order_of(arm, task))
        promises.append(partial(losses_are_eagers_at_every_step, tmp_path, record, eager))
        promises.append(partial(a_combination_is_applied_whole, record, task))
    for promise in promises:
        with subtests.test(promise=promise.func.__name__):
            promise()


def losses_are_eagers_at_every_step(run_dir: Path, record: RunRecord, eager: Baseline) -> None:
    losses = curve(run_dir)
    assert list(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS, "the model learns"
    assert max(relative_differences(losses, eager.losses)) <= FLOOR
    assert record.final_loss == pytest.approx(losses[STEPS])
    assert dict(record.losses) == pytest.approx(losses)  # type: ignore[arg-type]


def a_combination_is_applied_whole(record: RunRecord, task: str) -> None:
    assert record.regions_compiled == record.regions
    assert record.graph_breaks == 0
    assert record.warmup_seconds >= record.compile_seconds, "what was compiled belongs to warm-up steps"
    if "buckets" in record.label and not refusal(task, "buckets"):
        edges = record.report["buckets"]["edges"]
        assert (len(edges), [edge % 16 for edge in edges]) == (2, [0, 0])
    if "optimizer" in record.label:
        assert record.report["optimizer"]["form"] == "functional"
    if "cuda_graph" in record.label:
        assert "cuda_graph: left out, CUDA graphs need a CUDA device, this run trains on cpu" in record.notes


@every_pair(refused=True)
def test_a_strategy_that_cannot_be_applied_to_a_task_is_refused_with_the_reason(
    task: str, arm: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=refusal(task, arm)):
        train(tmp_path, task=task, strategy=arm)


def state_dict_keys_are_eagers(run_dir: Path, eager: Baseline) -> None:
    assert list(last_checkpoint(run_dir)["state_dict"]) == eager.state_dict_keys


def the_record_is_complete(record: RunRecord, task: str, arm: str) -> None:
    expected = COMBINATIONS.get(arm, arm)
    assert (record.status, record.exit_code, record.reason) == ("finished", 0, None)
    title = {"micro": "micro ragged", "library_model": "bert"}.get(task, TASKS[task].name)
    assert (record.task, record.label, record.steps) == (title, expected, STEPS)
    assert record.steady_steps + record.warmup_steps + record.left_out_steps == STEPS
    for name in ALWAYS:
        assert getattr(record, name) is not None, name
    assert record.config["trainer"]["max_steps"] == STEPS
    assert record.versions["torch"]


def a_figure_that_does_not_exist_is_none(record: RunRecord, arm: str) -> None:
    for name in NOT_ON_A_CPU:
        assert getattr(record, name) is None, name
    if arm == "eager":
        for name in OF_THE_COMPILER:
            assert getattr(record, name) is None, name
        assert record.strategies == []
    # aot_eager never asks Inductor's cache.
    assert (record.cache, record.cache_hits, record.cache_misses) == (None, None, None)


def every_region_is_compiled_without_a_break(record: RunRecord) -> None:
    assert record.regions
    assert record.regions_compiled == record.regions
    assert record.graphs
    assert record.graph_breaks == 0
    assert record.compile_seconds > 0
    assert not [event for event in record.events if event.kind != "recompile"]


def events_say_why_and_where(record: RunRecord, arm: str) -> None:
    if arm in MODULE_STRATEGIES:
        assert record.recompiles
    for event in record.events:
        assert event.reason.strip()
        assert ".py:" in event.location
        assert event.step in (3, 4)  # the validation after the third step


def the_record_is_read_back_as_it_was_written(run_dir: Path, record: RunRecord) -> None:
    assert RunRecord.load(run_dir) == RunRecord.load(run_dir / "record.json") == record
    assert sorted(path.name for path in run_dir.glob(".record*")) == []


def a_report_reads_it_without_torch(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.telemetry.record import RunRecord; "
        f"assert RunRecord.load(Path({str(run_dir)!r})).status == 'finished'; sys.exit('torch' in sys.modules)"
    )
    assert python("-c", code).returncode == 0


def every_strategy_did_something_or_says_that_it_did_not(record: RunRecord) -> None:
    """Else a strategy would keep all other promises by doing nothing."""
    for name in (strategy["name"] for strategy in record.strategies):
        compiled = name in MODULE_STRATEGIES and record.regions_compiled
        said = [note for note in record.notes if note.startswith(f"{name}: ")]
        assert record.report.get(name) or compiled or said, f"{name} compiled nothing, reports nothing and says nothing"


# ---- one Compile, two trainings --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager_twice(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> list[Training]:
    return train_twice(tmp_path_factory.mktemp("eager-twice"), "eager")


@pytest.mark.parametrize("arm", sorted(name for name, kind in STRATEGIES.items() if not kind.removed))
def test_a_second_training_is_what_the_first_one_was(arm: str, tmp_path: Path, eager_twice: list[Training]) -> None:
    first, second = train_twice(tmp_path, arm)
    assert differences(first.within, second.within) == []
    for one, eager in zip((first, second), eager_twice, strict=True):
        outlives = [line for line in differences(eager.after, one.after) if not line.startswith("weights ")]
        assert outlives == [], "their layout may, and nothing else"
        if not STRATEGIES[arm].reorders_data:
            assert one.losses == pytest.approx(eager.losses, rel=FLOOR)
        every_strategy_did_something_or_says_that_it_did_not(one.record)
    assert first.record.report == first.report, "the record of the first training is as it was"
    assert second.record.report.keys() - {"auto"} == first.record.report.keys() - {"auto"}
    assert second.record.strategies == first.record.strategies
    assert second.record.eager_parts == first.record.eager_parts


@dataclass(kw_only=True, slots=True)
class Transposed(Strategy):
    """Weights lie the other way around in memory while a training runs."""

    name: ClassVar[str] = "transposed"
    stage: ClassVar[Stage] = Stage.ACTIVATIONS

    every_training: bool
    """Whether ``begin`` does again what ``end`` has undone."""

    def apply(self, program: Program) -> None:
        self._lay(program, lambda one: one.mT.contiguous().mT)

    def begin(self, program: Program) -> None:
        if self.every_training:
            self.apply(program)

    def end(self, program: Program) -> None:
        self._lay(program, Tensor.contiguous)

    def _lay(self, program: Program, lay: Callable[[Tensor], Tensor]) -> None:
        for one in program.module.parameters():
            if one.ndim == 2:
                one.data = lay(one.data)


@pytest.mark.parametrize("every_training", [True, False])
def test_what_end_undoes_and_begin_does_not_do_again_is_found(
    every_training: bool, tmp_path: Path, eager_twice: list[Training]
) -> None:
    first, second = train_twice(tmp_path, "eager", [Transposed(every_training=every_training)])
    found = differences(first.within, second.within)
    assert bool(found) is not every_training
    assert all(line.startswith("weights ") for line in found)
    assert differences(eager_twice[0].within, first.within), "the first training is under it"
    with pytest.raises(AssertionError, match="transposed compiled nothing, reports nothing and says nothing"):
        every_strategy_did_something_or_says_that_it_did_not(first.record)


HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


@dataclass(kw_only=True)
class Training:
    """One of the two; ``within`` and ``after``: what a strategy may have changed, in the last step and at the end."""

    record: RunRecord
    report: dict[str, Any]
    """As it was when the training was over."""
    losses: list[float]
    within: dict[str, Any] = field(repr=False)
    after: dict[str, Any] = field(repr=False)


class Look(L.Callback):
    """Looks around in each step, while what is compiled is in force."""

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self.batch: Any = None
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        program = self._compile.program
        of_program = {
            "kept": sorted(program.kept),
            "captures": program.captures,
            "padding": program.padding is not None,
        }
        tensors = {"inputs": self.batch.inputs, "targets": self.batch.targets}
        # A dimension that is marked as dynamic is an attribute of the tensor.
        batch = {name: (one.dtype, one.shape, one.stride(), sorted(vars(one))) for name, one in tensors.items()}
        self.found = {**looked_at(pl_module, trainer.optimizers), "program": of_program, "batch": batch}


def looked_at(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """What strategies change, by the name of its place."""
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    return {
        "weights": {name: (type(one), one.dtype, one.stride()) for name, one in weights.items()},
        "calls": {path: one._compiled_call_impl is not None for path, one in module.named_modules()},
        "attributes": {path: sorted(vars(one)) for path, one in module.named_modules()},
        "hooks": {path: [len(getattr(one, name)) for name in HOOKS] for path, one in module.named_modules()},
        "optimizers": {str(place): sorted(vars(one)) for place, one in enumerate(optimizers)},
        "settings of Dynamo": torch._dynamo.config.get_config_copy(),
        "settings of torch": {
            "matmul precision": torch.get_float32_matmul_precision(),
            "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
            "benchmark": torch.backends.cudnn.benchmark,
            "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
            "default dtype": torch.get_default_dtype(),
        },
    }


def differences(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> list[str]:
    """Where two looks differ, with both findings."""
    return [
        f"{kind} {name or 'itself'}: {one[kind].get(name)}, then {other[kind].get(name)}"
        for kind in one
        for name in sorted(one[kind].keys() | other[kind].keys())
        if one[kind].get(name) != other[kind].get(name)
    ]


def train_twice(folder: Path, arm: str, strategies: Sequence[Strategy] | None = None) -> list[Training]:
    """Train the smallest task, validate it, and train it again; the strategies of ``arm``, or those that are given."""
    config = compose(overrides(arm, task="micro"))
    task = config.task
    declared = task.declare()
    compile_ = Compile(
        config.compile.values() if strategies is None else strategies,
        whole=declared.whole,
        blocks=declared.blocks,
        parts=declared.parts,
        ragged=declared.ragged,
        save=False,
        verbose=False,
        measure_peak=False,
    )
    torch.manual_seed(0)
    module = task.build_module(max_steps=2 * STEPS)
    options: dict[str, Any] = {"default_root_dir": folder, "max_steps": STEPS}
    trainings = []
    for validates in (True, False):
        look, losses = Look(compile_), Losses()
        trainer = quiet_trainer(**options, limit_val_batches=0, callbacks=[compile_, look, losses])
        trainer.fit(module, task.build_data(seed=0))
        trainings.append(
            Training(
                record=compile_.record,
                report=copy.deepcopy(compile_.record.report),
                losses=losses.values,
                within=look.found,
                after=looked_at(module, trainer.optimizers),
            )
        )
        if validates:
            quiet_trainer(**options, callbacks=[compile_]).validate(module, task.build_data(seed=0), verbose=False)
    return trainings
