"""Errors: says in a few lines what Hydra and OmegaConf spread over a traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

REFUSALS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
"""What a configuration that cannot be used raises."""
NOISE = re.compile(r"\s*(full_key|object_type|reference_type|See https?://|Config search path|provider=)")
"""Lines of Hydra's and OmegaConf's messages that speak of their insides."""
FOREIGN = re.compile(
    r"In 'schema/(?P<group>[\w/]+)/(?P<name>\w+)'.*Merge error: \w+ is not a subclass of (?P<base>\w+)", re.S
)
"""What they say when an option belongs to another task: ``task=captioning task/data=image_folder``."""


def explain(error: BaseException) -> list[str]:
    """Lines for the user: a ValueError's complaints, or what Hydra says with its causes indented below."""
    if isinstance(error, MarkedYAMLError):
        return [f"error: {_in_file(error)}"]
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return [f"error: {line}" for line in str(error).splitlines()] or [f"error: {type(error).__name__}"]
    if foreign := FOREIGN.search("\n".join(map(str, _causes(error)))):
        return [f"error: {_not_for_this_task(**foreign.groupdict())}"]
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _not_for_this_task(group: str, name: str, base: str) -> str:
    """An option whose class does not derive from ``base``, and those of its group whose class does."""
    from tasks import SCHEMAS  # not above: the command line first makes sure that these are our tasks

    fitting = [
        path.rpartition("/")[2]
        for path, kind in sorted(SCHEMAS.items())
        if path.rpartition("/")[0] == group and base in (each.__name__ for each in kind.__mro__)
    ]
    return f"{group}={name} belongs to another task" + (f"; this one takes {', '.join(fitting)}" if fitting else "")


def _in_file(error: MarkedYAMLError) -> str:
    """What is wrong with a YAML file, and where, as ``file:line: what``."""
    mark = error.problem_mark or error.context_mark
    what = " ".join(str(error.problem or error.context or "not YAML").split())
    # Indentation that does not fit ends a block too early, which is all that the parser can tell.
    if what.startswith(("expected <block end>", "mapping values are not allowed")):
        what += " (is the indentation right?)"
    return f"{mark.name}:{mark.line + 1}: {what}" if mark is not None else what


def report(error: BaseException) -> None:
    """Print what ``explain`` says on the standard error, without credentials."""
    from strategies.credentials import hidden  # not above, as in _not_for_this_task

    print(hidden("\n".join(explain(error))), file=sys.stderr, flush=True)


def report_system(error: OSError, place: object = "") -> None:
    """Print what the system has refused, and of which file; ``place`` is where, when it names none."""
    print(f"error: {error.filename or place}: {error.strerror or error}", file=sys.stderr)
