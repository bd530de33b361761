"""ArtifactStore: bundles of compiled artifacts under any fsspec URL (``file:``, ``s3:``, ``gs:``, ``memory:``, ...).

One flat folder with a file for each bundle, ``<fingerprint>-<sha256>.bundle``: a line of JSON, the manifest, which says
what it holds and carries the signature, and the artifacts behind it. Nothing is ever changed in place: two writers add
two bundles and lose nothing, and a reader sees a bundle whole or not at all. A bundle that holds all of another one
replaces it.

Artifacts are executable data (torch unpickles them, libraries are loaded into the process): whoever can write them runs
code as whoever loads them. So they are loaded only if they are signed (HMAC-SHA256) or lie where only the user writes.
"""

from __future__ import annotations

import contextlib
import datetime
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

SCHEMA = 3
NAME = re.compile(r"([0-9a-f]{32}-[0-9a-f]{64})\.bundle")
"""Files of ours; nothing else in the folder is read or removed."""
MAX_MANIFEST_BYTES = 4 << 20
"""Bytes; a manifest is read before anything vouches for it."""


class Stored(NamedTuple):
    """A bundle in the store, as far as a listing tells."""

    used: float
    """When it was written or, in a local folder, last served, in seconds since the epoch."""
    name: str
    size: int
    """Bytes."""


@dataclass(kw_only=True, slots=True)
class Loaded:
    name: str
    manifest: dict[str, Any]
    data: bytes


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

    # ---- reading ---------------------------------------------------------------------------------------------------

    def bundles(self) -> list[Stored]:
        """All bundles, the one used longest ago first; empty where the folder does not exist."""
        return sorted(
            Stored(_modified(info), match[1], info["size"] or 0)
            for info in self._files()
            if (match := NAME.fullmatch(info["name"].rpartition("/")[2]))
        )

    def names(self, fingerprint: str) -> list[str]:
        """Bundles that were written for ``fingerprint``, oldest use first."""
        return [stored.name for stored in self.bundles() if stored.name.startswith(fingerprint[:32])]

    def load(self, name: str, *, fingerprint: str | None = None) -> Loaded:
        """Read a bundle. Raises Refused for one that is foreign, not genuine, truncated or corrupt."""
        try:
            content = self.fs.cat_file(self._path(name))
        except FileNotFoundError:
            raise Refused("its file is missing") from None
        line, _, data = content.partition(b"\n")
        if len(line) >= MAX_MANIFEST_BYTES:
            raise Refused("its manifest is too large to be one")
        try:
            manifest = json.loads(line)
            sha256, size = manifest["sha256"], manifest["bytes"]
            own, schema, _ = manifest["fingerprint"], manifest["schema"], manifest["signature"]
            artifacts = [str(entry) for entry in manifest["artifacts"]]
            findings = dict(manifest.get("findings") or {})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(f"its manifest cannot be read ({type(error).__name__}: {error})") from None
        if (reason := refusal(manifest, self.key, self._distrust(name))) is not None:
            raise Refused(reason)
        if schema != SCHEMA:
            raise Refused(f"its format is {schema}, this version reads {SCHEMA}")
        if name != _name(own, sha256):
            raise Refused("its manifest belongs to another bundle")
        if fingerprint is not None and own != fingerprint:
            raise Refused("it was made for another program or machine")
        if len(data) != size:
            raise Refused(f"it is truncated or was changed: {len(data)} bytes instead of {size}")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Refused("it is corrupt: its SHA-256 is not the one in its manifest")
        return Loaded(name=name, manifest={**manifest, "artifacts": artifacts, "findings": findings}, data=data)

    def _distrust(self, name: str) -> str | None:
        """Why the place vouches for nothing; None for a local folder and files that only this user can write."""
        if not self.local:
            return "the store is not a local folder"
        with contextlib.suppress(FileNotFoundError):  # a missing bundle is reported as such
            return distrust_of(self.root) or distrust_of(self._path(name))
        return None

    def distrust_of_writes(self) -> str | None:
        """Why nobody could load what is written here; None when it can be loaded again."""
        if self.key is not None:
            return None
        if not self.local:
            return f"a store that is not a local folder needs a key to sign with (set {KEY_VARIABLE})"
        return distrust_of(self.root) if os.path.isdir(self.root) else None

    # ---- writing ---------------------------------------------------------------------------------------------------

    def save(
        self,
        data: bytes,
        *,
        fingerprint: str,
        facts: dict[str, Any],
        artifacts: Iterable[str],
        findings: dict[str, Any] | None = None,
    ) -> str:
        """Write a bundle; returns its name. Raises what the file system raises.

        ``facts`` say what the bundle is for; ``findings`` what its run found out about the program.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "fingerprint": fingerprint,
            "facts": json.loads(json.dumps(facts, default=repr)),
            "sha256": sha256,
            "bytes": len(data),
            "artifacts": sorted(artifacts),
            "findings": findings or {},
            "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "signature": None,
        }
        if self.key is not None:
            manifest["signature"] = signature_of(manifest, self.key)
        name = _name(fingerprint, sha256)
        self._write(self._path(name), json.dumps(manifest).encode() + b"\n" + data)
        return name

    def touch(self, name: str) -> None:
        """Note that a bundle served just now; elsewhere than in a local folder its age stays that of its writing."""
        if self.local:
            os.utime(self._path(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def evict(self, *, max_bytes: float, keep: Iterable[str] = ()) -> list[Stored]:
        """Remove what was used longest ago until the rest fits ``max_bytes``, never one in ``keep``; returns it."""
        removed, kept = [], set(keep)
        bundles = self.bundles()
        total = sum(stored.size for stored in bundles)
        for stored in bundles:
            if total > max_bytes and stored.name not in kept:
                self.remove(stored.name)
                removed.append(stored)
                total -= stored.size
        return removed

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

    def _files(self) -> list[dict[str, Any]]:
        self.fs.invalidate_cache()  # another process may have written since
        try:
            return [info for info in self.fs.ls(self.root, detail=True) if info["type"] == "file"]
        except FileNotFoundError:
            return []

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}.bundle"


def _name(fingerprint: str, sha256: str) -> str:
    return f"{str(fingerprint)[:32]}-{sha256}"


def _modified(info: dict[str, Any]) -> float:
    """Modification time from a listing, which each file system names differently."""
    for name in filter(info.__contains__, ("mtime", "LastModified", "last_modified", "updated", "created")):
        value = info[name]
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


# ---- whether it may be loaded ----------------------------------------------------------------------------------------

KEY_VARIABLE = "CRUCIBLE_CACHE_KEY"
"""Environment variable that holds the key; a key file comes before it."""
MIN_KEY_BYTES = 16
"""Bytes that a key must have."""
PURPOSE = b"crucible artifacts 1\n"
"""Signed along, so that no other use of the same key yields a signature of ours."""


def read_key(option: str, key_file: str | None) -> bytes | None:
    """The key from ``key_file``, else from ``KEY_VARIABLE``; None where neither is given.

    Raises ValueError, naming ``option`` or the variable, for a key that cannot be read, is too short, or that other
    users can read (whoever knows it signs code that others run) or replace.
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
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise ValueError(f"{given}: it belongs to another user; copy it, or set {KEY_VARIABLE}")
        if hasattr(os, "getuid") and status.st_mode & 0o077:
            raise ValueError(f"{given}: other users may read or write it; chmod go= {shlex.quote(key_file)}")
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{given}: a key of {len(key)} bytes is too short, at least {MIN_KEY_BYTES} are needed")
    return key


