"""Would torch.compile help, and which strategy? Trains a task eager and compiled, or compares runs that are there:

  crucible compare task=captioning            train it eager, regional and whole, in turn, each in a fresh process
  crucible compare outputs/sweeps/<time>      compare the runs of a sweep, or any others

The second needs neither torch nor a GPU. For each workload (task and settings) a row for each arm (strategies and their
parameters): steady step, ratio to eager, warm-up from cold and from warm compile caches, the step at which compiling
has paid back, memory, and a verdict. --markdown and --json have all other figures.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.arguments import at_least, exit_code, parser, sort_runs_and_steps
from trainer.report import tables
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.flags import BUSY
from trainer.report.runs import LOOSE, find
from trainer.telemetry.files import printable, written_whole

ABOUT = """\
~ no difference is shown; ± half of the range over the runs. docs/comparing.md says how each figure is made.

what is trained, with overrides: crucible train -m compile=eager,regional,whole OVERRIDES, whose options and folders it
has (crucible train --help); compile= with other values, or hydra.launcher.arms=[...], replaces the three.

Exit codes: 0 compared, 1 a training failed or an arm is worse than in --against, 2 refused (wrong arguments, no
records, runs that are unlike).
"""
OVERRIDE = re.compile(r"[+~]*[\w./@]+=")
"""What an override begins with; a folder may, too, where Hydra has named it."""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""


def main(arguments: list[str] | None = None) -> int:
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
    scaled = tables.scalings(runs)
    if not options.allow_unlike:
        refuse_unlike(comparisons)
    if options.markdown is not None:
        write(options.markdown, tables.markdown(comparisons, scaled))
    if options.json is not None:
        write(options.json, tables.as_json(comparisons))
    alone = "-" in (options.markdown, options.json)
    if not alone:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=WIDTH, highlight=False)
        tables.show(comparisons, console)
        for name, table in scaled:
            for line in (f"scaling: {name}", *tables.plain_lines(table, console.width), ""):
                console.print(line, markup=False, soft_wrap=True)
    if options.against is None:
        return 0
    moved = against(comparisons, options.against, options.tolerance)
    print("\n".join(drift_lines(moved)), file=sys.stderr if alone else sys.stdout)
    return int(any(verdict(moves) == WORSE.lower() for moves in moved.values()))


def parse(arguments: list[str]) -> argparse.Namespace:
    made = parser("compare", __doc__ or "", ABOUT)
    add = made.add_argument
    runs_help = "records, run folders, folders to search, or globs of these; or overrides to train (default: outputs)"
    steps_help = "steps to give total times for (default: 500 2000 20000)"
    add("runs", nargs="*", metavar="RUN", help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", nargs="+", default=[], metavar="N", help=steps_help)
    for kind in ("markdown", "json"):
        add(f"--{kind}", metavar="FILE", help=f"also write {kind} there; - = to the output, alone (default: nowhere)")
    against_help = (
        "what --json wrote of earlier runs: in which arms did ratio, graphs or breaks move? (default: nothing)"
    )
    add("--against", type=Path, metavar="FILE", help=against_help)
    tolerance_help = "by how much the ratio may differ from it (default: %(default)g)"
    add("--tolerance", type=at_least(0), default=TOLERANCE, metavar="SHARE", help=tolerance_help)
    unlike_help = "compare runs of other devices, versions or precisions too (default: refused)"
    add("--allow-unlike", action="store_true", help=unlike_help)
    options = made.parse_args(arguments)
    sort_runs_and_steps(options)
    if options.markdown == options.json == "-":
        made.error("only one of --markdown and --json can be -")
    return options


def refuse_unlike(comparisons: Sequence[WorkloadComparison]) -> None:
    """Raise ValueError when runs of a workload differ in what decides their speed."""
    for found in comparisons:
        if found.unlike:
            raise ValueError(
                f"runs of {found.workload} are unlike: {'; '.join(found.unlike)}. Name the runs that belong together, "
                "or use --allow-unlike"
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

TOLERANCE = 0.03
"""By how much a ratio may differ, relatively, beyond its noise."""
NO_WORKLOAD = frozenset({"task", "compile", "repeat", "resume", "peer", "seed"}) | LOOSE
"""Overrides that do not tell one workload from another; the task is named by itself."""
WORSE, BETTER, NOT_JUDGED = "WORSE", "better", "not judged"
Moves = list[tuple[str, str]]
"""What is to be said of an arm: its kind, and ``ratio 1.500x (1.480 to 1.520) -> 1.400x (1.390 to 1.410)``."""


def against(comparisons: Sequence[WorkloadComparison], file: Path, tolerance: float) -> dict[str, Moves | None]:
    """What moved of each arm of ``file``; None for one that ``comparisons`` lack.

    Raises ValueError when the file is not one of ours, is of another machine, or has no arm that was measured now.
    """
    then, now = _arms(_loaded(file)), _arms(json.loads(tables.as_json(comparisons)))
    if not any(name in now for name in then):
        raise ValueError(f"none of these runs is of an arm of {file}")
    for name, before in then.items():
        for what in ("device", "processor"):
            if name in now and before[what] != now[name][what]:
                raise ValueError(f"{file} was measured on {before[what]}, and these runs on {now[name][what]}")
    return {name: drift(before, now[name], tolerance) if name in now else None for name, before in then.items()}


def drift_lines(arms: Mapping[str, Moves | None]) -> list[str]:
    """Whole lines for grep and mails, and last ``2 arms: 1 worse``."""
    lines, counts = [], Counter[str]()
    for name, moves in arms.items():
        lines += [f"not measured: {name}"] if moves is None else []
        lines += [f"{kind}: {name}: {text}" for kind, text in moves or []]
        counts[verdict(moves)] += 1
    counted = [f"{counts[kind]} {kind}" for kind in ("worse", BETTER, NOT_JUDGED, "not measured") if counts[kind]]
    return [*lines, f"{len(arms)} arm{'' if len(arms) == 1 else 's'}: {', '.join(counted) or 'none moved'}"]


def verdict(moves: Moves | None) -> str:
    """Of an arm, in a word or two."""
    kinds = {kind for kind, _ in moves or []}
    found = next((kind.lower() for kind in (WORSE, BETTER, NOT_JUDGED) if kind in kinds), "same")
    return "not measured" if moves is None else found


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
    """Rows by the name of workload and arm, baselines left out; each with its workload's device."""
    found: dict[str, dict[str, Any]] = {}
    for one in comparisons:
        conditions = {name: one[name] for name in ("device", "processor")}
        base = [row for row in one["rows"] if row["arm"] == one["baseline"]]
        for row in one["rows"]:
            if row not in base:
                words = [word for word in shlex.split(row["command"]) if "=" in word]
                names = {word: word.lstrip("+~").partition("=")[0] for word in words}
                apart = ("compile.", "hydra", "-")
                own = sorted(word for word in words if names[word] not in NO_WORKLOAD and not word.startswith(apart))
                flags = [flag for each in (row, *base) for flag in each["flags"]]
                found[" ".join([one["task"], *own, row["arm"]])] = row | conditions | {"flags": flags}
    return found


