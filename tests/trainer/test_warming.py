"""Warming: every shape of batch compiled before the first step without a trace, and a lock on the compiler after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import Buckets, Regional
from tests.trainer.guarded import Noisy
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.guards.preflight import RecompileError

LENGTHS = [3, 4, 8, 7, 4, 2, 8, 6, 3, 4, 5, 8, 4, 1, 7, 8]


class Words(nn.Module):
    """A block for words with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.dropout(self.linear(x_BLD))


class Tagger(L.LightningModule):
    """Texts of ragged length in, one number a text out."""

    def __init__(self, *, surprise: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Words() for _ in range(2))
        self.statistics = Noisy(0.3)
        self.head = nn.Linear(8, 1)
        self.losses: list[float] = []
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
        if self.surprise and self.global_step == 2:
            batch = [torch.nn.functional.pad(batch[0], (0, 3))]
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def together(texts: list[tuple[Tensor]]) -> tuple[Tensor]:
    return (nn.utils.rnn.pad_sequence([text[0] for text in texts], batch_first=True),)


def trained(folder: Path, callback: Compile, *, surprise: bool = False, lengths: list[int] = LENGTHS) -> Tagger:
    L.seed_everything(0, verbose=False)
    module = Tagger(surprise=surprise)
    texts = [(torch.randint(1, 11, (length,)),) for length in lengths]
    trainer = quiet_trainer(
        max_steps=6,
        default_root_dir=folder,
        callbacks=[callback],
        log_every_n_steps=2,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    train = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=together)  # type: ignore[arg-type]
    trainer.fit(module, train, DataLoader(texts[:6], batch_size=4, collate_fn=together))  # type: ignore[arg-type]
    return module


def callback(*, warm: bool, on_recompile: str = "fail", **options: Any) -> Compile:
    buckets = Buckets(edges=[4, 8], multiple=4, warm=warm, on_recompile=on_recompile)
    regional = Regional(backend="aot_eager", blocks=["layers"])
    return Compile([regional, buckets], ragged=[(0, 1)], **options)


def test_every_shape_is_compiled_before_the_first_step_and_none_after_it_without_a_trace(tmp_path: Path) -> None:
    cold = trained(tmp_path, callback(warm=False, parity="off"))
    torch._dynamo.reset()
    compile_ = callback(warm=True)
    warm = trained(tmp_path, compile_)
    assert warm.losses == cold.losses
    for (name, tensor), other in zip(warm.state_dict().items(), cold.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    shapes = compile_.record.report["warming"]["shapes"]
    training, validation = ["training 4 x 8", "training 4 x 4"], ["4 x 8", "4 x 4", "2 x 8", "2 x 4"]
    assert shapes == [*training, *(f"validation {shape}" for shape in validation)]
    assert compile_.record.graphs == len(shapes), "one graph each, shared by the blocks"
    assert {event.phase for event in compile_.record.events} == {"preflight"}
    assert compile_.record.steady_steps == 1, "warm-up steps are counted as ever"


def test_a_smaller_last_batch_is_warmed_too_and_without_a_comparison(tmp_path: Path) -> None:
    compile_ = callback(warm=True, parity="off")
    trained(tmp_path, compile_, lengths=[*LENGTHS, 3, 2])
    shapes = compile_.record.report["warming"]["shapes"]
    assert shapes[:3] == ["training 4 x 8", "training 4 x 4", "training 2 x 4"]
    assert compile_.record.graphs == len(shapes)


def test_a_recompile_after_warming_is_an_error_that_says_where_and_why(tmp_path: Path) -> None:
    compile_ = callback(warm=True)
    said = r"on_recompile=fail: .*in training step 3: .*expected [48], actual 7.*forward\)"
    with pytest.raises(RecompileError, match=said) as it:
        trained(tmp_path, compile_, surprise=True)
    assert "test_warming.py" in str(it.value)
    assert len(str(it.value).splitlines()) == 1
    assert compile_.record.steps == 3


def test_or_a_warning_that_is_recorded_once(tmp_path: Path) -> None:
    compile_ = callback(warm=True, on_recompile="warn")
    with pytest.warns(UserWarning, match="on_recompile=warn: compiled again after all shapes were warmed"):
        trained(tmp_path, compile_, surprise=True)
    assert compile_.record.steps == 6
    assert len([note for note in compile_.record.notes if "compiled again" in note]) == 1
    assert compile_.record.report["warming"]["recompiles_after"] == 1


def test_without_warming_there_is_no_lock(tmp_path: Path) -> None:
    compile_ = callback(warm=False)
    trained(tmp_path, compile_, surprise=True)
    assert compile_.record.steps == 6
    assert "warming" not in compile_.record.report
