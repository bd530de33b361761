"""Rollback: finds which part of a program does not compile and lets it run eager, loudly, on all processes alike.

``torch.compile`` is lazy: the forward compiles at the first call, the backward inside ``.backward()``, the optimizer in
its first step. What eager can run and compiled cannot is the compiler's fault; nothing is guessed from error classes
except in the middle of training, where there is no second try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from strategies import Program, Stage
from strategies.base import Region
from strategies.compile_errors import is_out_of_memory
from strategies.inplace import compiled_only, guard_calls, uncompile
from strategies.optimizer_step import installed, uninstall
from trainer.eager import eager
from trainer.reasons import one_line
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.events import Event


class CompileFailed(RuntimeError):
    """A part of the program did not compile on another process, or in a place where it cannot be rolled back."""


class Rollback:
    """Decides what happens when something does not compile.

    Args:
        mode: ``fail`` (the error ends the run) or ``eager`` (the part at fault goes on eager).
    """

    def __init__(self, mode: str, trainer: L.Trainer, program: Program, watch: CompilerWatch) -> None:
        self._mode, self._trainer, self._program, self._watch = mode, trainer, program, watch
        self._optimizer_compiled = any(strategy.stage is Stage.OPTIMIZER for strategy in program.strategies)
        self._rehearsing = False
        if mode == "eager":
            guard_calls(program, self._failed_in_forward)

    @property
    def anything_left(self) -> bool:
        """Whether anything still runs compiled."""
        return bool(self._program.regions) or self._optimizer_compiled

    def attempt(self, what: str, run: Callable[[], Any], restore: Callable[[], None]) -> None:
        """Do ``run``, again and again with less compiled as long as the compiler fails at it.

        Args:
            what: What is being tried, for messages.
            run: A pass or a step; every process calls it.
            restore: Puts the state back before each further try.
        """
        while True:
            error = self._tried(run)
            if not self._anywhere(error is not None):
                return
            hopeless = self._mode == "fail" or not self.anything_left or (error is not None and is_out_of_memory(error))
            if self._anywhere(hopeless):
                raise error or CompileFailed(f"{what} failed on another process")
            restore()
            with eager(self._program):
                users_own = self._tried(run)
            if self._anywhere(users_own is not None):
                raise users_own or error or CompileFailed(f"{what} failed on another process")
            self._roll_back_what_fails(what, run, restore, error)
            restore()

    def together(self, run: Callable[[], Any]) -> None:
        """Do ``run``; where it fails on one process it fails on all, so that none begins the next step alone."""
        error = self._tried(run)
        if self._anywhere(error is not None):
            raise error or CompileFailed("another process failed")

    def give_up(self, regions: list[Region], reason: str, *, step: int | None = None) -> None:
        """Let ``regions`` run eager from now on and say so everywhere."""
        paths = [region.path for region in regions]
        uncompile(self._program, regions)
        self._say(
            f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}", paths, reason, step
        )

    def _roll_back_what_fails(
        self, what: str, run: Callable[[], Any], restore: Callable[[], None], error: BaseException | None
    ) -> None:
        reason = f"{what}: {one_line(error) if error is not None else 'another process failed'}"
        program = self._program
        kinds: dict[str, list[Region]] = {}
        for region in program.regions:
            kinds.setdefault(region.kind, []).append(region)
        if self._optimizer_compiled:
            with compiled_only(program, []):
                failed = self._anywhere(self._tried(run) is not None)
            restore()
            if failed:
                self._optimizer_compiled = False
                optimizer_to_eager(program)
                self._say("the optimizer step", ["optimizer"], reason, None)
                return
        # Each kind tried alone finds all that fail, in forward or backward, one or several.
        broken = []
        for regions in kinds.values():
            with compiled_only(program, regions):
                if self._anywhere(self._tried(run) is not None):
                    broken.extend(regions)
            restore()
        self.give_up(broken or list(program.regions), reason)

    def _tried(self, run: Callable[[], Any]) -> Exception | None:
        before, self._rehearsing = self._rehearsing, True
        try:
            run()
        except Exception as error:
            return error
        finally:
            self._rehearsing = before
        return None

    def _anywhere(self, found: bool) -> bool:
        return self._trainer.strategy.reduce_boolean_decision(found, all=False)

    def _failed_in_forward(self, region: Region, error: Exception) -> None:
        if self._rehearsing:
            raise error
        step = self._trainer.global_step
        if self._trainer.world_size > 1:
            raise CompileFailed(
                f"{region.path} did not compile in step {step + 1}: {one_line(error)}. With several processes only "
                "what fails before the first step can go on eager, because all of them must agree: resume with this "
                "part left out, or warm every shape (compile=buckets)"
            ) from error
        self.give_up([one for one in self._program.regions if one.kind == region.kind], one_line(error), step=step + 1)

    def _say(self, what: str, paths: list[str], reason: str, step: int | None) -> None:
        line = f"on_compile_error=eager: {what} runs eager, it did not compile: {reason}"
        rank_zero_warn(line)
        self._program.notes.append(line)
        done = self._program.report.setdefault("rollback", {"rolled_back": []})["rolled_back"]
        done.append({"parts": paths, "reason": reason, "step": step})
        if not self.anything_left:
            self._program.notes.append("on_compile_error=eager: nothing is left that compiles, the run is eager")
        self._watch.collect()
        # The search above has made the compiler fail several times; once is enough to read.
        seen: set[tuple[str, str, str | None]] = set()
        kept = [Event(kind="fallback", reason=line, step=step, phase=self._watch.phase)]
        for event in self._watch.events:
            key = (event.kind, event.reason, event.location)
            if event.kind != "fallback" or key not in seen:
                kept.append(event)
            seen.add(key)
        self._watch.events[:] = kept


def optimizer_to_eager(program: Program) -> None:
    """Give the optimizers torch's own step back; what else may have replaced it runs without compiling."""
    for optimizer in program.optimizers:
        if installed(optimizer) is not None:
            uninstall(optimizer)
        else:
            optimizer.step = _UncompiledStep(optimizer.step)  # type: ignore[method-assign]


class _UncompiledStep:
    """An optimizer's step under the stance that compiles nothing; its closure, which is the model's, stays compiled."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.compiler.set_stance("force_eager"):
            self._step()
        return loss
