"""A training on a simulated clock for ``compile=auto``: steps take the seconds that a workload gives for each arm."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from strategies import STRATEGIES, Program, Regional, Strategy, Whole
from strategies.modules import Auto
from trainer.auto import chooser
from trainer.auto.chooser import Chooser
from trainer.telemetry.meter import Step

AGAIN = 0.3
"""Share of a compile that the same modules take when they come back: they are traced and checked, kernels are there."""
STARTED = 12.0
"""Seconds that the process has run before its first step."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Seconds of one model's steps."""

    steps: dict[str, float]
    """By the name of an arm."""
    compiling: dict[str, float] = field(default_factory=dict)
    """Of the first step, by how modules are compiled."""
    capture: float = 0.4
    kinds: int = 2
    layers: dict[str, float] = field(default_factory=dict)
    """That ``regional`` and ``whole`` compile."""
    parts: bool = True
    """Whether head and loss are declared as a part."""
    never_waits: tuple[str, ...] = ()
    """Arms under which the device never waits for the host."""
    optimizers: int = 1
    """Each of which steps in every step of the loop."""
    spread: float = 0.01
    """Standard deviation of a step, relative."""
    shapes: Callable[[int], Any] = lambda step: "all"
    """Of the batch of each step."""
    refused: dict[str, str] = field(default_factory=dict)
    """Strategies that do not fit the module, with the reason."""
    fails: dict[str, str] = field(default_factory=dict)
    """Strategies of which nothing compiles, or is captured."""


