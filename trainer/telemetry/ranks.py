"""What each process of a run measured, handed to the first one without a collective.

Figures travel through the key-value store by which the processes found each other: whoever is gone has left its last
ones there, and nobody waits for anybody. How long a rank waits in collectives that no compute hides comes from DDP's
own timers, which torch reads every hundredth step anyway, or from the profiler.
https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import distributed, nn

from strategies.loop import Loop
from trainer.telemetry.files import build
from trainer.telemetry.record import RankFigures, communication_of

_FIRST_SAMPLES = 10
"""Iterations that DDP times one by one, most of them warm-up; after these it times every hundredth."""
_SAMPLES = 101
_RUNS = itertools.count()
"""Of this process; all processes of a group count alike."""


class Ranks:
    """The processes of one run, seen from one of them."""

    def __init__(self, loop: Loop) -> None:
        self._size, self._name = loop.world_size, f"crucible/run-{next(_RUNS)}"
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.exposed = ExposedCommunication()
        self._before: int | None = None

    def exchange(self, figures: RankFigures, step: int) -> tuple[dict[str, float | None], int]:
        """Publish the figures of a window; returns, on the first process, those of all of the window before for
        TensorBoard and its last step. By then all are through with it."""
        before, self._before = self._before, step
        self.publish(figures, step)
        return (rank_scalars(self.collect(before)) if self.rank == 0 and before is not None else {}), before or 0

    def publish(self, figures: RankFigures, moment: object) -> None:
        """Leave this process's figures of a moment, which all processes name alike, for the first one."""
        with contextlib.suppress(RuntimeError, ValueError):  # who holds the store is gone; there is none
            _store().set(f"{self._name}/{moment}/{self.rank}", json.dumps(dataclasses.asdict(figures)))

    def collect(self, moment: object) -> list[RankFigures]:
        """Figures of that moment of each process that has left some, in order; they are gone afterwards. For one
        process alone: of two, one would wait for what the other has taken."""
        found = []
        with contextlib.suppress(RuntimeError, ValueError):
            for key in (f"{self._name}/{moment}/{rank}" for rank in range(self._size)):
                if _store().check([key]):
                    found.append(build(RankFigures, json.loads(_store().get(key))))
                    _store().delete_key(key)
        return found


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


class ExposedCommunication:
    """Seconds that a step waits for collectives after its backward is through, as DDP times them. There is none where
    the steps are not DDP's own, in a replayed CUDA graph for instance."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = _FIRST_SAMPLES

    @property
    def median_seconds(self) -> float | None:
        """Over all samples; None without any."""
        return statistics.median(self._samples) if self._samples else None

    def look(self, model: nn.Module | None) -> float | None:
        """Take the newest sample of ``model`` in, which does not wait for the device; None where there is no new
        one."""
        if not isinstance(model, nn.parallel.DistributedDataParallel) or model.logger is None:
            return None
        timed = model._get_ddp_logging_data()
        if timed.get("iteration", 0) <= self._seen or not timed.get("backward_comm_time"):
            return None
        self._seen = timed["iteration"]
        self._samples.append((timed["backward_comm_time"] - timed["backward_compute_comm_overlap_time"]) / 1e9)
        return self._samples[-1]


def rank_scalars(ranks: Sequence[RankFigures]) -> dict[str, float | None]:
    """What TensorBoard shows of all processes."""
    found, peaks = communication_of(ranks), [one.peak_device_memory_gib for one in ranks]
    known = [peak for peak in peaks if peak is not None]
    return {
        "ranks/skew_milliseconds": None if found is None else found.skew_seconds * 1e3,
        "ranks/slowest": None if found is None else found.slowest.rank,
        "ranks/exposed_communication_share": None if found is None else found.exposed_share,
        "ranks/peak_device_gib": max(known, default=None),
    }
