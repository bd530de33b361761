"""Checkpoint and record files: written whole or not at all, and refused in one line when they are not usable."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.trainer.runs import train
from trainer.callback import Compile
from trainer.checkpoints import Checkpoints, FiniteLosses, open_checkpoint, random_states, restore_own
from trainer.loops import checkpoint_io
from trainer.loops.checkpoint_io import AtomicCheckpointIO
from trainer.process import StopRequest
from trainer.run_files import find_checkpoint
from trainer.telemetry.record import RunRecord
from trainer.telemetry.serialization import written_whole


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
    assert torch.load(path)["global_step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_is_found_by_run_folder_or_file(run_dir: Path) -> None:
    expected = run_dir / "checkpoints" / "last.ckpt"
    for given in (run_dir, run_dir / "checkpoints", expected):
        assert find_checkpoint(str(given)) == expected
    assert open_checkpoint(expected)["global_step"] == 2


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


def flipped(run_dir: Path, folder: Path) -> Path:
    """4 KiB in the middle of its largest tensor are others: torch.load takes them for weights."""
    path = folder / "flipped.ckpt"
    content = bytearray((run_dir / "checkpoints" / "last.ckpt").read_bytes())
    with zipfile.ZipFile(run_dir / "checkpoints" / "last.ckpt") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    begin = largest.header_offset + 200
    flip = range(begin, begin + min(4096, largest.file_size - 200))
    for place in flip:
        content[place] ^= 0xFF
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # does not notice
    return path


def without(*parts: str) -> Any:
    def make(run_dir: Path, folder: Path) -> Path:
        path = folder / "partial.ckpt"
        whole = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
        torch.save({name: value for name, value in whole.items() if name not in parts}, path)
        return path

    return make


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
        (flipped, r"the file is damaged: .*/data/\d+ is not what its checksum says"),
        (without("optimizer_states", "lr_schedulers"), "it holds no optimizer_states, lr_schedulers$"),
        (without("loops"), "it holds no loops$"),
        (without("state_dict"), "it holds no state_dict$"),
        (lambda run_dir, folder: folder / "nowhere", "no such file or directory"),
        (lambda run_dir, folder: folder, "no checkpoints/last.ckpt in it"),
        (truncated, "not a whole checkpoint"),
        (other_zip, "cannot be read as a checkpoint"),
        (weights_alone, "cannot be read as a checkpoint"),
        (malicious, f"is refused: reading it would call {os.name}.system, and could run code"),
        (lambda run_dir, folder: run_dir, "already at step 2"),
    ],
    ids=[
        "flipped",
        "weights only",
        "no progress",
        "no weights",
        "nowhere",
        "empty folder",
        "truncated",
        "another zip",
        "weights alone",
        "malicious",
        "nothing left to do",
    ],
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
    assert not (new / "record.json").exists(), "so that the folder can be used again"


def test_a_checkpoint_of_another_model_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=.*belongs to another model.*; give the options of the run") as raised:
        train(tmp_path, f"resume={run_dir}", "task.size.decoder_width=32", "trainer.max_steps=4")
    assert len(str(raised.value).splitlines()) == 1


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("version", ["earlier", "now"])
def test_random_states_are_put_back_from_a_file(tmp_path: Path, version: str) -> None:
    losses = FiniteLosses("fail", Compile())
    checkpoints = Checkpoints(tmp_path, every_n_steps=0, stop=StopRequest(print), losses=losses)
    torch.save(random_states() if version == "earlier" else checkpoints.state_dict(), tmp_path / "states.pt")
    drawn = draw()
    assert draw() != drawn
    checkpoints.load_state_dict(torch.load(tmp_path / "states.pt", weights_only=True))
    assert checkpoints._restored is not None
    restore_own(checkpoints._restored, process(0, of=1))
    assert draw() == drawn


def process(rank: int, *, of: int) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=of, global_step=5)


def test_a_disk_that_is_full_at_a_checkpoint_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def small(target: Path, mode: str) -> Iterator[Any]:
        with written_whole(target, mode) as file:
            yield Small(file)

    monkeypatch.setattr(checkpoint_io, "written_whole", small)
    record = train(tmp_path, "trainer.max_steps=1", task="micro")
    file = tmp_path / "checkpoints" / "last.ckpt"
    assert (record.status, record.exit_code) == ("failed", 1)
    assert record.reason == f"OSError: [Errno 28] No space left on device: '{file}'"
    assert list(file.parent.iterdir()) == []


class Small:
    """A file on a disk with room for 4 KiB."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        if self._file.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data))

    def flush(self) -> None:
        self._file.flush()


