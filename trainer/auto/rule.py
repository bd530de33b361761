"""The rule of ``compile=auto``: which arm the steps to come can pay for, from what was measured and plain estimates.

An arm is one way to train: modules eager, ``regional``, ``whole`` or ``second_order``, steps captured or not. Tried is
what the steps to come may pay ``PAYS`` times for setting up: at first a capture of what trains already, unless it takes
more than ``SHARE`` of the whole run, then the arm with which the run is expected to be over first.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from trainer.report.statistics import Cost, best_at, envelope

EAGER, DERIVING = "eager", "second_order"
MODULES = (EAGER, "regional", "whole", DERIVING)
"""Ways to train modules, each compiling no less than the one before; the last one is an arm once another one could not
take a gradient within the loss."""
# What setting up takes; on H200s in November 2026, as all that follows.
CAPTURE_SECONDS, CAPTURE_STEPS = 0.5, 12
"""0.05 to 0.5 s, or steps' time where the device never waits (1.2 s of GPT-2 at 90 ms, 0.6 s of BERT at 48 ms)."""
COMPILER_SECONDS, EACH_GRAPH, EACH_LAYER, REPEATED = 2.0, 2.0, 0.35, 0.5
"""To start the compiler, for each graph, and for each module with weights of its own in it, of which a repeated one
counts ``REPEATED``: 0.6 to 1.7 times this in 11 of 12 programs, 8 to 78 s."""
CACHED_SECONDS = 5.0
"""Code that is in the compiler's caches is traced and checked again."""
OFF = (0.5, 3.0)
"""How much longer or shorter the machine at hand is taken to need, from what it needed for regions."""
FURTHER_SHAPE, MAX_SHAPES = 0.5, 3
"""Share of a first compile that one for another shape takes (7 of 15 s a bucket), and for how many of these modules are
compiled until sizes are symbolic."""
# What is expected to be saved of a step.
SAVED, SAVED_SYMBOLIC = 0.38, 0.05
"""By compiling eager's modules: 0.28 to 0.58 in 12 programs, and nothing in captions of symbolic sizes."""
WHOLE_OVER_PARTS, WHOLE_OVER_BLOCKS = 0.05, 0.15
"""By one graph over regions, where head and loss are regions, too, and where these are the blocks alone: 0 to 0.03 in
four programs, 0.14 and 0.15 in Llama and T5."""
SAVED_BY_CAPTURE, SAVED_OF_GAPS = 0.5, 0.03
"""By a capture; where the device never waits for the host, the time between kernels (0.9 of 29.5 ms in ResNet-50)."""
PAYS, SHARE, MARGIN = 1.3, 0.025, 0.01
"""``MARGIN``: the share of a step's time that a candidate must save to stay: less is not worth a surprise."""
JUDGED_STEPS = 20
"""Steps after which an arm is judged, about."""


@dataclass(slots=True, kw_only=True, eq=False)
class Arm:
    """One way to train, with what this run, or an earlier one of the same program, found out about it."""

    module: str = EAGER
    captured: bool = False
    switched_at_step: int | None = None
    """Optimizer steps done when it took over; None where it has not."""
    stepped_back_at_step: int | None = None
    setup_seconds: float | None = None
    """Its steps from the switch to the first steady one, over what steady steps would have taken, and the switch."""
    step_seconds: float | None = None
    """Median of its real steps; None where they were never timed."""
    never_waited_steps: int | None = None
    """Timed steps, nearly all of them, in which the device was a step behind the host; None where that is not known."""
    step_seconds_before: float | None = None
    """Of the best arm until then."""
    failed: str | None = None
    """Why it cannot be had."""
    by_shape: dict[Any, list[float]] = field(default_factory=dict)
    """Seconds of its timed steps by the shapes of their batches; of this run alone."""

    @property
    def name(self) -> str:
        """As in ``compile=[...]``."""
        return "+".join([self.module] * (self.module != EAGER) + ["cuda_graph"] * self.captured) or EAGER

    @property
    def seconds(self) -> list[float]:
        """Of each timed step of this run."""
        return [one for each in self.by_shape.values() for one in each]

    def over(self, other: Arm) -> float:
        """Its seconds over those of ``other``."""
        return self.compared(other)[0]

    def compared(self, other: Arm) -> tuple[float, float]:
        """Its seconds over those of ``other``, and the standard error of that: over what is typical of a shape, for the
        shapes that both had; of all where they had too few in common."""
        mine, others = self.seconds, other.seconds
        if not mine or not others:
            assert self.step_seconds is not None
            assert other.step_seconds is not None
            return self.step_seconds / other.step_seconds, 0.0
        shared = self.by_shape.keys() & other.by_shape.keys()
        if sum(len(self.by_shape[shape]) for shape in shared) >= min(5, len(mine)):
            typical = {shape: statistics.median(self.by_shape[shape] + other.by_shape[shape]) for shape in shared}
            mine, others = (
                [one / typical[shape] for shape in shared for one in each.by_shape[shape]] for each in (self, other)
            )
        ratio = statistics.median(mine) / statistics.median(others)
        return ratio, ratio * math.hypot(_error(mine), _error(others))

    def row(self, steps_done: int) -> dict[str, Any]:
        """Of the table in the record, after ``steps_done`` optimizer steps."""
        row: dict[str, Any] = {
            name: value for name, value in asdict(self).items() if name not in ("module", "captured")
        }
        row["steps_timed"], gained = len(self.seconds), None
        del row["by_shape"]
        if self.switched_at_step is not None and self.setup_seconds is not None:
            until = steps_done if self.stepped_back_at_step is None else self.stepped_back_at_step
            known = None not in (self.step_seconds_before, self.step_seconds)
            each = (self.step_seconds_before or 0.0) - (self.step_seconds or 0.0) if known else 0.0
            gained = each * (until - self.switched_at_step) - self.setup_seconds
        return {**row, "gained_seconds": gained}


