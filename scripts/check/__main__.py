"""A gate for a project's CI: is this branch worse than its base? ``crucible check task=captioning compile=regional``.

Trains few steps, compiled and eager in turn, each run in a fresh process, and holds what came out against the base:
checks against eager, graph breaks, recompiles, graphs, the time of a step. Your own script, with Compile among the
callbacks of its Trainer, comes after two dashes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.arguments import exit_code, parser, positive, require_writable
from scripts.check import comment, judge, rounds
from scripts.check.measurement import FILE_NAME, Measured, measured, save
from strategies.compile_errors import redact
from trainer.advice import program
from trainer.process import quick_exit
from trainer.report.runs import Run, find
from trainer.wording import counted

MORE = f"""\
examples:
  crucible check --update task=captioning compile=regional    # on the base branch: store its record
  crucible check task=captioning compile=regional             # on yours: hold it against that
  crucible check --base origin/main compile=regional,whole    # both branches run here, in turns
  crucible check --base main:{FILE_NAME} --comment comment.md
  crucible check --base origin/main -- train.py --max-steps 60    # your own script, with its arguments
  crucible check --runs outputs/compare                       # runs that are there, of crucible.compare(out=...)

What is worse, so that the check fails: a run that does not finish; what differs from eager, or runs eager, and does
not in the base; more graph breaks or recompiles than the base in every round; a step that is slower by more than
--tolerance, beyond the noise, and again in as many rounds twice more. More graphs alone are not.

A stored record is of another day: its step is compared by its speed to eager of the same round, in seconds on one
model of GPU alone, and not at all where device, torch or settings differ or others used the machine. --base COMMIT
has the sharper eye.

