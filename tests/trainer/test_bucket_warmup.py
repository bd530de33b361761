"""Warming: a training begins with one batch of each shape; whatever compiles after these is a warning or an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import Buckets, Program, Ragged, Regional
from strategies.base import Padding
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.guards.recompiles import RecompileError, RecompileGuard

LENGTHS = [3, 4, 8, 7, 4, 2, 8, 6, 3, 4, 5, 8, 4, 1, 7, 8]


class Words(nn.Module):
    """A block for words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.linear(x_BLD)


class Tagger(L.LightningModule):
    """Texts of ragged length in, one number a text out."""

    def __init__(self, *, surprise: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Words() for _ in range(2))
        self.statistics = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 1)
        self.widths: list[int] = []
        self.surprise = surprise

    def loss(self, batch: Any) -> Tensor:
        (tokens_BL,) = batch
        x_BLD = self.words(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        known_BL1 = (tokens_BL > 0).unsqueeze(-1).float()
        mean_BD = (x_BLD * known_BL1).sum(1) / known_BL1.sum(1)
        return self.head(self.statistics(mean_BD)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.widths.append(batch[0].shape[1])
        if self.global_step == self.surprise:
            batch = [nn.functional.pad(batch[0], (0, 3))]
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class TaggerByHand(Tagger):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


def together(texts: list[tuple[Tensor]]) -> tuple[Tensor]:
    return (nn.utils.rnn.pad_sequence([text[0] for text in texts], batch_first=True),)


def trained(
    folder: Path,
    callback: Compile,
    *,
    module: Tagger | None = None,
    surprise: int | None = None,
    lengths: list[int] = LENGTHS,
    **options: Any,
) -> Tagger:
    L.seed_everything(0, verbose=False)
    module = module or Tagger(surprise=surprise)
    texts = [(torch.randint(1, 11, (length,)),) for length in lengths]
    options = {"max_steps": 12, "val_check_interval": 4, "check_val_every_n_epoch": None, **options}
    trainer = quiet_trainer(
        default_root_dir=folder, callbacks=[callback], log_every_n_steps=2, num_sanity_val_steps=0, **options
    )
    train = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=together)  # type: ignore[arg-type]
    trainer.fit(module, train, DataLoader(texts[:6], batch_size=4, collate_fn=together))  # type: ignore[arg-type]
    return module


def callback(*, warm: bool = True, on_recompile: str = "fail", **options: Any) -> Compile:
    buckets = Buckets(edges=[4, 8], multiple=4, warm=warm, on_recompile=on_recompile)
    regional = Regional(backend="aot_eager", blocks=["layers"])
    return Compile([regional, buckets], ragged=[(0, 1)], **options)


@pytest.mark.parametrize("kind", [Tagger, TaggerByHand])
def test_every_shape_comes_first_and_nothing_compiles_after_them(kind: type[Tagger], tmp_path: Path) -> None:
    compile_ = callback()
    module = trained(tmp_path, compile_, module=kind())
    assert module.widths[:2] == [8, 4]
    assert compile_.record.report["warming"]["shapes"] == ["4 x 8", "4 x 4"]
    assert {event.step for event in compile_.record.events if event.phase == "training"} <= {0, 1, 2, 3}
    assert compile_.record.steps == 12


def test_a_recompile_after_that_is_an_error_that_says_where_and_why(tmp_path: Path) -> None:
    compile_ = callback()
    said = r"^Buckets\(on_recompile=\"fail\"\): .*in training step 9: .*(mismatch|grad_mode).*\(.*:\d+ Words"
    with pytest.raises(RecompileError, match=said) as it:
        trained(tmp_path, compile_, surprise=8)
    assert "test_bucket_warmup.py" in str(it.value)
    assert len(str(it.value).splitlines()) == 1
    assert compile_.record.steps == 9


def test_or_a_warning_that_is_recorded_once(tmp_path: Path) -> None:
    compile_ = callback(on_recompile="warn")
    with pytest.warns(
        UserWarning, match=r"on_recompile=\"warn\"\): compiled after all planned shapes of batches had come"
    ):
        trained(tmp_path, compile_, surprise=8)
    assert compile_.record.steps == 12
    assert len([note for note in compile_.record.notes if "compiled after all planned shapes" in note]) == 1
    assert compile_.record.report["warming"]["recompiles_after"] == 1


# ---- the guard alone -------------------------------------------------------------------------------------------------


class Compiler:
    """What the guard reads of the compiler's monitor."""

    def __init__(self) -> None:
        self.compilations, self.events, self.reports_recompiles = 0, list[Any](), True

    def collect(self) -> None: ...


class Guarded:
    """A guard of two edges with batches of four rows, and a smaller last one."""

    def __init__(self) -> None:
        self.compiler: Any = Compiler()
        padding = Padding(name="buckets", ragged=(Ragged("0", 1),), edges=(4, 8), on_recompile="fail")
        padding.batch_sizes = {4: (4, 2), 8: (4,)}
        loop: Any = SimpleNamespace(steps_done=0)
        self.guard = RecompileGuard(padding, Program(module=nn.Identity()), loop, self.compiler)

    def train(self, width: int, *, rows: int = 4, compiles: bool = False, stepped: bool = True) -> None:
        self.guard.before([torch.zeros(rows, width)])
        self.compiler.compilations += compiles
        self.guard.after(stepped=stepped)

    def validate(self, width: int, *, rows: int = 4, compiles: bool = False) -> None:
        self.guard.before_evaluation([torch.zeros(rows, width)])
        self.compiler.compilations += compiles
        self.guard.after_evaluation()


def test_the_first_batches_of_each_planned_shape_may_compile() -> None:
    one = Guarded()
    for width in (8, 8, 8, 4, 4):
        one.train(width, compiles=True)
    assert not one.compiler.reports_recompiles, "a line for each planned shape says nothing new"
    one.train(4, rows=2, compiles=True)
    one.train(4, rows=2, compiles=True)
    with pytest.raises(RecompileError):
        one.train(4, rows=2, compiles=True)


def test_a_validation_may_compile_once() -> None:
    one = Guarded()
    for width in (4, 8, 11, 4, 4):
        one.validate(width, compiles=True)
    one.guard.validated()
    one.validate(8, compiles=True)
    one.validate(4, rows=3, compiles=True)
    for width in (4, 12):
        with pytest.raises(RecompileError, match="in the validation after step 0"):
            one.validate(width, compiles=True)
