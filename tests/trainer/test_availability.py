"""What a machine does not have, and what cannot fit into it, is one line and exit code 2 before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tasks import base as resources
from tasks.captioning.task import Shapes
from tasks.micro.task import Micro
from trainer import settings
from trainer.build import build_trainer
from trainer.config import compose
from trainer.run import run
from trainer.settings import Config

TINY = ["task=micro", "task.batch_size=4", "task.width=16", "trainer.max_steps=1", "trainer.val_every_n_steps=0"]


def refused(config: Config, folder: Path, command: list[str] | None = None) -> str:
    with pytest.raises(ValueError, match=r"task|trainer") as caught:
        run(config, run_dir=folder, command=command or [])
    (line,) = str(caught.value).splitlines()
    assert not (folder / "error.log").exists()
    return line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("accelerator", "gpu", "trainer.accelerator=gpu: No supported gpu backend found!"),
        ("accelerator", "cdua", "Available names are: "),
        ("accelerator", "cuda", "trainer.accelerator=cuda: "),
        ("devices", "cpu", "trainer.devices=cpu: "),
        ("devices", "0,1", "trainer.devices=0,1: "),
        ("strategy", "dpp", "Example choices: auto, ddp"),
        ("strategy", "fsdp3", "Example choices: auto, ddp"),
        ("strategy", "fsdp", "trainer.strategy=fsdp: "),
        ("precision", "transformer-engine", "trainer.precision=transformer-engine: "),
    ],
)
def test_what_the_machine_does_not_have_is_refused_by_its_option(
    option: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_data(*_: object, **__: object) -> None:
        raise AssertionError("the options come before the data")

    monkeypatch.setattr(Micro, "build_data", build_data)
    given = [f"trainer.{option}='{value}'", *["trainer.gradient_clip_val=null"] * (value == "fsdp")]
    line = refused(compose([*TINY, *given]), tmp_path)
    assert line.startswith(f"trainer.{option}={value}: ")
    assert said in line


def test_a_gpu_that_is_certainly_not_there_is_refused_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "DEVICES", tmp_path)
    monkeypatch.setattr(settings.sys, "platform", "linux")
    monkeypatch.delenv(settings.HIDES, raising=False)
    asks = compose([*TINY, "trainer.accelerator=gpu"])
    with pytest.raises(ValueError, match=r"^trainer\.accelerator=gpu: this machine has no GPU$"):
        settings.require_present(asks)
    settings.require_present(compose(TINY))
    (tmp_path / "kfd").touch()  # AMD's
    settings.require_present(asks)
    monkeypatch.setenv(settings.HIDES, "")
    with pytest.raises(ValueError, match=r"^trainer\.accelerator=gpu: CUDA_VISIBLE_DEVICES= hides all GPUs$"):
        settings.require_present(asks)


def test_an_error_that_is_no_options_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cluster() -> None:
        raise KeyError("SLURM_NODEID")

    monkeypatch.setattr("trainer.build.cluster", cluster)
    with pytest.raises(KeyError, match="SLURM_NODEID"):
        build_trainer(compose([*TINY, "trainer.precision=auto"]), tmp_path, [])


def test_clipping_that_lightnings_fsdp_does_not_do_is_refused(tmp_path: Path) -> None:
    line = refused(compose([*TINY, "trainer.strategy=fsdp"]), tmp_path)
    assert "use trainer.strategy=fsdp2, or trainer.gradient_clip_val=null" in line


def test_options_of_fsdp2_are_checked() -> None:
    for option in ("reshard_after_forward=false", "reshard_after_backward=false", "reduce_each_micro_batch=true"):
        with pytest.raises(ValueError, match=f"{option} is for"):
            compose([*TINY, f"trainer.{option}"])
    with pytest.raises(ValueError, match="the scaler of float16 knows no shards"):
        compose([*TINY, "trainer.strategy=fsdp2", "trainer.precision=16-mixed"])


@pytest.mark.parametrize("initialise", ["auto", "host"])
def test_a_network_that_cannot_fit_is_refused_by_its_options(initialise: str, tmp_path: Path) -> None:
    given = ["task.width=10000000", f"task.initialise={initialise}"]
    line = refused(compose([*TINY, *given]), tmp_path, [*TINY, *given])
    assert line.startswith("task=micro task.batch_size=4 task.width=10000000 task.initialise=")
    size = {"auto": "100,000,110,000,010 parameters: needs at least 372,529.44 GiB", "host": "400000000000000 bytes"}
    assert size[initialise] in line


def test_generated_examples_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    line = refused(compose([*TINY, "task.model=simple_linear", "task.batch_size=100000000000"]), tmp_path)
    assert line.startswith("task.batch_size=100000000000, task.train_examples=1600000000000")
    assert "GiB of memory, this machine has" in line


def test_loader_processes_that_cannot_be_started_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^task\.data\.num_workers=100000000 must be at most 1024 processes$"):
        Shapes(num_workers=100_000_000)


def test_a_container_and_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\nSwapTotal: 1024 kB\n")
    monkeypatch.setattr(resources, "PROC", tmp_path)
    monkeypatch.setattr(resources, "CGROUPS", tmp_path)
    assert (resources.free_bytes(), resources.total_bytes()) == (2 << 20, 5 << 20)
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    assert (resources.free_bytes(), resources.total_bytes()) == (2 << 20, 4 << 20), "memory of the container and swap"
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    assert resources.free_bytes() == 1 << 20
    (tmp_path / "meminfo").unlink()
    (tmp_path / "memory.max").unlink()
    resources.require_memory("anything", sys.maxsize)
