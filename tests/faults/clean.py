"""Clean trainings, which no guard may end or doubt: ``python -m tests.faults.clean [COUNT] [FIRST SEED]``.

Every training draws its module, precision, backend and options from its seed; a line a training, and a sum at the end.
"""

from __future__ import annotations

import collections
import logging
import random
import sys
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from strategies import Optimizer, Regional, Strategy, Whole
from tests.faults.module import LENGTH, ROWS, WIDTH, Small, batches, train
from tests.trainer.manual_modules import Adversaries
from trainer.guards.compare import ParityError


class Tied(Small):
    """Its head reads with the stem's weights, and its blocks are frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].norm.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x_BTD = self.stem(batch[0])
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return nn.functional.mse_loss(x_BTD @ self.stem.weight, batch[0])


class Recurrent(Small):
    """A GRU beside the blocks, and tokens."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.embedding = nn.Embedding(32, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.vocabulary = nn.Linear(WIDTH, 32)

    def loss(self, batch: Any) -> Tensor:
        tokens_BT = (batch[0].abs().sum(-1) * 7).long() % 32
        x_BTD, _ = self.recurrent(self.embedding(tokens_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return nn.functional.cross_entropy(self.vocabulary(x_BTD).flatten(0, 1), tokens_BT.flatten())


class Grouped(Small):
    """Two groups of parameters, one of them without weight decay; a schedule that begins at 0."""

    def configure_optimizers(self) -> Any:
        small = [one for one in self.parameters() if one.dim() < 2]
        large = [one for one in self.parameters() if one.dim() >= 2]
        groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Unused(Small):
    """A layer that gets no gradient."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2, statistics=True)
        self.unused = nn.Linear(WIDTH, WIDTH)


class Noisy(Small):
    """Draws noise outside of its blocks."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]])


MODULES: dict[str, Any] = {
    "plain": Small,
    "dropout": lambda: Small(dropout=0.1),
    "much dropout": lambda: Small(dropout=0.5),
    "statistics": lambda: Small(statistics=True),
    "both": lambda: Small(dropout=0.1, statistics=True),
    "tied": Tied,
    "recurrent": Recurrent,
    "grouped": Grouped,
    "unused": Unused,
    "noisy": Noisy,
    "sgd": lambda: Small(optimizer=lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True)),
    "rmsprop": lambda: Small(optimizer=lambda given: torch.optim.RMSprop(given, lr=1e-3, centered=True)),
    "amsgrad": lambda: Small(optimizer=lambda given: torch.optim.Adam(given, lr=1e-2, amsgrad=True)),
    "adagrad": lambda: Small(optimizer=lambda given: torch.optim.Adagrad(given, lr=1e-2)),
    "nadam": lambda: Small(optimizer=lambda given: torch.optim.NAdam(given, lr=1e-2)),
    "adafactor": lambda: Small(optimizer=lambda given: torch.optim.Adafactor(given, lr=1e-2)),
    "by hand": Adversaries,
}


def one(seed: int) -> tuple[str, str]:
    """Train; what was trained, and the verdict."""
    L.seed_everything(seed, verbose=False)
    drawn = random.Random(seed)
    kind = sorted(MODULES)[seed % len(MODULES)]
    precision = drawn.choice(["32-true", "32-true", "bf16-mixed", "bf16-mixed", "bf16-true", "64-true"])
    backend = drawn.choice(["inductor", *["aot_eager_decomp_partition"] * 3])
    arm = drawn.choice(["regional", "whole", "optimizer", "regional, optimizer"])
    if kind == "adafactor":  # compile=optimizer cannot compile it with every backend
        arm = "regional"
    strategies: list[Strategy] = []
    if "regional" in arm:
        strategies.append(Regional(backend=backend))
    if arm == "whole":
        strategies.append(Whole(backend=backend))
    if "optimizer" in arm:
        strategies.append(Optimizer(backend=backend))
    module, options = MODULES[kind](), {}
    if kind == "by hand":
        data = [[torch.randn(ROWS, WIDTH // 2), torch.randn(ROWS, 1)] for _ in range(3)]
        options["validates"] = False
        compile_options = {"whole": ["generator", "critic"]} if arm == "whole" else {}
    else:
        data = batches(3, (LENGTH,), (drawn.choice([2, ROWS, 32]),))
        options = {"accumulate_grad_batches": drawn.choice([1, 2]), "gradient_clip_val": drawn.choice([None, 0.1])}
        compile_options = {"whole": ["layers.0", "layers.1", "head"]} if arm == "whole" else {}
    if precision in ("bf16-true", "64-true"):
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float64
        data = [[tensor.to(dtype) for tensor in batch] for batch in data]
    what = f"{kind}, {arm}, {backend}, {precision}, {options}"
    try:
        record = train(
            module, strategies, data, parity=drawn.choice(["on", "on", "strict"]), precision=precision,
            compile_options=compile_options, **options,
        )  # fmt: skip
    except ParityError as error:
        return what, f"FALSE ALARM: {error}"
    facts = record.report.get("parity", {"verdict": "nothing to compare"})
    return what, f"{facts['verdict']}{': ' + facts['reason'] if 'reason' in facts else ''}"


def main(count: int, first: int) -> None:
    """Train ``count`` times."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    verdicts: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        what, verdict = "", ""
        try:
            what, verdict = one(seed)
        except Exception as error:
            verdict = f"error: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        verdicts[verdict.partition(":")[0]] += 1
        print(f"{seed}: {what}: {verdict}", flush=True)
    print(dict(verdicts))


if __name__ == "__main__":
    main(*map(int, (sys.argv[1:] + ["200", "0"][len(sys.argv) - 1 :])[:2]))
