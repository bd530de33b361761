"""Guards: what is checked before the first step and while training: does it compile, is it eager's, is it faster.

Here is what a run may ask of them, without torch; the guards themselves are imported once something is to be guarded.
"""

from __future__ import annotations

from dataclasses import dataclass

PARITY = ("on", "off", "strict")
ON_COMPILE_ERROR = ("fail", "eager")
ON_SLOWER = ("warn", "eager")
ON_DIFFERENCE = ("fail", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """What is asked for. Raises ValueError for a value that does not exist."""

    parity: str = "on"
    on_compile_error: str = "fail"
    on_slower: str = "warn"
    on_difference: str = "fail"

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
    """A strategy handed modules to the compiler and none of them was compiled."""