def _error(seconds: Sequence[float]) -> float:
    """Standard error of the median relative to it, from the median deviation: single slow steps are no spread."""
    if len(seconds) < 2:
        return math.inf
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(one - middle) for one in seconds)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(seconds)) / middle


def compile_seconds(modules: Collection[nn.Module]) -> float:
    """That compiling them, each a graph of its own, is expected to take for batches of one shape."""
    layers = [one for each in modules for one in each.modules() if any(True for _ in one.parameters(recurse=False))]
    different = len({kind_of(one) for one in layers})
    counted = different + REPEATED * (len(layers) - different)
    return COMPILER_SECONDS + EACH_GRAPH * len(modules) + EACH_LAYER * counted


def kind_of(module: nn.Module) -> Any:
    """Equal where a compiler makes the same of two modules."""
    return type(module), tuple(weight.shape for weight in module.parameters())


@dataclass(slots=True, kw_only=True)
class Timings:
    """All arms of a run."""

    arms: dict[tuple[str, bool], Arm] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)
    """``compile_seconds`` by how modules train."""
    blocks_alone: bool = False
    """Whether regions are repeated blocks alone, so that head and loss stay eager."""
    cached: frozenset[str] = frozenset()
    """What an earlier run compiled into caches that are there."""
    shapes: Counter[Any] = field(default_factory=Counter)
    """Steps by the shape of their batch."""
    static: bool = False
    """Whether modules are compiled anew for each shape, and never for symbolic sizes."""

    def take_in(self, module: str, *, captures: bool) -> None:
        """Arms of one more way to train modules, captured as well where steps may be."""
        for captured in (False, True) if captures else (False,):
            failed = self.arms[EAGER, True].failed if captured and (EAGER, True) in self.arms else None
            self.arms.setdefault((module, captured), Arm(module=module, captured=captured, failed=failed))

    # ---- what it costs

    def expected_setup(self, arm: Arm, now: Arm) -> float:
        """Seconds for which the training stands still until ``arm`` trains, from ``now``."""
        if arm.setup_seconds is not None:
            return arm.setup_seconds
        seconds = 0.0 if arm.module in (EAGER, now.module) else self._compile_seconds(arm.module)
        if arm.captured:
            waits = 0.0 if now.never_waited_steps is None else CAPTURE_STEPS * (now.step_seconds or 0.0)
            seconds += max(CAPTURE_SECONDS, waits)
        return seconds

    def _compile_seconds(self, module: str) -> float:
        tried = {arm.module: arm.setup_seconds for arm in self.arms.values() if arm.switched_at_step is not None}
        if module in tried or module in self.cached:
            return CACHED_SECONDS
        seconds, regional = self.compiling[module], tried.get("regional")
        if regional and "regional" not in self.cached:
            seconds *= min(max(regional / self.compiling["regional"], OFF[0]), OFF[1])
        further = max(0, len(self.shapes) - 1)
        return seconds * (1 + FURTHER_SHAPE * (further if self.static else min(further, MAX_SHAPES)))

    def new_shapes(self, steps: float) -> float:
        """Shapes that the next ``steps`` steps are expected to bring for the first time, from those seen once and twice
        (Chao's estimate of unseen species, extrapolated as by Colwell et al. 2012, eq. 9)."""
        once, twice = (sum(times == count for times in self.shapes.values()) for count in (1, 2))
        unseen = once**2 / (2 * twice) if twice else once * (once - 1) / 2
        if not unseen:
            return 0.0
        return unseen * (1 - (1 - once / (self.shapes.total() * unseen + once)) ** steps)

    def capture_seconds(self, arm: Arm, best: Arm, steps: float, captured: Container[Any] = ()) -> float:
        """That ``steps`` steps of ``arm`` take for captures of batches of further shapes, over those of ``best``."""
        again = sum(shape not in captured for shape in self.shapes) - (not captured)
        new = 0.0 if best.captured else self.new_shapes(steps)
        return CAPTURE_SECONDS * (max(0, again) + new) if arm.captured else 0.0

    # ---- what it saves

    def expected_over(self, arm: Arm, best: Arm) -> float:
        """Seconds of a step of ``arm`` over one of ``best``: measured, else expected of what differs between them."""
        if arm.step_seconds is not None:
            return arm.over(best)
        if arm.module == best.module:
            return 1.0 - (SAVED_BY_CAPTURE if best.never_waited_steps is None else SAVED_OF_GAPS)
        timed, eager = best, self.arms[EAGER, arm.captured]
        if eager.step_seconds is not None:
            # Regions that saved little have left something out, which one graph may have.
            little = best.module == "regional" and best.over(eager) > 1 - SAVED / 2
            timed = eager if little or best.captured != arm.captured else best
        return timed.over(best) * self._left(arm.module) / self._left(timed.module)

    def _left(self, module: str) -> float:
        """The share of eager's step that is left."""
        if module == EAGER:
            return 1.0
        if not self.static and len(self.shapes) > 2:  # a second one may be a last, smaller batch
            return 1.0 - SAVED_SYMBOLIC
        more = WHOLE_OVER_BLOCKS if self.blocks_alone else WHOLE_OVER_PARTS
        return (1 - SAVED) * (1.0 if module == "regional" else 1 - more)

    # ---- the rule

    def next(self, best: Arm, steps_left: float, age_seconds: float) -> Arm | None:
        """The arm to time after ``best``; None where the steps to come pay for none. ``age_seconds`` is how long the
        process has run. Where this run has timed nothing yet, it is what an earlier one found to be best, or eager."""
        if best.step_seconds is None:
            return best
        timed, left, costs = bool(best.by_shape), steps_left * best.step_seconds, dict[Arm, Cost]()
        for arm in self.arms.values():
            known, compiles = arm.step_seconds is not None, arm.module != best.module
            if arm is best or arm.switched_at_step is not None or arm.failed or not (timed or known):
                continue
            if best.captured and not (arm.captured or self.arms[arm.module, True].failed):
                continue
            if arm.captured and not best.captured and compiles and not known:  # one thing at a time
                continue
            setup, over = self.expected_setup(arm, best), self.expected_over(arm, best)
            captures = self.capture_seconds(arm, best, steps_left)
            saved = left * (1 - over) - captures
            if saved <= (setup + MARGIN * left if known else PAYS * setup):
                continue
            if known or compiles:
                costs[arm] = Cost(step_seconds=best.step_seconds * over, warmup_seconds=setup + captures)
            elif setup + self._captures_tried() <= SHARE * (age_seconds + left):
                return arm
        if costs:  # which a comparison of runs would advise for so many steps
            return best_at(envelope(costs, None), steps_left)
        return None if timed else best

    def _captures_tried(self) -> float:
        """Seconds that captures of further shapes are expected to take until captured steps are judged."""
        steps = self.shapes.total()
        different = sum(1 - (1 - times / steps) ** JUDGED_STEPS for times in self.shapes.values())
        return CAPTURE_SECONDS * max(0.0, different - 1)


def table_lines(table: dict[str, dict[str, Any]], chosen: str) -> str:
    """What was tried, for a person."""

    def figure(value: float | None, factor: float = 1.0) -> str:
        return f"{'' if value is None else f'{value * factor:,.1f}':>11}"

    wide = max(map(len, ["auto tried", *table]))
    lines = [f"{'auto tried':{wide}}{'from':>10}{'to':>10}   set-up s  ms before  ms a step   gained s"]
    for name, row in table.items():
        if (began := row["switched_at_step"]) is not None:
            ended = "" if row["stepped_back_at_step"] is None else f"{row['stepped_back_at_step']:,}"
            figures = figure(row["setup_seconds"]) + figure(row["step_seconds_before"], 1e3)
            figures += figure(row["step_seconds"], 1e3) + figure(row["gained_seconds"])
            # The line of the choice says in full why an arm is out.
            why = textwrap.shorten((row["failed"] or "").partition("; ")[0], 80, placeholder=" ...")
            stays = "stays" if name == chosen else ""
            lines.append(f"{name:{wide}}{began + 1:>10,}{ended:>10}{figures}  {why or stays}".rstrip())
    return "\n".join(lines)
