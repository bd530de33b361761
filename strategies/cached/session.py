"""One run's use of an artifact store: fetch and load before anything compiles, verify and store after training.

Nothing that goes wrong here ends the run: it continues cold, and ``notes`` and ``facts`` say why.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

from strategies.cached.store import Loaded, Refused, distrust_of, pack, read_libraries, unpack
from strategies.credentials import hidden
from strategies.torch_patches import compiling_in

if TYPE_CHECKING:
    from torch import nn

    from strategies.base import Program
    from strategies.cached import Cached


MIB = 1 << 20
MAX_NAMED = 5
"""Compiled functions that a note names; the record has all of them."""


class Session:
    """From ``open`` to ``close``, Inductor and Triton compile into a directory of this run's own.

    Of the processes of one host that train one program together, the first fetches and stores; all use its directory.
    ``facts`` are those of ``facts_of``.
    """

    def __init__(self, options: Cached, url: str, facts: dict[str, Any]) -> None:
        self._options, self._url, self._program_facts = options, url, facts
        self._fingerprint = fingerprint_of(facts)
        self.facts: dict[str, Any] = {"state": "cold", "reason": None, "url": url, "fingerprint": self._fingerprint}
        """What goes into the record."""
        self.notes: list[str] = []
        """Lines for the user; the owner takes them."""
        self.findings: dict[str, Any] = {}
        """Of the runs that stored the loaded bundles, see ``Program.findings``."""
        self._loaded: list[Loaded] = []
        self._libraries: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._leads = True
        self._directory = Path()
        self.place = socket.gethostname(), self._fingerprint
        """The same in the processes that share a directory; a GPU's index is part of the fingerprint."""

    # ---- before anything compiles ----------------------------------------------------------------------------------

    def open(self, leader: int = 0) -> None:
        """Fetch, verify and hand to torch what the store holds for this fingerprint, or let the process of rank
        ``leader`` do it; all processes of the group call it."""
        self._leads = leader == rank()
        shared = None
        try:
            if self._leads:
                self._open()
                shared = self._directory, self.facts, self.findings
        finally:
            shared = gathered(shared)[leader]
        if not self._leads:
            if shared is None:
                raise OSError("the first process of this host has no place for it")
            self._directory, self.facts, self.findings = shared
            self._stack.enter_context(compiling_in(self._directory))

    def _open(self) -> None:
        self._directory = self._stack.enter_context(own_directory(self.notes))
        self._counters = _read_counters()
        self._first_metric = len(get_compilation_metrics())
        began = time.perf_counter()
        try:
            fetched, refused = within(self._options.timeout_seconds, self._fetch)
            for loaded in fetched:
                self._load(loaded, refused)
            reason = "; ".join(refused) or "nothing is stored yet for this model, these strategies and this machine"
        except Exception as error:
            reason, refused = f"the store cannot be read: {reason_of(error)}", []
        seconds = round(time.perf_counter() - began, 4)
        for loaded in self._loaded:
            self.findings.update(loaded.manifest["findings"])
        names = {name for loaded in self._loaded for name in loaded.manifest["artifacts"]}
        size = sum(len(loaded.data) for loaded in self._loaded)
        self.facts.update(artifacts_loaded=len(names), bytes_loaded=size, load_seconds=seconds, refused=refused)
        if self._loaded:
            self.facts["state"] = "warm"
            self.notes.append(
                f"{len(names)} artifacts ({size / MIB:.1f} MiB) loaded in {seconds:.2f} s from {self._url}"
            )
            self.notes.extend(f"not loaded: {reason}" for reason in refused)
        else:
            self.facts["reason"] = reason
            self.notes.append(f"cold start: {reason} ({self._url})")

    def _fetch(self) -> tuple[list[Loaded], list[str]]:
        store = self._options.store()
        fetched: dict[str, Loaded] = {}
        refused: dict[str, str] = {}
        for _ in range(2):  # a bundle may be replaced by a larger one between listing and reading
            for name in store.names(self._fingerprint):
                if name not in fetched and name not in refused:
                    try:
                        fetched[name] = store.load(name, fingerprint=self._fingerprint)
                    except Refused as reason:
                        refused[name] = f"bundle {name[-12:]} refused: {reason}"
            if not refused:
                break
        if not self._options.read_only:
            for name in fetched:
                with contextlib.suppress(Exception):  # its age only decides what is evicted first
                    store.touch(name)
        return list(fetched.values()), list(refused.values())

    def _load(self, loaded: Loaded, refused: list[str]) -> None:
        try:
            artifacts, libraries = unpack(loaded.data)
            if artifacts and torch.compiler.load_cache_artifacts(artifacts) is None:
                raise ValueError("torch cannot read its artifacts")
            for path, data in libraries.items():
                file = self._directory / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        except Exception as error:
            refused.append(f"bundle {loaded.name[-12:]} refused: {reason_of(error)}")
            return
        self._libraries |= set(libraries)
        self._loaded.append(loaded)

    # ---- after training --------------------------------------------------------------------------------------------

    def close(self, findings: dict[str, Any]) -> None:
        """Compare with what was compiled, store what is new and ``findings``, and restore the usual directories."""
        with self._stack:
            if not self._leads:
                return
            try:
                self._verify()
                self._store(findings)
            except Exception as error:
                self.facts["save_error"] = reason_of(error)
                self.notes.append(f"nothing stored: {reason_of(error)} ({self._url})")

    def _verify(self) -> None:
        now = {name: value - self._counters[name] for name, value in _read_counters().items()}
        self._misses = now["misses"]
        self._built = read_libraries(self._directory)
        # Others are probes of the processor, which a thread may have begun before the directory was ours.
        kernels = {path for path in self._built if path.endswith(".main.so") or path.startswith("triton/")}
        self._new_libraries = kernels - self._libraries
        self.facts.update(
            graph_hits=now["hits"],
            graph_misses=self._misses,
            graph_bypasses=now["bypasses"],
            traces_bypassed=now["traces_bypassed"],
            kernels_timed=now["kernels_timed"],
            libraries_built=len(self._new_libraries),
            compiled_anew=(anew := compiled_anew(self._first_metric) if self._misses or now["bypasses"] else []),
        )
        if not now["hits"] + self._misses + now["bypasses"]:
            self.facts.update(state="idle", reason="nothing was compiled by Inductor, which alone can be cached")
            self.notes.append(f"nothing to cache: {self.facts['reason']}")
            return
        if now["traces_bypassed"]:
            self.notes.append(
                f"{now['traces_bypassed']} graphs are split into forward and backward anew at every start, torch "
                'cannot cache that (TORCH_LOGS="torch._functorch._aot_autograd.autograd_cache" names the reasons)'
            )
        if self._loaded and (self._misses or now["bypasses"]):
            more = f"; and {len(anew) - MAX_NAMED} more" if len(anew) > MAX_NAMED else ""
            reason = "; ".join(anew[:MAX_NAMED]) + more or "torch does not say which"
            self.facts.update(state="partly", reason=reason)
            self.notes.append(
                f"loaded {self.facts['artifacts_loaded']} artifacts but {self._misses + now['bypasses']} graphs "
                f"were compiled anew: {self.facts['reason']}"
            )
        elif self._loaded:
            timed = f", but {now['kernels_timed']} timings of kernels did not" if now["kernels_timed"] else ""
            self.notes.append(f"warm start: all {now['hits']} graphs came from the cache{timed}")

    def _store(self, findings: dict[str, Any]) -> None:
        new = bool(self._misses or self._new_libraries) or not findings.keys() <= self.findings.keys()
        if self.facts["state"] == "idle" or (self._loaded and not new):
            return
        if self._options.read_only:
            self.notes.append("what was compiled is not stored: read_only")
            return
        saved = torch.compiler.save_cache_artifacts()
        artifacts = [f"library {path}" for path in self._built]
        if saved is not None:
            artifacts += [f"{kind} {key}" for kind, keys in saved[1].artifacts.items() for key in keys]
        data = pack(saved[0] if saved else b"", self._built)
        if len(data) > self._options.max_gib * 2**30:
            raise ValueError(f"{len(data) / MIB:.1f} MiB are more than max_gib allows")
        began = time.perf_counter()
        removed = within(self._options.timeout_seconds, lambda: self._write(data, artifacts, findings))
        self.facts.update(
            artifacts_saved=len(artifacts),
            bytes_saved=len(data),
            save_seconds=round(time.perf_counter() - began, 4),
            bundles_evicted=removed,
        )
        self.notes.append(
            f"{len(artifacts)} artifacts ({len(data) / MIB:.1f} MiB) stored at {self._url}"
            + (f"; {removed} bundles evicted for max_gib" if removed else "")
        )

    def _write(self, data: bytes, artifacts: list[str], findings: dict[str, Any]) -> int:
        store = self._options.store()
        if (reason := store.distrust_of_writes()) is not None:
            raise ValueError(reason)
        name = store.save(
            data, fingerprint=self._fingerprint, facts=self._program_facts, artifacts=artifacts, findings=findings
        )
        for loaded in self._loaded:
            if loaded.name != name and set(loaded.manifest["artifacts"]) <= set(artifacts):
                store.remove(loaded.name)  # the new bundle holds all of it
        return len(store.evict(max_bytes=self._options.max_gib * 2**30, keep=[name]))


