"""Job: what training and inference have in common as parts of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from trainer.callback import Compile
from trainer.interrupt import StopRequest
from trainer.reasons import one_line
from trainer.rows import summary
from trainer.settings import Config
from trainer.telemetry.record import RunRecord


class Job:
    """The parts of one run, built by ``go`` in the order in which a user's mistakes are cheapest to find."""

    def __init__(self, config: Config, record: RunRecord, run_dir: Path, console: Console) -> None:
        self._config, self._record, self._run_dir, self._console = config, record, run_dir, console
        self._compile: Compile | None = None
        self._stop: StopRequest | None = None

    @property
    def stopping(self) -> int | None:
        """The signal that asked the run to stop, if one did."""
        return None if self._stop is None else self._stop.signum

    @property
    def started(self) -> bool:
        """Whether a step was begun."""
        raise NotImplementedError

    def go(self, stop: StopRequest) -> None:
        """Build everything and run to the end, to an error or to a stop."""
        raise NotImplementedError

    def close(self) -> None:
        """Write the last TensorBoard pages; whatever is wrong with them, the record is still to be saved."""
        if self._compile is None:
            return
        try:
            self._compile.close_pages(summary(self._record))
        except Exception as error:  # a full disk; or a signal to the group, which broke off Lightning's closing of them
            note = f"TensorBoard's last pages were not written: {one_line(error)}"
            self._record.notes.append(note)
            self._console.print(note)

    @contextlib.contextmanager
    def _loading(self, checkpoint: Path | None) -> Iterator[None]:
        """A checkpoint that does not fit, found before the first step, is the user's: ValueError in one line."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if checkpoint is not None and not self.started and re.search("state_dict|loaded state dict", str(error)):
                raise ValueError(
                    f"resume={self._config.resume}: the checkpoint belongs to another model than this: "
                    f"{one_line(error)}"
                ) from error
            raise
