"""FirstCalls: whether what a strategy found by itself is called at all; if not, what is called in its place.

Blocks are found in how a module is built, and some are never called: their layers are, one by one, or another method of
theirs. Where the first step has left one out, the second is watched, by hooks that are gone with it. The third begins
with other regions, on all processes alike. Nothing of it stays.
"""

from __future__ import annotations

from typing import Any

from strategies import Program
from strategies.loop_protocol import Loop, StepHook, gathered
from strategies.regions import CalledModules, exclude_user_compiled, instead_of, uncompile
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry
from trainer.wording import first_few


class FirstCalls(StepHook):
    """Of one training, or of one arm of ``auto``."""

    def __init__(self, loop: Loop, program: Program, telemetry: Telemetry, record: RunRecord) -> None:
        if program.sharded:  # what is gathered together was decided with the regions
            program.found = None
        self._loop, self._program, self._telemetry, self._record = loop, program, telemetry, record
        self._steps = 0
        self._called: CalledModules | None = None
        """Of the second step."""

    def before(self, batch: Any) -> None:
        if self._called is not None:
            self._telemetry.disturb()
            self._called.__enter__()

    def after(self, *, stepped: bool) -> None:
        if self._program.found is None:
            return
        if self._called is not None:
            self._called.close()
        if not stepped:
            return
        self._steps += 1
        if self._steps == 1 and self._loop.any_rank(self._left_out()):
            self._called = CalledModules(self._program)
        elif self._called is not None:
            self._take(self._called)
            self._called = None
        else:  # all are called, or those in their place have been for a step
            self._program.found = None

    def close(self) -> None:
        if self._called is not None:
            self._called.close()

    def _left_out(self) -> bool:
        assert self._program.found is not None
        return any(one.path in self._program.found.paths and not one.called for one in self._program.regions)

    def _take(self, called: CalledModules) -> None:
        program, found = self._program, self._program.found
        assert found is not None
        exclude_user_compiled(program)
        self._record.regions = len(program.regions)
        every = gathered(instead_of(program, [path for path in found.paths if path not in program.given_up], called))
        gone, taken = every[0]
        if not gone or any(one != every[0] for one in every):
            return
        self._telemetry.disturb()
        uncompile(program, [one for one in program.regions if one.path in gone])
        found.compile(taken)
        self._record.regions = len(program.regions)
        program.notes.append(
            f"{found.name}: {first_few(gone)} {'is' if len(gone) == 1 else 'are'} never called as a module; "
            f"compiling what is called instead: {', '.join(taken)}"
        )
