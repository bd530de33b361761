"""``run=peer``: the scripts of ``scripts/peers`` as arms of a sweep beside ours, on the same work, measured alike."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from scripts.peers import job, loop_captured
from tests import instant_cells
from tests.instant_cells import InstantCells
from tests.processes import Pair
from tests.trainer.runs import SMALLEST
from trainer.config import compose
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run, find
from trainer.run import run
from trainer.settings import PEERS, Config
from trainer.telemetry.record import RunRecord

STEPS = 4
HOWS = ("eager", "compiled")
WORK = ["task=captioning", *SMALLEST["captioning"], "trainer.val_every_n_steps=0", f"trainer.max_steps={STEPS}"]
SHORT = ["trainer.log_every_n_steps=4", "trainer.warmup_steps=1", "trainer.checkpoint_every_n_steps=null"]
ARMS = "eager,'eager run=peer run.peer=loop_eager','eager run=peer run.peer=accelerate_regional'"


ON_A_CPU = sorted(set(PEERS) - {"loop_captured", "transformers_eager", "transformers_compiled"})
"""Those that train the task's network."""


def peer(name: str, *overrides: str) -> list[str]:
    return [*WORK, *SHORT, "run=peer", f"run.peer={name}", *overrides]


@pytest.mark.parametrize("devices", [1, 2])
def test_peers_take_turns_with_ours_and_are_started_by_torchrun_on_several_devices(
    devices: int, command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PEERS:
        monkeypatch.setitem(instant_cells.SPEEDS, f"peer {name}", 3.0)
    cells = InstantCells(monkeypatch)
    given = ["hydra.launcher.rounds=2", "trainer.val_every_n_steps=0", f"trainer.devices={devices}"]
    assert command_line("-m", "sweep=out", *given, f"hydra.launcher.arms=[{ARMS}]") == 0
    labels = [cell.record.label for cell in cells.ran]
    assert labels == ["eager", "peer loop_eager", "peer accelerate_regional"] * 2
    ours, theirs, _ = (cell.command for cell in cells.ran[:3])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "torch.distributed.run" not in ours
    assert (theirs[1:5] == torchrun) is (devices == 2)
    assert {"run=peer", "run.peer=loop_eager"} <= set(theirs)


def loss_of_the_loop_by_hand(folder: Path) -> float | None:
    """One of two processes, under what ``folder`` is called."""
    devices = ("trainer.accelerator=cpu", "trainer.devices=2", f"trainer.strategy={folder.name}")
    record = run(compose(peer("loop_eager", "run.backend=eager", *devices)), run_dir=folder, command=[])
    assert record.status == "finished", record.reason
    return record.final_loss


def loss_of_what_is_captured(folder: Path) -> float | None:
    """The steps of ``loop_captured``, taken without a graph."""

    class Called:
        replays = 1

        def __init__(self, step: Any, optimizer: Any, *, before: int) -> None:
            self.step = step

        def __call__(self, batch: Any) -> Any:
            return self.step(batch)

    loop_captured.Replayed = Called  # type: ignore[assignment,misc]
    job.ARMS["loop_eager"] = ("loop_captured", {})
    return loss_of_the_loop_by_hand(folder)


def test_a_sweep_with_a_peer_that_is_refused_runs_nothing(
    command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cells = InstantCells(monkeypatch)
    given = ["trainer.val_every_n_steps=4", "hydra.launcher.arms=[eager,'eager run=peer run.peer=loop_eager']"]
    assert command_line("-m", "sweep=out", *given) == 2
    assert "val_every_n_steps" in capfd.readouterr().err
    assert not cells.ran


@pytest.mark.xdist_group("two_processes")
def test_the_loop_by_hand_trains_on_two_devices(pair: Pair, tmp_path: Path) -> None:
    ddp, fsdp2 = (pair(loss_of_the_loop_by_hand, tmp_path / name)[0] for name in ("ddp", "fsdp2"))
    assert ddp == pytest.approx(fsdp2, rel=1e-6)
    captured = [pair(loss_of_what_is_captured, tmp_path / "captured" / name)[0] for name in ("ddp", "fsdp2")]
    assert captured == pytest.approx([ddp, ddp], rel=1e-6), "clipped over all shards, and stepped on each"
    record = RunRecord.load(tmp_path / "fsdp2")
    assert record.world_size == 2
    assert [one.rank for one in record.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.peer=torchtitan"], "run.peer='torchtitan' is not one of"),
        (["trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches=2 must be 1"),
        (["trainer.val_every_n_steps=5"], "trainer.val_every_n_steps=5 must be 0"),
        (["trainer.devices=2", "trainer.strategy=fsdp"], "trainer.strategy=fsdp must be one of"),
        (["trainer.strategy=fsdp2", "trainer.devices=2", "run.peer=lightning_compile"], "leaves the sharding"),
        (["trainer.strategy=fsdp2", "trainer.devices=2", "run.peer=transformers_eager"], "its Trainer shards by"),
        (["compile=whole"], "compile= is not for a peer"),
    ],
)
def test_what_cannot_be_compared_is_refused(edge: None, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        compose([*peer("loop_eager"), *overrides])


def test_a_peer_that_cannot_run_here_says_what_to_do(
    edge: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="1 processes were started; several take python -m torch"):
        run(compose(peer("loop_eager", "trainer.devices=2")), run_dir=tmp_path / "two", command=[])
    with pytest.raises(ValueError, match="a CUDA graph takes a CUDA device, leave it out here"):
        run(compose(peer("loop_captured", "trainer.accelerator=cpu")), run_dir=tmp_path / "cpu", command=[])
    with pytest.raises(ValueError, match="transformers has no network in the place of captioning's"):
        run(compose(peer("transformers_compiled")), run_dir=tmp_path / "captioning", command=[])
    packed = ["task=masked_lm", "task.data.packing=packed_documents", *peer("transformers_eager")[len(WORK) :]]
    with pytest.raises(ValueError, match="transformers has no network in the place of masked_lm's"):
        run(compose([*packed, "trainer.val_every_n_steps=0"]), run_dir=tmp_path / "packed", command=[])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install -e '.\[peers\]'"):
        run(compose(peer("transformers_eager")), run_dir=tmp_path / "none", command=[])
    with pytest.raises(ValueError, match=r"needs accelerate: pip install -e '.\[peers\]'"):
        run(compose(peer("accelerate_regional")), run_dir=tmp_path / "none", command=[])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Our eager run and every peer, a few steps each."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("peers")
    given = {"eager": [*WORK, *SHORT, "compile=eager"], **{name: peer(name, "run.backend=eager") for name in ON_A_CPU}}
    for name, overrides in given.items():
        torch.compiler.reset()
        assert run(compose(overrides), run_dir=folder / name, command=overrides).status == "finished"
    return find([folder])


def test_all_peers_have_our_losses(runs: list[Run]) -> None:
    losses = {run.record.label: run.record.final_loss for run in runs}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["eager"]), rel=1e-6)


def test_a_peer_that_compiles_has_compiled_its_network_or_its_blocks(runs: list[Run]) -> None:
    graphs = {run.directory.name: run.record.graphs or 0 for run in runs}
    assert graphs["eager"] == graphs["loop_eager"] == graphs["lightning_eager"] == 0
    assert min(graphs[name] for name in ON_A_CPU if not name.endswith("_eager")) >= 1
    assert graphs["accelerate_regional"] > graphs["loop_compile"], "kinds of blocks, and what is between them"


def test_peers_are_arms_of_their_own_beside_eager_in_a_comparison(runs: list[Run]) -> None:
    (found,) = compare(runs)
    assert found.unlike == []
    assert [row.cell.arm for row in found.rows] == ["eager", *(f"peer {name}" for name in ON_A_CPU)]
    assert all(row.ratio is not None for row in found.rows[1:])
    command = found.rows[1].cell.command
    assert command.startswith("python -m trainer task=captioning")
    assert "run.peer=accelerate_regional" in command
    assert "peer" not in compare(runs[:1])[0].verdict


def test_a_peer_that_compiled_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.compiler.set_stance("force_eager"):
        record = run(compose(peer("loop_compile", "run.backend=eager")), run_dir=tmp_path, command=[])
    assert record.status == "failed"
    assert record.reason == "RuntimeError: peer loop_compile compiled no graph"
    assert RunRecord.load(tmp_path).reason == record.reason
    assert f" · peer loop_compile · {record.device} · 32-true · " in capsys.readouterr().out


def loss_of_a_loop_of_ones_own(config: Config) -> float:
    """Mean loss of ``STEPS`` steps of the network that ``run.peer=transformers_eager`` trains."""
    from scripts.peers.transformers_trainer import matching_network

    task: Any = config.task
    L.seed_everything(config.seed, verbose=False)
    data, module = task.build_data(seed=config.seed), task.build_module(max_steps=STEPS)
    build, inputs = matching_network(task)
    module.net = model = build()
    set_up = module.configure_optimizers()
    data.setup("fit")
    losses = []
    for batch in itertools.islice(data.train_dataloader(), STEPS):
        loss = model(**inputs(batch)).loss
        set_up["optimizer"].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.gradient_clip_val)
        set_up["optimizer"].step()
        set_up["lr_scheduler"]["scheduler"].step()
        losses.append(loss.item())
    return sum(losses) / STEPS


