"""What Inductor needs on a CPU: a C++ compiler and Python's headers. Looked for before any work starts."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

COMPILERS = ("g++", "clang++", "c++")


def missing_toolchain() -> str | None:
    """What is missing and how to get it, or None when nothing is."""
    wanted = os.environ.get("CXX")
    if shutil.which(wanted.split()[0]) is None if wanted else not any(map(shutil.which, COMPILERS)):
        named = f"CXX={wanted} is not there" if wanted else f"none of {', '.join(COMPILERS)} is there"
        return f"Inductor needs a C++ compiler on a CPU, {named}: install g++ or use compile=eager"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        return f"Inductor needs Python's headers on a CPU, {headers} is not there: install python3-dev"
    return None
