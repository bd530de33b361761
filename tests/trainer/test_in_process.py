"""``crucible.compare``: arms start alike and take turns, a failure keeps the rest, nothing stays changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader, TensorDataset

from scripts import compare as command
from strategies import Buckets, Regional, Strategy, Whole
from tests.trainer.ragged_modules import RAGGED, TextData, TextModel
from trainer.report.comparison import WorkloadComparison
from trainer.report.runs import find
from trainer.sweep.in_process import compare
from trainer.telemetry.record import RunRecord

SHORT: dict[str, Any] = {"seconds": 0.02, "rounds": 2, "trainer": {"accelerator": "cpu"}}


class Blocks(L.LightningModule):
    """Two blocks alike; every copy adds what it saw to one list."""

    def __init__(self, seen: list[Any] | None = None, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(blocks)))
        self._seen = [[]] if seen is None else seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Blocks:
        self._seen.append([])
        made = Blocks(self._seen, len(self.blocks))
        made.load_state_dict(self.state_dict())
        return made

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._seen[-1].append((round(batch[0].sum().item(), 3), outputs["loss"].item()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fails(Whole):
    def apply(self, program: Any) -> None:
        raise RuntimeError("this arm does not work")


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(256.0).view(64, 4) / 256), batch_size=8, shuffle=True, **options)


def rows(found: WorkloadComparison) -> list[str]:
    return [row.cell.arm for row in found.rows]


def records(found: WorkloadComparison) -> list[RunRecord]:
    """In the order of the turns."""
    runs = [run for row in found.rows for run in row.cell.runs]
    return [run.record for run in sorted(runs, key=lambda run: int(run.directory.name.partition("-")[0]))]


@pytest.fixture(scope="module", autouse=True)
def turns_last() -> Iterator[None]:
    """A busy machine would end an arm's turn early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.sweep.in_process.LONGEST", 1e6)
        yield


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkloadComparison, Blocks, Path]:
    out, module = tmp_path_factory.mktemp("out"), Blocks()
    arms: list[Strategy] = [Regional(backend="eager"), Whole(backend="eager")]
    found = compare(module, loader(generator=torch.Generator().manual_seed(3)), arms, out=out, **SHORT)
    return found, module, out


def test_arms_take_turns_over_the_same_steps(compared: tuple[WorkloadComparison, Blocks, Path]) -> None:
    runs = records(compared[0])
    labels = ["eager", "regional", "whole"]
    assert [(record.label, record.round, record.start) for record in runs] == [
        *((label, 1, "cold") for label in labels),
        *((label, 2, "warm") for label in labels),
    ]
    assert {record.status for record in runs} == {"finished"}
    assert len({record.steps for record in runs}) == 1
    assert all(record.steady_step_seconds_mean for record in runs)


def test_arms_start_from_the_same_weights_data_and_random_numbers(
    compared: tuple[WorkloadComparison, Blocks, Path],
) -> None:
    found, module, _ = compared
    turns = [losses for losses in module._seen if len(losses) > 5][-6:]
    assert len(turns) == 6
    batches, losses = ([[each[part] for each in turn] for turn in turns] for part in (0, 1))
    assert batches == [batches[0]] * 6
    assert losses == [pytest.approx(losses[0])] * 6, "with dropout"
    assert found.unlike == []


