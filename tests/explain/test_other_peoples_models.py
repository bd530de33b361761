"""Models of Lightning and transformers: what is found in them is so, and what is not there is not found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from scripts.explain import Explanation
from scripts.explain.run import explain_module
from strategies import Regional, Whole
from tests.trainer.test_other_peoples_models import Demo, gpt2, tokens
from trainer.telemetry.source_lines import display_path, line_at


def look(make: Callable[[], L.LightningModule], data: Callable[[], Any], *strategies: Any) -> Explanation:
    return explain_module(make(), data(), strategies or [Whole(backend="eager")])


def test_a_model_that_compiles_whole_is_no_alarm() -> None:
    assert look(gpt2, tokens).problems == 0


def test_lightnings_demo_breaks_within_torch_and_is_shown_at_its_own_line() -> None:
    explanation = look(Demo, tokens)
    assert explanation.breaks
    for one in explanation.breaks:
        line = line_at(one.where)
        assert line.file.endswith("demos/transformer.py")
        assert "self.transformer(" in (line.code or "")
    # Mask and positions are made in the first call; torch 2.15 blames the mask, 2.11 the positions.
    (made,) = explanation.unexpected
    assert " is None" in made.texts[0]


def test_a_key_value_cache_while_training_is_found_with_the_flag_that_changes() -> None:
    explanation = look(lambda: gpt2(use_cache=True), tokens, Regional(backend="eager"))
    assert explanation.breaks == []
    assert explanation.unexpected
    assert all(" == False" in text or " == True" in text for each in explanation.unexpected for text in each.texts)
    assert all(display_path(str(each.where)).startswith("transformers/") for each in explanation.unexpected)
