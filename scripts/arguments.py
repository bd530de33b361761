"""What the commands share: one style of parser, the trainer's overrides, exit codes; on the standard library alone."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies import Strategy
    from trainer.process import StopRequest
    from trainer.settings import Config

REFUSED = 2
"""Exit code of wrong arguments, and of what the system refuses."""


def composed_training(overrides: list[str], *, config_dir: str | None, looks: str) -> tuple[Config, list[str]]:
    """The configuration, with ``compile=whole`` where no strategy is named, and its overrides.

    ``looks`` says who looks at what, for the message. Raises ValueError.
    """
    from strategies import Whole
    from trainer.config import compose
    from trainer.settings import require_present

    config = compose(overrides, config_dir=config_dir)
    if config.run.name != "train":
        raise ValueError(f"run={config.run.name}: {looks} training steps; leave run= out")
    require_present(config, resumes=False)
    named = any(override.lstrip("+~").startswith(("compile=", "compile.")) for override in overrides)
    if not config.compile and not named:
        # Not composed again: a plugin.py need not bear to be run twice.
        overrides, config = [*overrides, "compile=whole"], dataclasses.replace(config, compile={"whole": Whole()})
    return config, overrides


def reject_auto(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError where ``auto`` is among strategies that are looked at: only a run has steps to choose for."""
    from trainer.advice import program

    if any(strategy.name == "auto" for strategy in strategies):
        raise ValueError(
            f"compile=auto: only a run chooses; {' '.join(program())} with the same arguments says what (`auto: ...`), "
            "name that here, as in compile=[regional,cuda_graph]"
        )


def parser(name: str, about: str, more: str = "", *, overrides: bool = False) -> argparse.ArgumentParser:
    """A parser of ``crucible NAME``, ``more`` last in its help; ``overrides``: it takes the trainer's as well."""
    if {"-h", "--help"} & set(sys.argv[1:]):  # to Python 3.11.2's argparse ``| head`` is an error
        from trainer.process import keep_streams

        keep_streams()
    made = argparse.ArgumentParser(
        prog=f"crucible {name}",
        description=about.replace("``", ""),
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if overrides:
        made.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="overrides, as for crucible train")
        made.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for crucible train")
    return made


def positive(text: str) -> int:
    """A type of arguments: whole numbers from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def require_writable(option: str, file: Path | None) -> None:
    """Raise ValueError where ``file`` of ``option`` cannot be one: before any work."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ValueError(f"{option}={str(file)!r} is a folder, or lies in none")


STEPS_HELP = "steps to give total times for (default: 500,2000,20000)"


def steps(text: str) -> list[int]:
    """A type of arguments: whole numbers of steps, ``500,2000``, from the least on."""
    return sorted({positive(word) for word in text.split(",")})


def exit_code(work: Callable[[StopRequest], int], *, place: object = "", interrupted: str = "") -> int:
    """What ``work`` returns; errors of the user and the system, and signals, are a line and an exit code.

    ``place`` is where, for a system's error that names no file; ``interrupted`` what a Ctrl-C leaves.
    """
    from trainer.process import Interrupted, StopRequest

    stop = StopRequest(print)
    try:
        with stop:
            code = work(stop)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # ``| head`` has read enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Interrupted, Exception) as error:
        if stop.signum is not None:  # also where a library swallowed the interrupt and then met what it had left
            name = signal.Signals(stop.signum).name
            print(f"interrupted ({name}){': ' * bool(interrupted)}{interrupted}", file=sys.stderr)
            return 128 + stop.signum
        from trainer import config_errors  # Hydra's as well, which takes a while to import

        if not isinstance(error, (*config_errors.REFUSALS, OSError)):
            raise
        config_errors.report(error, str(place))
        return REFUSED
