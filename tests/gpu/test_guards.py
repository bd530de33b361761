"""On a CUDA device: Inductor's kernels and CUDA graphs pass the checks, and checks leave the training as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import curve, train

pytestmark = pytest.mark.gpu
ON_GPU = ("trainer.accelerator=gpu", "trainer.deterministic=false", "trainer.max_steps=8")


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "16-mixed"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_right_program_passes(mode: str, precision: str, tmp_path: Path) -> None:
    changes = (*ON_GPU, "task.size.dropout=0.1", "parity=strict", f"trainer.precision={precision}")
    changes = (*changes, f"compile.regional.mode={mode}")
    if precision == "16-mixed":  # Lightning does not clip where a fused optimizer unscales
        changes = (*changes, "trainer.gradient_clip_val=null")
    record = train(tmp_path, *changes, strategy="regional", backend="inductor")
    assert record.status == "finished", record.reason
    assert record.report["parity"]["verdict"] == "passed"
    assert record.report["parity"]["checks"] > 0
    assert record.audits.verdict == "clean"
    assert record.eager_parts == {}
    assert record.peak_device_memory_gib is not None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_losses_with_and_without_checks_are_the_same_but_for_rounding(mode: str, tmp_path: Path) -> None:
    """Steps with a check run eager, whose kernels round otherwise."""
    changes = (*ON_GPU, "trainer.precision=32-true", "trainer.deterministic=true", f"compile.regional.mode={mode}")
    for parity in ("off", "on"):
        record = train(tmp_path / parity, *changes, f"parity={parity}", strategy="regional", backend="inductor")
        assert record.status == "finished", record.reason
    assert curve(tmp_path / "on") == pytest.approx(curve(tmp_path / "off"), rel=1e-3)
