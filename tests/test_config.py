"""The configuration: every shipped YAML composes, says how it is used, and is in step with its dataclass."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from strategies import STRATEGIES
from strategies.base import Strategy
from tasks.captioning.size import CaptionerSize
from tests.conftest import hydra_put_back
from trainer import CONF
from trainer.config import known_options, register, to_config
from trainer.settings import Config, TrainerConfig

YAMLS = sorted(Path(CONF).rglob("*.yaml"))
LANGUAGE = "task=language_modelling"
IMAGES = "task=image_classification"
NEEDS = {
    **{f"task/network/{name}": [LANGUAGE] for name in ("gpt2", "gpt2_tiny", "llama_tiny", "llama_small")},
    **{f"task/network/{name}": [LANGUAGE] for name in ("llama_7b", "llama_3_8b")},
    **{f"task/network/{name}": ["task=masked_lm"] for name in ("bert_base", "bert_tiny")},
}
"""Options that are complete only with the user's own paths, or that another task than the default one has."""


@pytest.fixture(scope="module", autouse=True)
def hydra_in_tests() -> Iterator[None]:
    with hydra_put_back():
        register()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield


def option_of(file: Path) -> tuple[str, str]:
    path = file.relative_to(CONF).with_suffix("")
    return str(path.parent), path.name


def build(*overrides: str) -> Config:
    return to_config(compose("config", overrides=list(overrides)), overrides)


def test_every_option_composes_into_dataclasses(subtests: pytest.Subtests) -> None:
    for file in YAMLS:
        group, name = option_of(file)
        if group == "arms" or name.endswith("_smoke"):
            continue  # see below, and tests/trainer/test_smoke_experiments.py
        with subtests.test(file=str(file.relative_to(CONF))):
            overrides = [] if group == "." or group.startswith("hydra") else [f"{group}={name}"]
            config = build(*overrides, *NEEDS.get(f"{group}/{name}", []))
            assert isinstance(config, Config)
            assert isinstance(config.trainer, TrainerConfig)
            assert all(isinstance(strategy, Strategy) for strategy in config.compile.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ["run=train"],
        ["run=peer", "trainer.val_every_n_steps=0"],
        ["task=micro"],
        ["task/data=shapes"],
        ["task/data=lognormal"],
        ["task/data=coco", "task.data.root=."],
        [IMAGES, "task/data=labelled_shapes"],
        [IMAGES, "task/data=torchvision", "task.data.root=."],
        [LANGUAGE, "task/data=stdlib"],
        [LANGUAGE, "task/data=text", "task.data.path=x.txt"],
    ],
    ids=" ".join,
)
def test_an_option_that_is_a_class_alone_composes(overrides: list[str]) -> None:
    assert isinstance(build(*overrides), Config)


def test_every_arm_that_ships_composes(subtests: pytest.Subtests) -> None:
    names = set(known_options("compile"))
    arms = {
        arm
        for file in (Path(CONF) / "arms").glob("*.yaml")
        for arm in yaml.safe_load(file.read_text())["hydra"]["launcher"]["arms"]
    }
    for compile_, *overrides in map(str.split, sorted(arms)):
        with subtests.test(arm=compile_):
            assert set(compile_.strip("[]").split(",")) <= names
            if overrides:
                assert isinstance(build("trainer=measured", f"compile={compile_}", *overrides), Config)
    chosen = compose("config", overrides=["arms=peers"], return_hydra_config=True)
    assert "eager run=peer run.peer=loop_eager" in chosen.hydra.launcher.arms


def test_nothing_runs_of_a_task_that_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: CaptionerSize) -> None:
        raise AssertionError("the captioning task was not asked for")

    monkeypatch.setattr(CaptionerSize, "__post_init__", run)
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {group: options for group, options in store.repo.items() if group != "schema"})
    register()
    assert build("task=micro").task.name == "micro"


def test_no_option_has_a_name_that_yaml_reads_as_a_boolean() -> None:
    assert [file for file in YAMLS if not isinstance(yaml.safe_load(file.stem), str)] == []


def test_a_strategy_alone_has_every_field_s_default(subtests: pytest.Subtests) -> None:
    for name, kind in STRATEGIES.items():
        with subtests.test(name=name):
            assert build(f"compile={name}").compile == {name: kind()}


def test_the_default_trainer_yaml_is_the_dataclasss_defaults() -> None:
    assert build().trainer == TrainerConfig()


def test_composites_differ_from_their_strategies_only_as_they_say() -> None:
    debug = build("compile=debug").compile
    assert debug == {"regional": STRATEGIES["regional"](backend="aot_eager")}
    full = build("compile=full_stack").compile
    assert set(full) == {"regional", "optimizer", "buckets", "cached", "cuda_graph"}
    assert full == {name: STRATEGIES[name]() for name in full} | {
        name: STRATEGIES[name](required=False)  # type: ignore[call-arg]
        for name in ("buckets", "cuda_graph")
    }


