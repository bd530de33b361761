"""The first replay of a captured step is compared with the step itself; a wrong one ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from strategies import Program
from strategies.cuda_graph.capture import StepGraphs
from tests.trainer.recording import RecordingEngine
from tests.trainer.test_step_capture import Net, Recorded, fit
from trainer.callback import Compile
from trainer.guards.compare import ParityError


class Forgetful(RecordingEngine):
    """Its replays lose what ``lost`` names."""

    lost: ClassVar[str] = ""

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        before = {name: value.clone() for name, value in self._module.state_dict().items()}
        replay, results = super().capture(call)

        def wrong() -> None:
            replay()
            if self.lost == "loss":
                results[0]["loss"].mul_(1.01)
            else:
                self._module.state_dict()[self.lost].copy_(before[self.lost])

        return wrong, results


class Wrong(Recorded):
    def begin(self, program: Program) -> None:
        program.step = StepGraphs(Forgetful(program.module))


def test_a_right_replay_passes_and_trains_on_as_if_nothing_had_been_compared(tmp_path: Path) -> None:
    compared, plain = Compile([Recorded()]), Compile([Recorded()], parity="off")
    assert fit(Net(), tmp_path, compared).losses == fit(Net(), tmp_path, plain).losses
    facts = compared.record.report["recorded"]["parity"]
    assert (facts["verdict"], facts["calibration_steps"]) == ("passed", 0)
    assert facts["compared"] == compared.record.report["recorded"]["captured"]
    assert "parity" not in plain.record.report["recorded"]


def test_strict_compares_every_graph_and_on_the_first_one(tmp_path: Path) -> None:
    for mode, count in (("on", 1), ("strict", 2)):
        compile_ = Compile([Recorded()], parity=mode)
        fit(Net(), tmp_path, compile_, rows=46, max_steps=40)
        assert len(compile_.record.report["recorded"]["parity"]["compared"]) == count


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lost", ["loss", "net.0.weight", "net.1.running_mean"])
def test_a_wrong_replay_ends_the_run_and_names_what_differs(
    lost: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "lost", lost)
    compile_ = Compile([Wrong()], parity="strict")
    if accumulate == 2 and lost == "net.0.weight":
        lost = "update of 'net.0.weight'"  # found once the graph that holds the optimizer is replayed
    with pytest.raises(ParityError, match=lost) as raised:
        fit(Net(), tmp_path, compile_, accumulate_grad_batches=accumulate)
    assert "not the step it was captured from" in str(raised.value)
    assert compile_.record.report["recorded"]["parity"]["verdict"] == "failed"
