"""What a script, run on two ranks, has to say; new tests call ``pair`` with a function instead."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.processes import on_ranks


def said_by_two(script: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``script`` twice, given ``folder`` and ``LOCAL_RANK``; returns what it wrote into ``folder/<rank>.json``."""
    (folder / "script.py").write_text(script)
    on_ranks(run_script, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def run_script(folder: Path) -> None:
    """Be ``python folder/script.py folder``."""
    sys.argv = [str(folder / "script.py"), str(folder)]
    sys.path[:0] = [str(folder)]
    runpy.run_path(sys.argv[0], run_name="__main__")