@pytest.mark.parametrize(
    ("task", "network"), [("language_modelling", "GPT2LMHeadModel"), ("masked_lm", "BertForMaskedLM")]
)
def test_transformers_trainer_trains_its_own_network_as_a_loop_would(task: str, network: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    work = [f"task={task}", *SMALLEST[task], "trainer.val_every_n_steps=0", f"trainer.max_steps={STEPS}"]
    configs = [compose([*work, *peer("transformers_" + how, "run.backend=eager")[len(WORK) :]]) for how in HOWS]
    records = [run(config, run_dir=tmp_path / how, command=[]) for config, how in zip(configs, HOWS, strict=True)]
    assert [record.status for record in records] == ["finished"] * 2, records[-1].reason
    expected = loss_of_a_loop_of_ones_own(configs[0])
    assert [record.final_loss for record in records] == pytest.approx([expected] * 2, rel=1e-5)
    assert not records[0].graphs
    assert (records[1].graphs or 0) >= 1, "more where transformers' network has a graph break"
    said = records[0].report["network"]
    assert said["class"] == f"transformers.{network}"
    assert said["parameters"] == said["task_parameters"]  # the same sizes throughout
    rows = compare(find([tmp_path]))[0].rows
    assert all(any(flag.startswith("another network") for flag in row.flags) for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["loop_captured", "loop_reduce_overhead", "lightning_reduce_overhead"])
def test_graphs_of_peers_have_our_losses(name: str, tmp_path: Path) -> None:
    steps = ["trainer.max_steps=12", "trainer.log_every_n_steps=12"]
    ours = run(compose([*WORK, *SHORT, *steps]), run_dir=tmp_path / "ours", command=[])
    theirs = run(compose(peer(name, *steps)), run_dir=tmp_path / name, command=[])
    assert (ours.status, theirs.status) == ("finished", "finished"), theirs.reason
    assert theirs.steps == ours.steps == 12
    assert theirs.final_loss == pytest.approx(ours.final_loss, rel=1e-2)