class Block(nn.Module):
    """As many kinds as it has sizes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


@dataclass
class Simulation:
    """A training of ``planned`` steps; ``train`` it."""

    workload: Workload
    planned: int
    options: dict[str, Any] = field(default_factory=dict)
    captures: bool = True
    now: float = 0.0
    arm: str = "eager"
    switches: list[tuple[int, str]] = field(default_factory=list)
    done: int = 0
    longest: float = 0.0

    def __post_init__(self) -> None:
        self.module = nn.Module()
        self.module.layers = nn.ModuleList(Block(1 + n) for n in range(self.workload.kinds - self.workload.parts))
        auto = Auto(**{"remember": False, **self.options})
        self.module.head = Block(10**3)
        self.program = Program(
            module=self.module,
            blocks=("layers",),
            parts=("head",) if self.workload.parts else (),
            strategies=(auto,),
            device=torch.device("cpu"),
        )
        meter = SimpleNamespace(time_steps=lambda: None)
        self.telemetry = cast(Any, SimpleNamespace(last_step=Step(0), meter=meter))
        self.loop: Any = SimpleNamespace(
            steps_done=0,
            steps_planned=self.planned,
            world_size=1,
            micro_batches=1,
            manual=False,
            is_first_process=True,
            device=torch.device("cpu"),
            broadcast=lambda value: value,
            any_rank=bool,
            all_ranks=bool,
            capture_obstacles=lambda: (),
        )
        self.chance = random.Random(0)
        self._fresh: set[Any] = set()
        self._compile, self._compiled = 0.0, frozenset[str | None]()
        self._module: str | None = None
        self.chooser = Chooser(auto, self.loop, self.program, self.telemetry, self.switch)
        self.chosen = ""
        expect_compiles = self.chooser._expect_compiles

        def expect() -> None:
            expect_compiles()
            for module, graphs in (("regional", self.workload.kinds), ("whole", 1)):
                layers = self.workload.layers.get(module, 0.0)
                self.chooser._timings.compiling[module] = 2.0 + 2.0 * graphs + 0.35 * layers

        self.chooser._expect_compiles = expect  # type: ignore[method-assign]

    @property
    def seconds(self) -> float:
        """Since the training began."""
        return self.now

    @property
    def tried(self) -> list[str]:
        """Arms in the order in which they took over."""
        return ["eager", *dict.fromkeys(name for _, name in self.switches if name != "eager")]

    def switch(self, strategies: Sequence[Strategy]) -> None:
        names = [strategy.name for strategy in strategies]
        for name in names:
            if name in self.workload.refused:
                raise ValueError(self.workload.refused[name])
        self.arm = "+".join(names) or "eager"
        self.switches.append((self.done, self.arm))
        module = names[0] if names and names[0] != "cuda_graph" else None
        again = module == self._module
        self.program.regions.clear()
        self.program.given_up.clear()
        if module is not None:
            reason = self.workload.fails.get(module)
            region: Any = SimpleNamespace(
                path="a", called=True, state="failed" if reason else "compiled", reason=reason
            )
            self.program.regions.append(region)
        graphs: Any = SimpleNamespace(
            done_capturing=True, replays=0, captures=0, given_up="cuda_graph" in self.workload.fails
        )
        self.program.step = graphs if "cuda_graph" in names else None
        if self.program.step is not None and graphs.given_up:
            self.program.given_up["step"] = self.workload.fails["cuda_graph"]
        self._compile = 0.0 if module is None or again else self.workload.compiling.get(module, 10.0)
        self._compile *= AGAIN if module in self._compiled else 1.0
        self._module, self._compiled = module, self._compiled | {module}
        self._fresh = set()

    def train(self, steps: int | None = None) -> Simulation:
        """Take ``steps`` steps, or all that are planned."""
        first = self.done
        for number in range(first, first + (self.planned if steps is None else steps)):
            self.chooser.before(self.batch(number))
            self.step(number)
            self.chooser.after(stepped=True)
        self.chosen = "+".join(one.name for one in self.chooser.finish()) or "eager"
        return self

    def batch(self, number: int) -> Any:
        """Of step ``number``, counted from 0."""
        return SimpleNamespace(shape=self.workload.shapes(number))

    def step(self, number: int) -> None:
        """Take it."""
        shape = self.workload.shapes(number)
        typical = self.workload.steps.get(self.arm, 1.0)
        seconds = typical * max(0.5, self.chance.gauss(1.0, self.workload.spread))
        step = Step(number + 1)
        if self._compile:
            seconds, step.compiled, self._compile = seconds + self._compile, True, 0.0
        graphs = self.program.step
        if graphs is not None and shape not in self._fresh and not graphs.given_up:
            self._fresh.add(shape)
            seconds, step.compiled = seconds + self.workload.capture, True
            graphs.captures += 1
        elif graphs is not None and not graphs.given_up:
            graphs.replays += 1
        step.seconds = seconds
        self.now += seconds
        self.longest = max(self.longest, seconds)
        self.done, self.loop.steps_done = number + 1, (number + 1) * self.workload.optimizers
        self.telemetry.last_step = step

    def only(self, arm: str) -> float:
        """Seconds of a training under ``arm`` from the start."""
        names = arm.split("+")
        setup = sum(self.workload.compiling.get(name, 10.0) for name in names if name in ("regional", "whole"))
        setup += self.workload.capture * ("cuda_graph" in names)
        return setup + self.planned * self.workload.steps[arm]

    @property
    def best(self) -> float:
        """Seconds of the fixed arm that is over first."""
        return min(self.only(arm) for arm in self.workload.steps)


FEW_STEPS = {
    "WARMUP_STEPS": 2,
    "QUIET_STEPS": 1,
    "MAX_WARMUP_STEPS": 12,
    "CHECK_EVERY": 1,
    "TIMED_STEPS": 2,
    "TIMED_SECONDS": 0.0,
    "BASE_STEPS": 2,
}
"""After which an arm is judged where its seconds are given."""


def steps_take(monkeypatch: pytest.MonkeyPatch, backend: str = "eager", /, **seconds: float) -> None:
    """In real trainings: candidates compile for ``backend``, ``regional`` first, are judged within a few steps, and
    steps count as if they took the seconds given for the module strategy and capture that train
    (``regional__cuda_graph=0.5``)."""
    expect_compiles = Chooser._expect_compiles

    def expect(self: Chooser) -> None:
        expect_compiles(self)
        self._timings.compiling = {"regional": 1.0, "whole": 1e9, "second_order": 1e9}

    monkeypatch.setattr(Chooser, "_expect_compiles", expect)
    monkeypatch.setattr("trainer.auto.rule.PAYS", 1e-3)
    kinds: dict[str, Any] = {kind.name: functools.partial(kind, backend=backend) for kind in (Regional, Whole)}
    monkeypatch.setattr(chooser, "STRATEGIES", {**STRATEGIES, **kinds})
    for name, value in FEW_STEPS.items():
        monkeypatch.setattr(chooser, name, value)
    real = Chooser._note_step

    def note_step(self: Chooser) -> None:
        steps = self._steps
        before = len(steps)
        real(self)
        for place in range(before, len(steps)):
            one, given = steps[place], seconds[self._arm.name.replace("+", "__")]
            timed = dataclasses.replace(one.step, seconds=given, laps=[])
            steps[place] = dataclasses.replace(one, step=timed, host_seconds=0.0)

    monkeypatch.setattr(Chooser, "_note_step", note_step)


def simulate(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, planned: int, *, captures: bool = True, **options: Any
) -> Simulation:
    """A simulation that is about to train."""
    run = Simulation(workload, planned, options)
    monkeypatch.setattr(chooser, "now", lambda: run.now)
    monkeypatch.setattr(chooser, "process_age_seconds", lambda: STARTED + run.now)
    monkeypatch.setattr(Chooser, "_may_capture", lambda self: captures)
    monkeypatch.setattr(Chooser, "_device_is_behind", lambda self: run.arm in workload.never_waits)
    return run


def simulate_together(
    monkeypatch: pytest.MonkeyPatch, workloads: Sequence[Workload], planned: int, **options: Any
) -> list[Simulation]:
    """Trainings of processes that wait for each other where they agree on something; an error where they do not ask
    for it at the same places."""
    runs = [simulate(monkeypatch, workload, planned, **options) for workload in workloads]
    ours, given = threading.local(), [("", None)] * len(runs)
    barrier = threading.Barrier(len(runs))
    monkeypatch.setattr(chooser, "now", lambda: ours.run.now)
    monkeypatch.setattr(chooser, "process_age_seconds", lambda: STARTED + ours.run.now)
    monkeypatch.setattr(Chooser, "_device_is_behind", lambda self: False)

    def all_of(place: int, asked: str, value: Any = None) -> list[Any]:
        given[place] = asked, copy.deepcopy(value)
        barrier.wait()
        found = list(given)
        barrier.wait()
        assert {one for one, _ in found} == {asked}, "processes would wait for each other"
        return [one for _, one in found]

    def train(place: int) -> None:
        ours.run = run = runs[place]
        vars(run.loop).update(
            world_size=len(runs),
            is_first_process=not place,
            broadcast=lambda value: copy.deepcopy(all_of(place, "broadcast", value)[0]),
            any_rank=lambda value: any(all_of(place, "any", value)),
            all_ranks=lambda value: all(all_of(place, "all", value)),
        )
        try:
            run.train()
            all_of(place, "the end")
        except BaseException:
            barrier.abort()  # who waits for it waits in vain
            raise

    with ThreadPoolExecutor(len(runs)) as pool:
        for done in [pool.submit(train, place) for place in range(len(runs))]:
            done.result()
    return runs
