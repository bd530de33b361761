"""Which checkpoints a training has written, whoever wrote them, so that one can be named that is good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L


class SavedCheckpoints(contextlib.ExitStack):
    """Inside, notes each checkpoint that ``trainer`` writes, and the one that it was resumed from."""

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__()
        self._trainer = trainer
        self._steps = {} if trainer.ckpt_path is None else {str(trainer.ckpt_path): trainer.global_step}
        self._save = self.enter_context(replaced(trainer, "save_checkpoint", self._save_and_note))

    def last(self, step: int) -> str | None:
        """Path and step of the last one written at or before ``step`` that is still there."""
        there = [(saved, path) for path, saved in self._steps.items() if saved <= step and Path(path).exists()]
        return f"{max(there)[1]} (step {max(there)[0]})" if there else None

    def _save_and_note(self, filepath: Any, *arguments: Any, **named: Any) -> None:
        self._save(filepath, *arguments, **named)
        self._steps[str(filepath)] = self._trainer.global_step


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Inside, ``owner.name`` is ``function``; yields what it was."""
    original, own = getattr(owner, name), vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield original
    finally:
        if own is None:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, own)
