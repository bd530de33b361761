"""``compile_trainer``: the true ``transformers.Trainer`` trains under strategies as without them, and is measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from scripts import compare
from strategies import (
    Buckets,
    Checkpointing,
    CudaGraph,
    Dynamic,
    Modular,
    Optimizer,
    Part,
    Regional,
    Strategy,
    Whole,
)
from strategies.base import label
from tests.conftest import ROOT
from trainer.guards import ParityError
from trainer.loops.huggingface import compile_trainer
from trainer.telemetry.record import RunRecord

EAGER: dict[str, Any] = {"backend": "eager"}
LENGTH, WORDS = 8, 32


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=16, **ends, **rates)
    return GPT2LMHeadModel(config)


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=3, **sizes)
    )


def examples(count: int, labels: Callable[[Tensor, Tensor], Any]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - 2).long()
        found.append({"input_ids": words, "attention_mask": mask, "labels": labels(words, mask)})
    return found


TEXTS = examples(64, lambda words, mask: torch.where(mask.bool(), words, -100))
SENTENCES = examples(64, lambda words, mask: int(words[0]) % 3)


def build(
    folder: Path,
    model: nn.Module | None = None,
    data: Any = TEXTS,
    kind: type[Trainer] = Trainer,
    collate: Any = None,
    **arguments: Any,
) -> Trainer:
    given = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 2, "learning_rate": 1e-3}
    off: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(output_dir=str(folder), **{**off, **given, **arguments})
    return kind(model=model or gpt2(), args=args, train_dataset=data, eval_dataset=data[:8], data_collator=collate)


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(
    folder: Path, strategies: list[Strategy] | None = None, resume: str | None = None, **how: Any
) -> tuple[Trainer, RunRecord]:
    options = {name: how.pop(name) for name in ("ragged", "count") if name in how}
    trainer = build(folder, **how)
    compiled = compile_trainer(trainer, strategies or [], **{"warmup_steps": 2, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer, compiled.record


def bare(folder: Path, **how: Any) -> Trainer:
    trainer = build(folder, **how)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Trained without us, once for all that is held against it."""
    return bare(tmp_path_factory.mktemp("bare"))


def assert_same_training(trainer: Trainer, expected: Trainer, *, rtol: float = 1e-4) -> None:
    assert losses_of(trainer) == pytest.approx(losses_of(expected), rel=rtol)
    torch.testing.assert_close(
        dict(trainer.model.state_dict()), dict(expected.model.state_dict()), rtol=rtol, atol=max(1e-5, rtol / 10)
    )


