"""What ProperDocs does not do by itself: pages from outside of docs/, the list of public names, links out of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # ProperDocs gives its modules under mkdocs' names, too

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root that are pages of the site."""
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)]*)?\)")
NAMED = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
"""The first line of a block of code with the file that it is, which Markdown of Python reads as no block."""
API = """# Python API

What `from crucible import ...` gives. Each name is imported when it is first used.
"""
SECTIONS = {
    "Training and comparing": ("trainer", "scripts"),
    "Strategies": ("strategies",),
    "Tasks": ("tasks",),
}
"""Headings of the list of public names, and the packages that the names under each come from."""


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(from_root, content)))
    files.append(File.generated(config, "api.md", content=API + "\n".join(public_names())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = NAMED.sub(r'```\1 title="\2"', markdown)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{target}")
    return markdown


def from_root(match: re.Match[str]) -> str:
    before, path, anchor = match.groups()
    path = PAGES.get(path, path.removeprefix("docs/"))
    return f"{before}{path}{anchor or ''})"


def public_names() -> list[str]:
    """Directives of mkdocstrings for the names of the stub, under a heading for each package."""
    stub = ast.parse((ROOT / "trainer" / "crucible" / "__init__.pyi").read_text(encoding="utf-8"))
    names = [
        (node.module or "", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    lines = []
    for title, packages in SECTIONS.items():
        lines.append(f"\n## {title}\n")
        for package in packages:
            lines += [f"::: {module}.{name}\n" for module, name in names if module.partition(".")[0] == package]
    return lines
