"""Coverage: shares of a step from the profiler's events, by hand-made trees and on a real profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from scripts.explain.coverage import BACKWARD, FORWARD, MODULE, STEP, coverage
from scripts.explain.explanation import Share
from scripts.explain.recorder import Options
from scripts.explain.run import explain_module
from strategies import Regional
from tests.explain.planted import Trained, like, loader


@dataclass
class Event:
    name: str
    cpu_time_total: float
    cpu_children: list[Event] = field(default_factory=list)
    cpu_parent: Any = None
    time_range: Any = field(default_factory=lambda: SimpleNamespace(start=0, end=1000))
    device_time_total: float = 0.0


def by_place(shares: list[Share]) -> dict[tuple[str, str], tuple[float, bool]]:
    return {(share.phase, share.what): (round(share.seconds * 1e6), share.compiled) for share in shares}


def test_the_parts_add_up_to_the_step_however_much_steps_differ() -> None:
    parts = [(800, 100), (100, 850), (9_000, 700)]  # the last one was disturbed
    steps = [Event(STEP, sum(each), [Event(FORWARD, each[0]), Event(BACKWARD, each[1])]) for each in parts]
    measured = coverage(steps)
    assert measured is not None
    assert measured.step_seconds == pytest.approx(950 / 1e6)
    assert sum(share.seconds for share in measured.shares) == pytest.approx(measured.step_seconds)
    assert sum(share.share for share in measured.shares) == pytest.approx(1)


def test_a_step_is_split_into_compiled_and_eager_by_hand() -> None:
    region = Event(
        "Torch-Compiled Region: 0/0",
        300,
        [
            Event("CompiledFunction", 200),
            Event("aten::is_nonzero", 20),
            Event("Torch-Compiled Region: 1/0", 50, [Event("CompiledFunction", 40)]),
        ],
    )
    forward = Event(FORWARD, 450, [Event(MODULE + "stem", 100, [Event("aten::linear", 80)]), region])
    backward = Event(
        BACKWARD,
        300,
        [
            Event("autograd::engine::evaluate_function: CompiledFunctionBackward", 180),
            Event("autograd::engine::evaluate_function: AddmmBackward0", 90),
        ],
    )
    optimizer = Event("Optimizer.step#AdamW.step", 950, [forward, backward, Event("aten::_foreach_add_", 150)])
    measured = coverage([Event(STEP, 1000, [optimizer])])
    assert measured is not None
    assert measured.step_seconds == pytest.approx(1e-3)
    assert by_place(measured.shares) == {
        ("forward", "compiled graphs"): (280, True),
        ("forward", "eager operators between graphs"): (20, False),
        ("forward", "stem (eager module)"): (100, False),
        ("forward", "training_step itself (eager)"): (50, False),
        ("backward", "compiled graphs"): (180, True),
        ("backward", "AddmmBackward0 (eager)"): (90, False),
        ("backward", "autograd engine"): (30, False),
        ("optimizer", "AdamW.step (eager)"): (200, False),
        ("host", "Python, Lightning and waiting for the device"): (50, False),
    }
    assert measured.compiled_share == pytest.approx(0.46)
    assert measured.shares[0].device_seconds is None


def test_a_backward_in_a_thread_of_its_own_is_taken_out_of_the_wait_for_it() -> None:
    step = Event(STEP, 1000, [Event(BACKWARD, 500)])
    node = Event("autograd::engine::evaluate_function: CompiledFunctionBackward", 400, device_time_total=350)
    node.time_range = SimpleNamespace(start=500, end=900)
    later = Event("autograd::engine::evaluate_function: MulBackward0", 400)
    later.time_range = SimpleNamespace(start=5000, end=5400)
    measured = coverage([step, node, later])
    assert measured is not None
    places = by_place(measured.shares)
    assert places["backward", "compiled graphs"] == (400, True)
    assert places["backward", "autograd engine"] == (100, False)
    assert ("backward", "MulBackward0 (eager)") not in places
    assert {share.what: share.device_seconds for share in measured.shares}["compiled graphs"] == pytest.approx(350e-6)


def test_what_compiles_while_it_is_timed_is_called_so() -> None:
    compiling = Event("entire_frame_compile (dynamo_timed)", 800)
    step = Event(STEP, 1000, [Event(FORWARD, 1000, [Event("Torch-Compiled Region: 0/1", 900, [compiling])])])
    measured = coverage([step])
    assert measured is not None
    assert by_place(measured.shares)["forward", "compiling, because every step does"] == (800, False)


def test_without_a_step_there_is_nothing_to_say() -> None:
    assert coverage([Event("aten::add", 5)]) is None


class Half(nn.Module):
    """One block compiled, a stem that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_real_step_names_its_eager_modules_and_leaves_no_mark() -> None:
    module = Trained(Half())
    strategies = [Regional(backend="aot_eager", parts=[])]
    measured = explain_module(module, loader(like(2, 2)), strategies, Options(), blocks=["planted.blocks"]).coverage
    assert measured is not None
    assert measured.steps == 3
    assert sum(share.share for share in measured.shares) == pytest.approx(1)
    assert 0 < measured.compiled_share < 1
    compiled = {share.phase for share in measured.shares if share.compiled}
    assert compiled == {"forward", "backward"}
    assert any(share.what == "planted.stem (eager module)" for share in measured.shares)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
