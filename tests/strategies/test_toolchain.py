"""What Inductor needs on a CPU is looked for before any work, and its absence is one line with the mend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strategies import Regional
from strategies.compose import check
from strategies.toolchain import missing_toolchain


@pytest.fixture(autouse=True)
def _no_compiler_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)


def test_nothing_is_missing_where_the_other_tests_compile() -> None:
    assert missing_toolchain() is None


def test_no_compiler_on_the_path_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^compile\.regional: .*C\+\+ compiler.*install g\+\+ or use compile=eager$"):
        check([Regional()])
    check([Regional(backend="aot_eager")])


def test_a_named_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    missing = missing_toolchain()
    assert missing is not None
    assert "CXX=no-such-compiler" in missing


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    missing = missing_toolchain()
    assert missing is not None
    assert "python3-dev" in missing
