"""Optuna's search over strategies and their options: ``hydra/sweeper=optuna compile=eager,regional,whole``.

Hydra's own plug-in (hydra-optuna-sweeper 1.3) ends at Optuna 2 and, with today's SQLAlchemy and alembic, breaks where
it stores a study; and it knows no options that exist for one strategy only. Optuna's ask and tell needs little around
it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from trainer.sweep.objectives import OBJECTIVES
from trainer.sweep.plan import COMPILE

if TYPE_CHECKING:
    import optuna

PLUGIN_MODULE = "hydra_plugins.crucible_optuna"
SAMPLERS = ("tpe", "random")
STUDY = "optuna.log"
"""Journal of the study, in the sweep's directory: a sweep that is gone on with goes on with its study."""


class OptunaSweeper(Sweeper):
    """Hydra sweeper: asks Optuna for cells, tells it what came of them.

    Args:
        objective: What a cell is judged by; one of ``OBJECTIVES``, which also say which way is better.
        objective_steps: Optimizer steps of ``seconds_to_steps``; None = as many as the cell trains.
        trials: Cells to run, those of the sweep that is gone on with included.
        at_once: Cells asked for at a time, for launchers that run several at once.
        sampler: ``tpe`` or ``random``.
        seed: Of the sampler; None = another one each time.
        params: Search space in YAML, by option, as on the command line; the command line wins.
    """

    __module__ = PLUGIN_MODULE

    def __init__(
        self,
        *,
        objective: str,
        objective_steps: int | None,
        trials: int,
        at_once: int,
        sampler: str,
        seed: int | None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._objective, self._steps = objective, objective_steps
        self._trials, self._at_once, self._sampler, self._seed = trials, at_once, sampler, seed
        self._params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the options and build the launcher. Raises ValueError, a line for each complaint."""
        if importlib.util.find_spec("optuna") is None:
            raise ValueError("hydra/sweeper=optuna needs optuna: pip install 'crucible-train[sweep]'")
        complaints = [
            f"hydra.sweeper.{name}={value!r} is not one of {choices}"
            for name, value, choices in (
                ("objective", self._objective, tuple(OBJECTIVES)),
                ("sampler", self._sampler, SAMPLERS),
            )
            if value not in choices
        ]
        complaints += [
            f"hydra.sweeper.{name}={value} must be at least 1"
            for name, value in (
                ("trials", self._trials),
                ("at_once", self._at_once),
                ("objective_steps", self._steps),
            )
            if value is not None and value < 1
        ]
        if "objective" not in config.hydra.launcher:
            complaints.append("hydra/sweeper=optuna needs a launcher that knows objectives: leave hydra/launcher out")
        if complaints:
            raise ValueError("\n".join(complaints))
        self._context, self._config = hydra_context, config
        with_objective = OmegaConf.merge(
            config,
            {"hydra": {"launcher": {"objective": self._objective, "objective_steps": self._steps}}},
        )
        assert isinstance(with_objective, DictConfig)
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=with_objective
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the trials, print the best. Raises ValueError for a space that cannot be searched."""
        import optuna

        from trainer.launcher import IsolatedLauncher

        space = self._space(arguments)
        directory = Path(str(self._config.hydra.sweep.dir))
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, directory / "multirun.yaml")
        study = self._study(directory)
        launcher = self._launcher
        if isinstance(launcher, IsolatedLauncher):
            launcher.trials = self._trials
            launcher.fixed = frozenset(
                f"{override.get_key_element()}={override.get_value_element_as_str()}"
                for override in space
                if not override.is_sweep_override()
            )
        done = len(study.get_trials(states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL)))
        if done:
            print(f"study goes on: {done} of {self._trials} trials were told before", flush=True)
        returns: list[Sequence[JobReturn]] = []
        while done < self._trials:
            trials = [study.ask() for _ in range(min(self._at_once, self._trials - done))]
            overrides = [self._overrides(trial, space) for trial in trials]
            results = launcher.launch(overrides, initial_job_idx=done)
            for trial, result in zip(trials, results, strict=True):
                _tell(study, trial, result)
            returns.append(results)
            done += len(trials)
        if isinstance(launcher, IsolatedLauncher) and returns:
            launcher.tell()
        print(self._verdict(study), flush=True)
        return returns

    def _space(self, arguments: Sequence[str]) -> list[Override]:
        """The parsed overrides, the choice of strategies first; of one option, the last one counts."""
        given = [f"{option}={value}" for option, value in self._params.items()]
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        parsed = parser.parse_overrides([*given, *arguments])
        last = {override.get_key_element(): override for override in parsed}
        if not any(override.is_sweep_override() for override in last.values()):
            raise ValueError("hydra/sweeper=optuna has nothing to choose: give an option several values")
        return sorted(last.values(), key=lambda override: override.key_or_group != "compile")

    def _study(self, directory: Path) -> optuna.Study:
        """The study of the sweep's directory; trials that a killed sweep left unfinished are asked again."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler if self._sampler == "tpe" else optuna.samplers.RandomSampler
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(directory / STUDY))),
            study_name="sweep",
            direction=OBJECTIVES[self._objective],
            sampler=sampler(seed=self._seed),
            load_if_exists=True,
        )
        if study.direction.name.lower() != OBJECTIVES[self._objective]:
            raise ValueError(f"hydra.sweeper.objective={self._objective!r} is not what the study of {directory} is for")
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.PRUNED)
            study.enqueue_trial(trial.params)
        return study

    def _overrides(self, trial: optuna.Trial, space: Sequence[Override]) -> list[str]:
        """Ask for every option; those of a strategy only where the trial has chosen that strategy."""
        chosen: list[str] = []
        strategies: set[str] | None = None
        for override in space:
            key = override.get_key_element()
            if COMPILE.match(key) and "." in key:
                if strategies is None:
                    config = self._context.config_loader.load_sweep_config(self._config, chosen)
                    strategies = {str(name) for name in config.compile}
                if key.split(".")[1] not in strategies:
                    continue
            chosen.append(f"{key}={suggested(trial, key, override)}")
        return chosen

    def _verdict(self, study: optuna.Study) -> str:
        import optuna

        complete = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        if not complete:
            return f"best by {self._objective}: none, every trial failed"
        best = study.best_trial
        words = " ".join(f"{name}={value}" for name, value in best.params.items())
        return f"best by {self._objective}: {best.value:.6g} with {words} (trial {best.number} of {len(study.trials)})"


def suggested(trial: optuna.Trial, key: str, override: Override) -> str:
    """A value for one option, as text: ``a,b``, ``choice``, ``range`` and ``interval`` (``tag(log, ...)``) are asked
    for, anything else stays as it is."""
    if not override.is_sweep_override():
        return override.get_value_element_as_str()
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return str(trial.suggest_categorical(key, list(override.sweep_string_iterator())))
    assert value.start is not None
    assert value.end is not None
    log = "log" in value.tags
    if isinstance(value.start, int) and isinstance(value.end, int):
        return str(trial.suggest_int(key, value.start, value.end, log=log))
    return repr(trial.suggest_float(key, float(value.start), float(value.end), log=log))


def _tell(study: optuna.Study, trial: optuna.Trial, result: JobReturn) -> None:
    import optuna

    value = result.return_value if result.status == JobStatus.COMPLETED else None
    if value is None or not math.isfinite(value):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, float(value))
