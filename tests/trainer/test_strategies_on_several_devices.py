"""Every compile strategy under DDP and FSDP2, on two processes: it trains as one process would, or leaves itself out
with a note. ``HOLDS`` says which, and docs/distributed.md shows the same table."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.conftest import ROOT
from tests.processes import Pair
from tests.strategies.modules import Block
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.ragged_modules import RAGGED, TextsWithLengths, collate

pytestmark = pytest.mark.xdist_group("two_processes")

STEPS = 6
"""At most an epoch."""
DEVICES = ("ddp", "fsdp2")
YES, OUT, ON_A_GPU = "yes", "left out, with a note", "on CUDA devices"
HOLDS: dict[str, tuple[str, str]] = {
    "eager": (YES, YES),
    "regional": (YES, YES),
    "whole": (YES, YES),
    "modular": (YES, YES),
    "dynamic": (YES, YES),
    "buckets": (YES, YES),
    "checkpointing": (YES, YES),
    "cached": (YES, YES),
    "optimizer": (YES, OUT),
    "cuda_graph": (ON_A_GPU, ON_A_GPU),
    "full_stack": (YES, YES),
    "auto": (YES, YES),
    "debug": (YES, YES),
}
"""Under DDP and under FSDP2."""
MORE: dict[str, tuple[str, ...]] = {
    "optimizer": ("+compile.modular.parts.net={how:regional,backend:eager}",),
    "auto": ("compile.auto.remember=false", "compile.auto.candidates=[regional]", "compile.auto.planned_steps=1000000"),
    "full_stack": (
        *(f"compile.{name}.backend=eager" for name in ("regional", "optimizer")),
        "compile.buckets.count=2",
        "compile.buckets.multiple=8",
    ),
}
WITH: dict[str, tuple[str, ...]] = {
    "checkpointing": ("dynamic", "regional"),
    "optimizer": ("modular",),
}
"""What is trained together with an arm."""
WITHIN: dict[str, str] = {
    **dict.fromkeys(("buckets", "cached", "cuda_graph"), "full_stack"),
    "debug": "regional",
    **{arm: holder for holder, arms in WITH.items() for arm in arms if arm not in ("regional", "whole")},
}
"""Arms that are not trained by themselves: what is trained holds them."""


def padded_to_one_width(items: Any) -> dict[str, Any]:
    """So that nothing is compiled again for symbolic shapes."""
    batch = collate(items)
    for name, value in (("tokens", 0), ("labels", -100)):
        batch[name] = nn.functional.pad(batch[name], (0, 64 - batch[name].shape[1]), value=value)
    return batch


class Texts(nn.Module):
    """Predicts each token from itself through three blocks; the loss of a batch is the mean of its texts' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 100)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x_BSD = self.embed(tokens)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        losses_BS = nn.functional.cross_entropy(
            self.head(x_BSD).transpose(1, 2), labels, ignore_index=-100, reduction="none"
        )
        return (losses_BS.sum(1) / (labels != -100).sum(1)).mean()


class Module(L.LightningModule):
    """Remembers losses, widths and names of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Texts()
        self.kept: list[Tensor] = []
        self.seen: list[tuple[int, list[str]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch["tokens"], batch["labels"])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs["loss"])
        self.seen.append((batch["tokens"].shape[1], batch["names"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


def new_module() -> Module:
    L.seed_everything(0, verbose=False)
    return Module()


def strategies_of(arm: str) -> list[Any]:
    """What ``compile=<arm>`` stands for, traced but not compiled."""
    from strategies import STRATEGIES
    from trainer.config import compose

    name = f"[{','.join(WITH[arm])},{arm}]" if arm in WITH else arm
    backends = [
        f"compile.{one}.backend={'aot_eager' if arm == 'regional' else 'eager'}"
        for one in name.strip("[]").split(",")
        if one in STRATEGIES and "backend" in STRATEGIES[one].__dataclass_fields__
    ]
    return list(compose(["task=micro", f"compile={name}", *backends, *MORE.get(arm, ())]).compile.values())


def lightning_strategy(name: str) -> Any:
    if name == "ddp":
        from trainer.loops.ddp import DDP

        return DDP()
    from trainer.loops.fsdp2 import FSDP2

    return FSDP2()


def trained(arm: str, strategies: list[Any], name: str) -> dict[str, Any]:
    """What one rank has to say about one arm."""
    from trainer.callback import Compile

    torch._dynamo.reset()
    module = new_module()
    compile_ = Compile(copy.deepcopy(strategies), whole=["net"], ragged=RAGGED, verbose=False, save=False)
    trainer = quiet_trainer(
        devices=2,
        strategy=lightning_strategy(name),
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=0.5,
        callbacks=[compile_],
    )
    ragged = arm in ("checkpointing", "full_stack")
    trainer.fit(
        module, DataLoader(TextsWithLengths(44), batch_size=4, collate_fn=collate if ragged else padded_to_one_width)
    )
    record = compile_.record
    weights = {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for key, value in module.state_dict().items()
    }
    return {
        "steps": trainer.global_step,
        "losses": [float(loss) for loss in module.kept],
        "seen": module.seen,
        "weights": weights,
        "regions": (record.regions_compiled, record.regions),
        "graphs": record.graphs,
        "notes": list(record.notes),
        "parity": record.report.get("parity", {}).get("verdict"),
        "why": record.report.get("parity", {}).get("reason"),
        "audits": None if record.audits is None else (record.audits.verdict, record.audits.reason),
        "ended_in_eager": record.ended_in_eager,
        "optimizer": record.report.get("optimizer", {}),
        "auto": record.report.get("auto"),
    }


def under_each(arms: dict[str, list[Any]], folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Each arm under each strategy of Lightning."""
    from strategies import STRATEGIES, Regional
    from trainer.auto import chooser

    os.environ["XDG_CACHE_HOME"] = str(folder / os.environ["RANK"])
    chooser.STRATEGIES = {**STRATEGIES, "regional": lambda: Regional(backend="eager")}  # type: ignore[dict-item]
    return {
        (arm, name): trained(arm, strategies, name)
        for arm, strategies in arms.items()
        for name in (DEVICES if arm != "whole" else DEVICES[:1])
    }


