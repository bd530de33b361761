"""Config: registers the dataclasses as Hydra's schemas, and turns a composed configuration into them.

Hydra and OmegaConf are known here and in the other modules of the edge, which CONTRIBUTING.md lists.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strategies import STRATEGIES, Strategy
from strategies.credentials import refuse_credentials
from tasks import SCHEMAS
from tasks.checks import near
from trainer.run_modes import RUN_MODES
from trainer.settings import Config
from trainer.sweep.plan import LAUNCHERS


def register() -> None:
    """Make schemas and resolvers known to Hydra; must come before composition. Doing it twice does no harm."""
    # Schemas live in a group of their own: beside the options they would be offered to users as options.
    root = OmegaConf.structured(Config)
    root.run = MISSING  # left open as in register_schema: the defaults list says which
    ConfigStore.instance().store(group="schema", name="config", node=root, package="_global_")
    for name, mode in RUN_MODES.items():
        register_schema(f"run/{name}", mode)
    for name, strategy in STRATEGIES.items():
        register_schema(f"compile/{name}", strategy)
    for path, schema in SCHEMAS.items():
        register_schema(path, schema)
    for name, options in LAUNCHERS.items():  # as plain values: the launcher checks them, with messages of its own
        node = {"_target_": MISSING} | dataclasses.asdict(options())
        ConfigStore.instance().store(group="schema/hydra/launcher", name=name, node=node)
    OmegaConf.register_new_resolver("task_name", task_name, replace=True)
    OmegaConf.register_new_resolver("strategy_names", strategy_names, replace=True)
    OmegaConf.register_new_resolver("option_list", option_list, replace=True)


def register_schema(path: str, schema: type) -> None:
    """Register a dataclass as ``schema/<path>``, for a YAML's ``defaults: [/schema/<path>@_here_, _self_]``."""
    group, _, name = path.rpartition("/")
    node = OmegaConf.structured(schema)
    for key, declared in get_type_hints(schema).items():
        if dataclasses.is_dataclass(declared) and OmegaConf.get_type(node, key) is not declared:
            # Declared as a base class with one of its kinds as default: OmegaConf would then only merge subclasses of
            # that default. Left open, every kind of the base class fits; the defaults list of the YAML says which.
            node[key] = MISSING
    ConfigStore.instance().store(group=f"schema/{group}", name=name, node=node)


def refuse_written_credentials(cfg: DictConfig) -> None:
    """Look for credentials in a composed configuration and its overrides, before Hydra writes them to files.

    What an interpolation such as ``${oc.env:NAME}`` stands for is not looked at: files hold the interpolation. Raises
    ValueError that names the options.
    """
    values: Any = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    own = values.get("hydra") or {}
    given = own.pop("overrides", {})
    own.pop("job", None)  # the overrides once more, as the name of a folder
    options: list[Any] = [values]
    for override in OverridesParser.create().parse_overrides([*given.get("task", []), *given.get("hydra", [])]):
        value = override.value()  # of a sweep, an object that lists the values
        options.append({override.key_or_group: getattr(value, "list", value)})
    refuse_credentials(options)


def to_config(cfg: DictConfig, overrides: Iterable[str] = ()) -> Config:
    """Build the dataclasses from a composed configuration. Raises one ValueError with a line for each bad part.

    ``overrides`` are those of the command line: of options in one list, the last wins in Hydra, which nobody should
    have to know.
    """
    complaints = [*_disagreements(overrides), *_made_up(cfg, "")]
    parts: dict[str, Any] = {}
    for option in dataclasses.fields(Config):
        if option.name != "compile":
            parts[option.name] = _build(cfg, option.name, complaints)
    parts["compile"] = {str(name): _build(cfg, f"compile.{name}", complaints) for name in cfg.compile}
    try:
        config = Config(**parts)
    except ValueError as error:
        complaints.append(str(error))
    if complaints:
        raise ValueError("\n".join(complaints))
    return config


