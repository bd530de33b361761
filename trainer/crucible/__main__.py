"""The command ``crucible`` and its subcommands; ``python -m crucible`` is the same.

Imports nothing but the standard library before it knows the subcommand: ``crucible doctor`` works where torch does not.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train under compile strategies, measured; with -m a sweep of several",
    "compare": "would torch.compile help? Train eager and two strategies on a task; or compare runs that are there",
    "report": "runs as one HTML page: verdict, break-even, pictures",
    "check": "a gate for CI: is this branch worse than its base in breaks, recompiles, checks or the step?",
    "verify": "do the published figures hold on this machine?",
    "explain": "what does not compile, with its line and torch's own hints",
    "bisect": "the smallest module whose compiled results are not eager's",
    "doctor": "is this machine all right?",
}
PACKAGES = ("bisect", "check", "explain")
"""Those whose script is a folder."""
HELP = f"""\
usage: crucible COMMAND ...

Would torch.compile help my training, how, and what does it cost? Trains any Lightning model eager and under compile
strategies, measures each with the same code, and says which one to use for how many steps.

commands:
{chr(10).join(f"  {name:<16} {meaning}" for name, meaning in COMMANDS.items())}

examples:
  crucible compare task=captioning                 # eager, regional and whole, in turn, with a table and a verdict
  crucible train task=captioning compile=regional  # one training; --help has the tasks, the strategies, every option
  crucible report outputs/sweeps/<time>            # the page of a sweep

crucible COMMAND --help says more. Of each there is a form without an installation: python -m trainer for train,
python -m scripts.COMMAND for the others. Your own model, in Python: crucible.compare(module, data).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` begin with; returns its exit code. Overrides alone are ``train``'s."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:  # else the command sees to what it prints
        from trainer.process import keep_streams

        keep_streams()  # ``| head``, a full disk
    if given in ([], ["-h"], ["--help"], ["help"]):
        print(HELP, end="")
        return 0
    if given == ["--version"]:
        from importlib.metadata import version

        print(version("crucible-train"))
        return 0
    if "COMP_LINE" in os.environ:
        complete(given)
        return 0
    named = re.fullmatch(r"[A-Za-z][\w-]*", given[0]) is not None  # an override has "=", a flag begins with "-"
    name, rest = (given[0].replace("-", "_"), given[1:]) if named else ("train", given)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=3)
        hint = f"near: {', '.join(near)}" if near else f"there are {', '.join(COMMANDS)}"
        print(f"error: {given[0]} is not a command of crucible; {hint}", file=sys.stderr)
        return 2
    if name == "train":
        train(rest)
        return 0  # it exits with its own
    script = importlib.import_module(f"scripts.{name}{'.__main__' * (name in PACKAGES)}")
    return script.main(rest)


def train(arguments: list[str]) -> None:
    """``python -m trainer``, which ends the process. Hydra and Lightning's further processes read ``sys.argv``."""
    sys.argv[1:] = arguments
    importlib.import_module("trainer.cli").main()


def complete(arguments: list[str]) -> None:
    """Tab completion: Hydra's, of the line without its subcommand; the subcommands themselves first."""
    program, *words = os.environ["COMP_LINE"].split(" ")
    if len(words) == 1 and (names := [name for name in COMMANDS if name.startswith(words[0])]):
        print(" ".join(names))
        return
    if words[:1] == ["train"]:
        words = words[1:]
    os.environ["COMP_LINE"] = " ".join([program, *words])
    train(arguments)


def entry() -> None:
    """The console script: the prompt is back with the last line."""
    try:
        from trainer.process import quick_exit

        with quick_exit():
            sys.exit(main())
    except ImportError as error:
        if not (line := importlib.import_module("crucible").overwritten(error)):
            raise
        sys.exit(f"error: {line}")


if __name__ == "__main__":
    from trainer import working_directory_last

    working_directory_last()
    entry()
