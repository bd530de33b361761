"""Reasons: an error in one line, for the console, the record and the notes."""

from __future__ import annotations

RECOMPILE_LIMIT = (
    "one piece of code was compiled for as many shapes and values as torch._dynamo.config.recompile_limit allows; the "
    "record's events say which guard failed each time: pad to a few shapes (compile=buckets) or set dynamic=true"
)
"""Torch's own words are that there was a hard failure due to fullgraph=True."""


def one_line(error: BaseException) -> str:
    """Class and first line of an error, the next one too where that only announces it, and the user's line of code."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return f"FailOnRecompileLimitHit: {RECOMPILE_LIMIT}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        return lines[-1]  # the worker's traceback ends with the error itself
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if len(lines) > 1 and lines[0].endswith(":"):  # the reason itself stands on the next line
        text += f" {lines[1]}"
    if "from user code:" in lines[:-1]:
        text += f" ({lines[lines.index('from user code:') + 1]})"
    return text
