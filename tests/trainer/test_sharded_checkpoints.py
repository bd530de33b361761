"""Checkpoints cross strategies and numbers of processes: weights, optimizer states, counters stay to the last bit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import shutil
import threading
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.processes import Pair, RanksFailed, on_ranks
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.runs import train
from trainer.checkpoints import open_checkpoint
from trainer.loops import checkpoint_io
from trainer.loops.checkpoint_io import AtomicCheckpointIO
from trainer.loops.fsdp2 import FSDP2
from trainer.run_files import INDEX, META, beside, find_checkpoint, is_directory
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")

SAVED_AT = 3
KINDS = ("ddp", "directory", "file")
"""How two processes train, and what they then write."""
LOADING = ("ddp", "directory")


class Small(L.LightningModule):
    """Blocks, a buffer, weights whose rows no number of processes divides, tied ones, two groups and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head, self.tied = nn.Linear(6, 5), nn.Linear(6, 5)
        self.tied.weight = self.head.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        batch = self.norm(batch)
        loss: Tensor = (self.head(batch) + self.tied(batch)).square().mean() + 0.01 * torch.rand(())
        return loss

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.head.parameters(), "weight_decay": 0.0},
            {"params": [*self.blocks.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Seen(L.Callback):
    """What is there when training begins, and at its end."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = state_of(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.end = state_of(trainer)


def state_of(trainer: L.Trainer) -> dict[str, str]:
    """A digest of each tensor and number of the training, by name."""
    states: dict[str, Any] = {"weights": trainer.lightning_module.state_dict(), "steps": trainer.global_step}
    states |= {"optimizer": [one.state_dict() for one in trainer.optimizers]}
    states |= {"schedule": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]}
    return dict(digests(states))


def digests(tree: Any, name: str = "") -> Any:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from digests(value, f"{name}.{key}")
        return
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    if isinstance(tree, Tensor):
        tree = (str(tree.dtype), tuple(tree.shape), tree.detach().contiguous().numpy().tobytes())
    yield name, hashlib.sha256(repr(tree).encode()).hexdigest()


def fit(
    folder: Path,
    kind: str,
    resume: Path | None = None,
    *callbacks: L.Callback,
    name: str = "last",
    steps: int = SAVED_AT,
    **io: bool,
) -> Seen:
    """Train; saves ``folder/<name>.ckpt`` after each step and keeps the last."""
    torch.manual_seed(0)
    seen = Seen()
    strategy: Any = {"one": "auto", "ddp": "ddp", "directory": FSDP2()}.get(kind)
    trainer = quiet_trainer(
        enable_checkpointing=True,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy or FSDP2(save_distributed_checkpoint=False),
        max_steps=steps,
        callbacks=[
            seen,
            *callbacks,
            ModelCheckpoint(folder, name, every_n_train_steps=1, save_top_k=1, enable_version_counter=False),
        ],
        plugins=[AtomicCheckpointIO(**io)],
    )
    data: Any = torch.randn(64, 6)
    trainer.fit(Small(), DataLoader(data, batch_size=4), ckpt_path=resume)
    return seen


def across(folder: str, saving: tuple[str, ...], loading: tuple[str, ...]) -> dict[str, Any]:
    """On each rank: save as each kind of ``saving``; go on from each of these and of one process as ``loading``."""
    facts: dict[str, Any] = {kind: fit(Path(folder) / kind, kind).end for kind in saving}
    for before in (*KINDS, "one"):
        for after in loading:
            resume = Path(folder) / before / "last.ckpt"
            facts[f"{before} to {after}"] = fit(Path(folder) / "on", after, resume, steps=SAVED_AT + 1).begin
    return facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crossing")


@pytest.fixture(scope="module")
def crossed(folder: Path, pair: Pair) -> dict[str, Any]:
    """What there is at the end of each kind, and at the beginning of what goes on from it."""
    single = fit(folder / "one", "one").end
    ranks = pair(across, str(folder), KINDS, LOADING)
    # Running means are each process's own, until they come from a checkpoint: the first one's.
    assert [name for name in ranks[0] if ranks[0][name] != ranks[1][name]] == [*KINDS]
    return {**ranks[0], "one": single}


def test_any_kind_goes_on_from_any_other_to_the_last_bit(
    crossed: dict[str, Any], folder: Path, subtests: pytest.Subtests
) -> None:
    assert [is_directory(folder / kind / "last.ckpt") for kind in KINDS] == [False, True, False]
    for before in (*KINDS, "one"):
        for after in LOADING:
            with subtests.test(f"{before} to {after}"):
                assert crossed[f"{before} to {after}"] == crossed[before]


def test_one_process_goes_on_from_each(crossed: dict[str, Any], folder: Path, subtests: pytest.Subtests) -> None:
    for before in KINDS:
        with subtests.test(before):
            resume = folder / before / "last.ckpt"
            assert fit(folder / "alone", "one", resume, steps=SAVED_AT + 1).begin == crossed[before]


def test_four_processes_go_on_from_two_and_one(crossed: dict[str, Any], folder: Path) -> None:
    for begins in on_ranks(across, str(folder), (), ("directory",), ranks=4):
        for before in (*KINDS, "one"):
            assert begins[f"{before} to directory"] == crossed[before], before


def test_keys_and_states_are_those_of_one_process(crossed: dict[str, Any], folder: Path) -> None:
    one = torch.load(folder / "one" / "last.ckpt", weights_only=True)
    for kind in KINDS:
        loaded = AtomicCheckpointIO().load_checkpoint(folder / kind / "last.ckpt", weights_only=True)
        assert shapes(loaded["state_dict"]) == shapes(one["state_dict"])
        assert shapes(loaded["optimizer_states"]) == shapes(one["optimizer_states"])
        module = Small()
        module.load_state_dict(loaded["state_dict"])
        (optimizer,), _ = module.configure_optimizers()
        optimizer.load_state_dict(loaded["optimizer_states"][0])
        found = digests({"weights": module.state_dict(), "optimizer": [optimizer.state_dict()]})
        assert dict(found).items() <= crossed[kind].items()


def shapes(tree: Any) -> Any:
    return checkpoint_io.mapped(tree, lambda _, tensor: (type(tensor), tensor.shape, tensor.dtype))


# ---- what is not whole ---------------------------------------------------------------------------------------------


def test_a_directory_that_is_damaged_or_runs_code_is_refused(
    crossed: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    whole = folder / "directory" / "last.ckpt"
    assert open_checkpoint(whole)["global_step"] == SAVED_AT

    class RunsCode:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        place = content.index(b"data/0") + 80  # in the first tensor
        content[place : place + 4] = bytes(byte ^ 255 for byte in content[place : place + 4])
        file.write_bytes(content)

    shards = [file.name for file in whole.glob("*.distcp")]
    assert len(shards) == 2
    for what, spoil, complaint in (
        ("flipped", lambda path: flip(path / shards[0]), "the file is damaged: .* is not what its checksum says"),
        ("cut", lambda path: os.truncate(path / shards[1], 100), "is not what its checksum says"),
        ("lost", lambda path: (path / shards[1]).unlink(), "No such file"),
        ("malicious", lambda path: (path / INDEX).write_bytes(pickle.dumps(RunsCode())), "would call posix.system"),
        ("no optimizer", lambda path: rewritten(path / META), "it holds no optimizer_states"),
    ):
        path = tmp_path / what
        shutil.copytree(whole, path)
        spoil(path)
        with pytest.raises(ValueError, match=complaint) as raised:
            open_checkpoint(path)
        assert len(str(raised.value).splitlines()) == 1


def rewritten(file: Path) -> None:
    loaded = torch.load(file, weights_only=True)
    torch.save({name: value for name, value in loaded.items() if name != "optimizer_states"}, file)


def refused(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(folder: str) -> list[str]:
    """On two ranks: the second has a full disk; the first cannot put the whole directory in place, each while training
    waits and beside it; somebody's files are there; then all is well."""
    said, path = [], Path(folder) / "directory"
    theirs = path / "last.ckpt" / "thesis.txt"

    def attempt(*, background: bool = False) -> None:
        try:
            fit(path, "directory", background=background)
        except OSError as error:
            said.append(str(error))

    for fault, background in product(("FileSystemWriter.write_data", "replace"), (False, True)):
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == ("1" if fault.endswith("write_data") else "0"):
                patch.setattr(f"trainer.loops.checkpoint_io.{fault}", refused)
            attempt(background=background)
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.touch()
    attempt()
    theirs.unlink(missing_ok=True)
    attempt()
    return [*said, *sorted(file.name for file in path.iterdir())]


def test_a_part_that_cannot_be_written_ends_all_with_its_reason(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(broken, str(tmp_path))
    last = tmp_path / "directory" / "last.ckpt"
    assert one == [
        *[f"[Errno 28] No space left on device (rank 1): '{last}'"] * 2,
        *[f"[Errno 28] No space left on device: '{last}'"] * 2,
        f"[Errno 17] a folder with other files than a checkpoint's: '{last}'",
        "last.ckpt",
    ]
    assert other == one


class Permits(L.Callback):
    """The second process writes each directory only after another step of all; notes what is whole before that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self._permits = folder, list[list[str]](), threading.Semaphore(0)
        self._write = FileSystemWriter.write_data

    def write_data(self, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            assert self._permits.acquire(timeout=60), "the training waits for what is written beside it"
        return self._write(*arguments)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(sorted(path.name for path in self.folder.glob("*") if is_directory(path)))
        trainer.strategy.barrier()  # all have looked
        if trainer.global_step > 1:
            self._permits.release()

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._permits.release()


def beside_training(folder: Path) -> tuple[dict[str, str], dict[str, str], list[list[str]]]:
    """On two ranks: the state at the end, what a directory written beside the training holds, what was whole when."""
    permits = Permits(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", lambda *arguments: permits.write_data(*arguments))
        end = fit(folder, "directory", None, permits, name="{step}", steps=4, background=True).end
    last = folder / "step=4.ckpt"
    begin = fit(folder / "on", "directory", last, steps=5).begin
    return end, begin, [*permits.seen, sorted(path.name for path in folder.glob("*") if path.name != "on")]


def test_training_continues_while_a_directory_is_written_and_the_one_before_stays(pair: Pair, tmp_path: Path) -> None:
    (end, *one), (_, *other) = pair(beside_training, tmp_path)
    assert one == other == [end, [[], [], ["step=1.ckpt"], ["step=2.ckpt"], ["step=4.ckpt"]]]


def full(folder: str, *options: str) -> None:
    """On two ranks: the first one's disk is full when it writes a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.loops.checkpoint_io.written_whole", refused)
        patch.setattr("trainer.loops.rank_failures.LEARN_SECONDS", 0.5)  # the second one has nothing to say of it
        train(Path(folder), "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=6", *options, task="micro")
    os._exit(1)  # as the command does


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["trainer.checkpoint_every_n_steps=2"], 2),
        (["trainer.checkpoint_every_n_steps=3", "trainer.async_checkpoints=true"], 6),
    ],
)
def test_a_file_that_cannot_be_written_ends_all(options: list[str], steps: int, pair: Pair, tmp_path: Path) -> None:
    with contextlib.suppress(RanksFailed):
        pair(full, str(tmp_path), *options)
    record = RunRecord.load(tmp_path)
    file = tmp_path / "checkpoints" / "last.ckpt"
    assert (record.status, record.reason) == ("failed", f"OSError: [Errno 28] No space left on device: '{file}'")
    assert record.steps == steps


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    crossed: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three moves that put a new directory in place, and a kill before each of them."""
    calls: list[str] = []

    def counted(name: str, real: Any, limit: int, *arguments: Any) -> None:
        calls.append(name)
        if len(calls) > limit:
            raise KeyboardInterrupt
        real(*arguments)

    for limit in range(4):
        run = tmp_path / str(limit)
        path = run / "checkpoints" / "last.ckpt"
        shutil.copytree(folder / "directory" / "last.ckpt", path)
        shutil.copytree(folder / "directory" / "last.ckpt", beside(path, "new"))
        calls.clear()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for owner, name in ((os, "rename"), (shutil, "rmtree")):
                patch.setattr(owner, name, partial(counted, name, getattr(owner, name), limit))
            checkpoint_io.replace(path)
        assert open_checkpoint(find_checkpoint(str(run)))["global_step"] == SAVED_AT
        assert open_checkpoint(find_checkpoint(str(path)))["global_step"] == SAVED_AT
    assert calls == ["rename", "rename", "rmtree"]


# ---- the command line ----------------------------------------------------------------------------------------------


def trained(folder: Path, runs: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, int | None, str | None]]:
    """On two ranks: what the records say of runs one after the other, of one under regional where it ends in a file."""
    facts = {}
    for name, changes in runs.items():
        two = ("trainer.devices=2", "trainer.val_every_n_steps=2")
        strategy = "regional" if name == "file" else "eager"
        record = train(folder / name, *two, *changes, task="micro", strategy=strategy, backend="eager")
        facts[name] = record.status, record.steps, record.reason
    return facts


def test_a_run_goes_on_by_the_command_line(pair: Pair, tmp_path: Path) -> None:
    fsdp2, background = "trainer.strategy=fsdp2", "trainer.async_checkpoints=true"
    resume = f"resume={tmp_path / 'saved'}"
    runs = {
        "saved": (fsdp2, "trainer.max_steps=4", background),
        "file": (fsdp2, "trainer.max_steps=6", resume, "trainer.sharded_checkpoints=false", background),
        "ddp": ("trainer.strategy=ddp", "trainer.max_steps=6", resume, background),
    }
    facts, _ = pair(trained, tmp_path, runs)
    assert facts == {name: ("finished", 4 if name == "saved" else 6, None) for name in facts}
    for name in facts:
        path = tmp_path / name / "checkpoints" / "last.ckpt"
        assert is_directory(path) == (name == "saved")
        assert len(AtomicCheckpointIO().load_checkpoint(path)["callbacks"]["Checkpoints"]["ranks"]) == 2
    assert is_directory(tmp_path / "saved" / "checkpoints" / "best.ckpt")
    alone = train(tmp_path / "alone", f"resume={tmp_path / 'saved'}", "trainer.max_steps=6", task="micro")
    assert (alone.status, alone.steps) == ("finished", 6)
