"""Checkpoints written while training continues hold the step at which they were asked for, and lose no error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from trainer.loops import checkpoint_io
from trainer.loops.checkpoint_io import AtomicCheckpointIO
from trainer.telemetry.serialization import written_whole


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
