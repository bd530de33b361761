"""Credentials in options, known by name and by value: refused as an option, left out of what a run writes.

Options end up in ``record.json``, TensorBoard, ``.hydra/`` and ``multirun.yaml``. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Stands where a credential was."""
_SURE = (
    r"pass(?:word|wd|phrase)|secret(?:[_-]?key)?|(?:api|access|account)[_-]?key|connection[_-]?string|authorization"
    r"|(?:access|api|auth|hf|refresh|sas|security)[_-]?token"
)
_STORAGE = rf"{_SURE}|(?:^|[._-])(?:key|o?auth|sas|sig|pass|pwd|cookie)|token|signature|credentials?"
ANYWHERE = re.compile(rf".*(?:{_SURE})", re.IGNORECASE)
"""Names of options that hold a credential wherever they stand; a ``token`` or ``key`` may be a word or a field."""
STORAGE = re.compile(rf".*(?:{_STORAGE})", re.IGNORECASE)
"""Names that do so among the ``storage_options`` of a file system."""
_TEXT = r"""(?!\$\{|null\b|None\b|\*\*\*)[^\s"'&,;}\])]+"""
VALUES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(://)[^\s/@:]*:(?!\d+(?:/|\s|$))[^\s@]+(?=@)",  # user:password@host, but no host:port
        r"(https?://)[^\s/@:]{16,}(?=@)",  # a token in the user's place
        r"((?:^|[?&#])(?:[\w-]*(?:signature|credential|token)|sig|key|AWSAccessKeyId)=)[^\s&]+",  # a signed URL
        r"(\bBearer\s+)(?=\S*\d|\S{20})[\w.~+/=-]{8,}",
        r"(\bBasic\s+)(?=\S*[\d=])[a-z0-9+/]{8,}={0,2}(?!\S)",
        rf"""(\bauthorization["']?\s*[=:]\s*["']?)(?:\w+\s+)?{_TEXT}""",
        rf"""((?:{_SURE})["']\s*:\s*["'])[^"']+""",  # a mapping as Python or JSON writes it
        rf"""((?:{_SURE})[=:]["']?){_TEXT}""",
        rf"(\bstorage_options(?=\.)[\w.-]*(?:{_STORAGE})=){_TEXT}",
        r"\b(?-i:(?:AKIA|ASIA)[0-9A-Z]{16})\b",
        r"\b(?:gh[pousr]_\w{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}|hf_[a-z0-9]{30,}|xox[abprs]-[\w-]{10,})",
        r"\b(?-i:eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # a JSON web token
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]+",
    )
)
"""Credentials in a text; what a first group matches is not a secret and stays."""


def hidden(text: str) -> str:
    """``text`` with ``***`` in the place of every credential that is known by its form."""
    for pattern in VALUES:
        text = pattern.sub(lambda match: (match[1] if match.lastindex else "") + HIDDEN, text)
    return text


def without_credentials(value: Any, found: list[str] | None = None, *, path: str = "", secret: bool = False) -> Any:
    """A copy of ``value`` (nested mappings, lists, scalars) with ``***`` in the place of credentials.

    ``path`` is the dotted name of ``value``; ``secret`` says that a name above it is a credential's. ``found`` gets the
    name of each option that holds some.
    """
    if isinstance(value, Mapping):
        inner = {name: f"{path}.{name}".lstrip(".") for name in value}
        return {
            name: without_credentials(part, found, path=inner[name], secret=secret or _names_one(inner[name]))
            for name, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        # Headers may be pairs: [Authorization, Bearer ...].
        pair = len(value) == 2 and isinstance(value[0], str) and _names_one(f"{path}.{value[0]}")
        parts = [
            without_credentials(part, found, path=path, secret=secret or (pair and place == 1))
            for place, part in enumerate(value)
        ]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is None or isinstance(value, bool) or not (secret or isinstance(value, (str, bytes))):
        return value
    literal, before = str(value), None
    while literal != before:  # interpolations may hold others
        before, literal = literal, re.sub(r"\$\{[^{}]*\}", "", literal)
    if literal.strip() in ("", "???") or not (secret or hidden(literal) != literal):  # ??? is a missing one
        return value
    if found is not None:
        found.append(path)
    return HIDDEN if secret else hidden(str(value))


def refuse_credentials(values: Any, path: str = "") -> None:
    """Raise ValueError, naming the options, when ``values`` hold credentials; ``${oc.env:NAME}`` is none."""
    found: list[str] = []
    without_credentials(values, found, path=path)
    files = "the file system's own variables (AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or files"
    variable = "the environment, and name the variable: '${oc.env:NAME}'"
    if found:
        raise ValueError(
            "\n".join(
                f"{name} must not hold credentials, which the run would write into its files: set them in "
                + (files if name.startswith(("compile.cached.", "CRUCIBLE_")) else variable)
                for name in dict.fromkeys(found)
            )
        )


def _names_one(path: str) -> bool:
    """Whether an option of the dotted name ``path`` holds a credential by its name."""
    *parents, name = path.split(".")
    return (STORAGE if "storage_options" in parents else ANYWHERE).fullmatch(name) is not None
