"""``from crucible import ...``: every public name, and what is said where a user's file hides one of our packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies import STRATEGIES
from tests.conftest import ROOT
from tests.processes import python
from trainer import crucible


def test_every_public_name_is_what_its_module_holds() -> None:
    for name in crucible.__all__:
        assert getattr(crucible, name).__name__ == name
    assert dir(crucible) == sorted(set(crucible.__all__))


def test_every_public_name_says_what_it_is() -> None:
    docs = {name: getattr(crucible, name).__doc__ or "" for name in crucible.__all__}
    # A dataclass without a docstring is given its signature.
    assert [name for name, doc in docs.items() if not doc.strip() or doc.startswith(f"{name}(")] == []


def test_every_strategy_is_public() -> None:
    assert {kind.__name__ for kind in STRATEGIES.values()} <= set(crucible.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Compiler'"):
        _ = crucible.Compiler


@pytest.mark.parametrize("hiding", ["trainer.py", "tasks.py", "strategies/__init__.py", "scripts.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, hiding: str) -> None:
    (tmp_path / "crucible").symlink_to(ROOT / "trainer" / "crucible")  # as an installation maps it
    file = tmp_path / hiding
    file.parent.mkdir(exist_ok=True)
    file.write_text("from crucible import Strategy\nprint('ran')\n")
    name = "explain_module" if "scripts" in hiding else "Strategy"
    done = python("-c", f"from crucible import {name}", cwd=tmp_path)
    assert done.returncode == 1
    package = hiding.split(".")[0].split("/")[0]
    complaint = f"ImportError: crucible: {file} hides crucible's own package {package!r}: rename that file or folder"
    assert done.stderr.splitlines()[-1] == complaint
    assert done.stdout == "", "and was not run"
