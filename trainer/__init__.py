"""The training loop that knows its compiler: runs a Task under a list of Strategies and writes a RunRecord."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
CONF = _HERE / "conf" if (_HERE / "conf" / "config.yaml").is_file() else _HERE.parent / "conf"
"""Inside the package in a wheel, beside it in a checkout; absolute, so that the user's own conf/ is never taken."""


def working_directory_last() -> None:
    """Let the working directory come last on the import path, after our packages: what it holds can be imported, as
    plug-ins are, and hides nothing. Warn of files in it that have the name of a module of Python's own.

    Python puts it first for ``python -m``, and leaves it out for a console script.
    """
    here = os.path.realpath(os.getcwd())
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    first = sys.path[:1] in ([os.getcwd()], [""])
    known = [entry for entry in sys.path if os.path.realpath(entry) != here]
    if here == ours:  # a checkout's own folder
        if not first:
            sys.path[:] = [*known, here]
        return
    # Not first: in an installation ours are site-packages, which must not come before the standard library.
    sys.path[:] = [*known, *([] if ours in map(os.path.realpath, known) else [ours]), here]
    for name in sorted(os.listdir(here)) if first else ():
        if name.endswith(".py") and name.removesuffix(".py") in sys.stdlib_module_names:
            print(
                f"warning: {os.path.join(here, name)} has the name of a module of Python's own: this process takes "
                "Python's, those that it starts may take yours; rename it",
                file=sys.stderr,
            )
