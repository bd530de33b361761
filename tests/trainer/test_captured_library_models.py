"""Other people's models captured in graphs: eager's losses, nothing refused, no recompile in a capture."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from strategies import Regional, Strategy
from strategies.torch_patches import as_capturing
from tasks.library_model import MASKED, MODELS
from tasks.library_model.data import loader
from tasks.library_model.model import make
from tests.sweep import some
from tests.trainer.capturing import Captured
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.recording import Recorded
from tests.trainer.test_step_capture import Watch

STEPS = 6


CASES = [(name, padded) for name in MODELS for padded in ((False, True) if name in MASKED else (False,))]
"""Every model, those of text with an ``attention_mask`` too."""


def train(name: str, padded: bool, *strategies: Strategy) -> tuple[list[float], Captured | None]:
    """Losses of some seeded steps, and the callback that captured them."""
    L.seed_everything(0, verbose=False)
    watch, captured = Watch(), Captured(strategies) if strategies else None
    trainer = quiet_trainer(max_steps=STEPS, callbacks=[watch, *([captured] if captured else [])])
    with torch.backends.mkldnn.flags(enabled=name != "lstm"):  # its LSTM is another one in a replay
        trainer.fit(make(name, tiny=True), loader(name, tiny=True, steps=STEPS, padded=padded))
    return watch.losses, captured


@pytest.mark.parametrize(
    ("name", "padded"), some([pytest.param(*case, id="-".join(map(str, case))) for case in CASES], every=3)
)
def test_a_library_models_step_is_captured_with_eagers_losses(name: str, padded: bool) -> None:
    eager, _ = train(name, padded)
    losses, captured = train(name, padded, Regional(backend="eager"), Recorded())
    report = captured.facts
    assert len(set(eager)) == STEPS
    assert losses == pytest.approx(eager, rel=FLOOR)
    before = 2 if name == "lstm" else 3  # Dynamo compiles no LSTM: there is no region to check first
    assert (report["graphs"], report["replayed_steps"], report["refused"]) == (1, STEPS - before, [])
    assert report["parity"]["verdict"] == "passed"


def test_who_asks_gets_the_answer_of_a_capture_and_torch_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.torch_patches._asked", lambda: False)
    asked = torch.cuda.is_current_stream_capturing
    as_torch = {"__name__": "torch._dynamo.convert_frame", "asked": asked}
    with as_capturing():
        assert asked()
        assert not eval("asked()", as_torch)
        with as_capturing(False):
            assert not asked()
        assert asked()
