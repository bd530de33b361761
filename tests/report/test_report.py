"""The report: one page that needs nothing else, shows every arm, says what is missing and trusts no record."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripts.report import main
from tests.report.records import ragged, record, save, static
from trainer.report.comparison import compare_runs as compare
from trainer.report.pictures import PICTURES
from trainer.report.runs import Run, find
from trainer.telemetry.record import Event, RunRecord

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}
LOADS = ("src", "href", "srcset", "data", "action", "poster", "background")
"""Attributes by which a page takes something from elsewhere."""


class Page(HTMLParser):
    """What a browser would make of it: open elements, attributes, and the text that is shown."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def figures(self) -> list[str]:
        return [attributes["id"] or "" for tag, attributes in self.tags if tag == "figure"]


def report(records: Sequence[RunRecord], folder: Path, *arguments: str) -> str:
    """The page of ``records``."""
    out = folder / "report.html"
    assert main([str(save(records, folder / "runs")), "-o", str(out), *arguments]) == 0
    return out.read_text()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two workloads, one of them ragged with buckets and a failed cell."""
    return report([*static(rounds=2), *ragged()], tmp_path_factory.mktemp("report"))


def test_single_runs_have_no_number_in_large_type(html: str, tmp_path: Path) -> None:
    assert 'class="headline"' in html
    one = report([each for each in static(rounds=1) if each.start == "cold"], tmp_path)
    assert 'class="headline"' not in one
    assert "Cannot tell from single runs" in Page(one).text


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    page = Page(html)
    loaded = [value for _, found in page.tags for name, value in found.items() if name in LOADS and value]
    assert loaded  # references within the page, and pictures inside it
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in loaded)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert "@import" not in html
    assert "url(" not in html
    assert "http://" not in html
    assert "https://" not in html


def test_every_element_is_closed_and_every_reference_has_its_target(html: str) -> None:
    page = Page(html)
    assert (page.open, page.mismatched) == ([], [])
    names = [found["id"] for _, found in page.tags if found.get("id")]
    assert len(names) == len(set(names))
    used = {value[1:] for _, found in page.tags for name, value in found.items() if name == "href" and value}
    assert used <= set(names)


def test_every_arm_and_every_figure_is_there_with_its_command(html: str) -> None:
    page = Page(html)
    for arm in ("eager", "regional", "whole (mode=reduce-overhead)", "regional+buckets+cuda_graph", "buckets"):
        assert arm in page.text
    names = [f"w{place}-{name}" for place in (1, 2) for name in PICTURES if name != "losses"]
    assert page.figures() == names
    assert len([found for tag, found in page.tags if tag == "img" and found.get("alt")]) == len(names)
    assert "python -m trainer task=captioning task.data.batch_size=32" in html


def test_the_verdicts_stand_before_everything_else(html: str, tmp_path: Path) -> None:
    text = " ".join(Page(html).text.split())
    found = compare(find([save([*static(rounds=2), *ragged()], tmp_path / "runs")]))
    assert len(found) == 2
    for comparison in found:
        assert 0 < text.lower().index(comparison.verdict.lower()) < text.index("warm-up")
        assert text.lower().count(comparison.verdict.lower()) == 1, "in one place"
    ratio = found[0].rows[-1].ratio
    assert ratio is not None
    assert text.index(f"{ratio.value:.2f}x") < text.index("95% interval") < text.index("steady step")


def test_the_card_names_the_arm_that_the_verdict_advises_not_one_that_pays_later(tmp_path: Path) -> None:
    arms = {"eager": (0.1, 1.0), "regional": (0.05, 10.0), "whole": (0.049, 900.0)}
    records = [
        record(arm, step_seconds=step + 1e-4 * turn, warmup_seconds=warmup, compile_seconds=warmup, round=turn)
        for turn in (1, 2, 3)
        for arm, (step, warmup) in arms.items()
    ]
    (found,) = compare([Run(Path(str(number)), one) for number, one in enumerate(records)])
    assert found.best == "whole", "whose steps are the fastest"
    text = " ".join(Page(report(records, tmp_path)).text.split())
    card = text[text.index("the speed of eager, with") :]
    assert card.startswith("the speed of eager, with regional (")
    assert "above, whole" in card


def test_it_follows_the_reader_into_the_dark_with_colours_for_each_part(html: str) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    light, dark = (dict(re.findall(r"--(\w+): ([^;]+);", rule)) for rule in re.findall(r":root \{(.*?)\}", style)[:2])
    assert "prefers-color-scheme: dark" in style
    assert light.keys() == dark.keys()
    assert not set(light.values()) & set(dark.values())
    assert "#" not in re.sub(r":root \{.*?\}|#d97214", "", style), "every other rule takes its colours from there"


def test_breaks_recompiles_and_failures_come_with_reason_and_place(html: str) -> None:
    text = Page(html).text
    for words in (
        "call to a builtin that cannot be traced: print",
        "tasks/captioning/model.py:63 forward",
        "tensor 'x_BSD' size mismatch at index 1. expected 32, actual 128",
        "CUDA out of memory: tried to allocate 2.00 GiB",
    ):
        assert words in text


def test_conditions_are_told(html: str) -> None:
    text = Page(html).text
    for words in ("NVIDIA H200", "bf16-mixed", "torch", "2.11.0", "7db0f83b6a", "2026-11-21"):
        assert words in text


def test_no_folder_of_the_machine_is_on_the_page(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"status": "failed", "reason": "OSError: /home/anna/data/train.bin is not there"}
    changes["command"] = ["task=captioning", "task.data.root=/home/anna/data", "compile=whole"]
    broken = record("whole", warmup_seconds=9.0, **changes)
    place = "/home/anna/.venv/lib/python3.12/site-packages/timm/layers/drop.py:12 forward"
    broken.events = [Event(kind="graph_break", reason="a break", location=place)]
    shown = report([record("eager", warmup_seconds=1.0), broken], tmp_path)
    assert "anna" not in shown
    assert str(tmp_path) not in shown
    assert "timm/layers/drop.py:12 forward" in shown
    assert "task.data.root=.../data" in shown


def test_unlike_runs_stand_under_a_warning(tmp_path: Path) -> None:
    records = [record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=9.0, device="NVIDIA H100")]
    text = Page(report(records, tmp_path)).text
    assert text.index("These runs are unlike") < text.index("speed to eager")
    assert "device: NVIDIA H200 (1 run), NVIDIA H100 (1 run)" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = "</title></style></svg><script>alert('$x_1$')</script>\"' onload=\"x"
    shared: dict[str, Any] = {"task": evil, "device": evil, "command": [evil]}
    records = [
        record("eager", **{"warmup_seconds": 1.0, **shared}),
        record("whole", step_seconds=0.05, **{"warmup_seconds": 9.0, "label": evil, **shared}),
        record("regional", **{"status": "failed", "reason": evil, **shared}),
    ]
    records[1].events = [Event(kind=evil, reason=evil, location=evil)]
    page = Page(report(records, tmp_path))
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [found for _, found in page.tags if any(name.startswith("on") for name in found)]
    assert (page.open, page.mismatched) == ([], [])
    assert page.text.count("<script>alert('$x_1$')</script>") > 5


def test_a_lonely_record_without_figures_makes_a_page(tmp_path: Path) -> None:
    page = Page(report([RunRecord(task="toy", status="failed", reason="no compiler")], tmp_path))
    assert page.figures() == []
    assert "no compiler" in page.text


def test_no_runs_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r"error: .*: no record\.json in it or below\n", capsys.readouterr().err)


def test_a_record_that_cannot_be_read_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = save([record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=2.0)], tmp_path / "runs")
    (runs / "broken").mkdir()
    (runs / "broken" / "record.json").write_text("{}")
    assert main([str(runs), "-o", str(tmp_path / "r.html")]) == 0
    said = capsys.readouterr()
    assert "warning: left out:" in said.err
    assert "2 runs" in said.out


def test_runs_after_the_steps_are_no_steps(tmp_path: Path) -> None:
    runs, page = save([record("eager", warmup_seconds=1.0)], tmp_path / "runs"), tmp_path / "r.html"
    assert main(["-o", str(page), "--steps", "777", str(runs)]) == 0
    assert "s to 777" in page.read_text()


def test_a_page_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    runs, page = save([record("eager", warmup_seconds=1.0)], tmp_path / "runs"), tmp_path / "r.html"
    monkeypatch.setattr(os, "fsync", full)
    assert main([str(runs), "-o", str(page)]) == 2
    assert capsys.readouterr().err == f"error: {page}: No space left on device\n"
    page.mkdir()
    monkeypatch.undo()
    assert main([str(runs), "-o", str(page)]) == 2
    assert capsys.readouterr().err == f"error: {page}: Is a directory\n"


def test_without_matplotlib_the_way_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = save([record("eager", warmup_seconds=1.0)], tmp_path / "runs")
    assert main([str(runs), "-o", str(tmp_path / "r.html")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
