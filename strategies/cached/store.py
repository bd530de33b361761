"""ArtifactStore: bundles of compiled artifacts under any fsspec URL (``file:``, ``s3:``, ``gs:``, ``memory:``, ...).

One flat folder with a file for each bundle, ``<fingerprint>-<sha256>.bundle``: a signature, and behind it a zip archive
of torch's artifacts, shared libraries and a manifest. Nothing is ever changed in place: two writers add two bundles and
lose nothing, and a reader sees a bundle whole or not at all. A bundle that holds all of another one replaces it.

Artifacts are executable data (torch unpickles them, libraries are loaded into the process): whoever can write them runs
code as whoever loads them. So a bundle is opened only if it is signed (HMAC-SHA256) or lies where only the user writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
import re
import shlex
import stat
import uuid
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = re.compile(r"([0-9a-f]{32}-[0-9a-f]{64})\.bundle")
"""Files of ours; nothing else in the folder is read or removed."""
MANIFEST, TORCH = "manifest.json", "torch.artifacts"
"""Members of the archive: the first has ``fingerprint``, ``facts`` and ``artifacts`` (their names); the second is what
``torch.compiler.save_cache_artifacts`` gives."""
LIBRARY_SUFFIXES = (".so", ".so.load_ok")
"""The other members, by their path in Inductor's cache. Torch's artifacts hold Triton's binaries but no C++ ones, so
that a warm start on a CPU would run the C++ compiler again although every cache says "hit". The second suffix is
Inductor's mark that a probe of the vector instructions succeeded."""
KEY_VARIABLE = "CRUCIBLE_CACHE_KEY"
"""Environment variable that holds the key; a key file comes before it."""
MIN_KEY_BYTES = 16
PURPOSE = b"crucible artifacts 2\n"
"""Signed along, so that no other use of the same key yields a signature of ours."""
UNSIGNED = b"-" * 64
"""Stands for the signature, 64 hexadecimal digits, where nobody signed."""


@dataclass(kw_only=True, slots=True)
class Bundle:
    """A bundle that may be loaded."""

    name: str
    size: int
    """Bytes."""
    manifest: dict[str, Any]
    artifacts: bytes
    """Torch's; empty when there are none."""
    libraries: dict[str, bytes]


class Refused(Exception):
    """A bundle that must not be loaded; the message is the reason."""


