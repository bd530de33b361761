"""LightningCLI: the callback and its strategies are given in Python, or named in its YAML, as the page says."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import crucible
import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from tests.conftest import ROOT

jsonargparse = pytest.importorskip("jsonargparse")

PAGE = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": 3,
    "limit_val_batches": 0,
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}


def compiling(trainer: L.Trainer) -> Any:
    (found,) = [one for one in trainer.callbacks if isinstance(one, crucible.Compile)]  # type: ignore[attr-defined]
    return found


def test_the_yaml_of_the_page_trains_under_the_strategies_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = "jsonargparse.set_parsing_settings(subclasses_enabled=[crucible.Strategy])"
    assert call in PAGE
    yaml = PAGE.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.count("crucible.Regional}") == 1
    yaml = yaml.replace("crucible.Regional}", "crucible.Regional, init_args: {backend: eager}}")
    yaml += textwrap.indent("\n".join(f"{name}: {str(value).lower()}" for name, value in OPTIONS.items()), "  ")
    (tmp_path / "fit.yaml").write_text(yaml)
    exec(call, {"jsonargparse": jsonargparse, "crucible": crucible})
    cli = LightningCLI(BoringModel, BoringDataModule, args=["fit", "--config", "fit.yaml"])
    record = compiling(cli.trainer).record
    assert (record.status, record.label, record.steps, record.regions_compiled) == ("finished", "regional", 3, 1)


def test_trainer_defaults_take_the_callback_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    defaults = {**OPTIONS, "callbacks": [crucible.Compile([crucible.Whole(backend="eager")], verbose=False)]}
    cli = LightningCLI(BoringModel, BoringDataModule, args=["fit"], trainer_defaults=defaults)
    assert compiling(cli.trainer).record.label == "whole"
