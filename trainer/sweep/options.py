"""Options of the launchers: ``hydra.launcher.<option>=...``, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trainer.sweep.objectives import OBJECTIVES

OUTPUTS = ("file", "terminal")
CACHES = ("own", "shared")


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """What every launcher understands."""

    rounds: int = 1
    """Turns of every cell; with more than one, arms take turns (A B A B) and the record says which turn it was."""
    interleave: bool | None = None
    """Whether arms take turns within each workload and seed (``seed=0,1,2``), so that what changes on a machine with
    time hits all of them alike; null = with more than one round, and where cells run one at a time."""
    arms: list[str] = field(default_factory=list)
    """Values of ``compile=`` with further overrides after blanks, for what a list of values cannot say:
    ``["eager","whole compile.whole.mode=reduce-overhead"]``."""
    timeout_seconds: float | None = None
    """Longest time of one cell; then it is stopped, and given up as failed. Null = no limit."""
    grace_seconds: float = 30.0
    """Time that a cell has to stop by itself when its time is up, before it is killed."""
    caches: str = "own"
    """Compile caches of cells without ``repeat``: ``own`` = empty ones for each, so that none finds what the one before
    it compiled, though a store of ``compile=cached`` stays; ``shared`` = the machine's, as they are: compile times then
    say little, and cells that repeat start sooner."""
    keep_caches: bool = False
    """Whether a cell's own compile caches are kept when it and its warm twin have finished; they can take gigabytes."""
    objective: str = "final_loss"
    """What a sweeper such as Optuna's gets from a cell: ``final_loss``, ``seconds_to_steps`` (see the next) or
    ``useful_tokens_per_second``."""
    objective_steps: int | None = None
    """Optimizer steps of ``seconds_to_steps``; null = as many as the cell trains."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        if complaints := self.complaints():
            raise ValueError("\n".join(complaints))

    def complaints(self) -> list[str]:
        """What is wrong with the options, a line each."""
        found = []
        if self.rounds < 1:
            found.append(f"hydra.launcher.rounds={self.rounds} must be at least 1")
        for name in ("timeout_seconds", "grace_seconds", "objective_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(
                    f"hydra.launcher.{name}={value} must be above 0" + (", or null for none" * (name[0] == "t"))
                )
        if self.objective not in OBJECTIVES:
            found.append(f"hydra.launcher.objective={self.objective!r} is not one of {tuple(OBJECTIVES)}")
        if self.caches not in CACHES:
            found.append(f"hydra.launcher.caches={self.caches!r} is not one of {CACHES}")
        if any(not arm.strip() for arm in self.arms):
            found.append(f"hydra.launcher.arms={self.arms} holds an arm without a value for compile=")
        return found

    @property
    def takes_turns(self) -> bool:
        """Whether arms are interleaved."""
        return self.rounds > 1 if self.interleave is None else self.interleave


@dataclass(kw_only=True, slots=True)
class LocalOptions(SweepOptions):
    """Options of ``hydra/launcher=isolated`` and ``joblib``: cells on this machine."""

    parallel: int = 1
    """Cells at once, on a GPU each where there are GPUs; -1 = as many as there are GPUs. One is what timings are fair
    with."""
    gpus_per_cell: int = 1
    """GPUs of each cell, for ``parallel`` above 1."""
    output: str = "file"
    """Where a cell's output goes: ``file`` (``output.txt`` in its directory) or ``terminal``."""

    def complaints(self) -> list[str]:
        """What is wrong with the options, a line each."""
        # slots=True makes a new class, which a bare super() does not know.
        found = super(LocalOptions, self).complaints()
        if self.parallel < 1 and self.parallel != -1:
            found.append(f"hydra.launcher.parallel={self.parallel} must be at least 1, or -1 for the number of GPUs")
        if self.gpus_per_cell < 1:
            found.append(f"hydra.launcher.gpus_per_cell={self.gpus_per_cell} must be at least 1")
        if self.output not in OUTPUTS:
            found.append(f"hydra.launcher.output={self.output!r} is not one of {OUTPUTS}")
        if self.output == "terminal" and self.parallel != 1:
            found.append(f"hydra.launcher.parallel={self.parallel} needs hydra.launcher.output=file: outputs would mix")
        return found

    @property
    def takes_turns(self) -> bool:
        """Whether arms are interleaved: side by side on several devices only where turns are asked for."""
        return (
            self.parallel == 1
            if self.interleave is None and self.rounds == 1
            else super(LocalOptions, self).takes_turns
        )


@dataclass(kw_only=True, slots=True)
class SubmititOptions(SweepOptions):
    """Options of ``hydra/launcher=submitit_slurm`` and ``submitit_local``; null = what the cluster does by itself."""

    executor: str = "slurm"
    """``slurm``, or ``local`` for processes on this machine, to try things out."""
    timeout_min: int = 60
    """Minutes of one job: one cell, or the cells that must come one after the other (``repeat``, turns)."""
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    """One: a cell starts the processes of ``trainer.devices`` by itself."""
    nodes: int = 1
    mem_gb: float | None = None
    stderr_to_stdout: bool = True
    slurm_partition: str | None = None
    slurm_qos: str | None = None
    slurm_account: str | None = None
    slurm_constraint: str | None = None
    slurm_gres: str | None = None
    slurm_time: str | None = None
    """As sbatch takes it; null = ``timeout_min``."""
    jobs_at_once: int = 256
    """Jobs that wait in the queue or run; the next ones are submitted as these end."""
    slurm_setup: list[str] = field(default_factory=list)
    """Shell commands before each job, ``module load cuda`` for instance."""
    slurm_additional_parameters: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch."""
    slurm_signal_delay_s: int = 120
    """Seconds between the warning that a job's time is up or that it is preempted, and its end."""
    max_num_timeout: int = 3
    """Times that a job whose time is up is put into the queue again, to go on from its checkpoint."""

    def complaints(self) -> list[str]:
        """What is wrong with the options, a line each."""
        found = super(SubmititOptions, self).complaints()
        if self.executor not in ("slurm", "local"):
            found.append(f"hydra.launcher.executor={self.executor!r} is not one of ('slurm', 'local')")
        for name in ("timeout_min", "jobs_at_once"):
            if getattr(self, name) < 1:
                found.append(f"hydra.launcher.{name}={getattr(self, name)} must be at least 1")
        if self.tasks_per_node != 1 or self.nodes != 1:
            found.append("hydra.launcher.nodes and tasks_per_node must be 1: a cell is one process that starts its own")
        return found

    def parameters(self) -> dict[str, object]:
        """What submitit is told: everything that is set and is its own."""
        ours = {option.name for option in fields(SweepOptions)} | {"executor", "jobs_at_once", "max_num_timeout"}
        named = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in ours}
        return {name: value for name, value in named.items() if value not in (None, [], {})}
