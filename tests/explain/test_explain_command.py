"""``python -m scripts.explain``: exit codes, what is printed and written, and what is refused before any work."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.explain import Explanation, Finding
from scripts.explain.__main__ import main, print_explanation, verdict
from tasks.lightning_module import ScoredModule
from tasks.micro.task import Micro
from trainer.process import Interrupted

MICRO = ["task=micro", "task.width=16", "task.batch_size=4", "task.train_examples=16", "trainer.val_every_n_steps=0"]


@pytest.fixture(autouse=True)
def _elsewhere(edge: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_task_that_breaks_is_explained_on_the_terminal_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MICRO, "task.model=graph_breaker", "compile=whole", "--json", "why.json"]) == 1
    out = capsys.readouterr().out
    assert "graph break 1" in out
    assert "micro/model.py:" in out
    assert "  Hint: " in out
    assert "2 graph breaks" in out.splitlines()[-1]
    said = json.loads(Path("why.json").read_text())
    assert said["problems"] == 2
    found = "".join(text for each in said["breaks"] for text in each["texts"])
    assert "gb0059" in found
    assert "generic_jump" in found
    assert any("what Inductor makes" in line for line in said["not_looked_at"])
    assert [file.name for file in tmp_path.iterdir()] == ["why.json"]


def test_a_task_without_a_strategy_is_explained_as_whole_and_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MICRO, "task.model=simple_linear", "--batches", "2"]) == 0
    out = capsys.readouterr().out
    assert "micro simple_linear under whole, torch" in out
    assert "2 batches trained on" in out
    assert out.splitlines()[-1] == "nothing wrong: no graph breaks, no recompiles"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class Finalizer:
    """Python swallows what its end raises."""

    def __del__(self) -> None:
        interrupt()


def swallowed() -> None:
    with contextlib.suppress(Interrupted):
        interrupt()


def swallowed_with_half_a_module() -> None:
    swallowed()
    raise ImportError("cannot import name 'half'")


MOMENTS = {
    "while the model is built": (Micro, "build_net", 2, interrupt),
    "in a batch": (ScoredModule, "training_step", 2, interrupt),
    "in a finalizer": (ScoredModule, "training_step", 2, Finalizer),
    "in the last batch, swallowed": (ScoredModule, "training_step", 20, swallowed),
    "swallowed by a library, which fails then": (ScoredModule, "training_step", 2, swallowed_with_half_a_module),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("owner", "name", "call", "sends"), MOMENTS.values(), ids=MOMENTS)
def test_an_interrupt_ends_it_with_a_line_and_leaves_nothing(
    owner: Any, name: str, call: int, sends: Callable[[], object], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    works, called = getattr(owner, name), []

    def work(*args: Any, **kwargs: Any) -> Any:
        """Send the signal after the work of one of its calls."""
        done = works(*args, **kwargs)
        called.append(name)
        if len(called) == call:
            sends()
        return done

    monkeypatch.setattr(owner, name, work)
    handler = signal.getsignal(signal.SIGINT)
    assert main([*MICRO, "compile=whole", "compile.whole.backend=eager", "--json", "why.json"]) == 130
    assert len(called) >= call
    assert "interrupted (SIGINT): nothing was written" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_everything_is_printed_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("\n\nif x < 1 and y > '[b]':\n")
    guards = [f"self.scale == {number}" for number in range(6)]
    where = f"{file}:3 forward"
    explanation = Explanation(
        task="[task]",
        strategies="whole",
        breaks=[Finding(texts=["a [kind]\n  Hint: h"], where=where, count=2)],
        recompiles=[
            Finding(texts=guards, where=where),
            Finding(texts=["grad_mode"], where=None, expected=True),
        ],
        failures=["BackendCompilerFailed: [oops]"],
    )
    console = Console(file=io.StringIO(), width=160)
    print_explanation(explanation, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "[task] under whole",
        "graph break 1, 2 times",
        "  a [kind]\n    Hint: h",
        "recompile 1\n",
        "if x < 1 and y > '[b]':",
        "  self.scale == 3\n  and 2 more",
        "[oops]",
        "expected: 1 more graph ",
    ):
        assert part in text
    assert text.splitlines()[-1] == verdict(explanation) == "1 graph break, 1 recompile, 1 failure"
    assert json.loads(explanation.as_json())["problems"] == 3
