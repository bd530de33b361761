"""What the compiler needs of a machine is looked for before any work, and its absence is one line with the mend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strategies import Regional
from strategies.compile_options import missing_for_inductor, missing_toolchain


@pytest.fixture(autouse=True)
def _no_compiler_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)


def test_no_compiler_on_the_path_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^compile\.regional: .*C\+\+ compiler.*install g\+\+ or use compile=eager$"):
        Regional().check()
    Regional(backend="aot_eager").check()


def test_a_named_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    missing = missing_toolchain()
    assert "CXX=no-such-compiler" in missing


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    missing = missing_toolchain()
    assert "python3-dev" in missing


@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_compiler_that_is_switched_off_is_named_with_its_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    for strategy in (Regional(), Regional(backend="aot_eager")):
        with pytest.raises(ValueError, match=rf"^compile\.regional: {switch}=1 switches the compiler off: unset it"):
            strategy.check()
    monkeypatch.setenv(switch, "0")
    Regional(backend="aot_eager").check()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


@pytest.mark.usefixtures("cuda")
def test_no_triton_on_a_cuda_device_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^compile\.regional: Inductor needs Triton.*pip install triton, or use"):
        Regional().check()
    Regional(backend="aot_eager").check()


@pytest.mark.usefixtures("cuda")
def test_a_device_too_old_for_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing_for_inductor() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert missing_for_inductor() == "Inductor needs compute capability 7.0, a GPU has 6.1: use compile=eager"


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_to_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    message = rf"^compile\.regional: the compiler's cache .*file/cache cannot be written to \(.+\): set {variable}"
    with pytest.raises(ValueError, match=message):
        Regional().check()
    monkeypatch.setenv(variable, str(tmp_path / "new" / "cache"))
    Regional().check()
