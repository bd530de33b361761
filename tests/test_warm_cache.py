"""``python -m scripts.warm_cache``: fills a store without a trace elsewhere, lists, verifies and prunes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.warm_cache import main
from strategies.cached.store import ArtifactStore
from tests.conftest import ROOT
from tests.trainer.runs import SMALLEST

FACTS = {"torch": "2.99.0 abc", "device": {"name": "a device"}, "strategies": [{"name": "regional"}]}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path / "store"))
    for number, age_days in ((1, 40), (2, 0)):
        fingerprint = f"{number:064x}"
        name = store.save(b"x" * 1000 * number, fingerprint=fingerprint, facts=FACTS, artifacts=["inductor a"])
        for file in Path(store.root).glob(f"{name}.*"):
            os.utime(file, (time.time() - age_days * 86400,) * 2)
    return store


def test_list_says_what_is_there(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", store.root]) == 0
    out = capsys.readouterr().out
    for text in ("2 bundles", "2.99.0", "a device", "regional", "unsigned"):
        assert text in out


def test_an_empty_store_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path / "none")]) == 0
    assert "0 bundles" in capsys.readouterr().out


def test_verify_fails_when_a_bundle_would_be_refused(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", store.root]) == 0
    bundle = next(Path(store.root).glob("*.bundle"))
    bundle.write_bytes(bundle.read_bytes() + b"changed")
    assert main(["list", store.root]) == 0, "a listing reads manifests only"
    assert main(["verify", store.root]) == 1
    assert "1 refused" in capsys.readouterr().out


def test_prune_by_age_and_by_size(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", store.root, "--older-than-days", "30"]) == 0
    assert "removed 1 bundles" in capsys.readouterr().out
    assert len(store.bundles()) == 1
    assert main(["prune", store.root, "--max-gib", "0"]) == 0
    assert store.bundles() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune", "/nowhere"], "--max-gib or --older-than-days"),
        (["list", "nonsense://x"], "nonsense"),
        (["list", "/nowhere", "--key-file", "/no/key"], "--key-file='/no/key': No such file"),
        (["fill", "compile=hole"], "compile=hole is not an option; near: whole"),
        (["fill", "compile=regional"], "add 'cached' to the strategies"),
        (["fill", "compile=[regional,cached]", "compile.cached.read_only=true"], "read_only=true stores nothing"),
        (["fill", "compile=[regional,cached]", "compile.cached.max_gib=0"], "compile.cached.max_gib=0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err


def test_help_shows_examples_without_importing_torch() -> None:
    code = (
        "import sys; from scripts.warm_cache import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "fill task=captioning compile=[regional,cached]" in done.stdout


def test_a_filled_store_leaves_no_line_that_leads_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], edge: None
) -> None:
    # From a folder of the user's own, and with a backend whose graphs cannot be cached: nothing is stored, quickly.
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text(
        "# @package _global_\ncompile:\n  regional:\n    backend: aot_eager\n"
        f"  cached:\n    url: {tmp_path / 'store'}\n"
    )
    given = [*SMALLEST["captioning"], "trainer=debug", "trainer.progress=none", "parity=off", "on_slower=warn"]
    arguments = ["fill", "--config-dir", str(tmp_path), "--steps", "1", "compile=[regional,cached]", "experiment=ours"]
    assert main([*arguments, *given]) == 1
    said = capfd.readouterr()
    assert "nothing stored: nothing was compiled by Inductor" in said.err
    assert "captioning · cached+regional · finished" in said.out
    assert "--logdir" not in said.out


def test_a_config_dir_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill", "--config-dir", "/nowhere", "compile=[regional,cached]"]) == 2
    assert capsys.readouterr().err == "error: --config-dir='/nowhere' is not a folder\n"
