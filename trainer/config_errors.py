"""Errors: says in a few lines what Hydra and OmegaConf spread over a traceback."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from trainer import CONF
from trainer.process import PACKAGES, rank_prefix
from trainer.sweep.plan import quoted

REFUSALS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
"""What a configuration that cannot be used raises."""
NOISE = re.compile(r"\s*(full_key|object_type|reference_type|See https?://|Config search path|provider=)")
"""Lines of Hydra's and OmegaConf's messages that speak of their insides."""
NOT_READ = re.compile(r"LexerNoViableAltException|mismatched input|no viable alternative")
"""How Hydra's messages begin of an option that its grammar does not read."""
FOREIGN = re.compile(r"In '(?:schema/)?([\w/]+)/(\w+)'.*(?:Merge error|assigned): \w+ is not a subclass of ", re.S)
"""What they say when an option belongs to another task: ``task=captioning task/data=torchvision``."""


def explain(error: BaseException) -> list[str]:
    """Lines for the user: a ValueError's complaints, or what Hydra says with its causes indented below."""
    if isinstance(error, MarkedYAMLError):
        return [f"error: {_in_file(error)}"]
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return [f"error: {line}" for line in str(error).splitlines()] or [f"error: {type(error).__name__}"]
    if unnamed := re.match(r"Error parsing override '(.+)'\s+missing EQUAL", str(error)):
        return [f"error: {unnamed[1]} is not NAME=VALUE"]
    if isinstance(error, OverrideParseException) and NOT_READ.match(str(error)):
        return [f"error: {_not_read(error.override)}"]
    if several := re.search(r"Ambiguous value for argument '((.+?)=(.+))'", str(error)):
        return [f"error: {several[1]}: {_several(several[2], several[3])}"]
    if known := _unknown(error):
        return [f"error: {known}"]
    lines: list[str] = []
    for cause in _causes(error, hidden=False):
        for line in map(str.strip, str(cause).splitlines()):
            if line and line not in lines and not NOISE.match(line):
                lines.append(line)
    if foreign := FOREIGN.match("\n".join(lines)):
        return [f"error: {foreign[1]}={foreign[2]} belongs to another task; task=NAME --help shows what that one takes"]
    if len(lines) == 2 and lines[0].startswith("Error merging override "):
        lines = [f"{lines[0].removeprefix('Error merging override ')}: {lines[1]}"]
    override = getattr(error, "override", None)
    first = f"{override}: {lines[0]}" if override and override not in lines[0] else lines[0]
    return [f"error: {first}", *(f"  {line}" for line in lines[1:])]


def _not_read(override: str) -> str:
    """What is wrong with an option that Hydra's grammar does not read."""
    name, _, value = override.partition("=")
    if not re.fullmatch(r"[\w.@/+~-]+", name, re.ASCII):
        return f"{override} is not NAME=VALUE"
    if value[:1] in "[{'\"":
        return f"{override}: a quote or a bracket is not closed, or a value in it needs quotes"
    return f"{override}: write it in quotes: {shlex.quote(f'{name}={quoted(value)}')}"


def _several(option: str, values: str) -> str:
    """What to write in the place of ``option=value,value``."""
    takes_a_list = option.partition(".")[0] == "compile"
    return f"a list is written {option}=[{values}]; a sweep needs -m" if takes_a_list else "several values need -m"


