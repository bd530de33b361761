"""Console of runs and sweeps: one whose reader may leave. Needs no torch."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class RunConsole(Console):
    """``python -m trainer | tee log`` loses its tee at a Ctrl-C, and the run should still write its checkpoint and
    record instead of ending where it prints."""

    def on_broken_pipe(self) -> None:
        """Go on without output; rich would exit."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
