"""GPT-2, Llama and BERT: the library's numbers, with its weights, and sizes as published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch import Tensor, nn

from tasks.language.task import BertNetwork, Gpt2Network, LanguageModelling, LanguageNetwork, LlamaNetwork, MaskedLM
from tasks.lightning_module import on_meta

NETWORKS = Path(__file__).resolve().parents[2] / "conf" / "task" / "network"
GPT2 = Gpt2Network(layers=3, width=32, heads=2, vocabulary_size=300, max_tokens=24)
LLAMA = LlamaNetwork(
    layers=3, width=32, heads=2, key_value_heads=2, hidden_width=80, vocabulary_size=300, max_tokens=24
)
GROUPED = replace(LLAMA, heads=4, key_value_heads=2)
EACH = pytest.mark.parametrize("network", [GPT2, LLAMA, GROUPED], ids=["gpt2", "llama", "grouped"])


def build(network: LanguageNetwork, *, loss_chunks: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModelling(network=network, loss_chunks=loss_chunks).build_net()


def example(rows: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 300, (rows, length + 1), generator=generator)
    tokens[0, 7:] = 0
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def renamed(state: dict[str, Tensor], names: dict[str, str], *, transposed: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The library's weights under our names; ``transposed``: what it keeps the other way around."""
    found = {}
    for name, tensor in state.items():
        ours = name
        for theirs, mine in names.items():
            ours = ours.replace(theirs, mine)
        turned = tensor.ndim == 2 and any(part in name for part in transposed)
        found[ours] = tensor.T if turned else tensor
    return found


def library_gpt2(network: Gpt2Network) -> tuple[nn.Module, dict[str, Tensor]]:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=network.layers,
            n_embd=network.width,
            n_head=network.heads,
            vocab_size=network.vocabulary_size,
            n_positions=network.max_tokens,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    names = {
        "transformer.wte.": "embed.token.",
        "transformer.wpe.weight": "embed.position",
        "transformer.ln_f.": "tail.norm.",
        "transformer.h.": "blocks.",
        "lm_head.": "tail.head.",
        "ln_1.": "attention_norm.",
        "ln_2.": "mlp_norm.",
        "attn.c_attn.": "attention.query_key_value.",
        "attn.c_proj.": "attention.output.",
        "mlp.c_fc.": "mlp.0.",
        "mlp.c_proj.": "mlp.2.",
    }
    return model, renamed(model.state_dict(), names, transposed=(".c_",))


def library_llama(network: LlamaNetwork) -> tuple[nn.Module, dict[str, Tensor]]:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=network.layers,
            hidden_size=network.width,
            num_attention_heads=network.heads,
            num_key_value_heads=network.key_value_heads,
            intermediate_size=network.hidden_width,
            vocab_size=network.vocabulary_size,
            max_position_embeddings=network.max_tokens,
            rms_norm_eps=1e-5,
        )
    )
    names = {
        "model.embed_tokens.": "embed.",
        "model.norm.": "tail.norm.",
        "model.layers.": "blocks.",
        "lm_head.": "tail.head.",
        "input_layernorm.": "attention_norm.",
        "post_attention_layernorm.": "mlp_norm.",
        "self_attn.q_proj.": "attention.query.",
        "self_attn.k_proj.": "attention.key.",
        "self_attn.v_proj.": "attention.value.",
        "self_attn.o_proj.": "attention.output.",
        "mlp.gate_proj.": "mlp.gate.",
        "mlp.up_proj.": "mlp.up.",
        "mlp.down_proj.": "mlp.down.",
    }
    return model, renamed(model.state_dict(), names)


