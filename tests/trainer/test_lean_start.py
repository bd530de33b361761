"""An eager training imports what it needs and no more: each of these takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

IN_VAIN = [
    *("accelerate", "datasets", "diffusers", "optuna", "pandas", "peft", "scipy", "submitit", "timm"),
    *("scripts", "torch._inductor.compile_fx", "trainer.auto", "trainer.guards.audits", "trainer.guards.parity"),
    *("trainer.guards.preflight", "trainer.inference", "trainer.loops.huggingface", "trainer.report.page"),
    *("trainer.report.pictures", "trainer.sweep.in_process"),
]
"""What an eager training needs none of. (torchmetrics, below Lightning, takes transformers and matplotlib.)"""
PROGRAM = """
import sys
from trainer.cli import main
try:
    main()
finally:
    print("in vain", *sorted(sys.modules.keys() & set(IN_VAIN)))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_imported_in_vain(tmp_path: Path) -> None:
    program = tmp_path / "counted.py"
    program.write_text(f"IN_VAIN = {IN_VAIN}\n{PROGRAM}")
    options = ["task=micro", "compile=eager", "trainer.max_steps=3", "trainer.accelerator=cpu"]
    command = [sys.executable, str(program), *options, "trainer.progress=none", f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines() if line.startswith("in vain")] == ["in vain"]
