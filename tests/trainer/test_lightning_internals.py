"""Lightning's and torch's private names: one that is gone ends nothing, and a patch that nobody needs is found."""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.torch_version import TorchVersion

from strategies import Regional, torch_patches
from tests.conftest import ROOT
from tests.processes import on_ranks
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.loops.lightning import LightningLoop

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def oldest(package: str) -> str:
    """The lowest version that pyproject.toml allows."""
    (found,) = (line for line in PROJECT["dependencies"] if line.startswith(f"{package}>="))
    return found.removeprefix(f"{package}>=").split(",")[0]


def renamed() -> None:
    """Import our own anew, as if Lightning had renamed a class."""
    from lightning.fabric.utilities import exceptions

    del exceptions.MisconfigurationException
    ours = [name for name in sys.modules if name.partition(".")[0] in ("trainer", "strategies", "tasks")]
    for name in ours:
        del sys.modules[name]
    for name in ("trainer.callback", "trainer.loops.lightning"):
        importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.xdist_group("two_processes")
def test_a_renamed_private_class_does_not_break_the_import() -> None:
    on_ranks(renamed, ranks=1)


def test_a_training_under_an_untried_lightning_goes_on_and_names_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(L.pytorch, "__version__", "2.7.0")
    callback = Compile([Regional(backend="aot_eager")], blocks=("layers",))
    fit(Blocks(), tmp_path, [callback])
    reason = "Lightning 2.7.0 was not tried: pip install"
    assert callback.record.regions_compiled == 3
    assert callback.record.audits.verdict == "clean"
    loop = LightningLoop(L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path))
    assert reason in next(iter(loop.capture_obstacles()))


def test_the_pin_is_the_one_that_messages_name() -> None:
    assert any(line.startswith("lightning>=2.6,<2.7") for line in PROJECT["dependencies"])


# ---- torch's: each fails when its patch in strategies/torch_patches.py can go ----


def test_faults_of_torch_2_11_are_avoided_as_long_as_it_is_supported() -> None:
    assert TorchVersion(oldest("torch")) < "2.12", "fixed in 2.12: delete faults_avoided and test_inductor_faults.py"


def test_libraries_still_ask_torch_whether_a_step_is_captured() -> None:
    with torch_patches.as_capturing():
        assert torch.cuda.is_current_stream_capturing(), "torch asks by another name: as_capturing does nothing"
    asks = pytest.importorskip("transformers.utils.import_utils")
    assert "is_current_stream_capturing" in inspect.getsource(asks), "transformers does not ask: delete as_capturing"


def test_inductor_still_adds_an_embeddings_gradient_in_any_order() -> None:
    from torch._inductor import decomposition

    gradient = torch.ops.aten.embedding_dense_backward.default
    assert gradient in decomposition.decompositions, "Inductor calls eager's kernel: delete embeddings_as_in_eager"
    source = inspect.getsource(decomposition.decomp_embedding_dense_backward)
    assert "index_put" in source, "no atomics: delete embeddings_as_in_eager"
