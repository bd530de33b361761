"""``buckets`` and ``dynamic`` on somebody else's data module: nothing lost, one batch of each shape first, and what
compiles after these a warning or an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from strategies import Buckets, Dynamic, Program, Ragged, Regional, Strategy
from strategies.base import Padding, edge_of
from strategies.padding import table_sizes
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.ragged_modules import RAGGED, TextData, TextModel, Texts, TextsWithLengths, collate, fit
from trainer.bucketed_loaders import known_lengths
from trainer.callback import Compile
from trainer.guards.recompiles import RecompileError, RecompileGuard


def with_(strategy: Strategy) -> Compile:
    return Compile([strategy], ragged=RAGGED, warmup_steps=1, save=False)


def train(data: Any = None, strategy: Strategy | None = None, **options: Any) -> tuple[TextModel, Compile]:
    compile_ = with_(Buckets(multiple=8, count=3) if strategy is None else strategy)
    return fit(data or TextData(), [compile_], **options), compile_


def test_training_batches_are_of_one_bucket_each_and_padded_to_its_edge() -> None:
    data = TextData()
    module, compile_ = train(data, max_steps=-1, max_epochs=1)
    report = compile_.record.report["buckets"]
    edges, of = report["edges"], data.train_set.lengths  # type: ignore[attr-defined]
    assert len(edges) == 3
    assert edges[-1] == -(-max(of) // 8) * 8
    lengths = {f"text {number}": length for number, length in enumerate(of)}
    assert {width for width, _, _ in module.trained} == set(edges)
    for width, names, _ in module.trained:
        assert len(names) == 4
        assert max(lengths[name] for name in names) <= width
    seen = [name for _, names, _ in module.trained for name in names]
    assert len(seen) == len(set(seen)) == 80 - report["left_out_each_epoch"]
    useful = sum(lengths[name] for name in seen)
    share = 1 - useful / sum(width * len(names) for width, names, _ in module.trained)
    assert report["seen_padded_share"] == pytest.approx(share)
    assert (report["unexpected_training_batches"], report["unexpected_validation_batches"]) == (0, 0)
    assert sum(report["examples"]) == 80
    assert report["batch_sizes"] == [4, 4, 4]


@pytest.mark.parametrize("count", [3, 39])
def test_every_example_is_trained_as_in_eager_the_last_ones_in_a_smaller_batch(count: int) -> None:
    def trained(*callbacks: Compile) -> TextModel:
        return fit(TextData(count=count), callbacks, max_steps=-1, max_epochs=2)

    eager, module = trained(), trained(compile_ := with_(Buckets(multiple=8, count=3)))
    assert [len(names) for _, names, _ in module.trained] == [len(names) for _, names, _ in eager.trained]
    for one in (eager, module):
        names = sorted(name for _, names, _ in one.trained for name in names)
        assert names == sorted(f"text {number}" for number in range(count) for _ in range(2))
    assert compile_.record.report["buckets"]["left_out_each_epoch"] == 0


def test_a_batch_has_the_loss_that_it_has_without_padding() -> None:
    data = TextData()
    module, _ = train(data, max_steps=1)
    width, names, loss = module.trained[0]
    plain = collate([data.train_set[int(name.split()[1])] for name in names])
    assert plain["tokens"].shape[1] < width
    L.seed_everything(0, verbose=False)
    assert loss == pytest.approx(float(TextModel().loss(plain).detach()), rel=1e-6)


@pytest.mark.parametrize("strategy", [Buckets(multiple=8, count=3), Dynamic()], ids=lambda strategy: strategy.name)
def test_validation_keeps_its_examples_batches_and_order(strategy: Strategy) -> None:
    plain = fit(TextData(), [], max_steps=2, val_check_interval=2)
    module, _ = train(strategy=strategy, max_steps=2, val_check_interval=2)
    assert [names for _, names, _ in module.validated] == [names for _, names, _ in plain.validated]
    assert [len(names) for _, names, _ in module.validated] == [4, 4, 3]
    pairs = list(zip(module.validated, plain.validated, strict=True))
    assert all(width % 8 == 0 and width >= before for (width, *_), (before, *_) in pairs)
    assert any(width > before for (width, *_), (before, *_) in pairs)


def test_a_validation_example_beyond_the_last_edge_is_padded_and_counted() -> None:
    data = TextData()
    data.val_set.texts[5] = torch.arange(1, 90)
    module, compile_ = train(data, max_steps=2, val_check_interval=2)
    assert [width for width, *_ in module.validated][1] == 96
    assert compile_.record.report["buckets"]["unexpected_validation_batches"] == 1
    assert any("1 validation batch was longer than the last edge" in note for note in compile_.record.notes)


def test_dynamic_keeps_the_training_order_and_pads_to_the_multiple() -> None:
    plain = fit(TextData(), [])
    module, compile_ = train(strategy=Dynamic(multiple=16))
    assert [names for _, names, _ in module.trained] == [names for _, names, _ in plain.trained]
    tables = table_sizes(module)
    assert [width for width, *_ in module.trained] == [edge_of(width, (), 16, tables) for width, *_ in plain.trained]
    assert sum(width % 16 == 0 for width, *_ in module.trained) > 1
    losses = [loss for *_, loss in module.trained]
    assert losses == pytest.approx([loss for *_, loss in plain.trained], rel=1e-5)
    assert compile_.record.report["dynamic"]["multiple"] == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_that_the_data_set_does_not_know_are_measured_once(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    known, _ = train(TextData())
    data = TextData(Texts, workers=workers)
    compile_ = with_(Buckets(multiple=8, count=3))
    measured = fit(data, [compile_])
    assert measured.trained == known.trained, "reading every example did not disturb the training's random numbers"
    assert fit(data, [compile_]).trained == known.trained
    if workers == 0:
        assert data.train_set.read < 2 * 80 + 40, "the second run measured nothing"


def test_lengths_that_a_data_set_has_are_one_for_each_example() -> None:
    texts = TextsWithLengths(10)
    assert known_lengths(Texts(3)) is None
    texts.lengths.append(1)
    with pytest.raises(ValueError, match=r"TextsWithLengths\.lengths must hold one length for each of 10 examples"):
        known_lengths(texts)


def test_a_trainer_that_only_validates_pads_by_the_data_at_hand() -> None:
    compile_ = with_(Buckets(multiple=8, count=2))
    module = TextModel()
    trainer = L.Trainer(accelerator="cpu", callbacks=[compile_], logger=False, enable_progress_bar=False)
    trainer.validate(module, datamodule=TextData(), verbose=False)
    assert {width for width, *_ in module.validated} <= set(compile_.program.padding.edges)


def test_after_a_training_the_trainer_has_its_own_methods_again() -> None:
    trainer = quiet_trainer(callbacks=[with_(Buckets(multiple=8, count=2))], max_steps=2, devices=1)
    before = set(vars(trainer.strategy)), set(vars(trainer.fit_loop))
    trainer.fit(TextModel(), datamodule=TextData())
    assert "process_dataloader" not in set(vars(trainer.strategy)) - before[0]
    assert "setup_data" not in set(vars(trainer.fit_loop)) - before[1]


def test_a_collate_function_that_pads_to_a_fixed_length_is_cut_to_the_edge() -> None:
    data = TextData()

    def fixed(items: Any) -> dict[str, Any]:
        batch = collate(items)
        missing = 64 - batch["tokens"].shape[1]
        return {
            **batch,
            "tokens": torch.nn.functional.pad(batch["tokens"], (0, missing)),
            "labels": torch.nn.functional.pad(batch["labels"], (0, missing), value=-100),
        }

    data._options["collate_fn"] = fixed
    module, compile_ = train(data)
    assert module.trained == train()[0].trained
    assert compile_.record.report["buckets"]["unexpected_training_batches"] == 0


def test_a_training_batch_longer_than_its_data_set_said_is_kept_whole_and_counted() -> None:
    data = TextData()
    data.train_set.lengths = [min(length, 8) for length in data.train_set.lengths]  # type: ignore[attr-defined]
    module, compile_ = train(data, max_steps=-1, max_epochs=1)
    report = compile_.record.report["buckets"]
    assert report["edges"] == [8]
    longer = [width for width, *_ in module.trained if width > 8]
    assert longer
    assert report["unexpected_training_batches"] == len(longer)
    assert any("longer than planned" in note for note in compile_.record.notes)


def test_more_examples_a_batch_where_they_are_short() -> None:
    module, compile_ = train(strategy=Buckets(multiple=8, count=3, tokens_per_batch=128), max_steps=-1, max_epochs=1)
    report = compile_.record.report["buckets"]
    rows = dict(zip(report["edges"], report["batch_sizes"], strict=True))
    assert len(set(rows.values())) > 1
    for width, names, _ in module.trained:
        assert len(names) == rows[width]
        assert width * len(names) <= 128


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(TextsWithLengths(8))  # type: ignore[call-overload]


OPTIONS: dict[str, Any] = {"collate_fn": collate}
TEXTS = TextsWithLengths(20)
REFUSED = {
    "IterableDataset": (DataLoader(Stream(), batch_size=4, **OPTIONS), "Stream cannot be grouped by length"),
    "sampler": (
        DataLoader(TEXTS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20), **OPTIONS),
        "draws its examples by a WeightedRandomSampler of its own",
    ),
    "batch sampler": (
        DataLoader(TEXTS, batch_sampler=[[0, 1], [2, 3]], **OPTIONS),  # type: ignore[arg-type]
        "draws its batches by a list",
    ),
    "no batches": (DataLoader(TEXTS, batch_size=None), "that make batches, not a DataLoader with batch_size=None"),
    "batches": ([collate([TEXTS[0]])], "takes torch DataLoaders that make batches, not a"),
    "several": ({"one": DataLoader(TEXTS), "two": DataLoader(TEXTS)}, "one training loader; this training has several"),
    "no field": (DataLoader(Texts(20), batch_size=4), "the batch .* has no 'tokens'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_buckets_would_break_is_refused_by_name(case: str) -> None:
    loader, message = REFUSED[case]
    data = TextData()
    data.train_dataloader = lambda: loader  # type: ignore[method-assign]
    if case == "no field":
        loader.collate_fn = list
    with pytest.raises(ValueError, match=message):
        train(data, max_steps=2)


def test_a_loader_that_lightning_reloads_every_epoch_is_grouped_again() -> None:
    once, _ = train(max_steps=-1, max_epochs=2)
    reloaded, compile_ = train(max_steps=-1, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert reloaded.trained == once.trained
    assert compile_.record.report["buckets"]["drawn_batches"] == len(once.trained) // 2


def test_the_users_own_loader_stays_as_it_was() -> None:
    data = TextData()
    loaders = data.train_dataloader(), data.val_dataloader()
    data.train_dataloader, data.val_dataloader = (lambda: loaders[0]), (lambda: loaders[1])  # type: ignore[method-assign]
    first, _ = train(data, max_steps=2, val_check_interval=2)
    assert [loader.collate_fn for loader in loaders] == [collate, collate]
    plain = fit(data, [], max_steps=2, val_check_interval=2)
    assert plain.trained != first.trained
    assert plain.validated != first.validated


@pytest.mark.parametrize("tokens", [None, 160])
@pytest.mark.parametrize("epochs", [False, True], ids=["by steps", "by epochs"])
def test_a_resumed_run_goes_on_with_the_same_batches_and_losses(
    tmp_path: Path, epochs: bool, tokens: int | None
) -> None:
    def run(folder: Path, resume: Path | None = None) -> list[Any]:
        checkpoints = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        ends = ModelCheckpoint(folder / "ends", filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
        compile_ = with_(Buckets(multiple=8, count=3, tokens_per_batch=tokens))
        length = {"max_steps": -1, "max_epochs": 3} if epochs else {"max_steps": 18, "max_epochs": -1}
        options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 0, **length}
        return fit(TextData(count=24), [compile_, checkpoints, ends], resume=resume, **options).trained

    whole = run(tmp_path / "a")
    saved = len(whole)
    assert saved == 18
    assert len({(width, len(names)) for width, names, _ in whole}) == 3
    for step in (1, 5, 6, 7, 11, 12, 13, 17):
        resumed = run(tmp_path / f"b{step}", tmp_path / "a" / f"step={step}.ckpt")
        assert resumed == whole[step:], step
    # Without epochs to count, Lightning itself takes one batch too many after a checkpoint of an epoch's end.
    for end in (0, 1) if epochs else ():
        resumed = run(tmp_path / f"c{end}", tmp_path / "a" / "ends" / f"epoch={end}.ckpt")
        assert resumed == whole[(end + 1) * saved // 3 :], end
    twice = run(tmp_path / "d", tmp_path / "b7" / "step=15.ckpt")
    assert twice == whole[15:]


def test_a_checkpoint_of_buckets_goes_on_without_them_and_the_other_way_round(tmp_path: Path) -> None:
    def run(folder: Path, callbacks: list[L.Callback], resume: Path | None = None) -> TextModel:
        checkpoints = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return fit(TextData(), [*callbacks, checkpoints], resume=resume, enable_checkpointing=True, max_steps=6)

    run(tmp_path / "plain", [])
    run(tmp_path / "buckets", [with_(Buckets())])
    assert len(run(tmp_path / "1", [with_(Buckets())], tmp_path / "plain" / "step=4.ckpt").trained) == 2
    assert len(run(tmp_path / "2", [], tmp_path / "buckets" / "step=4.ckpt").trained) == 2


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
    assert "test_bucketed_loaders.py" in str(it.value)
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