def test_options_of_a_composite_are_set_as_ever() -> None:
    chosen = build("compile=full_stack", "compile.regional.mode=max-autotune-no-cudagraphs").compile
    assert chosen["regional"].mode == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize(
    "names",
    [
        ("regional", "optimizer", "buckets", "cached", "cuda_graph"),
        ("full_stack", "regional", "cached"),
        ("debug", "dynamic", "cached"),
        ("regional", "regional"),
    ],
    ids="+".join,
)
def test_the_order_of_a_list_never_matters(names: tuple[str, ...]) -> None:
    there, back = (build(f"compile=[{','.join(order)}]").compile for order in (names, names[::-1]))
    assert there == back


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (("debug", "regional"), "compile.regional.backend"),
        (("debug", "full_stack"), "compile.regional.backend"),
        (("cuda_graph", "full_stack"), "compile.cuda_graph.required"),
        (("buckets", "full_stack"), "compile.buckets.required"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_options_that_disagree_in_a_list_are_an_error_that_names_both(names: tuple[str, str], path: str) -> None:
    # In Hydra the last one would win, and the order on the command line would matter.
    for first, second in itertools.permutations(names):
        with pytest.raises(
            ValueError, match=rf"compile: '{names[0]}' sets {re.escape(path)} to .* and '{names[1]}' to"
        ):
            build(f"compile=[{first},{second}]")


def test_parts_of_a_module_are_given_on_the_command_line_one_by_one_or_together() -> None:
    one_by_one = build(
        "compile=modular",
        "+compile.modular.parts.encoder.how=whole",
        "+compile.modular.parts.encoder.mode=max-autotune",
        "+compile.modular.parts.decoder.how=regional",
        "+compile.modular.parts.decoder.dynamic=true",
        "+compile.modular.parts.tail.how=off",
    ).compile
    together = build(
        "compile=modular",
        "+compile.modular.parts={encoder:{how:whole,mode:max-autotune},decoder:{how:regional,dynamic:true},tail:{how:off}}",
    ).compile
    assert one_by_one == together
    assert together["modular"].parts["decoder"].dynamic is True
    paths = build("compile=modular", "+compile.modular.parts={net.*.blocks.0:{how:whole}}").compile["modular"].parts
    assert list(paths) == ["net.*.blocks.0"]


def test_a_misspelt_option_of_a_part_is_named_with_near_ones() -> None:
    with pytest.raises(ValueError, match=r"^compile\.modular\.parts\.encoder\.hwo is not an option; near: how$"):
        build("compile=modular", "+compile.modular.parts.encoder.hwo=whole")


def test_experiments_win_over_defaults_and_the_command_line_over_experiments() -> None:
    assert build("experiment=smoke").trainer.max_steps == 8
    assert build("experiment=smoke", "trainer.max_steps=3").trainer.max_steps == 3


def test_all_complaints_come_together() -> None:
    with pytest.raises(ValueError, match="max_steps") as refused:
        build(
            "trainer.max_steps=0",
            "trainer.precision=half",
            "trainer.gradient_clip_val=0",
            "trainer.devices=-2",
            "seed=-1",
            "compile=whole",
            "compile.whole.mode=fastest",
        )
    assert len(str(refused.value).splitlines()) == 6
    for complaint in ("trainer.max_steps=0 must be at least 1", "trainer.devices=-2", "seed=-1", "is not one of"):
        assert complaint in str(refused.value)


def test_strategies_that_do_not_go_together_are_one_complaint_among_others() -> None:
    with pytest.raises(ValueError, match="max_steps") as refused:
        build("trainer.max_steps=0", "compile=[regional,whole,cached]", "compile.cached.max_gib=0")
    named = ("compile.cached.max_gib=0", "trainer.max_steps=0", "compile: 'regional' and 'whole' both act")
    for line, name in zip(sorted(str(refused.value).splitlines()), sorted(named), strict=True):
        assert line.startswith(name)


@pytest.mark.parametrize("path", ["compile.whole.typo", "trainer.typo", "task.typo", "task.size.typo"])
def test_an_option_that_was_made_up_with_a_plus_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(path)} is not an option$"):
        build("compile=whole", f"+{path}=1")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("task.learning_rate=inf", r"task\.learning_rate=inf must be above 0 and finite"),
        ("task.learning_rate=nan", r"task\.learning_rate=nan must be above 0 and finite"),
        ("task.weight_decay=inf", r"task\.weight_decay=inf must be finite"),
        ("on_nonfinite_loss=eager", r"on_nonfinite_loss='eager' is not one of \('fail', 'warn'\)"),
    ],
)
def test_values_that_no_training_can_take_are_refused(given: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build(given)


def test_a_value_that_has_no_default_is_asked_for() -> None:
    cfg = compose("config", overrides=["task=captioning"])
    OmegaConf.update(cfg, "task.learning_rate", "???")
    with pytest.raises(ValueError, match=r"task\.learning_rate is not set: add task\.learning_rate=<value>"):
        to_config(cfg)
