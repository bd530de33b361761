"""Bundles: one file with everything that a warm start needs, packed so that unpacking can only fill one directory.

A bundle is a tar archive of torch's own artifacts (``torch.compiler.save_cache_artifacts``) and of the shared libraries
that were built beside them: torch's artifacts hold Triton's binaries but no C++ ones, so that a warm start on a CPU
would run the C++ compiler again although every cache says "hit".
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

TORCH = "torch.artifacts"
"""Member with torch's artifacts."""
LIBRARIES = "libraries"
"""Folder of the members that are shared libraries."""
LIBRARY_SUFFIXES = (".so", ".so.load_ok")
"""Files worth keeping; the second one is Inductor's mark that a probe of the vector instructions succeeded."""


@dataclass(kw_only=True, slots=True)
class Bundle:
    """What a bundle holds."""

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
                        raise ValueError(f"not a bundle: {member.name!r} is no plain file, or is there twice")
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
        raise ValueError(f"not a bundle: {name!r} is no path of a library")
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