STRATEGIES: dict[str, Callable[[], list[Strategy]]] = {
    "eager": list,
    "whole": lambda: [Whole(**EAGER)],
    "regional": lambda: [Regional(**EAGER)],
    "modular": lambda: [Modular(parts={"*.h": Part(how="regional", **EAGER)})],
    "dynamic": lambda: [Dynamic(), Regional(**EAGER)],
    "checkpointing": lambda: [Checkpointing(), Regional(**EAGER)],
    "optimizer": lambda: [Optimizer(**EAGER)],
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_causal_model_trains_as_without_us(tmp_path: Path, name: str, plain: Trainer) -> None:
    trainer, record = trained(tmp_path, STRATEGIES[name](), ragged=[("input_ids", 1)])
    assert_same_training(trainer, plain)
    assert (record.status, record.task, record.steps) == ("finished", "GPT2LMHeadModel", 6)
    assert record.steady_steps, "those that nothing was checked in"
    assert record.label == label(STRATEGIES[name]())
    assert record.tokens_per_second == pytest.approx(LENGTH * (record.samples_per_second or 0))
    assert record.padded_share == pytest.approx(2 / LENGTH)
    if name == "eager":
        assert record.graphs is record.audits is None
        return
    assert record.graphs
    assert record.graph_breaks == 0
    assert record.compile_seconds is not None
    if name != "optimizer":
        assert record.report["parity"]["verdict"] == "passed"
        assert (record.audits.verdict, record.audits.steps, record.audits.not_compared) == ("clean", [2, 4, 6], {})


def test_a_classifier_with_dropout_trains_as_without_us(tmp_path: Path) -> None:
    how: dict[str, Any] = {"data": SENTENCES, "gradient_accumulation_steps": 2, "bf16": True}
    trainer, record = trained(tmp_path, [Regional(**EAGER)], model=bert(), **how)
    assert_same_training(trainer, bare(tmp_path / "bare", model=bert(), **how), rtol=1e-2)
    assert (record.precision, record.regions, record.regions_compiled) == ("bf16-mixed", 2, 2)
    assert record.steps == 6, "of two micro-batches each"
    assert record.audits.verdict == "clean"


def test_an_epoch_that_accumulation_does_not_divide(tmp_path: Path) -> None:
    how: dict[str, Any] = {"data": TEXTS[:20], "gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    trainer, record = trained(tmp_path, [Optimizer(**EAGER)], **how)
    assert_same_training(trainer, bare(tmp_path / "bare", **how))
    assert record.steps == 6, "two of two micro-batches and one of one, twice"


# ---- checkpoints, evaluation, resuming -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("regional", "eager"), ("eager", "optimizer")])
def test_a_checkpoint_goes_on_under_other_strategies(tmp_path: Path, first: str, then: str) -> None:
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    expected = bare(tmp_path / "bare", **how)
    saving, record = trained(tmp_path / "run", STRATEGIES[first](), **how)
    assert_same_training(saving, expected)
    assert record.final_metrics["eval_loss"] == pytest.approx(expected.state.log_history[-2]["eval_loss"], rel=1e-4)
    assert record.pause_seconds, "evaluating and saving belong to no step"
    trainer, resumed = trained(
        tmp_path / "run", STRATEGIES[then](), resume=str(tmp_path / "run" / "checkpoint-3"), **how
    )
    assert (resumed.steps, resumed.resumed_from) == (6, str(tmp_path / "run" / "checkpoint-3"))
    torch.testing.assert_close(
        dict(trainer.model.state_dict()), dict(expected.model.state_dict()), rtol=1e-4, atol=1e-5
    )
    names = {name.removeprefix("_orig_mod.") for name in gpt2().state_dict()}
    assert set(trainer.model.state_dict()) == names


def test_a_second_training_of_one_trainer(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    compiled = compile_trainer(trainer, [Regional(**EAGER)], warmup_steps=2)
    for _ in range(2):
        trainer.train()
        assert (compiled.record.status, compiled.record.steps) == ("finished", 6)
    assert trainer.training_step.__func__ is Trainer.training_step
    assert trainer.evaluate()["eval_loss"] > 0


# ---- what is written -----------------------------------------------------------------------------------------------


def test_two_runs_compare_like_two_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("eager", "regional"):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / name / "logs"))
        trained(tmp_path / name, STRATEGIES[name](), report_to="tensorboard")
    capsys.readouterr()
    assert compare.main([str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("GPT2LMHeadModel\n")
    assert {"eager", "regional"} <= {line.split()[0] for line in table.splitlines() if line.split()}
    for name in ("eager", "regional"):
        events = EventAccumulator(str(tmp_path / name / "logs"), purge_orphaned_data=False)
        events.Reload()
        assert "usage/samples_per_second" in events.Tags()["scalars"]


def test_the_trainers_own_log_has_the_speed(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, [Regional(**EAGER)])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert logged["speed/steps_per_second"] > 0


@pytest.mark.slow
def test_the_script_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    script = page.partition("```python fit.py\n")[2].partition("```")[0]
    assert script.count("Regional()") == script.count("max_steps=60,") == 1
    script = script.replace("Regional()", 'Regional(backend="eager")').replace("max_steps=60,", "max_steps=12,")
    monkeypatch.setitem(sys.modules, "crucible", importlib.import_module("trainer.crucible"))
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(script, "docs/huggingface.md", "exec"), found)
    record = RunRecord.load(tmp_path / "outputs" / "gpt2-regional")
    assert (record.status, record.label, record.steps, record.regions_compiled) == ("finished", "regional", 12, 4)
    assert record.samples_per_second == found["compiled"].record.samples_per_second


# ---- what is refused, and what fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategies", "arguments", "message"),
    [
        ([Buckets()], {}, "buckets groups and pads batches"),
        ([CudaGraph()], {}, "cuda_graph captures whole steps"),
        ([Whole()], {"auto_find_batch_size": True}, "args.auto_find_batch_size=True"),
        ([Whole(), Regional()], {}, "'regional' and 'whole' both act on the module stage"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    tmp_path: Path, strategies: list[Strategy], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraph, "check", lambda self: None)  # there is no CUDA device
    trainer = build(tmp_path, **arguments)
    with pytest.raises(ValueError, match=message) as caught:
        compile_trainer(trainer, strategies)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", [Regional, Whole])
def test_what_is_compiled_already_is_left_to_that(tmp_path: Path, plain: Trainer, strategy: Any) -> None:
    compiled = gpt2()
    compiled.transformer.compile(backend="eager")
    for model, arguments, why in (
        (compiled, {}, "transformer is compiled by torch.compile already"),
        (gpt2(), {"torch_compile": True, "torch_compile_backend": "eager"}, " a torch.compile of your own"),
    ):
        torch._dynamo.reset()
        trainer, record = trained(tmp_path, [strategy(**EAGER)], model=model, **arguments)  # type: ignore[arg-type]
        assert losses_of(trainer) == pytest.approx(losses_of(plain))
        assert record.ended_in_eager
        assert all(why in reason for reason in record.eager_parts.values())


class WrongInTraining(nn.Module):
    """Its compiled form is not its eager one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.wrong = False

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.lin(x)
        if torch.compiler.is_compiling() and self.wrong:
            y = y * 1.5
        return {"loss": nn.functional.mse_loss(y, labels)}


def numbers() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(4, generator=generator)} for _ in range(32)
    ]


def test_a_wrong_compile_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    model = WrongInTraining()
    model.wrong = True
    trainer = build(tmp_path, model, numbers())
    compiled = compile_trainer(trainer, [Whole(**EAGER)], on_difference="fail")
    with pytest.raises(ParityError, match="not eager's"):
        trainer.train()
    record = RunRecord.load(tmp_path)
    assert (record.status, record.steps) == ("failed", 2)
    assert "not eager's" in (record.reason or "")
    assert compiled.record.status == "failed"
    assert trainer.training_step.__func__ is Trainer.training_step, "everything was given back"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_audit_finds_what_goes_wrong_later(tmp_path: Path, micro_batches: int) -> None:
    class GoesWrong(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            model.wrong = state.global_step >= 3

    how: dict[str, Any] = {"model": WrongInTraining(), "data": numbers(), "gradient_accumulation_steps": micro_batches}
    trainer = build(tmp_path, **how)
    trainer.add_callback(GoesWrong)
    compiled = compile_trainer(trainer, [Whole(**EAGER)])
    trainer.train()
    assert compiled.record.audits.verdict == "went eager"
    assert compiled.record.ended_in_eager
    assert trainer.state.global_step == 6


class Counting(Trainer):
    """A subclass that counts and logs in its own loss, and makes its inputs of examples, as those that generate do."""

    calls = prepared = 0

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.counted = {"losses": []}
        self.data_collator = list

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        return super()._prepare_inputs({name: torch.stack([one[name] for one in inputs]) for name in inputs[0]})

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        result = super().compute_loss(*given, **named)
        loss = result[0] if isinstance(result, tuple) else result
        self.counted["losses"].append(float(loss.detach()))
        self.log({"mine": float(self.calls)})
        return result


def test_a_subclass_sees_no_trace_of_what_is_run_apart(tmp_path: Path) -> None:
    trainer, record = trained(tmp_path, [Regional(**EAGER)], kind=Counting)
    expected = bare(tmp_path / "bare", kind=Counting)
    assert record.report["parity"]["verdict"] == "passed"
    assert (trainer.calls, trainer.prepared, len(trainer.counted["losses"])) == (6, 6, 6)
    assert trainer.counted["losses"] == pytest.approx(expected.counted["losses"], rel=1e-4)
    assert [entry["mine"] for entry in trainer.state.log_history if "mine" in entry] == [1, 2, 3, 4, 5, 6]


class OnItsOwn(Trainer):
    """A step of its own that takes batches as the collator makes them."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        words, labels = inputs
        loss = model.train()(input_ids=words, labels=labels).loss
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_of_ones_own_with_tuples_for_batches(tmp_path: Path) -> None:
    data = [(one["input_ids"], one["labels"]) for one in TEXTS]
    how: dict[str, Any] = {"kind": OnItsOwn, "data": data, "max_steps": 12}
    collate = lambda rows: tuple(map(torch.stack, zip(*rows, strict=True)))  # noqa: E731
    expected = bare(tmp_path / "bare", collate=collate, **how)
    trainer, record = trained(tmp_path, [Regional(**EAGER)], collate=collate, **how)
    assert_same_training(trainer, expected)
    assert (record.regions_compiled, record.steps) == (2, 12)
    assert record.report["parity"]["verdict"] == "passed"
