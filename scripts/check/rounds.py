"""Rounds: the runs of a check, each in a fresh process; of this branch, and of a base that is checked out beside it.

Runs of both take turns, so that what else the machine does meets them alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.check.measurement import FILE_NAME, Measured, load, measured, read
from trainer.report.runs import Run, find
from trainer.run_start import RECORDS_VARIABLE, git_commit
from trainer.run_start import ROOT as OURS
from trainer.sweep.plan import REFUSED, PlannedCell, directory_name, quoted
from trainer.telemetry.record import RunRecord

STEPS = 60
"""Optimizer steps of a run, unless another number is asked for: some 35 are steady, beside warm-up and checks."""
THIS, BASE = "this", "base"
OPTION = re.compile(r"^(?P<name>[+~]*\w+(\.\w+)+=|--?[\w-]+=)?(?P<value>[^=]+)$")
"""An argument whose value may be a path: of an option of the trainer (``task.data.root=data``) or of a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A branch, as its processes are started."""

    name: str = THIS
    folder: Path = field(default_factory=Path.cwd)
    """Working directory."""
    root: Path = field(default_factory=Path.cwd)
    """Of the checkout, or the working directory where there is none."""
    commit: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def arguments(self, given: Sequence[str]) -> list[str]:
        """``given`` for this side: a file or folder that the checkout lacks, data for instance, by its whole path; one
        of the other checkout that is given by its whole path, in this one."""
        return list(given) if self.name == THIS else [self._argument(each) for each in given]

    def _argument(self, given: str) -> str:
        match = OPTION.match(given)
        if match is None or not (path := Path(match["value"])).exists():
            return given
        own = self.folder / os.path.relpath(path)
        if not own.exists():
            own = path.absolute()
        elif not path.is_absolute():
            return given  # from the working directory on, which is this one's
        return f"{match['name'] or ''}{own}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every round runs: overrides of the trainer for each arm, or a script of one's own."""

    arms: list[list[str]] = field(default_factory=list)
    """The trainer's arguments of each, without eager's; empty for a script."""
    eager: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)

    def cells(self, side: Side, number: int, directory: Path, *, eager: bool) -> Iterator[PlannedCell]:
        """Of one side in one round, ``eager`` among them if they are this side's."""
        # Eager of the base is left out: what is compared with the base is what is compiled.
        arms = [self.eager, *self.arms] if side.name == THIS and eager else self.arms
        for words in [self.script] if self.script else arms:
            named = (word.removeprefix("compile=") for word in words if word.startswith("compile="))
            title = words[0] if self.script else next(named)
            cell = PlannedCell(overrides=(), arm=(), job=0, record=RunRecord(task=title, round=number))
            cell.chosen = [title, *([f"of {side.name}"] if side.name != THIS else [])]
            cell.directory = (directory / f"{number}-{side.name}-{directory_name([title])}").absolute()
            cell.folder, cell.variables = side.folder, dict(side.variables)
            cell.command = side.arguments(words)
            if self.script:
                cell.variables[RECORDS_VARIABLE] = str(cell.directory)
                cell.command[:0] = [sys.executable] if words[0].endswith(".py") else []
            else:
                from trainer.sweep.launcher import started

                cell.command[:0] = [sys.executable, *started()]
                cell.command.append(f"hydra.run.dir={quoted(cell.directory)}")
            yield cell


def work_of(overrides: Sequence[str], *, steps: int, config_dir: str | None) -> Work:
    """What the trainer's ``overrides`` ask for. Raises ValueError where nothing is to be compiled."""
    given = [word for word in overrides if word.startswith("compile=")] or ["compile=regional"]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]}: several are written {given[0]},{given[1].partition('=')[2]}")
    choices = re.split(r",(?![^\[]*\])", given[0].removeprefix("compile="))
    choices = [choice for choice in choices if choice not in ("eager", "[]", "")]
    if not choices:
        raise ValueError("compile=eager: compiles nothing, there is nothing to check; try compile=regional")
    few = {
        "trainer.max_steps": steps,
        "trainer.val_every_n_steps": 0,
        "trainer.checkpoint_every_n_steps": "null",
        "trainer.progress": "none",
    }
    named = {word.lstrip("+").partition("=")[0] for word in overrides}
    if refused := next((word for word in overrides if re.match(r"[+~]*(hydra|repeat|resume|run)\b", word)), None):
        raise ValueError(f"{refused}: not for a check, which trains anew, in folders and processes of its own")
    shared = [word for word in overrides if not word.startswith("compile=")]
    shared += [f"{name}={value}" for name, value in few.items() if name not in named]
    shared = [*(["--config-dir", config_dir] if config_dir else []), *shared]
    eager = [word for word in shared if not re.match(r"[+~]*compile\.", word)]
    return Work(arms=[[*shared, f"compile={choice}"] for choice in choices], eager=[*eager, "compile=eager"])


