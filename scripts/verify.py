"""Do our published figures hold on your machine? ``crucible verify ROW`` runs a row of docs/results again and says.

It trains the row's arm and eager in rounds, each in a fresh process, as they were for the table. Ratios, the loss,
graphs and recompiles are compared with the published interval; times and memory where the GPU is of the same model.
For readers of docs/results who have the hardware and doubt a row, and for whoever publishes one.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.arguments import exit_code, parser, positive
from trainer.advice import program
from trainer.report import published
from trainer.report.published import LOSS, RATIO, RECORDS, TIME_TOLERANCE, TOLERANCES, PublishedRow
from trainer.report.runs import find
from trainer.report.tables import NOT_SURE
from trainer.sweep.plan import quoted
from trainer.wording import counted

MORE = f"""\
examples:
  crucible verify --list                                     # the rows
  crucible verify cpu-micro/regional                         # one row, three rounds
  crucible verify --publish NAME outputs/sweeps/<time>       # runs into records/NAME.jsonl; tables, pictures anew
  crucible verify --tables                                   # tables and pictures of docs made anew from their records

A figure holds where the rounds' median here, of a ratio their geometric mean, is in the published range, or beyond it
by at most {TOLERANCES[RATIO]:.0%} of a ratio, {TOLERANCES[LOSS]:.0%} of a loss,
{TIME_TOLERANCE:.0%} of a time or of memory. Counts must be the same. What lies beyond on the better side is better. The
ratio of a busy machine, or of a single round, is not compared.

Exit codes: 0 all that can be compared holds or is better, 1 something does not or a training failed, 2 wrong arguments.
"""
APART = re.compile(r"^[+~]*(compile|repeat|profile)\b")
"""Overrides of a published command that are an arm's, or that a verification sets by itself: the latter are OWN."""
OWN = ("repeat=", "profile=")
LONGEST_PADDED = 60
"""Characters of a row's name up to which what follows stands in a column."""


def main(arguments: list[str] | None = None) -> int:
    made = parser("verify", __doc__ or "", MORE)
    add = made.add_argument
    add("what", nargs="*", metavar="ROW", help="a row of --list; runs, for --publish")
    add("--list", action="store_true", help="show the rows, run nothing")
    add("--rounds", type=positive, default=3, metavar="N", help="rounds of the arm and eager (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="folder of the runs (default: outputs/verify/ROW-TIME)")
    add("--publish", metavar="NAME", help="write the records of runs into NAME.jsonl, make tables and pictures anew")
    add("--tables", action="store_true", help="make tables and pictures of the pages anew from their records")
    add("--records", type=Path, default=RECORDS, metavar="DIR", help="the records (default: docs/results/records)")
    options = made.parse_args(arguments)
    return exit_code(lambda _: work(options))


def work(options: argparse.Namespace) -> int:
    """Raises ValueError for a row or runs that are not there."""
    if options.publish:
        file = options.records / f"{options.publish}.jsonl"
        print(f"{file}: {published.publish(options.what, file)} records")
    if options.publish or options.tables:
        for changed in published.refresh(options.records):
            print(f"{changed}: made anew")
        return 0
    rows = published_rows(options.records)
    if not options.list:
        return verify(options, rows)
    width = min(max(map(len, rows)), LONGEST_PADDED)
    for name, row in rows.items():
        mark = "" if row.compared.ratio is None or row.compared.ratio.shown else NOT_SURE
        speed = mark + published.figure_text(row, RATIO)
        what = (
            f"{speed} times eager"
            if RATIO in row.figures
            else "the baseline"
            if row.arm == "eager"
            else "without eager beside it"
        )
        print(f"{name:<{width}} {what}, {counted(len(row.records), 'round')}, {row.records[0].device}")
    return 0


def published_rows(records: Path) -> dict[str, PublishedRow]:
    """Every row by its name. Raises ValueError where there are no records."""
    if not (rows := published.published_rows(records)):
        raise ValueError(f"{records} has no records (*.jsonl): they are in a checkout; --records DIR says where else")
    return rows


def base_of(name: str, rows: Mapping[str, PublishedRow]) -> PublishedRow:
    """The first row of the table, or of the part of it, that ``name`` is in."""
    table = name.rpartition("/")[0]
    return next(row for each, row in rows.items() if each.rpartition("/")[0] == table)


def verify(options: argparse.Namespace, rows: dict[str, PublishedRow]) -> int:
    """Run a row again, print how it compares with the published one."""
    if len(options.what) != 1 or (name := options.what[0]) not in rows:
        given = f"{' '.join(options.what)!r} is not a row" if options.what else "name a row"
        raise ValueError(f"{given} of crucible verify --list")
    row = rows[name]
    if row.records[0].device_type == "cuda" and not has_gpu():
        raise ValueError(f"{name} is from {row.records[0].device}, and no GPU is here")
    base = base_of(name, rows)
    out = options.out or Path("outputs/verify", f"{name.replace('/', '-')}-{datetime.datetime.now():%F_%H-%M-%S}")
    arguments = sweep_arguments(row, base, rounds=options.rounds, out=out)
    shown = shlex.join([*program(), *arguments])
    print(shown, flush=True)
    code = subprocess.run([sys.executable, "-m", "trainer", *arguments], check=False).returncode
    ran = published.rows_of(find([out])) if code in (0, 1) else []
    found = next((each for each in ran if each.records and each.records[0].label == row.records[0].label), None)
    if found is None or not ran[0].records:
        print(f"{name} did not run to its end here (exit code {code}): the lines above say why")
        return 1
    lines, holds = published.check(name, row, found, command=shown)
    print("\n".join(lines))
    return int(not holds or code != 0)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def sweep_arguments(row: PublishedRow, base: PublishedRow, *, rounds: int, out: Path) -> list[str]:
    """Arguments of ``python -m trainer`` that run a row and its baseline in rounds."""
    command, start = row.records[0].command, row.records[0].start
    shared = [word for word in command if word in base.records[0].command and not APART.match(word)]
    arms = dict.fromkeys((arm_of(base, shared), arm_of(row, shared)))
    return [
        "-m",
        f"sweep={out}",
        *shared,
        f"hydra.launcher.arms=[{','.join(map(quoted, arms))}]",
        f"hydra.launcher.rounds={rounds}",
        *(["hydra.launcher.caches=shared"] if start is None else []),  # as for the table
    ]


def arm_of(row: PublishedRow, shared: list[str]) -> str:
    """Value of ``compile=`` with what else the arm alone has after blanks, as a sweep takes it."""
    words = [word for word in row.records[0].command if word not in shared and not word.startswith(OWN)]
    first = next((word.partition("=")[2] for word in words if word.startswith("compile=")), "eager")
    return " ".join([first, *(word for word in words if not word.startswith("compile="))])


if __name__ == "__main__":
    sys.exit(main())
