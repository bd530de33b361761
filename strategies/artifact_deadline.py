"""Work that must not hold a run up: done within a time limit, its errors told in a line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from strategies.credentials import hidden

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do ``work``; raises what it raises, or TimeoutError when it takes longer than ``seconds`` (it then goes on in
    the background, where nobody waits for it)."""
    result: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=do, name="artifact-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return result[0]


def told(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {hidden(lines[0])[:300]}" if lines else type(error).__name__
