"""A cache directory of this run's own: Inductor and Triton compile into it, and torch records artifacts for it alone.

Only so is it known what belongs to a run, and is a cold start cold: what an earlier run left in the usual directory
would count as a hit here and be missing on the next machine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strategies.artifact_signature import distrust_of
from strategies.artifact_tuning import tuning_in
from strategies.environment import environment

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def own_directory(notes: list[str]) -> Iterator[Path]:
    """A new directory inside the one that Inductor uses (the user's choice of disk), in its place until the block ends.

    Where other users could put code into Inductor's, it lies in the temporary folder, and ``notes`` get a line.
    It is removed when the process exits: compiled code may load a library when it runs for the first time, later than
    this block. For that reason this is not ``torch._inductor.utils.fresh_cache``, which otherwise does the same.
    """
    # Private to torch, on all versions supported; there is no public way to ask for either.
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import clear_caches
    from torch.compiler._cache import CacheArtifactManager

    usual: str | None = cache_dir()
    if reason := distrust_of(os.path.realpath(str(usual))):
        usual = None
        notes.append(f"compiles in {tempfile.gettempdir()} and not in Inductor's cache folder, because {reason}")
    directory = Path(tempfile.mkdtemp(prefix="cached-", dir=usual))
    atexit.register(_remove, directory, os.getpid())
    # The artifacts of an earlier run of this process would be saved along; saved a second time, they would hide the new
    # ones (of two sections of one kind, CacheArtifactManager.deserialize keeps the last).
    with CacheArtifactManager.with_fresh_cache():
        clear_caches()
        try:
            variables = dict(zip(VARIABLES, (str(directory), str(directory / "triton")), strict=True))
            with environment(variables), tuning_in(directory):
                yield directory
        finally:
            clear_caches()


def _remove(directory: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked from the one that made it
        shutil.rmtree(directory, ignore_errors=True)
