"""The page on other people's Lightning scripts: its script and its YAML train, its arguments are real ones."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import re
import subprocess
import sys
import termios
import textwrap
from pathlib import Path
from typing import Any

import crucible
import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def in_terminal(folder: Path, script: str) -> tuple[int, str]:
    """Run ``script`` where a person would, in a terminal; returns the exit status and what the terminal was sent,
    without colours and cursor movements."""
    (folder / "crucible").symlink_to(ROOT / "trainer" / "crucible")  # as an installation maps it
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 200))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, script], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    sent = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while chunk := os.read(ours, 65536):
            sent += chunk
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent.decode().replace("\r\n", "\n"))
    return process.wait(200), text


BARS = """
import runpy

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from crucible import Compile, Regional
from tests.trainer.lightning_modules import Blocks

runpy.run_path("fit.py", run_name="__main__")
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
for bar in (RichProgressBar(refresh_rate=1), TQDMProgressBar(refresh_rate=1), None):
    print("BAR", type(bar).__name__)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[Compile([Regional(backend="eager")]), *([bar] if bar else [])], enable_progress_bar=bool(bar),
    )
    trainer.fit(Blocks(), torch.utils.data.DataLoader(data, batch_size=4))
"""


@pytest.mark.slow
def test_the_script_trains_outside_our_command_line_and_lightnings_bars_reach_their_end(tmp_path: Path) -> None:
    # As it stands on the page, but for the backend: Inductor takes a minute for this model on two cores.
    script, replaced = re.subn(r"Regional\(", 'Regional(backend="eager", ', BLOCKS["fit.py"])
    assert replaced == 1
    (tmp_path / "fit.py").write_text(script)
    (tmp_path / "bars.py").write_text(BARS)
    code, text = in_terminal(tmp_path, "bars.py")
    assert code == 0, text
    assert "Traceback" not in text, text
    fit, rich, tqdm, without = re.split("BAR .*", text)
    assert "8/8" in fit
    label, graphs, steps_per_second = fit.splitlines()[-1].split()
    assert (label, int(graphs)) == ("regional", 3), "two kinds of blocks and the head"
    assert float(steps_per_second) > 0
    assert "6/6" in rich, rich
    assert "6/6" in tqdm, tqdm
    assert "6/6" not in without, without


def test_the_arguments_that_it_shows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crucible", importlib.import_module("trainer.crucible"))
    exec(compile(BLOCKS["arguments.py"], "docs/own_model.md", "exec"), {})


jsonargparse = pytest.importorskip("jsonargparse")

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