def _disagreements(overrides: Iterable[str]) -> Iterator[str]:
    """Options of ``compile=[...]`` that give one strategy different values, so that their order would matter."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        names = override.value() if override.key_or_group == "compile" else None
        if not isinstance(names, list) or all(name in STRATEGIES for name in names):
            continue  # strategies of different names have no key in common
        values = {str(name): _values(hydra.compose(f"compile/{name}")) for name in dict.fromkeys(names)}
        for (first, ours), (second, theirs) in itertools.combinations(sorted(values.items()), 2):
            for path in sorted(ours.keys() & theirs.keys()):
                if ours[path] != theirs[path]:
                    yield (
                        f"compile: {first!r} sets {path} to {ours[path]!r} and {second!r} to {theirs[path]!r}; "
                        f"choose one of them, and set {path} itself if it should be another"
                    )


def _values(option: DictConfig) -> dict[str, Any]:
    """Values of an option of ``compile``, by ``compile.<strategy>.<field>``."""
    return {
        f"compile.{strategy}.{field}": value
        for strategy, fields in (option.get("compile") or {}).items()
        for field, value in fields.items()
    }


def _build(cfg: DictConfig, path: str, complaints: list[str]) -> Any:
    """Build the dataclass (or take the value) at ``path``; what is wrong with it goes to ``complaints``."""
    unset = sorted(OmegaConf.missing_keys(cfg))
    mine = [key for key in unset if key == path or key.startswith(f"{path}.")]
    if mine:
        complaints.extend(f"{key} is not set: add {key}=<value>" for key in mine)
        return None
    node = OmegaConf.select(cfg, path)
    if not isinstance(node, DictConfig):
        return node
    made_up = list(_made_up(node, f"{path}."))
    if made_up:
        complaints.extend(made_up)
        return None
    try:
        return OmegaConf.to_object(node)
    except ValueError as error:
        complaints.append(str(error))
    except OmegaConfBaseException as error:
        complaints.append(f"{path}: {str(error).splitlines()[0]}")
    return None


def _made_up(node: DictConfig, prefix: str) -> Iterator[str]:
    """Complaints about keys that no dataclass field stands for: ``+path.option=1`` passes Hydra whatever its name."""
    kind = OmegaConf.get_type(node)
    if not dataclasses.is_dataclass(kind):
        return
    known = {option.name for option in dataclasses.fields(kind)}
    for key in map(str, node):
        if key not in known:
            yield f"{prefix}{key} is not an option{near(key, known)}"
        elif prefix and isinstance(child := node[key], DictConfig):
            yield from _made_up(child, f"{prefix}{key}.")


def task_name(task: DictConfig) -> str:
    """Directory name of a task: the ``name`` of its class."""
    return str(getattr(OmegaConf.get_type(task), "name", "task"))


def strategy_names(compile: DictConfig | None) -> str:
    """Directory name of a combination: names in the order of their stages joined by ``+``, or ``eager``."""
    kinds = [OmegaConf.get_type(compile, str(name)) for name in compile or {}]
    chosen = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Strategy) and kind is not Strategy]
    return "+".join(kind.name for kind in sorted(chosen, key=lambda kind: (kind.stage, kind.name))) or "eager"


def option_list() -> str:
    """Lines ``group=option|option`` for the help text, plug-ins included; empty where nobody asks for help.

    OmegaConf resolves the help text whenever it merges it, in every composition, and the lists take longer than all
    the rest.
    """
    if not any(argument == "-h" or argument.startswith("--h") for argument in sys.argv[1:]):
        return ""
    loader = GlobalHydra.instance().config_loader()
    rows = [(group, sorted(loader.get_group_options(group))) for group in _groups(loader.list_groups, "")]
    width = max(len(group) for group, _ in rows) + 2
    return "\n".join(f"  {group + '=':<{width}}{' | '.join(options)}" for group, options in rows if options)


def _groups(list_groups: Callable[[str], list[str]], parent: str) -> Iterator[str]:
    for name in sorted(list_groups(parent)):
        if not parent and name in ("hydra", "schema"):
            continue
        group = f"{parent}/{name}" if parent else name
        yield group
        yield from _groups(list_groups, group)
