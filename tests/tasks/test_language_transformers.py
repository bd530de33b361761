"""Networks of the transformers library: trained as ours are, found by type or file, refused in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from strategies.regions import find_containers
from tasks.language.networks import TransformersNetwork
from tasks.language.task import LanguageModelling
from tasks.module import materialise, on_meta

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
EACH = pytest.mark.parametrize(("model_type", "overrides"), [("gpt2", GPT2), ("qwen2", SMALL)])


def example() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 300, (2, 13), generator=torch.Generator().manual_seed(0))
    tokens[0, 6:] = 0
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@EACH
def test_the_loss_is_the_librarys_and_padding_is_no_target(model_type: str, overrides: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = TransformersNetwork(model_type=model_type, overrides=overrides).build(loss_chunks=1).eval()
    tokens, targets = example()
    # The library ignores -100 and shifts by one position itself.
    labels = torch.cat((tokens[:, :1], targets), dim=1).where(torch.cat((tokens[:, :1], targets), dim=1) != 0, -100)
    padded = torch.nn.functional.pad(tokens, (0, 1))
    reference = net.model(input_ids=padded, labels=labels, use_cache=False)
    torch.testing.assert_close(net(tokens, targets)[0], reference.loss)
    torch.testing.assert_close(net(tokens), reference.logits[:, :-1])


@EACH
def test_it_compiles_whole_and_by_blocks_without_a_break(model_type: str, overrides: dict[str, Any]) -> None:
    network = TransformersNetwork(model_type=model_type, overrides=overrides)
    for regional in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        net = network.build(loss_chunks=1)
        if regional:
            (container,) = find_containers(net)
            modules = [*net.get_submodule(container.path), net.get_submodule(*network.parts())]
        else:
            modules = [net]
        for module in modules:
            module.compile(backend=counter, fullgraph=True)
        net(*example())[0].backward()
        assert counter.frame_count == (2 if regional else 1)
    torch._dynamo.reset()


@EACH
def test_flops_are_those_that_torch_counts(model_type: str, overrides: dict[str, Any]) -> None:
    network = TransformersNetwork(model_type=model_type, overrides=overrides)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.build(loss_chunks=1)(example()[0])
    task = LanguageModelling(network=network)
    assert task.count_flops(rows=2, positions=12, training=False) == counter.get_total_flops()


def test_flops_of_experts_are_not_guessed() -> None:
    network = TransformersNetwork(model_type="mixtral", overrides={**SMALL, "num_local_experts": 4})
    assert LanguageModelling(network=network).count_flops(rows=2, positions=12, training=True) is None


def test_weights_drawn_on_a_device_are_complete() -> None:
    network = TransformersNetwork(model_type="qwen2", overrides=SMALL)  # with a buffer that no state dict holds
    net = on_meta(lambda: network.build(loss_chunks=1))
    materialise(net, lambda: network.build(loss_chunks=1), device=torch.device("cpu"), seed=5)
    torch.manual_seed(5)
    reference = network.build(loss_chunks=1)
    assert torch.equal(net.eval()(*example())[0], reference.eval()(*example())[0])


def test_a_published_config_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "torch_dtype": "bfloat16", **SMALL}))
    for path in (tmp_path, tmp_path / "config.json"):
        network = TransformersNetwork(config=str(path), overrides={"max_position_embeddings": 64})
        assert network.limits() == (300, 64)
        net = network.build(loss_chunks=1)
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
        assert len(net.model.model.layers) == 2


def test_an_encoder_by_kind_sees_no_later_position_either() -> None:
    options = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    net = TransformersNetwork(model_type="bert", overrides=options).build(loss_chunks=1).eval()
    tokens, _ = example()
    before = net(tokens)
    tokens[:, 6:] = 9
    torch.testing.assert_close(net(tokens)[:, :6], before[:, :6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"task\.network\.config='' and task\.network\.model_type='': give one of them"),
        ({"model_type": "qwen22"}, r"task\.network\.model_type: 'qwen22' is not a causal language model .*near: qwen2"),
        ({"model_type": "t5"}, r"task\.network\.model_type: 't5' is not a causal language model"),
        (
            {"model_type": "qwen2", "overrides": {"hiden_size": 3}},
            r"task\.network\.overrides\.hiden_size is not an option of qwen2; near: hidden_size",
        ),
        ({"config": "nowhere.json"}, r"task\.network\.config='nowhere\.json': .* cannot be read"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        LanguageModelling(network=TransformersNetwork(**options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "names no model_type"), ('{"a": 1}', "names no model_type")]
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {message}"):
        TransformersNetwork(config=str(tmp_path)).limits()


def test_what_the_library_refuses_is_one_line() -> None:
    network = TransformersNetwork(model_type="gpt2", overrides={**GPT2, "n_head": 5})
    with pytest.raises(ValueError, match=r"^task/network=transformers: ") as refused:
        network.build(loss_chunks=1)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^task\.loss_chunks=2 must be 1"):
        network.build(loss_chunks=2)


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs the transformers package .*pip install -e '\.\[models\]'$"):
        TransformersNetwork(model_type="gpt2").limits()
