"""Judge: is this worse than the base? Counts in every round; a step beyond the noise, by a comparison's statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.check.measurement import Measured, Place
from trainer.report import statistics
from trainer.report.statistics import NOT_SHOWN, SLOWER, Ratio, Sample
from trainer.report.tables import ABSENT, estimated
from trainer.wording import counted, first_few

TOLERANCE = 0.1
"""How much slower a step may be before that counts, relatively."""
LOOKS = 3
"""How often a step has to be found slower, in as many rounds each, before that counts."""
CLEAN = "clean"


@dataclass(kw_only=True, slots=True)
class StepChange:
    """This step beside the base's."""

    ratio: Ratio | None = None
    """The base's seconds over this one's; None where they are not compared."""
    of: str = "step"
    """What is compared: the ``step``, or its ``step beside eager``, which another day's base is compared by."""
    why_not: str = ""
    """Why they are not compared."""

    @property
    def slower(self) -> float | None:
        """By how much, relatively: 0.1 is a tenth, below 0 it is faster; None where they are not compared."""
        return None if self.ratio is None else 1 / self.ratio.value - 1

    def surely_slower(self, tolerance: float) -> bool:
        """Whether a difference is shown, and the whole of its interval is beyond ``tolerance``."""
        ratio = self.ratio
        return (
            ratio is not None and ratio.verdict == SLOWER and ratio.high is not None and 1 / ratio.high - 1 > tolerance
        )

    def words(self) -> str:
        """``12% slower (8% to 17%)``, ``no difference shown``, or why there is no telling."""
        ratio, slower = self.ratio, self.slower
        if ratio is None or slower is None:
            return f"not compared: {self.why_not}"
        if ratio.verdict == NOT_SHOWN:
            return NOT_SHOWN
        word, sign = ("slower", 1) if slower > 0 else ("faster", -1)
        ends = sorted(sign * (1 / end - 1) for end in (ratio.low, ratio.high) if end is not None)
        return f"{sign * slower:.0%} {word} ({' to '.join(f'{end:.0%}' for end in ends)})"


@dataclass(slots=True)
class Row:
    """One line of the table, in words."""

    what: str
    base: str
    this: str
    change: str = ""
    worse: bool = False


@dataclass(kw_only=True, slots=True)
class Judgement:
    """One task under one list of strategies, beside its base."""

    this: Measured
    base: Measured | None
    rows: list[Row] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    """What is worse, in a few words each; empty when it passes."""
    new_places: list[Place] = field(default_factory=list)
    """Lines of breaks and recompiles that the base does not have."""
    new_not_clean: dict[str, str] = field(default_factory=dict)
    """The same of what differs from eager or runs eager."""
    notes: list[str] = field(default_factory=list)


def step_change(this: Measured, base: Measured, *, in_turns: bool) -> StepChange:
    """Compare the steps of ``this`` and ``base``: in pairs where their rounds were run ``in_turns``.

    Otherwise the base is of another day, when the machine may have been slower or faster: then the step is compared by
    its share of eager's of the same round, and on a GPU by its seconds. Where others used the machine there is no
    telling, as in any comparison; runs in turns meet the same others.
    """
    if why_not := _unlike(this, base):
        return StepChange(why_not=why_not)
    if in_turns:
        ours, theirs = ({one.number: one.step_seconds for one in each.rounds} for each in (this, base))
        return _change("step", ours, theirs)
    for side, measured in (("the base", base), ("this branch", this)):
        if measured.busy:
            return StepChange(why_not=f"the machine was busy under {side}")
    shares = (_apart(each, "share_of_eager") for each in (this, base))
    found = [_change("step beside eager", *shares, missing="steps of eager beside it")]
    if this.device_type == "cuda":
        found.insert(0, _change("step", *(_apart(each, "step_seconds") for each in (this, base))))
    compared = [one for one in found if one.ratio is not None]
    return next((one for one in compared if one.ratio is not None and one.ratio.shown), [*compared, *found][0])


def _change(
    of: str, ours: dict[int, float | None], theirs: dict[int, float | None], *, missing: str = "steady steps"
) -> StepChange:
    samples = [[Sample(value, key) for key, value in side.items() if value] for side in (ours, theirs)]
    ratio = statistics.ratio(*samples)
    if ratio is None:
        side = "this branch" if not samples[0] else "the base"
        return StepChange(why_not=f"{side} has no {missing}")
    return StepChange(ratio=ratio, of=of)


def _apart(measured: Measured, name: str) -> dict[int, float | None]:
    """Values by keys that no other session shares."""
    return {id(one): getattr(one, name) for one in measured.rounds}


def _unlike(this: Measured, base: Measured) -> str:
    """What differs and decides how long a step takes; a setting that one of them does not know is none."""
    for ours, theirs in ((this.conditions, base.conditions), (this.settings, base.settings)):
        for name in theirs:
            if name in ours and ours[name] != theirs[name]:
                return f"{name} is {ours[name]}, the base's {theirs[name]}"
    return ""


