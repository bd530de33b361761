"""Findings: what an earlier run that compiled the very same code found out about it, so that a warm start need not.

A run whose graphs all came from ``compile=cached`` executes what the run before it compiled, compared with eager and
timed. Its own comparison would cost more than its compiling; the verdict is kept beside the artifacts instead.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from trainer.telemetry.compiler import CompilerMonitor
from trainer.watchdog import Sample


class Findings:
    """The findings about one program and its first batch.

    Args:
        program: Whose ``findings`` are read and added to.
        watch: Says whether all graphs came from the cache; made after the first pass has compiled everything.
        batch: Artifacts hold graphs for more shapes than a run uses; what was found holds for the shapes of its batch.
    """

    def __init__(self, program: Program, watch: CompilerMonitor, batch: Any) -> None:
        self._program, self._watch, self._shapes = program, watch, shapes_of(batch)

    def of_earlier_runs(self, everywhere: Callable[[bool], bool]) -> dict[str, Any] | None:
        """Facts of parity and watchdog, if the comparison passed and nothing of this run was compiled anew.

        Each process has a cache of its own, and comparing takes steps that all of them take together: None unless
        ``everywhere``, which every process calls with its own answer, says yes.
        """
        found = self._own()
        return found if everywhere(found is not None) else None

    def _own(self) -> dict[str, Any] | None:
        figures = self._watch.figures()
        found = self._program.findings.get(self._shapes)
        if found is None or figures.cache != "warm" or set(found) != {"parity", "watchdog"}:
            return None
        return found if found["parity"].get("verdict") == "passed" else None

    def keep(self) -> None:
        """Leave what this run reported to later ones."""
        parity, watchdog = self._program.report.get("parity"), self._program.report.get("watchdog")
        if parity is None or watchdog is None or parity["verdict"] != "passed" or not _finite([parity, watchdog]):
            return
        compared = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
        self._program.findings[self._shapes] = {"parity": {**parity, "compared": compared}, "watchdog": dict(watchdog)}


def sample_of(facts: dict[str, Any]) -> Sample:
    """The seconds of steps of the run that took them."""
    taken = facts["before_the_first_step"]
    return Sample(eager_seconds=taken["eager_seconds"], compiled_seconds=taken["compiled_seconds"])


def shapes_of(batch: Any) -> str:
    """Types and shapes of the tensors of a batch, in order."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return " ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def _finite(value: Any) -> bool:
    """Whether all numbers in it are: the signature of a bundle allows no others."""
    leaves = pytree.tree_leaves(value)
    return all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))
