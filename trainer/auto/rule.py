"""The rule of ``compile=auto``: which arm the steps to come can pay for, from what was measured and plain bounds.

An arm is one way to train: modules eager, ``regional`` or ``whole``, steps captured or not. One rule decides what is
tried next, of the arms that differ in one thing from one that was timed, and whose saving in the steps to come may be
``PAYS`` times what setting up is expected to take. Captures of what trains already come first, where their seconds are
at most ``SHARE`` of the whole run, from the start of the process on; of what has to be compiled, that with which the
run is expected to be over first, since seconds spent on another arm are lost. No torch.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies import Strategy
from strategies.modules import Auto
from trainer.advice import program
from trainer.report.statistics import best_at, least_total

EAGER, MODULES, DERIVING = "eager", ("eager", "regional", "whole"), "second_order"
"""Ways to train modules; the last one is an arm once another one could not take a gradient within the loss."""
SETUP_SECONDS = {"regional": 15.0, "whole": 35.0, DERIVING: 35.0, "cuda_graph": 0.5}
"""What setting up is expected to take where nothing is known: compiling took 6 to 35 s and 13 to 60 s, capturing 0.05
to 0.5 s, on H200s in November 2026."""
CACHED_SECONDS = {"regional": 4.0, "whole": 6.0, DERIVING: 6.0}
"""The same for code that is in the compiler's caches: it is traced and checked again."""
COMPILER_SECONDS, EACH_GRAPH, EACH_LAYER = 2.0, 2.0, 0.35
"""Seconds of a compile where it is known what is compiled: to start, for each graph, and for each module with weights
of its own in it, of which a repeated one counts ``REPEATED``. On H200s (docs/log.md, 2026-11-27) it took 8 to 78 s in
12 programs, 0.6 to 1.7 times this in all but one: Swin's blocks are compiled anew for other windows, 80 s for 20."""
REPEATED = 0.5
OFF = (0.5, 3.0)
"""How much longer or shorter than that the machine at hand is taken to need, from what it needed for regions."""
FURTHER_SHAPE = 0.5
"""Share of a first compile that one for another shape takes: 7 of 15 s a bucket, in captioning on an H200."""
MAX_SAVED = {"regional": 0.4, "whole": 0.5, DERIVING: 0.5}
"""Share of a step that compiling eager's modules is expected to save at most."""
MAX_SAVED_BY_SYMBOLIC, SYMBOLIC_SHAPE = 0.05, 1.5
"""The same where sizes become symbolic, and the share of a first compile that it takes: captions under ``regional``
took 22 s and 1.15 to 1.27 of eager's step, on H200s and an H100."""
WHOLE_OVER_REGIONAL, WHOLE_OVER_BLOCKS = 0.05, 0.2
"""Share of a step with compiled regions that one graph saves at most, where regions saved about as much as they can: 0
to 3% in four programs that declare their head and loss as parts; 14 and 15% in Llama and T5, of which regions are the
blocks alone."""
SAVED, SAVED_MORE, SAVED_MORE_BY_BLOCKS = 0.35, 0.015, 0.08
"""Share of a step that ``regional`` usually saves, and ``whole`` beyond that, where head and loss are parts and where
regions are the blocks alone: 0.28 to 0.58, 0 to 0.02, 0.01 to 0.12 in 12 programs whose steps were captured."""
MAX_SAVED_BY_CAPTURE = 0.5
"""Share of a step that a CUDA graph may save, all that the host takes, where eager's capture did not save more: T5's
saved 0.74."""
MAX_SAVED_OF_GAPS, CAPTURE_STEPS = 0.03, 12
"""Where the device never waits for the host: the share of a step that lies between kernels (0.9 of 29.5 ms in
ResNet-50, docs/log.md), and steps whose time a capture takes (1.2 s of GPT-2 at 90 ms, 0.6 s of BERT at 48 ms)."""
JUDGED_STEPS = 20
"""Steps after which an arm is judged, about."""
PAYS, SHARE, MARGIN = 1.3, 0.025, 0.01
"""``MARGIN``: the share of a step's time that a candidate must save to stay: less is not worth a surprise."""
SURE = 3.0
"""How many times the standard error a difference has to be, until no further step is timed for it."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """One way to train, with what this run, or an earlier one of the same program, found out about it."""

    module: str = EAGER
    """``eager``, ``regional``, ``whole`` or ``second_order``."""
    captured: bool = False
    step_seconds: float | None = None
    """Median of its real steps; None where they were never timed."""
    setup_seconds: float | None = None
    """Its steps from the switch to the first steady one, over what steady steps would have taken, and the switch."""
    by_shape: dict[Any, list[float]] = field(default_factory=dict)
    """Seconds of its timed steps by the shapes of their batches; of this run alone."""
    never_waited_steps: int | None = None
    """Timed steps, nearly all of them, in which the device was a step behind the host; None where that is not known."""
    switched_at_step: int | None = None
    """Optimizer steps done when it took over for the first time; None where it has not."""
    stepped_back_at_step: int | None = None
    before: Arm | None = None
    """The best arm until then."""
    failed: str | None = None
    """Why it cannot be had."""

    @property
    def name(self) -> str:
        """As in ``compile=[...]``."""
        names = [name for name in (self.module,) if name != EAGER] + (["cuda_graph"] if self.captured else [])
        return "+".join(names) or EAGER

    @property
    def seconds(self) -> list[float]:
        """Of each timed step of this run."""
        return [one for each in self.by_shape.values() for one in each]

    def over(self, other: Arm) -> float:
        """Its seconds over those of ``other``."""
        return self.compared(other)[0]

    def compared(self, other: Arm) -> tuple[float, float]:
        """Its seconds over those of ``other``, and the standard error of that, from batches of the shapes that both
        had; of all where they had too few in common."""
        mine, others = _relative(self.by_shape, other.by_shape)
        if not mine or not others:
            assert self.step_seconds is not None
            assert other.step_seconds is not None
            return self.step_seconds / other.step_seconds, 0.0
        ratio = statistics.median(mine) / statistics.median(others)
        return ratio, ratio * math.hypot(_error(mine), _error(others))

    def facts(self, steps_done: int) -> dict[str, Any]:
        """A line of the table, after ``steps_done`` optimizer steps."""
        before = None if self.before is None else self.before.step_seconds
        gained = None
        if self.switched_at_step is not None and self.setup_seconds is not None:
            until = steps_done if self.stepped_back_at_step is None else self.stepped_back_at_step
            each = 0.0 if before is None or self.step_seconds is None else before - self.step_seconds
            gained = each * (until - self.switched_at_step) - self.setup_seconds
        own = ("switched_at_step", "stepped_back_at_step", "setup_seconds", "step_seconds")
        return {
            **{name: getattr(self, name) for name in own},
            "steps_timed": len(self.seconds),
            "never_waited_steps": self.never_waited_steps,
            "step_seconds_before": before,
            "gained_seconds": gained,
            "failed": self.failed,
        }


def _relative(mine: dict[Any, list[float]], others: dict[Any, list[float]]) -> tuple[list[float], list[float]]:
    """Seconds of both over what is typical of a shape, for the shapes that both had."""
    shared = mine.keys() & others.keys()
    if sum(len(mine[shape]) for shape in shared) < min(5, sum(map(len, mine.values()))):
        return [one for each in mine.values() for one in each], [one for each in others.values() for one in each]
    typical = {shape: statistics.median([*mine[shape], *others[shape]]) for shape in shared}
    first, second = ([one / typical[shape] for shape in shared for one in each[shape]] for each in (mine, others))
    return first, second


def _error(seconds: Sequence[float]) -> float:
    """Standard error of the median relative to it, from the median deviation: single slow steps are no spread."""
    if len(seconds) < 2:
        return math.inf
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(one - middle) for one in seconds)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(seconds)) / middle


@dataclass(slots=True, kw_only=True)
class Timings:
    """All arms of a run."""

    arms: dict[tuple[str, bool], Arm]
    kinds: int | None = None
    """Kinds of regions that ``regional`` compiles; None where nobody knows."""
    layers: dict[str, float] = field(default_factory=dict)
    """Modules with weights of their own that ``regional`` and ``whole`` compile, a repeated one as ``REPEATED``."""
    blocks_alone: bool = False
    """Whether these are repeated blocks alone, so that head and loss stay eager."""
    cached: frozenset[str] = frozenset()
    """What an earlier run compiled, ``regional`` or ``whole``, into caches that are there."""
    shapes: Counter[Any] = field(default_factory=Counter)
    """Steps by the shape of their batch."""
    max_further_shapes: float = 0
    """Shapes of batches after the first for which modules are compiled again."""

    @property
    def symbolic(self) -> bool:
        """Whether compiled code gets symbolic sizes. A second shape may be a last, smaller batch."""
        return self.max_further_shapes == 1 and len(self.shapes) > 2

    def take_in(self, module: str, *, captures: bool) -> None:
        """Arms of one more way to train modules, captured as well where steps may be."""
        for captured in (False, True) if captures else (False,):
            failed = self.arms[EAGER, True].failed if captured and (EAGER, True) in self.arms else None
            self.arms.setdefault((module, captured), Arm(module=module, captured=captured, failed=failed))

    def of_module(self, module: str) -> list[Arm]:
        """Its arms, captured and not."""
        return [arm for (name, _), arm in self.arms.items() if name == module]

    # ---- what it costs

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
        return SETUP_SECONDS["cuda_graph"] * (max(0, again) + new) if arm.captured else 0.0

    def _captures_tried(self) -> float:
        """Seconds that captures of further shapes are expected to take until captured steps are judged."""
        steps = self.shapes.total()
        different = sum(1 - (1 - times / steps) ** JUDGED_STEPS for times in self.shapes.values())
        return SETUP_SECONDS["cuda_graph"] * max(0.0, different - 1)

    def expected_setup(self, arm: Arm, now: Arm) -> float:
        """Seconds for which the training stands still until ``arm`` trains, from ``now``."""
        if arm.setup_seconds is not None:
            return arm.setup_seconds
        seconds = 0.0 if arm.module in (EAGER, now.module) else self._compile_seconds(arm.module)
        if arm.captured:
            waits = 0.0 if now.never_waited_steps is None else CAPTURE_STEPS * (now.step_seconds or 0.0)
            seconds += max(SETUP_SECONDS["cuda_graph"], waits)
        return seconds

    def _compile_seconds(self, module: str) -> float:
        tried = [one for one in self.arms.values() if one.module == module and one.switched_at_step is not None]
        if tried or module in self.cached:
            return CACHED_SECONDS[module]
        seconds = self._bound_of_compile(module)
        regional = [one.setup_seconds for one in self.arms.values() if one.module == "regional" and one.setup_seconds]
        if module == "whole" and regional and "regional" not in self.cached:
            seconds *= min(max(max(regional) / self._bound_of_compile("regional"), OFF[0]), OFF[1])
        further = FURTHER_SHAPE * min(self.max_further_shapes, max(0, len(self.shapes) - 1))
        return seconds * (1 + (SYMBOLIC_SHAPE if self.symbolic else further))

    def _bound_of_compile(self, module: str) -> float:
        """For batches of one shape, on a machine of which nothing is known."""
        if module not in self.layers:
            return SETUP_SECONDS[module]
        graphs = self.kinds or 1 if module == "regional" else 1
        return COMPILER_SECONDS + EACH_GRAPH * graphs + EACH_LAYER * self.layers[module]

    # ---- what it saves

    def most_saved(self, arm: Arm, best: Arm) -> float:
        """The largest share of a step of ``best`` that ``arm`` may save: what was measured, else the least of what each
        timed arm allows; nothing where none of these differs from it in one thing alone."""
        if arm.step_seconds is not None:
            return 1 - arm.over(best)
        timed = [one for one in self.arms.values() if one.step_seconds is not None]
        if not any((one.module == arm.module) is not (one.captured == arm.captured) for one in timed):
            return 0.0
        return min(1 - (1 - self._bound(one, arm)) * one.over(best) for one in timed)

    def _bound(self, timed: Arm, arm: Arm) -> float:
        if timed.module != arm.module and timed.captured != arm.captured:
            between = Arm(module=arm.module, captured=timed.captured, never_waited_steps=timed.never_waited_steps)
            return 1 - (1 - self._bound(timed, between)) * (1 - self._bound(between, arm))
        if timed.module == arm.module:
            if not arm.captured:  # no graph is given up to see whether it was in vain
                return 0.0
            eager, captured = self.arms[EAGER, False], self.arms[EAGER, True]
            known = None not in (eager.step_seconds, captured.step_seconds)
            of_gaps = timed.never_waited_steps is not None
            most = MAX_SAVED_OF_GAPS if of_gaps else MAX_SAVED_BY_CAPTURE
            return (min if of_gaps else max)(most, 1 - captured.over(eager)) if known else most
        order = (*MODULES, DERIVING)
        if order.index(arm.module) < order.index(timed.module):
            return 0.0
        most = MAX_SAVED_BY_SYMBOLIC if self.symbolic else MAX_SAVED[arm.module]
        if timed.module == EAGER:
            return most
        eager = self.arms[EAGER, arm.captured]
        saved = 0.0 if eager.step_seconds is None else 1 - timed.over(eager)
        if saved < 0:
            return 1.0  # regions that lose say nothing of one graph
        if eager.step_seconds is not None and saved < MAX_SAVED["regional"] / 2:
            return most  # regions that saved little have left something out that one graph may have
        return WHOLE_OVER_BLOCKS if self.blocks_alone else WHOLE_OVER_REGIONAL

    # ---- the rule

    def next(self, best: Arm, steps_left: float, age_seconds: float) -> Arm | None:
        """The arm to try after ``best``; None where the steps to come pay for none. ``age_seconds`` is how long the
        process has run."""
        if best.step_seconds is None:
            return None
        left, worth = steps_left * best.step_seconds, list[tuple[float, float, Arm]]()
        for arm in self.arms.values():
            if arm is best or arm.switched_at_step is not None or arm.failed:
                continue
            if best.captured and not (arm.captured or self.arms[arm.module, True].failed):
                continue
            setup = self.expected_setup(arm, best)
            saved = left * self.most_saved(arm, best) - self.capture_seconds(arm, best, steps_left)
            if saved <= setup * (PAYS if arm.step_seconds is None else 1.0):
                continue
            tried = setup + self._captures_tried()
            if arm.step_seconds is None and arm.module == best.module and tried > SHARE * (age_seconds + left):
                continue
            worth.append((setup, saved, arm))
        compiled = [one for one in worth if one[2].module == best.module or one[2].step_seconds is not None]
        if compiled:
            return max(compiled, key=lambda one: one[1] / max(one[0], 1e-9))[2]
        return min(worth, key=lambda one: self._total(one[2], one[0], best, left))[2] if worth else None

    def _total(self, arm: Arm, setup: float, best: Arm, left: float) -> float:
        """Seconds until the end under ``arm``, which was not timed, if it saves what such arms usually do."""
        usual = {EAGER: 0.0, "regional": SAVED, DERIVING: SAVED}
        usual["whole"] = SAVED + (SAVED_MORE_BY_BLOCKS if self.blocks_alone else SAVED_MORE)
        saved = 1 - (1 - usual[arm.module]) / (1 - usual[best.module])
        return setup + left * (1 - min(saved, self.most_saved(arm, best)))

    def best_known(self, base: Arm, steps_left: float) -> Arm:
        """The arm of least total time by what earlier runs measured; ``base`` unless more than ``MARGIN`` is saved."""
        if base.step_seconds is None:
            return base
        known = [arm for arm in self.arms.values() if arm.step_seconds is not None and arm.failed is None]
        setup = {arm.name: 0.0 if arm is base else self.expected_setup(arm, base) for arm in known}
        lines = {arm.name: (setup[arm.name], arm.step_seconds or 0.0) for arm in known}
        name = best_at(least_total(lines), steps_left)
        total, of_base = (lines[one][0] + steps_left * lines[one][1] for one in (name, base.name))
        best = next(arm for arm in known if arm.name == name)
        return best if total < (1 - MARGIN) * of_base else base


@dataclass(slots=True, kw_only=True)
class Choice:
    """What ``compile=auto`` did in a run, for the record."""

    chosen: str
    planned_steps: int | None = None
    decided_at_step: int | None = None
    """None where the run ended before."""
    setup_seconds: float = 0.0
    """Of all that was tried."""
    gained_seconds: float | None = None
    """Against training on as it began, by the medians of each arm; None where nothing took over."""
    remembered: str | None = None
    """When the run was whose measurements were used."""
    reason: str | None = None
    """Why nothing was tried, if so."""
    summary: str = ""
    """All of it in one sentence."""
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of each arm, in the order in which they were tried."""

    def lines(self) -> str:
        """The table, for a person."""
        columns = {"setup_seconds": 1.0, "step_seconds_before": 1e3, "step_seconds": 1e3, "gained_seconds": 1.0}
        rows = [["auto tried", "from", "to", "set-up s", "ms before", "ms a step", "gained s", ""]]
        for name, row in self.table.items():
            if (began := row["switched_at_step"]) is not None:
                ended = row["stepped_back_at_step"]
                steps = [f"{began + 1:,}", "" if ended is None else f"{ended:,}"]
                figures = ["" if row[key] is None else f"{row[key] * factor:,.1f}" for key, factor in columns.items()]
                rows.append(
                    [name, *steps, *figures, _first_words(row["failed"]) or ("stays" if name == self.chosen else "")]
                )
        kept = [column for column in zip(*rows, strict=True) if any(column[1:]) or not column[0]]
        rows = [list(row) for row in zip(*kept, strict=True)]
        widths = [max(map(len, column)) for column in kept][:-1]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]] for row in rows]
        return "\n".join("  ".join(line).rstrip() for line in lines)


def _first_words(reason: str | None) -> str:
    """Of why an arm is out, which the line of the choice says in full."""
    return textwrap.shorten((reason or "").partition("; ")[0], 80, placeholder=" ...")


def refuse_choice(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError where ``auto`` is among strategies that are looked at: only a run has steps to choose for."""
    if any(isinstance(strategy, Auto) for strategy in strategies):
        raise ValueError(
            f"compile=auto: only a run chooses; {' '.join(program())} with the same arguments says what (`auto: ...`), "
            "name that here, as in compile=[regional,cuda_graph]"
        )
