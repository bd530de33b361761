"""Config: registers the dataclasses as Hydra's schemas, and turns a composed configuration into them.

Hydra and OmegaConf are known here and in the other modules of the edge, which a contract in pyproject.toml lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf, _utils
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from strategies import STRATEGIES, Stage, Strategy
from strategies.base import WrongOption
from strategies.compile_errors import conceal, refuse_credentials
from tasks import SCHEMAS, TASKS, Task
from tasks.base import suggest
from trainer import CONF
from trainer.settings import RUN_MODES, Config
from trainer.sweep.plan import SweepOptions, quoted


def register() -> None:
    """Make schemas, options and resolvers known to Hydra, once; must come before composition.

    A class without parts to choose from is an option by itself; the other options are the files of ``conf``.
    """
    if "config.yaml" in ConfigStore.instance().repo.get("schema", {}):
        return
    # Schemas live in a group of their own: beside the options they would be offered to users as options.
    root = OmegaConf.structured(Config)
    root.run = MISSING  # left open as in register_schema: the defaults list says which
    ConfigStore.instance().store(group="schema", name="config", node=root, package="_global_")
    for name, strategy in STRATEGIES.items():
        register_schema(f"compile/{name}", strategy, package=f"compile.{name}")
    for path, schema in {**{f"run/{name}": mode for name, mode in RUN_MODES.items()}, **SCHEMAS}.items():
        group = path.rpartition("/")[0]
        alone = group in ("run", "task/data") or (group == "task" and not (CONF / f"{path}.yaml").exists())
        register_schema(path, schema, package=group.replace("/", ".") if alone else None)
    # As plain values: the launcher checks them, with messages of its own.
    node = {"_target_": "hydra_plugins.crucible.IsolatedLauncher", **dataclasses.asdict(SweepOptions())}
    ConfigStore.instance().store(group="hydra/launcher", name="isolated", node=node)
    bound_aliases()
    OmegaConf.register_new_resolver("task_name", task_name, replace=True)
    OmegaConf.register_new_resolver("strategy_names", strategy_names, replace=True)


MOST_VALUES = 10_000
"""Values that the aliases (``*name``) of one YAML file may make of what is written once."""


def bound_aliases() -> None:
    """Refuse YAML files whose aliases repeat each other's: PyYAML shares what they stand for, OmegaConf copies it, and
    nine short lines become a billion values. Tried: omegaconf 2.3, which makes its loader anew for each file:
    https://github.com/omry/omegaconf/blob/v2.3.0/omegaconf/_utils.py (``get_yaml_loader``)
    """
    if not isinstance(_utils.get_yaml_loader, functools.partial):
        _utils.get_yaml_loader = functools.partial(_bounded_loader, _utils.get_yaml_loader)


def _bounded_loader(made: Callable[[], Any]) -> Any:
    """The class that ``made`` returns; a file whose aliases go too far is a ``MarkedYAMLError`` of it."""
    loader = made()
    plain = loader.get_single_node

    def get_single_node(self: Any) -> Any:
        node = plain(self)
        sizes: dict[int, int] = {}
        if node is not None and (total := _values_of(node, sizes)) > MOST_VALUES and total > 2 * len(sizes):
            what = f"its aliases (*name) make more than {MOST_VALUES:,} values of {len(sizes):,}"
            raise MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        return node

    loader.get_single_node = get_single_node
    return loader


def _values_of(node: Any, sizes: dict[int, int]) -> int:
    """How many values ``node`` holds, those of an alias counted wherever it stands; ``sizes`` has each node's own once.

    Raises MarkedYAMLError where a node holds itself.
    """
    if (known := sizes.get(id(node))) is not None:
        if known == 0:
            raise MarkedYAMLError(problem="an alias (*name) within what it stands for", problem_mark=node.start_mark)
        return known
    sizes[id(node)] = 0
    parts = [] if isinstance(node.value, str) else node.value
    inner = (each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
    sizes[id(node)] = total = 1 + sum(_values_of(each, sizes) for each in inner)
    return total


def register_schema(path: str, schema: type, package: str | None = None) -> None:
    """Register a dataclass as ``schema/<path>``, for a YAML's ``defaults: [/schema/<path>@_here_, _self_]``, and with
    ``package`` as the option ``<path>`` itself."""
    group, _, name = path.rpartition("/")
    _store(f"schema/{group}", name, functools.partial(_schema_node, schema), None)
    if package is not None:
        _store(group, name, functools.partial(OmegaConf.structured, schema), package)


def _schema_node(schema: type) -> Any:
    node = OmegaConf.structured(schema)
    for key, declared in get_type_hints(schema).items():
        if dataclasses.is_dataclass(declared) and OmegaConf.get_type(node, key) is not declared:
            # Declared as a base class with one of its kinds as default: OmegaConf would then only merge subclasses of
            # that default. Left open, every kind of the base class fits; the defaults list of the YAML says which.
            node[key] = MISSING
    return node


class _WhenLoaded:
    """Stands for a node that ``make`` makes, once Hydra loads it: it hands out copies of what its store holds. So
    nothing runs of the tasks and strategies that a command does not choose."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return self._make()


