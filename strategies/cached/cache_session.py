"""One run's use of an artifact store: fetch and load before anything compiles, verify and store after training.

Nothing that goes wrong here ends the run: it continues cold, and notes and record say why.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

from strategies.cached.store import ArtifactStore, Bundle, Refused, distrust_of, read_libraries
from strategies.compile_errors import one_line
from strategies.loop_protocol import gathered
from strategies.torch_patches import compiling_in

if TYPE_CHECKING:
    from strategies.base import Program

MIB = 1 << 20
MAX_NAMED = 5
"""Compiled functions that a note names; the record has all of them."""
REVISION = 5
"""Raised when strategies let the compiler make something else of the same program, or bundles look different."""
T = TypeVar("T")


class Options(Protocol):
    """What is read here of ``Cached``, which says what it means."""

    name: ClassVar[str]
    max_gib: float
    timeout_seconds: float

    @property
    def url_used(self) -> str: ...

    def store(self) -> ArtifactStore: ...


class Session:
    """From here to ``close``, Inductor and Triton compile into a directory of this run's own.

    Of the processes of one host that train one program together, the first fetches and stores; all use its directory.
    """

    def __init__(self, options: Options, program: Program) -> None:
        """Fetch, verify and hand to torch what the store holds for ``program``. Raises what keeps it from having a
        directory, on all processes of the group."""
        self._options, self._program = options, program
        place, failed = None, None
        try:
            self._described = facts_of(program, leave_out=options.name)
            self._fingerprint = fingerprint_of(self._described)
            place = socket.gethostname(), self._fingerprint  # of which a GPU's index is part
        except Exception as error:  # a model that cannot be described
            failed = error
        places = gathered(place)  # whatever happens on one process
        if None in places:
            raise failed or ValueError("another process cannot describe its model")
        leader = places.index(place)
        self._leads = leader == (torch.distributed.get_rank() if len(places) > 1 else 0)
        self._facts: dict[str, Any] = {"state": "cold", "reason": None, "url": options.url_used}
        """What goes into the record."""
        self._facts["fingerprint"] = self._fingerprint
        self._loaded: list[Bundle] = []
        self._stack = contextlib.ExitStack()
        shared = None
        try:
            if self._leads:
                self._directory = self._own_directory()
                self._stack.enter_context(compiling_in(self._directory))
                self._fetch_and_load()
                shared = self._directory, self._facts
        finally:
            shared = gathered(shared)[leader]
        if not self._leads:
            if shared is None:
                raise OSError("the first process of this host has no place for it")
            self._directory, self._facts = shared
            self._stack.enter_context(compiling_in(self._directory))
        program.report[options.name] = self._facts

    def _note(self, line: str) -> None:
        self._program.notes.append(f"cached: {line}")

    def _own_directory(self) -> Path:
        """Make a directory inside the one that Inductor uses (the user's choice of disk), to compile in.

        Only so is it known what belongs to a run. What an earlier run left in the usual directory would count as a hit
        here and be missing on the next machine. Where other users could put code into Inductor's, it lies in the
        temporary folder. It is removed when the process exits: compiled code may load a library when it runs for the
        first time, later than the session. So this is not ``torch._inductor.utils.fresh_cache``.
        """
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        usual: str | None = cache_dir()
        if reason := distrust_of(os.path.realpath(str(usual))):
            usual = None
            self._note(f"compiles in {tempfile.gettempdir()} and not in Inductor's cache folder, because {reason}")
        directory = Path(tempfile.mkdtemp(prefix="cached-", dir=usual))
        made_by = os.getpid()

        def remove() -> None:
            if os.getpid() == made_by:  # not in a process that was forked from it
                shutil.rmtree(directory, ignore_errors=True)

        atexit.register(remove)
        return directory

    def _fetch_and_load(self) -> None:
        self._counters, self._first_metric = _read_counters(), len(get_compilation_metrics())
        began, url = time.perf_counter(), self._options.url_used
        refused: list[str] = []

        def fetch() -> tuple[list[Bundle], list[str]]:
            store, fetched, refused = self._options.store(), list[Bundle](), list[str]()
            for name in store.names(self._fingerprint):
                try:
                    fetched.append(store.load(name, fingerprint=self._fingerprint))
                except Refused as reason:
                    refused.append(f"bundle {name[-12:]} refused: {reason}")
            return fetched, refused

        try:
            fetched, refused = within(self._options.timeout_seconds, fetch)
            for bundle in fetched:
                try:
                    if bundle.artifacts and torch.compiler.load_cache_artifacts(bundle.artifacts) is None:
                        raise ValueError("torch cannot read its artifacts")
                    for path, data in bundle.libraries.items():
                        file = self._directory / path
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.write_bytes(data)
                    self._loaded.append(bundle)
                except Exception as error:
                    refused.append(f"bundle {bundle.name[-12:]} refused: {one_line(error)}")
            reason = "; ".join(refused) or "nothing is stored yet for this model, these strategies and this machine"
        except Exception as error:
            reason = f"the store cannot be read: {one_line(error)}"
        seconds = round(time.perf_counter() - began, 4)
        names = {name for bundle in self._loaded for name in bundle.manifest["artifacts"]}
        size = sum(bundle.size for bundle in self._loaded)
        self._facts.update(artifacts_loaded=len(names), bytes_loaded=size, load_seconds=seconds, refused=refused)
        if self._loaded:
            self._facts["state"] = "warm"
            self._note(f"{len(names)} artifacts ({size / MIB:.1f} MiB) loaded in {seconds:.2f} s from {url}")
            for each in refused:
                self._note(f"not loaded: {each}")
        else:
            self._facts["reason"] = reason
            self._note(f"cold start: {reason} ({url})")

    def close(self) -> None:
        """Compare with what was compiled, store what is new, and restore the usual directories."""
        with self._stack:
            if not self._leads:
                return
            try:
                libraries = read_libraries(self._directory)
                if self._has_new(libraries):
                    self._store(libraries)
            except Exception as error:
                self._facts["save_error"] = one_line(error)
                self._note(f"nothing stored: {one_line(error)} ({self._options.url_used})")

    def _has_new(self, libraries: dict[str, bytes]) -> bool:
        """Report what was compiled and what came from the cache; whether there is something to store."""
        now = {name: value - self._counters[name] for name, value in _read_counters().items()}
        # Others are probes of the processor, which a thread may have begun before the directory was ours.
        kernels = {path for path in libraries if path.endswith(".main.so") or path.startswith("triton/")}
        built = len(kernels - {path for bundle in self._loaded for path in bundle.libraries})
        compiled = now["graph_misses"] + now["graph_bypasses"]
        anew = compiled_anew(self._first_metric) if compiled else []
        self._facts.update(now, libraries_built=built, compiled_anew=anew)
        if not compiled + now["graph_hits"]:
            self._facts.update(state="idle", reason="nothing was compiled by Inductor, which alone can be cached")
            self._note(f"nothing to cache: {self._facts['reason']}")
            return False
        if self._loaded and compiled:
            more = f"; and {len(anew) - MAX_NAMED} more" if len(anew) > MAX_NAMED else ""
            reason = "; ".join(anew[:MAX_NAMED]) + more or "torch does not say which"
            self._facts.update(state="partly", reason=reason)
            self._note(
                f"loaded {self._facts['artifacts_loaded']} artifacts but {compiled} graphs were compiled anew: {reason}"
            )
        elif self._loaded:
            timed = f", but {now['kernels_timed']} timings of kernels did not" if now["kernels_timed"] else ""
            self._note(f"warm start: all {now['graph_hits']} graphs came from the cache{timed}")
        return bool(now["graph_misses"] or built or not self._loaded)

    def _store(self, libraries: dict[str, bytes]) -> None:
        data, artifacts = b"", [f"library {path}" for path in libraries]
        if (saved := torch.compiler.save_cache_artifacts()) is not None:
            data = saved[0]
            artifacts += [f"{kind} {key}" for kind, keys in saved[1].artifacts.items() for key in keys]
        manifest = {"fingerprint": self._fingerprint, "facts": self._described, "artifacts": artifacts}
        max_bytes = self._options.max_gib * 2**30
        if (size := len(data) + sum(map(len, libraries.values()))) > max_bytes:
            raise ValueError(f"{size / MIB:.1f} MiB are more than max_gib allows")

        def write() -> tuple[int, int]:
            store = self._options.store()
            if (reason := store.distrust_of_writes()) is not None:
                raise ValueError(reason)
            name, written = store.save(data, libraries, manifest)
            for bundle in self._loaded:
                if bundle.name != name and set(bundle.manifest["artifacts"]) <= set(artifacts):
                    store.remove(bundle.name)  # the new bundle holds all of it
            return written, len(store.evict(max_bytes=max_bytes, keep=[name]))

        began = time.perf_counter()
        size, evicted = within(self._options.timeout_seconds, write)
        seconds = round(time.perf_counter() - began, 4)
        self._facts.update(
            artifacts_saved=len(artifacts), bytes_saved=size, save_seconds=seconds, bundles_evicted=evicted
        )
        self._note(
            f"{len(artifacts)} artifacts ({size / MIB:.1f} MiB) stored at {self._options.url_used}"
            + (f"; {evicted} bundles evicted for max_gib" if evicted else "")
        )


def compiled_anew(first: int) -> list[str]:
    """What Inductor generated code for since the metric ``first``: user functions, and why torch came back to them."""
    found = []
    for metric in get_compilation_metrics()[first:]:
        if metric.inductor_code_gen_cumulative_compile_time_us and metric.co_name:
            why = f" ({metric.recompile_reason.strip().splitlines()[0]})" if metric.recompile_reason else ""
            found.append(f"{metric.co_name} {metric.co_filename}:{metric.co_firstlineno}{why}")
    return list(dict.fromkeys(found))


def _read_counters() -> dict[str, int]:
    """Graphs that Inductor's cache had, had not, and could not hold; and how often a kernel was timed on a GPU."""
    inductor = counters["inductor"]
    return {
        "graph_hits": inductor["fxgraph_cache_hit"],
        "graph_misses": inductor["fxgraph_cache_miss"],
        "graph_bypasses": inductor["fxgraph_cache_bypass"],
        "kernels_timed": sum(
            count for name, count in inductor.items() if re.fullmatch(r"benchmarking\.\w+\.benchmark_gpu", name)
        ),
    }


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do ``work``; raises what it raises, or TimeoutError after ``seconds``, when nobody waits for it any longer."""
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # A daemon, which no executor's threads are: the process may end without it.
    threading.Thread(target=do, name="artifact-store", daemon=True).start()
    if not wait([done], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done.result()


def facts_of(program: Program, *, leave_out: str) -> dict[str, Any]:
    """Everything that the fingerprint is made of, readable; the strategy named ``leave_out`` compiles nothing."""
    compiling = [one for one in program.strategies if one.name != leave_out]
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "revision": REVISION,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": triton,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "device": _device_facts(program.device or torch.device("cpu")),
        "precision": program.precision,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "strategies": [strategy.facts() for strategy in compiling],
        "model": model_digest(program.module),
    }


def fingerprint_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def _device_facts(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on. Inductor's keys hold the index of the device; C++ is built for the very CPU, and
    a library built for another one may end the process."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        return {"name": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "index": index}
    facts = {"name": f"{device.type} {device.index or 0}", "isa": torch.backends.cpu.get_cpu_capability()}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.is_file() else []
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    named = {name.strip().lower(): value.strip() for name, value in pairs}
    flags = " ".join(named[name] for name in ("flags", "features") if name in named)
    return {**facts, "processor": named.get("model name") or platform.processor(), "flags": flags}


def model_digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for path, child in module.named_modules():
        digest.update(f"{path}:{type(child).__module__}.{type(child).__qualname__}\n".encode())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for path, tensor in tensors:
            text = f"{kind} {path}:{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n"
            digest.update(text.encode())
    return digest.hexdigest()
