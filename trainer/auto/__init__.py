"""The rule of ``compile=auto``: which arm the steps to come can pay for, from what was measured and plain bounds.

An arm is one way to train: modules eager, ``regional`` or ``whole``, steps captured or not. One rule decides what is
tried. Modules are compiled in another way only where the most that this can save is ``PAYS`` times the seconds for
which the training is expected to stand still. What a helper process compiles saves nothing until it is ready. Steps are
captured only where those seconds are at most ``SHARE`` of the whole run, from the start of the process on. Torch is
imported only where a device is asked: ``Ahead`` tells whether the host keeps ahead of it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies import Program, Strategy
from strategies.modules import Auto
from strategies.options import cache_directories
from tasks.base import cache_folder
from trainer.telemetry.files import finite, written_whole

if TYPE_CHECKING:
    import torch

    from strategies.loop import Loop

EAGER = "eager"
TAKING_OVER, HELPER = "{} after a helper", "{} in a helper"
"""Keys of seconds: to take over what a helper process has compiled, and from the helper's start until it has."""
SETUP_SECONDS = {
    "regional": 15.0,
    "whole": 35.0,
    "cuda_graph": 0.4,
    "regional after a helper": 4.0,
    "whole after a helper": 6.0,
    "regional in a helper": 35.0,
    "whole in a helper": 70.0,
}
"""What taking over is expected to take where this program has not run before, the comparison with eager included. On
H200s (docs/results) compiling took 6 to 35 s, 13 to 60 s, capturing 0.05 to 0.5 s, and a helper 34 to 42 s for
regions."""
JUDGED_STEPS = 15
"""Steps after which an arm is judged at the soonest."""
FURTHER_SHAPE = 0.5
"""Share of a first compile that one for another shape takes: 7 of 15 s a bucket, in captioning on an H200."""
BESIDE_HELPER = 0.1
"""By how much steps are longer while a helper compiles: 9% in captioning, 10% in ResNet-50, both captured, on H200s."""
MAX_SAVED = 0.35
"""Share of a step that compiling its modules saves at most: it runs 1.35 to 1.55 times as fast in six models there."""
MAX_SAVED_BY_SYMBOLIC, SYMBOLIC_SHAPE = 0.05, 1.5
"""The same where sizes become symbolic, and the share of a first compile that it takes: captions under ``regional``
took 22 s and 1.15 to 1.27 of eager's step, on H200s and an H100."""
WHOLE_OVER_REGIONAL = 0.05
"""Share of a step with compiled regions that one graph saves at most: 0 to 3% there."""
MAX_SAVED_BY_CAPTURE = 0.5
"""Share of a step that a CUDA graph may save: all that the host takes. It only puts the arms in order."""
MAX_SAVED_OF_GAPS, CAPTURE_STEPS = 0.03, 12
"""Where the device never waits for the host: the share of a step that lies between kernels (0.9 of 29.5 ms in
ResNet-50, docs/log.md), and steps whose time a capture takes (1.2 s of GPT-2 at 90 ms, 0.6 s of BERT at 48 ms)."""
NEVER_WAITED = "the device never waited for the host in {} steps"
PAYS, SHARE, MARGIN = 1.5, 0.02, 0.02
"""``MARGIN``: the share of a step's time that a candidate must save to stay: less is not worth a surprise."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """One way to train, with what this run, or an earlier one of the same program, found out about it."""

    module: str = EAGER
    """``eager``, ``regional`` or ``whole``."""
    captured: bool = False
    step_seconds: float | None = None
    """Median of its real steps; None where they were never timed."""
    setup_seconds: float | None = None
    """From the switch to its first steady step, over what its steady steps would have taken."""
    by_shape: dict[Any, float] = field(default_factory=dict)
    """Median seconds of a step by the shapes of its batch; of this run alone."""
    seconds: list[float] = field(default_factory=list)
    """Of each of these steps."""
    helper_seconds: float | None = None
    """That a helper process took to compile its modules while the training went on."""
    steps_timed: int = 0
    never_waited_steps: int | None = None
    """Timed steps, nearly all of them, in which the device had its next kernel at every moment; None where that is not
    known."""
    switched_at_step: int | None = None
    """Optimizer steps done when it took over for the first time; None where it has not."""
    stepped_back_at_step: int | None = None
    before: Arm | None = None
    """What trained until then."""
    cached: bool = False
    """Whether an earlier run compiled it, into caches that are there."""
    failed: str | None = None
    """Why it cannot be had."""
    not_ready: str | None = None
    """Why no helper process has compiled it, in this run."""

    @property
    def name(self) -> str:
        """As in ``compile=[...]``."""
        names = [name for name in (self.module,) if name != EAGER] + (["cuda_graph"] if self.captured else [])
        return "+".join(names) or EAGER

    def over(self, other: Arm) -> float:
        """Its seconds over those of ``other``, on batches of the shapes that both had; of all where they had none."""
        shared = self.by_shape.keys() & other.by_shape.keys()
        if shared:
            return sum(self.by_shape[shape] for shape in shared) / sum(other.by_shape[shape] for shape in shared)
        assert self.step_seconds is not None
        assert other.step_seconds is not None
        return self.step_seconds / other.step_seconds

    def facts(self, steps_done: int) -> dict[str, Any]:
        """A line of the table, after ``steps_done`` optimizer steps."""
        before = None if self.before is None else self.before.step_seconds
        gained = None
        if self.switched_at_step is not None and self.setup_seconds is not None:
            until = steps_done if self.stepped_back_at_step is None else self.stepped_back_at_step
            each = 0.0 if before is None or self.step_seconds is None else before - self.step_seconds
            gained = each * (until - self.switched_at_step) - self.setup_seconds
        own = (
            *("switched_at_step", "stepped_back_at_step", "helper_seconds", "setup_seconds", "step_seconds"),
            *("steps_timed", "never_waited_steps"),
        )
        return {
            **{name: getattr(self, name) for name in own},
            "step_seconds_before": before,
            "gained_seconds": gained,
            "failed": self.failed or self.not_ready,
        }


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """All arms of a run."""

    arms: dict[tuple[str, bool], Arm]
    helped: dict[str, bool] = field(default_factory=dict)
    """What a helper process compiles, ``regional`` or ``whole``, and whether it has."""
    shapes: Counter[Any] = field(default_factory=Counter)
    """Steps by the shape of their batch."""
    max_further_shapes: float = 0
    """Shapes of batches after the first for which modules are compiled again."""

    @property
    def symbolic(self) -> bool:
        """Whether compiled code gets symbolic sizes. A second shape may be a last, smaller batch."""
        return self.max_further_shapes == 1 and len(self.shapes) > 2

    def new_shapes(self, steps: int) -> float:
        """Shapes that the next ``steps`` steps are expected to bring for the first time, from those seen once and twice
        (Chao's estimate of unseen species, extrapolated as by Colwell et al. 2012, eq. 9)."""
        once, twice = (sum(times == count for times in self.shapes.values()) for count in (1, 2))
        unseen = once**2 / (2 * twice) if twice else once * (once - 1) / 2
        if not unseen:
            return 0.0
        return unseen * (1 - (1 - once / (self.shapes.total() * unseen + once)) ** steps)

    def capture_seconds(self, arm: Arm, best: Arm, steps: int, captured: Container[Any] = ()) -> float:
        """That ``steps`` steps of ``arm`` take for captures of batches of further shapes, over those of ``best``."""
        again = sum(shape not in captured for shape in self.shapes) - (not captured)
        new = 0.0 if best.captured else self.new_shapes(steps)
        return SETUP_SECONDS["cuda_graph"] * (max(0, again) + new) if arm.captured else 0.0

    def captures_tried(self) -> float:
        """Seconds that captures of further shapes are expected to take until captured steps are judged."""
        steps = self.shapes.total()
        different = sum(1 - (1 - times / steps) ** JUDGED_STEPS for times in self.shapes.values())
        return SETUP_SECONDS["cuda_graph"] * max(0.0, different - 1)

    def expected_setup(self, arm: Arm, now: Arm) -> float:
        """Seconds for which the training stands still until ``arm`` trains, from ``now``."""
        changed = [arm.module] if arm.module not in (EAGER, now.module) else []
        if arm.setup_seconds is not None and not any(one in self.helped for one in changed):
            return arm.setup_seconds
        changes = [TAKING_OVER.format(one) if one in self.helped else one for one in changed]
        further = FURTHER_SHAPE * min(self.max_further_shapes, max(0, len(self.shapes) - 1))  # also after a helper
        capture = SETUP_SECONDS["cuda_graph"] if arm.captured else 0.0
        if capture and now.never_waited_steps is not None:
            capture = max(capture, CAPTURE_STEPS * (now.step_seconds or 0.0))
        again = (SYMBOLIC_SHAPE if self.symbolic else further) * sum(SETUP_SECONDS[one] for one in changed)
        return sum(SETUP_SECONDS[change] for change in changes) + again + capture

    def needs_helper(self, arm: Arm, now: Arm) -> bool:
        """Whether a helper process has to compile ``arm`` before it can take over from ``now``."""
        return arm.module != now.module and self.helped.get(arm.module) is False

    def most_saved(self, arm: Arm, best: Arm) -> float:
        """The largest share of a step of ``best`` that ``arm`` may save."""
        if arm.step_seconds is not None and best.step_seconds is not None:
            return 1 - arm.over(best)
        if arm.module == best.module:
            if best.never_waited_steps is None:
                return MAX_SAVED_BY_CAPTURE
            captured = self.arms.get((EAGER, True))
            if captured is None or captured.step_seconds is None:
                return MAX_SAVED_OF_GAPS
            return min(MAX_SAVED_OF_GAPS, 1 - captured.over(self.arms[EAGER, False]))  # compiled code has fewer gaps
        eager, regional = self.arms[EAGER, arm.captured], self.arms.get(("regional", arm.captured))
        most = MAX_SAVED_BY_SYMBOLIC if self.symbolic else MAX_SAVED
        least = (1 - most) * (1.0 if eager.step_seconds is None else eager.over(best))
        if arm.module == "whole" and regional is not None and None not in (regional.step_seconds, eager.step_seconds):
            # Where regions saved little, they have left something out that one graph may have.
            bound = (1 - WHOLE_OVER_REGIONAL) * regional.over(best)
            least = max(least, bound) if regional.over(eager) < 1 - most / 2 else least
        return 1 - least

    def still_pays(self, module: str, best: Arm, steps_left: int) -> bool:
        """Whether the steps left would pay for ``module``, which a helper is at work on, if it were ready now."""
        ready = replace(self, helped={**self.helped, module: True})
        return best.step_seconds is None or ready.next(best, steps_left, math.inf, module=module) is not None

    def next(
        self, best: Arm, steps_left: int, age_seconds: float, *, helper: bool = False, module: str | None = None
    ) -> Arm | None:
        """The arm to try after ``best``, that with the most to gain first; None where no step pays for any.

        One thing at a time: the modules compiled in another way, or the steps captured. ``age_seconds`` is how long
        the process has run. ``helper``: among those that a helper process has to compile first, else among the others.
        ``module``: among those alone that compile modules in this way.
        """
        if best.step_seconds is None:
            return None
        worth: list[tuple[float, Arm]] = []
        for arm in self.arms.values():
            out = arm.switched_at_step is not None or arm.failed or arm.not_ready or arm is best
            if out or (arm.module != best.module and arm.captured != best.captured):
                continue
            if self.needs_helper(arm, best) is not helper or module not in (None, arm.module):
                continue
            takes = SETUP_SECONDS[HELPER.format(arm.module)] if helper else 0.0
            left = max(0.0, steps_left * best.step_seconds - takes)
            saved = left * self.most_saved(arm, best) - BESIDE_HELPER * takes
            saved -= self.capture_seconds(arm, best, steps_left)
            setup = self.expected_setup(arm, best)
            capturing = arm.module == best.module
            if arm.step_seconds is not None:
                pays = saved > setup
            elif capturing:
                factor = 1.0 if best.never_waited_steps is None else PAYS
                pays = saved > factor * setup and setup + self.captures_tried() <= SHARE * (age_seconds + left)
            else:
                pays = saved > PAYS * setup
            if pays and (arm.captured or not capturing):  # no graph is given up to see whether it was in vain
                worth.append((saved - setup, arm))
        return max(worth, key=lambda one: one[0])[1] if worth else None

    def best_known(self, base: Arm, steps_left: int) -> Arm:
        """The arm of least total time by what earlier runs measured; ``base`` unless more than ``MARGIN`` is saved."""
        if base.step_seconds is None:
            return base
        known = [arm for arm in self.arms.values() if arm.step_seconds is not None and arm.failed is None]
        setup = {arm.name: 0.0 if arm is base else self.expected_setup(arm, base) for arm in known}
        totals = {arm.name: steps_left * (arm.step_seconds or 0.0) + setup[arm.name] for arm in known}
        best = min(known, key=lambda arm: totals[arm.name])
        return best if totals[best.name] < (1 - MARGIN) * totals[base.name] else base

    def recall(self, file: Path) -> str | None:
        """Fill in what earlier runs measured; returns when the newest of this program did, None where none has."""
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                return None
            here = cache_directories()["TORCHINDUCTOR_CACHE_DIR"]
            warm = kept["cache_directory"] == str(here) and here.is_dir() and any(here.iterdir())
            for arm in self.arms.values():
                if (values := kept["arms"].get(arm.name)) is None:
                    continue
                arm.step_seconds, setup = values["step_seconds"], values["setup_seconds"]
                arm.failed, arm.cached = arm.failed or values["failed"], warm and bool(setup)
                # That run may have compiled what is there now, or found it.
                if setup is not None and arm.module != EAGER:
                    loads, compiles = SETUP_SECONDS[TAKING_OVER.format(arm.module)], SETUP_SECONDS[arm.module]
                    setup = min(setup, loads) if warm else max(setup, compiles)
                arm.setup_seconds = setup
            return str(kept["written"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # none yet, or damaged: measured anew and written over

    def keep(self, file: Path) -> str | None:
        """Write what this run knows; returns why it could not, None when it could."""
        captures = SETUP_SECONDS["cuda_graph"] * (len(self.shapes) - 1 + self.new_shapes(10**6))
        for arm in self.arms.values():  # the next run captures every shape, also those that came after the trial
            if arm.captured and arm.setup_seconds is not None:
                arm.setup_seconds = max(arm.setup_seconds, captures)
        values = {
            "format": FORMAT,
            "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
            "cache_directory": str(cache_directories()["TORCHINDUCTOR_CACHE_DIR"]),
            "arms": {
                arm.name: {name: getattr(arm, name) for name in ("step_seconds", "setup_seconds", "failed")}
                for arm in self.arms.values()
                if arm.step_seconds is not None or arm.failed is not None
            },
        }
        try:
            with written_whole(file, "w") as opened:
                json.dump(finite(values), opened, indent=1, allow_nan=False)
        except OSError as error:
            return f"{file.parent}: {error.strerror or error}"
        return None


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
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of each arm, in the order in which they were tried."""

    def lines(self) -> str:
        """The table, for a person."""
        columns = {"helper_seconds": 1.0, "setup_seconds": 1.0, "step_seconds_before": 1e3, "step_seconds": 1e3}
        columns["gained_seconds"] = 1.0
        rows = [["auto tried", "from", "to", "helper s", "set-up s", "ms before", "ms a step", "gained s", ""]]
        for name, row in self.table.items():
            if (began := row["switched_at_step"]) is not None:
                ended = row["stepped_back_at_step"]
                steps = [f"{began + 1:,}", "" if ended is None else f"{ended:,}"]
                figures = ["" if row[key] is None else f"{row[key] * factor:,.1f}" for key, factor in columns.items()]
                waited, stays = row["never_waited_steps"], "stays" if name == self.chosen else None
                why = [row["failed"] or stays, None if waited is None else NEVER_WAITED.format(waited)]
                rows.append([name, *steps, *figures, "; ".join(filter(None, why))])
        kept = [column for column in zip(*rows, strict=True) if any(column[1:]) or not column[0]]
        rows = [list(row) for row in zip(*kept, strict=True)]
        widths = [max(map(len, column)) for column in kept][:-1]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]] for row in rows]
        return "\n".join("  ".join(line).rstrip() for line in lines)


def refuse_choice(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError where ``auto`` is among strategies that are looked at: only a run has steps to choose for."""
    if any(isinstance(strategy, Auto) for strategy in strategies):
        raise ValueError(
            "compile=auto: only a run chooses; python -m trainer with the same arguments says what (`auto: ...`), name "
            "that here, as in compile=[regional,cuda_graph]"
        )


# ---- what earlier runs of the same program on the same machine measured: a small JSON file for each program ----------

FORMAT = 5
"""Raised when the meaning of what is kept changes; files of another format count as none."""
NO_TIME = frozenset({"learning_rate", "lr", "initial_lr", "max_epochs", "max_steps", "seed"})
"""Names of what changes how much is learned, and no step's time: another run of the same program may choose by it."""


def memory_of(fingerprint: str) -> Path:
    """The file of the program with this fingerprint, in the user's cache directory."""
    return cache_folder() / "auto" / f"{fingerprint[:32]}.json"


def program_facts(program: Program) -> dict[str, Any]:
    """Plain attributes of every module and options of every optimizer; ``facts_of`` has classes and sizes. What lies
    deeper, in an object that a module holds, is not looked at."""
    return {
        "modules": {path: _plain(vars(child)) for path, child in program.module.named_modules()},
        "optimizers": [[type(one).__qualname__, _plain(one.defaults)] for one in program.optimizers],
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in sorted(values.items()) if name not in NO_TIME}
    named = {name: getattr(value, "__qualname__", value) for name, value in plain.items()}
    return {name: value for name, value in named.items() if isinstance(value, (bool, int, float, str))}


# ---- whether the host is ahead of the device -------------------------------------------------------------------------
#
# A step is cut where the loop calls us anyway. At each point an event is recorded, and the event of the point before is
# asked. If the device has not come to that one, all that lies between the two was launched before it began there: it
# waited for the host at no moment in between. If it has, nothing is known: a loop that reads its loss empties the
# queue. That holds about a thousand launches. Once it is full, the host is that far ahead and no further, so that a
# point says something only where the one before is less than a queue behind. A backward may be longer: eager's is cut,
# too, where gradients of some parameters are there.

POINTS, PARAMETERS = 16, 10
"""Points in a backward at most, and parameters between two of them at least: each takes some 15 microseconds of the
host, and a step of few parameters fits into the queue."""


def mark(device: torch.device) -> Any:
    """A point in the current stream, whose ``query()`` says whether the device has come to it; None without streams."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


class Ahead:
    """Watches single steps of ``loop``: ``begin`` each of them, then ``end`` it."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._within = loop, contextlib.ExitStack()
        self._last: Any = None
        self._ahead = False

    def begin(self, *, within_backward: bool = False) -> None:
        """A step begins, of eager where points ``within_backward`` are set. What lies between two watched steps belongs
        to the second."""
        self._ahead = True
        self._point()
        if self._last is not None:
            from trainer.guards.compare import around_steps

            trained = [one for one in self._loop.module.parameters() if one.requires_grad and one.is_leaf]
            for parameter in trained[:: max(PARAMETERS, math.ceil(len(trained) / POINTS))] if within_backward else ():
                if parameter._post_accumulate_grad_hooks is None:
                    parameter.register_post_accumulate_grad_hook(self._point)
                    # None again, where removing the hook alone would leave an empty list of them.
                    self._within.callback(setattr, parameter, "_post_accumulate_grad_hooks", None)
            self._within.enter_context(self._loop.around_training_step(self._point, self._point))
            self._within.enter_context(around_steps(self._loop.optimizers, self._point, self._point))

    def _point(self, *_: Any) -> None:
        self._ahead = self._ahead and (self._last is None or not self._last.query())
        self._last = mark(self._loop.device)

    def end(self) -> bool:
        """The step is over; whether the device waited for the host at no moment of it. False where nothing is known."""
        self.close()
        if self._ahead:
            self._point()
        ahead, self._ahead = self._ahead and self._last is not None, False
        return ahead

    def close(self) -> None:
        """Leave the loop as it was. May be called twice."""
        self._within.close()