class _Option(ConfigNode):
    """An entry of Hydra's store. To compose, Hydra copies the whole of it, which loads nothing yet."""

    def __deepcopy__(self, _: dict[int, Any]) -> _Option:
        return self


def _store(group: str, name: str, make: Callable[[], Any], package: str | None) -> None:
    """As ``ConfigStore.store``, which would make the node at once. Tried: hydra 1.3."""
    options = ConfigStore.instance().repo
    for part in group.split("/"):
        options = options.setdefault(part, {})
    node: Any = _WhenLoaded(make)
    options[f"{name}.yaml"] = _Option(name=f"{name}.yaml", node=node, group=group, package=package, provider=None)


def known_options(group: str, listed: Iterable[str] = ()) -> list[str]:
    """Names of the options of ``group`` that Hydra has ``listed``, else of those that ship or that a plug-in has
    registered, without strategies that were removed."""
    files = [*_registered(group), *(file.name for file in (CONF / group).glob("*.yaml"))]
    names = set(listed) or {name.removesuffix(".yaml") for name in files if name.endswith(".yaml")}
    removed = {name for name, kind in STRATEGIES.items() if kind.removed} if group == "compile" else set()
    return sorted(names - removed)


_NO_NAME = re.compile(r"null|true|false|[\d.+-]+", re.IGNORECASE)


def refuse_nameless(overrides: Iterable[str]) -> None:
    """Raise ValueError for ``compile=null``, also in a list: Hydra takes a number or a truth value for no name of an
    option, without saying of which group, or ends by a TypeError."""
    for word in overrides:
        group, _, value = word.partition("=")
        names = [name.strip() for name in value.strip("[]").split(",")]
        if any(map(_NO_NAME.fullmatch, names)) and (known := known_options(group.lstrip("+"))):
            wrong = next(name for name in names if _NO_NAME.fullmatch(name))
            raise ValueError(f"{word}: {wrong} is not an option; there are {', '.join(known)}")


def _registered(group: str) -> Any:
    """The options of ``group`` that are classes, by file name, with the groups below it."""
    found: Any = ConfigStore.instance().repo
    for name in group.split("/"):
        found = found.get(name, {})
    return found


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
    with _environment_concealed():
        return _to_config(cfg, overrides)


def _to_config(cfg: DictConfig, overrides: Iterable[str]) -> Config:
    complaints, unset = [*_disagreements(overrides), *_made_up(cfg, "")], sorted(OmegaConf.missing_keys(cfg))
    parts: dict[str, Any] = {}
    for option in dataclasses.fields(Config):
        if option.name != "compile":
            parts[option.name] = _build(cfg, option.name, unset, complaints)
    with warnings.catch_warnings(record=True) as warned:  # names of strategies that are no more
        warnings.simplefilter("always")
        parts["compile"] = {str(name): _build(cfg, f"compile.{name}", unset, complaints) for name in cfg.compile}
    for warning in warned:
        print(f"warning: {warning.message}", file=sys.stderr)
    try:
        config = Config(**parts)
    except ValueError as error:
        complaints.append(str(error))
    if complaints:
        raise ValueError("\n".join(complaints))
    return config


