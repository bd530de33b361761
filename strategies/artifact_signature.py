"""Whether stored artifacts may be loaded: a signature (HMAC-SHA256), or a place that only the user can write.

Artifacts are executable data (torch unpickles them, libraries are loaded into the process), so that whoever can write
them runs code as whoever loads them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_VARIABLE = "CRUCIBLE_CACHE_KEY"
"""Environment variable that holds the key; a key file comes before it."""
SHORTEST_KEY = 16
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
    if len(key) < SHORTEST_KEY:
        raise ValueError(f"{given}: a key of {len(key)} bytes is too short, at least {SHORTEST_KEY} are needed")
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