def of_one_process(seen: list[list[tuple[int, list[str]]]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that trains on what all have ``seen``, by hand and without a compiler."""
    module, texts = new_module(), TextsWithLengths(44)
    optimizer: Any = module.configure_optimizers()
    losses = []
    for shares in zip(*seen, strict=True):
        batch = collate([texts[int(name.split()[1])] for _, names in shares for name in names])
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module.state_dict()


TRAINED = [arm for arm in HOLDS if arm not in WITHIN]


def test_what_is_not_trained_by_itself_is_in_what_is() -> None:
    names = {arm: {strategy.name for strategy in strategies_of(arm)} for arm in ("debug", *TRAINED)}
    assert names["debug"] == names["regional"]
    assert all(arm in names[holder] for arm, holder in WITHIN.items() if arm != "debug")


@pytest.mark.parametrize("arms", [TRAINED[number::2] for number in range(2)], ids=", ".join)
def test_a_strategy_trains_as_one_process_on_the_whole_batch(
    arms: list[str], pair: Pair, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ranks = pair(under_each, {arm: strategies_of(arm) for arm in arms}, tmp_path)
    for arm, name in ranks[0]:
        with subtests.test(arm=arm, strategy=name):
            first, second = (rank[arm, name] for rank in ranks)
            it_trains_as_one_process(first, second)
            for rank in (first, second):
                for each in (arm, *WITH.get(arm, ())):
                    the_record_says(each, HOLDS[each][DEVICES.index(name)], rank)
                # Of batches of any length, few come twice in so few steps.
                if arm not in ("eager", "auto", "checkpointing"):
                    assert rank["audits"] == ("clean", None)
            if arm == "full_stack":
                shapes = [[(width, len(texts)) for width, texts in rank["seen"]] for rank in (first, second)]
                assert shapes[0] == shapes[1], "all ranks the same shapes in the same order"


def it_trains_as_one_process(first: dict[str, Any], second: dict[str, Any]) -> None:
    losses, weights = of_one_process([first["seen"], second["seen"]])
    assert first["steps"] == second["steps"] == STEPS
    means = [sum(both) / 2 for both in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for rank in (first, second):
        assert list(rank["weights"]) == list(weights)
        for key, tensor in weights.items():
            assert torch.allclose(rank["weights"][key], tensor, rtol=1e-4, atol=1e-5), key
            assert torch.equal(rank["weights"][key], first["weights"][key]), key
    every = [text for rank in (first, second) for _, texts in rank["seen"] for text in texts]
    assert len(every) == len(set(every)), "an example twice in an epoch"


def the_record_says(arm: str, says: str, rank: dict[str, Any]) -> None:
    notes = [note for note in rank["notes"] if note.startswith(f"{arm}: ")]
    if says == OUT:
        assert any("runs eager: its parameters are sharded" in note for note in notes)
        assert rank["ended_in_eager"] is False, "the modules beside it are compiled"
    if arm == "full_stack":
        assert "cuda_graph: left out, CUDA graphs need a CUDA device, this run trains on cpu" in rank["notes"]
    if arm == "auto":
        assert rank["auto"]["chosen"] in ("eager", "regional")
    elif arm == "optimizer":
        assert says == OUT or rank["optimizer"]["form"] == "functional"
    elif arm != "eager":
        assert rank["regions"] == ((1, 1) if "whole" in (arm, *WITH.get(arm, ())) else (3, 3))
        assert rank["graphs"]
    if arm in ("eager", "auto"):
        return
    assert rank["parity"] == "passed", rank["why"]


def test_the_page_shows_the_same_table() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text().partition("## Which strategies")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    shown = {arm: tuple(cells[1:]) for cells in rows for arm in re.findall(r"`(\w+)`", cells[0])}
    assert shown == HOLDS