def drift(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = TOLERANCE) -> Moves:
    """What moved between two rows of one arm."""
    if now["runs_failed"]:
        return [(WORSE, f"{now['runs_failed']} of its runs failed")]
    busy = next((flag for row in (now, before) for flag in row["flags"] if flag.startswith(BUSY)), None)
    found = _ratio_moved(before, now, tolerance) if busy is None else [(NOT_JUDGED, f"ratio: {busy}")]
    for name in ("graphs", "graph_breaks", "recompiles"):  # the same in every run of the same code
        old, new = before[name], now[name]
        if old is not None and old != new:
            # Fewer graphs are not better: less may have been compiled.
            kind = NOT_JUDGED if new is None else WORSE if name == "graphs" or new > old else BETTER
            found.append((kind, f"{name.replace('_', ' ')} {old} -> {new}"))
    return found


def _ratio_moved(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> Moves:
    """The ratio moved when it did by more than the tolerance, and the two intervals are apart."""
    old, new = before["ratio"], now["ratio"]
    if old is None:
        return []
    if new is None:
        return [(WORSE, f"ratio was {old:.3f}x, and is not known now")]
    if abs(new - old) <= tolerance * old:
        return []
    (low, high), (new_low, new_high) = ((row["ratio_low"], row["ratio_high"]) for row in (before, now))
    if None in (low, high, new_low, new_high):
        return [(NOT_JUDGED, "ratio: single runs do not show their noise; repeat with hydra.launcher.rounds=3")]
    move = f"ratio {old:.3f}x ({low:.3f} to {high:.3f}) -> {new:.3f}x ({new_low:.3f} to {new_high:.3f})"
    if new_low <= high and new_high >= low:
        return [(NOT_JUDGED, f"{move} is within the noise; more rounds or steps would show it")]
    return [(WORSE if new < old else BETTER, move)]


if __name__ == "__main__":
    sys.exit(main())
