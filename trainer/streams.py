"""Standard streams that cannot end a run: what the output or error stream cannot take is dropped."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


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


class _Text(io.TextIOWrapper):
    """A stream that drops what comes once it is closed: libraries print while the interpreter takes itself down, where
    a ValueError within C++ aborts the process."""

    def write(self, text: str) -> int:
        """Write ``text``; it counts as written once the stream is closed."""
        try:
            return super().write(text)
        except ValueError:
            if not self.buffer.closed:
                raise
            return len(text)

    def flush(self) -> None:
        """Write out what is held back, unless the stream is closed."""
        try:
            super().flush()
        except ValueError:
            if not self.buffer.closed:
                raise


def keep_streams() -> None:
    """From now on nothing raises because it prints, not even Python as it exits.

    A closed stream leads to the null device. The next file that is opened would else get its number, and whatever
    libraries and child processes print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(null, number)
                os.close(null)
        stream = getattr(sys, name)
        if name == "stdin" or stream is not getattr(sys, f"__{name}__"):
            continue  # or somebody reads or captures it within this process
        lossy = _Text(
            io.BufferedWriter(_Lossy(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors=getattr(stream, "errors", "backslashreplace"),
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=getattr(stream, "write_through", False),
        )
        setattr(sys, name, lossy)
