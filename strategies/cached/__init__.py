"""``compile=[regional,cached]``: start warm from compiled artifacts kept at any URL, and keep what was compiled.

For trainings that start often, or on many machines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Program, Stage, Strategy, require_types, wrong
from strategies.compile_errors import one_line, refuse_credentials

if TYPE_CHECKING:
    from strategies.cached.store import ArtifactStore

URL_VARIABLE = "CRUCIBLE_CACHE_URL"
"""Environment variable with the folder of a run that names none; a run that must start cold is given an empty one."""
SWITCHES = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FX_GRAPH_CACHE")


@dataclass(kw_only=True, slots=True)
class Cached(Strategy):
    """Load compiled artifacts before anything compiles, and store what a run had to compile anew.

    Artifacts are found by a fingerprint of torch, Triton, CUDA, device, strategies, precision and model structure, and
    checked (SHA-256, signature) before torch sees them; see ``store``. A store that
    is missing, unreachable, read-only, full, corrupt or not to be trusted costs the run its warm start and no more.

    Torch's tracing of the Python code is not cached. ``caching_precompile`` would, but has one key for all modules that
    are compiled in place: 2.11 fails, 2.15 compiles again. A wrapper would rename the state dict.
    https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
    """

    name: ClassVar[str] = "cached"
    stage: ClassVar[Stage] = Stage.CACHE
    headlines: ClassVar[tuple[str, ...]] = (
        *("state", "reason", "artifacts_loaded", "load_seconds", "artifacts_saved", "refused", "save_error"),
    )

    url: str | None = None
    """Folder, as fsspec writes it: a path, ``s3://bucket/folder``, ``gs://...``; null = that of ``CRUCIBLE_CACHE_URL``
    in the environment, or ``crucible/compiled`` in the user's cache folder. No credentials: they belong into the
    environment or the cloud's own files. So it is for ``storage_options``; they are known by name and by value."""
    key_file: str | None = None
    """File with the key that signs artifacts; null = the environment variable ``CRUCIBLE_CACHE_KEY``, if it is set.
    Without a key only a local folder that nobody else can write is read."""
    max_gib: float = 10.0
    """Size of the store, GiB, above which the oldest bundles are removed."""
    timeout_seconds: float = 30.0
    """Longest time that fetching, and storing, may take."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file system, such as ``{endpoint_url: ...}`` for s3. No credentials."""

    def __post_init__(self) -> None:
        for name in ("url", "key_file"):
            if isinstance(path := getattr(self, name), os.PathLike):  # in Python
                setattr(self, name, os.fspath(path))
        require_types(self)
        for name in ("max_gib", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise wrong("compile.cached", name, getattr(self, name), "must be above 0")
        # The record keeps every option, so that a secret here would be published with it.
        refuse_credentials({"url": self.url, "storage_options": self.storage_options}, "compile.cached")

    @property
    def needs_inductor(self) -> bool:
        """What it loads is Inductor's; also beside ``auto``, which needs it only if it compiles."""
        return True

    def check(self) -> None:
        import fsspec
        from fsspec.utils import get_protocol

        from strategies.cached.store import read_key

        if not self.url:
            refuse_credentials(os.environ.get(URL_VARIABLE), URL_VARIABLE)
        for part in self.url_used.split("::"):
            protocol = get_protocol(part) if "://" in part or "::" not in self.url_used else part
            try:
                fsspec.get_filesystem_class(protocol)
            except (ValueError, ImportError) as error:
                raise ValueError(f"compile.cached.url={self.url!r}: {error}") from error
        read_key("compile.cached.key_file", self.key_file)
        for switch, value in zip(SWITCHES, ("1", "0"), strict=True):
            if os.environ.get(switch) == value:
                raise ValueError(f"compile.cached: {switch}={value} switches torch's caches off; unset it")

    def apply(self, program: Program) -> None:
        from strategies.cached.cache_session import Session

        try:
            program.kept[self.name] = Session(self, program)
        except Exception as error:  # a model that cannot be described, or no place for a directory
            program.report[self.name] = {"state": "cold", "reason": one_line(error), "url": self.url_used}
            program.notes.append(f"cached: cold start, and nothing will be stored: {one_line(error)}")

    def begin(self, program: Program) -> None:
        """Another training of a program whose session was closed: a validation came before, for instance."""
        if self.name not in program.kept and "fingerprint" in program.report[self.name]:
            self.apply(program)

    def end(self, program: Program) -> None:
        if (session := program.kept.pop(self.name, None)) is not None:
            session.close()

    def store(self) -> ArtifactStore:
        """Connect to the store. Raises ValueError for a key that cannot be used, and what the file system raises."""
        from strategies.cached.store import ArtifactStore, read_key

        key = read_key("compile.cached.key_file", self.key_file)
        return ArtifactStore(self.url_used, key=key, storage_options=self.storage_options)

    @property
    def url_used(self) -> str:
        """``url``, or what stands for null."""
        if url := self.url or os.environ.get(URL_VARIABLE):
            return url
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return str(Path(home) / "crucible" / "compiled")