def compiled_anew(first: int) -> list[str]:
    """What Inductor generated code for since the metric ``first``: user functions, and why torch came back to them."""
    found = []
    for metric in get_compilation_metrics()[first:]:
        if metric.inductor_code_gen_cumulative_compile_time_us and metric.co_name:
            why = f" ({metric.recompile_reason.strip().splitlines()[0]})" if metric.recompile_reason else ""
            found.append(f"{metric.co_name} {metric.co_filename}:{metric.co_firstlineno}{why}")
    return list(dict.fromkeys(found))


def _read_counters() -> dict[str, int]:
    """Graphs that Inductor's cache had, had not, and could not hold; those that only AOTAutograd's could not; and how
    often a kernel was timed on a GPU to choose how it is launched."""
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "hits": inductor["fxgraph_cache_hit"],
        "misses": inductor["fxgraph_cache_miss"],
        "bypasses": inductor["fxgraph_cache_bypass"],
        "traces_bypassed": autograd["autograd_cache_bypass"],
        "kernels_timed": sum(
            count for name, count in inductor.items() if re.fullmatch(r"benchmarking\.\w+\.benchmark_gpu", name)
        ),
    }


@contextlib.contextmanager
def own_directory(notes: list[str]) -> Iterator[Path]:
    """A new directory inside the one that Inductor uses (the user's choice of disk), in its place until the block ends.

    Only so is it known what belongs to a run, and is a cold start cold: what an earlier run left in the usual directory
    would count as a hit here and be missing on the next machine.

    Where other users could put code into Inductor's, it lies in the temporary folder, and ``notes`` get a line.
    It is removed when the process exits: compiled code may load a library when it runs for the first time, later than
    this block. For that reason this is not ``torch._inductor.utils.fresh_cache``, which otherwise does the same.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    usual: str | None = cache_dir()
    if reason := distrust_of(os.path.realpath(str(usual))):
        usual = None
        notes.append(f"compiles in {tempfile.gettempdir()} and not in Inductor's cache folder, because {reason}")
    directory = Path(tempfile.mkdtemp(prefix="cached-", dir=usual))
    made_by = os.getpid()

    def remove() -> None:
        if os.getpid() == made_by:  # not in a process that was forked from it
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    with compiling_in(directory):
        yield directory


# ---- several processes ----------------------------------------------------------------------------------------------


def rank() -> int:
    """Of this process in its group; 0 without one."""
    return torch.distributed.get_rank() if _in_group() else 0


def gathered(value: Any) -> list[Any]:
    """``value`` of each process of the group, by rank; all of them call it."""
    if not _in_group():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


T = TypeVar("T")


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


def reason_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {hidden(lines[0])[:300]}" if lines else type(error).__name__


# ---- the fingerprint -------------------------------------------------------------------------------------------------

REVISION = 3
"""Raised when strategies let the compiler make something else of the same program: artifacts of before are stale."""


def facts_of(program: Program, *, leave_out: str) -> dict[str, Any]:
    """Everything that the fingerprint is made of, readable; the strategy named ``leave_out`` compiles nothing."""
    return {
        "revision": REVISION,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": _version("triton"),
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "device": device_facts(program.device or torch.device("cpu")),
        "precision": program.precision,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "strategies": [strategy.facts() for strategy in program.strategies if strategy.name != leave_out],
        "model": model_digest(program.module),
    }


def fingerprint_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def device_facts(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on. Inductor's keys hold the index of the device; C++ is built for the very CPU."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        return {"name": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "index": index}
    return {"name": f"{device.type} {device.index or 0}", **cpu_facts()}


def cpu_facts() -> dict[str, str]:
    """Model and instruction sets of the processor; a library built for others may end the process."""
    facts = {"isa": torch.backends.cpu.get_cpu_capability(), "processor": platform.processor()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        named = {name.strip().lower(): value.strip() for name, value in lines.items()}
        facts["processor"] = named["model name"] if "model name" in named else facts["processor"]
        flags = " ".join(named[name] for name in ("flags", "features") if name in named)
        facts["flags"] = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return facts


def model_digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for path, child in module.named_modules():
        digest.update(f"{path}:{type(child).__module__}.{type(child).__qualname__}\n".encode())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for path, tensor in tensors:
            text = f"{kind} {path}:{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n"
            digest.update(text.encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
