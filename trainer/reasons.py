"""Reasons: an error in one line, for the console, the record and the notes."""

from __future__ import annotations

from strategies.credentials import hidden

REPLACED = {
    "Hard failure due to ": (
        "one piece of code was compiled as often as torch._dynamo.config.recompile_limit allows; the record's events "
        "name the guard that failed each time"
    ),
    "does not currently support double backward": (
        "a gradient of a gradient (create_graph=True, as in a gradient penalty) cannot be taken through compiled code; "
        "on_compile_error=eager leaves the regions concerned eager, or name other blocks and parts to compile"
    ),
}
"""What takes the place of torch's words, by a piece of them."""


def one_line(error: BaseException) -> str:
    """Class and first line of an error, the next one too where that only announces it, and the user's line of code.

    Credentials in it are hidden: it goes into the record.
    """
    return hidden(_one_line(error))


def _one_line(error: BaseException) -> str:
    for words, ours in REPLACED.items():
        if words in str(error):
            return f"{type(error).__name__}: {ours}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        return lines[-1]  # the worker's traceback ends with the error itself
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if len(lines) > 1 and lines[0].endswith(":"):  # the reason itself stands on the next line
        text += f" {lines[1]}"
    if "from user code:" in lines[:-1]:
        text += f" ({lines[lines.index('from user code:') + 1]})"
    return text


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory, on the host or on a device."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    )
