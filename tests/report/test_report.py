"""The report: one page that needs nothing else, shows every arm on a phone and a desk, says what is missing and trusts
no record."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripts.report import main
from tests.conftest import STARTED
from tests.report.records import ragged, record, save, static
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run
from trainer.telemetry.record import Event, RunRecord

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}
GOLDEN = Path(__file__).with_name("golden") / "page.txt"
LOADS = ("src", "href", "srcset", "data", "action", "poster", "background")
"""Attributes by which a page takes something from elsewhere."""


class Page(HTMLParser):
    """What a browser would make of it: open elements, attributes, and the text that is shown."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.told = ""
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
        if {"style", "dl", "figcaption"}.isdisjoint(self.open):  # no words that explain
            self.told += data + " " * (self.open[-1:] == ["td"])

    def figures(self) -> list[str]:
        return [attributes["id"] or "" for tag, attributes in self.tags if tag == "figure"]


def report(records: Sequence[RunRecord], folder: Path, *arguments: str) -> str:
    """The page of ``records``."""
    out = folder / "report.html"
    assert main([str(save(records, folder / "runs")), "-o", str(out), *arguments]) == 0
    return out.read_text()


def whole_page(folder: Path) -> str:
    """Two workloads, one of them ragged with buckets and a failed cell."""
    return report([*static(rounds=2), *ragged()], folder)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return whole_page(tmp_path_factory.mktemp("report"))


def text_of_pages(html: str, folder: Path) -> str:
    """What is shown of the page, of one of single and unlike runs for 777 steps, and of one without figures."""
    single = [each for each in static(rounds=1) if each.start == "cold"]
    single[1].device = "NVIDIA H100"
    pages = [
        html,
        report(single, folder / "single", "--steps", "777"),
        report([RunRecord(task="toy", status="failed", reason="no compiler")], folder / "failed"),
    ]
    shown = []
    for each in pages:
        page = Page(each)
        lines = (" ".join(line.split()) for line in page.told.splitlines())
        large = 'class="headline"' in each
        shown += [f"==== figures: {page.figures()}; a number in large type: {large}", *filter(None, lines)]
    return "\n".join(shown) + "\n"


def test_what_is_shown_is_what_the_file_holds(html: str, tmp_path: Path) -> None:
    """In which verdicts come first. ``python -m tests.report.test_report`` writes it."""
    assert text_of_pages(html, tmp_path).splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


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


def test_a_record_that_cannot_be_read_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = save([record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=2.0)], tmp_path / "runs")
    (runs / "broken").mkdir()
    (runs / "broken" / "record.json").write_text("{}")
    assert main([str(runs), "-o", str(tmp_path / "r.html")]) == 0
    said = capsys.readouterr()
    assert "warning: left out:" in said.err
    assert "2 runs" in said.out


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


@pytest.mark.parametrize("leads_to", ["/dev/null", "page.html"])
def test_a_page_takes_the_place_of_no_link_and_no_device(leads_to: str, tmp_path: Path) -> None:
    runs, link = save([record("eager", warmup_seconds=1.0)], tmp_path / "runs"), tmp_path / "r.html"
    target = Path(leads_to)
    if not target.is_absolute():
        target = tmp_path / target
        target.touch()
    link.symlink_to(target)
    assert main([str(runs), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert target.is_char_device() or "<html" in target.read_text()


def test_without_matplotlib_the_way_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = save([record("eager", warmup_seconds=1.0)], tmp_path / "runs")
    assert main([str(runs), "-o", str(tmp_path / "r.html")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = (
    # Alone, with nothing of the user's and nothing from the network; as root there is no sandbox.
    *("--headless=new", "--no-sandbox", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
    # A container has no GPU and little shared memory.
    *("--disable-gpu", "--disable-dev-shm-usage", "--window-size=1600,1200", "--dump-dom"),
)
WIDTHS = (390, 1400)
MEASURE = """
const found = [...document.querySelectorAll("iframe")].map((frame) => {
  const page = frame.contentDocument, pictures = [...page.querySelectorAll("img")];
  return [page.documentElement.scrollWidth, pictures.filter((one) => one.naturalWidth > 0).length, pictures.length];
});
document.body.innerHTML = `<pre id="found">${JSON.stringify(found)}</pre>`;
"""


def test_it_fits_a_phone_and_a_desk(tmp_path: Path) -> None:
    if BROWSER is None or subprocess.run([BROWSER, "--version"], capture_output=True, timeout=200).returncode != 0:
        pytest.skip("needs chromium: apt-get install chromium")
    assert main([str(save([*static(rounds=2), *ragged()], tmp_path / "runs")), "-o", str(tmp_path / "r.html")]) == 0
    page = escape((tmp_path / "r.html").read_text())
    frames = "".join(f'<iframe style="border:0;width:{width}px" srcdoc="{page}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(
        f"<!DOCTYPE html><body>{frames}<script>window.onload = () => {{{MEASURE}}};</script>"
    )
    done = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frames.html").as_uri()],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr
    for width, (scrolled, shown, pictures) in zip(WIDTHS, json.loads(unescape(found[1])), strict=True):
        assert scrolled <= width
        assert shown == pictures == 6, "three of each workload"


if __name__ == "__main__":
    sys.argv[0] = STARTED
    with tempfile.TemporaryDirectory() as made:
        GOLDEN.write_text(text_of_pages(whole_page(Path(made) / "whole"), Path(made)), encoding="utf-8")