@pytest.mark.parametrize(
    ("network", "library"),
    [(GPT2, library_gpt2), (LLAMA, library_llama), (GROUPED, library_llama)],
    ids=["gpt2", "llama", "grouped"],
)
def test_logits_loss_and_gradients_are_the_librarys_with_its_weights(
    network: LanguageNetwork, library: Callable[[LanguageNetwork], tuple[nn.Module, dict[str, Tensor]]]
) -> None:
    torch.manual_seed(0)
    model, weights = library(network)
    net = build(network)
    net.load_state_dict(weights)
    tokens, targets = example()
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(net(tokens), logits, atol=1e-5, rtol=1e-5)
    reference = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
    loss = net(tokens, targets)[0]
    torch.testing.assert_close(loss, reference)
    *_, correct, count = net.eval()(tokens, targets)
    right = (logits.argmax(-1) == targets)[targets != 0]
    assert (int(correct), int(count)) == (int(right.sum()), len(right)), "in evaluation, without the padding"
    reference.backward()
    loss.backward()
    theirs = model.get_input_embeddings().weight.grad
    ours = next(module for module in net.modules() if isinstance(module, nn.Embedding)).weight.grad
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def library_bert(network: BertNetwork) -> tuple[nn.Module, dict[str, Tensor]]:
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=network.vocabulary_size,
            hidden_size=network.width,
            num_hidden_layers=network.layers,
            num_attention_heads=network.heads,
            intermediate_size=4 * network.width,
            max_position_embeddings=network.max_tokens,
            hidden_dropout_prob=network.dropout,
            attention_probs_dropout_prob=network.dropout,
        )
    )
    for parameter in model.parameters():  # biases and norms too, which begin at 0 and 1
        nn.init.normal_(parameter, std=0.2)
    names = {
        "bert.embeddings.word_embeddings.": "embed.token.",
        "bert.embeddings.position_embeddings.weight": "embed.position",
        "bert.embeddings.token_type_embeddings.weight": "embed.token_type",
        "bert.embeddings.LayerNorm.": "embed.norm.",
        "bert.encoder.layer.": "blocks.",
        "attention.self.": "",
        "attention.output.dense.": "output.",
        "attention.output.LayerNorm.": "attention_norm.",
        "intermediate.dense.": "mlp.0.",
        "output.dense.": "mlp.2.",
        "output.LayerNorm.": "mlp_norm.",
        "cls.predictions.transform.dense.": "tail.transform.",
        "cls.predictions.transform.LayerNorm.": "tail.norm.",
        "cls.predictions.decoder.": "tail.head.",
    }
    state = renamed(model.state_dict(), names)
    assert torch.equal(state.pop("cls.predictions.bias"), state["tail.head.bias"])
    for name in [name for name in state if ".query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "query_key_value")] = torch.cat(parts)
    return model, state


def test_bert_is_the_librarys_with_its_weights_with_and_without_a_mask() -> None:
    torch.manual_seed(0)
    network = BertNetwork(layers=3, width=48, heads=4, vocabulary_size=300, max_tokens=40)
    model, weights = library_bert(network)
    net = MaskedLM(network=network).build_net()
    net.load_state_dict(weights)
    tokens = torch.randint(3, 300, (3, 24))
    mask = torch.arange(24) < torch.tensor([[24], [7], [15]])
    tokens[~mask] = 0
    targets = torch.where(mask & (torch.rand(tokens.shape) < 0.3), tokens, -100)
    theirs = model(tokens, attention_mask=mask.long(), labels=targets)
    torch.testing.assert_close(net(tokens, mask)[mask], theirs.logits[mask], rtol=1e-4, atol=1e-4)
    loss = net(tokens, mask, targets)[0]
    torch.testing.assert_close(loss, theirs.loss)
    torch.testing.assert_close(net(tokens.where(mask, 5), mask, targets)[0], loss)  # whatever padding holds
    loss.backward()
    theirs.loss.backward()
    # Through both of its uses, embedding and head.
    gradient = model.get_input_embeddings().weight.grad
    torch.testing.assert_close(net.embed.token.weight.grad, gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(net(tokens)[1], net(tokens, mask)[1])


@pytest.mark.parametrize(
    ("name", "kind", "parameters"),
    [
        ("bert_base", BertNetwork, 109_514_298),
        ("gpt2", Gpt2Network, 124_439_808),
        ("llama_7b", LlamaNetwork, 6_738_415_616),
        ("llama_3_8b", LlamaNetwork, 8_030_261_248),
    ],
)
def test_shipped_networks_are_as_large_as_published(name: str, kind: type, parameters: int) -> None:
    values = yaml.safe_load((NETWORKS / f"{name}.yaml").read_text())
    del values["defaults"]
    task = MaskedLM if kind is BertNetwork else LanguageModelling
    net = on_meta(lambda: task(network=kind(**values)).build_net())
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters


@EACH
def test_a_loss_in_chunks_has_the_loss_and_gradients_of_all_at_once(network: LanguageNetwork) -> None:
    whole, pieces = build(network), build(network, loss_chunks=5)
    losses = [net(*example())[0] for net in (whole, pieces)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for one, other in zip(pieces.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_under_autocast_logits_are_bf16_and_the_loss_is_float32() -> None:
    net, seen = build(GPT2), []
    net.tail.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(*example())[0]
    assert (seen, loss.dtype) == ([torch.bfloat16], torch.float32)
    torch.testing.assert_close(loss, net(*example())[0], rtol=2e-2, atol=0)
