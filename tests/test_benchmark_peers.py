"""``python -m scripts.benchmark_peers``: ours and peers in turns, on the same work, under the same ruler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import benchmark_peers
from scripts.benchmark_peers import PEERS
from tests import instant_cells
from tests.instant_cells import InstantCells
from tests.processes import Pair
from tests.trainer.runs import SMALLEST
from trainer.config import compose
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run, find
from trainer.telemetry.record import RunRecord

STEPS = 4
WORK = ["task=captioning", *SMALLEST["captioning"], "trainer.val_every_n_steps=0", f"trainer.max_steps={STEPS}"]
WORK.append("task.initialise=device")  # what a loop without Lightning has to see to itself
SHORT = ["trainer.log_every_n_steps=4", "trainer.warmup_steps=1", "trainer.checkpoint_every_n_steps=null"]


@pytest.fixture
def instant(edge: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InstantCells:
    """Cells that end at once, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    for name in PEERS:
        monkeypatch.setitem(instant_cells.SPEEDS, f"peer {name}", 3.0)
    return InstantCells(monkeypatch)


def benchmark(*arguments: str) -> int:
    return benchmark_peers.main(["--out", "out", *arguments])


def test_arms_take_turns_from_cold_starts_and_a_later_call_runs_what_is_missing(
    instant: InstantCells, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ["--ours", "eager", "[whole]", "--peers", "loop_eager", "accelerate_regional", "--", "trainer.max_steps=9"]
    assert benchmark(*arms) == 0
    turn = ["compile=eager", "compile=[whole]", "peer=loop_eager", "peer=accelerate_regional"]
    assert [cell.arm[0] for cell in instant.ran] == turn
    table = capsys.readouterr().out.partition("[4/4]")[2]
    assert "peer loop_eager" in table
    assert "whole" in table
    assert benchmark("--rounds", "2", *arms) == 0
    assert [(cell.arm[0], cell.round) for cell in instant.ran[4:]] == [(arm, 2) for arm in turn]
    assert {cell.start for cell in instant.ran} == {"cold"}
    assert len({cell.caches for cell in instant.ran}) == 8
    assert [cell.command[1:3] for cell in instant.ran[1:3]] == [["-m", "trainer"], ["-m", "scripts.benchmark_peers"]]


def test_on_several_devices_peers_are_started_by_torchrun(instant: InstantCells) -> None:
    assert benchmark("--peers", "loop_eager", "--", "trainer.devices=2", "trainer.strategy=ddp") == 0
    ours, peer = instant.ran
    assert ours.command[1:3] == ["-m", "trainer"]
    assert peer.command[1:7] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "scripts.benchmark_peers"),
    ]


def test_one_peer_on_several_devices_says_how_it_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edge: None
) -> None:
    given = ["peer=loop_eager", *WORK, *SHORT, "trainer.devices=2", "--out", str(tmp_path / "run")]
    assert benchmark_peers.main(given) == 2
    assert "1 processes were started" in capsys.readouterr().err


def loss_of_the_loop_by_hand(folder: Path) -> float | None:
    """One of two processes, under what ``folder`` is called."""
    from scripts.peers import run

    devices = ("trainer.accelerator=cpu", "trainer.devices=2", f"trainer.strategy={folder.name}")
    record = run("loop_eager", compose([*WORK, *SHORT, *devices]), run_dir=folder, command=[], backend="eager")
    assert record.status == "finished", record.reason
    return record.final_loss


@pytest.mark.xdist_group("two_processes")
def test_the_loop_by_hand_trains_on_two_devices(pair: Pair, tmp_path: Path) -> None:
    ddp, fsdp2 = (pair(loss_of_the_loop_by_hand, tmp_path / name)[0] for name in ("ddp", "fsdp2"))
    assert ddp == pytest.approx(fsdp2, rel=1e-6)
    record = RunRecord.load(tmp_path / "fsdp2")
    assert record.world_size == 2
    assert [one.rank for one in record.ranks] == [0, 1]


