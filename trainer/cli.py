"""The command line: ``python -m trainer task=captioning compile=regional``, installed as ``crucible`` too.

The Hydra edge. Torch is imported only once the configuration is known to be good, so that ``--help``, completion
and errors are immediate. Exit codes: 0 finished, 1 failed, 2 refused before any work, 128 + signal interrupted.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
import hydra._internal.utils
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from trainer import CONF, config_errors, working_directory_last

REFUSED = 2
"""Exit code for a command that was refused before any work started."""
EXAMPLES = """\
usage: crucible train [NAME=VALUE ...]     (or python -m trainer)

Train a task under compile strategies, and measure what they cost and give.

examples:
  crucible train task=captioning compile=regional
  crucible train task=captioning task/data=coco task.data.root=/data/coco compile=regional trainer.max_steps=2000
  crucible train experiment=gpt2 compile=regional         # a named workload for a GPU; gpt2_smoke runs on a CPU
  crucible train -m compile=eager,regional,whole          # a sweep: each cell in a fresh process, a table at the end
  crucible train -m compile=eager,regional repeat=cold,warm    # from empty compile caches, then from filled ones
  crucible train -m sweep=DIR compile=eager,regional,whole    # in this folder; the same again continues it
  crucible train compile=whole resume=RUN                 # continue from a run's directory or a checkpoint
  crucible train compile=regional profile=on              # a trace of a few steps: is the GPU idle, what takes longest?

--help after other words shows the values that they lead to; --cfg job prints only those. --config-dir DIR adds your own
strategies and tasks (docs/extending.md). Tab completion: eval "$(crucible -sc install=bash)"
"""
GROUPS = {
    "task": "what is learned",
    "task/data": "what it is learned from",
    "task/network": "which network",
    "task/size": "how large",
    "compile": "how it is compiled; several together: compile=[regional,cuda_graph]",
    "run": "train, or a peer that trains the same",
    "trainer": "how long, on what, how often to validate and log",
    "experiment": "a named workload: task, sizes and lengths together",
    "arms": "what a sweep compares, -m arms=static: lists of strategies, peers",
}


def main() -> None:
    """Run the command in ``sys.argv``; exits with its code."""
    from trainer.process import end_with_first, keep_streams, signal_at_end_of_parent
    from trainer.run_start import SWEEP_VARIABLE
    from trainer.sweep import plan

    working_directory_last()
    keep_streams()
    end_with_first()
    if os.environ.get(SWEEP_VARIABLE) == str(os.getppid()):
        # When the sweep dies, even by SIGKILL, its cell stops with a checkpoint: a sweep that is resumed gives the
        # cell's directory to another process.
        signal_at_end_of_parent(signal.SIGTERM)
    try:
        if "COMP_LINE" not in os.environ:
            sys.argv[1:] = _flags_last(sys.argv[1:])
        sys.argv[1:] = plan.expanded(sys.argv[1:])
    except ValueError as error:
        config_errors.report(error)
        sys.exit(REFUSED)
    from trainer import config

    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    exit_codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        try:
            exit_codes.append(train(cfg))
        except ValueError as error:
            if wants_traceback:
                raise
            config_errors.report(error)
            exit_codes.append(REFUSED)

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_hydra_in_our_words(exit_codes.append))
            config.register()
            if "COMP_LINE" in os.environ and (chosen := config.config_dir(os.environ["COMP_LINE"].split()[1:])):
                # Tab completion: Hydra looks for the directory among our arguments, not on the line being completed.
                sys.argv += ["--config-dir", chosen]
            config.load_from_command_line(sys.argv[1:])
            config.refuse_nameless(sys.argv[1:])
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except (*config_errors.REFUSALS, OSError) as error:  # runs report their own OSErrors: this one made no folder
            refusal = isinstance(error, config_errors.REFUSALS)
            if wants_traceback or (not refusal and getattr(error, "errno", None) is None):
                raise
            config_errors.report(error, OwnFolder.place)
            sys.exit(REFUSED)
    sys.exit(max(exit_codes, default=0))


def _flags_last(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with flags behind the options where they stand among them, as in ``task=micro -m seed=1,2``:
    argparse takes one row of options alone. Raises ValueError for a flag that Hydra does not have, as in
    ``--task captioning``, or that has no value."""
    parser: Any = get_args_parser()
    parser.error = _raise_usage_error
    known, others = parser.parse_known_args(list(arguments))
    unknown = next((word for word in others if word[:1] == "-"), None)
    if not others:
        return list(arguments)
    if unknown is None:
        flags, options = list(arguments), [*known.overrides, *others]
        for option in options:
            flags.remove(option)
        return [*options, *flags]
    flag, equals, value = unknown.partition("=")
    if not (named := re.fullmatch(r"--([A-Za-z][\w./@-]*)", flag)):
        raise ValueError(f"{unknown} is not a flag, see --help; options are written NAME=VALUE")
    following = [*arguments][[*arguments].index(unknown) + 1 :][:1]
    if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
        unknown, value = f"{unknown} {following[0]}", following[0]
    raise ValueError(f"{unknown}: options are written {named[1].replace('-', '_')}={value or 'VALUE'}")