class ArtifactStore:
    """Reads, writes and evicts bundles.

    Args:
        url: Folder, as fsspec writes it; a plain path is a local folder.
        key: Signs what is written and checks what is read; None where the user has none.
        storage_options: Passed to the file system.

    Raises ValueError for a URL that fsspec does not know and ImportError for a protocol whose package is missing.
    """

    def __init__(self, url: str, *, key: bytes | None = None, storage_options: dict[str, Any] | None = None) -> None:
        import fsspec  # here, because the doctor reads this module on machines where nothing is installed
        from fsspec.implementations.local import LocalFileSystem

        self.fs, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        self.local = type(self.fs) is LocalFileSystem
        self.root = os.path.realpath(root) if self.local else str(root).rstrip("/")
        self.key = key

    def bundles(self) -> dict[str, int]:
        """Bytes of each bundle by its name; empty where the folder does not exist."""
        self.fs.invalidate_cache()  # another process may have written since
        try:
            found = [info for info in self.fs.ls(self.root, detail=True) if info["type"] == "file"]
        except FileNotFoundError:
            return {}
        names = [(NAME.fullmatch(info["name"].rpartition("/")[2]), info["size"] or 0) for info in found]
        return {match[1]: size for match, size in names if match}

    def names(self, fingerprint: str) -> list[str]:
        """Bundles that were written for ``fingerprint``."""
        return [name for name in self.bundles() if name.startswith(fingerprint[:32])]

    def load(self, name: str, *, fingerprint: str) -> Bundle:
        """Read a bundle. Raises Refused for one that is foreign, not genuine, truncated or corrupt."""
        try:
            content = self.fs.cat_file(self.path(name))
            signature, data = content[: len(UNSIGNED)], content[len(UNSIGNED) :]
            refusal = self._refusal(name, signature, data)
        except FileNotFoundError:  # another writer may have replaced it since it was listed
            raise Refused("its file is missing") from None
        if hashlib.sha256(data).hexdigest() != name.rpartition("-")[2]:
            raise Refused("it is truncated or was changed: its SHA-256 is not the one in its name")
        if refusal is not None:
            raise Refused(refusal)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {member: archive.read(member) for member in archive.namelist()}
            manifest = {"artifacts": [], **json.loads(members.pop(MANIFEST))}
            artifacts = members.pop(TORCH)
            if manifest["fingerprint"] != fingerprint:
                raise Refused("it was made for another program or machine")
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            raise Refused(f"it is not a bundle ({type(error).__name__}: {error})") from None
        return Bundle(name=name, size=len(content), manifest=manifest, artifacts=artifacts, libraries=members)

    def save(self, artifacts: bytes, libraries: Mapping[str, bytes], manifest: Mapping[str, Any]) -> tuple[str, int]:
        """Write a bundle; returns its name and bytes. Raises what the file system raises."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            text = json.dumps(manifest, default=repr, sort_keys=True).encode()
            for member, content in {MANIFEST: text, TORCH: artifacts, **libraries}.items():
                archive.writestr(zipfile.ZipInfo(member), content)  # without a time: the same content, the same bytes
        data = buffer.getvalue()
        name = f"{manifest['fingerprint'][:32]}-{hashlib.sha256(data).hexdigest()}"
        signature = UNSIGNED if self.key is None else signature_of(data, self.key)
        self._write(self.path(name), signature + data)
        return name, len(signature) + len(data)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def evict(self, *, max_bytes: float, keep: Collection[str] = ()) -> list[str]:
        """Remove what was written longest ago until the rest fits ``max_bytes``, never one in ``keep``; returns it."""
        sizes = self.bundles()
        total, removed = sum(sizes.values()), list[str]()
        if total > max_bytes:
            for name in sorted(sizes, key=lambda name: self.fs.modified(self.path(name))):
                if total > max_bytes and name not in keep:
                    self.remove(name)
                    removed.append(name)
                    total -= sizes[name]
        return removed

    def distrust_of_writes(self) -> str | None:
        """Why nobody could load what is written here; None when it can be loaded again."""
        if self.key is not None:
            return None
        if not self.local:
            return f"a store that is not a local folder needs a key to sign with (set {KEY_VARIABLE})"
        return distrust_of(self.root) if os.path.isdir(self.root) else None

    def path(self, name: str) -> str:
        return f"{self.root}/{name}.bundle"

    def _refusal(self, name: str, signature: bytes, data: bytes) -> str | None:
        """Why the content of a bundle must not be looked at; None when it may be."""
        if signature != UNSIGNED and self.key is not None:
            genuine = hmac.compare_digest(signature, signature_of(data, self.key))
            return None if genuine else "its signature does not match the key"
        distrust: str | None = "the store is not a local folder"
        if self.local:
            distrust = distrust_of(self.root) or distrust_of(self.path(name))
        if distrust is None or self.key is not None:
            return distrust and f"it is not signed, and {distrust}"
        return f"no key to check it with (set {KEY_VARIABLE}), and {distrust}"

    def _write(self, path: str, data: bytes) -> None:
        """Write a file whole: locally beside its target and renamed, elsewhere as the one object that it is."""
        if not self.local:
            self.fs.pipe_file(path, data)
            return
        os.makedirs(self.root, mode=0o755, exist_ok=True)
        temporary = os.path.join(self.root, f".{os.path.basename(path)}.{uuid.uuid4().hex}")
        try:
            # Never writable by others, whatever the umask: an unsigned bundle would be refused.
            with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def signature_of(data: bytes, key: bytes) -> bytes:
    return hmac.new(key, PURPOSE + data, hashlib.sha256).hexdigest().encode()


def read_key(option: str, key_file: str | None) -> bytes | None:
    """The key from ``key_file``, else from ``KEY_VARIABLE``; None where neither is given.

    Raises ValueError, naming ``option`` or the variable, for a key that cannot be read, is too short, or that others
    can read or replace: whoever knows it signs code that others run.
    """
    if key_file is None:
        given, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "").encode()
        if not key:
            return None
    else:
        given, path = f"{option}={key_file!r}", Path(key_file).expanduser()
        try:
            with path.open("rb") as file:
                status, key = os.fstat(file.fileno()), file.read().strip()
        except OSError as error:
            raise ValueError(f"{given}: {error.strerror}") from error
        if status.st_uid != os.getuid():
            raise ValueError(f"{given}: it belongs to another user; copy it, or set {KEY_VARIABLE}")
        if status.st_mode & 0o077:
            raise ValueError(f"{given}: other users may read or write it; chmod go= {shlex.quote(key_file)}")
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{given}: a key of {len(key)} bytes is too short, at least {MIN_KEY_BYTES} are needed")
    return key


def distrust_of(path: str) -> str | None:
    """Why others could have written the local file or directory ``path``; None when only this user can.

    Raises OSError when it cannot be looked at.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if status.st_mode & 0o022:
        return f"other users may write {path} (chmod go-w)"
    return None


def read_libraries(directory: Path) -> dict[str, bytes]:
    """Those that were built in an Inductor cache ``directory``, by their path within it."""
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.name.endswith(LIBRARY_SUFFIXES) and file.is_file() and not file.is_symlink()
    }
