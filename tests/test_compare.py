"""``python -m scripts.compare``: what it prints and writes, what it refuses, and that it starts at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compare import main
from scripts.report import main as report
from tests.conftest import ROOT
from tests.report.records import save, static
from tests.report.scenarios import SCALED


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(static(), tmp_path_factory.mktemp("sweep"))


def test_a_sweep_comes_to_a_table_and_a_verdict(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--steps", "700"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert "verdict: for fewer than " in text


def test_markdown_and_json_are_printed_in_the_place_of_tables(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["workload"] == "captioning"
    assert main([str(sweep), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## captioning\n")


def test_runs_on_several_numbers_of_devices_are_a_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = str(save(next(iter(SCALED.values())), tmp_path / "runs"))
    assert main([folder]) == 0
    said = capsys.readouterr().out
    assert "scaling: captioning · regional" in said
    assert "2 devices ddp" in said
    assert main([folder, "--markdown"]) == 0
    assert "| 2 devices fsdp2 | 2 | 64.0 |" in capsys.readouterr().out
    assert report([folder, "-o", str(tmp_path / "page.html")]) == 0
    assert "Scaling: captioning" in (tmp_path / "page.html").read_text()


def test_a_reader_that_closes_early_is_no_error(sweep: Path) -> None:
    command = [sys.executable, "-m", "scripts.compare", str(sweep), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=200, check=False)
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")