def _raise_usage_error(message: str) -> NoReturn:
    raise ValueError(message)


@contextlib.contextmanager
def _hydra_in_our_words(ended: Callable[[int], None]) -> Iterator[None]:
    """Inside, Hydra composes as ``_compose`` says, its help is ``_help``, and exceptions come through: it would print
    its own report of any, and exit with 1; ``config_errors.explain`` is shorter. A sweep calls ``ended`` with its exit
    code. Tried: hydra 1.3."""
    utils: Any = hydra._internal.utils
    kind: Any = Hydra
    before = utils.run_and_report, kind.compose_config, kind.app_help
    utils.run_and_report, kind.app_help = (lambda func: func()), _help
    kind.compose_config = functools.partialmethod(_compose, before[1], ended)
    try:
        yield
    finally:
        utils.run_and_report, kind.compose_config, kind.app_help = before


def _compose(
    self: Hydra, compose: Callable[..., DictConfig], ended: Callable[[int], None], *args: Any, **options: Any
) -> DictConfig:
    """Hydra's own composition, ``compose``; it writes the result to ``.hydra/`` and ``multirun.yaml`` before any code
    of ours runs.

    Devices and hosts are those that torchrun or SLURM has started processes for. Raises ValueError where the settings
    say otherwise.
    """
    from trainer.config import refuse_written_credentials
    from trainer.process import detect_launch, devices_of_launch

    cfg = compose(self, *args, **options)
    refuse_written_credentials(cfg)
    if "trainer" not in cfg:  # an option of a group, composed to be compared with another
        return cfg
    sweeps, launch = cfg.hydra.mode == hydra.types.RunMode.MULTIRUN, detect_launch(os.environ)
    if launch is not None and sweeps:
        raise ValueError(
            f"-m: each of the {launch.processes} processes that {launch.by} has started would run the whole sweep; "
            "start it alone, in one job"
        )
    if sweeps:
        from trainer.sweep import launcher  # with the reports that it ends with, which a single run has no use for

        launcher.register(ended)
    follow = devices_of_launch(launch, cfg.trainer.devices, cfg.trainer.num_nodes)
    with read_write(cfg):
        cfg.trainer.devices, cfg.trainer.num_nodes = follow
    return cfg


def _help(self: Hydra, config_name: str | None, args_parser: Any, args: Any) -> None:
    """``--help``: examples, the choices, and each option with the value that it would have and its meaning."""
    from strategies import STRATEGIES
    from tasks import TASKS

    cfg = self.compose_config(config_name, args.overrides, run_mode=hydra.types.RunMode.RUN)
    chosen = cfg.hydra.runtime.choices
    known: dict[str, dict[str, Any]] = {"task": dict(TASKS), "compile": dict(STRATEGIES)}
    repository = self.config_loader.repository  # type: ignore[attr-defined]
    print(f"{EXAMPLES}\nchoose (what this command would take comes first):")
    for group, meaning in GROUPS.items():
        options = sorted(repository.get_group_options(group, ObjectType.CONFIG))
        options = [option for option in options if not getattr(known.get(group, {}).get(option), "removed", False)]
        print(f"  {group}={chosen.get(group) or ''}  {meaning}")
        explained = [option for option in options if option in known.get(group, {})]
        for option in explained:
            print(_columns(f"      {option}", 28, _sentence(inspect.getdoc(known[group][option]) or "", {})))
        if others := [option for option in options if option not in explained]:
            print(_columns("", 6, ("also " if explained else "") + ", ".join(others)))
    print("\nset (with the value that this command would use):")
    for name, value, meaning in _options(self.get_sanitized_cfg(cfg, "job"), ""):
        print(_columns(f"  {name}={value}", 40, meaning))