@contextlib.contextmanager
def _environment_concealed() -> Iterator[None]:
    """Hide, from the end on, the values that ``${oc.env:NAME}`` gives inside, also those within longer texts. Defaults,
    as in ``${oc.env:NAME,here}``, stand in the configuration itself."""
    read: list[str] = []

    def env(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        if name in os.environ and not os.path.exists(os.environ[name]):  # a path that is there is no secret
            read.append(os.environ[name])
        return value

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        conceal(read)


def _disagreements(overrides: Iterable[str]) -> Iterator[str]:
    """Options of ``compile=[...]`` that give one strategy different values, so that their order would matter."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        names = override.value() if override.key_or_group == "compile" else None
        if not isinstance(names, list) or all(name in STRATEGIES for name in names):
            continue  # strategies of different names have no key in common
        known: dict[str, tuple[str, Any]] = {}
        for name in sorted(set(map(str, names))):
            for strategy, fields in (hydra.compose(f"compile/{name}").get("compile") or {}).items():
                for field, value in fields.items():
                    path = f"compile.{strategy}.{field}"
                    first, before = known.setdefault(path, (name, value))
                    if before != value:
                        yield (
                            f"compile: {first!r} sets {path} to {before!r} and {name!r} to {value!r}; "
                            f"choose one of them, and set {path} itself if it should be another"
                        )


def _build(cfg: DictConfig, path: str, unset: Sequence[str], complaints: list[str]) -> Any:
    """Build the dataclass (or take the value) at ``path``; what is wrong with it goes to ``complaints``."""
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
    except WrongOption as error:
        complaints.append(error.typed)
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
            yield f"{prefix}{key} is not an option{suggest(key, known)}"
        elif prefix and isinstance(child := node[key], DictConfig):
            yield from _made_up(child, f"{prefix}{key}.")


def task_name(task: DictConfig) -> str:
    """Directory name of a task: the ``name`` of its class."""
    return str(getattr(OmegaConf.get_type(task), "name", "task"))


def strategy_names(compile: DictConfig | None) -> str:
    """Directory name of a combination: names in the order of their stages joined by ``+``, or ``eager``."""
    given = [OmegaConf.get_type(compile, str(name)) for name in compile or {}]
    kinds = [kind for kind in given if isinstance(kind, type) and issubclass(kind, Strategy) and kind is not Strategy]
    chosen = [kind for kind in kinds if not kind.removed]
    return "+".join(kind.name for kind in sorted(chosen, key=lambda kind: (kind.stage, kind.name))) or "eager"


def compose(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Config:
    """The configuration that ``python -m trainer --config-dir <config_dir> <overrides>`` would run with.

    Raises ValueError for bad values, and for a folder that is none.
    """
    register()
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir={config_dir!r} is not a folder")
        load_from_command_line(["--config-dir", config_dir])
    refuse_nameless(overrides)
    theirs = [] if config_dir is None else [quoted(f"file://{Path(config_dir).resolve()}")]
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = hydra_compose("config", overrides=[*overrides, *(f"hydra.searchpath=[{one}]" for one in theirs)])
        refuse_written_credentials(cfg)
        return to_config(cfg, overrides)


FILE_NAME = "plugin.py"


def register_strategy(strategy: type[Strategy]) -> None:
    """Make a strategy known as ``compile=<name>`` and as the schema ``/schema/compile/<name>``.

    Raises ValueError when it is no dataclass with a name of its own and a stage.
    """
    name = _checked_name(strategy, Strategy, {*STRATEGIES, "eager"})
    if not isinstance(getattr(strategy, "stage", None), Stage):
        raise ValueError(f"{strategy.__name__}.stage must be a ClassVar[Stage]")
    _schema_node(strategy)  # which refuses what OmegaConf cannot hold
    # The class alone is an option already; a YAML of the same name only changes its values.
    register_schema(f"compile/{name}", strategy, package=f"compile.{name}")


def register_task(task: type[Task], *, schemas: Mapping[str, type] | None = None) -> None:
    """Make a task known as ``task=<name>`` and as the schema ``/schema/task/<name>``.

    ``schemas`` holds further dataclasses by the path that their YAML names (``task/data/mine`` for
    ``/schema/task/data/mine``). Raises ValueError for a class that is no dataclass with a name of its own.
    """
    name = _checked_name(task, Task, {*TASKS, Task.name})
    for path, schema in {**(schemas or {}), f"task/{name}": task}.items():
        _schema_node(schema)
        register_schema(path, schema, package="task" if schema is task else None)


def load_from_command_line(arguments: Sequence[str]) -> None:
    """Run the ``plugin.py`` of ``--config-dir``, if there is one. Raises ValueError naming file and error."""
    chosen = config_dir(arguments)
    if chosen is None:
        return
    file = Path(chosen) / FILE_NAME
    if file.is_file():
        # A real module in a directory on the path: dataclasses look up their module, and worker processes import it.
        sys.path.append(str(file.parent.resolve()))
        spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
    # Hydra takes a registered option for the schema of a YAML of the same name; the YAML names its schema by itself.
    for group in ("compile", "run", "task", "task/data"):
        for option in (file.parent / group).glob("*.yaml"):
            _registered(group).pop(option.name, None)


def config_dir(arguments: Sequence[str]) -> str | None:
    """The value of Hydra's ``--config-dir`` among ``arguments``; None without one."""
    return get_args_parser().parse_known_args(list(arguments))[0].config_dir


def source_flags(arguments: Sequence[str]) -> list[str]:
    """Hydra's flags that say where configuration comes from, as absolute paths."""
    given = get_args_parser().parse_known_args(list(arguments))[0]
    folder = None if given.config_dir is None else os.path.abspath(given.config_dir)
    found = {"--config-dir": folder, "--config-path": given.config_path, "--config-name": given.config_name}
    return [word for flag, value in found.items() if value is not None for word in (flag, value)]


def _checked_name(kind: type, base: type, taken: set[str]) -> str:
    """The name of a plug-in's class. Raises ValueError for a class that cannot be one."""
    function = f"register_{base.__name__.lower()}"
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{function}: {kind!r} is not a subclass of {base.__module__}.{base.__name__}")
    if "__dataclass_params__" not in vars(kind):  # its fields would be those of its base
        raise ValueError(f"{function}: {kind.__name__} must be decorated with @dataclass(kw_only=True, slots=True)")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{kind.__name__}.name={name!r} must be a ClassVar[str] holding an identifier")
    if name in taken:
        raise ValueError(f"{kind.__name__}.name={name!r} is the name of one that ships; choose another")
    return name
