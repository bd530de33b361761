"""The report in a real browser: on a phone and on a desk, light and dark, nothing scrolls sideways or is cut off."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.report import main
from tests.report.records import ragged, save, static

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
REASON = "needs chromium: apt-get install chromium"
pytestmark = pytest.mark.skipif(BROWSER is None, reason=REASON)
OPTIONS = (
    # Alone, with nothing of the user's and nothing from the network; as root there is no sandbox.
    *("--headless=new", "--no-sandbox", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
    # A container has no GPU and little shared memory.
    *("--disable-gpu", "--disable-dev-shm-usage", "--window-size=1600,1200", "--dump-dom"),
)

MEASURE = """
<!DOCTYPE html><body><iframe id="report" style="border:0;height:20000px;width:{width}px" srcdoc="{page}"></iframe>
<script>
const frame = document.getElementById("report");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const shown = (element) => element.getClientRects().length > 0;
  const pictures = [...page.querySelectorAll("svg")].filter(shown);
  const cut = [], heights = [];
  for (const picture of pictures) {{
    const box = picture.getBoundingClientRect();
    for (const text of picture.querySelectorAll("text")) {{
      const own = text.getBoundingClientRect();
      heights.push(own.height);
      if (own.left < box.left - 2 || own.right > box.right + 2) cut.push(text.textContent);
    }}
  }}
  const found = {{
    scrolled: page.documentElement.scrollWidth,
    pictures: pictures.length,
    cut: cut,
    smallest: Math.min(...heights),
    paper: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(pictures[0].querySelector("text")).fill,
    rows: [...page.querySelectorAll("figure")].map((one) => [one.offsetLeft, one.offsetTop]),
    boxes: [...page.querySelectorAll(".scroll")].map((box) => box.getBoundingClientRect().right),
  }};
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
}};
</script>
"""


@pytest.fixture(scope="module", autouse=True)
def browser() -> None:
    """Skip where the program is there and does not start, as that of a system which wants a snap for it."""
    assert BROWSER is not None
    if subprocess.run([BROWSER, "--version"], capture_output=True, timeout=100, check=False).returncode != 0:
        pytest.skip(REASON)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    runs = save([*static(rounds=2), *ragged()], folder / "runs")
    assert main([str(runs), "-o", str(folder / "report.html")]) == 0
    return (folder / "report.html").read_text()


def measure(report: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What a browser makes of the page in a window of ``width`` pixels."""
    assert BROWSER is not None
    (folder / "page.html").write_text(MEASURE.format(width=width, page=html.escape(report)))
    scheme = 0 if dark else 1
    own = [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [BROWSER, *OPTIONS, *own, (folder / "page.html").as_uri()],
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.parametrize("width", [390, 420, 1400])
def test_it_fits_a_phone_and_a_desk(report: str, tmp_path: Path, width: int) -> None:
    found = measure(report, tmp_path, width=width, dark=False)
    assert found["scrolled"] <= width
    assert found["pictures"] == 14  # seven of each workload: each once
    lefts = {left for left, _ in found["rows"]}
    assert len(lefts) == (3 if width == 1400 else 1), "columns of one width"
    assert len({top for _, top in found["rows"]}) == (6 if width == 1400 else 14), "rows that begin together"
    assert found["cut"] == []
    assert found["smallest"] >= 10  # pixels from the top of a letter to the foot of the line
    assert max(found["boxes"]) <= width


@pytest.mark.parametrize(
    ("dark", "paper", "ink"),
    [(False, "rgb(255, 255, 255)", "rgb(27, 31, 36)"), (True, "rgb(22, 25, 29)", "rgb(232, 234, 237)")],
)
def test_pictures_follow_the_readers_choice_of_light_or_dark(
    report: str, tmp_path: Path, dark: bool, paper: str, ink: str
) -> None:
    found = measure(report, tmp_path, width=800, dark=dark)
    assert found["paper"] == paper
    assert found["ink"] in (ink, {False: "rgb(91, 99, 109)", True: "rgb(163, 171, 181)"}[dark])
