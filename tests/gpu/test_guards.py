"""On a CUDA device: Inductor's kernels and CUDA graphs pass the parity gate, and the preflight leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import curve, train

pytestmark = pytest.mark.gpu
ON_GPU = ("trainer.accelerator=gpu", "trainer.deterministic=false", "trainer.max_steps=8", "task.size.dropout=0.1")


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "16-mixed"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_right_program_passes_and_is_timed(mode: str, precision: str, tmp_path: Path) -> None:
    changes = (*ON_GPU, "parity=strict", f"trainer.precision={precision}", f"compile.regional.mode={mode}")
    if precision == "16-mixed":  # Lightning does not clip where a fused optimizer unscales
        changes = (*changes, "trainer.gradient_clip_val=null")
    record = train(tmp_path, *changes, strategy="regional", backend="inductor")
    assert record.status == "finished", record.reason
    assert record.report["parity"]["verdict"] == "passed"
    assert record.report["parity"]["draws_random_numbers"]
    assert record.report["slowdown"]["before_the_first_step"]["eager_seconds"][0] > 0
    assert record.peak_device_memory_gib is not None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_losses_with_and_without_preflight_are_the_same(mode: str, tmp_path: Path) -> None:
    # Deterministic kernels, so that one run repeats another to the last bit.
    changes = (*ON_GPU, "trainer.deterministic=true", f"compile.regional.mode={mode}")
    for parity in ("off", "on"):
        record = train(tmp_path / parity, *changes, f"parity={parity}", strategy="regional", backend="inductor")
        assert record.status == "finished", record.reason
    assert curve(tmp_path / "on") == curve(tmp_path / "off")
