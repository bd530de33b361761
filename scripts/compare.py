"""Would torch.compile help, and which strategy? Trains a task eager and compiled, or compares runs that are there:

  crucible compare task=captioning            train it eager, regional and whole, in turn, each in a fresh process
  crucible compare outputs/sweeps/<time>      compare the runs of a sweep, or any others

The second needs neither torch nor a GPU. For each workload (task and settings) a row for each arm (strategies and their
parameters): steady step, warm-up from cold and from warm compile caches, memory, energy, graphs, ratio to eager, the
step at which compiling has paid back, total time for given numbers of steps, and a verdict.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.arguments import at_least, exit_code, parser
from trainer.report import scaling, tables
from trainer.report.comparison import AT_STEPS, WorkloadComparison, compare_runs
from trainer.report.flags import BUSY
from trainer.report.runs import LOOSE, SILENT, find
from trainer.telemetry.files import printable, written_whole

ABOUT = """\
how the figures are made:
  speed      the baseline's mean step time over the arm's, with a 95% interval: Student's t over three or more pairs of
             runs that share seed, round and start, else Welch's t over the runs of both sides; none for single runs
  ~          no difference is shown: the interval holds 1, there is none, or the runs of one arm are as far from each
             other (standard deviation) as the arms are
  ±          half the range from the smallest to the largest of the runs, over their median
  pays back  steps after which a cold start has caught up with the baseline, warm-up and all time in the compiler
             counted; none where no difference is shown
  s to N     seconds from the start of the process to the end of step N, without validation and checkpoints
  scaling    of runs on several numbers of devices: samples/s over as many times those of one device, of the same
             strategies; the median over rounds, ± half of their range
  verdict    of arms that are shown to be faster, the one of least total time

what is trained, with overrides: crucible train -m compile=eager,regional,whole OVERRIDES, whose options and folders it
has (crucible train --help); compile= with other values, or hydra.launcher.arms=[...], replaces the three.

  against    which arms moved since FILE was written by --json: the ratio beyond the tolerance and both intervals, the
             warm-up by a quarter and a second, memory beyond the tolerance, graphs, breaks and recompiles at all

