"""Advice in the words of the place where the user typed: the command that was run, or Python in a script of one's own.

All that names an option or a command for the user goes through here: ``program`` for commands, ``in_python`` for notes,
errors and verdicts, which are written with the options of the command line.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

CONSOLE_SCRIPT = "crucible"
PACKAGES = Path(__file__).parents[1]
PLAIN = {"true": "True", "false": "False", "null": "None"}
OF_COMPILE = re.compile(r"\b(parity|profile|on_compile_error|on_slower|on_difference)=(\w+)")
"""Options of a run that are arguments of ``Compile``."""
VALUE = r"\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[\w.+-]*\w"


def program(module: str = "trainer") -> list[str]:
    """Words that start ``module`` (``trainer``, ``scripts.explain``) as this process was started: by ``python -m`` and
    its own name, by ``python -m crucible``, else by the console script ``crucible``, where it is installed."""
    started = Path(sys.argv[0])
    name = "train" if module == "trainer" else module.removeprefix("scripts.")
    if started.parts[-2:] == (CONSOLE_SCRIPT, "__main__.py"):
        return ["python", "-m", CONSOLE_SCRIPT, name]
    ours = any(started.is_relative_to(PACKAGES / one) for one in ("trainer", "scripts"))
    if started.name == CONSOLE_SCRIPT or not (ours or importlib.util.find_spec(CONSOLE_SCRIPT) is None):
        return [CONSOLE_SCRIPT, name]
    return ["python", "-m", module]


def refuse_unknown(called: str, given: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Raise TypeError, as Python would, where ``called`` was given an argument by a name that none of ``functions``
    has: here it names what the user called, and what is near."""
    parameters = (one for function in functions for one in inspect.signature(function).parameters.values())
    known = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3)
            raise TypeError(f"{called}() has no argument {name!r}{'; near: ' * bool(near)}{', '.join(near)}")


BEFORE_STRATEGIES = {"compile_trainer": "trainer, ", "crucible.compile": "model, optimizer, "}
"""Arguments of what takes strategies in a script, beside ``Compile``."""


def strategies_in_python(names: Sequence[str], known: Sequence[Mapping[str, Any]] = (), entry: str = "Compile") -> str:
    """``Compile([Regional(mode='default'), CudaGraph()])``: strategies by their ``names``, with what ``known``, facts
    of a record, says of those of them that are not defaults; ``entry`` as in ``RunRecord``."""
    facts = {one["name"]: one for one in known}
    listed = ", ".join(_called(name, facts.get(name, {})) for name in names if name != "eager")
    return f"{entry}({BEFORE_STRATEGIES.get(entry, '')}[{listed}])"


def _called(name: str, facts: Mapping[str, Any]) -> str:
    from strategies import STRATEGIES  # not above: the command line's first imports are its own alone

    kind = STRATEGIES.get(name)
    if kind is None:  # a plug-in's, by the house's rule for names
        return f"{name.title().replace('_', '')}()"
    defaults = kind()
    given = [one.name for one in fields(kind) if one.name in facts and facts[one.name] != getattr(defaults, one.name)]
    return f"{kind.__name__}({', '.join(f'{option}={facts[option]!r}' for option in given)})"


def in_python(text: str) -> str:
    """``text`` with options of the command line as Python has them: ``compile=whole`` is ``Whole()``,
    ``compile.regional.blocks=[path]`` is ``Regional(blocks=[path])``, ``parity=off`` is ``parity="off"``."""
    from strategies import STRATEGIES

    name = f"({'|'.join(STRATEGIES)})"

    def listed(match: re.Match[str]) -> str:
        words = [word.strip() for word in match[1].split(",")]
        if not {"eager", "...", *STRATEGIES}.issuperset(words):
            return match[0]  # a composite, which is a file
        return f"[{', '.join('...' if word == '...' else _called(word, {}) for word in words if word != 'eager')}]"

    text = re.sub(
        rf"\bcompile\.{name}\.(\w+)=({VALUE})",
        lambda match: f"{STRATEGIES[match[1]].__name__}({match[2]}={_value(match[3])})",
        text,
    )
    text = re.sub(rf"\bcompile\.{name}\b", lambda match: STRATEGIES[match[1]].__name__, text)
    text = re.sub(r"\bcompile=\[([^\]]*)\]", listed, text)
    text = re.sub(rf"\bcompile={name}\b", lambda match: _called(match[1], {}), text)
    text = re.sub(r"\bcompile=eager\b", "Compile([])", text)
    text = OF_COMPILE.sub(r'\1="\2"', text)
    text = re.sub(r"=(true|false|null)\b", lambda match: f"={PLAIN[match[1]]}", text)
    return text.replace("hydra.launcher.rounds=", "rounds=")


def as_typed(text: str, script: str | None) -> str:
    """``text`` with options in Python where a ``script`` trains, see ``RunRecord.script``; else as it is."""
    return text if script is None else in_python(text)


def _value(text: str) -> str:
    quoted = text[0] in "['\"" or re.fullmatch(r"-?\d[\d.e+-]*|True|False|None", text)
    return PLAIN.get(text, text if quoted else f'"{text}"')


@contextlib.contextmanager
def speaking_python(so: bool = True) -> Iterator[None]:
    """A ValueError that is raised inside names options as Python has them, if ``so``."""
    try:
        yield
    except ValueError as error:
        if so and error.args and isinstance(error.args[0], str):
            error.args = (in_python(error.args[0]), *error.args[1:])
        raise
