"""Rollback: finds which part of a program does not compile and lets it run eager, with a warning, on all processes.

``torch.compile`` is lazy: the forward compiles at the first call, the backward inside ``.backward()``, the optimizer in
its first step. What eager can run and compiled cannot is the compiler's fault; nothing is guessed from error classes
except in the middle of training, where there is no second try. From the first step on, nothing that eager can do ends
the run, as far as the step under way can be repeated.

Code that was compiled as often as torch allows (``strategies.regions.RECOMPILE_LIMIT``) is no failure: its kind of
region runs eager from then on, on the process where it happened. Others need not follow: what a region computes and
the order in which gradients and collectives come are the same, compiled or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from strategies import Program
from strategies.base import Region, eager, give_up_others
from strategies.errors import (
    REMEDY,
    is_compile_error,
    is_double_backward,
    is_out_of_memory,
    is_recompile_limit,
    needs_kept_buffers,
    one_line,
)
from strategies.loop import Loop, MicroBatch
from strategies.regions import compiled_only, give_up, guard_calls
from strategies.torch_patches import keep_buffers
from trainer.guards.compare import ParityError
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.record import Event

BECAUSE = "on_compile_error=eager"
LATER = "after the first step"
"""Why what does not compile runs eager under ``on_compile_error=fail``."""
LIMIT = "limit of graphs"


class CompileFailed(RuntimeError):
    """A part of the program did not compile on another process, or in a place where it cannot be rolled back."""


class Rollback:
    """Decides what happens when something does not compile, by ``mode``: ``fail`` (the error ends the run, unless that
    is ``trained`` already) or ``eager`` (the part at fault continues in eager)."""

    def __init__(self, mode: str, loop: Loop, program: Program, watch: CompilerMonitor) -> None:
        self._mode, self._loop, self._program, self._watch = mode, loop, program, watch
        self._trying = False
        self.trained = False
        """Whether a step of the run is done, whose work must not be lost."""
        guard_calls(program, self._failed_in_forward)

    @property
    def anything_left(self) -> bool:
        return bool(self._program.regions or self._program.compiled_beside_regions)

    def attempt(self, what: str, run: Callable[[], Any], restore: Callable[[], None]) -> None:
        """Do ``run``, a pass or a step, again and again with less compiled as long as the compiler fails at it; every
        process calls it. ``restore`` puts the state back before each further try; ``what`` is for messages."""
        while True:
            error = self._tried(run)
            if not self._loop.anywhere(error is not None):
                return
            seen = error or CompileFailed(f"{what} failed on another process")
            if self._loop.anywhere(needs_kept_buffers(seen) and keep_buffers()):
                restore()
                continue
            if self._loop.anywhere(not self.anything_left or is_out_of_memory(seen)):
                raise _together(seen)
            fails = self._mode == "fail" and not self.trained and error is not None and not is_recompile_limit(error)
            fails = self._loop.anywhere(fails)
            restore()
            with eager(self._program):
                users_own = self._tried(run)
            if fails and users_own is not None and is_out_of_memory(users_own):
                users_own = None  # all of it eager lacks memory, which is no reason for what did not compile
            if self._loop.anywhere(users_own is not None):
                raise _together(users_own or seen)
            if fails:
                if is_double_backward(seen) and self._loop.world_size == 1:
                    restore()
                    if broken := self._kinds_that_fail(run, restore):
                        named = _listed([region.path for region in broken])
                        raise CompileFailed(f"{named}: {one_line(seen)}") from seen
                seen.add_note(REMEDY)
                raise _together(seen)
            self._roll_back_what_fails(what, run, restore, error)
            restore()

    def together(self, run: Callable[[], Any]) -> None:
        """Do ``run``; where it fails on one process it fails on all, so that none begins the next step alone."""
        error = self._tried(run)
        if self._loop.anywhere(error is not None):
            raise error or CompileFailed("another process failed")

    def give_up(self, regions: list[Region], reason: str, *, step: int | None = None, because: str = "") -> None:
        """Let ``regions`` run eager from now on and report it; ``because`` says why, unless they did not compile."""
        paths = [region.path for region in regions]
        give_up(self._program, regions, reason)
        self._report(_listed(paths), paths, reason, step, because)

    def run(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Run a micro-batch of the training. Where compiled code fails in its backward (a first gradient of a gradient)
        it runs once more, in eager: not where gradients are there already, or other processes would wait."""
        try:
            return micro_batch.run(micro_batch.batch)
        except Exception as error:
            alone = self._loop.world_size == 1 and micro_batch.begins and not self._program.captures_steps
            ours = is_double_backward(error) or (is_compile_error(error) and not is_recompile_limit(error))
            if not (self.trained and alone and ours and self._program.regions):
                raise
            reason = f"{one_line(error)}. This step ran twice: random numbers and buffers are not put back"
        self.give_up(list(self._program.regions), reason, step=self._loop.steps_done + 1)
        return micro_batch.run(micro_batch.batch)

    def check(self) -> None:
        """Between two batches: give up what torch has begun to run eager by itself, at the limit of graphs."""
        self._watch.collect()
        for kind in list(self._watch.beyond_limit):
            self._beyond_limit(kind, step=self._loop.steps_done)

    def _beyond_limit(self, kind: type[nn.Module], *, step: int | None) -> None:
        guard = self._watch.beyond_limit.pop(kind, "")
        regions = [one for one in self._program.regions if type(one.module) is kind]
        if regions:
            self.give_up(regions, _beyond_limit(guard), step=step, because=LIMIT)

    def _roll_back_what_fails(
        self, what: str, run: Callable[[], Any], restore: Callable[[], None], error: BaseException | None
    ) -> None:
        reason = f"{what}: {one_line(error) if error is not None else 'another process failed'}"
        program = self._program
        if program.compiled_beside_regions:
            with compiled_only(program, []):
                failed = self._loop.anywhere(self._tried(run) is not None)
            restore()
            if failed:
                names = give_up_others(program, reason)
                self._report(f"compile={','.join(names)}", names, reason)
                return
        broken = self._kinds_that_fail(run, restore) or list(program.regions)
        if error is not None and is_recompile_limit(error):
            self._watch.collect()
            guard = next(reversed(self._watch.beyond_limit.values()), "")
            self._watch.beyond_limit.clear()
            self.give_up(broken, _beyond_limit(guard), because=LIMIT)
        else:
            self.give_up(broken, reason)

    def _kinds_that_fail(self, run: Callable[[], Any], restore: Callable[[], None]) -> list[Region]:
        """Each kind tried alone finds all that fail, in forward or backward, one or several."""
        kinds: dict[str, list[Region]] = {}
        for region in self._program.regions:
            kinds.setdefault(region.kind, []).append(region)
        broken = []
        for regions in kinds.values():
            with compiled_only(self._program, regions):
                if self._loop.anywhere(self._tried(run) is not None):
                    broken.extend(regions)
            restore()
        return broken

    def _tried(self, run: Callable[[], Any]) -> Exception | None:
        before, self._trying = self._trying, True
        try:
            run()
        except Exception as error:
            return error
        finally:
            self._trying = before
        return None

    def _failed_in_forward(self, region: Region, error: Exception) -> None:
        if self._trying:
            raise error
        step = self._loop.steps_done
        if is_recompile_limit(error):
            self._watch.collect()
            self._beyond_limit(type(region.module), step=step + 1)
            return
        if self._mode == "fail" and not self.trained:
            if is_compile_error(error):
                error.add_note(REMEDY)
            raise error
        self.give_up([one for one in self._program.regions if one.kind == region.kind], one_line(error), step=step + 1)

    def warn(self, line: str) -> None:
        """Say ``line``, and keep it for the record."""
        self._program.notes.append(line)
        rank_zero_warn(line)

    def _report(self, what: str, paths: list[str], reason: str, step: int | None = None, because: str = "") -> None:
        run, they = ("runs", "it") if len(paths) == 1 else ("run", "they")
        failed = "" if because else f", {they} did not compile"
        because = because or (BECAUSE if self._mode == "eager" else LATER)
        line = f"{because}: {what} {run} eager{failed}: {reason}"
        (rank_zero_warn if step is None else warnings.warn)(line)  # alone, in the middle of a step
        self._program.notes.append(line)
        done = self._program.report.setdefault("rollback", {"rolled_back": []})["rolled_back"]
        done.append({"parts": paths, "reason": reason, "step": step})
        if not self.anything_left:
            self._program.notes.append(f"{because}: nothing is left that compiles, the run is eager")
        self._watch.collect()
        # The search above has made the compiler fail several times; once is enough to read.
        seen = {
            (event.reason, event.location) if event.kind == "fallback" else id(event): event
            for event in reversed(self._watch.events)
        }
        first = Event(kind="fallback", reason=line, step=step, phase=self._watch.phase)
        self._watch.events[:] = [first, *reversed(seen.values())]


def _together(error: Exception) -> Exception:
    error.__dict__["raised_together"] = True
    return error


def raised_together(error: Exception) -> bool:
    """Whether all processes have agreed on ``error``, so that none of them waits for another."""
    return isinstance(error, ParityError) or "raised_together" in error.__dict__


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"


def _beyond_limit(recompile_reason: str) -> str:
    """Why code may not be compiled once more, with the guard that failed last."""
    line = "one piece of its code was compiled as often as torch._dynamo.config.recompile_limit allows"
    guard = " ".join(recompile_reason.strip().partition("\n")[0].split())
    return f"{line}; the guard that failed last: {guard}" if guard else line
