"""Ahead: whether the host is ahead of the device all through a step, seen without waiting for either.

A step is cut where the loop calls us anyway. At each point an event is recorded, and the event of the point before is
asked. If the device has not come to that one, all that lies between the two was launched before it began there: it
waited for the host at no moment in between. If it has, nothing is known: a loop that reads its loss empties the queue.

The queue holds about a thousand launches. Once it is full, the host is that far ahead and no further, so that a point
says something only where the one before is less than a queue behind. A backward may be longer: eager's is cut, too,
where gradients of some parameters are there.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from strategies.loop import Loop

POINTS, PARAMETERS = 16, 10
"""Points in a backward at most, and parameters between two of them at least: each takes some 15 microseconds of the
host, and a step of few parameters fits into the queue."""


def mark(device: torch.device) -> Any:
    """A point in the device's current stream, whose ``query()`` says whether the device has come to it; None without
    streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Ahead:
    """Watches single steps of ``loop``: ``begin`` each of them, then ``end`` it."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._within = loop, contextlib.ExitStack()
        self._last: Any = None
        self._ahead = False

    def begin(self, *, within_backward: bool = False) -> None:
        """A step begins, of eager where points ``within_backward`` are set. What lies between two watched steps belongs
        to the second."""
        self._ahead = True
        self._point()
        if self._last is not None:
            trained = [one for one in self._loop.module.parameters() if one.requires_grad and one.is_leaf]
            for parameter in trained[:: max(PARAMETERS, math.ceil(len(trained) / POINTS))] if within_backward else ():
                if parameter._post_accumulate_grad_hooks is None:
                    parameter.register_post_accumulate_grad_hook(self._point)
                    # None again, where removing the hook alone would leave an empty list of them.
                    self._within.callback(setattr, parameter, "_post_accumulate_grad_hooks", None)
            self._within.enter_context(self._loop.around_training_step(self._point, self._point))
            if self._loop.scaler is None:  # else looking whether it left the update out would wait for the device
                self._within.enter_context(self._loop.around_update(self._point, self._point))

    def _point(self, *_: Any) -> None:
        self._ahead = self._ahead and (self._last is None or not self._last.query())
        self._last = mark(self._loop.device)

    def end(self) -> bool:
        """The step is over; whether the device waited for the host at no moment of it. False where nothing is known."""
        self.close()
        if self._ahead:
            self._point()
        ahead, self._ahead = self._ahead and self._last is not None, False
        return ahead

    def close(self) -> None:
        """Leave the loop as it was. May be called twice."""
        self._within.close()
