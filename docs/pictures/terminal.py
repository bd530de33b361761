"""Records what the README's script prints at its end, as a terminal shows it: ``python docs/pictures/terminal.py``.

It runs own_script.py in a terminal of its own, which takes a minute on free cores, and writes terminal.svg beside
this file and the same text to the standard output. Run it on a quiet machine, and copy the text to the README.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "own_script.py"
COLUMNS = 100
END = "Network · regional · finished"
"""The training's own lines come before it; they move the cursor, and a picture of them would show nothing."""


def record() -> str:
    """What the script sends to a terminal, with its colours. Raises CalledProcessError where it fails."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, COLUMNS))
    root = HERE.parents[1]
    paths = os.pathsep.join([str(root), str(root / "trainer")])
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, SCRIPT],
            cwd=folder,
            env={**os.environ, **terminal, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"},
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        sent = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while chunk := os.read(ours, 65536):
                sent += chunk
        os.close(ours)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args, sent)
    return sent.decode().replace("\r\n", "\n")


def ending(sent: str) -> Text:
    """The table and what follows it, without Lightning's progress bar and the movements of the cursor."""
    lines = sent[sent.index(END) :].splitlines()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-HJKhl]", "", line.strip("\r").rpartition("\r")[2]) for line in lines]
    kept = [line for line in lines if "Epoch" not in line and line.strip()]
    return Text.from_ansi("\n".join(["$ python own_script.py", "...", *kept]))


def main() -> None:
    shown = ending(record())
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(shown)
    # Rich's frame names a font on a server; readers have their own, and a picture loads nothing.
    frame = re.sub(r"@font-face \{\{.*?\}\}\n?", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    frame = frame.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    console.save_svg(str(HERE / "terminal.svg"), title="own_script.py", code_format=frame, unique_id="terminal")
    print(shown.plain)


if __name__ == "__main__":
    main()