Exit codes: 0 compared, 1 a training failed or an arm is worse than in --against, 2 refused (wrong arguments, no
records, runs that are unlike).
"""
OVERRIDE = re.compile(r"[+~]*[\w./@]+=")
"""What an override begins with; a folder may, too, where Hydra has named it."""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if any(OVERRIDE.match(word) and not Path(word).exists() for word in given):
        return train(given)
    options = parse(given)
    return exit_code(lambda _: compared(options))


def train(arguments: list[str]) -> int:
    """A sweep of the arms under these overrides; ends the process."""
    from trainer.cli import main

    named = any(word.startswith(("compile=", "hydra.launcher.arms=")) for word in arguments)
    sys.argv[1:] = ["-m", *([] if named else ["compile=eager,regional,whole"]), *arguments]
    main()
    return 0


def compared(options: argparse.Namespace) -> int:
    """Compare runs that are there."""
    runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=sorted(set(options.steps)))
    scaled = scaling.scalings(runs)
    if not options.allow_unlike:
        refuse_unlike(comparisons, several_devices=bool(scaled))
    texts = {"markdown": tables.markdown, "json": tables.as_json}
    targets = {kind: target for kind in texts if (target := getattr(options, kind)) is not None}
    for kind, target in targets.items():
        write(target, texts[kind](comparisons) + "".join(one.markdown() for one in scaled if kind == "markdown"))
    alone = "-" in targets.values()
    if not alone:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=WIDTH, highlight=False)
        tables.show(comparisons, console)
        for line in (line for found in scaled for line in found.lines(console.width)):
            console.print(line, markup=False, soft_wrap=True)
    if options.against is None:
        return 0
    moved = against(comparisons, options.against, options.tolerance)
    for line in (*(line for each in moved for line in each.lines()), summary(moved)):
        print(line, file=sys.stderr if alone else sys.stdout)
    return int(any(each.worse for each in moved))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    made = parser("compare", __doc__ or "", ABOUT)
    add = made.add_argument
    runs_help = "records, run folders, folders to search, or globs of these; or overrides to train (default: outputs)"
    steps_help = "steps to give total times for; the verdict looks as far as the largest (default: 500 2000 20000)"
    add("runs", nargs="*", metavar="RUN", help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", nargs="+", default=[str(steps) for steps in AT_STEPS], metavar="N", help=steps_help)
    for kind in ("markdown", "json"):
        add(f"--{kind}", metavar="FILE", help=f"also write {kind} there; - = to the output, alone (default: nowhere)")
    against_help = "what --json wrote of earlier runs: which arms are worse now? (default: compared with nothing)"
    add("--against", type=Path, metavar="FILE", help=against_help)
    tolerance_help = "by how much ratio and memory may differ from it (default: %(default)g)"
    add("--tolerance", type=at_least(0), default=TOLERANCE, metavar="SHARE", help=tolerance_help)
    unlike_help = "compare runs of other devices, versions or precisions too (default: refused)"
    add("--allow-unlike", action="store_true", help=unlike_help)
    options = made.parse_args(arguments)
    # ``--steps 500 outputs`` is what people write; argparse takes the folder for a number of steps.
    options.runs = [*options.runs, *(word for word in options.steps if not word.isdecimal())] or ["outputs"]
    options.steps = [int(word) for word in options.steps if word.isdecimal()] or list(AT_STEPS)
    if options.markdown == options.json == "-":
        made.error("only one of --markdown and --json can be -")
    return options


def refuse_unlike(comparisons: Sequence[WorkloadComparison], *, several_devices: bool = False) -> None:
    """Raise ValueError when runs of a workload differ in what decides their speed, or no two are of one workload, nor
    of one training on ``several_devices`` and on one."""
    for found in comparisons:
        if found.unlike:
            raise ValueError(
                f"runs of {found.workload} are unlike: {'; '.join(found.unlike)}. Name the runs that belong together, "
                "or use --allow-unlike"
            )
    if several_devices:
        return
    if len(comparisons) > 1 and all(
        len(found.rows) == 1 and found.task == comparisons[0].task for found in comparisons
    ):
        raise ValueError(
            "no two of these runs are of one workload, which makes nothing to compare: "
            f"{', '.join(found.workload for found in comparisons)}. Use --allow-unlike to see each by itself"
        )


def write(target: str, text: str) -> None:
    """Write a file whole, or to the output for ``-``."""
    if target == "-":
        sys.stdout.write(text)
        return
    with written_whole(Path(target), "w") as file:
        file.write(text)
    print(f"wrote {target}", file=sys.stderr)


# ---- drift: has a strategy become slower? The file is what ``--json FILE`` wrote of earlier runs -------------------

TOLERANCE, WARMUP_TOLERANCE = 0.03, 0.25
"""By how much a ratio or memory, and a warm-up, may differ, relatively, beyond their noise."""
MIN_WARMUP_SECONDS = 1.0
"""Warm-ups that differ by less are taken for the same: processes start that much apart."""
COUNTS = ("graphs", "graph_breaks", "recompiles")
"""Figures that are the same in every run of the same code."""
EITHER_WAY_WORSE = frozenset({"graphs"})
"""Counts of which fewer is not better: less may have been compiled."""
NO_WORKLOAD = frozenset({"task", "compile", "repeat", "resume", "peer"}) | LOOSE | SILENT
"""Overrides that do not tell one workload from another; the task is named by itself."""


@dataclass(kw_only=True, slots=True)
class Drift:
    """An arm of the file, and what it is now."""

    name: str
    measured: bool = True
    """Whether it is among the runs of today."""
    worse: list[str] = field(default_factory=list)
    """What moved for the worse: ``ratio 1.500x (1.480 to 1.520) -> 1.400x (1.390 to 1.410)``."""
    better: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Why a figure was not judged."""
    since: str = ""
    """Versions and commit that changed."""

    @property
    def verdict(self) -> str:
        kinds = {"worse": self.worse, "better": self.better, "not judged": self.unknown}
        found = next((kind for kind, lines in kinds.items() if lines), "same")
        return found if self.measured else "not measured"

    def lines(self) -> list[str]:
        """What there is to say of it, whole lines for grep and mails."""
        if not self.measured:
            return [f"not measured: {self.name}"]
        kinds = (("WORSE", self.worse), ("better", self.better), ("not judged", self.unknown))
        lines = [f"{kind}: {self.name}: {line}" for kind, moved in kinds for line in moved]
        return [*lines, f"  since then: {self.since}"] if self.worse or self.better else lines


def against(comparisons: Sequence[WorkloadComparison], file: Path, tolerance: float) -> list[Drift]:
    """What each arm of ``file`` is in ``comparisons``.

    Args:
        comparisons: Of today's runs, with the baseline that the file has.
        file: What ``tables.as_json`` made of earlier runs.
        tolerance: By how much a ratio, and memory, may differ, relatively, beyond the noise.

    Raises:
        ValueError: The file is not one of ours, is of another machine, or has no arm that was measured now.
    """
    then, now = _arms(_loaded(file)), _arms(json.loads(tables.as_json(comparisons)))
    if not any(name in now for name in then):
        raise ValueError(f"none of these runs is of an arm of {file}")
    for name, before in then.items():
        for what in ("device", "processor"):
            if name in now and before[what] != now[name][what]:
                raise ValueError(f"{file} was measured on {before[what]}, and these runs on {now[name][what]}")
    return [drift(name, before, now.get(name), tolerance) for name, before in then.items()]


