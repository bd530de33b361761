"""``explain_module``: each planted case is found at its line, with torch's hint; what torch handles by now is no alarm,
and nothing is left behind."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scripts.explain import Explanation
from scripts.explain.run import explain, explain_module, prepared
from strategies import Buckets, Cached, Modular, Optimizer, Part, Regional, Strategy, Whole
from tests.explain import planted
from tests.explain.planted import Trained, like, loader
from tests.trainer.ragged_modules import RAGGED, TextData, TextModel
from tests.trainer.runs import SMALLEST
from tests.trainer.test_in_process import AddsPadding
from trainer.config import compose
from trainer.telemetry.source_lines import line_at

Look = Callable[..., Explanation]
FILE = str(Path(planted.__file__).resolve())


def line_of(kind: type[nn.Module]) -> int:
    """Number of the line that says ``# planted``."""
    lines, first = inspect.getsourcelines(kind)
    return next(first + offset for offset, line in enumerate(lines) if "# planted" in line)


def at(where: str | None) -> tuple[str, int]:
    line = line_at(where)
    return str(Path(line.file).resolve()), line.number


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (planted.Prints, "reorderable_logging_functions"),
        (planted.Branch, "torch.where"),
        (planted.Hook, "capture_scalar_outputs"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_break_is_found_at_its_line_with_torchs_hint(looked: Look, kind: type[nn.Module], hint: str) -> None:
    explanation = looked(kind())
    found = [each for each in explanation.breaks if at(each.where) == (FILE, line_of(kind))]
    assert found, [each.where for each in explanation.breaks]
    (one,) = found
    assert hint in "".join(one.texts)
    if kind in (planted.Prints, planted.Branch):
        assert explanation.recompiles == [], "a break alone is no recompile"


@pytest.mark.parametrize(
    ("kind", "guard"),
    [
        (planted.EvalInside, "dropout"),
        (planted.GlobalVariable, "FACTOR"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_value_that_changes_is_found_at_its_line(looked: Look, kind: type[nn.Module], guard: str) -> None:
    explanation = looked(kind())
    assert explanation.breaks == []
    (one,) = explanation.unexpected
    assert guard in one.texts[0]
    assert at(one.where) == (FILE, line_of(kind))


def test_a_closure_over_what_changes_is_found_at_the_line_that_reads_it(looked: Look) -> None:
    (one,) = looked(planted.closure()).unexpected
    assert "factor" in one.texts[0]
    lines = Path(FILE).read_text().splitlines()
    assert at(one.where) == (FILE, 1 + next(index for index, line in enumerate(lines) if "# planted closure" in line))


def test_a_closure_in_an_attribute_is_found_where_torch_guards_it(looked: Look) -> None:
    found = [at(one.where) for one in looked(planted.ClosureAttribute()).unexpected]
    # Before 2.15 torch leaves the guard out, unless it is kept from skipping those of unchanged dictionaries.
    assert found == [(FILE, line_of(planted.ClosureAttribute))]


@pytest.mark.parametrize(
    ("batches", "guard"),
    [
        (like(2, 2, 2, 3), "size mismatch at index 0. expected 2, actual 3"),
        ([*like(2, 2, 2), *(batch.double() for batch in like(2))], "dtype mismatch. expected Float, actual Double"),
    ],
    ids=["shape", "dtype"],
)
def test_a_batch_that_differs_is_found_at_the_function_that_takes_it(
    looked: Look, batches: list[Any], guard: str
) -> None:
    class AnyType(planted.Planted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to(self.linear.weight.dtype))

    (one,) = looked(AnyType(), batches).unexpected
    assert guard in one.texts[0]
    assert at(one.where) == (str(Path(__file__).resolve()), AnyType.forward.__code__.co_firstlineno)


def test_keys_that_change_are_found(looked: Look) -> None:
    one_key, two_keys = {"a": like(2)[0]}, {"a": like(2)[0], "b": like(2)[0]}
    (one,) = looked(planted.ChangingKeys(), [one_key, two_keys]).unexpected
    assert "len(args[0])" in one.texts[0]
    assert at(one.where)[0] == FILE


@pytest.mark.parametrize("kind", [planted.NumPy, planted.InPlaceOnView], ids=lambda kind: kind.__name__)
def test_what_torch_traces_by_now_is_no_alarm(looked: Look, kind: type[nn.Module]) -> None:
    assert looked(kind()).problems == 0


@pytest.fixture
def small(edge: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Explanation]:
    """Explain a task at its smallest size; nothing may be written, and no setting of the process may change."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_float32_matmul_precision()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def look(*overrides: str, **options: Any) -> Explanation:
        given = [] if "compile.regional.backend=aot_eager" in overrides else ["compile.regional.backend=eager"]
        explanation = explain(compose(["task=micro", *SMALLEST["micro"], *overrides, *given]), **options)
        assert [file.name for file in tmp_path.iterdir() if file.name != "cache"] == []
        assert torch.get_float32_matmul_precision() == before
        return explanation

    return look


def test_a_task_that_compiles_is_no_problem(small: Callable[..., Explanation]) -> None:
    backend = "compile.regional.backend=aot_eager"
    explanation = small("compile=regional", "trainer.val_every_n_steps=100", backend, batches=4)
    assert explanation.batches == 4
    assert explanation.recompiles, "graphs of validation"
    assert explanation.problems == 0
    assert all(recompile.expected for recompile in explanation.recompiles)
    assert (explanation.task, explanation.strategies) == ("micro ragged", "regional")


def test_shapes_that_buckets_warms_are_no_problem(small: Callable[..., Explanation]) -> None:
    overrides = ("compile=[regional,buckets]", "compile.buckets.count=2", "task.pad_to=null")
    explanation = small(*overrides, "trainer.val_every_n_steps=0")
    assert explanation.problems == 0
    assert any("size mismatch" in each.texts[0] for each in explanation.recompiles)


@pytest.mark.parametrize("kind", [TextModel, AddsPadding])
def test_a_loss_that_padding_changes_is_noted(kind: type[TextModel]) -> None:
    strategies = [Buckets(multiple=64), Regional(backend="eager")]
    explanation = explain_module(kind(), TextData().train_dataloader(), strategies, batches=2, ragged=RAGGED)
    assert any("padding changes the loss" in note for note in explanation.notes) is (kind is AddsPadding)


def test_ragged_batches_of_an_epoch_are_a_problem_where_no_strategy_takes_care_of_them(
    small: Callable[..., Explanation],
) -> None:
    more = ("task.pad_to=null", "trainer.val_every_n_steps=0", "trainer.accumulate_grad_batches=8")
    explanation = small("compile=regional", *more)
    assert explanation.unexpected
    assert all("size mismatch" in text for recompile in explanation.unexpected for text in recompile.texts)


def test_copies_of_several_sizes_that_share_their_code_are_no_problem() -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(planted.Planted() for _ in range(2))
            self.blocks.append(planted.Planted())
            self.blocks[2].linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    strategies = [Regional(parts=[], backend="eager")]
    explanation = explain_module(Trained(Narrowing()), loader(like(2, 2)), strategies, blocks=["planted.blocks"])
    # The first copy's input needs no gradient; the last copy is narrower, and has code of its own.
    texts = "".join(text for one in explanation.recompiles for text in one.texts)
    assert "requires_grad" in texts
    assert "size mismatch" not in texts
    assert explanation.problems == 0


def test_a_module_keeps_its_class_keys_and_calls() -> None:
    module = Trained(planted.Planted())
    keys = list(module.state_dict())
    explain_module(module, loader(like(2)), [Whole(backend="eager")], whole=["planted"])
    assert list(module.state_dict()) == keys
    assert copy.deepcopy(module.planted)._compiled_call_impl is None, "torch drops compiled calls from copies"


def test_too_many_recompiles_are_a_failure_that_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.regions.RECOMPILE_LIMIT", 2)
    module, sizes = Trained(planted.Planted()), like(2, 3, 4, 5, 6)
    explanation = explain_module(module, loader(sizes), [Whole(dynamic=False, backend="eager")], whole=["planted"])
    assert any("recompile_limit" in failure for failure in explanation.failures)
    assert explanation.problems > len(explanation.failures)


@pytest.mark.parametrize(
    ("module", "strategies", "message"),
    [
        (nn.Linear(2, 2), [Whole()], "^explain_module: Linear is not a LightningModule$"),
        (Trained(nn.Linear(2, 2)), Whole(), r"^compile=Whole\(.*\) is not a list of strategies"),
    ],
)
def test_what_cannot_be_explained_is_refused(module: Any, strategies: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_module(module, [], strategies)


def test_an_error_in_the_users_code_is_not_swallowed() -> None:
    class Broken(planted.Planted):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(Exception, match="mine"):
        explain_module(Trained(Broken()), loader(like(2)), [Whole(backend="eager")], whole=["planted"])


@pytest.mark.parametrize(
    ("strategy", "without_gpu", "with_gpu"),
    [
        (Whole(mode="max-autotune", options={"combo_kernels": True}), Whole(backend="aot_eager"), None),
        (Whole(backend="eager"), Whole(backend="eager"), None),
        (Regional(fullgraph=True), Regional(backend="aot_eager", fullgraph=False), Regional(fullgraph=False)),
        (Optimizer(), Optimizer(backend="aot_eager"), Optimizer()),
        (
            Modular(parts={"a": Part(mode="reduce-overhead"), "b": Part(how="off", backend="eager")}),
            Modular(
                parts={
                    "a": Part(backend="aot_eager", fullgraph=False),
                    "b": Part(how="off", backend="eager", fullgraph=False),
                }
            ),
            None,
        ),
    ],
    ids=lambda value: value and value.name,
)
def test_without_a_gpu_another_backend_stands_in_for_inductor_and_what_belongs_to_it(
    strategy: Strategy, without_gpu: Strategy, with_gpu: Strategy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prepared([strategy]) == [without_gpu]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert with_gpu is None or prepared([strategy]) == [with_gpu]


def test_stores_are_neither_read_nor_written() -> None:
    assert [each.name for each in prepared([Whole(), Cached()])] == ["whole"]
