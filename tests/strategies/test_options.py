"""Options of strategies: what cannot be is refused as it is made, in one line; those of ``torch.compile`` are checked
before any work, and merged where torch refuses to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch._inductor import list_mode_options

from strategies import (
    STRATEGIES,
    Auto,
    Buckets,
    Cached,
    Checkpointing,
    Dynamic,
    Modular,
    Optimizer,
    Regional,
    Whole,
)
from strategies.base import WrongOption, ordered
from strategies.compile_options import MODES
from tests.strategies import backends


def part(**fields: Any) -> Modular:
    return Modular(parts={"encoder": fields})


def stored(**options: Any) -> Cached:
    return Cached(storage_options=options)


SECRETS = "compile.cached.storage_options."
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Buckets(count=0), "Buckets(count=0) must be at least 1"),
    (lambda: Buckets(multiple=0), "Buckets(multiple=0) must be at least 1"),
    (lambda: Buckets(tokens_per_batch=0), "Buckets(tokens_per_batch=0) must be at least 1"),
    (lambda: Buckets(on_recompile="stop"), "Buckets(on_recompile='stop') is not one of ('fail', 'warn')"),
    (lambda: Buckets(edges=[32, 16]), "Buckets(edges=[32, 16]) must be ascending and above 0"),
    (lambda: Buckets(edges=[]), "Buckets(edges=[]) must be ascending and above 0"),
    (lambda: Buckets(count="3"), "Buckets(count='3') is a text, not int"),
    (lambda: Dynamic(multiple=0), "Dynamic(multiple=0) must be at least 1"),
    (lambda: Checkpointing(every=0), "Checkpointing(every=0) must be at least 1"),
    (lambda: Checkpointing(every=[2]), "Checkpointing(every=[2]) is not a number"),
    (lambda: Checkpointing(blocks="net"), "Checkpointing(blocks='net') is a text, not a list"),
    (lambda: Optimizer(mode="reduce-overhead"), "Optimizer(mode='reduce-overhead')"),
    (lambda: Optimizer(mode="fastest"), "Optimizer(mode='fastest') is not one of"),
    (lambda: Optimizer(options={"triton.cudagraphs": True}), "...Inductor's CUDA graphs are not for updates in place"),
    (lambda: Optimizer(fullgraph=False), "Optimizer(fullgraph=False)"),
    (lambda: Optimizer(dynamic=True), "Optimizer(dynamic=True)"),
    (lambda: Regional(blocks="net.layers"), "Regional(blocks='net.layers') is a text, not a list: write ['net"),
    (lambda: Regional(blocks=[nn.Linear]), "Regional(blocks=[<class ...>]) is not a list of names, such as ['net"),
    (lambda: Regional(parts=nn.Linear), "Regional(parts=<class ...>) is not a list of names"),
    (lambda: Whole(fullgraph="no"), "Whole(fullgraph='no') is a text, not bool"),
    (lambda: Whole(backend=len), "Whole(backend=<built-in ...>) is not a name: torch._dynamo.register_backend"),
    (lambda: Auto(candidates="regional"), "Auto(candidates='regional') is a text, not a list"),
    (lambda: Auto(planned_steps="1000"), "Auto(planned_steps='1000') is a text, not int"),
    (lambda: Modular(parts=["net"]), "Modular(parts=['net']) is not a dictionary"),
    (lambda: part(how="rigional"), "Modular(parts={'encoder': {'how': 'rigional'}}) is not one of ('whole', 'reg"),
    (lambda: part(mode="fastest"), "Modular(parts={'encoder': {'mode': 'fastest'}}) is not one of"),
    (lambda: part(fulgraph=True), "...parts.encoder.fulgraph is not an option; near: fullgraph"),
    (lambda: part(fullgraph="maybe"), "Modular(parts={'encoder': {'fullgraph': 'maybe'}}) is not bool"),
    (lambda: part(dynamic=1), "Modular(parts={'encoder': {'dynamic': 1}}) is not bool or null"),
    (lambda: part(options=[1]), "Modular(parts={'encoder': {'options': [1]}}) is not dict"),
    (
        lambda: part(blocks={"how": "whole"}),
        "...for the path encoder.blocks write '+compile.modular.parts={encoder.blo",
    ),
    (
        lambda: Modular(parts={"encoder": "whole"}),
        "Modular(parts={'encoder': 'whole'}) is not a Part: write Part(how='whole')",
    ),
    (lambda: Cached(url=3), "Cached(url=3) is not a text"),
    (lambda: Cached(max_gib=0), "Cached(max_gib=0) must be above 0"),
    (lambda: Cached(timeout_seconds=-1), "Cached(timeout_seconds=-1) must be above 0"),
    (lambda: Cached(url="ftp://me:hush@host/x"), "...must not hold credentials"),
    (lambda: Cached(url="simplecache::ftp://me:hush@host/x"), "...must not hold credentials"),
    (lambda: Cached(url="https://host/x?sig=hush"), "...must not hold credentials"),
    (lambda: stored(secret="hush"), f"{SECRETS}secret must not hold"),
    (
        lambda: stored(client_kwargs={"aws_secret_access_key": "hush"}),
        f"{SECRETS}client_kwargs.aws_secret_access_key must not hold",
    ),
    (lambda: stored(headers={"Authorization": "hush"}), f"{SECRETS}headers.Authorization must not hold"),
    (lambda: stored(headers=[["X-Api-Key", "hush"]]), f"{SECRETS}headers must not hold"),
    (lambda: stored(headers=["Authorization: Token hush"]), f"{SECRETS}headers must not hold"),
    (lambda: stored(endpoint_url="http://me:hush@host:9000"), f"{SECRETS}endpoint_url must not hold"),
    (lambda: stored(client_kwargs={"proxies": ["http://me:hush@p"]}), f"{SECRETS}client_kwargs.proxies must not hold"),
    (lambda: stored(auth=["me", "hush"]), f"{SECRETS}auth must not hold"),
    (lambda: stored(sas="hush"), f"{SECRETS}sas must not hold"),
    (lambda: stored(passphrase="hush"), f"{SECRETS}passphrase must not hold"),
    (lambda: stored(secretkey="hush"), f"{SECRETS}secretkey must not hold"),
    (lambda: stored(password=12345), f"{SECRETS}password must not hold"),
    (
        lambda: stored(client_kwargs={"headers": {"x": "Bearer hush-1234567"}}),
        f"{SECRETS}client_kwargs.headers.x must not hold",
    ),
    (lambda: stored(mirror="https://host/x?se=2026&sig=hush"), f"{SECRETS}mirror must not hold"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_is_refused_without_repeating_a_secret(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + ".*".join(map(re.escape, message.split("...")))) as refused:
        ordered([make()])
    assert "hush" not in str(refused.value)
    assert "12345" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "fastest"}, r"mode='fastest' is not one of \('default', 'reduce-"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "backend='aot_eager' takes neither mode nor options"),
        ({"backend": "aot_eager", "options": {"shape_padding": True}}, "backend='aot_eager' takes neither mode nor"),
        ({"backend": "inductr"}, r"backend='inductr' is not one of \(.*'inductor'"),
        ({"options": {"shape_paddin": True}}, "options: .*'shape_paddin'; near: shape_padding"),
        ({"options": {"shape_padding": 3}}, r"options: .*shape_padding.*int.*bool"),
    ],
)
@pytest.mark.parametrize("kind", [Whole, Regional], ids=lambda kind: kind.name)
def test_what_torch_would_not_take_is_refused_with_the_choices(
    kind: type[Whole] | type[Regional], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        kind(**options).check()
    assert re.search(rf"compile\.{kind.name}\.{complaint}", getattr(refused.value, "typed", str(refused.value)))


def test_a_wrong_option_is_named_as_python_has_it_and_as_it_is_typed() -> None:
    """A strategy is made in a script, where nobody translates, and by the command line, which takes the other form."""
    for make, python, typed in (
        (lambda: Regional(mode="fastest"), "Regional(mode='fastest') is", "compile.regional.mode='fastest' is"),
        (lambda: Buckets(edges=[]), "Buckets(edges=[]) must", "compile.buckets.edges=[] must"),
        (lambda: Optimizer(fullgraph=False), "Optimizer(fullgraph=False): an", "compile.optimizer.fullgraph=False: an"),
        (
            lambda: Modular(parts={"net.head": {"how": "x"}}),
            "Modular(parts={'net.head': {'how': 'x'}}) is",
            "compile.modular.parts.net.head.how='x' is",
        ),
    ):
        with pytest.raises(WrongOption) as refused:
            make()
        assert str(refused.value).startswith(python)
        assert refused.value.typed.startswith(typed)
    for name, kind in STRATEGIES.items():
        assert kind.__name__ == name.title().replace("_", ""), "by which the message names the class"


def test_a_backend_that_someone_registered_is_known() -> None:
    backends.register()
    Whole(backend=backends.COUNTING).check()
    Whole(backend="aot_eager").check()
    Whole(options={"shape_padding": True, "triton.cudagraphs": False}).check()


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_spelt_out_as_the_options_it_stands_for(mode: str) -> None:
    preset = {} if mode == "default" else list_mode_options()[mode]
    arguments = Regional(mode=mode).compile_arguments()
    assert arguments["options"] == preset
    assert "mode" not in arguments


def test_options_are_added_to_the_preset_and_win() -> None:
    arguments = Whole(mode="max-autotune", options={"max_autotune": False, "shape_padding": True}).compile_arguments()
    assert arguments["options"] == {**list_mode_options()["max-autotune"], "max_autotune": False, "shape_padding": True}


def test_each_region_gets_its_own_copy_of_the_options() -> None:
    strategy = Whole(options={"shape_padding": True})
    strategy.compile_arguments()["options"].pop("shape_padding")  # as torch does with some keys
    assert strategy.compile_arguments()["options"] == {"shape_padding": True}
    presets = copy.deepcopy(list_mode_options())
    Whole(mode="max-autotune").compile_arguments()["options"].clear()
    assert list_mode_options() == presets
