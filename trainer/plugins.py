"""Plug-ins: ``python -m trainer --config-dir DIR compile=mine``, where ``DIR/plugin.py`` registers what is yours.

``plugin.py`` runs before the configuration is composed and calls ``register_strategy`` and ``register_task``.
See docs/extending.md.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore

from strategies import STRATEGIES, Stage, Strategy
from tasks import TASKS, Task
from trainer.config import register_schema

FILE_NAME = "plugin.py"


def register_strategy(strategy: type[Strategy]) -> None:
    """Make a strategy known as ``compile=<name>`` and as the schema ``/schema/compile/<name>``.

    Raises ValueError when it is no keyword-only, slotted dataclass with a name of its own and a stage.
    """
    _require_kind("register_strategy", strategy, Strategy)
    name = getattr(strategy, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{strategy.__name__}.name={name!r} must be a ClassVar[str] holding an identifier")
    if not isinstance(getattr(strategy, "stage", None), Stage):
        raise ValueError(f"{strategy.__name__}.stage must be a ClassVar[Stage]")
    if name in STRATEGIES or name == "eager":
        raise ValueError(f"{strategy.__name__}.name={name!r} is the name of a strategy that ships; choose another")
    register_schema(f"compile/{name}", strategy)
    # The class alone is an option already; a YAML of the same name only changes its values.
    ConfigStore.instance().store(group="compile", name=name, node=strategy, package=f"compile.{name}")


def register_task(task: type[Task], *, schemas: Mapping[str, type] | None = None) -> None:
    """Make a task known as ``task=<name>`` and as the schema ``/schema/task/<name>``.

    ``schemas`` holds further dataclasses by the path that their YAML names (``task/data/mine`` for
    ``/schema/task/data/mine``). Raises ValueError for a class that is no keyword-only, slotted dataclass.
    """
    _require_kind("register_task", task, Task)
    name = task.name
    if not name.isidentifier() or name == Task.name:
        raise ValueError(f"{task.__name__}.name={name!r} must be a ClassVar[str] holding a name of its own")
    if name in TASKS:
        raise ValueError(f"{task.__name__}.name={name!r} is the name of a task that ships; choose another")
    for path, schema in (schemas or {}).items():
        _require_dataclass(f"register_task: schemas[{path!r}]", schema)
        register_schema(path, schema)
    register_schema(f"task/{name}", task)
    ConfigStore.instance().store(group="task", name=name, node=task)


def load_from_command_line(arguments: Sequence[str]) -> None:
    """Run the ``plugin.py`` of ``--config-dir``, if there is one. Raises ValueError naming file and error."""
    chosen = config_dir(arguments)
    file = Path(chosen or ".") / FILE_NAME
    if chosen is None or not file.is_file():
        return
    # A real module in a directory on the path: dataclasses look up their module, and worker processes import it.
    sys.path.append(str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
    # Hydra takes a registered option for the schema of a YAML of the same name; the YAML names its schema by itself.
    for group in ("compile", "task"):
        for option in (file.parent / group).glob("*.yaml"):
            ConfigStore.instance().repo.get(group, {}).pop(option.name, None)


def config_dir(arguments: Sequence[str]) -> str | None:
    """The value of Hydra's ``--config-dir`` among ``arguments``; None without one."""
    return get_args_parser().parse_known_args(list(arguments))[0].config_dir


def _require_kind(function: str, kind: type, base: type) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{function}: {kind!r} is not a subclass of {base.__module__}.{base.__name__}")
    _require_dataclass(function, kind)


def _require_dataclass(where: str, kind: type) -> None:
    """Raise ValueError unless ``kind`` is ``@dataclass(kw_only=True, slots=True)`` and not frozen.

    Without slots a misspelt ``+compile.mine.typo=1`` would be dropped in silence; frozen ones refuse overrides.
    """
    if not is_configuration(kind):
        name = getattr(kind, "__name__", repr(kind))
        raise ValueError(f"{where}: {name} must be decorated with @dataclass(kw_only=True, slots=True)")


def is_configuration(kind: type) -> bool:
    """Whether ``kind`` itself (not only a base) is a keyword-only, slotted dataclass that is not frozen."""
    own = vars(kind)
    if "__dataclass_params__" not in own or "__slots__" not in own or own["__dataclass_params__"].frozen:
        return False
    return all(option.kw_only for option in dataclasses.fields(kind))