Exit codes: 0 passed, 1 failed, 2 wrong arguments, 128 + signal interrupted.
"""
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, script = (given[: (at := given.index("--"))], given[at + 1 :]) if "--" in given else (given, [])
    made = parser("check", __doc__ or "", MORE, overrides=True)
    add = made.add_argument
    base = f"a base record or its folder, runs, REF:FILE of git, or a commit to run as well (default: {FILE_NAME})"
    add("--base", metavar="BASE", help=base)
    add("--update", action="store_true", help="store what was measured as the base record, judge nothing")
    add("--comment", type=Path, metavar="FILE", help="write the comment for a pull request there (default: nowhere)")
    rounds_help = "runs of each; 1 judges no step (default: %(default)s)"
    add("--rounds", type=positive, default=3, metavar="N", help=rounds_help)
    steps = f"optimizer steps of each run, if trainer.max_steps is not given (default: {rounds.STEPS})"
    add("--steps", type=positive, default=rounds.STEPS, metavar="N", help=steps)
    percent = f"how much slower a step may be (default: {100 * judge.TOLERANCE:.0f})"
    add("--tolerance", type=positive, default=round(100 * judge.TOLERANCE), metavar="PERCENT", help=percent)
    add("--runs", nargs="+", metavar="RUN", help="judge these runs, train nothing")
    add("--out", type=Path, metavar="DIR", help="folder of the runs (default: outputs/check/TIME)")
    options = made.parse_intermixed_args(given)
    options.script = script
    options.command = shlex.join([*program("scripts.check"), *given, *(["--", *script] if script else [])])
    return exit_code(lambda _: checked(options))


def checked(options: argparse.Namespace) -> int:
    """Raises ValueError for what cannot be run or read, before anything is trained."""
    if options.script and (options.overrides or options.runs):
        raise ValueError(f"{(options.overrides or ['--runs'])[0]}: not beside a script, which has its own arguments")
    if options.runs and options.overrides:
        raise ValueError(f"{options.overrides[0]}: not beside --runs, which trains nothing")
    require_writable("--comment", options.comment)
    this = rounds.this_side()
    base = options.base or (FILE_NAME if Path(FILE_NAME).is_file() else None)
    if options.update:
        target = Path(options.base or FILE_NAME)
        return _update(options, this, target / FILE_NAME if target.is_dir() else target)
    stored = None if base is None else rounds.stored(base, root=this.root)
    if options.runs:
        if base is not None and stored is None:
            raise ValueError(f"--base={base}: a commit has to be run, and --runs trains nothing")
        return _say(options, [_judged(one, stored) for one in measured(find(options.runs), root=this.root)], base)
    work, out = _work(options), _folder(options)
    with contextlib.ExitStack() as stack:
        sides = [this]
        if base is not None and stored is None:
            sides.insert(0, stack.enter_context(rounds.checked_out(base)))
        return _say(options, _in_rounds(options, work, sides, out, stored), base)


def _work(options: argparse.Namespace) -> rounds.Work:
    if options.script:
        name = options.script[0]
        if not Path(name).is_file() and shutil.which(name) is None:
            raise ValueError(f"{name}: no such script or command")
        return rounds.Work(script=options.script)
    return rounds.work_of(options.overrides, steps=options.steps, config_dir=options.config_dir)


def _folder(options: argparse.Namespace) -> Path:
    folder: Path = options.out or Path("outputs/check", f"{datetime.datetime.now():%F_%H-%M-%S-%f}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out={folder}: is not an empty folder")
    return folder


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _update(options: argparse.Namespace, this: rounds.Side, target: Path) -> int:
    if target.suffix != ".json":
        raise ValueError(f"--base={target}: a base record that is stored is a file, NAME.json")
    if options.runs:
        runs = find(options.runs)
    else:
        numbers = range(1, options.rounds + 1)
        runs = rounds.run_rounds(_work(options), [this], numbers, _folder(options), _log)[rounds.THIS]
    found = measured(runs, root=this.root, commit=None if options.runs else this.commit)
    code = _say(options, [_judged(one, None) for one in found], None)
    if any(one.failed for one in found):
        _log(f"{target}: not written, a run did not finish")
        return 1
    save(found, target)
    print(f"\n{target}: stored{', with what is not clean: later checks take it for known' if code else ''}")
    return 0


def _in_rounds(
    options: argparse.Namespace,
    work: rounds.Work,
    sides: Sequence[rounds.Side],
    out: Path,
    stored: Sequence[Measured] | None,
) -> list[judge.Judgement]:
    """Run the rounds, and as many again while a step looks slower."""
    in_turns, tolerance, count = len(sides) > 1, options.tolerance / 100, options.rounds
    found: dict[str, list[Run]] = {side.name: [] for side in sides}

    def look(number: int) -> list[tuple[Measured, Measured | None]]:
        numbers = range(number * count + 1, (number + 1) * count + 1)
        eager = number == 0 or not in_turns  # enough to say how fast it is; the base is compared without
        for name, runs in rounds.run_rounds(work, sides, numbers, out, _log, eager=eager).items():
            found[name] += runs
        bases = list(stored or [])
        if in_turns:
            beside = [run for run in found[rounds.THIS] if not run.record.strategies]
            bases = measured([*found[rounds.BASE], *beside], root=sides[0].root, commit=sides[0].commit)
        this = measured(found[rounds.THIS], root=sides[-1].root, commit=sides[-1].commit)
        return [(one, _of(one, bases)) for one in this]

    pairs, looks = look(0), 1
    judging: dict[str, Any] = {"rounds": count, "tolerance": tolerance, "in_turns": in_turns}
    # Of one round nothing is known of the noise: who asks for it wants the counts.
    while (
        count > 1
        and looks < judge.LOOKS
        and any(
            base is not None and not one.failed and judge.is_slower(one, base, looks=looks, **judging)
            for one, base in pairs
        )
    ):
        _log(f"a step looks slower: {counted(count, 'round')} more, as it counts when it shows {judge.LOOKS} times")
        pairs, looks = look(looks), looks + 1
    return [judge.judge(one, base, looks=looks, **judging) for one, base in pairs]


def _judged(one: Measured, bases: Sequence[Measured] | None) -> judge.Judgement:
    return judge.judge(one, _of(one, bases or []))


def _of(one: Measured, bases: Sequence[Measured]) -> Measured | None:
    return next((base for base in bases if base.name == one.name), None)


def _say(options: argparse.Namespace, judgements: Sequence[judge.Judgement], base: str | None) -> int:
    if not judgements:
        raise ValueError("nothing was compiled in these runs, there is nothing to check")
    width = 100 if not sys.stdout.isatty() else os.get_terminal_size().columns
    print(redact("\n".join(comment.terminal(judgements, base, width))))
    if base is None and not options.update:
        print(f"\nno base to compare with: --update stores one in {FILE_NAME}, --base names one")
    text = redact(comment.markdown(judgements, base, options.command))
    if options.comment is not None:
        options.comment.write_text(text, encoding="utf-8")
    if summary := os.environ.get(SUMMARY_VARIABLE):
        with open(summary, "a", encoding="utf-8") as out:
            out.write(text)
    return int(any(each.worse for each in judgements))


if __name__ == "__main__":
    with quick_exit():
        sys.exit(main())
