"""An optimizer's update as CUDA graphs of its own, which the host launches at once instead of kernel by kernel.

A graph reads and writes fixed addresses, whoever lies there. Backward makes new gradients at each step; in a training
whose steps are alike they come to lie at the same few sets of addresses again and again, and each set that recurs gets
a graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from strategies.graph_engine import Engine, first_line

MOST_GRAPHS = 4
"""Graphs that are kept; the one that has not been used for longest gives way."""
MOST_CAPTURES = 16
"""Captures of one training: each waits for the device and empties the cache of its memory."""
MOST_SEEN = 64
"""Sets of addresses that are remembered to tell whether they recur."""


class Replays:
    """Runs launches, from a graph where there is one for the addresses at hand.

    Args:
        engine: Captures and replays.
        tell: Is given a line for the user when graphs are given up.
        wanted: Whether launches may be captured at this moment.
    """

    def __init__(self, engine: Engine, *, tell: Callable[[str], None], wanted: Callable[[], bool]) -> None:
        self._engine, self._tell, self._wanted = engine, tell, wanted
        self._graphs: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused = False
        self.captures = 0
        """Graphs captured so far."""
        self.replayed = 0
        """Steps replayed so far."""

    @property
    def active(self) -> bool:
        """Whether a key is worth making."""
        return not self._refused and self._wanted()

    def run(self, key: Hashable, launch: Callable[[], None]) -> bool:
        """Replay the graph of ``key``, capturing it when the key recurs; False where the caller has to launch itself.

        Args:
            key: All that a graph of ``launch`` has taken by value, addresses among them.
            launch: The device's part of a step. Nothing that it does on the host may matter.
        """
        replay = self._graphs.get(key)
        if replay is None:
            # The first launch also loads and tunes its kernels, which a capture may not.
            replay = self._capture(key, launch) if self._recurs(key) else None
            if replay is None:
                return False
        else:
            self._graphs.move_to_end(key)
        replay()
        self.replayed += 1
        return True

    def free(self) -> None:
        """Give the graphs back; what they work on may go."""
        self._graphs.clear()
        self._seen.clear()

    def another(self) -> Replays:
        """The same for a copy of the optimizer, which may be captured at any time and keeps what happens to itself."""
        return Replays(self._engine, tell=_nothing, wanted=lambda: not self._refused)

    def _recurs(self, key: Hashable) -> bool:
        if key in self._seen:
            return self.captures < MOST_CAPTURES
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> Callable[[], None] | None:
        try:
            replay, _ = self._engine.capture(launch)
        except Exception as error:
            # The engine does not promise that graphs from before may still be replayed.
            self.free()
            self._refused = True
            self._tell(f"the update is launched kernel by kernel, it could not be captured: {first_line(error)}")
            return None
        self.captures += 1
        self._graphs[key] = replay
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        if self.captures == MOST_CAPTURES:
            self._tell(
                f"gradients lay at {MOST_CAPTURES} sets of addresses: further ones are launched kernel by kernel"
            )
        return replay


def _nothing(_: Any) -> None:
    """Tells nobody."""
