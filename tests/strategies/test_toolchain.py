"""What the compiler needs of a machine is looked for before any work, and its absence is one line with the mend."""

from __future__ import annotations

from typing import Any

import pytest

from strategies import Regional


def gpu(triton: str | None, capability: tuple[int, int]) -> dict[str, Any]:
    return {
        "torch.cuda.is_available": lambda: True,
        "importlib.util.find_spec": lambda name: triton,
        "torch.cuda.get_device_capability": lambda: capability,
        "torch.cuda.get_device_name": lambda: "a GPU",
    }


LACKS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "compiler": (
        {"PATH": "/nowhere"},
        {},
        r".*C\+\+ compiler.*install g\+\+ or use compile=eager$",
    ),
    "named compiler": ({"CXX": "no-such-compiler -O3"}, {}, r".*CXX=no-such-compiler"),
    "headers": ({}, {"sysconfig.get_path": lambda name: "/nowhere"}, r".*python3-dev"),
    "switched off": (
        {"TORCH_COMPILE_DISABLE": "1"},
        {},
        r"TORCH_COMPILE_DISABLE=1 switches the compiler off: unset it",
    ),
    "Triton": ({}, gpu(None, (9, 0)), r"Inductor needs Triton.*pip install triton, or use"),
    "a newer device": (
        {},
        gpu("triton", (6, 1)),
        r"Inductor needs compute capability 7\.0, a GPU has 6\.1: use compile=eager$",
    ),
    **{
        variable: (
            {variable: "/dev/null/cache"},
            {},
            rf"the compiler's cache /dev/null/cache cannot be written to \(.+\): set {variable}",
        )
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    },
}


@pytest.mark.parametrize("name", LACKS)
def test_what_inductor_lacks_is_one_line_with_the_mend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, patches, message = LACKS[name]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Regional().check()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    for place, value in patches.items():
        monkeypatch.setattr(place, value)
    with pytest.raises(ValueError, match=rf"^compile\.regional: {message}"):
        Regional().check()
    if name != "switched off":
        Regional(backend="aot_eager").check()
