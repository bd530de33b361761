"""Guards: what is checked while training: is what runs compiled eager's, does it compile at all, is it faster.

Here is what a run may ask of them, without torch; the guards themselves are imported once something is to be guarded.
"""

from __future__ import annotations

from dataclasses import dataclass

PARITY = ("on", "off", "strict")
ON_COMPILE_ERROR = ("eager", "fail")
ON_SLOWER = ("warn", "eager")
ON_DIFFERENCE = ("eager", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """What is asked for. Raises ValueError for a value that does not exist."""

    parity: str = "on"
    on_compile_error: str = "eager"
    on_slower: str = "warn"
    on_difference: str = "eager"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("parity", self.parity, PARITY),
            ("on_compile_error", self.on_compile_error, ON_COMPILE_ERROR),
            ("on_slower", self.on_slower, ON_SLOWER),
            ("on_difference", self.on_difference, ON_DIFFERENCE),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {choices}")


class CompiledNothing(RuntimeError):
    """``on_compile_error=fail``: a strategy handed modules to the compiler and none of them was compiled."""


class CompileFailed(RuntimeError):
    """``on_compile_error=fail``: something does not compile."""


class ParityError(RuntimeError):
    """``on_difference=fail``: what runs compiled is not eager's."""