def run_rounds(
    work: Work,
    sides: Sequence[Side],
    numbers: Sequence[int],
    directory: Path,
    log: Callable[[str], None],
    *,
    eager: bool = True,
) -> dict[str, list[Run]]:
    """Run the rounds of ``numbers``, all sides in each; returns the runs by the name of the side.

    A side of which a run fails is not run again. Raises ValueError where the command is refused, or the script leaves
    no record.
    """
    from trainer.sweep.launcher import run_cell

    planned = [
        (side, cell)
        for number in numbers
        for side in sides
        for cell in work.cells(side, number, directory, eager=eager)
    ]
    found: dict[str, list[Run]] = {side.name: [] for side in sides}
    failed: set[str] = set()
    for place, (side, cell) in enumerate(planned, 1):
        if side.name in failed:
            continue
        name, blank, began = f"[{place}/{len(planned)}] {cell.title}", cell.record, time.monotonic()
        log(name)
        run_cell(cell, ())
        record = cell.record
        if cell.exit_code != 0:
            failed.add(side.name)
            if not record.strategies:  # eager, or dead before its first record: an arm that is told of
                record.strategies, record.label = [{"name": cell.chosen[0]}], cell.chosen[0]
        if side.name == THIS and cell.exit_code == REFUSED and not work.script:
            raise ValueError((record.reason or "refused").removeprefix("refused: "))
        if side.name == THIS and cell.exit_code == 0 and record is blank:
            needs = "Compile([...]) has to be among the callbacks of its Trainer"
            raise ValueError(f"{work.script[0]}: has left no record; {needs}")
        runs = find([cell.directory]) if work.script and record is not blank else [Run(cell.directory, record)]
        for run in runs:
            run.record.round = blank.round
        found[side.name] += runs
        log(f"{name}: {cell.outcome(time.monotonic() - began)}")
    return found


# ---- the base --------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> bytes | None:
    """What git prints; None where it fails, is not there, or there is no repository."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(reference: str) -> str | None:
    """The commit that a reference of git names; None for what is none."""
    if reference.startswith("-"):
        return None
    found = git("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
    return found.decode().strip() if found else None


def stored(base: str, *, root: Path) -> list[Measured] | None:
    """The base that ``base`` names: a base record, a folder of one or of runs, runs, or ``REF:PATH`` of git; None where
    it names a commit of git. Raises ValueError for what is none of them."""
    path = Path(base)
    if path.is_dir() and (path / FILE_NAME).is_file():
        path /= FILE_NAME
    if path.is_file() and path.suffix == ".json" and path.name != "record.json":
        return load(path)
    if path.exists():
        return measured(find([base]), root=root)
    if commit_of(base) is not None:
        return None
    reference, colon, inside = base.partition(":")
    if colon and commit_of(reference) is not None:
        text = git("show", f"{reference}:./{inside}")
        if text is None:
            raise ValueError(f"--base={base}: {reference} has no file {inside}")
        return read(text, base)
    raise ValueError(f"--base={base}: neither a file or folder nor a commit of git")


def this_side() -> Side:
    top = git("rev-parse", "--show-toplevel")
    if top is None:
        return Side()
    root = Path(top.decode().strip())
    return Side(root=root, commit=git_commit(root))


@contextlib.contextmanager
def checked_out(reference: str) -> Iterator[Side]:
    """A worktree of git in a temporary folder, which goes away. Raises ValueError where git makes none."""
    top = git("rev-parse", "--show-toplevel")
    if top is None:
        raise ValueError(f"--base={reference}: the working directory is in no checkout of git")
    root = Path(os.path.realpath(top.decode().strip()))
    with tempfile.TemporaryDirectory(prefix="check-base-") as folder:
        tree = Path(os.path.realpath(folder)) / root.name
        made = subprocess.run(
            ["git", "worktree", "add", "--detach", "--force", str(tree), str(commit_of(reference))],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise ValueError(f"--base={reference}: {made.stderr.strip().splitlines()[-1]}")
        try:
            here = tree / Path(os.path.realpath(Path.cwd())).relative_to(root)
            if not here.is_dir():
                raise ValueError(f"--base={reference}: has no folder {here.relative_to(tree)}")
            path = {"PYTHONPATH": os.pathsep.join(_import_path(root, tree))}
            yield Side(name=BASE, folder=here, root=tree, commit=commit_of(reference), variables=path)
        finally:
            git("worktree", "remove", "--force", str(tree))


def _import_path(root: Path, tree: Path) -> list[str]:
    """The search path of Python's imports with folders of ``tree`` in the place of those of ``root``.

    What ``tree`` has not, an environment in ``.venv`` for instance, stays as it is. A project that is installed
    editable may be found by a hook that no path names: its ``src`` comes first, as that hook comes last.
    """
    given = [Path(os.path.realpath(entry)) for entry in sys.path if entry and Path(entry).is_dir()]
    inside = [tree / entry.relative_to(root) for entry in given if entry.is_relative_to(root)]
    inside += [tree] * (Path(os.path.realpath(OURS)) == root) + [tree / "src"]
    outside = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    outside = [entry for entry in outside if not Path(os.path.realpath(entry)).is_relative_to(root)]
    return list(dict.fromkeys([*(str(entry) for entry in inside if entry.is_dir()), *outside]))
