"""``python -m trainer.background.helper``: compiles regions for a training that does not wait; started by it.

It imports what it will need before it is asked for anything. It reads from its standard input where in a file a
``Request`` lies, and writes a line of JSON for each region. It ends with an empty line there, with that input, or when
the training is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import select
import sys
import threading
from typing import Any, TextIO

from trainer.background import CACHES

NICENESS = 10
"""How far it stands back from the training on the processor."""
WATCH_SECONDS = 1.0
COMPILER = ("torch", "triton", "sympy", "mpmath")
"""Packages of which the training will import what this process did."""


def main(max_host_gib: float, requests: int, parent: int) -> None:
    """Compile what the process ``parent`` asks for in the file with the descriptor ``requests``."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    given = set(os.environ)
    # What libraries print goes to the file of errors; the training reads lines of ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(max_host_gib, parent, asked), daemon=True).start()
    import torch  # noqa: F401

    from strategies.prepare import Preparation
    from trainer.background.wire import Request

    Preparation().wait()
    while True:
        offset, size = asked.get()
        request = pickle.loads(os.pread(requests, size, offset))
        assert isinstance(request, Request)
        # What the training has changed since this process began, such as the folders of caches.
        os.environ.update(request.environment)
        for name in {*given, *CACHES} - request.environment.keys():
            os.environ.pop(name, None)
        sys.path[:] = request.path
        os.chdir(request.directory)
        _compile(request, answers)
        _report(answers, done=True)
        if request.last:
            return


def _watch(max_host_gib: float, parent: int, asked: queue.SimpleQueue[tuple[int, int]]) -> None:
    """End this process when it is to end, the training is gone, or memory is."""
    text = b""
    while True:
        readable, _, _ = select.select([0], [], [], WATCH_SECONDS)
        if readable:
            chunk = os.read(0, 1 << 16)
            *lines, text = (text + chunk).split(b"\n")
            if not chunk or b"" in lines:
                _end("the training is over", 0)
            for line in lines:
                offset, size = map(int, line.split())
                asked.put((offset, size))
        elif os.getppid() != parent:  # its data workers may keep the pipe open
            _end("the training is gone", 0)
        with contextlib.suppress(OSError, ValueError):
            with open("/proc/self/statm") as file:
                gib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
            if gib > max_host_gib:
                _end(f"{gib:.1f} GiB of host memory are more than compile.background.max_host_gib={max_host_gib}", 3)


def _end(reason: str, code: int) -> None:
    print(reason, file=sys.stderr, flush=True)
    with contextlib.suppress(BaseException):
        if "strategies.prepare" in sys.modules:
            sys.modules["strategies.prepare"].stop_compiling()
    os._exit(code)


def _report(answers: TextIO, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _compile(request: Any, answers: TextIO) -> None:
    import torch

    from strategies.base import compiler_settings
    from strategies.errors import one_line
    from trainer.background import wire

    wire.set_torch_state(request.torch_state)
    for name, saved in request.configurations.items():
        __import__(name)
        sys.modules[name].load_config(saved)
    if request.together:
        sys.modules["torch._functorch.config"].force_non_lazy_backward_lowering = True  # type: ignore[attr-defined]
    torch.set_num_threads(request.threads)  # Inductor writes it into the code for a processor
    if request.device.type == "cuda":
        torch.cuda.set_device(request.device)
        total = torch.cuda.get_device_properties(request.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.max_device_gib * 2**30 / total))
    if request.main is not None:
        import multiprocessing.spawn

        multiprocessing.spawn.prepare({"init_main_from_path": request.main})
    with compiler_settings(request.settings):
        for call in request.calls:
            try:
                _compile_call(call)
            except Exception as error:
                _report(answers, refused=call.path, reason=f"the helper could not compile it: {one_line(error)}")
            else:
                if call is request.calls[0]:
                    _report(answers, modules=[name for name in sys.modules if name.split(".")[0] in COMPILER])
                _report(answers, ready=call.path, number=call.number)
        for call in request.calls if request.validates else ():
            with contextlib.suppress(Exception):  # then validation compiles it
                _compile_call(call, trains=False)


def _compile_call(call: Any, *, trains: bool = True) -> None:
    """Forward and backward of one region, as the training is going to call it; or its forward in a validation."""
    import torch
    from torch.utils import _pytree as pytree

    from strategies.base import Program
    from strategies.regions import compile_in_place

    if call.path.startswith("<optimizer"):
        from trainer.background.update import Shadow

        for _ in Shadow(call.pickled).pieces() if trains else ():
            pass
        return
    module, args, kwargs = pickle.loads(call.pickled)
    compile_in_place(Program(module=module), "", call.arguments)
    if not trains:
        module.eval()
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    with contextlib.ExitStack() as stack:
        for kind, (enabled, dtype) in call.autocast.items():
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
        stack.enter_context(torch.set_grad_enabled(trains))
        results = module(*args, **kwargs)
        outputs = [one for one in pytree.tree_leaves(results) if isinstance(one, torch.Tensor) and one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what the kernels' tuning and the code itself do wrong, they do here


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
    sys.stdin.close()
    from strategies.prepare import stop_compiling

    stop_compiling()
    os._exit(0)
