"""The scripts of docs/gallery, as they stand there, on a CPU: they train, they are compiled, and losses are eager's."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import crucible
import pytest
import torch
from torch._dynamo import symbolic_convert

from strategies import region
from tests.sweep import MARK
from trainer.telemetry.record import RunRecord

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
SCRIPTS = sorted(path for path in GALLERY.glob("*.py") if path.stem not in ("measure", "nequip_forces"))
"""NequIP trains in tests/libraries, as other people's libraries do."""
LONG = frozenset({"diffusion_unet", "torchvision_efficientnet", "encoder_decoder"})
"""Take seconds each; of their kinds, ``timm_convnext`` and the language models train in every run of the tests."""
BFLOAT16 = 0.02
"""Relative; the checks of the run itself are stricter."""


def run(script: Path, *arguments: str) -> dict[str, Any]:
    """Its names after it has run, in a compiler that has not met its code before."""
    torch.compiler.reset()
    symbolic_convert._import_module.cache_clear()  # of Dynamo: the script that was __main__ before
    vars(region).pop("__import___main__", None)
    sys.argv = [str(script), *arguments]
    return runpy.run_path(str(script), run_name="__main__")


def losses_of(record: RunRecord) -> dict[str, float]:
    """What it logged last, and the training's own where steps have one loss."""
    own = {} if record.final_loss is None else {"loss of a step": record.final_loss}
    return own | {name: value for name, value in record.final_metrics.items() if "loss" in name}


@pytest.mark.parametrize(
    "script", [pytest.param(path, id=path.stem, marks=[MARK] if path.stem in LONG else []) for path in SCRIPTS]
)
def test_a_script_of_the_gallery_trains_as_eager_does(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("diffusers" if "unet" in script.stem else "peft" if "lora" in script.stem else "transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    for name in ("Regional", "Whole", "SecondOrder"):  # Inductor takes half a minute for each
        monkeypatch.setattr(crucible, name, functools.partial(getattr(crucible, name), backend="eager"), raising=False)
    compiled, eager = run(script), run(script, "eager")
    record = compiled["compiling"].record
    assert eager["compiling"].record.graphs in (0, None)
    assert record.report["parity"]["verdict"] == "passed"
    assert record.regions_compiled == record.regions
    assert record.graph_breaks == 0
    losses, expected = (losses_of(names["compiling"].record) for names in (compiled, eager))
    assert losses
    assert losses == pytest.approx(expected, rel=BFLOAT16)