def test_one_that_fails_leaves_the_others_and_is_run_again(
    instant: InstantCells, capsys: pytest.CaptureFixture[str]
) -> None:
    instant.fails = lambda cell: cell.arm == ("peer=loop_compile",)
    assert benchmark("--peers", "loop_compile", "loop_eager") == 1
    said = capsys.readouterr().out
    assert "run what failed again with: python -m scripts.benchmark_peers --out out --peers" in said
    assert "failed: RuntimeError: no" in said
    instant.fails = lambda cell: False
    assert benchmark("--peers", "loop_compile", "loop_eager") == 0
    assert [cell.arm[0] for cell in instant.ran[3:]] == ["peer=loop_compile"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "loop"], "error: peer=loop is not one of"),
        (["--", "trainer.accumulate_grad_batches=2"], "error: trainer.accumulate_grad_batches=2 must be 1"),
        (["--peers", "torchtitan"], "error: peer=torchtitan is not one of"),
        (
            ["--", "trainer.devices=2", "trainer.strategy=fsdp"],
            "error: trainer.strategy=fsdp must be auto or ddp or fsdp2",
        ),
        (
            ["--", "trainer.devices=2", "trainer.strategy=fsdp2"],
            "error: trainer.strategy=fsdp2: peer=lightning_compile: plain Lightning leaves the sharding",
        ),
        (["--ours", "wohle"], "error: compile=wohle is not an option; near: whole"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(
    instant: InstantCells, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert benchmark(*arguments) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not Path("out").exists()


def test_a_peer_whose_library_is_missing_is_refused_with_what_to_do(
    instant: InstantCells, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "accelerate" else object())
    assert benchmark() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install -e '.[peers]'" in line
    assert line.endswith("--peers loop_eager loop_compile lightning_compile")
    assert instant.ran == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Our eager run and every peer, a few steps each."""
    pytest.importorskip("accelerate")
    from trainer.run import run

    folder = tmp_path_factory.mktemp("peers")
    run(compose([*WORK, *SHORT, "compile=eager"]), run_dir=folder / "eager", command=[*WORK, *SHORT, "compile=eager"])
    for name in PEERS:
        torch.compiler.reset()
        given = [f"peer={name}", *WORK, *SHORT, "--backend", "eager", "--out", str(folder / name)]
        assert benchmark_peers.main(given) == 0
    return find([folder])


def test_all_peers_have_our_losses(runs: list[Run]) -> None:
    losses = {run.record.label: run.record.final_loss for run in runs}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["eager"]), rel=1e-6)


def test_a_peer_that_compiles_has_compiled_its_blocks(runs: list[Run]) -> None:
    records = {run.directory.name: run.record for run in runs}
    counts = {name: (record.regions, record.regions_compiled) for name, record in records.items()}
    assert counts == {
        "eager": (None, None),
        "loop_eager": (None, None),
        "loop_compile": (1, 1),
        "lightning_compile": (1, 1),
        "accelerate_regional": (4, 4),  # two encoder and two decoder blocks
    }
    graphs = {name: record.graphs or 0 for name, record in records.items()}
    assert graphs["eager"] == graphs["loop_eager"] == 0
    assert graphs["accelerate_regional"] > graphs["loop_compile"] >= 1


def test_peers_are_arms_of_their_own_beside_eager_in_a_comparison(runs: list[Run]) -> None:
    (found,) = compare(runs)
    assert found.unlike == []
    assert [row.cell.arm for row in found.rows] == ["eager", *sorted(f"peer {name}" for name in PEERS)]
    assert all(row.ratio is not None for row in found.rows[1:])
    command = found.rows[1].cell.command
    assert command.startswith(
        "python -m scripts.benchmark_peers --backend eager peer=accelerate_regional task=captioning"
    )
    assert "peer" not in compare(runs[:1])[0].verdict


def test_a_peer_that_compiled_nothing_has_failed(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert (
            benchmark_peers.main(["peer=loop_compile", *WORK, *SHORT, "--backend", "eager", "--out", str(tmp_path)])
            == 1
        )
    record = RunRecord.load(tmp_path)
    assert record.status == "failed"
    assert record.reason == "NotCompiled: peer loop_compile compiled 0 graphs and none of its 1 regions"
