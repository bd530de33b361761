"""The training loop that knows its compiler: runs a Task under a list of Strategies and writes a RunRecord."""

from __future__ import annotations

import os
import sys


def working_directory_last() -> None:
    """Move it to the end, and warn of files in it that have the name of a module of Python's own."""
    here = os.getcwd()
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[:1] not in ([here], [""]) or here == ours:  # not with -P, and not for a checkout's own folder
        return
    sys.path[:] = [*sys.path[1:], here]
    for name in sorted(os.listdir(here)):
        if name.endswith(".py") and name.removesuffix(".py") in sys.stdlib_module_names:
            print(
                f"warning: {os.path.join(here, name)} has the name of a module of Python's own: this process takes "
                "Python's, those that it starts may take yours; rename it",
                file=sys.stderr,
            )
