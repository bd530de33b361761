"""Checkpoint and record files: written whole or not at all, and refused in one line when they are not usable."""

from __future__ import annotations

import json
import os
import random
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import train
from trainer.checkpoints import AtomicCheckpointIO, Checkpoints, find_checkpoint, random_states, restore_own, step_of
from trainer.interrupt import StopRequest
from trainer.telemetry.record import RunRecord


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> Path:
    """A finished run of two steps."""
    directory = tmp_path_factory.mktemp("finished")
    train(directory, "trainer.max_steps=2")
    return directory


def test_a_write_that_fails_midway_leaves_the_old_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deeper" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)

    def fail(checkpoint: object, file: Any) -> None:
        file.write(b"half a checkpoint")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"global_step": 2}, path)
    assert step_of(path) == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_record_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord(task="captioning")
    record.save(tmp_path)

    def fail(values: object, file: Any, **_: object) -> None:
        file.write('{"task": ')
        raise OSError("No space left on device")

    record.status = "finished"
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", fail)
        with pytest.raises(OSError, match="No space left"):
            record.save(tmp_path)
    assert RunRecord.load(tmp_path).status == "running"


@pytest.mark.parametrize("text", ['{"task": ', "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_file_that_is_no_record_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"record\.json: "):
        RunRecord.load(tmp_path)


def test_a_checkpoint_is_found_by_run_folder_or_file(run_dir: Path) -> None:
    expected = run_dir / "checkpoints" / "last.ckpt"
    for given in (run_dir, run_dir / "checkpoints", expected):
        assert find_checkpoint(str(given)) == expected
    assert step_of(expected) == 2


def truncated(run_dir: Path, folder: Path) -> Path:
    whole = (run_dir / "checkpoints" / "last.ckpt").read_bytes()
    path = folder / "half.ckpt"
    path.write_bytes(whole[: len(whole) // 2])
    return path


def other_zip(run_dir: Path, folder: Path) -> Path:
    path = folder / "other.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "no checkpoint\n")
    return path


def weights_alone(run_dir: Path, folder: Path) -> Path:
    path = folder / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    return path


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def malicious(run_dir: Path, folder: Path) -> Path:
    path = folder / "malicious.ckpt"
    torch.save({"global_step": 1, "code": RunsCode()}, path)
    return path


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda run_dir, folder: folder / "nowhere", "no such file or directory"),
        (lambda run_dir, folder: folder, "no checkpoints/last.ckpt in it"),
        (truncated, "not a whole checkpoint"),
        (other_zip, "cannot be read as a checkpoint"),
        (weights_alone, "cannot be read as a checkpoint"),
        (malicious, f"is refused: reading it would call {os.name}.system, and could run code"),
        (lambda run_dir, folder: run_dir, "already at step 2"),
    ],
    ids=["nowhere", "empty folder", "truncated", "another zip", "weights alone", "malicious", "nothing left to do"],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_in_one_line(
    run_dir: Path, tmp_path: Path, make: Any, complaint: str
) -> None:
    given = make(run_dir, tmp_path)
    new = tmp_path / "new"
    with pytest.raises(ValueError, match=complaint) as raised:
        train(new, f"resume={given}", "trainer.max_steps=2")
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("resume")
    assert str(given) in str(raised.value)
    assert "weights_only" not in str(raised.value), "torch's advice would run what was refused"
    record = RunRecord.load(new)
    assert (record.status, record.exit_code) == ("failed", 1)
    assert complaint in str(record.reason)


def test_a_checkpoint_of_another_model_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=.*belongs to another model") as raised:
        train(tmp_path, f"resume={run_dir}", "task.size.decoder_width=32", "trainer.max_steps=4")
    assert len(str(raised.value).splitlines()) == 1


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("version", ["earlier", "now"])
def test_random_states_are_put_back_from_a_file(tmp_path: Path, version: str) -> None:
    checkpoints = Checkpoints(tmp_path, every_n_steps=0, stop=StopRequest(print))
    torch.save(random_states() if version == "earlier" else checkpoints.state_dict(), tmp_path / "states.pt")
    drawn = draw()
    assert draw() != drawn
    checkpoints.load_state_dict(torch.load(tmp_path / "states.pt", weights_only=True))
    assert checkpoints._restored is not None
    restore_own(checkpoints._restored, process(0, of=1))
    assert draw() == drawn


def test_processes_beyond_those_of_the_checkpoint_draw_numbers_of_their_own() -> None:
    states, drawn = [random_states()], []
    for rank in (0, 1, 2, 1):
        with pytest.warns(UserWarning, match="random states of 1 processes, this run has 3"):
            restore_own(states, process(rank, of=3))
        drawn.append(draw())
    assert drawn[3] == drawn[1]
    assert len({*drawn}) == 3


def process(rank: int, *, of: int) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=of, global_step=5)
