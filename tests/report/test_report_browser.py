"""The report in a real browser: on a phone and on a desk nothing scrolls sideways, and every picture is shown."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.report import main
from tests.report.records import ragged, save, static

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
    page = html.escape((tmp_path / "r.html").read_text())
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
    for width, (scrolled, shown, pictures) in zip(WIDTHS, json.loads(html.unescape(found[1])), strict=True):
        assert scrolled <= width
        assert shown == pictures == 6, "three of each workload"