def is_slower(
    this: Measured, base: Measured, *, looks: int, rounds: int, tolerance: float = TOLERANCE, in_turns: bool
) -> bool:
    """Whether each of so many ``looks``, of so many ``rounds``, found the step slower by more than ``tolerance``; and,
    from the second one on, all of them together do so beyond the noise."""

    def part(measured: Measured, look: int) -> Measured:
        chosen = [one for one in measured.rounds if look * rounds < one.number <= (look + 1) * rounds]
        return dataclasses.replace(measured, rounds=chosen)

    for look in range(looks):
        found = step_change(part(this, look), part(base, look) if in_turns else base, in_turns=in_turns)
        if found.slower is None or found.slower <= tolerance:
            return False
    return looks == 1 or step_change(this, base, in_turns=in_turns).surely_slower(tolerance)


def judge(
    this: Measured,
    base: Measured | None,
    *,
    tolerance: float = TOLERANCE,
    looks: int | None = None,
    rounds: int = 1,
    in_turns: bool = False,
) -> Judgement:
    """What is worse in ``this``.

    Args:
        this: All its rounds.
        base: None where there is none: then only what is wrong by itself is worse.
        tolerance: By how much a step may be slower, relatively.
        looks: How often so many ``rounds`` were run; None for runs that cannot be run again.
        rounds: Those of one look.
        in_turns: Whether the base's rounds were run between these.
    """
    made = Judgement(this=this, base=base)
    before = None if base is None or not base.rounds else base
    if this.failed:
        made.worse.append(f"{counted(len(this.failed), 'run')} did not finish")
    _judge_checks(made, before)
    new = f"{len(made.new_not_clean)} new" if made.new_not_clean else ""
    made.rows.append(Row("checks", _checks(before), _checks(this), new, worse=bool(new)))
    for what, name in (("graph breaks", "graph_breaks"), ("recompiles", "recompiles"), ("graphs", "graphs")):
        _judge_count(made, before, what, name)
    _judge_step(made, before, tolerance=tolerance, looks=looks, rounds=rounds, in_turns=in_turns)
    if base is not None and not base.rounds:
        made.notes.append(f"the base did not run: {base.failed[0] if base.failed else 'no reason given'}")
    made.notes += this.remarks
    return made


def _checks(measured: Measured | None) -> str:
    if measured is None:
        return ABSENT
    return CLEAN if not measured.not_clean else f"{len(measured.not_clean)} not clean"


def _judge_checks(made: Judgement, base: Measured | None) -> None:
    known = {} if base is None else base.not_clean
    made.new_not_clean = {name: why for name, why in made.this.not_clean.items() if name not in known}
    if made.new_not_clean:
        made.worse.append(f"checks are not clean: {first_few(list(made.new_not_clean), most=1)}")


def _judge_count(made: Judgement, base: Measured | None, what: str, name: str) -> None:
    """A count is larger when the least of these rounds is beyond the most of the base's."""
    ours, theirs = (
        [value for one in each.rounds if (value := getattr(one, name)) is not None] if each is not None else []
        for each in (made.this, base)
    )
    row = Row(what, _span(theirs), _span(ours))
    if ours and theirs and min(ours) > max(theirs):
        more = min(ours) - max(theirs)
        row.change, row.worse = f"{more} more", name != "graphs"  # another kind of block has a graph of its own
        if row.worse:
            made.worse.append(f"{more} more {what if more > 1 else what.removesuffix('s')}")
            made.new_places += _new_places(made.this, base, name.removesuffix("s"))
    elif ours and theirs and max(ours) < min(theirs):
        row.change = f"{min(theirs) - max(ours)} fewer"
    made.rows.append(row)


def _span(values: Sequence[int]) -> str:
    if not values:
        return ABSENT
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _new_places(this: Measured, base: Measured | None, kind: str) -> list[Place]:
    known = {} if base is None else {one.key: one.count for one in base.places}
    return [one for one in this.places if one.kind == kind and one.count > known.get(one.key, 0)]


def _judge_step(
    made: Judgement, base: Measured | None, *, tolerance: float, looks: int | None, rounds: int, in_turns: bool
) -> None:
    this = made.this
    ms, speed = (
        Row(what, text(base), text(this)) for what, text in (("step ms", _milliseconds), ("speed to eager", _speed))
    )
    made.rows += [ms, speed]
    if base is None:
        return
    change = step_change(this, base, in_turns=in_turns)
    row = ms if change.of == "step" else speed
    row.change = change.words()
    row.worse = change.surely_slower(tolerance) and (
        looks is None
        or (
            looks == LOOKS and is_slower(this, base, looks=looks, rounds=rounds, tolerance=tolerance, in_turns=in_turns)
        )
    )
    if row.worse:
        made.worse.append(f"the {change.of} is {change.words()}")
    elif looks not in (None, 1):
        made.notes.append(
            f"the step was looked at {looks} times, and is not slower by more than {tolerance:.0%} in each"
        )
    elif change.ratio is not None and change.ratio.verdict == SLOWER:
        made.notes.append(f"a step may be {tolerance:.0%} slower before that counts (--tolerance)")
    if row is speed:
        made.notes.append("the base is of another day: its step is compared by its speed to eager, not by milliseconds")


def _milliseconds(measured: Measured | None) -> str:
    values = [] if measured is None else [one.step_seconds for one in measured.rounds]
    return estimated(statistics.estimate(values), 1e3)


def _speed(measured: Measured | None) -> str:
    shares = [] if measured is None else [one.share_of_eager for one in measured.rounds]
    return estimated(statistics.estimate([1 / share for share in shares if share]))