def test_a_record_that_cannot_be_written_at_the_end_fails_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = RunRecord.save

    def full(record: RunRecord, directory: Path) -> Path:
        if record.status != "running":
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(record, directory)

    monkeypatch.setattr(RunRecord, "save", full)
    record = train(tmp_path, "trainer.max_steps=1", task="micro")
    assert (record.status, record.exit_code) == ("failed", 1)
    assert record.reason == f"{tmp_path / 'record.json'} was not written: No space left on device"
    assert record.reason in capsys.readouterr().out.replace("\n", "")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written once it is set."""
    opened = threading.Event()

    @contextlib.contextmanager
    def waiting(target: Path, mode: str) -> Iterator[Any]:
        assert opened.wait(60)
        with written_whole(target, mode) as file:
            yield file

    monkeypatch.setattr(checkpoint_io, "written_whole", waiting)
    return opened


def test_what_changes_after_a_save_is_not_in_the_file(tmp_path: Path, gate: threading.Event) -> None:
    writer, path = AtomicCheckpointIO(background=True), tmp_path / "last.ckpt"
    weight = torch.arange(60_000.0).view(200, 300)
    state = {"state_dict": {"weight": weight, "tied": weight.detach(), "turned": weight.t()}, "rates": [0.5]}
    torch.save(state, tmp_path / "now.ckpt")
    writer.save_checkpoint(state, path)
    weight.zero_()
    state["rates"].append(0.1)  # type: ignore[attr-defined]
    assert not path.exists()
    gate.set()
    writer.wait_until_written()
    loaded, now = (torch.load(file, weights_only=True) for file in (path, tmp_path / "now.ckpt"))
    assert loaded["rates"] == [0.5]
    for name, tensor in now["state_dict"].items():
        assert torch.equal(loaded["state_dict"][name], tensor)
        assert loaded["state_dict"][name].stride() == tensor.stride()
    tied = [loaded["state_dict"][name].untyped_storage().data_ptr() for name in ("weight", "tied")]
    assert tied[0] == tied[1], "tied weights are written once"


def test_shards_of_one_shape_are_not_taken_for_one_tensor(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        shards = {str(value): distribute_tensor(torch.full((2, 2), value), mesh) for value in (1.0, 2.0)}
        host = checkpoint_io.on_host({**shards, "tied": shards["1.0"].detach()})
    finally:
        distributed.destroy_process_group()
    assert [float(one.to_local()[0, 0]) for one in host.values()] == [1, 2, 1]
    assert host["tied"] is host["1.0"]


def test_the_end_of_a_trainer_waits_and_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = AtomicCheckpointIO(background=True)

    def ends(error: Exception | None) -> None:
        with contextlib.ExitStack() as end:
            end.callback(writer.teardown)
            if error is not None:
                raise error

    for before, seen in ((None, OSError), (ValueError("first"), ValueError)):
        writer.save_checkpoint({"weight": torch.zeros(2)}, tmp_path / "file" / "last.ckpt")
        with pytest.raises(seen):
            ends(before)


def test_what_is_rotated_away_stays_until_its_successor_is_whole(tmp_path: Path, gate: threading.Event) -> None:
    writer, old, new = AtomicCheckpointIO(background=True), tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    old.touch()
    (tmp_path / "file").touch()
    for path, kept in ((tmp_path / "file" / "new.ckpt", True), (new, False)):
        gate.clear()
        writer.save_checkpoint({"weight": torch.zeros(2)}, path)
        writer.remove_checkpoint(old)
        assert old.exists()
        gate.set()
        with pytest.raises(OSError, match="file") if kept else contextlib.nullcontext():
            writer.wait_until_written()
        assert old.exists() == kept