def summary(drifts: Sequence[Drift]) -> str:
    """``2 arms: 1 worse``."""
    verdicts = [each.verdict for each in drifts]
    counts = {kind: verdicts.count(kind) for kind in ("worse", "better", "not judged", "not measured")}
    counted = [f"{count} {kind}" for kind, count in counts.items() if count]
    return f"{len(drifts)} arm{'' if len(drifts) == 1 else 's'}: {', '.join(counted) or 'none moved'}"


def _loaded(file: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = printable(json.loads(file.read_text(encoding="utf-8")))
        _arms(found)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; crucible compare RUNS --json {file} makes one") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not what crucible compare --json writes ({error})") from error
    return found


def _arms(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by the name of workload and arm, baselines left out; each with its workload's device and versions."""
    found: dict[str, dict[str, Any]] = {}
    for one in comparisons:
        conditions = {name: one[name] for name in ("device", "processor", "versions")}
        base = [row for row in one["rows"] if row["arm"] == one["baseline"]]
        for row in one["rows"]:
            if row not in base:
                name = " ".join([one["task"], *_overrides(shlex.split(row["command"])), row["arm"]])
                flags = [flag for each in (row, *base) for flag in each["flags"]]
                found[name] = row | conditions | {"flags": flags}
    return found


def _overrides(command: Sequence[str]) -> list[str]:
    """Overrides of a command that describe its workload: neither strategies nor where it runs and how often."""
    named = {word: word.lstrip("+~").partition("=")[0] for word in command if "=" in word}
    apart = ("compile.", "hydra", "-")
    return sorted(word for word, name in named.items() if name not in NO_WORKLOAD and not name.startswith(apart))


def drift(name: str, before: Mapping[str, Any], now: Mapping[str, Any] | None, tolerance: float = TOLERANCE) -> Drift:
    """What moved between two rows of one arm."""
    found = Drift(name=name, measured=now is not None)
    if now is None:
        return found
    if now["runs_failed"]:
        found.worse.append(f"{now['runs_failed']} of its runs failed")
        return found
    if busy := next((flag for row in (now, before) for flag in row["flags"] if flag.startswith(BUSY)), None):
        found.unknown.append(f"times: {busy}")
    else:
        _compare(found, "ratio", "{:.3f}x", before, now, tolerance)
        _compare(found, "cold_warmup_seconds", "{:.1f} s", before, now, WARMUP_TOLERANCE)
    _compare(found, "peak_device_memory_gib", "{:.2f} GiB", before, now, tolerance)
    for count in COUNTS:
        _compare(found, count, "{}", before, now, 0.0)
    changed = [
        f"{what} {old} -> {now['versions'].get(what)}"
        for what, old in before["versions"].items()
        if now["versions"].get(what) != old
    ]
    commits = [row["runs"][0].get("git_commit") for row in (before, now)]
    if all(commits) and commits[0] != commits[1]:
        changed.append(f"commit {commits[0][:12]} -> {commits[1][:12]}")
    found.since = ", ".join(changed) or "neither versions nor commit changed"
    return found


def _compare(
    found: Drift, name: str, form: str, before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float
) -> None:
    """A figure moved when it did by more than the tolerance, and the two intervals are apart."""
    old, new, what = before[name], now[name], name.replace("_", " ")
    if old is None:
        return
    if new is None:
        (found.worse if name == "ratio" else found.unknown).append(
            f"{what} was {form.format(old)}, and is not known now"
        )
        return
    smallest = MIN_WARMUP_SECONDS if name == "cold_warmup_seconds" else 0.0
    if abs(new - old) <= max(tolerance * old, smallest):
        return
    ends = [row.get(f"{name}_{end}") for row in (before, now) for end in ("low", "high")]
    if name == "ratio" and None in ends:
        found.unknown.append("ratio: single runs do not show their noise; repeat with hydra.launcher.rounds=3")
        return
    low, high = (old if end is None else end for end in ends[:2])
    new_low, new_high = (new if end is None else end for end in ends[2:])
    move = f"{what} {_text(form, old, ends[:2])} -> {_text(form, new, ends[2:])}"
    if new_low > high or new_high < low:
        worse = name in EITHER_WAY_WORSE or (new < old) == (name == "ratio")
        (found.worse if worse else found.better).append(move)
    elif name == "ratio":
        found.unknown.append(f"{move} is within the noise; more rounds or steps would show it")


def _text(form: str, value: float, ends: Sequence[float | None]) -> str:
    """``1.550x (1.530 to 1.570)``."""
    middle = form.format(value)
    if None in ends or ends[0] == ends[1]:
        return middle
    return f"{middle} ({' to '.join(form.format(end).rstrip(' sx') for end in ends)})"


if __name__ == "__main__":
    sys.exit(main())
