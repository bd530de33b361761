"""Would torch.compile help, and which strategy? Trains a task eager and compiled, or compares runs that are there:

  crucible compare task=captioning            train it eager, regional and whole, in turn, each in a fresh process
  crucible compare outputs/sweeps/<time>      compare the runs of a sweep, or any others

The second needs neither torch nor a GPU. For each workload (task and settings) a row for each arm (strategies and their
parameters): steady step, ratio to eager, warm-up from cold and from warm compile caches, the step at which compiling
has paid back, memory, and a verdict. --markdown and --json have all other figures.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from scripts.arguments import STEPS_HELP, at_least, exit_code, parser, steps
from trainer.report import tables
from trainer.report.comparison import AT_STEPS, Row, WorkloadComparison, compare_runs
from trainer.report.flags import BUSY
from trainer.report.runs import arm_of, find, workload_of
from trainer.report.statistics import Ratio

ABOUT = """\
~ no difference is shown; ± half of the range over the runs. docs/comparing.md says how each figure is made.

what is trained, with overrides: crucible train -m compile=eager,regional,whole OVERRIDES, whose options and folders it
has (crucible train --help); compile= with other values, or hydra.launcher.arms=[...], replaces the three.

Exit codes: 0 compared, 1 a training failed or an arm is worse than in --against, 2 refused (wrong arguments, no
records).
"""
OVERRIDE = re.compile(r"[+~]*[\w./@]+=")
"""What an override begins with; a folder may, too, where Hydra has named it."""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    asks = {"-h", "--help"} & set(given)
    if not asks and any(OVERRIDE.match(word) and not Path(word).exists() for word in given):
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
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    scaled = tables.scalings(runs)
    if options.markdown:
        print(tables.markdown(comparisons, scaled), end="")
    elif options.json:
        print(tables.as_json(comparisons))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=WIDTH, highlight=False)
        tables.show(comparisons, console)
        for name, table in scaled:
            for line in (f"scaling: {name}", *tables.plain_lines(table, console.width), ""):
                console.print(line, markup=False, soft_wrap=True)
    if options.against is None:
        return 0
    earlier = compare_runs(find([options.against]), baseline=options.baseline)
    moved = against(comparisons, earlier, options.tolerance)
    print("\n".join(drift_lines(moved)), file=sys.stderr if options.markdown or options.json else sys.stdout)
    return int(any(verdict(moves) == WORSE.lower() for moves in moved.values()))


def parse(arguments: list[str]) -> argparse.Namespace:
    made = parser("compare", __doc__ or "", ABOUT)
    add = made.add_argument
    runs_help = "records, run folders, folders to search, or globs of these; or overrides to train (default: outputs)"
    add("runs", nargs="*", metavar="RUN", default=["outputs"], help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", type=steps, default=AT_STEPS, metavar="N,N", help=STEPS_HELP)
    form = made.add_mutually_exclusive_group()
    for kind in ("markdown", "json"):
        form.add_argument(f"--{kind}", action="store_true", help=f"print {kind} in the place of the tables")
    against_help = "earlier runs: in which of their arms did ratio, graphs or breaks move? (default: nothing)"
    add("--against", metavar="RUN", help=against_help)
    tolerance_help = "by how much the ratio may differ from it (default: %(default)g)"
    add("--tolerance", type=at_least(0), default=TOLERANCE, metavar="SHARE", help=tolerance_help)
    return made.parse_args(arguments)


# ---- drift: has a strategy become slower? ---------------------------------------------------------------------------

TOLERANCE = 0.03
"""By how much a ratio may differ, relatively, beyond its noise."""
WORSE, BETTER, NOT_JUDGED = "WORSE", "better", "not judged"
Moves = list[tuple[str, str]]
"""What is to be said of an arm: its kind, and ``ratio 1.500x (1.480 to 1.520) -> 1.400x (1.390 to 1.410)``."""


def against(
    comparisons: Sequence[WorkloadComparison], earlier: Sequence[WorkloadComparison], tolerance: float
) -> dict[str, Moves | None]:
    """What moved of each arm of ``earlier``, baselines left out; None for one that ``comparisons`` lack.

    Raises ValueError where they are of another machine, or have no arm in common.
    """
    now = {_identity(row): (found, row) for found in comparisons for row in found.rows}
    moved: dict[str, Moves | None] = {}
    for found in earlier:
        for row in found.rows:
            if row is found.baseline_row:
                continue
            measured = now.get(_identity(row))
            moved[f"{found.workload} {row.cell.arm}"] = (
                None if measured is None else _moves(found, row, *measured, tolerance)
            )
    if all(moves is None for moves in moved.values()):
        raise ValueError("none of these runs is of an arm of --against")
    return moved


def _identity(row: Row) -> tuple[object, ...]:
    record = row.cell.runs[0].record
    return workload_of(record), arm_of(record)


def _moves(then: WorkloadComparison, before: Row, found: WorkloadComparison, row: Row, tolerance: float) -> Moves:
    for was, is_now in ((then.device, found.device), (then.processor, found.processor)):
        if was != is_now:
            raise ValueError(f"--against was measured on {was}, and these runs on {is_now}")
    flags = [flag for one in (found, then) for each in (one.rows[0], before, row) for flag in each.flags]
    busy = next((flag for flag in flags if flag.startswith(BUSY)), None)
    return drift(before, row, tolerance, busy=busy)


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


def drift(before: Row, now: Row, tolerance: float = TOLERANCE, *, busy: str | None = None) -> Moves:
    """What moved between two rows of one arm. Counts are the same in every run of the same code; ratios are not judged
    where the machine was ``busy``."""
    if now.cell.failed:
        return [(WORSE, f"{len(now.cell.failed)} of its runs failed")]
    found = [(NOT_JUDGED, f"ratio: {busy}")] if busy else _ratio_moved(before.ratio, now.ratio, tolerance)
    for name in ("graphs", "graph_breaks", "recompiles"):
        old, new = getattr(before, name), getattr(now, name)
        if old is not None and old != new:
            # Fewer graphs are not better: less may have been compiled.
            kind = NOT_JUDGED if new is None else WORSE if name == "graphs" or new > old else BETTER
            found.append((kind, f"{name.replace('_', ' ')} {old} -> {new}"))
    return found


def _ratio_moved(old: Ratio | None, new: Ratio | None, tolerance: float) -> Moves:
    """The ratio moved when it did by more than the tolerance, and the two intervals are apart."""
    if old is None:
        return []
    if new is None:
        return [(WORSE, f"ratio was {old.value:.3f}x, and is not known now")]
    if abs(new.value - old.value) <= tolerance * old.value:
        return []
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return [(NOT_JUDGED, "ratio: single runs do not show their noise; repeat with hydra.launcher.rounds=3")]
    texts = [f"{one.value:.3f}x ({one.low:.3f} to {one.high:.3f})" for one in (old, new)]
    move = f"ratio {' -> '.join(texts)}"
    if new.low <= old.high and new.high >= old.low:
        return [(NOT_JUDGED, f"{move} is within the noise; more rounds or steps would show it")]
    return [(WORSE if new.value < old.value else BETTER, move)]


if __name__ == "__main__":
    sys.exit(main())
