"""The process of a run: its signals and its end, what started it, and further ones that start early.

Ctrl-C, SIGTERM and SIGHUP: the first asks the run to stop at the next step boundary, the second stops it where it is.
Before the first step is trained there is nothing to save, and the first one stops it, a compile included.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from trainer.settings import TrainerConfig


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST_SECONDS = 1.0
"""A signal that comes again within as long is the same request: ``timeout`` sends it to its command and then to the
group that this is in, launchers to each process of a group that has got it."""
PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>: the signal that a process gets when its parent dies."""


class Interrupted(BaseException):
    """The run was asked to stop at once. Not an Exception, so that nothing swallows it on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def present_handlers() -> dict[int, Any]:
    """The handlers of ``SIGNALS`` now, by signal; without a SIGHUP that is ignored, as ``nohup`` has it. In a job of
    SLURM's also of SIGUSR1, which ``sbatch --signal=USR1@120`` sends before the time is up, unless something has it."""
    found: dict[int, Any] = {signum: signal.getsignal(signum) for signum in SIGNALS}
    if found[signal.SIGHUP] == signal.SIG_IGN:
        del found[signal.SIGHUP]
    if "SLURM_JOB_ID" in os.environ and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        found[signal.SIGUSR1] = signal.SIG_DFL
    return found


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Set handlers of signals, by signal, and put the former ones back; a handler that is not Python's stays, and
    Python lets no thread but the main one set any."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: former for signum in handlers if (former := signal.getsignal(signum)) is not None}
    for signum in before:
        signal.signal(signum, handlers[signum])
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def uninterrupted_import() -> Iterator[None]:
    """Let signals wait while torch is imported, and import without Python's garbage collector.

    An exception in the middle of that import is swallowed by a library, leaves a module half there, or meets C++ that
    ends the process by SIGABRT (seen at ``torch.distributed``). The collector takes a fifth of the time: it visits
    again and again what stays for good, and later in full collections while training.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    before, collects = signal.pthread_sigmask(signal.SIG_BLOCK, present_handlers()), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_at_end_of_parent(signum: int) -> None:
    """Ask the kernel (Linux) for ``signum`` when this process's parent dies; 0 for nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Inside, nothing is raised when a data worker dies: torch does that from a signal handler, wherever the main
    thread is. For what must be written at the end of a run whose whole process group was asked to stop."""
    return signal_handlers({signal.SIGCHLD: signal.SIG_DFL})


class StopRequest:
    """Holds the signal that asked the run to stop, and the process's signal handlers while the run lasts.

    Lightning turns a Ctrl-C into ``sys.exit(1)`` in the middle of a step and a SIGTERM into exit code 0
    (lightning #19916); stopping at a step boundary instead is what makes the last checkpoint exact.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signum: int | None = None
        self.in_training = False
        """Whether a loop is there that will notice the request at its next step, and has something to save."""
        self._say = say
        self._asked_seconds = -math.inf
        self._process = os.getpid()
        self._signals: tuple[int, ...] = ()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._signals = tuple(present_handlers())
        self._stack.enter_context(signal_handlers(dict.fromkeys(self._signals, self._handle)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def install(self) -> None:
        """Set the handlers again, after Lightning has set its own."""
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                signal.signal(signum, self._handle)

    def check(self) -> None:
        """Raise Interrupted where a signal came and its exception was swallowed, as in a finalizer."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A data loader's worker, forked with these handlers and signalled with the whole process group: the step
            # that is under way still needs it. (SIGTERM never gets here: torch's workers end by it at once.)
            return
        asked, self._asked_seconds = self._asked_seconds, time.monotonic()
        if signum == self.signum and self._asked_seconds - asked < ONE_REQUEST_SECONDS:
            return
        first, self.signum = self.signum is None, signum
        if not (first and self.in_training):
            raise Interrupted(signum)
        name = signal.Signals(signum).name
        self._say(f"{name}: stopping after this step with a checkpoint; once more stops at once")


class _Lossy(io.FileIO):
    """A file that drops what cannot be written: its disk is full, the reader of a pipe has left, or is slow where the
    pipe does not wait for it."""

    def write(self, data: Any) -> int:
        """Write ``data``; it counts as written in any case."""
        try:
            written = super().write(data)
        except OSError:
            return len(data)
        return len(data) if written is None else written


def keep_streams() -> None:
    """From now on nothing raises because it prints, not even Python as it exits.

    A closed stream leads to the null device. The next file that is opened would else get its number, and whatever
    libraries and child processes print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # what is opened then gets the lowest number that is free, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if name == "stdin" or stream is not getattr(sys, f"__{name}__"):
            continue  # or somebody reads or captures it within this process
        file, unbuffered = _Lossy(number, "w", closefd=False), getattr(stream, "write_through", False)
        lossy = io.TextIOWrapper(
            file if unbuffered else io.BufferedWriter(file),  # as Python itself does for -u
            encoding=getattr(stream, "encoding", "utf-8"),
            errors=getattr(stream, "errors", "backslashreplace"),
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=unbuffered,
        )
        setattr(sys, name, lossy)


@contextlib.contextmanager
def quick_exit() -> Iterator[None]:
    """For the end of a command: what raises SystemExit inside ends the process, without the seconds in which Python
    takes every module of torch and Lightning apart (3 to 10). Never in a user's own script.

    This is how the processes of ``multiprocessing`` end: threads are joined, exit functions run (data workers, compile
    workers, TensorBoard, temporary folders). What Python would still have done is to close files that nobody has
    closed, so that is done here; memory, descriptors and the device are the system's to take back.
    https://github.com/python/cpython/blob/v3.12.0/Lib/multiprocessing/process.py (``_bootstrap``)

    A Ctrl-C that nothing inside has caught came while modules were imported: no traceback, there is nothing to stop.
    """
    try:
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
    except SystemExit as stopped:
        if not isinstance(stopped.code, int | None):  # a message, which Python prints
            raise
        for last in (threading._shutdown, atexit._run_exitfuncs, _flush_files):  # type: ignore[attr-defined]
            with contextlib.suppress(KeyboardInterrupt):
                last()
        os._exit((stopped.code or 0) & 0xFF)


def _flush_files() -> None:
    """Close what is open for writing: text into its bytes, compressed bytes into their file, that to the disk."""
    gc.unfreeze()
    objects = gc.get_objects()
    # By their bases in C: to ask an abstract class about thousands of others takes half a second.
    bases = {io.BytesIO.__base__.__base__, zipfile.ZipFile}  # type: ignore[union-attr]
    kinds = {kind for kind in set(map(type, objects)) if not bases.isdisjoint(kind.__mro__)}
    files = [one for one in objects if type(one) in kinds and not isinstance(one, io.BytesIO | io.RawIOBase)]
    to_disk = io.BufferedWriter | io.BufferedRandom
    for one in sorted(files, key=lambda one: 0 if isinstance(one, io.TextIOBase) else 1 + isinstance(one, to_disk)):
        with contextlib.suppress(Exception):  # it is closed
            # A thread that waits in a reader keeps its lock, for ever.
            if isinstance(one, zipfile.ZipFile) or one.writable():
                one.close()


LIGHTNING_LOGGERS = ("lightning.pytorch", "lightning.fabric")
"""Quiet in a run: its heading says more than banners and tips."""


PACKAGES = tuple(
    f"{os.path.dirname(os.path.dirname(__file__))}/{name}/" for name in ("scripts", "strategies", "tasks", "trainer")
)
"""Folders of this project's code."""


@contextlib.contextmanager
def process_settings(config: TrainerConfig) -> Iterator[None]:
    """Matrix precision for fp32 (TF32 on GPUs that have it), quiet libraries, and our warnings as a line without their
    place in our code, for the length of a run."""
    import torch
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    matmul = torch.get_float32_matmul_precision()
    levels = {name: logging.getLogger(name).level for name in LIGHTNING_LOGGERS}
    formatted = warnings.formatwarning

    def short(message: Any, category: Any, file: str, *place: Any) -> str:
        return f"warning: {message}\n" if file.startswith(PACKAGES) else formatted(message, category, file, *place)

    if config.matmul_precision != matmul:  # to set what is there is a change to Dynamo, which compiles again
        torch.set_float32_matmul_precision(config.matmul_precision)
    for name in LIGHTNING_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning's advice (more workers, a smaller logging interval) concerns choices made here on purpose.
            warnings.simplefilter("ignore", PossibleUserWarning)
            # A resumed run writes into a directory of its own; its best checkpoint is judged anew there.
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            # Lightning 2.6 asks torch 2.15's pytree in a way that the newer one deprecates; nothing a user could fix.
            warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.pytorch.utilities._pytree")
            warnings.formatwarning = short  # type: ignore[assignment]
            yield
    finally:
        warnings.formatwarning = formatted
        if torch.get_float32_matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# ---- what started this process ---------------------------------------------------------------------------------------
# Lightning's ``TorchElasticEnvironment`` and ``SLURMEnvironment`` read the same variables.

BY_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
"""What torchrun sets (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""
BY_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_ID")
"""What srun sets (https://slurm.schedmd.com/srun.html); ``SLURM_NTASKS_PER_NODE`` where it was asked for."""
OWN_SHELL = ("bash", "interactive")
"""Names of jobs in which somebody types commands; Lightning takes them for no SLURM either."""
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Environment variables of a process's rank; the first that is set counts, as in Lightning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What started this process together with others; the user's own command line did not."""

    by: str
    """``torchrun``, ``SLURM``, or ``RANK`` where another launcher has set torchrun's variables."""
    rank: int
    """Among all processes; 0 prints and writes."""
    local_rank: int
    processes: int
    """On all hosts."""
    per_host: int
    hosts: int
    job: str | None = None
    """SLURM's number of the job and of its step, the same when the job is put into the queue again."""

    @property
    def name(self) -> str:
        return self.by if self.job is None else f"{self.by} {self.job}"

    @property
    def place(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """What started this process, by its environment; None where it was started alone.

    Raises ValueError where it says so by halves: the process would wait for others in vain, or train alone beside them.
    """
    if "RANK" in environ:
        names, found, advice = BY_RANK, "RANK", "start every process by torchrun"
    elif environ.get("SLURM_NTASKS", "1") != "1" and environ.get("SLURM_JOB_NAME") not in OWN_SHELL:
        names, found = BY_SRUN, "SLURM_NTASKS"
        advice = "give sbatch --nodes and --ntasks-per-node, and start by srun"
        if "SLURM_STEP_ID" not in environ:
            tasks = f"SLURM_NTASKS={environ['SLURM_NTASKS']} is set"
            raise ValueError(f"{tasks} and SLURM_STEP_ID is not: put srun before the command, or ask for one task")
    else:
        return None
    if missing := [name for name in names if name not in environ]:
        what = f"{found}={environ[found]} is set and {', '.join(missing)} not"
        raise ValueError(f"{what}: {advice}, or unset {found}")
    if wrong := [name for name in names[:5] if not environ[name].isdecimal()]:
        raise ValueError(f"{wrong[0]}={environ[wrong[0]]!r} is not a number: {advice}")
    rank, local_rank, processes, per_host, hosts = (int(environ[name]) for name in names[:5])
    by, job = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK", None
    if names is BY_SRUN:
        by, job = "SLURM", f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    else:
        hosts = processes // max(per_host, 1)
    if per_host * hosts != processes or not rank < processes:
        raise ValueError(
            f"{names[2]}={processes} is not a multiple of {names[3]}={per_host}, or too few for rank {rank}: every "
            "host has to start as many processes"
        )
    return Launch(by=by, rank=rank, local_rank=local_rank, processes=processes, per_host=per_host, hosts=hosts, job=job)


def is_first_process() -> bool:
    """Whether this process, by its environment, is the one that claims and writes."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0"


def rank_prefix(environ: Mapping[str, str], *, alike: bool) -> str | None:
    """What to print before each line of an error in this process: which it is, if not rank 0. None for nothing at all:
    what all processes of a host find ``alike``, one of them says."""
    try:
        launch = detect_launch(environ)
    except ValueError:  # the error itself, perhaps
        launch = None
    if PARENT in environ:  # the first process of this host finds it, too, or says which one has ended
        return None
    if launch is None or launch.rank == 0:
        return ""
    return None if alike and launch.local_rank > 0 else f"{launch.place}: "


def devices_of_launch(
    launch: Launch | None, devices: int | str | None, num_nodes: int | None
) -> tuple[int | str | None, int | None]:
    """``trainer.devices`` and ``trainer.num_nodes`` as ``launch`` has them where they are None.

    Raises ValueError for values of the user's that differ from what was started.
    """
    if launch is None:
        if num_nodes not in (None, 1):
            raise ValueError(
                f"trainer.num_nodes={num_nodes}: nothing has started processes on other hosts; start the command by "
                f"torchrun --nnodes={num_nodes} on each of them, or by srun"
            )
        return devices, num_nodes
    asked = len(devices.split(",")) if isinstance(devices, str) and "," in devices else devices
    several = f"{launch.by} has started {launch.per_host} processes on each of {launch.hosts} hosts"
    if asked not in (None, "auto", -1, "-1", launch.per_host, str(launch.per_host)):
        raise ValueError(f"trainer.devices={devices}, and {several}: leave it out, or start as many")
    if num_nodes not in (None, launch.hosts):
        raise ValueError(f"trainer.num_nodes={num_nodes}, and {several}: leave it out, or start them on as many")
    return (devices if asked is not devices else launch.per_host), launch.hosts if launch.hosts > 1 else num_nodes


# ---- further processes of one host -----------------------------------------------------------------------------------

BY_PROCESSES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp2")
"""Those of ``trainer.strategy`` that take a process for each device."""
PARENT = "CRUCIBLE_PARENT"
"""Holds, in a process that ``start_others`` has started, which one did."""

others: list[subprocess.Popen[bytes]] = []
"""Processes that ``start_others`` has started, by rank from 1 on."""
_ports: list[socket.socket] = []
"""Holds the port at which they will meet, so that the system gives it to nobody else."""


def start_early(config: TrainerConfig, run_dir: Path) -> None:
    """Start the others as soon as their number is known: importing torch takes them seconds, as it does this one."""
    if isinstance(config.devices, int) and config.strategy in BY_PROCESSES:
        start_others(config.devices - 1, run_dir)


def start_others(count: int, run_dir: Path) -> None:
    """Run this command again for ``count`` further devices, in ``run_dir``; each ends with this process.

    They and this one have the environment by which Lightning knows that it has none to start, see
    https://lightning.ai/docs/pytorch/stable/clouds/cluster_intermediate_1.html
    """
    if count < 1:
        return
    from trainer.sweep.plan import quoted  # not for who imports the callback alone

    spec = sys.modules["__main__"].__spec__
    program = [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name]
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store, which listens there
    port.bind(("", 0))
    _ports.append(port)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    os.environ.update({**address, "NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count + 1)})
    command = [sys.executable, *program, *sys.argv[1:], f"hydra.run.dir={quoted(run_dir)}"]
    for rank in range(1, count + 1):
        environment = {**os.environ, "LOCAL_RANK": str(rank), PARENT: str(os.getpid())}
        others.append(subprocess.Popen(command, env=environment))


def end_with_first() -> None:
    """For a process of ``start_others``: it ends with the one that started it, until all watch over each other."""
    if (parent := os.environ.get(PARENT)) is not None:
        signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(0)
