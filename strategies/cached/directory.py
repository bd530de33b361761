"""A cache directory of a run's own, what is packed out of it, and the kernels' tuning results found in it again."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from strategies.cached.store import distrust_of
from strategies.toolchain import environment

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def own_directory(notes: list[str]) -> Iterator[Path]:
    """A new directory inside the one that Inductor uses (the user's choice of disk), in its place until the block ends.

    Only so is it known what belongs to a run, and is a cold start cold: what an earlier run left in the usual directory
    would count as a hit here and be missing on the next machine.

    Where other users could put code into Inductor's, it lies in the temporary folder, and ``notes`` get a line.
    It is removed when the process exits: compiled code may load a library when it runs for the first time, later than
    this block. For that reason this is not ``torch._inductor.utils.fresh_cache``, which otherwise does the same.
    """
    # Private to torch, on all versions supported; there is no public way to ask for it, nor for those below.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    usual: str | None = cache_dir()
    if reason := distrust_of(os.path.realpath(str(usual))):
        usual = None
        notes.append(f"compiles in {tempfile.gettempdir()} and not in Inductor's cache folder, because {reason}")
    directory = Path(tempfile.mkdtemp(prefix="cached-", dir=usual))
    atexit.register(_remove, directory, os.getpid())
    with compiling_in(directory):
        yield directory


@contextlib.contextmanager
def compiling_in(directory: Path) -> Iterator[None]:
    """Until the block ends, what compiles is looked for in ``directory`` alone, and kept there."""
    from torch._inductor.utils import clear_caches
    from torch.compiler._cache import CacheArtifactManager

    # The artifacts of an earlier run of this process would be saved along; saved a second time, they would hide the new
    # ones (of two sections of one kind, CacheArtifactManager.deserialize keeps the last).
    with CacheArtifactManager.with_fresh_cache():
        clear_caches()
        try:
            variables = dict(zip(VARIABLES, (str(directory), str(directory / "triton")), strict=True))
            with environment(variables), tuning_in(directory):
                yield
        finally:
            clear_caches()


def _remove(directory: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked from the one that made it
        shutil.rmtree(directory, ignore_errors=True)


# ---- bundles ---------------------------------------------------------------------------------------------------------

TORCH = "torch.artifacts"
"""Member with torch's artifacts."""
LIBRARIES = "libraries"
"""Folder of the members that are shared libraries."""
LIBRARY_SUFFIXES = (".so", ".so.load_ok")
"""Files worth keeping; the second one is Inductor's mark that a probe of the vector instructions succeeded."""


@dataclass(kw_only=True, slots=True)
class Bundle:
    """What a bundle holds: torch's own artifacts (``torch.compiler.save_cache_artifacts``), and the shared libraries
    that were built beside them. Torch's hold Triton's binaries but no C++ ones, so that a warm start on a CPU would run
    the C++ compiler again although every cache says "hit". Unpacking can only fill one directory."""

    torch: bytes
    """Torch's artifacts, empty when there are none."""
    libraries: dict[str, bytes] = field(default_factory=dict)
    """Shared libraries by their path in the cache directory."""

    def pack(self) -> bytes:
        """The archive: the same content gives the same bytes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            members = {TORCH: self.torch, **{f"{LIBRARIES}/{path}": data for path, data in self.libraries.items()}}
            for name in sorted(members):
                member = tarfile.TarInfo(name)  # owner, time and mode stay the defaults
                member.size = len(members[name])
                archive.addfile(member, io.BytesIO(members[name]))
        return buffer.getvalue()

    @classmethod
    def unpack(cls, data: bytes) -> Bundle:
        """Read an archive. Raises ValueError for anything that ``pack`` would not have written."""
        bundle = cls(torch=b"")
        seen: set[str] = set()
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                for member in archive:
                    if not member.isreg() or member.name in seen:
                        raise ValueError(f"not a bundle: {member.name!r} is not a plain file, or is there twice")
                    seen.add(member.name)
                    file = archive.extractfile(member)
                    assert file is not None, "a regular file"
                    if member.name == TORCH:
                        bundle.torch = file.read()
                    else:
                        bundle.libraries[_library_path(member.name)] = file.read()
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"not a bundle: {error}") from error
        if TORCH not in seen:
            raise ValueError(f"not a bundle: {TORCH!r} is missing")
        return bundle


def _library_path(name: str) -> str:
    """The path of a library inside the cache directory. Raises ValueError for one that would leave it."""
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or str(path) != name  # "a//b", "./a"
        or ".." in path.parts
        or "\\" in name
        or ":" in name
        or "\0" in name
        or len(path.parts) < 2
        or path.parts[0] != LIBRARIES
        or not name.endswith(LIBRARY_SUFFIXES)
    ):
        raise ValueError(f"not a bundle: {name!r} is not a path of a library")
    return str(path.relative_to(LIBRARIES))


def read_libraries(directory: Path) -> dict[str, bytes]:
    """Shared libraries under ``directory`` by their path in it."""
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.name.endswith(LIBRARY_SUFFIXES) and file.is_file() and not file.is_symlink()
    }


def write_libraries(libraries: Mapping[str, bytes], directory: Path) -> None:
    """Put ``libraries`` where they were, under ``directory``, which must be this process's own."""
    for path, data in libraries.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


# ---- tuning results --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tuning_in(directory: Path) -> Iterator[None]:
    """Until the block ends, what was tuned is looked for, and kept, in the cache directory ``directory``.

    Torch keeps the choice of a kernel's configuration beside the file of the generated kernel. A kernel that comes out
    of the cache still names the file of the run that compiled it. In any other directory torch does not find the
    choice, times all configurations again, and perhaps chooses another one, which rounds differently: a warm start
    would be slower than it need be and not equal to the cold one.

    A directory named by the fingerprint would have the same name in each run of one machine, and torch 2.15 then finds
    its choice unpatched. It is not used: the folder above it differs between users, jobs and machines, two runs of one
    program at a time would share it, and a cold start in it would not be cold. Torch 2.11 moreover forgets the
    configurations that it makes while tuning, by halving a reduction's block, whatever the directory is called.
    """
    # Private to torch, on all versions supported; there is no public way to move a kernel.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner: Any = CachingAutotuner
    forgets = not hasattr(tuner, "_could_rblock_scale")
    recheck, scale = tuner.recheck_autotune_cache, tuner._dynamic_scale_rblock

    @functools.wraps(recheck)
    def recheck_here(kernel: Any, reload_kernel_from_src: Callable[[], Any]) -> None:
        _move(kernel, directory)
        configs = _configs(kernel)
        recheck(kernel, reload_kernel_from_src)
        if forgets:
            _take(kernel, configs, reload_kernel_from_src)

    @functools.wraps(scale)
    def scale_and_keep(kernel: Any) -> None:
        configs = _configs(kernel)
        scale(kernel)
        if len(configs) == 1 < len(kernel.compile_results) and kernel.save_cache_hook is None:
            cache = _cache(kernel, configs)  # torch keeps a choice only where there was one before
            kernel.save_cache_hook = cache and cache.save

    tuner.recheck_autotune_cache = recheck_here
    if forgets:
        tuner._dynamic_scale_rblock = scale_and_keep
    try:
        yield
    finally:
        tuner.recheck_autotune_cache, tuner._dynamic_scale_rblock = recheck, scale


def _move(kernel: Any, directory: Path) -> None:
    """Let ``kernel`` look beside a file in ``directory``; whether that exists does not matter."""

    def moved(file: str) -> str:
        return str(directory.joinpath(*Path(file).parts[-2:]))

    if kernel.filename is not None:
        kernel.filename = moved(kernel.filename)
    # Where a new choice would be kept: a directory of another run, which is not to be made anew.
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if cache is not None and cache.local_cache is not None:
        store, file = cache.local_cache
        cache.local_cache = store, moved(file)


def _cache(kernel: Any, configs: list[Any]) -> Any:
    """Torch's cache of the choice among ``configs``; None where it keeps none."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_heuristics import hash_configs

    return (
        AutotuneCache.create(kernel.inductor_meta, kernel.filename, hash_configs(configs)) if kernel.filename else None
    )


def _take(kernel: Any, configs: list[Any], reload_kernel_from_src: Callable[[], Any]) -> None:
    """Leave ``kernel`` the configuration that was chosen, compiled anew where it had been made while tuning."""
    cache = _cache(kernel, configs)
    best = None if cache is None else cache._read()
    if (
        best is None
        or best.get("configs_hash") != cache.configs_hash
        or not _settings(configs[0]).keys() <= best.keys()
    ):
        return
    chosen = [result for result in kernel.compile_results if _settings(result.config).items() <= best.items()]
    if not chosen:
        config = copy.deepcopy(configs[0])
        config.kwargs.update({name: best[name] for name in config.kwargs})
        config.num_warps, config.num_stages = best["num_warps"], best["num_stages"]
        if kernel.fn.fn is None:
            kernel.fn = reload_kernel_from_src().fn
        chosen = [kernel._precompile_config(config)]
    kernel.compile_results = chosen[:1]
    # Chosen among all there were: torch would make one more out of it, and time the two.
    kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}


def _configs(kernel: Any) -> list[Any]:
    return [result.config for result in kernel.compile_results]


def _settings(config: Any) -> dict[str, Any]:
    """What torch keeps of a configuration."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