def _options(node: DictConfig, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of each option below ``node``."""
    kind = OmegaConf.get_type(node)
    meanings = _meanings(kind) if dataclasses.is_dataclass(kind) else {}
    for key in map(str, node):
        value = "???" if OmegaConf.is_missing(node, key) else node[key]
        if isinstance(value, DictConfig) and (len(value) or dataclasses.is_dataclass(OmegaConf.get_type(value))):
            yield from _options(value, f"{prefix}{key}.")
        else:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{prefix}{key}", text, meanings.get(key, "")


def _meanings(kind: type) -> dict[str, str]:
    """First sentence of the docstring below each field of a dataclass, with the choices that it names."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # a plug-in without a file
            continue
        assert isinstance(body, ast.ClassDef)
        for field, doc in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                text = ast.get_docstring(ast.Module([doc], [])) or ""
                found[field.target.id] = _sentence(text, vars(sys.modules[base.__module__]))
    return found


def _sentence(text: str, constants: dict[str, Any]) -> str:
    first = re.split(r"(?<=[a-z0-9)`])\.\s", f"{' '.join(text.split())} ", maxsplit=1)[0].strip()

    def choices(match: re.Match[str]) -> str:
        values = constants.get(match[1])
        return " | ".join(values) if isinstance(values, tuple) else match[0]

    return re.sub(r"[Oo]ne of ``([A-Z_]+)``", choices, first).replace("``", "")


def _columns(name: str, width: int, meaning: str) -> str:
    """``name`` in a column of ``width`` and ``meaning`` beside it, wrapped; below it where the name is long."""
    room = max(40, shutil.get_terminal_size((120, 24)).columns - width)
    lines = textwrap.wrap(meaning, room, break_on_hyphens=False) or [""]
    first = f"{name:<{width}}{lines.pop(0)}".rstrip() if len(name) < width else name
    return "\n".join([first, *(f"{'':{width}}{line}" for line in lines)])


class OwnFolder(Callback):
    """Hydra's callback that looks at the folder of a run or sweep before anything is written into it."""

    place: ClassVar[str] = ""
    """The folder, as the option that chooses it."""
    wanted: ClassVar[Path] = Path()
    """Where this process would leave its run, where it did not follow the first one."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Name the folder after SLURM's job; keep Hydra out of a folder that is another's."""
        from trainer.process import detect_launch, is_first_process
        from trainer.run_files import taken

        first, launch = is_first_process(), detect_launch(os.environ)
        if launch is not None and launch.job is not None:
            # Not the time: all processes name one folder then, and so does the job when it is put into the queue again.
            written: Any = OmegaConf.to_container(config.hydra.run, resolve=False)
            with read_write(config):
                config.hydra.run.dir = re.sub(r"\$\{now:[^}]*\}", f"slurm-{launch.job}", written["dir"])
        OwnFolder.place = f"hydra.run.dir={config.hydra.run.dir}"
        OwnFolder.wanted = Path(config.hydra.run.dir).absolute()
        if not first or taken(OwnFolder.wanted, config.resume):
            with read_write(config):
                config.hydra.output_subdir = None
                if launch is not None and not first:
                    config.hydra.run.dir = "."  # Hydra makes it: on this host, or by this clock, there need be none

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        OwnFolder.place = f"hydra.sweep.dir={config.hydra.sweep.dir}"


def train(cfg: DictConfig) -> int:
    """Train what ``cfg`` describes; returns the exit code. Raises ValueError for a bad configuration."""
    from trainer.config import source_flags, to_config
    from trainer.process import detect_launch, is_first_process, start_early, uninterrupted_import
    from trainer.run_files import taken
    from trainer.run_start import SWEEP_VARIABLE
    from trainer.settings import Peer, require_present

    settings = HydraConfig.get()
    # As they were typed: with ${oc.env:NAME}, not with what that stands for.
    given: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
    config = to_config(cfg, given)
    if config.repeat is not None and SWEEP_VARIABLE not in os.environ:
        raise ValueError(
            f"repeat={config.repeat!r}: a sweep gives its cells caches of their own, use -m repeat=cold,warm"
        )
    together = detect_launch(os.environ) is not None
    alone = not together and is_first_process()
    run_dir = OwnFolder.wanted if together else Path(settings.runtime.output_dir)
    command = [*source_flags(sys.argv[1:]), *given]
    # Of processes that were started together, the run asks once it knows whether it was started before.
    if alone and (complaint := taken(run_dir, config.resume)) is not None:
        raise ValueError(complaint)
    require_present(config, resumes=is_first_process())
    to_import = "torch" not in sys.modules
    if alone and to_import and not isinstance(config.run, Peer):  # of which torchrun starts several processes
        start_early(config.trainer, run_dir)
    if is_first_process() and to_import and SWEEP_VARIABLE not in os.environ:  # a cell's last line is its reason
        print("importing torch and Lightning", file=sys.stderr, flush=True)
    with uninterrupted_import():  # only now: torch takes seconds to import, and reads where its caches are
        from trainer.run import run

    return run(config, run_dir=run_dir, command=command).exit_code
