"""BERT against transformers' own with the same weights: logits, loss, gradients, size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from tasks.language.model import Bert
from tasks.language.task import BertNetwork

NETWORK = BertNetwork(layers=3, width=48, heads=4, vocabulary_size=300, max_tokens=40)
BASE = Path(__file__).resolve().parents[2] / "conf" / "task" / "network" / "bert_base.yaml"


def transformers_net(network: BertNetwork) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=network.vocabulary_size,
        hidden_size=network.width,
        num_hidden_layers=network.layers,
        num_attention_heads=network.heads,
        intermediate_size=4 * network.width,
        max_position_embeddings=network.max_tokens,
        hidden_dropout_prob=network.dropout,
        attention_probs_dropout_prob=network.dropout,
    )
    return BertForMaskedLM(config)


def copy_from_transformers(net: Bert, reference: BertForMaskedLM) -> None:
    """Give ``net`` the weights of ``reference``; every parameter of the one comes from the other."""
    theirs = {name: value.clone() for name, value in reference.state_dict().items()}

    def take(prefix: str) -> dict[str, Tensor]:
        return {end: theirs.pop(f"{prefix}.{end}") for end in ("weight", "bias")}

    with torch.no_grad():
        net.embed.token.weight.copy_(theirs.pop("bert.embeddings.word_embeddings.weight"))
        net.embed.position.copy_(theirs.pop("bert.embeddings.position_embeddings.weight"))
        net.embed.token_type.copy_(theirs.pop("bert.embeddings.token_type_embeddings.weight"))
    net.embed.norm.load_state_dict(take("bert.embeddings.LayerNorm"))
    for index, block in enumerate(net.blocks):
        layer = f"bert.encoder.layer.{index}"
        parts = [take(f"{layer}.attention.self.{name}") for name in ("query", "key", "value")]
        block.query_key_value.load_state_dict({end: torch.cat([part[end] for part in parts]) for end in parts[0]})
        block.output.load_state_dict(take(f"{layer}.attention.output.dense"))
        block.attention_norm.load_state_dict(take(f"{layer}.attention.output.LayerNorm"))
        block.mlp[0].load_state_dict(take(f"{layer}.intermediate.dense"))
        block.mlp[2].load_state_dict(take(f"{layer}.output.dense"))
        block.mlp_norm.load_state_dict(take(f"{layer}.output.LayerNorm"))
    net.tail.transform.load_state_dict(take("cls.predictions.transform.dense"))
    net.tail.norm.load_state_dict(take("cls.predictions.transform.LayerNorm"))
    with torch.no_grad():
        net.tail.head.bias.copy_(theirs.pop("cls.predictions.bias"))
    # What is left is the head, whose weight and bias are those above.
    assert set(theirs) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


@pytest.fixture
def reference() -> BertForMaskedLM:
    torch.manual_seed(0)
    reference = transformers_net(NETWORK)
    for parameter in reference.parameters():  # biases and norms too, which begin at 0 and 1
        nn.init.normal_(parameter, std=0.2)
    return reference


@pytest.fixture
def net(reference: BertForMaskedLM) -> Bert:
    net = Bert(NETWORK)
    copy_from_transformers(net, reference)
    return net


def example(*, rows: int = 3, positions: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and targets; the rows are of different lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 300, (rows, positions), generator=generator)
    mask = torch.arange(positions) < torch.tensor([positions, 7, 15])[:rows, None]
    tokens[~mask] = 0
    picked = mask & (torch.rand(rows, positions, generator=generator) < 0.3)
    return tokens, mask, torch.where(picked, tokens, -100)


def test_logits_and_loss_are_transformers_with_padding(net: Bert, reference: BertForMaskedLM) -> None:
    tokens, mask, targets = example()
    theirs = reference(tokens, attention_mask=mask.long(), labels=targets)
    torch.testing.assert_close(net(tokens, mask)[mask], theirs.logits[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net(tokens, mask, targets)[0], theirs.loss)


def test_without_a_mask_every_position_is_attended_to(net: Bert, reference: BertForMaskedLM) -> None:
    tokens, mask, _ = example()
    torch.testing.assert_close(net(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(net(tokens)[1], net(tokens, mask)[1])


def test_gradients_are_transformers(net: Bert, reference: BertForMaskedLM) -> None:
    tokens, mask, targets = example()
    net(tokens, mask, targets)[0].backward()
    reference(tokens, attention_mask=mask.long(), labels=targets).loss.backward()
    # Through both of its uses, embedding and head.
    theirs = reference.bert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(net.embed.token.weight.grad, theirs, rtol=1e-4, atol=1e-5)


def test_base_is_as_large_as_transformers_and_as_published() -> None:
    values = yaml.safe_load(BASE.read_text())
    del values["defaults"]
    with torch.device("meta"):
        net = Bert(BertNetwork(**values))
        reference = BertForMaskedLM(BertConfig())
    count = sum(parameter.numel() for parameter in reference.parameters())
    assert sum(parameter.numel() for parameter in net.parameters()) == count == 109_514_298


def test_what_padding_holds_changes_nothing(net: Bert) -> None:
    tokens, mask, targets = example()
    net.eval()
    longer = [nn.functional.pad(value, (0, 9), value=pad) for value, pad in ((tokens, 5), (mask, 0), (targets, -100))]
    for one, other in zip(net(*longer), net(tokens, mask, targets), strict=True):
        torch.testing.assert_close(one, other)
    assert net(tokens, mask, targets)[2] == (targets != -100).sum()