def signature_of(manifest: Mapping[str, Any], key: bytes) -> str:
    """HMAC-SHA256, in hexadecimal digits, over everything in ``manifest`` but its signature."""
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hmac.new(key, PURPOSE + text.encode(), hashlib.sha256).hexdigest()


def refusal(manifest: Mapping[str, Any], key: bytes | None, distrust: str | None) -> str | None:
    """Why what ``manifest`` describes must not be loaded; None when it may be.

    Args:
        manifest: As stored, with a ``signature`` that is None where nobody signed.
        key: The user's key, if there is one.
        distrust: Why the place itself vouches for nothing; None where only the user can write there.
    """
    signature = manifest["signature"]
    if signature is not None and key is not None:
        right = isinstance(signature, str) and hmac.compare_digest(
            signature.encode(), signature_of(manifest, key).encode()
        )
        return None if right else "its signature does not match the key"
    if distrust is None:
        return None
    if key is None:
        return f"no key to check it with (set {KEY_VARIABLE}), and {distrust}"
    return f"it is not signed, and {distrust}"


def distrust_of(path: str) -> str | None:
    """Why others could have written the local file or directory ``path``; None when only this user can.

    Raises OSError when it cannot be looked at.
    """
    if not hasattr(os, "getuid"):
        return "this system does not say who may write there"
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if status.st_mode & 0o022:
        return f"other users may write {path} (chmod go-w)"
    return None


# ---- bundles ---------------------------------------------------------------------------------------------------------

TORCH = "torch.artifacts"
"""Member with torch's artifacts, as ``torch.compiler.save_cache_artifacts`` gives them; empty when there are none."""
LIBRARY_SUFFIXES = (".so", ".so.load_ok")
"""Files worth keeping beside them. Torch's artifacts hold Triton's binaries but no C++ ones, so that a warm start on a
CPU would run the C++ compiler again although every cache says "hit". The second suffix is Inductor's mark that a probe
of the vector instructions succeeded."""


def pack(artifacts: bytes, libraries: Mapping[str, bytes]) -> bytes:
    """An archive of torch's artifacts and of shared libraries by their path: the same content, the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted({TORCH: artifacts, **libraries}.items()):
            archive.writestr(zipfile.ZipInfo(name), data)  # time and mode stay the defaults
    return buffer.getvalue()


def unpack(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """What ``pack`` was given. Raises ValueError for an archive that it would not have written: one whose paths leave
    the cache directory, for instance."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            members = {name: archive.read(name) for name in names}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"not a bundle: {error}") from error
    artifacts = members.pop(TORCH, None)
    if artifacts is None or len(names) != len(members) + 1:
        raise ValueError(f"not a bundle: {TORCH!r} is missing, or a name is there twice")
    for name in members:
        path = PurePosixPath(name)
        odd = path.is_absolute() or str(path) != name or ".." in path.parts or any(sign in name for sign in "\\:\0")
        if odd or not name.endswith(LIBRARY_SUFFIXES):
            raise ValueError(f"not a bundle: {name!r} is not a path of a library")
    return artifacts, members


def read_libraries(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.name.endswith(LIBRARY_SUFFIXES) and file.is_file() and not file.is_symlink()
    }