def test_the_answer_is_a_table_a_verdict_and_records_that_the_commands_read(
    compared: tuple[WorkloadComparison, Blocks, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, out = compared
    assert rows(found) == ["eager", "regional (backend=eager)", "whole (backend=eager)"]
    assert found.verdict
    assert len(find([out])) == 6
    with pytest.raises(ValueError, match="holds runs already"):
        compare(Blocks, loader(), [], out=out)
    assert command.main([str(out)]) == 0
    assert "Blocks" in capsys.readouterr().out


def test_everything_is_afterwards_as_it_was() -> None:
    module, generator = Blocks(), torch.Generator().manual_seed(7)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random, drawn, environment = torch.get_rng_state(), generator.get_state(), dict(os.environ)
    settings = torch.get_float32_matmul_precision(), torch.is_grad_enabled(), signal.getsignal(signal.SIGINT)
    counter = CompileCounter()
    own = torch.compile(lambda x: 2 * x, backend=counter)
    own(torch.ones(3))
    found = compare(module, loader(generator=generator), [Whole(backend="eager")], quiet=True, **SHORT)
    own(torch.ones(3))
    assert counter.frame_count == 1, "what was compiled before is there"
    assert [one.graphs for one in records(found) if one.label == "whole"] == [1, 1], "each turn starts from nothing"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(drawn, generator.get_state())
    assert dict(os.environ) == environment
    assert settings == (
        torch.get_float32_matmul_precision(), torch.is_grad_enabled(), signal.getsignal(signal.SIGINT)
    )  # fmt: skip
    assert module._compiled_call_impl is None
    assert module._trainer is None


def test_an_arm_that_fails_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(Blocks, loader(), [Fails(), Regional(backend="eager")], **SHORT)
    failed = [one for one in records(found) if one.status == "failed"]
    assert [record.reason for record in failed] == ["RuntimeError: this arm does not work"], "and it has no second turn"
    assert rows(found)[:2] == ["eager", "whole"]
    assert any("this arm does not work" in flag for flag in found.rows[1].flags)
    assert "whole, round 1 of 2: failed: RuntimeError: this arm does not work" in capsys.readouterr().out
    assert sum(one.status == "finished" for one in records(found)) == 4


def test_a_comparison_that_ctrl_c_ends_leaves_a_record_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Blocks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 8:
                raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning ignores any further Ctrl-C
    with pytest.raises(SystemExit):
        compare(Stopped, loader(), [Whole(backend="eager")], out=tmp_path, quiet=True, **SHORT)
    assert [(run.record.status, run.record.steps) for run in find([tmp_path])] == [("interrupted", 8)]
    command.main([str(tmp_path)])
    assert "eager: interrupted after 8 steps" in capsys.readouterr().out


def test_arms_without_a_steady_step_are_not_said_to_be_missing() -> None:
    found = compare(Blocks(), DataLoader([]), [Whole(backend="eager")], quiet=True, **SHORT)  # type: ignore[arg-type]
    assert len(rows(found)) == 2
    assert found.verdict == "eager has no steady steps, so there is nothing to compare; longer runs have some"


def test_what_eager_raises_is_raised() -> None:
    class Wrong(Blocks):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise IndexError("of the module")

    with pytest.raises(IndexError, match="of the module"):
        compare(Wrong, loader(), [Whole(backend="eager")], quiet=True, **SHORT)


def test_without_blocks_regional_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.sweep.in_process import _arms

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arms, note = _arms(None, Blocks(blocks=1), {}, "auto")
    assert [[one.name for one in arm] for arm in arms] == [[], ["whole"]]
    assert note == "regional is left out: no repeated blocks were found; blocks=[...] names them"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arms, note = _arms(None, Blocks(), {}, "auto")
    assert [[one.name for one in arm] for arm in arms] == [[], ["regional"], ["whole"], ["regional", "cuda_graph"]]
    assert not note


def test_data_that_does_not_repeat_is_noted() -> None:
    class Ever(torch.utils.data.Dataset[Tensor]):
        drawn = 0

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> list[Tensor]:
            Ever.drawn += 1
            return [torch.full((4,), Ever.drawn / 1e4)]

    found = compare(Blocks, DataLoader(Ever(), batch_size=8), [], quiet=True, **SHORT)
    assert found.unlike == ["first batch: the order of the data does not repeat under one seed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": {"max_steps": 5}}, r"trainer\['max_steps'\] is for the comparison to set"),
        ({"trainer": {"devices": 2}}, r"trainer\['devices'\]=2 must be 1"),
        ({"seconds": 0}, "seconds=0 must be above 0"),
        ({"rounds": 0}, "rounds=0 at least 1"),
        ({"module": torch.nn.Linear(2, 2)}, "Linear is neither a LightningModule nor a function that makes one"),
        ({"module": None}, "NoneType is neither"),
        ({"strategies": Regional()}, r"strategies=Regional\(.*\) is not a list of arms, such as \[Regional\(\), \["),
        ({"second": 3}, "second is not an argument; near: seconds"),
        ({"strategies": ["regional"]}, "compile='regional' is not a list of strategies"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(**{"module": Blocks, "data": loader(), **options})


@pytest.mark.slow
def test_inductor_compiles_each_arm_from_caches_of_its_own(tmp_path: Path) -> None:
    usual = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    found = compare(Blocks(), loader(), [Whole(options={"fallback_random": True})], quiet=True, **SHORT)
    cold, warm = [one for one in records(found) if one.label == "whole"]
    assert (cold.cache, cold.cache_hits, warm.cache, warm.cache_misses) == ("cold", 0, "warm", 0)
    assert cold.graphs
    assert cold.cache_misses
    assert warm.cache_hits
    assert warm.compile_seconds < cold.compile_seconds
    losses = [one.losses for one in records(found)]
    assert losses == [[[step, pytest.approx(loss, rel=1e-5)] for step, loss in losses[0]]] * 4, "eager's"
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == usual


class AddsPadding(TextModel):
    """Adds up over all positions, be they padding or not."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.embed(batch["tokens"]).square().mean()


@pytest.mark.parametrize("kind", [TextModel, AddsPadding])
def test_a_loss_that_padding_changes_is_said(kind: type[TextModel], capsys: pytest.CaptureFixture[str]) -> None:
    arm = [Buckets(multiple=64), Regional(backend="eager")]
    data = TextData().train_dataloader()
    compare(kind(), data, [arm], **{**SHORT, "rounds": 1}, ragged=RAGGED)
    assert ("buckets+regional: padding changes the loss" in capsys.readouterr().out) is (kind is AddsPadding)
