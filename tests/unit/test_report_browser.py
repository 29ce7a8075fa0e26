"""The HTML report in a real browser: no console message, nothing wider than a phone, cells that answer to focus."""

from __future__ import annotations

import html
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headprune.core.record import RunRecord
from headprune.report import render_html

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")

#: The records of test_report.py, which cannot be imported by name under --import-mode=importlib.
record_of: Callable[..., RunRecord] = runpy.run_path(str(Path(__file__).with_name("test_report.py")))["record_of"]

#: Puts a page into a frame of a phone's width (a headless window has a wider least width) and measures it.
PROBE = """<!DOCTYPE html><title>probe</title>
<iframe style="border:0;width:{width}px;height:800px" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const root = page.documentElement, cells = [...page.querySelectorAll("td.cell")];
  const outside = [...page.querySelectorAll("body *")].filter(e =>
    !e.closest(".scroll, pre, .vh") && e.getBoundingClientRect().right > root.clientWidth + 1);
  const first = cells[0].querySelector("input"), tip = cells[0].querySelector(".tip");
  const before = getComputedStyle(tip).display;
  document.querySelector("iframe").contentWindow.focus();
  first.focus();
  const result = {{
    width: root.clientWidth, scroll: root.scrollWidth, outside: outside.length, cells: cells.length,
    narrowest: Math.min(...cells.map(c => Math.round(c.getBoundingClientRect().width))),
    before: before, focused: page.activeElement === first, after: getComputedStyle(tip).display,
  }};
  for (const [key, value] of Object.entries(result)) document.body.dataset[key] = value;
}};
</script>"""


def browse(path: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Opens a file headless, with a new profile and without a network."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *flags, path.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_opens_without_a_console_message(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(record_of()), encoding="utf-8")
    picture = tmp_path / "page.png"
    done = browse(page, tmp_path, "--dump-dom", f"--screenshot={picture}", "--window-size=1280,900")
    assert console(done) == []
    cells = re.findall(r'<td class="cell (\w+) ', done.stdout)
    assert (len(cells), cells.count("removed")) == (32, 16)
    assert "<parsererror" not in done.stdout


def test_the_policy_blocks_loads_and_the_console_shows_it(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    text = render_html(record_of()).replace("</main>", '<img src="http://127.0.0.1:9/x.png" alt=""></main>')
    page.write_text(text, encoding="utf-8")
    assert any("Content Security Policy" in line for line in console(browse(page, tmp_path, "--dump-dom")))


@pytest.mark.parametrize(
    ("layers", "heads", "groups", "least"), [(4, 8, None, 18), (5, 8, 4, 36), (12, 12, None, 16), (2, 32, None, 16)]
)
def test_a_phone_shows_everything_without_sideways_scrolling(
    tmp_path: Path, layers: int, heads: int, groups: int | None, least: int
) -> None:
    page = tmp_path / "probe.html"
    text = render_html(record_of(layers, heads, groups))
    page.write_text(PROBE.format(width=390, page=html.escape(text, quote=True)), encoding="utf-8")
    done = browse(page, tmp_path, "--dump-dom", "--hide-scrollbars", "--window-size=1280,900")
    seen = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout.split("<body", 1)[1].split(">", 1)[0]))
    assert seen["width"] == "390"
    assert int(seen["scroll"]) <= 390
    assert seen["outside"] == "0"
    assert int(seen["cells"]) == layers * (groups or heads)
    assert int(seen["narrowest"]) >= least
    assert (seen["before"], seen["focused"], seen["after"]) == ("none", "true", "block")