def _causes(error: BaseException | None, *, hidden: bool = True) -> Iterator[BaseException]:
    """The error and those behind it, with those that Hydra leaves out (``hidden``)."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # under a debugger OmegaConf's errors are causes of themselves
        seen.append(error)
        yield error
        error = error.__cause__ or (error.__context__ if hidden else None)


def _unknown(error: HydraException | OmegaConfBaseException) -> str | None:
    """A group's option, a group or an option that does not exist, with the names that resemble it, else all of them.

    None for other errors, and for a key that ``+`` may add to a mapping without fixed keys.
    """
    # Not above: the command line imports this, and then puts a user's packages of the same names behind ours.
    from tasks import SCHEMAS
    from tasks.base import suggest
    from trainer.config import known_options

    file = re.match(r"In '([^']+)': ", str(error))
    # Of our own files a user has seen none: the option is on the command line.
    ours = file is None or file[1].startswith("hydra/") or (CONF / f"{file[1]}.yaml").is_file()
    where = "" if file is None or ours else f"{file[1]}: "
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        known = known_options(group, error.options or ())
        wrong = f"{where}{group}={name} is not an option"
        return wrong + (suggest(name, known) or f"; there are {', '.join(known)}") if group and known else None
    given = re.search(r"Could not override '(.+?)'", str(error))
    if given is not None and "/" in given[1]:
        groups = {path.rpartition("/")[0] for path in SCHEMAS} - {"task"}
        near = "; this task has none" if given[1] in groups else suggest(given[1], groups)
        return f"{given[1]} is not a group of options{near}"
    missing = next((one for one in _causes(error) if isinstance(one, ConfigAttributeError | ConfigKeyError)), None)
    if missing is None or missing.full_key is None:
        return None
    key, path, parent, kind = str(missing.key), missing.full_key, missing.parent_node, missing.object_type
    place = path.removesuffix(key)
    if isinstance(parent, DictConfig):
        known = list(_options(parent, place))
    elif dataclasses.is_dataclass(kind):  # a file's, which is merged without its node
        known = [f"{place}{option.name}" for option in dataclasses.fields(kind)]
    else:
        return None
    if place == "compile.":
        near = suggest(key, map(str, parent)) or f"; compile={key} adds it"
        if not {"-m", "--multirun"}.isdisjoint(sys.argv):
            near += f"; an option of one arm: 'hydra.launcher.arms=[eager,\"{key} {path}.NAME=VALUE\"]'"
        return f"{where}{path}: the run has no strategy {key}{near}"
    last = {option.rpartition(".")[2]: option for option in known}
    for name in (key, given[1].rpartition(".")[2] if given else key):
        if matches := difflib.get_close_matches(name, last):
            return f"{where}{path} is not an option; near: {', '.join(last[match] for match in matches)}"
    if kind in (None, dict) and not place.startswith("hydra."):  # a mapping of the user's
        return None
    there = [option.removeprefix(place) for option in known if "." not in option.removeprefix(place)]
    return f"{where}{path} is not an option; there are {', '.join(there)}"


def _options(node: DictConfig, prefix: str) -> Iterator[str]:
    """Full names of all options below ``node``, but Hydra's; of two with one last name, the nearer one comes last."""
    for key in map(str, node):
        if not prefix and key == "hydra":
            continue
        if not OmegaConf.is_missing(node, key) and isinstance(child := node._get_node(key), DictConfig):
            yield from _options(child, f"{prefix}{key}.")
    yield from (f"{prefix}{key}" for key in map(str, node))


def _in_file(error: MarkedYAMLError) -> str:
    """What is wrong with a YAML file, and where, as ``file:line: what``."""
    mark = error.problem_mark or error.context_mark
    what = " ".join(str(error.problem or error.context or "not YAML").split())
    # Indentation that does not fit ends a block too early, which is all that the parser can tell.
    if what.startswith(("expected <block end>", "mapping values are not allowed")):
        what += " (is the indentation right?)"
    return f"{mark.name}:{mark.line + 1}: {what}" if mark is not None else what


def _is_worded(error: BaseException) -> bool:
    """Whether code of this project has raised ``error``, for the user to read."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or frames[-1].startswith(PACKAGES)


def report(error: BaseException, place: str = "") -> None:
    """Print what ``explain`` says on the standard error, without credentials; of what the user's code has refused, its
    line; of what the system has, the file, or ``place``, which is an option that says where."""
    from strategies.compile_errors import redact  # not above, as in _unknown
    from trainer.telemetry.source_lines import place_lines, raised_at

    lines = explain(error)
    if not isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)) and not _is_worded(error):
        lines += place_lines(raised_at(error, own=True))
    if isinstance(error, OSError) and not isinstance(error, REFUSALS):  # some of Hydra's are both
        file = str(error.filename or place)
        what = error.strerror or str(error)
        if os.path.islink(file) and not os.path.exists(file):  # the system says "File exists"
            what = f"a symbolic link to {os.readlink(file)} that leads nowhere"
        lines = [f"error: {place if place.endswith(file) else file}: {what}"]
    who = rank_prefix(os.environ, alike="torch" not in sys.modules)
    if who is not None:
        # One write, also without a buffer: several processes may share a terminal.
        print(redact("".join(f"{who}{line}\n" for line in lines)), end="", file=sys.stderr, flush=True)
