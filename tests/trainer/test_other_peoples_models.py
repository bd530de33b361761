"""Models of Lightning, timm and transformers, which know nothing of this project: eager's losses, and no more graphs
than each is known to need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Modular, Part, Regional, Strategy, Whole
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.telemetry.record import RunRecord

FAST: dict[str, Any] = {"backend": "eager"}


class Demo(LightningTransformer):
    """Lightning's demo, small, without its download and its dropout."""

    def __init__(self) -> None:
        super().__init__(vocab_size=50)
        self.model = Transformer(vocab_size=50, ninp=16, nhead=2, nhid=32, nlayers=3, dropout=0.0)

    def prepare_data(self) -> None:
        pass


class Trained(L.LightningModule):
    """Somebody's model and its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model.train()
        self._loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def vision_transformer() -> L.LightningModule:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=32, num_heads=2, num_classes=5, pretrained=False
    )
    return Trained(model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))


def gpt2(*, use_cache: bool = False) -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_layer=3, n_embd=32, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=use_cache,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning, which is a graph break
    return Trained(model, lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss)


def images() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(0, 5, (16,))), batch_size=4)


def tokens() -> DataLoader[Any]:
    drawn = torch.randint(0, 50, (16, 13))
    return DataLoader(TensorDataset(drawn[:, :-1], drawn[:, 1:]), batch_size=4)


def train(
    make: Callable[[], L.LightningModule], data: Callable[[], DataLoader[Any]], *strategies: Strategy
) -> tuple[list[float], list[str], RunRecord]:
    """Four seeded steps: losses, state-dict keys afterwards, record."""
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    L.seed_everything(0, verbose=False)
    module, compile_ = make(), Compile(strategies, warmup_steps=1, save=False)
    trainer = quiet_trainer(max_steps=4, callbacks=[Losses(), compile_])
    trainer.fit(module, data())
    return losses, list(module.state_dict()), compile_.record


eager_of = functools.cache(train)
"""Of a model and its data; trained once for all strategies."""


@pytest.mark.parametrize(
    ("make", "data", "strategy", "regions", "graphs"),
    [
        pytest.param(Demo, tokens, Regional(**FAST), 6, 2, id="demo-regional"),
        pytest.param(
            Demo,
            tokens,
            Modular(
                parts={"model.transformer.*coder": Part(how="regional", **FAST), "model.decoder": Part(**FAST)},
            ),
            7,
            3,
            id="demo-modular",
        ),
        pytest.param(vision_transformer, images, Regional(parts=["model.head"], **FAST), 4, 2, id="timm-regional"),
        pytest.param(vision_transformer, images, Whole(fullgraph=True, backend="aot_eager"), 1, 1, id="timm-whole"),
        pytest.param(
            vision_transformer,
            images,
            Modular(parts={"model.blocks.*": Part(**FAST), "model.patch_embed": Part(backend="aot_eager")}),
            4,
            2,
            id="timm-modular",
        ),
        pytest.param(gpt2, tokens, Regional(parts=["model.lm_head"], **FAST), 4, 2, id="transformers-regional"),
        pytest.param(gpt2, tokens, Whole(fullgraph=True, backend="aot_eager"), 1, 1, id="transformers-whole"),
    ],
)
def test_a_strangers_model_has_eagers_losses_and_few_graphs(
    make: Callable[[], L.LightningModule],
    data: Callable[[], DataLoader[Any]],
    strategy: Strategy,
    regions: int,
    graphs: int,
) -> None:
    eager, keys, _ = eager_of(make, data)
    losses, compiled_keys, record = train(make, data, strategy)
    assert len(set(eager)) == 4, "it learns"
    assert losses == pytest.approx(eager, rel=FLOOR)
    assert compiled_keys == keys
    assert (record.regions, record.regions_compiled) == (regions, regions)
    assert (record.graphs, record.graph_breaks) == (graphs, 0)


def test_a_key_value_cache_while_training_shares_nothing_as_the_page_says() -> None:
    _, _, record = train(lambda: gpt2(use_cache=True), tokens, Regional(**FAST))
    assert 3 <= record.graphs <= 6, "one a block, and one more where a check calls it a second time"
    assert any("layers[0]" in event.reason for event in record.events)
