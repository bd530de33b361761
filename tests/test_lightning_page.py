"""The page on other people's Lightning scripts: its script is short and trains, its arguments are real ones."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_the_script_is_fifteen_lines() -> None:
    lines = [line for line in BLOCKS["fit.py"].splitlines() if line.strip()]
    assert len(lines) <= 15


@pytest.mark.slow
def test_the_script_trains_outside_our_command_line(tmp_path: Path) -> None:
    # As it stands on the page, but for the backend: Inductor takes a minute for this model on two cores.
    script, replaced = re.subn(r"Regional\(", 'Regional(backend="aot_eager", ', BLOCKS["fit.py"])
    assert replaced == 1
    (tmp_path / "fit.py").write_text(script)
    (tmp_path / "crucible").symlink_to(ROOT / "trainer" / "crucible")  # as an installation maps it
    process = subprocess.run(
        [sys.executable, "fit.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    label, graphs, steps_per_second = process.stdout.splitlines()[-1].split()
    assert (label, int(graphs)) == ("regional", 3), "two kinds of blocks and the head"
    assert float(steps_per_second) > 0


def test_the_arguments_that_it_shows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crucible", importlib.import_module("trainer.crucible"))
    exec(compile(BLOCKS["arguments.py"], "docs/own_model.md", "exec"), {})
