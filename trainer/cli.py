"""The command line: ``python -m trainer task=captioning compile=regional``, installed as ``crucible`` too.

The Hydra edge. Torch is imported only once the configuration is known to be good, so that ``--help``, completion
and errors are immediate. Exit codes: 0 finished, 1 failed, 2 refused before any work, 128 + signal interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import hydra._internal.utils
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig

from trainer import errors

if TYPE_CHECKING:
    from omegaconf import DictConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONF = HERE / "conf" if (HERE / "conf" / "config.yaml").is_file() else ROOT / "conf"
"""Inside the package in a wheel, beside it in a checkout; absolute, so that the user's own conf/ is never taken."""
REFUSED = 2
"""Exit code for a command that was refused before any work started."""
_COMPOSE = Hydra.compose_config


def main() -> None:
    """Run the command in ``sys.argv``; exits with its code."""
    from trainer.process import keep_streams
    from trainer.sweep import environment, ledger

    keep_streams()
    environment.end_with_parent()
    try:
        sys.argv[1:] = ledger.expanded(sys.argv[1:])
    except ValueError as error:
        errors.report(error)
        sys.exit(REFUSED)
    claim_packages()
    from trainer import config
    from trainer.sweep import folders, launcher

    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    exit_codes: list[int] = []

    def job(cfg: DictConfig) -> float | None:
        """Train once; the final loss is what a user's own sweeper minimises."""
        try:
            exit_code, final_loss = train(cfg)
        except ValueError as error:
            if wants_traceback:
                raise
            errors.report(error)
            exit_code, final_loss = REFUSED, None
        # Returned, not raised: SystemExit inside a job would end Hydra's own sweeps with exit code 0.
        exit_codes.append(exit_code)
        return final_loss

    # Hydra would print its own report of any exception and exit with 1; errors.explain is shorter.
    hydra._internal.utils.run_and_report = _call
    Hydra.compose_config = _compose  # type: ignore[method-assign]
    try:
        config.register()
        launcher.register()
        if "COMP_LINE" in os.environ and (chosen := config.config_dir(os.environ["COMP_LINE"].split()[1:])):
            # Tab completion: Hydra looks for the directory among our arguments, not on the line being completed.
            sys.argv += ["--config-dir", chosen]
        config.load_from_command_line(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except launcher.CellFailed:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except errors.REFUSALS as error:
        if wants_traceback:
            raise
        errors.report(error)
        sys.exit(REFUSED)
    except OSError as error:  # runs report their own, so this one comes from where the folder was to be made
        if wants_traceback or error.errno is None:
            raise
        place = folders.OwnFolder.place
        if error.filename is not None and place.endswith(str(error.filename)):
            error.filename = place
        errors.report_system(error, place)
        sys.exit(REFUSED)
    sys.exit(max(exit_codes, default=0))


def _call(func: Callable[[], Any]) -> Any:
    return func()


def _compose(self: Hydra, *args: Any, **options: Any) -> DictConfig:
    """Hydra's composition; it writes the result to ``.hydra/`` and ``multirun.yaml`` before any code of ours runs."""
    from trainer.config import refuse_written_credentials

    cfg = _COMPOSE(self, *args, **options)
    refuse_written_credentials(cfg)
    return cfg


def train(cfg: DictConfig) -> tuple[int, float | None]:
    """Train what ``cfg`` describes; returns exit code and final loss. Raises ValueError for a bad configuration."""
    from trainer.config import to_config
    from trainer.process import importing
    from trainer.sweep.environment import starting_caches
    from trainer.sweep.folders import is_first_process, taken
    from trainer.sweep.launcher import flags

    settings = HydraConfig.get()
    config = to_config(cfg, settings.overrides.task)
    run_dir = Path(settings.runtime.output_dir)
    command = [*flags(sys.argv[1:]), *settings.overrides.task]
    if is_first_process() and (complaint := taken(run_dir, config.resume)) is not None:
        raise ValueError(complaint)
    with starting_caches(config.repeat, run_dir):
        if is_first_process() and "torch" not in sys.modules:
            print("importing torch and Lightning", file=sys.stderr, flush=True)
        with importing():  # only now: torch takes seconds to import, and reads where its caches are
            from trainer.run import run

        record = run(config, run_dir=run_dir, command=command)
    return record.exit_code, record.final_loss


def claim_packages() -> None:
    """Import our ``strategies`` and ``tasks``, whatever the working directory holds under these names.

    Python puts the working directory first on the path for ``python -m`` and leaves it out for a console script.
    Here it always comes last: the user's plug-in packages can be imported, and shadow nothing.
    """
    here = Path.cwd()
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    sys.path[:] = [str(ROOT), *others]
    import strategies
    import tasks

    for package in (strategies, tasks):
        if Path(package.__path__[0]).resolve().parent != ROOT:
            raise ImportError(f"{package.__name__} was imported from {package.__path__[0]} before the command line")
    # Not first for good: in an installation ROOT is site-packages, which must not come before the standard library.
    # Still on the path, before the working directory, for worker processes that start a new interpreter.
    ours = [] if any(Path(entry).resolve() == ROOT for entry in others) else [str(ROOT)]
    sys.path[:] = [*others, *ours, *([] if here == ROOT else [str(here)])]
