"""The regions that a helper compiles: what each is called with, what the helper is asked for, what it has answered."""

from __future__ import annotations

import ast
import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strategies.base import Program, Region
from strategies.errors import one_line
from strategies.modules import Background as Options
from strategies.prepare import INDUCTOR, import_beside
from strategies.regions import outermost, switch_off
from trainer.background import Helper, release, take
from trainer.background.wire import Call, Request, call_of

Key = tuple[str, int]
"""A region's path, and the number of the shapes it is called with."""


class Background:
    """The helper of the regions of ``program``, which are named, and compiled here only once they have taken over; from
    ``start`` to ``close``. Whatever happens to it is in ``failed``."""

    def __init__(self, options: Options, program: Program) -> None:
        self._options, self._program = options, program
        padding = program.padding
        self.outer = sorted(outermost(program), key=lambda region: sum(1 for _ in region.module.modules()))
        """Smallest first: what a process does once, in its first trace, comes with a short one."""
        self.by_shape = padding is not None and padding.dynamic is False
        """Whether each shape of batch has graphs of its own, so that regions take over shape by shape."""
        self.warm = program.report.get("cached", {}).get("state") == "warm"
        """Whether an earlier run left what it compiled, so that all is ready and no helper is needed."""
        self.gates: dict[str, Gate] = {}
        """Where ``by_shape``: the calls of the regions by their paths."""
        self.calls: dict[Key, Call] = {}
        """What the helper can compile; of regions, and what else is put there."""
        self._missing: dict[str, Callable[..., Any] | None] = {}
        """Regions that were not called yet since they are recorded, with what called them before."""
        self._recorded = False
        self._ready: set[Key] = set()
        self.failed: str | None = None
        """Why nothing more will become ready, if so."""
        self.refused: dict[str, str] = {}
        """Regions that the helper cannot compile, with the reason."""
        self.done = False
        """Whether the helper has answered for every region, or has failed."""
        self.modules: list[str] = [INDUCTOR]
        """What the helper had to import to compile."""
        self.seconds: float | None = None
        """From the start of the helper, or from its request, until it had compiled what trains."""
        self._helper: Helper | None = None
        self._importing: threading.Thread | None = None
        self._sent: set[Key] = set()
        self._began = 0.0

    def start(self) -> None:
        """Take the helper that has started early, or start one; record what the regions are called with next."""
        self._began = time.perf_counter()
        if self.warm:
            self.done = True
            release()
            if self.by_shape:
                self.record()
            return
        try:
            self._helper = take(self._options)
        except OSError as error:
            self._fail(f"no helper could be started: {error}")
            return
        if not self._recorded:
            self.record()

    def record(self) -> None:
        """Keep what the regions are called with next, in a step that no graph stands for; ``start`` may come later."""
        self._recorded = True
        for region in self.outer:
            if self.by_shape:
                self.gates[region.path] = gate = Gate(region.module, functools.partial(self._keep, region))
                switch_off(self._program, region, gate)
            else:
                self._missing[region.path] = region.module._compiled_call_impl
                switch_off(self._program, region, self._recorder(region))

    def stop_recording(self) -> None:
        """One step has been taken: what was not called in it is left out."""
        for region in self.outer:
            if region.path in self._missing:
                switch_off(self._program, region, self._missing.pop(region.path))
                if not self.done:
                    self.refused[region.path] = "it was not called in the first step"

    @property
    def complete(self) -> bool:
        """Whether something is ready, and nothing that the helper could have compiled is missing."""
        return bool(self._ready) and not self._open

    @property
    def _open(self) -> list[Key]:
        """What the helper has not answered."""
        return [key for key in self.calls if key not in self._ready and key[0] not in self.refused]

    def imported(self, *, wait: bool = False) -> bool:
        """Whether Inductor is imported, by a thread beside the training that begins once something is ready."""
        if not self.ready():
            return False
        if self._importing is None:
            self._importing = import_beside(self.modules)
        if wait:
            self._importing.join()
        return not self._importing.is_alive()

    def _recorder(self, region: Region) -> Callable[..., Any]:
        module, before = region.module, self._missing[region.path]

        def call(*args: Any, **kwargs: Any) -> Any:
            if region.path in self._missing and module.training:
                module._compiled_call_impl = self._missing.pop(region.path)
                self._keep(region, 0, args, kwargs)
            return (before or module._call_impl)(*args, **kwargs)

        padding = self._program.padding  # what marks inputs does it here as it will when they are compiled
        return call if padding is None or padding.around_region is None else padding.around_region(call)

    def _keep(self, region: Region, number: int, args: Any, kwargs: Any) -> None:
        """Keep a call under way, the first one with inputs of these shapes."""
        module = region.module
        own, module._compiled_call_impl = module._compiled_call_impl, None
        try:
            self.calls[region.path, number] = call_of(region.path, module, region.arguments, args, kwargs, number)
        except Exception as error:  # anything that a user's object raises when it is pickled
            self.refused[region.path] = f"it cannot be described to the helper: {one_line(error)}"
        finally:
            module._compiled_call_impl = own

    # ---- between two steps -----------------------------------------------------------------------------------------

    def ready(self) -> set[Key]:
        """What lies in torch's cache by now: regions by their paths, and shapes by their numbers. Between two steps;
        never waits."""
        if self.warm:
            return {(one.path, 0) for one in self.outer} | self.calls.keys()
        if not self.done:
            self._read()
            unsent = [call for key, call in self.calls.items() if key not in self._sent]
            if not self.done and (unsent or (self.refused and not self._sent)):
                self._send(unsent)
        return set(self._ready)

    def wait(self) -> None:
        """Return once something is known of every region."""
        while self.ready() is not None and self._open and not self.done:
            time.sleep(0.02)

    def _send(self, calls: list[Call]) -> None:
        self.stop_recording()
        self._sent |= {(call.path, call.number) for call in calls}
        order = [one.path for one in self.outer]
        calls.sort(key=lambda call: (call.number, order.index(call.path) if call.path in order else len(order)))
        try:
            main = main_script() if any(b"__main__" in call.pickled for call in calls) else None
            assert self._program.device is not None
            loop, chosen = self._program.loop, any(one.chooser for one in self._program.strategies)
            request = Request(
                calls=calls,
                settings=self._program.settings,
                device=self._program.device,
                main=main,
                max_device_gib=self._options.max_device_gib,
                together=loop is not None and loop.world_size > 1,
                validates=chosen or (loop is not None and loop.validates),  # what is tried is compared in eval mode too
                last=not self.by_shape,
            )
            assert self._helper is not None
            self._helper.send(pickle.dumps(request))
        except Exception as error:
            self._fail(f"the helper could not be asked: {one_line(error)}")

    def _read(self) -> None:
        if self._helper is None:
            return
        messages, ended = self._helper.messages()
        for message in messages:
            if not isinstance(message, dict):
                continue
            if message.keys() & {"ready", "refused"}:
                self.seconds = time.perf_counter() - self._began
            if "ready" in message:
                self._ready.add((message["ready"], message.get("number", 0)))
            elif "refused" in message:
                self.refused[message["refused"]] = message["reason"]
            elif "modules" in message:
                self.modules += message["modules"]
            elif "done" in message and not self.by_shape:  # else other shapes may come
                self.close()
        if self.done:
            return
        if ended is not None:
            self._fail(ended)
        elif time.perf_counter() - self._began > self._options.timeout_seconds:
            self._helper.end(at_once=True)
            self._helper = None
            self._fail(f"the helper took longer than {self._options.timeout_seconds:.0f} s")

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self.close()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the helper and stop recording; what was ready stays so. May be called twice."""
        self.done = True
        self.stop_recording()
        if self._helper is not None:
            self._helper.end()
            self._helper = None


class Gate:
    """A region's call by the shapes of its inputs: compiled where that is ready, eager where it is not. For shapes that
    come for the first time ``new`` is called with their number and the arguments of the call under way."""

    def __init__(self, module: nn.Module, new: Callable[[int, Any, Any], None]) -> None:
        self._module, self._new = module, new
        self.numbers: dict[Any, int] = {}
        """By shapes, in the order in which they came."""
        self.called: set[int] = set()
        """Numbers of those that came since it was last emptied, in calls that train."""
        self.ready: dict[int, int] = {}
        """The optimizer step from which each runs compiled, by the number of its shapes."""
        self.compiled: Callable[..., Any] | None = None
        self.trials: dict[int, Callable[..., Any]] = {}
        """What runs the next call that trains, by the number of its shapes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is there for these shapes."""
        shapes = tuple([getattr(one, "shape", None) for one in (*args, *kwargs.values())])
        number = self.numbers.get(shapes)
        if self._module.training and torch.is_grad_enabled():
            if number is None:
                self.numbers[shapes] = number = len(self.numbers)
                self._new(number, args, kwargs)
            self.called.add(number)
        if number in self.ready and self.compiled is not None:
            return self.compiled(*args, **kwargs)
        if number in self.trials:
            return self.trials[number](*args, **kwargs)
        return self._module._call_impl(*args, **kwargs)


def main_script() -> str | None:
    """The script that defines ``__main__``; None under ``python -m``. Raises ValueError where running it again, as
    multiprocessing does, would train."""
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:
        raise ValueError("a region's class is defined in no file")
    guarded = any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in ast.parse(Path(file).read_text()).body
    )
    if not guarded:
        raise ValueError(
            f"{file} defines a region's class and has no `if __name__ == '__main__':`, without which the helper would "
            "run the training again to find the class; add it, or move the class to a module"
        )
    return str(Path(file).resolve())
