"""Call what Dynamo has compiled and never compile; where code is missing, the caller is told.

``torch.compiler.set_stance("eager_on_recompile")`` does that, too, but says nothing of what it runs eager, and takes 6
microseconds a call; this takes none. It reaches into torch's wrapper of a compiled function. All versions, 2.11
to 2.15: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/eval_frame.py (_TorchDynamoContext).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import _TorchDynamoContext
from torch._dynamo.types import ConvertFrameReturn

from strategies.compile_errors import CannotCapture

_EAGER_THIS_TIME = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)


class NoCode(Exception):
    """Nothing that is compiled lets a call in, and nothing of the call has run."""


class NotCompiledYet(CannotCapture):
    """The same within the capture of a CUDA graph, which ends there: nothing of the step has been executed."""


def not_compiled_yet(error: BaseException | None) -> NotCompiledYet | None:
    """That, where it has led to ``error``: a capture that fails ends by an error of its own."""
    while error is not None and not isinstance(error, NotCompiledYet):
        error = error.__context__
    return error


STANCE: Final = "fail_on_recompile"
"""Torch's, named by the error that it raises."""
_in_capture = False


def in_capture() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be compiled, or compared."""
    return _in_capture


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, ``in_capture``. What is compiled without us does not compile anew either: that breaks a capture, on 2.11
    with an error that names nothing."""
    global _in_capture
    before, _in_capture = _in_capture, True
    try:
        with torch.compiler.set_stance(STANCE):
            yield
    finally:
        _in_capture = before


class _NoCompiler:
    """What Dynamo calls in the place of its compiler for each frame that no compiled code lets in."""

    def __init__(self, compiler: Any, function: Any, note: Callable[[], Any]) -> None:
        self._torchdynamo_orig_backend = compiler  # by which Dynamo finds what that one has compiled
        self._code: Any = getattr(function, "__code__", None)
        self._module = getattr(function, "__self__", None)
        self._note = note

    def __call__(self, frame: Any, *_: Any) -> ConvertFrameReturn:
        code: Any = frame.f_code
        if code is self._code and frame.f_locals.get(code.co_varnames[0]) is self._module:
            raise NoCode
        if trace_rules.check(code):
            # As Dynamo's own compiler does; but 2.15 takes forwards of torch.nn that have hooks.
            return ConvertFrameReturn(apply_to_code=code.co_name != "forward")
        self._note()
        return ConvertFrameReturn(_EAGER_THIS_TIME, apply_to_code=False)


def without_compiling(
    compiled: Any, function: Any, note: Callable[[], Any], *, fullgraph: bool = False
) -> Callable[..., Any]:
    """``compiled``, which ``torch.compile`` has made of the method ``function``, by code that is there.

    Where no code lets the call itself in, it raises ``NoCode`` before anything has run. Where that is so for a part of
    it, behind a graph break, that part runs eager, after a call of ``note``.
    """
    held = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    if "callback" not in held:  # TORCH_COMPILE_DISABLE=1, or somebody's own torch.compile
        called: Callable[..., Any] = compiled
        return called
    callback: Any = _NoCompiler(held["callback"].cell_contents, function, note)
    # With fullgraph, what a graph calls is never compiled, and the callback is not called.
    made: Callable[..., Any] = _TorchDynamoContext(callback, fullgraph=fullgraph)(function)
    return made
