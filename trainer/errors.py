"""Errors: says in a few lines what Hydra and OmegaConf spread over a traceback."""

from __future__ import annotations

import re
import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

NOISE = re.compile(r"\s*(full_key|object_type|reference_type|See https?://|Config search path|provider=)")
"""Lines of Hydra's and OmegaConf's messages that speak of their insides."""


def explain(error: BaseException) -> list[str]:
    """Lines for the user: a ValueError's complaints, or what Hydra says with its causes indented below."""
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return [f"error: {line}" for line in str(error).splitlines()] or [f"error: {type(error).__name__}"]
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None:
        for line in str(current).splitlines():
            text = line.rstrip()
            if not text or NOISE.match(text) or text.strip() in (known.strip() for known in lines):
                continue
            # Adding a key with + helps in free-form mappings only; in a dataclass the option is misspelt.
            if text.startswith("To append to your config") and "not in struct" not in str(current.__cause__):
                continue
            if text.startswith("\t") and lines:
                # Available options come one to a line.
                lines[-1] += f" {text.strip()}" if lines[-1].endswith(":") else f", {text.strip()}"
            else:
                lines.append(text)
        current = current.__cause__
    override = getattr(error, "override", None)
    first = f"{override}: {lines[0]}" if override and override not in lines[0] else lines[0]
    return [f"error: {first}", *(f"  {line}" for line in lines[1:])]


def report(error: BaseException) -> None:
    """Print what ``explain`` says on the standard error."""
    print("\n".join(explain(error)), file=sys.stderr, flush=True)
