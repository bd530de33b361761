"""Has a strategy become slower? ``python -m scripts.drift --baseline FILE``, every night

Runs the arms that a baseline names again, in turns with eager, and compares their ratios to eager, warm-up, memory and
counts of the compiler with what they were on this machine. ``--update`` measures and writes the baseline:

    python -m scripts.drift --baseline drift.json --update experiment=gpt2,resnet50 compile=regional,whole
    python -m scripts.drift --baseline drift.json
    python -m scripts.drift --baseline drift.json experiment=gpt2 compile=regional       # one of its rows
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmark_strategies import ALWAYS, sweep_arguments
from scripts.drift_table import show, show_rows
from trainer.evidence import baselines
from trainer.evidence.baselines import BaselineRow
from trainer.evidence.drifts import Tolerances, drift, measured
from trainer.evidence.machines import fingerprint_of, this_fingerprint
from trainer.evidence.runs import Run, find
from trainer.streams import keep_streams
from trainer.sweep.processes import Signals

REFUSED = 2
ABOUT = """\
what moved:
  ratio        eager's mean step over the arm's, of the same session: differs by more than --tolerance, and the two 95%
               intervals are apart (Student's t over the rounds, see scripts.compare)
  warm-up      of cold starts: by more than --warmup-tolerance and a second, and the ranges of the runs are apart
  peak memory  of the device, by more than --tolerance
  counts       graphs, graph breaks, recompiles, cache misses: any difference
Ratios hold where the machine is as it was but for its clock; a baseline is kept for each device, host processor and
major version of torch, Triton and CUDA.

Exit codes: 0 nothing got worse, 1 a row got worse or failed, 2 refused (wrong arguments, no baseline for this machine),
128 + signal stopped.
"""


class Stopped(Exception):
    """A signal ended the sweep; its number is the argument."""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    keep_streams()
    options = parse(arguments)
    try:
        machines = baselines.load(options.baseline)
        known = find(options.runs) if options.runs else None
        machine = this_fingerprint() if known is None else machine_of(known)
        before = machines.get(machine, [])
        rows = chosen(options, before, machine, list(machines)) if known is None or not options.update else []
        runs = rerun(rows, options) if known is None else known
        found = [row for row in measured(runs, without=ALWAYS) if known is None or concerns(row, options)]
        if options.update:
            return update(machines, machine, found, options.baseline)
        return compare(rows, found, options)
    except Stopped as stopped:
        print("stopped; nothing was compared", file=sys.stderr)
        return 128 + int(stopped.args[0])
    except (ValueError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return REFUSED


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; what is no flag is an override."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.drift",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="workloads and arms; values with commas make several")
    add("--baseline", type=Path, required=True, metavar="FILE", help="JSON, with rows for each machine")
    add("--update", action="store_true", help="write what is measured into the baseline instead of comparing")
    add("--arm", action="append", default=[], metavar="ARM", help="an arm with options: 'whole compile.whole.mode=...'")
    add("--from", dest="runs", nargs="+", metavar="RUNS", help="take these runs (files, folders, globs); run nothing")
    add("--rounds", type=int, default=3, help="turns of each arm (default 3, the fewest that tell their noise well)")
    add("--tolerance", type=float, default=0.03, metavar="SHARE", help="of ratio and memory (default 0.03)")
    add("--warmup-tolerance", type=float, default=0.25, metavar="SHARE", help="of the warm-up (default 0.25)")
    add("--strict", action="store_true", help="exit with 1 too when a row got better, or could not be judged")
    add("--timeout", type=float, metavar="SECONDS", help="longest time of one run; then it has failed (default: none)")
    add("--out", type=Path, metavar="DIR", help="folder of the runs (default: outputs/drift/<time>)")
    add("--config-dir", metavar="DIR", help="your own options and plugin.py, as for python -m trainer")
    options = parser.parse_intermixed_args(arguments)
    options.out = options.out or Path("outputs", "drift", f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}")
    for name in ("rounds", "tolerance", "warmup_tolerance", "timeout"):
        value, least = getattr(options, name), 1 if name == "rounds" else 0
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    # ``--from RUNS experiment=gpt2`` is what people write; argparse takes the override for a run.
    words = [word for word in options.runs or [] if re.match(r"[+~]*[\w./]+=", word) and not Path(word).exists()]
    options.overrides += words
    options.runs = [word for word in options.runs or [] if word not in words] or None
    for word in options.overrides:
        if "=" not in word:
            parser.error(f"{word!r} is not an override (name=value); records are named with --from")
        if word.startswith("compile."):
            parser.error(f"{word} belongs to an arm: --arm '{word.split('.')[1]} {word}'")
    return options


def chosen(
    options: argparse.Namespace, before: Sequence[BaselineRow], machine: str, machines: Sequence[str]
) -> list[BaselineRow]:
    """Rows to measure. Raises ValueError when there are none, with the command that makes some."""
    workloads, arms = asked(options)
    if options.update and (workloads != [[]] or arms):
        if not arms or workloads == [[]]:
            raise ValueError("--update of new rows needs a workload and arms: experiment=gpt2 compile=regional,whole")
        return [BaselineRow(workload=workload, arm=arm) for workload in workloads for arm in arms if arm != "eager"]
    if not before:
        others = f"; it has {'; '.join(machines)}" if machines else ""
        raise ValueError(
            f"{options.baseline} has no baseline for this machine ({machine}){others}\n"
            f"make one: python -m scripts.drift --baseline {options.baseline} --update experiment=... compile=..."
        )
    rows = [row for row in before if concerns(row, options)]
    if not rows:
        raise ValueError(f"no such row in {options.baseline}; it has: {'; '.join(row.name for row in before)}")
    return rows


def asked(options: argparse.Namespace) -> tuple[list[list[str]], list[str]]:
    """Workloads and arms of the command line, each value with commas taken apart."""
    arms, given = [" ".join(arm.split()) for arm in options.arm], []
    for override in options.overrides:
        name, _, value = override.partition("=")
        if name == "compile":
            arms += [re.sub(r"\s", "", each) for each in parts(value)]
        else:
            given.append([f"{name}={each}" for each in parts(value)])
    return [list(workload) for workload in itertools.product(*given)], list(dict.fromkeys(arms))


def parts(value: str) -> list[str]:
    """``[regional,buckets],whole`` as its two values: commas within brackets and quotes separate nothing."""
    return [part for part in re.findall(r"(?:\[[^]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"|[^,])+", value) if part]


def concerns(row: BaselineRow, options: argparse.Namespace) -> bool:
    """Whether the command line names the row, by all of its overrides; without any it names all rows."""
    workloads, arms = asked(options)
    mine = {BaselineRow(workload=[], arm=arm).key[1] for arm in arms}
    return (not arms or row.key[1] in mine) and any(set(given) <= set(row.workload) for given in workloads)


def rerun(rows: Sequence[BaselineRow], options: argparse.Namespace) -> list[Run]:
    """Run the arms of each workload in turns with eager, each run in a fresh process with empty compile caches.

    Raises:
        Stopped: A signal came; the sweep has been told, and has ended.
        ValueError: The sweep was refused.
    """
    workloads: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        workloads.setdefault(tuple(row.workload), []).append(row.arm)
    signals = Signals()
    with signals.watch():
        for number, (workload, arms) in enumerate(workloads.items(), start=1):
            name = " ".join(workload)
            print(f"[{number}/{len(workloads)}] {name}: eager, {', '.join(arms)} · rounds {options.rounds}", flush=True)
            command = sweep(workload, ["eager", *arms], options.out / str(number), options)
            # A process group of its own: Ctrl-C reaches it once, through us.
            process = subprocess.Popen(command, process_group=0)
            signals.pass_on = process.send_signal
            if signals.received is not None:  # it came before
                process.send_signal(signals.received)
            exit_code = process.wait()
            if signals.received is not None:
                raise Stopped(signals.received)
            if exit_code == REFUSED:
                raise ValueError(f"{name}: the sweep was refused, as it says above")
            if exit_code not in (0, 1):
                raise ValueError(f"{name}: the sweep ended with exit code {exit_code}")
    return find([options.out])


def sweep(workload: Sequence[str], arms: Sequence[str], out: Path, options: argparse.Namespace) -> list[str]:
    """The command of a sweep over the arms of one workload, from empty compile caches."""
    limit = "null" if options.timeout is None else options.timeout
    given = argparse.Namespace(out=out, overrides=workload, warm=False, arms=arms, rounds=options.rounds, timeout=limit)
    own = ("--config-dir", options.config_dir) if options.config_dir else ()
    return [sys.executable, "-m", "trainer", *own, *sweep_arguments(given)]


def machine_of(runs: Sequence[Run]) -> str:
    """The machine that all runs were made on. Raises ValueError when they say several, or one does not say."""
    machines = {run.directory: fingerprint_of(run.record) for run in runs if run.record.status == "finished"}
    unknown = [directory for directory, machine in machines.items() if machine is None]
    if unknown:
        raise ValueError(f"{unknown[0]}: its record does not say on which machine it was made")
    names = list(dict.fromkeys(machines.values()))
    if len(names) != 1:
        raise ValueError(f"runs of one machine are needed, and these are of {len(names)}: {'; '.join(map(str, names))}")
    return str(names[0])


def update(machines: dict[str, list[BaselineRow]], machine: str, found: Sequence[BaselineRow], file: Path) -> int:
    """Write rows that have figures; returns 1 when one has none. Raises ValueError when there is no row at all."""
    if not found:
        raise ValueError("there is nothing but eager in these runs, and so nothing to keep")
    for row in found:
        if row.failed is not None:
            print(f"error: {row.name}: {row.failed}; its row is left as it was", file=sys.stderr)
    good = [row for row in found if row.failed is None]
    if good:
        machines[machine] = baselines.merged(machines.get(machine, []), good)
        baselines.save(machines, file)
    show_rows(good)
    print(f"{file}: {len(good)} row{'' if len(good) == 1 else 's'} written for {machine}")
    return int(len(good) < len(found))


def compare(rows: Sequence[BaselineRow], found: Sequence[BaselineRow], options: argparse.Namespace) -> int:
    """Print what each row is now; returns 1 when one got worse."""
    now = {row.key: row for row in found}
    tolerances = Tolerances(ratio=options.tolerance, warmup=options.warmup_tolerance)
    drifts = [drift(row, now.get(row.key), tolerances) for row in rows]
    if all(each.now is None for each in drifts):
        raise ValueError(f"none of these runs is of a row of {options.baseline}")
    show(drifts)
    odd = [each for each in drifts if each.verdict != "same"]
    return int(any(each.worse for each in drifts) or (options.strict and bool(odd)))


if __name__ == "__main__":
    sys.exit(main())
