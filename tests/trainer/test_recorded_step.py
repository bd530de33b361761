"""A captured step has to repeat one that ran without it; a graph that does not trains nothing, and eager goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from strategies.cuda_graph.recorded_step import StepRecorder
from strategies.tolerance import UNITS
from tests.trainer.capturing import Captured
from tests.trainer.recording import Recorded, RecordingEngine
from tests.trainer.test_step_capture import Net, fit


class Forgetful(RecordingEngine):
    """Its replays lose what ``lost`` names, from the replay ``begins`` on."""

    lost: ClassVar[str] = ""
    begins: ClassVar[int] = 0

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, results = super().capture(call)
        replays = 0

        def wrong() -> None:
            nonlocal replays
            replays += 1
            named = dict([*self._module.named_parameters(), *self._module.named_buffers()])
            before = named[self.lost].detach().clone() if self.lost in named else None
            state = torch.get_rng_state()
            replay()
            if replays <= self.begins:
                return
            if self.lost == "loss":
                results[0]["loss"].mul_(1.01)
            elif self.lost == "random numbers":
                torch.set_rng_state(state)
                replay()
            elif before is not None:
                named[self.lost].data.copy_(before)

        return wrong, results


class Wrong(Recorded):
    engine = Forgetful


def test_a_right_replay_passes_and_trains_on_as_if_nothing_had_been_compared(tmp_path: Path) -> None:
    compared, plain = Captured([Recorded()]), Captured([Recorded()], parity="off")
    compared.audit_at = (9, 15)
    expected, seen = fit(Net(), tmp_path, plain), fit(Net(), tmp_path, compared)
    assert seen.losses == expected.losses
    for name, value in expected.state.items():  # type: ignore[attr-defined]
        assert torch.equal(seen.state[name], value)  # type: ignore[attr-defined]
    facts = compared.facts["parity"]
    assert (facts["verdict"], facts["audits"], facts["equal_to_the_last_bit"]) == ("passed", 2, 3)
    assert facts["compared"] == compared.facts["captured"]
    assert "parity" not in plain.facts


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("begins", [0, 8])
@pytest.mark.parametrize("lost", ["loss", "net.0.weight", "net.1.running_mean", "random numbers"])
def test_a_wrong_replay_is_found_and_named_and_the_run_goes_on(
    lost: str, begins: int, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "lost", lost)
    monkeypatch.setattr(Forgetful, "begins", begins)
    eager, captured = fit(Net(), tmp_path, accumulate_grad_batches=accumulate), Captured([Wrong()], parity="strict")
    captured.audit_at = tuple(range(12, 20)) if begins else ()
    seen = fit(Net(), tmp_path, captured, accumulate_grad_batches=accumulate)
    assert seen.steps == eager.steps
    assert captured.facts["parity"]["verdict"] == "failed"
    reason = captured.program.given_up["step"]
    assert "differs from the step without it" in reason
    assert lost == "random numbers" or (lost in reason or "loss" in reason), reason
    if not begins:  # no replay has trained, and one batch for each graph was called twice
        assert seen.losses == pytest.approx(eager.losses, rel=1e-5)
    else:
        assert captured.facts["replayed_steps"] > 0


def test_what_an_optimizer_made_of_rounding_is_no_difference() -> None:
    """Adam divides a gradient by its own size: where that is all rounding, two runs of one step move a weight apart."""
    random = torch.get_rng_state, torch.set_rng_state
    repeating = StepRecorder(torch.device("cpu"), "on", unit=UNITS["bf16"], random=random)
    torch.manual_seed(0)
    start, mean = torch.randn(3000), torch.randn(3000)
    mean[:1000] = 1e-9
    step = mean.sign() * 1e-3

    def left(noise: Tensor, moved: Tensor) -> dict[tuple[str, str], Tensor]:
        other = mean.clone()
        other[:1000] *= noise
        return {("weight", "bias"): start - moved, ("optimizer", "bias.exp_avg"): other}

    flipped = step.clone()
    flipped[:1000] *= -1
    starts = {("weight", "bias"): start}

    def share(seen: dict[tuple[str, str], Tensor]) -> float:
        expected = left(torch.ones(1000), step)
        found = repeating._compare(list(expected), expected, seen, None, starts)
        return max(one.share for one in found if one.kind == "weight")

    assert share(left(-torch.ones(1000), flipped)) < 1
    assert share(left(torch.ones(1000), flipped)) > 1, "the same gradients have to move it alike"
    further = step.clone()
    further[:1000] *= 1.08
    assert share(left(torch.full((1000,), 1.05), further)) < 1, "a mean that is 5% larger moves it some 5% further"
    further[:1000] *= 1.3
    assert share(left(torch.full((1000,), 1.05), further)) > 1, "and no more than that"
    wrong = step.clone()
    wrong[2000:] *= 0.5
    assert share(left(-torch.ones(1000), wrong)) > 1
